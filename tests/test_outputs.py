# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Who computed what a hit adopts, and outputs against arms and oracle: on hand-made traces that a plain model ran."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import traces
from breaks import CACHEABLE, flip, put, table, writes
from plain_model import with_model

from invariants import judge
from invariants.lineage import lineage
from invariants.outputs import drift, mix_blind, output_match, poison_blind
from invariants.trace import Outputs, Trace, Violation
from invariants.view import View

MODEL = ("output-match", "poison-blind", "mix-blind", "cached-bytes")


def found(trace: Trace) -> list[tuple[str, str, str | None, int | None]]:
    """Of the invariants about a model: id, site, request, position."""
    return [(v.invariant, v.site, v.request, v.position) for v in judge(trace) if v.invariant in MODEL]


def outputs(trace: Trace, request: int = 1, arm: str | None = None) -> Outputs:
    found = trace.requests[request].outputs if arm is None else trace.arms[arm][request]
    assert found is not None
    return found


@pytest.fixture
def exact() -> Trace:
    return with_model(traces.prime_then_hit())


@pytest.fixture
def deep() -> Trace:
    return with_model(traces.prime_then_hit(), "deep")


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("kind", ["exact", "deep"])
@pytest.mark.parametrize("name", traces.GOOD)
def test_accepts(name: str, kind, ratio: int):
    assert judge(with_model(traces.GOOD[name](), kind, ratio)) == []


class TestLineage:
    def test_a_hit_adopts_from_the_life_that_computed_it(self):
        """The query's blocks 1 and 2 were written by admission 0 in step 0."""
        assert [one.tolist() for one in lineage(traces.prime_then_hit())] == [[], [0] * 8]

    def test_after_a_preemption_from_its_own_earlier_life(self):
        assert [one.tolist() for one in lineage(traces.preempted_then_hit())] == [[], [0] * 12]

    def test_in_the_same_step(self):
        """Row 0 is the query, row 1 writes what it adopts."""
        assert [one.tolist() for one in lineage(traces.hit_in_the_same_step())] == [[], [0] * 8]

    def test_of_two_lives(self):
        """A third request hits 12: blocks 1 and 2 of the prime, and 10, which the query computed in steps 2 and 3."""
        trace = traces.prime_then_hit()
        trace.admissions.append(replace(trace.admissions[1], step=5, hit=12, replay_start=8, computed=8))
        later = traces.lay(
            replace(trace, steps=[]), [[traces.Row(2, 8, 5, True, 8, [1, 2, 10, 17], [0] * 4 + [18, 19, 20])]]
        )
        trace.steps += later.steps
        assert lineage(trace)[2].tolist() == [0] * 8 + [1] * 4

    def test_what_it_overwrites_itself_is_not_what_it_adopted(self):
        """Step 2: the query writes its replayed position 4 to slot 8, where the prime's was."""
        trace = traces.prime_then_hit()
        put(writes(trace, CACHEABLE).slot, 1, 8)
        assert lineage(trace)[1].tolist() == [0] * 8

    def test_the_last_writer_counts(self):
        """Step 1: position 8 of the prime goes to slot 9, where its position 5 was."""
        trace = traces.prime_then_hit()
        put(writes(trace, CACHEABLE, step=1).slot, 0, 9)
        assert lineage(trace)[1].tolist() == [0] * 5 + [-1] + [0] * 2

    def test_what_was_padded_was_not_written(self):
        trace = traces.prime_then_hit()
        put(writes(trace, CACHEABLE, step=0).slot, 3, -1)
        assert lineage(trace)[1].tolist() == [0] * 3 + [-1] + [0] * 4

    @pytest.mark.parametrize("block", [0, 7, 31, 1000, -3])
    def test_another_block_in_the_table(self, block: int):
        """Block 2 is needed. Block 7 holds the prime's positions 8 and 9, the others nothing."""
        trace = traces.prime_then_hit()
        put(table(trace, CACHEABLE, 1), 1, block)
        assert lineage(trace)[1].tolist() == [0] * 4 + [-1] * 4

    def test_a_table_too_short(self):
        trace = traces.prime_then_hit()
        trace.steps[2].tables[CACHEABLE][1] = traces.ints(1)
        assert lineage(trace)[1].tolist() == [0] * 4 + [-1] * 4

    def test_no_tables_no_groups(self):
        trace = traces.prime_then_hit()
        for step in trace.steps:
            step.tables = []
        assert lineage(trace)[1].tolist() == [-1] * 8
        trace.groups = []
        assert lineage(trace)[1].tolist() == [-1] * 8


