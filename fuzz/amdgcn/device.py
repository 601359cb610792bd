# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""A GPU that is not there, as far as vLLM and Triton look at it before they launch a kernel.

Relied upon: vLLM asks the ``amdsmi`` module which architecture it has, once, when ``vllm.platforms.rocm`` is imported,
and decides by it; torch's device properties give the number of compute units; Triton asks its active driver for the
target.
Everything else is vLLM's own ROCm code. Only for a process that does nothing else: none of this is taken back.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types

from fuzz.amdgcn import ARCHS, Unavailable
from fuzz.triton_cpu.rocm import amdsmi


def pretend(arch: str) -> None:
    """Give this process a GPU of an architecture. Before vLLM or Triton is imported. Raises ``Unavailable``."""
    for variable in ("TRITON_INTERPRET", "VLLM_TARGET_DEVICE"):
        os.environ.pop(variable, None)
    # With no visible device vLLM takes the absence of a driver for a distributed start-up, and keeps Triton.
    os.environ |= {"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "", "VLLM_PLUGINS": ""}
    for needed in ("vllm", "triton", "torch"):
        if importlib.util.find_spec(needed) is None:
            raise Unavailable(f"{needed} is not installed")
    _use_amd_backend(arch)
    sys.modules["amdsmi"] = amdsmi(arch)

    import torch

    properties = types.SimpleNamespace(gcnArchName=arch, multi_processor_count=ARCHS[arch])
    torch.cuda.get_device_properties = lambda *_: properties

    import vllm.platforms

    # Whatever else this machine has: another GPU, a CPU build of vLLM.
    vllm.platforms.resolve_current_platform_cls_qualname = lambda: "vllm.platforms.rocm.RocmPlatform"
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        raise Unavailable("this vLLM does without Triton here")


def _use_amd_backend(arch: str) -> None:
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    if "amd" not in backends:
        raise Unavailable("this Triton has no AMD backend")
    target = GPUTarget("hip", arch, 64)
    driver.set_active(
        types.SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda _device: 0
        )
    )
