# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The scheduler engine: vLLM's scheduler and its worker's half of a step, driven without a model.

Everything that decides where KV is written and read is vLLM's own: Scheduler, KVCacheManager, block hashing, request
states, block tables, slot mappings, replay padding and the window metadata builder (see ``worker.py``). What a model
would compute is not there: the next token is a function of the prompt and the output so far, and KV bytes are replaced
by a shadow cache that knows who wrote which slot for which position. A fresh Scheduler and worker a case.
"""

from __future__ import annotations

import time
import traceback
import zlib
from typing import Any, Literal

import numpy as np

from fuzz import triton_cpu
from fuzz.case import FIRST_TOKEN, TOKENS, Case, Event, Request
from fuzz.engines import config as vllm_setup
from fuzz.engines.base import Refused, Unavailable
from fuzz.engines.record import StepRecorder
from fuzz.engines.worker import Worker
from invariants.trace import Admission, Fault, Final, Step, Trace, TracedRequest

KERNEL_MODE: Literal["compiled", "interpreter"] = "interpreter"
"""What runs vLLM's Triton kernels here."""

IDLE_STEPS = 8
"""Consecutive steps in which nothing is scheduled although requests wait: a hang."""


class SchedulerEngine:
    """See the module. Without ``kernels`` the worker is left out: the scheduler's block tables alone are followed, and
    gathers and writes are what the contract says they should be, looked up in them."""

    name = "scheduler"

    def __init__(self, kernels: bool = True) -> None:
        mode = triton_cpu.prepare(KERNEL_MODE)
        try:
            import vllm
        except ImportError as error:
            raise Unavailable(f"vLLM is not installed ({error})") from error
        self._vllm_version = str(vllm.__version__)
        self._mode = mode if kernels else "none"

    def versions(self) -> dict[str, str]:
        """See ``Engine.versions``."""
        import numba
        import torch
        import triton

        return {
            "vllm": self._vllm_version,
            "torch": str(torch.__version__),
            "triton": str(triton.__version__),
            "numba": str(numba.__version__),
            "kernels": self._mode,
        }

    def run(self, case: Case) -> Trace:
        """See ``Engine.run``."""
        started = time.perf_counter()
        trace = _Run(case, self._mode).finish()
        trace.versions = self.versions()
        trace.seconds = time.perf_counter() - started
        return trace


