# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Plans the batches of a case for vLLM's worker, in place of vLLM's scheduler: what the kernels engine runs on.

It is as simple as the contract allows: a pool that never runs out, requests in their order, hits on whatever was
scheduled before. Block ids are scattered over the pool, and a window block that nobody needs any more is the next one
to be handed out, so that a stale entry of a block table points at another request's KV. Driver and step recorder hold
it as they hold vLLM's Scheduler, by the few attributes that they use.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, lcm
from types import SimpleNamespace
from typing import Any

import numpy as np

from fuzz.case import Case
from invariants.trace import NULL_BLOCK, Geometry, Group


def blocks_for(case: Case) -> int:
    """Blocks for all requests at once, each with as many lives as events can give it, and the null block."""
    sizes, windows = case.geometry, case.geometry.windows
    lives = 1 + sum(event.kind == "preempt" for event in case.events)
    blocks = (ceil(n / sizes.block_size) + windows * (ceil(n / sizes.swa_block_size) + 1) for n in case.max_lengths)
    return 1 + lives * sum(blocks)


@dataclass(slots=True, eq=False)
class Block:
    """A block of the pool, by the names that vLLM's have."""

    block_id: int
    ref_cnt: int = 0
    block_hash: bytes | None = None
    """What makes it a prefix's: all tokens up to its end."""

    @property
    def is_null(self) -> bool:
        """Whether it stands for no block."""
        return self.block_id == NULL_BLOCK


@dataclass(slots=True)
class _Life:
    """A request that is running."""

    request: Any
    """vLLM's Request."""
    tables: list[list[Block]] = field(default_factory=list)
    """[group] blocks."""
    sent: list[int] = field(default_factory=list)
    """[group] how many of them the worker knows."""


