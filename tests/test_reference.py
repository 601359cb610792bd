# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The reference against numbers worked out by hand, or published."""

from __future__ import annotations

import numpy as np
import pytest
import traces
from msgspec import UNSET
from traces import Row

from invariants import reference
from invariants.reference import Prediction, hit_multiple, predict
from invariants.trace import Admission, Trace

W = 4


@pytest.mark.parametrize(
    ("prefix", "published"), [(1920, 15_360), (2048, 16_384), (2176, 17_408), (4096, 32_768)], ids=str
)
def test_published_sweep(prefix: int, published: int):
    """8 replicas, prefix + 128 tokens asked twice, block 128: the replay-on column."""
    assert 8 * reference.full_hit(prefix + 128, prefix + 128, 128) == published


@pytest.mark.parametrize(
    ("common", "tokens", "hit", "published"),
    [(3027, 3027, 2944, 23_552), (1800, 1827, 1792, 14_336)],
    ids=["vault code", "vault code, part of the prefix"],
)
def test_published_vault_code(common: int, tokens: int, hit: int, published: int):
    assert reference.full_hit(common, tokens, 128) == hit
    assert 8 * hit == published


@pytest.mark.parametrize(
    ("common", "tokens", "hit"),
    [(12, 12, 8), (13, 13, 12), (12, 13, 12), (11, 13, 8), (3, 13, 0), (1, 1, 0)],
)
def test_full_hit_leaves_a_token_and_ends_on_a_block(common: int, tokens: int, hit: int):
    assert reference.full_hit(common, tokens, 4) == hit


@pytest.mark.parametrize(
    ("found", "hit", "start", "computed", "left"),
    [
        (0, 0, 0, 0, 20),
        (3, 0, 0, 0, 20),
        (4, 0, 0, 0, 20),  # H == W: recomputed in full anyway
        (5, 5, 1, 1, 19),
        (8, 8, 4, 4, 16),
        (16, 16, 12, 12, 8),
    ],
)
def test_what_follows_from_a_hit_of_20_tokens(found: int, hit: int, start: int, computed: int, left: int):
    """CONTRACT 4, 5."""
    assert reference.adopted_hit(found, W) == hit
    assert reference.replay_start(hit, W) == start
    assert reference.computed_tokens(hit, W) == computed
    assert reference.tokens_left(20, hit, W) == left


@pytest.mark.parametrize("hit", [0, 3, 4, 8])
def test_without_replay_a_hit_is_just_computed(hit: int):
    assert reference.adopted_hit(hit, 0) == hit
    assert reference.replay_start(hit, 0) == 0
    assert reference.computed_tokens(hit, 0) == hit
    assert reference.tokens_left(20, hit, 0) == 20 - hit


def test_window_of_each_query_after_a_replay_from_4():
    positions = np.arange(4, 10)
    assert reference.window_first(positions, 4, W).tolist() == [4, 4, 4, 4, 5, 6]
    assert reference.window_first(2, 0, W) == 0


@pytest.mark.parametrize(
    ("first", "queries", "floor", "length"),
    [
        (0, 8, 0, 8),  # nothing before
        (8, 2, 0, 5),  # 5..9
        (4, 7, 4, 7),  # the replay itself: nothing below its start
        (6, 3, 4, 5),  # second chunk of a replay: 4..8
        (11, 2, 4, 5),  # out of the replay's reach: 8..12
    ],
)
def test_gather_length(first: int, queries: int, floor: int, length: int):
    assert reference.gather_length(first, queries, floor, W) == length


@pytest.mark.parametrize(
    ("hit", "window", "block", "null"),
    [
        (96, 33, 16, True),  # CONTRACT 12: W=33, b=16, P=100
        (96, 17, 16, True),
        (192, 33, 32, True),  # W=33, b=32, B=64, P=200
        (96, 32, 16, False),
        (2944, 128, 32, False),
        (255, 128, 128, True),  # review of PR 56227: an external hit one token short of a block
        (32, 33, 16, False),  # not adopted: nothing is replayed
    ],
)
def test_null_replay_block(hit: int, window: int, block: int, null: bool):
    assert reference.replay_block_is_null(hit, window, block) is null


def test_contract_12_numbers():
    hit = reference.full_hit(100, 100, 16)
    assert (hit, reference.replay_start(hit, 33)) == (96, 63)


@pytest.mark.parametrize(
    ("make", "hits"),
    [
        (traces.prime_then_hit, [0, 8]),
        (traces.preempted_then_hit, [0, 12]),  # 12 of 14 known tokens: its first output token counts as one of them
        (traces.hit_in_the_same_step, [0, 8]),
    ],
)
def test_predicted_hits(make, hits: list[int]):
    assert predict(make()) == [Prediction(hit, hit, "", None) for hit in hits]


