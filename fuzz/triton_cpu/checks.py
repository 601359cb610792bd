# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Kernels that check their memory accesses: every pointer keeps the number of the tensor it came from.

The number follows a pointer through arithmetic, casts, views, selections, branches and loops; for what was an integer
before, it is the tensor that the address lies in at the cast. An access compares its address with the bounds of that
tensor, inline; everything rarer is a call (``lookup``). A faulty lane neither reads nor writes: it gets ``other``.
Relied upon: a load of a tile is computed where the program has it, all lanes that its mask can reach, so that a fault
is seen once, whoever uses the value.
"""

# ruff: noqa: D102 - Emitter documents its methods

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from fuzz.triton_cpu import lookup
from fuzz.triton_cpu.bounds import lane_limits
from fuzz.triton_cpu.emitter import Emitter
from fuzz.triton_cpu.repeats import settle_distinct
from fuzz.triton_cpu.tiles import (
    BOOL,
    INT32,
    INT64,
    Buffer,
    Handle,
    Index,
    Limits,
    Load,
    Map,
    Memo,
    Scalar,
    Unsupported,
    View,
)

Number = Any
"""Of a tensor: an int if it is known while translating, else an i32."""


@dataclass(frozen=True)
class Checking:
    """What is checked besides bounds."""

    strict: bool = False
    """Lanes that are masked off are looked at as well."""
    races: bool = True
    """Two programs must not store different values to one address."""


@dataclass(frozen=True)
class Site:
    """An access of a kernel, as it is written."""

    file: str
    line: int
    store: bool
    width: int
    """Bytes of a lane."""
    shape: tuple[int, ...]


class CheckedEmitter(Emitter):
    """``ids`` and ``grid``: three i32 each. ``table``: the i64 address of what ``memory`` knows of tensors.

    ``where`` gives the file and line that are being translated; whoever has them sets it.
    """

    def __init__(self, function: Any, checking: Checking, ids: Sequence[Any], grid: Sequence[Any], table: Any) -> None:
        super().__init__(function, lane_limits)
        self.where: Callable[[], tuple[str, int]] = lambda: ("", 0)
        self.sites: list[Site] = []
        self.stored: set[int] = set()
        """Numbers of arguments that are written, as far as they are known while translating."""
        self._checking = checking
        self._table = table
        self._words: dict[tuple[int, int], Any] = {}
        self._limits: dict[tuple[int, int], Any] = {}
        self._functions: dict[str, Any] = {}
        with self.builder.goto_block(self.entry):
            program = self.builder.zext(ids[0], INT64)
            for number, size in zip(ids[1:], grid[1:], strict=True):
                program = self.builder.mul(program, self.builder.zext(size, INT64))
                program = self.builder.add(program, self.builder.zext(number, INT64))
            self._program = program
            first = self._load(ir.Constant(INT64, lookup.FIRST_STAMP))
            self._first_stamp = self.builder.trunc(first, INT32)
            self._stamp = self.builder.trunc(self.builder.add(first, program), INT32)

    # pointers

    def computed(self, node: Map) -> Scalar:
        scalar = super().computed(node)
        if node.pointee is not None:
            scalar.origin = self.number(node, (), {})
        return scalar

    def number(self, pointer: Handle, index: Index, memo: Memo) -> Number:
        """The number of the tensor that a lane of ``pointer`` came from."""
        if isinstance(pointer, (Scalar, Buffer)) and pointer.origin is not None:
            return pointer.origin
        if isinstance(pointer, View):
            return self.number(pointer.source, pointer.inner(index), memo)
        if isinstance(pointer, Map) and pointer.name in ("addptr", "bitcast") and pointer.args[0].pointee is not None:
            return self.number(pointer.args[0], index, memo)
        if isinstance(pointer, Map) and pointer.name == "select":
            condition, *sides = pointer.args
            one, other = (self.number(side, index, memo) for side in sides)
            if _same(one, other):
                return one
            return self.builder.select(self.lane(condition, index, memo), _i32(one), _i32(other))
        return self._call("find", [self.lane(pointer, index, memo)])

    def _uniform(self, pointer: Handle) -> Number | None:
        """The number of every lane, if it is one that needs no lane to be known."""
        if isinstance(pointer, (Scalar, Buffer)):
            return pointer.origin
        if isinstance(pointer, View):
            return self._uniform(pointer.source)
        if isinstance(pointer, Map) and pointer.name in ("addptr", "bitcast") and pointer.args[0].pointee is not None:
            return self._uniform(pointer.args[0])
        if isinstance(pointer, Map) and pointer.name == "select":
            one, other = map(self._uniform, pointer.args[1:])
            return one if _same(one, other) else None
        return None

    def new_buffer(self, like: Handle) -> Buffer:
        buffer = super().new_buffer(like)
        if like.pointee is not None:
            buffer.origin = self._uniform(like)
        return buffer

    def meet(self, first: Handle, second: Handle, ways: Sequence[Any]) -> Any:
        one, other = (getattr(handle, "origin", None) for handle in (first, second))
        if one is None or other is None or _same(one, other):
            return one if _same(one, other) else None
        phi = self.builder.phi(INT32)
        for origin, way in zip((one, other), ways, strict=True):
            phi.add_incoming(_i32(origin), way)
        return phi

    def keep_origin(self, before: Handle, after: Handle) -> None:
        if before.pointee is not None and not _same(self._uniform(before), self._uniform(after)):
            raise Unsupported("a pointer that changes its tensor, checked")

    # accesses

    def loaded(self, load: Load) -> None:
        if not settle_distinct(self, load):
            self.settle([load])

    def lanes(self, mask: Handle) -> Limits:
        return self.all_lanes(mask.shape) if self._checking.strict else super().lanes(mask)

    def may_read(self, load: Load, address: Any, mask: Any, index: Index, memo: Memo) -> Any:
        access = self._access(load.pointer, load.type, address, index, memo, store=False)
        return self._allowed(access, ir.Constant(INT64, 0), mask)

    def may_write(self, pointer: Handle, address: Any, value: Any, mask: Any, index: Index, memo: Memo) -> Any:
        access = self._access(pointer, value.type, address, index, memo, store=True)
        bits = value if value.type == INT64 else self.builder.zext(value, INT64)
        allowed = self._allowed(access, bits, mask)
        if self._checking.races:
            claims = allowed
            if isinstance(access.number, int):
                self.stored.add(access.number)
            else:
                # Tensors that are only read have no stamps; only a pointer of unknown origin can get here with one.
                shadow = self._word(access.number, lookup.SHADOW)
                claims = self.builder.and_(allowed, self.builder.icmp_signed("!=", shadow, ir.Constant(INT64, 0)))
            with self.builder.if_then(claims):
                self._claim(access, value, bits)
        return allowed

    def _access(self, pointer: Handle, type_: Any, address: Any, index: Index, memo: Memo, *, store: bool) -> _Access:
        file, line = self.where()
        width = max(1, type_.width // 8)
        self.sites.append(Site(file, line, store, width, pointer.shape))
        number = self.number(pointer, index, memo)
        offset = self.builder.sub(address, self._word(number, lookup.BASE))
        site = ir.Constant(INT32, len(self.sites) - 1)
        return _Access(number, address, offset, width, site, index, pointer.shape)

    def _allowed(self, access: _Access, value: Any, mask: Any) -> Any:
        """The i1 whether the lane is active and may do what it wants."""
        builder = self.builder
        active = ir.Constant(BOOL, 1) if mask is None else mask
        inside = builder.icmp_unsigned("<", access.offset, self._limit(access.number, access.width))
        doubtful = builder.not_(inside)
        if mask is not None and not self._checking.strict:
            doubtful = builder.and_(doubtful, active)
        before = builder.block
        with builder.if_then(doubtful, likely=False):
            looked = self._call("look", [*self._told(access, value), builder.zext(active, INT64)])
            doubt = builder.block
        fine = builder.phi(BOOL)
        fine.add_incoming(ir.Constant(BOOL, 1), before)
        fine.add_incoming(looked, doubt)
        return fine if mask is None else builder.and_(fine, active)

    def _claim(self, access: _Access, value: Any, bits: Any) -> None:
        """Note that this program writes here; tell if another one has, and another value."""
        builder = self.builder
        place = builder.shl(access.offset, self._word(access.number, lookup.SCALE))
        cell = builder.inttoptr(builder.add(self._word(access.number, lookup.SHADOW), place), ir.PointerType())
        last = builder.load(cell, align=1, typ=INT32)
        before = builder.icmp_unsigned(">=", last, self._first_stamp)
        others = builder.and_(before, builder.icmp_signed("!=", last, self._stamp))
        with builder.if_then(others, likely=False):
            old = self.read(access.address, value.type)
            with builder.if_then(builder.icmp_signed("!=", old, value)):
                other = builder.zext(builder.sub(last, self._first_stamp), INT64)
                wide = old if old.type == INT64 else builder.zext(old, INT64)
                self._call("race", [*self._told(access, bits), other, wide])
        builder.store(self._stamp, cell, align=1)

    def _told(self, access: _Access, value: Any) -> list[Any]:
        """What a record of ``lookup`` is made of."""
        lane = ir.Constant(INT64, 0)
        for position, size in zip(access.index, access.shape, strict=True):
            lane = self.builder.mul(lane, ir.Constant(INT64, size))
            lane = self.builder.add(lane, self.builder.zext(position, INT64))
        width = ir.Constant(INT64, access.width)
        return [_i32(access.number), width, access.address, value, access.site, self._program, lane]

    # the table

    def _word(self, number: Number, word: int) -> Any:
        """An i64 that the table has for a tensor."""
        if not isinstance(number, int):
            row = self.builder.mul(self.builder.zext(number, INT64), ir.Constant(INT64, lookup.ROW))
            return self._load(self.builder.add(row, ir.Constant(INT64, lookup.ROWS + word)))
        if (number, word) not in self._words:
            with self.builder.goto_block(self.entry):
                place = ir.Constant(INT64, lookup.ROWS + number * lookup.ROW + word)
                self._words[number, word] = self._load(place)
        return self._words[number, word]

    def _limit(self, number: Number, width: int) -> Any:
        """Offsets below this are surely allowed."""
        if not isinstance(number, int):
            return self._less(self._word(number, lookup.PLAIN), width - 1)
        if (number, width) not in self._limits:
            plain = self._word(number, lookup.PLAIN)
            with self.builder.goto_block(self.entry):
                self._limits[number, width] = self._less(plain, width - 1)
        return self._limits[number, width]

    def _less(self, size: Any, count: int) -> Any:
        """``size - count``, but not less than zero."""
        if not count:
            return size
        taken = ir.Constant(INT64, count)
        enough = self.builder.icmp_unsigned(">=", size, taken)
        return self.builder.select(enough, self.builder.sub(size, taken), ir.Constant(INT64, 0))

    def _load(self, word: Any) -> Any:
        place = self.builder.add(self._table, self.builder.shl(word, ir.Constant(INT64, 3)))
        return self.read(place, INT64)

    def _call(self, name: str, args: Sequence[Any]) -> Any:
        function = self._functions.get(name)
        if function is None:
            result = {"find": INT32, "look": BOOL, "race": ir.VoidType()}[name]
            type_ = ir.FunctionType(result, [INT64, *(arg.type for arg in args)])
            function = self._functions[name] = ir.Function(self.function.module, type_, f"{lookup.PREFIX}{name}")
        return self.builder.call(function, [self._table, *args])


@dataclass(frozen=True)
class _Access:
    """One lane of a load or store."""

    number: Number
    address: Any
    offset: Any
    """i64, from the start of the tensor's storage, in bytes."""
    width: int
    site: Any
    index: Index
    shape: tuple[int, ...]


def _same(one: Number | None, other: Number | None) -> bool:
    return one is other or (isinstance(one, int) and isinstance(other, int) and one == other)


def _i32(number: Number) -> Any:
    return ir.Constant(INT32, number) if isinstance(number, int) else number
