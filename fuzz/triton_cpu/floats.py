# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Arithmetic of float32 and float64. A float is carried as the integer of its width; only here is it a number.

Nothing is contracted, reordered or flushed to zero, so every operation and cast has the bits that NumPy gives under the
interpreter, but for the bits of a NaN and for the sign of ``maximum(0.0, -0.0)`` (NumPy's depends on the lane; here
the first operand wins). ``exp`` and ``log`` are those of libm in double, rounded to float32: within half an ulp and a
ten-millionth. Over all float32 numbers NumPy 2.3 differs by up to 3 ulp (``exp``) and 4 ulp (``log``), torch 2.13 by 1.
Two-byte floats are ``Unsupported``: half and bfloat16 are one LLVM type here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from fuzz.triton_cpu.tiles import INT32, INT64, Unsupported

Emit = Callable[..., Any]
_TYPES = {32: ir.FloatType(), 64: ir.DoubleType()}
_NUMPY = {32: (np.float32, np.int32), 64: (np.float64, np.int64)}


def check(type_: Any) -> None:
    """Raises ``Unsupported`` for the integer type of a float that cannot be computed with."""
    if type_.width not in _TYPES:
        raise Unsupported(f"a float of {type_.width} bits")


def bits(value: float, width: int) -> int:
    """The bits of the nearest float of ``width`` bits, as a signed integer."""
    floating, integer = _NUMPY[width]
    with np.errstate(over="ignore"):
        return int(np.array([value], dtype=floating).view(integer)[0])


def number(b: Any, x: Any) -> Any:
    """The LLVM float of a lane."""
    return b.bitcast(x, _TYPES[x.type.width])


def lane(b: Any, x: Any) -> Any:
    """The lane of an LLVM float."""
    return b.bitcast(x, INT32 if x.type == _TYPES[32] else INT64)


def truth(b: Any, x: Any) -> Any:
    """The i1 ``bool(x)``: a NaN is true."""
    return b.fcmp_unordered("!=", number(b, x), ir.Constant(_TYPES[x.type.width], 0.0))


def _compute(operation: Callable[..., Any]) -> Emit:
    return lambda b, *lanes: lane(b, operation(b, *(number(b, x) for x in lanes)))


def _pick(comparison: str) -> Emit:
    """The operand that is larger (or smaller), or the one that is a number."""

    def operation(b: Any, x: Any, y: Any) -> Any:
        first = b.or_(b.fcmp_ordered(comparison, x, y), b.fcmp_unordered("uno", y, y))
        return b.select(first, x, y)

    return _compute(operation)


def _libm(name: str) -> Emit:
    def operation(b: Any, x: Any) -> Any:
        double = _TYPES[64]
        function = b.module.declare_intrinsic(f"llvm.{name}", [double])
        if x.type == double:
            return b.call(function, [x])
        return b.fptrunc(b.call(function, [b.fpext(x, double)]), x.type)

    return _compute(operation)


def _compare(comparison: str) -> Emit:
    def emit(b: Any, x: Any, y: Any) -> Any:
        compare = b.fcmp_unordered if comparison == "!=" else b.fcmp_ordered
        return compare(comparison, number(b, x), number(b, y))

    return emit


_DIVIDE = _compute(lambda b, x, y: b.fdiv(x, y))
ARITHMETIC: dict[str, tuple[str, Emit]] = {
    "create_fadd": ("fadd", _compute(lambda b, x, y: b.fadd(x, y))),
    "create_fsub": ("fsub", _compute(lambda b, x, y: b.fsub(x, y))),
    "create_fmul": ("fmul", _compute(lambda b, x, y: b.fmul(x, y))),
    "create_fdiv": ("fdiv", _DIVIDE),
    "create_precise_divf": ("fdiv", _DIVIDE),
    "create_fneg": ("fneg", _compute(lambda b, x: b.fneg(x))),
    "create_maxnumf": ("fmax", _pick(">=")),
    "create_minnumf": ("fmin", _pick("<=")),
    "create_exp": ("exp", _libm("exp")),
    "create_log": ("log", _libm("log")),
}
COMPARISONS: dict[str, tuple[str, Emit]] = {
    f"create_fcmp{name}": (f"f{name.lower()}", _compare(text))
    for name, text in (("OEQ", "=="), ("UNE", "!="), ("OLT", "<"), ("OLE", "<="), ("OGT", ">"), ("OGE", ">="))
}


def _to_integer(b: Any, x: Any, wanted: Any) -> Any:
    """Towards zero; what does not fit is the least integer, as on x86."""
    value, least = number(b, x), -(1 << (wanted.width - 1))
    above = b.fcmp_ordered(">=", value, ir.Constant(value.type, float(least)))
    fits = b.and_(above, b.fcmp_ordered("<", value, ir.Constant(value.type, -float(least))))
    return b.select(fits, b.fptosi(value, wanted), ir.Constant(wanted, least))


def cast(operation: str, source: Any, wanted: Any) -> Emit:
    """The code of Triton's ``create_<operation>`` from one lane type to another. Raises ``Unsupported``."""
    for type_, is_float in ((source, operation.startswith("fp_")), (wanted, not operation.startswith("fp_to"))):
        if is_float:
            check(type_)
    if operation == "fp_to_si" and wanted in (INT32, INT64):
        return lambda b, x: _to_integer(b, x, wanted)
    to = _TYPES.get(wanted.width)
    if operation in ("fp_ext", "fp_trunc"):
        return _compute(lambda b, x: (b.fpext if operation == "fp_ext" else b.fptrunc)(x, to))
    if operation in ("si_to_fp", "ui_to_fp"):
        return lambda b, x: lane(b, (b.sitofp if operation == "si_to_fp" else b.uitofp)(x, to))
    raise Unsupported(f"{operation} to {wanted}")
