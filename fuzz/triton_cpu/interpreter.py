# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Triton's interpreter as what compiled kernels are compared with: the same, but right.

Triton 3.9.0's is wrong in these places, which ``interpreting`` puts right while it lasts (``tests/test_interpreter.py``
shows each of them wrong, and right):

* a scalar comparison that is spread over a tile becomes integers, which are then refused as a mask;
* float32 to bfloat16 is cut off, and to float8 misrounded, where torch rounds to nearest: torch casts here;
* bfloat16 is added, multiplied, compared and made of integers as if its bits were an integer;
* ``tl.dot`` of bfloat16 multiplies bits, too.

Import only once Triton is in interpreter mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

from fuzz.triton_cpu import uninstall

_TORCH = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e4b8: torch.float8_e4m3fnuz,
}


def _torch(data: Any, dtype: Any) -> torch.Tensor:
    """What NumPy's bits of a Triton type mean."""
    bits = np.ascontiguousarray(data)
    return torch.from_numpy(bits.view(f"int{bits.itemsize * 8}")).view(_TORCH[dtype]).view(bits.shape)


def _numpy(tensor: torch.Tensor, dtype: Any) -> Any:
    """The bits of floats of a Triton type, as the interpreter keeps them."""
    width = dtype.primitive_bitwidth
    bits = tensor.contiguous().view(getattr(torch, f"int{width}")).numpy()
    return bits.view(interpreter._get_np_dtype(dtype)).reshape(tuple(tensor.shape))


def _convert_float(data: Any, source: Any, wanted: Any, _rounding: Any) -> Any:
    bits = _numpy(_torch(data, source).to(_TORCH[wanted]), wanted)
    return bits.view(f"uint{wanted.primitive_bitwidth}")


def _is_bfloat(handle: Any) -> bool:
    return bool(handle.dtype.scalar == tl.bfloat16)


def _single(handle: Any) -> Any:
    """The float32 data of a bfloat16 handle."""
    return _torch(handle.data, tl.bfloat16).float().numpy()


def _with_bfloat(original: Callable[..., Any]) -> Callable[..., Any]:
    """``binary_op`` or ``unary_op``, of bfloat16 by way of float32."""

    def operate(self: Any, *args: Any) -> Any:
        *operands, op = args
        if not _is_bfloat(operands[0]):
            return original(self, *args)
        result = op(*map(_single, operands))
        if result.dtype == np.bool_:
            return TensorHandle(result, tl.int1)
        return TensorHandle(_numpy(torch.from_numpy(np.asarray(result)).to(torch.bfloat16), tl.bfloat16), tl.bfloat16)

    return operate


def _dot(original: Callable[..., Any]) -> Callable[..., Any]:
    def dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if not _is_bfloat(a):
            return original(self, a, b, d, *rest)
        factors = (TensorHandle(_single(factor), tl.float32) for factor in (a, b))
        return original(self, *factors, d, *rest)

    return dot


def _cast(original: Callable[..., Any]) -> Callable[..., Any]:
    def cast_impl(self: Any, source: Any, wanted: Any) -> Any:
        if wanted.scalar != tl.bfloat16 or source.dtype.scalar.is_floating():
            return original(self, source, wanted)
        data = torch.from_numpy(source.data.astype(np.float32)).to(torch.bfloat16)
        return TensorHandle(_numpy(data, tl.bfloat16), tl.bfloat16)

    return cast_impl


def _splat(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_splat(self: Any, type_: Any, source: Any) -> Any:
        handle = original(self, type_, source)
        if source.data.dtype == np.bool_:
            handle.data = handle.data.astype(np.bool_)
        return handle

    return create_splat


_REPAIRS = {
    "binary_op": _with_bfloat,
    "unary_op": _with_bfloat,
    "create_dot": _dot,
    "cast_impl": _cast,
    "create_splat": _splat,
}


@contextmanager
def interpreting() -> Iterator[None]:
    """Launches inside are interpreted, and rightly; afterwards launches go where they went before."""
    run, convert = InterpretedFunction.run, interpreter._convert_float
    originals = {name: getattr(InterpreterBuilder, name) for name in _REPAIRS}
    uninstall()
    interpreter._convert_float = _convert_float
    for name, repair in _REPAIRS.items():
        setattr(InterpreterBuilder, name, repair(originals[name]))
    try:
        yield
    finally:
        InterpretedFunction.run, interpreter._convert_float = run, convert
        for name, original in originals.items():
            setattr(InterpreterBuilder, name, original)
