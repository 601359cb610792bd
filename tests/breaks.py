# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""What tests break in ``prime_then_hit``, one thing at a time, and who has to notice where.

Steps 2 to 4 of that trace have two rows: the decoding prime, and the query that replays 4..7. Step 2 computes position
10 of row 0 (queries and tokens: index 0), then 4..10 of row 1 (index 1 to 7). Its paged-index cells are 7..10 of row 0
(index 0 to 3), then 4..10 of row 1 (index 4 to 10).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import traces
from plain_model import with_model

from invariants.trace import Fault, Gathers, Outputs, Trace

PAGED, LENGTH = 0, 1  # Step.gathers
CACHEABLE, WINDOW = 0, 1  # Step.writes, Step.tables, Trace.groups

Break = Callable[[Trace], object]


def put(array: np.ndarray, index: int, value: int) -> None:
    assert array[index] != value
    array[index] = value


def set_all(thing: object, **values: object) -> None:
    for name, value in values.items():
        assert getattr(thing, name) != value
        setattr(thing, name, value)


def keep(record: object, prefix: str, index: list[int]) -> None:
    """Keep these entries, in this order, of all the record's arrays whose names begin so."""
    for field in fields(record):  # type: ignore[arg-type]
        value = getattr(record, field.name)
        if isinstance(value, np.ndarray) and field.name.startswith("cell_") == (prefix == "cell_"):
            setattr(record, field.name, value[index])


def gathers(trace: Trace, step: int = 2, consumer: int = PAGED):
    return trace.steps[step].gathers[consumer]


def writes(trace: Trace, group: int, step: int = 2):
    return trace.steps[step].writes[group]


def table(trace: Trace, group: int, row: int, step: int = 2) -> np.ndarray:
    return trace.steps[step].tables[group][row]


def ask(
    trace: Trace, consumer: str, serves: str = "all", queries: slice = slice(None), step: int = 2, **values: object
) -> Gathers:
    """One more consumer, asked in this step alone; it reads what paged-index reads for these queries."""
    paged = gathers(trace, step)
    rows = np.unique(paged.row[queries])
    more = replace(paged, consumer=consumer, serves=serves, sampled=True)
    keep(more, "", list(range(len(paged.row)))[queries])
    keep(more, "cell_", np.flatnonzero(np.isin(paged.cell_row, rows)).tolist())
    set_all(more, **values)
    trace.steps[step].gathers.append(more)
    return more


PREFILLS, DECODES = slice(1, None), slice(1)  # queries of step 2

