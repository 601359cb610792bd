# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""What people and programs get to read: progress, the closing table, the text of a failure, JSON.

A failure's text needs no other context, and its last line is the command that replays just it. Progress and warnings
go to standard error, results to standard output; texts that are copied are printed plainly, never wrapped or coloured.
"""

from __future__ import annotations

import os
import shlex
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from fuzz import corpus
from fuzz.case import encode
from fuzz.edges import EDGES
from fuzz.engines.base import Engine
from fuzz.known import REGISTER
from fuzz.run import Finding, Judged, Key, Tally, installed
from invariants.trace import Violation

PLAIN_WIDTH: Final = 120
"""Columns of a table that does not go to a terminal."""
REFRESH_SECONDS: Final = 0.1
LINE_SECONDS: Final = 10.0
"""Between two lines of progress where there is no terminal, or nobody at it."""


def warn(message: str) -> None:
    """One line to standard error."""
    print(f"replaycheck: {message}", file=sys.stderr)


def console() -> Console:
    """Standard output, for tables."""
    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)


def table(*columns: str) -> Table:
    """A table without a heading whose cells are folded, never cut."""
    made = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def versions(engine: Engine) -> dict[str, str]:
    """What the result depends on: what is installed, and what the engine knows better."""
    return {**installed(), **engine.versions()}


class Meter:
    """How far a run is: a live line on a terminal, else a plain one every ten seconds. Call it with the tally."""

    def __init__(self, title: str, cases: int | None, seconds: float | None, started: float) -> None:
        """``started`` is of ``time.monotonic``; at least one of the two limits is given."""
        self._title, self._cases, self._seconds, self._started = title, cases, seconds, started
        self._live = sys.stderr.isatty() and "CI" not in os.environ
        self._shown = started
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[counts]}"),
            console=Console(stderr=True, highlight=False),
            disable=not self._live,
            transient=True,
        )
        self._task = self._progress.add_task(title, total=1.0, counts="starting")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, tally: Tally) -> None:
        """Show the tally, unless the last one was shown just now."""
        now = time.monotonic()
        if now - self._shown < (REFRESH_SECONDS if self._live else LINE_SECONDS):
            return
        self._shown = now
        spent = now - self._started
        counts = f"{tally.cases} cases, {len(tally.edges)} of {len(EDGES)} edges, {len(tally.findings)} violations"
        if self._live:
            shares = (tally.cases / self._cases if self._cases else 0, spent / self._seconds if self._seconds else 0)
            self._progress.update(self._task, completed=min(1.0, max(shares)), counts=counts)
        else:
            warn(f"{self._title}: {counts}, {spent:.0f} s")


def replay_command(path: Path) -> str:
    """The command that replays the case in a file."""
    return shlex.join(["replaycheck", "replay", corpus.shown(path)])


def failure_text(judged: Judged, path: Path, used: Mapping[str, str]) -> str:
    """What was broken, the case, the versions ``used``, and the command that replays it as the last line."""
    lines = []
    sites: dict[Key, list[Violation]] = {}
    for violation in judged.violations:
        sites.setdefault((violation.invariant, violation.site), []).append(violation)
    for first, *more in sites.values():
        lines += _violation_lines(first)
        # The last one's message says how many the invariant did not list.
        lines += [f"    and more  {len(more)} listed, the last: {more[-1].message}"] if more else []
    lines += [f"(known, not counted: {', '.join(judged.known)})"] if judged.known else []
    lines += ["", encode(judged.case).decode().rstrip(), ""]
    lines += [", ".join(f"{name} {version}" for name, version in used.items())]
    return "\n".join([*lines, replay_command(path)])


def _violation_lines(violation: Violation) -> list[str]:
    where = {"request": violation.request, "step": violation.step, "row": violation.row}
    where |= {"position": violation.position, "site": violation.site or None}
    told = ", ".join(f"{name} {value}" for name, value in where.items() if value is not None)
    return [
        f"{violation.invariant}: {violation.message}",
        f"    expected  {violation.expected}",
        f"    seen      {violation.seen}",
        f"    where     {told or 'the whole run'}",
    ]


@dataclass(frozen=True, slots=True)
class Run:
    """One ``replaycheck run``, for the report."""

    engine: str
    profile: str
    seed: int
    versions: dict[str, str]
    tally: Tally
    interrupted: bool


def print_run(run: Run) -> None:
    """The closing table, then each finding in full."""
    tally = run.tally
    rows = table("what", "how much")
    for name, value in _rows(run):
        rows.add_row(name, value)
    out = console()
    out.print(rows)
    if run.interrupted:
        print("broken off: what is above is what was done until then; findings are kept")
    for finding in tally.findings:
        print(f"\n{'-' * 20} {_kind(finding)}; the smallest case that was found:")
        print(failure_text(finding.judged, finding.path, run.versions))


def _kind(finding: Finding) -> str:
    return finding.judged.violations[0].invariant if finding.is_violation else "a fault of replaycheck's own"


def _rows(run: Run) -> Iterable[tuple[str, str]]:
    tally = run.tally
    yield "engine", f"{run.engine}, profile {run.profile}, seed {run.seed}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in run.versions.items())
    yield "cases", f"{tally.cases} in {tally.seconds:.1f} s"
    yield "requests", str(tally.requests)
    yield "steps", str(tally.steps)
    yield "gathers checked", f"{tally.gathers}, {tally.gathers_by_kernels} of them made by vLLM's kernels"
    yield "kernels", ", ".join(f"{mode}: {count} cases" for mode, count in tally.kernels.items()) or "none ran"
    if tally.interpreted:
        yield "  interpreted", ", ".join(f"{kernel}: {count} launches" for kernel, count in tally.interpreted.items())
    for kind, found in drift_json(tally).items():
        yield (
            f"{kind} hits",
            f"in {found['cases']} cases; logprobs are {found['median']:.1e} (median) to {found['max']:.1e} (most) from "
            f"no-cache, in {found['above_tolerance']} cases by more than the oracle's tolerance",
        )
    missing = [edge for edge in EDGES if edge not in tally.edges]
    yield "edges reached", f"{len(EDGES) - len(missing)} of {len(EDGES)}"
    if missing:
        yield "  not reached", ", ".join(missing)
    violations = sum(finding.is_violation for finding in tally.findings)
    yield "violations", str(violations)
    for finding in tally.findings:
        yield f"  {_kind(finding)}", corpus.shown(finding.path)
    if tally.repeats:
        yield "  again", ", ".join(f"{name} at {site}: {count}" for (name, site), count in tally.repeats.items())
    yield "known", str(sum(tally.known.values()))
    titles = {entry.id: entry.title for entry in REGISTER}
    for name, count in tally.known.items():
        yield f"  {name}", f"{count} cases: {titles[name]}"
    yield "skipped", str(sum(tally.refused.values()))
    for reason, count in tally.refused.most_common():
        yield "  refused by vLLM", f"{count}: {reason}"


def run_json(run: Run) -> dict[str, Any]:
    """The result of ``replaycheck run`` for a program. ``errors`` are faults of replaycheck's own."""
    tally = run.tally
    told = [
        {
            "invariant": finding.judged.violations[0].invariant,
            "case": corpus.shown(finding.path),
            "message": str(finding.judged.violations[0]),
        }
        for finding in tally.findings
    ]
    broken = [finding.is_violation for finding in tally.findings]
    return {
        "engine": run.engine,
        "profile": run.profile,
        "seed": run.seed,
        "cases": tally.cases,
        "requests": tally.requests,
        "steps": tally.steps,
        "gathers": tally.gathers,
        "gathers_by_kernels": tally.gathers_by_kernels,
        "seconds": round(tally.seconds, 3),
        "violations": [entry for entry, violation in zip(told, broken, strict=True) if violation],
        "known": [{"id": name, "case": _known_case(run.engine, name), "count": n} for name, n in tally.known.items()],
        "skipped": dict(tally.refused),
        "versions": run.versions,
        "errors": [entry for entry, violation in zip(told, broken, strict=True) if not violation],
        "repeats": [{"invariant": key[0], "site": key[1], "count": n} for key, n in tally.repeats.items()],
        "kernels": dict(tally.kernels),
        "interpreted": dict(tally.interpreted),
        "edges": {"reached": sorted(tally.edges), "missing": sorted(EDGES.keys() - tally.edges)},
        "interrupted": run.interrupted,
        "drift": drift_json(tally),
    }


def drift_json(tally: Tally) -> dict[str, Any]:
    """By kind of probe: how far replayed hits are from no-cache, as the largest logprob difference in a case."""
    return {
        kind: {
            "cases": len(found),
            "median": statistics.median(found),
            "max": max(found),
            "above_tolerance": tally.drifted[kind],
        }
        for kind, found in tally.drift.items()
        if found
    }


def _known_case(engine: str, name: str) -> str | None:
    """The file in ``known/`` that reproduces an entry of the register."""
    try:
        for path in corpus.files(corpus.folder(engine, "known")):
            entry = corpus.read(path).provenance.known
            if entry and entry.id == name:
                return corpus.shown(path)
    except corpus.CorpusError:
        pass
    return None
