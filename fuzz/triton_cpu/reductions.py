# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Reductions and scans along one axis of a tile. Both are computed where the program computes them, over every lane:
each lane counts, so none can be left out. The order is that of the lanes, but for ``pairwise_sum``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from fuzz.triton_cpu.builder import Builder
from fuzz.triton_cpu.emitter import Emitter
from fuzz.triton_cpu.tiles import BOOL, INT32, Buffer, Handle, Index, Scalar

Combine = Callable[[Handle, Handle], Handle]
_ACCUMULATORS, _CHUNK = 8, 128


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
        with emitter.loop(ir.Constant(INT32, tile.shape[axis])) as position:
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
        with emitter.loop(ir.Constant(INT32, tile.shape[axis])) as position:
            index = (*rest[:axis], position, *rest[axis:])
            emitter.builder.store(_accumulate(emitter, total, tile, index, combine), emitter.cell(result, index))
    return result


def first_extreme(
    builder: Builder, tile: Handle, better: Combine, equal: Combine, worst: int
) -> tuple[Scalar, Scalar, Any]:
    """Of a tile of one axis: the best value, the first lane that has it (i32), and an i1, whether any lane equals
    itself. Lanes that do not are as good as ``worst``, which no other lane is worse than."""
    emitter, b = builder.emitter, builder.emitter.builder
    best, place, found = (emitter.slot(type_) for type_ in (tile.type, INT32, BOOL))
    for value, slot in ((ir.Constant(tile.type, worst), best), (ir.Constant(INT32, 0), place)):
        b.store(value, slot)
    b.store(ir.Constant(BOOL, 0), found)
    with emitter.loop(ir.Constant(INT32, tile.shape[0])) as position:
        lane = Scalar(tile.type, (), value=emitter.lane(tile, (position,), {}))
        so_far = Scalar(tile.type, (), value=b.load(best, typ=tile.type))
        with b.if_then(emitter.lane(better(lane, so_far), (), {})):
            b.store(lane.value, best)
            b.store(position, place)
        b.store(b.or_(b.load(found, typ=BOOL), emitter.lane(equal(lane, lane), (), {})), found)
    value, index = (Scalar(t, (), value=b.load(slot, typ=t)) for t, slot in ((tile.type, best), (INT32, place)))
    return value, index, b.load(found, typ=BOOL)


def pairwise_sum(builder: Builder, tile: Handle) -> Handle:
    """The floats along the last axis, added up in the order of NumPy's ``sum``: eight running sums within 128 lanes,
    and halves of all that in pairs."""
    emitter = builder.emitter
    lanes, rows = emitter.copy(tile), tile.shape[:-1]
    if not rows:
        total: Handle = Scalar(tile.type, (), value=_row_sum(builder, lanes, ()))
    else:
        total = buffer = emitter.new_buffer(Handle(tile.type, rows))
        with emitter.loops(emitter.all_lanes(rows)) as row:
            emitter.builder.store(_row_sum(builder, lanes, row), emitter.cell(buffer, row))
    emitter.give_back([lanes])
    return total


def _row_sum(builder: Builder, lanes: Buffer, row: Index) -> Any:
    emitter, b = builder.emitter, builder.emitter.builder
    size, type_ = lanes.shape[-1], lanes.type

    def add(x: Any, y: Any) -> Any:
        return emitter.lane(builder.create_fadd(*(Scalar(type_, (), value=value) for value in (x, y))), (), {})

    def lane(place: Any) -> Any:
        return b.load(emitter.cell(lanes, (*row, place)), typ=type_)

    def load(memory: Any, place: Any) -> Any:
        return b.load(b.gep(memory, [place], source_etype=type_), typ=type_)

    def store(value: Any, memory: Any, place: Any) -> None:
        b.store(value, b.gep(memory, [place], source_etype=type_))

    def constant(value: int) -> Any:
        return ir.Constant(INT32, value)

    def in_pairs(values: Sequence[Any]) -> Any:
        half = len(values) // 2
        return add(in_pairs(values[:half]), in_pairs(values[half:])) if half else values[0]

    zero = ir.Constant(type_, 0)
    if size < _ACCUMULATORS:
        total = lane(constant(0))
        for place in range(1, size):
            total = add(total, lane(constant(place)))
        return add(zero, total)
    chunk = min(size, _CHUNK)
    sums, parts = emitter.slot(type_, _ACCUMULATORS), emitter.slot(type_, size // chunk)
    places = [constant(place) for place in range(_ACCUMULATORS)]
    with emitter.loop(constant(size // chunk)) as number:
        start = b.mul(number, constant(chunk))
        for place in places:
            store(lane(b.add(start, place)), sums, place)
        with emitter.loop(constant(chunk // _ACCUMULATORS - 1)) as group:
            first = b.add(start, b.mul(b.add(group, constant(1)), constant(_ACCUMULATORS)))
            for place in places:
                store(add(load(sums, place), lane(b.add(first, place))), sums, place)
        store(in_pairs([load(sums, place) for place in places]), parts, number)
    return add(zero, in_pairs([load(parts, constant(place)) for place in range(size // chunk)]))


def _without(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


def _accumulate(emitter: Emitter, total: Any, tile: Handle, index: Index, combine: Combine) -> Any:
    so_far = Scalar(tile.type, (), value=emitter.builder.load(total, typ=tile.type))
    lane = Scalar(tile.type, (), value=emitter.lane(tile, index, {}))
    result = emitter.lane(combine(so_far, lane), (), {})
    emitter.builder.store(result, total)
    return result
