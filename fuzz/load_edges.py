# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Edges of external loads (CONTRACT 7-9): what ``edges.py`` says of a run whose scheduler has a KV connector.

Relied upon: ``Admission.load`` is set where the scheduler took tokens from the connector, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from invariants.reference import hit_multiple
from invariants.trace import Admission, IntArray, Load, Trace

LOAD_EDGES: Final[dict[str, str]] = {
    "load-replayed": "a load without its window is taken, and the last window of the hit replayed",
    "load-with-window": "replay is on and a load with its window is taken: nothing is replayed",
    "load-after-local-hit": "a load goes on where the prefix cache's hit ends",
    "load-cut-to-blocks": "a load without its window is cut to whole blocks",
    "load-ends-mid-block": "a load with its window ends inside a block",
    "load-too-short": "a connector has more tokens than the prefix cache, and none is taken: not more than a window",
    "load-whole-prompt": "a load of all known tokens is taken, of which the last one is computed again",
    "load-waited-for": "a request waits for its load while rows of others are computed",
    "load-failed": "a load fails, and the request is looked up again",
    "load-aborted": "a request is aborted while its load is under way",
    "loaded-blocks-hit": "a request hits blocks that another one's load filled",
    "load-resumed": "a resumed request loads again",
}
"""See ``edges.EDGES``, of which they are a part."""


def load_edges(trace: Trace) -> set[str]:
    """Those of them that the run reached."""
    if all(request.offer is None for request in trace.requests):
        return set()
    reached = set(_loaded_blocks(trace))
    failed = {life.request for life in trace.admissions if life.load and life.load.failed}
    for life in trace.admissions:
        offer, load = trace.requests[life.request].offer, life.load
        if load is None:
            if life.request in failed:
                reached.add("load-failed")
            elif offer and offer.tokens > life.local:
                reached.add("load-too-short")
            continue
        reached.update(_taken(trace, life, load))
        if offer and life.local + load.tokens < offer.tokens and not load.carried:
            reached.add("load-cut-to-blocks")
    return reached


def _taken(trace: Trace, life: Admission, load: Load) -> Iterator[str]:
    """What one load shows."""
    if life.replay_start:
        yield "load-replayed"
    if load.carried and trace.replay_expected and life.step >= 0:
        yield "load-with-window"
    if life.local:
        yield "load-after-local-hit"
    if life.hit % hit_multiple(trace) and life.hit < life.tokens:
        yield "load-ends-mid-block"
    if life.hit == life.tokens and life.step >= 0:
        yield "load-whole-prompt"
    if life.resumed:
        yield "load-resumed"
    under_way = range(load.begun, load.begun if load.over is None else load.over + 1)
    if load.waits and any(step.index in under_way and len(step.request) for step in trace.steps):
        yield "load-waited-for"
    gone = [step.index for step in trace.steps if life.request in step.finished]
    aborted = trace.requests[life.request].finished == "abort"
    if aborted and life.step < 0 and not load.failed and any(load.begun < step <= (load.over or step) for step in gone):
        yield "load-aborted"


def _loaded_blocks(trace: Trace) -> Iterator[str]:
    """Whether a request hits a block that a load filled."""
    cacheable = next((i for i, group in enumerate(trace.groups) if group.kind == "cacheable"), 0)
    size = trace.groups[cacheable].block_size
    filled: dict[int, int] = {}
    for number, life in enumerate(trace.admissions):
        table = _table(trace, number, cacheable).tolist()
        local, hit = life.local // size, life.hit // size
        if any(filled.get(block, life.request) != life.request for block in table[:local]):
            yield "loaded-blocks-hit"
        # What is handed out anew holds nothing of a load any more. Later blocks of the life are not looked at, so a
        # block may be taken for loaded that has been computed since: only where its tokens are the same.
        for block in table[local:]:
            filled.pop(block, None)
        if life.load and not life.load.failed:
            filled.update((block, life.request) for block in table[local:hit])


def _table(trace: Trace, number: int, group: int) -> IntArray:
    """Block ids of an admission in the group when it begins; int32 [blocks]."""
    life = trace.admissions[number]
    if life.load and life.load.tables:
        return life.load.tables[group]
    for step in trace.steps:
        if step.index == life.step and step.tables:
            for row in np.flatnonzero(step.admission == number).tolist():
                table: IntArray = step.tables[group][row]
                return table
    return np.zeros(0, np.int32)
