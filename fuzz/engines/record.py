# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The step recorder: turns one scheduler output, and what the worker made of it, into a step of the trace.

Relied upon: block tables are read from the KV-cache manager right after scheduling, before the output is processed, so
they are the ones that the step runs with. Writes reach the shadow cache before gathers are read, as in a layer.

A step that is recorded is executed: all that it writes and reads comes before the writes of the next one, though its
output is not processed yet (``device.py``). So a block may change hands while the step that reads it is in flight, as
long as nobody but a later step writes it, and that is all that vLLM promises without a KV connector. What cannot be
right is a block that is taken from a request by a count of tokens of which some are rejected: then the next step reads
below what the scheduler took for the window's first position, in a block that is null by then, or somebody else's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from msgspec import UNSET

from fuzz.engines.drive import Scheduled
from fuzz.engines.loads import Loads, Log
from fuzz.engines.shadow import (
    Cells,
    Queries,
    ShadowGroup,
    Tables,
    gathers,
    gathers_from_indices,
    join,
    slot_map,
    stretch,
    stretches,
)
from fuzz.probe.batch import Batch, Padding
from invariants.trace import (
    DECODER_FIRST,
    DECODER_REST,
    NOBODY,
    PAD_SLOT,
    Admission,
    Gathers,
    IntArray,
    Step,
    Trace,
    Turn,
    Writes,
)


class Batches(Protocol):
    """Who knows what the worker made of a scheduler output."""

    def step(self, scheduled: Scheduled) -> Batch | None:
        """The batch of a step; None if it schedules nothing."""
        ...


@dataclass(slots=True)
class _Rows:
    """What stays the same while the same lives are in the batch, in the same order."""

    names: list[str]
    request: IntArray
    """int32, index into ``Trace.requests``"""
    admission: IntArray
    """int32, index into ``Trace.admissions``"""
    known: IntArray
    """int32, tokens known at admission"""
    start: IntArray
    """int32, replay_start"""


