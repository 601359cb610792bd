# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Launches of ROCm's sparse attention, by vLLM's own functions: prefill over a workspace, decode over the cache.

Relied upon: those functions ask tensors whether they are on the CPU only to refuse them, and take the architecture from
flags of their module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fuzz.triton_cpu.replay_path.batch import BLOCK, HEAD, HEADS, I32, NOPE, ROPE, V4, Batch, Launch

LONGEST = 64
"""Entries of a query's list, at most."""
DIMENSIONS = {"nope_head_dim": NOPE, "rope_head_dim": ROPE}


class Elsewhere(torch.Tensor):  # type: ignore[misc]  # torch's types are not followed
    """A tensor on the CPU that says it is not."""

    is_cpu = property(lambda _self: False)


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, for a function that refuses CPU tensors."""
    return tensor.as_subclass(Elsewhere)


@contextmanager
def architecture(name: str) -> Iterator[None]:
    """vLLM's attention takes this for a "gfx942" or "gfx950", or for neither."""
    from vllm.v1.attention.ops import rocm_aiter_mla_sparse as ops

    before = ops._ON_GFX942, ops._ON_GFX950
    ops._ON_GFX942, ops._ON_GFX950 = name == "gfx942", name == "gfx950"
    try:
        yield
    finally:
        ops._ON_GFX942, ops._ON_GFX950 = before


class Queries:
    """``q`` [count, HEADS, HEAD] bfloat16, each query with a ragged list of slots below ``slots``, some of them -1."""

    def __init__(self, count: int, slots: int) -> None:
        self.batch = batch = Batch(count, 1)
        lens = batch.ints(1, LONGEST, count)
        self.starts = elsewhere(torch.cat([torch.zeros(1, dtype=I32), lens.cumsum(0).to(I32)]))
        self.indices = elsewhere(batch.ints(-1, slots - 1, int(lens.sum())))
        self.q = elsewhere(batch.normal(count, HEADS, HEAD))
        self.sink = batch.normal(HEADS).float()
        self.out = torch.zeros(count, HEADS, HEAD, dtype=torch.bfloat16)

    def common(self) -> dict[str, Any]:
        """Arguments of every function."""
        return {"q": self.q, "scale": HEAD**-0.5, "attn_sink": self.sink, "out": self.out, **DIMENSIONS}


def prefill(programs: int) -> Launch:
    """A program a query, which reads rows of the workspace that K was gathered into."""
    from vllm.v1.attention.ops.rocm_aiter_mla_sparse import _rocm_sparse_attn_prefill_ragged_triton

    given = Queries(programs, 4 * LONGEST)
    kv = elsewhere(given.batch.normal(4 * LONGEST, HEAD))

    def run() -> None:
        _rocm_sparse_attn_prefill_ragged_triton(kv=kv, indices=given.indices, indptr=given.starts, **given.common())

    return Launch(run, [given.out], rounds=True)


def decode(programs: int) -> Launch:
    """Where there is no tuned kernel: a program a query."""
    return _decode(programs, "")


def decode_gfx942(programs: int) -> Launch:
    """A sixteenth as many queries, in splits, which a program a head puts together."""
    return _decode(programs // HEADS, "gfx942")


def decode_gfx950(programs: int) -> Launch:
    """As on gfx942."""
    return _decode(programs // HEADS, "gfx950")


def _decode(queries: int, name: str) -> Launch:
    from vllm.v1.attention.ops.rocm_aiter_mla_sparse import _rocm_sparse_attn_decode_ragged_triton

    cache = elsewhere(Batch(2, 4 * LONGEST).cache(V4))
    given = Queries(queries, cache.shape[0] * BLOCK)
    main = {"main_cache": cache, "main_indices": given.indices, "main_indptr": given.starts}
    extra = {"extra_cache": cache, "extra_indices": given.indices.flip(0), "extra_indptr": given.starts}

    def run() -> None:
        with architecture(name):
            _rocm_sparse_attn_decode_ragged_triton(**main, **extra, **given.common())

    return Launch(run, [given.out], rounds=True)


def decode_bf16(programs: int) -> Launch:
    """Over a cache that is not quantised: a sixteenth as many queries, in splits, as on gfx942."""
    from vllm.v1.attention.ops.rocm_aiter_mla_sparse import _rocm_sparse_attn_decode_ragged_bf16_triton

    given = Queries(programs // HEADS, 4 * LONGEST)
    kv = elsewhere(given.batch.normal(4 * LONGEST, HEAD))

    def run() -> None:
        _rocm_sparse_attn_decode_ragged_bf16_triton(
            kv=kv, indices=given.indices, indptr=given.starts, num_splits=4, **given.common()
        )

    return Launch(run, [given.out], rounds=True)
