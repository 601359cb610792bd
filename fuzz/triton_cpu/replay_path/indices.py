# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Launches of the kernels that say where tokens are written, and what a query reads.

vLLM's own functions launch where they take CPU tensors; where they take a whole builder, the kernel is launched with
the arguments that they give it.
"""

from __future__ import annotations

import numpy as np
import torch

from fuzz.triton_cpu.replay_path.batch import BLOCK, I32, I64, WINDOW, Batch, Launch, addresses, tensor

# where tokens go, and what rows there are


def slot_mappings(programs: int) -> Launch:
    """A program a request, and one for the padding."""
    from vllm.v1.worker.gpu.block_table import _compute_slot_mappings_kernel as kernel

    batch = Batch(programs - 1, 4)
    out = torch.full((1, batch.tokens + 8), 7, dtype=I64)
    pointers, strides = addresses(batch.table), torch.tensor([batch.width], dtype=I64)
    sizes, on = tensor([BLOCK]), torch.tensor([True])

    def run() -> None:
        kernel[(1, programs)](
            *(out.shape[1], batch.index, batch.starts, batch.positions, pointers, strides, sizes, on, on, out),
            *(out.stride(0), 0),
            CP_SIZE=1,
            CP_INTERLEAVE=1,
            PAD_ID=-1,
            TRITON_BLOCK_SIZE=1024,
        )

    return Launch(run, [out])


def block_tables(programs: int) -> Launch:
    """A program a request."""
    from vllm.v1.worker.gpu.block_table import _gather_block_tables_kernel as kernel

    batch = Batch(programs, 4)
    out = torch.full((programs, batch.width), 7, dtype=I32)
    counts = torch.full((1, programs), batch.width, dtype=I32)
    computed = tensor(batch.context)
    strides, window, size = torch.tensor([batch.width], dtype=I64), tensor([WINDOW]), tensor([BLOCK])

    def run() -> None:
        kernel[(1, programs)](
            *(
                batch.index,
                addresses(batch.table),
                addresses(out),
                strides,
                counts,
                counts.stride(0),
                programs,
                computed,
                window,
                size,
            ),
            MASK_SLIDING_WINDOW=True,
            BLOCK_SIZE=1024,
        )

    return Launch(run, [out])


def replay_padding(programs: int) -> Launch:
    """A program a request."""
    from vllm.models.deepseek_v41.nvidia.model_state import _pad_replayed_slots_kernel as kernel

    batch = Batch(programs, 8)
    slots, groups = batch.ints(0, 999, 2, batch.tokens, dtype=I64), tensor([1])

    def run() -> None:
        kernel[(programs,)](
            *(slots, slots.stride(0), groups, batch.starts, batch.positions, batch.replay_start, WINDOW, -1),
            NUM_GROUPS=1,
            BLOCK=1024,
        )

    return Launch(run, [slots])


def replay_batch(programs: int) -> Launch:
    """A program a request."""
    from vllm.models.deepseek_v41.nvidia.model_state import _gather_replay_batch_kernel as kernel

    batch = Batch(programs, WINDOW + 8)
    dropped, slots = tensor(np.arange(programs + 1) * 8), batch.ints(0, 999, 2, batch.tokens, dtype=I64)
    kept = programs * WINDOW
    rows, positions, kept_slots = (torch.zeros(*shape, dtype=I64) for shape in ((kept,), (kept,), (2, kept)))
    starts, kv_start = torch.zeros(programs + 1, dtype=I32), torch.zeros(programs, dtype=I32)

    def run() -> None:
        kernel[(programs,)](
            *(batch.starts, dropped, batch.lens, batch.replay_start, batch.positions, slots, slots.stride(0)),
            *(rows, starts, positions, kept_slots, kept_slots.stride(0), kv_start, WINDOW),
            NUM_GROUPS=2,
            BLOCK=1024,
        )

    return Launch(run, [rows, starts, positions, kept_slots, kv_start])


def lookback(programs: int) -> Launch:
    """A program a request."""
    from vllm.models.deepseek_v41.nvidia.model_state import _gather_lookback_kernel as kernel

    batch = Batch(programs, 1)
    out, tokens = torch.zeros(programs, 3, dtype=I32), batch.ints(0, 999, programs, 4 * WINDOW)

    def run() -> None:
        kernel[(programs,)](
            *(out, batch.index, batch.starts, batch.positions, tokens, tokens.stride(0), programs),
            DEPTH=3,
            BLOCK_DEPTH=4,
        )

    return Launch(run, [out])


# what a query reads


def swa_indices(programs: int) -> Launch:
    """A program a token, in requests of 172."""
    from vllm.v1.attention.backends.mla.sparse_swa import _compute_swa_indices_and_lens_kernel as kernel

    batch = Batch(max(1, programs // 172), min(programs, 172))
    out, lens = torch.zeros(batch.tokens, WINDOW, dtype=I32), torch.zeros(batch.tokens, dtype=I32)
    none, valid = torch.zeros(batch.tokens, dtype=I32), torch.ones(batch.tokens, dtype=torch.bool)

    def run() -> None:
        kernel[(batch.tokens,)](
            *(out, out.stride(0), lens, WINDOW, WINDOW, none, none, batch.starts, batch.lens, batch.requests, valid),
            *(batch.table, batch.table.stride(0), BLOCK, batch.replay_start, 0),
            HAS_IMAGE=False,
            TRITON_BLOCK_SIZE=1024,
        )

    return Launch(run, [out, lens])


def dspark_indices(programs: int) -> Launch:
    """A program a token, in drafts of 8."""
    from vllm.v1.attention.backends.mla.sparse_swa import ComputeDSparkNoncausalSWAIndicesKernel

    batch = Batch(programs // 8, 8)
    width = WINDOW + 8
    out, lens = torch.zeros(batch.tokens, 1, width, dtype=I32), torch.zeros(batch.tokens, dtype=I32)
    valid = torch.ones(batch.tokens, dtype=torch.bool)
    kernel = ComputeDSparkNoncausalSWAIndicesKernel()

    def run() -> None:
        kernel(
            *(out, lens, WINDOW, width, batch.starts, batch.lens, batch.requests, valid, batch.table, BLOCK),
            num_tokens=batch.tokens,
            token_offset=0,
        )

    return Launch(run, [out, lens])


def prefill_gather_lens(rows: int) -> Launch:
    """One program, whatever the rows."""
    from vllm.v1.attention.backends.mla.sparse_swa import _COMPUTE_PREFILL_METADATA_KERNEL

    batch, out = Batch(rows, 16), torch.zeros(rows, dtype=I32)
    return Launch(
        lambda: _COMPUTE_PREFILL_METADATA_KERNEL(out, batch.lens, batch.starts, batch.replay_start, rows, 0, WINDOW),
        [out],
    )


def combine(programs: int) -> Launch:
    """vLLM launches 256 programs a request."""
    from vllm.models.deepseek_v41.common.ops.cache_utils import combine_topk_swa_indices

    batch = Batch(max(1, programs // 256), 256)
    gather = tensor(batch.query + np.minimum(batch.context, WINDOW - 1))
    topk = batch.ints(-1, 60, batch.tokens, 64)
    out = torch.zeros(batch.tokens, 256, dtype=I32), torch.zeros(batch.tokens, dtype=I32)

    def run() -> None:
        combine_topk_swa_indices(topk, batch.starts, batch.lens, gather, WINDOW, 4, 64, 2000, 1000, out=out)

    return Launch(run, out)


def flashinfer_mixed(programs: int) -> Launch:
    """A program a token, a quarter of them decodes."""
    from vllm.models.deepseek_v41.common.ops.cache_utils import build_flashinfer_mixed_sparse_indices

    batch, decodes = Batch(programs // 8, 8), programs // 4
    swa, topk = batch.ints(-1, 999, decodes, WINDOW), batch.ints(-1, 60, programs - decodes, 64)
    out: list[torch.Tensor] = [torch.zeros(programs, WINDOW + 64, dtype=I32), torch.zeros(programs, dtype=I32)]
    lens = batch.ints(0, 64, decodes)

    def run() -> None:
        found = build_flashinfer_mixed_sparse_indices(
            *(swa, topk[:decodes], lens, topk, batch.starts, batch.lens, batch.requests, batch.table, BLOCK),
            *(batch.table, BLOCK, WINDOW, 4, 64),
            replay_start=batch.replay_start,
        )
        for kept, made in zip(out, found, strict=True):
            kept.copy_(made)

    return Launch(run, out)


def decode_metadata(rows: int) -> Launch:
    """One program, up to as many rows as the kernel takes."""
    from vllm.models.deepseek_v41.amd.ops import swa_decode_meta

    rows = min(rows, swa_decode_meta.MAX_ROWS)
    batch = Batch(rows, 1)
    slots, valid = batch.ints(-1, 9, rows, dtype=I64), torch.zeros(rows, dtype=torch.bool)
    indices, lens = torch.zeros(rows, WINDOW, dtype=I32), torch.zeros(rows, dtype=I32)
    ragged, starts = torch.zeros(rows * WINDOW, dtype=I32), torch.zeros(rows + 1, dtype=I32)

    def run() -> None:
        swa_decode_meta.launch(
            *(slots, valid, indices, lens, ragged, starts, batch.starts, batch.lens, batch.requests, batch.table),
            *(batch.replay_start, rows, WINDOW, BLOCK),
        )

    return Launch(run, [valid, indices, lens, ragged, starts])


def ragged(programs: int) -> Launch:
    """A program a row compacts; an eighth as many count."""
    from vllm.v1.attention.ops.rocm_aiter_mla_sparse import build_ragged_indices_from_dense

    batch = Batch(programs, 1)
    indices, lens = batch.ints(-1, 999, programs, WINDOW), batch.ints(0, WINDOW, programs)
    out = torch.zeros(programs * WINDOW, dtype=I32), torch.zeros(programs + 1, dtype=I32)

    def run() -> None:
        flat, starts = build_ragged_indices_from_dense(indices, lens, 900)
        out[0][: int(starts[-1])].copy_(flat[: int(starts[-1])])
        out[1].copy_(starts)

    return Launch(run, out)
