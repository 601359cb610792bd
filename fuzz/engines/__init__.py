# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""What can run a case. One file an engine, one line in ``ENGINES``."""

from __future__ import annotations

from importlib import import_module

from fuzz.engines.base import Engine

ENGINES: dict[str, str] = {
    "scheduler": "fuzz.engines.scheduler:SchedulerEngine",
    "kernels": "fuzz.engines.kernels:KernelsEngine",
    "cpu": "fuzz.engines.cpu:CpuEngine",
}
"""Engine name to "module:class"; loaded only when asked for, since an engine imports vLLM."""

IN_A_CHILD = frozenset({"cpu"})
"""Engines that the command line runs in a child process (``child.py``), because a model may end theirs."""


def load(name: str) -> Engine:
    """The engine of that name. Raises ``KeyError`` if there is none, ``Unavailable`` if it cannot run here."""
    module, _, attribute = ENGINES[name].partition(":")
    engine: Engine = getattr(import_module(module), attribute)()
    return engine
