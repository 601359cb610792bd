# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Sums, products and attention whose bits depend on nothing but their operands: not on the batch, not on padding.

Relied upon: torch's elementwise + - * / sqrt and maximum are the IEEE 754 operations, one rounding each, wherever an
element lies in a tensor. A matmul or a sum of torch's is not used, since the order of its additions changes with the
shape of the batch. Sums here pair neighbours, then neighbouring pairs, and so on: zeros at the end change nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from invariants.weights import EPSILON, WIDTH

_FLOATS = 1 << 22
"""Intermediate numbers at a time."""


def tree_sum(x: Tensor, dim: int) -> Tensor:
    """The sum over a dimension, which is dropped."""
    while (length := x.shape[dim]) > 1:
        if length % 2:
            tail = list(x.shape)
            tail[dim] = 1
            x = torch.cat([x, x.new_zeros(tail)], dim)
        pairs = x.unflatten(dim, (-1, 2))
        x = pairs.select(dim + 1, 0) + pairs.select(dim + 1, 1)
    return x.squeeze(dim)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """float32 [rows, outputs] of x [rows, inputs] and weight [inputs, outputs]."""
    rows = max(1, _FLOATS // weight.numel())
    parts = [tree_sum(part.unsqueeze(2) * weight, 1) for part in x.split(rows)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def norm(x: Tensor) -> Tensor:
    """float32 like x [..., WIDTH], each row with a mean square of one."""
    mean = tree_sum(x * x, x.dim() - 1) * (1.0 / WIDTH)
    return x / torch.sqrt(mean + float(EPSILON)).unsqueeze(-1)


def attend(query: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
    """float32 [rows, WIDTH]: what each row reads from its keys, which are the values, too.

    query [rows, WIDTH]; keys [rows or 1, n, WIDTH], the same for all rows if 1; visible bool [rows, n]. Zero for a row
    that sees none. What is under a key that is not visible does not matter, not even if it is NaN.
    """
    rows = max(1, _FLOATS // max(1, keys.shape[1] * WIDTH))
    parts = []
    for at in range(0, len(query), rows):
        some = slice(at, at + rows)
        # Zeros at the end change no sum, so columns that no row of these sees may go: half of them in a prefill.
        seen = visible[some].any(0).nonzero()
        end = int(seen[-1]) + 1 if len(seen) else 0
        parts.append(_attend(query[some], (keys[some] if len(keys) > 1 else keys)[:, :end], visible[some, :end]))
    return torch.cat(parts) if parts else query


def _attend(query: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
    if not keys.shape[1]:
        return torch.zeros_like(query)
    keys = torch.where(visible.unsqueeze(2), keys, 0.0)
    score = tree_sum(query.unsqueeze(1) * keys, 2) * (1.0 / WIDTH)
    weight = (score + 1.0) * 0.5
    for _ in range(4):
        weight = weight * weight
    weight = torch.where(visible, weight + 2.0**-20, 0.0)
    total = tree_sum(weight, 1)
    read = tree_sum(weight.unsqueeze(2) * keys, 1)
    return read / torch.where(total > 0, total, 1.0).unsqueeze(1)
