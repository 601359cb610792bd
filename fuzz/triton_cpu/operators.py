# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""What Python's operators do with a translated kernel's values.

A value is a ``tl.tensor`` over one of our handles, a ``WeakInt``, or a plain Python object that is known while
translating. Relied upon: ``TritonSemantic`` applies Triton's type rules to whatever a builder hands out. Import only
once Triton is in interpreter mode.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton.language as tl
from llvmlite import ir
from triton.language.semantic import TritonSemantic

from fuzz.triton_cpu import floats
from fuzz.triton_cpu.builder import Builder
from fuzz.triton_cpu.tiles import INT32, INT64, Scalar, Unsupported


@dataclass(eq=False)
class WeakInt:
    """A Python int that only the running kernel knows: a loop variable. It lies in int32 (checked as it runs), so
    that Triton would take it for an int32 wherever it does not take the other operand's type."""

    value: Any


STATIC: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda x, y: x in y,
    ast.NotIn: lambda x, y: x not in y,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
    ast.Not: operator.not_,
}
_TENSOR: dict[type, Callable[[TritonSemantic, Any, Any], Any]] = {
    ast.Add: lambda s, x, y: s.add(x, y, False),
    ast.Sub: lambda s, x, y: s.sub(x, y, False),
    ast.Mult: lambda s, x, y: s.mul(x, y, False),
    ast.Div: lambda s, x, y: s.truediv(x, y),
    ast.FloorDiv: lambda s, x, y: s.floordiv(x, y),
    ast.Mod: lambda s, x, y: s.mod(x, y),
    ast.LShift: lambda s, x, y: s.shl(x, y),
    ast.BitAnd: lambda s, x, y: s.and_(x, y),
    ast.BitOr: lambda s, x, y: s.or_(x, y),
    ast.BitXor: lambda s, x, y: s.xor_(x, y),
    ast.Eq: lambda s, x, y: s.equal(x, y),
    ast.NotEq: lambda s, x, y: s.not_equal(x, y),
    ast.Lt: lambda s, x, y: s.less_than(x, y),
    ast.LtE: lambda s, x, y: s.less_equal(x, y),
    ast.Gt: lambda s, x, y: s.greater_than(x, y),
    ast.GtE: lambda s, x, y: s.greater_equal(x, y),
}
_REFLECTED = {ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE}
_WEAK = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.BitAnd: "and_", ast.BitOr: "or_", ast.BitXor: "xor"}
_WEAK_COMPARISONS = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}


def known(value: Any) -> bool:
    """Whether the value is a Python object known while translating."""
    return not isinstance(value, (tl.tensor, WeakInt))


def plain(value: Any) -> Any:
    """A Python object for a ``tl.constexpr`` of it."""
    return value.value if isinstance(value, tl.constexpr) else value


def kind(value: Any) -> Any:
    """What has to agree where two ways meet; None for what cannot be handed on."""
    if isinstance(value, tl.tensor):
        return value.type
    return WeakInt if isinstance(value, WeakInt) else None


def same(first: Any, second: Any) -> bool:
    """Whether both are one value, known while translating."""
    if first is second:
        return True
    plain = (bool, int, float, str, type(None))
    return type(first) is type(second) and isinstance(first, plain) and bool(STATIC[ast.Eq](first, second))


def lane_of(value: Any) -> Any:
    """The LLVM value of a scalar."""
    return value.value if isinstance(value, WeakInt) else value.handle.value


def like(value: Any, lane: Any, origin: Any = None) -> Any:
    """A scalar of the kind of ``value`` with another LLVM value, and if it is a pointer, another origin."""
    if isinstance(value, WeakInt):
        return WeakInt(lane)
    return tl.tensor(Scalar(value.handle.type, (), value.handle.pointee, value=lane, origin=origin), value.type)


