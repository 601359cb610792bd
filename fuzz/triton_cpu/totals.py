# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The functions of ``triton.language`` that make one value of many lanes: sums, maxima, minima and where those are.

As under the interpreter, which leaves them to NumPy: a NaN is passed over by ``max`` and ``min`` unless every lane is
one, the first of equal lanes is the index, and floats are added up pairwise along the last axis, one after the other
along another.
"""

# ruff: noqa: D102 - Triton names and documents the functions

from __future__ import annotations

import math
from typing import Any

import triton.language as tl

from fuzz.triton_cpu import floats
from fuzz.triton_cpu.formats import Narrow
from fuzz.triton_cpu.operators import Operators
from fuzz.triton_cpu.reductions import Combine, first_extreme, pairwise_sum, reduce, scan
from fuzz.triton_cpu.shapes import permuted
from fuzz.triton_cpu.tiles import Unsupported


class Totals(Operators):
    """Reductions and scans of one kernel."""

    def sum(self, input: Any, axis: int | None = None, keep_dims: bool = False, dtype: Any = None) -> Any:
        tile = self.semantic.cast(input, _sum_type(input, dtype))
        if not tile.dtype.is_floating():
            return self._reduced(tile, axis, keep_dims, self.builder.create_add, 0)
        rank = len(tile.handle.shape)
        if keep_dims or isinstance(tile.handle.type, Narrow) or (axis is None and rank != 1):
            raise Unsupported("a sum of floats of two bytes, or along all of several axes")
        along = rank - 1 if axis is None else _axis(tile, axis)
        if math.prod(tile.handle.shape[along + 1 :]) > 1:
            return self._reduced(tile, axis, keep_dims, self.builder.create_fadd, 0)
        # To NumPy an axis is the last one if those behind it have one lane.
        axes = (*(other for other in range(rank) if other != along), along)
        handle = pairwise_sum(self.builder, permuted(tile.handle, axes))
        return tl.tensor(handle, tl.block_type(tile.dtype, list(handle.shape)) if handle.shape else tile.dtype)

    def max(
        self,
        input: Any,
        axis: int | None = None,
        return_indices: bool = False,
        return_indices_tie_break_left: bool = True,  # noqa: ARG002 - NumPy takes the first in any case
        keep_dims: bool = False,
    ) -> Any:
        if return_indices:
            return self._first(input, axis, keep_dims, largest=True)
        return self._extreme(input, axis, keep_dims, largest=True)

    def min(
        self,
        input: Any,
        axis: int | None = None,
        return_indices: bool = False,
        return_indices_tie_break_left: bool = True,  # noqa: ARG002
        keep_dims: bool = False,
    ) -> Any:
        if return_indices:
            return self._first(input, axis, keep_dims, largest=False)
        return self._extreme(input, axis, keep_dims, largest=False)

    def argmax(self, input: Any, axis: int, tie_break_left: bool = True, keep_dims: bool = False) -> Any:  # noqa: ARG002
        return self._first(input, axis, keep_dims, largest=True)[1]

    def argmin(self, input: Any, axis: int, tie_break_left: bool = True, keep_dims: bool = False) -> Any:  # noqa: ARG002
        return self._first(input, axis, keep_dims, largest=False)[1]

    def cumsum(self, input: Any, axis: int = 0, reverse: bool = False, dtype: Any = None) -> Any:
        if reverse:
            raise Unsupported("a reversed cumsum")
        tile = self.semantic.cast(input, _sum_type(input, dtype))
        if tile.dtype.is_floating():
            raise Unsupported("a cumsum of floats")
        return tl.tensor(scan(self.builder, tile.handle, _axis(tile, axis), self.builder.create_add), tile.type)

    def _extreme(self, tile: Any, axis: int | None, keep_dims: bool, *, largest: bool) -> Any:
        builder = self.builder
        dtype = _number_type(tile)
        if dtype.is_floating() and dtype.primitive_bitwidth < 32:
            tile, dtype = self.semantic.cast(tile, tl.float32), tl.float32
        if dtype.is_floating():
            combine = builder.create_maxnumf if largest else builder.create_minnumf
            return self._reduced(tile, axis, keep_dims, combine, floats.bits(float("nan"), dtype.primitive_bitwidth))
        if dtype.int_bitwidth < 32:
            tile, dtype = self.semantic.cast(tile, tl.int32), tl.int32
        combine = getattr(builder, f"create_{'max' if largest else 'min'}{'s' if dtype.is_int_signed() else 'u'}i")
        return self._reduced(tile, axis, keep_dims, combine, _worst(dtype, largest))

    def _first(self, tile: Any, axis: int | None, keep_dims: bool, *, largest: bool) -> Any:
        """The largest or smallest value, and the first lane that has it."""
        builder, dtype = self.builder, _number_type(tile)
        if dtype.is_floating() and dtype.primitive_bitwidth < 32:
            raise Unsupported(f"the index of a maximum of {dtype}")
        if keep_dims or axis is None or len(tile.handle.shape) != 1 or dtype.is_bool():
            raise Unsupported("the index of a maximum along one of several axes, or of booleans")
        _axis(tile, axis)
        kind = "fcmpO" if dtype.is_floating() else "icmpS" if dtype.is_int_signed() else "icmpU"
        better = getattr(builder, f"create_{kind}{'GT' if largest else 'LT'}")
        equal = builder.create_fcmpOEQ if dtype.is_floating() else builder.create_icmpEQ
        value, index, found = first_extreme(builder, tile.handle, better, equal, _worst(dtype, largest))
        self._fail_if(self.emitter.builder.not_(found), "All-NaN slice encountered")
        return tl.tensor(value, dtype), tl.tensor(index, tl.int32)

    def _reduced(self, tile: Any, axis: int | None, keep_dims: bool, combine: Combine, initial: int) -> Any:
        if keep_dims:
            raise Unsupported("keep_dims")
        handle = reduce(self.builder, tile.handle, None if axis is None else _axis(tile, axis), combine, initial)
        return tl.tensor(handle, tl.block_type(tile.dtype, list(handle.shape)) if handle.shape else tile.dtype)


def _worst(dtype: Any, largest: bool) -> int:
    """The bits that no lane is worse than."""
    if dtype.is_floating():
        return floats.bits(float("-inf") if largest else float("inf"), dtype.primitive_bitwidth)
    return int(dtype.get_int_min_value() if largest else dtype.get_int_max_value())


def _number_type(tile: Any) -> Any:
    if not isinstance(tile, tl.tensor) or not (tile.dtype.is_int() or tile.dtype.is_floating()):
        raise Unsupported("a maximum of what are no numbers")
    if tile.dtype.is_floating():
        floats.check(tile.handle.type)
    return tile.dtype


def _sum_type(tile: Any, dtype: Any) -> Any:
    if not isinstance(tile, tl.tensor) or not (tile.dtype.is_int() or tile.dtype.is_floating()):
        raise Unsupported("a sum of what are no numbers")
    if dtype is not None:
        return dtype
    if tile.dtype.is_floating() or tile.dtype.int_bitwidth >= 32:
        return tile.dtype
    return tl.int32 if tile.dtype.is_int_signed() else tl.uint32


def _axis(tile: Any, axis: Any) -> int:
    rank = len(tile.handle.shape)
    if not isinstance(axis, int) or not -rank <= axis < rank:
        raise Unsupported(f"axis {axis!r} of a tile of rank {rank}")
    return axis % rank
