# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Follows a driver to the end of its case and fills in the trace: steps, ends, faults, the block pool at the end."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import UNSET

from fuzz.case import Case
from fuzz.engines.drive import Driver, Hung, Scheduled
from fuzz.engines.record import StepRecorder
from fuzz.engines.worker import Disagreement
from fuzz.probe.batch import Padding
from fuzz.triton_cpu.faults import MemoryFaults
from invariants.trace import Fault, Final, Trace, TracedRequest


def traced_requests(case: Case, has_model: bool = False) -> list[TracedRequest]:
    """The case's requests, before anything has happened to them; without a model nobody asks for prompt logprobs."""
    names = [request.id for request in case.requests]
    return [
        TracedRequest(
            id=request.id,
            arrive=request.arrive,
            prompt=request.tokens(),
            max_tokens=request.max_tokens,
            reads_cache=not (has_model and request.prompt_logprobs is True),
            priority=None if request.priority is UNSET else request.priority,
            continues=None if request.continues is UNSET else names.index(request.continues),
        )
        for request in case.requests
    ]


def follow(
    driver: Driver,
    recorder: StepRecorder,
    trace: Trace,
    also: Callable[[Scheduled], None] | None = None,
    idle_batch: Callable[[], Padding] | None = None,
) -> None:
    """Run to the end; what vLLM raises on the way ends the trace with a fault, what we raise is our bug.

    ``also`` sees each step after the recorder. ``idle_batch``: see ``Worker.idle``; None: this engine has none.
    """

    def look(scheduled: Scheduled) -> None:
        trace.steps.append(recorder.record(scheduled))
        if also:
            also(scheduled)

    def idle() -> None:
        if idle_batch:
            recorder.record_idle(idle_batch())

    try:
        driver.run(look, idle)
        trace.final = _final(driver.scheduler.kv_cache_manager.block_pool)
    except Disagreement as disagreement:
        trace.faults.append(Fault("exception", driver.step, str(disagreement), "the worker's batch"))
    except Exception as error:
        trace.faults.append(fault_of(error, driver.step))
    for number, request in enumerate(trace.requests):
        request.output, request.finished = driver.outputs[number], driver.ends[number]
        request.prompt, request.arrive = driver.prompts[number], driver.arrived[number]


def fault_of(error: Exception, step: int) -> Fault:
    """What vLLM raised. An error that did not come out of an installed package is ours, and goes on its way."""
    if isinstance(error, Hung):
        return Fault("hang", step, str(error))
    if isinstance(error, MemoryFaults):
        first = error.faults[0]
        place = f"{first.kernel}, {first.access} at {first.tensor or 'no known tensor'}"
        return Fault("memory fault", step, str(error), place)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    package, place = _installed(frame.filename)
    if not package and Path(frame.filename).parent.name == "probe":
        # The probe indexes with what vLLM's metadata says, and believes it.
        package, place = "the probe", f"probe/{Path(frame.filename).name}"
    if not package:
        raise error
    text = f"{type(error).__name__}: {error or 'no message'} ({place}:{frame.lineno} in {frame.name})"
    return Fault("exception", step, text, f"{place}, {frame.name}")


def _installed(path: str) -> tuple[str, str]:
    """Where an installed package's file lies, and its name from there on; ("", ...) for a file of nobody's."""
    import vllm

    # vLLM may be a clone that was installed in place; Debian and ROCm images say dist-packages.
    clone = f"{Path(vllm.__file__).parent.parent}/"
    if path.startswith(f"{clone}vllm/"):
        return clone, path.removeprefix(clone)
    head, folder, place = path.rpartition("-packages/")
    return (head, place) if folder and head.endswith(("site", "dist")) else ("", path)


def _final(pool: Any) -> Final:
    referenced = [block.block_id for block in pool.blocks if block.ref_cnt and not block.is_null]
    return Final(
        free_blocks=pool.get_num_free_blocks(),
        total_blocks=len(pool.blocks) - 1,
        referenced=np.array(referenced, np.int32),
    )
