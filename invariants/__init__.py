# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Judges traces. Each invariant is a function from a trace to the violations it finds; its id is stable.

To add one: a function in a file of its own (or of its family), and a line in ``INVARIANTS``. It gets the trace as a
``View``, which also has it as a few long arrays, made once for all invariants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from invariants.agree import gather_agree
from invariants.bytes import cached_bytes
from invariants.faults import no_fault
from invariants.gather import gather_floor, gather_live, gather_window
from invariants.gating import gating
from invariants.hits import hit_count
from invariants.outputs import mix_blind, output_match, poison_blind
from invariants.progress import progress
from invariants.trace import Trace, Violation
from invariants.view import EXAMPLES, View
from invariants.writes import write_fence

INVARIANTS: dict[str, Callable[[View], Iterable[Violation]]] = {
    "gating": gating,
    "hit-count": hit_count,
    "progress": progress,
    "write-fence": write_fence,
    "gather-floor": gather_floor,
    "gather-agree": gather_agree,
    "gather-window": gather_window,
    "gather-live": gather_live,
    "no-fault": no_fault,
    "cached-bytes": cached_bytes,
    "poison-blind": poison_blind,
    "mix-blind": mix_blind,
    "output-match": output_match,
}
"""Causes before what comes of them, as vLLM goes about it: what is configured, scheduled, written, read, and what comes
out. So the first one that is broken says most about why, and what a wrong output alone would say comes last."""


def judge(trace: Trace) -> list[Violation]:
    """What every invariant finds, in the registry's order; a few for each site, the last one saying how many more."""
    view = View(trace)
    if trace.faults and not trace.groups:
        return list(no_fault(view))  # the process that could have told the rest is dead
    return [violation for invariant in INVARIANTS.values() for violation in _few(invariant(view))]


def _few(found: Iterable[Violation]) -> Iterator[Violation]:
    sites: dict[str, list[Violation]] = {}
    for violation in found:
        sites.setdefault(violation.site, []).append(violation)
    for site in sites.values():
        more = len(site) - EXAMPLES
        yield from site[: EXAMPLES - 1]
        for last in site[EXAMPLES - 1 : EXAMPLES]:
            yield replace(last, message=f"{last.message} ({more} more at this site)") if more > 0 else last
