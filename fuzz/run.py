# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""One case on one engine, judged: case, trace, violations, finding. Everything that runs cases goes through here.

Relied upon: an engine turns what vLLM raises into a fault of the trace, so an exception that gets here is our own bug;
it is a finding like any other (``OWN_FAULT``), since the case that causes it must not be lost.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Final

import msgspec

from fuzz import corpus, known
from fuzz.case import Case, Provenance
from fuzz.edges import edges
from fuzz.engines import ENGINES, IN_A_CHILD, load
from fuzz.engines.base import Engine, Refused, Unavailable, site_of
from fuzz.engines.child import ChildEngine
from invariants import judge
from invariants.dense import tolerance
from invariants.outputs import drift
from invariants.trace import Probe, Trace, Violation

OWN_FAULT: Final = "replaycheck"
"""Stands in the place of an invariant's id where replaycheck itself failed on a case."""

INSTALL: Final = (
    "install it with `python -m pip install --no-deps -r requirements/cpu.txt -e .` (CPU), or install replaycheck "
    "with `python -m pip install -e .` where a vLLM is"
)

REAL_WINDOW: Final = 64
"""From this window on, sizes are those of a real model and cases are long."""

Key = tuple[str, str]
"""(invariant, site): what tells findings apart."""


class CannotRun(Exception):
    """What was asked for cannot be done; the message is one line that says why."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What came of running a case."""

    case: Case
    trace: Trace | None
    """None if replaycheck itself failed."""
    violations: list[Violation]
    """Those that are not in the register of known findings."""
    known: dict[str, list[Violation]]
    """Those that are, by id of the entry."""
    edges: set[str]
    """Edges that it reached."""

    @property
    def keys(self) -> list[Key]:
        """What the case breaks, each once, in the order of the violations."""
        return list(dict.fromkeys((violation.invariant, violation.site) for violation in self.violations))


@dataclass(slots=True)
class Finding:
    """A case that breaks something new, as it was kept."""

    judged: Judged
    path: Path

    @property
    def is_violation(self) -> bool:
        """Whether vLLM broke an invariant; otherwise replaycheck itself failed."""
        return self.judged.violations[0].invariant != OWN_FAULT


@dataclass(slots=True)
class Tally:
    """What many runs add up to."""

    cases: int = 0
    requests: int = 0
    steps: int = 0
    gathers: int = 0
    """Runs of consecutive positions that a consumer read for a query or a row (``Gathers``), all of them judged."""
    gathers_by_kernels: int = 0
    """Those of them that vLLM's kernels made; the others were looked up in its block tables (``Trace.kernels``)."""
    kernels: Counter[str] = field(default_factory=Counter)
    """Cases by what executed the kernels (``Trace.kernels``)."""
    interpreted: Counter[str] = field(default_factory=Counter)
    """Launches that fell back to Triton's interpreter, by kernel."""
    edges: set[str] = field(default_factory=set)
    known: Counter[str] = field(default_factory=Counter)
    """Cases by known finding that fired in them."""
    refused: Counter[str] = field(default_factory=Counter)
    """Cases that vLLM would not take, by its ``general`` reason."""
    findings: list[Finding] = field(default_factory=list)
    repeats: Counter[Key] = field(default_factory=Counter)
    """Further cases that broke what a finding breaks."""
    drift: dict[str, list[float]] = field(default_factory=dict)
    """By kind of probe, one entry a case with replayed hits: how far the logprobs of any are from those without a
    cache. Reported, never judged."""
    drifted: Counter[str] = field(default_factory=Counter)
    """By kind of probe: cases that are farther than the dense oracle's tolerance."""
    seconds: float = 0.0

    def add(self, judged: Judged) -> None:
        """Count a case in."""
        self.cases += 1
        self.requests += len(judged.case.requests)
        self.known.update(judged.known.keys())
        if judged.trace is None:
            return
        self.steps += len(judged.trace.steps)
        gathers = sum(len(gathers.row) for step in judged.trace.steps for gathers in step.gathers)
        self.gathers += gathers
        self.gathers_by_kernels += gathers if judged.trace.kernels != "none" else 0
        self.kernels[judged.trace.kernels] += 1
        self.edges |= judged.edges
        self.interpreted.update(judged.trace.interpreted)
        if judged.trace.probe:
            self._add_drift(judged.trace, judged.trace.probe)

    def _add_drift(self, trace: Trace, probe: Probe) -> None:
        if len(found := drift(trace)):
            longest = max(request.max_tokens + len(request.prompt) for request in trace.requests)
            self.drift.setdefault(probe.kind, []).append(float(found.max()))
            self.drifted[probe.kind] += int(found.max() > tolerance(probe, keys=longest))


