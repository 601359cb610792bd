# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""What the functions of ``triton.language`` do with a translated kernel's values.

Relied upon: a method of ``Language`` is called with the arguments of the ``tl`` function of its name, so its parameters
are named and ordered as Triton's. Import only once Triton is in interpreter mode.
"""

# ruff: noqa: D102 - Triton names and documents the functions

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

import triton.language as tl

from fuzz.triton_cpu import floats
from fuzz.triton_cpu.builder import Builder
from fuzz.triton_cpu.operators import WeakInt, known, plain
from fuzz.triton_cpu.products import product
from fuzz.triton_cpu.shapes import concatenated
from fuzz.triton_cpu.tiles import Handle, Load, Scalar, Unsupported
from fuzz.triton_cpu.totals import Totals


class Language(Totals):
    """One kernel's ``tl``. ``needed_later`` gives the values that a store must not change."""

    NAMES = (
        frozenset(["program_id", "num_programs", "arange", "load", "store", "where", "minimum", "maximum", "full"])
        | frozenset(["zeros", "cast", "expand_dims", "multiple_of", "max_contiguous", "max_constancy", "constexpr"])
        | frozenset(["sum", "max", "min", "argmax", "argmin", "cumsum", "exp", "log", "add", "mul", "umulhi"])
        | frozenset(["exp2", "log2", "ceil", "floor", "abs", "clamp", "dot", "reshape", "broadcast_to", "trans"])
        | frozenset(
            [
                "permute",
                "join",
                "split",
                "interleave",
                "cat",
                "to_tensor",
                "static_assert",
                "device_assert",
                "debug_barrier",
            ]
        )
    )
    METHODS = frozenset(["to", "cast", "expand_dims", "sum", "max", "min", "cumsum", "store"])

    def __init__(
        self, builder: Builder, needed_later: Callable[[], list[Handle]], fail_if: Callable[[Any, str], None]
    ) -> None:
        super().__init__(builder, fail_if)
        self._needed_later = needed_later

    def program_id(self, axis: int) -> Any:
        return self.semantic.program_id(axis)

    def num_programs(self, axis: int) -> Any:
        return self.semantic.num_programs(axis)

    def arange(self, start: int, end: int) -> Any:
        return self.semantic.arange(start, end)

    def full(self, shape: Sequence[Any], value: Any, dtype: Any) -> Any:
        value = self.tensor(value) if isinstance(value, WeakInt) else value
        return self.semantic.full([plain(size) for size in shape], value, dtype)

    def zeros(self, shape: Sequence[Any], dtype: Any) -> Any:
        return self.full(shape, 0, dtype)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        return self.semantic.where(self.tensor(condition), self.number(x, y), self.number(y, x))

    def minimum(self, x: Any, y: Any) -> Any:
        return self.semantic.minimum(self.number(x, y), self.number(y, x), tl.PropagateNan.NONE)

    def maximum(self, x: Any, y: Any) -> Any:
        return self.semantic.maximum(self.number(x, y), self.number(y, x), tl.PropagateNan.NONE)

    def cast(self, input: Any, dtype: Any, *, bitcast: bool = False) -> Any:
        input = self.tensor(input)
        return self.semantic.bitcast(input, dtype) if bitcast else self.semantic.cast(input, dtype)

    to = cast

    def to_tensor(self, x: Any) -> Any:
        return self.tensor(x)

    def add(self, x: Any, y: Any, sanitize_overflow: bool = True) -> Any:  # noqa: ARG002 - not without debug
        return self.operate(ast.Add, x, y)

    def mul(self, x: Any, y: Any, sanitize_overflow: bool = True) -> Any:  # noqa: ARG002
        return self.operate(ast.Mult, x, y)

    def umulhi(self, x: Any, y: Any) -> Any:
        x, y = self.semantic.binary_op_type_checking_impl(self.number(x, y), self.number(y, x))
        if not x.dtype.is_int() or x.dtype.int_bitwidth < 32:
            raise Unsupported(f"umulhi of {x.dtype}")
        return tl.tensor(self.builder.create_umulhi(x.handle, y.handle), x.type)

    def abs(self, x: Any) -> Any:
        if x.dtype.is_int_unsigned():
            return x
        return self._of_floats(self.builder.create_fabs, x)

    def clamp(self, x: Any, min: Any, max: Any, propagate_nan: Any = tl.PropagateNan.NONE) -> Any:
        return self.semantic.clamp(self.tensor(x), self.tensor(min), self.tensor(max), propagate_nan)

    def dot(
        self,
        input: Any,
        other: Any,
        acc: Any = None,
        input_precision: Any = None,  # noqa: ARG002 - float32 stays float32
        allow_tf32: Any = None,  # noqa: ARG002
        max_num_imprecise_acc: Any = None,  # noqa: ARG002
        out_dtype: Any = None,
    ) -> Any:
        shapes = input.handle.shape, other.handle.shape
        if [len(shape) for shape in shapes] != [2, 2] or shapes[0][1] != shapes[1][0] or input.dtype != other.dtype:
            raise Unsupported(f"a product of {input.type} and {other.type}")
        floats.check(input.handle.type)
        wanted = out_dtype or (acc.dtype if acc is not None else tl.float32)
        if not input.dtype.is_floating() or input.dtype == tl.float64 or wanted != tl.float32:
            raise Unsupported(f"a product of {input.dtype} in {wanted}")
        handle = product(self.emitter, input.handle, other.handle)
        result = tl.tensor(handle, tl.block_type(tl.float32, list(handle.shape)))
        return result if acc is None else self.semantic.add(result, acc, False)

    def reshape(self, input: Any, *shape: Any, can_reorder: bool = False) -> Any:
        sizes = _sizes(shape)
        if can_reorder or not sizes:
            raise Unsupported("a reshape that may reorder, or of no axes")
        return self.semantic.reshape(input, sizes, False)

    def broadcast_to(self, input: Any, *shape: Any) -> Any:
        return self.semantic.broadcast_impl_shape(input, _sizes(shape))

    def permute(self, input: Any, *dims: Any) -> Any:
        return self.semantic.permute(input, _sizes(dims))

    def trans(self, input: Any, *dims: Any) -> Any:
        rank = len(input.handle.shape)
        return self.permute(input, *(dims or (*range(rank - 2), rank - 1, rank - 2)))

    def join(self, a: Any, b: Any) -> Any:
        return self.semantic.join(a, b)

    def split(self, a: Any) -> Any:
        if len(a.handle.shape) < 2:
            raise Unsupported("a split into two scalars")
        return self.semantic.split(a)

    def interleave(self, a: Any, b: Any) -> Any:
        shape = self.join(a, b).handle.shape
        return self.reshape(self.join(a, b), [*shape[:-2], 2 * shape[-2]])

    def cat(self, input: Any, other: Any, can_reorder: bool = False, dim: int = 0) -> Any:
        if can_reorder or input.type != other.type or not isinstance(dim, int):
            raise Unsupported("a cat of two types, or one that may reorder")
        handle = concatenated(self.emitter, input.handle, other.handle, dim % len(input.handle.shape))
        return tl.tensor(handle, tl.block_type(input.dtype, list(handle.shape)))

    def expand_dims(self, input: Any, axis: int) -> Any:
        rank = len(input.shape) + 1
        if not isinstance(axis, int) or not -rank <= axis < rank:
            raise Unsupported(f"expand_dims at {axis!r}")
        return self.semantic.expand_dims(input, axis % rank)

    def multiple_of(self, input: Any, values: Any) -> Any:  # noqa: ARG002
        return input

    max_contiguous = multiple_of
    max_constancy = multiple_of

    def constexpr(self, value: Any) -> Any:
        return value

    def static_assert(self, cond: Any, msg: str = "") -> None:
        if not known(cond) or not cond:
            raise Unsupported(f"a failing static_assert {msg}")

    def device_assert(self, cond: Any, msg: str = "", mask: Any = None) -> None:
        """Nothing: the interpreter runs without debug."""

    def debug_barrier(self) -> None:
        """Nothing: a program has one thread."""

    def load(self, pointer: Any, mask: Any = None, other: Any = None, **_hints: Any) -> Any:
        semantic = self.semantic
        if not isinstance(pointer, tl.tensor) or not pointer.type.scalar.is_ptr():
            raise Unsupported("a load from what is no pointer")
        if mask is None and other is not None:
            raise Unsupported("a load with other and no mask")
        if mask is not None:
            pointer, mask = self._masked(pointer, mask)
        is_bool = pointer.type.scalar.element_ty == tl.int1
        pointer, element = self._bool_as_byte(pointer)
        lane_type = element.to_ir(self.builder)
        if other is None:
            other = tl.tensor(self.builder.get_null_value(lane_type), element)
        other = semantic.cast(self.tensor(other), element)
        if pointer.type.is_block():
            pointer, other = semantic.broadcast_impl_value(pointer, other)
        elif other.type.is_block():
            raise Unsupported("a scalar load with a tile as other")
        type_ = pointer.type.with_element_ty(element) if pointer.type.is_block() else element
        mask_handle = None if mask is None else mask.handle
        load = Load(lane_type, pointer.handle.shape, pointer=pointer.handle, mask=mask_handle, other=other.handle)
        handle: Handle = load
        if not handle.shape:
            handle = Scalar(lane_type, (), value=self.emitter.lane(handle, (), {}))
        else:
            self.emitter.loaded(load)
        result = tl.tensor(handle, type_)
        return semantic.cast(result, tl.int1) if is_bool else result

    def store(self, pointer: Any, value: Any, mask: Any = None, **_hints: Any) -> None:
        semantic = self.semantic
        if not isinstance(pointer, tl.tensor) or not pointer.type.scalar.is_ptr():
            raise Unsupported("a store to what is no pointer")
        shape = pointer.handle.shape
        value = self.tensor(value)
        if mask is not None:
            pointer, mask = self._masked(pointer, mask)
        if pointer.type.is_block():
            pointer, value = semantic.broadcast_impl_value(pointer, value)
        if pointer.handle.shape != shape or value.handle.shape != shape:
            raise Unsupported("a store of a larger tile than its pointers")
        value = semantic.cast(value, pointer.type.scalar.element_ty)
        pointer, element = self._bool_as_byte(pointer)
        value = semantic.cast(value, element)
        self.emitter.store(pointer.handle, value.handle, None if mask is None else mask.handle, self._needed_later())

    def exp(self, x: Any) -> Any:
        return self._of_floats(self.builder.create_exp, x)

    def exp2(self, x: Any) -> Any:
        return self._of_floats(self.builder.create_exp2, x)

    def log(self, x: Any) -> Any:
        return self._of_floats(self.builder.create_log, x)

    def log2(self, x: Any) -> Any:
        return self._of_floats(self.builder.create_log2, x)

    def ceil(self, x: Any) -> Any:
        return self._of_floats(self.builder.create_ceil, x)

    def floor(self, x: Any) -> Any:
        return self._of_floats(self.builder.create_floor, x)

    def _of_floats(self, function: Callable[[Handle], Handle], x: Any) -> Any:
        x = self.tensor(x)
        if not x.dtype.is_floating():
            raise Unsupported(f"a function of floats of {x.dtype}")
        return tl.tensor(function(x.handle), x.type)

    def _masked(self, pointer: Any, mask: Any) -> tuple[Any, Any]:
        mask = self.tensor(mask)
        if not isinstance(mask, tl.tensor) or not mask.dtype.is_bool():
            raise Unsupported("a mask that is not boolean")
        if pointer.type.is_block():
            pointer, mask = self.semantic.broadcast_impl_value(pointer, mask)
            return pointer, mask
        if mask.type.is_block():
            raise Unsupported("a tile as mask of a scalar pointer")
        return pointer, mask

    def _bool_as_byte(self, pointer: Any) -> tuple[Any, Any]:
        element = pointer.type.scalar.element_ty
        if element.is_ptr():
            raise Unsupported("a pointer to pointers")
        if element == tl.int1:
            return self.semantic.cast(pointer, tl.pointer_type(tl.int8)), tl.int8
        return pointer, element


def _sizes(shape: Sequence[Any]) -> list[int]:
    """The sizes of a shape that is given as one argument, or as many."""
    given = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    return [plain(size) for size in given]