class TestNoCache:
    def test_the_first_difference_is_told(self, exact: Trace):
        """The query has 13 tokens: its second output is for position 14."""
        arm = outputs(exact, arm="no-cache")
        flip(arm.logprobs, 1, 0)
        flip(arm.logprobs, 1, 2)
        (violation,) = output_match(View(exact))
        assert (violation.site, violation.request, violation.position) == ("no-cache", "query", 14)
        assert "logprob 0 for position 14" in violation.message
        assert "2 values differ" in violation.message
        # One bit apart, and told apart.
        assert violation.expected != violation.seen

    def test_prompt_logprobs(self, exact: Trace):
        """Row 3 is about position 4."""
        put(outputs(exact, 0, "no-cache").prompt_ids, (3, 1), -7)  # type: ignore[arg-type]
        assert found(exact) == [("output-match", "no-cache", "prime", 4)]

    def test_a_prompt_logprob_is_missing(self, exact: Trace):
        arm = outputs(exact, 0, "no-cache")
        arm.prompt_ids = arm.prompt_logprobs = None
        assert found(exact) == [("output-match", "no-cache", "prime", 1)]

    def test_an_output_is_missing(self, exact: Trace):
        arm = outputs(exact, arm="no-cache")
        arm.tokens, arm.ids, arm.logprobs = arm.tokens[:1], arm.ids[:1], arm.logprobs[:1]
        assert found(exact) == [("output-match", "no-cache", "query", 14)]
        exact.requests[1].finished = "abort"
        assert list(output_match(View(exact))) == []
        flip(arm.logprobs, 0, 1)
        assert [v.position for v in output_match(View(exact))] == [13]

    def test_other_columns(self, exact: Trace):
        arm = outputs(exact, arm="no-cache")
        arm.ids, arm.logprobs = arm.ids[:, :2], arm.logprobs[:, :2]
        assert found(exact) == [("output-match", "no-cache", "query", 13)]

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_no_number_is_equal_to_nothing(self, exact: Trace, value: float):
        for arm in (None, *exact.arms):
            outputs(exact, arm=arm).logprobs[0, 0] = value
        assert found(exact) == [
            ("poison-blind", "twice", "query", 13),
            ("poison-blind", "poison", "query", 13),
            ("mix-blind", "alone", "query", 13),
            ("output-match", "no-cache", "query", 13),
            ("output-match", "dense", "query", 13),
        ]

    def test_signed_zeros_differ(self, exact: Trace):
        for arm in (None, "twice", "poison"):
            outputs(exact, arm=arm).logprobs[0, 1] = 0.0
        outputs(exact, arm="twice").logprobs[0, 1] = -0.0
        assert [v.site for v in poison_blind(View(exact))] == ["twice"]

    def test_a_hit_of_the_deep_probe_may_drift(self, deep: Trace):
        mine, arm = outputs(deep), outputs(deep, arm="no-cache")
        assert not np.array_equal(mine.logprobs, arm.logprobs)
        assert found(deep) == []
        # The prime had no hit, so it may not.
        flip(outputs(deep, 0).logprobs, 2, 0)
        assert ("output-match", "no-cache", "prime", 12) in found(deep)

    def test_before_its_hit_a_preempted_request_may_not_drift(self):
        """The first output, of position 13, was sampled before the hit; the second one after it."""
        trace = with_model(traces.preempted_then_hit(), "deep")
        assert found(trace) == []
        flip(outputs(trace, 0, "no-cache").logprobs, 0, 0)
        assert found(trace) == [("output-match", "no-cache", "lone", 13)]

    def test_without_replay_nothing_may_drift(self):
        trace = with_model(traces.replay_off(), "deep")
        flip(outputs(trace, arm="no-cache").logprobs, 0, 0)
        assert found(trace) == [("output-match", "no-cache", "query", 10)]

    def test_not_comparable(self, exact: Trace):
        flip(outputs(exact).logprobs, 0, 0)
        for arm in exact.arms.values():
            arm[1] = None
        assert found(exact) == []
        exact.requests[1].outputs = None
        assert found(exact) == []

    def test_arms_that_were_not_run(self, exact: Trace):
        flip(outputs(exact).logprobs, 0, 0)
        exact.arms = {}
        assert found(exact) == []

    def test_no_model_no_outputs(self, exact: Trace):
        outputs(exact).logprobs[:] = 5
        exact.probe = None
        assert found(exact) == []


