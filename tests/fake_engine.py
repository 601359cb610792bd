# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Engines that run nothing, for tests of what is built around engines. Each behaves badly in one way.

Their traces are those of a run in which every request was refused, which no invariant has anything against.
"""

from __future__ import annotations

import msgspec
import numpy as np
from msgspec import UNSET

from fuzz.case import Case
from fuzz.engines.base import Refused, Unavailable
from invariants.trace import Fault, Final, Group, Trace, TracedRequest


class Clean:
    """Nothing is ever wrong."""

    name = "clean"
    has_model = False

    def __init__(self) -> None:
        self.runs = 0

    def run(self, case: Case, brisk: bool = False) -> Trace:
        self.runs += 1
        # Where no limit is given, nobody says who should have been refused.
        sizes, blocks = msgspec.structs.replace(case.geometry, max_model_len=UNSET), case.geometry.num_blocks - 1
        trace = Trace(
            engine=self.name,
            geometry=sizes,
            requests=[
                TracedRequest(request.id, request.arrive, request.tokens(), request.max_tokens, finished="refused")
                for request in case.requests
            ],
            groups=[
                Group("cacheable", sizes.block_size, True, 0),
                Group("window", sizes.swa_block_size, not sizes.replay, sizes.window if sizes.replay else 0),
            ],
            replay_expected=sizes.replay,
            kernels="none" if brisk else "compiled",
            final=Final(blocks, blocks, np.zeros(0, np.int32)),
        )
        self.misbehave(case, trace)
        return trace

    def versions(self) -> dict[str, str]:
        return {"vllm": "0.0.fake", "kernels": "compiled"}

    def misbehave(self, case: Case, trace: Trace) -> None:
        pass


class Broken(Clean):
    """Faults on a prompt of 20 tokens or more; the smallest case is one request of 20."""

    name = "broken"

    def misbehave(self, case: Case, trace: Trace) -> None:
        if any(len(request) >= 20 for request in case.requests):
            trace.faults.append(Fault("exception", 0, "a prompt of 20 tokens or more"))


class TwiceBroken(Broken):
    """Hangs on three requests or more, too."""

    name = "twice-broken"

    def misbehave(self, case: Case, trace: Trace) -> None:
        super().misbehave(case, trace)
        if len(case.requests) >= 3:
            trace.faults.append(Fault("hang", 0, "three requests or more"))


class Crashing(Clean):
    """An engine with a bug of its own: it raises on an event."""

    name = "crashing"

    def misbehave(self, case: Case, trace: Trace) -> None:  # noqa: ARG002
        if case.events:
            raise IndexError("no such event")


class Picky(Clean):
    """Refuses every case."""

    name = "picky"

    def misbehave(self, case: Case, trace: Trace) -> None:  # noqa: ARG002
        raise Refused(f"a pool of {case.geometry.num_blocks} blocks is not to my taste")


class Interrupted(Broken):
    """Somebody presses Ctrl-C during the 200th run."""

    name = "interrupted"

    def misbehave(self, case: Case, trace: Trace) -> None:
        if self.runs == 200:
            raise KeyboardInterrupt
        super().misbehave(case, trace)


class Missing(Clean):
    """Cannot run here."""

    name = "missing"

    def __init__(self) -> None:
        raise Unavailable("this machine has no such accelerator")


ENGINES = {engine.name: engine for engine in (Clean, Broken, TwiceBroken, Crashing, Picky, Interrupted, Missing)}
