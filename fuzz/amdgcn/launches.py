# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Launches of what a step does before attention: block tables, slots, replay, and the lists of what is read.

All of them through vLLM's own functions. Each raises ``Absent`` where vLLM has no such function.
"""

from __future__ import annotations

import types
from importlib import import_module
from typing import Any

from fuzz.amdgcn.model import (
    BLOCK,
    CHUNK,
    DRAFT,
    GROUPS,
    LONGEST,
    LOOKBACK,
    MIXED,
    POOL,
    SEQS,
    SWA_BLOCK,
    TOPK,
    WINDOW,
    Batch,
    ints,
)
from fuzz.amdgcn.names import CACHE, ROCM, ROCM_V41, STATE, SWA, TABLE, find


def paged(decode: bool, noncausal: bool = False) -> None:
    """Window slots of the decode or the prefill rows of a mixed batch; of DSpark's draft block, if not causal."""
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


def gather_lens(prefills: int) -> None:
    """How many window rows each prefill gathers."""
    launch, batch = find(SWA, "_COMPUTE_PREFILL_METADATA_KERNEL"), Batch(0, prefills)
    launch(ints(prefills), batch.lens, batch.starts, batch.replay_start, prefills, 0, WINDOW)


def requests() -> None:
    """The request of each token."""
    batch = Batch()
    find("vllm.v1.attention.ops.metadata", "compute_token_to_req_indices")(batch.starts, ints(CHUNK), CHUNK, CHUNK)


def combine(ratio: int, decodes: int) -> None:
    """Rows of the gathered workspace that each prefill token attends to: top-k and window."""
    batch = Batch(decodes)
    compressed = LONGEST // ratio if ratio else 0
    find(CACHE, "combine_topk_swa_indices")(
        *(ints(CHUNK, TOPK)[decodes:], batch.starts[decodes:], batch.lens[decodes:], ints(batch.prefills)),
        *(WINDOW, ratio, TOPK if ratio else 0, compressed + WINDOW + CHUNK, compressed),
    )


def mixed_list(ratio: int) -> None:
    """FlashInfer's list of slots, decode rows first."""
    batch = Batch(MIXED)
    block = BLOCK // ratio if ratio else 0
    find(CACHE, "build_flashinfer_mixed_sparse_indices")(
        *(ints(CHUNK, 1, WINDOW)[:MIXED].view(-1, WINDOW), ints(MIXED, TOPK) if ratio else None),
        *(ints(MIXED) if ratio else None, ints(CHUNK, TOPK)[MIXED:], batch.starts, batch.lens, batch.requests),
        *(batch.table, SWA_BLOCK, ints(batch.rows, LONGEST // BLOCK) if ratio else None, block),
        *(WINDOW, ratio, TOPK if ratio else 0),
        replay_start=batch.replay_start,
    )


def fused_decode(rows: int, noncausal: bool) -> None:
    """Window slots of decode rows, dense and ragged at once: gfx942 with ``--monokernel``."""
    launch, batch = find("vllm.models.deepseek_v41.amd.ops.swa_decode_meta", "launch"), Batch(rows, 0)
    if not find("vllm.platforms.rocm", "on_gfx942")():
        return  # the path is not taken
    width = find(SWA, "get_dspark_swa_index_width")(WINDOW, DRAFT) if noncausal else WINDOW
    launch(
        *(ints(CHUNK, dtype="int64"), batch.valid, ints(CHUNK, 1, width), ints(CHUNK), ints(CHUNK * width)),
        *(ints(CHUNK + 1), batch.starts, batch.lens, batch.requests, batch.table, batch.replay_start),
        *(rows, WINDOW, SWA_BLOCK),
        noncausal=noncausal,
    )


def topk_slots(prefill: bool) -> None:
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


def ragged(width: int, limit: int = -1) -> None:
    """Dense lists, with -1 in them, to ragged ones without."""
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

    tables = find(TABLE, "BlockTables")
    buffers: Any = import_module("vllm.v1.worker.gpu.buffer_utils")
    buffers.UvaBuffer = _Buffer
    return tables(
        [SWA_BLOCK] * 4 + [BLOCK] * 2,
        SEQS,
        CHUNK,
        [LONGEST // SWA_BLOCK] * 4 + [LONGEST // BLOCK] * 2,
        torch.device("meta"),
        sliding_window_reach=[WINDOW] * 4 + [0, 0],
    )


def gather_tables() -> None:
    """The batch's rows of every group's block table."""
    _tables().gather_block_tables(ints(SEQS, dtype="int64")[:4], 4, num_computed_tokens=ints(SEQS))


def slots() -> None:
    """The slot of each token in every group."""
    batch = Batch()
    _tables().compute_slot_mappings(ints(SEQS, dtype="int64")[:4], batch.starts, ints(CHUNK, dtype="int64"), CHUNK)


def _state() -> Any:
    """Without its ``__init__``, which wants a whole model: whoever calls a method gives it what that reads."""
    return object.__new__(find(STATE, "DeepseekV41ModelState"))


def replay() -> None:
    """Padding of replayed slots, and the replay layers' batch: vLLM's warm-up, on the buffers that they run on."""
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


def lookback() -> None:
    """The tokens before each chunk."""
    state, batch = _state(), Batch()
    state.lookback_token_ids, state.rope_state = ints(SEQS, LOOKBACK), None
    inputs = types.SimpleNamespace(
        idx_mapping=ints(SEQS, dtype="int64")[:4], query_start_loc=batch.starts, positions=ints(CHUNK, dtype="int64")
    )
    tokens = types.SimpleNamespace(gpu=ints(SEQS, LONGEST))
    state.prepare_inputs(inputs, types.SimpleNamespace(all_token_ids=tokens))
