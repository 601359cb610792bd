# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Reductions and scans along one axis of a tile. Both are computed where the program computes them, over every lane:
each lane counts, so none can be left out. Relied upon: integer operations are associative, so order does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from fuzz.triton_cpu.builder import Builder
from fuzz.triton_cpu.tiles import Buffer, Emitter, Handle, Index, Scalar

Combine = Callable[[Handle, Handle], Handle]


def reduce(builder: Builder, tile: Handle, axis: int | None, combine: Combine, initial: int) -> Handle:
    """The lanes along ``axis`` (None: all) combined, starting from ``initial``."""
    emitter = builder.emitter
    total = emitter.slot(tile.type)
    start = ir.Constant(tile.type, initial)
    if axis is None or len(tile.shape) == 1:
        emitter.builder.store(start, total)
        with emitter.loops(emitter.all_lanes(tile.shape)) as index:
            _accumulate(emitter, total, tile, index, combine)
        return Scalar(tile.type, (), value=emitter.builder.load(total, typ=tile.type))
    shape = _without(tile.shape, axis)
    result = emitter.new_buffer(Handle(tile.type, shape))
    with emitter.loops(emitter.all_lanes(shape)) as rest:
        emitter.builder.store(start, total)
        with emitter.loop(ir.Constant(ir.IntType(32), tile.shape[axis])) as position:
            _accumulate(emitter, total, tile, (*rest[:axis], position, *rest[axis:]), combine)
        emitter.builder.store(emitter.builder.load(total, typ=tile.type), emitter.cell(result, rest))
    return result


def scan(builder: Builder, tile: Handle, axis: int, combine: Combine) -> Buffer:
    """Each lane combined with all lanes before it along ``axis``; an inclusive sum starting from zero."""
    emitter = builder.emitter
    total = emitter.slot(tile.type)
    result = emitter.new_buffer(tile)
    with emitter.loops(emitter.all_lanes(_without(tile.shape, axis))) as rest:
        emitter.builder.store(ir.Constant(tile.type, 0), total)
        with emitter.loop(ir.Constant(ir.IntType(32), tile.shape[axis])) as position:
            index = (*rest[:axis], position, *rest[axis:])
            emitter.builder.store(_accumulate(emitter, total, tile, index, combine), emitter.cell(result, index))
    return result


def _without(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


def _accumulate(emitter: Emitter, total: Any, tile: Handle, index: Index, combine: Combine) -> Any:
    so_far = Scalar(tile.type, (), value=emitter.builder.load(total, typ=tile.type))
    lane = Scalar(tile.type, (), value=emitter.lane(tile, index, {}))
    result = emitter.lane(combine(so_far, lane), (), {})
    emitter.builder.store(result, total)
    return result
