# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""A trace as a few long arrays, so that an invariant is a handful of NumPy calls a trace and not a loop over steps.

Rows of all steps are numbered through: row r of step k is ``row_offset[k] + r``. Whatever a trace says may be wrong, so
an index that points nowhere becomes -1 here, and the invariant whose business it is reports it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from invariants import reference
from invariants.flight import Flight
from invariants.lineage import lineage
from invariants.trace import DECODER_FIRST, DECODER_REST, BoolArray, Gathers, Group, IntArray, Trace, Violation

EXAMPLES = 5
"""Broken entries that one rule reports of a trace; the last one's message says how many more there are."""

_ROW = 1 << 32
"""A (row, position) pair as one number: row * _ROW + position."""

_NO_BLOCKS = np.zeros(0, np.int32)
"""The table of a row where the engine has no tables."""


@dataclass(slots=True)
class Reads:
    """What one consumer gathers over the whole trace. Fields as in ``Gathers``, rows numbered through."""

    consumer: str
    per: Literal["query", "row"]
    row: IntArray
    position: IntArray
    first: IntArray
    last: IntArray
    cell_row: IntArray
    cell_position: IntArray
    cell_slot: IntArray
    cell_writer: IntArray
    cell_written: IntArray
    floor: IntArray
    """[rows of the view] nothing below may be read by this consumer."""
    queries: IntArray
    """Keys of the queries that it serves, ascending."""
    serves: Literal["all", "prefills", "decodes"]
    asked: BoolArray
    """[rows] of the trace: whether the consumer was asked in the row's step."""
    group: int | None
    """Index of the window group that it reads; None: there is none."""


@dataclass(slots=True)
class Stores:
    """KV writes of the whole trace into one group. Fields as in ``Writes``, rows numbered through."""

    row: IntArray
    position: IntArray
    slot: IntArray


