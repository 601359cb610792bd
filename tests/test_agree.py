# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""All implementations of the lower bound: each is asked, each is judged, and one that stands alone is named."""

from __future__ import annotations

from typing import Any

import pytest
import traces
from breaks import DECODES, LENGTH, PREFILLS, ask, gathers, keep, put
from test_canaries import CASE, Break, mixed_list_ignores_replay_start

from fuzz.case import Case, Request
from fuzz.engines.base import Engine
from fuzz.triton_cpu.rocm import rocm
from invariants import judge
from invariants.trace import Geometry, Trace

REPLAYS = Case(
    geometry=Geometry(
        window=4, block_size=4, swa_block_size=2, num_blocks=40, max_num_batched_tokens=8, max_num_seqs=4
    ),
    requests=(
        Request(id="prime", arrive=0, prompt=(("s", 0, 21),), max_tokens=12),
        Request(id="hit", arrive=4, prompt=(("s", 0, 18), ("t", 0, 5)), max_tokens=6),
    ),
)
"""The prime still decodes while the second request replays; at the end both decode."""


def found(trace: Trace) -> set[tuple[str, str]]:
    return {(violation.invariant, violation.site) for violation in judge(trace)}


def consumers(trace: Trace) -> set[str]:
    return {reads.consumer for step in trace.steps for reads in step.gathers if len(reads.row)}


def test_a_consumer_that_is_asked_now_and_then_is_accepted():
    trace = traces.prime_then_hit()
    ask(trace, "mixed-list")
    ask(trace, "combine", "prefills", PREFILLS)
    ask(trace, "fused", "decodes", DECODES)
    assert judge(trace) == []


def test_the_message_names_both():
    trace = traces.prime_then_hit()
    put(ask(trace, "combine", "prefills", PREFILLS).first, 3, 5)
    (alone,) = [v for v in judge(trace) if v.invariant == "gather-agree"]
    assert alone.message == "combine reads [5, 7] for the query at 7, paged-index [4, 7]"
    assert (alone.request, alone.step, alone.row, alone.position) == ("query", 2, 1, 7)


def test_where_all_are_wrong_alike_they_agree():
    """Whether they are right is not asked here."""
    trace = traces.prime_then_hit()
    for reads in (gathers(trace), ask(trace, "mixed-list"), gathers(trace, consumer=LENGTH)):
        reads.first = reads.first - 1
    ids = {invariant for invariant, _ in found(trace)}
    assert "gather-window" in ids
    assert "gather-agree" not in ids


def test_a_hole_is_not_a_disagreement():
    trace = traces.prime_then_hit()
    more = ask(trace, "mixed-list")
    keep(more, "", [0, 1, 2, 3, 4, 4, 5, 6, 7])
    put(more.last, 4, 5)
    put(more.first, 5, 7)
    assert found(trace) == {("gather-window", "mixed-list")}


def test_every_implementation_is_asked(engine: Engine):
    trace = engine.run(REPLAYS)
    assert judge(trace) == []
    assert any(life.replay_start for life in trace.admissions)
    assert consumers(trace) == {
        "paged-index", "gather-length", "combine", "mixed-list", "ragged-list", "fused-decode", "fused-decode-ragged",
    }  # fmt: skip
    assert not trace.interpreted


def gather_length_ignores_replay_start(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends.mla import sparse_swa

    compute = sparse_swa._COMPUTE_PREFILL_METADATA_KERNEL
    patch.setattr(
        sparse_swa,
        "_COMPUTE_PREFILL_METADATA_KERNEL",
        lambda out, lens, starts, replay_start, *rest: compute(out, lens, starts, replay_start * 0, *rest),
    )


def combine_is_one_row_off(patch: pytest.MonkeyPatch) -> None:
    from vllm.models.deepseek_v41.common import ops

    combine = ops.combine_topk_swa_indices

    def broken(*args: Any) -> Any:
        indices, lens = combine(*args)
        indices[indices > 0] -= 1
        return indices, lens

    patch.setattr(ops, "combine_topk_swa_indices", broken)


def ragged_list_loses_the_query_itself(patch: pytest.MonkeyPatch) -> None:
    with rocm("gfx950"):
        from vllm.models.deepseek_v41.amd import rocm as layers

        build = layers.build_ragged_indices_from_dense
        patch.setattr(layers, "build_ragged_indices_from_dense", lambda indices, lens: build(indices, lens - 1))


def fused_decode_has_a_shorter_window(patch: pytest.MonkeyPatch) -> None:
    with rocm("gfx942"):
        from vllm.models.deepseek_v41.amd.ops import swa_decode_meta

        launch = swa_decode_meta.launch
        patch.setattr(swa_decode_meta, "launch", lambda *args, **kw: launch(*args[:-2], args[-2] - 1, args[-1], **kw))


BREAKS: dict[str, tuple[Break, set[str]]] = {
    "mixed list": (mixed_list_ignores_replay_start, {"mixed-list"}),
    "ragged list": (ragged_list_loses_the_query_itself, {"ragged-list"}),
    "fused decode": (fused_decode_has_a_shorter_window, {"fused-decode", "fused-decode-ragged"}),
    # The combine reads what was gathered, so its windows start too early with it.
    "gather length": (gather_length_ignores_replay_start, {"combine", "gather-length"}),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_implementation_stands_alone(name: str, engine: Engine, monkeypatch: pytest.MonkeyPatch):
    break_it, sites = BREAKS[name]
    break_it(monkeypatch)
    violations = judge(engine.run(REPLAYS))
    assert {v.site for v in violations if v.invariant == "gather-agree"} == sites
    assert {v.site.split(",")[0] for v in violations} == sites


def test_a_row_of_the_workspace_that_is_anothers(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    """The positions are right, but what is there is not."""
    combine_is_one_row_off(monkeypatch)
    assert ("gather-live", "combine") in found(engine.run(CASE))
