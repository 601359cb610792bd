# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Launches of what touches the keys: into the paged cache, out of it, and attention, through vLLM's own functions.

Each raises ``Absent`` where vLLM has no such function.
"""

from __future__ import annotations

import types
from importlib import import_module
from typing import Any

from fuzz.amdgcn.model import (
    BLOCK,
    CHUNK,
    HEAD,
    HEADS,
    LONGEST,
    NOPE,
    ROPE,
    SWA_BLOCK,
    TOPK,
    WINDOW,
    Batch,
    cache,
    ints,
)
from fuzz.amdgcn.names import CACHE, ROCM, ROCM_V41, find


def _fnuz() -> bool:
    return bool(find("vllm.platforms", "current_platform").is_fp8_fnuz())


def insert(record: str) -> None:
    """Keys of a step into the window cache, in a record that vLLM names ``record``."""
    size = find(CACHE, record)
    find(CACHE, "quantize_and_insert_k_cache")(
        *(ints(CHUNK, HEAD, dtype="bfloat16"), cache(size, SWA_BLOCK)),
        ints(CHUNK, dtype="int64"),
        block_size=SWA_BLOCK,
        use_fnuz=_fnuz(),
        bytes_per_token=size,
    )


def gather(record: str, ratio: int | None = None, decodes: int = 0) -> None:
    """The window rows of four prefills, or, at a compress ratio, all their compressed rows."""
    block, offset = (SWA_BLOCK, LONGEST) if ratio is None else (BLOCK // ratio, 0)
    batch, columns = Batch(decodes), LONGEST // (SWA_BLOCK if ratio is None else BLOCK)
    find(CACHE, "dequantize_and_gather_k_cache_triton")(
        *(ints(4, LONGEST + WINDOW + CHUNK, HEAD, dtype="bfloat16"), cache(find(CACHE, record), block)),
        *(batch.lens[decodes:], ints(4) if ratio is None else None, ints(batch.rows, columns)[decodes:]),
        *(block, offset),
        use_fnuz=ratio is None and _fnuz(),
        max_gather_len=None if ratio is None else LONGEST // ratio,
    )


def gather_plainly() -> None:
    """The form of the window's gather that vLLM takes elsewhere than on ROCm."""
    platform = find(CACHE, "current_platform")
    module: Any = import_module(CACHE)
    module.current_platform = types.SimpleNamespace(is_rocm=lambda: False, is_fp8_fnuz=platform.is_fp8_fnuz)
    try:
        gather("V4_BYTES_PER_TOKEN")
    finally:
        module.current_platform = platform


def prefill(ratio: int) -> None:
    """Attention over the gathered workspace."""
    topk, rows = TOPK if ratio else 0, (LONGEST // ratio if ratio else 0) + WINDOW + CHUNK
    find(ROCM, "rocm_sparse_attn_prefill")(
        q=ints(CHUNK, HEADS, HEAD, dtype="bfloat16"),
        kv=ints(4 * rows, 1, HEAD, dtype="bfloat16"),
        indices=ints(CHUNK, topk + WINDOW),
        topk_length=ints(CHUNK),
        **_attention(),
        output=ints(CHUNK, HEADS, HEAD, dtype="bfloat16"),
    )


def _attention() -> dict[str, Any]:
    return {
        "scale": HEAD**-0.5,
        "head_dim": HEAD,
        "nope_head_dim": NOPE,
        "rope_head_dim": ROPE,
        "attn_sink": ints(HEADS, dtype="float32"),
    }


def decode(rows: int, ratio: int) -> None:
    """As ``DeepseekV41ROCMAiterMLAAttention`` calls it: gfx950 writes MXFP8 rows, others bf16 ones."""
    trusted = find(ROCM_V41, "_trust_dsv4_extra_cache_nan_free")("fp8_ds_mla", False, ratio > 0)
    mxfp8 = find(ROCM, "_ON_GFX950")
    wide = ints(rows, HEADS * HEAD, dtype="float8_e4m3fn"), ints(rows, HEADS * HEAD // 32, dtype="uint8")
    find(ROCM, "rocm_sparse_attn_decode")(
        q=ints(rows, HEADS, HEAD, dtype="bfloat16"),
        kv_cache=cache(584, BLOCK // ratio) if ratio else None,
        swa_k_cache=cache(584, SWA_BLOCK),
        swa_only=not ratio,
        topk_indices=None,
        topk_lens=ints(rows) if ratio else None,
        swa_indices=ints(CHUNK, 1, WINDOW)[:rows],
        swa_lens=ints(CHUNK),
        swa_ragged_indices=ints(CHUNK * WINDOW)[: rows * WINDOW],
        swa_ragged_indptr=ints(CHUNK + 1)[: rows + 1],
        topk_ragged_indices=ints(rows * TOPK) if ratio else None,
        topk_ragged_indptr=ints(rows + 1) if ratio else None,
        **_attention(),
        output=None if mxfp8 else ints(rows, HEADS, HEAD, dtype="bfloat16"),
        output_mxfp8=wide if mxfp8 else None,
        inv_rope_positions=ints(CHUNK, dtype="int64")[:rows],
        inv_rope_cos_sin_cache=ints(LONGEST, ROPE, dtype="float32"),
        extra_cache_nan_free=trusted,
    )
