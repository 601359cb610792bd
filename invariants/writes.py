# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""What a step writes: every scheduled token once into every group, but replayed tokens into window groups only.

A replayed token is one in [replay_start, replay_start + W) of a request that replays; its cached KV in the cacheable
groups is what the hit adopted, and other requests may be reading it. replay_start is the one that the hit implies.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from invariants.loads import reserved
from invariants.tables import extent, growth, owners
from invariants.trace import NULL_BLOCK, PAD_SLOT, BoolArray, Violation
from invariants.view import Stores, View, compare, examples, key, unkey


def write_fence(view: View) -> Iterator[Violation]:
    """Replayed tokens write window groups only; no slot is written twice a step; no write lands in a foreign block."""
    for group, spec in enumerate(view.trace.groups):
        stores = view.stores(group)
        site = f"group {group}"
        yield from _coverage(view, stores, site)
        floor = view.floor[stores.row]
        replayed = (floor > 0) & (stores.position >= floor) & (stores.position < floor + view.replay)
        fenced = replayed & (spec.kind == "cacheable")
        padded = stores.slot == PAD_SLOT
        for token, more in examples(fenced & ~padded):
            message = f"a replayed token (replay_start {floor[token]}) overwrites KV that the hit adopted{more}"
            yield _violation(view, stores, token, site, message, "a padded slot")
        for token, more in examples(padded & ~fenced):
            kind = "replayed" if replayed[token] else "computed"
            message = f"a {kind} token writes no KV into a {spec.kind} group{more}"
            yield _violation(view, stores, token, site, message, "a slot of the request's block")
        yield from _foreign(view, stores, group, ~padded)
        # A write into the null block is reported above, once.
        yield from _collisions(view, stores, site, stores.slot >= spec.block_size)
    yield from owners(view)
    yield from growth(view)
    yield from extent(view)
    yield from reserved(view)


def _coverage(view: View, stores: Stores, site: str) -> Iterator[Violation]:
    """Positions written are the scheduled ones, each once."""
    missing, surplus = compare(key(stores.row, stores.position), view.queries)
    for query, more in examples(missing):
        at = unkey(query)
        message = f"scheduled token {at[1]} has no slot in {site}, not even a padded one{more}"
        yield view.violation("write-fence", site, at, message, "one slot", "none")
    for token, more in examples(surplus):
        message = f"the token is not scheduled, or has a slot in this group already{more}"
        yield _violation(view, stores, token, site, message, "one slot for each scheduled token")


def _foreign(view: View, stores: Stores, group: int, real: BoolArray) -> Iterator[Violation]:
    """Each real slot is the one that the manager's block table has for the token."""
    table, site = view.tables[group], f"group {group}"
    block = table.block(stores.row, stores.position)
    absent = block <= NULL_BLOCK
    for token, more in examples(real & absent):
        what = "the null block" if block[token] == NULL_BLOCK else "no block"
        message = f"the request's block table has {what} there: its KV is lost, or is somebody else's{more}"
        yield _violation(view, stores, token, f"{site}, {what}", message, "no write, or a block to write to")
    wanted = block * table.block_size + stores.position % table.block_size
    for token, more in examples(real & ~absent & (stores.slot != wanted)):
        message = f"the request's block table has block {block[token]} there{more}"
        yield _violation(view, stores, token, site, message, f"slot {wanted[token]}")


def _collisions(view: View, stores: Stores, site: str, real: BoolArray) -> Iterator[Violation]:
    """No real slot is written twice in one step."""
    index = np.flatnonzero(real & (stores.row >= 0))
    number = key(view.step[stores.row[index]], stores.slot[index])
    ordered = np.sort(number)
    if not (ordered[1:] == ordered[:-1]).any():
        return
    order = np.argsort(number, kind="stable")
    for at, more in examples(number[order][1:] == number[order][:-1]):
        one, other = int(index[order[at]]), int(index[order[at + 1]])
        message = f"position {stores.position[one]} of {view.where(int(stores.row[one]))} has the same slot{more}"
        yield _violation(view, stores, other, site, message, "a slot of its own")


def _violation(view: View, stores: Stores, token: int, site: str, why: str, expected: str) -> Violation:
    at, slot = (stores.row[token], stores.position[token]), stores.slot[token]
    message = f"token {at[1]} has slot {slot} in {site.partition(',')[0]}: {why}"
    return view.violation("write-fence", site, at, message, expected, f"slot {slot}")
