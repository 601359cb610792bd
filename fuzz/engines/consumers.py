# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""What each consumer of window KV is told to read in a step: every implementation of the lower bound (CONTRACT 17).

All lists are made by vLLM's own code from what one step's metadata is made of, and come back as slots, whatever the
consumer counts in. Relied upon: a layer without a compressed cache reads window KV alone, so the lists are asked for as
such a layer asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fuzz.engines.rocm import RocmBuilders
from fuzz.engines.shadow import Tables
from fuzz.probe.batch import IndexList
from invariants.trace import PAD_SLOT, IntArray

NOWHERE = -2
"""In a list: an entry that points at nothing which holds window KV of the step."""


class Consumers:
    """Asks in steps that replay, where the bound matters, and in one of ``every`` others: it costs what a step does."""

    def __init__(self, builder: Any, rocm_builders: RocmBuilders, window: int, every: int) -> None:
        """``builder``: the shared one; what it is given from now on, the others are given as well."""
        self._rocm = rocm_builders
        self._window = window
        self._every = every
        self._steps = 0
        self._given: tuple[Any, Any] = None, None
        build = builder.build

        def remember(
            common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False, replay_start: Any = None
        ) -> Any:
            self._given = common_attn_metadata, replay_start
            return build(common_prefix_len, common_attn_metadata, fast_build, replay_start)

        builder.build = remember

    def rocm_metadata(self) -> Any:
        """As ROCm's builder makes it for the step for which the builder was just asked."""
        common, replay_start = self._given
        return self._rocm.build(0, common, replay_start=replay_start)

    def lists(self, metadata: Any) -> list[IndexList]:
        """What they read in the step for which the builder was just asked; empty where they are not asked."""
        self._steps += 1
        common, replay_start = self._given
        if self._steps % self._every and (replay_start is None or not replay_start.any()):
            return []
        found = [_mixed(metadata, self._window), *_combine(metadata, self._window)]
        found.append(_ragged(self.rocm_metadata(), self._window))
        if not metadata.num_prefills:
            found += _fused(self._rocm.build_fused(common, replay_start), self._window)
        return found


def _ragged(metadata: Any, window: int) -> IndexList:
    """What AITER's sparse MLA reads in place: slots of all queries end to end."""
    parts = [
        rows(metadata.decode_swa_ragged_indices, metadata.decode_swa_ragged_indptr, window),
        rows(metadata.prefill_swa_ragged_indices, metadata.prefill_swa_ragged_indptr, window),
    ]
    indices, lens = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return IndexList("ragged-list", "all", 0, indices, lens)


def rows(ragged: Any, indptr: Any, window: int) -> tuple[IntArray, IntArray]:
    """[queries, W] and [queries] of a ragged list, which is None if there are no queries. Bounds may be wrong."""
    if ragged is None:
        return np.zeros((0, window), np.int32), np.zeros(0, np.int32)
    bounds = indptr.numpy()
    lens = np.maximum(np.diff(bounds), 0)
    dense = np.full((len(lens), max(window, int(lens.max(initial=0)))), PAD_SLOT, np.int32)
    row, lane = np.nonzero(np.arange(dense.shape[1]) < lens[:, None])
    entry, listed = bounds[row] + lane, ragged.numpy()
    inside = (entry >= 0) & (entry < len(listed))
    dense[row[inside], lane[inside]] = listed[entry[inside]]
    dense[row[~inside], lane[~inside]] = NOWHERE
    return dense, lens


def _mixed(metadata: Any, window: int) -> IndexList:
    """FlashInfer's matrix for decodes and prefills alike: W columns, of which it skips those that are -1."""
    import torch
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


def _fused(fused: Any, window: int) -> Iterator[IndexList]:
    """gfx942's one launch for a batch of decodes, which writes the list twice, dense and ragged."""
    if fused is None:
        return
    dense = fused.decode_swa_indices[:, 0].numpy().copy()
    yield IndexList("fused-decode", "decodes", 0, dense, fused.decode_swa_lens.numpy().copy())
    ragged = rows(fused.decode_swa_ragged_indices, fused.decode_swa_ragged_indptr, window)
    yield IndexList("fused-decode-ragged", "decodes", 0, *ragged)


def _combine(metadata: Any, window: int) -> Iterator[IndexList]:
    """The default path of gfx950: rows of a workspace, into which ``gather-length`` rows a request are gathered.

    As in ``_forward_prefill`` of the ROCm layer, chunk of requests by chunk.
    """
    import torch
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
        tables = metadata.block_table[decodes:][chunk]
        rows_of = workspace(seq_lens, gather_lens, tables, metadata.block_size, first, stride)
        lists.append((as_slots(listed.numpy(), rows_of), lens.numpy()))
    indices, lens = (np.concatenate(arrays) for arrays in zip(*lists, strict=True))
    yield IndexList("combine", "prefills", metadata.num_decode_tokens, indices, lens)


def workspace(seq_lens: Any, gather_lens: Any, table: Any, block_size: int, first: int, stride: int) -> IntArray:
    """int64 [requests * stride]: the slot that is gathered into each row of it, of a request's from ``first`` on."""
    ends, lens = seq_lens.numpy(), gather_lens.numpy()
    tables = Tables(table.numpy(), block_size)
    slots = np.full((len(lens), stride), NOWHERE, np.int64)
    row, lane = np.nonzero(np.arange(stride - first) < lens[:, None])
    slots[row, first + lane] = tables.slots(row, (ends - lens)[row] + lane)
    return slots.ravel()


def as_slots(indices: IntArray, rows_of: IntArray) -> IntArray:
    """Like ``indices``, which are rows of a workspace: what was gathered into them."""
    inside = (indices >= 0) & (indices < len(rows_of))
    return np.where(indices == PAD_SLOT, PAD_SLOT, np.where(inside, rows_of[np.where(inside, indices, 0)], NOWHERE))
