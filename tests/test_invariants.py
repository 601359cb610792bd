# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Every invariant accepts the hand-made traces, and rejects each of them with one thing broken, at the right site."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import traces
from breaks import ALL_BREAKS, CACHEABLE, gathers, put, table, writes
from load_traces import LOADED

import invariants
from invariants import INVARIANTS, judge
from invariants.trace import Fault, Gathers, Trace
from invariants.view import EXAMPLES

GOOD = traces.GOOD | LOADED


@pytest.mark.parametrize("name", GOOD)
def test_accepts(name: str):
    assert judge(GOOD[name]()) == []


@pytest.fixture
def trace() -> Trace:
    return traces.prime_then_hit()


def found(trace: Trace) -> set[tuple[str, str]]:
    return {(violation.invariant, violation.site) for violation in judge(trace)}


@pytest.mark.parametrize("name", ALL_BREAKS)
def test_rejects(trace: Trace, name: str):
    invariant, site, break_it = ALL_BREAKS[name]
    break_it(trace)
    assert (invariant, site) in found(trace)


def test_every_invariant_has_a_break():
    assert {invariant for invariant, _, _ in ALL_BREAKS.values()} == set(INVARIANTS)


def test_the_floor_comes_from_the_hit_and_not_from_the_worker(trace: Trace):
    """The worker lost replay_start, so the query at 4 reads its plain window [1, 4] through null blocks."""
    put(trace.steps[2].replay_start, 1, 0)
    put(gathers(trace).first, 1, 1)
    assert {("gather-floor", "paged-index"), ("hit-count", "worker replay_start")} <= found(trace)


def test_a_resumed_life_does_not_inherit_replay_start():
    trace = traces.preempted_then_hit()
    trace.admissions[1].replay_start = 4
    assert ("hit-count", "replay_start") in found(trace)


def test_a_resumed_life_does_not_read_what_its_earlier_life_wrote():
    trace = traces.preempted_then_hit()
    put(gathers(trace).cell_writer, 0, 0)
    assert ("gather-live", "paged-index, stale") in found(trace)


def test_a_life_cannot_go_on_without_a_preemption():
    trace = traces.preempted_then_hit()
    trace.steps[2].preempted = []
    assert ("progress", "preempted") in found(trace)


def test_without_replay_the_adopted_window_must_hold_the_same_tokens():
    trace = traces.replay_off()
    put(trace.requests[1].prompt, 6, 55)  # the query differs at 6: 5 may be read, 6 and 7 may not
    stale = [v for v in judge(trace) if v.site == "paged-index, stale"]
    assert [v.position for v in stale] == [6, 7]


def test_without_replay_nothing_is_adopted_beyond_the_hit():
    trace = traces.replay_off()
    put(gathers(trace, step=2).cell_writer, -1, 0)  # position 9, the hit is 8
    assert ("gather-live", "paged-index, stale") in found(trace)


def test_without_replay_nothing_is_replayed():
    trace = traces.replay_off()
    trace.admissions[1].replay_start = 4
    put(writes(trace, CACHEABLE, step=2).slot, 0, -1)
    assert {("gating", "replay_start"), ("gating", "group 0")} <= found(trace)


def test_the_threshold_does_not_bind_a_request_that_is_alone():
    """In steps 0 and 1 the prime is alone and may have 8 tokens; in step 2, with two requests, 7 are too many."""
    trace = traces.prime_then_hit()
    trace.geometry = traces.geometry(long_prefill_token_threshold=6)
    over = [v for v in judge(trace) if v.site == "scheduled"]
    assert [(v.step, v.expected) for v in over] == [(2, "1 to 6 tokens")]


def test_a_request_ends_at_the_longest_that_is_allowed():
    """The prime has 10 tokens and samples 4, the query 13 and 2."""
    trace = traces.prime_then_hit()
    trace.geometry = traces.geometry(max_model_len=15)
    assert judge(trace) == []
    trace.geometry = traces.geometry(max_model_len=14)  # so the query may sample 1
    assert found(trace) == {("progress", "output")}
    trace.geometry = traces.geometry(max_model_len=13)  # and is to be refused
    assert ("progress", "refused") in found(trace)


def test_nobody_else_is_refused():
    trace = traces.prime_then_hit()
    trace.requests.append(replace(traces.request("more", 4, range(13), []), finished="refused"))
    trace.geometry = traces.geometry(max_model_len=15)
    assert found(trace) == {("progress", "refused")}
    trace.requests[-1].prompt = traces.ints(*range(15))
    assert judge(trace) == []


def test_by_priority_nobody_is_preempted_for_one_that_comes_after_it():
    trace = traces.prime_then_hit()
    trace.steps[3].preempted = [0]  # beside row 1, the query
    trace.requests[0].priority, trace.requests[1].priority = 1, 1
    assert ("progress", "priority") not in found(trace)
    trace.requests[1].priority = 2
    assert ("progress", "priority") in found(trace)
    trace.steps[3].events = ["preempt"]
    assert ("progress", "priority") not in found(trace)


