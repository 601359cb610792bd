# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""vLLM's own attention layer of DeepSeek-V4.1 for the current platform, without weights.

Its constructor runs as it is, and so does its attention; projections, norms and CUDA events are left out, and nothing
that needs them is ever run. It is a layer without a compressed cache, which reads window KV alone.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

HEAD, ROPE = 512, 64
"""Numbers a head has, and how many of them, the last, are rotated."""
_LEFT_OUT = (
    "MergedColumnParallelLinear",
    "ColumnParallelLinear",
    "RowParallelLinear",
    "RMSNorm",
    "build_deepseek_v4_rope",
)


def make_layer(config: Any, window: int, heads: int = 16) -> Any:
    """The layer for a VllmConfig; as on ROCm inside ``triton_cpu.rocm``, else as on a GPU that is not AMD's.

    Raises ``ImportError`` or ``AttributeError`` where this vLLM has no such layer.
    """
    from torch import nn
    from vllm.config import set_current_vllm_config
    from vllm.models.deepseek_v41 import attention

    class Part(nn.Module):  # type: ignore[misc]
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()

    config = copy.copy(config)
    config.model_config = copy.copy(config.model_config)
    config.model_config.hf_config = _hf_config(window, heads)
    config.compilation_config = copy.copy(config.compilation_config)
    config.compilation_config.static_forward_context = {}
    with ExitStack() as stack:
        for name in _LEFT_OUT:
            stack.enter_context(mock.patch.object(attention, name, Part))
        stack.enter_context(mock.patch.object(attention, "get_tensor_model_parallel_world_size", return_value=1))
        stack.enter_context(mock.patch("torch.cuda.Event", Part))
        stack.enter_context(set_current_vllm_config(config))
        return _layer_class()(config, "model.layers.0.attn")


def _hf_config(window: int, heads: int) -> SimpleNamespace:
    return SimpleNamespace(
        hidden_size=64,
        num_attention_heads=heads,
        num_hidden_layers=1,
        q_lora_rank=64,
        o_lora_rank=64,
        o_groups=1,
        head_dim=HEAD,
        qk_rope_head_dim=ROPE,
        rms_norm_eps=1e-6,
        max_position_embeddings=1 << 20,
        sliding_window=window,
    )


def _layer_class() -> type[Any]:
    from vllm.platforms import current_platform

    if current_platform.is_rocm():
        from vllm.models.deepseek_v41.amd.rocm import DeepseekV41ROCMAiterMLAAttention

        rocm_layer: type[Any] = DeepseekV41ROCMAiterMLAAttention
        return rocm_layer
    from vllm.models.deepseek_v41.attention import DeepseekV4Attention
    from vllm.models.deepseek_v41.nvidia.flashmla import DeepseekV4FlashMLAAttention

    # The rest of its own constructor wants a CUDA device.
    return type("Layer", (DeepseekV4FlashMLAAttention,), {"__init__": DeepseekV4Attention.__init__})
