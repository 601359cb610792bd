# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The scheduler engine: vLLM's scheduler and its worker's half of a step, driven without a model.

Everything that decides where KV is written and read is vLLM's own: Scheduler, KVCacheManager, block hashing, request
states, block tables, slot mappings, replay padding and the window metadata builder (see ``worker.py``). What a model
would compute is not there: tokens are made up (``drive.py``), and KV bytes are replaced by a shadow cache that knows
who wrote which slot for which position (``shadow.py``). A fresh Scheduler and worker a case, one vLLM a process.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from typing import Any, Literal

from msgspec import UNSET

from fuzz import triton_cpu
from fuzz.case import Case
from fuzz.engines import config as vllm_setup
from fuzz.engines.base import Unavailable
from fuzz.engines.drive import Driver
from fuzz.engines.follow import follow, traced_requests
from fuzz.engines.record import StepRecorder
from fuzz.engines.worker import Worker, checked, require
from invariants.trace import Trace

KERNEL_MODE: Literal["compiled", "interpreter"] = "compiled"
"""What runs vLLM's Triton kernels where there is no GPU."""
ASK_EVERY = 8
"""Steps without a replay in which all consumers of window KV are asked, one in so many."""


class SchedulerEngine:
    """See the module. A brisk run leaves the worker out, which costs ten times what the scheduler does: gathers and
    writes are then what the contract says they should be, looked up in the scheduler's block tables."""

    name = "scheduler"
    has_model = False

    def __init__(self) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
        try:
            mode = triton_cpu.prepare(KERNEL_MODE)
            import vllm
        except ImportError as error:
            raise Unavailable(f"vLLM cannot be imported: {error}") from error
        try:
            vllm_setup.base_config()
            require()
        except ImportError as error:
            raise Unavailable(f"vLLM {vllm.__version__} has no DeepSeek-V4.1 on model runner V2: {error}") from error
        self._mode: str = mode

    def versions(self) -> dict[str, str]:
        """See ``Engine.versions``."""
        return vllm_setup.versions(self._mode)

    def run(self, case: Case, brisk: bool = False) -> Trace:
        """See ``Engine.run``."""
        started, before = time.perf_counter(), triton_cpu.fallbacks.copy()
        driver, layout = self._driver(case)
        trace = Trace(
            engine=self.name,
            geometry=case.geometry,
            requests=traced_requests(case),
            groups=vllm_setup.describe_groups(layout),
            replay_expected=case.geometry.replay,
            kernels="none" if brisk else self._mode,
            metrics=driver.metrics,
            versions=self.versions(),
        )
        worker = None if brisk else self._worker(case, layout, driver.scheduler)
        with checked(worker.tables) if worker else nullcontext():
            recorder = StepRecorder(trace, driver.scheduler, worker)
            follow(driver, recorder, trace, idle_batch=worker.idle if worker else None)
        trace.interpreted = triton_cpu.fallbacks_since(before)
        trace.seconds = time.perf_counter() - started
        return trace

    def _worker(self, case: Case, layout: Any, scheduler: Any) -> Worker:  # noqa: ARG002
        window = case.geometry.window
        # All consumers are there at such a window only: the combine kernel has one lane for each of its positions.
        # ROCm's take a decode for one token, so with drafts the shared builder's lists alone are looked at.
        asked = self._mode != "gpu" and window & (window - 1) == 0 and case.geometry.drafts is UNSET
        return Worker(vllm_setup.vllm_config(case), layout, ASK_EVERY if asked else 0)

    def run_bare(self, case: Case) -> None:
        """The same requests, events and tokens on vLLM's Scheduler with nobody looking on: the yardstick of speed."""
        self._driver(case)[0].run(lambda _: None)

    def _driver(self, case: Case) -> tuple[Driver, Any]:
        config = vllm_setup.vllm_config(case)
        layout = vllm_setup.kv_cache_config(config, case.geometry)
        vllm_setup.check_pool(config, layout, case)
        driver = Driver(case, *vllm_setup.make_scheduler(config, layout), loader=vllm_setup.make_loader(config, layout))
        driver.accepts = lambda prompt: vllm_setup.accepts(config, prompt)
        return driver, layout
