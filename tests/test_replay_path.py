# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Every kernel on vLLM's replay path is compiled, and does what it does under the interpreter, and what torch says.

Bytes are equal, except where sums of float32 are taken in another order (``test_rocm_attention`` has the bound for
those).
"""

from __future__ import annotations

from launches import I64, Arena, agree, compiled, fuzzed
from launches import interpreter as interpreter

# isort: split

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz import bench
from fuzz.triton_cpu import replay_path
from fuzz.triton_cpu.replay_path import KERNELS
from fuzz.triton_cpu.replay_path.batch import HEAD, MXFP8, NOPE, NVFP4, V4, Launch

BF16, E4M3, FNUZ, BYTE = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.uint8
seeds = st.integers(0, 1 << 20)
slow = settings(fuzzed, max_examples=8)
"""The interpreter takes tens of milliseconds a token."""
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_is_compiled(name: str) -> None:
    """With the launches of the benchmark, smaller."""

    def launched() -> Launch:
        launch = KERNELS[name](64 if name.startswith("attention_decode_") else 8)
        before = [tensor.clone() for tensor in launch.written]
        launch.run()
        changed = [not torch.equal(old, new) for old, new in zip(before, launch.written, strict=True)]
        assert any(changed), "a launch that does nothing shows nothing"
        return launch

    wanted = launched()
    with compiled():
        got = launched()
    assert got.agrees(wanted)


def test_launches_that_wrote_something_else_do_not_agree() -> None:
    for rounds in (False, True):
        one, other = (Launch(lambda: None, [torch.arange(4.0)], rounds) for _ in range(2))
        assert one.agrees(other)
        other.written[0][1] += 0.1
        assert not one.agrees(other)
        other.written[0][1] = torch.nan
        assert not one.agrees(other)


def test_the_benchmark_says_what_differs_and_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    built = 0

    def differs(_programs: int) -> Launch:
        nonlocal built
        built += 1
        return Launch(lambda: sum(range(999)), [torch.tensor([built])])

    def absent(_programs: int) -> Launch:
        raise ImportError("not in this vLLM")

    kernels = {"swa_indices": KERNELS["swa_indices"], "differs": differs, "absent": absent}
    monkeypatch.setattr(replay_path, "KERNELS", kernels)
    monkeypatch.setattr(bench, "PROGRAMS", 8)
    monkeypatch.setattr(bench, "STEP", 8)
    figures = bench.bench_triton("")
    assert figures["unequal"] == ["differs"]
    assert figures["missing"] == ["absent"]
    assert figures["fallbacks"] == {}
    assert figures["lockstep_vs_interpreter_swa_indices"] > 1
    assert figures["per_row_4096_vs_688"] > 0


# KV


def _platform(**answers: bool) -> Any:
    return SimpleNamespace(**{name: lambda answer=answer: answer for name, answer in answers.items()})


def _records(cache: torch.Tensor, block: int, width: int, slots: torch.Tensor) -> list[torch.Tensor]:
    """Elements, scales and the unquantised tail of the tokens in these slots, as bytes."""
    tokens, blocks = len(slots), cache[:, : block * width][slots // block]
    place = slots % block
    if width == MXFP8:
        rows = blocks.view(tokens, block, width)[torch.arange(tokens), place]
        return [rows[:, :HEAD], rows[:, HEAD:], rows[:, :0]]
    data = blocks[:, : block * 576].view(tokens, block, 576)[torch.arange(tokens), place]
    scales = blocks[:, block * 576 :].view(tokens, block, 8)[torch.arange(tokens), place]
    return [data[:, :NOPE], scales, data[:, NOPE:]]


@pytest.mark.parametrize("fnuz", [False, True])
@pytest.mark.parametrize("width", [V4, MXFP8])
@slow
@given(seeds, st.integers(1, 3), st.sampled_from([1, 3, 8]), st.sampled_from([1e-6, 1.0, 300.0]))
def test_k_insert(width: int, fnuz: bool, seed: int, tokens: int, block: int, size: float) -> None:
    """Byte for byte, the interpreter's and torch's: scales are the least power of two that the largest fits under."""
    from vllm.models.deepseek_v41.common.ops import cache_utils

    arena, blocks = Arena(seed), 4
    padding = int(arena.random.integers(0, 3)) * 16
    cache = arena.empty((blocks, block * width + padding), BYTE)
    k = arena.put(arena.random.normal(0, size, (tokens, HEAD)), BF16)
    if arena.random.random() < 0.3:
        k[0, :64] = 0
    chosen = arena.random.permutation(blocks * block)[:tokens]
    slots = arena.put(np.where(arena.random.random(len(chosen)) < 0.2, -1, chosen), I64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_utils, "current_platform", _platform(is_fp8_fnuz=fnuz))
        patch.setattr(cache_utils, "get_fp8_min_max", lambda: (-224.0, 224.0))
        agree(
            arena,
            cache_utils.quantize_and_insert_k_cache,
            *(k, cache, slots),
            block_size=block,
            use_fnuz=fnuz,
            bytes_per_token=width,
        )
    written = slots >= 0
    elements, scales, tail = _records(cache, block, width, slots[written])
    rows = k[: len(slots)][written]
    group, largest = (64, NOPE) if width == V4 else (32, HEAD)
    tiles, limit = rows[:, :largest].float().unflatten(1, (-1, group)), 224.0 if fnuz else 448.0
    amax = tiles.abs().amax(-1).clamp(min=1e-4).double()
    exponent = torch.ceil(torch.log2(amax / limit))
    quantised = (tiles.double() / 2.0 ** exponent[..., None]).float().to(FNUZ if fnuz else E4M3)
    assert torch.equal(scales[:, : exponent.shape[1]], (exponent + 127).to(BYTE))
    assert torch.equal(elements, quantised.view(BYTE).flatten(1))
    assert torch.equal(tail, rows[:, largest:].contiguous().view(BYTE).view(tail.shape))


def _decoded(cache: torch.Tensor, block: int, width: int, fnuz: bool, slots: torch.Tensor) -> torch.Tensor:
    """The tokens in these slots, by torch: [tokens, HEAD] bfloat16."""
    if width == NVFP4:
        rows = cache[:, : block * width].reshape(-1, block, width)[slots // block, slots % block]
        codes = torch.stack([rows[:, : HEAD // 2] & 15, rows[:, : HEAD // 2] >> 4], -1).flatten(1).long()
        numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        values = numbers[codes & 7] * torch.where(codes < 8, 1.0, -1.0)
        scales = rows[:, HEAD // 2 :].contiguous().view(E4M3).float()
        return (values * scales.repeat_interleave(16, 1)).to(BF16)
    elements, scales, tail = (part.contiguous() for part in _records(cache, block, width, slots))
    group = 64 if width == V4 else 32
    factors = 2.0 ** (scales[:, : elements.shape[1] // group].double() - 127)
    values = elements.view(FNUZ if fnuz else E4M3).double() * factors.repeat_interleave(group, 1)
    return torch.cat([values.float().to(BF16), tail.view(BF16)], 1)


FORMATS = [(V4, False, False), (V4, True, False), (V4, True, True), (MXFP8, False, False), (MXFP8, False, True)]


@pytest.mark.parametrize(("width", "rocm", "fnuz"), [*FORMATS, (NVFP4, False, False)])
@slow
@given(seeds, st.integers(1, 3), st.sampled_from([1, 3, 8]), st.booleans())
def test_k_gather(width: int, rocm: bool, fnuz: bool, seed: int, rows: int, block: int, whole: bool) -> None:
    """Byte for byte, the interpreter's and torch's. ROCm takes the one-pass kernel for V4."""
    from vllm.models.deepseek_v41.common.ops import cache_utils

    arena, blocks = Arena(seed, 1 << 19), 6
    cache = _any_cache(arena, blocks, block, width)
    lens = arena.random.integers(0, 3 * block + 1, rows)
    gather = lens if whole else np.minimum(lens, arena.random.integers(0, 9, rows))
    table = arena.ints(0, blocks - 1, (rows, 3))
    offset = int(arena.random.integers(0, 3))
    out = arena.empty((rows, 24 + offset, HEAD), BF16)
    gather_lens = None if whole else arena.put(gather)
    kept = out.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_utils, "current_platform", _platform(is_rocm=rocm))
        patch.setattr(cache_utils, "_GATHER_MIN_WORKERS", 4)
        agree(
            arena,
            cache_utils.dequantize_and_gather_k_cache_triton,
            *(out, cache.view(blocks, block, -1)[..., :width], arena.put(lens), gather_lens, table, block, offset),
            use_fnuz=fnuz,
        )
    for row in range(rows):
        positions = np.arange(lens[row] - gather[row], lens[row])
        slots = table[row][positions // block].long() * block + torch.as_tensor(positions % block)
        if len(slots):
            kept[row, offset : offset + len(slots)] = _decoded(cache, block, width, fnuz, slots)
    assert torch.equal(out.view(torch.int16), kept.view(torch.int16))


def _any_cache(arena: Arena, blocks: int, block: int, width: int) -> torch.Tensor:
    """[blocks, block * width] bytes of numbers (none of them NaN: the bits of a NaN are not kept)."""
    random = arena.random
    cache = arena.put(random.integers(0, 256, (blocks, block * width)), BYTE)
    cache[(cache & 0x7F) == 0x7F] = 1  # NaN of e4m3fn, and of bfloat16 most often
    cache[cache == 0x80] = 2
    return cache
