# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Every implementation of the lower bound gives the same rows (CONTRACT 17).

Which of them is right is the business of the other gather invariants: here consumers are only held against each other.
A hole or a repeat in a window is theirs, too; what counts is where a query's window begins and ends.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from invariants.trace import IntArray, Violation
from invariants.view import Reads, View, examples, key, key_row, unkey


def gather_agree(view: View) -> Iterator[Violation]:
    """Consumers that read for the same query read the same positions, and for a row what they read for its queries."""
    # Layers of decoder-side replay that have a bound of their own are another matter.
    consumers = [reads for reads in view.reads if reads.per == "query" and reads.floor is view.floor]
    if not consumers or len(view.reads) < 2:
        return  # nobody to disagree with
    extents = [_extent(reads) for reads in consumers]
    keys, first, last = (np.concatenate(arrays) for arrays in zip(*extents, strict=True))
    who = np.repeat(np.arange(len(consumers)), [len(extent[0]) for extent in extents])
    order = np.argsort(keys, kind="stable")
    keys, first, last, who = keys[order], first[order], last[order], who[order]
    queries, starts, count = np.unique(keys, return_index=True, return_counts=True)
    one = np.repeat(starts, count)  # the first consumer of each query
    for run, more in examples((first != first[one]) | (last != last[one])):
        at, other = unkey(keys[run]), one[run]
        expected, seen = f"[{first[other]}, {last[other]}]", f"[{first[run]}, {last[run]}]"
        consumer = consumers[who[run]].consumer
        message = f"{consumer} reads {seen} for the query at {at[1]}, {consumers[who[other]].consumer} {expected}{more}"
        yield view.violation("gather-agree", consumer, at, message, expected, seen)
    for reads in view.reads:
        if reads.per == "row":
            yield from _rows(view, reads, queries, first[starts], last[starts])


def _extent(reads: Reads) -> tuple[IntArray, IntArray, IntArray]:
    """Keys of the queries that it reads for, and from where to where."""
    own = np.flatnonzero(reads.row >= 0)
    keys = key(reads.row[own], reads.position[own])
    if (np.diff(keys) > 0).all():
        return keys, reads.first[own], reads.last[own]
    own = own[np.argsort(keys, kind="stable")]
    keys, starts = np.unique(keys, return_index=True)
    return keys, np.minimum.reduceat(reads.first[own], starts), np.maximum.reduceat(reads.last[own], starts)


def _rows(view: View, reads: Reads, queries: IntArray, first: IntArray, last: IntArray) -> Iterator[Violation]:
    """A consumer that reads for whole rows, against what is read for the queries of each, if that is known of all."""
    if not len(queries):
        return
    rows, starts, count = np.unique(key_row(queries), return_index=True, return_counts=True)
    low, high = np.minimum.reduceat(first, starts), np.maximum.reduceat(last, starts)
    at = np.minimum(np.searchsorted(rows, reads.row), len(rows) - 1)
    known = (rows[at] == reads.row) & (count[at] == view.scheduled[reads.row])
    for run, more in examples(known & ((reads.first != low[at]) | (reads.last != high[at]))):
        expected, seen = f"[{low[at[run]]}, {high[at[run]]}]", f"[{reads.first[run]}, {reads.last[run]}]"
        message = f"{reads.consumer} reads {seen} for the chunk at {reads.position[run]}, its queries {expected}{more}"
        where = reads.row[run], reads.position[run]
        yield view.violation("gather-agree", reads.consumer, where, message, expected, seen)
