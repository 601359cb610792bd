# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Makes vLLM and Triton usable on a machine without a GPU, before either is imported.

Relied upon: Triton decides when a kernel is *decorated* whether it is interpreted, so the environment has to be set
before Triton is imported; vLLM believes in Triton without a GPU driver when the visible devices are set to nothing
(it takes that for a distributed start-up) or, in a CPU build, when Triton has a backend called "cpu".
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import sys
import types
from pathlib import Path

_CPU_OP = "init_cpu_memory_env"
_keep: list[object] = []
"""torch drops an operator together with the Library object that made it."""


def runs_on_cpu() -> bool:
    """Whether vLLM would run on the CPU here: asked to, or torch sees no accelerator."""
    if os.environ.get("VLLM_TARGET_DEVICE", "").lower() == "cpu":
        return True
    import torch

    return not torch.cuda.is_available()


def use_interpreter() -> None:
    """Have Triton's kernels interpreted and vLLM use them. Raises ``RuntimeError`` if Triton came first."""
    triton = sys.modules.get("triton")
    if triton is not None and not triton.knobs.runtime.interpret:
        raise RuntimeError("Triton was imported before fuzz.triton_cpu.prepare(): its kernels are not interpreted")
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    _add_cpu_backend()
    _stub_cpu_op()


def _add_cpu_backend() -> None:
    from triton.backends import backends

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    backends.setdefault("cpu", types.SimpleNamespace(driver=Driver, compiler=None))


def _stub_cpu_op() -> None:
    """vLLM's CPU worker pins its memory to a NUMA node by an operator that only CPU builds have."""
    import torch

    if _keep or hasattr(torch.ops._C, _CPU_OP) or _wheel_has_cpu_ops():
        return
    library = torch.library.Library("_C", "FRAGMENT")
    library.define(f"{_CPU_OP}(int[] nodes) -> ()")
    library.impl(_CPU_OP, lambda _nodes: None, "CompositeExplicitAutograd")
    _keep.append(library)


def _wheel_has_cpu_ops() -> bool:
    spec = importlib.util.find_spec("vllm")
    for folder in spec.submodule_search_locations or () if spec else ():
        for pattern in ("_C.*so", "_C_AVX*so"):
            for path in Path(folder).glob(pattern):
                with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                    if content.find(_CPU_OP.encode()) >= 0:
                        return True
    return False