class _Run:
    """One case from the first step to the last."""

    def __init__(self, case: Case, mode: str) -> None:
        for event in case.events:
            if event.kind == "async_kv_load":
                raise Refused("async_kv_load needs a KV connector, which this engine does not have")
        self._case = case
        self._config = vllm_setup.vllm_config(case)
        layout = vllm_setup.kv_cache_config(self._config, case.geometry)
        vllm_setup.check_pool(self._config, layout, case)
        self._scheduler, self._hasher = vllm_setup.make_scheduler(self._config, layout)
        self._trace = Trace(
            engine="scheduler",
            geometry=case.geometry,
            requests=[
                TracedRequest(id=r.id, arrive=r.arrive, prompt=r.tokens(), max_tokens=r.max_tokens)
                for r in case.requests
            ],
            groups=vllm_setup.describe_groups(layout),
            replay_expected=case.geometry.replay,
            kernels=mode,
            metrics={"prefix_cache_queries": 0, "prefix_cache_hits": 0, "preempted_hits": 0},
        )
        self._recorder = StepRecorder(self._trace, None if mode == "none" else Worker(self._config, layout))
        self._index = {request.id: index for index, request in enumerate(case.requests)}
        self._live: dict[str, Any] = {}
        self._lookups: list[tuple[str, int]] = []
        self._watch_lookups()

    def _watch_lookups(self) -> None:
        """Note each adopted hit where vLLM counts it: from what is scheduled it could only be inferred."""
        manager = self._scheduler.kv_cache_manager
        count = manager.record_prefix_cache_stats

        def record(request: Any, num_hits: int) -> None:
            self._lookups.append((request.request_id, num_hits))
            count(request, num_hits)

        manager.record_prefix_cache_stats = record

    def finish(self) -> Trace:
        """Run to the end and return the trace; whatever vLLM raises ends it with a fault."""
        step = 0
        try:
            arrivals = sorted(self._case.requests, key=lambda request: request.arrive)
            idle = 0
            while arrivals or self._live:
                if not self._live:
                    step = max(step, arrivals[0].arrive)
                while arrivals and arrivals[0].arrive <= step:
                    self._add(arrivals.pop(0))
                scheduled = self._step(step)
                idle = 0 if scheduled or arrivals else idle + 1
                if idle == IDLE_STEPS:
                    waiting = ", ".join(self._live)
                    self._fault("hang", step, f"nothing was scheduled in {idle} steps while {waiting} waited")
                    return self._trace
                step += 1
            self._trace.final = self._final()
        except Exception as error:  # whatever vLLM raises is a finding; what we raise is our bug
            frame = traceback.extract_tb(error.__traceback__)[-1]
            package, _, place = frame.filename.rpartition("site-packages/")
            if not package:
                raise
            text = f"{type(error).__name__}: {error or 'no message'} ({place}:{frame.lineno} in {frame.name})"
            self._fault("exception", step, text)
        return self._trace

    def _fault(self, kind: Literal["exception", "hang"], step: int, message: str) -> None:
        self._trace.faults.append(Fault(kind, step, message))

    def _add(self, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request as EngineRequest

        tokens = self._trace.requests[self._index[request.id]].prompt.tolist()
        params = SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True)
        self._live[request.id] = EngineRequest(
            request_id=request.id,
            prompt_token_ids=tokens,
            sampling_params=params,
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self._scheduler.add_request(self._live[request.id])

    def _step(self, step: int) -> int:
        """One engine step; returns how many tokens were scheduled."""
        preemptions = {name: request.num_preemptions for name, request in self._live.items()}
        events, finished = self._apply_events(step)
        output = self._scheduler.schedule()
        admitted = self._admit(step, output)
        record = self._recorder.record(step, output, self._scheduler, admitted)
        record.events = events
        record.finished = finished
        record.preempted = [
            self._index[name] for name, request in self._live.items() if request.num_preemptions > preemptions[name]
        ]
        self._sample(output, record)
        self._trace.steps.append(record)
        return int(output.total_num_scheduled_tokens)

    def _apply_events(self, step: int) -> tuple[list[str], list[int]]:
        done: list[str] = []
        aborted: list[int] = []
        for event in self._case.events:
            if event.step == step and self._apply(event):
                done.append(event.kind)
                if event.kind == "abort" and event.request is not None:
                    self._end(event.request, "abort")
                    aborted.append(self._index[event.request])
        return done, aborted

    def _apply(self, event: Event) -> bool:
        """Do what the event says through vLLM's own entry points; False if it does not apply now."""
        scheduler = self._scheduler
        if event.kind == "reset_prefix_cache":
            return bool(scheduler.reset_prefix_cache())
        if event.kind == "drop_blocks":
            pool = scheduler.kv_cache_manager.block_pool
            pool.evict_blocks({block.block_id for block in pool.blocks if block.ref_cnt == 0 and block.block_hash})
            return True
        request = self._live.get(event.request or "")
        if request is None:
            return False
        if event.kind == "abort":
            from vllm.v1.request import RequestStatus

            scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
            return True
        if request not in scheduler.running:
            return False
        # As Scheduler.reset_prefix_cache(reset_running_requests=True) does it, for one request.
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        return True

    def _admit(self, step: int, output: Any) -> int:
        """Note the lives that begin in this step, in the order in which the scheduler looked them up; how many."""
        before = len(self._trace.admissions)
        new = {data.req_id: data for data in output.scheduled_new_reqs}
        for name, hit in self._lookups:
            if name not in new:
                continue
            request = self._live[name]
            self._trace.admissions.append(
                Admission(
                    step=step,
                    request=self._index[name],
                    tokens=request.num_tokens,
                    hit=hit,
                    replay_start=new[name].replay_start,
                    computed=new[name].num_computed_tokens,
                    scheduled=output.num_scheduled_tokens[name],
                    resumed=request.num_preemptions > 0,
                )
            )
        self._lookups.clear()
        return len(self._trace.admissions) - before

    def _sample(self, output: Any, record: Step) -> None:
        """Hand the scheduler the next token of every request whose known tokens are all computed."""
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        sampled = [
            [self._next_token(name)] if self._live[name].num_computed_tokens >= self._live[name].num_tokens else []
            for name in names
        ]
        for name, tokens in zip(names, sampled, strict=True):
            self._trace.requests[self._index[name]].output.extend(tokens)
        result = self._scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        self._count(result)
        for name in names:
            if name not in self._scheduler.requests:
                self._end(name, "length")
                record.finished.append(self._index[name])

    def _next_token(self, name: str) -> int:
        """Any fixed function of all tokens so far; equal prompts get equal outputs, as greedy decoding gives."""
        traced = self._trace.requests[self._index[name]]
        seen = zlib.crc32(np.asarray(traced.output, np.int32).tobytes(), zlib.crc32(traced.prompt.tobytes()))
        return FIRST_TOKEN + seen % TOKENS

    def _end(self, name: str, how: Literal["length", "abort"]) -> None:
        self._trace.requests[self._index[name]].finished = how
        del self._live[name]

    def _count(self, outputs: dict[int, Any]) -> None:
        metrics = self._trace.metrics
        for output in outputs.values():
            stats = output.scheduler_stats and output.scheduler_stats.prefix_cache_stats
            if stats:
                metrics["prefix_cache_queries"] += stats.queries
                metrics["prefix_cache_hits"] += stats.hits
                metrics["preempted_hits"] += stats.preempted_hits

    def _final(self) -> Final:
        pool = self._scheduler.kv_cache_manager.block_pool
        referenced = [block.block_id for block in pool.blocks if block.ref_cnt and not block.is_null]
        return Final(
            free_blocks=pool.get_num_free_blocks(),
            total_blocks=self._case.geometry.num_blocks - 1,
            referenced=np.array(referenced, np.int32),
        )
