# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Launches of ROCm's sparse attention: prefill over a workspace, decode over the cache.

vLLM's own functions refuse CPU tensors, so the kernels are launched with the arguments that they give them.
"""

from __future__ import annotations

import torch

from fuzz.triton_cpu.replay_path.batch import BLOCK, HEAD, HEADS, I32, NOPE, ROPE, V4, Batch, Launch

LONGEST = 64
"""Entries of a query's list, at most."""
SPLITS = 2


class Queries:
    """Queries with a ragged list of slots each: [count, HEADS, HEAD] bfloat16."""

    def __init__(self, count: int, slots: int) -> None:
        self.batch = batch = Batch(count, 1)
        lens = batch.ints(1, LONGEST, count)
        self.starts = torch.cat([torch.zeros(1, dtype=I32), lens.cumsum(0).to(I32)])
        self.indices = batch.ints(-1, slots - 1, int(lens.sum()))
        self.q = batch.normal(count, HEADS, HEAD)
        self.sink = batch.normal(HEADS).float()
        self.out = torch.zeros(count, HEADS, HEAD, dtype=torch.bfloat16)
        self.parts = (
            torch.zeros(count, SPLITS, HEADS),
            torch.zeros(count, SPLITS, HEADS),
            torch.zeros(count, SPLITS, HEADS, HEAD),
        )


def prefill(programs: int) -> Launch:
    """A program a query, which reads rows of the workspace that K was gathered into."""
    from vllm.v1.attention.ops.rocm_aiter_mla_sparse import _sparse_attn_prefill_ragged_kernel as kernel

    given = Queries(programs, 4 * LONGEST)
    kv = given.batch.normal(4 * LONGEST, HEAD)
    q, out = given.q, given.out

    def run() -> None:
        kernel[(programs, 1)](
            *(q, kv, given.indices, given.starts, given.sink, out, *q.stride(), *kv.stride(), *out.stride()),
            *(HEADS, HEAD, kv.shape[0], HEAD**-0.5),
            HAS_ATTN_SINK=True,
            OUT_DV=HEAD,
            BLOCK_H=16,
            BLOCK_D=HEAD,
            BLOCK_K=16,
        )

    return Launch(run, [out], rounds=True)


def decode(programs: int) -> Launch:
    """A program a query: where ROCm has no tuned kernel."""
    from vllm.v1.attention.ops.rocm_aiter_mla_sparse import _sparse_attn_decode_ragged_kernel as kernel

    given, cache = _over_cache(programs)
    q, out, slots = given.q, given.out, cache.shape[0] * BLOCK
    extra = given.indices.flip(0).contiguous()

    def run() -> None:
        kernel[(programs, 1)](
            *(q, cache, given.indices, given.starts, cache, extra, given.starts, given.sink, out),
            *(*q.stride()[:2], *out.stride()[:2], cache.stride(0), cache.stride(0), slots, slots, BLOCK, BLOCK),
            *(HEAD**-0.5, HEADS),
            HAS_ATTN_SINK=True,
            HAS_EXTRA=True,
            NOPE_DIM=NOPE,
            NOPE_BLOCK=HEAD,
            ROPE_DIM=ROPE,
            IS_FNUZ_MAIN=False,
            IS_FNUZ_EXTRA=False,
            BLOCK_H=16,
            BLOCK_K=16,
        )

    return Launch(run, [out], rounds=True)


