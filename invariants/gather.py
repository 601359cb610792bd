# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""What the window consumers read: nothing below replay_start, the whole window and nothing else, and only live KV.

The lower bound is the one that the adopted hit implies (``reference.replay_start``), never the worker's own: a worker
that forgot a replay start is exactly what has to be seen. A per-query consumer reads for every scheduled token. A
per-row consumer reads for every chunk of more than one token; a row of one token may run as a decode, so it may be left
out.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from invariants.reference import window_first
from invariants.trace import NULL_BLOCK, BoolArray, IntArray, Trace, Violation
from invariants.view import Reads, View, compare, examples, key, unkey


def gather_floor(view: View) -> Iterator[Violation]:
    """No window gather, by any consumer, reads a position below the request's replay_start."""
    for reads in view.reads:
        floor = view.floor[reads.row]
        for run, more in examples((reads.first < floor) & (reads.last >= reads.first) & (reads.row >= 0)):
            yield Violation(
                "gather-floor",
                f"{reads.consumer} reads [{reads.first[run]}, {reads.last[run]}] for the query at "
                f"{reads.position[run]}, but the request's window KV starts at replay_start {floor[run]}{more}",
                expected=f"first position >= {floor[run]}",
                seen=str(reads.first[run]),
                position=int(reads.position[run]),
                site=reads.consumer,
                **view.where(int(reads.row[run])),
            )
        floor = view.floor[reads.cell_row]
        for cell, more in examples((reads.cell_position < floor) & (reads.cell_row >= 0)):
            yield Violation(
                "gather-floor",
                f"{reads.consumer} reads slot {reads.cell_slot[cell]} for position {reads.cell_position[cell]}, but "
                f"the request's window KV starts at replay_start {floor[cell]}{more}",
                expected=f"position >= {floor[cell]}",
                seen=str(reads.cell_position[cell]),
                position=int(reads.cell_position[cell]),
                site=reads.consumer,
                **view.where(int(reads.cell_row[cell])),
            )


def gather_window(view: View) -> Iterator[Violation]:
    """Each query gathers exactly [max(replay_start, pos-W+1), pos], each row what all its queries do, and only once."""
    if len(view.queries) and not any(reads.per == "query" for reads in view.reads):
        yield Violation(
            "gather-window",
            f"no consumer reads a window for any of the {len(view.queries)} scheduled tokens",
            expected="a run for each of them",
            seen="none",
            site="consumers",
        )
    for reads in view.reads:
        missing, surplus = _runs(view, reads)
        for query, more in examples(missing):
            row, position = unkey(query)
            yield Violation(
                "gather-window",
                f"{reads.consumer} reads nothing for the query at {position}{more}",
                expected="one run",
                seen="none",
                position=position,
                site=reads.consumer,
                **view.where(row),
            )
        for run, more in examples(surplus):
            yield Violation(
                "gather-window",
                f"{reads.consumer} reads [{reads.first[run]}, {reads.last[run]}] for position {reads.position[run]}, "
                f"which is no query of a row it reads for, or is read for a second time: a window with a hole or a "
                f"repeat comes as several runs{more}",
                expected="one run a query",
                seen="one too many",
                position=int(reads.position[run]),
                site=reads.consumer,
                **view.where(int(reads.row[run])),
            )
        first, last = _bounds(view, reads)
        wrong = ((reads.first != first) | (reads.last != last)) & (reads.row >= 0)
        wrong[surplus] = False
        for run, more in examples(wrong):
            yield Violation(
                "gather-window",
                f"{reads.consumer} reads the wrong window for the query at {reads.position[run]} (W = "
                f"{view.trace.geometry.window}, replay_start {view.floor[reads.row[run]]}){more}",
                expected=f"[{first[run]}, {last[run]}]",
                seen=f"[{reads.first[run]}, {reads.last[run]}]",
                position=int(reads.position[run]),
                site=reads.consumer,
                **view.where(int(reads.row[run])),
            )


def gather_live(view: View) -> Iterator[Violation]:
    """Each gathered slot is the request's own, is allocated, and was last written by it for that position."""
    if view.window_group is None:
        return
    table = view.tables[view.window_group]
    for reads in view.reads:
        yield from _uncovered(view, reads)
        row, position, slot = reads.cell_row, reads.cell_position, reads.cell_slot
        block = table.block(row, position)
        real = block > NULL_BLOCK
        misplaced = real & (slot != block * table.block_size + position % table.block_size)
        for cell, more in examples(~real | misplaced):
            what = _block_name(int(block[cell]))
            yield Violation(
                "gather-live",
                f"{reads.consumer} reads slot {slot[cell]} for position {position[cell]}, where the window group's "
                f"block table has {what}{more}",
                expected=f"slot {block[cell] * table.block_size + position[cell] % table.block_size}"
                if real[cell]
                else "a position whose block is allocated",
                seen=f"slot {slot[cell]}",
                position=int(position[cell]),
                site=reads.consumer,
                **view.where(int(row[cell])),
            )
        own = (reads.cell_writer == view.admission[row]) & (reads.cell_written == position)
        stale = real & ~misplaced & ~own
        if stale.any():
            stale &= ~_inherited(view, reads, stale)
        for cell, more in examples(stale):
            yield Violation(
                "gather-live",
                f"{reads.consumer} reads slot {slot[cell]} for position {position[cell]}, which "
                f"{_writer_name(view.trace, reads, cell)}{more}",
                expected=f"written by admission {view.admission[row[cell]]} for position {position[cell]}",
                seen=f"admission {reads.cell_writer[cell]}, position {reads.cell_written[cell]}",
                position=int(position[cell]),
                site=reads.consumer,
                **view.where(int(row[cell])),
            )


