# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""``replaycheck mutants``: breaks vLLM on purpose, one mutant a process, and says which invariant notices, and when."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from rich.table import Table

from fuzz import options, report
from fuzz.engines import ENGINES
from fuzz.hunt import Hunted
from fuzz.mutation import Mutant, MutantError, read
from fuzz.run import CannotRun
from invariants import INVARIANTS

FILE: Final = Path(__file__).parent.parent / "tests" / "mutants.toml"
CASES: Final = 300
SECONDS: Final = 900.0
"""A hunt that takes longer hangs, which is a way of being noticed."""


class Result(NamedTuple):
    """A mutant on an engine."""

    mutant: Mutant
    engine: str
    hunted: Hunted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``replaycheck mutants``."""
    parser.add_argument("--file", type=Path, default=FILE, metavar="FILE", help="mutants of your own, as TOML")
    parser.add_argument("--id", metavar="ID", help="this mutant only")
    parser.add_argument("--engine", choices=ENGINES, help="on this engine only (default: on those that a mutant names)")
    parser.add_argument(
        "--cases", type=options.positive(int), default=CASES, metavar="N", help="for each (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the generated cases (default: %(default)s)")
    options.add_json(parser)


def command(args: argparse.Namespace) -> int:
    """Hunt them. 0: all are killed; 1: one survives; 2: one could not be applied or run."""
    jobs = [
        (mutant, engine)
        for mutant in _chosen(args.file, args.id)
        for engine in mutant.engines
        if args.engine in (None, engine)
    ]
    if not jobs:
        raise CannotRun(f"no mutant in {args.file} names engine {args.engine}")
    results: list[Result] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for result in pool.map(lambda job: _hunt(args.file, job[0], job[1], args.cases, args.seed), jobs):
            results.append(result)
            print(f"replaycheck: {_line(result)}", file=sys.stderr, flush=True)
    _print(results)
    options.write_json(args.json, [_json(result) for result in results])
    if any(result.hunted.error for result in results):
        return 2
    return 1 if any(result.hunted.invariant is None for result in results) else 0


def _chosen(path: Path, name: str | None) -> Sequence[Mutant]:
    try:
        mutants = read(path)
    except MutantError as error:
        raise CannotRun(str(error)) from error
    for mutant in mutants:
        for kind, known, used in (("engine", ENGINES, mutant.engines), ("invariant", INVARIANTS, mutant.expect)):
            if unknown := [one for one in used if one not in known]:
                raise CannotRun(f"{path}: mutant {mutant.id} names {kind} {unknown[0]}; there are {', '.join(known)}")
    chosen = [mutant for mutant in mutants if name in (None, mutant.id)]
    if not chosen:
        raise CannotRun(f"{path} has no mutant {name}")
    return chosen


def _hunt(path: Path, mutant: Mutant, engine: str, cases: int, seed: int) -> Result:
    """In a process of its own. Its death is a fault like any other."""
    arguments = [str(path.resolve()), mutant.id, engine, str(cases), str(seed)]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "fuzz.hunt", *arguments],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Result(mutant, engine, Hunted(invariant="no-fault", message="hangs", seconds=SECONDS))
    if done.returncode < 0:
        return Result(mutant, engine, Hunted(invariant="no-fault", message=f"died of signal {-done.returncode}"))
    try:
        return Result(mutant, engine, msgspec.json.decode(done.stdout.splitlines()[-1], type=Hunted))
    except (IndexError, msgspec.DecodeError):
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return Result(mutant, engine, Hunted(error=f"mutant {mutant.id} on {engine}: {last}"))


def _line(result: Result) -> str:
    mutant, hunted = result.mutant, result.hunted
    if hunted.error:
        return hunted.error
    if hunted.invariant is None:
        return f"{mutant.id} on {result.engine} survives {hunted.cases} cases: {mutant.title}"
    unexpected = "" if hunted.invariant in mutant.expect else f" (expected {', '.join(mutant.expect)})"
    return f"{mutant.id} on {result.engine}: {hunted.invariant}{unexpected} after {hunted.cases} cases"


def _print(results: Sequence[Result]) -> None:
    table = Table("mutant", "engine", "caught by", "cases", "seconds", "what it breaks")
    for mutant, engine, hunted in results:
        caught = "could not run" if hunted.error else hunted.invariant or "SURVIVES"
        table.add_row(mutant.id, engine, caught, str(hunted.cases), f"{hunted.seconds:.1f}", mutant.title)
    report.console().print(table)


def _json(result: Result) -> dict[str, Any]:
    hunted = result.hunted
    return {
        "id": result.mutant.id,
        "killed": hunted.invariant is not None,
        "invariant": hunted.invariant,
        "engine": result.engine,
        "cases": hunted.cases,
        "seconds": hunted.seconds,
    }