def decode_split(programs: int) -> Launch:
    """gfx942: a program a query and split."""
    from vllm.v1.attention.ops.rocm_aiter_mla_sparse import _sparse_attn_decode_partial_kernel as kernel

    given, cache = _over_cache(programs // SPLITS)
    q, slots, extra = given.q, cache.shape[0] * BLOCK, given.indices.flip(0).contiguous()
    highest, total, sums = given.parts

    def run() -> None:
        kernel[(programs // SPLITS, SPLITS, 1)](
            *(q, cache, given.indices, given.starts, cache, extra, given.starts, highest, total, sums),
            *(*q.stride()[:2], cache.stride(0), cache.stride(0), *highest.stride()[:2], *sums.stride()[:3]),
            *(slots, slots, BLOCK, BLOCK, HEAD**-0.5, HEADS),
            HAS_EXTRA=True,
            NOPE_DIM=NOPE,
            NOPE_BLOCK=HEAD,
            ROPE_DIM=ROPE,
            IS_FNUZ_MAIN=True,
            IS_FNUZ_EXTRA=False,
            BLOCK_H=16,
            BLOCK_K=32,
            NUM_SPLITS=SPLITS,
            NUM_STAGES=1,
        )

    return Launch(run, given.parts, rounds=True)


def decode_gfx950(programs: int) -> Launch:
    """gfx950: a program a query and split."""
    from vllm.v1.attention.ops.rocm_aiter_mla_sparse import _sparse_attn_decode_gfx950_partial_kernel as kernel

    given, cache = _over_cache(programs // SPLITS)
    q, slots, extra = given.q, cache.shape[0] * BLOCK, given.indices.flip(0).contiguous()

    def run() -> None:
        kernel[(programs // SPLITS, SPLITS, 1)](
            *(q, cache, given.indices, given.starts, cache, extra, given.starts, *given.parts),
            *(*q.stride()[:2], cache.stride(0), cache.stride(0), slots, slots, BLOCK, BLOCK, HEAD**-0.5, HEADS),
            HAS_EXTRA=True,
            NOPE_DIM=NOPE,
            ROPE_DIM=ROPE,
            IS_FNUZ_MAIN=False,
            IS_FNUZ_EXTRA=False,
            TRUST_EXTRA_CACHE_NAN_FREE=False,
            ADAPTIVE_SPLITS=False,
            ONE_WAVE_SPLITS=SPLITS,
            BLOCK_H=16,
            BLOCK_K=32,
            NUM_SPLITS=SPLITS,
            NUM_STAGES=1,
        )

    return Launch(run, given.parts, rounds=True)


def decode_bf16(programs: int) -> Launch:
    """A program a query and split, over a cache that is not quantised."""
    from vllm.v1.attention.ops.rocm_aiter_mla_sparse import _sparse_attn_decode_ragged_bf16_partial_kernel as kernel

    given = Queries(programs // SPLITS, 4 * LONGEST)
    q, kv = given.q, given.batch.normal(4 * LONGEST, HEAD)
    highest, _, sums = given.parts

    def run() -> None:
        kernel[(programs // SPLITS, SPLITS, 1)](
            *(q, kv, given.indices, given.starts, *given.parts, *q.stride(), *kv.stride()),
            *(*highest.stride()[:2], *sums.stride()[:3], HEADS, HEAD, kv.shape[0], HEAD**-0.5),
            BLOCK_H=16,
            BLOCK_D=HEAD,
            BLOCK_K=32,
            NUM_SPLITS=SPLITS,
        )

    return Launch(run, given.parts, rounds=True)


def decode_reduce(programs: int) -> Launch:
    """A program a query and head, which puts the splits together."""
    from vllm.v1.attention.ops.rocm_aiter_mla_sparse import _sparse_attn_decode_reduce_kernel as kernel

    given = Queries(programs // HEADS, LONGEST)
    highest, total, sums = given.parts
    for part in given.parts:
        part.copy_(given.batch.normal(*part.shape))
    total.abs_()
    out = given.out

    def run() -> None:
        kernel[(programs // HEADS, HEADS)](
            *(highest, total, sums, given.sink, out, None, None, None, *out.stride()[:2], 0, HEAD // 32),
            *(*highest.stride()[:2], *sums.stride()[:3], 0, HEADS),
            HAS_ATTN_SINK=True,
            ADAPTIVE_SPLITS=False,
            COMB_DIM=HEAD,
            BLOCK_H=1,
            NUM_SPLITS=SPLITS,
            SPLITS_PAD=SPLITS,
            FUSE_INV_ROPE=False,
            NOPE=NOPE,
            HALF=ROPE // 2,
            QUANT_OUT=False,
        )

    return Launch(run, [out], rounds=True)


def _over_cache(queries: int) -> tuple[Queries, torch.Tensor]:
    cache = Batch(2, 4 * LONGEST).cache(V4)
    return Queries(queries, cache.shape[0] * BLOCK), cache
