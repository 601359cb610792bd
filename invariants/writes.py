# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""What a step writes: every scheduled token once into every group, but replayed tokens into window groups only.

A replayed token is one in [replay_start, replay_start + W) of a request that replays; its cached KV in the cacheable
groups is what the hit adopted, and other requests may be reading it. replay_start is the one that the hit implies.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from invariants.trace import NULL_BLOCK, PAD_SLOT, BoolArray, IntArray, Violation
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
            yield _violation(
                view,
                stores,
                token,
                site,
                f"replayed token {stores.position[token]} (replay_start {floor[token]}) writes slot "
                f"{stores.slot[token]} of cacheable {site}, over KV that the hit adopted{more}",
                f"padded slot {PAD_SLOT}",
            )
        for token, more in examples(padded & ~fenced):
            what = "replayed token" if replayed[token] else "token"
            yield _violation(
                view,
                stores,
                token,
                site,
                f"{what} {stores.position[token]} writes nothing into {spec.kind} {site}: its KV will be missing{more}",
                "a slot of the request's block",
            )
        yield from _foreign(view, stores, group, ~padded)
        yield from _collisions(view, stores, group, ~padded)


def _coverage(view: View, stores: Stores, site: str) -> Iterator[Violation]:
    """Positions written are the scheduled ones, each once."""
    missing, surplus = compare(key(stores.row, stores.position), view.queries)
    for query, more in examples(missing):
        row, position = unkey(query)
        yield Violation(
            "write-fence",
            f"scheduled token {position} has no slot in {site}, not even a padded one{more}",
            expected="one slot",
            seen="none",
            position=position,
            site=site,
            **view.where(row),
        )
    for token, more in examples(surplus):
        yield _violation(
            view,
            stores,
            token,
            site,
            f"position {stores.position[token]} has a slot in {site}, but is not scheduled, or has one already{more}",
            "one slot for each scheduled token",
        )


def _foreign(view: View, stores: Stores, group: int, real: BoolArray) -> Iterator[Violation]:
    """Each real slot is the one that the manager's block table has for the token."""
    table = view.tables[group]
    block = table.block(stores.row, stores.position)
    wanted = np.where(block > NULL_BLOCK, block * table.block_size + stores.position % table.block_size, -1)
    for token, more in examples(real & (stores.slot != wanted)):
        has = "no block" if block[token] < 0 else f"block {block[token]}" if block[token] else "the null block"
        yield _violation(
            view,
            stores,
            token,
            f"group {group}",
            f"token {stores.position[token]} writes slot {stores.slot[token]}, in block "
            f"{stores.slot[token] // table.block_size} of group {group}, where the request's table has {has}{more}",
            f"slot {wanted[token]}" if wanted[token] >= 0 else "no write, or a block to write to",
        )


def _collisions(view: View, stores: Stores, group: int, real: BoolArray) -> Iterator[Violation]:
    """No slot is written twice in one step."""
    index = np.flatnonzero(real & (stores.row >= 0))
    if not len(index):
        return
    number: IntArray = key(view.step[stores.row[index]], stores.slot[index])
    if len(np.unique(number)) == len(number):
        return
    order = np.argsort(number, kind="stable")
    twice = np.flatnonzero(number[order][1:] == number[order][:-1])
    for at, more in examples(twice):
        one, other = index[order[at]], index[order[at + 1]]
        yield _violation(
            view,
            stores,
            int(other),
            f"group {group}",
            f"slot {stores.slot[other]} of group {group} is written twice in one step: for position "
            f"{stores.position[one]} of row {view.where(int(stores.row[one]))['row']} and position "
            f"{stores.position[other]} of row {view.where(int(stores.row[other]))['row']}{more}",
            "one writer",
        )


def _violation(view: View, stores: Stores, token: int, site: str, message: str, expected: str) -> Violation:
    return Violation(
        "write-fence",
        message,
        expected=expected,
        seen=f"slot {stores.slot[token]}",
        position=int(stores.position[token]),
        site=site,
        **view.where(int(stores.row[token])),
    )
