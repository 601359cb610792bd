# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The known findings cover what they explain, and nothing beside it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from fuzz import corpus, known
from fuzz.case import Case
from fuzz.engines.base import Engine
from invariants import judge
from invariants.trace import NULL_BLOCK, Trace
from invariants.view import View

OUTPUTS = {"output-match", "poison-blind"}


def case_of(slug: str) -> Case:
    """The first case of that name which the scheduler engine has."""
    return corpus.read(min(corpus.folder("scheduler", "known").glob(f"{slug}-????????.json")))


@pytest.fixture(scope="module")
def shared(open_engine: Callable[[str], Engine]) -> Trace:
    """Two requests that replay from one slot of the null block: the outputs of one are wrong."""
    (path,) = corpus.files(corpus.folder("cpu", "known"))
    return open_engine("cpu").run(corpus.read(path))


def test_wrong_outputs_are_its_consequence(shared: Trace):
    news, old = known.split(judge(shared), shared)
    assert not news
    assert {violation.invariant for violation in old["null-replay-block"]} >= OUTPUTS | {"gather-live", "write-fence"}


def test_wrong_outputs_beside_another_null_block_are_news(shared: Trace):
    """Of the hit, as a table would be that has lost the block of its last tokens."""
    group = next(i for i, spec in enumerate(shared.groups) if spec.kind == "window")
    before = [step.tables[group] for step in shared.steps]
    found = judge(shared)
    try:
        for step in shared.steps:
            step.tables[group] = [table.copy() for table in step.tables[group]]
            for table in step.tables[group]:
                table[-1] = NULL_BLOCK
        news, old = known.split(found, shared)
    finally:
        for step, tables in zip(shared.steps, before, strict=True):
            step.tables[group] = tables
    assert not old
    assert {violation.invariant for violation in news} >= OUTPUTS


def test_wrong_outputs_of_a_request_that_replays_from_elsewhere_are_news(shared: Trace):
    wrong = [violation for violation in judge(shared) if violation.invariant in OUTPUTS]
    cold = next(request.id for request in shared.requests if request.id.startswith("prime"))
    for violation in wrong:
        object.__setattr__(violation, "request", cold)
    news, old = known.split(wrong, shared)
    assert news == wrong
    assert not old


@pytest.fixture
def withdrawn(engine: Engine) -> Trace:
    """A request adopts a block of a chunk of its own that had been withdrawn."""
    return engine.run(case_of("withdrawn-chunk-cached"), brisk=True)


def test_a_hit_on_a_withdrawn_chunk_is_known(withdrawn: Trace):
    news, old = known.split(judge(withdrawn), withdrawn)
    assert not news
    assert {violation.site for violation in old["withdrawn-chunk-cached"]} == {"hit", "adopted block"}


def test_without_a_withdrawal_by_priority_it_is_news(withdrawn: Trace):
    for request in withdrawn.requests:
        request.priority = None
    news, old = known.split(judge(withdrawn), withdrawn)
    assert news
    assert not old


def test_a_hit_on_what_was_computed_but_is_gone_is_news(withdrawn: Trace):
    """Position 0 was computed long before the chunk was withdrawn: that it is not there is another matter."""
    found = judge(withdrawn)
    for step in withdrawn.steps:
        for writes in step.writes:
            writes.slot = writes.slot.copy()
    first = withdrawn.steps[0].writes[0]
    first.slot[0] = -1
    assert View(withdrawn).lineage[2][0] < 0
    news, _ = known.split(found, withdrawn)
    assert news == found


@pytest.fixture
def loaded(engine: Engine) -> Trace:
    """The last token of a prompt that was loaded as a whole reads a position that has no block."""
    return engine.run(case_of("whole-prompt-loaded"), brisk=True)


def test_the_one_position_that_a_load_of_a_whole_prompt_has_no_block_for_is_known(loaded: Trace):
    news, old = known.split(judge(loaded), loaded)
    assert not news
    assert {(violation.step, violation.position) for violation in old["whole-prompt-loaded"]} == {(1, 5)}


LOAD_CHANGES: dict[str, Callable[[Trace], object]] = {
    "of all tokens but the last": lambda trace: setattr(trace.admissions[0], "tokens", 8),
    "without its window": lambda trace: setattr(trace.admissions[0].load, "carried", False),
    "that is sync": lambda trace: setattr(trace.admissions[0].load, "waits", False),
    "beside another null block": lambda trace: trace.steps[1].tables[1][0].put(3, NULL_BLOCK),
}


@pytest.mark.parametrize("name", LOAD_CHANGES)
def test_the_null_block_after_another_load_is_another_matter(loaded: Trace, name: str):
    found = judge(loaded)
    LOAD_CHANGES[name](loaded)
    _, old = known.split(found, loaded)
    assert found
    assert "whole-prompt-loaded" not in old


def test_a_null_block_that_ends_further_on_is_another_matter(engine: Engine):
    """W = 1 and b = 4: the last of 8 tokens is the last of its block, that of 7 tokens is not."""
    case = case_of("whole-prompt-loaded-window-of-one")
    (request,) = case.requests
    (piece,) = request.prompt
    seven = replace(request, prompt=((piece[0], piece[1], piece[2] - 1),), load=replace(request.load, tokens=7))
    trace = engine.run(replace(case, requests=(seven,)), brisk=True)
    assert judge(trace) == []
    window = next(index for index, group in enumerate(trace.groups) if group.kind == "window")
    trace.steps[-1].tables[window][0][-1] = NULL_BLOCK
    found = judge(trace)
    assert {violation.position for violation in found if violation.invariant == "gather-live"} == {6}
    assert "whole-prompt-loaded" not in known.split(found, trace)[1]


def test_a_load_begun_anew_is_known_where_one_token_is_all_that_is_known(engine: Engine):
    trace = engine.run(case_of("one-token-loaded-again"))
    found = judge(trace)
    assert known.split(found, trace)[0] == []
    for life in trace.admissions:
        life.tokens = life.hit = 2
    assert known.split(found, trace)[0] == found


def test_a_load_that_is_not_begun_anew_explains_nothing(engine: Engine):
    trace = engine.run(case_of("one-token-loaded-again"))
    found = judge(trace)
    for life in trace.admissions[1:]:
        life.load = None
    assert known.split(found, trace)[0] == found


def test_a_hang_is_known_only_where_a_load_is_there_and_unused(engine: Engine):
    trace = engine.run(case_of("load-stranded"))
    found = judge(trace)
    assert known.split(found, trace)[0] == []
    for life in trace.admissions:
        life.load.failed = True
    assert [violation.site for violation in known.split(found, trace)[0]] == ["hang"]
