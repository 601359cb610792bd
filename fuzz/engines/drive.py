# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Drives vLLM's Scheduler through a case: requests as they arrive, events, a step, its output.

``Driver`` alone has no model: ``device.py`` says what is sampled. ``core.py`` has one with a model. Nothing is recorded
here; ``record.py`` looks on. With async scheduling a step's output comes after the next step has been scheduled and
executed, as in ``EngineCore.step_with_batch_queue``; so events hit with a step in flight.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import UNSET

from fuzz.case import Case, Event, Request
from fuzz.engines.device import Device, Sample
from invariants.trace import IntArray

IDLE_STEPS = 8
"""Consecutive steps in which nothing is scheduled although requests wait: a hang."""


class Hung(Exception):
    """The scheduler stopped making progress; the message says who waits."""


@dataclass(slots=True)
class Scheduled:
    """One step, between scheduling and its output."""

    index: int
    output: Any
    """vLLM's SchedulerOutput."""
    events: list[str]
    """Kinds of the events that took effect before the step."""
    finished: list[int] = field(default_factory=list)
    """Requests (indices in the case) aborted before the step; those that end with its output join after it."""
    processed: int = 0
    """Steps whose output the scheduler had, from the first on."""
    samples: dict[str, Sample] = field(default_factory=dict)
    """What each row samples, by request; empty where a model says."""
    ahead: dict[str, int] = field(default_factory=dict)
    """By request: rejected drafts that the scheduler still counts as computed, of steps in flight."""
    delivered: dict[int, int] = field(default_factory=dict)
    """Tokens of the step's output, by request (index); filled in when it is processed."""


