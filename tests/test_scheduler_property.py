# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Every invariant holds on every case that Hypothesis thinks of; what does not is saved, smallest version."""

from __future__ import annotations

import pytest
from hypothesis import event, given

from fuzz.case import Case
from fuzz.edges import edges
from fuzz.engines.base import Engine, Refused
from fuzz.explore import observe
from fuzz.run import run_case
from fuzz.strategies import cases


@pytest.fixture(scope="module")
def check(open_engine, fail_with):
    engine: Engine = open_engine("scheduler")

    def run(case: Case) -> None:
        try:
            judged = run_case(engine, case)
        except Refused as refused:
            event(f"refused by vLLM: {refused}")
            return
        if judged.trace:
            observe(edges(judged.trace))
        for finding in judged.known:
            event(f"known finding: {finding}")
        if judged.violations:
            fail_with(judged, engine)

    return run


@given(case=cases("small"))
def test_small(check, case: Case):
    check(case)


@given(case=cases("dsv41"))
def test_dsv41(check, case: Case):
    check(case)


@given(case=cases("wild"))
def test_wild(check, case: Case):
    check(case)
