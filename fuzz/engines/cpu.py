# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The CPU engine: the real vLLM engine with the probe model, its control arms and the bytes of its KV cache."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import UNSET

from fuzz import triton_cpu
from fuzz.case import Case, Request
from fuzz.engines import config as vllm_setup
from fuzz.engines.base import Refused, Unavailable
from fuzz.engines.core import Core, CoreDriver, sizes_of
from fuzz.engines.follow import fault_of, follow, traced_requests
from fuzz.engines.kv import CacheWatch, Poisoner
from fuzz.engines.record import StepRecorder
from fuzz.engines.worker import checked, require
from fuzz.probe.recorder import recorder
from invariants.trace import Fault, IntArray, Outputs, Probe, Trace

KERNEL_MODE: Literal["compiled", "interpreter"] = "compiled"
ALONE = 3
"""Requests of a case that are also run by themselves."""
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class CpuEngine:
    """See the module. A brisk run has the no-cache arm only, a full one all that ``Trace.arms`` tells of."""

    name = "cpu"
    has_model = True

    def __init__(self) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        os.environ["VLLM_TARGET_DEVICE"] = "cpu"
        try:
            self._mode = triton_cpu.prepare(KERNEL_MODE)
            import torch

            require()
            from fuzz.probe import model  # noqa: F401
        except ImportError as error:
            raise Unavailable(f"this vLLM lacks what the CPU engine is made of: {error}") from error
        try:
            # Not through the plugin: vLLM may have loaded that before, when nobody wanted a recorder.
            recorder.install("trace")
        except (ImportError, AttributeError) as error:
            raise Unavailable(f"the gather recorder finds nothing to look on at in this vLLM: {error}") from error
        _load_plugins()
        _register()
        torch.set_num_threads(1)  # the probe's tensors are too small to share out, and test workers have a core each
        atexit.register(gc.unfreeze)  # EngineCore freezes; nanobind, which Triton is built with, takes that for leaks
        self._cores: dict[str, Core] = {}
        """By arm."""

    def versions(self) -> dict[str, str]:
        """See ``Engine.versions``."""
        return vllm_setup.versions(self._mode)

    def run(self, case: Case, brisk: bool = False) -> Trace:
        """See ``Engine.run``."""
        started, before = time.perf_counter(), triton_cpu.fallbacks.copy()
        probe = Probe() if case.probe is UNSET else case.probe
        core = self._core(case, probe)
        driver = CoreDriver(case, core)
        trace = Trace(
            engine=self.name,
            geometry=case.geometry,
            requests=traced_requests(case, self.has_model),
            groups=vllm_setup.describe_groups(core.layout),
            replay_expected=case.geometry.replay,
            kernels=self._mode,
            probe=probe,
            metrics=driver.metrics,
            versions=self.versions(),
        )
        watch = CacheWatch(core)
        recorder.mode = "trace"
        with checked(core.block_tables):
            follow(driver, StepRecorder(trace, core.scheduler, core), trace, watch.look)
        recorder.mode = None  # nobody looks on in the arms
        trace.cached = watch.result()
        for request, outputs in zip(trace.requests, driver.results(), strict=True):
            request.outputs = outputs
        _check_numbers(trace)
        if not trace.faults:
            try:
                self._arms(case, probe, trace, brisk)
            except (Refused, Unavailable):
                raise
            except Exception as error:
                trace.faults.append(fault_of(error, trace.steps[-1].index))
        if trace.faults:
            self._drop()
        trace.interpreted = triton_cpu.fallbacks_since(before)
        trace.seconds = time.perf_counter() - started
        return trace

    def time_plain(self, case: Case) -> float:
        """CPU seconds that the case takes on the bare engine, for benchmarks: no arm, nothing judged."""
        core = self._core(case, Probe() if case.probe is UNSET else case.probe)
        started = time.process_time()
        _unwatched(case, core)
        return time.process_time() - started

    def _arms(self, case: Case, probe: Probe, trace: Trace, brisk: bool) -> None:
        plain = msgspec.structs.replace(case, events=())
        prompts = [request.prompt for request in trace.requests]
        trace.arms["no-cache"] = self._again(plain, probe, prompts, "no-cache")
        if not brisk:
            if probe.kind == "exact" or not case.geometry.replay:
                # Others may be hit then, and deep hits differ.
                with contextlib.suppress(Refused):
                    trace.arms["ngram"] = self._again(plain, probe, prompts, "ngram")
            trace.arms["twice"] = self._again(case, probe, prompts)
            trace.arms["poison"] = self._again(case, probe, prompts, poison=True)
            trace.arms["alone"] = self._alone(case, probe, trace)

    def _again(
        self, case: Case, probe: Probe, prompts: list[IntArray], arm: str = "main", poison: bool = False
    ) -> list[Outputs | None]:
        """The outputs of a run in which nobody looks on. It asks what the main run asked: what its own outputs may
        differ in, a request that continues another one would ask."""
        core = self._core(case, probe, arm)
        before = Poisoner(core, case.geometry.window) if poison else None
        return [*_unwatched(case, core, before, prompts).results()]

    def _alone(self, case: Case, probe: Probe, trace: Trace) -> list[Outputs | None]:
        """Each request after one that caches the prefix it hit; the first few that ran undisturbed, hits first."""
        found: list[Outputs | None] = [None] * len(case.requests)
        lives: dict[int, list[int]] = {}
        for life in trace.admissions:
            lives.setdefault(life.request, []).append(life.hit)
        eligible = [
            (-hits[0], index)
            for index, hits in lives.items()
            if len(hits) == 1 and trace.requests[index].finished == "length"
        ]
        for hit, index in sorted(eligible)[:ALONE]:
            found[index] = self._by_itself(case, probe, case.requests[index], trace.requests[index].prompt, -hit)
        return found

    def _by_itself(self, case: Case, probe: Probe, request: Request, prompt: IntArray, hit: int) -> Outputs:
        requests = [msgspec.structs.replace(request, arrive=1 << 19 if hit else 0, continues=UNSET)]
        prompts = [prompt]
        if hit:
            requests.insert(0, Request(id="alone-prime", arrive=0, prompt=(("alone", 0, 1),), max_tokens=1))
            prompts.insert(0, np.append(prompt[:hit], requests[0].tokens()))
        by_itself = msgspec.structs.replace(case, requests=tuple(requests), events=())
        # The engine of the case, whatever these lengths are.
        driver = _unwatched(by_itself, self._core(case, probe), prompts=prompts)
        outputs = driver.results()[-1]
        outputs.hit = driver.metrics["prefix_cache_hits"]
        return outputs

    def _core(self, case: Case, probe: Probe, arm: str = "main") -> Core:
        """An empty engine of the case's sizes: the last one, if it can be used again."""
        core = self._cores.pop(arm, None)
        if core and (core.case_sizes != sizes_of(case, probe) or not core.empty()):
            core.close()
            core = None
        core = core or Core(case, probe, arm)
        self._cores[arm] = core
        return core

    def _drop(self) -> None:
        """What has raised is not used again."""
        for core in self._cores.values():
            core.close()
        self._cores.clear()


