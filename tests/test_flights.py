# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Steps in flight and drafts, on traces laid out by hand: edges, which hits the reference expects, what comes out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from test_edges import COLD, LONG, Row, Run, ints

from fuzz.case import Case, CaseError, Request, check
from fuzz.flight_edges import FLIGHT_EDGES, flight_edges
from invariants.progress import progress
from invariants.reference import predict
from invariants.trace import Final, Geometry, Trace
from invariants.view import View

AGAIN = Row(1, 8, 5, [1, 2, 3, 5])
"""LONG once more: 12 tokens hit, 4 of them replayed."""


def decode(computed: int, scheduled: int = 1, life: int = 0) -> Row:
    return Row(life, computed, scheduled, [1, 2, 3, 4] if not life else [1, 2, 3, 5], False)


@dataclass
class Flown:
    """A run, with what its steps say of flight and drafts; where they say nothing it stays as it is."""

    run: Run
    processed: list[int] = field(default_factory=list)
    """Of each step; none: no step is in flight."""
    drafts: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)
    """Step to (drafts, accepted) of its rows."""
    delivered: dict[int, dict[int, int]] = field(default_factory=dict)

    def trace(self) -> Trace:
        sizes: dict[str, Any] = {"async_scheduling": True} if self.processed else {}
        if self.drafts:
            sizes["drafts"] = 2
        self.run.sizes = {**sizes, **self.run.sizes}
        trace = self.run.trace()
        for step, processed in zip(trace.steps, self.processed, strict=bool(self.processed)) if self.processed else ():
            step.processed = processed
        for index, (drafts, accepted) in self.drafts.items():
            trace.steps[index].drafts, trace.steps[index].accepted = ints(drafts), ints(accepted)
        for index, delivered in self.delivered.items():
            trace.steps[index].delivered = delivered
        return trace


def preempted(came: int) -> Flown:
    """While the only step of LONG is in flight; ``came``: tokens of it that come out."""
    run = Run([LONG], [(0, 0), (0, 0)], [COLD, [], [Row(1, 0, 13, [1, 2, 3, 4])]], preempted={1: [0]})
    return Flown(run, [0, 0, 1], delivered={0: {0: came}})


