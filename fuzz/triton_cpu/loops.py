# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Loops of a kernel. A range that is known and short is repeated while translating; other loops run as code, and hand
on what they change: a scalar as a phi, a tile in a buffer.

Relied upon: ``range`` takes its bounds once; a loop variable is a Python int, which Triton takes for an int32.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import triton.language as tl
from llvmlite import ir

from fuzz.triton_cpu.expressions import Expressions
from fuzz.triton_cpu.liveness import writes
from fuzz.triton_cpu.operators import WeakInt, kind, lane_of, like
from fuzz.triton_cpu.source import Unknown
from fuzz.triton_cpu.tiles import BOOL, INT32, INT64, Buffer, Unsupported

_UNROLLED = 8
"""A range of known length is repeated up to this often; ``static_range`` up to ``_UNROLLED_STATIC``."""
_UNROLLED_STATIC = 64


class Loops(Expressions):
    """Translates ``for`` and ``while``."""

    def for_loop(self, statement: ast.For) -> bool:
        """Translate a ``for`` over a range; True if it surely returns."""
        function, *bounds = self._range(statement.iter)
        if not isinstance(statement.target, ast.Name):
            raise Unsupported("a loop over more than one name")
        if all(isinstance(bound, int) for bound in bounds):
            values = range(*bounds)
            if len(values) <= (_UNROLLED_STATIC if function == "static_range" else _UNROLLED):
                for value in values:
                    self.frame.names[statement.target.id] = value
                    if self.run(statement.body):
                        return True
                return False
        self._counted(statement, statement.target.id, [self._whole(bound) for bound in bounds])
        return False

    def _range(self, node: ast.expr) -> tuple[str, Any, Any, Any]:
        """The name of the function that makes the range, and its start, stop and step."""
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).split(".")[-1]
            owner = None
            if isinstance(node.func, ast.Attribute):
                owner = getattr(self.evaluate(node.func.value), "__name__", "")
            is_range = name == "range" if owner is None else owner.startswith("triton.language")
            if is_range and name in ("range", "static_range"):
                names = ("arg1", "arg2", "step")
                given = dict(zip(names, node.args, strict=False))
                given.update({str(keyword.arg): keyword.value for keyword in node.keywords})
                values = dict(zip(given, self.evaluate_all(given.values()), strict=True))
                start, stop = values.get("arg1"), values.get("arg2")
                if stop is None:
                    start, stop = 0, start
                step = values.get("step")
                return name, start, stop, 1 if step is None else step
        raise Unsupported("a loop over something other than a range")

    def _whole(self, value: Any) -> Any:
        """The i64 that ``range`` takes for a value."""
        builder = self.emitter.builder
        if isinstance(value, int):
            return ir.Constant(INT64, value)
        if isinstance(value, WeakInt):
            return builder.sext(value.value, INT64)
        if not isinstance(value, tl.tensor) or value.handle.shape or not value.dtype.is_int():
            raise Unsupported("a range of what are no integers")
        lane = self.emitter.lane(value.handle, (), {})
        if lane.type == INT64:
            if value.dtype.is_int_unsigned():
                raise Unsupported("a range of uint64")
            return lane
        return builder.sext(lane, INT64) if value.dtype.is_int_signed() else builder.zext(lane, INT64)

    def _counted(self, statement: ast.For, target: str, bounds: Sequence[Any]) -> None:
        builder = self.emitter.builder
        start, stop, step = bounds
        zero = ir.Constant(INT64, 0)
        up = builder.icmp_signed(">", step, zero)
        self.fail_if(builder.icmp_signed("==", step, zero), "range() arg 3 must not be zero")
        self._check_int32(start, stop, up)
        self.emitter.settle(self.needed_later())
        loop = _Loop(self, statement)
        loop.begin()
        counter = builder.phi(INT64)
        counter.add_incoming(start, loop.entry)
        loop.hand_on()
        more = builder.select(up, builder.icmp_signed("<", counter, stop), builder.icmp_signed(">", counter, stop))
        loop.test(more)
        self.frame.names[target] = WeakInt(builder.trunc(counter, INT32))
        loop.body(statement.body)
        counter.add_incoming(builder.add(counter, step), builder.block)
        loop.end()
        self.frame.names[target] = Unknown("a loop variable after its loop")

    def _check_int32(self, start: Any, stop: Any, up: Any) -> None:
        """A loop variable that left int32 would be another type to Triton."""
        builder = self.emitter.builder
        low, high = ir.Constant(INT64, -(1 << 31)), ir.Constant(INT64, 1 << 31)
        runs = builder.select(up, builder.icmp_signed("<", start, stop), builder.icmp_signed(">", start, stop))
        first = builder.or_(builder.icmp_signed("<", start, low), builder.icmp_signed(">=", start, high))
        last_up = builder.icmp_signed(">", stop, high)
        last_down = builder.icmp_signed("<", builder.add(stop, ir.Constant(INT64, 1)), low)
        outside = builder.or_(first, builder.select(up, last_up, last_down))
        self.fail_if(builder.and_(runs, outside), "a loop variable left int32")

    def while_loop(self, statement: ast.While) -> None:
        """Translate a ``while``."""
        self.emitter.settle(self.needed_later())
        loop = _Loop(self, statement)
        loop.begin()
        loop.hand_on()
        test = self.truth(statement.test)
        loop.test(ir.Constant(BOOL, int(test)) if isinstance(test, bool) else test)
        loop.body(statement.body)
        loop.end()


