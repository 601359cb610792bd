# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""An engine in a child process: every way to die is a finding with its case, and the next case runs."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fuzz import corpus, run
from fuzz.case import Case, Request
from fuzz.engines import child
from fuzz.engines.base import Engine, Refused, Unavailable
from fuzz.engines.child import ChildEngine
from invariants.trace import Geometry


def case(how: str) -> Case:
    sizes = Geometry(window=4, block_size=4, swa_block_size=2, num_blocks=40, max_num_batched_tokens=8, max_num_seqs=4)
    prompt = (("s", 0, 21),)
    requests = (
        Request(id=how, arrive=0, prompt=prompt, max_tokens=2),
        Request(id="same", arrive=6, prompt=prompt, max_tokens=2),
    )
    return Case(geometry=sizes, requests=requests)


def child_of(target: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChildEngine]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    engine = ChildEngine(target, seconds=3)
    yield engine
    engine.close()


@pytest.fixture
def mortal(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChildEngine]:
    yield from child_of("mortal_engine:Mortal", monkeypatch)


@pytest.fixture
def bad(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChildEngine]:
    yield from child_of("bad_engine:Bad", monkeypatch)


def pid(engine: ChildEngine) -> int:
    return int(engine.run(case("live")).versions["pid"])


def gone(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize(
    ("how", "site", "words"),
    [
        ("SIGKILL", "signal in SIGKILL", "ended by SIGKILL"),
        ("SIGABRT", "signal in SIGABRT", "ended by SIGABRT"),
        ("SIGSEGV", "signal in SIGSEGV", "ended by SIGSEGV"),
        ("exit", "exception in exit", "exit code 3"),
        ("hang", "hang", "no answer in 3 s"),
        ("memory", "exception in out of memory", "nothing left"),
        ("allocate", "exception in out of memory", "can't allocate memory"),
    ],
)
def test_a_death_is_a_finding(
    how: str, site: str, words: str, mortal: ChildEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(corpus, "ROOT", tmp_path)
    first = pid(mortal)
    judged = run.run_case(mortal, case(how))
    assert [(found.invariant, found.site) for found in judged.violations] == [("no-fault", site)]
    message = judged.violations[0].message
    assert words in message
    if "out of memory" not in site:
        assert f"| asked to {how}" in message
    kept = run.keep(judged, mortal, seed=1)
    assert corpus.read(kept.path).requests == case(how).requests
    assert pid(mortal) != first
    assert gone(first)


def test_a_hang_says_where(mortal: ChildEngine):
    message = run.run_case(mortal, case("hang")).violations[0].message
    assert "mortal_engine.py" in message
    assert "in misbehave" in message


def test_a_hang_below_a_deep_stack_says_where(bad: ChildEngine):
    """The dump has 90 frames and another thread's before it, which hangs in vLLM too."""
    (found,) = run.run_case(bad, case("deep")).violations
    assert found.site == "hang in vllm/v1/deep.py, bottom"
    assert "in bottom" in found.message
    assert found.message.count("\n") < 60


def test_a_death_below_a_deep_stack_says_where(bad: ChildEngine):
    (found,) = run.run_case(bad, case("deep-death")).violations
    assert found.site == "signal in SIGSEGV"
    assert "in innermost" in found.message


@pytest.mark.parametrize(
    ("how", "site", "words"),
    [
        ("busy", "hang", "in misbehave"),
        ("absurd", "exception in out of memory", "8.00 PiB"),
        ("gpu-memory", "exception in out of memory", "HIP out of memory"),
        ("nameless", f"signal in signal {signal.SIGRTMIN + 5}", "ended by signal"),
    ],
)
def test_more_ways_to_die(how: str, site: str, words: str, bad: ChildEngine):
    first = pid(bad)
    (found,) = run.run_case(bad, case(how)).violations
    assert (found.invariant, found.site) == ("no-fault", site)
    assert words in found.message
    assert pid(bad) != first
    assert gone(first)


def test_last_words_are_not_left_in_a_buffer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    engine = ChildEngine("bad_engine:Bad")
    try:
        assert "| last words" in run.run_case(engine, case("unflushed")).violations[0].message
    finally:
        engine.close()


def test_a_trace_too_large_to_send_is_our_own_failure(bad: ChildEngine):
    (found,) = run.run_case(bad, case("vast")).violations
    assert found.invariant == run.OWN_FAULT
    assert "at most 100 can be sent" in found.message


def test_the_child_has_our_vllm_in_a_clone_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    ours = importlib.util.find_spec("vllm")
    monkeypatch.chdir(tmp_path)
    engine = ChildEngine("bad_engine:Elsewhere")
    try:
        assert engine.versions()["vllm"] == str(ours and ours.origin)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("kills", "words"),
    [
        ((4, 5), "(memory ran out:"),
        ((4, 4), "(not by the kernel's out-of-memory killer"),
        ((None, None), "(which is also what the kernel sends when memory runs out)"),
    ],
)
def test_a_sigkill_says_whether_memory_was_the_cause(
    kills: tuple[int | None, int | None], words: str, mortal: ChildEngine, monkeypatch: pytest.MonkeyPatch
):
    counts = iter(kills)
    monkeypatch.setattr(child, "_oom_kills", lambda: next(counts))
    assert f"ended by SIGKILL {words}" in run.run_case(mortal, case("SIGKILL")).violations[0].message


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/usr/local/lib/python3.12/dist-packages/vllm/v1/a.py", "vllm/v1/a.py"),
        ("/home/u/vllm/.venv/lib/python3.12/site-packages/vllm/v1/a.py", "vllm/v1/a.py"),
        ("/app/vllm/vllm/v1/a.py", "vllm/v1/a.py"),
        ("/home/u/vllm/.venv/lib/python3.12/site-packages/torch/a.py", None),
    ],
)
def test_frames_of_vllm(path: str, place: str | None):
    at = child._FRAME.search(f'  File "{path}", line 7 in f')
    assert (at and at.group(1)) == place


