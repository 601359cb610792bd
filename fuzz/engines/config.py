# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""A VllmConfig and a KV-cache layout for a geometry, without a checkpoint.

Relied upon: vLLM reads no weights before a model is loaded, so a config.json of a few lines is enough for everything
from the scheduler down to the metadata builders. One VllmConfig is made a process (it takes about a second) and then
given the sizes of each case; nothing that outlives a case may keep a reference to it.
"""

from __future__ import annotations

import atexit
import gc
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import UNSET

from fuzz.case import FIRST_TOKEN, TOKENS, Case
from fuzz.engines.base import Refused, Unavailable
from invariants.trace import Geometry, Group

HEAD_DIM = 512
"""Of DeepSeek-V4.1. The vLLM block-size rules look at it; no KV byte is ever allocated."""

_HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": FIRST_TOKEN + TOKENS,
    "max_position_embeddings": 1 << 20,
    "torch_dtype": "float32",
}


@cache
def base_config() -> Any:
    """The process's VllmConfig, before any case. Raises ``ImportError`` or ``Unavailable`` if vLLM lacks something."""
    from vllm.engine.arg_utils import EngineArgs

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_HF_CONFIG))
        config = EngineArgs(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            enable_prefix_caching=True,
            async_scheduling=False,
            disable_log_stats=False,
            max_model_len=1 << 20,
            max_num_batched_tokens=2048,
            max_num_seqs=64,
        ).create_engine_config()
    if not getattr(config, "use_v2_model_runner", False):
        raise Unavailable("this vLLM does not run model runner V2 here, and bounded replay needs it")
    # As EngineCore does once it is up: the million objects of the imports are not looked at by every collection.
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or nanobind, which Triton is built with, takes them for leaks
    return config


def vllm_config(case: Case) -> Any:
    """The process's VllmConfig, set to the sizes of the case. Raises ``Refused`` where vLLM would not start so."""
    config = base_config()
    geometry = case.geometry
    scheduler = config.scheduler_config
    scheduler.max_num_batched_tokens = geometry.max_num_batched_tokens
    scheduler.max_num_scheduled_tokens = geometry.max_num_batched_tokens
    scheduler.max_num_seqs = geometry.max_num_seqs
    scheduler.long_prefill_token_threshold = geometry.long_prefill_token_threshold
    by_priority = any(request.priority is not UNSET for request in case.requests)
    scheduler.policy = "priority" if by_priority else "fcfs"
    config.model_config.max_model_len = scheduler.max_model_len = case.max_model_len
    config.model_config.hf_config.sliding_window = geometry.window
    config.cache_config.block_size = geometry.block_size
    config.cache_config.num_gpu_blocks = geometry.num_blocks
    config.cache_config.swa_bounded_replay = geometry.replay
    config.kv_transfer_config = _transfer_config() if case.has_loads else None
    if case.has_loads and (geometry.async_scheduling is not UNSET or geometry.drafts is not UNSET):
        raise Refused("external loads with steps in flight or drafts: when a load is over is not followed there")
    if geometry.drafts is not UNSET and geometry.drafts >= geometry.max_num_batched_tokens:
        raise Refused(f"a step of {geometry.max_num_batched_tokens} tokens has no room for {geometry.drafts} drafts")
    scheduler.async_scheduling = geometry.async_scheduling is not UNSET
    config.speculative_config = None if geometry.drafts is UNSET else _speculation(config, geometry)
    config.cache_config.prefix_cache_retention_interval = 0 if geometry.retention is UNSET else geometry.retention
    try:
        scheduler.verify_max_model_len(case.max_model_len)
    except ValueError as error:
        raise Refused(one_line(error)) from error
    return config


def _transfer_config() -> Any:
    """``connector.py`` as vLLM's KV connector. A load that fails is computed instead."""
    from vllm.config.kv_transfer import KVTransferConfig

    return KVTransferConfig(
        kv_connector="Connector",
        kv_connector_module_path="fuzz.engines.connector",
        kv_role="kv_consumer",
        kv_load_failure_policy="recompute",
    )


def refuse_flight(geometry: Geometry, engine: str) -> None:
    """For an engine that knows nothing of steps in flight and drafts. Raises ``Refused``."""
    if geometry.async_scheduling is not UNSET or geometry.drafts is not UNSET:
        raise Refused(f"engine {engine} has no async scheduling and no drafts")