class _Loop:
    """A loop that runs an unknown number of times. What an iteration hands to the next one is a phi, if it is a
    scalar, and a buffer, if it is a tile."""

    def __init__(self, translator: Expressions, statement: ast.For | ast.While) -> None:
        self._translator, self._frame = translator, translator.frame
        self._emitter = translator.emitter
        again = self._frame.source.liveness.again[statement]
        changed = writes([statement]) & again
        names = self._frame.names
        self._carried = {name: names[name] for name in sorted(changed) if kind(names.get(name)) is not None}
        self._unknown = changed - self._carried.keys()
        self._phis: dict[str, Any] = {}
        self._buffers: dict[str, Buffer] = {}
        self.entry: Any = None

    def begin(self) -> None:
        """Enter the first block of the loop."""
        builder = self._emitter.builder
        for name, value in self._carried.items():
            if isinstance(value, tl.tensor) and value.handle.shape:
                self._buffers[name] = self._emitter.copy(value.handle)
        self.entry = builder.block
        self._head = self._emitter.function.append_basic_block("head")
        builder.branch(self._head)
        builder.position_at_end(self._head)

    def hand_on(self) -> None:
        """Give the names that change the meaning they have at the head of every iteration."""
        for name, value in self._carried.items():
            if name in self._buffers:
                self._frame.names[name] = tl.tensor(self._buffers[name], value.type)
            else:
                self._phis[name] = self._emitter.builder.phi(lane_of(value).type)
                self._phis[name].add_incoming(lane_of(value), self.entry)
                origin = value.handle.origin if isinstance(value, tl.tensor) else None
                self._frame.names[name] = like(value, self._phis[name], origin)
        for name in self._unknown:
            self._frame.names[name] = Unknown("which an iteration takes from the one before")

    def test(self, condition: Any) -> None:
        """Leave the loop where the i1 is false."""
        self._names = dict(self._frame.names)
        body, self._after = (self._emitter.function.append_basic_block(name) for name in ("again", "after"))
        self._emitter.builder.cbranch(condition, body, self._after)
        self._emitter.builder.position_at_end(body)

    def body(self, statements: Sequence[ast.stmt]) -> None:
        """One iteration."""
        with self._emitter.scope():
            self._iteration(statements)

    def _iteration(self, statements: Sequence[ast.stmt]) -> None:
        self._frame.branches += 1
        if self._translator.run(statements):
            raise Unsupported("a loop that always returns")
        self._frame.branches -= 1
        names = self._frame.names
        for name, value in self._carried.items():
            if kind(names.get(name)) != kind(value):
                raise Unsupported(f"{name}, which changes its type in a loop")
            if isinstance(value, tl.tensor):
                self._emitter.keep_origin(self._buffers.get(name, value.handle), names[name].handle)
        # All are computed before any is replaced: they may be computed from each other.
        fresh = {name: self._emitter.copy(names[name].handle) for name in self._buffers}
        for name, buffer in self._buffers.items():
            self._emitter.fill([buffer], [fresh[name]], self._emitter.all_lanes(buffer.shape))
        self._emitter.give_back(fresh.values())
        for name, phi in self._phis.items():
            phi.add_incoming(lane_of(names[name]), self._emitter.builder.block)

    def end(self) -> None:
        """Go back, and on behind the loop."""
        builder = self._emitter.builder
        builder.branch(self._head)
        builder.position_at_end(self._after)
        self._frame.names = self._names
