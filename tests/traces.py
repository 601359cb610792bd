# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Correct traces laid out by hand, for tests to break one thing in.

All sizes, hits, block tables and windows' lower bounds are literals worked out in the comments; ``lay`` only spells
them out as slots, runs and cells, with plain loops over a dictionary of slots. It calls nothing of ``invariants`` but
the trace's own classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from invariants.trace import Admission, Final, Gathers, Geometry, Group, Step, Trace, TracedRequest, Writes

W, BLOCK, SWA_BLOCK = 4, 4, 2
CACHEABLE, WINDOW = 0, 1


@dataclass
class Row:
    """A batch row. ``floor`` is the lower bound of its windows; ``cacheable`` and ``window`` are its block tables."""

    admission: int
    computed: int
    scheduled: int
    prefill: bool
    floor: int
    cacheable: list[int]
    window: list[int]


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def geometry(**changes: object) -> Geometry:
    sizes = {
        "window": W,
        "block_size": BLOCK,
        "swa_block_size": SWA_BLOCK,
        "num_blocks": 32,
        "max_num_batched_tokens": 8,
        "max_num_seqs": 4,
    }
    return Geometry(**{**sizes, **changes})


def groups(replay: bool = True) -> list[Group]:
    return [Group("cacheable", BLOCK, True, 0), Group("window", SWA_BLOCK, not replay, W if replay else 0)]


def lay(trace: Trace, steps: list[list[Row]]) -> Trace:
    """Add the steps to the trace: slots, runs and cells follow from their rows."""
    shadow: dict[int, tuple[int, int]] = {}
    allocated: set[tuple[int, int, int]] = set()
    for index, rows in enumerate(steps):
        _loads(trace, index, shadow, allocated)
        step = Step(
            index=index,
            request=ints(*(trace.admissions[row.admission].request for row in rows)),
            admission=ints(*(row.admission for row in rows)),
            computed=ints(*(row.computed for row in rows)),
            scheduled=ints(*(row.scheduled for row in rows)),
            prefill=np.array([row.prefill for row in rows], bool),
            replay_start=ints(*(row.floor if row.prefill else 0 for row in rows)),
            tables=[[ints(*row.cacheable) for row in rows], [ints(*row.window) for row in rows]],
        )
        for row in rows:
            for entry, block in enumerate(row.window):
                if block and (row.admission, entry, block) not in allocated:
                    allocated.add((row.admission, entry, block))
                    for slot in range(block * SWA_BLOCK, (block + 1) * SWA_BLOCK):
                        if trace.replay_expected or entry * SWA_BLOCK >= trace.admissions[row.admission].hit:
                            shadow.pop(slot, None)
        step.writes = [_writes(group, rows, shadow) for group in (CACHEABLE, WINDOW)]
        step.gathers = [_gathers(rows, shadow, "query"), _gathers(rows, shadow, "row")]
        trace.steps.append(step)
    return trace


def _loads(trace: Trace, index: int, shadow: dict[int, tuple[int, int]], allocated: set[tuple[int, int, int]]) -> None:
    """The windows that loads have brought since the step before: every position below the hit that has a block."""
    for number, life in enumerate(trace.admissions):
        load = life.load
        there = load and (load.begun if not load.waits else -1 if load.over is None else load.over + 1)
        if not load or not load.carried or load.failed or there != index:
            continue
        for entry, block in enumerate(load.tables[WINDOW].tolist()):
            allocated.add((number, entry, block))
            for position in range(entry * SWA_BLOCK, min((entry + 1) * SWA_BLOCK, life.hit) if block else 0):
                shadow[block * SWA_BLOCK + position % SWA_BLOCK] = (number, position)