SCENARIOS: dict[str, tuple[Flown, set[str]]] = {
    "a decode in flight": (Flown(Run([LONG], [(0, 0)], [COLD, [decode(13)]]), [0, 0]), {"step-in-flight"}),
    "a decode, its prefill processed": (Flown(Run([LONG], [(0, 0)], [COLD, [decode(13)]]), [0, 1]), set()),
    "a replay in flight": (
        Flown(
            Run([LONG, LONG], [(0, 0), (1, 12)], [COLD, [Row(1, 8, 2, [1, 2, 3])], [Row(1, 10, 3, [1, 2, 3, 5])]]),
            [0, 1, 1],
        ),
        {"step-in-flight", "replay-in-flight"},
    ),
    "preempted, the token dropped": (preempted(0), {"preempted-in-flight", "output-dropped"}),
    "preempted, the token comes out": (preempted(1), {"preempted-in-flight", "output-after-preemption"}),
    "aborted in flight": (
        Flown(Run([LONG], [(0, 0)], [COLD, []], finished={1: [0]}, aborted=(0,)), [0, 0]),
        {"aborted-in-flight"},
    ),
    "a step too many": (
        Flown(Run([LONG], [(0, 0)], [COLD, [decode(13)]], finished={0: [0]}), [0, 0]),
        {"ended-in-flight", "step-in-flight"},
    ),
    "two drafts, both right": (
        Flown(Run([LONG], [(0, 0)], [COLD, [decode(13, 3)]]), drafts={1: ([2], [2])}),
        {"drafts-accepted"},
    ),
    # Positions 14 and 15 are void, in the block that holds 13.
    "two drafts, both wrong": (
        Flown(Run([LONG], [(0, 0)], [COLD, [decode(13, 3)]]), drafts={1: ([2], [0])}),
        {"drafts-rejected"},
    ),
    # Positions 16 and 17 are void; 15 ends a block.
    "wrong drafts at a block's edge": (
        Flown(Run([f"{LONG}dd"], [(0, 0)], [[Row(0, 0, 15, [])], [decode(15, 3)]]), drafts={1: ([2], [0])}),
        {"drafts-rejected", "drafts-across-block-edge"},
    ),
    "a draft after a replay": (
        Flown(Run([LONG, LONG], [(0, 0), (1, 12)], [COLD, [AGAIN], [decode(13, 2, 1)]]), drafts={2: ([1], [1])}),
        {"drafts-accepted", "drafts-after-replay"},
    ),
    "a wrong draft in flight": (
        Flown(
            Run([LONG], [(0, 0)], [COLD, [decode(13, 2)], [decode(14, 2)]]),
            [0, 1, 1],
            drafts={1: ([1], [0]), 2: ([1], [1])},
        ),
        {"step-in-flight", "drafts-in-flight", "drafts-rejected", "drafts-accepted"},
    ),
    "a prompt of one token as long as a decode": (
        Flown(Run(["a"], [(0, 0)], [[Row(0, 0, 3, [1])]]), drafts={0: ([2], [0])}),
        {"prefill-with-drafts", "drafts-rejected"},
    ),
    # Position 14, in block 4, held a wrong draft; 16 tokens are hit.
    "a hit on what held a wrong draft": (
        Flown(
            Run(
                [LONG, f"{LONG}wxyz"],
                [(0, 0), (1, 16)],
                [COLD, [decode(13, 2)], [decode(14)], [decode(15)], [Row(1, 12, 5, [1, 2, 3, 4, 5])]],
                outputs={0: "wxyz"},
            ),
            drafts={1: ([1], [0])},
        ),
        {"drafts-rejected", "hit-after-rejected-drafts"},
    ),
    # 12 tokens are shared, and the one after them differs.
    "the token after a block differs": (
        Flown(
            Run(
                [LONG, "aaaabbbbccccxy"],
                [(0, 0), (1, 8)],
                [COLD, [Row(1, 4, 10, [1, 2, 5, 6])]],
                sizes={"drafts": 1, "drafter": "mtp"},
            )
        ),
        {"next-token-differs"},
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_reaches_its_edges_and_no_other(name: str) -> None:
    flown, expected = SCENARIOS[name]
    assert flight_edges(flown.trace()) == expected


def test_every_edge_has_a_scenario() -> None:
    assert set().union(*(expected for _, expected in SCENARIOS.values())) == set(FLIGHT_EDGES)


def bounds(flown: Flown) -> tuple[int, int]:
    """Of the hit of the second admission."""
    prediction = predict(flown.trace())[1]
    assert prediction is not None
    return prediction.low, prediction.high


def outputs_hit(processed: list[int], preempted: bool = False) -> Flown:
    """LONG and three tokens more fill four blocks with step 3. Step 4 may preempt; step 5 admits what continues it."""
    rows = [COLD, [decode(13)], [decode(14)], [decode(15)], [], [Row(1, 12, 5, [1, 2, 3, 4, 5])]]
    run = Run([LONG, f"{LONG}wxyz"], [(0, 0), (1, 16)], rows, outputs={0: "wxyz"})
    run.preempted = {4: [0]} if preempted else {}
    return Flown(run, processed, delivered={index: {0: 1} for index in range(4)})


def test_a_block_can_be_hit_once_its_tokens_are_known():
    """Step 3 computes the token that step 2 samples. Where that one is in flight then, step 3 has to be processed."""
    assert bounds(outputs_hit([0, 1, 2, 3, 3, 3])) == (16, 16)
    assert bounds(outputs_hit([0, 0, 1, 2, 3, 3])) == (12, 12)
    assert bounds(outputs_hit([0, 0, 1, 2, 3, 4])) == (16, 16)


def test_what_a_preempted_life_has_in_flight_is_not_its_own():
    """Step 3 is in flight when its request is preempted: its output comes out, its block is gone."""
    assert bounds(outputs_hit([0, 0, 1, 2, 3, 4], preempted=True)) == (12, 12)
    assert bounds(outputs_hit([0, 0, 1, 2, 4, 4], preempted=True)) == (16, 16)


def test_blocks_of_wrong_drafts_cannot_be_hit():
    """A token and two drafts fill block 4; both are wrong, and what is right is computed only after the admission."""
    rows = [COLD, [decode(13, 3)], [Row(1, 8, 9, [1, 2, 3, 5, 6])], [decode(14)], [decode(15)]]
    flown = Flown(Run([LONG, f"{LONG}wxyz"], [(0, 0), (1, 12)], rows, outputs={0: "wxyz"}), [0, 1, 2, 3, 4])
    flown.drafts, flown.delivered = {1: ([2], [0])}, {index: {0: 1} for index in (0, 1, 3, 4)}
    assert bounds(flown) == (12, 12)


@pytest.mark.parametrize(("drafter", "hit"), [("mtp", 8), ("dspark", 12)])
def test_mtp_names_a_block_by_the_token_after_it(drafter: str, hit: int):
    rows = [COLD, [Row(1, hit - 4, 14 - hit + 4, [1, 2, 3, 5])]]
    run = Run([LONG, "aaaabbbbccccxy"], [(0, 0), (1, hit)], rows, sizes={"drafts": 1, "drafter": drafter})
    assert bounds(Flown(run)) == (hit, hit)


def deliveries() -> Flown:
    """LONG, then a decode with a wrong draft and one more, each scheduled with the one before in flight."""
    run = Run([LONG], [(0, 0)], [COLD, [decode(13, 2)], [decode(14)]], outputs={0: "wxy"}, finished={2: [0]})
    return Flown(run, [0, 0, 1], {1: ([1], [0])}, {0: {0: 1}, 1: {0: 1}, 2: {0: 1}})


def broken_sites(flown: Flown, most: int = 3) -> set[str]:
    trace = flown.trace()
    trace.requests[0].max_tokens = most
    trace.final = Final(63, 63, ints([]))
    return {violation.site for violation in progress(View(trace))}


def test_what_comes_out_of_steps_in_flight():
    assert broken_sites(deliveries()) == set()


def test_a_token_that_is_lost_or_comes_twice_is_seen():
    for count in (0, 2):
        flown = deliveries()
        flown.delivered[1] = {0: count}
        assert "output" in broken_sites(flown)


def test_a_life_that_goes_on_after_a_wrong_draft_is_seen():
    flown = deliveries()
    flown.run.rows[2] = [decode(15)]
    assert "computed" in broken_sites(flown)


def test_more_drafts_than_asked_for_are_seen():
    flown = deliveries()
    flown.run.rows[1], flown.drafts = [decode(13, 4)], {1: ([3], [0])}
    assert "drafts" in broken_sites(flown)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"drafts": 0}, r"0 is not in 1\.\.8 - at `\$\.geometry\.drafts`"),
        ({"drafts": 9}, r"9 is not in 1\.\.8 - at `\$\.geometry\.drafts`"),
        ({"drafter": "mtp"}, r"a drafter without drafts - at `\$\.geometry\.drafter`"),
    ],
)
def test_drafts_are_checked(sizes: dict[str, Any], message: str):
    geometry = Geometry(
        window=4, block_size=4, swa_block_size=4, num_blocks=9, max_num_batched_tokens=8, max_num_seqs=2, **sizes
    )
    with pytest.raises(CaseError, match=message):
        check(Case(schema=1, geometry=geometry, requests=(Request(id="r", arrive=0, prompt=(("s", 0, 4),)),)))
