# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The register of known findings: what vLLM is known to do wrong, with the condition under which it does.

A run reports a violation that an entry matches as known, neither clean nor failed. Each entry has at least one case in
``corpora/<engine>/known/``; when that case no longer fires, the entry is out of date, and that is an error.

To add one: a line in ``REGISTER`` and a case. ``matches`` has to be narrow: what it lets through by mistake is a bug
that nobody will see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from msgspec import UNSET

from invariants.trace import NOBODY, NULL_BLOCK, Admission, BoolArray, IntArray, Trace, Violation
from invariants.view import View


@dataclass(frozen=True, slots=True)
class Known:
    """One known finding."""

    id: str
    invariants: tuple[str, ...]
    """Ids of the invariants that it breaks."""
    title: str
    condition: str
    """When it happens, for a reader; ``matches`` is the same as code."""
    upstream: str | None
    """The upstream issue; None while there is none."""
    matches: Callable[[Violation, View], bool]
    """Whether this is why the violation was found."""


def split(violations: Iterable[Violation], trace: Trace) -> tuple[list[Violation], dict[str, list[Violation]]]:
    """Violations that are news, and those that are known, by id of their entry."""
    news: list[Violation] = []
    known: dict[str, list[Violation]] = {}
    view: View | None = None
    for violation in violations:
        suspects = [entry for entry in REGISTER if violation.invariant in entry.invariants]
        if suspects:
            view = view or View(trace)
        entry = next((entry for entry in suspects if view and entry.matches(violation, view)), None)
        if entry:
            known.setdefault(entry.id, []).append(violation)
        else:
            news.append(violation)
    return news, known


def _null_replay_block(violation: Violation, view: View) -> bool:
    """The one position that retention gives up and the replay wants: replay_start, where it is the last of its block.

    An invariant gives a few examples a site. They can speak for the rest only if no other position is read or written
    in the null block, so that is looked at, too.
    """
    if violation.invariant in _OF_OUTPUTS:
        return _replays_from_null(violation, view)
    return violation.site.endswith(", the null block") and _explained(violation, view, _retired)


def _explained(violation: Violation, view: View, why: Callable[[View, int, IntArray, IntArray], BoolArray]) -> bool:
    """Whether ``why`` holds where the violation is, and nothing else is read or written in the null block."""
    if violation.step is None or violation.row is None or violation.position is None:
        return False
    groups = [group for group in view.window_groups if _site_is_of(violation, view, group)]
    steps = [step.index for step in view.trace.steps]
    row = view.row_offset[steps.index(violation.step)] + violation.row
    at = np.array([row]), np.array([violation.position])
    return any(bool(why(view, group, *at).all()) for group in groups) and _only_there(view)


def _site_is_of(violation: Violation, view: View, group: int) -> bool:
    """Whether the violation's site is the window group, or a consumer that reads it."""
    site = violation.site.removesuffix(", the null block")
    if violation.invariant == "write-fence":
        return site == f"group {group}"
    return any(reads.consumer == site and reads.group == group for reads in view.reads)


def _replays_from_null(violation: Violation, view: View) -> bool:
    """Whether the request whose outputs are wrong replays from the null block: others write there, too."""
    number = next((i for i, request in enumerate(view.trace.requests) if request.id == violation.request), -1)
    rows = np.flatnonzero(view.request == number)
    retired = any(bool(_retired(view, group, rows, view.floor[rows]).any()) for group in view.window_groups)
    return retired and _only_there(view)


def _only_there(view: View) -> bool:
    """Whether no other position is read or written in the null block."""
    touched = [(reads.group, reads.cell_row, reads.cell_position) for reads in view.reads if reads.group is not None]
    for group in view.window_groups:
        stores = view.stores(group)
        touched.append((group, stores.row, stores.position))
    return all(bool((_retired(view, *at) | _before_last(view, *at) | ~_null(view, *at)).all()) for at in touched)


_OF_OUTPUTS: Final = ("output-match", "poison-blind", "mix-blind")


