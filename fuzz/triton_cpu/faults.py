# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""What a checked launch (``memory``) did wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class MemoryFault:
    """One access of one lane that must not be."""

    kernel: str
    file: str
    line: int
    program: tuple[int, int, int]
    lane: tuple[int, ...]
    """Place in the tile; () of a scalar access."""
    tensor: str
    """The kernel's parameter, or what the tensor was registered as; "" for an address in no known tensor."""
    offset: int
    """From the tensor's first element, in its elements (rounded down); the address, if there is no tensor."""
    access: Literal["load", "store"]
    what: str
    value: int | float | None = None
    """Of a store."""
    active: bool = True
    """False for a lane that is masked off, which only a strict checker looks at."""

    def __str__(self) -> str:
        tensor = f"{self.tensor}[{self.offset}]" if self.tensor else f"address {self.offset:#x}"
        value = "" if self.value is None else f" of {self.value}"
        place = f"{Path(self.file).name}:{self.line}, program {self.program}, lane {self.lane}"
        return f"{self.kernel}: {self.access}{value} at {tensor}: {self.what} ({place})"


class MemoryFaults(Exception):
    """What one launch did wrong: the first few of ``total`` faults. The launch ran to its end; a faulty lane loaded
    ``other`` and stored nothing, but a race was only watched."""

    def __init__(self, faults: Sequence[MemoryFault], total: int) -> None:
        self.faults = tuple(faults)
        self.total = total
        more = f" (and {total - 1} more)" if total > 1 else ""
        super().__init__(f"{faults[0]}{more}")
