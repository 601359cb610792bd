# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""What vLLM launches on the bounded-replay path of DeepSeek-V4.1-Flash, through vLLM's own functions.

Tensors are torch's meta tensors: they have the shape, the alignment and the storage size of the real thing, all that a
specialisation depends on, and no memory. Names of vLLM are looked up by ``find``, so that one which a vLLM does not have
is a reason and not an error. A launch that only other GPUs get is in here as well: its kernels are then not launched.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

WINDOW: Final = 128
HEADS: Final = 64
HEAD: Final = 512
NOPE: Final = 448
ROPE: Final = 64
TOPK: Final = 512
RATIOS: Final = (0, 1, 2)
"""Compress ratios of the layers; 0: window only."""
SWA_BLOCK: Final = 32
BLOCK: Final = 128
"""Tokens of a block: window groups, and the scheduler's."""
GROUPS: Final = 6
"""KV-cache groups: four of windows, one cacheable, one of compressor states."""
DRAFT: Final = 5
"""Tokens that DSpark drafts at once."""
LOOKBACK: Final = 3
CHUNK: Final = 2048
SEQS: Final = 256
LONGEST: Final = 131072
"""Tokens of a step, requests of a batch, tokens of a request."""
POOL: Final = 200_000
"""Blocks of a cache, so that it is larger than 2 GB: the backend treats smaller ones differently."""

SWA: Final = "vllm.v1.attention.backends.mla.sparse_swa"
CACHE: Final = "vllm.models.deepseek_v41.common.ops.cache_utils"
STATE: Final = "vllm.models.deepseek_v41.nvidia.model_state"
TABLE: Final = "vllm.v1.worker.gpu.block_table"
ROCM: Final = "vllm.v1.attention.ops.rocm_aiter_mla_sparse"
ROCM_V41: Final = "vllm.models.deepseek_v41.amd.rocm"


class Absent(Exception):
    """This vLLM does not have it; the message says what."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place in vLLM that launches kernels."""

    title: str
    kernels: tuple[str, ...]
    """Those it is there for. Others that it launches are compiled as well."""
    launch: Callable[[], None]


def find(module: str, name: str) -> Any:
    """Something of vLLM, by its dotted name in a module. Raises ``Absent``."""
    try:
        found = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise Absent(f"vLLM has no {module}.{name}: {error}") from error
    return found