GATHER_BREAKS: dict[str, tuple[str, str, Break]] = {
    "a query reads from below replay_start": (
        "gather-floor", "paged-index", lambda t: put(gathers(t).first, 1, 3),
    ),
    "a chunk reads from below replay_start": (
        "gather-floor", "gather-length", lambda t: put(gathers(t, consumer=LENGTH).first, 0, 3),
    ),
    "a cell lies below replay_start": (
        "gather-floor", "paged-index", lambda t: put(gathers(t).cell_position, 4, 3),
    ),
    "a query misses the start of its window": (
        "gather-window", "paged-index", lambda t: put(gathers(t).first, 4, 5),
    ),
    "a query misses itself": (
        "gather-window", "paged-index", lambda t: put(gathers(t).last, 4, 6),
    ),
    "a decode reads one more": (
        "gather-window", "paged-index", lambda t: put(gathers(t).first, 0, 6),
    ),
    "a query reads nothing": (
        "gather-window", "paged-index", lambda t: keep(gathers(t), "", [0, 1, 2, 3, 5, 6, 7]),
    ),
    "a query has two runs": (
        "gather-window", "paged-index", lambda t: keep(gathers(t), "", [0, 1, 2, 3, 3, 4, 5, 6, 7]),
    ),
    "a run for a query that is not scheduled": (
        "gather-window", "paged-index", lambda t: put(gathers(t).position, 7, 11),
    ),
    "a run for a row that is not there": (
        "gather-window", "paged-index", lambda t: put(gathers(t).row, 7, 2),
    ),
    "a consumer is silent for a step": (
        "gather-window", "paged-index", lambda t: t.steps[3].gathers.pop(PAGED),
    ),
    "no consumer reads for queries": (
        "gather-window", "consumers", lambda t: [step.gathers.pop(PAGED) for step in t.steps],
    ),
    "a chunk reads past its end": (
        "gather-window", "gather-length", lambda t: put(gathers(t, consumer=LENGTH).last, 0, 11),
    ),
    "a chunk reads nothing": (
        "gather-window", "gather-length", lambda t: keep(gathers(t, consumer=LENGTH), "", []),
    ),
    "another slot than the table's": (
        "gather-live", "paged-index", lambda t: put(gathers(t).cell_slot, 5, 2),
    ),
    "a position whose block is null": (
        "gather-live", "paged-index, the null block", lambda t: put(table(t, WINDOW, 1), 2, 0),
    ),
    "a position past the table": (
        "gather-live", "paged-index, no block",
        lambda t: t.steps[2].tables[WINDOW].__setitem__(1, table(t, WINDOW, 1)[:5]),
    ),
    "written by another life": (
        "gather-live", "paged-index, stale", lambda t: put(gathers(t).cell_writer, 4, 0),
    ),
    "written by nobody": (
        "gather-live", "paged-index, stale", lambda t: put(gathers(t).cell_writer, 4, -1),
    ),
    "written for another position": (
        "gather-live", "gather-length, stale", lambda t: put(gathers(t, consumer=LENGTH).cell_written, 0, 2),
    ),
    "a position without a cell": (
        "gather-live", "paged-index, cells", lambda t: keep(gathers(t), "cell_", [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]),
    ),
    "one more consumer misses a query": (
        "gather-window", "mixed-list", lambda t: keep(ask(t, "mixed-list"), "", [0, 1, 2, 3, 4, 5, 6]),
    ),
    "a consumer of prefills misses a query": (
        "gather-window", "combine", lambda t: keep(ask(t, "combine", "prefills", PREFILLS), "", [0, 1, 2, 3, 4, 5]),
    ),
    "a consumer of prefills misses a chunk": (
        "gather-window", "combine", lambda t: ask(t, "combine", "prefills", DECODES),
    ),
    "a consumer of decodes misses a query": (
        "gather-window", "fused", lambda t: keep(ask(t, "fused", "decodes", PREFILLS), "", [0, 1, 2, 3, 4, 5]),
    ),
    "a window starts elsewhere for one more consumer": (
        "gather-agree", "combine", lambda t: put(ask(t, "combine", "prefills", PREFILLS).first, 3, 5),
    ),
    "a window ends elsewhere for one more consumer": (
        "gather-agree", "fused", lambda t: put(ask(t, "fused", "decodes", DECODES).last, 0, 9),
    ),
    "a chunk is not what its queries are": (
        "gather-agree", "gather-length", lambda t: put(gathers(t, consumer=LENGTH).first, 0, 5),
    ),
    "a position with two cells": (
        "gather-live", "paged-index, cells", lambda t: keep(gathers(t), "cell_", [*range(11), 10]),
    ),
}  # fmt: skip


def share_a_slot(trace: Trace) -> None:
    """Both rows of step 2 have block 9 for position 10, and so write slot 18."""
    put(table(trace, WINDOW, 1), 5, 9)
    put(writes(trace, WINDOW).slot, 7, 18)


