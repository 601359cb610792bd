# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""An independent model of the contract of bounded replay: what an engine owes, worked out from the trace alone.

Two halves. Pure functions turn a hit into everything that follows from it. ``predict`` says what the hit has to be: it
replays the trace's admissions and steps over a model of the prefix cache (``cache.py``). The model's positions, each
read from vLLM 0.33.0 (block_pool, kv_cache_manager) and owed by its documentation:

* A block can be hit as soon as its last token has been *scheduled*, so also later in the same step: KV is written
  before anyone attends to it. Within a step running requests come first, then admissions in their order. But its tokens
  have to be known: those of a step in flight, and drafts, are when that step's output is processed, if the life that
  computed them still is the request's.
* A block is known by all tokens up to its end, whichever request computed them, and by the next one where the drafter's
  KV depends on it; two blocks may hold the same tokens, and the prefix is lost when the last of them is.
* Freeing a block, a preemption included, loses nothing. A cached block is lost when the pool hands it out again, in any
  group: then its id appears newly in a block table. Tables only grow, apart from entries that become null.
* At least one token is left to compute, and hits end on multiples of every group's block size.
* A block that a load is to fill loses what it held when it is handed out, and can be hit once the scheduler has noted
  that the load is there; one of a sync load at once, as if it were computed. If the load fails it holds nothing.
* By priority, not by arrival, a request may be preempted in a step that had scheduled it already. Blocks that it was
  handed for that chunk are in no table of the step, though what they held is lost: any block may be, so there are only
  bounds. It computed nothing, so what it would have computed cannot be hit.
* With replay off the window group takes part, and what is owed of it is what a prompt sent again needs: the window
  before the last boundary that such a prompt can hit, and before each multiple of the retention interval if there is
  one. What else vLLM keeps is its own affair, so there are only bounds.

Imports nothing of vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import UNSET

from invariants.cache import PrefixCache
from invariants.flight import tokens_ahead
from invariants.trace import NULL_BLOCK, Admission, IntArray, Offer, Step, Trace, Turn


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


def trimmed_rows(computed: Any, scheduled: Any, tokens: Any, keeps_rows: Any, window: int) -> Any:
    """Whether decoder-side replay trims a row of ``scheduled`` tokens to its last W: a prefill's, longer than W, of a
    request whose rows are not all wanted (CONTRACT 21). ``tokens``: known at admission. Values or arrays."""
    return (computed < tokens) & (scheduled > window) & ~np.asarray(keeps_rows)


def decoder_floor(floor: Any, end: Any, trimmed: Any, window: int) -> Any:
    """First position of which the layers after the first trimmed one hold a key, for a row's queries: ``floor`` is
    the request's replay_start, ``end`` the row's first position that is not computed yet (CONTRACT 21)."""
    return np.where(trimmed, np.maximum(floor, end - window), floor)


def loaded_hit(local: int, offer: Offer | None, replay: int, multiple: int) -> tuple[int, int]:
    """(hit, external tokens of it) after a local hit of ``local``, with what a connector offers (CONTRACT 5, 7, 8).

    ``multiple``: tokens of a whole block. A load with the window is taken as it is, however short.
    """
    external = max(offer.tokens - local, 0) if offer else 0
    if offer and external and offer.carried:
        return local + external, external
    external -= external % multiple
    hit = adopted_hit(local + external, replay)
    return hit, external if hit else 0


def full_hit(common: int, tokens: int, block_size: int) -> int:
    """Hit of a request of ``tokens`` tokens whose first ``common`` ones are cached (CONTRACT 6)."""
    return min(common, tokens - 1) // block_size * block_size


def replay_block_is_null(hit: int, window: int, block_size: int) -> bool:
    """Whether vLLM's retention (from H-W+1 on) retires the window block that holds replay_start = H-W (CONTRACT 12)."""
    return hit > window and (hit - window + 1) % block_size == 0


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the lookup of one admission must find, before the rule that drops hits no longer than the window."""

    low: int
    high: int
    """Tokens; low < high only where the trace does not say enough."""
    doubt: str
    """What it does not say; "" where low == high is exact."""
    stranger: int | None
    """Index of the first adopted cacheable block that did not hold the request's tokens."""


def hit_multiple(trace: Trace) -> int:
    """Tokens that a hit is a multiple of: the scheduler block."""
    return math.lcm(*(group.block_size for group in trace.groups))


def predict(trace: Trace) -> list[Prediction | None]:
    """One prediction for each admission, in order; None for one that no step mentions."""
    return _Replay(trace).run()


