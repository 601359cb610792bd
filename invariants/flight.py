# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""What is known when: steps in flight and drafts, of a whole trace, as arrays (CONTRACT 23 to 26).

A step's output is processed after the next step was scheduled where one is in flight, and before it elsewhere. A row
with drafts computes a token for each; the rejected ones are taken back, and the row's life goes on at the first of
them. Where a trace says nothing of this, there are no drafts, and each row that reaches the last known token samples
one, which its client gets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec import UNSET

from invariants.trace import BoolArray, Geometry, IntArray, Step

if TYPE_CHECKING:
    from invariants.view import View


def most_drafts(geometry: Geometry) -> int:
    """Drafts that a row has at most."""
    return 0 if geometry.drafts is UNSET else geometry.drafts


def reserved_slots(geometry: Geometry) -> int:
    """Slots that a table has beyond what is scheduled: for KV of the drafter's own (CONTRACT 25)."""
    return 0 if geometry.drafter is UNSET else most_drafts(geometry)


def tokens_ahead(geometry: Geometry) -> int:
    """Tokens after a block that name it in the prefix cache, besides its own and those before it (CONTRACT 25)."""
    return 1 if geometry.drafter == "mtp" else 0


class Flight:
    """[rows] are those of the view, in its order."""

    def __init__(self, view: View) -> None:
        steps = view.trace.steps
        known = np.array([*(life.tokens for life in view.trace.admissions), 0], np.int64)[view.admission]
        self.processed: IntArray = np.array(
            [index if step.processed is None else step.processed for index, step in enumerate(steps)], np.int64
        )
        """[steps] steps whose output was processed when it was scheduled, from the first on."""
        self.drafts = _rows([step.drafts for step in steps], view.rows_of_step)
        self.accepted = _rows([step.accepted for step in steps], view.rows_of_step)
        end = view.computed + view.scheduled
        self.samples: BoolArray = (end - self.drafts >= known) & (view.admission >= 0)
        """[rows] whether all known tokens are computed with it."""
        self.rejected: IntArray = np.where(self.samples, self.drafts - self.accepted, 0)
        self.end: IntArray = end - self.rejected
        """[rows] first position that is not computed after it: that of the last token sampled."""
        self.sampled: IntArray = np.where(self.samples, 1 + self.accepted, 0)
        """[rows] tokens."""
        self.delivered = self._delivered(steps, view)
        """[rows] tokens of them that were delivered."""
        before = np.maximum(view.before, 0)
        unknown = (view.before >= 0) & (view.step[before] >= self.processed[view.step])
        optimistic = end + np.where(unknown, self.rejected[before], 0)
        self.reach = _running_most(optimistic, view.admission)
        """[rows] most tokens for which its life was ever scheduled to have slots."""

    def known_by(self, step: IntArray | int) -> IntArray:
        """First step that was scheduled with the output of this one processed; the number of steps if none was."""
        return np.searchsorted(self.processed, step, side="right")

    def _delivered(self, steps: list[Step], view: View) -> IntArray:
        delivered = self.sampled.copy()
        for index, step in enumerate(steps):
            if step.delivered is not None:
                rows = slice(view.row_offset[index], view.row_offset[index + 1])
                delivered[rows] = [step.delivered.get(number, 0) for number in view.request[rows].tolist()]
        return delivered


def _rows(parts: list[IntArray | None], rows: IntArray) -> IntArray:
    """The arrays end to end, zeros where a step has none."""
    arrays = [np.zeros(count, np.int64) if part is None else part for part, count in zip(parts, rows, strict=True)]
    joined: IntArray = np.concatenate(arrays) if arrays else np.zeros(0, np.int64)
    return joined.astype(np.int64)


def _running_most(values: IntArray, of: IntArray) -> IntArray:
    """For each value the most so far of those with the same, non-negative or missing (-1), ``of``."""
    order = np.argsort(of, kind="stable")
    step = int(values.max(initial=0)) + 1
    most = np.empty_like(values)
    most[order] = np.maximum.accumulate(values[order] + of[order] * step) - of[order] * step
    return most
