# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Launches kernels as machine code, in place of Triton's interpreter.

``install`` replaces ``InterpretedFunction.run``, where every launch under the interpreter ends, however it was spelled.
A kernel is translated once for each combination of argument types and constants; what cannot be translated runs under
the interpreter, with one warning a kernel and reason, and is counted. Relied upon: llvmlite (numba brings it, vLLM
needs numba) compiles a kernel in a few hundredths of a second, so nothing is kept on disk.
"""

from __future__ import annotations

import ctypes
import inspect
import math
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton.language as tl
from llvmlite import binding as llvm
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import mangle_type

from fuzz.triton_cpu import fallbacks, lookup, memory
from fuzz.triton_cpu.checks import Checking
from fuzz.triton_cpu.tiles import Unsupported
from fuzz.triton_cpu.translate import Argument, Translated, translate

_interpret = InterpretedFunction.run
_lock = threading.Lock()


class KernelFallback(RuntimeWarning):
    """A kernel runs under Triton's interpreter, slowly."""


class _Compiler:
    """LLVM, set up for this machine. Its optimiser is left out: it would take most of the time, and the code of a
    lane is straight already (measured: 0.60 us a program against 0.55, for 50 ms against 170 to compile)."""

    def __init__(self) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self._machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=1
        )
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(lookup.CODE), self._machine)
        self._compiled = 0

    def new_name(self) -> str:
        self._compiled += 1
        return f"launch{self._compiled}"

    def compile(self, text: str, name: str) -> Callable[..., int]:
        """The function ``name`` of a module."""
        module = llvm.parse_assembly(text)
        module.verify()
        self._engine.add_module(module)
        self._engine.finalize_object()
        prototype = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32)
        return prototype(self._engine.get_function_address(name))


class _Program:
    """A kernel compiled for some argument types and constants."""

    def __init__(self, run: Callable[..., int], slots: int, code: Translated) -> None:
        self.run = run
        self.array = ctypes.c_int64 * slots
        self.code = code


