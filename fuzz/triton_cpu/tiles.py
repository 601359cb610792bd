# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Values of a kernel while it is translated, and the LLVM code that computes them.

A scalar is computed where the program computes it. A tile is not: it is a rule for computing one lane, and code comes
out of it only in the lane loop of a store, a reduction or a buffer, so lanes that no store can reach cost nothing.
Relied upon: arithmetic has no effects and never traps, so computing a lane twice, late or in vain changes nothing.
Loads are the exception, since memory changes (``emitter.py``).
"""

# ruff: noqa: D102 - lane and parts are documented once

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llvmlite import ir

if TYPE_CHECKING:
    from fuzz.triton_cpu.emitter import Emitter

BOOL, BYTE, INT32, INT64 = (ir.IntType(bits) for bits in (1, 8, 32, 64))

Index = tuple[Any, ...]
Memo = dict[tuple[Any, Index], Any]
Limits = Sequence[Any]
"""For each axis an i32: no lane at or past it matters."""


class Unsupported(Exception):
    """What the translator does not know exactly; the kernel then runs under Triton's interpreter."""

    line: int | None = None


@dataclass(eq=False)
class Handle:
    """A value. ``type`` is LLVM's type of one lane; a pointer is an i64 address whose ``pointee`` is what it
    points to. A float is carried as the integer of its width; ``floats`` computes with it."""

    type: Any
    shape: tuple[int, ...]
    pointee: Any = None

    def lane(self, emitter: Emitter, index: Index, memo: Memo) -> Any:
        """Emit the lane at ``index`` (an i32 for each axis)."""
        raise NotImplementedError

    def parts(self) -> Iterable[Handle]:
        """What the lanes are computed from."""
        return ()


@dataclass(eq=False, kw_only=True)
class Scalar(Handle):
    """A value that is already computed."""

    value: Any
    origin: Any = None
    """Of a pointer whose accesses are checked: the number of its tensor, see ``checks``."""

    def lane(self, emitter: Emitter, index: Index, memo: Memo) -> Any:  # noqa: ARG002
        return self.value


@dataclass(eq=False, kw_only=True)
class Lanes(Handle):
    """start, start + 1, ... along the only axis."""

    start: int

    def lane(self, emitter: Emitter, index: Index, memo: Memo) -> Any:  # noqa: ARG002
        return emitter.builder.add(index[0], ir.Constant(INT32, self.start))


@dataclass(eq=False, kw_only=True)
class Map(Handle):
    """An elementwise operation on handles of the same shape. ``name`` is what ``bounds`` knows it by."""

    name: str
    emit: Callable[..., Any]
    args: tuple[Handle, ...]

    def lane(self, emitter: Emitter, index: Index, memo: Memo) -> Any:
        return self.emit(emitter.builder, *(emitter.lane(arg, index, memo) for arg in self.args))

    def parts(self) -> Iterable[Handle]:
        return self.args


@dataclass(eq=False, kw_only=True)
class View(Handle):
    """``source`` under another shape. ``axes``: for each axis of the source the axis of the view that walks it,
    or None where it has one lane only."""

    source: Handle
    axes: tuple[int | None, ...]

    def lane(self, emitter: Emitter, index: Index, memo: Memo) -> Any:
        return emitter.lane(self.source, self.inner(index), memo)

    def inner(self, index: Index) -> Index:
        """Where the lane at ``index`` is in the source."""
        zero = ir.Constant(INT32, 0)
        return tuple(zero if axis is None else index[axis] for axis in self.axes)

    def parts(self) -> Iterable[Handle]:
        return (self.source,)


@dataclass(eq=False, kw_only=True)
class Buffer(Handle):
    """Lanes that were computed into memory. Lanes past ``limits`` were not, and are ``other``."""

    memory: Any
    limits: Limits | None = None
    other: Handle | None = None
    origin: Any = None
    """As of a ``Scalar``, and of all lanes."""

    def lane(self, emitter: Emitter, index: Index, memo: Memo) -> Any:
        builder = emitter.builder
        value = builder.load(emitter.cell(self, index), typ=self.type)
        if self.limits is None or self.other is None:
            return value
        inside = ir.Constant(BOOL, 1)
        for position, limit in zip(index, self.limits, strict=True):
            inside = builder.and_(inside, builder.icmp_signed("<", position, limit))
        return builder.select(inside, value, emitter.lane(self.other, index, memo))

    def parts(self) -> Iterable[Handle]:
        return () if self.other is None else (self.other,)


@dataclass(eq=False, kw_only=True)
class Load(Handle):
    """Reads memory. Once ``settled`` it reads the copy. ``other`` is for lanes that are masked off."""

    pointer: Handle
    mask: Handle | None
    other: Handle
    settled: Buffer | None = None

    def lane(self, emitter: Emitter, index: Index, memo: Memo) -> Any:
        if self.settled is not None:
            return emitter.lane(self.settled, index, memo)
        address = emitter.lane(self.pointer, index, memo)
        mask = None if self.mask is None else emitter.lane(self.mask, index, memo)
        mask = emitter.may_read(self, address, mask, index, memo)
        if mask is None:
            return emitter.read(address, self.type)
        builder = emitter.builder
        other = emitter.lane(self.other, index, memo)
        before = builder.block
        with builder.if_then(mask):
            value = emitter.read(address, self.type)
            inside = builder.block
        result = builder.phi(self.type)
        result.add_incoming(value, inside)
        result.add_incoming(other, before)
        return result

    def parts(self) -> Iterable[Handle]:
        if self.settled is not None:
            return (self.settled,)
        return (self.pointer, self.other) if self.mask is None else (self.pointer, self.other, self.mask)


def unsettled(handles: Iterable[Handle]) -> list[Load]:
    """The loads that computing any lane of ``handles`` would still read from memory."""
    found: dict[int, Load] = {}
    seen: set[int] = set()
    todo = list(handles)
    while todo:
        handle = todo.pop()
        if id(handle) in seen:
            continue
        seen.add(id(handle))
        if isinstance(handle, Load) and handle.settled is None:
            found[id(handle)] = handle
        todo.extend(handle.parts())
    return list(found.values())
