# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""vLLM's entry point into replaycheck: a general plugin, which vLLM loads in each of its processes.

It registers the probe's architecture. What else it does, the environment asks for, since that is what child processes
inherit: ``REPLAYCHECK_RECORD=count|check|trace`` installs the gather recorder, ``REPLAYCHECK_KERNELS=compiled`` runs
Triton kernels as machine code on a CPU.
"""

from __future__ import annotations

import os

ARCHITECTURE = "ReplayProbeForCausalLM"
RECORD = "REPLAYCHECK_RECORD"
KERNELS = "REPLAYCHECK_KERNELS"


class PluginError(RuntimeError):
    """The environment asks for something that does not exist; vLLM's process ends with this message."""


def register() -> None:
    """May be called more than once."""
    kernels, record = os.environ.get(KERNELS), os.environ.get(RECORD)
    if kernels:
        if kernels not in ("compiled", "interpreter"):
            raise PluginError(f"{KERNELS}={kernels}: it can be compiled or interpreter")
        from fuzz import triton_cpu

        triton_cpu.prepare("compiled" if kernels == "compiled" else "interpreter")
    from vllm import ModelRegistry

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        # By name: the module imports much of vLLM, and most processes will never want it.
        ModelRegistry.register_model(ARCHITECTURE, f"fuzz.probe.model:{ARCHITECTURE}")
    if record:
        from fuzz.probe.recorder import MODES, recorder

        mode = next((mode for mode in MODES if mode == record), None)
        if mode is None:
            raise PluginError(f"{RECORD}={record}: it can be {', '.join(MODES)}")
        recorder.install(mode)
