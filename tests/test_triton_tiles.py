# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Tiles of several axes, compiled: sums and products along an axis, and lanes in another place."""

from __future__ import annotations

from launches import F32, F64, Arena, agree, compiled, fuzzed
from launches import interpreter as interpreter

# isort: split


import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.triton_cpu import install, uninstall
from fuzz.triton_cpu.executor import KernelFallback

BF16, F16, E4M3, FNUZ = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e4m3fnuz
floats = st.sampled_from([F32, F64])
seeds = st.integers(0, 1 << 20)
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


# sums along one of several axes, and products


@triton.jit
def _axes(values, out, rows: tl.constexpr, columns: tl.constexpr):
    row, column = tl.arange(0, rows), tl.arange(0, columns)
    x = tl.load(values + row[:, None] * columns + column[None, :])
    tl.store(out + row, tl.sum(x, axis=1))
    tl.store(out + rows + column, tl.sum(x, axis=0))
    tl.store(out + rows + columns + row, tl.max(x, axis=1))


@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize("columns", [1, 4, 8, 64, 512])
@settings(fuzzed, max_examples=4)
@given(seeds, floats)
def test_sums_along_one_of_two_axes(rows: int, columns: int, seed: int, dtype: torch.dtype) -> None:
    """In NumPy's order: pairwise along the last axis, one after the other along another."""
    arena = Arena(seed)
    values = arena.put(arena.random.normal(0, 1, rows * columns), dtype)
    agree(arena, _axes[(1,)], values, arena.empty(2 * rows + columns, dtype), rows, columns)


@triton.jit
def _products(a, b, acc, out, m: tl.constexpr, n: tl.constexpr, k: tl.constexpr):
    row, column, inner = tl.arange(0, m)[:, None], tl.arange(0, n)[None, :], tl.arange(0, k)
    x = tl.load(a + row * k + inner[None, :])
    y = tl.load(b + tl.arange(0, n)[:, None] * k + inner[None, :])
    at = row * n + column
    tl.store(out + at, tl.dot(x, tl.trans(y)))
    tl.store(out + m * n + at, tl.dot(x, tl.trans(y), tl.load(acc + at)))


sizes = st.sampled_from([1, 2, 4, 16, 32])


@pytest.mark.parametrize("dtype", [F32, F16, BF16, E4M3, FNUZ], ids=str)
@settings(fuzzed, max_examples=10)
@given(seeds, sizes, sizes, st.sampled_from([1, 2, 8, 128, 512]))
def test_products_are_within_their_bound(dtype: torch.dtype, seed: int, m: int, n: int, k: int) -> None:
    """k * u * sum(abs(a) * abs(b)) from the exact product, and no further from float64's than that."""
    arena = Arena(seed)
    a, b = arena.put(arena.random.normal(0, 1, (m, k)), dtype), arena.put(arena.random.normal(0, 1, (n, k)), dtype)
    acc, out = arena.put(arena.random.normal(0, 1, (m, n)), F32), arena.empty((2, m, n), F32)
    untouched = arena.bytes.clone()
    with compiled():
        _products[(1,)](a, b, acc, out, m, n, k)
    exact, size = a.double() @ b.double().T, a.double().abs() @ b.double().abs().T
    unit = 2.0**-24
    assert ((out[0] - exact).abs() <= k * unit * size).all()
    assert ((out[1] - (exact + acc)).abs() <= k * unit * size + unit * (exact + acc).abs() * (1 + k * unit)).all()
    out.copy_(untouched[out.data_ptr() - arena.bytes.data_ptr() :][: out.nbytes].view(F32).view(out.shape))
    assert torch.equal(arena.bytes, untouched)


def test_products_add_in_ascending_order() -> None:
    """What the docstring says, bit for bit."""
    k = 64
    random = np.random.default_rng(9)
    a, b = (torch.from_numpy(random.normal(size=(1, k)).astype(np.float32)) for _ in range(2))
    out = torch.empty(2)
    with compiled():
        _products[(1,)](a, b, torch.zeros(1), out, 1, 1, k)
    total = np.float32(0)
    for x, y in zip(a[0].numpy(), b[0].numpy(), strict=True):
        total = np.float32(total + np.float32(x * y))
    assert out[0].item() == total


# tiles in another shape


@triton.jit
def _shapes(values, out, n: tl.constexpr):
    lane = tl.arange(0, n)
    x = tl.load(values + lane)
    tile = tl.reshape(x, (4, n // 4))
    tl.store(out + lane, tl.reshape(tl.trans(tile), (n,)))
    left, right = tl.split(tl.reshape(x, (n // 2, 2)))
    tl.store(out + n + lane, tl.interleave(right, left))
    tl.store(out + 2 * n + lane, tl.reshape(tl.join(left, right * 2), (n,)))
    cube = tl.permute(tl.reshape(x, (2, 2, n // 4)), (1, 2, 0))
    tl.store(out + 3 * n + lane, tl.reshape(cube, (n,)))
    rows = tl.cat(tl.reshape(left, (2, n // 4)), tl.reshape(right, (2, n // 4)), dim=1)
    tl.store(out + 4 * n + lane, tl.reshape(rows, (n,)))
    rows = tl.cat(tl.reshape(left, (2, n // 4)), tl.reshape(right, (2, n // 4)), dim=0)
    tl.store(out + 5 * n + lane, tl.reshape(rows, (n,)))
    spread = tl.broadcast_to(tl.exp2(left)[:, None], (n // 2, 2))
    tl.store(out + 6 * n + lane, tl.reshape(spread, (n,)))


@fuzzed
@given(seeds, st.sampled_from([8, 64]))
def test_tiles_in_another_shape(seed: int, n: int) -> None:
    arena = Arena(seed)
    agree(arena, _shapes[(1,)], arena.ints(-9, 9, n, F32), arena.empty(7 * n, F32), n)


@triton.jit
def _spread(values, out, rows: tl.constexpr, columns: tl.constexpr, n):
    row, column = tl.arange(0, rows), tl.arange(0, columns)
    at = row[:, None] * columns + column[None, :]
    scale = tl.exp2(tl.load(values + row))
    tl.store(values + row, tl.load(values + row) + 1)
    if n > 1:
        tl.store(out + at, scale[:, None] + column[None, :])
        tl.store(values + row, scale)
    tl.store(out + rows * columns + at, scale[:, None] * column[None, :])


@pytest.mark.parametrize("n", [1, 2])
def test_what_is_spread_is_computed_once_and_in_time(n: int) -> None:
    """Before the stores that come after it, and on whichever way the program takes."""
    arena = Arena(n)
    agree(arena, _spread[(1,)], arena.ints(0, 5, 8, F32), arena.empty(2 * 8 * 16, F32), 8, 16, n)


# what is not translated


@triton.jit
def _rows(values, out):
    row, column = tl.arange(0, 4), tl.arange(0, 8)
    tl.store(out, tl.sum(tl.load(values + row[:, None] * 8 + column[None, :])))


def test_sums_of_floats_along_all_of_several_axes_fall_back() -> None:
    install()
    try:
        with pytest.warns(KernelFallback, match="along all of several axes"):
            _rows[(1,)](torch.ones(32), torch.empty(1))
    finally:
        uninstall()
