# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The compiled executor against Triton's interpreter: same memory, byte for byte."""

from __future__ import annotations

from launches import BOOL, I32, I64, Arena, agree, compiled, fuzzed
from launches import interpreter as interpreter

# isort: split

import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpretedFunction

from fuzz.triton_cpu import fallbacks, install, prepare, uninstall
from fuzz.triton_cpu.executor import KernelFallback

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


# vLLM's kernels


class Batch:
    """A batch as vLLM's worker has it, on an arena: random, valid, small."""

    def __init__(self, draw: Any) -> None:
        self.arena = arena = Arena(draw(st.integers(0, 1 << 20)), 1 << 19)
        self.rows = draw(st.integers(1, 3))
        self.states = self.rows + 2
        query = np.array(draw(st.lists(st.integers(0, 3), min_size=self.rows, max_size=self.rows)))
        context = np.array(draw(st.lists(st.integers(0, 40), min_size=self.rows, max_size=self.rows)))
        self.block_size = draw(st.sampled_from([1, 3, 16, 64]))
        self.window = draw(st.sampled_from([1, 2, 7, 8, 33]))
        self.tokens = int(query.sum())
        self.query, self.context = query, context
        starts = np.concatenate([[0], np.cumsum(query)])
        self.starts = arena.put(starts)
        self.lens = arena.put(query + context)
        self.computed = arena.ints(0, 40, self.states)
        self.index = arena.put(arena.random.permutation(self.states)[: self.rows])
        self.replay_start = arena.put(arena.random.integers(0, context + 1))
        self.positions = arena.put(
            np.concatenate([np.arange(c, c + q) for q, c in zip(query, context, strict=True)] + [[0]]), I64
        )
        self.requests = arena.put([*np.repeat(np.arange(self.rows), query), 0])
        self.blocks = 64 // self.block_size + 2
        self.table = arena.ints(0, 99, (self.states, self.blocks))

    def pointers(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.arena.put(np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64), torch.uint64)


batches = st.composite(Batch)
busy = batches().filter(lambda batch: batch.tokens > 0)


@fuzzed
@given(busy, st.booleans(), st.data())
def test_paged_window_indices(batch: Batch, image: bool, data: Any) -> None:
    from vllm.v1.attention.backends.mla.sparse_swa import _compute_swa_indices_and_lens_kernel as kernel

    arena, offset = batch.arena, data.draw(st.integers(0, batch.tokens - 1))
    programs, width = batch.tokens - offset, batch.window + (3 if image else 0)
    indices, lens = arena.empty((programs, width)), arena.empty(programs)
    left, right = arena.ints(0, 9, batch.tokens), arena.ints(0, 3, batch.tokens)
    valid = arena.put(arena.random.random(batch.tokens) < 0.8, BOOL)
    block = data.draw(st.sampled_from([8, 1024]))
    agree(
        arena,
        kernel[(programs,)],
        *(indices, indices.stride(0), lens, batch.window, width, left, right, batch.starts, batch.lens),
        *(batch.requests, valid, batch.table, batch.table.stride(0), batch.block_size, batch.replay_start, offset),
        HAS_IMAGE=image,
        TRITON_BLOCK_SIZE=block,
    )


@fuzzed
@given(busy)
def test_dspark_noncausal_indices(batch: Batch) -> None:
    from vllm.v1.attention.backends.mla.sparse_swa import ComputeDSparkNoncausalSWAIndicesKernel

    arena, width = batch.arena, batch.window + 8
    indices, lens = arena.empty((batch.tokens, 1, width)), arena.empty(batch.tokens)
    valid = arena.put(arena.random.random(batch.tokens) < 0.8, BOOL)
    agree(
        arena,
        ComputeDSparkNoncausalSWAIndicesKernel(),
        *(indices, lens, batch.window, width, batch.starts, batch.lens, batch.requests, valid),
        *(batch.table, batch.block_size),
        num_tokens=batch.tokens,
        token_offset=0,
    )


@fuzzed
@given(batches())
def test_prefill_gather_lens(batch: Batch) -> None:
    from vllm.v1.attention.backends.mla.sparse_swa import ComputePrefillMetadataKernel

    out = batch.arena.empty(batch.rows)
    decodes = int(batch.arena.random.integers(0, batch.rows))
    prefills = batch.rows - decodes
    agree(
        batch.arena,
        ComputePrefillMetadataKernel.kernel[(1,)],
        *(out, batch.lens, batch.starts, batch.replay_start, prefills, decodes, batch.window),
        BLOCK_SIZE=triton.next_power_of_2(prefills),
    )


