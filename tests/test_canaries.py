# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""A canary for every invariant: vLLM, broken on purpose in one place, must be caught by that invariant.

An invariant that cannot fail is worth nothing. Each break is a monkeypatch of real vLLM, undone after the test; the
case is one that the unbroken vLLM passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from fuzz.case import Case, Event, Request
from fuzz.engines.base import Engine
from invariants import INVARIANTS, judge
from invariants.trace import Geometry, Probe

CASE = Case(
    geometry=Geometry(
        window=4, block_size=4, swa_block_size=2, num_blocks=40, max_num_batched_tokens=8, max_num_seqs=4
    ),
    requests=(
        Request(id="prime", arrive=0, prompt=(("s", 0, 21),), max_tokens=2),
        Request(id="short", arrive=4, prompt=(("s", 0, 7),), max_tokens=1),
        Request(id="branch", arrive=4, prompt=(("s", 0, 18), ("t", 0, 5)), max_tokens=3),
        Request(id="same", arrive=5, prompt=(("s", 0, 21),), max_tokens=3),
    ),
    events=(Event(step=6, kind="preempt", request="branch"),),
)

DEEP = msgspec.structs.replace(CASE, probe=Probe(kind="deep"), events=())
"""With several requests replaying in one step."""

DECODER = msgspec.structs.replace(
    CASE,
    geometry=msgspec.structs.replace(CASE.geometry, max_num_batched_tokens=14),
    probe=Probe(kind="decoder", layers=3),
    events=(),
)

Break = Callable[[pytest.MonkeyPatch], None]


def replay_start_not_handed_on(patch: pytest.MonkeyPatch) -> None:
    from vllm.models.deepseek_v41.nvidia.model_state import ReplayAttnMetadata

    patch.setattr(ReplayAttnMetadata, "get_extra_attn_kwargs", lambda *_: {})


def replay_start_one_late(patch: pytest.MonkeyPatch) -> None:
    from vllm.models.deepseek_v41.nvidia.model_state import DeepseekV41ModelState

    upload = DeepseekV41ModelState._upload_replay_start
    patch.setattr(
        DeepseekV41ModelState, "_upload_replay_start", lambda self, values, n: upload(self, values + (values > 0), n)
    )


