# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Probes for an engine with a model, and prompt logprobs."""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from fuzz.case import Case
from invariants.trace import Probe


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
    """``asks``: whether a request asks for prompt logprobs, 0 for none, and which. Oftener where rows are trimmed."""
    # Fewer see the same either way: the last row of a replay has its whole window, in the first layer; a bound in
    # trimmed layers shows in an output through the third.
    least = {"exact": 1, "deep": 2 if case.geometry.window > 2 else 3, "decoder": 3}[probe.kind]
    if probe.layers < least:
        probe = msgspec.structs.replace(probe, layers=least)
    if case.geometry.block_size % probe.compress_ratio:
        probe = msgspec.structs.replace(probe, compress_ratio=1)
    requests = list(case.requests)
    if asks > (2 if probe.kind == "decoder" else 6):
        one = asks % len(requests)
        requests[one] = msgspec.structs.replace(requests[one], prompt_logprobs=True)
    return msgspec.structs.replace(case, requests=tuple(requests), probe=probe)
