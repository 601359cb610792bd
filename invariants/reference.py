# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""An independent model of the contract of bounded replay: what an engine owes, worked out from the trace alone.

Two halves. The pure functions turn a hit into everything that follows from it. ``predict`` says what the hit has to be:
it replays the trace's admissions and steps over ``PrefixCache``, a model of the prefix cache of the cacheable group.

The model's positions, each read from vLLM 0.33.0 (block_pool, kv_cache_manager) and owed by its documentation:

* A block can be hit as soon as its last token has been *scheduled*, so also later in the same step: KV is written
  before anyone attends to it. Within a step running requests come first, then admissions in their order.
* A block is known by all tokens up to its end, whichever request computed them; two blocks may hold the same tokens,
  and the prefix is lost when the last of them is.
* Freeing a block, a preemption included, loses nothing. A cached block is lost when the pool hands it out again, in any
  group: then its id appears newly in a block table. Tables only grow, apart from entries that become null.
* At least one token is left to compute, and hits end on multiples of every group's block size.

Never told anything by vLLM but block ids; imports nothing of vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from invariants.trace import NULL_BLOCK, Step, Trace, TracedRequest


def adopted_hit(hit: int, replay: int) -> int:
    """Tokens of a hit that are used: none of one that replay would recompute in full (CONTRACT 5).

    ``replay`` is the window W where replay is on and 0 where it is off, here and below.
    """
    return 0 if hit <= replay else hit


def replay_start(hit: int, replay: int) -> int:
    """First position whose window KV is rebuilt after an adopted hit; 0: nothing is replayed (CONTRACT 4)."""
    return hit - replay if 0 < replay < hit else 0


def computed_tokens(hit: int, replay: int) -> int:
    """Tokens counted as computed when the first chunk is scheduled: the hit, rewound by W if it is replayed."""
    return replay_start(hit, replay) if 0 < replay < hit else hit


def tokens_left(tokens: int, hit: int, replay: int) -> int:
    """Tokens to schedule after an adopted hit, out of ``tokens`` known ones."""
    return tokens - computed_tokens(hit, replay)


def window_first(position: Any, floor: Any, window: int) -> Any:
    """First position that the query at ``position`` reads; ``floor`` is its request's replay_start. Ints or arrays."""
    return np.maximum(floor, position - window + 1)


def gather_length(first_query: int, queries: int, floor: int, window: int) -> int:
    """Positions that a chunk of ``queries`` queries from ``first_query`` on reads together."""
    return int(first_query + queries - window_first(first_query, floor, window))


def full_hit(common: int, tokens: int, block_size: int) -> int:
    """Hit of a request of ``tokens`` tokens whose first ``common`` ones are cached (CONTRACT 6)."""
    return min(common, tokens - 1) // block_size * block_size


def replay_block_is_null(hit: int, window: int, block_size: int) -> bool:
    """Whether vLLM's retention (from H-W+1 on) retires the window block that holds replay_start = H-W (CONTRACT 12)."""
    return hit > window and (hit - window + 1) % block_size == 0


