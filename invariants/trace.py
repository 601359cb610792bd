# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The trace: what one engine saw while it ran one case. Plain data, judged by every invariant.

Relied upon everywhere: a trace carries the geometry and the requests' token ids, so that an invariant needs
nothing from ``fuzz/``. Arrays are NumPy and one per step, never one object per gather. Unless said otherwise,
positions count tokens from the start of a request, block and slot ids are vLLM's (block 0 is the null block,
slot = block id * block size + offset, slot -1 = padded, nothing is written).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

IntArray = NDArray[np.integer[Any]]
BoolArray = NDArray[np.bool_]

Turn = Literal["look up", "arrive", "run"]
"""What a scheduler does with a request that waits: it looks the prompt up and allocates blocks, notes that a load is
there, schedules the first chunk."""

NULL_BLOCK = 0
PAD_SLOT = -1
DECODER_FIRST, DECODER_REST = "decoder-first-layer", "decoder-layers"
"""Consumers in steps with decoder-side replay: the first of the layers that run on the last rows only, into which every
row has written its window key, and those after it."""
NOBODY = -1
"""Writer of a cell that nobody wrote since its block was last handed out."""


class Geometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes that decide where boundaries fall. All in tokens, except ``num_blocks`` and ``max_num_seqs``."""

    window: int
    """Sliding window W: a query at position p attends to [p - W + 1, p]."""
    block_size: int
    """Block of the prefix-cacheable group. Hits end on the scheduler block B, the least common multiple of the groups'
    blocks (CONTRACT 6)."""
    swa_block_size: int
    """Block of the sliding-window group."""
    num_blocks: int
    """Blocks in the pool that both groups share, the null block included."""
    max_num_batched_tokens: int
    """Prefill chunk: the most tokens a step may schedule."""
    max_num_seqs: int
    long_prefill_token_threshold: int = 0
    """A longer prefill gets at most this many tokens a step; 0 = no limit."""
    replay: bool = True
    """Bounded replay asked for (vLLM's ``--swa-bounded-replay``)."""
    async_scheduling: Literal[True] | UnsetType = UNSET
    """A step is scheduled while the one before it is in flight: executed, but its output not yet seen."""
    drafts: int | UnsetType = UNSET
    """Speculative tokens that a decode verifies at most (vLLM's ``num_speculative_tokens``); unset: none."""
    drafter: Literal["mtp", "dspark"] | UnsetType = UNSET
    """Who drafts. mtp, dspark: one with KV of its own, so that slots for ``drafts`` tokens more are reserved; mtp's KV
    at a position depends on the next token. Unset: one without, as ngram."""
    window_groups: int | UnsetType = UNSET
    """Sliding-window groups, all alike but for their block tables; unset: one. DeepSeek-V4.1 has four."""
    retention: int | UnsetType | None = UNSET
    """Tokens between positions at which the prefix cache keeps a window, where it keeps windows (replay off); None:
    at every position that a hit can end on; unset: 0, at the ends of prompts only."""
    max_model_len: int | UnsetType = UNSET
    """Tokens that a request may have: a prompt that leaves no room for one more is refused, an output ends there;
    unset: as many as the longest request gets."""

    @property
    def windows(self) -> int:
        """Sliding-window groups."""
        return 1 if self.window_groups is UNSET else self.window_groups


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model that an engine with a model runs; ``invariants/dense.py`` says what it computes."""

    kind: Literal["exact", "deep", "decoder"] = "exact"
    """exact: window keys come from token embeddings, so a replay rebuilds them bit for bit. deep: from hidden states,
    as in the real model, so that layers above the first see another window after a hit than in a cold run. decoder:
    deep, and where replay is on the last three layers run on each chunk's last W rows only (CONTRACT 21)."""
    layers: int = 2
    """Each has a window cache and a compressed cache."""
    compress_ratio: int = 1
    """Tokens that share one state of the compressed (prefix-cacheable) cache; DeepSeek-V4.1 has 1 and 2."""
    seed: int = 0
    """Of the weights."""


@dataclass(slots=True)
class Outputs:
    """What an engine with a model gave back for a request, as vLLM's own sampler returned it."""

    tokens: IntArray
    """int32 [outputs], sampled greedily."""
    ids: IntArray
    """int32 [outputs, 1 + k]: the sampled token, then the k most likely ones."""
    logprobs: NDArray[np.float32]
    """float32 [outputs, 1 + k], of ``ids``."""
    prompt_ids: IntArray | None = None
    """int32 [prompt - 1, 1 + k]: row i is about position i + 1, its own token first; None if not asked for."""
    prompt_logprobs: NDArray[np.float32] | None = None
    """float32 like ``prompt_ids``."""
    hit: int = 0
    """Prefix-cache hit of the request's first admission, in tokens; for arms of which no more is kept."""


@dataclass(slots=True)
class CachedBytes:
    """Blocks in the prefix cache, each from when it got there until it left or the run ended: one entry a stay."""

    group: int
    block: IntArray
    """int32 [stays]"""
    since: IntArray
    """int32 [stays], step after which it was first seen in the cache."""
    until: IntArray
    """int32 [stays], last step after which it was looked at; the one that changed its bytes, if any did."""
    before: NDArray[np.uint64]
    """uint64 [stays], digest of its bytes, all layers of the group, at ``since``."""
    after: NDArray[np.uint64]
    """uint64 [stays], the same at ``until``."""


@dataclass(slots=True)
class Offer:
    """What a connector offers at each lookup of a request: KV of the first ``tokens`` tokens."""

    tokens: int
    carried: bool
    """Whether it has the window of every window group, too."""


@dataclass(slots=True)
class Load:
    """KV that a connector brings for one life, after its local hit (CONTRACT 7-9)."""

    tokens: int
    """External tokens that the scheduler took, of those offered."""
    carried: bool
    """Whether the load has the window of every window group, so that nothing is replayed once it is there."""
    begun: int
    """Step in which its blocks were allocated."""
    waits: bool
    """Async: nothing may be scheduled before it is there."""
    tables: list[IntArray] = field(default_factory=list)
    """[group] int32 [blocks]: the life's block ids right after allocation."""
    over: int | None = None
    """Step with whose output the connector told the scheduler that an async load is there, or has failed."""
    failed: bool = False


@dataclass(slots=True)
class TracedRequest:
    """A request as the engine ran it."""

    id: str
    arrive: int
    """Step before which it was handed to the engine."""
    prompt: IntArray
    """int32 [prompt length], token ids; of a request that continues another one and was never handed over, its own."""
    max_tokens: int
    output: list[int] = field(default_factory=list)
    """Sampled token ids, in order."""
    finished: Literal["length", "abort", "refused"] | None = None
    """How it ended; None: it never did."""
    outputs: Outputs | None = None
    """None where no model runs."""
    reads_cache: bool = True
    """False: it asks for prompt logprobs, of which every row has to be computed, and so looks nothing up."""
    offer: Offer | None = None
    """None: no connector has KV of it."""
    priority: int | None = None
    """Lower goes first, and stays when the pool is full; None: requests go in the order in which they arrived."""
    continues: int | None = None
    """Index of the request whose prompt and whole output begin this one's prompt."""


@dataclass(slots=True)
class Admission:
    """One time that a request left the waiting queue: first, or again after a preemption or a failed load. Its index in
    ``Trace.admissions`` names that life of the request; cells written in it carry that index. One that waits for a load
    has no chunk yet; if the load fails, or the request is aborted meanwhile, it never gets one."""

    step: int
    """Of the first chunk; -1: there is none."""
    request: int
    """Index into ``Trace.requests``."""
    tokens: int
    """Tokens known at admission: prompt, plus what was sampled before a preemption."""
    hit: int
    """Adopted prefix-cache hit H in tokens, before the rewind; what a connector loads is part of it."""
    replay_start: int
    """First position whose window KV this life holds; 0 = nothing is replayed."""
    computed: int
    """Tokens counted as computed when the first chunk was scheduled: H - W after a rewind, else H."""
    scheduled: int
    """Tokens of the first chunk."""
    resumed: bool
    """True after a preemption."""
    load: Load | None = None

    @property
    def local(self) -> int:
        """Tokens of the hit that were in the prefix cache."""
        return self.hit - (self.load.tokens if self.load else 0)

    @property
    def carried(self) -> bool:
        """Whether the window came with the hit, so that nothing is replayed."""
        return self.load is not None and self.load.carried


@dataclass(slots=True)
class Group:
    """A KV-cache group as vLLM's published spec describes it."""

    kind: Literal["cacheable", "window"]
    """window: holds sliding-window KV; cacheable: holds the prefix-cacheable (compressed/global) KV."""
    block_size: int
    prefix_cacheable: bool
    replay_tokens: int
    """``prefix_replay_tokens`` of the spec: W where the group is rebuilt by replay, else 0."""


@dataclass(slots=True)
class Gathers:
    """Window KV that one consumer reads in one step, as runs of consecutive positions.

    A query normally reads one run; a list with a hole or a repeat in it becomes several runs of that query.
    The cells are every distinct (row, position, slot) that any run covers, with what the shadow cache held there
    *after* this step's writes.
    """

    consumer: str
    """Who reads: "paged-index", "gather-length", "combine", "mixed-list", "ragged-list", "fused-decode", ...
    ("block-table" when no kernel ran: see ``Trace.kernels``)."""
    per: Literal["query", "row"]
    """query: a run is what one query reads; row: what all queries of a batch row read together."""
    row: IntArray
    """int32 [runs], batch row."""
    position: IntArray
    """int32 [runs], position of the reading query (per="row": of the row's first query)."""
    first: IntArray
    """int32 [runs], first position read."""
    last: IntArray
    """int32 [runs], last position read; last < first: the query reads nothing."""
    cell_row: IntArray
    """int32 [cells]"""
    cell_position: IntArray
    """int32 [cells], the position that the consumer believes is there."""
    cell_slot: IntArray
    """int64 [cells]"""
    cell_writer: IntArray
    """int32 [cells], admission that wrote the slot last, or NOBODY. Where the window group is prefix-cacheable (replay
    off) an adopted cell was written by an earlier admission, of this or another request with the same tokens."""
    cell_written: IntArray
    """int32 [cells], position that was written there, or -1."""
    serves: Literal["all", "prefills", "decodes"] = "all"
    """Whose windows it reads: those of all rows, or of those that run as a prefill, or as a decode. A row of one token
    may run as either, whatever it is."""
    sampled: bool = False
    """Asked in some steps only: where it is absent, nothing is missing."""
    group: int | None = None
    """The window group that it reads, as an index into ``Trace.groups``; None: the first one."""


@dataclass(slots=True)
class Writes:
    """KV writes of one step into one group, in batch order. Padded rows (slot -1) are listed too."""

    group: int
    row: IntArray
    """int32 [tokens], batch row."""
    position: IntArray
    """int32 [tokens]"""
    slot: IntArray
    """int64 [tokens]"""


@dataclass(slots=True)
class Step:
    """One scheduler step and the batch the worker made of it. Rows are in the worker's order."""

    index: int
    request: IntArray
    """int32 [rows], index into ``Trace.requests``."""
    admission: IntArray
    """int32 [rows], index into ``Trace.admissions``: this life of the request."""
    computed: IntArray
    """int32 [rows], tokens computed before the step."""
    scheduled: IntArray
    """int32 [rows], tokens scheduled."""
    prefill: BoolArray
    """bool [rows], True while the row has prompt (or replayed output) left to compute before this step."""
    replay_start: IntArray
    """int32 [rows], the bound that the worker handed to the metadata builders (0 on decode rows)."""
    tables: list[list[IntArray]]
    """[group][row] int32 [blocks]: block ids as the KV-cache manager holds them after scheduling."""
    gathers: list[Gathers] = field(default_factory=list)
    writes: list[Writes] = field(default_factory=list)
    """One for each group."""
    preempted: list[int] = field(default_factory=list)
    """Requests (indices) preempted in this step."""
    finished: list[int] = field(default_factory=list)
    """Requests (indices) that ended with this step's output, or were aborted before it."""
    events: list[str] = field(default_factory=list)
    """Events of the case applied before the step: "preempt", "abort", "reset_prefix_cache" (only if it took
    effect), "drop_blocks"."""
    queue: list[tuple[Turn, int]] = field(default_factory=list)
    """What the scheduler did with those that waited, in its order, and for which admission. Empty: all admissions that
    begin in the step, each looked up and then run."""
    processed: int | None = None
    """Steps of the trace, from the first one on, whose output the scheduler had when it scheduled this one. None: that
    of all before it. What follows is known, too, where this is."""
    drafts: IntArray | None = None
    """int32 [rows], how many of the scheduled tokens, the last ones, are drafts to be verified."""
    accepted: IntArray | None = None
    """int32 [rows], drafts that turned out right when the step was executed. The KV of the others is void."""
    delivered: dict[int, int] | None = None
    """Request (index) to tokens that its client got of this step's output, which may be fewer than were sampled."""
    idled: bool = False
    """After the step the engine had no request for a while, and so ran a dummy batch, as a data-parallel rank does
    while others have requests. What that wrote and read is listed with rows of no request."""


@dataclass(slots=True)
class Final:
    """The block pool after the last request ended."""

    free_blocks: int
    total_blocks: int
    """Blocks that can be handed out: the pool without its null block."""
    referenced: IntArray
    """int32 [n], ids of blocks (null block aside) whose reference count is not zero."""


@dataclass(slots=True)
class Fault:
    """Something that must never happen: an exception out of vLLM, a dead engine, a GPU fault, or a memory fault: a
    kernel touches what it may not."""

    kind: Literal["exception", "hang", "signal", "gpu", "nan", "memory fault"]
    step: int
    """-1: unknown, the process that knew is dead."""
    message: str
    place: str = ""
    """Where, for telling faults apart: the file and function that raised, a GPU kernel. Never a value."""


@dataclass(slots=True)
class Trace:
    """Everything that an engine saw while it ran one case."""

    engine: str
    geometry: Geometry
    requests: list[TracedRequest]
    groups: list[Group]
    replay_expected: bool
    """Whether configuration and architecture say that replay is on here (CONTRACT 3)."""
    kernels: str
    """What executed the Triton kernels: "compiled", "interpreter", "gpu", or "none" (nothing did: the gathers are
    then the contract's windows looked up in vLLM's block tables)."""
    admissions: list[Admission] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    final: Final | None = None
    """None if the run broke off."""
    faults: list[Fault] = field(default_factory=list)
    metrics: dict[str, int] = field(default_factory=dict)
    """"prefix_cache_queries" and "prefix_cache_hits" in tokens, first admissions only; "preempted_hits" in tokens for
    those after a preemption; "cached_tokens", which clients are told with the first token of a request that has any,
    and "external_tokens", those of them that a connector loaded; "connector_hits" and "connector_preempted_hits", as
    vLLM counts tokens that a connector loads.
    A metric that the engine does not have is absent."""
    probe: Probe | None = None
    """None where no model runs."""
    arms: dict[str, list[Outputs | None]] = field(default_factory=dict)
    """The same requests run again, one entry each (None: not comparable); an arm that was not run is absent.
    "no-cache": prefix caching off, no events. "ngram": speculative decoding on, no events.
    "twice": exactly the same again. "poison": the same, with everything that the batch of a step may not read
    overwritten before the step. "alone": each request by itself, after one that
    caches just the prefix it had hit."""
    cached: list[CachedBytes] = field(default_factory=list)
    """One for each prefix-cacheable group, where there are bytes."""
    interpreted: dict[str, int] = field(default_factory=dict)
    """Launches that ran under Triton's interpreter although kernels are compiled, by kernel."""
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


Architecture = Literal["other", "CDNA4", "CDNA3"]
"""Of the GPU; other: not AMD's."""


@dataclass(slots=True)
class Gate:
    """Whether the window cache of a layer is replayed, in some circumstances."""

    architecture: Architecture
    asked: bool
    """``--swa-bounded-replay``, which is vLLM's default."""
    window: int
    """W, in tokens."""
    runner: Literal[1, 2] = 2
    """vLLM's model runner V1 or V2."""
    context_parallel: int = 1
    """Ranks that share a prefill (prefill context parallelism)."""
    prefix_caching: bool = True
    prefix_cacheable: bool | None = None
    """Whether the published KV-cache spec puts the window into the prefix cache; None: not asked yet."""
    replay_tokens: int | None = None
    """``prefix_replay_tokens`` of the spec."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken promise, told so that nothing else is needed to understand it."""

    invariant: str
    message: str
    """What rule was broken, in one sentence with values."""
    expected: str
    seen: str
    request: str | None = None
    step: int | None = None
    row: int | None = None
    position: int | None = None
    site: str = ""
    """Where it fired, for telling findings apart: a consumer, a group, a field. Never a value."""

    def __str__(self) -> str:
        where = ", ".join(
            f"{name} {value}"
            for name, value in (
                ("request", self.request),
                ("step", self.step),
                ("row", self.row),
                ("position", self.position),
            )
            if value is not None
        )
        return f"{self.invariant}: {self.message} (expected {self.expected}, saw {self.seen}; {where or 'whole run'})"
