# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Edges on traces laid out by hand: each scenario reaches exactly the edges listed, all scenarios together every edge.

Window, blocks and so hits are of 4 tokens unless a scenario says otherwise. A prompt is a string, a token a letter.
Edges need no gathers, no writes and only the cacheable group's block tables, so nothing else is filled in.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from msgspec import UNSET

from fuzz.edges import EDGES, common_prefix, edges
from fuzz.flight_edges import FLIGHT_EDGES
from fuzz.load_edges import LOAD_EDGES
from invariants.trace import Admission, Geometry, Group, Step, Trace, TracedRequest

LONG = "aaaabbbbccccd"
"""13 tokens: three blocks and one."""


@dataclass
class Row:
    """A batch row: ``blocks`` is its table in the cacheable group."""

    life: int
    computed: int
    scheduled: int
    blocks: list[int]
    prefill: bool = True


@dataclass
class Run:
    """A trace to be."""

    prompts: list[str]
    lives: list[tuple[int, int]]
    """(request, hit) of each admission."""
    rows: list[list[Row]]
    """Of each step."""
    outputs: dict[int, str] = field(default_factory=dict)
    preempted: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, list[int]] = field(default_factory=dict)
    aborted: tuple[int, ...] = ()
    continues: dict[int, int] = field(default_factory=dict)
    events: dict[int, list[str]] = field(default_factory=dict)
    idled: tuple[int, ...] = ()
    priorities: tuple[int | None, ...] = ()
    arrivals: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()
    sizes: dict[str, int | bool | str | None] = field(default_factory=dict)

    def trace(self) -> Trace:
        defaults = {"window": 4, "block_size": 4, "swa_block_size": 4, "num_blocks": 64, "max_num_batched_tokens": 32}
        geometry = Geometry(**{**defaults, "max_num_seqs": 8, **self.sizes})
        replay = geometry.replay
        trace = Trace(
            engine="hand",
            geometry=geometry,
            requests=[
                TracedRequest(f"r{i}", 0, letters(prompt), 8, letters(self.outputs.get(i, "")).tolist(), "length")
                for i, prompt in enumerate(self.prompts)
            ],
            groups=[
                Group("cacheable", geometry.block_size, True, 0),
                *[Group("window", geometry.swa_block_size, not replay, geometry.window if replay else 0)]
                * (geometry.window_groups if geometry.window_groups is not UNSET else 1),
            ],
            replay_expected=replay,
            kernels="none",
        )
        for request, priority in zip(trace.requests, self.priorities, strict=False):
            request.priority = priority
        for request, arrive in zip(trace.requests, self.arrivals, strict=False):
            request.arrive = arrive
        for request in self.refused:
            trace.requests[request].finished = "refused"
        for request in self.aborted:
            trace.requests[request].finished = "abort"
        for request, earlier in self.continues.items():
            trace.requests[request].continues = earlier
        for index, rows in enumerate(self.rows):
            trace.steps.append(self._step(index, rows))
        for life, (request, hit) in enumerate(self.lives):
            trace.admissions.append(self._admission(life, request, hit, geometry))
        return trace

    def _admission(self, life: int, request: int, hit: int, geometry: Geometry) -> Admission:
        step, row = next((i, row) for i, rows in enumerate(self.rows) for row in rows if row.life == life)
        resumed = request in [earlier for earlier, _ in self.lives[:life]]
        tokens = len(self.prompts[request]) + (len(self.outputs.get(request, "")) if resumed else 0)
        start = hit - geometry.window if hit and geometry.replay else 0
        return Admission(step, request, tokens, hit, start, row.computed, row.scheduled, resumed)

    def _step(self, index: int, rows: list[Row]) -> Step:
        return Step(
            index=index,
            request=ints(self.lives[row.life][0] for row in rows),
            admission=ints(row.life for row in rows),
            computed=ints(row.computed for row in rows),
            scheduled=ints(row.scheduled for row in rows),
            prefill=np.array([row.prefill for row in rows], bool),
            replay_start=ints(0 for _ in rows),
            tables=[
                [ints(row.blocks) for row in rows],
                *[[ints([]) for _ in rows]] * (self.sizes.get("window_groups", 1)),
            ],
            preempted=self.preempted.get(index, []),
            finished=self.finished.get(index, []),
            events=self.events.get(index, []),
            idled=index in self.idled,
        )


def ints(values) -> np.ndarray:
    return np.array(list(values), np.int32)


def letters(text: str) -> np.ndarray:
    return ints(map(ord, text))


COLD = [Row(0, 0, 13, [1, 2, 3, 4])]
HIT_12 = {"hit-above-window", "hit-whole-prompt", "identical-twice", "one-token-tail"}