class Operators:
    """One kernel's operators. ``fail_if`` makes the kernel stop with an error where a condition holds as it runs."""

    def __init__(self, builder: Builder, fail_if: Callable[[Any, str], None]) -> None:
        self.builder = builder
        self.emitter = builder.emitter
        self.semantic = TritonSemantic(builder)
        self._fail_if = fail_if

    def operate(self, operation: type, x: Any, y: Any) -> Any:
        """``x operation y`` as Triton's interpreter would compute it."""
        if known(x) and known(y):
            return STATIC[operation](x, y)
        if operation in (ast.Is, ast.IsNot) and (x is None or y is None):
            return operation is ast.IsNot
        if not isinstance(x, tl.tensor) and not isinstance(y, tl.tensor):
            return self._operate_weak(operation, x, y)
        if operation in _REFLECTED and not isinstance(x, tl.tensor):
            x, y, operation = y, x, _REFLECTED[operation]
        x, y = self.number(x, y), self.number(y, x)
        if operation is ast.RShift:
            decides = x if isinstance(x, tl.tensor) else y
            return self.semantic.ashr(x, y) if decides.dtype.is_int_signed() else self.semantic.lshr(x, y)
        if operation not in _TENSOR:
            raise Unsupported(operation.__name__)
        return _TENSOR[operation](self.semantic, x, y)

    def _operate_weak(self, operation: type, x: Any, y: Any) -> Any:
        builder = self.emitter.builder
        wide = [self._wide(x), self._wide(y)]
        if operation in _WEAK_COMPARISONS:
            return self.boolean(builder.icmp_signed(_WEAK_COMPARISONS[operation], *wide))
        if operation in (ast.FloorDiv, ast.Mod):
            return self.weak(self._floor(operation, *wide))
        if operation not in _WEAK:
            raise Unsupported(f"{operation.__name__} of a loop variable")
        return self.weak(getattr(builder, _WEAK[operation])(*wide))

    def _floor(self, operation: type, x: Any, y: Any) -> Any:
        """Python's own // and %, which round down."""
        builder, zero = self.emitter.builder, ir.Constant(INT64, 0)
        self._fail_if(builder.icmp_signed("==", y, zero), "integer division or modulo by zero")
        quotient, rest = builder.sdiv(x, y), builder.srem(x, y)
        other_sign = builder.icmp_signed("<", builder.xor(rest, y), zero)
        down = builder.and_(builder.icmp_signed("!=", rest, zero), other_sign)
        if operation is ast.FloorDiv:
            return builder.select(down, builder.sub(quotient, ir.Constant(INT64, 1)), quotient)
        return builder.select(down, builder.add(rest, y), rest)

    def _wide(self, value: Any) -> Any:
        if isinstance(value, WeakInt):
            return self.emitter.builder.sext(value.value, INT64)
        if not isinstance(value, int) or not -(1 << 31) <= value < 1 << 31:
            raise Unsupported(f"a loop variable with {value!r}")
        return ir.Constant(INT64, int(value))

    def weak(self, wide: Any) -> WeakInt:
        """A ``WeakInt`` of an i64, which has to fit."""
        builder = self.emitter.builder
        narrow = builder.trunc(wide, INT32)
        self._fail_if(builder.icmp_signed("!=", builder.sext(narrow, INT64), wide), "a loop variable left int32")
        return WeakInt(narrow)

    def number(self, value: Any, partner: Any) -> Any:
        """``value`` as ``TritonSemantic`` takes it beside ``partner``."""
        if not isinstance(value, WeakInt):
            if known(value) and not isinstance(value, (bool, int, float)):
                raise Unsupported(f"arithmetic with {value!r}")
            return value
        dtype = partner.dtype if isinstance(partner, tl.tensor) else tl.int32
        strong = self.tensor(value)
        if dtype.is_ptr() or dtype.is_int64():
            return self.semantic.cast(strong, tl.int64)
        if dtype.is_int32() or dtype.is_bool():
            return strong
        raise Unsupported(f"a loop variable with {dtype}")

    def tensor(self, value: Any) -> Any:
        """``value`` as an assignment stores it: Python numbers become tensors, other objects stay."""
        if isinstance(value, WeakInt):
            return tl.tensor(Scalar(INT32, (), value=value.value), tl.int32)
        return self.semantic.to_tensor(value, False)

    def boolean(self, bit: Any) -> Any:
        """A tensor of an i1."""
        return tl.tensor(Scalar(bit.type, (), value=bit), tl.int1)

    def truth(self, value: Any) -> Any:
        """``bool(value)``: a Python bool, or an i1."""
        builder = self.emitter.builder
        if known(value):
            return bool(value)
        if isinstance(value, tl.tensor):
            if value.handle.shape:
                raise Unsupported("the truth of a tile")
            lane = self.emitter.lane(value.handle, (), {})
            if value.dtype.is_floating():
                floats.check(value.handle.type)
                return floats.truth(builder, lane, value.handle.type)
        else:
            lane = value.value
        return lane if lane.type.width == 1 else builder.icmp_signed("!=", lane, ir.Constant(lane.type, 0))

    def unary(self, operation: type, value: Any) -> Any:
        """``operation value``, but for ``not``."""
        if known(value):
            return STATIC[operation](value)
        if isinstance(value, WeakInt):
            if operation is ast.USub:
                return self._operate_weak(ast.Sub, 0, value)
            raise Unsupported(f"{operation.__name__} of a loop variable")
        if operation is ast.UAdd:
            return value
        return self.semantic.minus(value) if operation is ast.USub else self.semantic.invert(value)
