# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Which lanes a mask can reach: past the limit for an axis the mask is false, whatever the other lanes are.

A conjunct of the form ``scalars + lane < scalars`` bounds the lanes of its axis. Relied upon: additions and
subtractions of one width agree modulo 2**width with the same sums in 64 bits, so if the 64-bit range of
``scalars + lane`` fits the narrow type, no lane wrapped around and the bound is exact. Whether it fits is checked
when the kernel runs; where it does not, no lane is left out. Everything not of this form is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from llvmlite import ir

from fuzz.triton_cpu.emitter import Emitter
from fuzz.triton_cpu.tiles import BOOL, INT32, INT64, Buffer, Handle, Lanes, Limits, Load, Map, Scalar, View

Axes = tuple[int | None, ...]
_FLIPPED = {"slt": "sgt", "sgt": "slt", "sle": "sge", "sge": "sle"}
_FAR = 1 << 50
"""Sums of thousands of 64-bit values below this do not wrap around."""


@dataclass
class _Sum:
    """An i64 ``base`` plus, if ``axis`` is set, the lane along that axis; true only where all ``checks`` are."""

    base: Any
    axis: int | None = None
    checks: list[Any] = field(default_factory=list)


def lane_limits(emitter: Emitter, mask: Handle) -> Limits:
    """i32 limits, one an axis of the mask."""
    limits = list(emitter.all_lanes(mask.shape))
    _conjuncts(emitter, mask, tuple(range(len(mask.shape))), mask.shape, limits)
    return limits


def _conjuncts(emitter: Emitter, mask: Handle, axes: Axes, shape: tuple[int, ...], limits: list[Any]) -> None:
    if isinstance(mask, View):
        _conjuncts(emitter, mask.source, _through(mask, axes), shape, limits)
    elif isinstance(mask, Map) and mask.name == "and":
        for part in mask.args:
            _conjuncts(emitter, part, axes, shape, limits)
    elif isinstance(mask, Map) and mask.name in _FLIPPED:
        left, right = (_sum(emitter, arg, axes) for arg in mask.args)
        if left is None or right is None or (left.axis is None) == (right.axis is None):
            return
        comparison = mask.name
        if left.axis is None:
            left, right, comparison = right, left, _FLIPPED[comparison]
        if comparison in ("slt", "sle") and left.axis is not None:
            size, width = shape[left.axis], mask.args[0].type.width
            limit = _limit(emitter, left, right, comparison == "sle", size, width)
            limits[left.axis] = _smaller(emitter, limits[left.axis], limit)


def _through(view: View, axes: Axes) -> Axes:
    return tuple(None if axis is None else axes[axis] for axis in view.axes)


def _smaller(emitter: Emitter, a: Any, b: Any) -> Any:
    return emitter.builder.select(emitter.builder.icmp_signed("<", a, b), a, b)


def _constant(value: int) -> Any:
    return ir.Constant(INT64, value)


def _limit(emitter: Emitter, left: _Sum, right: _Sum, inclusive: bool, size: int, width: int) -> Any:
    """The i32 number of lanes for which ``left.base + lane < right.base`` can hold."""
    builder = emitter.builder
    limit = builder.sub(right.base, left.base)
    if inclusive:
        limit = builder.add(limit, _constant(1))
    zero, full = _constant(0), _constant(size)
    limit = builder.select(builder.icmp_signed("<", limit, zero), zero, limit)
    limit = builder.select(builder.icmp_signed("<", limit, full), limit, full)
    exact = ir.Constant(BOOL, 1)
    for check in (
        *left.checks,
        *right.checks,
        _fits(emitter, left.base, size, width),
        _fits(emitter, right.base, 1, width),
    ):
        exact = builder.and_(exact, check)
    return builder.trunc(builder.select(exact, limit, full), INT32)


def _fits(emitter: Emitter, base: Any, size: int, width: int) -> Any:
    """Whether base .. base + size - 1 lie in a signed type of ``width`` bits."""
    low, high = (-(1 << 31), (1 << 31) - 1) if width == 32 else (-_FAR, _FAR)
    builder = emitter.builder
    above = builder.icmp_signed(">=", base, _constant(low))
    return builder.and_(above, builder.icmp_signed("<=", base, _constant(high - (size - 1))))


def _sum(emitter: Emitter, handle: Handle, axes: Axes) -> _Sum | None:
    """The handle as a sum, if it is one of 32- or 64-bit integers."""
    if handle.type not in (INT32, INT64) or handle.pointee is not None:
        return None
    builder = emitter.builder
    if isinstance(handle, Scalar):
        if handle.type == INT64:
            return _Sum(handle.value, None, [_fits(emitter, handle.value, 1, 64)])
        return _Sum(builder.sext(handle.value, INT64))
    if isinstance(handle, View):
        return _sum(emitter, handle.source, _through(handle, axes))
    if isinstance(handle, Lanes):
        return _Sum(_constant(handle.start), axes[0])
    if isinstance(handle, (Load, Buffer)) or not isinstance(handle, Map):
        return None
    if handle.name == "sext":
        inner = _sum(emitter, handle.args[0], axes)
        if inner is not None:
            inner.checks.append(_fits(emitter, inner.base, max(handle.shape), 32))
        return inner
    if handle.name not in ("add", "sub"):
        return None
    left, right = (_sum(emitter, arg, axes) for arg in handle.args)
    if left is None or right is None or (left.axis is not None and right.axis is not None):
        return None
    if handle.name == "add":
        axis = right.axis if left.axis is None else left.axis
        return _Sum(builder.add(left.base, right.base), axis, left.checks + right.checks)
    if right.axis is not None:
        return None
    return _Sum(builder.sub(left.base, right.base), left.axis, left.checks + right.checks)