WRITE_BREAKS: dict[str, tuple[str, str, Break]] = {
    "a replayed token overwrites cached KV": (
        "write-fence", "group 0", lambda t: put(writes(t, CACHEABLE).slot, 1, 8),
    ),
    "a computed token past the replay is padded": (
        "write-fence", "group 0", lambda t: put(writes(t, CACHEABLE).slot, 5, -1),
    ),
    "a replayed token is padded in the window group": (
        "write-fence", "group 1", lambda t: put(writes(t, WINDOW).slot, 1, -1),
    ),
    "a decode is padded": (
        "write-fence", "group 0", lambda t: put(writes(t, CACHEABLE).slot, 0, -1),
    ),
    "another slot than the table's": (
        "write-fence", "group 1", lambda t: put(writes(t, WINDOW).slot, 1, 60),
    ),
    "a slot of the null block": (
        "write-fence", "group 1, the null block", lambda t: put(table(t, WINDOW, 1), 2, 0),
    ),
    "a slot past the table": (
        "write-fence", "group 0, no block",
        lambda t: t.steps[2].tables[CACHEABLE].__setitem__(1, table(t, CACHEABLE, 1)[:2]),
    ),
    "two rows write one slot": ("write-fence", "group 1", share_a_slot),
    "a token is not written": (
        "write-fence", "group 0", lambda t: keep(writes(t, CACHEABLE), "", [0, 1, 2, 3, 4, 5, 6]),
    ),
    "a token is written twice": (
        "write-fence", "group 0", lambda t: keep(writes(t, CACHEABLE), "", [*range(8), 7]),
    ),
    "a group is not written": ("write-fence", "group 1", lambda t: t.steps[2].writes.pop(WINDOW)),
    "a block in the tables of two rows": ("write-fence", "group 1, table", share_a_slot),
    "a block in the tables of two groups": (
        "write-fence", "group 1, table", lambda t: put(table(t, WINDOW, 0, step=0), 3, 2),
    ),
    "a table entry changes": (
        "write-fence", "group 0, table", lambda t: put(table(t, CACHEABLE, 1, step=4), 0, 7),
    ),
    "a window block comes back": (
        "write-fence", "group 1, table", lambda t: put(table(t, WINDOW, 1, step=4), 0, 20),
    ),
    "a replay allocates a block too many": (
        "write-fence", "group 0, table",
        lambda t: t.steps[4].tables[CACHEABLE].__setitem__(1, np.append(table(t, CACHEABLE, 1, step=4), 30)),
    ),
    "a table shrinks": (
        "write-fence", "group 1, table",
        lambda t: t.steps[4].tables[WINDOW].__setitem__(1, table(t, WINDOW, 1, step=4)[:-1]),
    ),
}  # fmt: skip

HIT_BREAKS: dict[str, tuple[str, str, Break]] = {
    "a hit is missed": (
        "hit-count", "hit", lambda t: set_all(t.admissions[1], hit=0, replay_start=0, computed=0),
    ),
    "a hit of more than was cached": ("hit-count", "hit", lambda t: set_all(t.admissions[1], hit=12)),
    "a hit of the window is adopted": ("hit-count", "hit", lambda t: set_all(t.admissions[1], hit=4)),
    "a hit ends within a block": ("hit-count", "hit", lambda t: set_all(t.admissions[1], hit=7)),
    "a block of other tokens is adopted": (
        "hit-count", "adopted block", lambda t: put(table(t, CACHEABLE, 1), 1, 7),
    ),
    "replay starts elsewhere": ("hit-count", "replay_start", lambda t: set_all(t.admissions[1], replay_start=3)),
    "no rewind": ("hit-count", "computed", lambda t: set_all(t.admissions[1], computed=8)),
    "the first chunk is empty": ("hit-count", "scheduled", lambda t: set_all(t.admissions[1], scheduled=0)),
    "the first chunk is too long": ("hit-count", "scheduled", lambda t: set_all(t.admissions[1], scheduled=10)),
    "the worker forgets replay_start": (
        "hit-count", "worker replay_start", lambda t: put(t.steps[2].replay_start, 1, 0),
    ),
    "the worker forgets it in the last chunk": (
        "hit-count", "worker replay_start", lambda t: put(t.steps[3].replay_start, 1, 0),
    ),
    "a decode row carries one": (
        "hit-count", "worker replay_start", lambda t: put(t.steps[4].replay_start, 1, 4),
    ),
    "hits counted after the rewind": (
        "hit-count", "metric prefix_cache_hits", lambda t: t.metrics.update(prefix_cache_hits=4),
    ),
    "a query counted twice": (
        "hit-count", "metric prefix_cache_queries", lambda t: t.metrics.update(prefix_cache_queries=36),
    ),
    "a client is told of the hit after the rewind": (
        "hit-count", "metric cached_tokens", lambda t: t.metrics.update(cached_tokens=4),
    ),
    "a first hit counted as one after a preemption": (
        "hit-count", "metric preempted_hits", lambda t: t.metrics.update(preempted_hits=8),
    ),
}  # fmt: skip