@fuzzed
@given(batches(), st.booleans())
def test_gather_block_tables(batch: Batch, mask: bool) -> None:
    from vllm.v1.worker.gpu.block_table import _gather_block_tables_kernel as kernel

    arena = batch.arena
    other = arena.ints(0, 99, (batch.states, 5))
    out = arena.empty((batch.rows + 2, batch.blocks)), arena.empty((batch.rows + 2, 5))
    counts = arena.ints(0, 5, (2, batch.states))
    counts[0].clamp_(max=batch.blocks)
    agree(
        arena,
        kernel[(2, batch.rows + 2)],
        *(batch.index, batch.pointers(batch.table, other), batch.pointers(*out)),
        *(arena.put([batch.blocks, 5], I64), counts, counts.stride(0), batch.rows, batch.computed),
        *(arena.put([0, batch.window]), arena.put([batch.block_size, 3])),
        MASK_SLIDING_WINDOW=mask,
        BLOCK_SIZE=4,
    )


@fuzzed
@given(batches(), st.sampled_from([(1, 0, 1), (2, 1, 1), (2, 0, 4)]), st.sampled_from([4, 1024]))
def test_slot_mappings(batch: Batch, parallel: tuple[int, int, int], block: int) -> None:
    from vllm.v1.worker.gpu.block_table import _compute_slot_mappings_kernel as kernel

    arena, (size, rank, interleave) = batch.arena, parallel
    index = arena.put([-1 if arena.random.random() < 0.2 else int(row) for row in batch.index])
    mappings = arena.empty((2, batch.tokens + 3), I64)
    other = arena.ints(0, 99, (batch.states, 64))
    agree(
        arena,
        kernel[(2, batch.rows + 1)],
        *(mappings.shape[1], index, batch.starts, batch.positions, batch.pointers(batch.table, other)),
        *(arena.put([batch.blocks, 64], I64), arena.put([batch.block_size, 1]), arena.put([True, False], BOOL)),
        *(arena.put([True, False], BOOL), mappings, mappings.stride(0), rank),
        CP_SIZE=size,
        CP_INTERLEAVE=interleave,
        PAD_ID=-1,
        TRITON_BLOCK_SIZE=block,
    )


@fuzzed
@given(st.integers(0, 1 << 20), st.booleans(), st.sampled_from([I32, I64, torch.float32]))
def test_apply_write(seed: int, groups: bool, dtype: torch.dtype) -> None:
    from vllm.v1.worker.gpu.buffer_utils import _apply_write_kernel as kernel

    arena = Arena(seed)
    random, dtype = arena.random, I32 if groups else dtype
    lengths = random.integers(0, 9, 3)
    out = arena.empty((4, 24), dtype), arena.empty((4, 16), dtype)
    contents = arena.ints(-9, 9, int(lengths.sum()) + 1, dtype)
    # Rows of their own: writes to one place would be a race.
    common = arena.put(random.permutation(4)[:3]), arena.ints(0, 7, 3), contents, arena.put(np.cumsum(lengths))
    if groups:
        pointers = arena.put(np.array([tensor.data_ptr() for tensor in out], dtype=np.uint64), torch.uint64)
        first = pointers, arena.put([24, 16], I64)
        last = arena.ints(0, 1, 3)
    else:
        first, last = (out[0], 24), None
    agree(arena, kernel[(3, 3)], *first, *common, last, BLOCK_SIZE=4, MULTI_GROUP=groups)


@fuzzed
@given(batches(), st.integers(1, 3))
def test_prefill_inputs(batch: Batch, lookahead: int) -> None:
    from vllm.v1.worker.gpu.input_batch import prepare_prefill_inputs

    arena = batch.arena
    inputs, following = arena.empty(batch.tokens + 1), arena.empty((lookahead, batch.states))
    tokens = arena.ints(0, 999, (batch.states, 64))
    lens = arena.ints(0, 46, batch.states)
    agree(
        arena,
        prepare_prefill_inputs,
        inputs,
        following,
        batch.index,
        batch.starts,
        tokens,
        lens,
        batch.computed,
    )


@fuzzed
@given(batches())
def test_positions_and_seq_lens(batch: Batch) -> None:
    from vllm.v1.worker.gpu.input_batch import prepare_pos_seq_lens

    positions, lens = batch.arena.empty(batch.tokens + 1, I64), batch.arena.empty(batch.rows + 3)
    agree(
        batch.arena,
        prepare_pos_seq_lens,
        batch.index,
        batch.starts,
        batch.computed,
        positions,
        lens,
    )


