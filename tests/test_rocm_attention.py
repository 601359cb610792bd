# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""ROCm's sparse attention, compiled, against a dense computation in float64.

Not against the interpreter: the order of the sums differs, and under Triton 3.9.0 products of bfloat16 are those of
their bits.

The bound, to first order, with u = 2**-24 and k = 512: a score is off by e <= (k + 3) u sum(abs(q) abs(k)) scale, so a
weight is by a factor of e, of u times its distance from the maximum, and of a few u for each block of the list; the sum
of the weights likewise. Weights are rounded to bfloat16 (eight bits: by 2**-8 at most) before they meet values, and the
result is again.
"""

from __future__ import annotations

from launches import F32, I32, Arena, compiled, fuzzed
from launches import interpreter as interpreter

# isort: split

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.triton_cpu.replay_path.attention import DIMENSIONS, LONGEST, architecture, elsewhere
from fuzz.triton_cpu.replay_path.batch import BLOCK, HEAD, NOPE, ROPE, V4, Batch

BF16, E4M3, FNUZ, BYTE = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.uint8
UNIT, BFLOAT = 2.0**-24, 2.0**-8
SCALE = HEAD**-0.5
seeds, heads = st.integers(0, 1 << 20), st.sampled_from([1, 3, 16, 20])
counts = st.lists(st.integers(0, 70), min_size=1, max_size=3)
slow = settings(fuzzed, max_examples=6)


class Lists:
    """Ragged lists of slots; some entries are -1 or past the end, which no kernel may read."""

    def __init__(self, arena: Arena, counts: list[int], slots: int) -> None:
        self.starts = arena.put(np.concatenate([[0], np.cumsum(counts)]))
        self.indices = arena.ints(0, slots - 1, max(1, sum(counts)))
        odd = arena.random.random(len(self.indices))
        self.indices[torch.from_numpy(odd < 0.1)] = -1
        self.indices[torch.from_numpy(odd > 0.9)] = slots + 1
        self.slots = slots

    def of(self, query: int) -> torch.Tensor:
        chosen = self.indices[int(self.starts[query]) : int(self.starts[query + 1])].long()
        return chosen[(chosen >= 0) & (chosen < self.slots)]


def dense(q: torch.Tensor, rows: torch.Tensor, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """One query's output [heads, HEAD], and how far from it is near enough."""
    q, rows = q.double(), rows.double()
    if not len(rows):
        return torch.zeros_like(q), torch.zeros_like(q)
    scores = q @ rows.T * SCALE
    off = ((HEAD + 3) * UNIT * SCALE * (q.abs() @ rows.abs().T)).amax(-1)
    top = scores.amax(-1) if sink is None else torch.maximum(scores.amax(-1), sink.double())
    weights = (scores - top[:, None]).exp()
    total = weights.sum(-1) + (0 if sink is None else (sink.double() - top).exp())
    out, size = weights @ rows / total[:, None], weights @ rows.abs() / total[:, None]
    span = (top[:, None] - scores).amax(-1)
    relative = 2 * (off + (span + len(rows) + 64) * UNIT) + BFLOAT
    # Weights below the least normal float32 need not be there.
    underflow = 2.0**-125 * len(rows) * rows.abs().max()
    return out, relative[:, None] * size + BFLOAT * out.abs() + underflow


