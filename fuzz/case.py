# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The case: plain data that says what an engine shall run. Strategies make it, corpora keep it, mutators change it.

Relied upon: reading a case never runs code; a case's canonical form, and so its hash, depends on nothing but what it
makes an engine do (provenance is left out of the hash). ``Geometry`` lives in ``invariants.trace``, since a trace
carries it to the invariants.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType
from numpy.typing import NDArray

from invariants.trace import Geometry, Probe

SCHEMA: Final = 1
FIRST_TOKEN, TOKENS = 3, 1000
"""Streams hold token ids FIRST_TOKEN .. FIRST_TOKEN + TOKENS - 1: any test model's vocabulary covers them."""
MAX_FILE_BYTES = 1 << 20
MAX_PROMPT_TOKENS = 1 << 18
MAX_DRAFTS = 8
"""Speculative tokens a step."""
MAX_WINDOW_GROUPS = 4
MAX_PRIORITY = 1 << 16
MAX_TURNS: Final = 4
"""Requests in a chain of which each continues the one before."""

Tokens = NDArray[np.int32]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")]
Text = Annotated[str, Meta(max_length=2000)]
Count = Annotated[int, Meta(ge=0, le=1 << 20)]
Slice = tuple[Name, Count, Count]
"""(stream, start, stop): tokens start..stop-1 of that stream."""


class CaseError(ValueError):
    """A case that cannot be read; the message names the JSON path."""


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """KV that an external connector has of a request's prompt, and offers at each lookup."""

    tokens: Annotated[int, Meta(ge=1, le=1 << 18)]
    """Of the prompt's start, whole blocks or not."""
    window: Literal["whole", "part", "none"]
    """Of which window groups it has KV, too: all, all but the first, or none."""
    how: Literal["sync", "async", "fails"]
    """sync: it is there before the step computes. async: it comes after some steps, in which nothing of the request is
    computed. fails: async, but it never comes; vLLM is told so, and the connector offers nothing more."""
    steps: Annotated[int, Meta(ge=0, le=1000)]
    """Steps that an async load takes, 1 at least; a sync one takes 0."""


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One request. Who shares which prefix is visible in the slices."""

    id: Name
    arrive: Count
    """Step before which the request is handed to the engine."""
    prompt: Annotated[tuple[Slice, ...], Meta(min_length=1, max_length=64)]
    max_tokens: Annotated[int, Meta(ge=1, le=4096)] = 1
    prompt_logprobs: Literal[True] | UnsetType = UNSET
    """Ask for the logprobs of the prompt as well; only engines with a model look at it."""
    continues: Name | UnsetType = UNSET
    """A request before this one in the case, whose prompt and whole output go before this one's own slices. It is
    handed over as soon as that one has ended, and not before ``arrive``."""

    priority: int | UnsetType = UNSET
    """Lower goes first. A case in which any request has one is scheduled by priority (unset: 0), not in order of
    arrival; only the scheduler engine looks at it."""

    load: Load | UnsetType = UNSET
    """An external hit, for engines with a connector."""

    def tokens(self) -> Tokens:
        """int32 [slices' length], token ids; of a request that continues another one, what is its own."""
        return np.concatenate([stream_tokens(*piece) for piece in self.prompt])

    def __len__(self) -> int:
        return sum(stop - start for _, start, stop in self.prompt)


EventKind = Literal["preempt", "abort", "reset_prefix_cache", "drop_blocks"]


class Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Something done to the engine before a step. One that does not apply when its step comes (the request is not
    running any more, say) does nothing."""

    step: Count
    kind: EventKind
    request: Name | None = None
    """Whom it concerns; None where it concerns the cache."""


class Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a case in ``known/`` reproduces: an entry of the register in ``fuzz/known.py``."""

    id: Name
    condition: Text
    """When it fires, for a reader; the register holds the same as code."""


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Where a case comes from. Not part of its content hash."""

    note: Text = ""
    """One line: what the case is for."""
    found: Text | None = None
    """ISO date."""
    vllm: Text | None = None
    seed: int | None = None
    invariant: Text | None = None
    """The invariant that the case broke when it was found."""
    upstream: Text | None = None
    """Reference of the upstream issue, if there is one."""
    known: Known | None = None


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an engine shall run."""

    schema: Literal[1] = SCHEMA
    geometry: Geometry
    requests: Annotated[tuple[Request, ...], Meta(min_length=1, max_length=2048)]
    events: Annotated[tuple[Event, ...], Meta(max_length=256)] = ()
    probe: Probe | UnsetType = UNSET
    """The model, for engines with one; unset: the default ``Probe``."""
    provenance: Provenance = Provenance()

    @property
    def digest(self) -> str:
        """8 hex digits: the content hash, provenance left out."""
        bare = msgspec.structs.replace(self, provenance=Provenance())
        return hashlib.sha256(encode(bare)).hexdigest()[:8]

    @property
    def has_loads(self) -> bool:
        """Whether any request is offered an external load."""
        return any(request.load is not UNSET for request in self.requests)

    @property
    def max_lengths(self) -> list[int]:
        """Tokens of each request, prompt and output, at most: one that another continues may be aborted."""
        lengths: dict[str, int] = {}
        for request in self.requests:
            before = 0 if request.continues is UNSET else lengths[request.continues]
            lengths[request.id] = before + len(request) + request.max_tokens
        return [*lengths.values()]

    @property
    def max_model_len(self) -> int:
        """Tokens that a request may have: as given, or those of the longest one, prompt and output."""
        if self.geometry.max_model_len is not UNSET:
            return self.geometry.max_model_len
        return max(self.max_lengths)


@lru_cache(maxsize=256)
def _stream_seed(stream: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "little"))