def _runs(view: View, reads: Reads) -> tuple[IntArray, IntArray]:
    """Keys of queries without a run, and indices of runs too many."""
    keys = key(reads.row, reads.position)
    if reads.per == "query":
        return compare(keys, view.queries)
    first_queries = key(np.arange(len(view.computed)), view.computed)
    missing, surplus = compare(keys, first_queries)
    must = view.scheduled > 1
    return missing[must[missing >> 32]] if len(missing) else missing, surplus


def _bounds(view: View, reads: Reads) -> tuple[IntArray, IntArray]:
    """[runs] first and last position that the contract has for each run."""
    first = window_first(reads.position, view.floor[reads.row], view.trace.geometry.window)
    last = reads.position if reads.per == "query" else reads.position + view.scheduled[reads.row] - 1
    return np.maximum(first, 0), last


def _uncovered(view: View, reads: Reads) -> Iterator[Violation]:
    """Positions in the runs that have no cell, or two: what was read there would go unjudged."""
    first, last = _bounds(view, reads)
    missing, surplus = _runs(view, reads)
    if len(missing) or len(surplus) or (first != reads.first).any() or (last != reads.last).any():
        return  # gather-window's business; cells follow the runs
    rows = np.unique(reads.row)
    low = np.maximum(window_first(view.computed[rows], view.floor[rows], view.trace.geometry.window), 0)
    count = view.computed[rows] + view.scheduled[rows] - low
    row = np.repeat(rows, count)
    position = np.arange(len(row)) + np.repeat(low - (np.cumsum(count) - count), count)
    missing, surplus = compare(key(reads.cell_row, reads.cell_position), key(row, position))
    for cell, more in examples(missing):
        at, pos = unkey(cell)
        yield Violation(
            "gather-live",
            f"{reads.consumer} reads position {pos}, but no slot is known for it{more}",
            expected="one slot",
            seen="none",
            position=pos,
            site=reads.consumer,
            **view.where(at),
        )
    for index, more in examples(surplus):
        yield Violation(
            "gather-live",
            f"{reads.consumer} reads slot {reads.cell_slot[index]} for position {reads.cell_position[index]}, which no "
            f"run covers or another slot stands for already{more}",
            expected="one slot for each position read",
            seen="one too many",
            position=int(reads.cell_position[index]),
            site=reads.consumer,
            **view.where(int(reads.cell_row[index])),
        )


def _inherited(view: View, reads: Reads, candidates: BoolArray) -> BoolArray:
    """[cells] window KV that came with a hit: only where replay is off, written for the same tokens."""
    trace = view.trace
    lives = len(trace.admissions)
    reader, writer = view.admission[reads.cell_row], reads.cell_writer
    good: BoolArray = candidates & (reader >= 0) & (writer >= 0) & (writer < lives) & (view.replay == 0)
    good &= reads.cell_written == reads.cell_position
    if not good.any():
        return good
    pairs, pair = np.unique(reader[good] * lives + writer[good], return_inverse=True)
    # An adopted position is in the hit, and the writer had the same tokens up to there.
    reach = np.array([_reach(trace, *divmod(int(number), lives)) for number in pairs])
    good[good] = reads.cell_position[good] < reach[pair]
    return good


def _reach(trace: Trace, reader: int, writer: int) -> int:
    """Positions from the start whose window KV one life may have adopted from another."""
    life = trace.admissions[reader]
    return min(life.hit, _common(trace, life.request, trace.admissions[writer].request))


def _common(trace: Trace, one: int, other: int) -> int:
    """Tokens that two requests have in common from the start."""
    a, b = (np.concatenate([trace.requests[i].prompt, np.asarray(trace.requests[i].output, int)]) for i in (one, other))
    shorter = min(len(a), len(b))
    differ = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(differ[0]) if len(differ) else shorter


def _block_name(block: int) -> str:
    if block < 0:
        return "no block"
    return "the null block" if block == NULL_BLOCK else f"block {block}"


def _writer_name(trace: Trace, reads: Reads, cell: int) -> str:
    writer, written = int(reads.cell_writer[cell]), int(reads.cell_written[cell])
    if not 0 <= writer < len(trace.admissions):
        return "nobody has written since its block was handed out"
    life = trace.admissions[writer]
    return f"was last written by request {trace.requests[life.request].id} (admission {writer}) for position {written}"