def _slot(row: Row, position: int) -> int:
    return row.window[position // SWA_BLOCK] * SWA_BLOCK + position % SWA_BLOCK


def _writes(group: int, rows: list[Row], shadow: dict[int, tuple[int, int]]) -> Writes:
    tokens = []
    for number, row in enumerate(rows):
        for position in range(row.computed, row.computed + row.scheduled):
            slot = row.cacheable[position // BLOCK] * BLOCK + position % BLOCK
            if group == WINDOW:
                slot = _slot(row, position)
                shadow[slot] = (row.admission, position)
            elif row.floor and row.floor <= position < row.floor + W:
                slot = -1
            tokens.append((number, position, slot))
    number, position, slot = zip(*tokens, strict=True) if tokens else ((), (), ())
    return Writes(group, ints(*number), ints(*position), np.array(slot, np.int64))


def _gathers(rows: list[Row], shadow: dict[int, tuple[int, int]], per: str) -> Gathers:
    runs, cells = [], []
    for number, row in enumerate(rows):
        queries = list(range(row.computed, row.computed + row.scheduled))
        if per == "query":
            runs += [(number, query, max(row.floor, query - W + 1, 0), query) for query in queries]
        elif row.prefill and len(queries) > 1:
            runs.append((number, queries[0], max(row.floor, queries[0] - W + 1, 0), queries[-1]))
        for position in sorted({p for n, _, first, last in runs if n == number for p in range(first, last + 1)}):
            slot = _slot(row, position)
            cells.append((number, position, slot, *shadow.get(slot, (-1, -1))))
    run = [ints(*column) for column in zip(*runs, strict=True)] or [ints()] * 4
    cell = [ints(*column) for column in zip(*cells, strict=True)] or [ints()] * 5
    cell[2] = cell[2].astype(np.int64)
    return Gathers("paged-index" if per == "query" else "gather-length", per, *run, *cell)


def request(name: str, arrive: int, prompt: range | list[int], output: list[int]) -> TracedRequest:
    return TracedRequest(name, arrive, ints(*prompt), len(output), output, "length")


def trace_of(requests: list[TracedRequest], admissions: list[Admission], replay: bool = True) -> Trace:
    return Trace(
        engine="hand",
        geometry=geometry(replay=replay),
        requests=requests,
        groups=groups(replay),
        replay_expected=replay,
        kernels="none",
        admissions=admissions,
        final=Final(free_blocks=31, total_blocks=31, referenced=ints()),
    )


def prime_then_hit() -> Trace:
    """A prime of 10 tokens; while it decodes, a query of 13 tokens that shares 9 of them hits 8 and replays 4..7.

    Cached when the query comes: blocks 1 and 2, tokens 0..7 (8 and 9 are no full block). H = 8 > W = 4, so
    replay_start = 4 and 9 of its 13 tokens are left. Its window table starts with (8-4+1)//2 = 2 null blocks.
    A budget of 8 cuts the prime to 8 + 2 and, beside a decode, the query to 7 + 2.
    """
    trace = trace_of(
        [
            request("prime", 0, range(100, 110), [200, 201, 202, 203]),
            request("query", 2, [*range(100, 109), 300, 301, 302, 303], [400, 401]),
        ],
        [
            Admission(0, request=0, tokens=10, hit=0, replay_start=0, computed=0, scheduled=8, resumed=False),
            Admission(2, request=1, tokens=13, hit=8, replay_start=4, computed=4, scheduled=7, resumed=False),
        ],
    )
    lay(
        trace,
        [
            [Row(0, 0, 8, True, 0, [1, 2], [3, 4, 5, 6])],
            # Computed 8: window blocks below 8-4+1 = 5 go, that is 2 of them.
            [Row(0, 8, 2, True, 0, [1, 2, 7], [0, 0, 5, 6, 8])],
            [
                # Computed 10: below 7, 3 blocks.
                Row(0, 10, 1, False, 0, [1, 2, 7], [0, 0, 0, 6, 8, 9]),
                Row(1, 4, 7, True, 4, [1, 2, 10], [0, 0, 11, 12, 13, 14]),
            ],
            [
                Row(0, 11, 1, False, 0, [1, 2, 7], [0, 0, 0, 0, 8, 9]),
                # Computed 11: below 8, 4 blocks. Block 3, freed long ago, holds position 12.
                Row(1, 11, 2, True, 4, [1, 2, 10, 15], [0, 0, 0, 0, 13, 14, 3]),
            ],
            [
                Row(0, 12, 1, False, 0, [1, 2, 7, 16], [0, 0, 0, 0, 8, 9, 4]),
                Row(1, 13, 1, False, 4, [1, 2, 10, 15], [0, 0, 0, 0, 0, 14, 3]),
            ],
        ],
    )
    trace.steps[4].finished = [0, 1]
    trace.metrics = {"prefix_cache_queries": 23, "prefix_cache_hits": 8, "preempted_hits": 0}
    return trace


def preempted_then_hit() -> Trace:
    """One request, preempted after its first output and resumed with what it had cached itself.

    13 tokens: chunks of 8 and 5, then token 13 is sampled. Preempted before step 2; 14 tokens are known, blocks 1, 2
    and 5 (tokens 0..11) are cached: H = 12, replay_start = 8, 6 tokens left. Null window blocks: (12-4+1)//2 = 4.
    """
    trace = trace_of(
        [request("lone", 0, range(100, 113), [200, 201])],
        [
            Admission(0, request=0, tokens=13, hit=0, replay_start=0, computed=0, scheduled=8, resumed=False),
            Admission(2, request=0, tokens=14, hit=12, replay_start=8, computed=8, scheduled=6, resumed=True),
        ],
    )
    lay(
        trace,
        [
            [Row(0, 0, 8, True, 0, [1, 2], [3, 4, 6, 7])],
            [Row(0, 8, 5, True, 0, [1, 2, 5, 8], [0, 0, 6, 7, 9, 10, 11])],
            [Row(1, 8, 6, True, 8, [1, 2, 5, 12], [0, 0, 0, 0, 13, 14, 15])],
        ],
    )
    trace.steps[2].preempted = [0]
    trace.steps[2].events = ["preempt"]
    trace.steps[2].finished = [0]
    trace.metrics = {"prefix_cache_queries": 13, "prefix_cache_hits": 0, "preempted_hits": 12}
    return trace


def replay_off() -> Trace:
    """Replay off: the window group is cached too, so a hit of 8 adopts window blocks 5 and 6 and recomputes nothing.

    The window of the next token, 8, is 5..8: entries 2 and 3 of the prime's window table, tokens 4..7.
    """
    trace = trace_of(
        [
            request("prime", 0, range(100, 109), [200]),
            request("query", 2, [*range(100, 108), 300, 301], [400]),
        ],
        [
            Admission(0, request=0, tokens=9, hit=0, replay_start=0, computed=0, scheduled=8, resumed=False),
            Admission(2, request=1, tokens=10, hit=8, replay_start=0, computed=8, scheduled=2, resumed=False),
        ],
        replay=False,
    )
    lay(
        trace,
        [
            [Row(0, 0, 8, True, 0, [1, 2], [3, 4, 5, 6])],
            [Row(0, 8, 1, True, 0, [1, 2, 9], [0, 0, 5, 6, 10])],
            [Row(1, 8, 2, True, 0, [1, 2, 7], [0, 0, 5, 6, 8])],
        ],
    )
    trace.steps[1].finished = [0]
    trace.steps[2].finished = [1]
    trace.metrics = {"prefix_cache_queries": 19, "prefix_cache_hits": 8, "preempted_hits": 0}
    return trace


def hit_in_the_same_step() -> Trace:
    """Two requests with 9 common tokens arrive together: the second hits the 8 that the first has scheduled already."""
    trace = trace_of(
        [
            request("prime", 0, range(100, 109), [200]),
            request("query", 0, [*range(100, 109), 300], [400]),
        ],
        [
            Admission(0, request=0, tokens=9, hit=0, replay_start=0, computed=0, scheduled=9, resumed=False),
            Admission(0, request=1, tokens=10, hit=8, replay_start=4, computed=4, scheduled=6, resumed=False),
        ],
    )
    trace.geometry = geometry(max_num_batched_tokens=16)
    lay(
        trace,
        [
            [
                Row(1, 4, 6, True, 4, [1, 2, 8], [0, 0, 9, 10, 11]),
                Row(0, 0, 9, True, 0, [1, 2, 3], [4, 5, 6, 7, 12]),
            ]
        ],
    )
    trace.steps[0].finished = [0, 1]
    trace.metrics = {"prefix_cache_queries": 19, "prefix_cache_hits": 8, "preempted_hits": 0}
    return trace


def two_window_groups() -> Trace:
    """``hit_in_the_same_step`` with a second window group, whose blocks are 16 higher than the first one's."""
    trace = hit_in_the_same_step()
    trace.groups.append(replace(trace.groups[WINDOW]))
    for step in trace.steps:
        step.tables.append([np.where(table > 0, table + 16, table) for table in step.tables[WINDOW]])
        own = step.writes[WINDOW]
        step.writes.append(Writes(2, own.row.copy(), own.position.copy(), own.slot + 16 * SWA_BLOCK))
        for gathers in list(step.gathers):
            more = replace(gathers, group=2, cell_slot=gathers.cell_slot + 16 * SWA_BLOCK)
            for name in ("row", "position", "first", "last", "cell_row", "cell_position", "cell_writer"):
                setattr(more, name, getattr(gathers, name).copy())
            more.cell_written = gathers.cell_written.copy()
            step.gathers.append(more)
    return trace


GOOD = {
    make.__name__: make
    for make in (prime_then_hit, preempted_then_hit, replay_off, hit_in_the_same_step, two_window_groups)
}
