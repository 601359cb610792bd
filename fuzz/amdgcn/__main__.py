# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The process behind ``fuzz.amdgcn.compile_for``: architecture and number of jobs in, an ``Answer`` as JSON out."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import msgspec

from fuzz.amdgcn import Answer, Row, Unavailable
from fuzz.amdgcn.build import build
from fuzz.amdgcn.device import pretend
from fuzz.amdgcn.names import Absent
from fuzz.amdgcn.places import Place, places
from fuzz.amdgcn.record import Launch, record


def compile_all(arch: str, jobs: int) -> Answer:
    """Record and compile every launch. Raises ``Unavailable``."""
    pretend(arch)
    launches, missing = collect(arch, places())
    rows = {(row.kernel, row.launch): row for row in build(launches, arch, jobs)}
    import triton
    import vllm

    ordered = [rows[launch.kernel, launch.title] for launch in launches]
    return Answer([*ordered, *missing], {"vllm": vllm.__version__, "triton": triton.__version__})


def collect(arch: str, everywhere: Iterator[Place]) -> tuple[list[Launch], list[Row]]:
    """What is launched, each specialisation once, and a row for each kernel that is launched nowhere."""
    launches: dict[tuple[str, str], Launch] = {}
    reasons: dict[str, Row] = {}
    for place in everywhere:
        why, cannot = f"vLLM does not launch it on {arch}", False
        try:
            for launch in record(place.launch, place.title):
                launches.setdefault((launch.kernel, launch.specialisation), launch)
        except Absent as absent:
            why = str(absent)
        except Exception as error:
            why, cannot = f"cannot be launched: {type(error).__name__}: {error}", True
        for kernel in place.kernels:
            row = Row(kernel, place.title, arch, None, error=why, cannot=cannot)
            if cannot or kernel not in reasons:
                reasons[kernel] = row
    launched = {launch.kernel for launch in launches.values()}
    return list(launches.values()), [row for row in reasons.values() if row.cannot or row.kernel not in launched]


def main() -> None:
    """Answer on standard output, with everything else that is said on standard error."""
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        said = compile_all(sys.argv[1], int(sys.argv[2]))
    except Unavailable as unavailable:
        said = Answer(unavailable=str(unavailable))
    with answer:
        answer.write(msgspec.json.encode(said))


if __name__ == "__main__":
    main()
