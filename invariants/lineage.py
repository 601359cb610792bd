# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Who computed what a hit adopts: the trace's writes into the cacheable group, followed slot by slot.

A life's states need not come from one other life: blocks of a prefix may have been cached by several.
"""

from __future__ import annotations

import numpy as np

from invariants.trace import NOBODY, IntArray, Step, Trace


def lineage(trace: Trace) -> list[IntArray]:
    """For each admission int [hit]: the earlier admission that computed the state of each adopted position.

    NOBODY where the slot does not hold that position, or its writer is no earlier admission. Slots are a token each,
    also where several tokens share a state: it belongs to the last of them.
    """
    lives = trace.admissions
    adopted = [np.full(max(life.hit, 0), NOBODY) for life in lives]
    group = next((i for i, group in enumerate(trace.groups) if group.kind == "cacheable"), None)
    if group is None or not any(life.hit > 0 for life in lives):
        return adopted
    size = trace.groups[group].block_size
    slots = 1 + max((int(w.slot.max(initial=0)) for step in trace.steps for w in step.writes), default=0)
    writer, written = np.full(slots, NOBODY), np.full(slots, -1)
    seen: set[int] = set()
    for step in trace.steps:
        fresh = []
        for row, index in enumerate(step.admission.tolist()):
            if index in seen or not 0 <= index < len(lives):
                continue
            seen.add(index)
            if lives[index].hit > 0 and step.tables:
                cells = _cells(step.tables[group][row], lives[index].hit, size, slots)
                fresh.append((index, cells, writer[cells], written[cells]))
        _write(step, group, writer, written)
        for index, cells, old, position in fresh:
            # KV of a step is written before anyone reads it, so what another row has just written can be adopted; what
            # the life itself writes is not what it adopted.
            own = writer[cells] == index
            source = np.where(own, old, writer[cells])
            position = np.where(own, position, written[cells])
            valid = (cells >= 0) & (position == np.arange(len(cells))) & (source < index)
            adopted[index] = np.where(valid, source, NOBODY)
    return adopted


def _cells(table: IntArray, hit: int, size: int, slots: int) -> IntArray:
    """int64 [hit]: the slot of each position below ``hit``, -1 where the table has none or nothing was ever written."""
    position = np.arange(hit)
    entry = position // size
    block = np.append(table, -1)[np.minimum(entry, len(table))].astype(np.int64)
    slot = block * size + position % size
    return np.where((block >= 0) & (slot < slots), slot, -1)


def _write(step: Step, group: int, writer: IntArray, written: IntArray) -> None:
    for writes in step.writes:
        if writes.group == group:
            valid = (writes.slot >= 0) & (writes.row >= 0) & (writes.row < len(step.admission))
            slot = writes.slot[valid]
            writer[slot], written[slot] = step.admission[writes.row[valid]], writes.position[valid]
