# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Every invariant holds on every case that Hypothesis thinks of; what breaks one is saved, smallest version."""

from __future__ import annotations

from hypothesis import given

from fuzz.case import Case
from fuzz.strategies import cases


@given(case=cases("small"))
def test_small(check, case: Case):
    check("scheduler", case)


@given(case=cases("dsv41"))
def test_dsv41(check, case: Case):
    check("scheduler", case)


@given(case=cases("wild"))
def test_wild(check, case: Case):
    check("scheduler", case)
