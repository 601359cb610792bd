# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The shadow KV cache: for every slot of a group, who wrote it last and for which position. No byte of KV is kept.

Relied upon: a block that is handed out holds nothing its new owner may read (its cells are wiped when it first appears
in a table outside the adopted hit), and a life of a request is one admission, so that KV left by an earlier life of the
same request counts as somebody else's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from invariants.trace import NOBODY, NULL_BLOCK, PAD_SLOT, BoolArray, Gathers, IntArray


class Tables:
    """The block tables of one group for the rows of a batch, side by side so that one lookup serves all rows."""

    def __init__(self, tables: Sequence[IntArray] | IntArray, block_size: int) -> None:
        self.block_size = block_size
        self._width = max(map(len, tables)) + 1
        # One column more than the longest table, and PAD_SLOT wherever a table has ended.
        self._blocks = np.full((len(tables), self._width), PAD_SLOT, np.int64)
        for row, table in enumerate(tables):
            self._blocks[row, : len(table)] = table
        self._flat = self._blocks.ravel()

    def __len__(self) -> int:
        return len(self._blocks)

    def slots(self, row: IntArray, position: IntArray) -> IntArray:
        """int64 like row: the slot of each position of each batch row; PAD_SLOT beyond the end of its table."""
        column = position // self.block_size
        block = self._flat[row * self._width + np.minimum(column, self._width - 1)]
        slot: IntArray = block * self.block_size + (position - column * self.block_size)
        return slot if slot.min(initial=0) >= 0 else np.where(block >= 0, slot, PAD_SLOT)


def slot_map(table: IntArray, block_size: int) -> IntArray:
    """int64 [positions]: the slot of every position that a block table covers."""
    slots: IntArray = (table[:, None].astype(np.int64) * block_size + np.arange(block_size)).ravel()
    return slots


def stretch(maps: Sequence[IntArray], begins: Sequence[int], ends: Sequence[int]) -> IntArray:
    """int64: the slots of positions begin..end-1 in each slot map (at least one) in turn; PAD_SLOT beyond its end."""
    parts = [slots[begin:end] for slots, begin, end in zip(maps, begins, ends, strict=True)]
    if any(end > len(slots) for slots, end in zip(maps, ends, strict=True)):
        wanted = [end - begin for begin, end in zip(begins, ends, strict=True)]
        parts = [
            np.pad(part, (0, length - len(part)), constant_values=PAD_SLOT)
            for part, length in zip(parts, wanted, strict=True)
        ]
    return join(parts)


def join(parts: list[IntArray]) -> IntArray:
    """The parts (at least one) end to end. Most steps have one row, and then there is nothing to copy."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class ShadowGroup:
    """The cells of one KV-cache group."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._writer = np.full(num_blocks * block_size, NOBODY, np.int32)
        self._position = np.full(num_blocks * block_size, -1, np.int32)
        self._lane = np.arange(block_size)
        self._tables: dict[int, IntArray] = {}

    def admit(self, admission: int, table: IntArray, adopted: int) -> None:
        """A life begins with this table, of which the first ``adopted`` blocks came from the prefix cache."""
        self._tables[admission] = table[:adopted]
        self.extend(admission, table)

    def extend(self, admission: int, table: IntArray) -> None:
        """The table as it is after scheduling: blocks that are new in it are wiped."""
        before = self._tables[admission]
        if table is before:
            return
        self._tables[admission] = table
        same = np.zeros(len(table), bool)
        same[: len(before)] = table[: len(before)] == before[: len(table)]
        fresh = table[~same & (table != NULL_BLOCK)]
        if len(fresh):
            cells = fresh[:, None].astype(np.int64) * self.block_size + self._lane
            self._writer[cells] = NOBODY
            self._position[cells] = -1

    def write(self, admission: IntArray, position: IntArray, slot: IntArray) -> None:
        """What a step writes. A slot outside the pool is kept in the trace and changes nothing here."""
        if not self._holds(slot):
            real = (slot >= 0) & (slot < len(self._writer))
            admission, position, slot = admission[real], position[real], slot[real]
        self._writer[slot] = admission
        self._position[slot] = position

    def _holds(self, slot: IntArray) -> bool:
        # As unsigned numbers the negative ones are the largest: one look for both ends.
        return int(slot.view(np.uint64).max(initial=0)) < len(self._writer)

    def copy_block(self, source: int, target: int) -> None:
        """Copy-on-write of a partly filled block."""
        size = self.block_size
        for cells in (self._writer, self._position):
            cells[target * size : (target + 1) * size] = cells[source * size : (source + 1) * size]

    def read(self, slot: IntArray) -> tuple[IntArray, IntArray]:
        """(writer, position) int32 like slot: what the slots hold. Slots outside the pool hold nothing."""
        if self._holds(slot):
            return self._writer[slot], self._position[slot]
        real = (slot >= 0) & (slot < len(self._writer))
        safe = np.where(real, slot, 0)
        return np.where(real, self._writer[safe], NOBODY), np.where(real, self._position[safe], -1)


