# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The kernels engine: vLLM's worker on planned batches, which are those of a scheduler that keeps the contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from fuzz import corpus
from fuzz.case import Case, Request
from fuzz.engines.base import Engine
from fuzz.engines.consumers import NOWHERE, rows
from fuzz.strategies import cases
from invariants import judge
from invariants.trace import NULL_BLOCK, Geometry, Trace

SIZES = Geometry(window=4, block_size=4, swa_block_size=2, num_blocks=40, max_num_batched_tokens=8, max_num_seqs=6)
PRIME = Request(id="prime", arrive=0, prompt=(("s", 0, 21),), max_tokens=4)
HIT = Request(id="hit", arrive=9, prompt=(("s", 0, 18), ("t", 0, 3)), max_tokens=3)
TWO = Case(geometry=SIZES, requests=(PRIME, HIT))


@pytest.fixture(scope="module")
def kernels(open_engine: Callable[[str], Engine]) -> Engine:
    return open_engine("kernels")


def seed(slug: str) -> Case:
    (path,) = corpus.folder("kernels", "seeds").glob(f"{slug}-*.json")
    return corpus.read(path)


def consumers(trace: Trace) -> set[str]:
    return {gathers.consumer for step in trace.steps for gathers in step.gathers}


def test_a_hit_by_hand(kernels: Engine):
    """16 of the 18 shared tokens are in whole blocks; W = 4 of them are replayed, in two chunks of up to 8."""
    trace = kernels.run(TWO)
    assert judge(trace) == []
    assert [(life.step, life.hit, life.replay_start) for life in trace.admissions] == [(0, 0, 0), (9, 16, 12)]
    hit = [step for step in trace.steps if step.index >= 9]
    assert [(step.computed.tolist(), step.scheduled.tolist()) for step in hit] == [
        ([12], [8]),
        ([20], [1]),
        ([21], [1]),
        ([22], [1]),
    ]
    assert [bool(step.prefill[0]) for step in hit] == [True, True, False, False]
    assert trace.final is not None
    assert trace.final.free_blocks == trace.final.total_blocks


def test_block_ids_are_scattered_and_change_hands(kernels: Engine):
    trace = kernels.run(TWO)
    window = [step.tables[1][0] for step in trace.steps]
    assert (np.diff(window[0]) != 1).any()
    used = [set(table[table != NULL_BLOCK].tolist()) for table in window]
    assert used[0] & set.union(*used[9 - len(trace.steps) :])
    assert any((table == NULL_BLOCK).any() for table in window)


def test_every_implementation_of_the_lower_bound_is_asked(kernels: Engine):
    trace = kernels.run(TWO)
    assert consumers(trace) >= {"paged-index", "gather-length", "combine", "mixed-list", "ragged-list", "fused-decode"}
    for step in trace.steps:
        assert {"paged-index", "mixed-list", "ragged-list"} <= {gathers.consumer for gathers in step.gathers}


def test_one_token_that_extends_a_replay_has_its_bound(kernels: Engine):
    trace = kernels.run(seed("one-token-extension"))
    (step,) = [step for step in trace.steps if step.computed.tolist() == [8] and step.request.tolist() == [1]]
    assert (step.scheduled.tolist(), step.prefill.tolist(), step.replay_start.tolist()) == ([1], [True], [4])
    (paged,) = [gathers for gathers in step.gathers if gathers.consumer == "paged-index"]
    assert (paged.first.tolist(), paged.last.tolist()) == ([5], [8])


def test_a_replay_token_by_token_runs_as_decodes_with_its_bound(kernels: Engine, monkeypatch: pytest.MonkeyPatch):
    """As if gfx942's fused decode metadata ignored replay_start: only here does the bound bind in decodes alone."""
    from fuzz.engines.rocm import RocmBuilders

    case, build = seed("replays-token-by-token"), RocmBuilders.build_fused
    assert judge(kernels.run(case)) == []
    monkeypatch.setattr(RocmBuilders, "build_fused", lambda self, common, start: build(self, common, start * 0))
    found = {(violation.invariant, violation.site) for violation in judge(kernels.run(case))}
    assert found >= {("gather-floor", "fused-decode"), ("gather-agree", "fused-decode")}


