# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""What the window consumers read: nothing below replay_start, the whole window and nothing else, and only live KV.

The lower bound is the one that the adopted hit implies (``reference.replay_start``), never the worker's own: a worker
that forgot a replay start is exactly what has to be seen. A per-query consumer reads for every scheduled token. A
per-row consumer reads for every chunk of more tokens than a decode has, which is one and its drafts; a row of fewer may
run as a decode, so it may be left out. So it may by one that serves prefills only, and one that serves decodes only may
leave out any row.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from invariants.flight import most_drafts
from invariants.reference import window_first
from invariants.trace import NULL_BLOCK, BoolArray, IntArray, Trace, Violation
from invariants.view import Reads, View, compare, examples, key, key_row, unkey


def gather_floor(view: View) -> Iterator[Violation]:
    """No window gather, by any consumer, reads a position below the request's replay_start."""
    for reads in view.reads:
        floor = reads.floor[reads.row]
        for run, more in examples((reads.first < floor) & (reads.last >= reads.first) & (reads.row >= 0)):
            message = f"{_run(reads, run)}, but its window KV starts at {_start(view, reads)} {floor[run]}{more}"
            at = reads.row[run], reads.position[run]
            expected = f"first position >= {floor[run]}"
            yield view.violation("gather-floor", reads.consumer, at, message, expected, reads.first[run])
        floor = reads.floor[reads.cell_row]
        for cell, more in examples((reads.cell_position < floor) & (reads.cell_row >= 0)):
            message = f"{_cell(reads, cell)}, but its window KV starts at {_start(view, reads)} {floor[cell]}{more}"
            at = reads.cell_row[cell], reads.cell_position[cell]
            expected = f"position >= {floor[cell]}"
            yield view.violation("gather-floor", reads.consumer, at, message, expected, reads.cell_position[cell])


def gather_window(view: View) -> Iterator[Violation]:
    """Each query gathers exactly [max(replay_start, pos-W+1), pos], each row what its queries do, and only once."""
    read = {reads.group for reads in view.reads if reads.per == "query"}
    for group in view.window_groups:
        if len(view.queries) and group not in read:
            message = f"no consumer reads a window in group {group} for any of the {len(view.queries)} scheduled tokens"
            yield Violation("gather-window", message, expected="a run for each", seen="none", site="consumers")
    for reads in view.reads:
        missing, surplus = _unmatched(view, reads)
        for query, more in examples(missing):
            at = unkey(query)
            message = f"{reads.consumer} reads nothing for the query at {at[1]}{more}"
            yield view.violation("gather-window", reads.consumer, at, message, "one run", "none")
        for run, more in examples(surplus):
            message = (
                f"{_run(reads, run)}, which is no query of the row, or has a run already: a window with a hole or a "
                f"repeat comes as several runs{more}"
            )
            at = reads.row[run], reads.position[run]
            yield view.violation("gather-window", reads.consumer, at, message, "one run a query", "one too many")
        first, last = _bounds(view, reads)
        wrong = ((reads.first != first) | (reads.last != last)) & (reads.row >= 0)
        wrong[surplus] = False
        for run, more in examples(wrong):
            bound = f"{_start(view, reads)} {reads.floor[reads.row[run]]}"
            message = f"{_run(reads, run)}; W = {view.trace.geometry.window}, {bound}{more}"
            at = reads.row[run], reads.position[run]
            expected, seen = f"[{first[run]}, {last[run]}]", f"[{reads.first[run]}, {reads.last[run]}]"
            yield view.violation("gather-window", reads.consumer, at, message, expected, seen)


def gather_live(view: View) -> Iterator[Violation]:
    """Each gathered slot is the request's own, is allocated, and was last written by it for that position."""
    for reads in view.reads:
        if reads.group is None:
            if view.window_groups:  # or gating reports that there is none
                message, groups = f"{reads.consumer}, which is no window group", f"one of {view.window_groups}"
                yield Violation("gather-live", message, groups, "another", site=f"{reads.consumer}, group")
            continue
        table = view.tables[reads.group]
        yield from _uncovered(view, reads)
        row, position, slot = reads.cell_row, reads.cell_position, reads.cell_slot
        block = table.block(row, position)
        absent = block <= NULL_BLOCK
        for cell, more in examples(absent):
            what = "the null block" if block[cell] == NULL_BLOCK else "no block"
            message = f"{_cell(reads, cell)}, where the window group's block table has {what}{more}"
            site, at = f"{reads.consumer}, {what}", (row[cell], position[cell])
            yield view.violation("gather-live", site, at, message, "a position whose block is allocated", what)
        wanted = block * table.block_size + position % table.block_size
        misplaced = ~absent & (slot != wanted)
        for cell, more in examples(misplaced):
            message = f"{_cell(reads, cell)}, where the window group's block table has block {block[cell]}{more}"
            at = row[cell], position[cell]
            seen = f"slot {slot[cell]}"
            yield view.violation("gather-live", reads.consumer, at, message, f"slot {wanted[cell]}", seen)
        own = (reads.cell_writer == view.admission[row]) & (reads.cell_written == position)
        stale = ~absent & ~misplaced & ~own
        if stale.any():
            stale &= ~_inherited(view, reads, stale)
        for cell, more in examples(stale):
            message = f"{_cell(reads, cell)}, which {_writer(view.trace, reads, cell)}{more}"
            at = row[cell], position[cell]
            expected = f"written by admission {view.admission[row[cell]]} for position {position[cell]}"
            seen = f"admission {reads.cell_writer[cell]}, position {reads.cell_written[cell]}"
            yield view.violation("gather-live", f"{reads.consumer}, stale", at, message, expected, seen)


