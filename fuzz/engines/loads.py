# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""External loads, for the step recorder: what a connector writes into which slots, and when the scheduler knows of it.

Relied upon: a load writes its external tokens into the cacheable groups, and into a window group that it carries every
position below its hit whose block is there, as a transfer of the request's own blocks does. A sync load is there before
the step's own writes, an async one with the output of the step that reports it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fuzz.engines.shadow import ShadowGroup, slot_map
from invariants.trace import NULL_BLOCK, IntArray, Load, Trace, Turn

Log = list[tuple[Turn, str, int]]
"""What the scheduler did with those that waited, with whom, and how many tokens a lookup hit."""


class Loads:
    """Of one case, whose scheduler has ``connector.py``. Arrivals go to the recorder's ``log``."""

    def __init__(self, trace: Trace, scheduler: Any, shadows: Sequence[ShadowGroup], log: Log) -> None:
        self._log = log
        self._trace = trace
        self._connector = scheduler.connector
        self._shadows = shadows
        self._under_way: dict[str, tuple[int, tuple[int, ...]]] = {}
        """For which admission, and into which groups."""
        self._watch(scheduler.kv_cache_manager)

    def _watch(self, manager: Any) -> None:
        """Note each arrival where vLLM puts its blocks into the prefix cache."""
        cache = manager.cache_blocks

        def arrive(request: Any, num_computed_tokens: int) -> None:
            self._log.append(("arrive", request.request_id, 0))
            cache(request, num_computed_tokens)

        manager.cache_blocks = arrive

    def end(self, step: int) -> None:
        """Loads that were over with the output of that step."""
        for name, failed in self._connector.take_over():
            number, groups = self._under_way.pop(name)
            load = self._trace.admissions[number].load
            assert load is not None
            load.over, load.failed = step, failed
            if not failed:
                self._write(number, groups, load.tables)

    def begin(self, number: int, name: str, begun: Any, tables: list[IntArray], step: int) -> None:
        """The admission begins with a load (``connector.Begun``) into these tables."""
        life = self._trace.admissions[number]
        carried = all(index in begun.groups for index in range(len(tables)))
        life.load = Load(begun.tokens, carried, step, begun.steps > 0, tables)
        life.hit += begun.tokens
        self._under_way[name] = number, begun.groups

    def allocated(self) -> None:
        """The shadow cache knows the blocks of the loads that begin in this step: sync ones are there now."""
        for name, (number, groups) in list(self._under_way.items()):
            load = self._trace.admissions[number].load
            if load is not None and not load.waits:
                self._write(number, groups, load.tables)
                del self._under_way[name]

    @staticmethod
    def queue(log: Log, first_chunks: Sequence[str], admission: Mapping[str, int]) -> list[tuple[Turn, int]]:
        """``Step.queue``. ``first_chunks``: requests that begin to run in the step, in the scheduler's order."""
        queue: list[tuple[Turn, str]] = []
        runs, seen = list(first_chunks), set[str]()
        for index, (turn, name, _) in enumerate(log):
            if turn == "arrive" and any(("look up", name) == later[:2] for later in log[index:]):
                continue  # of a life that is over: vLLM looks the request up once more
            # One waits after the other: whoever had its turn before has run by now, if it does in this step at all.
            last = max((place for place, other in enumerate(runs) if other in seen and other != name), default=-1)
            if name in runs:
                last = max(last, runs.index(name) - 1)
            queue += [("run", other) for other in runs[: last + 1]]
            del runs[: last + 1]
            queue.append((turn, name))
            seen.add(name)
        queue += [("run", name) for name in runs]
        return [(turn, admission[name]) for turn, name in queue]

    def _write(self, number: int, groups: Sequence[int], tables: Sequence[IntArray]) -> None:
        life = self._trace.admissions[number]
        for index in groups:
            group, table, shadow = self._trace.groups[index], tables[index], self._shadows[index]
            position = np.arange(life.local if group.prefix_cacheable else 0, life.hit, dtype=np.int32)
            position = position[position < len(table) * group.block_size]
            position = position[table[position // group.block_size] != NULL_BLOCK]
            writer = np.full(len(position), number, np.int32)
            shadow.write(writer, position, slot_map(table, group.block_size)[position])
