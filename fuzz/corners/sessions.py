# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Sessions: a prompt grows by the one before and its output."""

from __future__ import annotations

from typing import Final

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from fuzz.case import MAX_TURNS, Case, Request
from fuzz.strategies import Sizes, blocks_needed


def with_turns(plain: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The same cases, one in ten with a session added: one to three requests, each of which continues the one before,
    the first of them a request of the plain case."""
    turn = st.tuples(st.sampled_from((5, 2, 9, 1)), st.sampled_from(_OWN), st.sampled_from((0, 2)))
    sessions = st.lists(turn, min_size=1, max_size=MAX_TURNS - 1)
    now_and_then = st.sampled_from((False,) * 9 + (True,)).flatmap(lambda more: sessions if more else st.just([]))
    return st.builds(_add_turns, plain, st.integers(0, 7), now_and_then)


_OWN: Final = ("one", "unit", "to boundary", "window")
"""How many tokens of its own a turn has; "to boundary": as many as make its prompt end where a hit may end."""


def _add_turns(case: Case, first: int, turns: list[tuple[int, str, int]]) -> Case:
    """``turns``: (output tokens of the request before, own tokens, steps between arrivals). A pool that is too small
    for the longest request grows to what it needs alone."""
    if not turns:
        return case
    sizes = Sizes.of(case.geometry)
    requests = list(case.requests)
    before = first % len(requests)
    length = len(requests[before])
    for number, (outputs, own, wait) in enumerate(turns):
        requests[before] = msgspec.structs.replace(requests[before], max_tokens=outputs)
        length += outputs
        boundary = sizes.hit_unit - length % sizes.hit_unit
        added = {"one": 1, "unit": sizes.hit_unit, "to boundary": boundary, "window": sizes.window}[own]
        requests.append(
            Request(
                id=f"turn{number}",
                arrive=requests[before].arrive + wait,
                prompt=((f"turn{number}", 0, added),),
                continues=requests[before].id,
            )
        )
        before, length = len(requests) - 1, length + added
    case = msgspec.structs.replace(case, requests=tuple(requests))
    needed = 1 + blocks_needed(sizes, case.geometry.max_num_batched_tokens, case.max_model_len)
    geometry = msgspec.structs.replace(
        case.geometry,
        num_blocks=max(case.geometry.num_blocks, needed),
        # The longest request may have become shorter.
        long_prefill_token_threshold=min(case.geometry.long_prefill_token_threshold, case.max_model_len),
    )
    return msgspec.structs.replace(case, geometry=geometry)