def check(out: torch.Tensor, wanted: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for got, (value, bound) in zip(out.as_subclass(torch.Tensor).double(), wanted, strict=True):
        off = (got - value).abs()
        worst = (off - bound).argmax()
        assert (off <= bound).all(), [tensor.flatten()[worst].item() for tensor in (got, value, off, bound)]


@slow
@given(seeds, counts, heads, st.booleans())
def test_prefill(seed: int, counts: list[int], heads: int, has_sink: bool) -> None:
    from vllm.v1.attention.ops.rocm_aiter_mla_sparse import rocm_sparse_attn_prefill

    arena, rows = Arena(seed, 1 << 20), 40
    lists, q = Lists(arena, counts, rows), arena.put(arena.random.normal(size=(len(counts), heads, HEAD)), BF16)
    kv = arena.put(arena.random.normal(size=(rows, 1, HEAD)), BF16)
    sink = arena.put(arena.random.normal(size=heads), F32) if has_sink else None
    out = torch.full_like(q, 7)
    before = arena.bytes.clone()
    with compiled():
        rocm_sparse_attn_prefill(
            *(elsewhere(q), elsewhere(kv), None, None, SCALE, HEAD, NOPE, ROPE, sink, out),
            ragged_indices=elsewhere(lists.indices),
            ragged_indptr=elsewhere(lists.starts),
        )
    assert torch.equal(arena.bytes, before)
    check(out, [dense(q[row], kv[lists.of(row), 0], sink) for row in range(len(counts))])


@slow
@given(seeds, counts, heads, st.integers(1, 5))
def test_decode_over_bfloat16(seed: int, counts: list[int], heads: int, splits: int) -> None:
    from vllm.v1.attention.ops.rocm_aiter_mla_sparse import rocm_sparse_attn_decode_bf16

    arena, rows = Arena(seed, 1 << 20), 40
    lists, q = Lists(arena, counts, rows), arena.put(arena.random.normal(size=(len(counts), heads, HEAD)), BF16)
    kv, sink = arena.put(arena.random.normal(size=(rows, 1, HEAD)), BF16), None
    out = torch.full_like(q, 7)
    with compiled():
        rocm_sparse_attn_decode_bf16(
            *(elsewhere(q), elsewhere(kv), SCALE, HEAD, NOPE, ROPE, sink, out),
            *(elsewhere(lists.indices), elsewhere(lists.starts), splits),
        )
    check(out, [dense(q[row], kv[lists.of(row), 0], sink) for row in range(len(counts))])


def numbers(cache: torch.Tensor, fnuz: bool) -> torch.Tensor:
    """[slots, HEAD] bfloat16: what the cache [blocks, BLOCK, V4] means to the kernels, which take NaN for 0."""
    blocks = cache.flatten(1)
    data, scales = blocks[:, : BLOCK * 576].reshape(-1, 576), blocks[:, BLOCK * 576 :].reshape(-1, 8)
    values = data[:, :NOPE].contiguous().view(FNUZ if fnuz else E4M3).double()
    nope = values * 2.0 ** (scales[:, :7].double() - 127).repeat_interleave(64, 1)
    return torch.cat([nope.to(BF16), data[:, NOPE:].contiguous().view(BF16)], 1).nan_to_num(nan=0.0)


class Decode:
    """Queries over the window's cache and a compressed one."""

    def __init__(self, seed: int, counts: list[int], heads: int, extra: bool, has_sink: bool) -> None:
        self.arena = arena = Arena(seed, 1 << 20)
        batch = Batch(1 + seed % 3, BLOCK)
        self.caches = [batch.cache(V4)[: 1 + seed % 2] for _ in range(1 + extra)]
        self.lists = [Lists(arena, counts, len(cache) * BLOCK) for cache in self.caches]
        tokens = self.caches[0].flatten(1)[:, : BLOCK * 576].unflatten(1, (BLOCK, 576))
        tokens[..., :NOPE][torch.from_numpy(arena.random.random((*tokens.shape[:2], NOPE)) < 0.01)] = 0xFF
        tokens[0, 0, NOPE:].view(BF16)[5] = torch.nan
        # Elements of the cache are in the hundreds: the weights of a query this short are of one size.
        self.q = arena.put(arena.random.normal(0, 0.02, (len(counts), heads, HEAD)), BF16)
        self.sink = arena.put(arena.random.normal(size=heads), F32) if has_sink else None

    def arguments(self) -> dict[str, object]:
        found: dict[str, object] = {"q": elsewhere(self.q), "scale": SCALE, "attn_sink": self.sink, **DIMENSIONS}
        for name, cache, lists in zip(("main", "extra"), self.caches, self.lists, strict=False):
            found |= {f"{name}_cache": elsewhere(cache), f"{name}_indices": elsewhere(lists.indices)}
            found |= {f"{name}_indptr": elsewhere(lists.starts)}
        return found

    def dense(self, fnuz: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The compressed cache is never e4m3fnuz."""
        read = [numbers(cache, fnuz and not number) for number, cache in enumerate(self.caches)]
        return [
            dense(q, torch.cat([rows[lists.of(row)] for rows, lists in zip(read, self.lists, strict=True)]), self.sink)
            for row, q in enumerate(self.q)
        ]


@pytest.mark.parametrize(("name", "fnuz"), [("", False), ("", True), ("gfx942", True), ("gfx950", False)])
@slow
@given(seeds, counts, heads, st.booleans(), st.booleans())
def test_decode(name: str, fnuz: bool, seed: int, counts: list[int], heads: int, extra: bool, has_sink: bool) -> None:
    from vllm.v1.attention.ops import rocm_aiter_mla_sparse as ops

    decode = Decode(seed, counts, heads, extra, has_sink)
    with architecture(name), compiled(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "current_platform", SimpleNamespace(is_fp8_fnuz=lambda: fnuz))
        out = ops._rocm_sparse_attn_decode_ragged_triton(**decode.arguments())
    check(out, decode.dense(fnuz))


@pytest.mark.parametrize("seed", range(2))
def test_decode_in_adaptive_splits_of_a_cache_without_nan(seed: int) -> None:
    """gfx950, with enough queries that some splits have nothing to do."""
    from vllm.v1.attention.ops import rocm_aiter_mla_sparse as ops

    decode = Decode(seed, [LONGEST, 300, *[40] * 14], 3, True, True)
    with architecture("gfx950"), compiled():
        out = ops._rocm_sparse_attn_decode_ragged_triton(
            **decode.arguments(), extra_cache_nan_free=True, adaptive_splits=True
        )
    check(out, decode.dense(False))


@pytest.mark.parametrize("quantised", [False, True])
def test_decode_turns_back_the_rotation(quantised: bool) -> None:
    """Fused into gfx950's last step, as is the quantisation to MXFP8: the bytes of torch's."""
    from vllm.v1.attention.ops import rocm_aiter_mla_sparse as ops

    count, heads = 2, 3
    decode = Decode(7, [33, 9], heads, True, True)
    positions, angles = torch.tensor([5, 2], dtype=I32), torch.linspace(0, 2, 8 * ROPE // 2).view(8, ROPE // 2)
    rotation = torch.cat([angles.cos(), angles.sin()], 1)
    rotate = {"inv_rope_positions": elsewhere(positions), "inv_rope_cos_sin_cache": elsewhere(rotation)}
    data = torch.zeros(count, heads * HEAD, dtype=E4M3), torch.zeros(count, heads * HEAD // 32, dtype=BYTE)
    with architecture("gfx950"), compiled():
        plain = ops._rocm_sparse_attn_decode_ragged_triton(**decode.arguments(), out=None)
        rotated = ops._rocm_sparse_attn_decode_ragged_triton(**decode.arguments(), **rotate)
        if quantised:
            ops._rocm_sparse_attn_decode_ragged_triton(**decode.arguments(), **rotate, out_mxfp8=data)
    nope, rope = plain[..., :NOPE], plain[..., NOPE:].double().unflatten(-1, (-1, 2))
    cos, sin = rotation[positions.long()].double().chunk(2, -1)
    even, odd = rope[..., 0], rope[..., 1]
    wanted = torch.stack([even * cos[:, None] + odd * sin[:, None], odd * cos[:, None] - even * sin[:, None]], -1)
    assert torch.equal(rotated[..., :NOPE], nope)
    assert ((rotated[..., NOPE:].double() - wanted.flatten(-2)).abs() <= 2.0**-7 * plain.double().abs().max()).all()
    if quantised:
        groups = rotated.double().view(count, heads * HEAD // 32, 32)
        scales = 2.0 ** (data[1].double() - 127)
        back = data[0].double().view(groups.shape) * scales[..., None]
        assert (groups.abs().amax(-1) <= 448 * scales * (1 + 2.0**-8)).all()
        assert (groups.abs().amax(-1) >= 224 * scales * (1 - 2.0**-8)).all()
        assert ((back - groups).abs() <= groups.abs() * (2.0**-4 + 2.0**-8) + scales[..., None] * 2.0**-9).all()
