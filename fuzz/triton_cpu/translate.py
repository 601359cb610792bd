# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Statements of a kernel, and the whole: from the source of a ``@triton.jit`` function to one LLVM module.

Branches and loops whose conditions are known are followed while translating. For the others, a name that both ways may
change is handed on if it has one type on both; if not, reading it is ``Unsupported``. Relied upon: ``Liveness`` names
everything that may be read later.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import triton.language as tl
from llvmlite import ir  # type: ignore[import-untyped]

from fuzz.triton_cpu.bounds import lane_limits
from fuzz.triton_cpu.expressions import Expressions
from fuzz.triton_cpu.liveness import reads, writes
from fuzz.triton_cpu.operators import STATIC, WeakInt
from fuzz.triton_cpu.source import Frame, Unknown, source_of
from fuzz.triton_cpu.tiles import BOOL, INT32, INT64, Buffer, Emitter, Scalar, Unsupported

_UNROLLED = 8
"""A range of known length is repeated up to this often; ``static_range`` up to ``_UNROLLED_STATIC``."""
_UNROLLED_STATIC = 64


class Translator(Expressions):
    """Writes the code of one program."""

    def run(self, body: Sequence[ast.stmt]) -> bool:
        """Translate statements of the frame on top; True if they surely return."""
        for statement in body:
            frame = self.frame
            frame.enter(statement, reads(statement))
            try:
                if self._statement(statement):
                    return True
            except Unsupported as problem:
                if problem.line is None:
                    problem.line = frame.source.first_line + statement.lineno - 1
                raise
            except (TypeError, ValueError, AttributeError, KeyError, AssertionError, NotImplementedError) as error:
                refused = Unsupported(f"{type(error).__name__} ({error})")
                refused.line = frame.source.first_line + statement.lineno - 1
                raise refused from error
        return False

    def _statement(self, statement: ast.stmt) -> bool:
        match statement:
            case ast.Assign(targets=[target], value=ast.IfExp() as value):
                self._assign(target, self.if_expression(value, self.language.tensor))
            case ast.Assign(targets=[target], value=value):
                self._assign(target, self.language.tensor(self.evaluate(value)))
            case ast.AnnAssign(target=ast.Name() as target, value=ast.expr() as value):
                self._assign(target, self.evaluate(value))
            case ast.AugAssign(target=ast.Name(id=name) as target, op=operation, value=value):
                operands = self.evaluate_all([ast.Name(id=name, ctx=ast.Load()), value])
                self._assign(target, self.language.operate(type(operation), *operands))
            case ast.Expr(value=value):
                self.evaluate(value)
            case ast.Assert(test=test):
                if self.truth(test) is not True:
                    raise Unsupported("an assertion that is not known to hold")
            case ast.If():
                return self._if(statement)
            case ast.For(orelse=[]):
                return self._for(statement)
            case ast.While(orelse=[]):
                self._while(statement)
            case ast.Return(value=value):
                self._return(value)
                return True
            case ast.Pass():
                pass
            case _:
                raise Unsupported(type(statement).__name__)
        return False

    def _assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.frame.names[target.id] = value
        elif isinstance(target, ast.Tuple) and isinstance(value, tuple) and len(value) == len(target.elts):
            for part, element in zip(target.elts, value, strict=True):
                self._assign(part, element)
        else:
            raise Unsupported(f"an assignment to {ast.unparse(target)}")

    def _return(self, value: ast.expr | None) -> None:
        frame = self.frame
        if not frame.inlined:
            if value is not None:
                raise Unsupported("a kernel that returns a value")
            self.emitter.builder.ret(ir.Constant(INT32, 0))
            return
        if frame.branches:
            raise Unsupported(f"a return inside a branch of {frame.source.tree.name}")
        frame.result = None if value is None else self.evaluate(value)

    # branches

    def _if(self, statement: ast.If) -> bool:
        test = self.truth(statement.test)
        if isinstance(test, bool):
            return self.run(statement.body if test else statement.orelse)
        builder, frame = self.emitter.builder, self.frame
        self.emitter.settle(self.needed_later())
        start = builder.block
        before = dict(frame.names)
        frame.branches += 1
        ways = []
        blocks = [self.emitter.function.append_basic_block(name) for name in ("then", "else")]
        for block, body in zip(blocks, (statement.body, statement.orelse), strict=True):
            builder.position_at_end(block)
            frame.names = dict(before)
            if not self.run(body):
                ways.append(_Way(builder.block, frame.names))
        frame.branches -= 1
        with builder.goto_block(start):
            builder.cbranch(test, *blocks)
        if not ways:
            return True
        if len(ways) == 1:
            builder.position_at_end(ways[0].end)
            frame.names = ways[0].names
        else:
            self._join(ways[0], ways[1], frame.source.liveness.after[statement])
        return False

    def _join(self, one: _Way, other: _Way, live: frozenset[str]) -> None:
        builder, frame = self.emitter.builder, self.frame
        joined: dict[str, Any] = {}
        scalars: list[tuple[str, Any, Any]] = []
        tiles: list[tuple[Buffer, Any, Any]] = []
        for name in sorted(live & (one.names.keys() | other.names.keys())):
            first, second = one.names.get(name), other.names.get(name)
            if name not in one.names or name not in other.names:
                joined[name] = Unknown("which only one branch defines")
            elif _same(first, second):
                joined[name] = first
            elif _type(first) is None or _type(first) != _type(second):
                joined[name] = Unknown(f"which branches give different types ({_type(first)}, {_type(second)})")
            elif isinstance(first, tl.tensor) and isinstance(second, tl.tensor) and first.handle.shape:
                buffer = self.emitter.new_buffer(first.handle)
                tiles.append((buffer, first.handle, second.handle))
                joined[name] = tl.tensor(buffer, first.type)
            else:
                scalars.append((name, first, second))
        end = self.emitter.function.append_basic_block("joined")
        for way, side in ((one, 1), (other, 2)):
            builder.position_at_end(way.end)
            for tile in tiles:
                self.emitter.fill([tile[0]], [tile[side]], self.emitter.all_lanes(tile[0].shape))
            way.end = builder.block
            builder.branch(end)
        builder.position_at_end(end)
        for name, first, second in scalars:
            phi = builder.phi(_lane(first).type)
            phi.add_incoming(_lane(first), one.end)
            phi.add_incoming(_lane(second), other.end)
            joined[name] = _like(first, phi)
        frame.names = joined

    # loops

    def _for(self, statement: ast.For) -> bool:
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

    def _while(self, statement: ast.While) -> None:
        self.emitter.settle(self.needed_later())
        loop = _Loop(self, statement)
        loop.begin()
        loop.hand_on()
        test = self.truth(statement.test)
        loop.test(ir.Constant(BOOL, int(test)) if isinstance(test, bool) else test)
        loop.body(statement.body)
        loop.end()


