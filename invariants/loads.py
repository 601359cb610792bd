# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Async loads (CONTRACT 9): a life waits for its KV, and until it is there its blocks are nobody else's.

Relied upon: the connector's word of when a load is over comes with the output of a step, so what waits for it can be
scheduled from the next step on.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from invariants.trace import NULL_BLOCK, Admission, Load, Trace, Violation
from invariants.view import View


def never_ran(trace: Trace, life: Admission) -> bool:
    """Whether the life may be without a chunk: its load failed, or its request was aborted before the load was used."""
    waits = life.load is not None and life.load.waits
    failed = life.load is not None and life.load.failed
    return life.step < 0 and waits and (failed or trace.requests[life.request].finished == "abort")


def waits(view: View) -> Iterator[Violation]:
    """Nothing of a life is scheduled before its load is there, and nothing at all if the load fails."""
    for life, load, name in _async(view):
        if life.step < 0:
            continue
        ready = load.over is not None and not load.failed and life.step > load.over
        if not ready:
            over = "never told to be over" if load.over is None else f"over with step {load.over}"
            message = f"request {name} is scheduled in step {life.step}, and its load, begun in step {load.begun}, is"
            yield Violation(
                "progress",
                f"{message} {'reported as failed' if load.failed else over}",
                expected="no token before its KV is there",
                seen=f"{life.scheduled} tokens",
                request=name,
                step=life.step,
                site="load",
            )


def reserved(view: View) -> Iterator[Violation]:
    """A load has blocks for its whole hit, and until it is over no row of another life has one that it fills."""
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