class StepRecorder:
    """Follows one case. ``worker`` None: no kernel runs, see ``Trace.kernels``."""

    def __init__(self, trace: Trace, scheduler: Any, worker: Batches | None) -> None:
        self._trace = trace
        self._scheduler = scheduler
        self._worker = worker
        blocks = trace.geometry.num_blocks
        self._shadows = [ShadowGroup(blocks, group.block_size) for group in trace.groups]
        self._windows = [i for i, group in enumerate(trace.groups) if group.kind == "window"]
        self._request = {request.id: index for index, request in enumerate(trace.requests)}
        self._admission: dict[str, int] = {}
        self._seen_tables: dict[tuple[str, int], tuple[list[Any], IntArray]] = {}
        self._slot_maps: dict[tuple[str, int], tuple[IntArray, IntArray]] = {}
        self._rows = self._rows_of([])
        self._changed = False
        """Whether a block table of the step differs from what the shadow cache knows."""
        self._log: Log = []
        geometry = trace.geometry
        self._flies = geometry.async_scheduling is not UNSET or geometry.drafts is not UNSET
        """Whether scheduling is ahead of what is known: steps in flight, or drafts."""
        self._watch_lookups(scheduler.kv_cache_manager)
        has_connector = getattr(scheduler, "connector", None) is not None
        self._loads = Loads(trace, scheduler, self._shadows, self._log) if has_connector else None

    def _watch_lookups(self, manager: Any) -> None:
        """Note each adopted hit where vLLM counts it: from what is scheduled it could only be inferred."""
        count = manager.record_prefix_cache_stats

        def record(request: Any, num_hits: int) -> None:
            self._log.append(("look up", request.request_id, num_hits))
            count(request, num_hits)

        manager.record_prefix_cache_stats = record

    def record(self, scheduled: Scheduled) -> Step:
        """The step as it stands between scheduling and its output."""
        output = scheduled.output
        first_new = len(self._trace.admissions)
        if self._loads and self._trace.steps:
            self._loads.end(self._trace.steps[-1].index)
        queue = self._admit(scheduled)
        admitted = first_new < len(self._trace.admissions) or bool(queue)
        self._changed = admitted or bool(output.kv_cache_block_copies)
        batch = self._worker.step(scheduled) if self._worker else None
        names = batch.request_ids if batch else list(output.num_scheduled_tokens)
        if admitted or names != self._rows.names:
            self._rows = self._rows_of(names)
        tokens = np.array([output.num_scheduled_tokens[name] for name in names], np.int32)
        # The scheduler has already counted this step's tokens, and not yet taken back what a step in flight rejects.
        ahead = scheduled.ahead
        counted = np.array(
            [self._scheduler.requests[name].num_computed_tokens - ahead.get(name, 0) for name in names], np.int32
        )
        step = Step(
            index=scheduled.index,
            request=self._rows.request,
            admission=self._rows.admission,
            computed=counted - tokens,
            scheduled=tokens,
            prefill=np.zeros(len(names), bool),
            replay_start=np.zeros(len(names), np.int32),
            tables=self._tables(names),
            events=scheduled.events,
            # The driver adds those that end with this step's output.
            finished=scheduled.finished,
            preempted=sorted(self._request[name] for name in output.preempted_req_ids or ()),
            queue=queue,
        )
        samples = [scheduled.samples[name] for name in names] if self._flies else []
        if self._flies:
            step.processed, step.delivered = scheduled.processed, scheduled.delivered
            step.drafts = np.array([sample.drafts for sample in samples], np.int32)
            step.accepted = np.array([sample.accepted for sample in samples], np.int32)
        if self._changed:
            self._follow_blocks(step, output, first_new)
        if batch:
            self._from_worker(step, batch)
        elif names:
            self._from_contract(step, self._rows)
        rejected = np.array([sample.rejected for sample in samples], np.int32)
        if rejected.any():
            self._reject(step, step.computed + step.scheduled - rejected)
        return step

    def _reject(self, step: Step, end: IntArray) -> None:
        """After all is read: KV from ``end`` [rows] on is nobody's, so who reads it before it is written is seen."""
        for writes in step.writes[: len(self._shadows)]:
            void = (writes.position >= end[writes.row]) & (writes.slot >= 0)
            nobody = np.full(np.count_nonzero(void), NOBODY, np.int32)
            self._shadows[writes.group].write(nobody, nobody, writes.slot[void])

    def _rows_of(self, names: list[str]) -> _Rows:
        numbers = [self._admission[name] for name in names]
        lives = [self._trace.admissions[number] for number in numbers]
        return _Rows(
            names,
            np.array([life.request for life in lives], np.int32),
            np.array(numbers, np.int32),
            np.array([life.tokens for life in lives], np.int32),
            np.array([life.replay_start for life in lives], np.int32),
        )

    def _admit(self, scheduled: Scheduled) -> list[tuple[Turn, int]]:
        """The lives that begin in this step, in the order in which the scheduler looked them up, and those whose load
        is there. Returns ``Step.queue``."""
        output = scheduled.output
        new = {data.req_id: data for data in output.scheduled_new_reqs}
        begun = output.kv_connector_metadata.begun if self._loads else {}
        for turn, name, hit in self._log:
            if turn != "look up" or (name not in new and name not in begun):
                continue
            request = self._scheduler.requests[name]
            number = self._admission[name] = len(self._trace.admissions)
            life = Admission(-1, self._request[name], request.num_tokens, hit, 0, 0, 0, request.num_preemptions > 0)
            self._trace.admissions.append(life)
            if self._loads and name in begun:
                self._loads.begin(number, name, begun[name], self._tables_of(name), scheduled.index)
        for name, data in new.items():
            life = self._trace.admissions[self._admission[name]]
            life.step = scheduled.index
            life.replay_start, life.computed = data.replay_start, data.num_computed_tokens
            life.scheduled = output.num_scheduled_tokens[name]
        queue: list[tuple[Turn, int]] = []
        if self._loads:
            first_chunks = [name for name in output.num_scheduled_tokens if name in new]
            queue = self._loads.queue(self._log, first_chunks, self._admission)
        self._log.clear()
        return queue

    def _tables(self, names: list[str]) -> list[list[IntArray]]:
        blocks = [self._scheduler.kv_cache_manager.get_blocks(name).blocks for name in names]
        return [
            [self._table(name, group, of_request[group]) for name, of_request in zip(names, blocks, strict=True)]
            for group in range(len(self._shadows))
        ]

    def _tables_of(self, name: str) -> list[IntArray]:
        """[group] block ids of one request."""
        blocks = self._scheduler.kv_cache_manager.get_blocks(name).blocks
        return [self._table(name, group, of_group) for group, of_group in enumerate(blocks)]

    def _table(self, name: str, group: int, blocks: Sequence[Any]) -> IntArray:
        """Block ids; the same array as before where no block changed, which is the case in most steps."""
        seen, table = self._seen_tables.get((name, group), ([], None))
        # Comparing lists of the same objects costs nothing; making the array would.
        if table is None or seen != blocks:
            table = np.array([block.block_id for block in blocks], np.int32)
            self._seen_tables[name, group] = (list(blocks), table)
            self._changed = True
        return table

    def _follow_blocks(self, step: Step, output: Any, first_new: int) -> None:
        for group, shadow in enumerate(self._shadows):
            adopts = self._trace.groups[group].prefix_cacheable
            for row, number in enumerate(step.admission.tolist()):
                table = step.tables[group][row]
                if number < first_new:
                    shadow.extend(number, table)
                else:
                    hit = self._trace.admissions[number].local if adopts else 0
                    shadow.admit(number, table, -(-hit // shadow.block_size))
            for number in range(first_new, len(self._trace.admissions)):
                life = self._trace.admissions[number]
                if life.step < 0 and life.load:
                    shadow.admit(number, life.load.tables[group], -(-life.local // shadow.block_size) if adopts else 0)
            for source, target in output.kv_cache_block_copies or ():
                shadow.copy_block(source, target)
        if self._loads:
            self._loads.allocated()

    def _write(self, step: Step, row: IntArray, position: IntArray, slots: Sequence[IntArray]) -> None:
        writer = step.admission[row]
        for group, slot in enumerate(slots):
            self._shadows[group].write(writer, position, slot)
            step.writes.append(Writes(group, row, position, slot))

    def _from_worker(self, step: Step, batch: Batch) -> None:
        step.prefill, step.replay_start = batch.prefill, batch.replay_start
        row = np.repeat(np.arange(len(step.request), dtype=np.int32), step.scheduled)
        self._write(step, row, batch.positions, batch.slots)
        self._padding(step, batch.padding)
        for group, part in zip(self._windows, (batch, *batch.others), strict=True):
            first = len(step.gathers)
            self._gathers(step, part, row, self._shadows[group])
            for found in step.gathers[first:]:
                found.group = self._named(group)

    def _named(self, group: int) -> int | None:
        """``Gathers.group`` of a window group."""
        return None if group == self._windows[0] else group

    def _gathers(self, step: Step, batch: Batch, row: IntArray, shadow: ShadowGroup) -> None:
        """What the consumers of one window group read. ``row``: int32 [tokens]."""
        tables = Tables(batch.window_table, shadow.block_size)
        queries = Queries(row, batch.positions)
        step.gathers.append(gathers_from_indices("paged-index", queries, *batch.indices, tables, shadow))
        kept = Queries(row[batch.kept], batch.positions[batch.kept])
        for consumer, indices in zip((DECODER_FIRST, DECODER_REST), batch.kept_indices, strict=False):
            step.gathers.append(gathers_from_indices(consumer, kept, *indices, tables, shadow))
        for read in batch.lists:
            served = slice(read.begin, read.begin + len(read.lens))
            some = Queries(row[served], batch.positions[served])
            found = gathers_from_indices(read.consumer, some, read.indices, read.lens, tables, shadow)
            found.serves, found.sampled = read.serves, True
            step.gathers.append(found)
        if len(batch.gather_lens):
            # The prefill rows come last; the others are empty stretches.
            low = batch.computed + batch.scheduled
            high = low - 1
            rows = np.arange(len(low) - len(batch.gather_lens), len(low), dtype=np.int32)
            low[rows] -= batch.gather_lens
            queries, span = Queries(rows, batch.computed[rows]), (low[rows], high[rows])
            step.gathers.append(gathers("gather-length", "row", queries, span, stretches(low, high, tables), shadow))

    def record_idle(self, padding: Padding) -> None:
        """What a dummy batch after the last step that was recorded writes and gathers."""
        step = self._trace.steps[-1]
        step.idled = True
        self._padding(step, padding)

    def _padding(self, step: Step, padding: Padding) -> None:
        """What rows of no request write and gather: nothing, and then the step does not mention them (CONTRACT 16)."""
        rows = len(step.request)
        for group, slots in enumerate(padding.slots):
            real = np.flatnonzero(slots != PAD_SLOT).astype(np.int32)
            if len(real):
                step.writes.append(Writes(group, rows + real, np.zeros_like(real), slots[real]))
        for group, listed in zip(self._windows, padding.indices, strict=True):
            reads = np.flatnonzero((listed.lens > 0) | (listed.slots != PAD_SLOT).any(1)).astype(np.int32)
            if len(reads):
                row, nobody = rows + reads, np.full(len(reads), NOBODY, np.int32)
                last, slot = listed.lens[reads] - 1, listed.slots[reads, 0].astype(np.int64)
                first = np.zeros_like(last)
                found = Gathers("paged-index", "query", row, last, first, last, row, first, slot, nobody, nobody)
                found.group = self._named(group)
                step.gathers.append(found)

    def _from_contract(self, step: Step, lives: _Rows) -> None:
        """No kernel runs: what CONTRACT 14 and 17 say is written and read, through the manager's block tables."""
        window = self._trace.geometry.window
        step.prefill = step.computed < lives.known
        step.replay_start = lives.start * step.prefill
        low, end = np.maximum(lives.start, step.computed - (window - 1)), step.computed + step.scheduled
        lows, begins, ends = low.tolist(), step.computed.tolist(), end.tolist()
        rows = np.arange(len(lives.names), dtype=np.int32)
        row = np.repeat(rows, step.scheduled)
        position = _ranges(begins, ends)
        start = lives.start[row]
        maps = [self._maps(group, lives.names, tables) for group, tables in enumerate(step.tables)]
        slots = [stretch(group, begins, ends) for group in maps]
        if step.replay_start.any():
            replayed = (start > 0) & (position < start + window)
            for group, spec in enumerate(self._trace.groups):
                if spec.prefix_cacheable:
                    slots[group] = np.where(replayed, PAD_SLOT, slots[group])
        self._write(step, row, position, slots)
        span = (np.maximum(start, position - (window - 1)), position)
        of_row, at = np.repeat(rows, end - low), _ranges(lows, ends)
        for group in self._windows:
            cells, shadow = Cells(of_row, at, stretch(maps[group], lows, ends)), self._shadows[group]
            found = gathers("block-table", "query", Queries(row, position), span, cells, shadow)
            found.group = self._named(group)
            step.gathers.append(found)

    def _maps(self, group: int, names: list[str], tables: list[IntArray]) -> list[IntArray]:
        """The slot maps of a group's tables, made anew only for tables that changed."""
        maps = []
        for name, table in zip(names, tables, strict=True):
            known, slots = self._slot_maps.get((name, group), (None, table))
            if known is not table:
                slots = slot_map(table, self._shadows[group].block_size)
                self._slot_maps[name, group] = (table, slots)
            maps.append(slots)
        return maps


def _ranges(begins: list[int], ends: list[int]) -> IntArray:
    return join([np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)])
