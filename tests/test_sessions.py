# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Sessions: requests that continue earlier ones, with their output, on the engines with vLLM's scheduler."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st
from test_strategies import sample

from fuzz.case import Case, CaseError, Event, Request, check, decode, encode
from fuzz.corners import with_turns
from fuzz.engines.base import Engine
from fuzz.strategies import cases
from invariants import judge
from invariants.trace import Geometry, Probe

SIZES = Geometry(window=4, block_size=4, swa_block_size=2, num_blocks=40, max_num_batched_tokens=8, max_num_seqs=4)
ONE = Request(id="one", arrive=0, prompt=(("s", 0, 9),), max_tokens=10)
TWO = Request(id="two", arrive=0, prompt=(("t", 0, 3),), max_tokens=2, continues="one")


def session(*requests: Request, events: tuple[Event, ...] = ()) -> Case:
    return Case(geometry=SIZES, requests=requests, events=events)


def test_a_second_turn_asks_the_first_ones_prompt_and_output(engine: Engine) -> None:
    trace = engine.run(session(ONE, TWO))
    assert judge(trace) == []
    one, two = trace.requests
    np.testing.assert_array_equal(two.prompt, [*ONE.tokens(), *one.output, *TWO.tokens()])
    # The first turn computes [0, 9) in steps 0 and 1, and a token in each of steps 2 to 10.
    assert (one.continues, two.continues, two.arrive) == (None, 0, 11)
    # Of its 19 tokens the last has no KV, so 16 can be hit: 9 of the prompt, 7 of the output.
    assert [(life.tokens, life.hit, life.replay_start) for life in trace.admissions] == [(9, 0, 0), (22, 16, 12)]


def test_a_turn_waits_for_its_step_and_for_the_turn_before(engine: Engine) -> None:
    late = Request(id="late", arrive=30, prompt=(("u", 0, 1),), continues="one")
    trace = engine.run(session(ONE, late, TWO))
    assert judge(trace) == []
    assert [request.arrive for request in trace.requests] == [0, 30, 11]


def test_what_an_aborted_turn_had_is_continued(engine: Engine) -> None:
    trace = engine.run(session(ONE, TWO, events=(Event(step=4, kind="abort", request="one"),)))
    assert judge(trace) == []
    one, two = trace.requests
    assert (one.finished, len(one.output), len(two.prompt)) == ("abort", 3, 9 + 3 + 3)


def test_lengths_are_those_of_whole_prompts() -> None:
    three = Request(id="three", arrive=0, prompt=(("u", 0, 1),), max_tokens=5, continues="two")
    case = session(ONE, TWO, three)
    assert case.max_lengths == [9 + 10, 19 + 3 + 2, 24 + 1 + 5]
    assert case.max_model_len == 30
    assert decode(encode(case)) == case


@pytest.mark.parametrize(
    ("requests", "path"),
    [
        ((TWO, ONE), r"no request before is called 'one' - at `\$.requests\[0\].continues`"),
        ((ONE, Request(id="own", arrive=0, prompt=(("t", 0, 1),), continues="own")), "no request before"),
        (
            (ONE, *(Request(id=f"r{n}", arrive=0, prompt=(("t", 0, 1),), continues=f"r{n - 1}" if n else "one")
                    for n in range(4))),
            r"turn 5 of a session; at most 4 - at `\$.requests\[4\].continues`",
        ),
    ],
    ids=["later", "itself", "fifth"],
)  # fmt: skip
def test_a_turn_that_means_nothing(requests: tuple[Request, ...], path: str) -> None:
    with pytest.raises(CaseError, match=path):
        check(session(*requests))


def test_one_generated_case_in_ten_has_a_session() -> None:
    made = sample(with_turns(cases("small")), 600)
    continued = [case for case in made if any(request.id.startswith("turn") for request in case.requests)]
    assert 15 <= len(continued) <= 120
    for case in continued:
        check(case)


def test_a_session_leaves_the_threshold_within_the_longest_request() -> None:
    """vLLM refuses one beyond; a request that is continued may have fewer output tokens than it had."""
    sizes = msgspec.structs.replace(SIZES, max_num_batched_tokens=40, long_prefill_token_threshold=32)
    one = msgspec.structs.replace(ONE, prompt=(("s", 0, 22),))
    made = sample(with_turns(st.just(Case(geometry=sizes, requests=(one,)))), 200)
    assert any(case.max_model_len < 32 for case in made)
    assert all(case.geometry.long_prefill_token_threshold <= case.max_model_len for case in made)


@pytest.mark.parametrize("kind", ["exact", "deep", "decoder"])
def test_a_model_is_asked_its_own_output(kind: str, open_engine: Callable[[str], Engine]) -> None:
    """And every arm is asked the same, also where its own output would be another one."""
    case = session(ONE, TWO, Request(id="three", arrive=0, prompt=(("u", 0, 9),), max_tokens=3, continues="two"))
    probe = Probe(kind=kind, layers=3)  # type: ignore[arg-type]
    trace = open_engine("cpu").run(Case(geometry=SIZES, requests=case.requests, probe=probe))
    assert judge(trace) == []
    assert [life.hit for life in trace.admissions] == [0, 16, 20]
    np.testing.assert_array_equal(trace.requests[2].prompt[:22], trace.requests[1].prompt)
    assert {"no-cache", "twice", "poison", "alone"} <= set(trace.arms)
    assert [outputs and outputs.hit for outputs in trace.arms["alone"]] == [0, 16, 20]
