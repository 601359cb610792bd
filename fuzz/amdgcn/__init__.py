# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""vLLM's Triton kernels as AMD machine code, without a GPU and without ROCm.

``python -m fuzz.amdgcn ARCH JOBS`` is the process that does it: it pretends to have a GPU (``device``), has vLLM's own
functions launch what the replay path launches (``places``), keeps what Triton's JIT would compile instead of launching
it (``record``) and compiles that with Triton's AMD backend (``build``). ``compile_for`` starts that process: importing
vLLM for a ROCm GPU is not to be undone, and nothing of it may get into the process that asked.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

import msgspec

ARCHS: Final = {"gfx942": 304, "gfx950": 256}
"""GPUs on which vLLM runs DeepSeek-V4.1, with their compute units (MI300X and MI325X, MI355X)."""


class Unavailable(Exception):
    """Nothing can be compiled here; the message is one line that says why."""


class Row(msgspec.Struct, frozen=True):
    """One kernel as it is launched in one place, compiled; or why it is not."""

    kernel: str
    """Its name in vLLM."""
    launch: str
    """What vLLM launches it for; with the kernel and the architecture, what tells rows apart."""
    arch: str
    ok: bool | None
    """Whether it compiled. None: it is not launched there, ``error`` says why."""
    vgprs: int | None = None
    """Vector registers of a lane, accumulation registers included."""
    sgprs: int | None = None
    lds_bytes: int | None = None
    scratch_bytes: int | None = None
    """Memory of a lane for what does not fit into registers."""
    error: str | None = None
    cannot: bool = False
    """vLLM has it, but launching it failed: nothing is known about it."""


class Answer(msgspec.Struct, frozen=True):
    """What the process says, as JSON on its standard output."""

    rows: list[Row] = []
    versions: dict[str, str] = {}
    unavailable: str | None = None


def compile_for(archs: Sequence[str], jobs: int) -> dict[str, Answer]:
    """Compile every launch for each of these ``ARCHS``, in a process each, with ``jobs`` compilers at a time in all.

    Raises ``Unavailable``: no vLLM, no Triton with an AMD backend, or a process died.
    """
    processes = {arch: _start(arch, max(1, jobs // len(archs))) for arch in archs}
    try:
        return {arch: _answer(arch, process) for arch, process in processes.items()}
    finally:
        for process in processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _start(arch: str, jobs: int) -> subprocess.Popen[bytes]:
    # -P and our own path: -m would put the working directory first, and in a clone of vLLM that is another vLLM. A
    # session of its own: its compilers end with it.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "fuzz.amdgcn", arch, str(jobs)],
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise Unavailable(f"its process did not start: {error}") from error


def _answer(arch: str, process: subprocess.Popen[bytes]) -> Answer:
    said, words = process.communicate()
    try:
        answer = msgspec.json.decode(said, type=Answer)
    except msgspec.DecodeError:
        last = (words.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise Unavailable(f"the process that compiles for {arch} ended with {process.returncode}: {last}") from None
    if answer.unavailable:
        raise Unavailable(answer.unavailable)
    return answer
