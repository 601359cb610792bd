# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The bytes of the KV cache: digests of what is in the prefix cache, and poison in what a step may not read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fuzz.engines.config import is_window
from fuzz.engines.core import Core
from fuzz.engines.drive import Scheduled
from invariants.trace import NULL_BLOCK, CachedBytes, IntArray

POISON = 4.0
"""Finite, and no number of a key: its rows have a mean square of one, the poison's has 16."""


class CacheWatch:
    """Follows every stay of a block in the prefix cache, from step to step."""

    def __init__(self, core: Core) -> None:
        self._pool = core.scheduler.kv_cache_manager.block_pool
        self._groups = [
            index for index, group in enumerate(core.layout.kv_cache_groups) if group.kv_cache_spec.prefix_cacheable
        ]
        self._caches = core.caches()
        self._factors = [_factors(caches) for caches in self._caches]
        self._open: list[dict[int, tuple[Any, int, int, int, int]]] = [{} for _ in core.layout.kv_cache_groups]
        """[group] block -> its hash, since, until, digest before, digest after"""
        self._closed: list[list[tuple[int, int, int, int, int]]] = [[] for _ in core.layout.kv_cache_groups]

    def look(self, scheduled: Scheduled) -> None:
        """After the step has been executed."""
        cached: dict[int, dict[int, Any]] = {group: {} for group in self._groups}
        for group, block, name in _cached_blocks(self._pool):
            cached.get(group, {})[block] = name
        for group, hashes in cached.items():
            stays = self._open[group]
            for block in [block for block, stay in stays.items() if hashes.get(block) != stay[0]]:
                self._closed[group].append((block, *stays.pop(block)[1:]))
            digests = self._digests(group, list(hashes))
            for (block, name), digest in zip(hashes.items(), digests, strict=True):
                _, since, _, before, after = stays.get(block, (name, scheduled.index, 0, digest, digest))
                if before == after:  # else the step that changed it stays on record
                    stays[block] = (name, since, scheduled.index, before, digest)

    def _digests(self, group: int, blocks: list[int]) -> list[int]:
        """64 bits for each block: a sum of its words with odd factors, over all layers."""
        import torch

        if not blocks:
            return []
        total = torch.zeros(len(blocks), dtype=torch.int64)
        index = torch.tensor(blocks)
        for cache, factors in zip(self._caches[group], self._factors[group], strict=True):
            words = cache[index].reshape(len(blocks), -1).view(torch.int64)
            total += (words * factors).sum(1)
        return [int(value) & (1 << 64) - 1 for value in total]

    def result(self) -> list[CachedBytes]:
        """Every stay, those that the end of the run found going on included."""
        found = []
        for group in self._groups:
            stays = self._closed[group] + [(block, *stay[1:]) for block, stay in self._open[group].items()]
            columns = list(zip(*stays, strict=True)) or [()] * 5
            block, since, until = (np.array(column, np.int32) for column in columns[:3])
            before, after = (np.array(column, np.uint64) for column in columns[3:])
            found.append(CachedBytes(group, block, since, until, before, after))
        return found


class Poisoner:
    """Overwrites, before a step is executed, everything that no request may read from then on.

    What may be read, by the contract: of the window group the last W - 1 positions before each running request's next
    token, not below its replay_start; of a cacheable group all that is computed; and whatever is in the prefix cache.
    """

    def __init__(self, core: Core, window: int) -> None:
        self._scheduler = core.scheduler
        self._caches = core.caches()
        self._groups = [group.kv_cache_spec for group in core.layout.kv_cache_groups]
        self._window = window
        self._start: dict[str, int] = {}

    def __call__(self, output: Any) -> None:
        """Before ``output``, a SchedulerOutput, is executed."""
        from fuzz.probe.caches import cells

        for data in output.scheduled_new_reqs:
            self._start[data.req_id] = data.replay_start
        readable = [np.zeros(caches[0].shape[:2], bool) for caches in self._caches]
        # Groups take their blocks from one pool of memory: each block is looked at as its owner has it.
        owned = np.zeros((len(readable), len(readable[0])), bool)
        for group, cached, _ in _cached_blocks(self._scheduler.kv_cache_manager.block_pool):
            readable[group][cached] = owned[group, cached] = True
        for request in self._scheduler.running:
            computed = request.num_computed_tokens - output.num_scheduled_tokens.get(request.request_id, 0)
            tables = self._scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
            for group, blocks in enumerate(tables):
                table = np.array([block.block_id for block in blocks], np.int64)
                owned[group, table] = True
                self._mark(readable[group], group, table, computed, self._start.get(request.request_id, 0))
        owned[:, NULL_BLOCK] = False
        owned[0, ~owned.any(0)] = True
        for group, mask in enumerate(readable):
            mask[NULL_BLOCK] = False
            block, row = np.nonzero(~mask & owned[group, :, None])
            for cache in self._caches[group]:
                cells(cache)[block, row] = POISON

    def _mark(self, readable: Any, group: int, table: IntArray, computed: int, start: int) -> None:
        spec = self._groups[group]
        rows = readable.shape[1]
        low, high = 0, computed // (spec.block_size // rows)
        if is_window(spec):
            low, high = max(start, computed - self._window + 1, 0), computed
        position = np.arange(low, min(high, len(table) * rows))
        readable[table[position // rows], position % rows] = True


def _factors(caches: list[Any]) -> list[Any]:
    """[layer] int64 [words a block]: odd numbers, other ones for each layer."""
    import torch

    words = [cache[0].numel() * cache.element_size() // 8 for cache in caches]
    return [(torch.arange(n) + layer * 1000003) * -7046029254386353131 | 1 for layer, n in enumerate(words)]


def _cached_blocks(pool: Any) -> Iterator[tuple[int, int, Any]]:
    """Group, id and hash of every block in the prefix cache."""
    from vllm.v1.core.kv_cache_utils import get_group_id

    for block in pool.blocks:
        if block.block_hash is not None:
            yield get_group_id(block.block_hash), block.block_id, block.block_hash
