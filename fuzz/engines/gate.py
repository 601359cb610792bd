# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Asks vLLM's attention layers of DeepSeek-V4.1 whether they replay, on each architecture (CONTRACT 3).

The layer's own constructor decides, and the KV-cache spec of the ``DeepseekV4SWACache`` that it makes is the answer.
What it is made of beside that, projections, norms and CUDA events, is left out: nothing of it is ever run. Relied upon:
the decision looks at the config, the environment and the current platform only.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

from fuzz.engines.base import Unavailable
from fuzz.engines.config import base_config
from fuzz.triton_cpu.rocm import rocm
from invariants.trace import Architecture, Gate

WINDOW = 128
_GPUS: dict[Architecture, Literal["gfx950", "gfx942"]] = {"CDNA4": "gfx950", "CDNA3": "gfx942"}
_HF_CONFIG = {
    "hidden_size": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 1,
    "q_lora_rank": 64,
    "o_lora_rank": 64,
    "o_groups": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "sliding_window": WINDOW,
}
"""A layer without a compressed cache: whether the window is replayed does not depend on that."""
_LEFT_OUT = (
    "MergedColumnParallelLinear",
    "ColumnParallelLinear",
    "RowParallelLinear",
    "RMSNorm",
    "build_deepseek_v4_rope",
)


def gates() -> list[Gate]:
    """Every architecture in every circumstance. Raises ``Unavailable`` where vLLM runs on a GPU, which then is the one
    that it would answer for, and ``ImportError`` or ``AttributeError`` where its layers are not as described."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise Unavailable("layers of other architectures are made where vLLM runs on a CPU only")
    return [gate for architecture in ("other", *_GPUS) for gate in _gates(architecture)]


def _gates(architecture: Architecture) -> Iterator[Gate]:
    with rocm(_GPUS[architecture]) if architecture in _GPUS else nullcontext():
        layer = _layer_class(architecture)
        for asked in (True, False):
            yield _ask(layer, Gate(architecture, asked=asked, window=WINDOW))
        yield _ask(layer, Gate(architecture, asked=True, window=WINDOW, runner=1))
        yield _ask(layer, Gate(architecture, asked=True, window=WINDOW, context_parallel=2, prefix_caching=False))


def _layer_class(architecture: Architecture) -> type[Any]:
    if architecture in _GPUS:
        from vllm.models.deepseek_v41.amd.rocm import DeepseekV41ROCMAiterMLAAttention

        rocm_layer: type[Any] = DeepseekV41ROCMAiterMLAAttention
        return rocm_layer
    from vllm.models.deepseek_v41.attention import DeepseekV4Attention
    from vllm.models.deepseek_v41.nvidia.flashmla import DeepseekV4FlashMLAAttention

    # The rest of its own constructor wants a CUDA device.
    return type("Layer", (DeepseekV4FlashMLAAttention,), {"__init__": DeepseekV4Attention.__init__})


def _ask(layer: type[Any], gate: Gate) -> Gate:
    """The gate with what the layer answers."""
    from torch import nn
    from vllm.config import set_current_vllm_config
    from vllm.models.deepseek_v41 import attention

    class Part(nn.Module):  # type: ignore[misc]
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()

    config = copy.copy(base_config())
    for part in ("cache_config", "parallel_config", "model_config", "compilation_config"):
        setattr(config, part, copy.copy(getattr(config, part)))
    config.cache_config.swa_bounded_replay = gate.asked
    config.cache_config.enable_prefix_caching = gate.prefix_caching
    config.parallel_config.prefill_context_parallel_size = gate.context_parallel
    config.model_config.hf_config = SimpleNamespace(**_HF_CONFIG)
    config.compilation_config.static_forward_context = {}
    with ExitStack() as stack:
        for name in _LEFT_OUT:
            stack.enter_context(mock.patch.object(attention, name, Part))
        stack.enter_context(mock.patch.object(attention, "get_tensor_model_parallel_world_size", return_value=1))
        stack.enter_context(mock.patch("torch.cuda.Event", Part))
        stack.enter_context(mock.patch.dict("os.environ", {"VLLM_USE_V2_MODEL_RUNNER": str(int(gate.runner == 2))}))
        stack.enter_context(set_current_vllm_config(config))
        spec = layer(config, "model.layers.0.attn").swa_cache_layer.get_kv_cache_spec(config)
    gate.prefix_cacheable, gate.replay_tokens = spec.prefix_cacheable, spec.prefix_replay_tokens
    return gate