SCENARIOS: dict[str, tuple[Run, set[str]]] = {
    "cold": (Run([LONG], [(0, 0)], [COLD]), set()),
    "the same prompt again": (
        Run([LONG, LONG], [(0, 0), (1, 12)], [COLD, [Row(1, 8, 5, [1, 2, 3, 5])]]),
        HIT_12,
    ),
    "the shortest hit that is adopted": (
        Run([LONG, "aaaabbbbxy"], [(0, 0), (1, 8)], [COLD, [Row(1, 4, 6, [1, 2, 5])]]),
        {"hit-above-window", "hit-smallest-adopted"},
    ),
    "a hit as long as the window": (
        Run([LONG, "aaaaxy"], [(0, 0), (1, 0)], [COLD, [Row(1, 0, 6, [5, 6])]]),
        {"hit-equals-window"},
    ),
    "a hit shorter than the window": (
        Run([LONG, "aaaaxy"], [(0, 0), (1, 0)], [COLD, [Row(1, 0, 6, [5, 6])]], sizes={"window": 8}),
        {"hit-below-window"},
    ),
    "a cached prompt that ends on a block": (
        Run([LONG, "aaaabbbbcccc"], [(0, 0), (1, 8)], [COLD, [Row(1, 4, 8, [1, 2, 5])]]),
        {"hit-above-window", "hit-smallest-adopted", "hit-whole-prompt", "hit-backs-off"},
    ),
    "divergence inside the last block, then another depth": (
        Run(
            [LONG, "aaaabbbbccxy", "aaaabbbbccccx"],
            [(0, 0), (1, 8), (2, 12)],
            [COLD, [Row(1, 4, 8, [1, 2, 5])], [Row(2, 8, 5, [1, 2, 3, 6])]],
        ),
        {
            "hit-above-window",
            "hit-smallest-adopted",
            "divergence-in-last-block",
            "several-depths",
            "one-token-tail",
        },
    ),
    "a replay in three chunks": (
        Run(
            [LONG, LONG],
            [(0, 0), (1, 12)],
            [
                [Row(0, 0, 2, [1])],
                [Row(0, 2, 11, [1, 2, 3, 4])],
                [Row(1, 8, 2, [1, 2, 3])],
                [Row(1, 10, 2, [1, 2, 3])],
                [Row(1, 12, 1, [1, 2, 3, 5])],
            ],
            sizes={"max_num_batched_tokens": 2},
        ),
        HIT_12
        | {
            "hit-on-chunk-boundary",
            "replay-only-chunk",
            "replay-ends-chunk",
            "replay-spans-chunks",
            "one-token-extension",
            "one-token-replay",
        },
    ),
    "two replays and a decode in one step": (
        Run(
            [LONG, LONG, LONG],
            [(0, 0), (1, 12), (2, 12)],
            [COLD, [Row(0, 13, 1, [1, 2, 3, 4], False), Row(1, 8, 5, [1, 2, 3, 5]), Row(2, 8, 5, [1, 2, 3, 6])]],
            outputs={0: "zz"},
        ),
        HIT_12 | {"burst", "several-replaying", "decode-beside-replay"},
    ),
    "a replay beside a cold prefill, which then moves up": (
        Run(
            [LONG, LONG, "xyz"],
            [(0, 0), (1, 12), (2, 0)],
            [COLD, [Row(2, 0, 3, [6]), Row(1, 8, 2, [1, 2, 3])], [Row(1, 10, 3, [1, 2, 3, 5])]],
            sizes={"max_num_batched_tokens": 5},
        ),
        HIT_12
        | {
            "burst",
            "cold-beside-replay",
            "replay-only-chunk",
            "replay-spans-chunks",
            "row-moved",
            "budget-cut",
        },
    ),
    "a hit on blocks of the same step": (
        Run(["aaaabbbbc", "aaaabbbbd"], [(0, 0), (1, 8)], [[Row(1, 4, 5, [1, 2, 4]), Row(0, 0, 9, [1, 2, 3])]]),
        {
            "burst",
            "same-step-hit",
            "hit-above-window",
            "hit-smallest-adopted",
            "one-token-tail",
            "cold-beside-replay",
        },
    ),
    "the long-prefill threshold": (
        Run(
            [LONG, "xy"],
            [(0, 0), (1, 0)],
            [[Row(0, 0, 8, [1, 2]), Row(1, 0, 2, [9])], [Row(0, 8, 5, [1, 2, 3, 4])]],
            sizes={"long_prefill_token_threshold": 8},
        ),
        {"burst", "long-prefill-cut"},
    ),
    "a request without a hit after a replayed one": (
        Run(
            [LONG, LONG, "xyz"],
            [(0, 0), (1, 12), (2, 0)],
            [COLD, [Row(1, 8, 5, [1, 2, 3, 5])], [Row(2, 0, 3, [6])]],
            finished={1: [1]},
        ),
        HIT_12 | {"cold-after-replay"},
    ),
    "preempted in its replay, resumed with the same hit": (
        Run(
            [LONG, LONG],
            [(0, 0), (1, 12), (1, 12)],
            [COLD, [Row(1, 8, 2, [1, 2, 3])], [Row(2, 8, 5, [1, 2, 3, 5])]],
            preempted={2: [1]},
            sizes={"max_num_batched_tokens": 13},
        ),
        HIT_12 | {"preempted", "preempted-mid-replay", "preempted-then-hit", "replay-only-chunk"},
    ),
    "preempted after four outputs, which it then replays": (
        Run(
            [LONG, LONG],
            [(0, 0), (1, 12), (1, 16)],
            [
                COLD,
                [Row(1, 8, 5, [1, 2, 3, 5])],
                *([Row(1, at, 1, [1, 2, 3, 5], False)] for at in (13, 14, 15)),
                [Row(2, 12, 5, [1, 2, 3, 5, 6])],
            ],
            outputs={1: "wxyz"},
            preempted={5: [1]},
        ),
        HIT_12 | {"preempted", "preempted-then-hit", "resumed-replays-output", "resumed-elsewhere", "several-depths"},
    ),
    "replay off, and every window is kept": (
        Run(
            [LONG, "aaaabbbbxy"],
            [(0, 0), (1, 4)],
            [COLD, [Row(1, 4, 6, [1, 5, 6])]],
            sizes={"replay": False, "retention": None},
        ),
        {"replay-off-hit", "retained-hit"},
    ),
    "replay on, and every window would be kept": (
        Run([LONG, LONG], [(0, 0), (1, 12)], [COLD, [Row(1, 8, 5, [1, 2, 3, 5])]], sizes={"retention": 4}),
        HIT_12 | {"retention-beside-replay"},
    ),
    "a prompt that is refused": (
        Run(["aaa", LONG], [(0, 0)], [[Row(0, 0, 3, [1])]], refused=(1,), sizes={"max_model_len": 13}),
        {"prompt-refused"},
    ),
    "an output that is cut": (
        Run(["aaa"], [(0, 0)], [[Row(0, 0, 3, [1])]], outputs={0: "b"}, finished={0: [0]}, sizes={"max_model_len": 4}),
        {"output-cut"},
    ),
    "preempted three times": (
        Run(
            ["aaa"],
            [(0, 0)] * 4,
            [[Row(life, 0, 3, [1])] for life in range(4)],
            preempted={1: [0], 2: [0], 3: [0]},
        ),
        {"preempted", "preempted-repeatedly"},
    ),
    "by priority the second one of three goes last": (
        Run(
            ["aaa", "bbb", "ccc"],
            [(0, 0), (2, 0), (1, 0)],
            [[Row(0, 0, 3, [1])], [Row(0, 3, 1, [1], False), Row(1, 0, 3, [2])], [Row(2, 0, 3, [3])]],
            priorities=(0, 1, 0),
            arrivals=(0, 0, 1),
        ),
        {"overtaken"},
    ),
    "by priority the first one makes room": (
        Run(
            ["aaa", "bbb"],
            [(0, 0), (1, 0), (0, 0)],
            [[Row(0, 0, 3, [1])], [Row(1, 0, 3, [2])], [Row(1, 3, 1, [2], False)], [Row(2, 0, 3, [3])]],
            preempted={2: [0]},
            priorities=(1, None),
        ),
        {"preempted", "preempted-by-priority"},
    ),
    "resumed without the hit that it had": (
        Run(
            [LONG, LONG],
            [(0, 0), (1, 12), (1, 0)],
            [COLD, [Row(1, 8, 5, [1, 2, 3, 5])], [Row(2, 0, 14, [6, 7, 8, 9])]],
            outputs={1: "w"},
            preempted={2: [1]},
            events={2: ["preempt", "drop_blocks"]},
        ),
        HIT_12 | {"preempted", "resumed-cold-after-replay", "drop-blocks", "dropped-then-miss"},
    ),
    "evicted by another prompt": (
        Run(
            [LONG, "xyz", LONG],
            [(0, 0), (1, 0), (2, 0)],
            [COLD, [Row(1, 0, 3, [1])], [Row(2, 0, 13, [5, 6, 7, 8])]],
        ),
        {"eviction", "evicted-then-miss"},
    ),
    "reset, then the same prompt": (
        Run(
            [LONG, LONG],
            [(0, 0), (1, 0)],
            [COLD, [Row(1, 0, 13, [1, 2, 3, 4])]],
            events={1: ["reset_prefix_cache"]},
        ),
        {"reset-prefix-cache", "reset-then-miss"},
    ),
    "blocks dropped, then the same prompt": (
        Run([LONG, LONG], [(0, 0), (1, 0)], [COLD, [Row(1, 0, 13, [1, 2, 3, 4])]], events={1: ["drop_blocks"]}),
        {"drop-blocks", "dropped-then-miss"},
    ),
    "aborted in its replay": (
        Run(
            [LONG, LONG],
            [(0, 0), (1, 12)],
            [COLD, [Row(1, 8, 2, [1, 2, 3])], []],
            finished={2: [1]},
            aborted=(1,),
            sizes={"max_num_batched_tokens": 13},
        ),
        HIT_12 | {"abort", "aborted-mid-replay", "replay-only-chunk"},
    ),
    "replay off": (
        Run([LONG, LONG], [(0, 0), (1, 12)], [COLD, [Row(1, 12, 1, [1, 2, 3, 5])]], sizes={"replay": False}),
        {"replay-off-hit", "hit-whole-prompt", "identical-twice", "one-token-tail"},
    ),
    "window one more than a block": (
        Run([LONG, LONG], [(0, 0), (1, 12)], [COLD, [Row(1, 7, 6, [1, 2, 3, 5])]], sizes={"window": 5}),
        HIT_12 | {"replay-start-mid-block", "replay-start-retired"},
    ),
    "idle before anything is cached": (Run(["aaa"], [(0, 0)], [[Row(0, 0, 3, [1])]], idled=(0,)), set()),
    "idle while blocks are cached": (Run([LONG], [(0, 0)], [COLD], idled=(0,)), {"idle-batch-over-cached-blocks"}),
    "a window block of two blocks": (
        Run([LONG, LONG], [(0, 0), (1, 8)], [COLD, [Row(1, 4, 9, [1, 2, 5, 6])]], sizes={"swa_block_size": 8}),
        (HIT_12 - {"one-token-tail"}) | {"hit-smallest-adopted", "replay-start-mid-block", "window-block-larger"},
    ),
    "blocks of four and of three": (
        Run([LONG, LONG], [(0, 0), (1, 12)], [COLD, [Row(1, 8, 5, [1, 2, 3, 5])]], sizes={"swa_block_size": 3}),
        HIT_12
        | {"hit-smallest-adopted", "replay-start-mid-block", "replay-start-retired", "window-block-not-dividing"},
    ),
    "two window groups": (
        Run([LONG, LONG], [(0, 0), (1, 12)], [COLD, [Row(1, 8, 5, [1, 2, 3, 5])]], sizes={"window_groups": 2}),
        HIT_12 | {"several-window-groups"},
    ),
    "a replay in a step of 1,024 tokens": (
        Run(
            [LONG, LONG, "x" * 1019],
            [(0, 0), (1, 12), (2, 0)],
            [COLD, [Row(1, 8, 5, [1, 2, 3, 5]), Row(2, 0, 1019, [])]],
            sizes={"max_num_batched_tokens": 2048},
        ),
        HIT_12 | {"burst", "cold-beside-replay", "replay-in-large-step"},
    ),
    "two more turns after five outputs, the last of which fills a block": (
        Run(
            ["aaaabbb", "aaaabbbbcwxyz", "aaaabbbbcwxyzv"],
            [(0, 0), (1, 8), (2, 12)],
            [
                [Row(0, 0, 7, [1, 2])],
                *([Row(0, at, 1, [1, 2, 3], False)] for at in (7, 8, 9, 10)),
                [Row(1, 4, 9, [1, 2, 4, 5])],
                [Row(2, 8, 6, [1, 2, 4, 6])],
            ],
            outputs={0: "bcwxy"},
            continues={1: 0, 2: 1},
        ),
        {"hit-above-window", "hit-smallest-adopted", "several-depths", "divergence-in-last-block"}
        | {"continued", "continued-hits-output", "continued-hit-on-hit", "continued-stops-short"},
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_reaches_its_edges_and_no_other(name: str) -> None:
    run, expected = SCENARIOS[name]
    assert edges(run.trace()) == expected


def test_every_edge_has_a_scenario() -> None:
    """Those of steps in flight and drafts have theirs in test_flights.py, those of loads in test_loads.py and
    test_seeds.py."""
    apart = {*FLIGHT_EDGES, *LOAD_EDGES}
    assert set().union(*(expected for _, expected in SCENARIOS.values())) == set(EDGES) - apart


def test_a_run_that_broke_off_has_the_edges_it_reached() -> None:
    run, _ = SCENARIOS["the same prompt again"]
    trace = run.trace()
    trace.steps.pop()
    assert edges(trace) == set()


@pytest.mark.parametrize(
    ("one", "other", "common"), [("abc", "abd", 2), ("abc", "ab", 2), ("x", "y", 0), ("", "y", 0), ("ab", "ab", 2)]
)
def test_common_prefix(one: str, other: str, common: int) -> None:
    assert common_prefix(letters(one), letters(other)) == common