@dataclass(slots=True)
class _Life:
    """How far one admission has been followed."""

    request: int
    seen: list[int]
    """In each group: entries of its table that are not new any more."""
    registered: dict[int, int]
    """In each caching group: blocks that had their turn."""
    known: int
    """Tokens, as far as output was processed."""
    tables: list[IntArray]
    """[group] as of its latest step."""
    end: int = 0
    """Tokens that it has been scheduled for."""
    gone: bool = False
    """Preempted, or its request ended: what a step in flight still delivers is not its own."""


def _at_once(admission: int) -> list[tuple[Turn, int]]:
    """An admission that waits for nothing."""
    return [("look up", admission), ("run", admission)]


class _Replay:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.multiple = hit_multiple(trace)
        kinds = [group.kind for group in trace.groups]
        self.cacheable = kinds.index("cacheable") if "cacheable" in kinds else 0
        self.windows = [group for group, kind in enumerate(kinds) if kind == "window" and not trace.replay_expected]
        """Window groups that take part in the prefix cache."""
        caching = (self.cacheable, *self.windows)
        self.ahead = tokens_ahead(trace.geometry)
        self.caches = {
            group: PrefixCache(trace.groups[group].block_size, self.multiple, self.ahead) for group in caching
        }
        self.nodes: dict[tuple[int, int], list[int]] = {}
        """Of each request, in each caching group."""
        self.lives: dict[int, _Life] = {}
        self.running: set[int] = set()
        """Admissions that have had a row."""
        self.processed = 0
        """Steps, from the first on."""

    def run(self) -> list[Prediction | None]:
        admissions = self.trace.admissions
        predictions: list[Prediction | None] = [None] * len(admissions)
        by_priority = any(request.priority is not None for request in self.trace.requests)
        for step in self.trace.steps:
            if step.processed is not None:
                self._process(step.processed)
            if by_priority and step.preempted:
                self._withdraw(step.preempted)
            for event in step.events:
                for cache in self.caches.values():
                    if event == "reset_prefix_cache":
                        cache.clear()
                    elif event == "drop_blocks":
                        cache.doubt()
            self._leave(step)
            first: dict[int, tuple[list[IntArray], int]] = {}
            ends = (step.computed + step.scheduled).tolist()
            for row, (admission, end) in enumerate(zip(step.admission.tolist(), ends, strict=True)):
                tables = [group[row] for group in step.tables]
                if admission in self.running:
                    self._schedule(step, tables, self.lives[admission], end)
                elif 0 <= admission < len(admissions):
                    first[admission] = tables, end
            for turn, admission in step.queue or [turn for number in sorted(first) for turn in _at_once(number)]:
                life = admissions[admission]
                tables, end = (life.load.tables, 0) if life.load else ([], 0)
                if turn != "arrive":
                    tables, end = first.get(admission, (tables, end))
                # What runs has been looked up, if nobody says when then just now.
                if turn == "look up" or admission not in self.lives:
                    predictions[admission] = self._admit(tables, life)
                    self.lives[admission] = self._adopt(life)
                if turn == "look up":
                    continue
                # A first chunk may end inside the replayed range, and what was adopted is cached all the same.
                self._schedule(step, tables, self.lives[admission], max(end, life.hit))
                if turn == "run":
                    self.running.add(admission)
        return predictions

    def _withdraw(self, preempted: Sequence[int]) -> None:
        """A chunk of theirs may have been scheduled, and taken back, in the same step. That named a block whose last
        token had only become known; and the chunk may have named blocks that it never filled."""
        for life in self.lives.values():
            if life.request in preempted and not life.gone:
                self._register(life, min(life.known - self.ahead, life.end))
        for cache in self.caches.values():
            cache.doubt()

    def _process(self, steps: int) -> None:
        """Take note of the outputs of all steps up to that number, in their order."""
        for step in self.trace.steps[self.processed : steps]:
            ends = (step.computed + step.scheduled).tolist()
            drafts, delivered = step.drafts, step.delivered or {}
            for row, admission in enumerate(step.admission.tolist()):
                life = self.lives.get(admission)
                if life is None or life.gone or not delivered.get(life.request):
                    continue
                life.known = ends[row] + delivered[life.request] - (0 if drafts is None else int(drafts[row]))
                self._register(life, life.known - 1)
            for request in step.finished:
                self._gone(request)
        self.processed = max(self.processed, steps)

    def _leave(self, step: Step) -> None:
        """Lives that end before the step is executed."""
        aborted = [request for request in step.finished if self.trace.requests[request].finished == "abort"]
        for request in (*step.preempted, *aborted):
            self._gone(request)

    def _gone(self, request: int) -> None:
        for life in self.lives.values():
            life.gone |= life.request == request

    def _admit(self, tables: list[IntArray], admission: Admission) -> Prediction:
        """Look the request up, before it takes its blocks."""
        low, high = self.caches[self.cacheable].lookup(self._nodes(admission.request, self.cacheable), admission.tokens)
        doubt = "drop_blocks, or a chunk that was withdrawn, may have cost a block of it" if low < high else ""
        if self.windows:
            low, doubt = self._window_hit(admission.request, low), "replay is off, so the window group takes part"
        if not self.trace.requests[admission.request].reads_cache:
            low, high, doubt = 0, 0, ""
        if not tables:
            low, doubt = 0, "without block tables nobody knows what was evicted"
        stranger = None
        for group, cache in self.caches.items():
            table = tables[group][: admission.local // cache.block_size].tolist() if tables else []
            for index, (block, node) in enumerate(zip(table, self._nodes(admission.request, group), strict=False)):
                if cache.holds(block, node):
                    cache.trust(block)
                elif group == self.cacheable:
                    stranger = index
                    break
        return Prediction(low, high, doubt, stranger)

    def _adopt(self, admission: Admission) -> _Life:
        """The life as it begins: what it adopted is neither new nor registered again. Blocks for a load are new."""
        blocks = [admission.local // group.block_size for group in self.trace.groups]
        seen = [adopted if group in self.caches else 0 for group, adopted in enumerate(blocks)]
        caching = {group: blocks[group] for group in self.caches}
        life = _Life(admission.request, seen, caching, admission.tokens, [])
        if admission.load:
            self._hand_out(admission.load.tables, life)
        return life

    def _window_hit(self, request: int, most: int) -> int:
        """Longest hit up to ``most`` whose window is surely cached too, in every window group."""
        windows = [(self.caches[group], self._nodes(request, group)) for group in self.windows]
        for hit in range(most, 0, -self.multiple):
            kept = [(cache, nodes[slice(*self._kept(hit, cache.block_size))]) for cache, nodes in windows]
            if all(nodes and all(map(cache.certain, nodes)) for cache, nodes in kept):
                return hit
        return 0

    def _kept(self, boundary: int, block_size: int) -> tuple[int, int]:
        """Window blocks [first, end) that a hit ending at the boundary needs."""
        end = boundary // block_size
        return max(end - math.ceil((self.trace.geometry.window - 1) / block_size), 0), end

    def _hand_out(self, tables: list[IntArray], life: _Life) -> None:
        """Blocks newly in the life's tables lose what they held."""
        for group, table in enumerate(tables):
            seen = life.seen[group]
            if len(table) > seen:
                life.seen[group] = len(table)
                for block in table[seen:].tolist():
                    for cache in self.caches.values():
                        cache.evict(block)

    def _schedule(self, step: Step, tables: list[IntArray], life: _Life, end: int) -> None:
        """Blocks newly in the life's tables lose what they held; those full with known tokens can be hit."""
        self._hand_out(tables, life)
        life.tables, life.end = tables, end
        # Without a word about it, what is scheduled is known.
        self._register(life, end if step.processed is None else min(end, life.known - self.ahead))

    def _register(self, life: _Life, end: int) -> None:
        """Blocks that are full with ``end`` tokens, and whose name is known, can be hit."""
        for group, cache in self.caches.items():
            first, last = life.registered[group], end // self.multiple * self.multiple // cache.block_size
            if last <= first:
                continue
            life.registered[group] = last
            kept = None if group == self.cacheable else self._retained(life.request, end, cache.block_size)
            nodes = self._nodes(life.request, group)[first:last]
            # Without tables a prefix stands for its block: it is never seen to be evicted.
            blocks = life.tables[group][first:last].tolist() if life.tables else [-node for node in nodes]
            for index, (block, node) in enumerate(zip(blocks, nodes, strict=False), first):
                if block != NULL_BLOCK and (kept is None or index in kept):
                    cache.register(block, node)

    def _retained(self, request: int, end: int, block_size: int) -> set[int]:
        """Window blocks of a request, up to ``end`` tokens of it, that the prefix cache has to keep."""
        prompt, interval = len(self.trace.requests[request].prompt), self.trace.geometry.retention
        boundaries = {(prompt - 1) // self.multiple * self.multiple}
        if interval is None or (interval is not UNSET and interval > 0):
            boundaries.update(range(0, end + 1, interval or self.multiple))
        return {block for boundary in boundaries for block in range(*self._kept(boundary, block_size))}

    def _nodes(self, request: int, group: int) -> list[int]:
        nodes = self.nodes.get((request, group))
        if nodes is None:
            nodes = self.nodes[request, group] = self.caches[group].nodes(self.trace.requests[request])
        return nodes