@fuzzed
@given(batches().filter(lambda batch: (batch.query > 0).all()), st.integers(0, 2), st.integers(0, 1))
def test_combine_sampled_and_draft_tokens(batch: Batch, drafts: int, sampled: int) -> None:
    from vllm.v1.worker.gpu.input_batch import combine_sampled_and_draft_tokens

    arena = batch.arena
    drafted = np.minimum(arena.random.integers(0, drafts + 1, batch.rows), np.maximum(batch.query - sampled, 0))
    logits = np.concatenate([[0], np.cumsum(drafted + sampled)])
    inputs, last = arena.empty(batch.tokens + 1), arena.ints(0, 999, (batch.states, 1))
    draft_tokens, prefill = arena.ints(0, 999, (batch.states, max(drafts, 1))), arena.ints(0, 60, batch.states)
    total = int(logits[-1])
    agree(
        arena,
        combine_sampled_and_draft_tokens,
        *(inputs, batch.index, last, batch.starts, batch.lens, prefill, draft_tokens, arena.put(logits), total),
        num_new_sampled_tokens=sampled,
    )


@fuzzed
@given(batches(), st.booleans(), st.booleans(), st.booleans())
def test_post_update(batch: Batch, bins: bool, starts: bool, drafts: bool) -> None:
    from vllm.v1.worker.gpu.input_batch import post_update

    arena = batch.arena
    index = arena.put([-1 if arena.random.random() < 0.2 else int(row) for row in batch.index])
    counts = arena.ints(0, 9, (batch.states, 50)) if bins else None
    draft = arena.ints(0, 49, (batch.rows, 2), I64) if drafts else None
    draft_out = arena.empty((batch.states, 2), I64) if drafts else None
    arguments = (
        *(index, batch.computed, arena.empty((batch.states, 1)), counts, arena.ints(0, 49, (batch.rows, 3), I64)),
        *(arena.ints(0, 3, batch.rows), arena.ints(0, 2, batch.rows), batch.starts if starts else None),
        *(arena.empty((batch.states, 64)), arena.ints(0, 50, batch.states), draft, draft_out),
    )
    agree(arena, post_update, *arguments)


@fuzzed
@given(batches())
def test_post_update_num_computed_tokens(batch: Batch) -> None:
    from vllm.v1.worker.gpu.input_batch import post_update_num_computed_tokens

    agree(batch.arena, post_update_num_computed_tokens, batch.index, batch.computed, batch.starts)


@fuzzed
@given(batches(), st.sampled_from([2, 1024]))
def test_pad_replayed_slots(batch: Batch, block: int) -> None:
    from vllm.models.deepseek_v41.nvidia.model_state import _pad_replayed_slots_kernel as kernel

    slots = batch.arena.ints(0, 999, (3, batch.tokens + 2), I64)
    agree(
        batch.arena,
        kernel[(batch.rows,)],
        *(slots, slots.stride(0), batch.arena.put([2, 0]), batch.starts, batch.positions, batch.replay_start),
        *(batch.window, -1),
        NUM_GROUPS=2,
        BLOCK=block,
    )


@fuzzed
@given(batches(), st.sampled_from([2, 1024]))
def test_gather_replay_batch(batch: Batch, block: int) -> None:
    from vllm.models.deepseek_v41.nvidia.model_state import _gather_replay_batch_kernel as kernel

    arena = batch.arena
    kept = np.minimum(batch.query, batch.window)
    dropped = arena.put(np.concatenate([[0], np.cumsum(batch.query - kept)]))
    slots, kept_slots = arena.ints(0, 999, (2, batch.tokens + 1), I64), arena.empty((2, int(kept.sum()) + 2), I64)
    agree(
        arena,
        kernel[(batch.rows,)],
        *(batch.starts, dropped, batch.lens, batch.replay_start, batch.positions, slots, slots.stride(0)),
        *(arena.empty(batch.tokens + 1, I64), arena.empty(batch.rows + 1), arena.empty(batch.tokens + 1, I64)),
        *(kept_slots, kept_slots.stride(0), arena.empty(batch.rows), batch.window),
        NUM_GROUPS=2,
        BLOCK=block,
    )


@fuzzed
@given(batches(), st.integers(1, 5))
def test_gather_lookback(batch: Batch, depth: int) -> None:
    from vllm.models.deepseek_v41.nvidia.model_state import _gather_lookback_kernel as kernel

    tokens, out = batch.arena.ints(0, 999, (batch.states, 64)), batch.arena.empty((batch.rows + 2, depth))
    agree(
        batch.arena,
        kernel[(batch.rows + 2,)],
        *(out, batch.index, batch.starts, batch.positions, tokens, tokens.stride(0), batch.rows),
        DEPTH=depth,
        BLOCK_DEPTH=triton.next_power_of_2(depth),
    )