def lives(*prompts: list[int], hits: tuple[int, ...]) -> Trace:
    """One request a prompt, admitted one a step, with those hits; each samples one token."""
    return traces.trace_of(
        [traces.request(f"r{n}", n, prompt, [900 + n]) for n, prompt in enumerate(prompts)],
        [
            Admission(
                step=n,
                request=n,
                tokens=len(prompt),
                hit=hit,
                replay_start=max(hit - W, 0),
                computed=max(hit - W, 0),
                scheduled=len(prompt) - max(hit - W, 0),
                resumed=False,
            )
            for n, (prompt, hit) in enumerate(zip(prompts, hits, strict=True))
        ],
    )


SHARED = list(range(100, 113))  # three full blocks of 4


def shared_thrice(second_window: list[int]) -> Trace:
    """r0 caches SHARED in blocks 1, 2, 3; r1, of other tokens, gets the window blocks given; r2 is SHARED again."""
    trace = lives(SHARED, [1, 2, 3, 4, 5], [*SHARED, 50], hits=(0, 0, 12))
    return traces.lay(
        trace,
        [
            [Row(0, 0, 13, True, 0, [1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11])],
            [Row(1, 0, 5, True, 0, [12, 13], second_window)],
            [Row(2, 8, 6, True, 8, [1, 2, 3, 14], [0, 0, 0, 0, 15, 16, 17])],
        ],
    )


