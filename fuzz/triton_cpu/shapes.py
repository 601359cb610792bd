# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Tiles whose lanes are those of other tiles in another place."""

# ruff: noqa: D102 - lane and parts are documented in tiles

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from fuzz.triton_cpu.emitter import Emitter
from fuzz.triton_cpu.tiles import INT32, Buffer, Handle, Index, Load, Map, Memo, View

_COSTLY = frozenset(["div", "rem", "fdiv", "precise_divf", "exp", "exp2", "log", "log2"])
"""Names of operations that take longer than to keep what came out of them."""


@dataclass(eq=False, kw_only=True)
class Reshaped(Handle):
    """The lanes of ``source``, the last axis fastest, under another shape."""

    source: Handle

    def lane(self, emitter: Emitter, index: Index, memo: Memo) -> Any:
        builder, place = emitter.builder, ir.Constant(INT32, 0)
        for position, size in zip(index, self.shape, strict=True):
            place = builder.add(builder.mul(place, ir.Constant(INT32, size)), position)
        inner = []
        for size in reversed(self.source.shape):
            inner.append(builder.urem(place, ir.Constant(INT32, size)))
            place = builder.udiv(place, ir.Constant(INT32, size))
        return emitter.lane(self.source, tuple(reversed(inner)), memo)

    def parts(self) -> Iterable[Handle]:
        return (self.source,)


@dataclass(eq=False, kw_only=True)
class Joined(Handle):
    """Two tiles side by side along a new last axis."""

    left: Handle
    right: Handle

    def lane(self, emitter: Emitter, index: Index, memo: Memo) -> Any:
        builder = emitter.builder
        left, right = (emitter.lane(part, index[:-1], memo) for part in (self.left, self.right))
        return builder.select(builder.icmp_signed("==", index[-1], ir.Constant(INT32, 0)), left, right)

    def parts(self) -> Iterable[Handle]:
        return self.left, self.right


@dataclass(eq=False, kw_only=True)
class Slice(Handle):
    """The lanes of ``source`` whose place along its last axis is ``place``."""

    source: Handle
    place: int

    def lane(self, emitter: Emitter, index: Index, memo: Memo) -> Any:
        return emitter.lane(self.source, (*index, ir.Constant(INT32, self.place)), memo)

    def parts(self) -> Iterable[Handle]:
        return (self.source,)


def permuted(source: Handle, axes: tuple[int, ...]) -> View:
    """``source`` with its axes in another order: axis i is axis ``axes[i]`` of ``source``."""
    shape = tuple(source.shape[axis] for axis in axes)
    back = tuple(axes.index(axis) for axis in range(len(axes)))
    return View(source.type, shape, source.pointee, source=source, axes=back)


def concatenated(emitter: Emitter, first: Handle, second: Handle, axis: int) -> Buffer:
    """One tile after the other along ``axis``, computed now: a lane of it need not ask which."""
    size = first.shape[axis] + second.shape[axis]
    result = emitter.new_buffer(Handle(first.type, (*first.shape[:axis], size, *first.shape[axis + 1 :])))
    for part, start in ((first, 0), (second, first.shape[axis])):
        with emitter.loops(emitter.all_lanes(part.shape)) as index:
            place = emitter.builder.add(index[axis], ir.Constant(INT32, start))
            cell = emitter.cell(result, (*index[:axis], place, *index[axis + 1 :]))
            emitter.builder.store(emitter.lane(part, index, {}), cell)
    return result


def spread(emitter: Emitter, source: Handle, shape: tuple[int, ...]) -> View:
    """``source`` with the axes that have one lane spread over those of ``shape``. Lanes that are costly are computed
    now: the view would compute them once for each of its own."""
    base = source
    while isinstance(base, View) and math.prod(base.shape) == math.prod(base.source.shape):
        base = base.source
    if math.prod(shape) > math.prod(base.shape) and _costly(emitter, base):
        emitter.compute(base)
    axes = tuple(None if size == 1 else axis for axis, size in enumerate(source.shape))
    return View(source.type, shape, source.pointee, source=source, axes=axes)


def _costly(emitter: Emitter, handle: Handle) -> bool:
    return any(
        (isinstance(part, Load) and part.settled is None) or (isinstance(part, Map) and part.name in _COSTLY)
        for part in emitter.pending(handle)
    )
