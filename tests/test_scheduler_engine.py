# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The scheduler engine: what it records is what vLLM did, with and without the worker."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from fuzz.case import Case, Event, Request
from fuzz.engines.base import Engine, Refused
from fuzz.strategies import cases
from invariants import judge
from invariants.trace import Geometry, Trace

GEOMETRY = Geometry(window=4, block_size=4, swa_block_size=2, num_blocks=40, max_num_batched_tokens=8, max_num_seqs=4)


def case(*requests: Request, events: tuple[Event, ...] = (), geometry: Geometry = GEOMETRY) -> Case:
    return Case(geometry=geometry, requests=requests, events=events)


def test_a_hit_is_replayed_from_its_last_window(engine: Engine) -> None:
    # 20 tokens in blocks of 4; the second request has 18 in common: H = 16, replay [12, 16), chunk of 8.
    trace = engine.run(
        case(
            Request(id="prime", arrive=0, prompt=(("s", 0, 20),)),
            Request(id="hit", arrive=9, prompt=(("s", 0, 18), ("t", 0, 3))),
        )
    )
    life = trace.admissions[1]
    assert (life.hit, life.replay_start, life.computed, life.scheduled) == (16, 12, 12, 8)
    step = next(step for step in trace.steps if step.index == life.step)
    cacheable, window = step.writes
    assert cacheable.position.tolist() == window.position.tolist() == list(range(12, 20))
    assert (cacheable.slot[:4] == -1).all()
    assert (cacheable.slot[4:] >= 0).all()
    assert (window.slot >= 0).all()
    paged = step.gathers[0]
    assert paged.first.tolist() == [12, 12, 12, 12, 13, 14, 15, 16]
    assert (paged.cell_writer == 1).all()
    assert (paged.cell_written == paged.cell_position).all()
    assert trace.metrics == {
        "prefix_cache_queries": 41,
        "prefix_cache_hits": 16,
        "preempted_hits": 0,
        "cached_tokens": 16,
    }


IDLE_BETWEEN = case(
    Request(id="prime", arrive=0, prompt=(("s", 0, 20),)), Request(id="hit", arrive=9, prompt=(("s", 0, 20),))
)


def test_an_engine_without_requests_runs_a_dummy_batch(engine: Engine) -> None:
    trace = engine.run(IDLE_BETWEEN)
    assert [step.idled for step in trace.steps] == [False, False, True, False]
    assert judge(trace) == []
    assert not any(step.idled for step in engine.run(IDLE_BETWEEN, brisk=True).steps)


