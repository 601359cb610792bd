# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Corners: what is added to plain cases for an engine that can run it, a function for each.

Relied upon: a plain case stays the likeliest, so that a corner costs the rest little, and shrinking leads back to it.
"""

from __future__ import annotations

from typing import Final

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from msgspec import UNSET

from fuzz.case import MAX_TURNS, Case, Request
from fuzz.strategies import Sizes, blocks_needed, cases
from invariants.trace import Probe


def cases_for(engine: str, profile: str) -> SearchStrategy[Case]:
    """Cases of a profile for the engine of that name. Raises ``KeyError``."""
    plain = with_turns(cases(profile))
    if engine == "cpu":
        return with_probe(plain)
    return with_single_tokens(with_crowds(plain)) if engine == "kernels" else plain


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
    sizes = Sizes(case.geometry.window, case.geometry.block_size, case.geometry.swa_block_size)
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
    geometry = msgspec.structs.replace(case.geometry, num_blocks=max(case.geometry.num_blocks, needed))
    return msgspec.structs.replace(case, geometry=geometry)
