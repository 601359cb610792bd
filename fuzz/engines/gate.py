# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Asks vLLM's attention layers of DeepSeek-V4.1 whether they replay, on each architecture (CONTRACT 3).

The layer's own constructor decides (``layer.py``), and the KV-cache spec of the ``DeepseekV4SWACache`` that it makes is
the answer. Relied upon: the decision looks at the config, the environment and the current platform only.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, Literal
from unittest import mock

from fuzz.engines.base import Unavailable
from fuzz.engines.config import base_config
from fuzz.engines.layer import make_layer
from fuzz.triton_cpu.rocm import rocm
from invariants.trace import Architecture, Gate

WINDOW = 128
_GPUS: dict[Architecture, Literal["gfx950", "gfx942"]] = {"CDNA4": "gfx950", "CDNA3": "gfx942"}


def gates() -> list[Gate]:
    """Every architecture in every circumstance. Raises ``Unavailable`` where vLLM runs on a GPU, which then is the one
    that it would answer for, and ``ImportError`` or ``AttributeError`` where its layers are not as described."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise Unavailable("layers of other architectures are made where vLLM runs on a CPU only")
    return [gate for architecture in ("other", *_GPUS) for gate in _gates(architecture)]


def _gates(architecture: Architecture) -> Iterator[Gate]:
    with rocm(_GPUS[architecture]) if architecture in _GPUS else nullcontext():
        for asked in (True, False):
            yield _ask(Gate(architecture, asked=asked, window=WINDOW))
        yield _ask(Gate(architecture, asked=True, window=WINDOW, runner=1))
        yield _ask(Gate(architecture, asked=True, window=WINDOW, context_parallel=2, prefix_caching=False))


def _ask(gate: Gate) -> Gate:
    """The gate with what the layer answers."""
    config: Any = copy.copy(base_config())
    for part in ("cache_config", "parallel_config"):
        setattr(config, part, copy.copy(getattr(config, part)))
    config.cache_config.swa_bounded_replay = gate.asked
    config.cache_config.enable_prefix_caching = gate.prefix_caching
    config.parallel_config.prefill_context_parallel_size = gate.context_parallel
    # Not in the environment itself, which vLLM reads but once after an engine has run.
    with mock.patch("vllm.envs.VLLM_USE_V2_MODEL_RUNNER", gate.runner == 2):
        spec = make_layer(config, gate.window).swa_cache_layer.get_kv_cache_spec(config)
    gate.prefix_cacheable, gate.replay_tokens = spec.prefix_cacheable, spec.prefix_replay_tokens
    return gate