@fuzzed
@given(batches(), st.integers(0, 300))
def test_token_to_request(batch: Batch, more: int) -> None:
    from vllm.v1.attention.ops.metadata import compute_token_to_req_indices

    out = batch.arena.empty(batch.tokens + more + 1)
    agree(
        batch.arena,
        compute_token_to_req_indices,
        batch.starts,
        out,
        batch.tokens,
        batch.tokens + more,
    )


@fuzzed
@given(busy, st.sampled_from([0, 1, 4]), st.booleans())
def test_combine_topk_and_window(batch: Batch, ratio: int, wide: bool) -> None:
    from vllm.models.deepseek_v41.common.ops.cache_utils import CombineTopkSwaIndicesKernel

    arena, window = batch.arena, 8 if wide else 2
    indices, out = arena.ints(-2, 60, (batch.tokens, 4)), arena.empty((batch.tokens, 12))
    gather = arena.put(np.minimum(batch.query + batch.context, batch.query + window - 1))
    agree(
        arena,
        CombineTopkSwaIndicesKernel.kernel[(batch.rows, 2)],
        *(out, out.stride(0), arena.empty(batch.tokens), indices, indices.stride(0)),
        *(batch.starts, batch.lens, gather, 200, 50),
        TOP_K=4 if ratio else 0,
        COMPRESS_RATIO=ratio,
        WINDOW_SIZE=window,
        PADDED_TOP_K=4,
    )


@fuzzed
@given(busy, st.sampled_from([0, 1, 4]), st.booleans(), st.data())
def test_flashinfer_mixed_indices(batch: Batch, ratio: int, local: bool, data: Any) -> None:
    from vllm.models.deepseek_v41.common.ops import cache_utils

    arena, topk = batch.arena, 6 if ratio else 0
    decodes = data.draw(st.integers(0, batch.tokens))
    names = {
        "decode_swa_indices": arena.ints(-1, 99, (max(decodes, 1), batch.window)),
        "decode_compressed_indices": arena.ints(-1, 30, (max(decodes, 1), 6)),
        "decode_compressed_topk_lens": None if local else arena.ints(0, 6, batch.tokens),
        "decode_is_valid_token": arena.put(arena.random.random(batch.tokens) < 0.7, BOOL),
        "prefill_topk_indices": arena.ints(-1, 30, (batch.tokens, 6)),
        "query_start_loc": batch.starts,
        "seq_lens": batch.lens,
        "token_to_req_indices": batch.requests,
        "replay_start": batch.replay_start,
        "swa_block_table": batch.table,
        "compressed_block_table": batch.table,
    }
    kernel = cache_utils._build_flashinfer_mixed_sparse_indices_kernel
    out, out_lens = arena.empty((batch.tokens, batch.window + 8)), arena.empty(batch.tokens)
    lens = names["decode_compressed_topk_lens"]
    lens = batch.requests if lens is None else lens
    agree(
        arena,
        kernel[(batch.tokens,)],
        *(out, out.stride(0), out_lens, names["decode_swa_indices"], batch.window),
        *(names["decode_compressed_indices"], 6, lens, names["decode_is_valid_token"]),
        *(names["prefill_topk_indices"], 6, batch.starts, batch.lens, batch.requests, batch.replay_start),
        *(batch.table, batch.table.stride(0), batch.block_size, batch.block_size + 1),
        *(batch.table, batch.table.stride(0), 16, 17),
        NUM_DECODE_TOKENS=decodes,
        WINDOW_SIZE=batch.window,
        SWA_INDEX_WIDTH=batch.window,
        COMPRESS_RATIO=ratio,
        TOP_K=topk,
        PADDED_TOP_K=8,
        PREFILL_TOPK_STRIDE=6,
        DECODE_COMPRESSED_TOPK=6 if ratio else 0,
        DECODE_COMPRESSED_INDICES_ARE_LOCAL=local,
        HAS_DECODE_COMPRESSED_LENS=not local,
        WINDOW_BLOCK_SIZE=triton.next_power_of_2(batch.window),
        TOPK_BLOCK_SIZE=8,
    )