@pytest.mark.parametrize(
    ("second_window", "hit"),
    [
        ([4, 5, 6], 12),  # only blocks that held nothing cached
        ([3, 4, 5], 8),  # block 3 handed out: its tokens 8..11 are lost
        ([3, 2, 4], 4),
        ([4, 5, 1], 0),  # the first block is lost, so nothing can be hit
    ],
)
def test_a_block_handed_out_again_is_lost(second_window: list[int], hit: int):
    last = predict(shared_thrice(second_window))[-1]
    assert (last.low, last.high, last.doubt) == (hit, hit, "")
    # The trace's admission claims 12 tokens: the first block adopted that does not hold them is named.
    assert last.stranger == (None if hit == 12 else hit // 4)


def test_reset_empties_the_cache():
    trace = shared_thrice([4, 5, 6])
    trace.steps[2].events = ["reset_prefix_cache"]
    assert predict(trace)[-1] == Prediction(0, 0, "", 0)


def test_dropped_blocks_leave_bounds_until_someone_adopts_them():
    trace = shared_thrice([4, 5, 6])
    trace.steps[2].events = ["drop_blocks"]
    found = predict(trace)[-1]
    assert (found.low, found.high) == (0, 12)
    assert "drop_blocks" in found.doubt
    # r3, the same again: what r2 adopted was there, so it still is.
    trace.requests.append(traces.request("r3", 3, SHARED, [1]))
    trace.admissions.append(Admission(3, 3, 13, 12, 8, 8, 5, False))
    steps = [[Row(3, 8, 5, True, 8, [1, 2, 3, 20], [0, 0, 0, 0, 21, 22, 23])]]
    later = traces.lay(traces.trace_of(trace.requests, trace.admissions), steps).steps[0]
    trace.steps.append(later)
    assert predict(trace)[-1] == Prediction(12, 12, "", None)


def test_by_priority_a_withdrawn_chunk_may_have_taken_any_block():
    trace = shared_thrice([4, 5, 6])
    trace.steps[2].preempted = [0]
    assert predict(trace)[-1] == Prediction(12, 12, "", None)
    trace.requests[0].priority = 1
    found = predict(trace)[-1]
    assert (found.low, found.high) == (0, 12)
    assert "withdrawn" in found.doubt


def test_blocks_cached_after_a_drop_are_certain():
    trace = shared_thrice([4, 5, 6])
    trace.steps[0].events = ["drop_blocks"]
    assert predict(trace)[-1] == Prediction(12, 12, "", None)


def test_two_blocks_with_the_same_tokens_are_lost_only_together():
    """5 common tokens: a hit of 4 is not adopted, so r1 caches the same tokens in a block of its own."""
    five = SHARED[:5]
    trace = lives(five, [*five, 50], [1, 2, 3], [*five, 51], [7, 8, 9], [*five, 52], hits=(0,) * 6)
    traces.lay(
        trace,
        [
            [Row(0, 0, 5, True, 0, [1, 2], [3, 4, 5])],
            [Row(1, 0, 6, True, 0, [6, 7], [8, 9, 10])],
            [Row(2, 0, 3, True, 0, [11], [1, 12])],  # block 1 is gone, block 6 still holds the tokens
            [Row(3, 0, 6, True, 0, [13, 14], [15, 16, 17])],
            [Row(4, 0, 3, True, 0, [6], [13, 18])],  # blocks 6 and 13 are gone
            [Row(5, 0, 6, True, 0, [19, 20], [21, 22, 23])],
        ],
    )
    assert [(p.low, p.high) for p in predict(trace)] == [(n, n) for n in (0, 4, 0, 4, 0, 0)]


def test_a_block_counts_from_the_chunk_that_fills_it():
    """r0 is cut into 6 + 7 tokens, so in step 0 only its first block is full; r1 comes too early for the second."""
    trace = lives(SHARED, [*SHARED, 50], hits=(0, 0))
    trace.admissions[0].scheduled = 6
    traces.lay(
        trace,
        [
            [Row(0, 0, 6, True, 0, [1, 2], [3, 4, 5])],
            [
                Row(1, 0, 2, True, 0, [6], [7]),
                Row(0, 6, 7, True, 0, [1, 2, 8, 9], [0, 4, 5, 10, 11, 12, 13]),
            ],
        ],
    )
    # A running request is scheduled before an admission of the same step, wherever the worker puts its row.
    assert [(p.low, p.high) for p in predict(trace)] == [(0, 0), (12, 12)]
    trace.steps[1].scheduled[1] = 1  # up to 7 tokens: the second block is not full yet
    assert predict(trace)[1].high == 4


def test_hits_end_on_multiples_of_every_groups_block():
    trace = shared_thrice([4, 5, 6])
    trace.groups[traces.WINDOW].block_size = 8
    assert hit_multiple(trace) == 8
    assert predict(trace)[-1].high == 8


def test_without_block_tables_only_an_upper_bound_is_known():
    trace = shared_thrice([3, 2, 1])
    for step in trace.steps:
        step.tables = []
    found = predict(trace)[-1]
    assert (found.low, found.high, found.stranger) == (0, 12, None)
    assert "tables" in found.doubt


@pytest.mark.parametrize(
    ("prompt", "low", "high"),
    [
        (range(100, 109), 8, 8),  # sent again: the window before its last boundary, 8, is kept
        (range(100, 120), 8, 8),
        (range(100, 108), 0, 4),  # 7 tokens may be hit, so 4; nobody promised to keep the window before 4
        ([*range(100, 105), 1, 2, 3, 4], 0, 4),  # the same where they differ from 5 on
    ],
    ids=str,
)
def test_without_replay_a_prompt_sent_again_hits(prompt: range | list[int], low: int, high: int):
    trace = traces.replay_off()
    trace.requests[1].prompt = traces.ints(*prompt)
    trace.admissions[1].tokens = len(prompt)
    found = predict(trace)[-1]
    assert (found.low, found.high) == (low, high)
    assert "window group" in found.doubt


def test_without_replay_a_lost_window_is_no_promise():
    trace = traces.replay_off()
    trace.steps[2].events = ["drop_blocks"]
    assert (predict(trace)[-1].low, predict(trace)[-1].high) == (0, 8)


def test_decoder_side_replay_by_hand():
    """W = 4. A cold chunk of 9 keeps 5 to 8; one of 4 is kept; a decode, and a request that wants every row, are."""
    rows = (
        (0, 9, 21, False, 0),
        (9, 4, 21, False, 0),
        (21, 1, 21, False, 0),
        (0, 9, 21, True, 0),
        (12, 9, 21, False, 12),
    )
    trimmed = [bool(reference.trimmed_rows(*row[:4], 4)) for row in rows]
    assert trimmed == [True, False, False, False, True]
    ends = [row[0] + row[1] for row in rows]
    floors = [
        int(reference.decoder_floor(row[4], end, cut, 4)) for row, end, cut in zip(rows, ends, trimmed, strict=True)
    ]
    assert floors == [5, 0, 0, 0, 17]
    # A replay that starts within the last window of its chunk: the later bound holds.
    assert int(reference.decoder_floor(18, 21, True, 4)) == 18


@pytest.mark.parametrize(("interval", "low"), [(UNSET, 0), (0, 0), (None, 4), (4, 4), (8, 0)])
def test_without_replay_a_retention_interval_keeps_more_windows(interval: int | None, low: int):
    """The prime of 9 tokens keeps the window before 8. A prompt of 8 may hit 4, before which intervals of 4 keep one:
    positions 1 to 3, in its window blocks 0 and 1."""
    trace = traces.replay_off()
    trace.geometry = traces.geometry(replay=False, retention=interval)
    trace.requests[1].prompt = traces.ints(*range(100, 108))
    trace.admissions[1].tokens = 8
    assert (predict(trace)[-1].low, predict(trace)[-1].high) == (low, 4)


@pytest.mark.parametrize(("kept", "low"), [([0, 0, 15, 16, 20], 8), ([0, 0, 0, 16, 20], 0)])
def test_without_replay_a_hit_needs_the_window_of_every_group(kept: list[int], low: int):
    """A second window group has the window before 8 in blocks 15 and 16, or has lost one of them when they are full."""
    trace = traces.replay_off()
    trace.groups.append(trace.groups[traces.WINDOW])
    for step, table in zip(trace.steps, ([13, 14, *kept[2:4]], kept, [0, 0, 15, 16, 18]), strict=True):
        step.tables.append([traces.ints(*table)])
    assert (predict(trace)[-1].low, predict(trace)[-1].high) == (low, 8)
