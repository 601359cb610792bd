# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""vLLM's own Triton kernels on the CPU, fast enough to fuzz with.

``prepare`` comes first, before vLLM or Triton is imported: it makes both usable without a GPU and picks what executes
kernels, Triton's interpreter or machine code made from the kernels' own source. ``install`` and ``uninstall`` switch
between the two at any time. A kernel that cannot be compiled runs under the interpreter; ``fallbacks`` counts that.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal

from fuzz.triton_cpu.environment import runs_on_cpu, use_interpreter

if TYPE_CHECKING:
    from fuzz.triton_cpu.memory import Checker

fallbacks: Counter[str] = Counter()
"""Launches that ran under the interpreter although the compiled executor was installed, by kernel."""


def prepare(mode: Literal["compiled", "interpreter"]) -> Literal["compiled", "interpreter", "gpu"]:
    """Make vLLM's Triton kernels runnable here and say what will execute them.

    Where vLLM runs on a GPU nothing is touched and the answer is "gpu". May be called again to change the mode. Where
    Triton's internals are not those that the compiler knows, or llvmlite is missing, it is the interpreter, with a
    warning.
    Raises ``RuntimeError`` if Triton was imported before, with its interpreter off.
    """
    if not runs_on_cpu():
        return "gpu"
    use_interpreter()
    if mode == "compiled":
        try:
            install()
        except (ImportError, AttributeError) as error:
            # Python shows a warning of one text from one place once.
            warnings.warn(f"kernels run under Triton's interpreter, slowly: {error}", RuntimeWarning, stacklevel=1)
            return "interpreter"
    else:
        uninstall()
    return mode


def fallbacks_since(before: Counter[str]) -> dict[str, int]:
    """What ``fallbacks`` counts more than a copy of it from before, by kernel."""
    return dict(fallbacks - before)


def install() -> None:
    """Run kernels as machine code from now on. Only after ``prepare``."""
    from fuzz.triton_cpu import executor

    executor.install()


def compiles() -> bool:
    """Whether kernels run as machine code now."""
    executor = sys.modules.get(f"{__name__}.executor")
    return executor is not None and executor.installed()


def uninstall() -> None:
    """Run kernels under Triton's interpreter from now on."""
    executor = sys.modules.get(f"{__name__}.executor")
    if executor is not None:
        executor.uninstall()


def checking(*, strict: bool = False, races: bool = True) -> AbstractContextManager[Checker]:
    """Check every memory access of the compiled kernels launched inside; see ``memory.checking``."""
    from fuzz.triton_cpu import memory

    return memory.checking(strict=strict, races=races)