def test_a_dummy_batch_that_writes_where_the_last_one_wrote_is_seen(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.gpu.block_table import BlockTables

    monkeypatch.setattr(BlockTables, "get_dummy_slot_mappings", lambda self, tokens: self.slot_mappings[:, :tokens])
    assert "write-fence" in {found.invariant for found in judge(engine.run(IDLE_BETWEEN))}


def test_events_take_effect(engine: Engine) -> None:
    trace = engine.run(
        case(
            Request(id="a", arrive=0, prompt=(("s", 0, 20),), max_tokens=9),
            Request(id="b", arrive=0, prompt=(("t", 0, 5),), max_tokens=9),
            Request(id="c", arrive=90, prompt=(("s", 0, 20),)),
            Request(id="d", arrive=99, prompt=(("s", 0, 20),)),
            events=(
                Event(step=4, kind="preempt", request="a"),
                Event(step=5, kind="abort", request="b"),
                Event(step=5, kind="reset_prefix_cache"),
                Event(step=90, kind="reset_prefix_cache"),
                Event(step=99, kind="drop_blocks"),
            ),
        )
    )
    by_index = {step.index: step for step in trace.steps}
    assert by_index[4].events == ["preempt"]
    assert by_index[4].preempted == [0]
    assert by_index[5].finished == [1]
    assert by_index[5].events == ["abort"]  # the reset does nothing while requests hold blocks
    assert by_index[90].events == ["reset_prefix_cache"]
    assert [request.finished for request in trace.requests] == ["length", "abort", "length", "length"]
    hits = [(life.request, life.hit, life.resumed) for life in trace.admissions]
    assert hits == [(0, 0, False), (1, 0, False), (0, 20, True), (2, 0, False), (3, 0, False)]


def test_equal_prompts_get_equal_outputs(engine: Engine) -> None:
    trace = engine.run(case(*(Request(id=name, arrive=0, prompt=(("s", 0, 9),), max_tokens=5) for name in ("a", "b"))))
    assert trace.requests[0].output == trace.requests[1].output
    assert len(set(trace.requests[0].output)) > 1


def test_a_pool_too_small_for_a_request_is_refused(engine: Engine) -> None:
    # 21 tokens: 6 blocks of 4, and for a chunk of 8 behind a window of 4: 11 tokens, 6 blocks of 2, one more as they
    # need not start on a block.
    geometry = msgspec.structs.replace(GEOMETRY, num_blocks=5)
    with pytest.raises(Refused, match="a request of 21 tokens needs 13 blocks, the pool has 4"):
        engine.run(case(Request(id="a", arrive=0, prompt=(("s", 0, 20),)), geometry=geometry))


def test_vllm_s_own_reason_is_given(engine: Engine) -> None:
    request = Request(id="a", arrive=0, prompt=(("s", 0, 20),))
    more_seats_than_tokens = msgspec.structs.replace(GEOMETRY, max_num_seqs=9)
    with pytest.raises(Refused, match=r"max_num_batched_tokens \(8\) must be greater than or equal to max_num_seqs"):
        engine.run(case(request, geometry=more_seats_than_tokens))


def test_a_kv_load_is_refused(engine: Engine) -> None:
    request = Request(id="a", arrive=0, prompt=(("s", 0, 20),))
    with pytest.raises(Refused, match="async_kv_load needs a KV connector"):
        engine.run(case(request, events=(Event(step=0, kind="async_kv_load", request="a"),)))


def test_an_exception_out_of_vllm_is_a_fault(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    monkeypatch.setattr(KVCacheManager, "allocate_slots", lambda *_args, **_kwargs: None)
    trace = engine.run(case(Request(id="a", arrive=0, prompt=(("s", 0, 20),))))
    assert [fault.kind for fault in trace.faults] == ["hang"]
    assert trace.final is None
    monkeypatch.setattr(KVCacheManager, "allocate_slots", lambda *_args, **_kwargs: 1)
    trace = engine.run(case(Request(id="a", arrive=0, prompt=(("s", 0, 20),))))
    assert [fault.kind for fault in trace.faults] == ["exception"]
    assert "vllm/v1/core/" in trace.faults[0].message


def test_a_worker_that_batches_something_else_is_a_fault(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    prepare = GPUModelRunner.prepare_inputs

    def swap_rows(*args: object) -> object:
        batch = prepare(*args)
        batch.req_ids = batch.req_ids[::-1]
        return batch

    monkeypatch.setattr(GPUModelRunner, "prepare_inputs", swap_rows)
    requests = (Request(id=name, arrive=0, prompt=(("s", 0, length),)) for name, length in (("a", 2), ("b", 5)))
    (fault,) = engine.run(case(*requests)).faults
    assert fault.message == "the worker batches {'b': 2, 'a': 5}, the scheduler scheduled {'a': 2, 'b': 5}"


def cells(trace: Trace) -> list[tuple[list[int], ...]]:
    """What is read and written, step by step, in an order that does not depend on the batch's."""
    seen = []
    for step in trace.steps:
        for gathers in step.gathers[:1]:
            request = step.request[gathers.cell_row]
            order = np.lexsort((gathers.cell_position, request))
            seen.append(tuple(column[order].tolist() for column in (request, gathers.cell_position, gathers.cell_slot)))
        for writes in step.writes:
            request = step.request[writes.row]
            order = np.lexsort((writes.position, request))
            seen.append(tuple(column[order].tolist() for column in (request, writes.position, writes.slot)))
    return seen


@settings(max_examples=150)
@given(case=cases("small"))
def test_the_worker_reads_and_writes_what_the_contract_says(engine: Engine, case: Case) -> None:
    """The contract's own lookups (no kernel) and vLLM's kernels give the same slots, position by position."""
    try:
        alone = engine.run(case, brisk=True)
    except Refused:
        return
    assert cells(alone) == cells(engine.run(case))


def test_a_case_that_goes_round_in_circles_ends(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    """A scheduler that takes a request back to its start after each chunk: no step is idle."""
    from vllm.v1.core.sched.scheduler import Scheduler

    schedule = Scheduler.schedule

    def broken(self: Scheduler, *args: object) -> object:
        for request in list(self.running):
            self.running.remove(request)
            self._preempt_request(request, 0.0)
        self.reset_prefix_cache()
        return schedule(self, *args)

    monkeypatch.setattr(Scheduler, "schedule", broken)
    trace = engine.run(case(Request(id="a", arrive=0, prompt=(("s", 0, 20),))))
    assert [fault.kind for fault in trace.faults] == ["hang"]
    assert "no token came out" in trace.faults[0].message
