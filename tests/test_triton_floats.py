# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Float kernels compiled against Triton's interpreter: the same bits, but for what goes through ``exp`` or ``log``.

The interpreter's ``exp`` and ``log`` are NumPy's, which are some ulp off; ours are the nearest float32.
"""

from __future__ import annotations

from launches import BOOL, F32, F64, I32, I64, Arena, Near, agree, compiled, fuzzed, interpreting
from launches import interpreter as interpreter

# isort: split


import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from triton.runtime.errors import InterpreterError

ULP = 4
"""NumPy's ``exp`` and ``log`` of float32 differ from ours by no more than this."""
EPSILON = 2.0**-23
SPECIAL = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3.4e38, -3.4e38, 0.1, 0.5, 2.5]
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning", "ignore:All-NaN:RuntimeWarning")
seeds = st.integers(0, 1 << 20)
floats = st.sampled_from([F32, F64])


def _ordered(values: np.ndarray) -> np.ndarray:
    """Integers that neighbouring floats differ in by one; both zeros are 0."""
    bits = values.view(np.int32 if values.dtype == np.float32 else np.int64)
    return np.where(bits < 0, np.iinfo(bits.dtype).min - bits, bits).astype(np.int64)


def _steps(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """uint64: how many floats apart. A float64 has no room for the integers of two float64s."""
    x, y = _ordered(x), _ordered(y)
    return np.maximum(x, y).astype(np.uint64) - np.minimum(x, y).astype(np.uint64)


def within(ulps: int) -> Near:
    """Values this near, or both NaN."""
    return lambda x, y: (_steps(x, y) <= ulps) | (np.isnan(x) & np.isnan(y))


def test_steps_by_hand():
    """Neighbours are one apart, the two largest of both signs nearly all of 2**64."""
    for dtype in (np.float32, np.float64):
        x = np.array([4.05, -0.0, 1.0, -1.0], dtype)
        assert _steps(x, x).tolist() == [0] * 4
        assert _steps(x, np.nextafter(x, dtype(9))).tolist() == [1] * 4
    least, most = np.array([-np.finfo(float).max]), np.array([np.finfo(float).max])
    assert _steps(least, most).tolist() == [2 * int(most.view(np.int64)[0])]


def same(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Values of the same bits, or both NaN."""
    return ((x == y) & (np.signbit(x) == np.signbit(y))) | (np.isnan(x) & np.isnan(y))


def beside(absolute: float) -> Near:
    """Values that differ by no more than ``absolute`` and half an ulp on either side, or not at all, or both NaN."""
    return lambda x, y: (x == y) | (abs(x - y) <= absolute + np.spacing(abs(y))) | (np.isnan(x) & np.isnan(y))


def logits(arena: Arena, rows: int, vocab: int, *, nan: bool = True) -> torch.Tensor:
    """Rows with many ties, and with lanes that are masked out; the first lane of 16 is always a number."""
    random = arena.random
    values = random.choice([-2.0, 0.0, 1.5, 3.25, 8.0], (rows, vocab)) if random.random() < 0.5 else None
    values = random.normal(0, 4, (rows, vocab)) if values is None else values
    values[random.random((rows, vocab)) < 0.2] = -np.inf
    if nan:
        hole = random.random((rows, vocab)) < 0.1
        hole[:, ::16] = False
        values[hole] = np.nan
    return arena.put(values, F32)


# vLLM's kernels


@fuzzed
@given(seeds, st.integers(1, 4), st.integers(1, 70), st.booleans(), st.booleans(), st.booleans())
def test_greedy_sample(seed: int, rows: int, vocab: int, double: bool, cache: bool, apply: bool) -> None:
    """With no temperature there is no noise: every bit is the same."""
    _sample(Arena(seed), rows, vocab, [0.0] * rows, exact=True, double=double, cache=cache, apply=apply)


@fuzzed
@given(seeds, st.integers(1, 4), st.integers(1, 70), st.booleans(), st.booleans(), st.booleans())
def test_gumbel_sample(seed: int, rows: int, vocab: int, double: bool, cache: bool, apply: bool) -> None:
    """The same hash; the noise is off by the ulps of two logarithms, and so is the maximum."""
    arena = Arena(seed)
    temperatures = list(arena.random.choice([0.0, 1.0, 0.3, 2.0], rows))
    _sample(arena, rows, vocab, temperatures, exact=False, double=double, cache=cache, apply=apply)


def _sample(
    arena: Arena,
    rows: int,
    vocab: int,
    temperature: list[float],
    *,
    exact: bool,
    double: bool,
    cache: bool,
    apply: bool,
) -> None:
    from vllm.v1.worker.gpu.sample.gumbel import _gumbel_sample_kernel as kernel

    block, states = 16, rows + 2
    blocks = triton.cdiv(vocab, block)
    index = arena.put(arena.random.permutation(states)[:rows])
    temperatures = arena.put(np.zeros(states), F32)
    temperatures[index] = torch.tensor(temperature, dtype=F32)
    argmax, best = arena.empty((rows, blocks), I64), arena.empty((rows, blocks), F64 if double else F32)
    values = logits(arena, rows, vocab)
    cached = arena.empty((states, 2, vocab), F32) if cache else None
    column = arena.ints(0, 1, rows) if cache else None
    agree(
        arena,
        kernel[(rows, blocks)],
        *(argmax, argmax.stride(0), best, best.stride(0), cached, 2 * vocab if cache else 0, vocab if cache else 0),
        *(column, values if cache else None, vocab if cache else 0, values, values.stride(0), index),
        *(arena.ints(-(2**62), 2**62, states, I64), arena.ints(0, 999, rows, I64), temperatures, vocab),
        BLOCK_SIZE=block,
        IS_DRAFTING=cache,
        APPLY_TEMPERATURE=apply,
        USE_FP64=double,
        PER_TOKEN_COL=cache,
        loosely=[(best, within(0) if exact else beside(1e-4 if not double else 1e-12))],
    )


@fuzzed
@given(seeds, st.integers(1, 4), st.integers(1, 70), st.integers(1, 9), st.booleans())
def test_topk_log_softmax(seed: int, rows: int, vocab: int, topk: int, nan: bool) -> None:
    from vllm.v1.worker.gpu.sample.logprob import _topk_log_softmax_kernel as kernel

    arena = Arena(seed)
    values, out = logits(arena, rows, vocab, nan=nan), arena.empty((rows, topk), F32)
    ids = arena.ints(0, vocab - 1, (rows, topk), I64)
    # Terms of the sum are off by ULP, and so is every of up to 8 additions that a term goes through, by half an ulp a
    # side; the sum is below 128 and its logarithm below 8.
    sum_off = (ULP + 8) * EPSILON
    agree(
        arena,
        kernel[(rows,)],
        *(out, values, values.stride(0), ids, ids.stride(0), topk, vocab),
        BLOCK_SIZE=16,
        TOPK_BLOCK_SIZE=4,
        loosely=[(out, beside(sum_off + ULP * 4 * EPSILON))],
    )


@fuzzed
@given(seeds, st.integers(1, 4), st.integers(1, 70), st.sampled_from([16, 128]))
def test_ranks(seed: int, rows: int, vocab: int, block: int) -> None:
    from vllm.v1.worker.gpu.sample.logprob import _ranks_kernel as kernel

    arena = Arena(seed)
    values, out = logits(arena, rows, vocab), arena.empty(rows, I64)
    ids = arena.ints(0, vocab - 1, rows, I64)
    agree(arena, kernel[(rows,)], *(out, values, values.stride(0), ids, vocab), BLOCK_SIZE=block)


@fuzzed
@given(seeds, st.integers(1, 4), st.integers(1, 70))
def test_temperature(seed: int, rows: int, vocab: int) -> None:
    from vllm.v1.worker.gpu.sample.gumbel import _temperature_kernel as kernel

    arena = Arena(seed)
    values, index = logits(arena, rows, vocab), arena.put(arena.random.permutation(rows))
    temperatures = arena.put(arena.random.choice([0.0, 1.0, 0.7, 3.0], rows), F32)
    grid = rows, triton.cdiv(vocab, 16)
    agree(arena, kernel[grid], *(values, values.stride(0), index, temperatures, vocab), BLOCK_SIZE=16)


@fuzzed
@given(seeds, st.integers(1, 4), st.integers(1, 70))
def test_min_p(seed: int, rows: int, vocab: int) -> None:
    from vllm.v1.worker.gpu.sample.min_p import _min_p_kernel as kernel

    arena = Arena(seed)
    values, index = logits(arena, rows, vocab), arena.put(arena.random.permutation(rows))
    least = arena.put(arena.random.choice([0.0, 0.013, 0.4], rows), F32)
    agree(arena, kernel[(rows,)], *(values, values.stride(0), index, least, vocab), BLOCK_SIZE=16)


@fuzzed
@given(seeds, st.integers(1, 4), st.integers(0, 20))
def test_prompt_logprobs_token_ids(seed: int, rows: int, longest: int) -> None:
    from vllm.v1.worker.gpu.sample.prompt_logprob import _prompt_logprobs_token_ids_kernel as kernel

    arena = Arena(seed)
    starts = np.concatenate([[0], np.cumsum(arena.random.integers(0, longest + 1, rows))])
    tokens = arena.ints(0, 999, (rows + 1, 64))
    agree(
        arena,
        kernel[(rows,)],
        *(
            arena.empty(int(starts[-1]) + 1, I64),
            arena.put(starts),
            arena.put(arena.random.permutation(rows + 1)[:rows]),
        ),
        *(arena.ints(0, 40, rows + 1), tokens, tokens.stride(0)),
        BLOCK_SIZE=8,
    )


@fuzzed
@given(seeds, st.integers(1, 3), st.sampled_from([0.0, 0.7, None]))
def test_rejection_sample(seed: int, rows: int, temperature: float | None) -> None:
    """Which drafts of an n-gram speculator are accepted, and what is sampled after them. Philox decides; the chance
    that ulps of a logarithm turn a decision is below 1e-5."""
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    arena, vocab, steps, states = Arena(seed), 40, 3, rows + 1
    counts = arena.random.integers(0, steps + 1, rows) + 1
    starts = np.concatenate([[0], np.cumsum(counts)])
    total = int(starts[-1])
    values = arena.put(arena.random.normal(0, 2, (total, vocab)), F32)
    index = arena.random.permutation(states)[:rows]
    drafts = values.argmax(dim=1).roll(1).numpy()
    drafts = np.where(arena.random.random(total) < 0.3, arena.random.integers(-1, vocab, total), drafts)
    choices = [0.0, 0.7] if temperature is None else [temperature]
    arguments = (
        *(values, None, arena.put(drafts, I64), arena.put(starts), arena.ints(0, 1 << 40, total, I64)),
        *(arena.put(index), arena.put(np.repeat(index, counts)), arena.put(np.concatenate([*map(np.arange, counts)]))),
        *(arena.put(arena.random.choice(choices, states), F32), arena.ints(-(2**62), 2**62, states, I64), steps),
    )

    def launch() -> list[torch.Tensor]:
        sampled, lengths = rejection_sample(*arguments)
        return [lengths, *(row[:length] for row, length in zip(sampled, lengths.tolist(), strict=True))]

    agree(arena, launch)
    if temperature == 0.0:
        with compiled():
            lengths = launch()[0].tolist()
        best = values.argmax(dim=1).tolist()
        for start, count, length in zip(starts[:-1].tolist(), counts.tolist(), lengths, strict=True):
            right = [drafts[start + i + 1] == best[start + i] for i in range(count - 1)]
            assert length == (right.index(False) if False in right else count - 1) + 1


def test_a_row_does_not_know_its_batch() -> None:
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    random = torch.Generator().manual_seed(1)
    row, other = torch.randn(2, 1500, generator=random) * 5
    ids = torch.arange(1500)
    with compiled():
        alone = compute_token_logprobs(row[None], ids[None])
        batch = compute_token_logprobs(torch.stack([other, row, row]), ids.expand(3, -1))
    assert torch.equal(batch[1], alone[0])
    assert torch.equal(batch[2], alone[0])
    assert not torch.equal(batch[0], alone[0])
    assert torch.allclose(alone[0], torch.log_softmax(row.double(), 0).float(), atol=1e-5)


# the language, feature by feature


@triton.jit
def _arithmetic(a, b, out, flags, odd, n: tl.constexpr):
    lane = tl.arange(0, n)
    x, y = tl.load(a + lane), tl.load(b + lane)
    tl.store(out + lane, x + y)
    tl.store(out + n + lane, x - y)
    tl.store(out + 2 * n + lane, x * y)
    tl.store(out + 3 * n + lane, x / y)
    tl.store(out + 4 * n + lane, -x + 1.7 * y - 3)
    tl.store(out + 5 * n + lane, tl.where(x < y, x, float("-inf")))
    tl.store(out + 6 * n + lane, x * y + x)
    tl.store(flags + lane, x == y)
    tl.store(flags + n + lane, x != y)
    tl.store(flags + 2 * n + lane, x < y)
    tl.store(flags + 3 * n + lane, x <= y)
    tl.store(flags + 4 * n + lane, x > y)
    tl.store(flags + 5 * n + lane, x >= y)
    tl.store(odd + lane, tl.maximum(x, y))
    tl.store(odd + n + lane, tl.minimum(x, y))


@fuzzed
@given(seeds, floats)
def test_arithmetic_is_exact(seed: int, dtype: torch.dtype) -> None:
    """Every bit, but for those of a NaN, and the sign of a zero that is the maximum of both."""
    arena, n = Arena(seed), 256
    values = [np.where(arena.random.random(n) < 0.7, arena.random.choice(SPECIAL, n), arena.random.normal(size=n))]
    values.append(np.where(arena.random.random(n) < 0.7, arena.random.choice(SPECIAL, n), arena.random.normal(size=n)))
    a, b = (arena.put(column, dtype) for column in values)
    out, odd = arena.empty(7 * n, dtype), arena.empty(2 * n, dtype)
    arguments = a, b, out, arena.empty(6 * n, torch.int8), odd, n
    agree(arena, _arithmetic[(1,)], *arguments, loosely=[(out, same), (odd, within(0))])


@triton.jit
def _branches(values, out, i):
    x = tl.load(values + i)
    if x:
        tl.store(out, 1)
    if not (x > 0.5 or x == -1.0):
        tl.store(out + 1, 2)
    if x < float("inf") and x != 0:
        tl.store(out + 2, 3)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("i", range(len(SPECIAL)))
def test_branches_on_floats(i: int, dtype: torch.dtype) -> None:
    arena = Arena()
    agree(arena, _branches[(1,)], arena.put(SPECIAL, dtype), arena.empty(3), i)


def test_multiplication_is_rounded_before_addition() -> None:
    """A fused multiply-add would leave 2**-46."""
    arena = Arena()
    x = arena.put([1 + EPSILON], F32)
    out = arena.empty(1, F32)
    agree(arena, _fusible[(1,)], x, out)
    assert out.item() == 0.0


@triton.jit
def _fusible(values, out):
    x = tl.load(values)
    tl.store(out, x * x - (1.0 + 2 * 1.1920928955078125e-07))


@triton.jit
def _casts(values, single, double, int32s, int64s, n: tl.constexpr):
    lane = tl.arange(0, n)
    x = tl.load(values + lane)
    tl.store(single + lane, x.to(tl.float32))
    tl.store(double + lane, x.to(tl.float64))
    tl.store(int32s + lane, x.to(tl.int32))
    tl.store(int64s + lane, x.to(tl.int64))
    tl.store(single + n + lane, x / 3.0)


INTEGERS = [torch.int8, torch.uint8, I32, torch.uint32, I64, torch.uint64]


@pytest.mark.parametrize("dtype", [BOOL, *INTEGERS, F32, F64])
def test_casts(dtype: torch.dtype) -> None:
    arena, n = Arena(7), 64
    if dtype in (F32, F64):
        numbers = [
            *SPECIAL,
            2.0**31,
            -(2.0**31),
            2.0**31 - 128,
            2.0**63,
            -(2.0**63),
            1e10,
            -2.7,
            16777217.0,
            1e300,
            1e-300,
        ]
        numbers += list(arena.random.normal(0, 1e5, n - len(numbers)))
        values = arena.empty(n, dtype)
        values.copy_(torch.tensor(numbers, dtype=F64).to(dtype))
    else:
        values = arena.empty(n, dtype)
        if dtype == BOOL:
            values.copy_(torch.arange(n) % 3 == 0)
    agree(
        arena,
        _casts[(1,)],
        *(values, arena.empty(2 * n, F32), arena.empty(n, F64), arena.empty(n), arena.empty(n, I64), n),
    )


@triton.jit
def _extremes(values, out, indices, n: tl.constexpr):
    x = tl.load(values + tl.arange(0, n))
    best, place = tl.max(x, 0, return_indices=True)
    tl.store(out, best)
    tl.store(indices, place)
    best, place = tl.min(x, axis=0, return_indices=True, return_indices_tie_break_left=False)
    tl.store(out + 1, best)
    tl.store(indices + 1, place)
    tl.store(indices + 2, tl.argmax(x, 0))
    tl.store(indices + 3, tl.argmin(x, 0))
    tl.store(out + 2, tl.max(x))
    tl.store(out + 3, tl.min(x, 0))


@fuzzed
@given(seeds, st.sampled_from([1, 2, 4, 64]), st.sampled_from([F32, F64, *INTEGERS]))
def test_extremes_and_where_they_are(seed: int, n: int, dtype: torch.dtype) -> None:
    arena = Arena(seed)
    pool = [-np.inf, np.inf, np.nan, -1.0, 2.0] if dtype.is_floating_point else [0, 1, 5, 100]
    values = arena.put(arena.random.choice(arena.random.permutation(pool)[:3], n), dtype)
    out, indices = arena.empty(4, dtype), arena.empty(4)
    if values.isnan().all():
        for executor in (compiled, interpreting):
            with executor(), pytest.raises(InterpreterError, match="All-NaN slice encountered"):
                _extremes[(1,)](values, out, indices, n)
        return
    agree(arena, _extremes[(1,)], values, out, indices, n)


@triton.jit
def _sums(values, out, n: tl.constexpr):
    x = tl.load(values + tl.arange(0, n))
    tl.store(out, tl.sum(x))
    tl.store(out + 1, tl.sum(x * x, 0))
    tl.store(out + 2, tl.max(x))
    tl.store(out + 3, tl.min(x, axis=0))


@fuzzed
@given(seeds, st.sampled_from([1, 2, 4, 8, 16, 64, 128, 256, 1024, 4096]), floats, st.booleans())
def test_sums_in_numpys_order(seed: int, n: int, dtype: torch.dtype, special: bool) -> None:
    arena = Arena(seed)
    numbers = arena.random.normal(size=n) * 10.0 ** arena.random.integers(-6, 6, n)
    if special:
        numbers = np.where(arena.random.random(n) < 0.2, arena.random.choice(SPECIAL, n), numbers)
    out = arena.empty(4, dtype)
    agree(arena, _sums[(1,)], arena.put(numbers, dtype), out, n, loosely=[(out, within(0))])


@triton.jit
def _transcendental(values, out, n: tl.constexpr):
    lane = tl.arange(0, n)
    x = tl.load(values + lane)
    tl.store(out + lane, tl.exp(x))
    tl.store(out + n + lane, tl.log(x))


@fuzzed
@given(seeds, floats)
def test_exp_and_log(seed: int, dtype: torch.dtype) -> None:
    arena, n = Arena(seed), 256
    scale = 10.0 ** arena.random.integers(-30, 3, n)
    numbers = np.where(
        arena.random.random(n) < 0.2, arena.random.choice(SPECIAL, n), arena.random.normal(size=n) * scale
    )
    values, out = arena.put(numbers, dtype), arena.empty((2, n), dtype)
    agree(arena, _transcendental[(1,)], values, out, n, loosely=[(out, within(ULP))])
    if dtype == F32:
        with compiled():
            _transcendental[(1,)](values, out, n)
        exact = np.exp(values.numpy().astype(np.float64)), np.log(values.numpy().astype(np.float64))
        assert within(0)(out.numpy(), np.array(exact).astype(np.float32)).all()


@triton.jit
def _random(seeds, places, out, n: tl.constexpr):
    lane = tl.arange(0, n)
    seed, place = tl.load(seeds), tl.load(places + lane)
    tl.store(out + lane, tl.rand(seed, place))
    tl.store(out + n + lane, tl.rand(seed, place.to(tl.int32)))


@fuzzed
@given(seeds)
def test_philox(seed: int) -> None:
    arena, n = Arena(seed), 16
    places = arena.ints(-(2**62), 2**62, n, I64)
    agree(arena, _random[(1,)], arena.ints(-(2**62), 2**62, 1, I64), places, arena.empty(2 * n, F32), n)


@triton.jit
def _high(a, b, out, n: tl.constexpr):
    lane = tl.arange(0, n)
    tl.store(out + lane, tl.umulhi(tl.load(a + lane), tl.load(b + lane)))


@pytest.mark.parametrize("dtype", [torch.uint32, torch.uint64])
def test_the_high_half_of_a_product(dtype: torch.dtype) -> None:
    arena, most = Arena(), torch.iinfo(dtype).max
    a, b, out = (arena.empty(4, dtype) for _ in range(3))
    a.copy_(torch.tensor([0, 1, most, most // 2 + 1], dtype=dtype))
    b.copy_(torch.tensor([most, most, most, 6], dtype=dtype))
    agree(arena, _high[(1,)], a, b, out, 4)
    assert out.tolist() == [0, 0, most - 1, 3]


# functions of floats


@triton.jit
def _functions(values, out, n: tl.constexpr):
    lane = tl.arange(0, n)
    x = tl.load(values + lane)
    tl.store(out + lane, tl.ceil(x))
    tl.store(out + n + lane, tl.floor(x))
    tl.store(out + 2 * n + lane, tl.abs(x))
    tl.store(out + 3 * n + lane, tl.clamp(x, -2.5, 2.5))


@fuzzed
@given(seeds, floats)
def test_functions_that_are_exact(seed: int, dtype: torch.dtype) -> None:
    arena, n = Arena(seed), 64
    values = arena.put(arena.random.normal(0, 3, n), dtype)
    values[: len(SPECIAL)] = torch.tensor(SPECIAL, dtype=dtype)
    out = arena.empty(4 * n, dtype)
    agree(arena, _functions[(1,)], values, out, n, loosely=[(out, same)])


@triton.jit
def _powers(values, out, n: tl.constexpr):
    lane = tl.arange(0, n)
    x = tl.load(values + lane)
    tl.store(out + lane, tl.exp2(x))
    tl.store(out + n + lane, tl.log2(tl.abs(x)))


@fuzzed
@given(seeds, floats)
def test_exp2_and_log2(seed: int, dtype: torch.dtype) -> None:
    arena, n = Arena(seed), 64
    values = arena.put(arena.random.normal(0, 40, n), dtype)
    out = arena.empty(2 * n, dtype)
    agree(arena, _powers[(1,)], values, out, n, loosely=[(out, within(ULP))])


def test_powers_of_two_are_exact() -> None:
    """Scales of the cache are nothing else."""
    values, out = torch.arange(-149, 107).float(), torch.empty(512)
    with compiled():
        _powers[(1,)](values, out, 256)
    assert torch.equal(out[:256].double(), 2.0 ** values.double())
    exact = 2.0 ** torch.arange(-149, 107).float()
    with compiled():
        _powers[(1,)](exact, out, 256)
    assert torch.equal(out[256:], values)
