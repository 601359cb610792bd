# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Floats of one and two bytes, compiled: torch is the arbiter."""

from __future__ import annotations

from launches import BOOL, F32, F64, I32, I64, Arena, agree, compiled, fuzzed
from launches import interpreter as interpreter

# isort: split


import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

seeds = st.integers(0, 1 << 20)
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


BF16, F16, E4M3, FNUZ = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e4m3fnuz
narrow = pytest.mark.parametrize("dtype", [BF16, F16, E4M3, FNUZ], ids=str)


@triton.jit
def _cast(values, out, n: tl.constexpr):
    lane = tl.arange(0, n)
    tl.store(out + lane, tl.load(values + lane).to(out.dtype.element_ty))


def cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(len(values), dtype=dtype)
    with compiled():
        _cast[(1,)](values, out, len(values))
    return out


def alike(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Whether elements have the same bits, or both are NaN."""
    bits = {1: torch.uint8, 2: torch.uint16, 4: I32}[got.dtype.itemsize]
    return (got.view(bits) == wanted.view(bits)) | (got.float().isnan() & wanted.float().isnan())


@narrow
def test_every_narrow_float_widens_as_in_torch(dtype: torch.dtype) -> None:
    bits = {1: torch.uint8, 2: torch.uint16}[dtype.itemsize]
    values = torch.arange(1 << 8 * dtype.itemsize).to(bits).view(dtype)
    assert alike(cast(values, F32), values.float()).all()
    assert alike(cast(values, BF16), values.to(BF16)).all()


@narrow
@fuzzed
@given(seeds)
def test_floats_are_narrowed_as_in_torch(dtype: torch.dtype, seed: int) -> None:
    """Any bits, and numbers near the format's own and midway between them, where rounding is decided."""
    random, n = torch.Generator().manual_seed(seed), 1 << 10
    bits = {1: torch.uint8, 2: torch.uint16}[dtype.itemsize]
    own = torch.randint(0, 1 << 8 * dtype.itemsize, (n,), generator=random).to(bits).view(dtype).float()
    other = (own.view(I32) + torch.randint(-2, 3, (n,), generator=random, dtype=I32)).view(F32)
    midway = (own.double() * (1 + 2.0 ** -torch.randint(3, 13, (n,), generator=random))).float()
    anything = torch.randint(-(1 << 31), 1 << 31, (n,), generator=random).to(I32).view(F32)
    for values in (own, other, midway, anything):
        same_bits = alike(cast(values, dtype), values.to(dtype))
        assert same_bits.all(), values[~same_bits][:3].tolist()


def test_what_no_narrow_float_is_large_enough_for() -> None:
    values = torch.tensor([1e9, -1e9, torch.inf, -torch.inf, torch.nan, 464.0, 465.0, 248.0, 249.0, 65519.0, 65520.0])
    values = torch.cat([values, values[:5]])
    for dtype in (BF16, F16, E4M3, FNUZ):
        assert alike(cast(values, dtype), values.to(dtype)).all(), dtype


@triton.jit
def _narrow_arithmetic(a, b, out, flags, n: tl.constexpr):
    lane = tl.arange(0, n)
    x, y = tl.load(a + lane), tl.load(b + lane)
    tl.store(out + lane, x + y)
    tl.store(out + n + lane, x - y)
    tl.store(out + 2 * n + lane, x * y)
    tl.store(out + 3 * n + lane, tl.where(x > y, tl.abs(x), -y))
    tl.store(out + 4 * n + lane, tl.maximum(x, y))
    tl.store(flags + lane, (x == y) | (x <= y))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_every_operation_on_two_bytes_is_rounded(dtype: torch.dtype) -> None:
    """As torch does it, and as the interpreter does once it is put right."""
    arena, n = Arena(3), 64
    a, b = (arena.put(arena.random.normal(0, 3, n), dtype) for _ in range(2))
    a[:4] = torch.tensor([torch.nan, torch.inf, -0.0, 1e-6])
    out, flags = arena.empty(5 * n, dtype), arena.empty(n, BOOL)
    with compiled():
        _narrow_arithmetic[(1,)](a, b, out, flags, n)
    wanted = [a + b, a - b, a * b, torch.where(a > b, a.abs(), -b), torch.fmax(a, b)]
    assert alike(out, torch.cat(wanted)).all()
    assert torch.equal(flags, (a == b) | (a <= b))
    a[0] = 1.0  # the bits of a NaN are not kept
    agree(arena, _narrow_arithmetic[(1,)], a, b, out, flags, n)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_ranks_of_two_bytes(dtype: torch.dtype) -> None:
    from vllm.v1.worker.gpu.sample.logprob import _ranks_kernel as kernel

    values, out = torch.tensor([[1.0, 3.0, -2.0, 3.0]], dtype=dtype), torch.zeros(1, dtype=I64)
    with compiled():
        kernel[(1,)](out, values, 4, torch.tensor([2]), 4, BLOCK_SIZE=4)
    assert out.item() == 4


@triton.jit
def _to_small(values, bytes_, shorts, words, n: tl.constexpr):
    lane = tl.arange(0, n)
    x = tl.load(values + lane)
    tl.store(bytes_ + lane, x.to(tl.uint8))
    tl.store(bytes_ + n + lane, x.to(tl.int8).to(tl.uint8, bitcast=True))
    tl.store(shorts + lane, x.to(tl.int16))
    tl.store(words + lane, x.to(tl.uint32))


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_small_and_unsigned_integers(dtype: torch.dtype) -> None:
    arena = Arena(5)
    values = arena.put([0.0, -0.0, 0.9, 1.0, 17.5, 126.99, 127.0, 99.0], dtype)
    out = arena.empty(16, torch.uint8), arena.empty(8, torch.int16), arena.empty(8, torch.uint32)
    agree(arena, _to_small[(1,)], values, *out, 8)
