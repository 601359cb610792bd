# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Benchmarks: ratios measured in one run, so that they mean something on any machine. ``replaycheck bench NAME``.

Both sides of a ratio run the same cases, in turn, in rounds; figures are medians over the rounds, in CPU seconds of the
one thread that runs, so that a busy machine blurs them less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from rich.table import Table

from fuzz import options, report, triton_cpu
from fuzz.case import Case, Request
from fuzz.engines.base import Refused
from invariants import judge
from invariants.trace import Geometry

ROUNDS = 5
CASES = 100
ENGINE_ROUNDS = 7
ENGINE_REQUESTS = 6
PROGRAMS = 256
"""Of each kernel's launch; of paged window indices, as many as a step of four replaying requests has, and 4096."""
STEP, MANY = 688, 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``replaycheck bench``."""
    parser.add_argument("bench", metavar="NAME", choices=sorted(BENCHES), help=", ".join(sorted(BENCHES)))
    options.add_profile(parser, default="dsv41")
    options.add_json(parser)


def command(args: argparse.Namespace) -> int:
    """Run one benchmark; 0, since a figure is neither right nor wrong."""
    figures = BENCHES[args.bench](args.profile)
    table = Table("figure", "value")
    for name, value in figures.items():
        table.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
    report.console().print(table)
    options.write_json(args.json, figures)
    return 0


def bench_scheduler(profile: str) -> dict[str, Any]:
    """The scheduler engine with every invariant, against vLLM's Scheduler alone, in requests a second."""
    from fuzz.engines.scheduler import SchedulerEngine
    from fuzz.run import brisk

    engine = SchedulerEngine()
    cases = _accepted(profile, engine.run_bare)
    seconds: dict[str, list[float]] = {"bare": [], "engine": [], "judge": []}
    for _ in range(ROUNDS):
        started = time.process_time()
        for case in cases:
            engine.run_bare(case)
        seconds["bare"].append(time.process_time() - started)
        judged, with_kernels = 0.0, 0
        started = time.process_time()
        for number, case in enumerate(cases):
            trace = engine.run(case, brisk=brisk(case, number))
            with_kernels += trace.kernels != "none"
            begun = time.process_time()
            judge(trace)
            judged += time.process_time() - begun
        seconds["engine"].append(time.process_time() - started)
        seconds["judge"].append(judged)
    requests = sum(len(case.requests) for case in cases)
    ratios = [bare / engine for bare, engine in zip(seconds["bare"], seconds["engine"], strict=True)]
    return {
        "profile": profile,
        "kernels": engine.versions()["kernels"],
        "cases": len(cases),
        "cases_with_kernels": with_kernels,
        "requests": requests,
        "bare_requests_per_second": requests / statistics.median(seconds["bare"]),
        "engine_requests_per_second": requests / statistics.median(seconds["engine"]),
        "judging_share": statistics.median(seconds["judge"]) / statistics.median(seconds["engine"]),
        "engine_vs_bare": statistics.median(ratios),
    }


