# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""``replaycheck run``: the engine's seeds, then cases from Hypothesis, until the budget is used up.

Hypothesis makes the cases and shrinks the first that breaks something new; its smallest version is kept in ``crashes/``
and the search goes on. What a finding breaks is from then on counted, not reported again. A case is told from another
by what it breaks, (invariant, site), so that shrinking does not wander off to another bug.
"""

from __future__ import annotations

import argparse
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Final

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.errors import Flaky
from hypothesis.strategies import SearchStrategy

from fuzz import corpus, options, report
from fuzz.case import Case, encode
from fuzz.corners import cases_for
from fuzz.engines.base import Engine, Refused
from fuzz.run import REAL_WINDOW, Judged, Key, Tally, brisk, general, keep, open_engine, run_case

ROUND: Final = 1000
"""Examples in one Hypothesis run, whose memory of what it tried grows with each."""
SHRINK_SECONDS: Final = 20.0
"""For how long one finding is made smaller. May go beyond the run's time."""
DEFAULT_SECONDS: Final = 60.0


class _Fired(Exception):
    """Tells Hypothesis that the example is one to shrink."""


class _Stop(BaseException):
    """Leaves Hypothesis at once; it lets through what is no ``Exception``."""


@dataclass
class Explorer:
    """Runs cases and keeps what they break. ``tally`` is right at any time, also after a Ctrl-C."""

    engine: Engine
    strategy: SearchStrategy[Case]
    seed: int
    cases: int | None = None
    """Cases to run, or to have refused; None: as many as there is time for."""
    deadline: float | None = None
    """Of ``time.monotonic``."""
    progress: Callable[[Tally], None] = lambda _: None
    """Called after every case."""
    tally: Tally = field(default_factory=Tally)
    interrupted: bool = False
    """Ctrl-C was pressed. Python loses the exception if a finaliser, or a callback of Hypothesis's, runs just then: so
    the next case asks."""
    _seen: set[int] = field(default_factory=set)
    _found: set[Key] = field(default_factory=set)
    _aside: dict[Key, Judged] = field(default_factory=dict)
    """The smallest case for what cannot be shrunk: seeds broke it, or it came up while something else was shrunk."""
    _smallest: Judged | None = None
    """The smallest case so far of what is being shrunk."""
    _key: Key | None = None
    _brisk: bool = False
    """How the latest case ran, and so how it is shrunk."""
    _shrink_until: float = 0.0

    def run(self, seeds: Iterable[Case]) -> None:
        """The seeds, then generated cases. Raises ``CannotRun``; a ``KeyboardInterrupt`` after all found is kept."""
        try:
            for case in seeds:
                if self._spent():
                    break
                # pytest runs them in full; here the long ones would take half of a minute in all arms of a model.
                self._brisk = self.engine.has_model and case.geometry.window >= REAL_WINDOW
                if news := self._explore(case):
                    self._set_aside(news)
            self._keep_set_aside()
            number = 0
            # Far apart, so that runs with neighbouring seeds share no round.
            while not self._spent() and self._round(self.seed + (number << 64)):
                number += 1
        finally:
            self._keep_set_aside()

    def _spent(self) -> bool:
        tried = self.tally.cases + sum(self.tally.refused.values())
        enough = self.cases is not None and tried >= self.cases
        return enough or (self.deadline is not None and time.monotonic() >= self.deadline)

    def _round(self, number: int) -> bool:
        """One Hypothesis run, which ends with its examples or with the first finding; False if no case was new."""
        before = len(self._seen)

        @seed(number)
        @settings(
            max_examples=ROUND,
            # Not "target": its hill climbing can go round in circles for minutes without calling us.
            phases=(Phase.generate, Phase.shrink),
            database=None,
            derandomize=False,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
        )
        @given(self.strategy)
        def every(case: Case) -> None:
            if self._shrink(case) if self._key else self._hunt(case):
                raise _Fired

        try:
            every()
        except (_Fired, _Stop, Flaky):
            # What fired is in hand, also where it did not fire again.
            pass
        finally:
            judged, self._key, self._smallest = self._smallest, None, None
            if judged:
                self._keep(judged)
        return len(self._seen) > before

    def _hunt(self, case: Case) -> bool:
        """Whether a generated case breaks something new, which is shrunk from now on."""
        if self._spent():
            raise _Stop
        self._brisk = brisk(case, self.tally.cases)
        news = self._explore(case)
        if news:
            self._key = next(key for key in news.keys if key not in self._found)
            self._smallest = news
            self._shrink_until = time.monotonic() + SHRINK_SECONDS
        return news is not None

    def _ask(self) -> None:
        if self.interrupted:
            raise KeyboardInterrupt

    def _explore(self, case: Case) -> Judged | None:
        """Run and count one more case, unless it was there before; the case if it breaks something new."""
        self._ask()
        number = hash(case)
        if number in self._seen:
            return None
        self._seen.add(number)
        try:
            judged = run_case(self.engine, case, self._brisk)
        except Refused as refused:
            self.tally.refused[general(refused)] += 1
            return None
        self.tally.add(judged)
        self.tally.repeats.update(key for key in judged.keys if key in self._found)
        self.progress(self.tally)
        return None if self._found.issuperset(judged.keys) else judged

    def _shrink(self, case: Case) -> bool:
        """Whether a candidate still breaks what is being shrunk: Hypothesis offers smaller and smaller ones."""
        self._ask()
        if time.monotonic() >= self._shrink_until:
            raise _Stop
        try:
            judged = run_case(self.engine, case, self._brisk)
        except Refused:
            return False
        if self._key in judged.keys:
            self._smallest = judged
            return True
        self._set_aside(judged)
        return False

    def _set_aside(self, judged: Judged) -> None:
        for key in judged.keys:
            known = self._aside.get(key)
            if not known or len(encode(judged.case)) < len(encode(known.case)):
                self._aside[key] = judged

    def _keep_set_aside(self) -> None:
        """The smallest case first: what it breaks, larger ones need not be kept for."""
        for judged in sorted(self._aside.values(), key=lambda judged: len(encode(judged.case))):
            self._keep(judged)
        self._aside.clear()

    def _keep(self, judged: Judged) -> None:
        """Save a case as a finding, as a replay will see it; what it breaks, either way it runs, is not news again."""
        if self._found.issuperset(judged.keys):
            return
        try:
            full = run_case(self.engine, judged.case)
            self._found.update(judged.keys, full.keys, run_case(self.engine, judged.case, brisk=True).keys)
            judged = full if full.violations else judged
        finally:
            # Also on a Ctrl-C just now.
            self._found.update(judged.keys)
            finding = keep(judged, self.engine, self.seed)
        if finding.path not in {earlier.path for earlier in self.tally.findings}:
            self.tally.findings.append(finding)
        self.progress(self.tally)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``replaycheck run``."""
    options.add_engine(parser)
    options.add_profile(parser, default="small")
    parser.add_argument(
        "--cases", type=options.positive(int), metavar="N", help="stop after N cases, the seeds of the corpus included"
    )
    parser.add_argument(
        "--time",
        type=options.positive(float),
        metavar="SECONDS",
        help=f"stop after SECONDS, start-up included (default: {DEFAULT_SECONDS:g}, or no limit with --cases)",
    )
    parser.add_argument("--seed", type=int, help="of the generated cases (default: a random one, which is printed)")
    options.add_json(parser)


def command(args: argparse.Namespace) -> int:
    """Run. 0: clean, or known findings only; 1: a finding; 2: could not run, or was broken off without a finding."""
    started = time.monotonic()
    number = random.randrange(1 << 32) if args.seed is None else args.seed
    seconds = args.time or (None if args.cases else DEFAULT_SECONDS)
    engine = open_engine(args.engine, apart=True)
    strategy = cases_for(engine.name, args.profile)
    explorer = Explorer(engine, strategy, number, args.cases, deadline=None if seconds is None else started + seconds)
    with report.Meter(f"{args.engine}, {args.profile}", args.cases, seconds, started) as explorer.progress:
        try:
            with _noticing(explorer):
                explorer.run(_seeds(args.engine))
        except KeyboardInterrupt:
            explorer.interrupted = True
    tally, interrupted = explorer.tally, explorer.interrupted
    tally.seconds = time.monotonic() - started
    run = report.Run(args.engine, args.profile, number, report.versions(engine), tally, interrupted)
    report.print_run(run)
    options.write_json(args.json, report.run_json(run))
    if any(finding.is_violation for finding in tally.findings):
        return 1
    if not tally.cases and not interrupted:
        report.warn(f"no case was judged: {sum(tally.refused.values())} were refused; more --time is needed otherwise")
        return 2
    return 2 if interrupted or tally.findings else 0


@contextmanager
def _noticing(explorer: Explorer) -> Iterator[None]:
    """Ctrl-C is noted, and then raised as ever; not where whoever started us wants it ignored."""

    def note(number: int, frame: FrameType | None) -> None:
        explorer.interrupted = True
        signal.default_int_handler(number, frame)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _seeds(engine: str) -> Iterable[Case]:
    """The engine's seeds that can be read; the others are named on standard error."""
    try:
        paths = corpus.files(corpus.folder(engine, "seeds"))
    except corpus.CorpusError as error:
        report.warn(f"{error}: starting without seeds")
        return
    for path in paths:
        try:
            yield corpus.read(path)
        except corpus.CorpusError as error:
            report.warn(str(error))
