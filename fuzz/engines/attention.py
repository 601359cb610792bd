# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""gfx950's window attention over real KV bytes: vLLM's own ROCm layer, run on the batches that the worker makes.

Two ways through the same layer, as vLLM has them: the default (K insert, gather into a workspace, combine, sparse
prefill, sparse decode) and, with ``aiter``, AITER's sparse MLA on the paged lists, of which ``aiter.py`` stands in for
the kernel. What they read is taken down where the layer calls the kernels. Left out: on a GPU K is inserted by an
operator in C++, which rotates it as well; here vLLM's Triton kernel of the same record inserts it, and nothing is
rotated. Relied upon: a block of the cache is padded to whole 576 bytes, as ``DeepseekV4SWACache`` asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from fuzz.case import Case
from fuzz.engines import aiter
from fuzz.engines import config as vllm_setup
from fuzz.engines.config import is_window
from fuzz.engines.consumers import as_slots, rows, workspace
from fuzz.engines.drive import Scheduled
from fuzz.engines.layer import HEAD, ROPE, make_layer
from fuzz.engines.scheduler import SchedulerEngine
from fuzz.engines.worker import Worker
from fuzz.probe.batch import Batch, IndexList
from fuzz.triton_cpu.rocm import rocm
from invariants.trace import Geometry, IntArray

RECORD, ALIGNMENT = 584, 576
"""Bytes: of a token's K (448 in fp8, 64 in bfloat16, 8 scales), and what a block is a multiple of."""


@dataclass(slots=True)
class Attended:
    """What attention made of one step."""

    lists: list[IndexList]
    """What the kernels were told to read."""
    output: NDArray[np.float32]
    """[tokens, heads, 512]"""


