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
from typing import Any, Literal

import numpy as np

from invariants.trace import NOBODY, NULL_BLOCK, PAD_SLOT, Gathers, IntArray


class Tables:
    """The block tables of one group for the rows of a batch, laid end to end so that one lookup serves all rows."""

    def __init__(self, tables: Sequence[IntArray] | IntArray, block_size: int) -> None:
        self.block_size = block_size
        self._length = np.array([len(table) for table in tables])
        self._start = np.cumsum(self._length) - self._length
        self._flat = np.concatenate(tables)

    def __len__(self) -> int:
        return len(self._length)

    def slots(self, row: IntArray, position: IntArray) -> IntArray:
        """int64 like row: the slot of each position of each batch row; PAD_SLOT beyond the end of its table."""
        column, offset = np.divmod(position, self.block_size)
        inside = column < self._length[row]
        if inside.all():
            slot: IntArray = self._flat[self._start[row] + column] * np.int64(self.block_size) + offset
            return slot
        block = self._flat[np.where(inside, self._start[row] + column, 0)] if len(self._flat) else column
        return np.where(inside, block * np.int64(self.block_size) + offset, PAD_SLOT)


class ShadowGroup:
    """The cells of one KV-cache group."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._writer = np.full(num_blocks * block_size, NOBODY, np.int32)
        self._position = np.full(num_blocks * block_size, -1, np.int32)
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
            cells = fresh[:, None].astype(np.int64) * self.block_size + np.arange(self.block_size)
            self._writer[cells] = NOBODY
            self._position[cells] = -1

    def write(self, admission: IntArray, position: IntArray, slot: IntArray) -> None:
        """What a step writes. A slot outside the pool is kept in the trace and changes nothing here."""
        real = (slot >= 0) & (slot < len(self._writer))
        if not real.all():
            admission, position, slot = admission[real], position[real], slot[real]
        self._writer[slot] = admission
        self._position[slot] = position

    def copy_block(self, source: int, target: int) -> None:
        """Copy-on-write of a partly filled block."""
        size = self.block_size
        for cells in (self._writer, self._position):
            cells[target * size : (target + 1) * size] = cells[source * size : (source + 1) * size]

    def read(self, slot: IntArray) -> tuple[IntArray, IntArray]:
        """(writer, position) int32 like slot: what the slots hold. Slots outside the pool hold nothing."""
        real = (slot >= 0) & (slot < len(self._writer))
        if real.all():
            return self._writer[slot], self._position[slot]
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
    if ((indices != PAD_SLOT) == listed).all() and lens.max(initial=0) <= len(lane):
        spans = _Cells(queries.row, first, queries.position, tables)
        if ((spans.slot[spans.find(queries.row, believed)] == indices) | ~listed).all():
            return _gathers(consumer, "query", queries, (first, queries.position), spans, shadow)
    return _irregular(consumer, queries, indices, believed, shadow)


def gathers_of_spans(
    consumer: str,
    per: Literal["query", "row"],
    queries: Queries,
    span: tuple[IntArray, IntArray],
    tables: Tables,
    shadow: ShadowGroup,
) -> Gathers:
    """The gathers of a consumer that reads positions first..last, both included, through the block table."""
    return _gathers(consumer, per, queries, span, _Cells(queries.row, *span, tables), shadow)


class _Cells:
    """The cells that runs of queries in batch order cover: one stretch of positions a batch row."""

    def __init__(self, row: IntArray, first: IntArray, last: IntArray, tables: Tables) -> None:
        starts = np.flatnonzero(row[1:] != row[:-1]) + 1 if len(row) > 1 else np.zeros(0, np.int64)
        starts = np.concatenate([[0], starts]) if len(row) else starts
        low, high = np.minimum.reduceat(first, starts), np.maximum.reduceat(last, starts)
        length = np.maximum(high - low + 1, 0)
        begin = np.cumsum(length) - length
        self._base = np.zeros(len(tables), np.int64)
        self._base[row[starts]] = begin - low
        self.row = np.repeat(row[starts], length)
        self.position = np.arange(len(self.row)) - self._base[self.row]
        self.slot = tables.slots(self.row, self.position)

    def find(self, row: IntArray, position: IntArray) -> IntArray:
        """Index of the cell at [query, lane] positions of the queries' rows; some cell for what lies outside."""
        return np.clip(self._base[row][:, None] + position, 0, len(self.row) - 1)


def _gathers(
    consumer: str,
    per: Literal["query", "row"],
    queries: Queries,
    span: tuple[IntArray, IntArray],
    cells: Any,
    shadow: ShadowGroup,
) -> Gathers:
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


@dataclass(slots=True)
class _LooseCells:
    row: IntArray
    position: IntArray
    slot: IntArray


def _irregular(consumer: str, queries: Queries, indices: IntArray, believed: IntArray, shadow: ShadowGroup) -> Gathers:
    """Lists with holes, stale entries or foreign slots: every stretch of entries is a run of its own."""
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
    query, lane = np.nonzero(there)
    listed = np.stack([queries.row[query], believed[query, lane], indices[query, lane]], axis=1)
    cells = _LooseCells(*np.unique(listed.astype(np.int64), axis=0).T)
    return _gathers(consumer, "query", read, (first[order], last[order]), cells, shadow)
