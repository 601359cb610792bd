# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""vLLM's own Triton kernels on the CPU. Call ``prepare`` before vLLM or Triton is imported."""

from __future__ import annotations

from typing import Literal

from fuzz.triton_cpu.environment import runs_on_cpu, use_interpreter


def prepare(mode: Literal["compiled", "interpreter"]) -> Literal["compiled", "interpreter", "gpu"]:
    """Make vLLM's Triton kernels runnable here and say what will execute them.

    Where vLLM runs on a GPU nothing is touched and the answer is "gpu". May be called again to change the mode.
    Raises ``RuntimeError`` if Triton was imported before, with its interpreter off.
    """
    if not runs_on_cpu():
        return "gpu"
    if mode == "compiled":
        raise NotImplementedError("the compiled executor is not there yet; use 'interpreter'")
    use_interpreter()
    return "interpreter"
