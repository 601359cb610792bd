# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""A model of the prefix cache: which blocks of a group hold which prefix. ``reference.py`` says what it relies on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from invariants.trace import TracedRequest


class PrefixCache:
    """Which blocks hold which prefix. A prefix is named by a node: the index of its block in a tree of all prefixes."""

    def __init__(self, block_size: int, multiple: int, ahead: int = 0) -> None:
        """Blocks of ``block_size`` tokens; hits end on multiples of ``multiple`` tokens. ``ahead``: tokens after a
        block that have to be the same as well."""
        self.block_size = block_size
        self.ahead = ahead
        self.multiple = multiple
        self._tree: dict[tuple[int, bytes], int] = {}
        self._holders: dict[int, set[int]] = {}
        self._held: dict[int, int] = {}
        self._doubtful: set[int] = set()

    def nodes(self, request: TracedRequest) -> list[int]:
        """One node for each full block of everything that the request ever held, prompt and output."""
        data = request.prompt.astype(np.int32).tobytes() + np.array(request.output, np.int32).tobytes()
        size, ahead = 4 * self.block_size, 4 * self.ahead
        nodes, parent = [], 0
        for end in range(size, len(data) - ahead + 1, size):
            parent = self._tree.setdefault((parent, data[end - size : end + ahead]), len(self._tree) + 1)
            nodes.append(parent)
        return nodes

    def lookup(self, nodes: Sequence[int], tokens: int) -> tuple[int, int]:
        """Least and most tokens that a request of ``tokens`` tokens may hit."""
        sure = most = 0
        for node in nodes[: (tokens - max(self.ahead, 1)) // self.block_size]:
            if not self._holders.get(node):
                break
            if sure == most and self.certain(node):
                sure += 1
            most += 1
        low, high = (blocks * self.block_size // self.multiple * self.multiple for blocks in (sure, most))
        return low, high

    def certain(self, node: int) -> bool:
        """Whether some block surely holds the prefix."""
        return not self._holders.get(node, set()) <= self._doubtful

    def holds(self, block: int, node: int) -> bool:
        """Whether the block holds that prefix."""
        return self._held.get(block) == node

    def register(self, block: int, node: int) -> None:
        """From now on the block can be hit."""
        self.evict(block)
        self._held[block] = node
        self._holders.setdefault(node, set()).add(block)

    def trust(self, block: int) -> None:
        """Someone adopted the block, so it was there."""
        self._doubtful.discard(block)

    def evict(self, block: int) -> None:
        """The pool handed the block out again."""
        node = self._held.pop(block, None)
        if node is not None:
            self._holders[node].discard(block)
            self._doubtful.discard(block)

    def clear(self) -> None:
        """Nothing can be hit."""
        self._holders.clear()
        self._held.clear()
        self._doubtful.clear()

    def doubt(self) -> None:
        """Any block may have been dropped, nobody says which."""
        self._doubtful.update(self._held)
