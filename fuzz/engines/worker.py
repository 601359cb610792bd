# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The worker's half of a step, without a model: vLLM's own model runner V2 from scheduler output to attention metadata.

The methods run are vLLM's, unchanged and in ``execute_model``'s order: request states, block tables, batch order,
positions, slot mappings, replay padding (``DeepseekV41ModelState``) and the sliding-window metadata builder. The runner
is made without its constructor, because that one wants a device and a model; it is given just what those methods read.
Relied upon: on one GPU, without LoRA, pooling, pipeline or context parallelism, the methods read nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from invariants.trace import BoolArray, IntArray


@dataclass(slots=True)
class Batch:
    """What the worker made of one scheduler output. Rows are in the worker's order; arrays are copies."""

    request_ids: list[str]
    computed: IntArray
    """int32 [rows], tokens computed before the step, as the device's request state has them."""
    scheduled: IntArray
    """int32 [rows]"""
    prefill: BoolArray
    """bool [rows]"""
    replay_start: IntArray
    """int32 [rows], what the metadata carries."""
    positions: IntArray
    """int64 [tokens]"""
    slots: list[IntArray]
    """[group] int64 [tokens], slot mapping after replay padding."""
    window_table: IntArray
    """int32 [rows, columns], the window group's block table as the metadata carries it."""
    swa_indices: IntArray
    """int32 [tokens, W], paged window indices: decode rows, then prefill rows. -1 fills a row past its length."""
    swa_lens: IntArray
    """int32 [tokens]"""
    gather_lens: IntArray
    """int32 [prefill rows], rows gathered for each prefill request; the last ``len(gather_lens)`` rows of the batch."""


class Disagreement(Exception):
    """The worker's batch is not what the scheduler scheduled; the message says how."""