def stream_tokens(stream: str, start: int, stop: int) -> Tokens:
    """int32 [stop - start]: tokens start..stop-1 of an endless deterministic stream (splitmix64 of the position)."""
    with np.errstate(over="ignore"):
        x = np.arange(start, stop, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + _stream_seed(stream)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return (x % np.uint64(TOKENS)).astype(np.int32) + np.int32(FIRST_TOKEN)


def cut(prompt: Sequence[Slice], start: int, stop: int) -> tuple[Slice, ...]:
    """Tokens start..stop-1 of a prompt."""
    pieces = []
    for stream, first, last in prompt:
        low, high = max(first, first + start), min(last, first + stop)
        if low < high:
            pieces.append((stream, low, high))
        start, stop = start - (last - first), stop - (last - first)
    return tuple(pieces)


def _line(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value, order="sorted"), indent=0)


def encode(case: Case) -> bytes:
    """The canonical form: sorted keys, a line a request and an event, one newline at the end."""

    def lines(values: tuple[Any, ...]) -> bytes:
        return b"[\n    " + b",\n    ".join(map(_line, values)) + b"\n  ]" if values else b"[]"

    fields = {
        "events": lines(case.events),
        "geometry": _line(case.geometry),
        **({} if case.probe is UNSET else {"probe": _line(case.probe)}),
        "provenance": _line(case.provenance),
        "requests": lines(case.requests),
        "schema": _line(case.schema),
    }
    return b"{\n" + b",\n".join(b'  "%b": %b' % (key.encode(), value) for key, value in fields.items()) + b"\n}\n"


_decoder = msgspec.json.Decoder(Case)


def decode(data: bytes) -> Case:
    """The case in ``data``. Raises ``CaseError`` with the JSON path of what is wrong."""
    if len(data) > MAX_FILE_BYTES:
        raise CaseError(f"{len(data)} bytes; a case has at most {MAX_FILE_BYTES}")
    try:
        case = _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise CaseError(_in_our_words(str(error))) from None
    check(case)
    return case


def _in_our_words(message: str) -> str:
    """msgspec's message, without our regular expression and without calling a schema an enum."""
    if message.endswith("`$.schema`"):
        return f"this replaycheck reads schema {SCHEMA} only - at `$.schema`"
    return re.sub(r"matching regex '[^']*'", "of 1-64 letters, digits or _.:-", message)