def test_more_rows_than_a_block_of_a_kernel(kernels: Engine):
    trace = kernels.run(seed("more-than-1024-rows"))
    assert max(len(step.request) for step in trace.steps) == 1050
    assert max((step.replay_start > 0).sum() for step in trace.steps) == 1050


@pytest.mark.parametrize("tokens", [2047, 2048, 2049])
def test_long_chunks(tokens: int, kernels: Engine):
    trace = kernels.run(seed(f"chunk-of-{tokens}-replays"))
    assert max(int(step.scheduled.max()) for step in trace.steps) == tokens


def test_what_padding_writes_is_seen(kernels: Engine, monkeypatch: pytest.MonkeyPatch):
    from vllm.v1.worker.gpu.block_table import BlockTables

    compute = BlockTables.compute_slot_mappings

    def broken(self: Any, *args: Any, num_tokens_padded: int) -> Any:
        slots = compute(self, *args, num_tokens_padded=num_tokens_padded)
        return slots.clamp(min=0)

    monkeypatch.setattr(BlockTables, "compute_slot_mappings", broken)
    cold = Case(geometry=SIZES, requests=(PRIME,))  # whose own tokens all have a slot
    assert {(found.invariant, found.site) for found in judge(kernels.run(cold))} >= {("write-fence", "group 1")}


def test_what_padding_gathers_is_seen(kernels: Engine, monkeypatch: pytest.MonkeyPatch):
    """A builder that takes every token for a real one."""
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadataBuilder

    build = DeepseekSparseSWAMetadataBuilder.build

    def broken(self: Any, prefix: int, common: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = build(self, prefix, common, *args, **kwargs)
        padded = metadata.slot_mapping < 0
        if not metadata.num_prefill_tokens and padded.any():
            metadata.decode_swa_lens[padded] = 1
            metadata.decode_swa_indices[padded, 0, 0] = 5
        return metadata

    monkeypatch.setattr(DeepseekSparseSWAMetadataBuilder, "build", broken)
    assert ("gather-window", "paged-index") in {(found.invariant, found.site) for found in judge(kernels.run(TWO))}


def test_a_bound_past_the_end_of_a_ragged_list_points_nowhere():
    """It would read what lies behind the list; a broken vLLM is no failure of ours."""
    dense, lens = rows(torch.tensor([7, 8, 9]), torch.tensor([0, 2, 4]), 3)
    assert dense.tolist() == [[7, 8, -1], [9, NOWHERE, -1]]
    assert lens.tolist() == [2, 2]


def test_an_idle_rank_is_seen(kernels: Engine, monkeypatch: pytest.MonkeyPatch):
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    prepare = GPUModelRunner.prepare_dummy_attn

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        tables, slots = prepare(self, *args, **kwargs)
        return tables, slots.clamp(min=7)

    monkeypatch.setattr(GPUModelRunner, "prepare_dummy_attn", broken)
    assert {found.invariant for found in judge(kernels.run(TWO))} >= {"write-fence", "gather-window"}


def test_replay_off_has_no_hits(kernels: Engine):
    """What is left to see are windows without a bound."""
    trace = kernels.run(msgspec.structs.replace(TWO, geometry=msgspec.structs.replace(SIZES, replay=False)))
    assert judge(trace) == []
    assert [life.hit for life in trace.admissions] == [0, 0]


@pytest.mark.parametrize("profile", ["small", "wild", "dsv41"])
def test_every_case_holds(profile: str, check: Callable[[str, Case], None]):
    @settings(max_examples=max(1, settings.default.max_examples // (4 if profile == "dsv41" else 1)))
    @given(case=cases(profile))
    def holds(case: Case) -> None:
        check("kernels", case)

    holds()
