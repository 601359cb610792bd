# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Corners of the KV cache's layout: window groups and their blocks, what retention keeps, the longest request."""

from __future__ import annotations

from math import ceil

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from fuzz.case import MAX_WINDOW_GROUPS, Case, Request
from fuzz.strategies import Sizes, blocks_needed, replay_start_can_be_null


def with_larger_window_blocks(plain: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The same cases, one in five with a window block of twice, or one and a half times, the cacheable block: hits end
    on multiples of both. Prompts and chunks grow with the multiple, so that what they share stays as long in hits."""
    return st.builds(_larger_window_block, plain, st.sampled_from((1,) * 16 + (3, 3, 2, 2)))


def _larger_window_block(case: Case, times: int) -> Case:
    """``times``: how much longer hits get. Only where the block that replay starts in stays (CONTRACT 12)."""
    geometry = case.geometry
    times = 2 if times == 3 and geometry.block_size % 2 else times
    block = geometry.block_size * times // (1 if times == 2 else 2)
    if times == 1 or replay_start_can_be_null(Sizes(geometry.window, geometry.block_size, block)):
        return case
    requests = tuple(
        msgspec.structs.replace(
            request, prompt=tuple((stream, times * start, times * stop) for stream, start, stop in request.prompt)
        )
        for request in case.requests
    )
    case = msgspec.structs.replace(case, requests=requests)
    sizes, chunk = Sizes(geometry.window, geometry.block_size, block), times * geometry.max_num_batched_tokens
    # A window block may get smaller, too: then there are more of them.
    needed = 1 + max(blocks_needed(sizes, chunk, length) for length in case.max_lengths)
    geometry = msgspec.structs.replace(
        geometry,
        swa_block_size=block,
        num_blocks=max(needed, 1 + times * (geometry.num_blocks - 1)),
        max_num_batched_tokens=chunk,
    )
    return msgspec.structs.replace(case, geometry=geometry)


def with_window_groups(plain: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The same cases, one in ten with two to four window groups in place of one."""
    return st.builds(_more_windows, plain, st.integers(0, 39).map(lambda number: max(0, number - 35)))


def _more_windows(case: Case, more: int) -> Case:
    """``more`` window groups more, and as many blocks as they take: a tight pool stays as tight."""
    if not more:
        return case
    geometry = case.geometry
    sizes, chunk = Sizes.of(geometry), geometry.max_num_batched_tokens
    lengths = case.max_lengths
    roomy = geometry.num_blocks > sum(blocks_needed(sizes, chunk, length) for length in lengths)
    windows = [
        blocks_needed(sizes, chunk, length) - ceil(length / geometry.block_size)
        for length in (lengths if roomy else [max(lengths)])
    ]
    groups = min(1 + more, MAX_WINDOW_GROUPS)
    blocks = geometry.num_blocks + (groups - 1) * sum(windows)
    return msgspec.structs.replace(
        case, geometry=msgspec.structs.replace(geometry, window_groups=groups, num_blocks=blocks)
    )


def with_retention(plain: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The same cases, one in eight with a retention interval, mostly without replay (with it, it changes nothing), and
    with two requests more, the second of which shares most of the first one's prompt."""
    return st.builds(
        _retain,
        plain,
        st.sampled_from((None,) * 28 + (0, 1, 2, 3)),
        st.sampled_from((False,) * 5 + (True,)),
        st.sampled_from((0, 1, -1)),
    )


def _retain(case: Case, units: int | None, replay: bool, delta: int) -> Case:
    """``units``: the interval in hit units, 0: every one; None: the case as it is. ``delta``: how many tokens more than
    three intervals, and the one that is always computed, are shared."""
    geometry = case.geometry
    if units is None:
        return case
    sizes, chunk = Sizes.of(geometry), geometry.max_num_batched_tokens
    step = max(1, units) * sizes.hit_unit
    shared, whole = 3 * step + 1 + delta, 4 * step + geometry.window
    after = max(request.arrive for request in case.requests) + sum(case.max_lengths)
    more = (
        Request(id="whole", arrive=after, prompt=(("kept", 0, whole),)),
        Request(id="part", arrive=after + whole + 1, prompt=(("kept", 0, shared), ("part", 0, 2))),
    )
    blocks = geometry.num_blocks + blocks_needed(sizes, chunk, whole + 1)
    geometry = msgspec.structs.replace(geometry, retention=step if units else None, replay=replay, num_blocks=blocks)
    return msgspec.structs.replace(case, geometry=geometry, requests=(*case.requests, *more))


def with_model_length(plain: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The same cases, one in ten with a limit for a request's tokens that cuts outputs short, or refuses a prompt."""
    return st.builds(_limit, plain, st.sampled_from((None,) * 27 + (1, 3, 0)))


def _limit(case: Case, room: int | None) -> Case:
    """``room``: tokens that the longest prompt leaves for its output; 0: it is refused; None: the case as it is."""
    limit = min(max(map(len, case.requests)) + (room or 0), case.max_model_len)
    if room is None or limit < 2:
        return case
    threshold = min(case.geometry.long_prefill_token_threshold, limit)
    geometry = msgspec.structs.replace(case.geometry, max_model_len=limit, long_prefill_token_threshold=threshold)
    return msgspec.structs.replace(case, geometry=geometry)
