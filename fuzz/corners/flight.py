# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Steps in flight, and drafts."""

from __future__ import annotations

from math import ceil
from typing import Literal

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from msgspec import UNSET

from fuzz.case import Case, Request
from fuzz.strategies import Sizes


def with_flight(plain: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The same cases, one in ten with async scheduling: a step is scheduled while another is in flight."""
    return st.builds(lambda case, number: _fly(case) if number == 9 else case, plain, st.integers(0, 9))


def with_drafts(plain: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The same cases, one in eight with one to four speculative tokens; half of these with async scheduling as well.
    Where the next token is part of a block's name there is a request more, which shares a prompt up to a block's
    end; elsewhere there may be one whose prompt is a single token."""
    drafter = st.sampled_from((None, None, "mtp", "dspark"))
    return st.builds(_speculate, plain, st.integers(0, 15), st.integers(1, 4), drafter, st.booleans())


def _fly(case: Case) -> Case:
    """Two steps hold window blocks at a time, so the pool has those of one more: as tight, or roomy, as it was."""
    geometry = case.geometry
    if geometry.async_scheduling is not UNSET:
        return case
    blocks = geometry.num_blocks + geometry.windows * ceil(geometry.max_num_batched_tokens / geometry.swa_block_size)
    geometry = msgspec.structs.replace(geometry, async_scheduling=True, num_blocks=blocks)
    return msgspec.structs.replace(case, geometry=geometry)


def _speculate(case: Case, number: int, drafts: int, drafter: Literal["mtp", "dspark"] | None, single: bool) -> Case:
    """``number``: 14 and 15 are for drafts, 15 for drafts in flight; ``single``: with a prompt of one token. A step has
    room for a token and its drafts."""
    drafts = min(drafts, case.geometry.max_num_batched_tokens - 1)
    if number < 14 or not drafts:
        return case
    geometry = msgspec.structs.replace(case.geometry, drafts=drafts, drafter=drafter or UNSET)
    if drafter:
        # Slots for the drafter are reserved past a request's end.
        blocks = ceil(drafts / geometry.block_size) + geometry.windows * ceil(drafts / geometry.swa_block_size)
        geometry = msgspec.structs.replace(geometry, num_blocks=geometry.num_blocks + blocks)
    more = _another_next_token(case) if drafter == "mtp" else _single_token(case) if single else ()
    case = msgspec.structs.replace(case, geometry=geometry, requests=(*case.requests, *more))
    return _fly(case) if number == 15 else case


def _another_next_token(case: Case) -> tuple[Request, ...]:
    """The longest prompt once more, soon after it is computed, but for what comes after the last hit that it allows."""
    unit = Sizes.of(case.geometry).hit_unit
    longest = max((request for request in case.requests if request.continues is UNSET), key=len)
    left, pieces = (len(longest) - 1) // unit * unit, []
    for stream, start, stop in longest.prompt:
        pieces.append((stream, start, min(stop, start + left)))
        left -= pieces[-1][2] - start
    shared = tuple(piece for piece in pieces if piece[1] < piece[2])
    return (Request(id="next", arrive=_computed(case, longest), prompt=(*shared, ("next", 0, 1))),) if shared else ()


def _single_token(case: Case) -> tuple[Request, ...]:
    """A prompt of one token, soon after the longest prompt is computed."""
    arrive = _computed(case, max(case.requests, key=len))
    return (Request(id="single", arrive=arrive, prompt=(("single", 0, 1),)),)


def _computed(case: Case, request: Request) -> int:
    """The step after which its prompt is computed, if it is alone."""
    return request.arrive + ceil(len(request) / case.geometry.max_num_batched_tokens)
