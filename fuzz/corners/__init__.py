# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Corners: what is added to plain cases for an engine that can run it, a function for each.

Relied upon: a plain case stays the likeliest, so that a corner costs the rest little, and shrinking leads back to it.
"""

from __future__ import annotations

from hypothesis.strategies import SearchStrategy

from fuzz.case import Case
from fuzz.corners.flight import with_drafts, with_flight
from fuzz.corners.layout import with_larger_window_blocks, with_model_length, with_retention, with_window_groups
from fuzz.corners.loads import with_loads
from fuzz.corners.probes import with_probe
from fuzz.corners.sessions import with_turns
from fuzz.corners.traffic import with_crowds, with_cut_replays, with_lost_prefixes, with_priorities, with_single_tokens
from fuzz.strategies import cases


def cases_for(engine: str, profile: str) -> SearchStrategy[Case]:
    """Cases of a profile for the engine of that name. Raises ``KeyError``."""
    plain = with_turns(with_cut_replays(cases(profile)))
    if engine == "cpu":
        return with_probe(plain)
    # What changes blocks comes before what counts in them, and the number of groups, by which pools grow, last.
    plain = with_larger_window_blocks(plain)
    if engine == "scheduler":
        plain = with_retention(with_priorities(plain))
    plain = with_window_groups(with_lost_prefixes(plain))
    if engine == "kernels":
        return with_single_tokens(with_crowds(plain))
    plain = with_model_length(plain)
    return with_loads(with_drafts(with_flight(plain))) if engine == "scheduler" else plain