@dataclass
class _Way:
    """One way through a branch: its last block, and what names mean there."""

    end: Any
    names: dict[str, Any]


class _Loop:
    """A loop that runs an unknown number of times. What an iteration hands to the next one is a phi, if it is a
    scalar, and a buffer, if it is a tile."""

    def __init__(self, translator: Translator, statement: ast.For | ast.While) -> None:
        self._translator, self._frame = translator, translator.frame
        self._emitter = translator.emitter
        again = self._frame.source.liveness.again[statement]
        changed = writes([statement]) & again
        names = self._frame.names
        self._carried = {name: names[name] for name in sorted(changed) if _type(names.get(name)) is not None}
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
                self._phis[name] = self._emitter.builder.phi(_lane(value).type)
                self._phis[name].add_incoming(_lane(value), self.entry)
                self._frame.names[name] = _like(value, self._phis[name])
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
        self._frame.branches += 1
        if self._translator.run(statements):
            raise Unsupported("a loop that always returns")
        self._frame.branches -= 1
        names = self._frame.names
        for name, value in self._carried.items():
            if _type(names.get(name)) != _type(value):
                raise Unsupported(f"{name}, which changes its type in a loop")
        # All are computed before any is replaced: they may be computed from each other.
        fresh = {name: self._emitter.copy(names[name].handle) for name in self._buffers}
        for name, buffer in self._buffers.items():
            self._emitter.fill([buffer], [fresh[name]], self._emitter.all_lanes(buffer.shape))
        for name, phi in self._phis.items():
            phi.add_incoming(_lane(names[name]), self._emitter.builder.block)

    def end(self) -> None:
        """Go back, and on behind the loop."""
        builder = self._emitter.builder
        builder.branch(self._head)
        builder.position_at_end(self._after)
        self._frame.names = self._names


