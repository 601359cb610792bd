# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Corners: what is added to plain cases for an engine that can run it, a function for each.

Relied upon: a plain case stays the likeliest, so that a corner costs the rest little, and shrinking leads back to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Final, Literal

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from msgspec import UNSET

from fuzz.case import MAX_TURNS, MAX_WINDOW_GROUPS, Case, Event, Request
from fuzz.loads import with_loads
from fuzz.strategies import Sizes, blocks_needed, cases, replay_start_can_be_null
from invariants.trace import Probe


def cases_for(engine: str, profile: str) -> SearchStrategy[Case]:
    """Cases of a profile for the engine of that name. Raises ``KeyError``."""
    plain = with_turns(with_cut_replays(cases(profile)))
    if engine == "cpu":
        return with_probe(plain)
    # What changes blocks comes before what counts in them, and the number of groups, by which pools grow, last.
    plain = with_larger_window_blocks(plain)
    if engine == "scheduler":
        plain = with_retention(with_priorities(plain))
    plain = with_window_groups(with_lost_prefixes(plain))
    if engine == "kernels":
        return with_single_tokens(with_crowds(plain))
    plain = with_model_length(plain)
    return with_loads(with_drafts(with_flight(plain))) if engine == "scheduler" else plain


def with_probe(plain: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The same cases for an engine with a model: a probe for each, and now and then prompt logprobs asked for."""
    probes = st.builds(
        Probe,
        kind=st.sampled_from(("exact", "deep", "exact", "deep", "decoder")),
        layers=st.sampled_from((2, 2, 2, 1, 3)),
        compress_ratio=st.sampled_from((1, 1, 2)),
        seed=st.integers(0, 3),
    )
    return st.builds(_add_probe, plain, probes, st.integers(0, 8))


def _add_probe(case: Case, probe: Probe, asks: int) -> Case:
    """``asks``: whether a request asks for prompt logprobs, 0 for none, and which. Oftener where rows are trimmed."""
    # Fewer see the same either way: the last row of a replay has its whole window, in the first layer; a bound in
    # trimmed layers shows in an output through the third.
    least = {"exact": 1, "deep": 2 if case.geometry.window > 2 else 3, "decoder": 3}[probe.kind]
    if probe.layers < least:
        probe = msgspec.structs.replace(probe, layers=least)
    if case.geometry.block_size % probe.compress_ratio:
        probe = msgspec.structs.replace(probe, compress_ratio=1)
    requests = list(case.requests)
    if asks > (2 if probe.kind == "decoder" else 6):
        one = asks % len(requests)
        requests[one] = msgspec.structs.replace(requests[one], prompt_logprobs=True)
    return msgspec.structs.replace(case, requests=tuple(requests), probe=probe)


def with_crowds(plain: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The same cases, one in a hundred with its last request a thousand times: more rows than a block of a kernel.
    One in five has a few more: more prefills in a step than ``PREFILL_CHUNK_SIZE`` of the ROCm layer, which is 4."""
    return st.builds(_crowd, plain, st.integers(0, 99).map(_copies))


def _copies(number: int) -> int:
    if number == 57:
        return 1030
    return 2 + number % 7 if number >= 80 else 0


def _crowd(case: Case, copies: int) -> Case:
    """``copies`` requests more, at the same time; a small window and short prompts only."""
    last = case.requests[-1]
    if not copies or case.geometry.window > 16 or len(last) > 64:
        return case
    more = tuple(msgspec.structs.replace(last, id=f"copy{n}", max_tokens=1) for n in range(copies))
    tokens = len(last) * (copies + 1) + 1
    geometry = msgspec.structs.replace(
        case.geometry, max_num_seqs=copies + 8, max_num_batched_tokens=tokens, long_prefill_token_threshold=0
    )
    return msgspec.structs.replace(case, requests=(*case.requests, *more), geometry=geometry)


def with_larger_window_blocks(plain: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The same cases, one in five with a window block of twice, or one and a half times, the cacheable block: hits end
    on multiples of both. Prompts and chunks grow with the multiple, so that what they share stays as long in hits."""
    return st.builds(_larger_window_block, plain, st.sampled_from((1,) * 16 + (3, 3, 2, 2)))


def _larger_window_block(case: Case, times: int) -> Case:
    """``times``: how much longer hits get. Only where the block that replay starts in stays (CONTRACT 12)."""
    geometry = case.geometry
    times = 2 if times == 3 and geometry.block_size % 2 else times
    block = geometry.block_size * times // (1 if times == 2 else 2)
    if times == 1 or replay_start_can_be_null(Sizes(geometry.window, geometry.block_size, block)):
        return case
    requests = tuple(
        msgspec.structs.replace(
            request, prompt=tuple((stream, times * start, times * stop) for stream, start, stop in request.prompt)
        )
        for request in case.requests
    )
    case = msgspec.structs.replace(case, requests=requests)
    sizes, chunk = Sizes(geometry.window, geometry.block_size, block), times * geometry.max_num_batched_tokens
    # A window block may get smaller, too: then there are more of them.
    needed = 1 + max(blocks_needed(sizes, chunk, length) for length in case.max_lengths)
    geometry = msgspec.structs.replace(
        geometry,
        swa_block_size=block,
        num_blocks=max(needed, 1 + times * (geometry.num_blocks - 1)),
        max_num_batched_tokens=chunk,
    )
    return msgspec.structs.replace(case, geometry=geometry)


def with_window_groups(plain: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The same cases, one in ten with two to four window groups in place of one."""
    return st.builds(_more_windows, plain, st.integers(0, 39).map(lambda number: max(0, number - 35)))


def _more_windows(case: Case, more: int) -> Case:
    """``more`` window groups more, and as many blocks as they take: a tight pool stays as tight."""
    if not more:
        return case
    geometry = case.geometry
    sizes, chunk = Sizes(geometry.window, geometry.block_size, geometry.swa_block_size), geometry.max_num_batched_tokens
    lengths = case.max_lengths
    roomy = geometry.num_blocks > sum(blocks_needed(sizes, chunk, length) for length in lengths)
    windows = [
        blocks_needed(sizes, chunk, length) - ceil(length / geometry.block_size)
        for length in (lengths if roomy else [max(lengths)])
    ]
    groups = min(1 + more, MAX_WINDOW_GROUPS)
    blocks = geometry.num_blocks + (groups - 1) * sum(windows)
    return msgspec.structs.replace(
        case, geometry=msgspec.structs.replace(geometry, window_groups=groups, num_blocks=blocks)
    )


def with_lost_prefixes(plain: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The same cases, one in ten with a request more that is preempted when what it had hit is dropped: it resumes
    without the hit of its earlier life."""
    return st.builds(_lose_prefix, plain, st.integers(0, 39).map(lambda number: max(0, number - 35)))


def _lose_prefix(case: Case, delay: int) -> Case:
    """``delay``: steps from its arrival to its preemption; 0: the case as it is."""
    case, again = _once_more(case, 1 + delay) if delay else (case, None)
    if again is None:
        return case
    step = again.arrive + delay
    preempt, drop = Event(step=step, kind="preempt", request=again.id), Event(step=step, kind="drop_blocks")
    return msgspec.structs.replace(case, events=(*case.events, preempt, drop))


def _once_more(case: Case, outputs: int) -> tuple[Case, Request | None]:
    """With the longest prompt once more, after all others: it hits. No request where it would not."""
    geometry, longest = case.geometry, max(case.requests, key=len)
    if len(longest) <= geometry.window:
        return case, None
    lengths = case.max_lengths
    more = max(0, len(longest) + outputs - max(lengths))
    blocks = ceil(more / geometry.block_size) + ceil(more / geometry.swa_block_size)
    # By then the others are gone: a step computes a token of some request, unless one of them is preempted.
    arrive = max(request.arrive for request in case.requests) + sum(lengths)
    again = Request(id=f"again{len(lengths)}", arrive=arrive, prompt=longest.prompt, max_tokens=outputs)
    geometry = msgspec.structs.replace(geometry, num_blocks=geometry.num_blocks + blocks)
    return msgspec.structs.replace(case, geometry=geometry, requests=(*case.requests, again)), again


def with_cut_replays(plain: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The same cases, one in twenty with a request more that hits, replays in chunks shorter than the window, and is
    aborted before it is done."""
    return st.builds(lambda case, number: _cut_replay(case) if number == 19 else case, plain, st.integers(0, 19))


def _cut_replay(case: Case) -> Case:
    geometry = case.geometry
    chunk = max(geometry.window // 2, geometry.max_num_seqs)
    geometry = msgspec.structs.replace(geometry, max_num_batched_tokens=min(chunk, geometry.max_num_batched_tokens))
    cut, again = _once_more(msgspec.structs.replace(case, geometry=geometry), 1)
    if again is None:
        return case
    abort = Event(step=again.arrive + 1, kind="abort", request=again.id)
    return msgspec.structs.replace(cut, events=(*cut.events, abort))


def with_priorities(plain: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The same cases, one in five scheduled by priority: requests arrive one a step, into a pool for hardly more than
    one of them, and later ones tend to go before earlier ones."""
    priorities = st.lists(st.sampled_from((-1, -2, -3, 0, 1)), min_size=4, max_size=4)
    return st.builds(_prioritise, plain, st.sampled_from((0,) * 8 + (2, 4)), priorities)


def _prioritise(case: Case, room: int, priorities: Sequence[int]) -> Case:
    """Priorities for all but the first request, in turn; ``room``: blocks more than the longest one needs."""
    if not room or len(case.requests) == 1:
        return case
    geometry = case.geometry
    first, *later = [
        msgspec.structs.replace(request, arrive=index, max_tokens=max(request.max_tokens, 9))
        for index, request in enumerate(case.requests)
    ]
    given = [msgspec.structs.replace(later[i], priority=priorities[i % len(priorities)]) for i in range(len(later))]
    sizes, chunk = Sizes(geometry.window, geometry.block_size, geometry.swa_block_size), geometry.max_num_batched_tokens
    case = msgspec.structs.replace(case, requests=(first, *given))
    needed = max(blocks_needed(sizes, chunk, length) for length in case.max_lengths)
    return msgspec.structs.replace(
        case,
        geometry=msgspec.structs.replace(
            geometry,
            num_blocks=1 + needed + room,
            max_num_seqs=min(8, chunk),
            # A prefill goes on for some steps, beside decodes that take the blocks away that it was admitted for.
            long_prefill_token_threshold=min((1 + room) * sizes.hit_unit, len(first)),
        ),
    )


def with_single_tokens(plain: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The same cases, one in ten in chunks of one token, at the end of which the longest prompt is asked again by as
    many as a step has rows: replays that run as decodes."""
    return st.builds(_single_tokens, plain, st.sampled_from((0,) * 27 + (1, 2, 3)))


def _single_tokens(case: Case, rows: int) -> Case:
    """``rows`` a step, each of a token; 0: as it was. Short cases only: it takes a step for each token."""
    tokens = sum(case.max_lengths)
    if not rows or tokens > 200:
        return case
    longest = max((request for request in case.requests if request.continues is UNSET), key=len)
    again = (msgspec.structs.replace(longest, id=f"again{n}", arrive=tokens, max_tokens=1) for n in range(rows))
    # The threshold holds where more than one request is there.
    sizes = {"max_num_batched_tokens": rows, "max_num_seqs": rows, "long_prefill_token_threshold": int(rows > 1)}
    geometry = msgspec.structs.replace(case.geometry, **sizes)
    return msgspec.structs.replace(case, requests=(*case.requests, *again), geometry=geometry)


def with_turns(plain: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The same cases, one in ten with a session added: one to three requests, each of which continues the one before,
    the first of them a request of the plain case."""
    turn = st.tuples(st.sampled_from((5, 2, 9, 1)), st.sampled_from(_OWN), st.sampled_from((0, 2)))
    sessions = st.lists(turn, min_size=1, max_size=MAX_TURNS - 1)
    now_and_then = st.sampled_from((False,) * 9 + (True,)).flatmap(lambda more: sessions if more else st.just([]))
    return st.builds(_add_turns, plain, st.integers(0, 7), now_and_then)


_OWN: Final = ("one", "unit", "to boundary", "window")
"""How many tokens of its own a turn has; "to boundary": as many as make its prompt end where a hit may end."""


def _add_turns(case: Case, first: int, turns: list[tuple[int, str, int]]) -> Case:
    """``turns``: (output tokens of the request before, own tokens, steps between arrivals). A pool that is too small
    for the longest request grows to what it needs alone."""
    if not turns:
        return case
    sizes = Sizes(case.geometry.window, case.geometry.block_size, case.geometry.swa_block_size)
    requests = list(case.requests)
    before = first % len(requests)
    length = len(requests[before])
    for number, (outputs, own, wait) in enumerate(turns):
        requests[before] = msgspec.structs.replace(requests[before], max_tokens=outputs)
        length += outputs
        boundary = sizes.hit_unit - length % sizes.hit_unit
        added = {"one": 1, "unit": sizes.hit_unit, "to boundary": boundary, "window": sizes.window}[own]
        requests.append(
            Request(
                id=f"turn{number}",
                arrive=requests[before].arrive + wait,
                prompt=((f"turn{number}", 0, added),),
                continues=requests[before].id,
            )
        )
        before, length = len(requests) - 1, length + added
    case = msgspec.structs.replace(case, requests=tuple(requests))
    needed = 1 + blocks_needed(sizes, case.geometry.max_num_batched_tokens, case.max_model_len)
    geometry = msgspec.structs.replace(
        case.geometry,
        num_blocks=max(case.geometry.num_blocks, needed),
        # The longest request may have become shorter.
        long_prefill_token_threshold=min(case.geometry.long_prefill_token_threshold, case.max_model_len),
    )
    return msgspec.structs.replace(case, geometry=geometry)


def with_retention(plain: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The same cases, one in eight with a retention interval, mostly without replay (with it, it changes nothing), and
    with two requests more, the second of which shares most of the first one's prompt."""
    return st.builds(
        _retain,
        plain,
        st.sampled_from((None,) * 28 + (0, 1, 2, 3)),
        st.sampled_from((False,) * 5 + (True,)),
        st.sampled_from((0, 1, -1)),
    )


def _retain(case: Case, units: int | None, replay: bool, delta: int) -> Case:
    """``units``: the interval in hit units, 0: every one; None: the case as it is. ``delta``: how many tokens more than
    three intervals, and the one that is always computed, are shared."""
    geometry = case.geometry
    if units is None:
        return case
    sizes, chunk = Sizes(geometry.window, geometry.block_size, geometry.swa_block_size), geometry.max_num_batched_tokens
    step = max(1, units) * sizes.hit_unit
    shared, whole = 3 * step + 1 + delta, 4 * step + geometry.window
    after = max(request.arrive for request in case.requests) + sum(case.max_lengths)
    more = (
        Request(id="whole", arrive=after, prompt=(("kept", 0, whole),)),
        Request(id="part", arrive=after + whole + 1, prompt=(("kept", 0, shared), ("part", 0, 2))),
    )
    blocks = geometry.num_blocks + blocks_needed(sizes, chunk, whole + 1)
    geometry = msgspec.structs.replace(geometry, retention=step if units else None, replay=replay, num_blocks=blocks)
    return msgspec.structs.replace(case, geometry=geometry, requests=(*case.requests, *more))


def with_model_length(plain: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The same cases, one in ten with a limit for a request's tokens that cuts outputs short, or refuses a prompt."""
    return st.builds(_limit, plain, st.sampled_from((None,) * 27 + (1, 3, 0)))


def _limit(case: Case, room: int | None) -> Case:
    """``room``: tokens that the longest prompt leaves for its output; 0: it is refused; None: the case as it is."""
    limit = min(max(map(len, case.requests)) + (room or 0), case.max_model_len)
    if room is None or limit < 2:
        return case
    threshold = min(case.geometry.long_prefill_token_threshold, limit)
    geometry = msgspec.structs.replace(case.geometry, max_model_len=limit, long_prefill_token_threshold=threshold)
    return msgspec.structs.replace(case, geometry=geometry)


def with_flight(plain: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The same cases, one in ten with async scheduling: a step is scheduled while another is in flight."""
    return st.builds(lambda case, number: _fly(case) if number == 9 else case, plain, st.integers(0, 9))


def with_drafts(plain: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The same cases, one in eight with one to four speculative tokens; half of these with async scheduling as well.
    Where the next token is part of a block's name there is a request more, which shares a prompt up to a block's
    end; elsewhere there may be one whose prompt is a single token."""
    drafter = st.sampled_from((None, None, "mtp", "dspark"))
    return st.builds(_speculate, plain, st.integers(0, 15), st.integers(1, 4), drafter, st.booleans())


def _fly(case: Case) -> Case:
    """Two steps hold window blocks at a time, so the pool has those of one more: as tight, or roomy, as it was."""
    geometry = case.geometry
    if geometry.async_scheduling is not UNSET:
        return case
    groups = 1 if geometry.window_groups is UNSET else geometry.window_groups
    blocks = geometry.num_blocks + groups * ceil(geometry.max_num_batched_tokens / geometry.swa_block_size)
    geometry = msgspec.structs.replace(geometry, async_scheduling=True, num_blocks=blocks)
    return msgspec.structs.replace(case, geometry=geometry)


def _speculate(case: Case, number: int, drafts: int, drafter: Literal["mtp", "dspark"] | None, single: bool) -> Case:
    """``number``: 14 and 15 are for drafts, 15 for drafts in flight; ``single``: with a prompt of one token. A step has
    room for a token and its drafts."""
    drafts = min(drafts, case.geometry.max_num_batched_tokens - 1)
    if number < 14 or not drafts:
        return case
    geometry = msgspec.structs.replace(case.geometry, drafts=drafts, drafter=drafter or UNSET)
    if drafter:
        # Slots for the drafter are reserved past a request's end.
        groups = 1 if geometry.window_groups is UNSET else geometry.window_groups
        blocks = ceil(drafts / geometry.block_size) + groups * ceil(drafts / geometry.swa_block_size)
        geometry = msgspec.structs.replace(geometry, num_blocks=geometry.num_blocks + blocks)
    more = _another_next_token(case) if drafter == "mtp" else _single_token(case) if single else ()
    case = msgspec.structs.replace(case, geometry=geometry, requests=(*case.requests, *more))
    return _fly(case) if number == 15 else case


def _another_next_token(case: Case) -> tuple[Request, ...]:
    """The longest prompt once more, soon after it is computed, but for what comes after the last hit that it allows."""
    unit = Sizes(case.geometry.window, case.geometry.block_size, case.geometry.swa_block_size).hit_unit
    longest = max((request for request in case.requests if request.continues is UNSET), key=len)
    left, pieces = (len(longest) - 1) // unit * unit, []
    for stream, start, stop in longest.prompt:
        pieces.append((stream, start, min(stop, start + left)))
        left -= pieces[-1][2] - start
    shared = tuple(piece for piece in pieces if piece[1] < piece[2])
    arrive = longest.arrive + ceil(len(longest) / case.geometry.max_num_batched_tokens)
    return (Request(id="next", arrive=arrive, prompt=(*shared, ("next", 0, 1))),) if shared else ()


def _single_token(case: Case) -> tuple[Request, ...]:
    """A prompt of one token, soon after the longest prompt is computed."""
    longest = max(case.requests, key=len)
    arrive = longest.arrive + ceil(len(longest) / case.geometry.max_num_batched_tokens)
    return (Request(id="single", arrive=arrive, prompt=(("single", 0, 1),)),)
