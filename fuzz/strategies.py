# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Hypothesis strategies for cases: geometry, shared-prefix trees, lengths at the edges, request mixes, small pools.

Lengths are not uniform: each is an anchor (so many windows, blocks and chunks) plus -1, 0 or 1, because what breaks
breaks where boundaries meet. A draw is a few small choices, turned into a case by plain code, so that cases are cheap
to make and shrink one choice at a time: towards one short request, no event, equal sizes and a roomy pool.

Relied upon: a pool that holds each request alone (``blocks_needed``) lets every case end; hits end on multiples of
lcm(block sizes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, lcm
from typing import Any, Final, Literal, NamedTuple

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from fuzz.case import Case, Event, EventKind, Request, Slice, cut
from invariants.trace import Geometry

_Kind = EventKind | Literal["forget"]
Anchor = tuple[int, int, int]
"""A length: so many windows, hit units and chunks."""


class Sizes(NamedTuple):
    """A window and its blocks, in tokens."""

    window: int
    block_size: int
    swa_block_size: int

    @classmethod
    def of(cls, geometry: Geometry) -> Sizes:
        """Those of a case."""
        return cls(geometry.window, geometry.block_size, geometry.swa_block_size)

    @property
    def hit_unit(self) -> int:
        """Hits end on its multiples."""
        return lcm(self.block_size, self.swa_block_size)


@dataclass(frozen=True, slots=True)
class Profile:
    """A family of cases. Limits are in tokens, but for ``requests``, ``outputs`` and ``steps``."""

    title: str
    sizes: SearchStrategy[Sizes]
    chunks: tuple[tuple[int, int], ...]
    """Prefill chunks to choose from, as (windows, hit units); (0, 0) is ``chunk``."""
    chunk: int
    """The usual, and but for one token more the largest, chunk."""
    anchors: tuple[Anchor, ...]
    """Lengths to choose from, of prompts and of shared prefixes."""
    requests: int
    outputs: tuple[int, ...]
    """Output lengths to choose from."""
    prompt: int
    """Longest prompt."""
    tokens: int
    """Prompt tokens in a case."""
    steps: int
    """About the most steps that prefills may take; prompt tokens are limited to what fits."""


def replay_start_can_be_null(sizes: Sizes) -> bool:
    """Whether CONTRACT 12 can strike: the block that replay starts in is retired before the replay.

    Retention keeps whole blocks from position H - W + 1 on, replay starts at H - W: they are in different blocks where
    (H - W + 1) % b == 0. Hits are multiples of b (of lcm), so this is a matter of W and the window group's block b.
    """
    return (sizes.window - 1) % sizes.swa_block_size == 0


# A hit one unit above the window is the first that is adopted, so most lengths are just above that.
_SHORT: Final[tuple[Anchor, ...]] = (
    (1, 2, 0), (1, 1, 0), (1, 3, 0), (1, 0, 0), (2, 1, 0), (1, 2, 0), (0, 0, 1), (1, 0, 1), (0, 0, 2),
)  # fmt: skip
_LONG: Final[tuple[Anchor, ...]] = (
    (1, 2, 0), (1, 1, 0), (0, 1, 1), (0, 0, 1), (0, -1, 1), (0, 0, 2), (1, 0, 1), (0, 0, 3), (0, 0, 4),
)  # fmt: skip

SMALL_SIZES: Final = tuple(
    Sizes(window, block, swa)
    for swa in (4, 2, 3)
    for block in range(swa, 9, swa)
    for window in range(swa, 13, swa)
    if not replay_start_can_be_null(Sizes(window, block, swa))
)


@st.composite
def _wild_sizes(draw: st.DrawFn) -> Sizes:
    """Any sizes, a third of them with ``replay_start_can_be_null``; hit units stay short so that hits happen."""
    swa = draw(st.sampled_from((4, 2, 1, 3, 5, 8, 7, 12, 16, 33)))
    block = draw(st.sampled_from((4, 2, 1, 3, 5, 8, 6, 16, 24)))
    if lcm(swa, block) > 48:
        block = swa
    window = draw(st.sampled_from((1, 2, 0, 3, 4))) * swa + draw(st.sampled_from((1, 0, -1, 1, 2, 5)))
    return Sizes(max(1, window), block, swa)


PROFILES: Final[dict[str, Profile]] = {
    "small": Profile(
        title="tiny windows and blocks: most bugs live here and cases are cheap",
        sizes=st.sampled_from(SMALL_SIZES),
        chunks=((0, 0), (1, 0), (0, 1), (1, 1), (0, 1), (1, 0), (0, 2)),
        chunk=32,
        anchors=_SHORT,
        requests=8,
        outputs=(1, 2, 1, 5, 9),
        prompt=60,
        tokens=130,
        steps=20,
    ),
    "dsv41": Profile(
        title="DeepSeek-V4.1: window 128, blocks of 32 and 128, chunk 2048, prompts to 8k",
        sizes=st.sampled_from([Sizes(128, block, 32) for block in (128, 128, 32, 64, 256)]),
        chunks=((0, 0), (0, 0), (0, 0), (4, 0), (1, 0), (1, 1)),
        chunk=2048,
        anchors=_LONG,
        requests=8,
        outputs=(1, 2, 8, 33),
        prompt=8192,
        tokens=24576,
        steps=24,
    ),
    "wild": Profile(
        title="any geometry: window no multiple of the block, blocks that do not divide one another",
        sizes=_wild_sizes(),
        chunks=((0, 0), (1, 0), (0, 1), (1, 1), (0, 1), (1, 0), (0, 2)),
        chunk=96,
        anchors=_SHORT,
        requests=8,
        outputs=(1, 2, 1, 5, 17),
        prompt=240,
        tokens=600,
        steps=24,
    ),
}

_DELTAS: Final = (0, -1, 1)
_TAILS: Final = ("one", "align", "unit", "none", "align+1", "align-1", "window", "two", "chunk")
_ARRIVALS: Final = ("after", "together", "next", "after", "soon")
_THRESHOLDS: Final = ("off", "off", "off", "off", "unit", "window", "chunk-1")
_EVENTS: Final = ("preempt", "abort", "reset_prefix_cache", "drop_blocks", "preempt", "abort", "forget")
_DELAYS: Final = (1, 2, 1, 3, 1)
_ROOMY: Final = -1
_SLACKS: Final = (_ROOMY, 0, 2, 1, 4, 0)


class _Draw(NamedTuple):
    """The choices that become one request."""

    relation: str
    """What it shares with an earlier request."""
    parent: int
    """Which one: 0 the first, 1 the second, -1 the last."""
    arrival: str
    output: int
    anchor: Anchor = (0, 0, 0)
    delta: int = 0
    tail: str = "none"


def _request_draws(limits: Profile) -> tuple[SearchStrategy[tuple[Any, ...]], SearchStrategy[tuple[Any, ...]]]:
    """What ``_Draw`` is made of: for the first request and for a later one. Each relation draws only what it needs,
    or Hypothesis would run many a case twice."""
    head = (st.sampled_from((0, -1, 1)), st.sampled_from(_ARRIVALS), st.sampled_from(limits.outputs))
    length = (st.sampled_from(limits.anchors), st.sampled_from(_DELTAS))
    tail = st.sampled_from(_TAILS)
    prefix = st.tuples(st.just("prefix"), *head, *length, tail)
    later = st.one_of(
        prefix,
        st.tuples(st.just("same"), *head),
        prefix,
        st.tuples(st.just("extend"), *head, st.just((0, 0, 0)), st.just(0), tail),
        st.tuples(st.just("fresh"), st.just(0), *head[1:], *length),
        st.tuples(st.just("shifted"), *head),
    )
    return st.tuples(st.just("fresh"), st.just(0), st.just("after"), head[2], *length), later


def cases(profile: str) -> SearchStrategy[Case]:
    """Cases of a profile in ``PROFILES``. Raises ``KeyError``."""
    limits = PROFILES[profile]
    first, later = _request_draws(limits)
    event = st.tuples(st.sampled_from(_EVENTS), st.integers(0, 2), st.sampled_from(_DELAYS))
    return st.builds(
        _build,
        st.just(limits),
        limits.sizes,
        st.sampled_from(limits.chunks),
        st.sampled_from(_DELTAS),
        st.sampled_from(_THRESHOLDS),
        first,
        st.lists(later, max_size=limits.requests - 1),
        st.lists(event, max_size=2),
        st.sampled_from((8, 8, 8, 2, 1)),
        st.sampled_from(_SLACKS),
        st.sampled_from((True,) * 15 + (False,)),
    )


def _build(
    limits: Profile,
    sizes: Sizes,
    chunk_anchor: tuple[int, int],
    chunk_delta: int,
    threshold_kind: str,
    first: tuple[Any, ...],
    later: Sequence[tuple[Any, ...]],
    event_draws: Sequence[tuple[_Kind, int, int]],
    max_num_seqs: int,
    slack: int,
    replay: bool,
) -> Case:
    """The case that the choices mean."""
    windows, units = chunk_anchor
    chunk = windows * sizes.window + units * sizes.hit_unit or limits.chunk
    chunk = max(1, min(chunk + chunk_delta, limits.chunk + 1))
    threshold = {"off": 0, "unit": sizes.hit_unit, "window": sizes.window, "chunk-1": chunk - 1}[threshold_kind]
    requests = _requests(limits, sizes, chunk, threshold, [_Draw(*draw) for draw in (first, *later)])
    geometry = Geometry(
        window=sizes.window,
        block_size=sizes.block_size,
        swa_block_size=sizes.swa_block_size,
        num_blocks=1 + _pool(sizes, chunk, requests, slack),
        max_num_batched_tokens=chunk,
        # vLLM refuses more seats than a step has tokens, and a threshold beyond the longest request.
        max_num_seqs=min(max_num_seqs, chunk),
        long_prefill_token_threshold=min(threshold, max(len(r) + r.max_tokens for r in requests)),
        replay=replay,
    )
    return Case(geometry=geometry, requests=tuple(requests), events=_events(event_draws, requests))


def blocks_needed(sizes: Sizes, chunk: int, tokens: int) -> int:
    """Blocks, of both groups, that a request of ``tokens`` tokens, output included, needs to run alone.

    As vLLM counts before it starts: window blocks are handed back while a request runs, so it holds those of a window
    and a chunk, and one for not being aligned.
    """
    held = min(sizes.window - 1 + chunk, tokens)
    return ceil(tokens / sizes.block_size) + ceil(held / sizes.swa_block_size) + 1


def _pool(sizes: Sizes, chunk: int, requests: Sequence[Request], slack: int) -> int:
    """Blocks without the null block: room for all requests at once, or ``slack`` more than the longest one needs."""
    needs = [blocks_needed(sizes, chunk, len(request) + request.max_tokens) for request in requests]
    return sum(needs) if slack == _ROOMY else max(needs) + slack


def _requests(limits: Profile, sizes: Sizes, chunk: int, threshold: int, draws: Sequence[_Draw]) -> list[Request]:
    """As many of the drawn requests as the limits allow, the first in any case."""
    stride = min(chunk, threshold or chunk)
    left = min(limits.tokens, limits.steps * stride)
    requests: list[Request] = []
    idle = step = 0
    for index, draw in enumerate(draws):
        prompt = _prompt(sizes, chunk, draw, index, requests)
        prompt = cut(prompt, 0, limits.prompt if requests else min(limits.prompt, left))
        length = _length(prompt)
        if length > left:
            break
        left -= length
        step = {"after": idle, "together": step, "next": step + 1, "soon": step + 3}[draw.arrival]
        idle = max(idle, step) + ceil(length / stride) + draw.output
        requests.append(Request(id=f"r{index}", arrive=step, prompt=prompt, max_tokens=draw.output))
    return requests


def _prompt(sizes: Sizes, chunk: int, draw: _Draw, index: int, earlier: Sequence[Request]) -> tuple[Slice, ...]:
    """A prompt that shares with an earlier request's what the relation says, then goes its own way."""
    windows, units, chunks = draw.anchor
    length = max(1, windows * sizes.window + units * sizes.hit_unit + chunks * chunk + draw.delta)
    if draw.relation == "fresh":
        return ((f"s{index}", 0, length),)
    parent = earlier[min(draw.parent, index - 1)].prompt
    if draw.relation == "same":
        return parent
    if draw.relation == "shifted":
        return cut(parent, 1, _length(parent)) or parent
    shared = parent if draw.relation == "extend" else cut(parent, 0, length)
    tail = _tail(draw.tail, sizes, chunk, _length(shared))
    return (*shared, (f"t{index}", 0, tail)) if tail else shared


def _tail(kind: str, sizes: Sizes, chunk: int, start: int) -> int:
    """Tokens that follow ``start`` shared ones; "align" ends on a boundary of the hit unit."""
    unit = sizes.hit_unit
    align = unit - start % unit
    return {
        "none": 0,
        "one": 1,
        "two": 2,
        "unit": unit,
        "window": sizes.window,
        "chunk": chunk,
        "align": align,
        "align+1": align + 1,
        "align-1": align - 1,
    }[kind]


def _length(prompt: Sequence[Slice]) -> int:
    return sum(stop - start for _, start, stop in prompt)


def _events(draws: Sequence[tuple[_Kind, int, int]], requests: Sequence[Request]) -> tuple[Event, ...]:
    """Events that tend to matter: a request's own just after its arrival, the cache's just before a later one's.

    "forget": a preempted request finds less in the cache than before, and its replay, if any, starts elsewhere.
    """
    events = []
    for kind, who, delay in draws:
        request = requests[-1 - who % max(1, len(requests) - 1)]
        if kind == "forget":
            step = request.arrive + delay
            events += [Event(step=step, kind="preempt", request=request.id), Event(step=step, kind="drop_blocks")]
        elif kind in ("preempt", "abort"):
            events.append(Event(step=request.arrive + delay, kind=kind, request=request.id))
        else:
            events.append(Event(step=request.arrive, kind=kind))
    return tuple(events)
