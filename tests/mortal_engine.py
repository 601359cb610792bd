# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""An engine that dies in the way that the first request's id says. For tests of what runs it in a child process."""

from __future__ import annotations

import os
import signal
import time

import fake_engine

from fuzz.case import Case
from fuzz.engines.base import Refused, Unavailable
from invariants.trace import Trace


class Mortal(fake_engine.Clean):
    name = "mortal"

    def misbehave(self, case: Case, trace: Trace) -> None:
        trace.versions = {"pid": str(os.getpid())}
        how = case.requests[0].id
        print(f"asked to {how}", flush=True)
        if how in ("SIGKILL", "SIGABRT", "SIGSEGV"):
            os.kill(os.getpid(), signal.Signals[how])
        if how == "hang":
            time.sleep(1000)
        if how == "exit":
            os._exit(3)
        if how == "memory":
            raise MemoryError("nothing left")
        if how == "allocate":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
        if how == "raise":
            raise ValueError("our own mistake")
        if how == "refuse":
            raise Refused("vLLM does not want to")


class Absent(Mortal):
    def __init__(self) -> None:
        raise Unavailable("there is nothing to run")


class Stillborn(Mortal):
    def __init__(self) -> None:
        print("cannot be born", flush=True)
        os._exit(9)
