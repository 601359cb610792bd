# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The dense oracle against what can be worked out by hand, against its own definition read plainly, and in float32."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest
from plain_model import PlainModel

from invariants import dense
from invariants.trace import Probe
from invariants.weights import EPSILON, VOCAB, WIDTH, position_codes, weights

Kind = Literal["exact", "deep", "decoder"]
KINDS: tuple[Kind, ...] = ("exact", "deep", "decoder")
EVERYTHING = np.arange(1000)


def tokens(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, VOCAB, length)


def plain(probe: Probe, window: int, ids: np.ndarray, dtype: Any, start: int = 0, adopted: Any = None):
    """Logits [n, VOCAB] and states, a token at a time."""
    model = PlainModel(probe, window, dtype, start, adopted)
    return np.array([model.feed(token) for token in ids[start:]]), model.states


def norm(v: np.ndarray) -> np.ndarray:
    return v / np.sqrt((v * v).mean() + float(EPSILON))


def test_attend_by_hand():
    """One key gives that key back. Of an equal and an opposite key the latter weighs 2**-20 to 1 + 2**-20."""
    key = np.zeros((3, WIDTH))
    key[:2, 0] = key[2, 1] = WIDTH**0.5
    key[1] *= -1
    first, end = np.array([0, 0, 1]), np.array([1, 2, 3])
    query = key[[0, 0, 2]]
    one, two, three = dense._attend(query, key, first, end)
    assert one.tolist() == key[0].tolist()
    near, far = 1 + 2.0**-20, 2.0**-20
    assert two == pytest.approx(key[0] * (near - far) / (near + far), rel=1e-14)
    # A key at a right angle: cosine 0, so ((1 + 0) / 2) ** 16.
    right = 2.0**-16 + 2.0**-20
    assert three == pytest.approx((key[2] * near + key[1] * right) / (near + right), rel=1e-14)


def test_no_key_no_attention():
    nothing = np.zeros(2, np.int64)
    assert not dense._attend(np.ones((2, WIDTH)), np.zeros((0, WIDTH)), nothing, nothing).any()


def test_queries_in_blocks(monkeypatch: pytest.MonkeyPatch):
    probe, ids = Probe(kind="deep", compress_ratio=2), tokens(40)
    whole = dense.evaluate(probe, 6, ids, EVERYTHING[:40]).logits
    monkeypatch.setattr(dense, "_ROWS", 7)
    assert dense.evaluate(probe, 6, ids, EVERYTHING[:40]).logits == pytest.approx(whole, abs=1e-12)


def test_a_window_of_one_written_out():
    """One layer, one token, two tokens a state: attention over a single key is that key, and there is no state."""
    probe = Probe(layers=1, compress_ratio=2)
    w = {name: value.astype(np.float64) for name, value in weights(probe).items()}
    x = w["embed"][500]
    x = x + w["0.wo"] @ norm(w["0.wk"] @ norm(x) + 0.5 * position_codes(1)[0])
    x = x + w["0.down"] @ np.maximum(w["0.up"] @ norm(x), 0)
    found = dense.evaluate(probe, 1, np.array([500]), np.array([0]))
    assert found.logits[0] == pytest.approx(2 * w["head"] @ norm(x), abs=1e-12)
    assert found.states[0].shape == (0, WIDTH)


