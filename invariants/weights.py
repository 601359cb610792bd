# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The probe model's definition and its weights from a seed: data that the probe and the dense oracle have in common.

What the model computes for a token at position p, all vectors float32 columns of WIDTH numbers:

    norm(v) = v / sqrt(mean(v * v) + EPSILON)
    code(p) = CODE_GAIN * position_codes[p]
    x = embed[token]                                     e = x, kept for the exact kind
    in each layer:
        the window cache gets k[p] = norm(wk @ norm(s) + code(p))    s = e (exact) or x (deep)
        x += wo @ attend(norm(wq @ norm(x)), {k[j] : window's first position <= j <= p})
        where (p + 1) % ratio == 0 the compressed cache gets g[(p + 1) / ratio - 1] = norm(gk @ norm(x) + code(p))
        x += go @ attend(norm(gq @ norm(x)), {g[i] : i < (p + 1) // ratio}), or nothing where there is no state yet
        x += down @ max(up @ norm(x), 0)
    logits = LOGIT_GAIN * head @ norm(x)

In the decoder kind (s = x) the last three layers take their g from norm(x) as it enters the first of the three. Where
replay is on they do not compute every row: of a prefill chunk of more than W tokens that ends before position ``end``
they compute the last W rows only, but for the k of the first of the three, which every row has. So in the last two
the window's first position is for these rows max(replay_start, end - W, p - W + 1).

    attend(q, keys) = sum(w * key) / sum(w), with w = ((1 + q . key / WIDTH) / 2) ** 16 + 2 ** -20

A key is its own value. The window's first position is max(replay_start, p - W + 1). Since q and key are normed, the
score is a cosine: no maximum has to be subtracted and nothing overflows. Only + - * / sqrt and max occur, which IEEE
754 fixes to the bit, so the same sums in the same order are the same bits on any machine and in any batch.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from invariants.trace import Probe

Float32 = NDArray[np.float32]

WIDTH = 32
VOCAB = 1003
"""Covers the token ids of a case (``fuzz.case``)."""
EPSILON = np.float32(2.0**-20)
CODE_GAIN = np.float32(0.5)
LOGIT_GAIN = np.float32(2.0)

_GAINS = {"wk": 1.0, "wq": 1.0, "wo": 1.5, "gk": 1.0, "gq": 1.0, "go": 1.5, "up": 1.0, "down": 1.0}
"""Of the matrices of a layer, each [outputs, inputs]."""


def decoder_start(probe: Probe) -> int:
    """First of the layers that decoder-side replay trims; the number of layers where there are none."""
    # Three: the row that is sampled has its whole window in any case; it sees the bound through keys of the last layer,
    # which rows with a cut window in the one before have given.
    return max(probe.layers - 3, 0) if probe.kind == "decoder" else probe.layers


@lru_cache(maxsize=8)
def weights(probe: Probe) -> dict[str, Float32]:
    """All weights: "embed" and "head" [VOCAB, WIDTH], and "0.wk" to "<layers - 1>.down" [outputs, inputs].

    Uniform with variance gain**2 / inputs (embed: 1), from splitmix64 of seed, tensor and element. Read-only arrays.
    """
    shapes = {"embed": (VOCAB, WIDTH, float(np.sqrt(WIDTH))), "head": (VOCAB, WIDTH, 1.0)}
    for layer in range(probe.layers):
        for name, gain in _GAINS.items():
            rows, columns = {"up": (2 * WIDTH, WIDTH), "down": (WIDTH, 2 * WIDTH)}.get(name, (WIDTH, WIDTH))
            shapes[f"{layer}.{name}"] = (rows, columns, gain)
    made = {}
    for number, (name, (rows, columns, gain)) in enumerate(shapes.items()):
        scale = gain * np.sqrt(3.0 / columns)
        values = (_uniform(probe.seed, number, rows * columns) * scale).astype(np.float32).reshape(rows, columns)
        values.setflags(write=False)
        made[name] = values
    return made


@lru_cache(maxsize=4)
def position_codes(length: int) -> Float32:
    """float32 [length, WIDTH]: sines of the position at WIDTH frequencies from 1 down to about 1/1000."""
    rates = np.exp(-np.arange(WIDTH) * (7.0 / WIDTH))
    codes: Float32 = np.sin(np.arange(length)[:, None] * rates + np.arange(WIDTH)).astype(np.float32)
    codes.setflags(write=False)
    return codes


def _uniform(seed: int, tensor: int, count: int) -> NDArray[np.float64]:
    """float64 [count] in [-1, 1), multiples of 2**-23: they are float32 numbers."""
    with np.errstate(over="ignore"):
        first = (np.uint64(seed) << np.uint64(32)) + (np.uint64(tensor) << np.uint64(20))
        x = np.arange(count, dtype=np.uint64) + first
        x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return (x >> np.uint64(40)).astype(np.float64) * 2.0**-23 - 1.0
