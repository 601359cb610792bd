# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""``replaycheck replay``: run kept cases again, each FIXED, FAILED or ERROR. pytest does so with every corpus file.

FIXED: nothing is broken. FAILED: an invariant is; if that is the known finding the file is there for, or any other in
the register, it is known. ERROR: the file could not be read or run, or is there for a known finding that no longer
fires, which means that its entry in the register is out of date.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fuzz import corpus, options, report
from fuzz.engines import ENGINES
from fuzz.engines.base import Engine, Refused
from fuzz.known import REGISTER
from fuzz.run import OWN_FAULT, CannotRun, Judged, open_engine, run_case
from invariants.trace import Trace


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of a file."""

    path: Path
    outcome: Literal["FIXED", "FAILED", "ERROR"]
    message: str
    """One line; empty if FIXED."""
    judged: Judged | None = None
    """None if it could not be run."""

    @property
    def known(self) -> bool:
        """Whether this is about a known finding, and about nothing else."""
        if self.judged is None or self.judged.violations:
            return False
        return bool(self.judged.known) or self.judged.case.provenance.known is not None

    @property
    def invariant(self) -> str | None:
        """The first invariant that is broken."""
        if self.judged is None:
            return None
        found = [*self.judged.violations, *(violation for known in self.judged.known.values() for violation in known)]
        return next((violation.invariant for violation in found if violation.invariant != OWN_FAULT), None)

    @property
    def exit_code(self) -> Literal[0, 1, 2]:
        """0: as it should be; 1: a finding, or a known one that is gone; 2: not read or not run."""
        if self.outcome == "ERROR":
            return 1 if self.known else 2
        return 1 if self.outcome == "FAILED" and not self.known else 0


def replay(path: Path, engine: Callable[[], Engine]) -> Replayed:
    """Replay a file. ``engine`` is called once the file is read, and may raise ``CannotRun``."""
    try:
        case = corpus.read(path)
        judged = run_case(engine(), case)
    except (corpus.CorpusError, CannotRun) as error:
        return Replayed(path, "ERROR", str(error))
    except Refused as refused:
        return Replayed(path, "ERROR", f"{corpus.shown(path)}: vLLM refuses this case: {refused}")
    if judged.violations:
        first = judged.violations[0]
        if first.invariant == OWN_FAULT:
            return Replayed(path, "ERROR", f"replaycheck failed: {first.message.splitlines()[-1]}", judged)
        return Replayed(path, "FAILED", str(first), judged)
    expected = case.provenance.known
    if expected and expected.id not in judged.known:
        message = f"known finding {expected.id} no longer fires: if vLLM has fixed it, move the case to regressions/"
        return Replayed(path, "ERROR", message, judged)
    if judged.known:
        titles = [f"known finding {entry.id}: {entry.title}" for entry in REGISTER if entry.id in judged.known]
        return Replayed(path, "FAILED", "; ".join(titles), judged)
    return Replayed(path, "FIXED", "", judged)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``replaycheck replay``."""
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="case files, or folders of them")
    default = f"the one whose corpus the file is in, else {options.DEFAULT_ENGINE}"
    parser.add_argument("--engine", choices=ENGINES, help=f"what runs the cases (default: {default})")
    options.add_json(parser)


def command(args: argparse.Namespace) -> int:
    """Replay. 1 if any file is a finding, else 2 if any was not read or not run, else 0."""
    engines: dict[str, Engine] = {}
    replayed: list[Replayed] = []
    interrupted = False
    try:
        for given in args.paths:
            for result in _replay_all(given, args.engine, engines):
                _print_line(result, replayed)
                replayed.append(result)
    except KeyboardInterrupt:
        interrupted = True
        report.warn(f"broken off after {len(replayed)} files")
    if len(replayed) == 1 and (only := replayed[0].judged) and only.trace:
        _print_lives(only.trace)
    _print_failures(replayed, engines)
    options.write_json(args.json, [_json(result) for result in replayed])
    codes = {result.exit_code for result in replayed} | ({2} if interrupted else {0})
    return 1 if 1 in codes else max(codes)


def _replay_all(given: Path, engine: str | None, engines: dict[str, Engine]) -> Iterator[Replayed]:
    """Every file at or below a path; one without any is an ERROR of its own. Engines are opened when needed."""
    try:
        paths = corpus.files(given)
    except corpus.CorpusError as error:
        yield Replayed(given, "ERROR", str(error))
        return
    for path in paths:
        home = corpus.engine_of(path)
        name = engine or (home if home in ENGINES else options.DEFAULT_ENGINE)

        def opened(name: str = name) -> Engine:
            if name not in engines:
                engines[name] = open_engine(name, apart=True)
            return engines[name]

        yield replay(path, opened)


def _print_line(result: Replayed, earlier: list[Replayed]) -> None:
    """A line to standard output for a file that ran, to standard error for one that did not, there each reason once."""
    if result.judged:
        line = f"{result.outcome:6}  {corpus.shown(result.path)}  {result.message.partition(chr(10))[0]}"
        print(line.rstrip(), flush=True)
    elif result.message not in {other.message for other in earlier}:
        report.warn(result.message)


def _print_lives(trace: Trace) -> None:
    """What a case comes down to: who was admitted when, with which hit, and where its replay began."""
    for life in trace.admissions:
        hit = f"hit {life.hit}" if life.hit else "no hit"
        replays = f", replays from {life.replay_start}" if life.replay_start else ""
        again = ", again after a preemption" if life.resumed else ""
        name = trace.requests[life.request].id
        print(f"        step {life.step}: {name}, {life.tokens} tokens, {hit}{replays}{again}")


def _print_failures(replayed: list[Replayed], engines: dict[str, Engine]) -> None:
    for result in replayed:
        if result.judged and result.judged.violations:
            print(f"\n{'-' * 20} {result.outcome} {corpus.shown(result.path)}")
            used = report.versions(next(iter(engines.values())))
            print(report.failure_text(result.judged, result.path, used))


def _json(result: Replayed) -> dict[str, object]:
    return {
        "file": corpus.shown(result.path),
        "outcome": result.outcome,
        "invariant": result.invariant,
        "message": result.message,
        "known": result.known,
        "runs": int(result.judged is not None),
        "fired": int(result.outcome == "FAILED"),
    }