@fuzzed
@given(busy, st.booleans())
def test_fused_decode_metadata(batch: Batch, noncausal: bool) -> None:
    from vllm.models.deepseek_v41.amd.ops import swa_decode_meta

    arena, tokens, width = batch.arena, batch.tokens, batch.window + (6 if noncausal else 0)
    agree(
        arena,
        swa_decode_meta.launch,
        *(arena.ints(-1, 9, tokens, I64), arena.empty(tokens, BOOL), arena.empty((tokens, width))),
        *(arena.empty(tokens + 3), arena.empty(tokens * width), arena.empty(tokens + 1), batch.starts),
        *(batch.lens, batch.requests, batch.table, batch.replay_start, tokens, batch.window, batch.block_size),
        noncausal=noncausal,
    )


@fuzzed
@given(st.integers(0, 1 << 20), st.integers(1, 5), st.integers(1, 40), st.sampled_from([-1, 20]))
def test_ragged_indices(seed: int, rows: int, width: int, limit: int) -> None:
    from vllm.v1.attention.ops.rocm_aiter_mla_sparse import build_ragged_indices_from_dense

    arena = Arena(seed)
    indices, lens = arena.ints(-1, 30, (rows, width)), arena.ints(0, width, rows)

    def launch() -> tuple[torch.Tensor, ...]:
        flat, starts = build_ragged_indices_from_dense(indices, lens, limit)
        return flat[: int(starts[-1])], starts

    agree(arena, launch)


# the language, feature by feature


@triton.jit
def _divide(a, b, out, n: tl.constexpr):
    lane = tl.arange(0, n)
    x, y = tl.load(a + lane), tl.load(b + lane)
    tl.store(out + lane, x // y)
    tl.store(out + n + lane, x % y)
    tl.store(out + 2 * n + lane, tl.cdiv(x, y))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, I32, torch.uint32, I64])
def test_division_truncates(dtype: torch.dtype) -> None:
    arena = Arena()
    limits = torch.iinfo(dtype)
    values = [v for v in (0, 1, 2, 3, 7, limits.max, limits.min, -1, -2, -3, -7) if limits.min <= v <= limits.max]
    pairs = [(x, y) for x in values for y in values]
    pairs += [(1, 1)] * (128 - len(pairs))
    a, b = (arena.put(np.array(column, dtype=np.int64), dtype) for column in zip(*pairs, strict=True))
    out = arena.empty(3 * 128, I64)
    agree(arena, _divide[(1,)], a, b, out, 128)
    assert int(out[pairs.index((7, 2))]) == 3
    if limits.min < 0:
        assert int(out[pairs.index((-7, 2))]) == -3
        assert int(out[128 + pairs.index((-7, 2))]) == -1
    assert int(out[pairs.index((7, 0))]) == 0


@triton.jit
def _operators(a, b, flags, out, scalar, wide, flag):
    lane = tl.arange(0, 16)
    x, y, f = tl.load(a + lane), tl.load(b + lane), tl.load(flags + lane)
    tl.store(out + lane, x + y)
    tl.store(out + 16 + lane, x * y)
    tl.store(out + 32 + lane, x - wide)
    tl.store(out + 48 + lane, (x & y) | (x ^ scalar))
    tl.store(out + 64 + lane, -x + ~y)
    tl.store(out + 80 + lane, tl.where(f & (x < y) | (y == scalar), x, -1))
    tl.store(out + 96 + lane, tl.where(~f ^ flag, tl.minimum(x, scalar), tl.maximum(y, 3)))
    tl.store(out + 112 + lane, (x << 3) + (y >> 2) + (x >> (y & 63)) + (x << y) + (y >> x))
    tl.store(out + 128 + lane, x.to(tl.int8) + (y > 0))
    tl.store(out + 144 + lane, (x.to(tl.int64) * scalar) + (y < 2))
    tl.store(flags + lane, (x >= y) & flag)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, I32, I64])
@pytest.mark.parametrize("flag", [False, True])
def test_operators_wrap_around_and_promote(dtype: torch.dtype, flag: bool) -> None:
    arena = Arena(1)
    limits = torch.iinfo(dtype)
    extremes = [0, 1, -1, 5, limits.max, limits.min, limits.max - 1, limits.min + 1]
    a = arena.put(np.array(extremes * 2, dtype=np.int64), dtype)
    b = arena.put(np.repeat(np.array(extremes, dtype=np.int64), 2), dtype)
    flags = arena.put(arena.random.random(16) < 0.5, BOOL)
    agree(arena, _operators[(1,)], a, b, flags, arena.empty(160, I64), 3, 1 << 40, flag)
    agree(arena, _operators[(1,)], a, b, flags, arena.empty(160), -3, -5, flag)


@triton.jit
def _wrap(out, x):
    tl.store(out, x + 1)


