# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Where things are in vLLM: looked up by name, so that what a vLLM does not have is a reason and not an error."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

SWA: Final = "vllm.v1.attention.backends.mla.sparse_swa"
CACHE: Final = "vllm.models.deepseek_v41.common.ops.cache_utils"
STATE: Final = "vllm.models.deepseek_v41.nvidia.model_state"
TABLE: Final = "vllm.v1.worker.gpu.block_table"
ROCM: Final = "vllm.v1.attention.ops.rocm_aiter_mla_sparse"
ROCM_V41: Final = "vllm.models.deepseek_v41.amd.rocm"


class Absent(Exception):
    """This vLLM does not have it; the message says what."""


def find(module: str, name: str) -> Any:
    """Something of vLLM, by its dotted name in a module. Raises ``Absent``."""
    try:
        found = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise Absent(f"vLLM has no {module}.{name}: {error}") from error
    return found
