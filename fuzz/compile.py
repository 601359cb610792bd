# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""``replaycheck compile``: vLLM's kernels on the replay path as AMD machine code, without a GPU and without ROCm.

A kernel that does not compile is a finding, and so is one that needs more scratch memory than it is known to.
"""

from __future__ import annotations

import argparse
import os
import shlex
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from fuzz import options, report
from fuzz.amdgcn import ARCHS, Answer, Row, Unavailable, baseline, compile_for
from fuzz.run import CannotRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``replaycheck compile``."""
    parser.add_argument(
        "--arch", nargs="+", choices=ARCHS, default=list(ARCHS), help="GPUs to compile for (default: all of them)"
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        default=baseline.FILE,
        metavar="FILE",
        help="what the kernels are known to need (default: replaycheck's own)",
    )
    parser.add_argument("--record", action="store_true", help="write what they need now into the baseline first")
    options.add_json(parser)


def command(args: argparse.Namespace) -> int:
    """Compile and judge. 0: nothing found; 1: a finding; 2: nothing found, but a kernel could not be launched."""
    known = _read(args.baseline, must_exist=not args.record)
    started = time.monotonic()
    answers = _compile(list(dict.fromkeys(args.arch)))
    seconds = time.monotonic() - started
    if args.record:
        known |= {arch: baseline.record(answer.rows, answer.versions) for arch, answer in answers.items()}
        _write(args.baseline, known)
    out, findings, notes = report.console(), list[str](), list[str]()
    for arch, answer in answers.items():
        out.print(_table(arch, answer, known.get(arch)))
        judged = baseline.judge(arch, answer.rows, answer.versions["triton"], known.get(arch))
        findings += judged.findings
        notes += judged.notes
    rows = [row for answer in answers.values() for row in answer.rows]
    _print_not_launched(rows)
    for note in notes:
        print(f"note: {note}")
    for finding in findings:
        print(f"FOUND: {finding}")
    compiled = sum(row.ok is not None for row in rows)
    print(f"{compiled} launches compiled in {seconds:.0f} s, {len(findings)} findings")
    if findings:
        print(shlex.join(["replaycheck", "compile", "--arch", *answers]))
    options.write_json(args.json, [_json(row) for row in rows])
    unknown = sum(row.cannot for row in rows) or not compiled
    if unknown:
        report.warn("not everything could be launched, so nothing is known about it; see above")
    return 1 if findings else 2 if unknown else 0


def _compile(archs: list[str]) -> dict[str, Answer]:
    try:
        return compile_for(archs, len(os.sched_getaffinity(0)))
    except Unavailable as unavailable:
        raise CannotRun(str(unavailable)) from unavailable


def _read(path: Path, must_exist: bool) -> dict[str, baseline.Baseline]:
    try:
        return baseline.read(path)
    except FileNotFoundError as error:
        if must_exist:
            raise CannotRun(f"there is no baseline {path}: make one with --record") from error
        return {}
    except OSError as error:
        raise CannotRun(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CannotRun(f"{path} is no baseline: {error}") from error


def _write(path: Path, known: dict[str, baseline.Baseline]) -> None:
    try:
        baseline.write(path, known)
    except OSError as error:
        raise CannotRun(f"cannot write to {path}: {error.strerror}") from error


def _table(arch: str, answer: Answer, known: baseline.Baseline | None) -> Table:
    """The launches that were compiled for one architecture; VGPRs with what they are more than in the baseline."""
    versions = ", ".join(f"{name} {version}" for name, version in answer.versions.items())
    made = Table(box=None, padding=(0, 2, 0, 0), title=f"{arch} ({versions})", title_justify="left")
    for column in ("kernel", "launched for"):
        made.add_column(column, overflow="fold")
    for column in ("VGPRs", "SGPRs", "LDS", "scratch"):
        made.add_column(column, justify="right")
    for row in answer.rows:
        if row.ok:
            before = known.kernels.get(baseline.key(row)) if known else None
            vgprs = str(row.vgprs)
            if before and row.vgprs != before.vgprs:
                vgprs += f" ({row.vgprs - before.vgprs:+})"  # type: ignore[operator]
            made.add_row(row.kernel, row.launch, vgprs, str(row.sgprs), str(row.lds_bytes), str(row.scratch_bytes))
        elif row.ok is False:
            made.add_row(row.kernel, row.launch, "does not compile")
    return made


def _print_not_launched(rows: Iterable[Row]) -> None:
    """What did not compile, in full, and what was not launched, with the reason."""
    for row in rows:
        if row.ok is False:
            print(f"{baseline.key(row)}, {row.arch}: {row.error}")
        elif row.ok is None:
            print(f"not compiled for {row.arch}: {row.kernel}: {row.error}")


def _json(row: Row) -> dict[str, Any]:
    told = msgspec.structs.asdict(row)
    del told["cannot"]
    return told
