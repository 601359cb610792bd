# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Async loads (CONTRACT 9): a life waits for its KV, and until it is there its blocks are nobody else's.

Relied upon: the connector's word of when a load is over comes with the output of a step, so what waits for it can be
scheduled from the next step on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from invariants.trace import NULL_BLOCK, Admission, Load, Trace, Violation
from invariants.view import View

_NOTHING: Final = (-1, 0, 0, 0)
"""Step, computed, scheduled and replay_start of a life without a chunk."""


def never_ran(trace: Trace, life: Admission) -> bool:
    """Whether the life may be without a chunk: its load failed, or its request was aborted before the load was used."""
    waits = life.load is not None and life.load.waits
    failed = life.load is not None and life.load.failed
    return life.step < 0 and waits and (failed or trace.requests[life.request].finished == "abort")


def waits(view: View) -> Iterator[Violation]:
    """Nothing of a life is scheduled before its load is there, and nothing at all if the load fails: the request then
    begins anew, once it is known. What is loaded at once is there in the same step, and cannot fail."""
    failed: dict[int, int] = {}
    """Of each request: the step with whose output it was known that its load had failed."""
    for life in view.trace.admissions:
        name, load = view.trace.requests[life.request].id, life.load
        if life.request in failed and 0 <= life.step <= failed[life.request]:
            message = f"request {name} begins anew in step {life.step}, and its load failed with {failed[life.request]}"
            yield _early(message, "a later step", life, name)
        if load is None:
            continue
        if not load.waits and (load.failed or load.begun != life.step):
            message = f"a load at once for request {name}, begun in step {load.begun}, failed {load.failed}"
            yield _early(message, f"step {load.begun}, and no failure", life, name)
        elif load.waits and life.step < 0 and (life.step, life.computed, life.scheduled, life.replay_start) != _NOTHING:
            yield _early(f"request {name} never ran after its load, begun in step {load.begun}", "nothing", life, name)
        elif load.waits and life.step >= 0 and (load.over is None or load.failed or life.step <= load.over):
            over = "never told to be over" if load.over is None else f"over with step {load.over}"
            message = f"request {name} is scheduled in step {life.step}, and its load, begun in step {load.begun}, is"
            message = f"{message} {'reported as failed' if load.failed else over}"
            yield _early(message, "no token before its KV is there", life, name)
        if load.waits and load.failed and load.over is not None:
            failed[life.request] = load.over


def queued(view: View) -> Iterator[Violation]:
    """A life is looked up once, then runs once, and what arrives for it arrives between."""
    looked_up: set[int] = set()
    ran: set[int] = set()
    for step in view.trace.steps:
        for turn, admission in step.queue:
            fits = admission not in looked_up if turn == "look up" else admission in looked_up - ran
            seen = [name for name, those in (("looked up", looked_up), ("run", ran)) if admission in those]
            if turn == "look up":
                looked_up.add(admission)
            elif turn == "run":
                ran.add(admission)
            if fits:
                continue
            message = f"admission {admission} has its turn in step {step.index}: {turn}"
            expected = "looked up, then run, once each"
            yield Violation("progress", message, expected, f"before: {seen}", step=step.index, site="queue")


def _early(message: str, expected: str, life: Admission, name: str) -> Violation:
    seen = f"step {life.step}, {life.scheduled} tokens from {life.computed} on, replay_start {life.replay_start}"
    return Violation("progress", message, expected, seen, request=name, step=life.step, site="load")


def reserved(view: View) -> Iterator[Violation]:
    """A load has blocks for its whole hit, which its life keeps; until it is over no other life's row has one that it
    fills."""
    yield from _kept(view)
    for life, load, name in _async(view):
        for group, (table, spec) in enumerate(zip(load.tables, view.trace.groups, strict=True)):
            site, wanted = f"group {group}, load", -(-life.hit // spec.block_size)
            if len(table) != wanted:
                message = f"the table in group {group} has {len(table)} blocks for a load up to token {life.hit}"
                yield _broken(site, message, f"{wanted} blocks", len(table), name, load.begun)
        last = view.trace.steps[-1].index if load.over is None else load.over
        for index, step in enumerate(view.trace.steps):
            if load.begun <= step.index <= last:
                yield from _shared(view, life, load, name, index)


def _kept(view: View) -> Iterator[Violation]:
    """The tables of a life's first row begin with those that its load filled, but for what the window has left."""
    for number, life in enumerate(view.trace.admissions):
        if life.load is None:
            continue
        rows = np.flatnonzero(view.admission == number)
        if not len(rows):
            continue
        index = int(view.step[rows[0]])
        row, name = int(rows[0] - view.row_offset[index]), view.trace.requests[life.request].id
        for group, (loaded, spec) in enumerate(zip(life.load.tables, view.trace.groups, strict=True)):
            table = view.trace.steps[index].tables[group][row][: len(loaded)]
            same = table == loaded[: len(table)]
            if spec.kind == "window":
                same |= table == NULL_BLOCK
            if len(table) < len(loaded) or not same.all():
                message = f"the table in group {group} of a row does not begin with the blocks that its load filled"
                seen, at = table.tolist(), view.trace.steps[index].index
                yield _broken(f"group {group}, load", message, str(loaded.tolist()), seen, name, at)


def _shared(view: View, life: Admission, load: Load, name: str, index: int) -> Iterator[Violation]:
    """Blocks of the load in tables of the step; the pool is shared by all groups."""
    step = view.trace.steps[index]
    filled = [
        table[life.local // spec.block_size if spec.prefix_cacheable else 0 :]
        for table, spec in zip(load.tables, view.trace.groups, strict=True)
    ]
    blocks = np.concatenate(filled)
    blocks = blocks[blocks != NULL_BLOCK]
    for group, tables in enumerate(step.tables):
        for row, table in enumerate(tables):
            taken = table[np.isin(table, blocks)]
            if len(taken) and view.trace.admissions[int(step.admission[row])] is not life:
                message = f"block {taken[0]} is in the table of row {row} in group {group}, while a load fills it"
                yield _broken(f"group {group}, load", message, f"request {name}'s alone", "shared", name, step.index)


def _async(view: View) -> Iterator[tuple[Admission, Load, str]]:
    for life in view.trace.admissions:
        if life.load is not None and life.load.waits:
            yield life, life.load, view.trace.requests[life.request].id


def _broken(site: str, message: str, expected: str, seen: object, request: str, step: int) -> Violation:
    return Violation("write-fence", message, expected, str(seen), request=request, step=step, site=site)
