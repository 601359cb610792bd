# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Edges of steps in flight and of drafts: which of them one run reached, told from its trace (see ``edges.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from msgspec import UNSET

from invariants.flight import tokens_ahead
from invariants.reference import hit_multiple
from invariants.trace import NULL_BLOCK, Trace
from invariants.view import View

FLIGHT_EDGES: Final[dict[str, str]] = {
    "step-in-flight": "a request goes on in a step that is scheduled while its step before is in flight",
    "replay-in-flight": "so it does in the middle of its replay",
    "preempted-in-flight": "a request is preempted while a step of it is in flight",
    "aborted-in-flight": "a request is aborted while a step of it is in flight",
    "ended-in-flight": "a step runs a request that had ended before, which was not known when it was scheduled",
    "output-dropped": "a step in flight samples for a request that was preempted since, and its client never gets it",
    "output-after-preemption": "the client of a preempted request gets what a step in flight sampled for it",
    "drafts-accepted": "a draft turns out right",
    "drafts-rejected": "a draft turns out wrong",
    "drafts-across-block-edge": "rejected drafts reach into a window block that the request had not begun before",
    "drafts-after-replay": "the window of a draft reaches into replayed tokens",
    "drafts-in-flight": "a step is scheduled while drafts that turn out wrong are in flight",
    "prefill-with-drafts": "a prefill of a single token is made as long as a decode with drafts",
    "hit-after-rejected-drafts": "a hit adopts a block that held a rejected draft once",
    "next-token-differs": "a block is not adopted because of the token after it, which is part of its name",
}
"""Edge id to what it means, in one line."""


def flight_edges(trace: Trace) -> set[str]:
    """Ids of the edges that the run reached."""
    if trace.geometry.async_scheduling is UNSET and trace.geometry.drafts is UNSET:
        return set()
    view = View(trace)
    return {*_in_flight(view), *_drafts(view), *_left_in_flight(view), *_adopted(view)}


def _in_flight(view: View) -> Iterator[str]:
    flight = view.flight
    before = np.maximum(view.before, 0)
    flying = (view.before >= 0) & (view.step[before] >= flight.processed[view.step])
    if flying.any():
        yield "step-in-flight"
    if (flying & (view.floor > 0) & (view.computed < view.hit)).any():
        yield "replay-in-flight"
    if (flying & (flight.rejected[before] > 0)).any():
        yield "drafts-in-flight"


def _left_in_flight(view: View) -> Iterator[str]:
    """Requests that leave while a step of theirs is in flight."""
    flight, steps = view.flight, view.trace.steps
    for row, (number, index) in enumerate(zip(view.request.tolist(), view.step.tolist(), strict=True)):
        request, last = view.trace.requests[number], int(flight.known_by(index))
        if request.finished == "length" and any(number in step.finished for step in steps[:index]):
            yield "ended-in-flight"
        for step in steps[index + 1 : last]:
            if number in step.finished and request.finished == "abort":
                yield "aborted-in-flight"
            if number in step.preempted:
                yield "preempted-in-flight"
                if flight.sampled[row]:
                    yield "output-after-preemption" if flight.delivered[row] else "output-dropped"


def _drafts(view: View) -> Iterator[str]:
    flight, drafts = view.flight, view.flight.drafts > 0
    if (drafts & view.prefill).any():
        yield "prefill-with-drafts"
    if (drafts & (flight.accepted > 0)).any():
        yield "drafts-accepted"
    rejected = flight.rejected > 0
    if rejected.any():
        yield "drafts-rejected"
    block, last = view.trace.geometry.swa_block_size, flight.end + flight.rejected - 1
    if (rejected & (last // block > np.maximum(flight.end - 1, 0) // block)).any():
        yield "drafts-across-block-edge"
    if (drafts & (view.floor > 0) & (view.computed - view.trace.geometry.window + 1 < view.hit)).any():
        yield "drafts-after-replay"


def _adopted(view: View) -> Iterator[str]:
    """What hits have to do with drafts."""
    trace = view.trace
    group = next(i for i, group in enumerate(trace.groups) if group.kind == "cacheable")
    table, multiple = view.tables[group], hit_multiple(trace)
    rows = np.flatnonzero(view.flight.rejected)
    held = set(zip(table.block(rows, view.flight.end[rows]).tolist(), view.flight.end[rows].tolist(), strict=True))
    tokens = [np.concatenate([request.prompt, np.asarray(request.output, np.int32)]) for request in trace.requests]
    for row in np.flatnonzero(view.before < 0).tolist():
        hit, known = int(view.hit[row]), trace.admissions[view.admission[row]].tokens
        blocks = table.blocks[table.offset[row] : table.offset[row] + hit // table.block_size].tolist()
        if any(
            position < hit and blocks[position // table.block_size] == block > NULL_BLOCK for block, position in held
        ):
            yield "hit-after-rejected-drafts"
        earlier = set(view.request[view.step < view.step[row]].tolist()) - {int(view.request[row])}
        for other in earlier if tokens_ahead(trace.geometry) else ():
            short = min(known - 1, len(tokens[other]))
            same = tokens[int(view.request[row])][:short] == tokens[other][:short]
            if (short if same.all() else int(same.argmin())) == hit + multiple:
                yield "next-token-differs"
