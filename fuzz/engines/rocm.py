# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The window metadata builder as vLLM has it on ROCm: gfx950's, and beside it gfx942's one-launch build of decodes.

It is a drop-in for the shared builder and makes all that one does, plus the ragged lists. Relied upon: the ROCm
builders decide once, when they are made, whether AITER reads the caches in place; here it is taken to do so.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

from fuzz.triton_cpu.rocm import rocm


@cache
def builder_class() -> type[Any]:
    """vLLM's builder for gfx950. Raises ``ImportError`` or ``AttributeError`` where this vLLM has none."""
    with rocm("gfx950"):
        from vllm.models.deepseek_v41.amd import rocm as gfx950
    with rocm("gfx942"):
        from vllm.models.deepseek_v41.amd import ops
        from vllm.models.deepseek_v41.amd import rocm as gfx942
        from vllm.models.deepseek_v41.amd.ops import swa_decode_meta

    class Builder(gfx950.DeepseekV41ROCMAiterSparseSWAMetadataBuilder):  # type: ignore[misc]
        """Its metadata has one more field, ``fused``: gfx942's metadata of a batch of decodes, else None."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with rocm("gfx950"):
                super().__init__(*args, **kwargs)
            self._use_aiter_sparse_mla = True
            with rocm("gfx942"):
                # With buffers of its own.
                self._gfx942 = gfx942.DeepseekV41ROCMAiterSparseSWAMetadataBuilder(*args, **kwargs)
                ops.record_monokernel(SimpleNamespace(kernel_config=SimpleNamespace(monokernel=True)))

        def build(
            self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False, replay_start: Any = None
        ) -> Any:
            """See the class."""
            batch = (common_prefix_len, common_attn_metadata, fast_build, replay_start)
            with rocm("gfx950"):
                metadata = super().build(*batch)
            metadata.fused = None
            if not metadata.num_prefills:
                with rocm("gfx942"):
                    kind = gfx942.DeepseekV41ROCMAiterSparseSWAMetadata
                    metadata.fused = swa_decode_meta.build(self._gfx942, *batch, kind)
            return metadata

    return Builder
