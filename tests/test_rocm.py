# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""vLLM's ROCm code path on a machine without ROCm."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fuzz.engines.base import Engine
from fuzz.triton_cpu.rocm import Architecture, current, rocm

pytestmark = pytest.mark.usefixtures("engine")


def _fingerprint() -> dict[str, Any]:
    """Everything about vLLM that the context may touch, by identity."""
    import torch
    import vllm.utils.torch_utils
    from vllm import platforms

    platform = platforms.current_platform
    seen: dict[str, Any] = {name: id(module) for name, module in sys.modules.items()}
    for name, module in sys.modules.items():
        if name.startswith("vllm"):
            attributes = vars(module) if module else {}
            seen.update(
                {f"{name}:{key}": id(value) for key, value in attributes.items() if type(value) is type(module)}
            )
            seen.update({f"{name}:{key}": value for key, value in attributes.items() if key.startswith("_ON_")})
    return seen | {
        "platform": (id(platform), type(platform), dict(vars(platform)), platform.is_cpu(), platform.is_rocm()),
        "names": sorted(vars(platforms)),
        "register": vllm.utils.torch_utils.direct_register_custom_op,
        "is_cpu": "is_cpu" in vars(torch.Tensor),
    }


@pytest.mark.parametrize(("architecture", "cdna", "fnuz"), [("gfx950", 4, False), ("gfx942", 3, True)])
def test_vllm_runs_as_on(architecture: Architecture, cdna: int, fnuz: bool) -> None:
    from vllm.platforms import current_platform

    with rocm(architecture):
        import vllm.models.deepseek_v41.amd.rocm as layers
        import vllm.v1.attention.ops.rocm_aiter_mla_sparse as kernels
        from vllm.platforms import rocm as platform

        assert current() == architecture
        assert (platform.on_gfx950(), platform.on_gfx942()) == (architecture == "gfx950", architecture == "gfx942")
        assert (platform.on_mi3xx(), platform.on_gfx9(), platform.on_cdna(), platform.on_rdna()) == (True,) * 3 + (
            False,
        )
        assert platform.get_cdna_version() == cdna
        assert (current_platform.is_rocm(), current_platform.is_cpu(), current_platform.is_cuda()) == (
            True,
            False,
            False,
        )
        assert current_platform.is_fp8_fnuz() == fnuz
        assert current_platform.get_device_capability().major == 9
        assert [cdna == 4, cdna == 4, cdna == 3] == [layers._ON_GFX950, kernels._ON_GFX950, kernels._ON_GFX942]
        assert layers.rocm_sparse_attn_decode is kernels.rocm_sparse_attn_decode


def test_it_is_undone() -> None:
    with rocm("gfx950"):
        pass
    before = _fingerprint()
    for architecture in ("gfx950", "gfx942", "gfx950"):
        with rocm(architecture):  # type: ignore[arg-type]
            import vllm.models.deepseek_v41.amd.rocm as layers
            import vllm.models.deepseek_v41.common.ops.fused_compress_quant_cache as shared

            here = architecture == "gfx950"
            assert [here, here] == [layers._ON_GFX950, shared._ON_GFX950]
            assert _fingerprint() != before
        after = _fingerprint()
        assert {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)} == set()
    assert current() is None


def test_it_is_undone_after_an_error() -> None:
    before = _fingerprint()
    with pytest.raises(ZeroDivisionError), rocm("gfx942"):
        raise ZeroDivisionError
    assert _fingerprint() == before
    assert current() is None


def test_no_two_at_once() -> None:
    with rocm("gfx950"), rocm("gfx950"):
        with pytest.raises(RuntimeError, match="gfx950 already, and cannot as on gfx942"), rocm("gfx942"):
            pass
        assert current() == "gfx950"


def test_only_vllm_takes_tensors_for_the_gpus() -> None:
    import torch

    tensor = torch.zeros(1)
    ask = {"__name__": "vllm.somewhere"}
    exec("def is_cpu(tensor): return tensor.is_cpu", ask)
    with rocm("gfx950"):
        assert tensor.is_cpu
        assert not ask["is_cpu"](tensor)  # type: ignore[operator]
    assert ask["is_cpu"](tensor)  # type: ignore[operator]


def test_the_engine_still_runs(engine: Engine) -> None:
    """On the CPU, by modules that were imported before, during and after."""
    from test_canaries import CASE

    from invariants import judge

    with rocm("gfx942"):
        import vllm.models.deepseek_v41.amd.rocm  # noqa: F401
    assert judge(engine.run(CASE)) == []


def test_modules_that_were_imported_outside_before(monkeypatch: pytest.MonkeyPatch):
    """They have taken the CPU for the current platform, which they would not ask for again."""
    from vllm.models.deepseek_v41.amd import ops as outside

    from fuzz.triton_cpu import rocm as facade

    monkeypatch.setattr(facade, "_modules", {"gfx950": {}, "gfx942": {}})
    monkeypatch.setattr(facade, "_decided", set())
    with facade.rocm("gfx942"):
        from vllm.models.deepseek_v41.amd import ops

        assert ops is not outside
        ops.record_monokernel(SimpleNamespace(kernel_config=SimpleNamespace(monokernel=True)))
        assert ops.enabled()
    assert not outside.enabled()