class View:
    """The arrays. ``[rows]`` is the number of rows of all steps, ``[queries]`` that of all scheduled tokens."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._joined: dict[tuple[int, ...], IntArray] = {}
        steps = trace.steps
        self.replay = trace.geometry.window if trace.replay_expected else 0
        """Tokens that a hit replays: W where replay is on, else 0."""
        self.rows_of_step = np.array([len(step.request) for step in steps], np.int64)
        self.row_offset = np.concatenate([[0], np.cumsum(self.rows_of_step)])
        self.step = np.repeat(np.arange(len(steps)), self.rows_of_step)
        """[rows] index into ``Trace.steps``."""
        self.request = _join([step.request for step in steps])
        self.admission = _index(_join([step.admission for step in steps]), len(trace.admissions))
        order = np.argsort(self.admission, kind="stable")
        same = self.admission[order[1:]] == self.admission[order[:-1]]
        self.before = np.full(len(order), -1)
        """[rows] the row before of the same life, or -1."""
        self.before[order[1:][same]] = order[:-1][same]
        self.computed = _join([step.computed for step in steps])
        self.scheduled = _join([step.scheduled for step in steps])
        self.prefill: BoolArray = _join([step.prefill for step in steps]).astype(np.bool_)
        self.claimed = _join([step.replay_start for step in steps])
        """[rows] replay_start as the worker has it."""
        lives = trace.admissions
        self.hit: IntArray = np.array([*(life.hit for life in lives), 0], np.int64)[self.admission]
        """[rows] hit of the row's life."""
        self.local: IntArray = np.array([*(life.local for life in lives), 0], np.int64)[self.admission]
        """[rows] what was in the prefix cache of it."""
        floors = [reference.replay_start(life.hit, 0 if life.carried else self.replay) for life in lives]
        self.floor: IntArray = np.array([*floors, 0], np.int64)[self.admission]
        """[rows] replay_start as the row's hit has it: nothing below may be read."""
        queries = np.maximum(self.scheduled, 0)
        self.query_row = np.repeat(np.arange(len(queries)), queries)
        """[queries] in batch order"""
        starts = np.cumsum(queries) - queries - self.computed
        self.query_position: IntArray = np.arange(len(self.query_row)) - starts[self.query_row]
        self.queries = key(self.query_row, self.query_position)
        """[queries] ascending"""
        self.window_groups = [i for i, group in enumerate(trace.groups) if group.kind == "window"]
        self.tables = [
            Table([step.tables[group] if step.tables else [_NO_BLOCKS] * len(step.request) for step in steps], spec)
            for group, spec in enumerate(trace.groups)
        ]
        self.reads = self._reads()

    def _reads(self) -> list[Reads]:
        parts: dict[Any, list[tuple[int, Gathers]]] = {}
        if self.decoder_replay:  # owed, even if it never comes
            parts = {(DECODER_FIRST, "query", "all", None): [], (DECODER_REST, "query", "all", None): []}
        for index, step in enumerate(self.trace.steps):
            for gathers in step.gathers:
                kind = gathers.consumer, gathers.per, gathers.serves, gathers.group
                parts.setdefault(kind, []).append((index, gathers))
        first = next(iter(self.window_groups), None)
        return [
            Reads(
                consumer if group is None else f"{consumer} of group {group}",
                per,
                self._rows([(step, g.row) for step, g in part]),
                self._join([g.position for _, g in part]),
                self._join([g.first for _, g in part]),
                self._join([g.last for _, g in part]),
                self._rows([(step, g.cell_row) for step, g in part]),
                self._join([g.cell_position for _, g in part]),
                self._join([g.cell_slot for _, g in part]),
                self._join([g.cell_writer for _, g in part]),
                self._join([g.cell_written for _, g in part]),
                self._decoder_floor if consumer == DECODER_REST else self.floor,
                self._kept_queries if consumer in (DECODER_FIRST, DECODER_REST) else self.queries,
                serves,
                self._asked(part),
                first if group is None else group if group in self.window_groups else None,
            )
            for (consumer, per, serves, group), part in parts.items()
        ]

    def _asked(self, part: list[tuple[int, Gathers]]) -> BoolArray:
        if not part or not all(gathers.sampled for _, gathers in part):
            return np.ones(len(self.step), np.bool_)
        return np.isin(self.step, [step for step, _ in part])

    @cached_property
    def lineage(self) -> list[IntArray]:
        """See ``invariants.lineage``."""
        return lineage(self.trace)

    @cached_property
    def flight(self) -> Flight:
        """See ``invariants.flight``."""
        return Flight(self)

    @property
    def may_drift(self) -> bool:
        """Whether a hit may change outputs: window keys come from hidden states, and are rebuilt by replay."""
        return self.trace.probe is not None and self.trace.probe.kind != "exact" and self.replay > 0

    @property
    def decoder_replay(self) -> bool:
        """Whether there are layers that run on the last rows of a chunk only."""
        return self.trace.probe is not None and self.trace.probe.kind == "decoder" and self.replay > 0

    @cached_property
    def trimmed(self) -> BoolArray:
        """[rows] whether those layers run on the row's last W tokens only."""
        if not self.decoder_replay:
            return np.zeros(len(self.computed), np.bool_)
        known = np.array([*(life.tokens for life in self.trace.admissions), 0], np.int64)[self.admission]
        whole = np.array([*(not request.reads_cache for request in self.trace.requests), True], np.bool_)
        asks = whole[_index(self.request, len(self.trace.requests))]
        trimmed: BoolArray = reference.trimmed_rows(self.computed, self.scheduled, known, asks, self.replay)
        return trimmed

    @cached_property
    def _decoder_floor(self) -> IntArray:
        floor: IntArray = reference.decoder_floor(self.floor, self.computed + self.scheduled, self.trimmed, self.replay)
        return floor

    @cached_property
    def _kept_queries(self) -> IntArray:
        """Keys of what the trimmed layers compute, in steps in which any row is trimmed; in others they run on all."""
        steps = np.zeros(len(self.rows_of_step), np.bool_)
        steps[self.step[self.trimmed]] = True
        row, end = self.query_row, (self.computed + self.scheduled)[self.query_row]
        kept = steps[self.step[row]] & (~self.trimmed[row] | (self.query_position >= end - self.replay))
        queries: IntArray = self.queries[kept]
        return queries

    def stores(self, group: int) -> Stores:
        """The writes into one group."""
        part = [(k, w) for k, step in enumerate(self.trace.steps) for w in step.writes if w.group == group]
        return Stores(
            self._rows([(step, w.row) for step, w in part]),
            self._join([w.position for _, w in part]),
            self._join([w.slot for _, w in part]),
        )

    def _rows(self, parts: Sequence[tuple[int, IntArray]]) -> IntArray:
        """Rows of single steps, numbered through; -1 where the step has no such row."""
        row: IntArray = self._join([rows for _, rows in parts])
        steps = [step for step, _ in parts]
        number = (-1, id(row), *steps)
        if number not in self._joined:
            step = np.repeat(np.array(steps, np.int64), [len(rows) for _, rows in parts])
            valid = (row >= 0) & (row < self.rows_of_step[step])
            self._joined[number] = np.where(valid, row + self.row_offset[step], -1)
        return self._joined[number]

    def _join(self, parts: Sequence[IntArray]) -> IntArray:
        """The arrays end to end. An engine uses the same array in several places, so each list is joined once."""
        number = tuple(map(id, parts))
        if number not in self._joined:
            self._joined[number] = _join(parts)
        return self._joined[number]

    def where(self, row: int) -> str:
        """The row for a message."""
        if row < 0:
            return "no row"
        request, step, number = self._name(row)
        return f"row {number} of step {step} ({request})"

    def violation(
        self, invariant: str, site: str, at: tuple[Any, Any], message: str, expected: object, seen: object
    ) -> Violation:
        """A violation at (row, position); row -1: none, position None: the row as a whole."""
        row, position = int(at[0]), None if at[1] is None else int(at[1])
        request, step, number = self._name(row) if row >= 0 else (None, None, None)
        return Violation(invariant, message, str(expected), str(seen), request, step, number, position, site)

    def _name(self, row: int) -> tuple[str, int, int]:
        """Request, step index and row within the step."""
        index, request = int(self.step[row]), int(self.request[row])
        requests = self.trace.requests
        name = requests[request].id if 0 <= request < len(requests) else f"number {request}"
        return name, self.trace.steps[index].index, row - int(self.row_offset[index])


