# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Machine code of recorded launches, each compiled in a process of its own: LLVM ends the process when it gives up.

Relied upon: ``JITFunction.preload`` compiles from a specialisation without a device; the code object's metadata, which
the assembly ends with, has the registers and the scratch memory; Triton sets the size of LDS at launch, from its own
metadata.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import IO, Any, Final

from fuzz.amdgcn import Row
from fuzz.amdgcn.record import Launch

SECONDS: Final = 600.0
"""A kernel that takes longer to compile counts as one that does not compile."""
LINES: Final = 12
"""Of what a failing compiler says."""


def build(launches: Iterable[Launch], arch: str, jobs: int) -> Iterator[Row]:
    """Compile launches, ``jobs`` at a time; a row for each, in the order in which they get ready."""
    waiting, running = list(launches)[::-1], list[_Build]()
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_Build(waiting.pop(), arch))
        answered = wait([each.answer for each in running], timeout=1.0)
        for each in list(running):
            if each.answer in answered:
                running.remove(each)
                yield each.row()
            elif time.monotonic() > each.deadline:
                running.remove(each)
                yield each.give_up()


class _Build:
    """One compiler process."""

    def __init__(self, launch: Launch, arch: str) -> None:
        self.launch, self.arch = launch, arch
        self.answer, answer = multiprocessing.Pipe(duplex=False)
        self._words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the build
        # A fork has vLLM and Triton imported already, and nothing in it has been compiled yet.
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_compile, args=(launch, answer, self._words.fileno()), daemon=True)
        self._process.start()
        answer.close()
        self.deadline = time.monotonic() + SECONDS

    def row(self) -> Row:
        """What it answered, or how it died."""
        try:
            figures = self.answer.recv()
        except EOFError:
            figures = None
        self._process.join()
        if isinstance(figures, dict):
            return Row(self.launch.kernel, self.launch.title, self.arch, True, **figures)
        code = self._process.exitcode or 0
        died = f"the compiler was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with {code}"
        return self._failed(figures or died)

    def give_up(self) -> Row:
        """End it."""
        self._process.kill()
        self._process.join()
        return self._failed(f"still compiling after {SECONDS:.0f} s")

    def _failed(self, why: str) -> Row:
        self._words.seek(0)
        words = self._words.read().decode(errors="replace").strip().splitlines()
        return Row(self.launch.kernel, self.launch.title, self.arch, False, error="\n".join([why, *words[-LINES:]]))


def _compile(launch: Launch, answer: Connection, words: int) -> None:
    """In the child: send the figures of the code, or the error's text."""
    os.dup2(words, 2)
    try:
        answer.send(figures_of(launch.function.preload(launch.specialisation)))
    except Exception as error:
        answer.send(f"{type(error).__name__}: {error}")


def figures_of(binary: Any) -> dict[str, int]:
    """Registers and memory of a compiled kernel, by the fields of ``Row``."""
    assembly = binary.asm["amdgcn"]
    told = {name: int(value) for name, value in re.findall(r"^\s*-?\s*\.(\w+):\s+(\d+)$", assembly, re.MULTILINE)}
    return {
        "vgprs": told["vgpr_count"],
        "sgprs": told["sgpr_count"],
        "lds_bytes": max(told["group_segment_fixed_size"], binary.metadata.shared),
        "scratch_bytes": told["private_segment_fixed_size"],
    }
