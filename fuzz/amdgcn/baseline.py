# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""What kernels needed when it was last looked at: registers and memory of each, by architecture, and by which Triton.

Another Triton compiles to other code, so more scratch memory than in a baseline of another Triton is a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from fuzz.amdgcn import Row

FILE: Final = Path(__file__).with_name("baseline.json")


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one launch's code needs; see ``Row``."""

    vgprs: int
    sgprs: int
    lds_bytes: int
    scratch_bytes: int


class Baseline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One architecture's."""

    vllm: str
    triton: str
    kernels: dict[str, Figures]
    """By ``key``."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is to be said about rows, a line each."""

    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def key(row: Row) -> str:
    """A row's name in a baseline."""
    return f"{row.kernel} [{row.launch}]"


def judge(arch: str, rows: Sequence[Row], triton: str, baseline: Baseline | None) -> Judgement:
    """Kernels that do not compile, and those that need more scratch memory than recorded. Not recorded is none."""
    said = Judgement()
    if baseline is None:
        said.notes.append(f"no baseline for {arch}: scratch memory is not judged")
    elif baseline.triton != triton:
        said.notes.append(f"the baseline of {arch} is of Triton {baseline.triton}, this is {triton}: not judged by it")
    known = baseline.kernels if baseline else {}
    judged = baseline is not None and baseline.triton == triton
    for row in rows:
        if row.ok is False:
            said.findings.append(f"{key(row)} does not compile for {arch}")
        before = known[key(row)].scratch_bytes if key(row) in known else 0
        if row.scratch_bytes is not None and row.scratch_bytes > before:
            text = f"{key(row)} spills on {arch}: {row.scratch_bytes} bytes of scratch memory a lane, {before} recorded"
            (said.findings if judged else said.notes).append(text)
    gone = sorted(known.keys() - {key(row) for row in rows if row.ok is not None})
    said.notes.extend(f"{name} is in the baseline of {arch}, and is not launched now" for name in gone)
    return said


def read(path: Path) -> dict[str, Baseline]:
    """By architecture. Raises ``OSError``, and ``msgspec.DecodeError`` if it is no baseline."""
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Baseline])


def record(rows: Iterable[Row], versions: Mapping[str, str]) -> Baseline:
    """The baseline that these rows of one architecture would be judged by; what does not compile is left out."""
    kernels = {key(row): Figures(*(getattr(row, name) for name in Figures.__struct_fields__)) for row in rows if row.ok}
    return Baseline(versions["vllm"], versions["triton"], kernels)


def write(path: Path, baselines: Mapping[str, Baseline]) -> None:
    """A line a launch, so that a difference can be read. Raises ``OSError``."""
    archs = []
    for arch, found in sorted(baselines.items()):
        lines = [f"{_json(name)}: {_json(figures)}" for name, figures in found.kernels.items()]
        kernels = ",\n    ".join(lines)
        archs.append(
            f'  {_json(arch)}: {{\n   "vllm": {_json(found.vllm)}, "triton": {_json(found.triton)},\n'
            f'   "kernels": {{\n    {kernels}\n   }}\n  }}'
        )
    path.write_text("{\n" + ",\n".join(archs) + "\n}\n")


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=0).decode()
