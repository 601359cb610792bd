# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Stands in for AITER's sparse MLA, which is not Triton alone and wants a GPU: window attention over a ragged list.

It trusts its list as that kernel does: no entry is skipped, whatever its sign, and the null block is read like any
other. Outside the cache it raises where a GPU would fault, or read somebody else's memory.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

FP8, SCALE = 448, 64
"""Numbers of a K that are kept in fp8, and how many share a scale; the others are bfloat16."""
_PACKAGES = ("aiter", "aiter.ops", "aiter.ops.triton", "aiter.ops.triton.attention")


@contextmanager
def installed(look: Callable[[torch.Tensor, torch.Tensor], None]) -> Iterator[None]:
    """Inside, vLLM finds it where AITER has the kernel. ``look`` is given the list of each call: slots and bounds."""
    kernel: Any = types.ModuleType("aiter.ops.triton.attention.sparse_mla")

    def sparse_mla_fwd(
        q: Any, cache: Any, indptr: Any, indices: Any, scale: float, *, out: Any, attn_sink: Any, **_: Any
    ) -> None:
        look(indices, indptr)
        for query, (begin, end) in enumerate(zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)):
            out[query] = _attend(q[query].float(), read(cache, indices[begin:end].long()), attn_sink, scale)

    kernel.sparse_mla_fwd = sparse_mla_fwd
    modules = {name: types.ModuleType(name) for name in _PACKAGES} | {kernel.__name__: kernel}
    with mock.patch.dict(sys.modules, modules):
        yield


def read(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """float32 [slots, 512] out of uint8 [blocks, rows a block, bytes]: all data of a block come before its scales."""
    blocks, rows, record = cache.shape
    outside = slots[(slots < 0) | (slots >= blocks * rows)]
    if len(outside):
        raise IndexError(f"AITER reads slot {int(outside[0])} of a cache of {blocks * rows}")
    flat = cache.as_strided((blocks, rows * record), (cache.stride(0), 1))
    block, row = (slots // rows)[:, None], (slots % rows)[:, None]
    width = FP8 + 2 * (512 - FP8)
    data = flat[block, row * width + torch.arange(width)]
    scales = flat[block, rows * width + row * (record - width) + torch.arange(FP8 // SCALE)]
    low = data[:, :FP8].view(torch.float8_e4m3fn).float()
    low *= torch.exp2(scales.float() - 127).repeat_interleave(SCALE, 1)
    return torch.cat([low, data[:, FP8:].contiguous().view(torch.bfloat16).float()], 1)


def _attend(q: torch.Tensor, keys: torch.Tensor, sink: torch.Tensor, scale: float) -> torch.Tensor:
    """float32 [heads, 512]: keys are the values, too."""
    scores = torch.cat([q @ keys.T * scale, sink[:, None]], 1)
    return scores.softmax(1)[:, :-1] @ keys