def test_log_softmax_by_hand():
    logits = np.log(np.array([[1.0, 2.0, 5.0]])) + 900
    assert np.exp(dense.log_softmax(logits)) == pytest.approx(np.array([[0.125, 0.25, 0.625]]))


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [1, 5, 64])
def test_it_is_the_definition(kind: Kind, ratio: int, window: int):
    probe, ids = Probe(kind=kind, layers=3, compress_ratio=ratio, seed=window), tokens(21)
    logits, states = plain(probe, window, ids, np.float64)
    found = dense.evaluate(probe, window, ids, EVERYTHING[:21])
    assert found.logits == pytest.approx(logits, abs=1e-11)
    assert np.array(found.states) == pytest.approx(np.array(states), abs=1e-11)
    some = dense.evaluate(probe, window, ids, np.array([4, 19]))
    assert some.logits == pytest.approx(logits[[4, 19]], abs=1e-11)
    assert np.array(some.states) == pytest.approx(np.array(states), abs=1e-11)


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hit_is_the_definition(kind: Kind, ratio: int):
    """A hit of 12, W = 5: positions from 7 on, states of positions below 12 adopted as they are, whatever they are."""
    probe, ids = Probe(kind=kind, layers=3, compress_ratio=ratio), tokens(21)
    other = dense.evaluate(probe, 5, tokens(12, seed=9), EVERYTHING[:1]).states
    logits, states = plain(probe, 5, ids, np.float64, 7, [list(layer) for layer in other])
    found = dense.evaluate(probe, 5, ids, EVERYTHING[7:21], 7, other)
    assert found.logits == pytest.approx(logits, abs=1e-11)
    assert np.array(found.states) == pytest.approx(np.array(states), abs=1e-11)
    assert np.array_equal(np.array(found.states)[:, : 12 // ratio], np.array(other))


@pytest.mark.parametrize(("start", "ratio"), [(0, 1), (0, 2), (7, 1)])
def test_trimmed_layers_are_the_definition(start: int, ratio: int):
    """W = 4 and chunks that end at 9 (trimmed), 11 and 19 (trimmed): the rows that are kept, in each."""
    probe, ids = Probe(kind="decoder", layers=4, compress_ratio=ratio), tokens(19)
    adopted = dense.evaluate(probe, 4, ids[:11], EVERYTHING[:1]).states if start else None
    model = PlainModel(probe, 4, np.float64, start, adopted)
    trimmed, wanted, logits = np.zeros(19, np.int64), [], []
    for position in range(start, 19):
        # Chunk, its end, and whether it is trimmed: rows of it before its last 4 are dropped.
        end, cut = (9, 5) if position < 9 else (11, 0) if position < 11 else (19, 15)
        model.cut = trimmed[position] = cut if position >= end - 4 else 0
        logits.append(model.feed(ids[position]))
        if position >= cut:
            wanted.append(position)
    found = dense.evaluate(probe, 4, ids, np.array(wanted), start, adopted, trimmed)
    assert found.logits == pytest.approx(np.array(logits)[np.array(wanted) - start], abs=1e-11)
    if not start:
        whole = dense.evaluate(probe, 4, ids, np.array(wanted))
        assert np.abs(found.logits - whole.logits)[-1].max() > 1e-3  # the row that would be sampled sees the bound


@pytest.mark.parametrize(("kind", "layers", "equal"), [("exact", 4, True), ("deep", 1, True), ("deep", 2, False)])
def test_what_a_hit_changes(kind: Kind, layers: int, equal: bool):
    """Nothing in the exact probe; in the deep one what is above the first layer."""
    probe, ids = Probe(kind=kind, layers=layers), tokens(21)
    cold = dense.evaluate(probe, 4, ids, EVERYTHING[12:21])
    hit = dense.evaluate(probe, 4, ids, EVERYTHING[12:21], 8, [states[:12] for states in cold.states])
    assert bool(np.abs(hit.logits - cold.logits).max() < 1e-12) is equal
    if not equal:
        assert np.abs(hit.logits - cold.logits).max() > 1e-2


@pytest.mark.parametrize("layers", [1, 2, 4, 8, 16])
def test_tolerance(layers: int):
    """Float32 stays below it, a few hundred tokens already come within a factor of 200, and it hides no drift."""
    worst = 0.0
    for seed in range(6):
        probe = Probe(kind=KINDS[seed % 3], layers=layers, compress_ratio=1 + seed // 3, seed=seed)
        ids = tokens(16, seed)
        seen = dense.log_softmax(plain(probe, 6, ids, np.float32)[0].astype(np.float64))
        wanted = dense.log_softmax(dense.evaluate(probe, 6, ids, EVERYTHING[:16]).logits)
        worst = max(worst, float(np.abs(seen - wanted).max()))
    allowed = dense.tolerance(Probe(layers=layers), 16)
    assert allowed / 200 < worst < allowed / 2
    assert allowed < 2e-3


def test_tolerance_by_hand():
    """2 layers, 512 keys: 10 * 2 * sqrt(4) * sqrt(256 * 7 * 32 + 1024) * 2**-24, and sqrt(58368) = 241.6."""
    assert dense.tolerance(Probe(layers=2), 512) == pytest.approx(40 * 241.595 / 2**24, rel=1e-5)
    allowed = [dense.tolerance(Probe(layers=n), 512) for n in (1, 2, 9)]
    assert all(a < b for a, b in pairwise(allowed))


def test_many_keys_stay_within_tolerance():
    probe, ids = Probe(kind="deep", layers=2), tokens(400)
    seen = plain(probe, 128, ids, np.float32)[0][-40:]
    wanted = dense.evaluate(probe, 128, ids, np.arange(360, 400)).logits
    error = np.abs(dense.log_softmax(seen.astype(np.float64)) - dense.log_softmax(wanted)).max()
    assert error < dense.tolerance(probe, 400) / 2
