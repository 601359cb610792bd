# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Launches of the kernels that write KV into the cache and read it back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fuzz.triton_cpu.replay_path.batch import BLOCK, HEAD, I64, MXFP8, NOPE, ROPE, V4, WINDOW, Batch, Launch, tensor


def insert(width: int) -> Callable[[int], Launch]:
    """A program a token."""

    def build(programs: int) -> Launch:
        from vllm.models.deepseek_v41.common.ops.cache_utils import quantize_and_insert_k_cache

        batch = Batch(max(1, programs // 64), 64)
        cache, k = torch.zeros(batch.blocks, BLOCK * width, dtype=torch.uint8), batch.normal(batch.tokens, HEAD)
        slots = tensor(batch.random.permutation(batch.blocks * BLOCK)[: batch.tokens], I64)
        return Launch(
            lambda: quantize_and_insert_k_cache(k, cache, slots, block_size=BLOCK, bytes_per_token=width), [cache]
        )

    return build


def gather(name: str, width: int) -> Callable[[int], Launch]:
    """The kernel of this name (which one vLLM takes, it asks the platform): 128 programs a request."""

    def build(programs: int) -> Launch:
        from vllm.models.deepseek_v41.common.ops import cache_utils

        batch = Batch(max(1, programs // 128), WINDOW)
        cache = batch.cache(width)
        gather = tensor(np.minimum(batch.query + batch.context, batch.query + WINDOW - 1))
        out = torch.zeros(batch.rows, 3 * WINDOW, HEAD, dtype=torch.bfloat16)
        sizes: dict[str, Any] = {"max_blocks_per_seq": batch.width, "cache_block_size": BLOCK}
        sizes |= {"block_stride": cache.stride(0)}
        if width == V4:
            sizes |= {"fp8_dim": NOPE, "bf16_dim": ROPE, "scale_dim": 8, "quant_block": 64, "token_data_size": 576}
            sizes |= {"output_dim": HEAD, "fp8_max": 448.0, "n_quant_blocks": 7}
        else:
            scales = 16 if width == MXFP8 else 32
            sizes |= {"head_dim": HEAD, "scale_dim": scales, "quant_block": HEAD // scales}
        kernel = getattr(cache_utils, name)

        def run() -> None:
            kernel[(batch.rows, 128)](
                *(out, out.stride(0), out.stride(1), cache, batch.lens, batch.table, 0, gather), **sizes
            )

        return Launch(run, [out])

    return build