def test_int32_wraps_around() -> None:
    arena = Arena()
    out = arena.empty(1, I64)
    agree(arena, _wrap[(1,)], out, 2**31 - 1)
    assert int(out[0]) == -(2**31)


@triton.jit
def _branches(values, out, limit, skip: tl.constexpr, missing):
    pid = tl.program_id(0)
    value = tl.load(values + pid)
    lane = tl.arange(0, 4)
    tile = lane * 2
    extra = tl.load(values + pid - 1) if pid > 0 else 0
    if value < 0:
        tl.store(out + pid * 8, -1)
        return
    if value > limit:
        value = limit
        tile = tile + extra
    elif value == 3 or (value == 5 and not extra > 2):
        tile = tl.load(values + lane)
    else:
        value += 100
    if skip:
        value = 0
    if missing is not None:
        tl.store(missing, 1)
    tl.store(out + pid * 8, value + extra)
    tl.store(out + pid * 8 + 1 + lane, tile, mask=lane < pid)


@fuzzed
@given(st.integers(0, 1 << 20), st.integers(0, 9), st.booleans(), st.booleans())
def test_branches_and_early_return(seed: int, limit: int, skip: bool, missing: bool) -> None:
    arena = Arena(seed)
    values = arena.ints(-2, 9, 6)
    agree(arena, _branches[(6,)], values, arena.empty(48), limit, skip, arena.empty(1) if missing else None)


@triton.jit
def _loops(values, out, n, step):
    pid = tl.program_id(0)
    lane = tl.arange(0, 4)
    count = tl.zeros((), dtype=tl.int32)
    low = tl.full((4,), 0, tl.int32)
    high = lane + n
    for i in range(pid, n, step):
        count += i // 2 + (i - 5) % 3 + (i - 4) // -3
        for j in tl.range(n, -1, -2):
            count += j * (i & 1)
        low, high = high - 1, low + tl.load(values + (lane + i) % 8)
    for k in tl.static_range(3):
        tl.store(out + pid * 16 + k, count + k)
    while tl.sum((low < high).to(tl.int32), 0) > 0:
        low = low + 1 + lane
        count += 1
    for i in range(0, 9, 4):
        tl.store(out + pid * 16 + 3 + i, count - i)
    tl.store(out + pid * 16 + 12 + lane, low)


@fuzzed
@given(st.integers(0, 1 << 20), st.integers(-1, 8), st.sampled_from([1, 2, 5, -1, -3]))
def test_loops(seed: int, n: int, step: int) -> None:
    arena = Arena(seed)
    agree(arena, _loops[(3,)], arena.ints(-5, 9, 8), arena.empty(48), n, step)


@triton.jit
def _aliased(memory, n, again: tl.constexpr):
    lane = tl.arange(0, 8)
    here = tl.load(memory + lane, mask=lane < n, other=7)
    there = tl.load(memory + (here & 7))
    tl.store(memory + lane + 1, here)
    tl.store(memory + lane, there + here, mask=lane < 6)
    first = tl.load(memory)
    tl.store(memory, first + 1)
    tl.store(memory + 1, first)
    for i in range(n):
        before = tl.load(memory + lane + i)
        if i > 1:
            tl.store(memory + lane + i + 1, before)
        tl.store(memory + lane, before + there)
    if again:
        tl.store(memory + lane + 1, tl.load(memory + lane) + tl.load(memory + 2 + lane))
    counted = tl.load(memory + lane)
    for i in range(n - 2):
        tl.store(memory + lane + 1, counted + i)
    tested = tl.load(memory + 1 + lane)
    while tl.load(memory) < n + 40:
        tl.store(memory, tl.load(memory) + 9)
        tl.store(memory + lane + 2, tested)
    tl.store(memory + 8 + lane, counted + tested)


@fuzzed
@given(st.integers(0, 1 << 20), st.integers(0, 5), st.booleans())
def test_loads_see_memory_as_of_their_place(seed: int, n: int, again: bool) -> None:
    arena = Arena(seed)
    agree(arena, _aliased[(2,)], arena.ints(0, 99, 24), n, again)


@triton.jit
def _two(x, y):
    return x + y, x - y


@triton.jit
def _put(memory, value):
    tl.store(memory + tl.arange(0, 4), value)
    return value + 1


@triton.jit
def _calls(memory, n):
    lane = tl.arange(0, 4)
    total, rest = _two(lane, n)
    old = tl.load(memory + lane)
    new = old + _put(memory, total * rest)
    tl.store(memory + 4 + lane, new)
    tl.store(memory + 8 + lane, tl.load(memory + lane) + _put(memory + 1, old))
    kept = tl.load(memory + 2 + lane)
    _put(memory + 1, total)
    tl.store(memory + 12 + lane, kept)


