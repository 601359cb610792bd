# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Values of a kernel while it is translated, and the LLVM code that computes them.

A scalar is computed where the program computes it. A tile is not: it is a rule for computing one lane, and code comes
out of it only in the lane loop of a store, a reduction or a buffer, so lanes that no store can reach cost nothing.
Relied upon: arithmetic has no effects and never traps, so computing a lane twice, late or in vain changes nothing.
Loads are the exception, since memory changes: whoever writes memory first has the loads that are still needed
copied into buffers (``Emitter.settle``), so that each load sees memory as of its place in the program.
"""

# ruff: noqa: D102 - lane and parts are documented once

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

BOOL, BYTE, INT32, INT64 = (ir.IntType(bits) for bits in (1, 8, 32, 64))
MAX_BUFFER_BYTES = 1 << 20
"""Of all buffers of one program together: they live on the stack."""

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


class Emitter:
    """Writes one program's LLVM code. ``bounds`` gives, for a mask, the lanes past which it is surely false."""

    def __init__(self, function: Any, bounds: Callable[[Emitter, Handle], Limits]) -> None:
        self.function = function
        self.bounds = bounds
        self.entry = function.append_basic_block("entry")
        """Holds the stack slots only: a slot made anywhere else would grow the stack with every iteration."""
        self.builder = ir.IRBuilder(function.append_basic_block("start"))
        self._start = self.builder.block
        self._buffer_bytes = 0
        self._spare: dict[tuple[int, int], list[Any]] = {}
        self._computed: dict[Handle, Buffer] = {}

    def close(self) -> None:
        """Nothing more comes: go on from the stack slots to the code."""
        with self.builder.goto_block(self.entry):
            self.builder.branch(self._start)

    def lane(self, handle: Handle, index: Index, memo: Memo) -> Any:
        """One lane of ``handle``; ``memo`` holds what this iteration has computed already."""
        if isinstance(handle, Scalar):
            return handle.value
        handle = self._computed.get(handle, handle)
        key = (handle, index)
        if key not in memo:
            memo[key] = handle.lane(self, index, memo)
        return memo[key]

    def slot(self, type_: Any, count: int = 1) -> Any:
        """Stack memory for ``count`` values."""
        with self.builder.goto_block(self.entry):
            memory = self.builder.alloca(type_, count)
        memory.type = ir.PointerType()  # to whatever is stored there: integers, or the floats that they stand for
        return memory

    def read(self, address: Any, type_: Any) -> Any:
        """The value at an i64 address, aligned or not."""
        return self.builder.load(self.builder.inttoptr(address, ir.PointerType()), align=1, typ=type_)

    def write(self, address: Any, value: Any) -> None:
        """Store at an i64 address, aligned or not."""
        self.builder.store(value, self.builder.inttoptr(address, ir.PointerType()), align=1)

    @contextmanager
    def loop(self, limit: Any) -> Iterator[Any]:
        """Code inside runs for an i32 going from 0 to ``limit`` - 1."""
        builder = self.builder
        before = builder.block
        head, body, end = (self.function.append_basic_block(name) for name in ("lane", "body", "end"))
        builder.branch(head)
        builder.position_at_end(head)
        counter = builder.phi(INT32)
        counter.add_incoming(ir.Constant(INT32, 0), before)
        builder.cbranch(builder.icmp_signed("<", counter, limit), body, end)
        builder.position_at_end(body)
        yield counter
        counter.add_incoming(builder.add(counter, ir.Constant(INT32, 1)), builder.block)
        builder.branch(head)
        builder.position_at_end(end)

    @contextmanager
    def loops(self, limits: Limits) -> Iterator[Index]:
        """Nested loops, the last axis innermost: the order in which Triton's interpreter goes through lanes."""
        if not limits:
            yield ()
            return
        with self.loop(limits[0]) as first, self.loops(limits[1:]) as rest:
            yield (first, *rest)

    def all_lanes(self, shape: tuple[int, ...]) -> Limits:
        """Limits that leave nothing out."""
        return [ir.Constant(INT32, size) for size in shape]

    def new_buffer(self, like: Handle) -> Buffer:
        """Uninitialised memory for every lane of ``like``."""
        count = math.prod(like.shape)
        spare = self._spare.get((like.type.width, count))
        if spare:
            return Buffer(like.type, like.shape, like.pointee, memory=spare.pop())
        self._buffer_bytes += count * max(1, like.type.width // 8)
        if self._buffer_bytes > MAX_BUFFER_BYTES:
            raise Unsupported(f"tiles of more than {MAX_BUFFER_BYTES} bytes")
        return Buffer(like.type, like.shape, like.pointee, memory=self.slot(like.type, count))

    def give_back(self, buffers: Iterable[Buffer]) -> None:
        """Nothing that comes reads them: their memory may hold other lanes."""
        for buffer in buffers:
            self._spare.setdefault((buffer.type.width, math.prod(buffer.shape)), []).append(buffer.memory)

    def cell(self, buffer: Buffer, index: Index) -> Any:
        """Where a lane of a buffer is."""
        offset = ir.Constant(INT32, 0)
        for position, size in zip(index, buffer.shape, strict=True):
            offset = self.builder.add(self.builder.mul(offset, ir.Constant(INT32, size)), position)
        return self.builder.gep(buffer.memory, [offset], source_etype=buffer.type)

    def fill(self, buffers: Sequence[Buffer], sources: Sequence[Handle], limits: Limits) -> None:
        """Compute ``sources`` into ``buffers`` in one pass over the lanes."""
        with self.loops(limits) as index:
            memo: Memo = {}
            for buffer, source in zip(buffers, sources, strict=True):
                self.builder.store(self.lane(source, index, memo), self.cell(buffer, index))

    def copy(self, source: Handle) -> Buffer:
        """``source`` computed now, every lane of it."""
        buffer = self.new_buffer(source)
        self.fill([buffer], [source], self.all_lanes(source.shape))
        return buffer

    def compute(self, handle: Handle) -> None:
        """Compute every lane of ``handle`` now, for whatever reads it from here on to the end of the ``scope``."""
        ready = isinstance(handle, (Scalar, Lanes, Buffer)) or (isinstance(handle, Load) and handle.settled)
        if handle.shape and not ready and handle not in self._computed:
            self._computed[handle] = self.copy(handle)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """What is computed inside is forgotten afterwards: for code that may be jumped over."""
        before = dict(self._computed)
        yield
        self._computed = before

    def pending(self, handle: Handle) -> list[Handle]:
        """Everything that computing a lane of ``handle`` goes through, once each."""
        seen: dict[Handle, None] = {}
        todo = [handle]
        while todo:
            part = todo.pop()
            part = self._computed.get(part, part)
            if part not in seen:
                seen[part] = None
                todo.extend(part.parts())
        return list(seen)

    def settle(self, handles: Iterable[Handle]) -> None:
        """Have every load that ``handles`` need read memory now."""
        loads = unsettled(handles)
        # An inner load first, so that the outer one does not read through it a second time.
        for load in sorted(loads, key=lambda load: len(unsettled(load.parts()))):
            buffer = self.new_buffer(load)
            limits = self.all_lanes(load.shape)
            if load.mask is not None and not unsettled([load.other]):
                limits = self.lanes(load.mask)
                buffer.limits, buffer.other = limits, load.other
            self.fill([buffer], [load], limits)
            load.settled = buffer

    def store(self, pointer: Handle, value: Handle, mask: Handle | None, needed_later: Iterable[Handle]) -> None:
        """Write the lanes of ``value`` in order; ``needed_later`` are the values that must not see it."""
        self.settle(needed_later)
        limits = self.all_lanes(pointer.shape) if mask is None else self.lanes(mask)
        # A lane must not be loaded after an earlier lane was stored: compute all, then store all.
        parts = [part for part in (pointer, value, mask) if part is not None and unsettled([part])]
        if parts and pointer.shape:
            buffers = [self.new_buffer(part) for part in parts]
            self.fill(buffers, parts, limits)
            swap = {id(part): buffer for part, buffer in zip(parts, buffers, strict=True)}
            pointer, value = swap.get(id(pointer), pointer), swap.get(id(value), value)
            mask = None if mask is None else swap.get(id(mask), mask)
        with self.loops(limits) as index:
            memo: Memo = {}
            address, lane = self.lane(pointer, index, memo), self.lane(value, index, memo)
            active = None if mask is None else self.lane(mask, index, memo)
            active = self.may_write(pointer, address, lane, active, index, memo)
            if active is None:
                self.write(address, lane)
            else:
                with self.builder.if_then(active):
                    self.write(address, lane)

    # what ``checks`` has more to do for

    def computed(self, node: Map) -> Scalar:
        """The value of an operation on scalars."""
        return Scalar(node.type, (), node.pointee, value=node.lane(self, (), {}))

    def loaded(self, load: Load) -> None:
        """The program is at a load of a tile."""

    def lanes(self, mask: Handle) -> Limits:
        """The lanes of a mask that an access goes through."""
        return self.bounds(self, mask)

    def may_read(self, load: Load, address: Any, mask: Any, index: Index, memo: Memo) -> Any:  # noqa: ARG002
        """The i1 that says whether a lane is read, None for always; ``mask`` says what the kernel wants."""
        return mask

    def may_write(
        self,
        pointer: Handle,  # noqa: ARG002
        address: Any,  # noqa: ARG002
        value: Any,  # noqa: ARG002
        mask: Any,
        index: Index,  # noqa: ARG002
        memo: Memo,  # noqa: ARG002
    ) -> Any:
        """As ``may_read``."""
        return mask

    def meet(self, first: Handle, second: Handle, ways: Sequence[Any]) -> Any:  # noqa: ARG002
        """The ``origin`` of a scalar that is one of two, by the block (of ``ways``) it comes from."""
        return None

    def keep_origin(self, before: Handle, after: Handle) -> None:
        """A name of ``before`` gets ``after``, and what was made for it stays in use."""
