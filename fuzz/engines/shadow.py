# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The shadow KV cache: for every slot of a group, who wrote it last and for which position. No byte of KV is kept.

Relied upon: a block that is handed out holds nothing its new owner may read (its cells are wiped when it first appears
in a table outside the adopted hit), and a life of a request is one admission, so that KV left by an earlier life of the
same request counts as somebody else's.
"""

from __future__ import annotations

import numpy as np

from invariants.trace import NOBODY, NULL_BLOCK, PAD_SLOT, Gathers, IntArray


def slots_of(table: IntArray, positions: IntArray, block_size: int) -> IntArray:
    """int64 like positions: the slots that a block table gives them; PAD_SLOT beyond its end."""
    columns = positions // block_size
    inside = columns < len(table)
    if not len(table):
        return np.full(positions.shape, PAD_SLOT, np.int64)
    blocks = table[np.where(inside, columns, 0)].astype(np.int64)
    return np.where(inside, blocks * block_size + positions % block_size, PAD_SLOT)


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
        self._writer[slot[real]] = admission[real]
        self._position[slot[real]] = position[real]

    def copy_block(self, source: int, target: int) -> None:
        """Copy-on-write of a partly filled block."""
        size = self.block_size
        for cells in (self._writer, self._position):
            cells[target * size : (target + 1) * size] = cells[source * size : (source + 1) * size]

    def read(self, slot: IntArray) -> tuple[IntArray, IntArray]:
        """(writer, position) int32 like slot: what the slots hold. Slots outside the pool hold nothing."""
        real = (slot >= 0) & (slot < len(self._writer))
        safe = np.where(real, slot, 0)
        return np.where(real, self._writer[safe], NOBODY), np.where(real, self._position[safe], -1)


def gathers_from_indices(
    consumer: str,
    row: IntArray,
    position: IntArray,
    indices: IntArray,
    lens: IntArray,
    tables: list[IntArray],
    shadow: ShadowGroup,
) -> Gathers:
    """The gathers of an index list: int32 [queries, width] slots, of which the first ``lens`` count.

    Entry j of a query at position p with length n stands for position p - n + 1 + j, which is how every consumer of
    such a list means it. An entry beyond the length that is not -1 is read as well: its position lies past p.
    """
    width = indices.shape[1]
    lane = np.arange(width)
    believed = (position - lens + 1)[:, None] + lane
    runs_from_zero = bool((lens <= width).all()) and bool(((indices != PAD_SLOT) == (lane < lens[:, None])).all())
    if runs_from_zero:
        first, last = position - lens + 1, position
        plain = _regular_cells(row, first, last, tables, shadow.block_size)
        if _agrees(row, believed, indices, lens, plain, len(tables)):
            return _gathers(consumer, "query", row, position, first, last, *plain, shadow)
    return _irregular(consumer, row, position, indices, believed, shadow)


def gathers_of_spans(
    consumer: str,
    per: str,
    row: IntArray,
    position: IntArray,
    first: IntArray,
    last: IntArray,
    tables: list[IntArray],
    shadow: ShadowGroup,
) -> Gathers:
    """The gathers of a consumer that reads positions first..last through the block table."""
    cells = _regular_cells(row, first, last, tables, shadow.block_size)
    return _gathers(consumer, per, row, position, first, last, *cells, shadow)


def _gathers(
    consumer: str,
    per: str,
    row: IntArray,
    position: IntArray,
    first: IntArray,
    last: IntArray,
    cell_row: IntArray,
    cell_position: IntArray,
    cell_slot: IntArray,
    shadow: ShadowGroup,
) -> Gathers:
    writer, written = shadow.read(cell_slot)
    return Gathers(
        consumer=consumer,
        per="query" if per == "query" else "row",
        row=row.astype(np.int32),
        position=position.astype(np.int32),
        first=first.astype(np.int32),
        last=last.astype(np.int32),
        cell_row=cell_row.astype(np.int32),
        cell_position=cell_position.astype(np.int32),
        cell_slot=cell_slot.astype(np.int64),
        cell_writer=writer,
        cell_written=written,
    )


def _regular_cells(
    row: IntArray, first: IntArray, last: IntArray, tables: list[IntArray], block_size: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Rows, positions and slots that runs of queries in batch order cover: one stretch a row."""
    rows: list[IntArray] = []
    positions: list[IntArray] = []
    slots: list[IntArray] = []
    starts = np.flatnonzero(np.diff(row, prepend=-1))
    if not len(starts):
        empty = np.zeros(0, np.int64)
        return empty, empty, empty
    lows = np.minimum.reduceat(first, starts)
    highs = np.maximum.reduceat(last, starts)
    for index, low, high in zip(row[starts].tolist(), lows.tolist(), highs.tolist(), strict=True):
        stretch = np.arange(low, high + 1)
        rows.append(np.full(len(stretch), index))
        positions.append(stretch)
        slots.append(slots_of(tables[index], stretch, block_size))
    return np.concatenate(rows), np.concatenate(positions), np.concatenate(slots)


def _agrees(
    row: IntArray,
    believed: IntArray,
    indices: IntArray,
    lens: IntArray,
    plain: tuple[IntArray, IntArray, IntArray],
    num_rows: int,
) -> bool:
    """Whether every listed slot is the one that the row's block table gives for the position it stands for."""
    cell_row, cell_position, cell_slot = plain
    if not len(cell_row):
        return not lens.any()
    starts = np.flatnonzero(np.diff(cell_row, prepend=-1))
    # Where a row's stretch begins in the cells, less its first position: cell of position p is base + p.
    base = np.zeros(num_rows, np.int64)
    base[cell_row[starts]] = starts - cell_position[starts]
    cell = np.clip(base[row][:, None] + believed, 0, len(cell_slot) - 1)
    listed = np.arange(indices.shape[1]) < lens[:, None]
    return bool(((indices == cell_slot[cell]) | ~listed).all())


def _irregular(
    consumer: str, row: IntArray, position: IntArray, indices: IntArray, believed: IntArray, shadow: ShadowGroup
) -> Gathers:
    """Lists with holes, stale entries or foreign slots: every stretch of entries is a run of its own."""
    there = indices != PAD_SLOT
    edge = np.diff(np.pad(there, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    query, begin = np.nonzero(edge == 1)
    _, end = np.nonzero(edge == -1)
    empty = np.flatnonzero(~there.any(axis=1))
    queries = np.concatenate([query, empty])
    first = np.concatenate([believed[query, begin], position[empty] + 1])
    last = np.concatenate([believed[query, end - 1], position[empty]])
    order = np.argsort(queries, kind="stable")
    queries, first, last = queries[order], first[order], last[order]
    at, lane = np.nonzero(there)
    cells = np.unique(np.stack([row[at], believed[at, lane], indices[at, lane]], axis=1), axis=0)
    return _gathers(
        consumer, "query", row[queries], position[queries], first, last, cells[:, 0], cells[:, 1], cells[:, 2], shadow
    )