class _Kernel:
    """One ``@triton.jit`` function."""

    def __init__(self, function: InterpretedFunction) -> None:
        self.function = function
        self.name = function.fn.__name__
        parameters = inspect.signature(function.fn).parameters
        self._names = tuple(parameters)
        self._defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
        self._constant = tuple(_is_constexpr(p.annotation) for p in parameters.values())
        self._programs: defaultdict[Any, dict[tuple[Any, ...], _Program | Unsupported]] = defaultdict(dict)
        """By what is checked, then by arguments."""

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """The value of every parameter. Options of the launch that are no parameters are dropped, as by Triton."""
        values = list(args)
        for name in self._names[len(values) :]:
            values.append(kwargs[name] if name in kwargs else self._defaults[name])
        return values

    def launch(self, grid: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Run the grid; False if this kernel cannot be compiled for these arguments."""
        checker = memory.active()
        try:
            values = self.bind(args, kwargs)
            key, slots, tensors = self._specialise(values)
            checking = None if checker is None else checker.checking
            programs = self._programs[checking]
            program = programs.get(key)
            if program is None:
                program = programs[key] = self._compile(values, key, len(slots), checking)
            if isinstance(program, Unsupported):
                raise program
            sizes = self._sizes(grid, values)
        except (Unsupported, KeyError, ValueError) as problem:
            line = getattr(problem, "line", None) or self.function.fn.__code__.co_firstlineno
            # Python shows a warning of one text from one place once.
            warnings.warn(f"kernel {self.name}: unsupported {problem} at line {line}", KernelFallback, stacklevel=1)
            return False
        if checker is None:
            status = program.run(program.array(*slots), *sizes)
        else:
            table = checker.begin(program.code, tensors, math.prod(sizes))
            status = program.run(program.array(*slots, table), *sizes)
            checker.end(self.name, program.code, tensors, sizes)
        if status:
            raise InterpreterError(f"kernel {self.name}: {program.code.errors[status - 1]}")
        return True

    def _sizes(self, grid: Any, values: Sequence[Any]) -> tuple[int, ...]:
        if callable(grid):
            grid = grid(dict(zip(self._names, values, strict=True)))
        if len(grid) > 3:
            raise Unsupported(f"a grid of {len(grid)} dimensions")
        return (*map(int, grid), 1, 1)[:3]

    def _specialise(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], list[int], list[torch.Tensor]]:
        """What decides the code, the numbers that the code gets, and the tensors that some of them point to."""
        key: list[Any] = []
        slots: list[int] = []
        tensors: list[torch.Tensor] = []
        for value, constant in zip(values, self._constant, strict=True):
            kind = type(value)
            if constant:
                key.append(_constant_key(value))
            elif kind is torch.Tensor or isinstance(value, torch.Tensor):
                if value.device.type != "cpu":
                    raise Unsupported(f"a tensor on {value.device}")
                key.append(value.dtype)
                slots.append(value.data_ptr())
                tensors.append(value)
            elif kind is int or kind is bool:
                key.append("i1" if kind is bool else _int_type(value))
                slots.append(value)
            else:
                key.append(_constant_key(value))
        return tuple(key), slots, tensors

    def _compile(
        self, values: Sequence[Any], key: Sequence[Any], slots: int, checking: Checking | None
    ) -> _Program | Unsupported:
        try:
            given = zip(self._names, values, key, strict=True)
            arguments = {name: _argument(part) or value for name, value, part in given}
            with _lock:
                compiler = _compiler()
                name = compiler.new_name()
                code = translate(self.function.fn, arguments, name, checking)
                return _Program(compiler.compile(code.text, name), slots + (checking is not None), code)
        except Unsupported as problem:
            return problem
        except Exception as error:
            return Unsupported(f"{type(error).__name__} ({error})")


def _is_constexpr(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return annotation.strip().split(".")[-1] == "constexpr"
    return annotation is tl.constexpr


_INTEGERS = {"i1": tl.int1, "i32": tl.int32, "i64": tl.int64}


def _int_type(value: int) -> str:
    if -(1 << 31) <= value < 1 << 31:
        return "i32"
    if -(1 << 63) <= value < 1 << 63 and not 1 << 31 <= value < 1 << 32:
        return "i64"
    raise Unsupported(f"the integer argument {value}")


def _constant_key(value: Any) -> tuple[Any, ...]:
    """Equal only for values that make equal code: 1, True and 1.0 do not."""
    if isinstance(value, tl.constexpr):
        value = value.value
    if not isinstance(value, (bool, int, float, str, tl.dtype, type(None))):
        raise Unsupported(f"an argument of type {type(value).__name__}")
    return (type(value), repr(value) if isinstance(value, float) else value)


def _argument(part: Any) -> Argument | None:
    """The run-time argument that a part of a key stands for."""
    if isinstance(part, str):
        return Argument(_INTEGERS[part])
    if not isinstance(part, torch.dtype):
        return None
    return Argument(tl.str_to_ty(mangle_type(torch.empty(0, dtype=part)), None))


_the_compiler: list[_Compiler] = []


def _compiler() -> _Compiler:
    if not _the_compiler:
        _the_compiler.append(_Compiler())
    return _the_compiler[0]


_kernels: dict[InterpretedFunction, _Kernel] = {}


def _run(self: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    if warmup:
        return
    if not self.pre_run_hooks:
        kernel = _kernels.get(self)
        if kernel is None:
            kernel = _kernels[self] = _Kernel(self)
        if kernel.launch(grid, args, kwargs):
            return
    fallbacks[self.fn.__name__] += 1
    _interpret(self, *args, grid=grid, warmup=warmup, **kwargs)


def install() -> None:
    """Launch kernels as machine code from now on."""
    InterpretedFunction.run = _run


def uninstall() -> None:
    """Launch kernels under Triton's interpreter from now on."""
    InterpretedFunction.run = _interpret


def installed() -> bool:
    """Whether kernels are launched as machine code now."""
    return bool(InterpretedFunction.run is _run)