def off(trace: Trace) -> list[Violation]:
    trace.arms = {}
    return list(output_match(View(trace)))


class TestDense:
    @pytest.fixture(params=["exact", "deep"])
    def trace(self, request: pytest.FixtureRequest) -> Trace:
        return with_model(traces.prime_then_hit(), request.param)

    def test_a_logprob(self, trace: Trace):
        outputs(trace).logprobs[1, 2] += np.float32(2e-3)
        (violation,) = off(trace)
        assert (violation.site, violation.request, violation.position) == ("dense", "query", 14)
        assert "1 values are off" in violation.message
        assert float(violation.seen) - float(violation.expected) == pytest.approx(2e-3, abs=1e-4)

    def test_within_rounding(self, trace: Trace):
        outputs(trace).logprobs[:] += np.float32(2e-4)
        assert off(trace) == []

    def test_a_prompt_logprob(self, trace: Trace):
        put(outputs(trace, 0).prompt_ids, (8, 1), 999)  # type: ignore[arg-type]
        assert [(v.request, v.position) for v in off(trace)] == [("prime", 9)]

    def test_a_token_that_is_not_the_best(self, trace: Trace):
        """The last token, so that nothing follows from it, with its own logprob."""
        mine = outputs(trace)
        mine.tokens[1] = mine.ids[1, 0] = mine.ids[1, 2]
        mine.logprobs[1, 0] = mine.logprobs[1, 2]
        (violation,) = off(trace)
        assert (violation.position, "best logprob" in violation.message) == (14, True)

    @pytest.mark.parametrize("token", [-1, 1003, 1 << 30])
    def test_a_token_that_is_none(self, trace: Trace, token: int):
        outputs(trace).ids[0, 1] = token
        assert [(v.request, v.position, v.expected) for v in off(trace)] == [("query", 13, "nan")]
        outputs(trace).tokens[0] = token
        assert off(trace)[0].position == 13

    def test_a_window_that_begins_one_late(self):
        """Another bound gives other outputs by far more than the tolerance: the model ran with replay_start 5."""
        late = traces.prime_then_hit()
        late.admissions[1].replay_start = 5
        trace = with_model(late, "deep")
        trace.admissions[1].replay_start = 4
        assert [(v.site, v.request) for v in off(trace)] == [("dense", "query")]

    def test_no_hit_where_there_was_one(self):
        """A deep hit is not a cold run, and the oracle tells them apart."""
        trace = with_model(traces.prime_then_hit(), "deep")
        trace.requests[1].outputs = trace.arms["no-cache"][1]
        assert [(v.site, v.request) for v in off(trace)] == [("dense", "query")]

    @pytest.mark.parametrize(
        "break_it",
        [
            pytest.param(lambda t: put(table(t, CACHEABLE, 1), 1, 7), id="another block"),
            pytest.param(lambda t: put(writes(t, CACHEABLE, step=0).slot, 3, -1), id="never written"),
            pytest.param(lambda t: put(t.requests[0].prompt, 2, 7), id="other tokens"),
        ],
    )
    def test_states_that_nobody_owes(self, break_it: Callable[[Trace], None]):
        trace = with_model(traces.prime_then_hit(), "deep")
        break_it(trace)
        violation = off(trace)[-1]
        assert (violation.request, "computed" in violation.message or "compute" in violation.message) == ("query", True)

    def test_a_life_that_was_aborted_early(self):
        """After step 2 the query has computed 4..10 and sampled nothing."""
        trace = with_model(traces.prime_then_hit(), "deep")
        for step in trace.steps[3:]:
            keep = step.request == 0
            step.request, step.admission = step.request[keep], step.admission[keep]
            step.computed, step.scheduled = step.computed[keep], step.scheduled[keep]
            step.prefill, step.replay_start = step.prefill[keep], step.replay_start[keep]
        mine = outputs(trace)
        mine.tokens, mine.ids, mine.logprobs = mine.tokens[:0], mine.ids[:0], mine.logprobs[:0]
        trace.requests[1].finished = "abort"
        assert list(output_match(View(trace))) == []