class Driver:
    """One case on one Scheduler, which must be new.

    ``prompts``: what to ask in place of the case's own prompts, those of requests that continue others included.
    ``loader``: the worker's half of ``connector.py``, if the scheduler has the other.
    """

    def __init__(
        self, case: Case, scheduler: Any, hasher: Any, prompts: Sequence[IntArray] | None = None, loader: Any = None
    ) -> None:
        self.scheduler = scheduler
        self.outputs: list[list[int]] = [[] for _ in case.requests]
        self.ends: list[Literal["length", "abort", "refused"] | None] = [None] * len(case.requests)
        self.metrics = {"prefix_cache_queries": 0, "prefix_cache_hits": 0, "preempted_hits": 0, "cached_tokens": 0}
        if loader:
            self.metrics |= {"external_tokens": 0, "connector_hits": 0, "connector_preempted_hits": 0}
        self.step = 0
        own = [request.tokens() for request in case.requests]
        self.prompts: list[IntArray] = [*own] if prompts is None else [*prompts]
        """What a request continues is put before its own part when it is handed over."""
        self.arrived = [request.arrive for request in case.requests]
        """Step before which each was handed over, or will be at the earliest."""
        self.case = case
        self.accepts: Callable[[int], bool] = lambda _: True
        """Whether a prompt of so many tokens gets past vLLM's front-end, which is not here."""
        self._hasher = hasher
        self._loader = loader
        self._index = {request.id: index for index, request in enumerate(case.requests)}
        self._whole = prompts is not None
        self._held_back: list[Request] = []
        """Requests whose step has come before the one that they continue has ended."""
        self._live: dict[str, Any] = {}
        self._device = Device(case)
        self._flying: deque[Scheduled] = deque()
        """Steps that are executed, and their output not processed."""
        self._executed = 0
        """Steps."""

    def run(self, look: Callable[[Scheduled], None], idle_batch: Callable[[], None] = lambda: None) -> None:
        """To the end of the case; ``look`` sees each step before its output, and ``idle_batch`` is called once where no
        request is left before the next one comes. Raises ``Hung``, and what vLLM raises."""
        arrivals = sorted(self.case.requests, key=lambda request: request.arrive)[::-1]
        idle = stuck = 0
        done = self._done()
        # The request that has run longest computes a token in each step, and only an event takes it back to its start.
        lengths = sum(self.case.max_lengths)
        lengths += sum(request.load.steps for request in self.case.requests if request.load is not UNSET)
        most = IDLE_STEPS + (1 + len(self.case.events)) * lengths
        while arrivals or self._held_back or self._live or self._loading:
            self._hand_over(arrivals, idle_batch)
            scheduled = Scheduled(self.step, None, [])
            self._apply_events(scheduled)
            self.advance(scheduled, look)
            idle = 0 if scheduled.output.total_num_scheduled_tokens or arrivals or self._loading else idle + 1
            if idle == IDLE_STEPS:
                raise Hung(f"nothing was scheduled in {idle} steps while {', '.join(self._live)} waited")
            before, done = done, self._done()
            stuck = 0 if done > before or arrivals else stuck + 1
            if stuck == most:
                raise Hung(
                    f"no token came out in {stuck} steps, though some were scheduled for {', '.join(self._live)}"
                )
            self.step += 1
        self._land(0)

    @property
    def _loading(self) -> bool:
        """Whether a load is under way; also one for a request that was aborted, whose blocks vLLM still keeps."""
        return self._loader is not None and self._loader.busy

    def _done(self) -> int:
        """Tokens that came out, and requests that ended."""
        return sum(map(len, self.outputs)) + sum(end is not None for end in self.ends)

    def _hand_over(self, arrivals: list[Request], idle_batch: Callable[[], None]) -> None:
        """What may go to vLLM before this step; ``arrivals``: the others, the next one last."""
        if not self._live:
            self._land(0)
        nobody = not self._live and not self._loading and not any(map(self._may_start, self._held_back))
        if nobody and arrivals[-1].arrive > self.step:
            if self.step:
                idle_batch()
            self.step = arrivals[-1].arrive
        due, self._held_back = self._held_back, []
        while arrivals and arrivals[-1].arrive <= self.step:
            due.append(arrivals.pop())
        for request in due:
            if self._may_start(request):
                self._add(request.id)
            else:
                self._held_back.append(request)

    def _may_start(self, request: Request) -> bool:
        return request.continues is UNSET or self.ends[self._index[request.continues]] is not None

    def _add(self, name: str) -> None:
        from vllm.v1.request import Request

        index = self._index[name]
        request = self.case.requests[index]
        earlier = request.continues
        if earlier is not UNSET and not self._whole:
            before = self._index[earlier]
            parts = self.prompts[before], np.array(self.outputs[before], np.int32), self.prompts[index]
            self.prompts[index] = np.concatenate(parts)
        self.arrived[index] = self.step
        if not self.accepts(len(self.prompts[index])):
            self.ends[index] = "refused"
            return
        self._live[name] = Request(
            request_id=name,
            prompt_token_ids=self.prompts[index].tolist(),
            sampling_params=self.sampling(request),
            pooling_params=None,
            block_hasher=self._hasher,
            priority=0 if request.priority is UNSET else request.priority,
        )
        self._device.add(name, self.prompts[index])
        self.scheduler.add_request(self._live[name])

    def sampling(self, request: Request) -> Any:
        """vLLM's SamplingParams for a request."""
        from vllm import SamplingParams

        # The way by which a client tells a connector where its KV is.
        args = {} if request.load is UNSET else {"kv_transfer_params": msgspec.to_builtins(request.load)}
        return SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True, extra_args=args or None)

    def advance(self, scheduled: Scheduled, look: Callable[[Scheduled], None]) -> None:
        """Schedule a step, execute and look at it, and process what output is due."""
        scheduled.output = self.scheduler.schedule()
        scheduled.processed = self._executed - len(self._flying)
        begun = {data.req_id for data in scheduled.output.scheduled_new_reqs}
        for step in self._flying:
            for name, sample in step.samples.items():
                if sample.rejected and name not in begun:
                    scheduled.ahead[name] = sample.rejected
        scheduled.samples = self._device.execute(scheduled.output)
        self._executed += 1
        self._flying.append(scheduled)
        look(scheduled)
        self._land(0 if self.case.geometry.async_scheduling is UNSET else 1)

    def _land(self, left: int) -> None:
        """Process the output of all steps in flight but the last ``left``."""
        while len(self._flying) > left:
            self._process(self._flying.popleft())

    def _apply_events(self, scheduled: Scheduled) -> None:
        for event in self.case.events:
            if event.step == scheduled.index and self._apply(event):
                scheduled.events.append(event.kind)
                if event.kind == "abort" and event.request is not None:
                    self._end(event.request, "abort", scheduled)

    def _apply(self, event: Event) -> bool:
        """Do what the event says through vLLM's own entry points; False if it does not apply now."""
        if event.kind == "reset_prefix_cache":
            return bool(self.scheduler.reset_prefix_cache())
        if event.kind == "drop_blocks":
            pool = self.scheduler.kv_cache_manager.block_pool
            pool.evict_blocks({block.block_id for block in pool.blocks if block.ref_cnt == 0 and block.block_hash})
            return True
        request = self._live.get(event.request or "")
        if request is None:
            return False
        if event.kind == "abort":
            from vllm.v1.request import RequestStatus

            self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
            return True
        if request not in self.scheduler.running:
            return False
        # As Scheduler.reset_prefix_cache(reset_running_requests=True) does it, for one request.
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        self.scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        return True

    def _process(self, scheduled: Scheduled) -> None:
        """Hand the scheduler what a step has sampled."""
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(scheduled.samples)
        before = {name: self._live[name].num_output_tokens for name in names if name in self._live}
        result = self.scheduler.update_from_output(
            scheduled.output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: row for row, name in enumerate(names)},
                sampled_token_ids=[list(sample.tokens) for sample in scheduled.samples.values()],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
                kv_connector_output=self._transfers(scheduled.output),
            ),
        )
        self.count(result)
        for name, known in before.items():
            new = self._live[name].output_token_ids[known:]
            self.outputs[self._index[name]] += new
            if new:
                scheduled.delivered[self._index[name]] = len(new)
        self.end_finished(names, scheduled)
        self._draft(names)

    def _draft(self, names: list[str]) -> None:
        """Give the scheduler the drafts made after a step. A step in flight has only placeholders: vLLM leaves the
        drafts on the device then."""
        geometry = self.case.geometry
        if geometry.drafts is UNSET or geometry.async_scheduling is not UNSET:
            return
        from vllm.v1.outputs import DraftTokenIds

        live = [name for name in names if name in self._live]
        self.scheduler.update_draft_token_ids(DraftTokenIds(live, [self._device.drafts(name) for name in live]))

    def _transfers(self, output: Any) -> Any:
        """vLLM's KVConnectorOutput: what the worker's half of the connector makes of the step."""
        if self._loader is None:
            return None
        from vllm.v1.outputs import KVConnectorOutput

        self._loader.bind_connector_metadata(output.kv_connector_metadata)
        self._loader.start_load_kv(None)
        results = self._loader.get_transfer_results(output.finished_req_ids)
        self._loader.clear_connector_metadata()
        return KVConnectorOutput(
            finished_recving=results.finished_recving or None, failed_recving=results.failed_recving
        )

    def end_finished(self, names: list[str], scheduled: Scheduled) -> None:
        """Note which of them vLLM has dropped with this step's output."""
        for name in names:
            if name in self._live and name not in self.scheduler.requests:
                self._end(name, "length", scheduled)

    def _end(self, name: str, how: Literal["length", "abort"], scheduled: Scheduled) -> None:
        self.ends[self._index[name]] = how
        scheduled.finished.append(self._index[name])
        del self._live[name]

    def count(self, outputs: dict[int, Any]) -> None:
        """Add up vLLM's metrics; ``outputs``: EngineCoreOutputs by client."""
        for output in outputs.values():
            stats = output.scheduler_stats and output.scheduler_stats.prefix_cache_stats
            if stats:
                self.metrics["prefix_cache_queries"] += stats.queries
                self.metrics["prefix_cache_hits"] += stats.hits
                self.metrics["preempted_hits"] += stats.preempted_hits
            told = [one.prefill_stats for one in output.outputs if one.prefill_stats]
            self.metrics["cached_tokens"] += sum(stats.num_cached_tokens for stats in told)
            if self._loader is None:
                continue
            self.metrics["external_tokens"] += sum(stats.num_external_cached_tokens for stats in told)
            loaded = output.scheduler_stats and output.scheduler_stats.connector_prefix_cache_stats
            if loaded:
                self.metrics["connector_hits"] += loaded.hits
                self.metrics["connector_preempted_hits"] += loaded.preempted_hits