def _type(value: Any) -> Any:
    """What has to agree where two ways meet; None for what cannot be handed on."""
    if isinstance(value, tl.tensor):
        return value.type
    return WeakInt if isinstance(value, WeakInt) else None


def _same(first: Any, second: Any) -> bool:
    if first is second:
        return True
    plain = (bool, int, float, str, type(None))
    return type(first) is type(second) and isinstance(first, plain) and bool(STATIC[ast.Eq](first, second))


def _lane(value: Any) -> Any:
    return value.value if isinstance(value, WeakInt) else value.handle.value


def _like(value: Any, lane: Any) -> Any:
    if isinstance(value, WeakInt):
        return WeakInt(lane)
    return tl.tensor(Scalar(value.handle.type, (), value.handle.pointee, lane), value.type)


def translate(function: Any, arguments: dict[str, Any], name: str) -> tuple[str, list[str]]:
    """LLVM text of a module whose function ``name`` runs a whole grid, and the messages of its error codes from 1 on.

    ``arguments``: for each parameter either a Python object, known now, or an ``Argument``. The function takes an
    array of i64, one for each ``Argument`` in order, and the three sizes of the grid as i32; it returns an i32, 0 if
    all went well.
    Raises ``Unsupported``.
    """
    module = ir.Module(name)
    given = [value for value in arguments.values() if isinstance(value, Argument)]
    kinds = [INT32] * 6 + [value.lane_type for value in given]
    program = ir.Function(module, ir.FunctionType(INT32, kinds), "program")
    program.linkage = "internal"
    emitter = Emitter(program, lane_limits)
    translator = Translator(emitter, program.args[:3], program.args[3:6])
    lanes = iter(program.args[6:])
    names = {
        key: value.value(next(lanes)) if isinstance(value, Argument) else value for key, value in arguments.items()
    }
    source = source_of(function)
    translator.frames.append(Frame(source, names, inlined=False))
    if not translator.run(source.tree.body):
        emitter.builder.ret(ir.Constant(INT32, 0))
    with emitter.builder.goto_block(emitter.entry):
        emitter.builder.branch(program.basic_blocks[1])
    _launch(module, program, name, [value.lane_type for value in given])
    return str(module), translator.errors


@dataclass(frozen=True)
class Argument:
    """A parameter that every launch gives anew: an integer or a pointer of this ``tl`` type."""

    type: Any

    @property
    def lane_type(self) -> Any:
        """LLVM's type."""
        return INT64 if self.type.is_ptr() else ir.IntType(self.type.primitive_bitwidth)

    def value(self, lane: Any) -> Any:
        """The tensor that the kernel sees."""
        pointee = ir.IntType(self.type.element_ty.primitive_bitwidth) if self.type.is_ptr() else None
        return tl.tensor(Scalar(self.lane_type, (), pointee, lane), self.type)


def _launch(module: Any, program: Any, name: str, kinds: Sequence[Any]) -> None:
    """A function that runs every program, in the order of Triton's interpreter, until one returns an error."""
    launch = ir.Function(module, ir.FunctionType(INT32, [ir.PointerType(), INT32, INT32, INT32]), name)
    emitter = Emitter(launch, lane_limits)
    builder = emitter.builder
    array, *grid = launch.args
    arguments = []
    for number, kind in enumerate(kinds):
        cell = builder.gep(array, [ir.Constant(INT32, number)], source_etype=INT64)
        value = builder.load(cell, typ=INT64)
        arguments.append(value if kind == INT64 else builder.trunc(value, kind))
    with emitter.loops(grid) as program_ids:
        status = builder.call(program, [*program_ids, *grid, *arguments])
        with builder.if_then(builder.icmp_signed("!=", status, ir.Constant(INT32, 0)), likely=False):
            builder.ret(status)
    builder.ret(ir.Constant(INT32, 0))
    with builder.goto_block(emitter.entry):
        builder.branch(launch.basic_blocks[1])
