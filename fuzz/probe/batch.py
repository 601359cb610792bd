# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The worker's batch of one step, as vLLM's input batch and window metadata have it. Arrays are copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from invariants.trace import BoolArray, IntArray


class Kept(NamedTuple):
    """Decoder-side replay of one step, as vLLM prepares it: the layers after the last KV source run on these tokens."""

    tokens: Any
    """int64 tensor [kept tokens], ascending: tokens of the batch."""
    window: int
    first: Any
    """DeepseekSparseSWAMetadata of the first such layer, which has every token's window key."""
    rest: list[Any]
    """Of the others."""


class Indices(NamedTuple):
    """Paged window indices of some queries."""

    slots: IntArray
    """int32 [queries, W]: decode rows, then prefill rows. -1 fills a query's row past its length."""
    lens: IntArray
    """int32 [queries]"""


@dataclass(slots=True)
class IndexList:
    """The window KV that one consumer is told to read, query by query."""

    consumer: str
    serves: Literal["all", "prefills", "decodes"]
    begin: int
    """Token of the batch that the first row is for; the others follow."""
    indices: IntArray
    """[queries, width] slots, of which the first ``lens`` count. -1 fills a row past its length."""
    lens: IntArray
    """[queries]"""

    def cut(self, tokens: int) -> IndexList:
        """Without the queries past the first ``tokens`` tokens of the batch, which are padding."""
        end = max(tokens - self.begin, 0)
        return IndexList(self.consumer, self.serves, self.begin, self.indices[:end], self.lens[:end])


class Padding(NamedTuple):
    """The tokens and rows that a batch is filled up with to the size of a graph."""

    slots: list[IntArray]
    """[group] int64 [padded tokens]"""
    indices: list[Indices]
    """[window group]"""


@dataclass(slots=True)
class Batch:
    """What the worker made of one scheduler output. Rows are in the worker's order."""

    request_ids: list[str]
    computed: IntArray
    """int32 [rows], tokens computed before the step, as the device's request state has them."""
    scheduled: IntArray
    """int32 [rows]"""
    prefill: BoolArray
    """bool [rows]"""
    replay_start: IntArray
    """int32 [rows], what the metadata carries."""
    positions: IntArray
    """int64 [tokens]"""
    slots: list[IntArray]
    """[group] int64 [tokens], slot mapping after replay padding."""
    window_table: IntArray
    """int32 [rows, columns], the window group's block table as the metadata carries it."""
    indices: Indices
    """Of all tokens."""
    gather_lens: IntArray
    """int32 [prefill rows], rows gathered for each prefill request; the last ``len(gather_lens)`` rows of the batch."""
    kept: IntArray
    """int64 [kept tokens] that the layers of decoder-side replay run on; empty in a step without."""
    kept_indices: list[Indices]
    """Of the kept tokens, in the first such layer and in the others; empty in a step without."""
    padding: Padding
    lists: list[IndexList] = field(default_factory=list)
    """What further consumers read, in a step in which they have been asked."""
    others: list[Batch] = field(default_factory=list)
    """The same batch as the metadata of each further window group has it, in the groups' order."""


def copy_batch(batch: Any, slots: Any, metadata: Any, kept: Kept | None = None, further: Sequence[Any] = ()) -> Batch:
    """From vLLM's InputBatch, slot mappings [group, tokens] and the DeepseekSparseSWAMetadata of the window group, and
    of ``further`` ones. Waits for the device.

    The builders reuse their buffers from step to step, so everything kept is copied.
    """
    gather_lens = metadata.prefill_gather_lens
    rows, tokens = batch.num_reqs, batch.num_tokens
    indices, lens = _indices(metadata)
    scheduled = batch.num_scheduled_tokens.astype(np.int32)
    return Batch(
        request_ids=list(batch.req_ids),
        computed=_array(batch.seq_lens)[:rows] - scheduled,
        scheduled=scheduled,
        prefill=batch.is_prefilling_np.copy(),
        replay_start=_array(metadata.replay_start)[:rows],
        positions=_array(batch.positions)[:tokens],
        slots=list(_array(slots)[:, :tokens]),
        window_table=_array(metadata.block_table)[:rows],
        indices=Indices(indices[:tokens], lens[:tokens]),
        gather_lens=np.zeros(0, np.int32) if gather_lens is None else _array(gather_lens),
        kept=_array(kept.tokens) if kept else np.zeros(0, np.int64),
        kept_indices=[_indices(part) for part in (kept.first, *kept.rest)] if kept else [],
        padding=copy_padding(slots, (metadata, *further), tokens),
        others=[copy_batch(batch, slots, one) for one in further],
    )


def copy_padding(slots: Any, metadata: Sequence[Any], tokens: int) -> Padding:
    """What comes after the first ``tokens`` tokens of a batch; ``metadata`` of each window group."""
    listed = [_indices(one) for one in metadata]
    return Padding(
        list(_array(slots)[:, tokens:]), [Indices(indices[tokens:], lens[tokens:]) for indices, lens in listed]
    )


def _indices(metadata: Any) -> Indices:
    indices = [_array(metadata.decode_swa_indices)[:, 0]]
    lens = [_array(metadata.decode_swa_lens)]
    if metadata.num_prefill_tokens:
        indices.append(_array(metadata.prefill_swa_indices)[:, 0])
        lens.append(_array(metadata.prefill_swa_lens))
    return Indices(np.concatenate(indices), np.concatenate(lens))


def _array(tensor: Any) -> Any:
    return tensor.cpu().numpy().copy()
