# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""What Triton's interpreter gets wrong, and that ``interpreting`` puts it right: torch is the arbiter.

A test whose first half finds the bare interpreter right skips: that repair can go.
"""

from __future__ import annotations

from launches import BOOL, F32, I32, interpreting

# isort: split

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpretedFunction

from fuzz.triton_cpu import uninstall

E4M3, FNUZ, BF16, F16 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.bfloat16, torch.float16
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@pytest.fixture(autouse=True)
def bare() -> Iterator[None]:
    before = InterpretedFunction.run
    uninstall()
    yield
    InterpretedFunction.run = before


def same(values: torch.Tensor, wanted: torch.Tensor) -> bool:
    values, wanted = values.float(), wanted.float()
    return bool(((values == wanted) | (values.isnan() & wanted.isnan())).all())


def wrong_then_right(launch: Callable[[], torch.Tensor], wanted: torch.Tensor) -> None:
    try:
        already = same(launch(), wanted)
    except InterpreterError:
        already = False
    with interpreting():
        assert same(launch(), wanted)
    if already:
        pytest.skip(f"Triton {triton.__version__} has this right")


@triton.jit
def _cast(values, out, n: tl.constexpr):
    lane = tl.arange(0, n)
    tl.store(out + lane, tl.load(values + lane).to(out.dtype.element_ty))


def cast(values: torch.Tensor, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    def launch() -> torch.Tensor:
        out = torch.empty(len(values), dtype=dtype)
        _cast[(1,)](values, out, len(values))
        return out

    return launch


@pytest.mark.parametrize("dtype", [E4M3, FNUZ, BF16], ids=str)
def test_float32_is_rounded_to_nearest(dtype: torch.dtype) -> None:
    """Triton 3.9.0 misrounds 2 % of these as float8, and cuts off bfloat16."""
    values = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * 30
    wrong_then_right(cast(values, dtype), values.to(dtype))


def test_integers_become_bfloat16() -> None:
    values = torch.arange(-500, 524, dtype=I32)
    wrong_then_right(cast(values, BF16), values.to(BF16))


@triton.jit
def _arithmetic(a, b, out, less, n: tl.constexpr):
    lane = tl.arange(0, n)
    x, y = tl.load(a + lane), tl.load(b + lane)
    tl.store(out + lane, x * y + x)
    tl.store(less + lane, (x < y) | (x != x))


def test_bfloat16_is_a_number() -> None:
    """Triton 3.9.0 multiplies, adds and compares its bits."""
    a, b = (torch.randn(64, generator=torch.Generator().manual_seed(seed)).to(BF16) for seed in (1, 2))
    a[3] = torch.nan

    def launch() -> torch.Tensor:
        out, less = torch.empty(64, dtype=BF16), torch.empty(64, dtype=BOOL)
        _arithmetic[(1,)](a, b, out, less, 64)
        return torch.cat([out, less.to(BF16)])

    wrong_then_right(launch, torch.cat([a * b + a, ((a < b) | a.isnan()).to(BF16)]))


@triton.jit
def _dot(a, b, out, n: tl.constexpr):
    row, column = tl.arange(0, n)[:, None], tl.arange(0, n)[None, :]
    at = row * n + column
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


def test_products_of_bfloat16() -> None:
    """Triton 3.9.0 is off by 2e10. Small integers, so that the order of the sum does not matter."""
    a, b = (torch.arange(256).remainder(prime).sub(3).view(16, 16).to(BF16) for prime in (7, 5))

    def launch() -> torch.Tensor:
        out = torch.empty(16, 16)
        _dot[(1,)](a, b, out, 16)
        return out

    wrong_then_right(launch, a.float() @ b.float())


@triton.jit
def _mask(out, n):
    lane = tl.arange(0, 4)
    inside = n > 2
    tl.store(out + lane, lane, mask=inside & (lane < 3))


def test_a_scalar_comparison_is_a_mask() -> None:
    """Triton 3.9.0 raises; ``_gather_lookback_kernel`` has such a mask."""

    def launch() -> torch.Tensor:
        out: Any = torch.full((4,), 9, dtype=I32)
        _mask[(1,)](out, 3)
        return out

    wrong_then_right(launch, torch.tensor([0, 1, 2, 9]))


@pytest.mark.parametrize("dtype", [F16, E4M3], ids=str)
def test_what_is_right_stays(dtype: torch.dtype) -> None:
    """Widening, and products of float16, as torch does them with and without the repairs."""
    values = torch.arange(256, dtype=torch.uint8).view(E4M3) if dtype == E4M3 else torch.linspace(-9, 9, 256).to(F16)
    values = values[~values.float().isnan()][:128]
    for repaired in (False, True):
        if repaired:
            with interpreting():
                assert same(cast(values, F32)(), values)
        else:
            assert same(cast(values, F32)(), values)
