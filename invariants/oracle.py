# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Logprobs against the dense oracle: which life gave which output, from what it adopted, within float32's rounding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from invariants import reference
from invariants.dense import Float64, evaluate, log_softmax, tolerance
from invariants.trace import NOBODY, IntArray, Outputs, Probe, TracedRequest, Violation
from invariants.view import View
from invariants.weights import WIDTH

SITE = "dense"


@dataclass(slots=True)
class _Part:
    """What one evaluation says of a request."""

    request: TracedRequest
    outputs: IntArray
    """int [n], which of its outputs."""
    prompt_rows: int
    """How many of its prompt logprobs."""
    logprobs: Float64
    """float64 [prompt_rows + n, VOCAB]"""


def dense_match(view: View) -> Iterator[Violation]:
    """Every logprob is the oracle's within ``dense.tolerance``, and every sampled token its best one, so far.

    At most one violation a request.
    """
    probe = view.trace.probe
    if probe is None:
        return
    told: set[str] = set()
    for found in _lives(view, probe) if view.may_drift else _cold(view, probe):
        violation = found if isinstance(found, Violation) else _judge(found, probe, view.trace.geometry.window)
        if violation is not None and violation.request not in told:
            told.add(str(violation.request))
            yield violation


def _cold(view: View, probe: Probe) -> Iterator[_Part]:
    """Where no hit may change anything, each request is one cold life."""
    for request in view.trace.requests:
        if request.outputs is not None:
            tokens = _tokens(request)
            outputs = np.arange(len(request.outputs.tokens))
            rows = _prompt_rows(request.outputs, len(request.prompt))
            wanted = _positions(request, outputs, rows)
            if len(wanted):
                logits = evaluate(probe, view.trace.geometry.window, tokens[: wanted[-1] + 1], wanted).logits
                yield _Part(request, outputs, rows, log_softmax(logits))


def _lives(view: View, probe: Probe) -> Iterator[_Part | Violation]:
    """Each life by itself, in order, since later ones adopt from earlier ones."""
    trace, window = view.trace, view.trace.geometry.window
    done: list[tuple[IntArray, list[Float64]] | None] = []
    for number, life in enumerate(trace.admissions):
        request = trace.requests[life.request]
        ends = (view.computed + view.scheduled)[view.admission == number]
        floor = reference.replay_start(life.hit, view.replay)
        tokens = _tokens(request)[: int(ends.max(initial=0))]
        done.append(None)
        if len(tokens) <= life.hit:
            continue  # it has not got beyond its hit
        adopted = _adopted(probe, tokens, view.lineage[number], done)
        if adopted is None:
            if not trace.faults:
                yield _unknown(request, life.hit)
            continue
        outputs, rows = np.zeros(0, np.int64), 0
        if request.outputs is not None:
            outputs = np.unique(ends[ends >= max(life.tokens, life.hit + 1)]) - len(request.prompt)
            outputs = outputs[(outputs >= 0) & (outputs < len(request.outputs.tokens))]
            # A request that asks for prompt logprobs reads no prefix cache.
            rows = min(_prompt_rows(request.outputs, len(request.prompt)), len(tokens)) if not life.hit else 0
        trimmed = _trimmed(view, number, len(tokens)) if view.decoder_replay else None
        found = evaluate(probe, window, tokens, _positions(request, outputs, rows), floor, adopted, trimmed)
        done[number] = tokens, found.states
        if len(found.logits):
            yield _Part(request, outputs, rows, log_softmax(found.logits))


def _trimmed(view: View, number: int, length: int) -> IntArray:
    """int [length]: first position with a key in the last two layers, for the query at each position, in this life."""
    first = np.zeros(length, np.int64)
    for row in np.flatnonzero((view.admission == number) & view.trimmed):
        end = int(view.computed[row] + view.scheduled[row])
        first[max(end - view.replay, 0) : end] = end - view.replay
    return first


