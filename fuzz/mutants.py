# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""``replaycheck mutants``: breaks vLLM on purpose, one mutant a process, and says which invariant notices, and when."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import msgspec
from rich.table import Table

from fuzz import options, report
from fuzz.engines import ENGINES
from fuzz.hunt import HANG, Hunted
from fuzz.mutation import Mutant, MutantError, check, read
from fuzz.run import CannotRun
from invariants import INVARIANTS

FILE: Final = Path(__file__).parent.parent / "tests" / "mutants.toml"
CASES: Final = 2000


class Result(NamedTuple):
    """A mutant on an engine."""

    mutant: Mutant
    engine: str
    hunts: list[Hunted]
    """One for each seed, or a single one that says what went wrong."""

    @property
    def errors(self) -> list[str]:
        """Why it could not be hunted."""
        return [hunt.error for hunt in self.hunts if hunt.error]

    @property
    def caught(self) -> Counter[str]:
        """Hunts by the invariant that was the first to notice."""
        return Counter(hunt.invariant for hunt in self.hunts if hunt.invariant and not hunt.error)

    @property
    def unexpected(self) -> list[str]:
        """Invariants that were the first to notice, though the mutant does not name them."""
        return [invariant for invariant in self.caught if invariant not in self.mutant.expect]

    @property
    def survived(self) -> list[Hunted]:
        """Hunts in which nothing noticed."""
        return [hunt for hunt in self.hunts if not hunt.error and hunt.invariant is None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``replaycheck mutants``."""
    parser.add_argument("--file", type=Path, default=FILE, metavar="FILE", help="mutants of your own, as TOML")
    parser.add_argument("--id", metavar="ID", help="this mutant only")
    parser.add_argument("--engine", choices=ENGINES, help="on this engine only (default: on those that a mutant names)")
    parser.add_argument(
        "--cases", type=options.positive(int), default=CASES, metavar="N", help="at most, each (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the generated cases (default: %(default)s)")
    parser.add_argument(
        "--seeds", type=options.positive(int), default=1, metavar="N", help="hunt with N seeds, from --seed on"
    )
    parser.add_argument(
        "--baseline", action="store_true", help="run a handful of cases of fixed sizes instead of generated ones"
    )
    options.add_json(parser)


def command(args: argparse.Namespace) -> int:
    """Hunt them. 0: all are killed; 1: one survives generated cases; 2: one could not be applied or run."""
    jobs = [
        (mutant, engine)
        for mutant in _chosen(args.file, args.id)
        for engine in mutant.engines
        if args.engine in (None, engine)
    ]
    if not jobs:
        raise CannotRun(f"no mutant in {args.file} names engine {args.engine}")
    seeds = [] if args.baseline else range(args.seed, args.seed + args.seeds)
    results: list[Result] = []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        try:
            for result in pool.map(lambda job: hunt(args.file, job[0], job[1], args.cases, seeds), jobs):
                results.append(result)
                print(f"replaycheck: {line(result)}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    _print(results)
    options.write_json(args.json, [entry for result in results for entry in _json(result)])
    if any(result.errors for result in results):
        return 2
    return 1 if any(result.survived for result in results) and not args.baseline else 0


def _chosen(path: Path, name: str | None) -> Sequence[Mutant]:
    """Those that are asked for. Raises ``CannotRun`` if one is nonsense, before anything is run."""
    try:
        mutants = read(path)
        for mutant in mutants:
            for kind, known, used in (("engine", ENGINES, mutant.engines), ("invariant", INVARIANTS, mutant.expect)):
                if unknown := [one for one in used if one not in known]:
                    known_ones = ", ".join(known)
                    raise MutantError(f"{path}: mutant {mutant.id} names {kind} {unknown[0]}; there are {known_ones}")
        chosen = [mutant for mutant in mutants if name in (None, mutant.id)]
        if not chosen:
            raise MutantError(f"{path} has no mutant {name}" if name else f"{path} has no mutants")
        for mutant in chosen:
            check(mutant)
    except MutantError as error:
        raise CannotRun(str(error)) from error
    return chosen


def hunt(path: Path, mutant: Mutant, engine: str, cases: int, seeds: Sequence[int]) -> Result:
    """With all seeds in a process of its own; in another one from where it died, which is a fault like any other."""
    hunts: list[Hunted] = []
    while len(hunts) < max(1, len(seeds)):
        arguments = [str(path.resolve()), mutant.id, engine, str(cases), *map(str, seeds[len(hunts) :])]
        done = subprocess.run(
            [sys.executable, "-m", "fuzz.hunt", *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # the hunts have the cores
        )
        last: dict[int | None, Hunted] = {hunted.seed: hunted for hunted in _told(done.stdout)}
        hunts += [hunted for hunted in last.values() if not hunted.running]
        if done.returncode < 0:
            number = seeds[len(hunts)] if seeds else None
            hunts.append(_died(-done.returncode, last.get(number, Hunted(seed=number))))
        elif done.returncode or not last:
            word = (done.stderr.strip().splitlines() or ["no word"])[-1]
            hunts.append(Hunted(error=f"mutant {mutant.id} on {engine}: {word}"))
        if any(hunted.error for hunted in hunts):
            break
    return Result(mutant, engine, hunts)


def _told(text: str) -> Iterable[Hunted]:
    """What a hunting process said, among what vLLM may have printed."""
    for said in text.splitlines():
        try:
            yield msgspec.json.decode(said, type=Hunted)
        except msgspec.DecodeError:
            continue


def _died(number: int, last: Hunted) -> Hunted:
    message = f"hangs for {HANG} s" if number == signal.SIGALRM else f"died of signal {number}"
    return msgspec.structs.replace(last, invariant="no-fault", message=message, running=False)


def line(result: Result) -> str:
    """What came of it, in a line."""
    mutant, hunts = result.mutant, result.hunts
    if result.errors:
        return result.errors[0]
    name = f"{mutant.id} on {result.engine}"
    if result.survived:
        seeds = "" if len(hunts) == 1 else f", {len(result.survived)} times of {len(hunts)}"
        words = "" if any(hunt.reached for hunt in result.survived) else "; what it changes was never executed"
        return f"{name} survives {max(hunt.cases for hunt in result.survived)} cases{seeds}: {mutant.title}{words}"
    expected = f" (expected {', '.join(mutant.expect)})" if result.unexpected else ""
    return f"{name}: {_caught(result)}{expected} after {_cases(hunts)} cases"


def _caught(result: Result) -> str:
    names = {name: f"{name}!" if name in result.unexpected else name for name in result.caught}
    if len(names) == 1:
        return next(iter(names.values()))
    return ", ".join(f"{names[name]} {count}x" for name, count in result.caught.most_common())


def _cases(hunts: Iterable[Hunted]) -> str:
    """The median, and the most if that is not the same."""
    cases = [hunt.cases for hunt in hunts]
    middle, most = f"{median(cases):g}", str(max(cases))
    return most if middle == most else f"{middle} to {most}"


def _print(results: Sequence[Result]) -> None:
    table = Table("mutant", "engine", "caught by", "cases", "seconds", "what it breaks")
    for result in results:
        ends = [_caught(result)] if result.caught else []
        ends += ["could not run"] if result.errors else ["SURVIVES"] if result.survived else []
        seconds = sum(hunt.seconds for hunt in result.hunts)
        table.add_row(
            result.mutant.id,
            result.engine,
            ", ".join(ends),
            _cases(result.hunts),
            f"{seconds:.1f}",
            result.mutant.title,
        )
    report.console().print(table)
    if len(results) > 1:
        _print_invariants(results)
    hunts = [hunt for result in results for hunt in result.hunts if not hunt.error]
    killed = [hunt for hunt in hunts if hunt.invariant]
    mutants = {result.mutant.id for result in results}
    caught = {result.mutant.id for result in results if result.caught}
    print(f"{len(caught)} of {len(mutants)} mutants are caught, in {len(killed)} of {len(hunts)} hunts")
    if killed:
        cases = [hunt.cases for hunt in killed]
        print(f"cases until then: {median(cases):g} (median), {max(cases)} (most)")
    if strange := sorted({result.mutant.id for result in results if result.unexpected}):
        print(f"caught first by an invariant (!) that the mutant does not name: {', '.join(strange)}")


def _print_invariants(results: Sequence[Result]) -> None:
    """Which invariants were the first to notice."""
    table = Table("invariant", "first to catch", "hunts", "cases (median to most)")
    for invariant in INVARIANTS:
        hunts = [(result, hunt) for result in results for hunt in result.hunts if hunt.invariant == invariant]
        mutants = {result.mutant.id for result, _ in hunts}
        cases = _cases(hunt for _, hunt in hunts) if hunts else ""
        table.add_row(invariant, f"{len(mutants)} mutants" if hunts else "none", str(len(hunts)), cases)
    report.console().print(table)


def _json(result: Result) -> Iterable[dict[str, Any]]:
    for hunted in result.hunts:
        yield {
            "id": result.mutant.id,
            "killed": hunted.invariant is not None and not hunted.error,
            "invariant": hunted.invariant,
            "engine": result.engine,
            "cases": hunted.cases,
            "seconds": hunted.seconds,
            "seed": hunted.seed,
        }