def cut_a_chunk(trace: Trace) -> None:
    """Step 2 gives the query 6 tokens although 7 fit beside the decode; step 3 the other 3."""
    set_all(trace.admissions[1], scheduled=6)
    put(trace.steps[2].scheduled, 1, 6)
    put(trace.steps[3].computed, 1, 10)
    put(trace.steps[3].scheduled, 1, 3)


PROGRESS_BREAKS: dict[str, tuple[str, str, Break]] = {
    "step numbers repeat": ("progress", "step index", lambda t: set_all(t.steps[3], index=2)),
    "a row of another request": ("progress", "admission", lambda t: put(t.steps[2].request, 1, 0)),
    "two rows of one life": ("progress", "admission", lambda t: put(t.steps[2].admission, 1, 0)),
    "a life without a row": ("progress", "admission", lambda t: t.admissions.append(replace(t.admissions[1]))),
    "a chunk that does not advance": ("progress", "computed", lambda t: put(t.steps[3].computed, 1, 4)),
    "a life begins with another chunk": ("progress", "first chunk", lambda t: set_all(t.admissions[1], scheduled=6)),
    "a life begins in another step": ("progress", "first chunk", lambda t: set_all(t.admissions[1], step=3)),
    "a prefill is called a decode": ("progress", "prefill", lambda t: put(t.steps[3].prefill, 1, False)),
    "more tokens than are known": ("progress", "scheduled", lambda t: put(t.steps[3].scheduled, 1, 3)),
    "no tokens": ("progress", "scheduled", lambda t: put(t.steps[4].scheduled, 1, 0)),
    "a chunk cut for no reason": ("progress", "scheduled", cut_a_chunk),
    "a longer chunk than the threshold": (
        "progress", "scheduled",
        lambda t: set_all(t, geometry=traces.geometry(long_prefill_token_threshold=6)),
    ),
    "more tokens than a step may have": (
        "progress", "tokens a step", lambda t: set_all(t, geometry=traces.geometry(max_num_batched_tokens=7)),
    ),
    "more requests than a step may have": (
        "progress", "requests a step", lambda t: set_all(t, geometry=traces.geometry(max_num_seqs=1)),
    ),
    "an admission knows other tokens": ("progress", "tokens", lambda t: set_all(t.admissions[1], tokens=12)),
    "a first life counts as resumed": ("progress", "resumed", lambda t: set_all(t.admissions[1], resumed=True)),
    "preempted, but running on": ("progress", "preempted", lambda t: t.steps[3].preempted.extend([0, 0])),
    "preempted before it was admitted": ("progress", "preempted", lambda t: t.steps[1].preempted.append(1)),
    "an output token too few": ("progress", "output", lambda t: t.requests[1].output.pop()),
    "a request ends early": ("progress", "output", lambda t: set_all(t.requests[1], max_tokens=3)),
    "a request never ends": ("progress", "finished", lambda t: set_all(t.requests[1], finished=None)),
    "a request ends twice": ("progress", "finished", lambda t: t.steps[3].finished.append(1)),
    "an aborted request runs on": ("progress", "finished", lambda t: set_all(t.requests[1], finished="abort")),
    "a refused request runs": ("progress", "finished", lambda t: set_all(t.requests[1], finished="refused")),
    "the run broke off": ("progress", "final", lambda t: set_all(t, final=None)),
    "a block leaks": ("progress", "free blocks", lambda t: set_all(t.final, free_blocks=30)),
    "a reference leaks": ("progress", "referenced", lambda t: setattr(t.final, "referenced", traces.ints(7))),
}  # fmt: skip

