# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""DeepSeek-V4.1's window attention as NumPy, one query at a time, with no paging, no list and no kernel of vLLM's.

``error`` is how far a kernel may be from it that multiplies bfloat16 and adds in float32 (u = 2**-24 and
v = 2**-8 are half an ulp of 1 in float32 and in bfloat16, which have 24 and 8 bits):

* A score is a sum of 512 products, each exact in float32, times the scale: off by e = 512 u sum|q k| scale, and by a
  few ulp of itself for the scale and the exponent's base.
* So a weight is off by 2 e of itself (its own score's and the largest's), by v when it is rounded to bfloat16 for the
  second product, and by 256 u for exp, for sums of up to 128 terms and for rescaling when the maximum moves.
* The output is a sum of weights times keys, and is rounded to bfloat16 at last.
"""

from __future__ import annotations

import numpy as np

U, V = 2.0**-24, 2.0**-8
FP8, SCALE, MOST = 448, 64, 448.0


def _e4m3() -> np.ndarray:
    """The 126 positive numbers and 0, by code: 4 bits of exponent with bias 7, 3 of mantissa."""
    code = np.arange(127)
    exponent, mantissa = code >> 3, code & 7
    return np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)


E4M3 = _e4m3()


def stored(k: np.ndarray) -> np.ndarray:
    """float64 [n, 512]: what comes back of K, float [n, 512], out of the cache.

    448 numbers are fp8, times a power of two for every 64 so that none is above the largest fp8; 64 are as they are.
    """
    low = np.abs(k[:, :FP8].astype(np.float64)).reshape(len(k), -1, SCALE)
    mantissa, exponent = np.frexp(np.maximum(low.max(2), 1e-4) / MOST)
    scale = 2.0 ** (exponent - (mantissa == 0.5))  # the power of two that is no less
    scaled = low / scale[..., None]
    above = np.searchsorted(E4M3, scaled).clip(1)
    lower, upper = E4M3[above - 1], E4M3[above]
    middle = (lower + upper) / 2
    up = (scaled > middle) | ((scaled == middle) & (above % 2 == 0))  # a tie goes to the even code
    rounded = np.where(up, upper, lower) * scale[..., None]
    signed = np.copysign(rounded.reshape(len(k), FP8), k[:, :FP8])
    return np.concatenate([signed, k[:, FP8:]], 1)


def attend(q: np.ndarray, keys: np.ndarray, sink: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """float64 [heads, 512] and its ``error``, of q [heads, 512] over keys [n, 512], which are the values as well; the
    softmax has ``sink`` [heads] in its denominator."""
    scores = q @ keys.T * scale
    top = np.maximum(scores.max(1), sink)[:, None]
    weights = np.exp(scores - top)
    weights /= weights.sum(1, keepdims=True) + np.exp(sink[:, None] - top)
    output = weights @ keys
    off = 512 * U * (np.abs(q) @ np.abs(keys).T).max(1) * scale + 8 * U * np.abs(scores).max(1)
    moved = (V + 2 * off + 256 * U)[:, None] * (weights @ np.abs(keys))
    return output, moved + V * (np.abs(output) + moved)