def ints(*shape: int, dtype: str = "int32") -> Any:
    """A device tensor."""
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def cache(record_bytes: int, block: int) -> Any:
    """A paged KV cache, bytes of [blocks, block, record_bytes], pages padded as the model's spec pads them."""
    import torch

    align = 576 if record_bytes == 584 else 512
    page = -(-block * record_bytes // align) * align
    return torch.empty_strided((POOL, block, record_bytes), (page, record_bytes, 1), dtype=torch.uint8, device="meta")


class Batch:
    """What the worker has of a batch: three decode rows first, or none, so that slices of it are aligned or not."""

    def __init__(self, decodes: int = 0, prefills: int = 4) -> None:
        self.decodes, self.prefills, self.rows = decodes, prefills, decodes + prefills
        self.starts = ints(SEQS + 1)[: self.rows + 1]
        self.lens = ints(SEQS)[: self.rows]
        self.replay_start = ints(SEQS)[: self.rows]
        self.requests = ints(CHUNK)
        self.valid = ints(CHUNK, dtype="bool")
        self.table = ints(SEQS, LONGEST // SWA_BLOCK)[: self.rows]


MIXED: Final = 3
"""Decode rows before the prefills of a mixed batch: what starts after them is not aligned to 16 bytes."""


def _paged(decode: bool, noncausal: bool = False) -> None:
    name = "_COMPUTE_DSPARK_NONCAUSAL_SWA_INDICES_KERNEL" if noncausal else "_COMPUTE_SWA_INDICES_AND_LENS_KERNEL"
    launch, batch = find(SWA, name), Batch(MIXED)
    rows, offset = (MIXED, 0) if decode else (CHUNK - MIXED, MIXED)
    lens = ints(CHUNK)
    common = batch.starts, batch.lens, batch.requests, batch.valid, batch.table, SWA_BLOCK
    if noncausal:
        width = find(SWA, "get_dspark_swa_index_width")(WINDOW, DRAFT)
        launch(ints(CHUNK, 1, width), lens, WINDOW, width, *common, num_tokens=rows, token_offset=offset)
        return
    launch(
        *(ints(CHUNK, 1, WINDOW), lens, WINDOW, WINDOW, lens, lens, *common, batch.replay_start),
        num_tokens=rows,
        token_offset=offset,
    )


def _gather_lens(prefills: int) -> None:
    launch, batch = find(SWA, "_COMPUTE_PREFILL_METADATA_KERNEL"), Batch(0, prefills)
    launch(ints(prefills), batch.lens, batch.starts, batch.replay_start, prefills, 0, WINDOW)


def _requests() -> None:
    batch = Batch()
    find("vllm.v1.attention.ops.metadata", "compute_token_to_req_indices")(batch.starts, ints(CHUNK), CHUNK, CHUNK)


def _combine(ratio: int, decodes: int) -> None:
    batch = Batch(decodes)
    compressed = LONGEST // ratio if ratio else 0
    find(CACHE, "combine_topk_swa_indices")(
        *(ints(CHUNK, TOPK)[decodes:], batch.starts[decodes:], batch.lens[decodes:], ints(batch.prefills)),
        *(WINDOW, ratio, TOPK if ratio else 0, compressed + WINDOW + CHUNK, compressed),
    )


def _mixed_list(ratio: int) -> None:
    batch = Batch(MIXED)
    block = BLOCK // ratio if ratio else 0
    find(CACHE, "build_flashinfer_mixed_sparse_indices")(
        *(ints(CHUNK, 1, WINDOW)[:MIXED].view(-1, WINDOW), ints(MIXED, TOPK) if ratio else None),
        *(ints(MIXED) if ratio else None, ints(CHUNK, TOPK)[MIXED:], batch.starts, batch.lens, batch.requests),
        *(batch.table, SWA_BLOCK, ints(batch.rows, LONGEST // BLOCK) if ratio else None, block),
        *(WINDOW, ratio, TOPK if ratio else 0),
        replay_start=batch.replay_start,
    )


def _fused_decode(rows: int, noncausal: bool) -> None:
    launch, batch = find("vllm.models.deepseek_v41.amd.ops.swa_decode_meta", "launch"), Batch(rows, 0)
    if not find("vllm.platforms.rocm", "on_gfx942")():
        return  # vLLM takes its other path there
    width = find(SWA, "get_dspark_swa_index_width")(WINDOW, DRAFT) if noncausal else WINDOW
    launch(
        *(ints(CHUNK, dtype="int64"), batch.valid, ints(CHUNK, 1, width), ints(CHUNK), ints(CHUNK * width)),
        *(ints(CHUNK + 1), batch.starts, batch.lens, batch.requests, batch.table, batch.replay_start),
        *(rows, WINDOW, SWA_BLOCK),
        noncausal=noncausal,
    )


def _topk_slots(prefill: bool) -> None:
    """Top-k positions to slots: of decode rows, and, for AITER's kernel, of prefill rows."""
    batch, table = Batch(MIXED), ints(SEQS, LONGEST // BLOCK)
    if not prefill:
        find(ROCM_V41, "compute_global_topk_ragged_indices_and_indptr")(
            ints(CHUNK, TOPK)[:MIXED], batch.requests, table[:MIXED], BLOCK // 2, batch.valid[:MIXED]
        )
        return
    find(ROCM, "build_prefill_topk_ragged_indices")(
        *(ints(CHUNK, TOPK)[MIXED:], batch.requests, batch.starts, batch.lens, batch.valid, table),
        block_size=BLOCK // 2,
        compress_ratio=2,
        num_compressed=LONGEST // 2,
        token_offset=MIXED,
        num_rows=POOL * BLOCK // 2,
    )


def _ragged(width: int, limit: int = -1) -> None:
    find(ROCM, "build_ragged_indices_from_dense")(ints(CHUNK, width), ints(CHUNK), num_rows=limit)


class _Buffer:
    """vLLM's ``UvaBuffer``, without the pinned memory that only a driver gives."""

    def __init__(self, size: Any, dtype: Any) -> None:
        import torch

        self.cpu = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()
        self._device = torch.empty_like(self.cpu, device="meta")

    def uva(self, n: int | None = None) -> Any:
        return self._device if n is None else self._device[:n]


def _tables() -> Any:
    import torch

    find(TABLE, "BlockTables")
    import_module("vllm.v1.worker.gpu.buffer_utils").__dict__["UvaBuffer"] = _Buffer
    return find(TABLE, "BlockTables")(
        [SWA_BLOCK] * 4 + [BLOCK] * 2,
        SEQS,
        CHUNK,
        [LONGEST // SWA_BLOCK] * 4 + [LONGEST // BLOCK] * 2,
        torch.device("meta"),
        sliding_window_reach=[WINDOW] * 4 + [0, 0],
    )


def _gather_tables() -> None:
    _tables().gather_block_tables(ints(SEQS)[:4], 4, num_computed_tokens=ints(SEQS))


def _slots() -> None:
    batch = Batch()
    _tables().compute_slot_mappings(ints(SEQS)[:4], batch.starts, ints(CHUNK, dtype="int64"), CHUNK)


def _state() -> Any:
    state = find(STATE, "DeepseekV41ModelState")
    return object.__new__(state)


def _replay() -> None:
    """Its warm-up launches the replay kernels on the buffers that they run on."""
    state, batch = _state(), Batch()
    state._replay = WINDOW, ints(1)
    state._replay_start = ints(SEQS)
    state.decoder_replay_layers = types.SimpleNamespace(window=WINDOW)
    state._dropped_before = types.SimpleNamespace(copy_to_uva=lambda _: ints(SEQS + 1))
    state._kept_slot_mappings = ints(GROUPS, CHUNK, dtype="int64")
    state._kept_rows = state._kept_positions = ints(CHUNK, dtype="int64")
    state._kept_query_start_loc, state._kept_kv_start = ints(SEQS + 1), ints(SEQS)
    inputs = types.SimpleNamespace(
        query_start_loc=batch.starts, positions=ints(CHUNK, dtype="int64"), seq_lens=batch.lens
    )
    state._warm_up_replay_kernels(inputs, ints(GROUPS, CHUNK, dtype="int64"))


def _lookback() -> None:
    state, batch = _state(), Batch()
    state.lookback_token_ids, state.rope_state = ints(SEQS, LOOKBACK), None
    inputs = types.SimpleNamespace(
        idx_mapping=ints(SEQS)[:4], query_start_loc=batch.starts, positions=ints(CHUNK, dtype="int64")
    )
    tokens = types.SimpleNamespace(gpu=ints(SEQS, LONGEST))
    state.prepare_inputs(inputs, types.SimpleNamespace(all_token_ids=tokens))


def _fnuz() -> bool:
    return bool(find("vllm.platforms", "current_platform").is_fp8_fnuz())


def _insert(record: str) -> None:
    size = find(CACHE, record)
    find(CACHE, "quantize_and_insert_k_cache")(
        *(ints(CHUNK, HEAD, dtype="bfloat16"), cache(size, SWA_BLOCK)),
        ints(CHUNK, dtype="int64"),
        block_size=SWA_BLOCK,
        use_fnuz=_fnuz(),
        bytes_per_token=size,
    )


def _gather(record: str, ratio: int | None = None, decodes: int = 0) -> None:
    """The window rows of four prefills, or, at a compress ratio, all their compressed rows."""
    block, offset = (SWA_BLOCK, LONGEST) if ratio is None else (BLOCK // ratio, 0)
    batch = Batch(decodes)
    find(CACHE, "dequantize_and_gather_k_cache_triton")(
        *(ints(4, LONGEST + WINDOW + CHUNK, HEAD, dtype="bfloat16"), cache(find(CACHE, record), block)),
        *(batch.lens[decodes:], ints(4) if ratio is None else None, ints(batch.rows, LONGEST // block)[decodes:]),
        *(block, offset),
        use_fnuz=ratio is None and _fnuz(),
        max_gather_len=None if ratio is None else LONGEST // ratio,
    )


def _gather_plainly() -> None:
    """The form that other platforms take."""
    find(CACHE, "_dequantize_and_gather_k_one_pass_kernel")
    module = import_module(CACHE)
    platform = module.__dict__["current_platform"]
    module.__dict__["current_platform"] = types.SimpleNamespace(is_rocm=lambda: False, is_fp8_fnuz=platform.is_fp8_fnuz)
    try:
        _gather("V4_BYTES_PER_TOKEN")
    finally:
        module.__dict__["current_platform"] = platform


def _prefill(ratio: int) -> None:
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


def _decode(rows: int, ratio: int) -> None:
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

    yield Place("block tables", ("_gather_block_tables_kernel",), _gather_tables)
    yield Place("slot mappings", ("_compute_slot_mappings_kernel",), _slots)
    yield Place("lookback", ("_gather_lookback_kernel",), _lookback)
    yield Place("replay", replay, _replay)
    yield Place("token to request", ("_token_request_mapping_kernel",), _requests)
    yield Place("decode rows", ("_compute_swa_indices_and_lens_kernel",), lambda: _paged(True))
    yield Place("prefill rows", ("_compute_swa_indices_and_lens_kernel",), lambda: _paged(False))
    yield Place("draft block", ("ComputeDSparkNoncausalSWAIndicesKernel",), lambda: _paged(True, noncausal=True))
    yield Place("4 prefills", ("ComputePrefillMetadataKernel",), lambda: _gather_lens(4))
    yield Place("256 prefills", ("ComputePrefillMetadataKernel",), lambda: _gather_lens(256))
    yield Place("8 rows", ("_decode_swa_meta_kernel",), lambda: _fused_decode(8, False))
    yield Place("draft block", ("_decode_swa_meta_kernel",), lambda: _fused_decode(DRAFT, True))
    yield Place("window rows", ragged, lambda: _ragged(WINDOW))
    yield Place("combined rows", ragged, lambda: _ragged(TOPK + WINDOW, 4 * (LONGEST // 2 + WINDOW + CHUNK)))
    yield Place(
        "decode top-k", ("_compute_topk_lens_kernel", "_pack_global_topk_ragged_kernel"), lambda: _topk_slots(False)
    )
    yield Place("prefill top-k", ("_prefill_topk_global_slots_kernel",), lambda: _topk_slots(True))
    for ratio in RATIOS:
        for rows in (0, MIXED):
            title = f"ratio {ratio}" + (", mixed batch" if rows else "")
            yield Place(title, combine, lambda ratio=ratio, rows=rows: _combine(ratio, rows))
    for ratio in RATIOS:
        kernels = ("_build_flashinfer_mixed_sparse_indices_kernel",)
        yield Place(f"ratio {ratio}", kernels, lambda ratio=ratio: _mixed_list(ratio))
    yield Place("V4 record", ("quantize_and_insert_k_kernel",), lambda: _insert(v4))
    yield Place("MXFP8 record", ("_quantize_and_insert_k_mxfp8_kernel",), lambda: _insert(v41))
    yield Place("window", one_pass, lambda: _gather(v4))
    yield Place("window, mixed batch", one_pass, lambda: _gather(v4, decodes=MIXED))
    yield Place("compressed, ratio 2", one_pass, lambda: _gather(v4, 2))
    yield Place("window", ("_dequantize_and_gather_k_kernel",), _gather_plainly)
    yield Place("window", mxfp8, lambda: _gather(v41))
    yield Place("compressed, ratio 2", mxfp8, lambda: _gather(v41, 2))
    yield Place("compressed, ratio 2", nvfp4, lambda: _gather("V41_NVFP4_BYTES_PER_TOKEN", 2))
    yield Place("prefill", ("_sparse_attn_prefill_ragged_kernel",), lambda: _prefill(2))
    for rows in (8, 256):
        for ratio in (0, 2):
            title = f"{rows} rows, " + ("top-k" if ratio else "window only")
            yield Place(title, decode, lambda rows=rows, ratio=ratio: _decode(rows, ratio))
