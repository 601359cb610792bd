# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""``replaycheck doctor``: what this machine has and which engines can run here. Each engine proves it with one case."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from fuzz import corpus, options, report
from fuzz.case import Case, Request
from fuzz.engines import ENGINES
from fuzz.engines.base import Engine, Refused, Unavailable
from fuzz.run import CannotRun, installed, open_engine, run_case
from fuzz.strategies import PROFILES
from invariants.gating import as_the_contract, replays
from invariants.trace import Geometry


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``replaycheck doctor``."""
    options.add_json(parser)


def command(args: argparse.Namespace) -> int:
    """Examine. 0 if the default engine can run here, else 2."""
    found = examine()
    rows = report.table("what", "state")
    for name, version in found["versions"].items():
        rows.add_row(name, version)
    for name, engine in found["engines"].items():
        rows.add_row(f"engine {name}", engine["missing"] or "can run")
    for name, title in found["profiles"].items():
        rows.add_row(f"profile {name}", title)
    for name, counts in found["corpora"].items():
        rows.add_row(f"corpus {name}", ", ".join(f"{count} {kind}" for kind, count in counts.items()))
    for gate in found["gates"] or ():
        if gate["runner"] == 2 and gate["context_parallel"] == 1:
            name = f"replay on {gate['architecture']}{', asked for' if gate['asked'] else ', turned off'}"
            rows.add_row(name, _told(gate))
    report.console().print(rows)
    options.write_json(args.json, found)
    default = found["engines"][options.DEFAULT_ENGINE]
    if not default["can_run"]:
        report.warn(default["missing"])
    return 0 if default["can_run"] else 2


def examine() -> dict[str, Any]:
    """Versions, engines, profiles and the size of the corpora."""
    versions = installed()
    engines: dict[str, dict[str, bool | str | None]] = {}
    for name in ENGINES:
        try:
            versions |= _prove(open_engine(name))
            engines[name] = {"can_run": True, "missing": None}
        except CannotRun as error:
            engines[name] = {"can_run": False, "missing": str(error)}
    return {
        "versions": versions,
        "engines": engines,
        "profiles": {name: profile.title for name, profile in PROFILES.items()},
        "corpora": {name: {kind: _count(name, kind) for kind in corpus.KINDS} for name in ENGINES},
        "gates": _gates() if engines.get("scheduler", {}).get("can_run") else None,
    }


def _gates() -> list[dict[str, Any]] | None:
    """Where vLLM's layers replay, and where they have to; None where they cannot be asked. After the engine is open."""
    from fuzz.engines.gate import gates

    try:
        return [
            msgspec.to_builtins(gate) | {"contract": replays(gate), "as_the_contract": as_the_contract(gate)}
            for gate in gates()
        ]
    except (Unavailable, ImportError, AttributeError):
        return None


def _told(gate: dict[str, Any]) -> str:
    window = "in" if gate["prefix_cacheable"] else "out of"
    differs = "" if gate["as_the_contract"] else f"; by the contract it is {'on' if gate['contract'] else 'off'}"
    return f"window {window} the prefix cache, {gate['replay_tokens']} tokens replayed{differs}"


def _prove(engine: Engine) -> dict[str, str]:
    """Run one small case that is hit and replayed; the engine's versions. Raises ``CannotRun``."""
    prompt = (("doctor", 0, 14),)
    case = Case(
        geometry=Geometry(
            window=4, block_size=4, swa_block_size=4, num_blocks=32, max_num_batched_tokens=16, max_num_seqs=2
        ),
        requests=tuple(Request(id=f"r{arrive}", arrive=arrive, prompt=prompt, max_tokens=2) for arrive in (0, 4)),
    )
    try:
        judged = run_case(engine, case)
    except Refused as refused:
        raise CannotRun(f"vLLM refuses the simplest case: {refused}") from refused
    if judged.violations:
        what = "breaks an invariant" if judged.trace else "cannot be run"
        raise CannotRun(f"the simplest case {what}: {str(judged.violations[0]).splitlines()[-1]}")
    return engine.versions()


def _count(engine: str, kind: str) -> int:
    try:
        return len(corpus.files(corpus.folder(engine, kind)))
    except corpus.CorpusError:
        return 0
