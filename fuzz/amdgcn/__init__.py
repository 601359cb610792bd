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
import subprocess
import sys
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


def compile_for(arch: str, jobs: int) -> Answer:
    """Compile every launch for one of ``ARCHS``, in a process of its own with this many compiler processes.

    Raises ``Unavailable``: no vLLM, no Triton with an AMD backend, or the process died.
    """
    # -P and our own path: -m would put the working directory first, and in a clone of vLLM that is another vLLM.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "fuzz.amdgcn", arch, str(jobs)],
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    try:
        answer = msgspec.json.decode(ran.stdout, type=Answer)
    except msgspec.DecodeError:
        words = ran.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise Unavailable(f"the process that compiles for {arch} ended with {ran.returncode}: {words[-1]}") from None
    if answer.unavailable:
        raise Unavailable(answer.unavailable)
    return answer
