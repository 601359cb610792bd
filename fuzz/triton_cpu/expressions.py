# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Expressions of a kernel: what is known is computed by Python, the rest becomes code.

Relied upon: Triton's interpreter runs a kernel as Python, so names, calls and short circuits mean what they mean there.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from llvmlite import ir
from triton.runtime.interpreter import InterpretedFunction

from fuzz.triton_cpu.builder import Builder
from fuzz.triton_cpu.emitter import Emitter
from fuzz.triton_cpu.language import Language
from fuzz.triton_cpu.operators import known, plain
from fuzz.triton_cpu.source import Frame, source_of
from fuzz.triton_cpu.tiles import BOOL, INT32, Handle, Scalar, Unsupported

_CALLABLE = (min, max, abs, len, int, float, bool, triton.cdiv, triton.next_power_of_2, tl.pointer_type)
"""Python functions that are called if all their arguments are known."""
_MAX_DEPTH = 16


class Expressions:
    """Evaluates the expressions of the frame on top."""

    def __init__(self, emitter: Emitter, program_ids: Sequence[Any], grid: Sequence[Any]) -> None:
        self.emitter = emitter
        self.frames: list[Frame] = []
        self.errors: list[str] = []
        """Messages of the errors that the program can return: code 1 is the first."""
        self._half_done: list[list[Any]] = []
        """Operands that are computed already while others of the same expression are not."""
        self._pure = 0
        self.language = Language(Builder(emitter, program_ids, grid), self.needed_later, self.fail_if)

    @property
    def frame(self) -> Frame:
        """The function at hand."""
        return self.frames[-1]

    def where(self) -> tuple[str, int]:
        """The file and line of the statement at hand."""
        source, statement = self.frame.source, self.frame.statement
        line = source.first_line + (statement.lineno - 1 if statement else 0)
        return source.function.__code__.co_filename, line

    def fail_if(self, condition: Any, message: str) -> None:
        """Have the program end with an error where the i1 ``condition`` holds."""
        self.errors.append(message)
        with self.emitter.builder.if_then(condition, likely=False):
            self.emitter.builder.ret(ir.Constant(INT32, len(self.errors)))

    def needed_later(self) -> list[Handle]:
        """Every value that something after the operation at hand may use."""
        if self._pure:
            raise Unsupported("a store inside an expression")
        values: list[Any] = [value for operands in self._half_done for value in operands]
        for frame in self.frames:
            values.extend(value for name, value in frame.names.items() if name in frame.live)
        return [handle for value in values for handle in _handles(value)]

    def evaluate_all(self, nodes: Iterable[ast.expr]) -> list[Any]:
        """The values of several expressions, in order."""
        values: list[Any] = []
        self._half_done.append(values)
        for node in nodes:
            values.append(self.evaluate(node))
        self._half_done.pop()
        return values

    def evaluate(self, node: ast.expr) -> Any:
        """The value of an expression."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return plain(self.frame.lookup(name))
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                return tuple(self.evaluate_all(elements))
            case ast.BinOp(left=left, op=operation, right=right):
                return self.language.operate(type(operation), *self.evaluate_all([left, right]))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self._negated(self.truth(operand))
            case ast.UnaryOp(op=operation, operand=operand):
                return self.language.unary(type(operation), self.evaluate(operand))
            case ast.Compare(left=left, ops=[operation], comparators=[right]):
                return self.language.operate(type(operation), *self.evaluate_all([left, right]))
            case ast.BoolOp(op=operation, values=values):
                return self._bool_op(values, isinstance(operation, ast.And))
            case ast.IfExp():
                return self.if_expression(node, lambda value: value)
            case ast.Attribute(value=owner, attr=name):
                return self._attribute(self.evaluate(owner), name)
            case ast.Subscript(value=owner, slice=index):
                return self._subscript(self.evaluate(owner), index)
            case ast.Call():
                return self._call(node)
        raise Unsupported(type(node).__name__)

    # conditions

    def truth(self, node: ast.expr) -> Any:
        """``bool(node)``: a Python bool, or an i1."""
        if isinstance(node, ast.BoolOp):
            return self._short_circuit(node.values, isinstance(node.op, ast.And))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            value = self.truth(node.operand)
            return not value if isinstance(value, bool) else self.emitter.builder.not_(value)
        return self.language.truth(self.evaluate(node))

    def _negated(self, truth: Any) -> Any:
        return not truth if isinstance(truth, bool) else self.language.boolean(self.emitter.builder.not_(truth))

    def _short_circuit(self, nodes: Sequence[ast.expr], conjunction: bool) -> Any:
        first = self.truth(nodes[0])
        if len(nodes) == 1 or first is (not conjunction):
            return first
        if isinstance(first, bool):
            return self._short_circuit(nodes[1:], conjunction)

        def rest() -> Any:
            value = self._short_circuit(nodes[1:], conjunction)
            return ir.Constant(BOOL, int(value)) if isinstance(value, bool) else value

        skip = ir.Constant(BOOL, int(not conjunction))
        return self._either(first, rest, lambda: skip) if conjunction else self._either(first, lambda: skip, rest)

    def _bool_op(self, nodes: Sequence[ast.expr], conjunction: bool) -> Any:
        """``x and y`` is one of its operands; only between booleans is that the same as its truth."""
        if all(_is_boolean(node) for node in nodes):
            truth = self._short_circuit(nodes, conjunction)
            return truth if isinstance(truth, bool) else self.language.boolean(truth)
        first = self.evaluate(nodes[0])
        if not known(first):
            raise Unsupported("and/or of what are no comparisons")
        if len(nodes) == 1 or bool(first) is not conjunction:
            return first
        return self._bool_op(nodes[1:], conjunction)

    def if_expression(self, node: ast.IfExp, convert: Callable[[Any], Any]) -> Any:
        """``body if test else orelse``, each side converted by ``convert`` before they have to agree."""
        test = self.truth(node.test)
        if isinstance(test, bool):
            return convert(self.evaluate(node.body if test else node.orelse))
        types_: list[Any] = []

        def side(expression: ast.expr) -> Callable[[], Any]:
            def compute() -> Any:
                value = convert(self.evaluate(expression))
                if not isinstance(value, tl.tensor) or value.handle.shape:
                    raise Unsupported("a conditional expression of what are no scalar tensors")
                types_.append(value)
                return self.emitter.lane(value.handle, (), {})

            return compute

        value = self._either(test, side(node.body), side(node.orelse))
        first, second = types_
        if first.type != second.type:
            raise Unsupported(f"a conditional expression of {first.type} and {second.type}")
        return tl.tensor(Scalar(first.handle.type, (), first.handle.pointee, value=value), first.type)

    def _either(self, condition: Any, one: Callable[[], Any], other: Callable[[], Any]) -> Any:
        """An LLVM value computed on one of two paths, neither of which may store."""
        builder = self.emitter.builder
        self._pure += 1
        with builder.if_else(condition) as (then, otherwise):
            with then, self.emitter.scope():
                first = one()
                first_block = builder.block
            with otherwise, self.emitter.scope():
                second = other()
                second_block = builder.block
        self._pure -= 1
        if first.type != second.type:
            raise Unsupported("a conditional expression of two types")
        result = builder.phi(first.type)
        result.add_incoming(first, first_block)
        result.add_incoming(second, second_block)
        return result

    # names and calls

    def _attribute(self, owner: Any, name: str) -> Any:
        if isinstance(owner, tl.tensor):
            if name in Language.METHODS:
                return _Function(getattr(self.language, name), (owner,))
            if name in ("dtype", "shape", "type"):
                return getattr(owner, name)
        elif isinstance(owner, types.ModuleType):
            if owner.__name__.startswith("triton.language") and name in Language.NAMES:
                return _Function(getattr(self.language, name))
            return plain(getattr(owner, name))
        elif isinstance(owner, tl.dtype):
            return plain(getattr(owner, name))
        raise Unsupported(f"the attribute {name} of {owner!r}")

    def _subscript(self, owner: Any, index: ast.expr) -> Any:
        if not isinstance(owner, tl.tensor):
            value = self.evaluate(index)
            if isinstance(owner, tuple) and isinstance(value, int):
                return plain(owner[value])
            raise Unsupported(f"an index into {owner!r}")
        axes = index.elts if isinstance(index, ast.Tuple) else [index]
        for axis, part in enumerate(axes):
            if isinstance(part, ast.Constant) and part.value is None:
                owner = self.language.expand_dims(owner, axis)
            elif not (isinstance(part, ast.Slice) and part.lower is part.upper is part.step is None):
                raise Unsupported("an index into a tile")
        return owner

    def _call(self, node: ast.Call) -> Any:
        if any(isinstance(arg, ast.Starred) for arg in node.args) or any(k.arg is None for k in node.keywords):
            raise Unsupported("a call with * or **")
        function = self.evaluate(node.func)
        self._half_done.append(list(function.first) if isinstance(function, _Function) else [])
        values = self.evaluate_all([*node.args, *(keyword.value for keyword in node.keywords)])
        self._half_done.pop()
        args, names = values[: len(node.args)], [str(keyword.arg) for keyword in node.keywords]
        kwargs = dict(zip(names, values[len(node.args) :], strict=True))
        if isinstance(function, InterpretedFunction):
            return self._inline(function.fn, args, kwargs)
        if isinstance(function, _Function):
            statement = self.frame.statement
            if isinstance(statement, ast.Expr) and statement.value is node:
                # The operands are computed, so all that a store must not change is what comes after it.
                self.frame.live = self.frame.source.liveness.after[statement]
            return function.method(*function.first, *args, **kwargs)
        callable_ = function in _CALLABLE or isinstance(getattr(function, "__self__", None), tl.dtype)
        if not known(function) or not callable_ or not all(known(value) for value in values):
            raise Unsupported(f"a call of {getattr(function, '__name__', function)!s}")
        return plain(function(*args, **kwargs))

    def _inline(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if len(self.frames) >= _MAX_DEPTH:
            raise Unsupported("calls this deep")
        source = source_of(function)
        bound = source.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        frame = Frame(source, {name: plain(value) for name, value in bound.arguments.items()}, inlined=True)
        self.frames.append(frame)
        self.run(source.tree.body)
        self.frames.pop()
        return frame.result

    def run(self, body: Sequence[ast.stmt]) -> bool:
        """Translate statements of the frame on top; True if they surely return."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Function:
    """A function of ``tl``, or a method of a tensor with that tensor."""

    method: Callable[..., Any]
    first: tuple[Any, ...] = ()


def _is_boolean(node: ast.expr) -> bool:
    if isinstance(node, ast.BoolOp):
        return all(_is_boolean(value) for value in node.values)
    return isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))


def _handles(value: Any) -> list[Handle]:
    if isinstance(value, tl.tensor):
        return [value.handle]
    if isinstance(value, tuple):
        return [handle for part in value for handle in _handles(part)]
    return []
