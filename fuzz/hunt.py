# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Hunts one mutant: this process breaks vLLM, then runs cases until an invariant says so.

``python -m fuzz.hunt FILE ID ENGINE CASES SEED...`` prints a line of JSON as each case begins, so that its death costs
no more than that case, and one as each seed ends. Without a seed it is the cases of fixed sizes that are run. Seeds of
the corpus are left out: they are known to be good cases, and a mutant shall be found by cases that nobody has chosen.
``mutants.py`` starts such a process for each mutant and engine.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from fuzz import mutation

HANG: Final = 300
"""Seconds. A case, or the start of an engine, that takes longer hangs: SIGALRM ends this process."""


class Hunted(msgspec.Struct, kw_only=True):
    """What came of a hunt."""

    seed: int | None = None
    """Of the generated cases; None: those of fixed sizes."""
    invariant: str | None = None
    """The first one broken by the first case that breaks any; None: the mutant survived."""
    message: str = ""
    cases: int = 0
    """The one that broke it included."""
    seconds: float = 0.0
    """From when the engine was ready."""
    reached: bool = True
    """Whether what the mutant changes was executed, by this seed or an earlier one."""
    running: bool = False
    """Whether the last of the cases has only begun."""
    error: str = ""
    """Why there was no hunt, or no mutant."""


class _Over(BaseException):
    """No exception that Hypothesis would look into."""


class _Hunter:
    """Runs cases until one breaks something."""

    def __init__(self, engine: Any, cases: int, number: int | None) -> None:
        self.found = Hunted(seed=number)
        self._engine, self._most, self._started = engine, cases, time.monotonic()

    def __call__(self, case: Any) -> None:
        """Raises ``_Over`` when there is no more to do."""
        from fuzz.engines.base import Refused
        from fuzz.run import OWN_FAULT, run_case

        found = self.found
        signal.alarm(HANG)
        _print(msgspec.structs.replace(found, cases=found.cases + 1, running=True))
        try:
            judged = run_case(self._engine, case)
        except Refused:
            return
        found.cases += 1
        found.seconds = round(time.monotonic() - self._started, 3)
        if judged.violations:
            first = judged.violations[0]
            if first.invariant == OWN_FAULT:
                found.error = f"replaycheck failed: {first.message.splitlines()[-1]}"
            found.invariant, found.message = first.invariant, str(first)
        if judged.violations or found.cases == self._most:
            raise _Over


def hunt(engine: Any, cases: int, number: int | None) -> Hunted:
    """Up to so many small cases that vLLM takes, from a seed, every one in full; or those of fixed sizes."""
    hunter = _Hunter(engine, cases, number)
    try:
        if number is None:
            from fuzz.fixed import fixed_cases

            for case in fixed_cases(engine.name):
                hunter(case)
        else:
            _generate(hunter, engine.name, cases, number)
    except _Over:
        pass
    hunter.found.reached = mutation.reached()
    return hunter.found


def _generate(hunter: _Hunter, engine: str, cases: int, number: int) -> None:
    from hypothesis import HealthCheck, Phase, given, seed, settings

    from fuzz.corners import cases_for

    @seed(number)
    @settings(
        max_examples=2 * cases,  # vLLM refuses some
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases_for(engine, "small"))
    def every(case: Any) -> None:
        hunter(case)

    every()


def main(path: str, name: str, engine: str, cases: int, seeds: Sequence[int]) -> Iterator[Hunted]:
    """Install the mutant, then hunt it seed by seed."""
    from fuzz.engines.base import Unavailable

    signal.alarm(HANG)
    try:
        (mutant,) = [mutant for mutant in mutation.read(Path(path)) if mutant.id == name]
        mutation.install(mutant)

        from fuzz.engines import load

        ready = load(engine)
        for number in seeds or (None,):
            found = hunt(ready, cases, number)
            if not mutation.applied():
                found.error = f"engine {engine} never imports {mutant.module}"
            if found.error:
                found.error = f"mutant {name}: {found.error}"
            yield found
    except (mutation.MutantError, Unavailable) as error:
        yield Hunted(error=" ".join(str(error).split()))


def _print(found: Hunted) -> None:
    print(msgspec.json.encode(found).decode(), flush=True)


if __name__ == "__main__":
    for hunted in main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), [int(seed) for seed in sys.argv[5:]]):
        _print(hunted)
