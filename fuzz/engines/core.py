# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""One EngineCore of vLLM with the probe model, and what drives it through a case.

All from the scheduler to the sampler is vLLM's: EngineCore.step(), the executor, the CPU worker, model runner V2 and
KV-cache tensors. Only the LLM front-end is left out, which turns text into tokens. An EngineCore takes about 50 ms to
make once the process is warm, so sizes may change from case to case. Relied upon: EngineCore.step() schedules, executes
and processes the output in this order, through attributes of the scheduler and the executor that an instance may wrap.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import UNSET

from fuzz.case import Case, Request
from fuzz.engines import config as vllm_setup
from fuzz.engines.base import Refused, Unavailable
from fuzz.engines.drive import Driver, Scheduled
from fuzz.probe.batch import Batch
from fuzz.probe.recorder import recorder
from invariants.trace import Geometry, IntArray, Outputs, Probe

ARM_OPTIONS: dict[str, dict[str, Any]] = {
    "main": {},
    "no-cache": {"enable_prefix_caching": False},
    "ngram": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 2,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 2,
        }
    },
}
"""What makes an arm's engine another one: vLLM's engine arguments. None has async scheduling: vLLM's CPU platform turns
it off, whatever was asked for."""

TOP = 3
"""Most likely tokens whose logprobs are asked for, besides the sampled one's."""


class Core:
    """An EngineCore for some sizes, a probe and an arm of ``ARM_OPTIONS``. Raises ``Refused``."""

    def __init__(self, case: Case, probe: Probe, arm: str = "main") -> None:
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor import Executor

        self.case_sizes = sizes_of(case, probe)
        config = _config(case, probe, arm)
        try:
            self.engine: Any = EngineCore(config, Executor.get_class(config), log_stats=True)
        except (AssertionError, NotImplementedError, ValueError) as error:
            raise Refused(vllm_setup.one_line(error)[:300]) from error
        self.config = config
        self.scheduler: Any = self.engine.scheduler
        self.layout: Any = self.scheduler.kv_cache_config
        for group in self.layout.kv_cache_groups:
            spec = group.kv_cache_spec
            wanted = case.geometry.swa_block_size if vllm_setup.is_window(spec) else case.geometry.block_size
            if spec.block_size != wanted:
                raise Refused(f"vLLM makes blocks of {spec.block_size} tokens out of blocks of {wanted}")

    def step(self, scheduled: Scheduled) -> Batch | None:  # noqa: ARG002
        """What the worker made of the step that it has just executed (``record.Batches``)."""
        return recorder.take()

    @property
    def block_tables(self) -> Any:
        """Of the model runner."""
        return self.engine.model_executor.driver_worker.worker.model_runner.block_tables

    def caches(self) -> list[list[Any]]:
        """[group][layer] KV-cache tensors [blocks, rows, cells], as vLLM bound them."""
        layers = self.config.compilation_config.static_forward_context
        return [[layers[name].kv_cache for name in group.layer_names] for group in self.layout.kv_cache_groups]

    def empty(self) -> bool:
        """Forget the last run, its KV included; whether every block is then free, and none cached."""
        if not self.engine.reset_prefix_cache():
            return False
        for cache in (cache for group in self.caches() for cache in group):
            cache.zero_()
        pool = self.scheduler.kv_cache_manager.block_pool
        cached = any(block.block_hash is not None for block in pool.blocks)
        return not cached and pool.get_num_free_blocks() == len(pool.blocks) - 1

    def close(self) -> None:
        """Let go of the engine's memory. Not by its own ``shutdown``, which ends torch.distributed as well:
        starting that again takes seconds."""
        import torch

        for layer in self.config.compilation_config.static_forward_context.values():
            layer.kv_cache = torch.tensor([])
        self.engine.model_executor.driver_worker.worker.model_runner.kv_caches.clear()
        vars(self.engine).clear()


def sizes_of(case: Case, probe: Probe) -> tuple[Geometry, Probe, int]:
    """Cases with equal sizes can share an engine."""
    return case.geometry, probe, case.max_model_len