@dataclass(slots=True)
class Queries:
    """Who reads: one entry a query (or a batch row), in batch order."""

    row: IntArray
    """int32"""
    position: IntArray
    """int32"""


def gathers_from_indices(
    consumer: str, queries: Queries, indices: IntArray, lens: IntArray, tables: Tables, shadow: ShadowGroup
) -> Gathers:
    """The gathers of an index list: int32 [queries, width] slots, of which the first ``lens`` count.

    Entry j of a query at position p with length n stands for position p - n + 1 + j, which is how every consumer of
    such a list means it. An entry beyond the length that is not -1 is read as well: its position lies past p.
    """
    lane = np.arange(indices.shape[1])
    first = queries.position - lens + 1
    believed = first[:, None] + lane
    listed = lane < lens[:, None]
    if ((indices != PAD_SLOT) == listed).all() and 0 < lens.min() <= lens.max() <= len(lane):
        starts = np.flatnonzero(np.diff(queries.row, prepend=-1))
        if ((tables.slots(queries.row[:, None], believed) == indices) | ~listed).all():
            # Rows without a query are empty stretches.
            low, high = np.zeros((2, len(tables)), np.int64)
            high -= 1
            low[queries.row[starts]] = np.minimum.reduceat(first, starts)
            high[queries.row[starts]] = np.maximum.reduceat(queries.position, starts)
            cells = stretches(low, high, tables)
            return gathers(consumer, "query", queries, (first, queries.position), cells, shadow)
    return _irregular(consumer, queries, indices, believed, listed, shadow)


@dataclass(slots=True)
class Cells:
    """Distinct (row, position, slot) that a step reads."""

    row: IntArray
    """int32"""
    position: IntArray
    slot: IntArray
    """int64"""


def stretches(low: IntArray, high: IntArray, tables: Tables) -> Cells:
    """One stretch of positions for each batch row, in order, from ``low`` to ``high`` included."""
    length = high - low + 1
    row = np.repeat(np.arange(len(low), dtype=np.int32), length)
    position = np.arange(len(row)) - (np.cumsum(length) - length - low)[row]
    return Cells(row, position, tables.slots(row, position))


def gathers(
    consumer: str,
    per: Literal["query", "row"],
    queries: Queries,
    span: tuple[IntArray, IntArray],
    cells: Cells,
    shadow: ShadowGroup,
) -> Gathers:
    """The gathers of a consumer that reads the positions ``span`` = (first, last), both included, in these cells."""
    writer, written = shadow.read(cells.slot)
    return Gathers(
        consumer=consumer,
        per=per,
        row=queries.row,
        position=queries.position,
        first=span[0],
        last=span[1],
        cell_row=cells.row,
        cell_position=cells.position,
        cell_slot=cells.slot,
        cell_writer=writer,
        cell_written=written,
    )


def _irregular(
    consumer: str, queries: Queries, indices: IntArray, believed: IntArray, listed: BoolArray, shadow: ShadowGroup
) -> Gathers:
    """Lists with holes, stale entries or foreign slots: every stretch of entries is a run of its own.

    A hole is in none, but it is read: by a consumer that does not test the sign (CONTRACT 19).
    """
    there = indices != PAD_SLOT
    edge = np.diff(np.pad(there, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    query, begin = np.nonzero(edge == 1)
    _, end = np.nonzero(edge == -1)
    empty = np.flatnonzero(~there.any(axis=1))
    at = np.concatenate([query, empty])
    first = np.concatenate([believed[query, begin], queries.position[empty] + 1])
    last = np.concatenate([believed[query, end - 1], queries.position[empty]])
    order = np.argsort(at, kind="stable")
    read = Queries(queries.row[at[order]], queries.position[at[order]])
    query, lane = np.nonzero(there | listed)
    read_from = np.stack([queries.row[query], believed[query, lane], indices[query, lane]], axis=1)
    cells = Cells(*np.unique(read_from.astype(np.int64), axis=0).T)
    return gathers(consumer, "query", read, (first[order], last[order]), cells, shadow)
