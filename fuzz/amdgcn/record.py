# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""What Triton's JIT would compile for a launch, kept instead of compiled.

Relied upon: a true answer of ``triton.knobs.runtime.jit_cache_hook`` makes the JIT neither compile nor launch, and the
hook is handed the specialisation it derived from the arguments (dtypes, constants, alignment, 2-GB ranges, options) as
JSON that ``JITFunction.preload`` compiles from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with all that its machine code depends on."""

    kernel: str
    title: str
    """What it is launched for."""
    function: Any = field(compare=False)
    """The ``JITFunction``."""
    specialisation: str = field(repr=False)


def record(launches: Callable[[], None], title: str) -> list[Launch]:
    """The kernels that a function launches, in order, each specialisation once. No kernel runs."""
    from triton import knobs

    made: dict[tuple[str, str], Launch] = {}

    def keep(**told: Any) -> bool:
        function = told["fn"].jit_function
        specialisation = told["compile"]["specialization_data"]
        kernel = function.__qualname__.removesuffix(".kernel")
        again = sum(name == kernel for name, _ in made)
        launch = Launch(kernel, f"{title} ({again + 1})" if again else title, function, specialisation)
        made.setdefault((kernel, specialisation), launch)
        return True

    knobs.runtime.jit_cache_hook = keep
    try:
        launches()
    finally:
        knobs.runtime.jit_cache_hook = None
    return list(made.values())
