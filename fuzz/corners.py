# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Corners: what is added to plain cases for an engine that can run it, a function for each.

Relied upon: a plain case stays the likeliest, so that a corner costs the rest little, and shrinking leads back to it.
"""

from __future__ import annotations

from math import ceil, lcm
from typing import Final, Literal, NamedTuple

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from msgspec import UNSET

from fuzz.case import Case, Load
from fuzz.strategies import cases
from invariants.trace import Probe


def cases_for(engine: str, profile: str) -> SearchStrategy[Case]:
    """Cases of a profile for the engine of that name. Raises ``KeyError``."""
    plain = cases(profile)
    if engine == "cpu":
        return with_probe(plain)
    if engine == "scheduler":
        return with_loads(plain)
    return with_crowds(plain) if engine == "kernels" else plain


def with_probe(plain: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The same cases for an engine with a model: a probe for each, and now and then prompt logprobs asked for."""
    probes = st.builds(
        Probe,
        kind=st.sampled_from(("exact", "deep", "exact", "deep", "decoder")),
        layers=st.sampled_from((2, 2, 2, 1, 3)),
        compress_ratio=st.sampled_from((1, 1, 2)),
        seed=st.integers(0, 3),
    )
    return st.builds(_add_probe, plain, probes, st.integers(0, 8))


def _add_probe(case: Case, probe: Probe, asks: int) -> Case:
    """``asks``: whether a request asks for prompt logprobs, and which, from the end. Oftener where rows are trimmed."""
    # Fewer see the same either way: the last row of a replay has its whole window, in the first layer; a bound in
    # trimmed layers shows in an output through the third.
    least = {"exact": 1, "deep": 2 if case.geometry.window > 2 else 3, "decoder": 3}[probe.kind]
    if probe.layers < least:
        probe = msgspec.structs.replace(probe, layers=least)
    if case.geometry.block_size % probe.compress_ratio:
        probe = msgspec.structs.replace(probe, compress_ratio=1)
    requests = list(case.requests)
    if asks < (6 if probe.kind == "decoder" else 2):
        requests[-1 - asks % len(requests)] = msgspec.structs.replace(
            requests[-1 - asks % len(requests)], prompt_logprobs=True
        )
    return msgspec.structs.replace(case, requests=tuple(requests), probe=probe)


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


class _LoadDraw(NamedTuple):
    """The choices that become one external load."""

    who: int
    """Request, from the end."""
    end: str
    delta: int
    window: Literal["none", "whole", "part"]
    how: Literal["sync", "async", "fails"]
    steps: int


_ENDS: Final = ("window+unit", "prompt", "window", "unit", "window+2", "last-unit", "common+unit", "chunk")


def with_loads(plain: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The same cases, in one of ten a connector has the start of a few prompts. Loads end where windows, blocks, chunks
    and prompts do, or a token before or after."""
    draw = st.tuples(
        st.integers(0, 3),
        st.sampled_from(_ENDS),
        st.sampled_from((0, -1, 1)),
        st.sampled_from(("none", "whole", "none", "whole", "part")),
        st.sampled_from(("sync", "async", "async", "fails")),
        st.sampled_from((1, 2, 4)),
    ).map(lambda choices: _LoadDraw(*choices))
    draws = st.integers(0, 9).flatmap(lambda n: st.lists(draw, min_size=1, max_size=4) if n == 9 else st.just([]))
    return st.builds(_add_loads, plain, draws)


def _add_loads(case: Case, draws: list[_LoadDraw]) -> Case:
    """Each draw a load of another request; of two for one request the later counts."""
    requests = list(case.requests)
    for draw in draws:
        index = -1 - draw.who % len(requests)
        load = _load(case, len(requests) + index, draw)
        requests[index] = msgspec.structs.replace(requests[index], load=load)
    geometry = case.geometry
    if any(request.load is not UNSET and request.load.window == "part" for request in requests):
        # The second window group takes its blocks from the same pool.
        held = min(geometry.window - 1 + geometry.max_num_batched_tokens, case.max_model_len)
        more = ceil(held / geometry.swa_block_size) + 1
        geometry = msgspec.structs.replace(geometry, num_blocks=geometry.num_blocks + more)
    return msgspec.structs.replace(case, requests=tuple(requests), geometry=geometry)


def _load(case: Case, index: int, draw: _LoadDraw) -> Load:
    geometry, request = case.geometry, case.requests[index]
    unit, length = lcm(geometry.block_size, geometry.swa_block_size), len(request)
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
    own = case.requests[index].prompt
    common = 0
    for other in case.requests[:index]:
        shared = 0
        for (stream, start, stop), (other_stream, other_start, other_stop) in zip(own, other.prompt, strict=False):
            if (stream, start) != (other_stream, other_start):
                break
            shared += min(stop, other_stop) - start
            if stop != other_stop:
                break
        common = max(common, shared)
    return common
