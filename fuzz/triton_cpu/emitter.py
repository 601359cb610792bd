# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The emitter: writes the LLVM code of one program, lane loops, buffers and stores, out of the values in ``tiles.py``.

Relied upon: whoever writes memory first has the loads that are still needed copied into buffers (``settle``), so that
each load sees memory as of its place in the program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from fuzz.triton_cpu.tiles import (
    INT32,
    Buffer,
    Handle,
    Index,
    Lanes,
    Limits,
    Load,
    Map,
    Memo,
    Scalar,
    Unsupported,
    unsettled,
)

MAX_BUFFER_BYTES = 1 << 20
"""Of all buffers of one program together: they live on the stack."""


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