def test_a_death_is_seen_though_a_forked_process_holds_the_pipe(bad: ChildEngine):
    started = time.monotonic()
    assert run.run_case(bad, case("orphan")).keys == [("no-fault", "signal in SIGKILL")]
    assert time.monotonic() - started < 2.5  # the watchdog's 3 s have not passed
    pid(bad)


def test_a_closed_pipe_of_a_living_child_is_no_deadlock(bad: ChildEngine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(child, "END_SECONDS", 0.5)
    first = pid(bad)
    assert run.run_case(bad, case("closes")).keys == [("no-fault", "exception in closed pipe")]
    assert gone(first)
    pid(bad)


@pytest.mark.parametrize(("how", "words"), [("garbage", "not a frame"), ("too-long", "a frame of 4294967295 bytes")])
def test_garbage_is_our_own_failure(how: str, words: str, bad: ChildEngine):
    first = pid(bad)
    (found,) = run.run_case(bad, case(how)).violations
    assert found.invariant == run.OWN_FAULT
    assert words in found.message
    assert pid(bad) != first


def test_what_is_said_to_be_no_memory_left_but_is_not(bad: ChildEngine):
    (found,) = run.run_case(bad, case("os-error")).violations
    assert found.invariant == run.OWN_FAULT


def test_an_interrupted_case_does_not_answer_for_the_next(bad: ChildEngine, monkeypatch: pytest.MonkeyPatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            bad.run(case("slow"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert [request.id for request in bad.run(case("live")).requests] == ["live", "same"]


def test_a_case_that_cannot_be_read_is_no_fault_of_vllm(bad: ChildEngine):
    twice = case("live").requests[:1] * 2
    (found,) = run.run_case(bad, msgspec.structs.replace(case("live"), requests=twice)).violations
    assert found.invariant == run.OWN_FAULT
    assert "a second request is called 'live'" in found.message


def test_output_without_line_ends_is_not_kept(bad: ChildEngine):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bad.run(case("flood"))  # 200 MiB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10  # KiB


def test_one_child_for_many_cases(mortal: ChildEngine):
    assert pid(mortal) == pid(mortal)


def test_what_is_no_death_passes_through(mortal: ChildEngine):
    first = pid(mortal)
    with pytest.raises(Refused, match=r"^vLLM does not want to$"):
        mortal.run(case("refuse"))
    judged = run.run_case(mortal, case("raise"))
    assert judged.violations[0].invariant == run.OWN_FAULT
    assert "our own mistake" in judged.violations[0].message
    assert judged.violations[0].site == "mortal_engine.py:misbehave"
    assert pid(mortal) == first


def test_a_closed_engine_leaves_nothing(mortal: ChildEngine):
    number = pid(mortal)
    before = len(os.listdir("/proc/self/fd"))
    mortal.close()
    assert gone(number)
    assert len(os.listdir("/proc/self/fd")) == before - 3


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("mortal_engine:Absent", "^there is nothing to run$"),
        ("mortal_engine:Stillborn", "did not start.*cannot be born"),
        ("no_such_module:Engine", "No module named 'no_such_module'"),
    ],
)
def test_a_child_that_does_not_start(target: str, reason: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    with pytest.raises(Unavailable, match=reason):
        ChildEngine(target)


def test_the_child_ends_with_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A parent that is killed closes nothing."""
    import subprocess
    import sys

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    script = (
        "import os, signal, test_child\n"
        "engine = test_child.ChildEngine('mortal_engine:Mortal')\n"
        "print(test_child.pid(engine), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    number = int(done.stdout)
    deadline = time.monotonic() + 10
    while not gone(number) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone(number)


def same(one: Any, other: Any) -> None:
    """Equal, arrays by type and value."""
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    elif dataclasses.is_dataclass(one):
        for field in dataclasses.fields(one):
            if field.name != "seconds":
                same(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            same(one[name], other[name])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            same(left, right)
    else:
        assert one == other


def test_the_cpu_engine_gives_the_same_trace(open_engine: Callable[[str], Engine]):
    inside = open_engine("cpu")
    apart = ChildEngine("cpu")
    try:
        same(apart.run(case("r")), inside.run(case("r")))
    finally:
        apart.close()


def test_the_scheduler_engine_gives_the_same_trace_and_is_killed_in_the_middle(
    open_engine: Callable[[str], Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(corpus, "ROOT", tmp_path)
    inside = open_engine("scheduler")
    apart = ChildEngine("scheduler")
    try:
        for brisk in (False, True):
            same(apart.run(case("r"), brisk), inside.run(case("r"), brisk))
        assert apart._child is not None
        timer = threading.Timer(1, os.kill, (apart._child._process.pid, signal.SIGKILL))
        timer.start()
        started = time.monotonic()
        judged = run.run_case(apart, LONG)
        timer.join()
        assert 1 <= time.monotonic() - started < 5
        assert judged.keys == [("no-fault", "signal in SIGKILL")]
        assert corpus.read(run.keep(judged, apart, seed=1).path).requests == LONG.requests
    finally:
        apart.close()


LONG = msgspec.structs.replace(
    case("r"),
    geometry=msgspec.structs.replace(case("r").geometry, num_blocks=4096),
    requests=tuple(msgspec.structs.replace(request, max_tokens=4096) for request in case("r").requests),
)
"""Takes far longer than the second after which its child is killed."""


def test_a_death_just_before_it_counts_as_a_hang(mortal: ChildEngine):
    """It is still the death that is told, and nothing is left open."""
    number, before = pid(mortal), len(os.listdir("/proc/self/fd"))
    assert mortal._child is not None
    child = mortal._child
    os.kill(number, signal.SIGKILL)
    while child._alive():
        time.sleep(0.01)
    fault = child.hang(3)
    assert (fault.kind, fault.place) == ("signal", "SIGKILL")
    assert gone(number)
    assert len(os.listdir("/proc/self/fd")) == before - 3
    mortal.close()
