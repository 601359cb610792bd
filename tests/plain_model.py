# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The probe model as its definition reads (``invariants/weights.py``): a token at a time, every sum in order.

In float32 it stands for a model that a correct engine runs; in float64 the dense oracle has to agree with it.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Literal

import numpy as np
import traces

from invariants.trace import Admission, CachedBytes, Outputs, Probe, Trace
from invariants.weights import CODE_GAIN, EPSILON, LOGIT_GAIN, WIDTH, position_codes, weights


def total(values: np.ndarray) -> Any:
    """The sum over the first axis, in order."""
    return np.cumsum(values, axis=0)[-1]


class PlainModel:
    """One life: feed it tokens from ``start`` on. ``adopted``: [layers] lists of states, which it starts with."""

    def __init__(self, probe: Probe, window: int, dtype: Any = np.float32, start: int = 0, adopted: Any = None):
        self.cut = 0
        """First position with a key in the last two of a decoder probe's layers; the caller moves it."""
        self.probe, self.window, self.dtype, self.start, self.position = probe, window, dtype, start, start
        self.weights = {name: value.astype(dtype) for name, value in weights(probe).items()}
        self.keys: list[list[np.ndarray]] = [[] for _ in range(probe.layers)]
        self.states = [list(states) for states in adopted] if adopted else [[] for _ in range(probe.layers)]

    def feed(self, token: int) -> np.ndarray:
        """Logits [VOCAB] for the next token."""
        p, ratio = self.position, self.probe.compress_ratio
        code = (CODE_GAIN * position_codes(512)[p]).astype(self.dtype)
        x = e = self.weights["embed"][token]
        trimmed, last = self.probe.kind == "decoder", max(self.probe.layers - 3, 0)
        for layer in range(self.probe.layers):
            if layer == last:
                entering = x
            source = e if self.probe.kind == "exact" else x
            self.keys[layer].append(self.norm(self.times(f"{layer}.wk", self.norm(source)) + code))
            first = max(self.start, p - self.window + 1)
            if trimmed and layer > last:
                first = max(first, self.cut)
            query = self.norm(self.times(f"{layer}.wq", self.norm(x)))
            x = x + self.times(f"{layer}.wo", self.attend(query, self.keys[layer][first - self.start :]))
            states, visible = self.states[layer], (p + 1) // ratio
            if (p + 1) % ratio == 0 and len(states) < visible:
                source = entering if trimmed and layer >= last else x
                states.append(self.norm(self.times(f"{layer}.gk", self.norm(source)) + code))
            if visible:
                query = self.norm(self.times(f"{layer}.gq", self.norm(x)))
                x = x + self.times(f"{layer}.go", self.attend(query, states[:visible]))
            hidden = np.maximum(self.times(f"{layer}.up", self.norm(x)), self.dtype(0))
            x = x + self.times(f"{layer}.down", hidden)
        self.position += 1
        logits: np.ndarray = self.dtype(LOGIT_GAIN) * self.times("head", self.norm(x))
        assert logits.dtype == self.dtype
        return logits

    def times(self, name: str, v: np.ndarray) -> np.ndarray:
        return total((self.weights[name] * v).T)

    def norm(self, v: np.ndarray) -> np.ndarray:
        return v / np.sqrt(total(v * v) / self.dtype(WIDTH) + self.dtype(EPSILON))

    def attend(self, query: np.ndarray, keys: list[np.ndarray]) -> np.ndarray:
        key = np.array(keys)
        w = (self.dtype(1) + total((key * query).T) / self.dtype(WIDTH)) / self.dtype(2)
        for _ in range(4):
            w = w * w
        w = w + self.dtype(2.0**-20)
        return total(w[:, None] * key) / total(w)


def logprobs_of(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def rows_of(logits: list[np.ndarray], tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """ids and logprobs [n, 3]: the token itself, then the two best."""
    logprobs = [logprobs_of(one) for one in logits]
    ids = [[token, *np.argsort(-one)[:2]] for one, token in zip(logprobs, tokens, strict=True)]
    values = [one[list(row)] for one, row in zip(logprobs, ids, strict=True)]
    return np.array(ids, np.int32).reshape(-1, 3), np.array(values, np.float32).reshape(-1, 3)


def run(probe: Probe, trace: Trace, lives: list[Admission]) -> list[Outputs]:
    """Outputs of each request; hits adopt what ``lives[0]`` computed. Request 0 asks for prompt logprobs."""
    models: list[PlainModel] = []
    logits: list[list[np.ndarray]] = [[] for _ in trace.requests]
    outputs: list[list[int]] = [[] for _ in trace.requests]
    prompt: tuple[Any, Any] = (None, None)
    for number, life in enumerate(lives):
        request, sampled = trace.requests[life.request], outputs[life.request]
        later = [other.tokens for other in lives[number + 1 :] if other.request == life.request]
        end = later[0] if later else len(request.prompt) + request.max_tokens
        replayed = life.hit and trace.replay_expected  # without replay a hit changes nothing
        adopted = [states[: life.hit // probe.compress_ratio] for states in models[0].states] if replayed else None
        model = PlainModel(probe, traces.W, start=life.replay_start, adopted=adopted)
        models.append(model)
        fed = [model.feed(token) for token in [*request.prompt.tolist(), *sampled][life.replay_start :]]
        if number == 0:
            prompt = rows_of(fed[: len(request.prompt) - 1], request.prompt.tolist()[1:])
        for position in range(life.tokens, end):
            sampled.append(int(fed[-1].argmax()))
            logits[life.request].append(fed[-1])
            if position + 1 < end:
                fed.append(model.feed(sampled[-1]))
    made = [Outputs(np.array(o, np.int32), *rows_of(rows, o)) for o, rows in zip(outputs, logits, strict=True)]
    made[0].prompt_ids, made[0].prompt_logprobs = prompt
    for life in reversed(lives):
        made[life.request].hit = life.hit
    return made


def with_model(trace: Trace, kind: Literal["exact", "deep"] = "exact", compress_ratio: int = 1) -> Trace:
    """The same hand-made trace as a correct engine with a model would have given it, with all its arms.

    Only for traces whose hits adopt nothing but what admission 0 computed.
    """
    probe = trace.probe = Probe(kind=kind, compress_ratio=compress_ratio, seed=5)
    outputs = run(probe, trace, trace.admissions)
    for request, mine in zip(trace.requests, outputs, strict=True):
        request.outputs, request.output = mine, mine.tokens.tolist()
    cold = [
        Admission(0, index, len(request.prompt), 0, 0, 0, len(request.prompt), False)
        for index, request in enumerate(trace.requests)
    ]
    trace.arms = {name: deepcopy(list(outputs)) for name in ("twice", "poison", "alone")}
    trace.arms["no-cache"] = list(run(probe, trace, cold))
    digests = np.array([11, 12], np.uint64)
    trace.cached = [CachedBytes(0, traces.ints(1, 2), traces.ints(0, 1), traces.ints(4, 4), digests, digests.copy())]
    return trace
