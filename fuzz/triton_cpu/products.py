# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Matrix products.

A lane is a float32 sum, from zero, of the products along the inner axis in ascending order; an accumulator is added
last. Products and sums are rounded on their own. Of floats of one or two bytes the products are exact, so with ``k``
the length of the inner axis and ``u = 2**-24`` the sum is within ``k * u * sum(abs(a) * abs(b))`` of the exact one, and
of float32 as well, to first order in ``u``. A GPU adds in an order of its own, to the same bound.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from fuzz.triton_cpu import floats
from fuzz.triton_cpu.emitter import Emitter
from fuzz.triton_cpu.tiles import INT32, Buffer, Handle, View

_FLOAT = ir.FloatType()
_LANES, _ROWS, _STEPS = 16, 4, 4
"""Neighbouring columns are one vector; so many rows and so many steps along the inner axis are written out."""


def product(emitter: Emitter, left: Handle, right: Handle) -> Buffer:
    """[m, k] times [k, n], both of one float type: [m, n] float32. Computed now."""
    b = emitter.builder
    a, c = (_widened(emitter, factor) for factor in (left, right))
    (rows, inner), columns = left.shape, right.shape[1]
    result = emitter.new_buffer(Handle(INT32, (rows, columns)))
    group, width, steps = min(rows, _ROWS), min(columns, _LANES), min(inner, _STEPS)
    vector = ir.VectorType(_FLOAT, width)
    sums = [emitter.slot(vector) for _ in range(group)]

    def beside(cell: Any, more: int) -> Any:
        return b.gep(cell, [ir.Constant(INT32, more)], source_etype=_FLOAT)

    def times(counter: Any, factor: int) -> Any:
        return b.mul(counter, ir.Constant(INT32, factor))

    with emitter.loops(emitter.all_lanes((rows // group, columns // width))) as (block, column):
        row, column = times(block, group), times(column, width)
        for total in sums:
            b.store(ir.Constant(vector, [0.0] * width), total)
        with emitter.loop(ir.Constant(INT32, inner // steps)) as chunk:
            totals = [b.load(total, typ=vector) for total in sums]
            inside = times(chunk, steps)
            left_cell, right_cell = emitter.cell(a, (row, inside)), emitter.cell(c, (inside, column))
            for step in range(steps):
                factors = b.load(beside(right_cell, step * columns), typ=vector, align=4)
                for number in range(group):
                    factor = b.load(beside(left_cell, number * inner + step), typ=_FLOAT)
                    totals[number] = b.fadd(totals[number], b.fmul(_splat(b, factor, width), factors))
            for total, value in zip(sums, totals, strict=True):
                b.store(value, total)
        cell = emitter.cell(result, (row, column))
        for number, total in enumerate(sums):
            b.store(b.load(total, typ=vector), beside(cell, number * columns), align=4)
    emitter.give_back([a, c])
    return result


def _widened(emitter: Emitter, factor: Handle) -> Buffer:
    """``factor`` as LLVM floats in memory."""
    # Each of its lanes takes part in many sums, and often in a second product: compute it once, as it lies.
    base = factor.source if isinstance(factor, View) else factor
    emitter.compute(base)
    result = emitter.new_buffer(Handle(INT32, factor.shape))
    with emitter.loops(emitter.all_lanes(factor.shape)) as index:
        value = floats.number(emitter.builder, emitter.lane(factor, index, {}), factor.type)
        emitter.builder.store(value, emitter.cell(result, index))
    return result


def _splat(b: Any, value: Any, width: int) -> Any:
    vector = ir.VectorType(value.type, width)
    first = b.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(INT32, 0))
    return b.shuffle_vector(first, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(INT32, width), None))
