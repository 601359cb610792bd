# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Arithmetic of integers by the builder's names for it: what ``bounds`` knows an operation by, and a lane's LLVM code.

Where Triton leaves an operation open (division by zero, shifts past the width) the result is NumPy's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir


def _divide(signed: bool) -> Callable[..., Any]:
    def emit(b: Any, x: Any, y: Any) -> Any:
        zero, minus = ir.Constant(x.type, 0), ir.Constant(x.type, -1)
        none = b.icmp_signed("==", y, zero)
        if not signed:
            return b.select(none, zero, b.udiv(x, b.select(none, ir.Constant(x.type, 1), y)))
        flip = b.icmp_signed("==", y, minus)
        quotient = b.sdiv(x, b.select(b.or_(none, flip), ir.Constant(x.type, 1), y))
        return b.select(none, zero, b.select(flip, b.sub(zero, x), quotient))

    return emit


def _remainder(signed: bool) -> Callable[..., Any]:
    def emit(b: Any, x: Any, y: Any) -> Any:
        zero, one = ir.Constant(x.type, 0), ir.Constant(x.type, 1)
        odd = b.icmp_signed("==", y, zero)
        if not signed:
            return b.select(odd, zero, b.urem(x, b.select(odd, one, y)))
        odd = b.or_(odd, b.icmp_signed("==", y, ir.Constant(x.type, -1)))
        return b.select(odd, zero, b.srem(x, b.select(odd, one, y)))

    return emit


def _shift(kind: str) -> Callable[..., Any]:
    def emit(b: Any, x: Any, y: Any) -> Any:
        inside = b.icmp_unsigned("<", y, ir.Constant(x.type, x.type.width))
        last = ir.Constant(x.type, x.type.width - 1)
        if kind == "ashr":
            return b.ashr(x, b.select(inside, y, last))
        return b.select(inside, getattr(b, kind)(x, b.select(inside, y, last)), ir.Constant(x.type, 0))

    return emit


def _high_half(b: Any, x: Any, y: Any) -> Any:
    """The upper half of the product of two unsigned numbers."""
    width = x.type.width
    wide = ir.IntType(2 * width)
    product = b.mul(b.zext(x, wide), b.zext(y, wide))
    return b.trunc(b.lshr(product, ir.Constant(wide, width)), x.type)


def _pick(comparison: str, signed: bool) -> Callable[..., Any]:
    def emit(b: Any, x: Any, y: Any) -> Any:
        return b.select((b.icmp_signed if signed else b.icmp_unsigned)(comparison, x, y), x, y)

    return emit


def _compare(comparison: str, signed: bool) -> Callable[..., Any]:
    def emit(b: Any, x: Any, y: Any) -> Any:
        return (b.icmp_signed if signed else b.icmp_unsigned)(comparison, x, y)

    return emit


ARITHMETIC: dict[str, tuple[str, Callable[..., Any]]] = {
    "create_add": ("add", lambda b, x, y: b.add(x, y)),
    "create_sub": ("sub", lambda b, x, y: b.sub(x, y)),
    "create_mul": ("mul", lambda b, x, y: b.mul(x, y)),
    "create_and": ("and", lambda b, x, y: b.and_(x, y)),
    "create_or": ("or", lambda b, x, y: b.or_(x, y)),
    "create_xor": ("xor", lambda b, x, y: b.xor(x, y)),
    "create_minsi": ("min", _pick("<", True)),
    "create_minui": ("min", _pick("<", False)),
    "create_maxsi": ("max", _pick(">", True)),
    "create_maxui": ("max", _pick(">", False)),
}
WIDE_ONLY: dict[str, tuple[str, Callable[..., Any]]] = {
    "create_sdiv": ("div", _divide(True)),
    "create_udiv": ("div", _divide(False)),
    "create_srem": ("rem", _remainder(True)),
    "create_urem": ("rem", _remainder(False)),
    "create_shl": ("shl", _shift("shl")),
    "create_ashr": ("ashr", _shift("ashr")),
    "create_lshr": ("lshr", _shift("lshr")),
    "create_umulhi": ("umulhi", _high_half),
}
"""Not for booleans: NumPy computes those in wider types of its own choosing."""
COMPARISONS: dict[str, tuple[str, Callable[..., Any]]] = {
    "create_icmpEQ": ("eq", _compare("==", True)),
    "create_icmpNE": ("ne", _compare("!=", True)),
    **{
        f"create_icmp{sign}{name}": (f"{sign.lower()}{name.lower()}", _compare(text, sign == "S"))
        for sign in "SU"
        for name, text in (("LT", "<"), ("LE", "<="), ("GT", ">"), ("GE", ">="))
    },
}
