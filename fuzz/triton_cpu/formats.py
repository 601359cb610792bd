# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Floats of one and two bytes: how they are carried, and the way to float32 and back.

Widening is exact. Narrowing rounds to nearest, ties to even, with subnormals, and has the bits that the casts of torch
2.13 from float32 have: what is too large is infinite; in e4m3fn, which has no infinity, the largest number; in e4m3fnuz
NaN. (vLLM's kernels clamp before they cast.) The bits of a NaN are not kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from fuzz.triton_cpu.tiles import INT32

_FLOAT = ir.FloatType()
_INFINITY, _QUIET, _MAGNITUDE = 0x7F800000, 0x7FC00000, 0x7FFFFFFF


@dataclass(frozen=True)
class Format:
    """``exponent`` and ``mantissa`` in bits. ``infinite``: the largest exponent means infinity or NaN. ``fnuz``: the
    bits of minus zero are the only NaN. Neither: all ones are NaN."""

    exponent: int
    mantissa: int
    bias: int
    infinite: bool = False
    fnuz: bool = False

    @property
    def width(self) -> int:
        """Bits in all."""
        return 1 + self.exponent + self.mantissa

    @property
    def limit(self) -> int:
        """The magnitude bits of infinity, or of NaN where there is none: what is past all numbers."""
        if self.fnuz:
            return 1 << (self.width - 1)
        return ((1 << self.exponent) - 1) << self.mantissa if self.infinite else (1 << (self.width - 1)) - 1

    @property
    def overflow(self) -> int:
        """The magnitude bits of what is too large."""
        return self.limit if self.infinite or self.fnuz else self.limit - 1

    @property
    def nan(self) -> int:
        """The magnitude bits of a NaN."""
        return self.limit | (1 << (self.mantissa - 1)) if self.infinite else self.limit


class Narrow(ir.IntType):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's integer type that floats of a format are carried as. It equals any other integer type of its width."""

    format: Format

    def __new__(cls, format_: Format) -> Narrow:
        """Not one of llvmlite's shared integer types: this one is known by its format."""
        self: Narrow = object.__new__(cls)
        self.width = format_.width
        self.format = format_
        return self


NARROW = {
    "half": Narrow(Format(exponent=5, mantissa=10, bias=15, infinite=True)),
    "bf16": Narrow(Format(exponent=8, mantissa=7, bias=127, infinite=True)),
    "fp8e4nv": Narrow(Format(exponent=4, mantissa=3, bias=7)),
    "fp8e4b8": Narrow(Format(exponent=4, mantissa=3, bias=8, fnuz=True)),
}
"""Type of the lanes by Triton's name for the format."""


def _constant(value: int) -> Any:
    return ir.Constant(INT32, value)


def widen(b: Any, lane: Any, format_: Format) -> Any:
    """The LLVM float of a lane."""
    bits = b.zext(lane, INT32)
    spare = 23 - format_.mantissa
    if format_.bias == 127:
        return b.bitcast(b.shl(bits, _constant(spare)), _FLOAT)
    sign = format_.width - 1
    magnitude = b.and_(bits, _constant((1 << sign) - 1))
    shifted = b.shl(magnitude, _constant(spare))
    normal = b.add(shifted, _constant((127 - format_.bias) << 23))
    # A subnormal is the mantissa of a number of the least exponent, less that number's leading one.
    least = _constant((128 - format_.bias) << 23)
    subnormal = b.bitcast(b.fsub(b.bitcast(b.add(shifted, least), _FLOAT), b.bitcast(least, _FLOAT)), INT32)
    tiny = b.icmp_unsigned("<", magnitude, _constant(1 << format_.mantissa))
    result = b.select(tiny, subnormal, normal)
    if format_.infinite:
        special = b.icmp_unsigned(">=", magnitude, _constant(format_.limit))
        result = b.select(special, b.or_(shifted, _constant(_INFINITY)), result)
    else:
        special = b.icmp_unsigned("==", bits if format_.fnuz else magnitude, _constant(format_.limit))
        result = b.select(special, _constant(_QUIET), result)
    return b.bitcast(b.or_(result, b.shl(b.lshr(bits, _constant(sign)), _constant(31))), _FLOAT)


def narrow(b: Any, value: Any, type_: Narrow) -> Any:
    """The lane of an LLVM float."""
    format_ = type_.format
    bits = b.bitcast(value, INT32)
    magnitude = b.and_(bits, _constant(_MAGNITUDE))
    spare = 23 - format_.mantissa
    odd = b.and_(b.lshr(magnitude, _constant(spare)), _constant(1))
    rounded = b.lshr(b.add(magnitude, b.add(odd, _constant((1 << (spare - 1)) - 1))), _constant(spare))
    result = b.sub(rounded, _constant((127 - format_.bias) << format_.mantissa))
    if format_.bias != 127:
        # Added to a number whose last bit is worth the least subnormal, the sum is rounded to a multiple of that.
        anchor = _constant((127 + 24 - format_.bias - format_.mantissa) << 23)
        total = b.fadd(b.bitcast(magnitude, _FLOAT), b.bitcast(anchor, _FLOAT))
        tiny = b.icmp_unsigned("<", magnitude, _constant((128 - format_.bias) << 23))
        result = b.select(tiny, b.sub(b.bitcast(total, INT32), anchor), result)
    overflow = _constant(format_.overflow)
    result = b.select(b.icmp_unsigned("<", result, overflow), result, overflow)
    result = b.select(b.icmp_unsigned(">", magnitude, _constant(_INFINITY)), _constant(format_.nan), result)
    sign = b.shl(b.lshr(bits, _constant(31)), _constant(format_.width - 1))
    signed = b.or_(result, sign)
    if format_.fnuz:
        signed = b.select(b.icmp_unsigned("==", result, _constant(0)), result, signed)
    return b.trunc(signed, ir.IntType(format_.width))
