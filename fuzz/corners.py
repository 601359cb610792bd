# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Corners: what is added to plain cases for an engine that can run it, a function for each.

Relied upon: a plain case stays the likeliest, so that a corner costs the rest little, and shrinking leads back to it.
"""

from __future__ import annotations

from math import ceil
from typing import Literal

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from msgspec import UNSET

from fuzz.case import Case
from fuzz.strategies import cases
from invariants.trace import Probe


def cases_for(engine: str, profile: str) -> SearchStrategy[Case]:
    """Cases of a profile for the engine of that name. Raises ``KeyError``."""
    plain = cases(profile)
    if engine == "cpu":
        return with_probe(plain)
    if engine == "scheduler":
        return with_drafts(with_flight(plain))
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


def with_flight(plain: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The same cases, one in ten with async scheduling: a step is scheduled while another is in flight."""
    return st.builds(lambda case, number: _fly(case) if number == 9 else case, plain, st.integers(0, 9))


def with_drafts(plain: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The same cases, one in eight with one to four speculative tokens; half of these with async scheduling as well."""
    drafter = st.sampled_from((None, None, "mtp", "dspark"))
    return st.builds(_speculate, plain, st.integers(0, 15), st.integers(1, 4), drafter)


def _fly(case: Case) -> Case:
    """Two steps hold window blocks at a time, so the pool has those of one more: as tight, or roomy, as it was."""
    geometry = case.geometry
    if geometry.async_scheduling is not UNSET:
        return case
    blocks = geometry.num_blocks + ceil(geometry.max_num_batched_tokens / geometry.swa_block_size)
    geometry = msgspec.structs.replace(geometry, async_scheduling=True, num_blocks=blocks)
    return msgspec.structs.replace(case, geometry=geometry)


def _speculate(case: Case, number: int, drafts: int, drafter: Literal["mtp", "dspark"] | None) -> Case:
    """``number``: 14 and 15 are for drafts, 15 for drafts in flight. A step has room for a token and its drafts."""
    drafts = min(drafts, case.geometry.max_num_batched_tokens - 1)
    if number < 14 or not drafts:
        return case
    geometry = msgspec.structs.replace(case.geometry, drafts=drafts, drafter=drafter or UNSET)
    case = msgspec.structs.replace(case, geometry=geometry)
    return _fly(case) if number == 15 else case