def open_engine(name: str, apart: bool = False) -> Engine:
    """The engine, ready to run; ``apart``: in a child process, if it is one of ``IN_A_CHILD``. Raises ``CannotRun``."""
    if name not in ENGINES:
        raise CannotRun(f"no engine is called '{name}'; there are: {', '.join(ENGINES)}")
    try:
        return ChildEngine(name) if apart and name in IN_A_CHILD else load(name)
    except (Unavailable, ImportError) as error:
        hint = f"; {INSTALL}" if not installed().get("vllm") else ""
        raise CannotRun(f"engine '{name}' cannot run here: {error}{hint}") from error


def brisk(case: Case, number: int) -> bool:
    """Whether the ``number``-th case of a long run is to be run without what costs the engine most.

    What it leaves out then, the worker with its kernels, costs ten times what the scheduler does. Most bugs show in
    small cases, so every other one of those has it, and one in a hundred at a real model's sizes.
    """
    return number % (100 if case.geometry.window >= REAL_WINDOW else 2) != 0


def run_case(engine: Engine, case: Case, brisk: bool = False) -> Judged:
    """Run and judge. Raises ``Refused`` if vLLM does not take the case, ``CannotRun`` if the engine cannot run here."""
    try:
        trace = engine.run(case, brisk)
        news, old = known.split(judge(trace), trace)
        return Judged(case, trace, news, old, edges(trace))
    except Refused:
        raise
    except Unavailable as error:
        raise CannotRun(f"engine '{engine.name}' cannot run here: {error}") from error
    except Exception as error:
        return Judged(case, None, [_own_fault(error)], {}, set())


def general(refused: Refused) -> str:
    """vLLM's reason without its numbers, so that cases can be counted by it."""
    return re.sub(r"\d+", "N", str(refused))


def _own_fault(error: Exception) -> Violation:
    text = "".join(traceback.format_exception(error)).rstrip()
    return Violation(
        OWN_FAULT, text, expected="a case that is run and judged", seen=type(error).__name__, site=site_of(error)
    )


def keep(judged: Judged, engine: Engine, seed: int | None) -> Finding:
    """Save a case that broke something under the engine's ``crashes/``, with where it comes from.

    A folder that cannot be written to costs its place, not the finding: that goes to a new temporary folder.
    """
    first = judged.violations[0]
    note = f"{first.invariant} at {first.site or 'no site'}"
    provenance = Provenance(
        note=note[:200],
        found=date.today().isoformat(),
        vllm=installed().get("vllm"),
        seed=seed,
        invariant=first.invariant,
    )
    case = msgspec.structs.replace(judged.case, provenance=provenance)
    try:
        path = corpus.save(case, corpus.folder(engine.name, "crashes"), first.invariant)
    except OSError:
        path = corpus.save(case, Path(tempfile.mkdtemp(prefix="replaycheck-")), first.invariant)
    return Finding(replace(judged, case=case), path)


def installed() -> dict[str, str]:
    """Versions of what is installed, without importing any of it; what is absent is left out."""
    versions = {"python": platform.python_version()}
    for package in ("vllm", "torch", "triton", "numba", "hypothesis"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