class Table:
    """The block tables of one group, those of all rows end to end."""

    def __init__(self, steps: Sequence[list[IntArray]], group: Group) -> None:
        rows = [row for tables in steps for row in tables]
        self.block_size = group.block_size
        self.blocks: IntArray = _join(rows).astype(np.int64)
        """[entries]"""
        self.length = np.array([len(row) for row in rows], np.int64)
        """[rows]"""
        self.offset: IntArray = np.cumsum(self.length) - self.length
        """[rows] entry at which the row's table begins."""
        self.row = np.repeat(np.arange(len(rows)), self.length)
        """[entries]"""
        self.column: IntArray = np.arange(len(self.row)) - self.offset[self.row]
        """[entries]"""

    def block(self, row: IntArray, position: IntArray) -> IntArray:
        """[n] block that the manager has for each position of each row; -1 past the table's end."""
        entry = position // self.block_size
        if not len(self.blocks):
            return np.full(len(row), -1)
        valid = (row >= 0) & (entry >= 0) & (entry < self.length[row])
        index = self.offset[row] + entry
        blocks: IntArray = self.blocks[np.where(valid, index, 0)]
        return blocks if valid.all() else np.where(valid, blocks, -1)


def key(row: IntArray, position: IntArray) -> IntArray:
    """[n] one number for each (row, position) pair, in their order."""
    return row * _ROW + position


def key_row(keys: IntArray) -> IntArray:
    """[n] the row of each key."""
    return keys // _ROW


def unkey(number: int) -> tuple[int, int]:
    """(row, position) of a key with a position that is not negative."""
    return divmod(int(number), _ROW)


def compare(keys: IntArray, expected: IntArray) -> tuple[IntArray, IntArray]:
    """Expected keys that are missing, and indices of keys too many (unexpected, or there before).

    ``expected`` is ascending and without repeats; ``keys`` may be in any order.
    """
    nothing = np.zeros(0, np.int64)
    if np.array_equal(keys, expected):
        return nothing, nothing
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    surplus = ~np.isin(ordered, expected)
    surplus[1:] |= ordered[1:] == ordered[:-1]
    return expected[~np.isin(expected, ordered)], order[surplus]


def examples(broken: BoolArray | IntArray) -> Iterator[tuple[int, str]]:
    """The first few entries of a mask, or of a list of numbers, each with the tail of its message."""
    if broken.dtype == np.bool_ and not broken.any():
        return  # nearly always
    found = np.flatnonzero(broken) if broken.dtype == np.bool_ else broken
    shown = found[:EXAMPLES].tolist()
    for index in shown[:-1]:
        yield index, ""
    for index in shown[-1:]:
        more = len(found) - EXAMPLES
        yield index, f" ({more} more like this)" if more > 0 else ""


def _join(parts: Sequence[Any]) -> Any:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _index(values: IntArray, length: int) -> IntArray:
    """``values`` where they are an index into something of that length, else -1."""
    valid: IntArray = np.where((values >= 0) & (values < length), values, -1)
    return valid
