# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""An engine in a child process, so that a death of vLLM is a finding and not the end of the run.

``ChildEngine`` is an engine like any other. Its child runs one registered engine for many cases and is replaced when it
dies, hangs or is cut off. Nothing is kept in files, and no port is opened: two pipes, which close with the processes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from importlib import import_module
from typing import Any

import msgspec

from fuzz.case import Case, decode, encode
from fuzz.engines import load, wire
from fuzz.engines.base import Engine, Refused, Unavailable
from fuzz.engines.follow import traced_requests
from invariants.trace import Fault, Trace

CASE_SECONDS = 300.0
START_SECONDS = 300.0
END_SECONDS = 10.0
"""From closed pipes to the end of the process."""
LOG_LINES = 40
"""Shown of a child's output; ``DUMP_LINES`` are kept, since a dump of many threads is longer."""
DUMP_LINES = 2000
_FRAME = re.compile(r'File "[^"]*site-packages/(vllm/[^"]+)", line \d+ in (\S+)')
_MAIN_THREAD = "Current thread 0x"
"""How faulthandler heads the stack of the thread that got the signal, innermost frame first."""
_DUMPED = re.compile(r'Thread 0x|  File "|$')


class ChildFailure(RuntimeError):
    """replaycheck itself failed in the child; the message is the child's traceback."""


class ChildEngine:
    """The engine ``name`` ("module:Class" for one that is not registered) in a process of its own.

    ``seconds``: how long a case may take before it counts as hung. Raises ``Unavailable``.
    """

    def __init__(self, name: str, seconds: float = CASE_SECONDS) -> None:
        self.name = name.rpartition(":")[2]
        self._target = name
        self._seconds = seconds
        self._child: _Child | None = None
        ready = self._running().ready
        self.has_model: bool = ready.has_model
        self._versions = ready.versions
        atexit.register(self.close)

    def versions(self) -> dict[str, str]:
        """See ``Engine.versions``."""
        return self._versions

    def run(self, case: Case, brisk: bool = False) -> Trace:
        """See ``Engine.run``. A child that dies or hangs gives a trace with that fault and nothing else."""
        child = self._running()
        started = time.monotonic()
        try:
            child.send(wire.Order(encode(case), brisk), started + self._seconds)
            answer = child.receive(started + self._seconds)
            if isinstance(answer, wire.Ran):
                return wire.decode_trace(answer.trace)
        except wire.Closed:
            fault = child.death()
        except wire.Late:
            fault = child.hang(self._seconds)
        except BaseException:
            # Interrupted, or what came was no answer: its next answer would be taken for that of another case.
            self.close()
            raise
        else:
            if answer.kind == "refused":
                raise Refused(answer.message)
            if answer.kind == "unavailable":
                raise Unavailable(answer.message)
            if answer.kind == "own":
                raise ChildFailure(answer.message)
            fault = Fault("exception", -1, answer.message, "out of memory")
        self.close()
        return Trace(
            engine=self.name,
            geometry=case.geometry,
            requests=traced_requests(case, self.has_model),
            groups=[],
            replay_expected=case.geometry.replay,
            kernels="none",
            faults=[fault],
            versions=self._versions,
            seconds=time.monotonic() - started,
        )

    def close(self) -> None:
        """End the child. The next case gets a new one."""
        if self._child:
            self._child.kill()
            self._child = None

    def _running(self) -> _Child:
        if self._child is None:
            self._child = _Child(self._target)
        return self._child