def _null(view: View, group: int, row: IntArray, position: IntArray) -> BoolArray:
    """bool [n] whether the row's block table has the null block for the position."""
    null: BoolArray = view.tables[group].block(row, position) == NULL_BLOCK
    return null


def _retired(view: View, group: int, row: IntArray, position: IntArray) -> BoolArray:
    """bool [n] whether that is because the position is the row's replay_start H - W and (H - W + 1) % b == 0."""
    start = view.floor[row]
    last = (start + 1) % view.tables[group].block_size == 0
    retired: BoolArray = (start > 0) & (position == start) & last & _null(view, group, row, position)
    return retired


def _before_last(view: View, group: int, row: IntArray, position: IntArray) -> BoolArray:
    """bool [n] whether that is because an async load brought all P known tokens with their window, the last of which
    is computed again, the position is the first that it reads, P - W, and (P - W + 1) % b == 0."""
    lives = view.trace.admissions
    whole = [life.load is not None and life.load.waits and life.carried and life.hit == life.tokens for life in lives]
    tokens = np.array([*(life.tokens for life in lives), 0])[view.admission[row]]
    first = tokens - view.trace.geometry.window
    last = (first + 1) % view.tables[group].block_size == 0
    loaded = np.array([*whole, False])[view.admission[row]] & (view.computed[row] == tokens - 1)
    found: BoolArray = loaded & (position == first) & last & _null(view, group, row, position)
    return found


def _loaded_whole(violation: Violation, view: View) -> bool:
    """The one position that the last token of a prompt needs, and that a load of the whole prompt has no block for."""
    return violation.site.endswith(", the null block") and _explained(violation, view, _before_last)


def _unused(life: Admission) -> bool:
    """Whether an async load is there, and nothing was ever computed after it."""
    load = life.load
    return life.step < 0 and load is not None and load.waits and load.over is not None and not load.failed


def _loaded_again(violation: Violation, view: View) -> bool:
    """A load of a prompt of one token, which is there, and begun anew each time: the request it is about, or a hang."""
    again = set()
    lives = sorted(view.trace.admissions, key=lambda life: life.request)
    for life, later in pairwise(lives):
        if _unused(life) and life.hit == life.tokens == 1 and later.request == life.request and later.load:
            again.add(view.trace.requests[life.request].id)
    return violation.request in again or (bool(again) and violation.request is None and violation.site == "hang")


def _stranded(violation: Violation, view: View) -> bool:
    """A hang in which a load is there and unused, for as long as nothing was scheduled, while another request waits."""
    trace = view.trace
    if violation.site != "hang":
        return False
    waiting = {number for number, request in enumerate(trace.requests) if request.finished is None}
    stranded = {life.request for life in trace.admissions if _unused(life)}
    return bool(stranded & waiting) and bool(waiting - stranded)


def _pad_above_threshold(violation: Violation, view: View) -> bool:
    """An assertion in ``Scheduler.schedule``, where a waiting request with one token left to compute is possible."""
    geometry = view.trace.geometry
    threshold = geometry.long_prefill_token_threshold
    if geometry.drafts is UNSET or not 0 < threshold <= geometry.drafts:
        return False
    one_left = not geometry.replay or any(len(request.prompt) == 1 for request in view.trace.requests)
    there = violation.site.endswith("vllm/v1/core/sched/scheduler.py, schedule")
    return one_left and there and "AssertionError:  (" in violation.message


def _never_computed(violation: Violation, view: View) -> bool:
    """A hit whose positions were all computed but for some that a request preempted by priority would have: it was
    scheduled for them, its blocks were cached at once, and then it was preempted in the same step."""
    trace = view.trace
    number = next((i for i, request in enumerate(trace.requests) if request.id == violation.request), -1)
    if violation.invariant == "gather-live":  # the window group is cached as well
        stale = violation.site.endswith(", stale") and violation.position is not None and not view.replay
        return stale and _withdrawn(view, number, np.array([violation.position]))
    if violation.site not in ("hit", "adopted block"):
        return False
    lives = [i for i, life in enumerate(trace.admissions) if (life.request, life.step) == (number, violation.step)]
    holes = [np.flatnonzero(view.lineage[life] == NOBODY) for life in lives]
    return any(len(found) > 0 and _withdrawn(view, number, found) for found in holes)


