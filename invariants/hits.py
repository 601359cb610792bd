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
from invariants.trace import Admission, Offer, Violation
from invariants.view import View, examples


def hit_count(view: View) -> Iterator[Violation]:
    """Hit, replay_start, computed and scheduled tokens equal the reference's, and so do the worker and the metrics."""
    yield from _admissions(view)
    yield from _worker(view)
    yield from _metrics(view)


def _admissions(view: View) -> Iterator[Violation]:
    trace = view.trace
    multiple = reference.hit_multiple(trace)
    given_up: set[int] = set()
    for life, prediction in zip(trace.admissions, reference.predict(trace), strict=True):
        if prediction is None:
            continue  # never scheduled: progress reports it
        offer = None if life.request in given_up else trace.requests[life.request].offer
        if life.load and life.load.failed:
            given_up.add(life.request)
        for site, message, expected, seen in _wrong(view, life, prediction, offer, multiple):
            name = trace.requests[life.request].id
            yield Violation("hit-count", message, expected, seen, request=name, step=life.step, site=site)


def _wrong(
    view: View, life: Admission, prediction: Prediction, offer: Offer | None, multiple: int
) -> Iterator[tuple[str, str, str, str]]:
    """Site, message, expected and seen of everything that is wrong with one admission."""
    hit = life.hit
    if offer and not view.trace.requests[life.request].reads_cache:
        offer = None
    yield from _hit(view, life, prediction, offer, multiple)
    replay = 0 if offer and offer.carried and life.load else view.replay
    if prediction.stranger is not None:
        yield (
            "adopted block",
            f"a hit of {hit} tokens adopted a block as number {prediction.stranger} that does not hold these tokens",
            "a block cached for the same tokens up to its end",
            "another one",
        )
    if life.step < 0:
        return  # it waited for a load and never ran
    # vLLM computes the last known token in any case.
    computed = min(reference.computed_tokens(hit, replay), life.tokens - 1)
    for site, wanted, seen in (
        ("replay_start", reference.replay_start(hit, replay), life.replay_start),
        ("computed", computed, life.computed),
    ):
        if seen != wanted:
            yield site, f"hit {hit} with W = {replay} replayed implies another {site}", str(wanted), str(seen)
    left = life.tokens - computed
    # A chunk of one token may have drafts, to be as long as decodes are.
    most = left + (most_drafts(view.trace.geometry) if left == 1 else 0)
    if not 0 < life.scheduled <= most:
        message = f"first chunk of a request with {life.tokens} tokens, hit {hit}, {replay} of them replayed if longer"
        yield "scheduled", message, f"1 to {most} tokens", f"{life.scheduled} tokens"


def _hit(
    view: View, life: Admission, prediction: Prediction, offer: Offer | None, multiple: int
) -> Iterator[tuple[str, str, str, str]]:
    """What was adopted, of what the prefix cache holds and the connector offers."""
    replay = view.replay
    external = life.load.tokens if life.load else 0
    found = range(prediction.low, prediction.high + 1, multiple)
    can_be = {reference.loaded_hit(local, offer, replay, multiple) for local in found}
    if (life.hit, external) not in can_be:
        cached = str(prediction.high) if not prediction.doubt else f"{prediction.low} to {prediction.high}"
        offered = f"; a connector offers {offer.tokens}" if offer else ""
        if offer:
            offered += " with the window" if offer.carried else " without the window, of which whole blocks count"
        rule = f"; a hit of at most W = {replay} tokens is not adopted" if (prediction.high or offer) and replay else ""
        doubt = f" ({prediction.doubt})" if prediction.doubt else ""
        low, high = min(can_be), max(can_be)
        yield (
            "hit",
            f"{life.tokens} known tokens, of which {cached} can be hit in whole blocks{doubt}{offered}{rule}",
            _told(*low) if low == high else f"{_told(*low)} to {_told(*high)}, a multiple of {multiple}",
            _told(life.hit, external),
        )


def _told(hit: int, external: int) -> str:
    return f"hit {hit}, {external} of it loaded" if external else f"hit {hit}"


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
    answered = [life for life in lives if life.step >= 0 and len(view.trace.requests[life.request].output)]
    for name, wanted in (
        ("prefix_cache_queries", sum(life.tokens for life in lives if not life.resumed)),
        ("prefix_cache_hits", sum(life.local for life in lives if not life.resumed)),
        ("preempted_hits", sum(life.local for life in lives if life.resumed)),
        ("cached_tokens", sum(life.hit for life in answered if not life.resumed)),
        ("external_tokens", sum(life.hit - life.local for life in answered if not life.resumed)),
        ("connector_hits", sum(life.hit - life.local for life in lives if not life.resumed)),
        ("connector_preempted_hits", sum(life.hit - life.local for life in lives if life.resumed)),
    ):
        seen = view.trace.metrics.get(name, wanted)
        if seen != wanted:
            which = "resumed" if "preempted" in name else "first"
            yield Violation(
                "hit-count",
                f"metric {name} is not the sum over the {which} admissions",
                expected=str(wanted),
                seen=str(seen),
                site=f"metric {name}",
            )
