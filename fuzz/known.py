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
from typing import Final

import numpy as np
from msgspec import UNSET

from invariants.trace import NULL_BLOCK, BoolArray, IntArray, Trace, Violation
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
    group = view.window_group
    if group is None:
        return False
    if violation.invariant in _OF_OUTPUTS:
        return _replays_from_null(violation, view, group)
    if not violation.site.endswith(", the null block"):
        return False
    if violation.step is None or violation.row is None or violation.position is None:
        return False
    if violation.invariant == "write-fence" and not violation.site.startswith(f"group {group},"):
        return False
    steps = [step.index for step in view.trace.steps]
    row = view.row_offset[steps.index(violation.step)] + violation.row
    return bool(_retired(view, group, np.array([row]), np.array([violation.position])).all()) and _only_there(
        view, group
    )


def _replays_from_null(violation: Violation, view: View, group: int) -> bool:
    """Whether the request whose outputs are wrong replays from the null block: others write there, too."""
    number = next((i for i, request in enumerate(view.trace.requests) if request.id == violation.request), -1)
    rows = np.flatnonzero(view.request == number)
    return bool(_retired(view, group, rows, view.floor[rows]).any()) and _only_there(view, group)


def _only_there(view: View, group: int) -> bool:
    """Whether no other position is read or written in the null block."""
    stores = view.stores(group)
    touched = [(stores.row, stores.position), *((reads.cell_row, reads.cell_position) for reads in view.reads)]
    return all(bool((_retired(view, group, *at) | ~_null(view, group, *at)).all()) for at in touched)


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


def _pad_above_threshold(violation: Violation, view: View) -> bool:
    """An assertion in ``Scheduler.schedule``, where a waiting request with one token left to compute is possible."""
    geometry = view.trace.geometry
    threshold = geometry.long_prefill_token_threshold
    if geometry.drafts is UNSET or not 0 < threshold <= geometry.drafts:
        return False
    one_left = not geometry.replay or any(len(request.prompt) == 1 for request in view.trace.requests)
    there = violation.site.endswith("vllm/v1/core/sched/scheduler.py, schedule")
    return one_left and there and "AssertionError:  (" in violation.message


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
        condition="0 < long_prefill_token_threshold <= num_speculative_tokens, and a request is admitted with one token "
        "left to compute while others decode, or with a hit: it is made as long as a decode with drafts, then cut to the "
        "threshold, and the length asserted",
        upstream="vllm#54028",
        matches=_pad_above_threshold,
    ),
)