def require() -> None:
    """Import all of vLLM that a worker is made of. Raises ``ImportError`` if this vLLM does not have it."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        # vLLM's own stand-ins for pinned memory and streams; its CPU worker imports them first, too.
        import vllm.v1.worker.cpu.shm  # noqa: F401
    from vllm.models.deepseek_v41.nvidia.model_state import DeepseekV41ModelState  # noqa: F401
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadataBuilder  # noqa: F401
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner  # noqa: F401


class Worker:
    """Model runner V2 for one case. ``require`` comes first."""

    def __init__(self, config: Any, layout: Any) -> None:
        import torch
        from vllm.models.deepseek_v41.nvidia.model_state import DeepseekV41ModelState
        from vllm.v1.worker.gpu.block_table import BlockTables
        from vllm.v1.worker.gpu.input_batch import InputBuffers
        from vllm.v1.worker.gpu.lora_utils import LoraState
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner
        from vllm.v1.worker.gpu.states import RequestState

        device = torch.device(config.device_config.device_type)
        scheduler = config.scheduler_config
        sizes = {"max_num_reqs": scheduler.max_num_seqs}
        tokens = scheduler.max_num_batched_tokens
        runner: Any = object.__new__(GPUModelRunner)
        runner.device = device
        runner.vllm_config = config
        runner.model_config = config.model_config
        runner.kv_cache_config = layout
        runner.kv_caches = []
        runner.max_num_reqs = scheduler.max_num_seqs
        runner.decode_query_len = 1
        runner.use_pp = False
        # The last pipeline rank samples, which needs a model; the others do all that is wanted here.
        runner.is_last_pp_rank = False
        for absent in (
            "adaptive_verification",
            "encoder_cache",
            "fast_prefill",
            "kv_block_zeroer",
            "pcp_manager",
            "pooling_runner",
            "pp_handler",
            "prompt_logprobs_worker",
            "sampler",
        ):
            setattr(runner, absent, None)
        runner.lora_state = LoraState(**sizes)
        runner.input_buffers = InputBuffers(**sizes, max_num_tokens=tokens, device=device)
        runner.req_states = RequestState(
            **sizes,
            max_model_len=config.model_config.max_model_len,
            max_num_batched_tokens=tokens,
            num_speculative_steps=0,
            vocab_size=config.model_config.get_vocab_size(),
            device=device,
        )
        runner.block_tables = BlockTables(**sizes, **_block_table_sizes(config, layout), device=device)
        model = SimpleNamespace(token_lookback_depth=0, decoder_replay_layers=None)
        runner.model_state = DeepseekV41ModelState(config, model, None, device)
        self._runner = runner
        self._layout = layout
        self._attn_groups = _attention_groups(config, layout, device)

    def step(self, output: Any) -> Batch | None:
        """Take in one SchedulerOutput; None if it schedules nothing."""
        from vllm.config.compilation import CUDAGraphMode
        from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

        runner = self._runner
        runner.finish_requests(output)
        runner.add_requests(output)
        runner.update_requests(output)
        runner.block_tables.apply_staged_writes()
        if output.total_num_scheduled_tokens == 0:
            return None
        state, _ = runner.gather_batch_req_state(output, False)
        descriptor = BatchExecutionDescriptor(
            cg_mode=CUDAGraphMode.NONE, num_tokens=state.num_tokens, num_reqs=len(state.req_ids)
        )
        batch = runner.prepare_inputs(output, state, descriptor, 0)
        tables, slots = runner.prepare_attn(batch)
        metadata = runner.model_state.prepare_attn(
            batch, CUDAGraphMode.NONE, tables, slots, self._attn_groups, self._layout
        )["window"]
        seen = _copy(batch, slots, metadata)
        batched = dict(zip(seen.request_ids, seen.scheduled.tolist(), strict=True))
        if batched != output.num_scheduled_tokens:
            raise Disagreement(f"the worker batches {batched}, the scheduler scheduled {output.num_scheduled_tokens}")
        runner.postprocess_num_computed_tokens(batch)
        return seen


def _copy(batch: Any, slots: Any, metadata: Any) -> Batch:
    """The builders reuse their buffers from step to step, so everything kept is copied."""
    indices = [_array(metadata.decode_swa_indices)[:, 0]]
    lens = [_array(metadata.decode_swa_lens)]
    if metadata.num_prefill_tokens:
        indices.append(_array(metadata.prefill_swa_indices)[:, 0])
        lens.append(_array(metadata.prefill_swa_lens))
    gather_lens = metadata.prefill_gather_lens
    rows, tokens = batch.num_reqs, batch.num_tokens
    scheduled = batch.num_scheduled_tokens.astype(np.int32)
    return Batch(
        request_ids=list(batch.req_ids),
        computed=_array(batch.seq_lens)[:rows] - scheduled,
        scheduled=scheduled,
        prefill=batch.is_prefilling_np.copy(),
        replay_start=_array(metadata.replay_start)[:rows],
        positions=_array(batch.positions)[:tokens],
        slots=list(_array(slots)[:, :tokens]),
        window_table=_array(metadata.block_table)[:rows],
        swa_indices=np.concatenate(indices),
        swa_lens=np.concatenate(lens),
        gather_lens=np.zeros(0, np.int32) if gather_lens is None else _array(gather_lens),
    )


def _array(tensor: Any) -> Any:
    return tensor.cpu().numpy().copy()


def _block_table_sizes(config: Any, layout: Any) -> dict[str, Any]:
    """Arguments of BlockTables, as the runner's ``initialize_kv_cache`` derives them from the specs."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec
    from vllm.v1.worker.block_table import get_block_table_width

    specs = [group.kv_cache_spec for group in layout.kv_cache_groups]
    max_model_len = config.model_config.max_model_len
    return {
        "block_sizes": [spec.block_size for spec in specs],
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_num_blocks_per_group": [
            get_block_table_width(
                spec.max_num_blocks_per_req(config, max_model_len),
                spec.block_size,
                token_alignment=spec.block_table_token_alignment,
            )
            for spec in specs
        ],
        "slot_mapping_enabled": [spec.uses_slot_mapping for spec in specs],
        "dcp_sharded": [spec.dcp_sharded for spec in specs],
        "sliding_window_reach": [
            spec.num_retained_tokens if isinstance(spec, SlidingWindowSpec) else 0 for spec in specs
        ],
    }


def _attention_groups(config: Any, layout: Any, device: Any) -> list[list[Any]]:
    """The window group with vLLM's shared builder; the cacheable group needs none to be followed."""
    from collections import defaultdict

    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWABackend, DeepseekSparseSWAMetadataBuilder
    from vllm.v1.worker.utils import AttentionGroup

    class Builder(DeepseekSparseSWAMetadataBuilder):  # type: ignore[misc]
        """Plans no FlashMLA tiles: that is a CUDA extension, and reads nothing that is judged here."""

        def build_tile_scheduler(self, num_decode_tokens: int) -> Any:  # noqa: ARG002
            return defaultdict(lambda: None)

    groups: list[list[Any]] = []
    for index, group in enumerate(layout.kv_cache_groups):
        if "window" not in group.layer_names:
            groups.append([])
            continue
        attention = AttentionGroup(DeepseekSparseSWABackend, ["window"], group.kv_cache_spec, index)
        attention.metadata_builders.append(Builder(group.kv_cache_spec, ["window"], config, device))
        groups.append([attention])
    return groups
