# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Hunts one mutant: this process breaks vLLM, then runs generated cases until an invariant says so.

``python -m fuzz.hunt FILE ID ENGINE CASES SEED`` prints what came of it as one line of JSON. Seeds of the corpus are
left out: they are known to be good cases, and a mutant shall be found by cases that nobody has chosen. ``mutants.py``
starts one such process a mutant and engine.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from fuzz import mutation


class Hunted(msgspec.Struct, kw_only=True):
    """What came of a hunt."""

    invariant: str | None = None
    """The first one broken by the first case that breaks any; None: the mutant survived."""
    message: str = ""
    cases: int = 0
    seconds: float = 0.0
    """From when the engine was ready."""
    error: str = ""
    """Why there was no hunt, or no mutant."""


def hunt(engine: Any, cases: int, number: int) -> Hunted:
    """Up to so many small cases that vLLM takes, from a seed, every one in full."""
    from hypothesis import HealthCheck, Phase, given, seed, settings

    from fuzz.corners import cases_for
    from fuzz.engines.base import Refused
    from fuzz.run import OWN_FAULT, run_case

    found, started = Hunted(), time.monotonic()

    @seed(number)
    @settings(
        max_examples=2 * cases,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases_for(engine.name, "small"))
    def every(case: Any) -> None:
        if found.invariant is not None or found.cases == cases:
            return
        try:
            judged = run_case(engine, case)
        except Refused:
            return
        found.cases += 1
        found.seconds = round(time.monotonic() - started, 3)
        if judged.violations:
            first = judged.violations[0]
            if first.invariant == OWN_FAULT:
                found.error = f"replaycheck failed: {first.message.splitlines()[-1]}"
            found.invariant, found.message = first.invariant, str(first)

    every()
    return found


def main(path: str, name: str, engine: str, cases: int, number: int) -> Hunted:
    """Install the mutant, then hunt it."""
    from fuzz.engines.base import Unavailable

    try:
        (mutant,) = [mutant for mutant in mutation.read(Path(path)) if mutant.id == name]
        mutation.install(mutant)

        from fuzz.engines import load

        found = hunt(load(engine), cases, number)
        if not mutation.applied():
            found.error = f"mutant {name}: engine {engine} never imports {mutant.module}"
    except (mutation.MutantError, Unavailable) as error:
        return Hunted(error=" ".join(str(error).split()))
    return found


if __name__ == "__main__":
    print(msgspec.json.encode(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))).decode())
