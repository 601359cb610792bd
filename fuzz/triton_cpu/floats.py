# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Arithmetic of floats. A float is carried as the integer of its width; only here is it a number.

Nothing is contracted, reordered or flushed to zero, so every operation and cast of float32 and float64 has the bits
that NumPy gives under the interpreter, but for the bits of a NaN and for the sign of ``maximum(0.0, -0.0)`` (NumPy's
depends on the lane; here the first operand wins). Floats of one and two bytes (``formats``) are computed with in
float32, each operation rounded once more, as torch does. ``exp``, ``exp2``, ``log`` and ``log2`` are those of libm in
double, rounded to float32: within half an ulp and a ten-millionth. Over all float32 numbers NumPy 2.3 differs by up to
3 ulp (``exp``) and 4 ulp (``log``), torch 2.13 by 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from fuzz.triton_cpu.formats import Narrow, narrow, widen
from fuzz.triton_cpu.tiles import BOOL, INT32, INT64, Unsupported

Emit = Callable[..., Any]
Operation = Callable[..., Any]
"""Emits the LLVM value of LLVM floats."""
_TYPES = {32: ir.FloatType(), 64: ir.DoubleType()}
_NUMPY = {32: (np.float32, np.int32), 64: (np.float64, np.int64)}


def check(type_: Any) -> None:
    """Raises ``Unsupported`` for the lane type of a float that cannot be computed with."""
    if not isinstance(type_, Narrow) and type_.width not in _TYPES:
        raise Unsupported(f"a float of {type_.width} bits")


def bits(value: float, width: int) -> int:
    """The bits of the nearest float of ``width`` bits, as a signed integer."""
    floating, integer = _NUMPY[width]
    with np.errstate(over="ignore"):
        return int(np.array([value], dtype=floating).view(integer)[0])


def number(b: Any, x: Any, type_: Any) -> Any:
    """The LLVM float of a lane of this type."""
    return widen(b, x, type_.format) if isinstance(type_, Narrow) else b.bitcast(x, _TYPES[type_.width])


def lane(b: Any, x: Any, type_: Any) -> Any:
    """The lane of this type of an LLVM float."""
    if not isinstance(type_, Narrow):
        return b.bitcast(_to(b, x, _TYPES[type_.width]), type_)
    return narrow(b, _to(b, x, _TYPES[32]), type_)


def _to(b: Any, x: Any, wanted: Any) -> Any:
    if x.type == wanted:
        return x
    return b.fptrunc(x, wanted) if wanted == _TYPES[32] else b.fpext(x, wanted)


def truth(b: Any, x: Any, type_: Any) -> Any:
    """The i1 ``bool(x)``: a NaN is true."""
    value = number(b, x, type_)
    return b.fcmp_unordered("!=", value, ir.Constant(value.type, 0.0))


def _pick(comparison: str) -> Operation:
    """The operand that is larger (or smaller), or the one that is a number."""

    def operation(b: Any, x: Any, y: Any) -> Any:
        first = b.or_(b.fcmp_ordered(comparison, x, y), b.fcmp_unordered("uno", y, y))
        return b.select(first, x, y)

    return operation


def _libm(name: str) -> Operation:
    def operation(b: Any, x: Any) -> Any:
        function = b.module.declare_intrinsic(f"llvm.{name}", [_TYPES[64]])
        return _to(b, b.call(function, [_to(b, x, _TYPES[64])]), x.type)

    return operation


def _exact(name: str) -> Operation:
    return lambda b, x: b.call(b.module.declare_intrinsic(f"llvm.{name}", [x.type]), [x])


def _compare(comparison: str) -> Operation:
    def operation(b: Any, x: Any, y: Any) -> Any:
        return (b.fcmp_unordered if comparison == "!=" else b.fcmp_ordered)(comparison, x, y)

    return operation


_ARITHMETIC: dict[str, Operation] = {
    "create_fadd": lambda b, x, y: b.fadd(x, y),
    "create_fsub": lambda b, x, y: b.fsub(x, y),
    "create_fmul": lambda b, x, y: b.fmul(x, y),
    "create_fdiv": lambda b, x, y: b.fdiv(x, y),
    "create_precise_divf": lambda b, x, y: b.fdiv(x, y),
    "create_fneg": lambda b, x: b.fneg(x),
    "create_maxnumf": _pick(">="),
    "create_minnumf": _pick("<="),
    "create_exp": _libm("exp"),
    "create_exp2": _libm("exp2"),
    "create_log": _libm("log"),
    "create_log2": _libm("log2"),
    "create_ceil": _exact("ceil"),
    "create_floor": _exact("floor"),
    "create_fabs": _exact("fabs"),
}
_COMPARISONS: dict[str, Operation] = {
    f"create_fcmp{name}": _compare(text)
    for name, text in (("OEQ", "=="), ("UNE", "!="), ("OLT", "<"), ("OLE", "<="), ("OGT", ">"), ("OGE", ">="))
}


def known(name: str) -> bool:
    """Whether there is an ``operation`` of this name."""
    return name in _ARITHMETIC or name in _COMPARISONS


def operation(name: str, type_: Any) -> tuple[Emit, Any]:
    """The code of the builder's method of this name for lanes of this type, and the type of what comes out.

    Raises ``Unsupported`` where the lanes are no numbers.
    """
    check(type_)
    compares = name in _COMPARISONS
    compute = (_COMPARISONS if compares else _ARITHMETIC)[name]

    def emit(b: Any, *lanes: Any) -> Any:
        value = compute(b, *(number(b, x, type_) for x in lanes))
        return value if compares else lane(b, value, type_)

    return emit, BOOL if compares else type_


_BY_WAY_OF = {8: INT32, 16: INT32, 32: INT64}
"""As x86 does it: no instruction makes integers of fewer bits, or unsigned ones."""


def _to_integer(b: Any, value: Any, wanted: Any) -> Any:
    """Towards zero; what does not fit is the least integer, as on x86."""
    least = -(1 << (wanted.width - 1))
    above = b.fcmp_ordered(">=", value, ir.Constant(value.type, float(least)))
    fits = b.and_(above, b.fcmp_ordered("<", value, ir.Constant(value.type, -float(least))))
    return b.select(fits, b.fptosi(value, wanted), ir.Constant(wanted, least))


def cast(name: str, source: Any, wanted: Any) -> Emit:
    """The code of Triton's ``create_<name>`` from one lane type to another. Raises ``Unsupported``."""
    for type_, is_float in ((source, name.startswith("fp_")), (wanted, name not in ("fp_to_si", "fp_to_ui"))):
        if is_float:
            check(type_)
    if name in ("fp_ext", "fp_trunc", "fp_to_fp"):
        return lambda b, x: lane(b, number(b, x, source), wanted)
    if name in ("si_to_fp", "ui_to_fp"):
        to = _TYPES.get(wanted.width, _TYPES[32])
        return lambda b, x: lane(b, (b.sitofp if name == "si_to_fp" else b.uitofp)(x, to), wanted)
    if name == "fp_to_si" and wanted in (INT32, INT64):
        return lambda b, x: _to_integer(b, number(b, x, source), wanted)
    if wanted.width in _BY_WAY_OF:
        return lambda b, x: b.trunc(_to_integer(b, number(b, x, source), _BY_WAY_OF[wanted.width]), wanted)
    raise Unsupported(f"{name} to {wanted}")