class PrefixCache:
    """Which blocks hold which prefix. A prefix is named by a node: the index of its block in a tree of all prefixes."""

    def __init__(self, block_size: int, multiple: int) -> None:
        """Blocks of ``block_size`` tokens; hits end on multiples of ``multiple`` tokens."""
        self.block_size = block_size
        self.multiple = multiple
        self._tree: dict[tuple[int, bytes], int] = {}
        self._holders: dict[int, set[int]] = {}
        self._held: dict[int, int] = {}
        self._doubtful: set[int] = set()

    def nodes(self, request: TracedRequest) -> list[int]:
        """One node for each full block of everything that the request ever held, prompt and output."""
        data = np.concatenate([request.prompt, np.asarray(request.output, np.int32)]).astype(np.int32).tobytes()
        size = 4 * self.block_size
        nodes, parent = [], 0
        for end in range(size, len(data) + 1, size):
            parent = self._tree.setdefault((parent, data[end - size : end]), len(self._tree) + 1)
            nodes.append(parent)
        return nodes

    def lookup(self, nodes: Sequence[int], tokens: int) -> tuple[int, int]:
        """Least and most tokens that a request of ``tokens`` tokens may hit."""
        sure = most = 0
        for node in nodes[: (tokens - 1) // self.block_size]:
            holders = self._holders.get(node)
            if not holders:
                break
            if sure == most and not holders <= self._doubtful:
                sure += 1
            most += 1
        low, high = (blocks * self.block_size // self.multiple * self.multiple for blocks in (sure, most))
        return low, high

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


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the lookup of one admission must find, before the rule that drops hits no longer than the window."""

    low: int
    high: int
    """Tokens; low < high only where the trace does not say enough."""
    doubt: str
    """What it does not say; "" where low == high is exact."""
    stranger: int | None
    """Index of the first adopted block that did not hold the request's tokens."""


def hit_multiple(trace: Trace) -> int:
    """Tokens that a hit is a multiple of: the scheduler block."""
    return math.lcm(*(group.block_size for group in trace.groups))


def predict(trace: Trace) -> list[Prediction | None]:
    """One prediction for each admission, in order; None for one that no step mentions."""
    return _Replay(trace).run()


class _Replay:
    """The trace's admissions and steps in order, over a PrefixCache."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        group = next((i for i, group in enumerate(trace.groups) if group.kind == "cacheable"), 0)
        self.group = group
        self.cache = PrefixCache(trace.groups[group].block_size, hit_multiple(trace))
        self.nodes: dict[int, list[int]] = {}
        self.seen: dict[int, list[int]] = {}
        """For each admission: entries seen so far of its table in each group."""
        self.registered: dict[int, int] = {}
        """For each admission: cacheable blocks registered so far."""

    def run(self) -> list[Prediction | None]:
        admissions = self.trace.admissions
        predictions: list[Prediction | None] = [None] * len(admissions)
        for step in self.trace.steps:
            for event in step.events:
                if event == "reset_prefix_cache":
                    self.cache.clear()
                elif event == "drop_blocks":
                    self.cache.doubt()
            fresh: list[tuple[int, int]] = []
            for row, admission in enumerate(step.admission.tolist()):
                if not 0 <= admission < len(admissions):
                    continue
                if predictions[admission] is None:
                    fresh.append((admission, row))
                else:
                    self._schedule(step, admission, row)
            for admission, row in sorted(fresh):
                predictions[admission] = self._admit(step, admission, row)
        return predictions

    def _of(self, admission: int) -> list[int]:
        request = self.trace.admissions[admission].request
        nodes = self.nodes.get(request)
        if nodes is None:
            nodes = self.nodes[request] = self.cache.nodes(self.trace.requests[request])
        return nodes

    def _admit(self, step: Step, admission: int, row: int) -> Prediction:
        """Look the request up, then let it take its blocks."""
        life = self.trace.admissions[admission]
        nodes = self._of(admission)
        low, high = self.cache.lookup(nodes, life.tokens)
        doubt = ""
        if not self.trace.replay_expected:
            low, doubt = 0, "replay is off, so the window group takes part in the lookup"
        elif not step.tables:
            low, doubt = 0, "without block tables nobody knows what was evicted"
        elif low < high:
            doubt = "drop_blocks may have dropped a block of it"
        adopted = life.hit // self.cache.block_size
        stranger = None
        if step.tables:
            table = step.tables[self.group][row][:adopted].tolist()
            for index, (block, node) in enumerate(zip(table, nodes, strict=False)):
                if not self.cache.holds(block, node):
                    stranger = index
                    break
                self.cache.trust(block)
        # Window blocks are adopted, or null, only where replay is off.
        reused = 0 if self.trace.replay_expected else life.hit
        self.seen[admission] = [
            (life.hit if g == self.group else reused) // group.block_size for g, group in enumerate(self.trace.groups)
        ]
        self.registered[admission] = adopted
        self._schedule(step, admission, row)
        return Prediction(low, high, doubt, stranger)

    def _schedule(self, step: Step, admission: int, row: int) -> None:
        """Blocks newly in the row's tables lose what they held; blocks that the chunk fills can be hit."""
        for block in self._new_blocks(step, admission, row):
            self.cache.evict(block)
        done = self.registered[admission]
        end = int(step.computed[row]) + int(step.scheduled[row])
        full = end // self.cache.multiple * self.cache.multiple // self.cache.block_size
        if full <= done:
            return
        nodes = self._of(admission)[done:full]
        # Without tables a prefix stands for its block: it is never seen to be evicted.
        blocks = step.tables[self.group][row][done:full].tolist() if step.tables else [-node for node in nodes]
        for block, node in zip(blocks, nodes, strict=False):
            if block != NULL_BLOCK:
                self.cache.register(block, node)
        self.registered[admission] = full

    def _new_blocks(self, step: Step, admission: int, row: int) -> Iterator[int]:
        seen = self.seen[admission]
        for group, tables in enumerate(step.tables):
            table = tables[row]
            if len(table) > seen[group]:
                yield from table[seen[group] :].tolist()
                seen[group] = len(table)
