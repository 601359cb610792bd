# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The builder behind Triton's own semantics.

``TritonSemantic`` decides types: promotion, weak Python numbers, broadcasting, what is an error. It then asks a builder
for operations; Triton's interpreter answers with NumPy, this one with handles. Where Triton leaves an operation
open (division by zero, shifts past the width) the result is NumPy's, as under the interpreter. An operation that
is missing here is ``Unsupported`` under its own name.
"""

# ruff: noqa: D102 - Triton names the methods

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from llvmlite import ir
from triton._C.libtriton.ir import PROPAGATE_NAN, ROUNDING_MODE

from fuzz.triton_cpu import floats, integers
from fuzz.triton_cpu.emitter import Emitter
from fuzz.triton_cpu.formats import NARROW
from fuzz.triton_cpu.shapes import Joined, Reshaped, Slice, permuted, spread
from fuzz.triton_cpu.tiles import BOOL, INT32, INT64, Handle, Lanes, Map, Scalar, Unsupported, View


@dataclass(frozen=True)
class Pointer:
    """Stands for Triton's IR type of a pointer."""

    pointee: Any


@dataclass(frozen=True)
class Block:
    """Stands for Triton's IR type of a tile."""

    element: Any
    shape: tuple[int, ...]


class Builder:
    """What ``TritonSemantic`` calls. Sizes of types are in bits; shapes are tuples of ints."""

    options = SimpleNamespace(sanitize_overflow=False, debug=False, supported_fp8_dtypes=tuple(NARROW))

    def __init__(self, emitter: Emitter, program_ids: Sequence[Any], grid: Sequence[Any]) -> None:
        self.emitter = emitter
        self._program_ids = program_ids
        self._grid = grid

    def map(
        self, name: str, emit: Callable[..., Any], args: Sequence[Handle], type_: Any, pointee: Any = None
    ) -> Handle:
        """An elementwise operation: done now on scalars, per lane on tiles."""
        node = Map(type_, args[0].shape, pointee, name=name, emit=emit, args=tuple(args))
        return node if any(arg.shape for arg in args) else self.emitter.computed(node)

    def constant(self, type_: Any, value: int) -> Scalar:
        """A number of an integer type."""
        return Scalar(type_, (), value=ir.Constant(type_, value))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in integers.ARITHMETIC or name in integers.WIDE_ONLY:
            operation, emit = integers.ARITHMETIC.get(name) or integers.WIDE_ONLY[name]

            def arithmetic(lhs: Handle, rhs: Handle) -> Handle:
                if lhs.type == BOOL and name in integers.WIDE_ONLY:
                    raise Unsupported(f"{operation} of booleans")
                return self.map(operation, emit, (lhs, rhs), lhs.type)

            return arithmetic
        if name in integers.COMPARISONS:
            operation, emit = integers.COMPARISONS[name]
            return lambda lhs, rhs: self.map(operation, emit, (lhs, rhs), BOOL)
        if name.startswith("get_") and name.endswith("_ty"):
            return lambda: _lane_type(name[4:-3])
        if name.startswith(("get_int", "get_uint")):
            return lambda value: self.constant(_lane_type(name[4:].lstrip("u")), value)
        if name in _FLOAT_CASTS:
            return lambda source, type_, rounding=None: self._float_cast(name[7:], source, _element(type_), rounding)
        if name.startswith("create_"):
            return self._float_operation(name)
        raise AttributeError(name)

    def _float_operation(self, name: str) -> Callable[..., Handle]:
        def compute(*args: Any) -> Handle:
            if not floats.known(name):
                raise Unsupported(name.removeprefix("create_"))
            emit, type_ = floats.operation(name, args[0].type)
            return self.map(name.removeprefix("create_"), emit, args, type_)

        return compute

    def _float_cast(self, operation: str, source: Handle, wanted: Any, rounding: Any) -> Handle:
        if rounding not in (None, ROUNDING_MODE.RTNE):
            raise Unsupported(f"rounding by {rounding}")
        return self.map(operation, floats.cast(operation, source.type, wanted), (source,), wanted)

    # types

    def get_ptr_ty(self, element: Any, _address_space: Any) -> Pointer:
        return Pointer(element)

    def get_block_ty(self, element: Any, shape: Sequence[int]) -> Block:
        return Block(element, tuple(shape))

    # values

    def get_null_value(self, type_: Any) -> Scalar:
        return self.constant(type_, 0)

    def get_all_ones_value(self, type_: Any) -> Scalar:
        return self.constant(type_, -1)

    def create_clampf(self, value: Handle, low: Handle, high: Handle, propagate: Any) -> Handle:
        if propagate != PROPAGATE_NAN.NONE:
            raise Unsupported("a clamp that propagates NaN")
        clamped: Handle = self.create_minnumf(self.create_maxnumf(value, low), high)
        return clamped

    def get_fp16(self, value: float) -> Handle:
        return self._float_cast("fp_trunc", self.get_fp32(value), NARROW["half"], None)

    def get_bf16(self, value: float) -> Handle:
        return self._float_cast("fp_trunc", self.get_fp32(value), NARROW["bf16"], None)

    def get_fp32(self, value: float) -> Scalar:
        return self.constant(INT32, floats.bits(value, 32))

    def get_fp64(self, value: float) -> Scalar:
        return self.constant(INT64, floats.bits(value, 64))

    def create_get_program_id(self, axis: int) -> Scalar:
        return Scalar(INT32, (), value=self._program_ids[axis])

    def create_get_num_programs(self, axis: int) -> Scalar:
        return Scalar(INT32, (), value=self._grid[axis])

    def create_make_range(self, _type: Any, start: int, stop: int) -> Lanes:
        return Lanes(INT32, (stop - start,), start=start)

    # shapes

    def create_splat(self, type_: Block, source: Handle) -> Handle:
        return View(source.type, type_.shape, source.pointee, source=source, axes=(None,) * len(source.shape))

    def create_broadcast(self, source: Handle, shape: Sequence[int]) -> Handle:
        return spread(self.emitter, source, tuple(shape))

    def create_expand_dims(self, source: Handle, axis: int) -> Handle:
        shape = (*source.shape[:axis], 1, *source.shape[axis:])
        axes = tuple(old if old < axis else old + 1 for old in range(len(source.shape)))
        return View(source.type, shape, source.pointee, source=source, axes=axes)

    def create_reshape(self, source: Handle, shape: Sequence[int], _allow_reorder: bool) -> Handle:
        return Reshaped(source.type, tuple(shape), source.pointee, source=source)

    def create_trans(self, source: Handle, axes: Sequence[int]) -> Handle:
        return permuted(source, tuple(axes))

    def create_join(self, left: Handle, right: Handle) -> Handle:
        return Joined(left.type, (*left.shape, 2), left.pointee, left=left, right=right)

    def create_split(self, source: Handle) -> tuple[Handle, Handle]:
        first, second = (Slice(source.type, source.shape[:-1], source.pointee, source=source, place=n) for n in (0, 1))
        return first, second

    # casts and pointers

    def create_int_cast(self, source: Handle, type_: Any, signed: bool) -> Handle:
        wanted, width = _element(type_), source.type.width
        if wanted.width == width:
            return source
        if wanted.width < width:
            return self.map("trunc", lambda b, x: b.trunc(x, wanted), (source,), wanted)
        if signed:
            return self.map("sext", lambda b, x: b.sext(x, wanted), (source,), wanted)
        return self.map("zext", lambda b, x: b.zext(x, wanted), (source,), wanted)

    def create_bitcast(self, source: Handle, type_: Any) -> Handle:
        element = _element(type_)
        if isinstance(element, Pointer):
            element, pointee = INT64, element.pointee
        else:
            pointee = None
        if element != source.type:
            raise Unsupported(f"bitcast from {source.type} to {element}")
        return self.map("bitcast", lambda _, x: x, (source,), element, pointee)

    create_int_to_ptr = create_bitcast
    create_ptr_to_int = create_bitcast

    def create_addptr(self, pointer: Handle, offset: Handle) -> Handle:
        if not isinstance(pointer.pointee, ir.IntType):
            raise Unsupported("arithmetic on a pointer to pointers")
        size = ir.Constant(INT64, max(1, pointer.pointee.width // 8))

        def emit(b: Any, address: Any, count: Any) -> Any:
            wide = count if count.type == INT64 else b.sext(count, INT64)
            return b.add(address, b.mul(wide, size))

        return self.map("addptr", emit, (pointer, offset), INT64, pointer.pointee)

    def create_select(self, condition: Handle, lhs: Handle, rhs: Handle) -> Handle:
        return self.map("select", lambda b, c, x, y: b.select(c, x, y), (condition, lhs, rhs), lhs.type, lhs.pointee)


_FLOAT_BITS = {"float": 32, "double": 64}
_FLOAT_CASTS = frozenset(
    f"create_{name}" for name in ("si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui", "fp_ext", "fp_trunc", "fp_to_fp")
)


def _lane_type(name: str) -> Any:
    """LLVM's type for the name in Triton's get_NAME_ty; a float is the integer of its width."""
    if name in NARROW:
        return NARROW[name]
    if name.startswith("fp8"):
        return ir.IntType(8)
    bits = _FLOAT_BITS.get(name) or int(name.lstrip("u").removeprefix("int"))
    return ir.IntType(bits)


def _element(type_: Any) -> Any:
    return type_.element if isinstance(type_, Block) else type_