def _unwatched(
    case: Case,
    core: Core,
    before: Callable[[Any], None] | None = None,
    prompts: Sequence[IntArray] | None = None,
) -> CoreDriver:
    """The case on an empty core, run to its end; ``before`` and ``prompts`` as in ``CoreDriver``."""
    driver = CoreDriver(case, core, before, prompts)
    driver.run(lambda _: None)
    return driver


def _load_plugins() -> None:
    """As vLLM's engine core would, whose failure would be that of every case. Raises ``Unavailable``."""
    from vllm.plugins import load_general_plugins

    try:
        load_general_plugins()
    except Exception as error:  # a plugin may be anybody's
        raise Unavailable(f"a plugin of vLLM fails to load: {vllm_setup.one_line(error)}") from error


def _register() -> None:
    """Make the architecture known by its class: a name would have vLLM import it in a process of its own first.

    Raises ``Unavailable``.
    """
    from vllm import ModelRegistry

    from fuzz.probe.model import ReplayProbeForCausalLM
    from fuzz.probe.plugin import ARCHITECTURE

    ModelRegistry.register_model(ARCHITECTURE, ReplayProbeForCausalLM)
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        raise Unavailable(f"vLLM does not know the architecture {ARCHITECTURE} after it was registered")


def _check_numbers(trace: Trace) -> None:
    """NaN among the logprobs is a fault."""
    for request in trace.requests:
        if request.outputs is not None and np.isnan(request.outputs.logprobs).any():
            row = int(np.isnan(request.outputs.logprobs).any(axis=1).argmax())
            message = f"logprobs of output {row} of request {request.id} are NaN"
            trace.faults.append(Fault("nan", trace.steps[-1].index, message, "logprobs"))
            return
