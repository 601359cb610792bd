# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Statements of a kernel, and the whole: from the source of a ``@triton.jit`` function to one LLVM module.

A branch whose condition is known is followed while translating. For the others, a name that both ways may change is
handed on if it has one type on both; if not, reading it is ``Unsupported``. Relied upon: ``Liveness`` names everything
that may be read later.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import triton.language as tl
from llvmlite import ir

from fuzz.triton_cpu import lookup
from fuzz.triton_cpu.bounds import lane_limits
from fuzz.triton_cpu.checks import CheckedEmitter, Checking, Site
from fuzz.triton_cpu.emitter import Emitter
from fuzz.triton_cpu.liveness import reads
from fuzz.triton_cpu.loops import Loops
from fuzz.triton_cpu.operators import kind, lane_of, like, same
from fuzz.triton_cpu.source import Frame, Unknown, source_of
from fuzz.triton_cpu.tiles import INT32, INT64, Buffer, Scalar, Unsupported


class Translator(Loops):
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
            except Exception as error:
                # Whatever goes wrong here, the interpreter is there to say what the kernel does.
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
                return self.for_loop(statement)
            case ast.While(orelse=[]):
                self.while_loop(statement)
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
            with self.emitter.scope():
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
            elif same(first, second):
                joined[name] = first
            elif kind(first) is None or kind(first) != kind(second):
                joined[name] = Unknown(f"which branches give different types ({kind(first)}, {kind(second)})")
            elif isinstance(first, tl.tensor) and isinstance(second, tl.tensor) and first.handle.shape:
                buffer = self.emitter.new_buffer(first.handle)
                self.emitter.keep_origin(buffer, second.handle)
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
            phi = builder.phi(lane_of(first).type)
            phi.add_incoming(lane_of(first), one.end)
            phi.add_incoming(lane_of(second), other.end)
            origin = None
            if isinstance(first, tl.tensor):
                origin = self.emitter.meet(first.handle, second.handle, (one.end, other.end))
            joined[name] = like(first, phi, origin)
        frame.names = joined


@dataclass
class _Way:
    """One way through a branch: its last block, and what names mean there."""

    end: Any
    names: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Translated:
    """A kernel as LLVM code."""

    text: str
    """A module. Its function runs a whole grid: it takes an array of i64, one for each ``Argument`` in order and if
    memory is checked the address of a table (``lookup``), and the three sizes of the grid as i32. It returns an i32,
    0 if all went well."""
    errors: list[str]
    """What the codes that it can return mean, from 1 on."""
    pointers: Sequence[str]
    """Names of the pointer arguments, numbered from 1 on."""
    sites: Sequence[Site] = ()
    """If memory is checked: its accesses."""
    stores: Sequence[int] = ()
    """If memory is checked: for each pointer the bytes of its elements, or 0 if it is not known to be stored to."""


def translate(function: Any, arguments: dict[str, Any], name: str, checking: Checking | None = None) -> Translated:
    """A kernel, for ``arguments``: for each parameter a Python object, known now, or an ``Argument``.

    ``name``: of the module's function. Raises ``Unsupported``.
    """
    module = ir.Module(name)
    given = [value for value in arguments.values() if isinstance(value, Argument)]
    kinds = [value.lane_type for value in given] + [INT64] * (checking is not None)
    program = ir.Function(module, ir.FunctionType(INT32, [INT32] * 6 + kinds), "program")
    program.linkage = "internal"
    ids, grid = program.args[:3], program.args[3:6]
    checked = None if checking is None else CheckedEmitter(program, checking, ids, grid, program.args[-1])
    emitter = checked or Emitter(program, lane_limits)
    translator = Translator(emitter, ids, grid)
    if checked:
        checked.where = translator.where
    lanes, numbers = iter(program.args[6:]), count(1)
    names = {
        key: value.value(next(lanes), numbers) if isinstance(value, Argument) else value
        for key, value in arguments.items()
    }
    source = source_of(function)
    translator.frames.append(Frame(source, names, inlined=False))
    if not translator.run(source.tree.body):
        emitter.builder.ret(ir.Constant(INT32, 0))
    emitter.close()
    _launch(module, program, name, kinds)
    pointers = [
        (key, max(1, value.type.element_ty.primitive_bitwidth // 8))
        for key, value in arguments.items()
        if isinstance(value, Argument) and value.type.is_ptr()
    ]
    if checked is None:
        return Translated(str(module), translator.errors, [name for name, _ in pointers])
    if len(pointers) >= lookup.FIRST_KNOWN:
        raise Unsupported(f"{len(pointers)} pointers, checked")
    return Translated(
        str(module),
        translator.errors,
        [name for name, _ in pointers],
        checked.sites,
        [bytes_ if number in checked.stored else 0 for number, (_, bytes_) in enumerate(pointers, 1)],
    )


@dataclass(frozen=True)
class Argument:
    """A parameter that every launch gives anew: an integer or a pointer of this ``tl`` type."""

    type: Any

    @property
    def lane_type(self) -> Any:
        """LLVM's type."""
        return INT64 if self.type.is_ptr() else ir.IntType(self.type.primitive_bitwidth)

    def value(self, lane: Any, numbers: Iterator[int]) -> Any:
        """The tensor that the kernel sees. A pointer takes the next of ``numbers``."""
        if not self.type.is_ptr():
            return tl.tensor(Scalar(self.lane_type, (), value=lane), self.type)
        pointee = ir.IntType(self.type.element_ty.primitive_bitwidth)
        return tl.tensor(Scalar(self.lane_type, (), pointee, value=lane, origin=next(numbers)), self.type)


def _launch(module: Any, program: Any, name: str, types: Sequence[Any]) -> None:
    """A function that runs every program, in the order of Triton's interpreter, until one returns an error."""
    launch = ir.Function(module, ir.FunctionType(INT32, [ir.PointerType(), INT32, INT32, INT32]), name)
    emitter = Emitter(launch, lane_limits)
    builder = emitter.builder
    array, *grid = launch.args
    arguments = []
    for number, type_ in enumerate(types):
        cell = builder.gep(array, [ir.Constant(INT32, number)], source_etype=INT64)
        value = builder.load(cell, typ=INT64)
        arguments.append(value if type_ == INT64 else builder.trunc(value, type_))
    with emitter.loops(grid) as program_ids:
        status = builder.call(program, [*program_ids, *grid, *arguments])
        with builder.if_then(builder.icmp_signed("!=", status, ir.Constant(INT32, 0)), likely=False):
            builder.ret(status)
    builder.ret(ir.Constant(INT32, 0))
    emitter.close()