def test_by_priority_a_withdrawn_chunk_may_have_had_part_of_the_budget():
    trace = traces.preempted_then_hit()
    trace.geometry = traces.geometry(max_num_batched_tokens=7)
    trace.steps[2].scheduled[0], trace.admissions[1].scheduled = 5, 5
    assert ("progress", "scheduled") in found(trace)
    trace.requests[0].priority = 1
    assert ("progress", "scheduled") not in {(v.invariant, v.site) for v in judge(trace) if v.step == 2}


def test_a_run_that_broke_off_is_reported_once(trace: Trace):
    trace.faults.append(Fault("exception", 3, "AssertionError: no blocks"))
    trace.final = None
    trace.requests[1].finished = None
    trace.requests[1].output.pop()
    trace.requests.append(replace(trace.requests[1], output=[]))
    trace.admissions.append(replace(trace.admissions[1], step=5, request=2))
    assert found(trace) == {("no-fault", "exception")}


@pytest.mark.parametrize("steps", [[], [[]], [[], []]], ids=["no step", "an empty step", "empty steps"])
def test_a_run_that_broke_off_at_once(steps: list[list[traces.Row]]):
    lone = replace(traces.request("lone", 0, [1, 2], []), finished=None)
    trace = traces.lay(traces.trace_of([lone], []), steps)
    assert found(trace) == {("progress", "finished")}
    trace.faults.append(Fault("hang", 0, "nothing was scheduled"))
    assert found(trace) == {("no-fault", "hang")}


def second(trace: Trace) -> Gathers:
    """What paged-index reads in the second window group."""
    return gathers(trace, 0, 2)


def stores(trace: Trace, group: int) -> np.ndarray:
    return writes(trace, group, 0).slot


READS = "paged-index of group 2"
SECOND_GROUP_BREAKS = {
    "its slots hold another position": ("gather-live", f"{READS}, stale", lambda t: put(second(t).cell_written, 0, 9)),
    "it is read through the first one's table": (
        "gather-live", READS, lambda t: put(second(t).cell_slot, 0, gathers(t, 0).cell_slot[0]),
    ),
    "its windows begin elsewhere": ("gather-agree", READS, lambda t: put(second(t).first, 1, 5)),
    "a window of it is short": ("gather-window", READS, lambda t: put(second(t).first, 5, 7)),
    "it is read from below replay_start": ("gather-floor", READS, lambda t: put(second(t).first, 0, 3)),
    "nobody reads it": ("gather-window", "consumers", lambda t: t.steps[0].gathers.__delitem__(slice(2, None))),
    "a replayed token is not written there": ("write-fence", "group 2", lambda t: put(stores(t, 2), 0, -1)),
    "it is written in the first one's block": (
        "write-fence", "group 2", lambda t: put(stores(t, 2), 0, stores(t, 1)[0]),
    ),
    "it is not there": ("gather-live", "paged-index of group 3, group", lambda t: setattr(second(t), "group", 3)),
    "its table shares a block with the first one's": (
        "write-fence", "group 2, table", lambda t: put(table(t, 2, 0, 0), 2, table(t, 1, 0, 0)[2]),
    ),
    "it is in the prefix cache": ("gating", "group 2", lambda t: setattr(t.groups[2], "prefix_cacheable", True)),
}  # fmt: skip


@pytest.mark.parametrize("name", SECOND_GROUP_BREAKS)
def test_a_second_window_group_is_judged_like_the_first(name: str):
    trace = traces.two_window_groups()
    invariant, site, break_it = SECOND_GROUP_BREAKS[name]
    break_it(trace)
    assert (invariant, site) in found(trace)


def test_messages_can_be_understood_alone(trace: Trace):
    put(gathers(trace).first, 1, 3)
    text = str(judge(trace)[0])
    for part in ("gather-floor", "paged-index", "[3, 4]", "replay_start 4", "query", "step 2", "row 1", "position 4"):
        assert part in text


def test_many_alike_are_counted_not_listed(trace: Trace):
    gathers(trace).cell_writer[:] = 7
    stale = [v for v in judge(trace) if v.site == "paged-index, stale"]
    assert len(stale) == EXAMPLES
    assert "(6 more like this)" in stale[-1].message
    trace.faults = [Fault("gpu", n, "memory access fault") for n in range(12)]
    faults = [v for v in judge(trace) if v.invariant == "no-fault"]
    assert len(faults) == EXAMPLES
    assert "(7 more at this site)" in faults[-1].message


def test_invariants_import_nothing_that_they_judge():
    folder = Path(invariants.__file__).parent
    seen = set()
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                seen.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                seen.add((node.module or "").split(".")[0])
    assert "invariants" in seen
    assert not seen & {"fuzz", "vllm", "torch", "triton"}
