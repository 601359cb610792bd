# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""vLLM's ROCm modules on a machine without ROCm: inside ``rocm("gfx950")`` they import and run as on that GPU.

Nothing but names is made up. A stand-in for ``amdsmi`` says which GPU there is, vLLM's own ``vllm.platforms.rocm``
draws its conclusions from that, and the current platform becomes its ``RocmPlatform``, but for the torch device, which
stays the CPU. Kernels run as everywhere else here. vLLM's launchers of attention kernels refuse CPU tensors by an
assertion, so vLLM's modules are told that no tensor is one; nobody else is.

Relied upon: what depends on the GPU is decided when a module is imported (``_ON_GFX950``), or asked of the current
platform when it is needed. Modules that have decided are therefore set aside for as long as the context lasts, and
imported anew, once for each architecture. Afterwards ``sys.modules``, the packages' attributes, the platform and all
that was patched are as before; only operators that were registered with torch stay registered.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec
from itertools import islice
from typing import Any, Literal

Architecture = Literal["gfx950", "gfx942"]

_PLATFORM = "vllm.platforms.rocm"
_AMD = "vllm.models.deepseek_v41.amd"
_ABSENT = object()
_modules: dict[Architecture, dict[str, types.ModuleType]] = {"gfx950": {}, "gfx942": {}}
"""What was imported inside, and goes back into ``sys.modules`` when the context is entered again."""
_decided: set[str] = set()
"""Modules that were imported outside, and decided on another platform."""
_current: list[Architecture] = []


def current() -> Architecture | None:
    """The GPU that vLLM sees now; None outside."""
    return _current[0] if _current else None


@contextmanager
def rocm(architecture: Architecture) -> Iterator[None]:
    """Inside, vLLM runs as on this GPU. May be nested in itself. ``prepare`` comes first.

    Raises ``RuntimeError`` inside the other one, ``ImportError`` where this vLLM has no ROCm modules.
    """
    if _current:
        if _current[0] != architecture:
            raise RuntimeError(f"vLLM runs as on {_current[0]} already, and cannot as on {architecture}")
        yield
        return
    _import_shared()
    with _installed(_modules[architecture], architecture), _platform(), _operators(), _no_cpu_tensors():
        _current.append(architecture)
        try:
            yield
        finally:
            _current.clear()


@cache
def _import_shared() -> None:
    """What all platforms share comes first, so that it stays the same module inside and outside."""
    import vllm.models.deepseek_v41.attention
    import vllm.models.deepseek_v41.sparse_mla
    import vllm.v1.attention.ops.rocm_aiter_mla_sparse  # noqa: F401


@contextmanager
def _installed(own: dict[str, types.ModuleType], architecture: Architecture) -> Iterator[None]:
    """Have ``own`` in ``sys.modules``, and keep in it what is imported on the way.

    Entered in every step of a run, so nothing looks at all of ``sys.modules`` after the first time: what is imported
    stands at its end.
    """
    if not own:
        _decided.update(name for name, module in sys.modules.items() if _has_decided(name, module))
    aside = _decided | set(own)
    before = {name: (sys.modules.get(name), _attribute(name)) for name in aside}
    library = sys.modules.get("amdsmi")
    for name in aside:
        sys.modules.pop(name, None)
    for name, module in own.items():
        _put(name, module, module)
    sys.modules["amdsmi"] = amdsmi(architecture)
    size = len(sys.modules)
    try:
        if not own:
            import vllm.platforms.rocm  # noqa: F401
        yield
    finally:
        for name in list(islice(sys.modules, size, None)):
            if name.startswith("vllm."):
                own[name] = sys.modules[name]
        for name in aside | set(own):
            _put(name, *before.get(name, (None, _ABSENT)))
        _put("amdsmi", library, _ABSENT)


def _has_decided(name: str, module: object) -> bool:
    if not name.startswith("vllm."):
        return False
    # ROCm's own modules hold on to the current platform as it was when they were imported.
    if name in (_PLATFORM, _AMD) or name.startswith(f"{_AMD}."):
        return True
    return any(key.startswith("_ON_GFX") for key in getattr(module, "__dict__", ()))


def _attribute(name: str) -> object:
    """What the package of a module has under the module's name."""
    package, _, child = name.rpartition(".")
    return vars(sys.modules[package]).get(child, _ABSENT) if package in sys.modules else _ABSENT


def _put(name: str, module: types.ModuleType | None, attribute: object) -> None:
    if module is None:
        sys.modules.pop(name, None)
    else:
        sys.modules[name] = module
    package, _, child = name.rpartition(".")
    if package not in sys.modules:
        return
    if attribute is _ABSENT:
        vars(sys.modules[package]).pop(child, None)
    else:
        setattr(sys.modules[package], child, attribute)


@cache
def amdsmi(architecture: str) -> types.ModuleType:
    """AMD's system management library, as far as it is asked for the GPU's name."""
    library = types.ModuleType("amdsmi")
    module: Any = library
    module.__spec__ = ModuleSpec("amdsmi", None)
    module.AmdSmiException = RuntimeError
    module.amdsmi_init = module.amdsmi_shut_down = lambda: None
    module.amdsmi_get_processor_handles = lambda: [0]
    module.amdsmi_get_gpu_asic_info = lambda _: {"target_graphics_version": architecture}
    module.__getattr__ = _unknown
    return library


def _unknown(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*_: Any) -> Any:
        raise RuntimeError(f"amdsmi.{name}: there is no AMD GPU here")

    return refuse


@contextmanager
def _platform() -> Iterator[None]:
    """Everybody has the same platform object, so it is changed in place."""
    from vllm.platforms import current_platform
    from vllm.platforms.rocm import RocmPlatform

    before = current_platform.__class__
    current_platform.__class__ = _on_cpu(RocmPlatform)
    try:
        yield
    finally:
        current_platform.__class__ = before


@cache
def _on_cpu(platform: type[Any]) -> type[Any]:
    return type("RocmPlatformOnCpu", (platform,), {"device_type": "cpu", "dispatch_key": "CPU"})


@contextmanager
def _operators() -> Iterator[None]:
    """vLLM's operators have one name each in torch, and stay what they are when their module is imported again."""
    import torch
    from vllm.utils import torch_utils

    before = torch_utils.direct_register_custom_op

    def register(op_name: str, *args: Any, **kwargs: Any) -> None:
        if not hasattr(torch.ops.vllm, op_name):
            before(op_name, *args, **kwargs)

    torch_utils.direct_register_custom_op = register
    try:
        yield
    finally:
        torch_utils.direct_register_custom_op = before


@contextmanager
def _no_cpu_tensors() -> Iterator[None]:
    import torch

    is_cpu = torch.Tensor.is_cpu.__get__

    def answer(tensor: Any) -> bool:
        asked_by = sys._getframe(1).f_globals.get("__name__", "")
        return bool(is_cpu(tensor)) and not asked_by.startswith("vllm.")

    torch.Tensor.is_cpu = property(answer)
    try:
        yield
    finally:
        del torch.Tensor.is_cpu  # the one that torch.Tensor inherits is back
