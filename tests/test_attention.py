# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""gfx950's window attention, run by vLLM's own ROCm layer on real batches: right to the last bits of bfloat16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from plain_mla import E4M3, attend, stored
from test_agree import REPLAYS, consumers, gather_length_ignores_replay_start
from test_canaries import CASE

from fuzz.case import Case, Request
from invariants import judge
from invariants.trace import Geometry, Trace

MIXED = msgspec.structs.replace(
    REPLAYS,
    geometry=msgspec.structs.replace(REPLAYS.geometry, max_num_batched_tokens=20),
    requests=(*REPLAYS.requests, Request(id="too", arrive=4, prompt=(("s", 0, 13), ("u", 0, 1)), max_tokens=2)),
)
"""Decodes beside two replaying prefills in one step."""
REAL = Case(
    geometry=Geometry(
        window=128, block_size=128, swa_block_size=32, num_blocks=40, max_num_batched_tokens=192, max_num_seqs=4
    ),
    requests=(
        Request(id="prime", arrive=0, prompt=(("s", 0, 270),), max_tokens=4),
        Request(id="hit", arrive=2, prompt=(("s", 0, 262),), max_tokens=2),
    ),
)
"""DeepSeek-V4.1's window and blocks; the second request hits 256 and replays from 128 on, beside a decode."""


HEAD = 512


@pytest.fixture(scope="module")
def attention(open_engine: Any) -> Any:
    """Its worker's steps have the outputs."""
    open_engine("scheduler")
    from fuzz.engines.attention import AttentionEngine

    return AttentionEngine()


@dataclass
class Off:
    """How far the outputs of one query are from dense attention."""

    way: str
    request: str
    position: int
    replayed: bool
    worst: float
    """The largest error of a number, as a part of what it may be."""


def off(engine: Any, trace: Trace) -> list[Off]:
    """Every query of every step, both ways; what a window may hold is the contract's, from the hit."""
    from fuzz.engines.attention import keys, queries

    window, worker, found = trace.geometry.window, engine.worker, []
    sink = worker.ways["default"].sink.numpy()
    rows: dict[str, tuple[Any, Any]] = {}
    for request in trace.requests:
        tokens = np.array([*request.prompt, *request.output])
        at = np.arange(len(tokens))
        q = queries(tokens, at, engine.heads).double().numpy()
        rows[request.id] = q, stored(keys(tokens, at).double().numpy())
    for step, (batch, ways) in zip([s for s in trace.steps if len(s.request)], worker.attended, strict=True):
        row_of = np.repeat(np.arange(len(batch.scheduled)), batch.scheduled)
        for token, (row, position) in enumerate(zip(row_of.tolist(), batch.positions.tolist(), strict=True)):
            q, k = rows[batch.request_ids[row]]
            hit = trace.admissions[step.admission[row]].hit
            floor = hit - window if hit > window else 0
            right, error = attend(q[position], k[max(floor, position - window + 1) : position + 1], sink, HEAD**-0.5)
            replayed = 0 < floor <= position < hit
            for way, attended in ways.items():
                worst = float((np.abs(attended.output[token] - right) / error).max())
                found.append(Off(way, batch.request_ids[row], position, replayed, worst))
    return found


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(CASE, id="preempted"),
        pytest.param(MIXED, id="mixed"),
        pytest.param(REAL, id="real", marks=pytest.mark.slow_test),
    ],
)
def test_outputs_are_those_of_dense_attention(attention: Any, case: Case):
    trace = attention.run(case)
    assert judge(trace) == []
    assert not trace.interpreted
    found = off(attention, trace)
    for way in ("default", "aiter"):
        assert {one.replayed for one in found if one.way == way} == {True, False}
    assert max(one.worst for one in found) <= 1
    assert consumers(trace) >= {"sparse-prefill", "sparse-decode", "aiter-prefill", "aiter-decode", "combine"}


def test_a_decode_and_two_replays_in_one_step(attention: Any):
    attention.run(MIXED)
    assert any(
        not batch.prefill.all() and (batch.replay_start > 0).sum() == 2 for batch, _ in attention.worker.attended
    )


def test_one_key_too_many_is_far_off(attention: Any, monkeypatch: pytest.MonkeyPatch):
    """Whoever reads below replay_start on the default way; AITER's list does not come from the gather length."""
    gather_length_ignores_replay_start(monkeypatch)
    trace = attention.run(REPLAYS)
    wrong = {(one.way, one.request) for one in off(attention, trace) if one.worst > 1}
    assert wrong == {("default", "hit")}
    assert {v.site.split(",")[0] for v in judge(trace)} == {"combine", "gather-length", "sparse-prefill"}


def test_aiterreads_the_null_block_without_a_word_and_we_do_not(attention: Any):
    """Blocks of one token: the block that a replay starts in has been dropped (the known finding)."""
    geometry = msgspec.structs.replace(REPLAYS.geometry, swa_block_size=1, num_blocks=80)
    trace = attention.run(msgspec.structs.replace(REPLAYS, geometry=geometry))
    assert trace.faults == []
    sites = {violation.site for violation in judge(trace) if violation.invariant == "gather-live"}
    assert {"aiter-prefill, the null block", "sparse-prefill, the null block"} <= sites


def test_what_is_stored(attention: Any):
    """To the bit: vLLM's insert and our reading of the record, against NumPy. All exponents, ties and zeros."""
    from fuzz.engines.aiter import read
    from fuzz.engines.attention import keys

    attention.run(REPLAYS)
    way = attention.worker.ways["default"]
    tokens, positions = np.arange(64) * 7, np.arange(64) * 13
    k = keys(tokens, positions)
    k[0] = 0
    k[1, :448:2] = torch.from_numpy(E4M3).bfloat16().repeat(2)[:224]
    k[2] = k[2] * 1e-6
    k[3, :64] = torch.tensor([17, 19, 21, 23, 448, -17, -19, -21]).bfloat16().repeat(8)
    slots = np.random.default_rng(1).permutation(way.cache.shape[0] * way.cache.shape[1])[:64]
    way.insert(k, slots)
    assert np.array_equal(read(way.cache, torch.from_numpy(slots)).double().numpy(), stored(k.double().numpy()))


@pytest.mark.parametrize("slot", [-1, 80])
def test_aiter_outside_the_cache(attention: Any, slot: int):
    from fuzz.engines.aiter import read

    attention.run(REPLAYS)
    with pytest.raises(IndexError, match=f"slot {slot} of a cache of 80"):
        read(attention.worker.ways["aiter"].cache, torch.tensor([3, slot]))
