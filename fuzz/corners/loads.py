# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""External loads for generated cases: a connector has the start of some prompts.

Relied upon: ``corners`` applies this last, so that geometry and prompts are final; a load is drawn from few choices
and shrinks, as all corners do, to none.
"""

from __future__ import annotations

from math import ceil
from typing import Final, Literal, NamedTuple

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from msgspec import UNSET

from fuzz.case import Case, Load
from fuzz.edges import common_prefix
from fuzz.strategies import Sizes, blocks_needed


class _LoadDraw(NamedTuple):
    """The choices that become one external load."""

    who: int
    """Request, from the end."""
    end: str
    delta: int
    window: Literal["none", "whole", "part"]
    how: Literal["sync", "async", "fails"]
    steps: int


_ENDS: Final = ("window+unit", "window", "window+2", "prompt", "unit", "window", "last-unit", "common+unit", "chunk")


def with_loads(plain: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The same cases, in one of five a connector has the start of a few prompts. Loads end where windows, blocks,
    chunks and prompts do, or a token before or after."""
    draw = st.tuples(
        st.integers(0, 3),
        st.sampled_from(_ENDS),
        st.sampled_from((0, -1, 1)),
        st.sampled_from(("none", "whole", "part", "none", "whole", "part")),
        st.sampled_from(("sync", "async", "async", "fails")),
        st.sampled_from((1, 2, 4)),
    ).map(lambda choices: _LoadDraw(*choices))
    draws = st.integers(0, 9).flatmap(lambda n: st.lists(draw, min_size=2, max_size=4) if n >= 8 else st.just([]))
    return st.builds(_add_loads, plain, draws)


def _add_loads(case: Case, draws: list[_LoadDraw]) -> Case:
    """Each draw a load of another request; of two for one request the later counts. None of a request that continues
    another: how long its prompt is depends on how the other ends. None with steps in flight or drafts: no engine has
    both."""
    geometry = case.geometry
    if not draws or geometry.async_scheduling is not UNSET or geometry.drafts is not UNSET:
        return case
    requests = list(case.requests)
    own = [index for index, request in enumerate(requests) if request.continues is UNSET]
    for draw in draws:
        index = own[-1 - draw.who % len(own)]
        requests[index] = msgspec.structs.replace(requests[index], load=_load(case, index, draw))
    loaded = msgspec.structs.replace(case, requests=tuple(requests))
    parts = any(request.load is not UNSET and request.load.window == "part" for request in requests)
    if not parts or geometry.windows > 1:
        return loaded
    sizes, longest = Sizes.of(geometry), max(case.max_lengths)
    # The second window group takes its blocks from the same pool.
    more = blocks_needed(sizes, geometry.max_num_batched_tokens, longest) - ceil(longest / geometry.block_size)
    geometry = msgspec.structs.replace(geometry, window_groups=2, num_blocks=geometry.num_blocks + more)
    return msgspec.structs.replace(loaded, geometry=geometry)


def _load(case: Case, index: int, draw: _LoadDraw) -> Load:
    geometry, request = case.geometry, case.requests[index]
    unit, length = Sizes.of(geometry).hit_unit, len(request)
    window = draw.window if geometry.replay else "whole"
    most = length - 1 if draw.how == "sync" and window == "whole" else length
    if not most:
        return Load(tokens=1, window="whole", how="async", steps=draw.steps)
    tokens = {
        "window+unit": geometry.window + unit,
        "prompt": length,
        "window": geometry.window,
        "unit": unit,
        "window+2": geometry.window + 2 * unit,
        "last-unit": (length - 1) // unit * unit,
        "common+unit": _common(case, index) // unit * unit + unit,
        "chunk": geometry.max_num_batched_tokens,
    }[draw.end] + draw.delta
    return Load(
        tokens=max(1, min(tokens, most)), window=window, how=draw.how, steps=0 if draw.how == "sync" else draw.steps
    )


def _common(case: Case, index: int) -> int:
    """Tokens that the request shares with one before it."""
    own = case.requests[index].tokens()
    return max((common_prefix(own, other.tokens()) for other in case.requests[:index]), default=0)