def _withdrawn(view: View, request: int, positions: IntArray) -> bool:
    """Whether each position may have been in a chunk that was taken back, of this request or one that begins alike."""
    trace = view.trace
    if all(one.priority is None for one in trace.requests) or request < 0:
        return False
    tokens, end = _tokens(trace, request), int(positions.max()) + 1
    left = np.ones(len(positions), np.bool_)
    for index, step in enumerate(trace.steps):
        for victim in step.preempted:
            if len(tokens) >= end and np.array_equal(_tokens(trace, victim)[:end], tokens[:end]):
                rows = np.flatnonzero((view.request == victim) & (view.step < index))
                done = int((view.computed + view.scheduled)[rows[-1]]) if len(rows) else 0
                left &= (positions < done) | (positions >= done + trace.geometry.max_num_batched_tokens)
    return not left.any()


def _tokens(trace: Trace, request: int) -> IntArray:
    one = trace.requests[request]
    return np.concatenate([one.prompt, np.asarray(one.output, one.prompt.dtype)])


REGISTER: Final[tuple[Known, ...]] = (
    Known(
        id="null-replay-block",
        invariants=("gather-live", "write-fence", *_OF_OUTPUTS),
        title="the block that a replay starts in is the null block",
        condition="(H - W + 1) % b == 0, with H the adopted hit, W the window and b the window group's block: "
        "retention keeps blocks from position H - W + 1 on, the replay starts at H - W, so the KV of that one position "
        "is written to and read from the null block",
        upstream=None,
        matches=_null_replay_block,
    ),
    Known(
        id="draft-padding-above-threshold",
        invariants=("no-fault",),
        title="the scheduler dies of an assertion when it makes a prefill of one token as long as a decode with drafts",
        condition="0 < long_prefill_token_threshold <= num_speculative_tokens, and a request is admitted with one token"
        " left to compute while others decode, or with a hit: it is made as long as a decode with drafts, then cut to "
        "the threshold, and the length asserted",
        upstream="vllm#54028",
        matches=_pad_above_threshold,
    ),
    Known(
        id="withdrawn-chunk-cached",
        invariants=("hit-count", "gather-live"),
        title="a hit adopts blocks that nobody has computed",
        condition="by priority: a request is scheduled for a chunk that fills a block, which is cached at once, and is "
        "then preempted in the same step for one of higher priority; the chunk is taken back, the block stays cached",
        upstream="vllm#43569",
        matches=_never_computed,
    ),
    Known(
        id="whole-prompt-loaded",
        invariants=("gather-live", "write-fence"),
        title="after a load of a whole prompt its last token reads the null block",
        condition="an async load brings all P tokens of a prompt with their window, and (P - W + 1) % b == 0, with W "
        "the window and b the window group's block: blocks are allocated for what token P needs, from P - W + 1 on, "
        "then the last token is computed again, which reads P - W",
        upstream=None,
        matches=_loaded_whole,
    ),
    Known(
        id="one-token-loaded-again",
        invariants=("progress", "no-fault"),
        title="a prompt of one token is loaded again and again",
        condition="a connector that offers at each lookup what it has offers, asynchronously, a prompt's only token: "
        "once it is there none of it counts as computed, which is how a request looks that was never looked up",
        upstream=None,
        matches=_loaded_again,
    ),
    Known(
        id="load-stranded",
        invariants=("no-fault",),
        title="a request that waits for blocks keeps another one's load, which holds them, from being used: for ever",
        condition="an async load is there, and a request before it in the queue, such as one whose load failed, does "
        "not fit into what the load leaves of the pool: the scheduler stops at the first that does not fit, and "
        "nothing runs",
        upstream="vllm#57841",
        matches=_stranded,
    ),
)
