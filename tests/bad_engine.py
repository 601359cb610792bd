# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""An engine that also spoils what is between its process and ours, in the way that the first request's id says."""

from __future__ import annotations

import importlib.util
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable

import mortal_engine
import numpy as np

from fuzz.case import Case
from fuzz.engines import wire
from invariants.trace import Trace


class Bad(mortal_engine.Mortal):
    name = "bad"

    def misbehave(self, case: Case, trace: Trace) -> None:
        super().misbehave(case, trace)
        answers = int(sys.argv[3])
        match case.requests[0].id:
            case "orphan":  # what it forked holds its pipes open when it dies
                if os.fork() == 0:
                    time.sleep(1000)
                os.kill(os.getpid(), signal.SIGKILL)
            case "garbage":
                os.write(answers, struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1")
            case "too-long":
                os.write(answers, struct.pack("<I", 0xFFFFFFFF))
            case "closes":
                os.close(answers)
                time.sleep(1000)
            case "deep":  # the innermost frames are the first of a dump that is longer than the tail
                threading.Thread(target=_vllm_function("other"), daemon=True).start()
                self._sink(90)
            case "slow":
                time.sleep(1.5)
            case "flood":
                for _ in range(200):
                    os.write(1, b"x" * (1 << 20))
            case "busy":  # in C, with the interpreter's lock held
                sum(range(1 << 62))
            case "absurd":
                np.ones(1 << 50)
            case "gpu-memory":
                raise RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB")
            case "unflushed":
                print("last words")
                os.kill(os.getpid(), signal.SIGKILL)
            case "nameless":
                os.kill(os.getpid(), signal.SIGRTMIN + 5)
            case "deep-death":
                self._sink(60, signal.SIGSEGV)
            case "vast":
                wire.MAX_TRACE = 100
            case "os-error":
                raise OSError("cannot allocate memory in static TLS block")

    def _sink(self, frames: int, death: signal.Signals | None = None) -> None:
        if not frames:
            if death:
                innermost(death)
            _vllm_function("bottom")()
        self._sink(frames - 1, death)


def innermost(death: signal.Signals) -> None:
    os.kill(os.getpid(), death)


class Elsewhere(mortal_engine.Mortal):
    """Says which vLLM it would import."""

    def versions(self) -> dict[str, str]:
        spec = importlib.util.find_spec("vllm")
        return {"vllm": str(spec and spec.origin)}


def _vllm_function(name: str) -> Callable[[], None]:
    """A function that hangs, in a file of the path that vLLM's have."""
    names = {"time": time}
    source = f"def {name}():\n    time.sleep(1000)\n"
    exec(compile(source, "/lib/site-packages/vllm/v1/deep.py", "exec"), names)
    return names[name]