def window_block_freed_early(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    skipped = SlidingWindowManager.get_num_skipped_tokens
    patch.setattr(
        SlidingWindowManager, "get_num_skipped_tokens", lambda self, n, *rest: skipped(self, n, *rest) + self.block_size
    )


def replayed_slots_not_padded(patch: pytest.MonkeyPatch) -> None:
    from vllm.models.deepseek_v41.nvidia import model_state

    class NoLaunch:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *_args, **_kwargs: None

        def warmup(self, *_args: Any, **_kwargs: Any) -> None:
            pass

    patch.setattr(model_state, "_pad_replayed_slots_kernel", NoLaunch())


def rewind_one_short(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    mark = Scheduler._mark_prefix_replay

    def broken(self: Any, request: Any, *rest: Any) -> int:
        tokens = mark(self, request, *rest)
        request.replay_start += tokens > 0
        return int(tokens - (tokens > 0))

    patch.setattr(Scheduler, "_mark_prefix_replay", broken)


def one_block_never_freed(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.block_pool import BlockPool

    free = BlockPool.free_blocks
    patch.setattr(BlockPool, "free_blocks", lambda self, blocks: free(self, list(blocks)[1:]))


def window_group_stays_cacheable(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

    patch.setattr(SlidingWindowMLASpec, "prefix_cacheable", property(lambda _: True))


def state_rows_never_freed(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.states import RequestState

    patch.setattr(RequestState, "remove_request", lambda self, name: self.req_id_to_index.pop(name, None))


def rows_get_the_replay_start_of_others(patch: pytest.MonkeyPatch) -> None:
    import numpy as np
    from vllm.models.deepseek_v41.nvidia.model_state import DeepseekV41ModelState

    upload = DeepseekV41ModelState._upload_replay_start
    patch.setattr(
        DeepseekV41ModelState, "_upload_replay_start", lambda self, values, n: upload(self, np.roll(values, 1), n)
    )


def mixed_list_ignores_replay_start(patch: pytest.MonkeyPatch) -> None:
    from vllm.models.deepseek_v41.common.ops import cache_utils

    build = cache_utils.build_flashinfer_mixed_sparse_indices
    patch.setattr(
        cache_utils,
        "build_flashinfer_mixed_sparse_indices",
        lambda *args, replay_start, **kw: build(*args, replay_start=replay_start * 0, **kw),
    )


def slots_padded_one_too_far(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu import block_table

    kernel = block_table._compute_slot_mappings_kernel

    class OneMore:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda max_num_tokens, *args, **kwargs: kernel[grid](max_num_tokens + 1, *args, **kwargs)

    patch.setattr(block_table, "_compute_slot_mappings_kernel", OneMore())


CANARIES: dict[str, Break] = {
    "gather-floor": replay_start_not_handed_on,
    "gather-window": replay_start_one_late,
    "gather-live": window_block_freed_early,
    "gather-agree": mixed_list_ignores_replay_start,
    "write-fence": replayed_slots_not_padded,
    "hit-count": rewind_one_short,
    "progress": one_block_never_freed,
    "gating": window_group_stays_cacheable,
    "no-fault": state_rows_never_freed,
}
"""On the scheduler engine."""

MODEL_CANARIES: dict[str, Break] = {
    "cached-bytes": replayed_slots_not_padded,
    "output-match": rewind_one_short,
    "poison-blind": replay_start_not_handed_on,
    "mix-blind": rows_get_the_replay_start_of_others,
}
"""On the CPU engine, whose traces have outputs."""


def trimmed_layers_read_what_they_did_not_write(patch: pytest.MonkeyPatch) -> None:
    from vllm.models.deepseek_v41.nvidia.model_state import DeepseekV41ModelState

    kept = DeepseekV41ModelState._kept_input_batch

    def broken(self: Any, batch: Any, slots: Any, replay_start: Any, *rest: Any) -> Any:
        made = kept(self, batch, slots, replay_start, *rest)
        self._kept_kv_start[: len(replay_start)].copy_(replay_start)
        return made

    patch.setattr(DeepseekV41ModelState, "_kept_input_batch", broken)


def every_row_kept(patch: pytest.MonkeyPatch) -> None:
    from vllm.models.deepseek_v41.nvidia.model_state import DeepseekV41ModelState

    add = DeepseekV41ModelState.add_request

    def broken(self: Any, index: int, data: Any) -> None:
        add(self, index, data)
        self._keeps_rows_np[index] = True

    patch.setattr(DeepseekV41ModelState, "add_request", broken)


def first_trimmed_layer_writes_kept_rows_only(patch: pytest.MonkeyPatch) -> None:
    from vllm.models.deepseek_v41.decoder_replay_layers import DecoderReplayLayers

    patch.setattr(DecoderReplayLayers, "uses_replay_batch", lambda _: False)


DECODER_CANARIES: dict[str, Break] = {
    "gather-floor": trimmed_layers_read_what_they_did_not_write,
    "gather-window": every_row_kept,
    "output-match": first_trimmed_layer_writes_kept_rows_only,
}
"""On the CPU engine, where the last layers of the model run on the last rows of a chunk only."""


def test_every_invariant_has_a_canary() -> None:
    assert CANARIES.keys() | MODEL_CANARIES.keys() == INVARIANTS.keys()


def test_the_case_is_clean_on_the_unbroken_vllm(engine: Engine) -> None:
    trace = engine.run(CASE)
    assert judge(trace) == []
    assert any(life.replay_start for life in trace.admissions)


@pytest.mark.parametrize("invariant", CANARIES)
def test_canary(invariant: str, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    CANARIES[invariant](monkeypatch)
    caught = {violation.invariant for violation in judge(engine.run(CASE))}
    assert invariant in caught


@pytest.mark.parametrize("name", ["scheduler", "cpu"])
def test_memory_canary(name: str, open_engine: Callable[[str], Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """A store past the end of a tensor, and in the row of another group before that is written: no slot is wrong."""
    engine = open_engine(name)
    slots_padded_one_too_far(monkeypatch)
    first, *_ = judge(engine.run(CASE))
    assert first.invariant == "no-fault"
    assert first.site == "memory fault in _compute_slot_mappings_kernel, store at slot_mappings_ptr"
    assert "a race: program (0," in first.message


def test_the_case_is_clean_on_the_unbroken_model(open_engine: Callable[[str], Engine]) -> None:
    trace = open_engine("cpu").run(DEEP)
    assert judge(trace) == []
    assert trace.arms.keys() == {"no-cache", "twice", "poison", "alone"}  # the others are for the exact probe
    assert sum(outputs is not None for outputs in trace.arms["alone"]) == 3


@pytest.mark.parametrize("invariant", MODEL_CANARIES)
def test_model_canary(invariant: str, open_engine: Callable[[str], Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine("cpu")
    MODEL_CANARIES[invariant](monkeypatch)
    caught = {violation.invariant for violation in judge(engine.run(DEEP))}
    assert invariant in caught


def test_the_case_is_clean_on_the_unbroken_trimmed_model(open_engine: Callable[[str], Engine]) -> None:
    trace = open_engine("cpu").run(DECODER)
    assert judge(trace) == []
    assert any(life.replay_start for life in trace.admissions)


@pytest.mark.parametrize("invariant", DECODER_CANARIES)
def test_decoder_canary(invariant: str, open_engine: Callable[[str], Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine("cpu")
    DECODER_CANARIES[invariant](monkeypatch)
    caught = {violation.invariant for violation in judge(engine.run(DECODER))}
    assert invariant in caught
