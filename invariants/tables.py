# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The half of ``write-fence`` that looks at block tables: a write is fenced only if its block is the request's alone.

The pool is shared by all groups. An entry is adopted if it lies wholly within the local hit of its life, in a
group that takes part in the prefix cache; adopted blocks may be in any number of tables, every other block is in one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from invariants.flight import reserved_slots
from invariants.trace import NULL_BLOCK, Violation
from invariants.view import View, examples, key


def owners(view: View) -> Iterator[Violation]:
    """No block that a life did not adopt is in another table, or in one twice, in the same step."""
    groups, rows, columns, keys = [], [], [], []
    for number, (table, spec) in enumerate(zip(view.tables, view.trace.groups, strict=True)):
        row, column = table.row, table.column
        shared = view.local[row] if spec.kind == "cacheable" or not view.replay else np.zeros_like(row)
        own = (table.blocks > NULL_BLOCK) & ((column + 1) * table.block_size > shared)
        groups.append(np.full(np.count_nonzero(own), number))
        rows.append(row[own])
        columns.append(column[own])
        keys.append(key(view.step[row[own]], table.blocks[own]))
    owned = np.concatenate(keys)
    ordered = np.sort(owned)
    if not (ordered[1:] == ordered[:-1]).any():
        return
    order = np.argsort(owned, kind="stable")
    entries = np.stack([np.concatenate(parts) for parts in (groups, rows, columns)], axis=1)[order]
    for at, more in examples(owned[order][1:] == owned[order][:-1]):
        one, other = (_entry(view, *entries[index].tolist()) for index in (at, at + 1))
        group, row, _ = entries[at + 1].tolist()
        message = f"{other} is also {one}, and nobody adopted it from the prefix cache{more}"
        yield view.violation("write-fence", f"group {group}, table", (row, None), message, "one owner", "two")


def growth(view: View) -> Iterator[Violation]:
    """While a life lasts its tables only grow, but for window blocks that become null."""
    for group, (table, spec) in enumerate(zip(view.tables, view.trace.groups, strict=True)):
        row, column = table.row, table.column
        before = view.before[row]
        known = (before >= 0) & (column < table.length[before])
        old = table.blocks[np.where(known, table.offset[before] + column, 0)]
        changed = known & (old != table.blocks)
        if spec.kind == "window":
            changed &= table.blocks != NULL_BLOCK
        shrunk = (view.before >= 0) & (table.length < table.length[view.before])
        for entry, more in examples(changed):
            message = f"{_entry(view, group, int(row[entry]), int(column[entry]))} was block {old[entry]} before{more}"
            at = row[entry], column[entry] * table.block_size
            site, seen = f"group {group}, table", table.blocks[entry]
            yield view.violation("write-fence", site, at, message, f"block {old[entry]}", f"block {seen}")
        for index, more in examples(shrunk):
            lengths = table.length[view.before[index]], table.length[index]
            message = f"the table in group {group} shrank from {lengths[0]} to {lengths[1]} blocks{more}"
            yield view.violation("write-fence", f"group {group}, table", (index, None), message, *lengths)


def extent(view: View) -> Iterator[Violation]:
    """A table reaches to the end of its row's hit or chunk, whichever is later: a chunk that ends inside the replayed
    range allocates nothing new (CONTRACT 10). What was allocated for drafts since rejected stays; so do slots for KV of
    the drafter's own."""
    end = np.maximum(view.hit, view.flight.reach) + reserved_slots(view.trace.geometry)
    for group, table in enumerate(view.tables):
        most = -(-end // table.block_size)
        for row, more in examples(table.length > most):
            message = f"the table in group {group} has {table.length[row]} blocks, for {end[row]} tokens{more}"
            expected = f"at most {most[row]}"
            yield view.violation(
                "write-fence", f"group {group}, table", (row, None), message, expected, table.length[row]
            )


def _entry(view: View, group: int, row: int, column: int) -> str:
    table = view.tables[group]
    block = table.blocks[table.offset[row] + column]
    return f"block {block}, entry {column} of the table in group {group} of {view.where(row)}"
