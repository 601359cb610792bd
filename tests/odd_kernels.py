# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Run by tests/test_compile.py in a process of its own: kernels that go wrong, and vLLM's, as on an MI355X.

Prints JSON: what compiling them gave, and what vLLM's launches were specialised to.
"""

# ruff: noqa: E402 - vLLM and Triton are imported after pretend()

from __future__ import annotations

import json
import os
import sys

from fuzz.amdgcn.device import pretend

answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
pretend("gfx950")

import msgspec
import torch
import triton
import triton.language as tl

from fuzz.amdgcn.__main__ import collect
from fuzz.amdgcn.build import build
from fuzz.amdgcn.model import ints
from fuzz.amdgcn.names import find
from fuzz.amdgcn.places import Place, places
from fuzz.amdgcn.record import Launch


@triton.jit
def _copy(source, target, n, size: tl.constexpr):
    lane = tl.arange(0, size)
    tl.store(target + lane, tl.load(source + lane, mask=lane < n), mask=lane < n)


@triton.jit
def _refused(out, n: tl.constexpr):
    tl.static_assert(n < 3, "n is too large")
    tl.store(out, n)


@triton.jit
def _spilling(out, size: tl.constexpr):
    row = tl.arange(0, size)
    tile = tl.load(out + row[:, None] * size + row[None, :])
    for _ in range(3):
        tile = tl.dot(tile, tl.trans(tile)) + tl.trans(tile)
    tl.store(out + row[:, None] * size + row[None, :], tile)


class Dying:
    """A ``JITFunction`` whose compiler ends the process, as LLVM's does."""

    def preload(self, _: str) -> None:
        print("LLVM ERROR: Cannot select", file=sys.stderr, flush=True)
        os.abort()


def copies() -> None:
    memory = ints(64)
    large = torch.empty(1 << 30, dtype=torch.int32, device="meta")
    for source, n in ((memory, 5), (memory[4:], 7), (memory[1:], 5), (memory, 16), (memory, 1), (large, 5)):
        _copy[(1,)](source, memory, n, size=8)
    _copy[(1,)](ints(64, dtype="float16"), memory, 5, size=8, num_warps=2)


def odd() -> list[Place]:
    return [
        Place("copies", ("_copy",), copies),
        Place("n is 5", ("_refused",), lambda: _refused[(1,)](ints(1), n=5)),
        Place("a tile", ("_spilling",), lambda: _spilling[(1,)](ints(1 << 14, dtype="float32"), size=128, num_warps=1)),
        Place("nowhere", ("_gone_kernel",), lambda: find("vllm.envs", "_gone_kernel")()),
        Place("nothing", ("_elsewhere_kernel",), lambda: None),
        Place("wrongly", ("_changed_kernel",), lambda: _copy[(1,)](ints(1))),
    ]


def main() -> None:
    launches, missing = collect("gfx950", iter(odd()))
    dying = Launch("_dying", "anything", Dying(), "")
    everywhere, lost = collect("gfx950", places())
    two = [launch for launch in everywhere if launch.title in ("4 prefills", "replay")]
    rows = list(build([*launches, dying, *two], "gfx950", 2))
    with answer:
        json.dump(
            {
                "rows": msgspec.to_builtins([*rows, *missing]),
                "specialised": [[launch.kernel, json.loads(launch.specialisation)] for launch in launches],
                "vllm": [[launch.kernel, launch.title, json.loads(launch.specialisation)] for launch in everywhere],
                "lost": msgspec.to_builtins(lost),
            },
            answer,
        )


main()