def _speculation(config: Any, geometry: Geometry) -> Any:
    """vLLM's SpeculativeConfig, without a drafter: its method says which slots and hashes the scheduler keeps."""
    from vllm.config import SpeculativeConfig

    speculation = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=geometry.drafts,
        prompt_lookup_min=1,
        prompt_lookup_max=1,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    if geometry.drafter is not UNSET:
        # Asked for at once, it would look for the drafter's checkpoint.
        speculation.method = geometry.drafter
    return speculation


def accepts(config: Any, prompt: int) -> bool:
    """Whether vLLM's front-end takes a prompt of so many tokens."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    processor: Any = object.__new__(InputProcessor)
    processor.model_config = config.model_config
    processor.supports_mm_inputs = processor.skip_prompt_length_check = False
    try:
        processor._validate_prompt_len(prompt, "decoder")
    except VLLMValidationError:
        return False
    return True


def versions(kernels: str) -> dict[str, str]:
    """Of vLLM, torch and Triton, and what executes the kernels."""
    import torch
    import triton
    import vllm

    return {
        "vllm": str(vllm.__version__),
        "torch": str(torch.__version__),
        "triton": str(triton.__version__),
        "kernels": kernels,
    }


def is_window(spec: Any) -> bool:
    """Whether a KV-cache spec is that of a sliding-window group."""
    return bool(getattr(spec, "sliding_window", None))


def one_line(error: Exception) -> str:
    """What an exception says, for a message."""
    return " ".join(str(error).split()) or type(error).__name__


def kv_cache_config(config: Any, geometry: Geometry) -> Any:
    """vLLM's KVCacheConfig with the two kinds of group: one cacheable group, then the window groups."""
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec, SlidingWindowMLASpec

    sizes: dict[str, Any] = {"num_kv_heads": 1, "head_size": HEAD_DIM, "dtype": torch.bfloat16}
    groups = [KVCacheGroupSpec(["cacheable"], MLAAttentionSpec(block_size=geometry.block_size, **sizes))]
    for number in range(geometry.windows):
        window = SlidingWindowMLASpec(
            block_size=geometry.swa_block_size,
            sliding_window=geometry.window,
            bounded_replay=config.cache_config.swa_bounded_replay,
            **sizes,
        )
        groups.append(KVCacheGroupSpec([f"window {number}"], window))
    # As EngineCore settles it once the groups are known.
    config.cache_config.block_size = min(
        group.kv_cache_spec.block_size for group in groups if group.kv_cache_spec.prefix_cacheable
    )
    return KVCacheConfig(
        num_blocks=geometry.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=config.cache_config.prefix_cache_retention_interval,
    )


def describe_groups(layout: Any) -> list[Group]:
    """What the published KV-cache spec says, group by group."""
    specs = [group.kv_cache_spec for group in layout.kv_cache_groups]
    return [
        Group(
            kind="window" if is_window(spec) else "cacheable",
            block_size=spec.block_size,
            prefix_cacheable=spec.prefix_cacheable,
            replay_tokens=spec.prefix_replay_tokens,
        )
        for spec in specs
    ]


def make_scheduler(config: Any, layout: Any) -> tuple[Any, Any]:
    """vLLM's Scheduler over the layout and the hasher for its requests, as EngineCore makes them."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
    from vllm.v1.structured_output import StructuredOutputManager

    try:
        block_size, hash_block_size = resolve_kv_cache_block_sizes(layout, config)
        scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=layout,
            structured_output_manager=StructuredOutputManager(config),
            log_stats=True,
            block_size=block_size,
            hash_block_size=hash_block_size,
        )
    except (AssertionError, ValueError, NotImplementedError) as error:
        raise Refused(one_line(error)) from error
    hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_fn)
    ahead = config.num_hash_lookahead_tokens
    return scheduler, get_request_block_hasher(hash_block_size, hash_fn, *([ahead] if ahead else ()))


def make_loader(config: Any, layout: Any) -> Any:
    """The worker's half of the KV connector; None where the config has none."""
    if config.kv_transfer_config is None:
        return None
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    return KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, layout)


def check_pool(config: Any, layout: Any, case: Case) -> None:
    """Refuse a pool that cannot hold the longest request alone, by the rule with which vLLM refuses to start."""
    specs = [group.kv_cache_spec for group in layout.kv_cache_groups]
    needed = sum(-(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes) for spec in specs)
    available = layout.num_blocks - 1
    if needed > available:
        raise Refused(f"a request of {case.max_model_len} tokens needs {needed} blocks, the pool has {available}")
