# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The contract of window gathers and replayed writes as tensor operations, for the recorder's checking mode.

They run where the metadata lies and wait for nothing, so that they can go along on a GPU. CONTRACT 14, 17 and 19.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def wrong_reads(row: Tensor, position: Tensor, start: Tensor, metadata: Any) -> Tensor:
    """int64 [2]: queries with a wrong length, and with an index that is not the block table's (or a stale entry).

    ``row`` and ``position``, int64 [queries]: of the queries that the metadata is of. ``start``, [rows]: first position
    of which each row's request has window KV.
    """
    indices, lens = metadata.decode_swa_indices[:, 0], metadata.decode_swa_lens
    if metadata.num_prefill_tokens:
        indices = torch.cat([indices, metadata.prefill_swa_indices[:, 0]])
        lens = torch.cat([lens, metadata.prefill_swa_lens])
    window = indices.shape[1]
    first = torch.maximum(start[row].long(), position - (window - 1))
    owed = (position - first + 1).clamp(min=0)
    lane = torch.arange(window, device=indices.device)
    believed = first[:, None] + lane
    listed = lane < owed[:, None]
    column = (believed // metadata.block_size).clamp(0, metadata.block_table.shape[1] - 1)
    block = metadata.block_table[row[:, None], column].long()
    expected = torch.where(listed, block * metadata.block_size + believed % metadata.block_size, -1)
    return torch.stack([(lens != owed).sum(), (indices != expected).any(1).sum()])


def wrong_writes(batch: Any, slots: Tensor, metadata: Any, layout: Any) -> Tensor:
    """int64 [2]: replayed tokens that write a prefix-cacheable group, and tokens that write nothing where they must."""
    tokens = batch.num_tokens
    position = batch.positions[:tokens]
    start = metadata.replay_start[rows_of(batch)].long()
    specs = [group.kv_cache_spec for group in layout.kv_cache_groups]
    window = max(spec.prefix_replay_tokens for spec in specs)
    replayed = (start > 0) & (position >= start) & (position < start + window)
    wrong = torch.zeros(2, dtype=torch.int64, device=slots.device)
    for group, spec in enumerate(specs):
        padded = slots[group, :tokens] < 0
        fenced = replayed if spec.prefix_cacheable else torch.zeros_like(replayed)
        wrong += torch.stack([(fenced & ~padded).sum(), (padded & ~fenced).sum()])
    return wrong


def kept_start(batch: Any, kept_row: Tensor, start: Tensor, window: int) -> Tensor:
    """int64 [rows]: where window KV starts in layers that ran on some tokens of the batch only (CONTRACT 21).

    ``kept_row``, int64 [kept tokens]: their batch rows. ``start``, [rows]: the batch's own.
    """
    bounds = batch.query_start_loc[: batch.num_reqs + 1]
    trimmed = torch.bincount(kept_row, minlength=batch.num_reqs) < bounds.diff()
    start = start[: batch.num_reqs].long()
    return torch.where(trimmed, torch.maximum(start, batch.seq_lens[: batch.num_reqs].long() - window), start)


def rows_of(batch: Any) -> Tensor:
    """int64 [tokens]: batch row of each token."""
    bounds = batch.query_start_loc[1 : batch.num_reqs + 1]
    token = torch.arange(batch.num_tokens, device=bounds.device)
    return torch.searchsorted(bounds, token.to(bounds.dtype), right=True)
