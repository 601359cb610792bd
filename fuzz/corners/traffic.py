# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Corners of who comes when: crowds, priorities, replays that are cut short or begin elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from msgspec import UNSET

from fuzz.case import Case, Event, Request
from fuzz.strategies import Sizes, blocks_needed


def with_crowds(plain: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The same cases, one in a hundred with its last request a thousand times: more rows than a block of a kernel.
    One in five has a few more: more prefills in a step than ``PREFILL_CHUNK_SIZE`` of the ROCm layer, which is 4."""
    return st.builds(_crowd, plain, st.integers(0, 99).map(_copies))


def _copies(number: int) -> int:
    if number == 57:
        return 1030
    return 2 + number % 7 if number >= 80 else 0


def _crowd(case: Case, copies: int) -> Case:
    """``copies`` requests more, at the same time; a small window and short prompts only."""
    last = case.requests[-1]
    if not copies or case.geometry.window > 16 or len(last) > 64:
        return case
    more = tuple(msgspec.structs.replace(last, id=f"copy{n}", max_tokens=1) for n in range(copies))
    tokens = len(last) * (copies + 1) + 1
    geometry = msgspec.structs.replace(
        case.geometry, max_num_seqs=copies + 8, max_num_batched_tokens=tokens, long_prefill_token_threshold=0
    )
    return msgspec.structs.replace(case, requests=(*case.requests, *more), geometry=geometry)


def with_lost_prefixes(plain: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The same cases, one in ten with a request more that is preempted when what it had hit is dropped: it resumes
    without the hit of its earlier life."""
    return st.builds(_lose_prefix, plain, st.integers(0, 39).map(lambda number: max(0, number - 35)))


def _lose_prefix(case: Case, delay: int) -> Case:
    """``delay``: steps from its arrival to its preemption; 0: the case as it is."""
    case, again = _once_more(case, 1 + delay) if delay else (case, None)
    if again is None:
        return case
    step = again.arrive + delay
    preempt, drop = Event(step=step, kind="preempt", request=again.id), Event(step=step, kind="drop_blocks")
    return msgspec.structs.replace(case, events=(*case.events, preempt, drop))


def _once_more(case: Case, outputs: int) -> tuple[Case, Request | None]:
    """With the longest prompt once more, after all others: it hits. No request where it would not."""
    geometry, longest = case.geometry, max(case.requests, key=len)
    if len(longest) <= geometry.window:
        return case, None
    lengths = case.max_lengths
    more = max(0, len(longest) + outputs - max(lengths))
    blocks = ceil(more / geometry.block_size) + ceil(more / geometry.swa_block_size)
    # By then the others are gone: a step computes a token of some request, unless one of them is preempted.
    arrive = max(request.arrive for request in case.requests) + sum(lengths)
    again = Request(id=f"again{len(lengths)}", arrive=arrive, prompt=longest.prompt, max_tokens=outputs)
    geometry = msgspec.structs.replace(geometry, num_blocks=geometry.num_blocks + blocks)
    return msgspec.structs.replace(case, geometry=geometry, requests=(*case.requests, again)), again


def with_cut_replays(plain: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The same cases, one in twenty with a request more that hits, replays in chunks shorter than the window, and is
    aborted before it is done."""
    return st.builds(lambda case, number: _cut_replay(case) if number == 19 else case, plain, st.integers(0, 19))


def _cut_replay(case: Case) -> Case:
    geometry = case.geometry
    chunk = max(geometry.window // 2, geometry.max_num_seqs)
    geometry = msgspec.structs.replace(geometry, max_num_batched_tokens=min(chunk, geometry.max_num_batched_tokens))
    cut, again = _once_more(msgspec.structs.replace(case, geometry=geometry), 1)
    if again is None:
        return case
    abort = Event(step=again.arrive + 1, kind="abort", request=again.id)
    return msgspec.structs.replace(cut, events=(*cut.events, abort))


def with_priorities(plain: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The same cases, one in five scheduled by priority: requests arrive one a step, into a pool for hardly more than
    one of them, and later ones tend to go before earlier ones."""
    priorities = st.lists(st.sampled_from((-1, -2, -3, 0, 1)), min_size=4, max_size=4)
    return st.builds(_prioritise, plain, st.sampled_from((0,) * 8 + (2, 4)), priorities)


def _prioritise(case: Case, room: int, priorities: Sequence[int]) -> Case:
    """Priorities for all but the first request, in turn; ``room``: blocks more than the longest one needs."""
    if not room or len(case.requests) == 1:
        return case
    geometry = case.geometry
    first, *later = [
        msgspec.structs.replace(request, arrive=index, max_tokens=max(request.max_tokens, 9))
        for index, request in enumerate(case.requests)
    ]
    given = [msgspec.structs.replace(later[i], priority=priorities[i % len(priorities)]) for i in range(len(later))]
    sizes, chunk = Sizes.of(geometry), geometry.max_num_batched_tokens
    case = msgspec.structs.replace(case, requests=(first, *given))
    needed = max(blocks_needed(sizes, chunk, length) for length in case.max_lengths)
    return msgspec.structs.replace(
        case,
        geometry=msgspec.structs.replace(
            geometry,
            num_blocks=1 + needed + room,
            max_num_seqs=min(8, chunk),
            # A prefill goes on for some steps, beside decodes that take the blocks away that it was admitted for.
            long_prefill_token_threshold=min((1 + room) * sizes.hit_unit, len(first)),
        ),
    )


def with_single_tokens(plain: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The same cases, one in ten in chunks of one token, at the end of which the longest prompt is asked again by as
    many as a step has rows: replays that run as decodes."""
    return st.builds(_single_tokens, plain, st.sampled_from((0,) * 27 + (1, 2, 3)))


def _single_tokens(case: Case, rows: int) -> Case:
    """``rows`` a step, each of a token; 0: as it was. Short cases only: it takes a step for each token."""
    tokens = sum(case.max_lengths)
    if not rows or tokens > 200:
        return case
    longest = max((request for request in case.requests if request.continues is UNSET), key=len)
    again = (msgspec.structs.replace(longest, id=f"again{n}", arrive=tokens, max_tokens=1) for n in range(rows))
    # The threshold holds where more than one request is there.
    sizes = {"max_num_batched_tokens": rows, "max_num_seqs": rows, "long_prefill_token_threshold": int(rows > 1)}
    geometry = msgspec.structs.replace(case.geometry, **sizes)
    return msgspec.structs.replace(case, requests=(*case.requests, *again), geometry=geometry)
