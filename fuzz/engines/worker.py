# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The worker's half of a step, without a model: vLLM's own model runner V2 from scheduler output to attention metadata.

The methods run are vLLM's, unchanged and in ``execute_model``'s order: request states, block tables, batch order,
positions, slot mappings, replay padding (``DeepseekV41ModelState``) and the sliding-window metadata builder. The runner
is made without its constructor, because that one wants a device and a model; it is given just what those methods read.
Relied upon: on one GPU, without LoRA, pooling, pipeline or context parallelism, the methods read nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

from fuzz import triton_cpu
from fuzz.engines import rocm
from fuzz.engines.config import is_window
from fuzz.engines.consumers import Consumers
from fuzz.engines.device import Sample
from fuzz.engines.drive import Scheduled
from fuzz.probe.batch import Batch, Padding, copy_batch, copy_padding


class Disagreement(Exception):
    """The worker's batch is not what the scheduler scheduled; the message says how."""


def require() -> None:
    """Import all of vLLM that a worker is made of. Raises ``ImportError`` if this vLLM does not have it."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        # vLLM's own stand-ins for pinned memory and streams; its CPU worker imports them first, too.
        import vllm.v1.worker.cpu.shm  # noqa: F401

        rocm.require()
    from vllm.models.deepseek_v41.nvidia.model_state import DeepseekV41ModelState  # noqa: F401
    from vllm.models.deepseek_v41.sparse_mla import DeepseekV41SparseSWAMetadataBuilder  # noqa: F401
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner  # noqa: F401


class Worker:
    """Model runner V2 for one case. ``require`` comes first.

    ``ask_every``: steps without a replay in which all consumers are asked, one in so many; 0: never (``consumers.py``).
    ``padding``: rows that a batch of decodes is filled up with, as for a graph of that size.
    """

    def __init__(self, config: Any, layout: Any, ask_every: int, padding: int = 0) -> None:
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
        runner.decode_query_len = 1 + config.num_speculative_tokens
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
            num_speculative_steps=config.num_speculative_tokens,
            vocab_size=config.model_config.get_vocab_size(),
            device=device,
        )
        runner.block_tables = BlockTables(**sizes, **_block_table_sizes(config, layout), device=device)
        model = SimpleNamespace(token_lookback_depth=0, decoder_replay_layers=None)
        runner.model_state = DeepseekV41ModelState(config, model, None, device)
        self._runner = runner
        self.tables = runner.block_tables
        self._layout = layout
        self._attn_groups = _attention_groups(config, layout, device)
        self._windows = [attention.layer_names[0] for group in self._attn_groups for attention in group]
        """A layer of each window group."""
        self._consumers = _consumers(config, self._attn_groups, device, ask_every) if ask_every else []
        self._padding = padding
        self._most = scheduler.max_num_seqs, tokens

    def step(self, scheduled: Scheduled) -> Batch | None:
        """Take in one step; None if it schedules nothing."""
        from vllm.config.compilation import CUDAGraphMode
        from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

        runner, output = self._runner, scheduled.output
        runner.finish_requests(output)
        runner.add_requests(output)
        runner.update_requests(output)
        runner.block_tables.apply_staged_writes()
        if output.total_num_scheduled_tokens == 0:
            return None
        state, _ = runner.gather_batch_req_state(output, False)
        rows, tokens = len(state.req_ids), state.num_tokens
        filled = min(self._padding, self._most[0] - rows, self._most[1] - tokens) if not state.has_prefill else 0
        mode = CUDAGraphMode.FULL if filled else CUDAGraphMode.NONE
        descriptor = BatchExecutionDescriptor(cg_mode=mode, num_tokens=tokens + filled, num_reqs=rows + filled)
        batch = runner.prepare_inputs(output, state, descriptor, 0)
        tables, slots = runner.prepare_attn(batch)
        made = runner.model_state.prepare_attn(batch, mode, tables, slots, self._attn_groups, self._layout)
        first, *further = (made[name] for name in self._windows)
        seen = copy_batch(batch, slots, first, further=further)
        # There are none where they are never asked.
        for consumers, part, metadata in zip(self._consumers, (seen, *seen.others), (first, *further), strict=False):
            part.lists = [read.cut(tokens) for read in consumers.lists(metadata)]
        batched = dict(zip(seen.request_ids, seen.scheduled.tolist(), strict=True))
        if batched != output.num_scheduled_tokens:
            raise Disagreement(f"the worker batches {batched}, the scheduler scheduled {output.num_scheduled_tokens}")
        self._settle(batch, scheduled.samples)
        return seen

    def _settle(self, batch: Any, samples: dict[str, Sample]) -> None:
        """Count what is computed; with drafts as the last pipeline rank does, which knows how many are rejected."""
        import torch
        from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected

        runner = self._runner
        if not runner.vllm_config.num_speculative_tokens:
            runner.postprocess_num_computed_tokens(batch)
            return
        sampled = torch.tensor([1 + samples[name].accepted for name in batch.req_ids], dtype=torch.int32)
        tokens = torch.zeros((len(batch.req_ids), runner.decode_query_len), dtype=torch.int64)
        for row, name in enumerate(batch.req_ids):
            tokens[row, : len(samples[name].tokens)] = torch.tensor(samples[name].tokens)
        prefill_len = runner.req_states.prefill_len.gpu
        counts = get_num_sampled_and_rejected(
            sampled.to(runner.device), batch.seq_lens, batch.cu_num_logits, batch.idx_mapping, prefill_len
        )
        starts = batch.query_start_loc
        runner.postprocess_sampled(batch.idx_mapping, tokens.to(runner.device), *counts, starts)

    def idle(self) -> Padding:
        """What a data-parallel rank without requests writes and reads when the others have a batch."""
        from vllm.config.compilation import CUDAGraphMode
        from vllm.v1.worker.gpu.input_batch import InputBatch

        runner, rows = self._runner, min(2, *self._most)
        batch = InputBatch.make_dummy(rows, rows, runner.input_buffers)
        tables, slots = runner.prepare_dummy_attn(batch)
        made = runner.model_state.prepare_attn(
            batch, CUDAGraphMode.NONE, tables, slots, self._attn_groups, self._layout
        )
        return copy_padding(slots, [made[name] for name in self._windows], 0)


def checked(tables: Any) -> AbstractContextManager[object]:
    """Compiled kernels inside are checked (``triton_cpu.checking``), with the tensors of a runner's BlockTables known,
    which kernels find by their address. Nothing where no kernel is compiled."""
    return _checking(tables) if triton_cpu.compiles() else nullcontext()


@contextmanager
def _checking(tables: Any) -> Iterator[None]:
    with triton_cpu.checking() as checker:
        for group, (staged, batch) in enumerate(zip(tables.block_tables, tables.input_block_tables, strict=True)):
            checker.know(f"block table {group}", staged.gpu)
            checker.know(f"the batch's block table {group}", batch)
        yield


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
    """The window groups with vLLM's shared builder; the cacheable group needs none to be followed."""
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWABackend
    from vllm.v1.worker.utils import AttentionGroup

    from fuzz.probe.caches import WindowBuilder

    groups: list[list[Any]] = []
    for index, group in enumerate(layout.kv_cache_groups):
        if not is_window(group.kv_cache_spec):
            groups.append([])
            continue
        attention = AttentionGroup(DeepseekSparseSWABackend, group.layer_names, group.kv_cache_spec, index)
        attention.metadata_builders.append(WindowBuilder(group.kv_cache_spec, group.layer_names, config, device))
        groups.append([attention])
    return groups


def _consumers(config: Any, groups: list[list[Any]], device: Any, every: int) -> list[Consumers]:
    """Of each window group."""
    window = config.model_config.hf_config.sliding_window
    made = []
    for attention in (attention for group in groups for attention in group):
        rocm_builders = rocm.RocmBuilders(attention.kv_cache_spec, attention.layer_names, config, device)
        made.append(Consumers(attention.metadata_builders[0], rocm_builders, window, every))
    return made
