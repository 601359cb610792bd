# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Correct traces with external loads, laid out by hand as those of ``traces.py`` are."""

from __future__ import annotations

from typing import Any

import traces
from traces import Row, ints

from invariants.trace import Admission, Load, Offer, Trace

PROMPT = range(300, 313)
"""13 tokens: three blocks of 4 and one."""


def load(cacheable: list[int], window: list[int], tokens: int, **fields: Any) -> Load:
    return Load(
        tokens, **{"carried": False, "begun": 0, "waits": True, **fields}, tables=[ints(*cacheable), ints(*window)]
    )


def loaded_then_replayed() -> Trace:
    """While a prime of 5 tokens decodes, a connector brings 9 tokens of a query without the window; then the query once
    more.

    Whole blocks count, so H = 8, and replay_start = 4. Nothing of the query is scheduled until the load is over, with
    step 1. Its window table begins with (8-4+1)//2 = 2 null blocks. In step 2 a budget of 8 leaves it 7,
    4..10. In step 3 the last 2 tokens fill the third block, and the same prompt hits it at once: H = 12, replay_start =
    8, 5 tokens left, (12-4+1)//2 = 4 null blocks.
    """
    trace = traces.trace_of(
        [
            traces.request("prime", 0, range(100, 105), [200, 201, 202, 203]),
            traces.request("query", 0, PROMPT, [400]),
            traces.request("again", 3, PROMPT, [401]),
        ],
        [
            Admission(0, request=0, tokens=5, hit=0, replay_start=0, computed=0, scheduled=5, resumed=False),
            Admission(2, request=1, tokens=13, hit=8, replay_start=4, computed=4, scheduled=7, resumed=False),
            Admission(3, request=2, tokens=13, hit=12, replay_start=8, computed=8, scheduled=5, resumed=False),
        ],
    )
    trace.requests[1].offer = Offer(9, carried=False)
    trace.admissions[1].load = load([3, 4], [0, 0, 5, 6], 8, over=1)
    traces.lay(
        trace,
        [
            [Row(0, 0, 5, True, 0, [1, 2], [7, 8, 9])],
            [Row(0, 5, 1, False, 0, [1, 2], [0, 8, 9])],
            [
                Row(0, 6, 1, False, 0, [1, 2], [0, 8, 9, 10]),
                Row(1, 4, 7, True, 4, [3, 4, 11], [0, 0, 5, 6, 12, 13]),
            ],
            [
                Row(0, 7, 1, False, 0, [1, 2], [0, 0, 9, 10]),
                Row(1, 11, 2, True, 4, [3, 4, 11, 14], [0, 0, 0, 0, 12, 13, 15]),
                Row(2, 8, 5, True, 8, [3, 4, 11, 16], [0, 0, 0, 0, 17, 18, 19]),
            ],
        ],
    )
    trace.steps[0].queue = [("look up", 0), ("run", 0), ("look up", 1)]
    trace.steps[2].queue = [("arrive", 1), ("run", 1)]
    trace.steps[3].queue = [("look up", 2), ("run", 2)]
    trace.steps[3].finished = [0, 1, 2]
    trace.metrics = {
        "prefix_cache_queries": 31,
        "prefix_cache_hits": 12,
        "preempted_hits": 0,
        "cached_tokens": 20,
        "external_tokens": 8,
        "connector_hits": 8,
        "connector_preempted_hits": 0,
    }
    return trace


def loaded_with_its_window() -> Trace:
    """A connector brings 10 tokens of a prompt, with their window, at once; a step later comes the same prompt.

    H = 10, within a block, nothing is replayed, 3 tokens are left. The window table begins with (10-4+1)//2 = 3 null
    blocks, and the load writes positions 6 to 9. With token 12 three blocks are full, so the second one hits 12.
    """
    trace = traces.trace_of(
        [traces.request("query", 0, PROMPT, [400]), traces.request("again", 1, PROMPT, [401])],
        [
            Admission(0, request=0, tokens=13, hit=10, replay_start=0, computed=10, scheduled=3, resumed=False),
            Admission(1, request=1, tokens=13, hit=12, replay_start=8, computed=8, scheduled=5, resumed=False),
        ],
    )
    trace.requests[0].offer = Offer(10, carried=True)
    trace.admissions[0].load = load([1, 2, 3, 4], [0, 0, 0, 5, 6, 7, 8], 10, carried=True, waits=False)
    traces.lay(
        trace,
        [
            [Row(0, 10, 3, True, 0, [1, 2, 3, 4], [0, 0, 0, 5, 6, 7, 8])],
            [Row(1, 8, 5, True, 8, [1, 2, 3, 9], [0, 0, 0, 0, 10, 11, 12])],
        ],
    )
    trace.steps[0].queue = [("look up", 0), ("run", 0)]
    trace.steps[0].finished, trace.steps[1].finished = [0], [1]
    trace.metrics = {"prefix_cache_queries": 26, "prefix_cache_hits": 12, "cached_tokens": 22, "external_tokens": 10}
    return trace


def load_failed() -> Trace:
    """A load of 8 tokens fails with step 1: its blocks hold nothing, and the request begins anew, without it."""
    trace = traces.trace_of(
        [traces.request("query", 0, PROMPT, [400])],
        [
            Admission(-1, request=0, tokens=13, hit=8, replay_start=0, computed=0, scheduled=0, resumed=False),
            Admission(2, request=0, tokens=13, hit=0, replay_start=0, computed=0, scheduled=8, resumed=False),
        ],
    )
    trace.requests[0].offer = Offer(8, carried=True)
    trace.admissions[0].load = load([1, 2], [0, 0, 3, 4], 8, carried=True, over=1, failed=True)
    traces.lay(
        trace,
        [
            [],
            [],
            [Row(1, 0, 8, True, 0, [2, 1], [4, 3, 5, 6])],
            [Row(1, 8, 5, True, 0, [2, 1, 7, 8], [0, 0, 5, 6, 9, 10, 11])],
        ],
    )
    trace.steps[0].queue = [("look up", 0)]
    trace.steps[2].queue = [("look up", 1), ("run", 1)]
    trace.steps[3].finished = [0]
    trace.metrics = {"prefix_cache_queries": 26, "prefix_cache_hits": 0, "cached_tokens": 0, "connector_hits": 8}
    return trace


LOADED = {make.__name__: make for make in (loaded_then_replayed, loaded_with_its_window, load_failed)}