class Attention:
    """One layer with its window cache. Import only after ``triton_cpu.prepare``."""

    def __init__(self, config: Any, num_blocks: int, block_size: int, heads: int, *, with_aiter: bool) -> None:
        """``config``: VllmConfig, set to the sizes of a case."""
        import torch
        from vllm.v1.worker.workspace import init_workspace_manager, is_workspace_manager_initialized

        if not is_workspace_manager_initialized():
            init_workspace_manager(torch.device("cpu"))
        stride = -(-block_size * RECORD // ALIGNMENT) * ALIGNMENT
        self._bytes = torch.zeros((num_blocks, stride), dtype=torch.uint8)
        self.heads = heads
        self._window, self._block_size = config.model_config.hf_config.sliding_window, block_size
        with rocm("gfx950"):
            self._layer = layer = make_layer(config, self._window, heads)
        layer._use_aiter_sparse_mla = with_aiter
        self.cache = self._bytes.as_strided((num_blocks, block_size, RECORD), (stride, RECORD, 1))
        """uint8 [blocks, tokens a block, bytes], as attention is given it."""
        layer.swa_cache_layer.kv_cache = self.cache
        layer.topk_indices_buffer = torch.zeros((config.scheduler_config.max_num_batched_tokens, 1), dtype=torch.int32)
        # Cosines and sines of no rotation.
        angles = torch.ones(1, ROPE)
        angles[:, ROPE // 2 :] = 0
        layer.rotary_emb.cos_sin_cache = angles.expand(config.model_config.max_model_len, ROPE).contiguous()
        self.sink = layer.attn_sink.data.copy_(torch.linspace(-1, 1, heads))
        """float32 [heads]: the logarithm of what a head's softmax has in its denominator beside the window."""

    def insert(self, k: Any, slots: IntArray) -> None:
        """Write K bfloat16 [tokens, 512] to int64 slots [tokens]."""
        import torch
        from vllm.models.deepseek_v41.common.ops import quantize_and_insert_k_cache

        with rocm("gfx950"):
            quantize_and_insert_k_cache(k, self._bytes, torch.from_numpy(slots), block_size=self._block_size)

    def attend(self, q: Any, batch: Batch, metadata: Any) -> Attended:
        """Window attention of q bfloat16 [tokens, heads, 512]; ``metadata`` of the batch as ROCm's builder makes it."""
        import torch

        output = torch.full_like(q, float("nan"))
        with rocm("gfx950"), self._watched(metadata) as lists:
            self._layer.forward_mqa(q, None, torch.from_numpy(batch.positions), output)
        return Attended(lists, output.float().numpy())

    @contextmanager
    def _watched(self, metadata: Any) -> Iterator[list[IndexList]]:
        """Taken down as the layer calls its kernels: what each of them is told to read."""
        from vllm.models.deepseek_v41.amd import rocm as layers

        lists: list[IndexList] = []
        gather, prefill, decode = (
            layers.dequantize_and_gather_k_cache,
            layers.rocm_sparse_attn_prefill,
            layers.rocm_sparse_attn_decode,
        )
        gathered: list[IntArray] = []
        done = metadata.num_decode_tokens

        def gathers(out: Any, cache: Any, **kw: Any) -> None:
            read = (kw["seq_lens"], kw["gather_lens"], kw["block_table"])
            gathered[:] = [workspace(*read, kw["block_size"], kw["offset"], out.shape[1])]
            gather(out, cache, **kw)

        def prefills(**kw: Any) -> None:
            nonlocal done
            indices, lens = kw["indices"].numpy(), kw["topk_length"].numpy()
            lists.append(IndexList("sparse-prefill", "prefills", done, as_slots(indices, gathered[0]), lens))
            done += len(lens)
            prefill(**kw)

        def decodes(**kw: Any) -> int:
            listed = rows(kw["swa_ragged_indices"], kw["swa_ragged_indptr"], self._window)
            lists.append(IndexList("sparse-decode", "decodes", 0, *listed))
            return int(decode(**kw))

        def aiters(indices: Any, indptr: Any) -> None:
            listed = rows(indices, indptr, self._window)
            if indices is metadata.prefill_swa_ragged_indices:
                lists.append(IndexList("aiter-prefill", "prefills", done, *listed))
            else:
                lists.append(IndexList("aiter-decode", "decodes", 0, *listed))

        forward = SimpleNamespace(attn_metadata={self._layer.swa_cache_layer.prefix: metadata})
        with ExitStack() as stack:
            for name, stand_in in (
                ("get_forward_context", lambda: forward),
                ("dequantize_and_gather_k_cache", gathers),
                ("rocm_sparse_attn_prefill", prefills),
                ("rocm_sparse_attn_decode", decodes),
            ):
                stack.enter_context(mock.patch.object(layers, name, stand_in))
            stack.enter_context(aiter.installed(aiters))
            yield lists


_NORMALS = np.random.default_rng(950).standard_normal(1 << 16, np.float32)


def keys(tokens: IntArray, positions: IntArray) -> Any:
    """K, bfloat16 [tokens, 512], of tokens at positions: the same whenever and in whatever batch it is computed."""
    # Blocks of 64 numbers, which share a scale, are of all magnitudes.
    magnitude = np.exp2((tokens + positions)[:, None] % 5 + np.arange(HEAD) // 64 % 4 - 4.0)
    return _bfloat16(_numbers(tokens, positions, 1)[:, 0] * magnitude)


def queries(tokens: IntArray, positions: IntArray, heads: int) -> Any:
    """Q, bfloat16 [tokens, heads, 512]."""
    return _bfloat16(_numbers(tokens, positions, heads, of=1))


def _numbers(tokens: IntArray, positions: IntArray, count: int, of: int = 0) -> NDArray[np.float32]:
    """[tokens, count, 512] normally distributed."""
    number = (tokens.astype(np.int64) * 1000003 + positions) * 2 + of
    start = (number[:, None] * 64 + np.arange(count)) * 40503 % (len(_NORMALS) - HEAD)
    found: NDArray[np.float32] = _NORMALS[start[..., None] + np.arange(HEAD)]
    return found


def _bfloat16(numbers: NDArray[Any]) -> Any:
    import torch

    return torch.from_numpy(numbers.astype(np.float32)).bfloat16()


class AttendingWorker(Worker):
    """A worker whose steps write K, and read it both ways."""

    def __init__(
        self, config: Any, layout: Any, geometry: Geometry, heads: int, tokens_of: Callable[[str], Sequence[int]]
    ) -> None:
        """``tokens_of``: all tokens of a request that are known when a step of it is computed."""
        super().__init__(config, layout, ask_every=1)
        self._tokens_of = tokens_of
        self._group = [is_window(group.kv_cache_spec) for group in layout.kv_cache_groups].index(True)
        sizes = (config, geometry.num_blocks, geometry.swa_block_size, heads)
        self.ways = {"default": Attention(*sizes, with_aiter=False), "aiter": Attention(*sizes, with_aiter=True)}
        self.attended: list[tuple[Batch, dict[str, Attended]]] = []
        """Each step with tokens, and what came of it, by way."""

    def step(self, scheduled: Scheduled) -> Batch | None:
        """See ``Worker.step``. What attention reads is among the batch's lists."""
        batch = super().step(scheduled)
        if batch is None or not self._consumers:
            return batch
        metadata = self._consumers[0].rocm_metadata()
        names = np.repeat(batch.request_ids, batch.scheduled)
        tokens = np.array([self._tokens_of(name)[at] for name, at in zip(names, batch.positions, strict=True)])
        done = {}
        for name, way in self.ways.items():
            way.insert(keys(tokens, batch.positions), batch.slots[self._group])
            done[name] = way.attend(queries(tokens, batch.positions, way.heads), batch, metadata)
            batch.lists += done[name].lists
        self.attended.append((batch, done))
        return batch


class AttentionEngine(SchedulerEngine):
    """The scheduler engine with such a worker."""

    heads = 2

    def __init__(self) -> None:
        super().__init__()
        self.worker: AttendingWorker | None = None
        """Of the last case."""

    def _worker(self, case: Case, layout: Any, scheduler: Any) -> Worker:
        config = vllm_setup.vllm_config(case)
        self.worker = AttendingWorker(
            config, layout, case.geometry, self.heads, lambda name: scheduler.requests[name].all_token_ids
        )
        return self.worker
