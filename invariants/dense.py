# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The dense oracle: the probe model (``weights.py``) once more, in NumPy and float64, by plain dense attention.

It knows no pages, no slots, no chunks and no batch: only tokens, the first position that a life of a request computes,
and the compressed states that it adopted. Imports nothing of vLLM or torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from invariants.reference import window_first
from invariants.trace import IntArray, Probe
from invariants.weights import CODE_GAIN, EPSILON, LOGIT_GAIN, VOCAB, WIDTH, decoder_start, position_codes, weights

Float64 = NDArray[np.float64]

_ROWS = 256
"""Queries that attend at a time: their scores over some thousand keys fit into a cache or two."""

_CONFIDENCE = 10
"""Of a tolerance: largest error over typical one. Of 300 000 rows of random models and tokens, 1 to 32 layers, the
worst needs 0.9, and one in 10 000 needs 0.35."""


class Evaluation(NamedTuple):
    """What one life computes."""

    logits: Float64
    """float64 [wanted, VOCAB]"""
    states: list[Float64]
    """[layers] float64 [tokens // ratio, WIDTH]: the compressed cache as the life leaves it, adopted states first."""


def evaluate(
    probe: Probe,
    window: int,
    tokens: IntArray,
    wanted: IntArray,
    replay_start: int = 0,
    adopted: Sequence[Float64] | None = None,
    trimmed: IntArray | None = None,
) -> Evaluation:
    """Logits at the ``wanted`` positions (ascending, at least ``replay_start``) and the states of one life.

    ``tokens`` are all that it computes or adopts, int [n]. It computes positions from ``replay_start`` on and has no
    window key below. ``adopted``, one float64 [H // ratio, WIDTH] a layer, are the states of a hit of H tokens: they
    are what every row sees of positions below H, the replayed rows included. None: a cold life. ``trimmed``, int [n]:
    first position with a key in the last two layers, for the query at each position (decoder kind; None: no bound).
    """
    weight, codes = _weights(probe), _codes(len(tokens))[replay_start:]
    position = np.arange(replay_start, len(tokens))
    first = np.maximum(window_first(position, replay_start, window) - replay_start, 0)
    visible = (position + 1) // probe.compress_ratio
    whole = np.flatnonzero((position + 1) % probe.compress_ratio == 0)
    last = np.asarray(wanted) - replay_start
    x = weight["embed"][np.clip(tokens[replay_start:], 0, VOCAB - 1)]
    embedded, states = _norm(x), []
    for layer in range(probe.layers):
        if layer == decoder_start(probe):
            entering = _norm(x)
        if layer > decoder_start(probe) and trimmed is not None:
            first = np.maximum(first, trimmed[replay_start:] - replay_start)
        w = {name: weight[f"{layer}.{name}"] for name in ("wk", "wq", "wo", "gk", "gq", "go", "up", "down")}
        v = _norm(x)
        keys = _norm((embedded if probe.kind == "exact" else v) @ w["wk"] + codes)
        x = x + _attend(_norm(v @ w["wq"]), keys, first, position - replay_start + 1) @ w["wo"]
        v = _norm(x)
        old = adopted[layer] if adopted is not None else np.zeros((0, WIDTH))
        own = whole[visible[whole] > len(old)]
        source = entering if layer >= decoder_start(probe) else v
        states.append(np.concatenate([old, _norm(source[own] @ w["gk"] + codes[own])]))
        if layer == probe.layers - 1:
            x, v, visible = x[last], v[last], visible[last]
        x = x + _attend(_norm(v @ w["gq"]), states[layer], np.zeros_like(visible), visible) @ w["go"]
        x = x + np.maximum(_norm(x) @ w["up"], 0) @ w["down"]
    return Evaluation(float(LOGIT_GAIN) * (_norm(x) @ weight["head"]), states)


def log_softmax(logits: Float64) -> Float64:
    """float64 like ``logits``, over the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    result: Float64 = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def tolerance(probe: Probe, keys: int) -> float:
    """How far a float32 logprob may be from the oracle's, where a query attends to at most ``keys`` keys at once.

    To first order, and with rounding errors as independent (a sum of n products is then off by sqrt(n) * u of its size,
    u = 2**-24, and errors add in quadrature):

    * Between x and a score lie 7 sums of WIDTH numbers: 3 for the query (norm, wq, norm), 3 for the key, q . key. So
      the score is off by sqrt(7 * WIDTH) * u.
    * A weight is a 16th power, so off by 16 times that, relatively; and so is the mean of the keys, all of which have
      one length. Summing n weights and n weighted keys adds sqrt(2 * n) * u.
    * Each layer attends twice, which makes sqrt(2 * layers) of these. The feed-forward part has no power in it and is
      small beside them. What x has of errors already is passed on, but x grows from layer to layer by as much as an
      attention adds, so its relative error does not build up faster (``tests/test_dense.py`` measures that).
    * A logit is LOGIT_GAIN times a product with a row of length 1.

    That is the size of a typical error, times _CONFIDENCE for the largest of millions. Tens of times what is seen
    mostly, since spread-out weights average errors out; and far below what a wrong or a missing key makes.
    """
    attention = np.sqrt(16**2 * 7 * WIDTH + 2 * keys)
    return float(_CONFIDENCE * LOGIT_GAIN * np.sqrt(2 * probe.layers) * attention * 2.0**-24)


def _norm(v: Float64) -> Float64:
    normed: Float64 = v / np.sqrt(np.einsum("...i,...i", v, v)[..., None] / WIDTH + float(EPSILON))
    return normed


def _attend(query: Float64, keys: Float64, first: IntArray, end: IntArray) -> Float64:
    """[n, WIDTH]: query i over keys first[i] .. end[i] - 1, both ascending; zeros where there are none."""
    out = np.empty_like(query)
    for start in range(0, len(query), _ROWS):
        block = slice(start, start + _ROWS)
        low, high = int(first[block][0]), int(end[block][-1])
        seen = keys[low:high]
        score = query[block] @ seen.T
        score *= 0.5 / WIDTH
        score += 0.5
        for _ in range(4):  # to the 16th power
            score *= score
        score += 2.0**-20
        number = np.arange(low, high)
        score *= (number >= first[block, None]) & (number < end[block, None])
        out[block] = (score @ seen) / np.maximum(score.sum(1), 2.0**-20)[:, None]
    return out


@lru_cache(maxsize=8)
def _weights(probe: Probe) -> dict[str, Float64]:
    """Float64 and, but for "embed", transposed: [inputs, outputs]."""
    made = {name: value.astype(np.float64) for name, value in weights(probe).items()}
    return {name: value if name == "embed" else np.ascontiguousarray(value.T) for name, value in made.items()}


def _codes(length: int) -> Float64:
    """float64 [length, WIDTH]: code(p) of the definition."""
    return _codes_to(1 << max(length - 1, 63).bit_length())[:length]


@lru_cache(maxsize=4)
def _codes_to(length: int) -> Float64:
    return float(CODE_GAIN) * position_codes(length).astype(np.float64)
