# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The kernels on vLLM's replay path, from slot mappings to attention, each with a launch at DeepSeek-V4.1's sizes.

For the benchmark, and for the test that none of them falls back. Import only after ``fuzz.triton_cpu.prepare``.
"""

from __future__ import annotations

from collections.abc import Callable

from fuzz.triton_cpu.replay_path import attention, cache, indices
from fuzz.triton_cpu.replay_path.batch import MXFP8, NVFP4, V4, Launch

KERNELS: dict[str, Callable[[int], Launch]] = {
    "slot_mappings": indices.slot_mappings,
    "block_tables": indices.block_tables,
    "replay_padding": indices.replay_padding,
    "replay_batch": indices.replay_batch,
    "lookback": indices.lookback,
    "swa_indices": indices.swa_indices,
    "dspark_indices": indices.dspark_indices,
    "prefill_gather_lens": indices.prefill_gather_lens,
    "combine": indices.combine,
    "flashinfer_mixed": indices.flashinfer_mixed,
    "decode_metadata": indices.decode_metadata,
    "ragged": indices.ragged,
    "k_insert_v4": cache.insert(V4),
    "k_insert_mxfp8": cache.insert(MXFP8),
    "k_gather_v4": cache.gather("_dequantize_and_gather_k_kernel", V4),
    "k_gather_v4_one_pass": cache.gather("_dequantize_and_gather_k_one_pass_kernel", V4),
    "k_gather_mxfp8": cache.gather("_dequantize_and_gather_k_mxfp8_kernel", MXFP8),
    "k_gather_nvfp4": cache.gather("_dequantize_and_gather_k_nvfp4_kernel", NVFP4),
    "attention_prefill": attention.prefill,
    "attention_decode": attention.decode,
    "attention_decode_gfx942": attention.decode_gfx942,
    "attention_decode_gfx950": attention.decode_gfx950,
    "attention_decode_bf16": attention.decode_bf16,
}
"""Name to what builds a launch of a number of programs (of rows, where a kernel runs as one program)."""