def _start(view: View, reads: Reads) -> str:
    return "replay_start" if reads.floor is view.floor else "the later of replay_start and the first row kept,"


def _run(reads: Reads, run: int) -> str:
    what = "query" if reads.per == "query" else "chunk"
    span = f"[{reads.first[run]}, {reads.last[run]}]"
    return f"{reads.consumer} reads {span} for the {what} at {reads.position[run]}"


def _cell(reads: Reads, cell: int) -> str:
    return f"{reads.consumer} reads slot {reads.cell_slot[cell]} for position {reads.cell_position[cell]}"


def _writer(trace: Trace, reads: Reads, cell: int) -> str:
    writer, written = int(reads.cell_writer[cell]), int(reads.cell_written[cell])
    if not 0 <= writer < len(trace.admissions):
        return "nobody has written since its block was handed out"
    name = trace.requests[trace.admissions[writer].request].id
    return f"was last written by request {name} (admission {writer}) for position {written}"


def _unmatched(view: View, reads: Reads) -> tuple[IntArray, IntArray]:
    """Keys of queries without a run, and indices of runs too many."""
    keys = key(reads.row, reads.position)
    owed = reads.asked.copy()
    if reads.per == "row" or reads.serves != "all":
        owed &= (view.scheduled > 1 + most_drafts(view.trace.geometry)) & (reads.serves != "decodes")
    owed[reads.row[reads.row >= 0]] = True  # one that may be left out is owed to a consumer that has it
    if reads.per == "query":
        return compare(keys, reads.queries if owed.all() else reads.queries[owed[key_row(reads.queries)]])
    rows = np.flatnonzero(owed)
    return compare(keys, key(rows, view.computed[rows]))


def _bounds(view: View, reads: Reads) -> tuple[IntArray, IntArray]:
    """[runs] first and last position that the contract has for each run."""
    first = window_first(reads.position, reads.floor[reads.row], view.trace.geometry.window)
    last = reads.position if reads.per == "query" else reads.position + view.scheduled[reads.row] - 1
    return first, last


def _uncovered(view: View, reads: Reads) -> Iterator[Violation]:
    """Positions in the runs that have no cell, or two: what was read there would go unjudged."""
    first, last = _bounds(view, reads)
    unmatched = sum(map(len, _unmatched(view, reads)))
    if unmatched or not np.array_equal(first, reads.first) or not np.array_equal(last, reads.last):
        return  # gather-window's business; cells follow the runs
    rows = np.unique(reads.row)
    lowest = np.full(len(view.computed), np.iinfo(np.int64).max)
    np.minimum.at(lowest, reads.row, reads.first)
    low = lowest[rows]
    count = view.computed[rows] + view.scheduled[rows] - low
    row = np.repeat(rows, count)
    position = np.arange(len(row)) + np.repeat(low - (np.cumsum(count) - count), count)
    missing, surplus = compare(key(reads.cell_row, reads.cell_position), key(row, position))
    for number, more in examples(missing):
        at = unkey(number)
        message = f"{reads.consumer} reads position {at[1]}, but no slot is known for it{more}"
        yield view.violation("gather-live", f"{reads.consumer}, cells", at, message, "one slot", "none")
    for cell, more in examples(surplus):
        message = f"{_cell(reads, cell)}, which no run covers, or which has another slot already{more}"
        at = reads.cell_row[cell], reads.cell_position[cell]
        yield view.violation("gather-live", f"{reads.consumer}, cells", at, message, "one slot", "one too many")


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
    one, other = (
        np.concatenate([trace.requests[number].prompt, np.asarray(trace.requests[number].output, np.int64)])
        for number in (life.request, trace.admissions[writer].request)
    )
    shorter = min(len(one), len(other))
    differ = np.flatnonzero(one[:shorter] != other[:shorter])
    return min(life.hit, int(differ[0]) if len(differ) else shorter)
