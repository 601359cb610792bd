# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The probe's two KV caches: vLLM's own sliding-window cache, and a compressed cache with vLLM's own metadata builder.

A cell holds WIDTH float32 numbers, as pairs of bfloat16, which is what vLLM's cache takes. Relied upon: vLLM makes the
pages of all groups the same size, by changing block sizes if it has to. Cells are widened so that it does not have to.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.models.deepseek_v41.sparse_mla import DeepseekV4SparseMLAMetadataBuilder, DeepseekV41SparseSWAMetadataBuilder
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWABackend, DeepseekV4SWACache
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec

from invariants.weights import WIDTH

CELL = 2 * WIDTH
"""bfloat16 numbers that a cell needs."""
ALIGNMENT = 512
"""Bytes, of a page: what ``DeepseekV4SWACache`` asks for."""


class WindowBuilder(DeepseekV41SparseSWAMetadataBuilder):  # type: ignore[misc]
    """Plans no FlashMLA tiles: that is a CUDA extension, and nothing of ours reads its plan."""

    def build_tile_scheduler(self, num_decode_tokens: int) -> Any:  # noqa: ARG002
        """See the class."""
        return defaultdict(lambda: None)


class WindowBackend(DeepseekSparseSWABackend):  # type: ignore[misc]
    """vLLM's backend of the window cache, for blocks of any size."""

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """See ``WindowBuilder``."""
        return WindowBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:  # noqa: ARG004
        """Any: no attention kernel runs on it."""
        return [MultipleOf(1)]


class CompressedBackend(AttentionBackend):  # type: ignore[misc]
    """Describes the compressed cache to vLLM."""

    @staticmethod
    def get_name() -> str:
        """Of the backend."""
        return "REPLAY_PROBE_COMPRESSED"

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """DeepSeek-V4.1's own: compressed slots, and none for replayed tokens."""
        builder: type[Any] = DeepseekV4SparseMLAMetadataBuilder
        return builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:  # noqa: ARG004
        """Any: no attention kernel runs on it."""
        return [MultipleOf(1)]


class CompressedCache(nn.Module, AttentionLayerBase):  # type: ignore[misc]
    """A prefix-cacheable cache with one state for every ``ratio`` tokens."""

    def __init__(self, prefix: str, block_size: int, ratio: int, cells: int) -> None:
        super().__init__()
        self.prefix, self.block_size, self.ratio, self.cells = prefix, block_size, ratio, cells
        self.kv_cache = torch.tensor([])
        get_current_vllm_config().compilation_config.static_forward_context[prefix] = self

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """[blocks, 1, states a block, cells] from vLLM."""
        self.kv_cache = kv_cache.squeeze(1)

    def get_attn_backend(self) -> type[Any]:
        """See ``CompressedBackend``."""
        return CompressedBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:  # noqa: ARG002
        """As DeepSeek-V4.1's compressed cache, unquantised."""
        return MLAAttentionSpec(
            block_size=self.block_size,
            num_kv_heads=1,
            head_size=self.cells,
            dtype=torch.bfloat16,
            cache_dtype_str="auto",
            model_version="deepseek_v4",
            tokens_per_state=self.ratio,
            alignment=ALIGNMENT,
        )


def make_caches(prefix: str, config: VllmConfig, sizes: Any) -> tuple[DeepseekV4SWACache, CompressedCache]:
    """A layer's window cache and compressed cache. ``sizes``: see ``fuzz.probe.model.Sizes``."""
    block_size = sizes.block_size
    states = block_size // sizes.compress_ratio
    rows = math.lcm(states, sizes.swa_block_size)
    window = DeepseekV4SWACache(
        CELL * (rows // sizes.swa_block_size),
        sizes.window,
        torch.bfloat16,
        f"{prefix}.window",
        config.cache_config,
        block_size=sizes.swa_block_size,
        bounded_replay=config.cache_config.swa_bounded_replay,
        backend_cls=WindowBackend,
    )
    return window, CompressedCache(f"{prefix}.compressed", block_size, sizes.compress_ratio, CELL * (rows // states))


def cells(cache: Tensor) -> Tensor:
    """float32 [blocks, rows a block, WIDTH]: the cells of a cache as vLLM bound it, for reading and writing."""
    return cache.view(torch.float32)[..., :WIDTH]


def store(cache: Tensor, slots: Tensor, values: Tensor) -> None:
    """Write values float32 [tokens, WIDTH] to int64 slots [tokens] of a cache; a negative slot writes nothing."""
    there = slots >= 0
    if not there.all():
        slots, values = slots[there], values[there]
    rows = cache.shape[1]
    cells(cache)[slots // rows, slots % rows] = values