def check(case: Case) -> None:
    """Raise ``CaseError`` where a well-formed case means nothing."""
    geometry = case.geometry
    _check_probe(case)
    for field, low, high in (
        ("window", 1, 1 << 16),
        ("block_size", 1, 1 << 16),
        ("swa_block_size", 1, 1 << 16),
        ("num_blocks", 2, 1 << 20),
        ("max_num_batched_tokens", 1, 1 << 17),
        ("max_num_seqs", 1, 2048),
        ("long_prefill_token_threshold", 0, 1 << 17),
    ):
        value = getattr(geometry, field)
        if not low <= value <= high:
            raise CaseError(f"{value} is not in {low}..{high} - at `$.geometry.{field}`")
    _check_drafts(geometry)
    _check_layout(geometry)
    seen: set[str] = set()
    total = 0
    _check_turns(case)
    for index, request in enumerate(case.requests):
        if request.id in seen:
            raise CaseError(f"a second request is called '{request.id}' - at `$.requests[{index}].id`")
        seen.add(request.id)
        for piece, (_, start, stop) in enumerate(request.prompt):
            if start >= stop:
                raise CaseError(f"empty slice {start}..{stop} - at `$.requests[{index}].prompt[{piece}]`")
        if request.priority is not UNSET and not -MAX_PRIORITY <= request.priority <= MAX_PRIORITY:
            limits = f"-{MAX_PRIORITY}..{MAX_PRIORITY}"
            raise CaseError(f"{request.priority} is not in {limits} - at `$.requests[{index}].priority`")
        total += case.max_lengths[index] - request.max_tokens
        if total > MAX_PROMPT_TOKENS:
            raise CaseError(f"more than {MAX_PROMPT_TOKENS} prompt tokens - at `$.requests[{index}].prompt`")
    _check_loads(case)
    for index, event in enumerate(case.events):
        if event.request is not None and event.request not in seen:
            raise CaseError(f"no request is called '{event.request}' - at `$.events[{index}].request`")
        if event.request is None and event.kind in ("preempt", "abort"):
            raise CaseError(f"'{event.kind}' needs a request - at `$.events[{index}].request`")


def _check_layout(geometry: Geometry) -> None:
    groups = geometry.window_groups
    if groups is not UNSET and not 1 <= groups <= MAX_WINDOW_GROUPS:
        raise CaseError(f"{groups} is not in 1..{MAX_WINDOW_GROUPS} - at `$.geometry.window_groups`")
    length = geometry.max_model_len
    if length is not UNSET and not 2 <= length <= MAX_PROMPT_TOKENS:
        raise CaseError(f"{length} is not in 2..{MAX_PROMPT_TOKENS} - at `$.geometry.max_model_len`")
    interval = geometry.retention
    if isinstance(interval, int) and not 0 <= interval <= MAX_PROMPT_TOKENS:
        raise CaseError(f"{interval} is not in 0..{MAX_PROMPT_TOKENS} - at `$.geometry.retention`")


def _check_turns(case: Case) -> None:
    """A request continues one before it, by at most ``MAX_TURNS`` in all."""
    turns: dict[str, int] = {}
    for index, request in enumerate(case.requests):
        before = 0
        if request.continues is not UNSET:
            if request.continues not in turns:
                raise CaseError(
                    f"no request before is called '{request.continues}' - at `$.requests[{index}].continues`"
                )
            before = turns[request.continues]
        turns[request.id] = before + 1
        if before == MAX_TURNS:
            raise CaseError(f"turn {before + 1} of a session; at most {MAX_TURNS} - at `$.requests[{index}].continues`")


def _check_probe(case: Case) -> None:
    if case.probe is UNSET:
        return
    for field, low, high in (("layers", 1, 64), ("compress_ratio", 1, 2), ("seed", 0, (1 << 32) - 1)):
        value = getattr(case.probe, field)
        if not low <= value <= high:
            raise CaseError(f"{value} is not in {low}..{high} - at `$.probe.{field}`")


def _check_loads(case: Case) -> None:
    for index, request in enumerate(case.requests):
        load = request.load
        if load is UNSET:
            continue
        # vLLM computes the last prompt token in any case; where nothing is replayed, a sync load has to leave it.
        most = len(request) - (load.how == "sync" and load.window == "whole")
        for field, wrong, why in (
            ("tokens", load.tokens > most, f"{load.tokens} tokens, where the prompt leaves {most} to load"),
            ("steps", (load.steps == 0) != (load.how == "sync"), f"a load that is {load.how} takes {load.steps} steps"),
            ("window", not case.geometry.replay and load.window != "whole", "without replay a load has the window"),
            ("window", load.window == "part" and case.geometry.windows < 2, "part of one window group"),
        ):
            if wrong:
                raise CaseError(f"{why} - at `$.requests[{index}].load.{field}`")


def _check_drafts(geometry: Geometry) -> None:
    if geometry.drafts is not UNSET and not 1 <= geometry.drafts <= MAX_DRAFTS:
        raise CaseError(f"{geometry.drafts} is not in 1..{MAX_DRAFTS} - at `$.geometry.drafts`")
    if geometry.drafts is UNSET and geometry.drafter is not UNSET:
        raise CaseError("a drafter without drafts - at `$.geometry.drafter`")
