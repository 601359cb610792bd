# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""What each consumer of window KV is told to read in a step: every implementation of the lower bound (CONTRACT 17).

All lists are made by vLLM's own code from one step's metadata, that of the ROCm builder (``rocm.py``), and come back
as slots, whatever the consumer counts in. Relied upon: a layer without a compressed cache reads window KV alone, so the
lists are asked for as such a layer asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from fuzz.engines.shadow import Tables
from fuzz.probe.batch import IndexList
from invariants.trace import PAD_SLOT, IntArray

NOWHERE = -2
"""In a list: an entry that points at nothing which holds window KV of the step."""


def index_lists(metadata: Any, window: int) -> list[IndexList]:
    """The lists for one step. ``metadata``: DeepseekV41ROCMAiterSparseSWAMetadata, with ``fused`` (``rocm.py``)."""
    return [*_ragged(metadata, window), _mixed(metadata, window), *_fused(metadata, window), *_combine(metadata, window)]


def _ragged(metadata: Any, window: int) -> Iterator[IndexList]:
    """What AITER's sparse MLA reads in place: slots of all queries end to end."""
    parts = [
        _rows(metadata.decode_swa_ragged_indices, metadata.decode_swa_ragged_indptr, window),
        _rows(metadata.prefill_swa_ragged_indices, metadata.prefill_swa_ragged_indptr, window),
    ]
    indices, lens = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    yield IndexList("ragged-list", "all", 0, indices, lens)


def _rows(ragged: Any, indptr: Any, window: int) -> tuple[IntArray, IntArray]:
    """[queries, W] and [queries] of a ragged list, which is None if there are no queries."""
    if ragged is None:
        return np.zeros((0, window), np.int32), np.zeros(0, np.int32)
    bounds = indptr.numpy()
    lens = np.diff(bounds)
    dense = np.full((len(lens), max(window, int(lens.max(initial=0)))), PAD_SLOT, np.int32)
    dense[np.arange(dense.shape[1]) < lens[:, None]] = ragged.numpy()[bounds[0] : bounds[-1]]
    return dense, lens


def _mixed(metadata: Any, window: int) -> IndexList:
    """FlashInfer's matrix for decodes and prefills alike: W columns, of which it skips those that are -1."""
    from vllm.models.deepseek_v41.common.ops.cache_utils import build_flashinfer_mixed_sparse_indices

    tokens = metadata.num_decode_tokens + metadata.num_prefill_tokens
    rows = metadata.num_decodes + metadata.num_prefills
    indices = build_flashinfer_mixed_sparse_indices(
        metadata.decode_swa_indices[:, 0],
        None,
        None,
        torch.zeros((metadata.num_prefill_tokens, 0), dtype=torch.int32),
        metadata.query_start_loc[: rows + 1],
        metadata.seq_lens[:rows],
        metadata.token_to_req_indices[:tokens],
        metadata.block_table[:rows],
        metadata.block_size,
        None,
        metadata.block_size,
        window,
        compress_ratio=0,
        topk=0,
        replay_start=metadata.replay_start[:rows],
    )[0].numpy()
    return IndexList("mixed-list", "all", 0, indices, (indices != PAD_SLOT).sum(1, dtype=np.int32))


def _fused(metadata: Any, window: int) -> Iterator[IndexList]:
    """gfx942's one launch for a batch of decodes, which writes the list twice, dense and ragged."""
    fused = metadata.fused
    if fused is None:
        return
    dense = fused.decode_swa_indices[:, 0].numpy().copy()
    yield IndexList("fused-decode", "decodes", 0, dense, fused.decode_swa_lens.numpy().copy())
    ragged = _rows(fused.decode_swa_ragged_indices, fused.decode_swa_ragged_indptr, window)
    yield IndexList("fused-decode-ragged", "decodes", 0, *ragged)


def _combine(metadata: Any, window: int) -> Iterator[IndexList]:
    """The default path of gfx950: rows of a workspace, into which ``gather-length`` rows a request are gathered.

    As in ``_forward_prefill`` of the ROCm layer, chunk of requests by chunk.
    """
    from vllm.models.deepseek_v41.attention import DeepseekV4Attention
    from vllm.models.deepseek_v41.common.ops import combine_topk_swa_indices

    if not metadata.num_prefills or window & (window - 1):
        return  # the kernel has one lane for each position of the window, so W is a power of two
    decodes, starts = metadata.num_decodes, metadata.query_start_loc
    lists = []
    plan = metadata.get_prefill_chunk_plan(0, DeepseekV4Attention.PREFILL_CHUNK_SIZE, has_compressed=False)
    for begin, end, first, stride in plan:
        chunk = slice(begin, end)
        queries = starts[decodes + begin : decodes + end + 1]
        seq_lens, gather_lens = metadata.prefill_seq_lens[chunk], metadata.prefill_gather_lens[chunk]
        topk = torch.zeros((int(queries[-1] - queries[0]), 1), dtype=torch.int32)
        listed, lens = combine_topk_swa_indices(topk, queries, seq_lens, gather_lens, window, 0, 0, stride, first)
        indices = listed.numpy()
        slots = _gathered(metadata, chunk, first, stride)
        inside = (indices >= 0) & (indices < len(slots))
        found = np.where(inside, slots[np.where(inside, indices, 0)], NOWHERE)
        lists.append((np.where(indices == PAD_SLOT, PAD_SLOT, found), lens.numpy()))
    indices, lens = (np.concatenate(arrays) for arrays in zip(*lists, strict=True))
    yield IndexList("combine", "prefills", metadata.num_decode_tokens, indices, lens)


def _gathered(metadata: Any, chunk: slice, first: int, stride: int) -> IntArray:
    """int64 [requests * stride]: the slot that is gathered into each row of the workspace."""
    seq_lens, lens = metadata.prefill_seq_lens[chunk].numpy(), metadata.prefill_gather_lens[chunk].numpy()
    tables = Tables(metadata.block_table[metadata.num_decodes :][chunk].numpy(), metadata.block_size)
    slots = np.full((len(lens), stride), NOWHERE, np.int64)
    row, lane = np.nonzero(np.arange(stride - first) < lens[:, None])
    slots[row, first + lane] = tables.slots(row, (seq_lens - lens)[row] + lane)
    return slots.ravel()
