# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The window metadata builders that vLLM has on ROCm: gfx950's, and beside it gfx942's one-launch build of decodes.

Relied upon: they decide once, when they are made, whether AITER reads the caches in place; here it is taken to do so.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fuzz.triton_cpu.rocm import rocm


def require() -> None:
    """Import what the builders are. Raises ``ImportError`` where this vLLM does not have it."""
    with rocm("gfx950"):
        from vllm.models.deepseek_v41.amd.rocm import DeepseekV41ROCMAiterSparseSWAMetadataBuilder  # noqa: F401
    with rocm("gfx942"):
        from vllm.models.deepseek_v41.amd.ops import record_monokernel, swa_decode_meta  # noqa: F401


class RocmBuilders:
    """For one window group. ``require`` comes first."""

    def __init__(self, spec: Any, layers: list[str], config: Any, device: Any) -> None:
        with rocm("gfx950"):
            from vllm.models.deepseek_v41.amd.rocm import DeepseekV41ROCMAiterSparseSWAMetadataBuilder as Builder950

            self._gfx950 = Builder950(spec, layers, config, device)
            self._gfx950._use_aiter_sparse_mla = True
        with rocm("gfx942"):
            from vllm.models.deepseek_v41.amd import ops
            from vllm.models.deepseek_v41.amd.rocm import DeepseekV41ROCMAiterSparseSWAMetadataBuilder as Builder942

            # Has buffers of its own.
            self._gfx942 = Builder942(spec, layers, config, device)
            ops.record_monokernel(SimpleNamespace(kernel_config=SimpleNamespace(monokernel=True)))

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """What the shared builder's ``build`` makes, and the ragged lists."""
        with rocm("gfx950"):
            return self._gfx950.build(*args, **kwargs)

    def build_fused(self, common: Any, replay_start: Any) -> Any:
        """The same from one launch, for a batch of a few decodes; None for any other."""
        with rocm("gfx942"):
            from vllm.models.deepseek_v41.amd.ops import swa_decode_meta
            from vllm.models.deepseek_v41.amd.rocm import DeepseekV41ROCMAiterSparseSWAMetadata as Metadata

            return swa_decode_meta.build(self._gfx942, 0, common, False, replay_start, Metadata)
