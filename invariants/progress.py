# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Every request ends, every chunk advances it, no step exceeds its limits, and at the end every block is free.

Relied upon: a decode computes one token and its drafts, a step that reaches the last known token samples one, and vLLM
cuts a chunk short for three reasons only: the request's known tokens end, the step's budget is used up, or
``long_prefill_token_threshold``, which holds where more than one request is waiting or running when the step begins.
By priority there is a fourth: a request that is preempted for the chunk, or for a later one, had part of the budget.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from invariants.ends import broken, ends, lives
from invariants.flight import most_drafts
from invariants.loads import never_ran, queued, waits
from invariants.trace import BoolArray, IntArray, Violation
from invariants.view import View, examples

_NO_LIMIT = 1 << 40


def progress(view: View) -> Iterator[Violation]:
    """Every request ends; replay-only chunks advance; at the end every block is free and every refcount is zero."""
    tokens = np.array([*(life.tokens for life in view.trace.admissions), 0], np.int64)[view.admission]
    yield from _rows(view)
    yield from _chain(view)
    yield from _chunks(view, tokens)
    yield from _limits(view)
    yield from _priorities(view)
    yield from lives(view)
    yield from waits(view)
    yield from queued(view)
    if not view.trace.faults:  # a run that broke off ends nothing, and no-fault says so
        yield from ends(view)


def _at(view: View, row: int, site: str, message: str, expected: object, seen: object) -> Violation:
    return view.violation("progress", site, (row, None), message, expected, seen)


def _rows(view: View) -> Iterator[Violation]:
    """Each row is a life of its request, once a step; steps are numbered upwards."""
    indices = np.array([step.index for step in view.trace.steps])
    for step, more in examples(indices[1:] <= indices[:-1]):
        yield broken("step index", f"step {indices[step + 1]} follows step {indices[step]}{more}", "a later one", "not")
    requests = np.array([*(life.request for life in view.trace.admissions), -1], np.int64)
    for row, more in examples(view.request != requests[view.admission]):
        message = f"a row of request number {view.request[row]} belongs to admission {view.admission[row]}{more}"
        yield _at(view, row, "admission", message, "one of its own", f"one of {requests[view.admission[row]]}")


def _chain(view: View) -> Iterator[Violation]:
    """A life begins as admitted and goes on where its last chunk ended, drafts rejected in it taken back."""
    before = view.before
    goes_on = before >= 0
    for row, more in examples(goes_on & (view.step == view.step[before])):
        message = f"two rows of one step belong to admission {view.admission[row]}{more}"
        yield _at(view, row, "admission", message, 1, 2)
    end = view.flight.end[before]
    for row, more in examples(goes_on & (view.computed != end)):
        message = f"a chunk starts at {view.computed[row]}, but the one before ended at {end[row]}{more}"
        yield _at(view, row, "computed", message, end[row], view.computed[row])
    first = np.flatnonzero(~goes_on)
    started = dict(zip(view.admission[first].tolist(), first.tolist(), strict=True))
    for index, life in enumerate(view.trace.admissions):
        row = started.get(index, -1)
        if row >= 0:
            begun = view.trace.steps[int(view.step[row])].index, int(view.computed[row]), int(view.scheduled[row])
            if begun != (life.step, life.computed, life.scheduled):
                message = f"admission {index} (step, computed, scheduled) does not begin as it was admitted"
                yield _at(view, row, "first chunk", message, (life.step, life.computed, life.scheduled), begun)
        elif not view.trace.faults and not never_ran(view.trace, life):  # after a fault: the step broke off
            name = view.trace.requests[life.request].id
            message = f"admission {index} of request {name} never ran"
            yield broken("admission", message, "a row", "none", request=name, step=life.step)