class Planner:
    """For one case. ``geometry``: its ``num_blocks`` must be enough for everything at once (``blocks_for``)."""

    def __init__(self, geometry: Geometry, groups: Sequence[Group]) -> None:
        self.requests: dict[str, Any] = {}
        self.running: list[Any] = []
        self.kv_cache_manager = self
        self.block_pool = self
        self.prev_step_scheduled_req_ids: set[str] = set()
        self.blocks = [Block(number) for number in range(geometry.num_blocks)]
        self._geometry = geometry
        self._groups = groups
        self._unit = lcm(*(group.block_size for group in groups))
        scattered = self.blocks[1:]
        random.Random(0).shuffle(scattered)
        self._free = scattered
        self._prefixes: dict[bytes, Block] = {}
        self._waiting: deque[Any] = deque()
        self._lives: dict[str, _Life] = {}
        self._gone: set[str] = set()
        self._preempted: set[str] = set()

    # What the driver calls.

    def add_request(self, request: Any) -> None:
        """Take in a vLLM Request."""
        self.requests[request.request_id] = request
        self._waiting.append(request)

    def schedule(self) -> Any:
        """A SchedulerOutput: a chunk for each running request, then new ones, while there are tokens and seats."""
        from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

        output = SchedulerOutput.make_empty()
        output.finished_req_ids, self._gone = self._gone, set()
        output.preempted_req_ids, self._preempted = self._preempted, set()
        cached = CachedRequestData.make_empty()
        left = self._geometry.max_num_batched_tokens
        for request in self.running:
            tokens = self._chunk(request, left)
            if not tokens:
                continue
            left -= tokens
            life = self._lives[request.request_id]
            self._allocate(life, tokens)
            cached.req_ids.append(request.request_id)
            cached.new_block_ids.append(self._news(life))
            cached.num_computed_tokens.append(request.num_computed_tokens)
            cached.num_output_tokens.append(request.num_output_tokens)
            self._count(output, request, tokens)
        while self._waiting and left and len(self.running) < self._geometry.max_num_seqs:
            request = self._waiting.popleft()
            life = self._lives[request.request_id] = self._admit(request)
            tokens = self._chunk(request, left)
            left -= tokens
            self._allocate(life, tokens)
            ids = self._news(life)
            known = list(request.all_token_ids)
            output.scheduled_new_reqs.append(NewRequestData.from_request(request, ids, known))
            self.running.append(request)
            self._count(output, request, tokens)
        output.scheduled_cached_reqs = cached
        return output

    def update_from_output(self, _output: Any, result: Any) -> dict[int, Any]:
        """Append what was sampled, and end those that have all their tokens. Has nothing to tell a client."""
        for name, tokens in zip(result.req_ids, result.sampled_token_ids, strict=True):
            request = self.requests[name]
            request.append_output_token_ids(tokens)
            if request.num_output_tokens >= request.max_tokens:
                self._end(request)
        return {}

    def finish_requests(self, name: str, _status: Any) -> None:
        """Abort a request."""
        self._end(self.requests[name])

    def _preempt_request(self, request: Any, *_: Any, **__: Any) -> None:
        """The driver has taken it from ``running``."""
        self._release(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._preempted.add(request.request_id)
        self._waiting.appendleft(request)

    def reset_prefix_cache(self) -> bool:
        """Not while anything is cached: as vLLM answers while a request runs."""
        return False

    def evict_blocks(self, ids: set[int]) -> None:
        """Forget prefixes."""
        for number in ids:
            if self.blocks[number].block_hash is not None:
                self._prefixes.pop(self.blocks[number].block_hash, None)  # type: ignore[arg-type]
                self.blocks[number].block_hash = None

    # What the step recorder reads.

    def get_blocks(self, name: str) -> Any:
        """An object whose ``blocks`` are the request's, [group]."""
        return SimpleNamespace(blocks=self._lives[name].tables)

    def record_prefix_cache_stats(self, request: Any, num_hits: int) -> None:
        """Called with every adopted hit, so that a recorder can listen."""

    def get_num_free_blocks(self) -> int:
        """Blocks that no request holds."""
        return sum(not block.ref_cnt for block in self.blocks[1:])

    # The plan.

    def _chunk(self, request: Any, left: int) -> int:
        """Tokens of a step; the threshold holds where another request could use what it leaves, as in vLLM."""
        most = (len(self.requests) > 1 and self._geometry.long_prefill_token_threshold) or left
        return min(int(request.num_tokens - request.num_computed_tokens), most, left)

    def _count(self, output: Any, request: Any, tokens: int) -> None:
        output.num_scheduled_tokens[request.request_id] = tokens
        output.total_num_scheduled_tokens += tokens
        request.num_computed_tokens += tokens
        self._register(request)

    def _admit(self, request: Any) -> _Life:
        """A life with what it adopts. A hit no longer than the window is none."""
        window = self._geometry.window
        tokens = np.array(request.all_token_ids, np.int32)
        adopted = self._lookup(tokens) if self._geometry.replay else []
        hit = len(adopted) * self._groups[0].block_size
        if hit <= window:
            adopted, hit = [], 0
        for block in adopted:
            block.ref_cnt += 1
        request.replay_start = hit - window if hit else 0
        request.num_computed_tokens = request.replay_start
        self.kv_cache_manager.record_prefix_cache_stats(request, hit)
        return _Life(request, [adopted, *([] for _ in self._groups[1:])], [0] * len(self._groups))

    def _lookup(self, tokens: Any) -> list[Block]:
        """Blocks of the cacheable group of the longest prefix known, but for the last token."""
        size, found = self._groups[0].block_size, []
        for end in range(size, len(tokens), size):
            block = self._prefixes.get(tokens[:end].tobytes())
            if block is None:
                break
            found.append(block)
        whole = len(found) * size // self._unit * self._unit
        return found[: whole // size]

    def _register(self, request: Any) -> None:
        """Blocks that are full with what has been scheduled can be hit from now on, by whole units."""
        size = self._groups[0].block_size
        table = self._lives[request.request_id].tables[0]
        tokens = np.array(request.all_token_ids, np.int32)
        whole = request.num_computed_tokens // self._unit * self._unit
        for index in range(whole // size):
            if table[index].block_hash is None:
                name = tokens[: (index + 1) * size].tobytes()
                table[index].block_hash = name
                self._prefixes.setdefault(name, table[index])

    def _allocate(self, life: _Life, tokens: int) -> None:
        """Blocks up to the end of the chunk; window blocks below its first query's window are given back."""
        request, null = life.request, self.blocks[NULL_BLOCK]
        first = max(request.num_computed_tokens - self._geometry.window + 1, request.replay_start, 0)
        for index, group in enumerate(self._groups):
            table, size = life.tables[index], group.block_size
            gone = first // size if group.kind == "window" else 0
            for column in range(min(gone, len(table))):
                if table[column] is not null:
                    self._give_back(table[column])
                    table[column] = null
            while len(table) * size < request.num_computed_tokens + tokens:
                table.append(null if len(table) < gone else self._take())

    def _news(self, life: _Life) -> tuple[list[int], ...]:
        """[group] ids that the worker does not know yet. A retired one it may keep, as vLLM's does."""
        ids = tuple([block.block_id for block in table[n:]] for table, n in zip(life.tables, life.sent, strict=True))
        life.sent = [len(table) for table in life.tables]
        return ids

    def _take(self) -> Block:
        block = self._free.pop()
        block.ref_cnt = 1
        return block

    def _give_back(self, block: Block) -> None:
        block.ref_cnt -= 1
        if not block.ref_cnt and block.block_hash is None:
            self._free.append(block)

    def _end(self, request: Any) -> None:
        name = request.request_id
        if request in self.running:
            self.running.remove(request)
            self._release(request)
            self._gone.add(name)
        elif request in self._waiting:
            self._waiting.remove(request)
        del self.requests[name]

    def _release(self, request: Any) -> None:
        for block in (block for table in self._lives.pop(request.request_id).tables for block in table):
            if not block.is_null:
                self._give_back(block)
