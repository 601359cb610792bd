# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""A batch of requests that prefill after a hit, and caches, for launches at DeepSeek-V4.1's sizes.

Relied upon: everything is drawn from the sizes alone, so that the same call makes the same tensors again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

WINDOW, BLOCK, HEAD, NOPE, ROPE, HEADS = 128, 32, 512, 448, 64, 16
V4, MXFP8, NVFP4 = 584, 528, 288
"""Bytes of a token in the cache, which is how vLLM tells the formats apart."""
I32, I64 = torch.int32, torch.int64


@dataclass(frozen=True)
class Launch:
    """``run`` launches; ``written`` is all that it changes; ``rounds`` is True where it adds float32 up in an order of
    the executor's own."""

    run: Callable[[], Any]
    written: Sequence[torch.Tensor]
    rounds: bool = False

    def agrees(self, other: Launch) -> bool:
        """Whether the other wrote the same bytes: or, where it ``rounds``, bfloat16 that are a step apart at most, as
        large as the largest has it."""
        pairs = list(zip(self.written, other.written, strict=True))
        if not self.rounds:
            return all(torch.equal(one, another) for one, another in pairs)
        floats = [(one.double(), another.double()) for one, another in pairs]
        return all(bool(((one - another).abs() <= another.abs().max() * 2.0**-7).all()) for one, another in floats)


class Batch:
    """Requests that are replaying, or have just done so: ``rows`` of them, ``query`` tokens each, in paged blocks."""

    def __init__(self, rows: int, query: int) -> None:
        self.random = random = np.random.default_rng(rows * 10007 + query)
        self.rows, self.tokens = rows, rows * query
        self.query = np.full(rows, query)
        self.context = random.integers(0, 3 * WINDOW, rows)
        self.starts = tensor(np.arange(rows + 1) * query)
        self.lens = tensor(self.query + self.context)
        self.replay_start = tensor(np.maximum(self.context - random.integers(0, WINDOW + 1, rows), 0))
        self.requests = tensor(np.repeat(np.arange(rows), query))
        self.positions = tensor((self.context[:, None] + np.arange(query)).ravel(), I64)
        self.index = tensor(random.permutation(rows))
        self.width = int(self.lens.max()) // BLOCK + 1
        self.blocks = rows * self.width
        self.table = tensor(random.permutation(self.blocks).reshape(rows, self.width))

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = I32) -> torch.Tensor:
        """Random numbers in low..high."""
        return tensor(self.random.integers(low, high + 1, shape), dtype)

    def cache(self, width: int) -> torch.Tensor:
        """[blocks, BLOCK, width] uint8: tokens as they lie in the cache. No element is NaN."""
        shape = (self.blocks, BLOCK)
        if width == NVFP4:
            return torch.cat([self._bytes(0, 255, *shape, HEAD // 2), self._bytes(0, 0x7E, *shape, 32)], -1)
        quantised = NOPE if width == V4 else HEAD
        elements = self._bytes(0, 0x7E, *shape, quantised) | self._bytes(0, 1, *shape, quantised) << 7
        scales = self._bytes(118, 128, *shape, 8 if width == V4 else HEAD // 32)
        if width == MXFP8:
            return torch.cat([elements, scales], -1)
        tokens = torch.cat([elements, self.normal(*shape, ROPE).view(torch.uint8)], -1)
        # A block of the V4 format has all its scales behind all its tokens.
        return torch.cat([tokens.flatten(1), scales.flatten(1)], 1).view(*shape, V4)

    def _bytes(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return self.ints(low, high, *shape, dtype=torch.uint8)

    def normal(self, *shape: int) -> torch.Tensor:
        """Random bfloat16."""
        return torch.from_numpy(self.random.normal(size=shape)).to(torch.bfloat16)


def tensor(values: Any, dtype: torch.dtype = I32) -> torch.Tensor:
    """``values`` as a tensor."""
    return torch.as_tensor(values).to(dtype)


def addresses(*tensors: torch.Tensor) -> torch.Tensor:
    """Their addresses, as vLLM hands them to a kernel of several groups."""
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)
