# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The places of the bounded-replay path of DeepSeek-V4.1-Flash that launch kernels.

One that only other GPUs reach is in here as well: its kernels are then not launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from fuzz.amdgcn import kv, launches
from fuzz.amdgcn.model import CHUNK, DRAFT, LONGEST, MIXED, RATIOS, TOPK, WINDOW


@dataclass(frozen=True, slots=True)
class Place:
    """A place in vLLM that launches kernels."""

    title: str
    kernels: tuple[str, ...]
    """Those it is there for. Others that it launches are compiled as well."""
    launch: Callable[[], None]


def places() -> Iterator[Place]:
    """Every place, in the order of a step."""
    decode = (
        "_sparse_attn_decode_gfx950_partial_kernel",
        "_sparse_attn_decode_partial_kernel",
        "_sparse_attn_decode_reduce_kernel",
        "_sparse_attn_decode_ragged_kernel",
    )
    ragged = "_count_valid_row_entries_kernel", "_compact_dense_row_to_ragged_kernel"
    replay = "_pad_replayed_slots_kernel", "_gather_replay_batch_kernel"
    one_pass = ("_dequantize_and_gather_k_one_pass_kernel",)
    mxfp8, nvfp4 = ("_dequantize_and_gather_k_mxfp8_kernel",), ("_dequantize_and_gather_k_nvfp4_kernel",)
    combine = ("CombineTopkSwaIndicesKernel",)
    v4, v41 = "V4_BYTES_PER_TOKEN", "V41_BYTES_PER_TOKEN"

    yield Place("block tables", ("_gather_block_tables_kernel",), launches.gather_tables)
    yield Place("slot mappings", ("_compute_slot_mappings_kernel",), launches.slots)
    yield Place("lookback", ("_gather_lookback_kernel",), launches.lookback)
    yield Place("replay", replay, launches.replay)
    yield Place("token to request", ("_token_request_mapping_kernel",), launches.requests)
    yield Place("decode rows", ("_compute_swa_indices_and_lens_kernel",), partial(launches.paged, True))
    yield Place("prefill rows", ("_compute_swa_indices_and_lens_kernel",), partial(launches.paged, False))
    yield Place(
        "draft block", ("ComputeDSparkNoncausalSWAIndicesKernel",), partial(launches.paged, True, noncausal=True)
    )
    yield Place("4 prefills", ("ComputePrefillMetadataKernel",), partial(launches.gather_lens, 4))
    yield Place("256 prefills", ("ComputePrefillMetadataKernel",), partial(launches.gather_lens, 256))
    yield Place("8 rows", ("_decode_swa_meta_kernel",), partial(launches.fused_decode, 8, False))
    yield Place("draft block", ("_decode_swa_meta_kernel",), partial(launches.fused_decode, DRAFT, True))
    yield Place("window rows", ragged, partial(launches.ragged, WINDOW))
    yield Place("combined rows", ragged, partial(launches.ragged, TOPK + WINDOW, 4 * (LONGEST // 2 + WINDOW + CHUNK)))
    yield Place(
        "decode top-k",
        ("_compute_topk_lens_kernel", "_pack_global_topk_ragged_kernel"),
        partial(launches.topk_slots, False),
    )
    yield Place("prefill top-k", ("_prefill_topk_global_slots_kernel",), partial(launches.topk_slots, True))
    for ratio in RATIOS:
        for rows in (0, MIXED):
            title = f"ratio {ratio}" + (", mixed batch" if rows else "")
            yield Place(title, combine, partial(launches.combine, ratio, rows))
    for ratio in RATIOS:
        kernels = ("_build_flashinfer_mixed_sparse_indices_kernel",)
        yield Place(f"ratio {ratio}", kernels, partial(launches.mixed_list, ratio))
    yield Place("V4 record", ("quantize_and_insert_k_kernel",), partial(kv.insert, v4))
    yield Place("MXFP8 record", ("_quantize_and_insert_k_mxfp8_kernel",), partial(kv.insert, v41))
    yield Place("window", one_pass, partial(kv.gather, v4))
    yield Place("window, mixed batch", one_pass, partial(kv.gather, v4, decodes=MIXED))
    yield Place("compressed, ratio 2", one_pass, partial(kv.gather, v4, 2))
    yield Place("window", ("_dequantize_and_gather_k_kernel",), kv.gather_plainly)
    yield Place("window", mxfp8, partial(kv.gather, v41))
    yield Place("compressed, ratio 2", mxfp8, partial(kv.gather, v41, 2))
    yield Place("compressed, ratio 2", nvfp4, partial(kv.gather, "V41_NVFP4_BYTES_PER_TOKEN", 2))
    yield Place("prefill", ("_sparse_attn_prefill_ragged_kernel",), partial(kv.prefill, 2))
    for rows in (8, 256):
        for ratio in (0, 2):
            title = f"{rows} rows, " + ("top-k" if ratio else "window only")
            yield Place(title, decode, partial(kv.decode, rows, ratio))