def _chunks(view: View, tokens: IntArray) -> Iterator[Violation]:
    """A chunk has at least a token and at most what is known, and is cut short only by a limit."""
    left = tokens - view.computed
    for row, more in examples(view.prefill != (left > 0)):
        message = f"{view.computed[row]} of {tokens[row]} tokens known at admission are computed{more}"
        expected, seen = ("prefill" if value else "decode" for value in (left[row] > 0, view.prefill[row]))
        yield _at(view, row, "prefill", message, expected, seen)
    limit = _threshold(view)
    want = np.minimum(np.where(left > 0, left, 1), limit)
    scheduled, drafts = view.scheduled - view.flight.drafts, view.flight.drafts
    for row, more in examples((scheduled < 1) | (scheduled > want)):
        message = f"{max(left[row], 1)} tokens are left to compute at {view.computed[row]}"
        if limit[row] < _NO_LIMIT:
            message += f", long_prefill_token_threshold is {limit[row]}"
        yield _at(view, row, "scheduled", message + more, f"1 to {want[row]} tokens", f"{scheduled[row]} tokens")
    most = np.where(view.flight.samples, most_drafts(view.trace.geometry), 0)
    for row, more in examples((drafts < 0) | (drafts > most)):
        message = f"{max(left[row], 1)} tokens are left to compute at {view.computed[row]}{more}"
        yield _at(view, row, "drafts", message, f"at most {most[row]} drafts after them", f"{drafts[row]} drafts")
    total = np.bincount(view.step, view.scheduled, len(view.trace.steps)).astype(np.int64)
    budget = view.trace.geometry.max_num_batched_tokens
    by_priority = any(request.priority is not None for request in view.trace.requests)
    late = np.array([by_priority and bool(step.preempted) for step in view.trace.steps], np.bool_)[view.step]
    for row, more in examples((scheduled < want) & (total[view.step] < budget) & ~late):
        message = f"a chunk is cut to {scheduled[row]} of {want[row]} tokens, but its step has {total[view.step[row]]}"
        yield _at(view, row, "scheduled", f"{message} of {budget} tokens{more}", want[row], scheduled[row])


def _threshold(view: View) -> IntArray:
    """[rows] most tokens that long_prefill_token_threshold leaves a row."""
    trace = view.trace
    threshold = trace.geometry.long_prefill_token_threshold
    if not threshold:
        return np.full(len(view.step), _NO_LIMIT)
    ended = {request: index for index, step in enumerate(trace.steps) for request in step.finished}
    alive = np.zeros(len(trace.steps), np.int64)
    indices = np.array([step.index for step in trace.steps])
    for number, request in enumerate(trace.requests):
        if request.finished == "refused":
            continue
        begin = int(np.searchsorted(indices, request.arrive))
        # An aborted request ends before the step that lists it, another one when that step's output is processed.
        end = ended.get(number, len(indices))
        alive[begin : end if request.finished == "abort" else int(view.flight.known_by(end))] += 1
    limits: IntArray = np.where(alive > 1, threshold, _NO_LIMIT)[view.step]
    return limits


def _priorities(view: View) -> Iterator[Violation]:
    """Where requests have priorities, nobody is preempted for one that comes after it; an event may preempt anybody."""
    trace = view.trace
    priority = np.array([request.priority or 0 for request in trace.requests], np.int64)
    if all(request.priority is None for request in trace.requests):
        return
    for number, step in enumerate(trace.steps):
        if not step.preempted or "preempt" in step.events:
            continue
        rows = np.flatnonzero(view.step == number)
        first = priority[step.preempted].min()
        for row, more in examples(rows[priority[view.request[rows]] > first]):
            message = f"a request of priority {first} is preempted in a step with one of {priority[view.request[row]]}"
            yield _at(view, row, "priority", message + more, f"at most {first}", priority[view.request[row]])


def _limits(view: View) -> Iterator[Violation]:
    """No step has more tokens or rows than configured."""
    geometry = view.trace.geometry
    totals = np.bincount(view.step, view.scheduled, len(view.trace.steps)).astype(np.int64)
    for what, counts, most in (
        ("tokens", totals, geometry.max_num_batched_tokens),
        ("requests", view.rows_of_step, geometry.max_num_seqs),
    ):
        over: BoolArray = counts > most
        for step, more in examples(over):
            index = view.trace.steps[step].index
            message = f"step {index} schedules {counts[step]} {what}{more}"
            yield broken(f"{what} a step", message, f"at most {most}", counts[step], step=index)