def _config(case: Case, probe: Probe, arm: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    from fuzz.probe.model import Sizes, hf_config

    geometry = case.geometry
    vllm_setup.refuse_flight(geometry, "cpu")
    if any(field is not UNSET for field in (geometry.window_groups, geometry.retention, geometry.max_model_len)):
        raise Refused("window_groups, retention and max_model_len are for engines without a model")
    if geometry.block_size % probe.compress_ratio:
        raise Refused(f"blocks of {geometry.block_size} tokens do not hold states of {probe.compress_ratio} tokens")
    sizes = Sizes(
        probe=probe,
        window=geometry.window,
        block_size=geometry.block_size,
        swa_block_size=geometry.swa_block_size,
    )
    with tempfile.TemporaryDirectory(prefix="replaycheck-probe-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(hf_config(sizes, case.max_model_len)))
        try:
            options: dict[str, Any] = {
                "model": folder,
                "load_format": "dummy",
                "skip_tokenizer_init": True,
                "enforce_eager": True,
                "dtype": "float32",
                "seed": 0,
                "max_model_len": case.max_model_len,
                "max_num_batched_tokens": geometry.max_num_batched_tokens,
                "max_num_seqs": geometry.max_num_seqs,
                "long_prefill_token_threshold": geometry.long_prefill_token_threshold,
                "enable_prefix_caching": True,
                "swa_bounded_replay": geometry.replay,
                "num_gpu_blocks_override": geometry.num_blocks,
                "async_scheduling": False,
                "disable_log_stats": False,
                "compilation_config": {"mode": 0},
            }
            config = EngineArgs(**options | ARM_OPTIONS[arm]).create_engine_config()
        except (ValueError, NotImplementedError, AssertionError) as error:
            raise Refused(vllm_setup.one_line(error)[:300]) from error
    if not getattr(config, "use_v2_model_runner", False):
        raise Unavailable("this vLLM does not run model runner V2 here, and bounded replay needs it")
    return config


class CoreDriver(Driver):
    """One case on one ``Core``, which must be empty."""

    def __init__(
        self,
        case: Case,
        core: Core,
        before: Callable[[Any], None] | None = None,
        prompts: Sequence[IntArray] | None = None,
    ) -> None:
        super().__init__(case, core.scheduler, core.engine.request_block_hasher, prompts)
        self._core = core
        self._before = before
        """Called with each SchedulerOutput before it is executed."""
        self._logprobs: list[list[Any]] = [[] for _ in case.requests]
        self._prompt_logprobs: list[Any] = [None] * len(case.requests)

    def sampling(self, request: Request) -> Any:
        """See ``Driver``."""
        from vllm import SamplingParams

        return SamplingParams(
            temperature=0,
            max_tokens=request.max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=TOP,
            prompt_logprobs=TOP if request.prompt_logprobs is True else None,
        )

    def advance(self, scheduled: Scheduled, look: Callable[[Scheduled], None]) -> None:
        """One EngineCore step, into which we look before its output is processed."""
        engine, scheduler = self._core.engine, self.scheduler
        execute, update = engine.model_executor.execute_model, scheduler.update_from_output

        def execute_model(output: Any, *args: Any, **kwargs: Any) -> Any:
            if self._before:
                self._before(output)
            return execute(output, *args, **kwargs)

        def update_from_output(output: Any, result: Any) -> Any:
            scheduled.output = output
            look(scheduled)
            return update(output, result)

        engine.model_executor.execute_model = execute_model
        scheduler.update_from_output = update_from_output
        try:
            outputs, executed = engine.step()
            engine.post_step(executed)
        finally:
            del engine.model_executor.execute_model, scheduler.update_from_output
        self.count(outputs)
        self._collect(outputs)
        self.end_finished(list(scheduled.output.num_scheduled_tokens), scheduled)

    def _collect(self, outputs: dict[int, Any]) -> None:
        for output in (one for client in outputs.values() for one in client.outputs):
            index = self._index[output.request_id]
            self.outputs[index].extend(output.new_token_ids)
            if output.new_logprobs is not None:
                self._logprobs[index].append(output.new_logprobs)
            if output.new_prompt_logprobs_tensors is not None:
                self._prompt_logprobs[index] = output.new_prompt_logprobs_tensors

    def results(self) -> list[Outputs]:
        """What came back for each request."""
        return [
            _outputs(tokens, parts, prompt)
            for tokens, parts, prompt in zip(self.outputs, self._logprobs, self._prompt_logprobs, strict=True)
        ]


def _outputs(tokens: list[int], parts: list[Any], prompt: Any) -> Outputs:
    nothing = np.zeros((0, TOP + 1))
    return Outputs(
        tokens=np.array(tokens, np.int32),
        ids=np.concatenate([nothing, *(part.logprob_token_ids for part in parts)]).astype(np.int32),
        logprobs=np.concatenate([nothing, *(part.logprobs for part in parts)]).astype(np.float32),
        prompt_ids=None if prompt is None else prompt.logprob_token_ids.numpy().astype(np.int32),
        prompt_logprobs=None if prompt is None else prompt.logprobs.numpy().astype(np.float32),
    )