class _Child:
    """One child process, from its start to its end. Raises ``Unavailable`` if it does not get ready."""

    def __init__(self, target: str) -> None:
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fuzz.engines.child", target, str(orders), str(answers)],
            pass_fds=(orders, answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.close(orders)
        os.close(answers)
        self._log: deque[str] = deque(maxlen=DUMP_LINES)
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        try:
            answer = self.receive(time.monotonic() + START_SECONDS)
        except (wire.Closed, wire.Late) as problem:
            fault = self.death() if isinstance(problem, wire.Closed) else self.hang(START_SECONDS)
            raise Unavailable(f"its process did not start: {fault.message.splitlines()[-1]}") from problem
        except BaseException:
            self.kill()
            raise
        if not isinstance(answer, wire.Ready):
            self.kill()
            raise Unavailable(answer.message)
        self.ready = answer

    def send(self, message: Any, deadline: float) -> None:
        wire.send(self._orders, message, deadline)

    def receive(self, deadline: float) -> Any:
        return wire.receive(self._answers, wire.Answer, deadline, lambda: self._process.poll() is None)

    def death(self) -> Fault:
        """How it ended, with its last words."""
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return Fault("exception", -1, f"vLLM's process closed its pipes and lived on{self._tail()}", "closed pipe")
        self.kill()
        if code >= 0:
            return Fault("exception", -1, f"vLLM's process ended by itself with exit code {code}{self._tail()}", "exit")
        name = signal.Signals(-code).name
        memory = " (also what the kernel sends when memory runs out)" if name == "SIGKILL" else ""
        return Fault("signal", -1, f"vLLM's process was ended by {name}{memory}{self._tail()}", name)

    def hang(self, seconds: float) -> Fault:
        """Where it hangs; it is killed."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)  # faulthandler writes every thread's stack
        time.sleep(1)
        self.kill()
        lines = list(self._log)
        start = max((number for number, line in enumerate(lines) if line.startswith(_MAIN_THREAD)), default=None)
        before = lines if start is None else [line for line in lines[:start] if not _DUMPED.match(line)]
        stack = [] if start is None else lines[start:]
        at = _FRAME.search("\n".join(stack or lines))
        shown = _quoted(before[-LOG_LINES // 2 :] + stack[:LOG_LINES])
        message = f"vLLM gave no answer in {seconds:g} s{shown}"
        return Fault("hang", -1, message, f"{at.group(1)}, {at.group(2)}" if at else "")

    def kill(self) -> None:
        """End it and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(timeout=5)
        for pipe in (self._orders, self._answers):
            with contextlib.suppress(OSError):
                os.close(pipe)
        self._orders = self._answers = -1
        if self._process.stdout and not self._reader.is_alive():
            self._process.stdout.close()

    def _tail(self) -> str:
        return _quoted(list(self._log)[-LOG_LINES:])

    def _read_log(self) -> None:
        output = self._process.stdout
        # In pieces, since what has no line ends would be kept whole.
        while output and (piece := output.readline(1 << 12)):
            self._log.append(piece.decode(errors="replace").rstrip()[:300])


def _quoted(lines: list[str]) -> str:
    return "".join(f"\n    | {line}" for line in lines)


def main(target: str, orders: int, answers: int) -> None:
    """The child: an engine that takes orders until nobody gives any."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    faulthandler.enable()
    try:
        engine = _open(target)
        wire.send(answers, wire.Ready(engine.has_model, engine.versions()))
    except (Unavailable, ImportError, KeyError) as error:
        wire.send(answers, wire.Failed("unavailable", str(error)))
        return
    with contextlib.suppress(wire.Closed):
        while True:
            order = wire.receive(orders, wire.Order)
            wire.send(answers, _answer(engine, order))


def _answer(engine: Engine, order: wire.Order) -> wire.Ran | wire.Failed:
    try:
        return wire.Ran(msgspec.Raw(wire.encode_trace(engine.run(decode(order.case), order.brisk))))
    except Refused as error:
        return wire.Failed("refused", str(error))
    except Unavailable as error:
        return wire.Failed("unavailable", str(error))
    except MemoryError as error:
        return wire.Failed("memory", f"MemoryError: {error}")
    except Exception as error:
        text = "".join(traceback.format_exception(error)).rstrip()
        memory = isinstance(error, RuntimeError) and "allocate memory" in str(error)
        return wire.Failed("memory" if memory else "own", text)


def _open(target: str) -> Engine:
    module, _, name = target.partition(":")
    if not name:
        return load(target)
    engine: Engine = getattr(import_module(module), name)()
    return engine


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
