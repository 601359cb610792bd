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
from pathlib import Path
from typing import Any

import msgspec

from fuzz.case import Case, decode, encode
from fuzz.engines import load, wire
from fuzz.engines.base import Engine, OwnFailure, Refused, Unavailable, site_of
from fuzz.engines.follow import traced_requests
from invariants.trace import Fault, Trace

CASE_SECONDS = 300.0
START_SECONDS = 300.0
END_SECONDS = 10.0
"""From closed pipes to the end of the process."""
LOG_LINES = 40
"""Shown of a child's output; ``DUMP_LINES`` are kept, since a dump of many threads is longer."""
DUMP_LINES = 2000
_FRAME = re.compile(r'File "[^"]*(?:-packages|/vllm)/(vllm/[^"]+)", line \d+ in (\S+)')
"""A frame of vLLM: in site-packages, in Debian's and the ROCm images' dist-packages, or in a clone."""
_MAIN_THREAD = "Current thread 0x"
"""How faulthandler heads the stack of the thread that got the signal, innermost frame first."""
_DUMPED = re.compile(r'Thread 0x|  File "|$')


class ChildEngine:
    """The engine ``name`` ("module:Class" for one that is not registered) in a process of its own.

    ``seconds``: how long a case may take before it counts as hung. Raises ``Unavailable``. The child ends with the
    thread that started it, not only with the process: run cases from a thread that stays.
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
                raise OwnFailure(answer.message, answer.site)
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
        # -u: last words are not lost in a buffer. -P and our own path: -m would put the working directory first, and
        # in a clone of vLLM the child would have another vLLM than we have.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-P", "-m", "fuzz.engines.child", target, str(orders), str(answers)],
                env=os.environ | {"PYTHONPATH": path},
                pass_fds=(orders, answers),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            os.close(self._orders)
            os.close(self._answers)
            raise Unavailable(f"its process did not start: {error}") from error
        finally:
            os.close(orders)
            os.close(answers)
        self._oom_kills = _oom_kills()
        self._ended = False
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
        self._oom_kills = _oom_kills()
        wire.send(self._orders, message, deadline)

    def receive(self, deadline: float) -> Any:
        return wire.receive(self._answers, wire.Answer, deadline, self._alive)

    def _alive(self) -> bool:
        """Not by ``poll``, which frees the process id: until ``kill`` has used it, it must name nobody else."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def death(self) -> Fault:
        """How it ended, with its last words."""
        deadline = time.monotonic() + END_SECONDS
        while (alive := self._alive()) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.kill()
        shown, _ = self._last_words()
        if alive:
            return Fault("exception", -1, f"vLLM's process closed its pipes and lived on{shown}", "closed pipe")
        code = self._process.returncode
        if code is None:
            return Fault("hang", -1, f"vLLM's process is dead, but does not end{shown}")
        if code >= 0:
            return Fault("exception", -1, f"vLLM's process ended by itself with exit code {code}{shown}", "exit")
        name = _signal_name(-code)
        memory = _about_memory(self._oom_kills, _oom_kills()) if name == "SIGKILL" else ""
        return Fault("signal", -1, f"vLLM's process was ended by {name}{memory}{shown}", name)

    def hang(self, seconds: float) -> Fault:
        """Where it hangs; it is killed."""
        if not self._alive():
            return self.death()  # just now
        # faulthandler writes every thread's stack. Not by Popen.send_signal, which looks for the end and takes it.
        os.kill(self._process.pid, signal.SIGUSR1)
        time.sleep(1)
        self.kill()
        shown, place = self._last_words()
        return Fault("hang", -1, f"vLLM gave no answer in {seconds:g} s{shown}", place)

    def kill(self) -> None:
        """End it and what it started, once."""
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)  # a process that waits for a broken driver cannot be ended
        self._reader.join(timeout=5)
        for pipe in (self._orders, self._answers):
            with contextlib.suppress(OSError):
                os.close(pipe)
        self._orders = self._answers = -1
        if self._process.stdout and not self._reader.is_alive():
            self._process.stdout.close()

    def _last_words(self) -> tuple[str, str]:
        """The end of its output, and the innermost frame of vLLM if that is a dump of stacks.

        Of a dump, the thread that got the signal is shown from its innermost frame on, and what came before the dump.
        """
        lines = list(self._log)
        start = max((number for number, line in enumerate(lines) if line.startswith(_MAIN_THREAD)), default=None)
        if start is None:
            at, shown = _FRAME.search("\n".join(lines)), lines[-LOG_LINES:]
        else:
            before = [line for line in lines[:start] if not _DUMPED.match(line)]
            at, shown = _FRAME.search("\n".join(lines[start:])), before[-LOG_LINES // 2 :] + lines[start:][:LOG_LINES]
        return "".join(f"\n    | {line}" for line in shown), f"{at.group(1)}, {at.group(2)}" if at else ""

    def _read_log(self) -> None:
        output = self._process.stdout
        # In pieces, since what has no line ends would be kept whole.
        while output and (piece := output.readline(1 << 12)):
            self._log.append(piece.decode(errors="replace").rstrip()[:300])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have none
        return f"signal {number}"


def _oom_kills() -> int | None:
    """How many processes of this machine the kernel has ended for want of memory; None: it does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def _about_memory(before: int | None, after: int | None) -> str:
    if before is None or after is None:
        return " (which is also what the kernel sends when memory runs out)"
    if after > before:
        return " (memory ran out: the kernel's out-of-memory killer ended a process of this machine meanwhile)"
    return " (not by the kernel's out-of-memory killer, which ended no process meanwhile)"


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
        wire.send(answers, wire.Failed("unavailable", " ".join(str(error).split())))
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
        words = str(error).lower()  # torch's: of the CPU's allocator, of a GPU's
        memory = isinstance(error, RuntimeError) and ("allocate memory" in words or "out of memory" in words)
        return wire.Failed("memory" if memory else "own", text, site_of(error))


def _open(target: str) -> Engine:
    module, _, name = target.partition(":")
    if not name:
        return load(target)
    engine: Engine = getattr(import_module(module), name)()
    return engine


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
