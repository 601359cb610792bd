# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Tiles whose lanes are all equal from some lane on: what follows from a masked load, past its mask.

Loading through them touches one place over and over, so that one lane can stand for the rest. Kernels have tiles of
1024 lanes for rows of a few tokens.
"""

# ruff: noqa: D102 - Handle documents its methods

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from fuzz.triton_cpu.emitter import Emitter
from fuzz.triton_cpu.tiles import INT32, Buffer, Handle, Index, Lanes, Load, Memo


@dataclass(eq=False, kw_only=True)
class Repeated(Buffer):
    """The lanes up to ``last``, an i32; all past it equal that one."""

    last: Any

    def lane(self, emitter: Emitter, index: Index, memo: Memo) -> Any:  # noqa: ARG002
        builder = emitter.builder
        place = builder.select(builder.icmp_signed("<", index[0], self.last), index[0], self.last)
        return builder.load(emitter.cell(self, (place,)), typ=self.type)


def settle_distinct(emitter: Emitter, load: Load) -> bool:
    """Have the load read memory now, one lane for all that equal it; False if it is not known to have such lanes."""
    last = _last(emitter, load)
    if last is None:
        return False
    builder, full = emitter.builder, ir.Constant(INT32, load.shape[0] - 1)
    last = builder.select(builder.icmp_signed("<", last, full), last, full)
    lanes = emitter.new_buffer(load)
    emitter.fill([lanes], [load], [builder.add(last, ir.Constant(INT32, 1))])
    load.settled = Repeated(load.type, load.shape, memory=lanes.memory, last=last)
    return True


def _last(emitter: Emitter, handle: Handle) -> Any | None:
    """The i32 lane that all lanes past it equal; None if there may be none, or more axes than one."""
    if isinstance(handle, Repeated):
        return handle.last
    if len(handle.shape) > 1 or isinstance(handle, Lanes) or (isinstance(handle, Buffer) and handle.limits is None):
        return None
    found = handle.limits[0] if isinstance(handle, Buffer) and handle.limits else ir.Constant(INT32, 0)
    for part in handle.parts():
        if part.shape in ((), (1,)):
            continue
        last = _last(emitter, part)
        if last is None:
            return None
        found = emitter.builder.select(emitter.builder.icmp_signed(">", last, found), last, found)
    return found
