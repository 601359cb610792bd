# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The engine protocol: something that executes vLLM. An engine knows no invariant and no strategy.

To add one: a file beside this one, and a line in ``ENGINES`` (``fuzz/engines/__init__.py``).
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Protocol

from fuzz.case import Case
from invariants.trace import Trace


class Unavailable(Exception):
    """This machine cannot run the engine; the message says what is missing, in one line."""


class Refused(Exception):
    """vLLM does not accept the case's geometry; the message is vLLM's own reason, in one line."""


def refuse_loads(case: Case) -> None:
    """For engines without a KV connector. Raises ``Refused``."""
    if case.has_loads:
        raise Refused("an external load needs a KV connector, which this engine does not have")


class OwnFailure(Exception):
    """replaycheck itself failed in another process; the message is the traceback there, ``site`` where it raised."""

    def __init__(self, message: str, site: str) -> None:
        super().__init__(message)
        self.site = site


def site_of(error: BaseException) -> str:
    """The file and function that raised, for telling failures of our own apart."""
    if isinstance(error, OwnFailure):
        return error.site
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.name}"


class Engine(Protocol):
    """Runs cases. One vLLM import a process, many cases an engine."""

    name: str
    has_model: bool
    """Whether a model runs: cases may then say which ``Probe``, and traces have outputs."""

    def run(self, case: Case, brisk: bool = False) -> Trace:
        """Run the case to its end. Raises ``Refused``; whatever vLLM raises while running becomes a ``Fault``.

        ``brisk``: the engine may leave out what costs it most; ``Trace.kernels`` says whether it did.
        """
        ...

    def versions(self) -> dict[str, str]:
        """What to print at the head of a report: vLLM, torch, Triton, how kernels run."""
        ...
