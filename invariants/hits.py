# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Each admission's hit and all that follows from it, against the reference; and the metrics that add them up.

Where the trace does not say enough to know the hit (``Prediction.doubt``), what is still implied is checked: bounds,
the multiple, and that a hit no longer than the window is not adopted.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from invariants import reference
from invariants.flight import most_drafts
from invariants.reference import Prediction
from invariants.trace import Admission, Violation
from invariants.view import View, examples


def hit_count(view: View) -> Iterator[Violation]:
    """Hit, replay_start, computed and scheduled tokens equal the reference's, and so do the worker and the metrics."""
    yield from _admissions(view)
    yield from _worker(view)
    yield from _metrics(view)


def _admissions(view: View) -> Iterator[Violation]:
    trace = view.trace
    multiple = reference.hit_multiple(trace)
    for life, prediction in zip(trace.admissions, reference.predict(trace), strict=True):
        if prediction is None:
            continue  # never scheduled: progress reports it
        for site, message, expected, seen in _wrong(view, life, prediction, multiple):
            name = trace.requests[life.request].id
            yield Violation("hit-count", message, expected, seen, request=name, step=life.step, site=site)


def _wrong(view: View, life: Admission, prediction: Prediction, multiple: int) -> Iterator[tuple[str, str, str, str]]:
    """Site, message, expected and seen of everything that is wrong with one admission."""
    replay, hit = view.replay, life.hit
    low, high = reference.adopted_hit(prediction.low, replay), reference.adopted_hit(prediction.high, replay)
    fits = low <= hit <= high and hit % multiple == 0 and hit == reference.adopted_hit(hit, replay)
    if not fits:
        cached = str(prediction.high) if not prediction.doubt else f"{prediction.low} to {prediction.high}"
        rule = f"; a hit of at most W = {replay} tokens is not adopted" if prediction.high > 0 and replay else ""
        doubt = f" ({prediction.doubt})" if prediction.doubt else ""
        yield (
            "hit",
            f"{life.tokens} known tokens, of which {cached} can be hit in whole blocks{doubt}{rule}",
            f"hit {low}" if low == high else f"hit in {low}..{high}, a multiple of {multiple}",
            f"hit {hit}",
        )
    if prediction.stranger is not None:
        yield (
            "adopted block",
            f"a hit of {hit} tokens adopted a block as number {prediction.stranger} that does not hold these tokens",
            "a block cached for the same tokens up to its end",
            "another one",
        )
    for site, wanted, seen in (
        ("replay_start", reference.replay_start(hit, replay), life.replay_start),
        ("computed", reference.computed_tokens(hit, replay), life.computed),
    ):
        if seen != wanted:
            yield site, f"hit {hit} with W = {replay} replayed implies another {site}", str(wanted), str(seen)
    left = reference.tokens_left(life.tokens, hit, replay)
    # A chunk of one token may have drafts, to be as long as decodes are.
    most = left + (most_drafts(view.trace.geometry) if left == 1 else 0)
    if not 0 < life.scheduled <= most:
        message = f"first chunk of a request with {life.tokens} tokens, hit {hit}, {replay} of them replayed if longer"
        yield "scheduled", message, f"1 to {most} tokens", f"{life.scheduled} tokens"


def _worker(view: View) -> Iterator[Violation]:
    """Rows still prefilling carry their request's replay_start, decode rows 0 (CONTRACT 13)."""
    wanted = np.where(view.prefill, view.floor, 0)
    for row, more in examples(view.claimed != wanted):
        kind = "prefill" if view.prefill[row] else "decode"
        message = (
            f"the worker hands replay_start {view.claimed[row]} to the metadata of a {kind} row at "
            f"{view.computed[row]}, whose hit implies {view.floor[row]}{more}"
        )
        at = row, None
        yield view.violation("hit-count", "worker replay_start", at, message, wanted[row], view.claimed[row])


def _metrics(view: View) -> Iterator[Violation]:
    if view.trace.faults:
        return  # a step that broke off was never counted
    # Who looks nothing up is not counted.
    lives = [life for life in view.trace.admissions if view.trace.requests[life.request].reads_cache]
    answered = [life for life in lives if len(view.trace.requests[life.request].output)]
    for name, wanted in (
        ("prefix_cache_queries", sum(life.tokens for life in lives if not life.resumed)),
        ("prefix_cache_hits", sum(life.hit for life in lives if not life.resumed)),
        ("preempted_hits", sum(life.hit for life in lives if life.resumed)),
        ("cached_tokens", sum(life.hit for life in answered if not life.resumed)),
    ):
        seen = view.trace.metrics.get(name, wanted)
        if seen != wanted:
            which = "resumed" if name == "preempted_hits" else "first"
            yield Violation(
                "hit-count",
                f"metric {name} is not the sum over the {which} admissions",
                expected=str(wanted),
                seen=str(seen),
                site=f"metric {name}",
            )
