# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The kernels engine: vLLM's worker, its metadata builders and its kernels on planned batches (``plan.py``).

The scheduler engine's batches are those that vLLM's scheduler happens to make. Here a case is planned without it, so
block ids are scattered, blocks change hands at once, and every consumer of window KV is asked in every step.
"""

from __future__ import annotations

import time

import msgspec
from msgspec import UNSET

from fuzz import triton_cpu
from fuzz.case import Case
from fuzz.engines import config as vllm_setup
from fuzz.engines.base import Refused, refuse_loads
from fuzz.engines.drive import Driver
from fuzz.engines.follow import follow, traced_requests
from fuzz.engines.plan import Planner, blocks_for
from fuzz.engines.record import StepRecorder
from fuzz.engines.scheduler import SchedulerEngine
from fuzz.engines.worker import Worker, checked
from invariants.trace import Trace

PADDING = 3
"""Rows that batches of decodes are filled up with."""


class KernelsEngine(SchedulerEngine):
    """See the module. The pool is as large as the case needs, whatever its geometry says."""

    name = "kernels"

    def run(self, case: Case, brisk: bool = False) -> Trace:  # noqa: ARG002 - without kernels nothing is left
        """See ``Engine.run``."""
        refuse_loads(case)
        vllm_setup.refuse_flight(case.geometry, self.name)
        started, before = time.perf_counter(), triton_cpu.fallbacks.copy()
        if case.geometry.max_model_len is not UNSET:
            raise Refused("a planner refuses nothing and cuts nothing, so max_model_len cannot be set")
        geometry = msgspec.structs.replace(case.geometry, num_blocks=blocks_for(case))
        case = msgspec.structs.replace(case, geometry=geometry)
        config = vllm_setup.vllm_config(case)
        layout = vllm_setup.kv_cache_config(config, geometry)
        groups = vllm_setup.describe_groups(layout)
        driver = Driver(case, Planner(geometry, groups), None)
        trace = Trace(
            engine=self.name,
            geometry=geometry,
            requests=traced_requests(case),
            groups=groups,
            replay_expected=geometry.replay,
            kernels=self._mode,
            versions=self.versions(),
        )
        for request in trace.requests:
            request.reads_cache = geometry.replay  # a planner does not keep window KV for later requests
        worker = Worker(config, layout, int(self._mode != "gpu"), PADDING)
        recorder = StepRecorder(trace, driver.scheduler, worker)
        with checked(worker.tables):
            follow(driver, recorder, trace, idle_batch=worker.idle)
            if not trace.faults:
                recorder.record_idle(worker.idle())
        trace.interpreted = triton_cpu.fallbacks_since(before)
        trace.seconds = time.perf_counter() - started
        return trace
