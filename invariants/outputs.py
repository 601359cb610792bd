# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""What comes out: outputs after a prefix hit against no-cache outputs, the dense oracle and the other control arms.

A hit is not bit-identical to a cold run by design: replayed rows see a shorter window, and where window keys come from
hidden states the layers above the first see that. Equal to the bit are: everything of the exact probe; everything where
replay is off; what a life without a hit gives; and the same thing twice. For all else there is the oracle, which
computes each life from what that life adopted. Nothing here applies where no model runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from invariants.oracle import dense_match
from invariants.reference import replay_start
from invariants.trace import NOBODY, BoolArray, Outputs, Trace, TracedRequest, Violation
from invariants.view import View


def output_match(view: View) -> Iterator[Violation]:
    """Outputs equal those without prefix cache, where they have to, and the dense oracle's everywhere."""
    if view.trace.probe is None:
        return
    first_hit = _outputs_before_a_hit(view.trace)
    for index, request, arm in _arm(view.trace, "no-cache"):
        if _is_trimmed(view, request):
            continue  # by chunks, and those of the arm are others
        most = first_hit.get(index) if view.may_drift else None
        yield from _same("output-match", "no-cache", request, arm, request.finished != "length", most)
    if not view.may_drift:
        for _, request, arm in _arm(view.trace, "ngram"):
            yield from _same("output-match", "ngram", request, arm, request.finished != "length")
    yield from dense_match(view)


def poison_blind(view: View) -> Iterator[Violation]:
    """The same run again gives the same bits; also with everything overwritten that it may not read."""
    for site in ("twice", "poison"):
        for _, request, arm in _arm(view.trace, site):
            yield from _same("poison-blind", site, request, arm)


def mix_blind(view: View) -> Iterator[Violation]:
    """A request that runs alone, after the same hit, gives the same bits as in the mix.

    Of an arm's entry only requests with one admission and the same hit are comparable. Where a hit may drift, the
    adopted states have to be those of lives without a hit as well: alone, a cold request computes them. Where chunks
    are trimmed, they have to be those that it gets alone.
    """
    lives = view.trace.admissions
    of_request: dict[int, list[int]] = {}
    for number, life in enumerate(lives):
        of_request.setdefault(life.request, []).append(number)
    arms = list(_arm(view.trace, "alone"))
    sources = view.lineage if arms and view.may_drift else None
    for index, request, arm in arms:
        mine = of_request.get(index, [])
        if len(mine) != 1 or lives[mine[0]].hit != arm.hit:
            continue
        if _is_trimmed(view, request) and not _chunks_of_its_own(view, mine[0]):
            continue
        if sources is not None and any(n == NOBODY or lives[n].hit for n in set(sources[mine[0]].tolist())):
            continue
        yield from _same("mix-blind", "alone", request, arm, request.finished != "length")


def drift(trace: Trace) -> NDArray[np.float64]:
    """float64 [requests with a replayed hit and a no-cache entry]: how far a logprob is, at most, from that arm's.

    Up to and including the first output whose token differs. Of an id that only one of them lists, the other's logprob
    is no higher than the lowest that it lists, and is taken for that. For reports; nothing is owed.
    """
    window = trace.geometry.window if trace.replay_expected else 0
    hits = {life.request for life in trace.admissions if replay_start(life.hit, window) > 0}
    found = []
    for index, request, arm in _arm(trace, "no-cache"):
        if index in hits and request.outputs is not None:
            mine, rows = request.outputs, min(len(request.outputs.tokens), len(arm.tokens))
            differ = np.flatnonzero(mine.tokens[:rows] != arm.tokens[:rows])
            rows = int(differ[0]) + 1 if len(differ) else rows
            found.append(max(_apart(mine, arm, rows), _apart(arm, mine, rows)))
    return np.array(found, np.float64)


def _apart(one: Outputs, other: Outputs, rows: int) -> float:
    """Of the ids that ``one`` lists in its first rows."""
    same = one.ids[:rows, :, None] == other.ids[:rows, None, :]
    logprobs = one.logprobs[:rows, :, None].astype(np.float64)
    apart = np.abs(logprobs - other.logprobs[:rows, None, :])
    above = logprobs[..., 0] - other.logprobs[:rows].min(1, initial=0.0, keepdims=True)
    return float(max(apart[same].max(initial=0.0), above[~same.any(2)].max(initial=0.0)))


def _is_trimmed(view: View, request: TracedRequest) -> bool:
    """Whether the request has a chunk whose rows decoder-side replay trims, or may have one in another batch."""
    longest = min(len(request.prompt) + request.max_tokens, view.trace.geometry.max_num_batched_tokens)
    return view.decoder_replay and longest > view.replay