def bench_engine(_profile: str) -> dict[str, Any]:
    """The CPU engine, warm, on prompts of 400 tokens of which 384 are hit but for the first: requests a second.

    Kernels compiled against Triton's interpreter; the recorder counting, checking or tracing against nobody looking.
    """
    from fuzz.engines.cpu import CpuEngine
    from fuzz.probe.recorder import recorder

    engine = CpuEngine()
    prompt = Case(
        geometry=Geometry(
            window=64, block_size=64, swa_block_size=32, num_blocks=200, max_num_batched_tokens=256, max_num_seqs=4
        ),
        requests=tuple(
            Request(id=f"r{number}", arrive=20 * number, prompt=(("p", 0, 390), (f"t{number}", 0, 10)), max_tokens=6)
            for number in range(ENGINE_REQUESTS)
        ),
    )
    rates: dict[str, list[float]] = {"interpreter": []}
    engine.time_plain(prompt)  # compiles the kernels
    for _ in range(ENGINE_ROUNDS):
        for mode in (None, "count", "check", "trace"):
            recorder.mode = mode
            rates.setdefault(mode or "plain", []).append(ENGINE_REQUESTS / engine.time_plain(prompt))
    recorder.mode = None
    triton_cpu.prepare("interpreter")
    rates["interpreter"].append(ENGINE_REQUESTS / engine.time_plain(prompt))
    triton_cpu.prepare("compiled")
    medians = {name: statistics.median(values) for name, values in rates.items()}
    recorder.mode = "trace"
    judged = time.perf_counter()
    trace = engine.run(prompt, brisk=True)
    run = time.perf_counter() - judged
    judge(trace)
    return {
        "requests": ENGINE_REQUESTS,
        **{f"{name}_requests_per_second": rate for name, rate in medians.items()},
        "lockstep_vs_interpreter": medians["plain"] / medians["interpreter"],
        **{
            f"{mode}_vs_plain": statistics.median(
                some / plain for some, plain in zip(rates[mode], rates["plain"], strict=True)
            )
            for mode in ("count", "check", "trace")
        },
        "judging_share": (time.perf_counter() - judged - run) / (time.perf_counter() - judged),
    }


def bench_triton(_profile: str) -> dict[str, Any]:
    """Each kernel of the replay path compiled against Triton's interpreter, put right, which runs once; what a row of
    paged indices costs in a long launch against a short one; what the memory checker costs. Takes minutes."""
    from fuzz.run import CannotRun

    if triton_cpu.prepare("compiled") == "gpu":
        raise CannotRun("Triton's kernels run on a GPU here: set VLLM_TARGET_DEVICE=cpu")
    from fuzz.triton_cpu.interpreter import interpreting
    from fuzz.triton_cpu.measure import bench_checker
    from fuzz.triton_cpu.replay_path import KERNELS

    ratios, unequal, missing = {}, [], []
    before = triton_cpu.fallbacks.copy()
    for name, build in KERNELS.items():
        programs = STEP if name == "swa_indices" else PROGRAMS
        try:
            compiled, interpreted = build(programs), build(programs)
        except (ImportError, AttributeError):
            missing.append(name)
            continue
        build(programs).run()  # compiles it
        with interpreting():
            slow = _seconds(interpreted.run)
        compiled.run()
        if not compiled.agrees(interpreted):
            unequal.append(name)
        ratios[f"lockstep_vs_interpreter_{name}"] = slow / _median(build(programs).run)
    per_row = {programs: _median(KERNELS["swa_indices"](programs).run) / programs for programs in (STEP, MANY)}
    return {
        **ratios,
        "per_row_4096_vs_688": per_row[MANY] / per_row[STEP],
        **bench_checker(),
        "unequal": unequal,
        "missing": missing,
        "fallbacks": triton_cpu.fallbacks_since(before),
    }


def _seconds(run: Callable[[], Any]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def _median(run: Callable[[], Any]) -> float:
    return statistics.median(_seconds(run) for _ in range(ROUNDS))


def _accepted(profile: str, run: Callable[[Case], None]) -> list[Case]:
    """CASES cases of the profile that vLLM takes, the same ones every time. Runs each once, as a warm-up."""
    from hypothesis import HealthCheck, Phase, given, seed, settings

    from fuzz.strategies import cases

    found: list[Case] = []

    @seed(0)
    @settings(
        max_examples=2 * CASES,
        database=None,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(profile))
    def collect(case: Case) -> None:
        if len(found) == CASES:
            return
        try:
            run(case)
        except Refused:
            return
        found.append(case)

    collect()
    return found


BENCHES: dict[str, Callable[[str], dict[str, Any]]] = {
    "scheduler": bench_scheduler,
    "engine": bench_engine,
    "triton": bench_triton,
}
"""Benchmark name to the function that runs it on a profile."""