def test_called_functions_are_part_of_the_program() -> None:
    arena = Arena(2)
    agree(arena, _calls[(1,)], arena.ints(0, 99, 16), 3)


@triton.jit
def _bounded(out, start, stop, size: tl.constexpr, wide):
    lane = tl.arange(0, size)
    offset = start + lane
    tl.store(out + lane, 1, mask=offset < stop)
    tl.store(out + size + lane, 2, mask=(stop >= offset) & (lane < 5))
    tl.store(out + 2 * size + lane, 3, mask=offset - 2 < wide)
    tl.store(out + 3 * size + lane, 4, mask=offset.to(tl.int64) + wide <= stop)
    tl.store(out + 4 * size + lane, 5, mask=offset > stop)
    tl.store(out + 5 * size + lane, 6, mask=(offset < stop) | (lane == 3))
    tl.store(out + 6 * size + lane, tl.load(out + lane, mask=offset < stop, other=9))


@fuzzed
@given(
    st.one_of(st.integers(-20, 20), st.integers(2**31 - 20, 2**31 - 1), st.integers(-(2**31), -(2**31) + 20)),
    st.one_of(st.integers(-20, 20), st.integers(2**31 - 20, 2**31 - 1), st.integers(-(2**31), -(2**31) + 20)),
    st.one_of(st.integers(-20, 20), st.just(1 << 40), st.just(2**63 - 1), st.just(-(2**63))),
)
def test_masks_that_bound_lanes(start: int, stop: int, wide: int) -> None:
    arena = Arena(3)
    agree(arena, _bounded[(1,)], arena.empty(7 * 16), start, stop, 16, wide)


@triton.jit
def _rectangle(values, out, n, rows: tl.constexpr, cols: tl.constexpr):
    row, col = tl.arange(0, rows), tl.arange(0, cols)
    tile = tl.load(values + row[:, None] * cols + col[None, :], mask=col[None, :] < n, other=-1)
    keep = (tile >= 0) & (row[:, None] < n)
    counts = tl.sum(keep.to(tl.int32), axis=1)
    tl.store(out + row, counts)
    tl.store(out + rows + col, tl.max(tile, axis=0))
    tl.store(out + rows + cols, tl.sum(tile) + tl.min(counts, 0))
    rank = tl.cumsum(keep.to(tl.int32), axis=1) + tl.cumsum(keep.to(tl.int32), axis=0)
    tl.store(values + row[:, None] * cols + col[None, :] + 1, tile + rank, mask=keep)


@fuzzed
@given(st.integers(0, 1 << 20), st.integers(-1, 9), st.sampled_from([(1, 1), (2, 8), (8, 2), (1, 4)]))
def test_tiles_of_two_axes(seed: int, n: int, shape: tuple[int, int]) -> None:
    arena = Arena(seed)
    agree(arena, _rectangle[(1,)], arena.ints(-3, 9, shape[0] * shape[1] + 1), arena.empty(sum(shape) + 1), n, *shape)


@triton.jit
def _totals(values, flags, out):
    lane = tl.arange(0, 16)
    narrow, flag = tl.load(values + lane), tl.load(flags + lane)
    tl.store(out, tl.sum(narrow, 0))
    tl.store(out + 1, tl.sum(flag, 0))
    tl.store(out + 2, tl.max(narrow, 0) + tl.min(narrow, 0))
    tl.store(out + 3 + lane, tl.cumsum(narrow, 0))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, I32, torch.uint32, I64])
def test_totals_widen(dtype: torch.dtype) -> None:
    arena = Arena(5)
    limits = torch.iinfo(dtype)
    values = arena.put(arena.random.choice([limits.min, limits.max, 1, limits.max - 3], 16), dtype)
    flags = arena.put(arena.random.random(16) < 0.5, BOOL)
    agree(arena, _totals[(1,)], values, flags, arena.empty(19, I64))


@triton.jit
def _grid(out):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    order = tl.load(out)
    tl.store(out, order + 1)
    place = (x * tl.num_programs(1) + y) * tl.num_programs(2) + z
    tl.store(out + 1 + place, order)


def test_programs_run_in_row_major_order() -> None:
    arena = Arena()
    out = arena.put([0] * 25)
    agree(arena, _grid[(2, 3, 4)], out)
    assert out.tolist() == [24, *range(24)]
    agree(arena, _grid[lambda names: (2, len(names), 0)], out)


# what is not translated


