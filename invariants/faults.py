# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Nothing that must never happen has happened: no exception out of vLLM, no dead or hung engine, no GPU fault."""

from __future__ import annotations

from collections.abc import Iterator

from invariants.trace import Violation
from invariants.view import View


def no_fault(view: View) -> Iterator[Violation]:
    """Every fault is a violation."""
    for fault in view.trace.faults:
        yield Violation(
            "no-fault",
            f"{fault.kind} while running: {fault.message}",
            expected="no fault",
            seen=fault.kind,
            step=None if fault.step < 0 else fault.step,
            site=f"{fault.kind} in {fault.place}" if fault.place else fault.kind,
        )