def _chunks_of_its_own(view: View, life: int) -> bool:
    """Whether every chunk of the life but the last takes up all of a step's tokens, as where nobody else is there."""
    rows = np.flatnonzero((view.admission == life) & view.prefill)
    return bool((view.scheduled[rows[:-1]] == view.trace.geometry.max_num_batched_tokens).all())


def _outputs_before_a_hit(trace: Trace) -> dict[int, int]:
    """For each request with a hit: how many of its outputs were sampled by lives before the first one with a hit."""
    before: dict[int, int] = {}
    for life in trace.admissions:
        if life.hit > 0:
            before.setdefault(life.request, max(life.tokens - len(trace.requests[life.request].prompt), 0))
    return before


def _arm(trace: Trace, name: str) -> Iterator[tuple[int, TracedRequest, Outputs]]:
    """Requests that have outputs in the main run and in that arm; none if the arm was not run."""
    if trace.probe is not None and name in trace.arms:
        for index, (request, arm) in enumerate(zip(trace.requests, trace.arms[name], strict=True)):
            if request.outputs is not None and arm is not None:
                yield index, request, arm


class _Difference(NamedTuple):
    position: int
    what: str
    expected: str
    seen: str
    values: int


def _same(
    invariant: str, site: str, request: TracedRequest, arm: Outputs, partial: bool = False, most: int | None = None
) -> Iterator[Violation]:
    """A violation if the request's outputs are not the arm's, bit for bit.

    ``partial``: one of them may have ended early, so that only what both have is compared. ``most``: of outputs, only
    the first so many.
    """
    assert request.outputs is not None
    fields = zip(_fields(request, request.outputs), _fields(request, arm), strict=True)
    found = []
    for (name, start, seen), (_, _, wanted) in fields:
        if start == len(request.prompt):
            seen, wanted = seen[:most], wanted[:most]
        if partial:
            rows = min(len(seen), len(wanted))
            seen, wanted = seen[:rows], wanted[:rows]
        if (difference := _difference(name, start, wanted, seen)) is not None:
            found.append(difference)
    if found:
        first, count = min(found, key=lambda one: one.position), sum(one.values for one in found)
        message = f"{first.what} for position {first.position} is not that of arm {site} ({count} values differ)"
        yield Violation(
            invariant, message, first.expected, first.seen, request=request.id, position=first.position, site=site
        )


def _fields(request: TracedRequest, outputs: Outputs) -> Iterator[tuple[str, int, NDArray[Any]]]:
    """Name, position that the first row is about, and the values [rows, columns]."""
    length, nothing = len(request.prompt), np.zeros((0, 0))
    yield "sampled token", length, outputs.tokens[:, None]
    yield "token id", length, outputs.ids
    yield "logprob", length, outputs.logprobs
    yield "prompt token id", 1, nothing if outputs.prompt_ids is None else outputs.prompt_ids
    yield "prompt logprob", 1, nothing if outputs.prompt_logprobs is None else outputs.prompt_logprobs


def _difference(name: str, start: int, wanted: NDArray[Any], seen: NDArray[Any]) -> _Difference | None:
    rows = min(len(seen), len(wanted))
    if rows and wanted.shape[1] != seen.shape[1]:
        return _Difference(start, f"number of {name}s", str(wanted.shape[1]), str(seen.shape[1]), rows)
    differs = _unlike(wanted[:rows], seen[:rows]) if rows else np.zeros((0, 0), np.bool_)
    missing = abs(len(wanted) - len(seen))
    if differs.any():
        row, column = divmod(int(differs.argmax()), differs.shape[1])
        values = _text(wanted[row, column]), _text(seen[row, column])
        return _Difference(start + row, f"{name} {column}", *values, int(differs.sum()) + missing)
    if missing:
        return _Difference(start + rows, f"row of {name}s", f"{len(wanted)} rows", f"{len(seen)} rows", missing)
    return None


def _unlike(wanted: NDArray[Any], seen: NDArray[Any]) -> BoolArray:
    """Where the bits differ; NaN and +inf are like nothing, themselves included: no logprob is."""
    if seen.dtype.kind != "f":
        return np.asarray(wanted != seen)
    bits = [np.ascontiguousarray(values, np.float32).view(np.uint32) for values in (wanted, seen)]
    return np.asarray((bits[0] != bits[1]) | np.isnan(seen) | np.isposinf(seen))


def _text(value: Any) -> str:
    """A float with its bits: two that differ in the last one may print alike."""
    return f"{value} (0x{np.float32(value).view(np.uint32):08x})" if value.dtype.kind == "f" else str(value)