@triton.jit
def _atomic(out, n):
    tl.store(out, n)
    tl.atomic_add(out, 5)


@triton.jit
def _floating(out, n):
    tl.store(out, (tl.load(out) * 1.5).to(tl.uint64) + n)


@triton.jit
def _maybe_unset(out, n):
    for sum in range(n):
        tl.store(out, sum)
    tl.store(out, sum)


@triton.jit
def _two_types(out, n):
    x = tl.load(out)
    if n > 2:
        x = x.to(tl.int64) + (1 << 40)
    tl.store(out, x // 3)


@pytest.mark.parametrize(
    ("kernel", "operation"),
    [
        (_atomic, "a call of atomic_add"),
        (_floating, "fp_to_ui"),
        (_two_types, "x, which branches give different types"),
        (_maybe_unset, "sum, a loop variable after its loop"),
    ],
)
def test_unsupported_operations_fall_back(kernel: Any, operation: str) -> None:
    arena = Arena(4)
    out = arena.put([10])
    before = arena.bytes.clone()
    kernel[(1,)](out, 3)
    want = arena.bytes.clone()
    arena.bytes.copy_(before)
    name, launches = kernel.fn.__name__, fallbacks[kernel.fn.__name__]
    install()
    try:
        with pytest.warns(KernelFallback, match=rf"kernel {name}: unsupported {operation}.* at line \d+$"):
            kernel[(1,)](out, 3)
    finally:
        uninstall()
    assert torch.equal(arena.bytes, want)
    assert fallbacks[name] == launches + 1


def test_a_warning_names_the_line() -> None:
    lines, first = inspect.getsourcelines(_atomic.fn)
    line = first + next(number for number, text in enumerate(lines) if "atomic_add" in text)
    install()
    try:
        with pytest.warns(KernelFallback, match=rf"at line {line}$"):
            _atomic[(1,)](torch.zeros(1, dtype=I32), 3)
    finally:
        uninstall()


def test_the_source_that_is_imported_is_what_runs(tmp_path: Path) -> None:
    """A mutant of a kernel is a rewritten file: no copy of the original may run in its place."""
    text = "import triton\nimport triton.language as tl\n\n@triton.jit\ndef kernel(out, n):\n    tl.store(out, n + 1)\n"
    arena = Arena()
    out = arena.empty(1)
    for name, source, value in (("original", text, 6), ("mutant", text.replace("+ 1", "- 1"), 4)):
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        agree(arena, module.kernel[(1,)], out, 5)
        assert int(out[0]) == value


@triton.jit
def _stepping(out, step):
    for i in range(0, 3, step):
        tl.store(out + i, i)


def test_errors_are_raised_either_way() -> None:
    out = torch.zeros(4, dtype=I32)
    with pytest.raises(InterpreterError, match="must not be zero"):
        _stepping[(1,)](out, 0)
    with compiled(), pytest.raises(InterpreterError, match=r"kernel _stepping: range\(\) arg 3 must not be zero"):
        _stepping[(1,)](out, 0)


def test_constants_of_equal_value_are_told_apart() -> None:
    arena = Arena()
    for value in (1, True, 0, False):
        agree(arena, _constant[(1,)], arena.empty(2), value)


@triton.jit
def _constant(out, value: tl.constexpr):
    x = value
    tl.store(out, x + x)


def test_install_and_uninstall() -> None:
    original = InterpretedFunction.run
    install()
    assert InterpretedFunction.run is not original
    assert prepare("interpreter") == "interpreter"
    assert InterpretedFunction.run is original
    assert prepare("compiled") == "compiled"
    assert InterpretedFunction.run is not original
    uninstall()
    assert InterpretedFunction.run is original


def test_warming_up_launches_nothing() -> None:
    with compiled():
        _constant.warmup(I32, value=1, grid=(1,))


def test_prepare_comes_before_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(RuntimeError, match="Triton was imported before"):
        prepare("interpreter")


def test_a_triton_that_the_compiler_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """None in sys.modules is how Python spells a module that cannot be imported."""
    from fuzz import triton_cpu

    original = InterpretedFunction.run
    monkeypatch.delattr(triton_cpu, "executor")
    monkeypatch.setitem(sys.modules, "fuzz.triton_cpu.executor", None)
    with pytest.warns(RuntimeWarning, match=r"kernels run under Triton's interpreter, slowly: .*executor"):
        assert prepare("compiled") == "interpreter"
    assert InterpretedFunction.run is original


def test_a_gpu_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_TARGET_DEVICE")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    original = InterpretedFunction.run
    assert prepare("compiled") == "gpu"
    assert InterpretedFunction.run is original