OTHER_BREAKS: dict[str, tuple[str, str, Break]] = {
    "the window is in the prefix cache": (
        "gating", "group 1", lambda t: set_all(t.groups[WINDOW], prefix_cacheable=True),
    ),
    "the window is not replayed": ("gating", "group 1", lambda t: set_all(t.groups[WINDOW], replay_tokens=0)),
    "less than the window is replayed": ("gating", "group 1", lambda t: set_all(t.groups[WINDOW], replay_tokens=3)),
    "the cacheable group is replayed": ("gating", "group 0", lambda t: set_all(t.groups[CACHEABLE], replay_tokens=4)),
    "nothing is cacheable": ("gating", "group 0", lambda t: set_all(t.groups[CACHEABLE], prefix_cacheable=False)),
    "no window group": ("gating", "window", lambda t: set_all(t.groups[WINDOW], kind="cacheable")),
    "replay on, though not asked for": (
        "gating", "replay_expected", lambda t: set_all(t, geometry=traces.geometry(replay=False)),
    ),
    "replay on where it should be off": ("gating", "group 1", lambda t: set_all(t, replay_expected=False)),
    "vLLM raises": ("no-fault", "exception", lambda t: t.faults.append(Fault("exception", 3, "AssertionError"))),
}  # fmt: skip


def outputs_of(trace: Trace, arm: str | None = None, request: int = 1) -> Outputs:
    """Of the query, with a model under the trace; of the main run or of an arm."""
    with_model(trace)
    outputs = trace.requests[request].outputs if arm is None else trace.arms[arm][request]
    assert outputs is not None
    return outputs


def flip(values: np.ndarray, *index: int) -> None:
    """Flip the last bit of a float32."""
    values.view(np.uint32)[index] ^= 1


OUTPUT_BREAKS: dict[str, tuple[str, str, Break]] = {
    "bytes of a cached block change": (
        "cached-bytes", "group 0", lambda t: put(with_model(t).cached[0].after, 1, 13),
    ),
    "a logprob is not that without cache": (
        "output-match", "no-cache", lambda t: flip(outputs_of(t, "no-cache").logprobs, 1, 2),
    ),
    "a prompt logprob is not that without cache": (
        "output-match", "no-cache", lambda t: flip(outputs_of(t, "no-cache", 0).prompt_logprobs, 3, 0),
    ),
    "a token is not that without cache": (
        "output-match", "no-cache", lambda t: put(outputs_of(t, "no-cache").tokens, 1, 0),
    ),
    "a logprob is not the oracle's": (
        "output-match", "dense", lambda t: outputs_of(t).logprobs.__isub__(0.01),
    ),
    "a prompt logprob is not the oracle's": (
        "output-match", "dense", lambda t: outputs_of(t, request=0).prompt_logprobs.__isub__(0.01),
    ),
    "another token than the oracle's is sampled": (
        "output-match", "dense", lambda t: put(outputs_of(t).tokens, 1, 77),
    ),
    "a second run gives other bits": (
        "poison-blind", "twice", lambda t: flip(outputs_of(t, "twice").logprobs, 0, 0),
    ),
    "what may not be read is": ("poison-blind", "poison", lambda t: flip(outputs_of(t, "poison").logprobs, 1, 1)),
    "others in the batch matter": ("mix-blind", "alone", lambda t: flip(outputs_of(t, "alone").logprobs, 0, 1)),
}  # fmt: skip

ALL_BREAKS = {
    f"{where}: {name}": one
    for where, family in (
        ("gather", GATHER_BREAKS),
        ("write", WRITE_BREAKS),
        ("hit", HIT_BREAKS),
        ("progress", PROGRESS_BREAKS),
        ("other", OTHER_BREAKS),
        ("output", OUTPUT_BREAKS),
    )
    for name, one in family.items()
}