class TestMixBlind:
    def test_another_hit_is_not_comparable(self, exact: Trace):
        flip(outputs(exact, arm="alone").logprobs, 0, 0)
        assert [v.request for v in mix_blind(View(exact))] == ["query"]
        outputs(exact, arm="alone").hit = 4
        assert list(mix_blind(View(exact))) == []

    def test_nor_are_two_lives(self):
        trace = with_model(traces.preempted_then_hit())
        flip(outputs(trace, 0, "alone").logprobs, 0, 0)
        assert list(mix_blind(View(trace))) == []

    @pytest.mark.parametrize(("budget", "comparable"), [(8, False), (7, True), (4, True)])
    def test_nor_are_other_trimmed_chunks(self, budget: int, comparable: bool):
        """The query's are 7 and 2 tokens long: its own in steps of 7. In steps of W = 4, none would be trimmed."""
        trace = with_model(traces.prime_then_hit(), "decoder")
        flip(outputs(trace, arm="alone").logprobs, 0, 0)
        trace.geometry = msgspec.structs.replace(trace.geometry, max_num_batched_tokens=budget)
        assert [v.request for v in mix_blind(View(trace))] == ["query"] * comparable

    def test_nor_is_a_deep_hit_of_what_a_hit_computed(self, deep: Trace):
        flip(outputs(deep, arm="alone").logprobs, 0, 0)
        assert [v.request for v in mix_blind(View(deep))] == ["query"]
        deep.admissions[0].hit = 8
        assert list(mix_blind(View(deep))) == []
        deep.admissions[0].hit = 0
        put(table(deep, CACHEABLE, 1), 1, 7)
        assert list(mix_blind(View(deep))) == []


def test_drift(exact: Trace, deep: Trace):
    """The query's outputs: 0.25 apart in the first, of an id at another place; its second token differs already."""
    assert drift(exact).tolist() == [0.0]
    assert 1e-4 < drift(deep)[0] < 1
    mine, arm = outputs(exact), outputs(exact, arm="no-cache")
    arm.ids[0] = [1, 2, 3]
    mine.ids[0] = [2, 1, 4]
    arm.logprobs[0] = [-1, -2, -3]
    mine.logprobs[0] = [-2.25, -1, -3]
    assert drift(exact).tolist() == [0.25]
    arm.logprobs[1] += 0.5
    assert drift(exact) == pytest.approx([0.5])
    arm.tokens[0] += 1
    assert drift(exact).tolist() == [0.25]
    mine.logprobs[0, 2] = -2.5  # of id 4, which the arm does not list: so it has at most -3 there
    assert drift(exact).tolist() == [0.5]
    mine.logprobs[0, 2] = -5  # and of id 3, which the arm gives -3
    assert drift(exact).tolist() == [2]


def test_cached_bytes(exact: Trace):
    put(exact.cached[0].after, 1, 13)
    (violation,) = judge(exact)
    text = str(violation)
    for part in ("cached-bytes", "block 2", "group 0", "since step 1", "after step 4", f"{12:016x}", f"{13:016x}"):
        assert part in text
