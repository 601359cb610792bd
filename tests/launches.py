# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""For tests of the compiled executor: a launch under Triton's interpreter and compiled has to leave the same memory.

Every tensor of a test lives in one arena with guard bytes around it. A launch runs on the arena under the interpreter,
then on the same bytes compiled, so a stray write, a missing write and a wrong value are all a difference.
Whoever imports this is skipped where Triton is missing, or runs on a GPU.
"""

# ruff: noqa: E402 - Triton is imported after prepare()

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

for _needed in ("torch", "triton", "llvmlite"):
    if importlib.util.find_spec(_needed) is None:
        pytest.skip(f"{_needed} is not installed", allow_module_level=True)

from fuzz.triton_cpu import fallbacks, install, prepare

if prepare("compiled") == "gpu":
    pytest.skip("Triton's kernels run on a GPU here", allow_module_level=True)

import torch
from triton.runtime.interpreter import InterpretedFunction

from fuzz.triton_cpu.executor import KernelFallback
from fuzz.triton_cpu.interpreter import interpreting as interpreting

I32, I64, BOOL, F32, F64 = torch.int32, torch.int64, torch.bool, torch.float32, torch.float64
GUARD = 64
fuzzed = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))


class Arena:
    """Memory for the tensors of one test, filled with random bytes in between."""

    def __init__(self, seed: int = 0, size: int = 1 << 18) -> None:
        self.random = np.random.default_rng(seed)
        self.bytes = torch.from_numpy(self.random.integers(0, 256, size, dtype=np.uint8))
        self._used = GUARD

    def put(self, values: Any, dtype: torch.dtype = I32) -> torch.Tensor:
        """A tensor with these values."""
        values = torch.as_tensor(np.asarray(values)).to(dtype)
        tensor = self.empty(values.shape, dtype)
        tensor.copy_(values)
        return tensor

    def empty(self, shape: Any, dtype: torch.dtype = I32) -> torch.Tensor:
        """A tensor with random bytes in it."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        size = int(np.prod(shape)) * dtype.itemsize
        start, self._used = self._used, self._used + (size + 15) // 16 * 16 + GUARD
        assert self._used <= len(self.bytes)
        return self.bytes[start : start + size].view(dtype).view(shape)

    def ints(self, low: int, high: int, shape: Any, dtype: torch.dtype = I32) -> torch.Tensor:
        """A tensor of random numbers in low..high."""
        return self.put(self.random.integers(low, high + 1, shape), dtype)


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    """For a module that imports it: each of its tests starts under the interpreter, whatever an engine installed."""
    with interpreting():
        yield


@contextmanager
def compiled() -> Iterator[None]:
    """Launches inside are compiled, and none may fall back."""
    before, run = dict(fallbacks), InterpretedFunction.run
    install()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", KernelFallback)
            yield
    finally:
        InterpretedFunction.run = run
    assert dict(fallbacks) == before, [str(warning.message) for warning in caught]


Near = Callable[[np.ndarray, np.ndarray], Any]


def agree(
    arena: Arena,
    launch: Callable[..., Any],
    *args: Any,
    loosely: Sequence[tuple[torch.Tensor, Near]] = (),
    **kwargs: Any,
) -> None:
    """Assert that the launch leaves the same bytes, and returns the same tensors, either way.

    ``loosely``: tensors on the arena whose values need not have the same bytes, each with what says for the compiled
    and the interpreted values, element by element, whether they may differ so.
    """
    before = arena.bytes.clone()
    wanted = launch(*args, **kwargs)
    want = arena.bytes.clone()
    arena.bytes.copy_(before)
    with compiled():
        got = launch(*args, **kwargs)
    for tensor, near in loosely:
        start = tensor.data_ptr() - arena.bytes.data_ptr()
        values = want[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        bad = np.argwhere(~near(tensor.numpy(), values.numpy())).tolist()
        assert not bad, f"at {bad[0]}: {tensor[tuple(bad[0])].item()!r} for {values[tuple(bad[0])].item()!r}"
        tensor.copy_(values)
    different = torch.nonzero(arena.bytes != want).flatten().tolist()
    assert not different, f"{len(different)} bytes differ, the first at {different[0]}"
    if isinstance(wanted, torch.Tensor):
        wanted, got = (wanted,), (got,)
    for one, other in zip(wanted or (), got or (), strict=True):
        assert torch.equal(one, other)