def _adopted(
    probe: Probe, tokens: IntArray, sources: IntArray, done: list[tuple[IntArray, list[Float64]] | None]
) -> list[Float64] | None:
    """The adopted states, [layers] float64 [hit // ratio, WIDTH]; None if not all are known, and of these tokens."""
    owners = sources[probe.compress_ratio - 1 :: probe.compress_ratio]
    number = np.arange(len(owners))
    known = {owner: done[owner] for owner in set(owners.tolist()) if owner != NOBODY}
    states = [np.zeros((len(owners), WIDTH)) for _ in range(probe.layers)]
    if (owners == NOBODY).any():
        return None
    for owner, life in known.items():
        mine = number[owners == owner]
        length = (int(mine[-1]) + 1) * probe.compress_ratio
        if life is None or not np.array_equal(life[0][:length], tokens[:length]):
            return None
        for layer, values in enumerate(life[1]):
            states[layer][mine] = values[mine]
    return states


def _unknown(request: TracedRequest, hit: int) -> Violation:
    return Violation(
        "output-match",
        f"an earlier life did not compute, for these tokens, every compressed state of an adopted hit of {hit} tokens",
        expected="states that the oracle knows",
        seen="another one, or none",
        request=request.id,
        site=SITE,
    )


def _judge(part: _Part, probe: Probe, window: int) -> Violation | None:
    """The first value that is off, or None."""
    request, outputs, rows = part.request, part.request.outputs, part.prompt_rows
    assert outputs is not None
    length, which, sampled = len(request.prompt), part.outputs, part.logprobs[rows:]
    allowed = tolerance(probe, max(window, (length + len(outputs.tokens)) // probe.compress_ratio))
    best = sampled.max(1, initial=-np.inf, keepdims=True)
    # A better token than the sampled one is off by what it is better.
    checks = [
        ("logprob", length + which, outputs.ids[which], outputs.logprobs[which], sampled),
        ("best logprob, not the sampled one,", length + which, outputs.tokens[which, None], best, sampled),
    ]
    if outputs.prompt_ids is not None and outputs.prompt_logprobs is not None:
        prompt = outputs.prompt_ids[:rows], outputs.prompt_logprobs[:rows], part.logprobs[:rows]
        checks.append(("prompt logprob", np.arange(1, rows + 1), *prompt))
    found, count = [], 0
    for name, positions, ids, seen, logprobs in checks:
        wanted = _of(logprobs, ids)
        with np.errstate(invalid="ignore"):
            off = ~(np.abs(seen - wanted) <= allowed)
        if off.any():
            row, column = divmod(int(off.argmax()), off.shape[1])
            count += int(off.sum())
            found.append((int(positions[row]), name, int(ids[row, column]), wanted[row, column], seen[row, column]))
    if not found:
        return None
    position, name, token, want, saw = min(found, key=lambda one: one[0])
    return Violation(
        "output-match",
        f"{name} of token {token} for position {position} is not the dense oracle's to within {allowed:.1e} "
        f"({count} values are off)",
        expected=f"{want:.7f}",
        seen=f"{saw:.7f}",
        request=request.id,
        position=position,
        site=SITE,
    )


def _of(logprobs: Float64, ids: IntArray) -> NDArray[np.float64]:
    """float64 like ``ids``: the logprobs of these ids, NaN for an id that is none."""
    valid = (ids >= 0) & (ids < logprobs.shape[-1])
    return np.where(valid, np.take_along_axis(logprobs, np.where(valid, ids, 0).astype(np.int64), 1), np.nan)


def _tokens(request: TracedRequest) -> IntArray:
    sampled = request.output if request.outputs is None else request.outputs.tokens
    return np.concatenate([request.prompt, np.array(sampled, np.int32)])


def _prompt_rows(outputs: Outputs, prompt: int) -> int:
    return 0 if outputs.prompt_ids is None else min(len(outputs.prompt_ids), prompt - 1)


def _positions(request: TracedRequest, outputs: IntArray, prompt_rows: int) -> IntArray:
    """Positions whose logits are about these prompt tokens and outputs, ascending."""
    return np.concatenate([np.arange(prompt_rows), len(request.prompt) - 1 + outputs])
