# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The half of ``progress`` that looks at whole requests: their lives, how they ended, what they left in the pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec import UNSET, UnsetType

from invariants.loads import never_ran
from invariants.trace import TracedRequest, Violation
from invariants.view import View


def broken(site: str, message: str, expected: object, seen: object, **where: Any) -> Violation:
    """A violation of ``progress``; ``where`` as in ``Violation``."""
    return Violation("progress", message, expected=str(expected), seen=str(seen), site=site, **where)


def lives(view: View) -> Iterator[Violation]:
    """What a life knows at its admission is the prompt and what came out before; a preemption lies between two."""
    trace, flight = view.trace, view.flight
    alive = view.admission >= 0
    delivered = np.bincount(view.admission[alive], flight.delivered[alive], len(trace.admissions)).astype(int).tolist()
    known = [len(request.prompt) for request in trace.requests]
    starts: list[list[int]] = [[] for _ in trace.requests]
    for number, life in enumerate(trace.admissions):
        name, before = trace.requests[life.request].id, starts[life.request]
        message = f"admission {number}, number {len(before) + 1} of request {name}"
        if life.tokens != known[life.request]:
            yield broken("tokens", message, f"{known[life.request]} tokens", life.tokens, request=name)
        if life.resumed != bool(before):
            yield broken("resumed", message, f"resumed {bool(before)}", life.resumed, request=name)
        known[life.request] += delivered[number]
        if not never_ran(trace, life):
            before.append(life.step)
    yield from _preemptions(view, starts)
    yield from _deliveries(view)
    for request, total in zip(trace.requests, known, strict=True):
        count = total - len(request.prompt)
        if count != len(request.output) and not trace.faults:
            message = f"request {request.id} was given {count} tokens by its rows"
            yield broken("output", message, f"{count} output tokens", len(request.output), request=request.id)


def _deliveries(view: View) -> Iterator[Violation]:
    """Tokens come out in order, once each, and all of them: but those of a step in flight whose request has ended, or
    was preempted, and those past ``max_tokens`` or the limit for its length (CONTRACT 24)."""
    trace, flight = view.trace, view.flight
    if trace.faults:
        return  # of the last steps nothing came out
    for number, request in enumerate(trace.requests):
        total, most = 0, min(request.max_tokens, _room(request, trace.geometry.max_model_len))
        for row in np.flatnonzero(view.request == number).tolist():
            sampled, came = int(flight.sampled[row]), int(flight.delivered[row])
            place, next_one = (
                int(view.computed[row] + view.scheduled[row] - flight.drafts[row]),
                len(request.prompt) + total,
            )
            at, what = (row, None), f"{view.where(row)} samples {sampled} tokens from position {place} on"
            if came and place != next_one:
                yield view.violation("progress", "output", at, f"{what}; {total} came out before", next_one, place)
            total += came
            if came > sampled or (came < sampled and total < most and not _cut_off(view, row)):
                yield view.violation("progress", "output", at, what, f"{sampled} tokens come out", came)


def _cut_off(view: View, row: int) -> bool:
    """Whether the request ended, or was preempted, before the output of its row was processed."""
    first, last = int(view.step[row]), int(view.flight.known_by(int(view.step[row])))
    number, steps = int(view.request[row]), view.trace.steps
    if any(number in step.preempted for step in steps[first + 1 : last]):
        return True
    ended = steps[first + 1 : last] if view.trace.requests[number].finished == "abort" else steps[:first]
    return any(number in step.finished for step in ended)


def ends(view: View) -> Iterator[Violation]:
    """Every request ends, once, and with all its tokens unless it was aborted or refused; then every block is free."""
    trace = view.trace
    listed: dict[int, list[int]] = {}
    for index, step in enumerate(trace.steps):
        for number in step.finished:
            listed.setdefault(number, []).append(index)
    limit = trace.geometry.max_model_len
    for number, request in enumerate(trace.requests):
        steps, end = view.step[view.request == number], listed.get(number, [])
        if request.finished == "length" and len(end) == 1:
            # One may have been scheduled before the output that ended it was processed.
            steps = steps[(steps <= end[0]) | (view.flight.processed[steps] > end[0])]
        yield from _end(request, limit, end, int(steps[-1]) if len(steps) else -1)
    yield from _final(view)


def _preemptions(view: View, starts: list[list[int]]) -> Iterator[Violation]:
    """The n-th preemption ends the n-th life before the next begins; the last life may have none."""
    stops: dict[int, list[int]] = {}
    for step in view.trace.steps:
        for number in step.preempted:
            stops.setdefault(number, []).append(step.index)
    for number, begun in enumerate(starts):
        ended = stops.get(number, [])
        fits = len(begun) - 1 <= len(ended) <= len(begun)
        fits &= all(begin < end for begin, end in zip(begun, ended, strict=False))
        fits &= all(end <= begin for end, begin in zip(ended, begun[1:], strict=False))
        if not fits:
            name = view.trace.requests[number].id
            message = f"request {name} was admitted in steps {begun} and preempted in steps {ended}"
            yield broken("preempted", message, "a preemption between two admissions", "otherwise", request=name)


def _end(request: TracedRequest, limit: int | UnsetType, listed: list[int], last: int) -> Iterator[Violation]:
    """``limit``: tokens that it may have, if there is one; ``listed``: steps that say it ended; ``last``: its last step
    with a row, or -1."""
    if request.finished is None:
        message = f"request {request.id} never ended, with {len(request.output)} of {request.max_tokens} tokens"
        yield broken("finished", message, "an end", "none", request=request.id)
        return
    room = _room(request, limit)
    tokens = min(request.max_tokens, room)
    if limit is not UNSET and (request.finished == "refused") != (room < 1) and request.finished != "abort":
        message = f"a prompt of {len(request.prompt)} tokens leaves room for {room} more in request {request.id}"
        expected = "no refusal" if room > 0 else "refused"
        yield broken("refused", message, expected, request.finished, request=request.id)
    elif request.finished == "length" and len(request.output) != tokens:
        message = f"request {request.id} ended by length"
        yield broken("output", message, f"{tokens} output tokens", len(request.output), request=request.id)
    # An aborted request ends before the step that lists it.
    wanted, fits = {
        "length": (f"number {last} alone", listed == [last] and last >= 0),
        "abort": (f"one after number {last}", len(listed) == 1 and listed[0] > last),
        "refused": ("none, and no rows", not listed and last < 0),
    }[request.finished]
    if not fits:
        message = f"request {request.id} ended by {request.finished}; its last row is in step number {last}"
        yield broken("finished", f"{message}; steps that say it ended", wanted, listed, request=request.id)


def _room(request: TracedRequest, limit: int | UnsetType) -> int:
    """Most output tokens that its prompt leaves room for."""
    return request.max_tokens if limit is UNSET else limit - len(request.prompt)


def _final(view: View) -> Iterator[Violation]:
    final = view.trace.final
    if final is None:
        yield broken("final", "the run broke off, without a fault", "a block pool to look at", "none")
        return
    usable = view.trace.geometry.num_blocks - 1
    if (final.free_blocks, final.total_blocks) != (usable, usable):
        message, wanted = "blocks are missing from the pool after the last request", f"{usable} of {usable} free"
        yield broken("free blocks", message, wanted, f"{final.free_blocks} of {final.total_blocks} free")
    if len(final.referenced):
        message = f"blocks are still referenced after the last request: {final.referenced[:10].tolist()}"
        yield broken("referenced", message, "none", f"{len(final.referenced)} blocks")
