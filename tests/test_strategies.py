# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Strategies: what they make is valid and within its profile's limits, shrinks to something readable, and reaches
the edges. Examples are the same in every run: these tests judge the strategies, not vLLM."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, find, given, seed, settings
from hypothesis import strategies as st

from fuzz.case import Case, check, decode, encode
from fuzz.corners import cases_for, with_crowds, with_single_tokens
from fuzz.edges import EDGES, edges
from fuzz.engines.base import Engine
from fuzz.run import run_case
from fuzz.strategies import PROFILES, SMALL_SIZES, Sizes, blocks_needed, cases, replay_start_can_be_null

NEED_WORKER = {"idle-batch-over-cached-blocks"}
"""Edges that a brisk run does not have."""
BEYOND_SMALL = {"replay-start-retired", "replay-in-large-step"}
"""Edges that no small case can reach: they need sizes that do not divide, or more tokens than a small case has."""


def sample(strategy: st.SearchStrategy, count: int) -> list:
    """``count`` examples, always the same ones."""
    made: list = []

    @seed(0)
    @settings(
        max_examples=count, phases=[Phase.generate], database=None, deadline=None, suppress_health_check=HealthCheck
    )
    @given(strategy)
    def collect(value: object) -> None:
        made.append(value)

    collect()
    return made


def smallest(profile: str, condition: Callable[[Case], bool]) -> Case:
    return find(
        cases(profile), condition, settings=settings(database=None, deadline=None, max_examples=2000, derandomize=True)
    )


@pytest.mark.parametrize("profile", PROFILES)
def test_cases_are_valid_and_within_the_limits(profile: str) -> None:
    limits = PROFILES[profile]
    for case in sample(cases(profile), 200):
        check(case)
        assert decode(encode(case)) == case
        assert 1 <= len(case.requests) <= limits.requests
        assert max(map(len, case.requests)) <= limits.prompt
        assert sum(map(len, case.requests)) <= limits.tokens
        assert case.geometry.max_num_seqs <= case.geometry.max_num_batched_tokens <= limits.chunk + 1
        assert case.geometry.long_prefill_token_threshold <= case.max_model_len
        arrivals = [request.arrive for request in case.requests]
        assert arrivals == sorted(arrivals)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_pool_holds_each_request_alone(profile: str) -> None:
    tight = 0
    for case in sample(cases(profile), 200):
        geometry = case.geometry
        sizes = Sizes.of(geometry)
        needed = blocks_needed(sizes, geometry.max_num_batched_tokens, case.max_model_len)
        assert geometry.num_blocks - 1 >= needed
        tight += geometry.num_blocks - 1 < 2 * needed and len(case.requests) > 1
    assert tight >= 40, "pools are too large to evict or preempt"


def retires_replay_start(sizes: Sizes) -> bool:
    """CONTRACT 12, hit by hit, from its first principles: is the block of H - W below the one of H - W + 1?"""
    window, swa = sizes.window, sizes.swa_block_size
    hits = range(sizes.hit_unit, window + sizes.hit_unit * swa + 1, sizes.hit_unit)
    return any((hit - window) // swa < (hit - window + 1) // swa for hit in hits if hit > window)


def test_replay_start_can_be_null_says_what_counting_says() -> None:
    every = [Sizes(window, block, swa) for window in range(1, 20) for block in range(1, 9) for swa in range(1, 9)]
    assert [replay_start_can_be_null(sizes) for sizes in every] == [retires_replay_start(sizes) for sizes in every]


def test_only_wild_sizes_can_retire_the_block_of_replay_start() -> None:
    assert not any(map(retires_replay_start, SMALL_SIZES))
    assert not any(map(retires_replay_start, sample(PROFILES["dsv41"].sizes, 20)))
    wild = sample(PROFILES["wild"].sizes, 200)
    assert 40 <= sum(map(retires_replay_start, wild)) <= 160


def test_the_simplest_case_is_one_short_request() -> None:
    case = smallest("small", lambda case: bool(case.requests))
    geometry = case.geometry
    assert (len(case.requests), case.requests[0].arrive, case.requests[0].max_tokens, case.events) == (1, 0, 1, ())
    assert geometry.window == geometry.block_size == geometry.swa_block_size == 4
    assert geometry.max_num_batched_tokens == PROFILES["small"].chunk
    assert geometry.replay


def test_shrinking_keeps_only_what_matters() -> None:
    def shared(case: Case) -> bool:
        return any(request.prompt[0][0] == "s0" for request in case.requests[1:])

    case = smallest("small", lambda case: shared(case) and any(event.kind == "abort" for event in case.events))
    assert len(case.requests) == 2
    assert [event.kind for event in case.events] == ["abort"]
    assert all(request.max_tokens == 1 for request in case.requests)


@pytest.mark.slow_test
def test_small_cases_reach_every_edge(engine: Engine) -> None:
    reached: dict[str, int] = dict.fromkeys(EDGES, 0)
    for case in sample(cases_for("scheduler", "small"), 2000):
        judged = run_case(engine, case, brisk=True)
        assert not judged.violations, encode(case).decode()
        for edge in judged.edges:
            reached[edge] += 1
    assert {edge for edge, count in reached.items() if not count} == BEYOND_SMALL | NEED_WORKER


@pytest.mark.slow_test
def test_the_other_profiles_reach_the_edges_that_small_cannot(engine: Engine) -> None:
    reached: set[str] = set()
    for profile in ("wild", "dsv41"):
        for case in sample(cases(profile), 100):
            reached |= edges(engine.run(case, brisk=True))
    assert reached >= BEYOND_SMALL


def test_crowds_fit_into_a_step_and_into_a_file():
    crowds = [case for case in sample(with_crowds(cases("small")), 600) if len(case.requests) > 8]
    sizes = set()
    for case in crowds:
        copies = [request for request in case.requests if request.id.startswith("copy")]
        sizes.add(len(copies))
        assert len({request.prompt for request in copies}) == 1
        assert case.geometry.max_num_seqs > len(copies)
        assert case.geometry.max_num_batched_tokens > sum(map(len, copies))
        assert decode(encode(case)) == case
    assert 1030 in sizes
    assert any(4 < size < 9 for size in sizes)  # a chunk of the ROCm layer's prefills has four


def test_chunks_of_one_token_end_with_the_longest_prompt_again():
    made = [
        case for case in sample(with_single_tokens(cases("small")), 900) if case.requests[-1].id.startswith("again")
    ]
    assert {case.geometry.max_num_batched_tokens for case in made} == {1, 2, 3}
    for case in made:
        check(case)
        again = [request for request in case.requests if request.id.startswith("again")]
        assert len(again) == case.geometry.max_num_seqs
        assert len(again[0]) == max(map(len, case.requests))
