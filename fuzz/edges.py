# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Edges: which of the situations worth reaching one run reached, told from its trace.

A run that is clean says little if it never replayed a window beside a decode. Reports list these edges, a strategy is
measured by them, and a seed case is there for one of them.

Relied upon: ``invariants.reference.predict`` for hits that were found but not adopted, of which a trace says nothing.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

import numpy as np
from msgspec import UNSET

from fuzz.flight_edges import FLIGHT_EDGES, flight_edges
from fuzz.load_edges import LOAD_EDGES, load_edges
from invariants.flight import tokens_ahead
from invariants.reference import Prediction, hit_multiple, predict
from invariants.trace import NULL_BLOCK, Admission, IntArray, Step, Trace

EDGES: Final[dict[str, str]] = {
    "hit-above-window": "a hit longer than the window is adopted, its last window replayed",
    "hit-equals-window": "a hit exactly as long as the window is found, and not adopted",
    "hit-below-window": "a hit shorter than the window is found, and not adopted",
    "hit-smallest-adopted": "the adopted hit is the shortest that a window allows",
    "hit-whole-prompt": "a request with a hit whose whole prompt begins an earlier request",
    "hit-backs-off": "a whole cached prompt ends on a hit boundary, so that its last block is computed again",
    "identical-twice": "two requests with a hit in the second have the same prompt",
    "one-token-tail": "one token follows the hit",
    "several-depths": "two requests adopt hits of different lengths",
    "divergence-in-last-block": "a prompt leaves an earlier one inside its own last block",
    "hit-on-chunk-boundary": "an adopted hit is a whole number of chunks long",
    "same-step-hit": "a hit adopts a block that another request computes in the same step",
    "burst": "two requests are admitted in one step",
    "replay-only-chunk": "a chunk ends inside the replayed range",
    "replay-ends-chunk": "a chunk ends exactly where the replayed range does",
    "replay-spans-chunks": "the replayed range takes two or more chunks",
    "several-replaying": "two rows of one step replay",
    "decode-beside-replay": "a row replays beside one that decodes",
    "cold-beside-replay": "a row replays beside a prefill without a hit",
    "one-token-extension": "a prefill goes on by a single token",
    "one-token-replay": "a prefill with a replay_start goes on by a single token",
    "replay-in-large-step": "a row replays in a step of 1,024 tokens or more",
    "row-moved": "a row moves in the batch between two steps of its replay",
    "cold-after-replay": "a request without a hit is admitted after a replayed one left, and may take its state row",
    "long-prefill-cut": "the long-prefill threshold cuts a chunk that the budget would have allowed",
    "budget-cut": "a chunk is cut because other rows of the step took part of the budget",
    "preempted": "a request is preempted",
    "preempted-mid-replay": "a request is preempted before its replay is over",
    "preempted-then-hit": "a resumed request adopts a hit",
    "resumed-replays-output": "a resumed request replays tokens that it had sampled itself",
    "resumed-elsewhere": "a resumed request replays from another position than in its earlier life",
    "eviction": "a cached block is handed out again",
    "evicted-then-miss": "a request misses tokens that were cached once, because of an eviction",
    "abort": "a request is aborted",
    "aborted-mid-replay": "a request is aborted before its replay is over",
    "reset-prefix-cache": "the prefix cache is reset",
    "reset-then-miss": "a request misses tokens that were cached before a reset",
    "drop-blocks": "cached blocks are dropped",
    "dropped-then-miss": "a request misses tokens that were cached before blocks were dropped",
    "replay-off-hit": "a hit is adopted with replay off",
    "replay-start-mid-block": "replay starts inside a block of the window group",
    "replay-start-retired": "replay starts in a block that retention gives up (CONTRACT 12)",
    "overtaken": "by priority, a request is admitted before one that has waited longer",
    "preempted-by-priority": "the pool preempts a request though others have been admitted after it",
    "resumed-cold-after-replay": "a resumed request adopts no hit, though it replayed in its earlier life",
    "several-window-groups": "a hit is replayed in two or more window groups",
    "preempted-repeatedly": "a request is preempted three times or more",
    "prompt-refused": "a prompt leaves no room for a token more, and is refused",
    "output-cut": "an output ends where the longest allowed request does",
    "retained-hit": "replay is off, and a hit ends where no earlier prompt does: a retention interval keeps the window",
    "retention-beside-replay": "a hit is replayed, and a retention interval is set for nothing",
    "window-block-larger": "a hit is replayed where blocks of the window group are larger than the cacheable group's",
    "window-block-not-dividing": "a hit is replayed where the block of neither group divides the other's",
    "idle-batch-over-cached-blocks": "an engine without requests runs a dummy batch while blocks are cached",
    "continued": "a request begins with the prompt and the whole output of an earlier one",
    "continued-hits-output": "one that does so adopts tokens that the earlier one sampled",
    "continued-hit-on-hit": "one that does so replays after a hit, and so did the earlier one",
    "continued-stops-short": "one that does so misses a hit unit that ends with the last sampled token: it has no KV",
    **FLIGHT_EDGES,
    **LOAD_EDGES,
}
"""Edge id to what it means, in one line. Ids are stable: reports, tests and seeds use them."""

LARGE_STEP: Final = 1024
"""Tokens from which the sparse-attention kernel of gfx950 takes another path, the one that once faulted."""


def edges(trace: Trace) -> set[str]:
    """Ids of the edges that the run reached; also those of a run that broke off."""
    return _Walk(trace).run() | flight_edges(trace) | load_edges(trace) if trace.groups else set()


class _Walk:
    """The trace's steps in order, and what has to be remembered from one to the next."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.reached: set[str] = set()
        self.window = trace.geometry.window
        self.multiple = hit_multiple(trace)
        self.cacheable = next((i for i, group in enumerate(trace.groups) if group.kind == "cacheable"), 0)
        self.windows = sum(group.kind == "window" for group in trace.groups)
        self.tokens = [np.concatenate([r.prompt, np.asarray(r.output, np.int32)]) for r in trace.requests]
        self.commons: dict[tuple[int, int], int] = {}
        self.end: dict[int, int] = {}
        """For each admission: tokens computed so far."""
        self.progress: dict[int, int] = defaultdict(int)
        """For each request: the most tokens that any life of it computed."""
        self.life: dict[int, int] = {}
        """For each request: its latest admission."""
        self.rows: dict[int, int] = {}
        """For each admission that replays: its row in the step before."""
        self.seen: dict[int, list[int]] = {}
        """For each admission: entries seen so far of its table in each group."""
        self.cached: set[int] = set()
        self.fresh: set[int] = set()
        """Blocks that can be hit, and those of them that were computed in this step."""
        self.registered: dict[int, int] = {}
        self.lost = "evicted-then-miss"
        """What a miss of tokens that were once cached means at this point of the run."""
        self.depths: set[int] = set()
        self.replayed = False
        """Whether a request that replayed has left."""

    def run(self) -> set[str]:
        predictions = predict(self.trace)
        self._ends()
        for step in self.trace.steps:
            self._before(step)
            rows = {admission: row for row, admission in enumerate(step.admission.tolist())}
            born = sorted(admission for admission in rows if admission not in self.end)
            if len(born) > 1:
                self.reached.add("burst")
            self.fresh.clear()
            for admission, row in rows.items():
                if admission in self.end:
                    self._row(step, admission, row)
            for admission in born:
                self._admitted(step, admission, rows[admission], predictions[admission])
                self._row(step, admission, rows[admission])
            self._batch(step)
            self._left(step.finished)
            if step.idled and self.cached:
                self.reached.add("idle-batch-over-cached-blocks")
        return self.reached

    def _ends(self) -> None:
        """Which requests ended otherwise than by their own length."""
        limit = self.trace.geometry.max_model_len
        for number, request in enumerate(self.trace.requests):
            if request.finished == "refused":
                self.reached.add("prompt-refused")
            cut = len(request.prompt) + len(request.output) == limit and len(request.output) < request.max_tokens
            if cut and request.finished == "length":
                self.reached.add("output-cut")
            if sum(number in step.preempted for step in self.trace.steps) > 2:
                self.reached.add("preempted-repeatedly")

    def _before(self, step: Step) -> None:
        """Events, preemptions and aborts, which come before the step's rows."""
        for event in step.events:
            if event in ("reset_prefix_cache", "drop_blocks"):
                self.reached.add(event.replace("_", "-"))
                self.lost = "reset-then-miss" if event == "reset_prefix_cache" else "dropped-then-miss"
                self.cached.clear()
        self._priorities(step)
        for request in step.preempted:
            self._cut_short(request, "preempted", "preempted-mid-replay")
        self._left(step.preempted)
        for request in step.finished:
            if self.trace.requests[request].finished == "abort":
                self._cut_short(request, "abort", "aborted-mid-replay")

    def _priorities(self, step: Step) -> None:
        """Who goes before whom where requests have priorities."""
        requests = self.trace.requests
        if all(request.priority is None for request in requests):
            return
        latest = int(step.admission.max(initial=-1))
        if "preempt" not in step.events and any(self.life.get(one, latest) < latest for one in step.preempted):
            self.reached.add("preempted-by-priority")
        waiting = [
            request.arrive
            for index, request in enumerate(requests)
            if request.arrive < step.index and index not in self.life and index not in step.request
            if request.finished != "refused"
        ]
        new = [requests[index].arrive for index in step.request.tolist() if index not in self.life]
        if waiting and new and min(waiting) < max(new):
            self.reached.add("overtaken")

    def _cut_short(self, request: int, edge: str, mid_replay: str) -> None:
        self.reached.add(edge)
        admission = self.life.get(request)
        if admission is not None and self._replaying(admission, self.end[admission]):
            self.reached.add(mid_replay)

    def _left(self, requests: list[int]) -> None:
        for request in requests:
            admission = self.life.get(request)
            self.replayed |= admission is not None and self.trace.admissions[admission].replay_start > 0

    def _replaying(self, admission: int, computed: int) -> bool:
        life = self.trace.admissions[admission]
        return life.replay_start > 0 and computed < life.hit

    def _common(self, one: int, other: int) -> int:
        """Tokens that two requests share from the start, outputs included."""
        pair = (min(one, other), max(one, other))
        if pair not in self.commons:
            self.commons[pair] = common_prefix(self.tokens[one], self.tokens[other])
        return self.commons[pair]

    def _admitted(self, step: Step, admission: int, row: int, prediction: Prediction | None) -> None:
        life = self.trace.admissions[admission]
        earlier = self.trace.requests[life.request].continues
        if earlier is not None and earlier in self.life and not life.resumed:
            self._continued(life, earlier)
        if life.resumed:
            self._resumed(life)
        elif self.replayed and not life.hit:
            self.reached.add("cold-after-replay")
        if life.hit:
            self._adopted(step, life, row)
        elif prediction and self.trace.replay_expected and 0 < prediction.low == prediction.high <= self.window:
            self.reached.add("hit-equals-window" if prediction.high == self.window else "hit-below-window")
        self._shared(life, prediction)
        self.life[life.request] = admission
        self.registered[admission] = life.hit // self.trace.geometry.block_size
        reused = 0 if self.trace.replay_expected else life.hit
        self.seen[admission] = [
            (life.hit if index == self.cacheable else reused) // group.block_size
            for index, group in enumerate(self.trace.groups)
        ]

    def _continued(self, life: Admission, earlier: int) -> None:
        """The first life of a request that continues an earlier one."""
        self.reached.add("continued")
        known = len(self.tokens[earlier])
        if life.hit > len(self.trace.requests[earlier].prompt):
            self.reached.add("continued-hits-output")
        if life.replay_start and self.trace.admissions[self.life[earlier]].replay_start:
            self.reached.add("continued-hit-on-hit")
        if known % self.multiple == 0 and known < life.tokens and life.hit == known - self.multiple:
            self.reached.add("continued-stops-short")

    def _resumed(self, life: Admission) -> None:
        before = self.life.get(life.request)
        if life.hit:
            self.reached.add("preempted-then-hit")
            if life.replay_start and life.hit > len(self.trace.requests[life.request].prompt):
                self.reached.add("resumed-replays-output")
        if before is not None and self.trace.admissions[before].replay_start not in (0, life.replay_start):
            self.reached.add("resumed-elsewhere" if life.hit else "resumed-cold-after-replay")

    def _adopted(self, step: Step, life: Admission, row: int) -> None:
        geometry, hit = self.trace.geometry, life.hit
        self.depths.add(hit)
        if life.replay_start:
            self.reached.add("hit-above-window")
            self._layout(geometry.block_size, geometry.swa_block_size)
            if hit == (self.window // self.multiple + 1) * self.multiple:
                self.reached.add("hit-smallest-adopted")
            if life.replay_start % geometry.swa_block_size:
                self.reached.add("replay-start-mid-block")
            if (life.replay_start + 1) % geometry.swa_block_size == 0:
                self.reached.add("replay-start-retired")
        if not self.trace.replay_expected:
            self.reached.add("replay-off-hit")
        if geometry.retention not in (UNSET, 0):
            earlier = [self.trace.requests[request] for request in self.life]
            ends = {(len(request.prompt) - 1) // self.multiple * self.multiple for request in earlier}
            if self.trace.replay_expected:
                self.reached.add("retention-beside-replay")
            elif hit not in ends:
                self.reached.add("retained-hit")
        if life.tokens == hit + 1:
            self.reached.add("one-token-tail")
        if len(self.depths) > 1:
            self.reached.add("several-depths")
        if hit % geometry.max_num_batched_tokens == 0:
            self.reached.add("hit-on-chunk-boundary")
        if step.tables and self.fresh.intersection(
            step.tables[self.cacheable][row][: hit // geometry.block_size].tolist()
        ):
            self.reached.add("same-step-hit")

    def _layout(self, block: int, window_block: int) -> None:
        """What a replayed hit says of the groups."""
        if self.windows > 1:
            self.reached.add("several-window-groups")
        if window_block > block:
            self.reached.add("window-block-larger")
        if window_block % block and block % window_block:
            self.reached.add("window-block-not-dividing")

    def _shared(self, life: Admission, prediction: Prediction | None) -> None:
        """What the request has in common with those before it, itself before a preemption included."""
        prompt = len(self.trace.requests[life.request].prompt)
        once = 0
        for other, done in self.progress.items():
            common = len(self.tokens[other]) if other == life.request else self._common(life.request, other)
            once = max(once, min(common, done))
            if other == life.request or life.resumed:
                continue
            if common % self.multiple and common < prompt and common // self.multiple == (prompt - 1) // self.multiple:
                self.reached.add("divergence-in-last-block")
            if common >= prompt and life.hit:
                self.reached.add("hit-whole-prompt")
                if prompt % self.multiple == 0 and life.hit == prompt - self.multiple:
                    self.reached.add("hit-backs-off")
                if prompt == len(self.trace.requests[other].prompt):
                    self.reached.add("identical-twice")
        once -= tokens_ahead(self.trace.geometry)
        cached_once = min(once, life.tokens - 1) // self.multiple * self.multiple
        found_at_most = life.hit or min(self.window, prediction.high if prediction else 0)
        if self.trace.replay_expected and found_at_most < cached_once:
            self.reached.add(self.lost)

    def _row(self, step: Step, admission: int, row: int) -> None:
        life = self.trace.admissions[admission]
        computed, scheduled = int(step.computed[row]), int(step.scheduled[row])
        if step.drafts is not None:
            scheduled -= int(step.drafts[row])
        end, first = computed + scheduled, admission not in self.end
        if self._replaying(admission, computed):
            if end <= life.hit:
                self.reached.add("replay-only-chunk" if end < life.hit else "replay-ends-chunk")
            if not first:
                self.reached.add("replay-spans-chunks")
                if self.rows.get(admission, row) != row:
                    self.reached.add("row-moved")
            self.rows[admission] = row
        if scheduled == 1 and not first and computed < life.tokens:
            self.reached.add("one-token-extension")
            if life.replay_start:
                self.reached.add("one-token-replay")
        if end < life.tokens:
            self._cut(step, scheduled)
        self.end[admission] = end
        self.progress[life.request] = max(self.progress[life.request], end)
        if step.tables:
            self._blocks(step, admission, row, end)

    def _cut(self, step: Step, scheduled: int) -> None:
        """Why the row was not scheduled to its end."""
        geometry = self.trace.geometry
        budget_left = int(step.scheduled.sum()) < geometry.max_num_batched_tokens
        if scheduled == geometry.long_prefill_token_threshold:
            if budget_left:
                self.reached.add("long-prefill-cut")
        elif not budget_left and scheduled < geometry.max_num_batched_tokens:
            self.reached.add("budget-cut")

    def _blocks(self, step: Step, admission: int, row: int, end: int) -> None:
        """Blocks newly in the row's tables were handed out; those that the chunk fills can be hit from now on."""
        seen = self.seen[admission]
        for group, tables in enumerate(step.tables):
            table = tables[row]
            if len(table) > seen[group]:
                for block in table[seen[group] :].tolist():
                    if block in self.cached:
                        self.cached.discard(block)
                        self.reached.add("eviction")
                seen[group] = len(table)
        done = self.registered[admission]
        full = end // self.multiple * self.multiple // self.trace.geometry.block_size
        if full > done:
            blocks = step.tables[self.cacheable][row][done:full].tolist()
            self.fresh.update(blocks)
            self.cached.update(block for block in blocks if block != NULL_BLOCK)
            self.registered[admission] = full

    def _batch(self, step: Step) -> None:
        """Who shares the step with a row that replays."""
        prefill, computed = step.prefill.tolist(), step.computed.tolist()
        replaying = decoding = cold = 0
        for row, admission in enumerate(step.admission.tolist()):
            replaying += self._replaying(admission, computed[row])
            decoding += not prefill[row]
            cold += prefill[row] and not self.trace.admissions[admission].hit
        if replaying and int(step.scheduled.sum()) >= LARGE_STEP:
            self.reached.add("replay-in-large-step")
        if replaying:
            self.reached.update(
                edge
                for edge, count in (
                    ("several-replaying", replaying - 1),
                    ("decode-beside-replay", decoding),
                    ("cold-beside-replay", cold),
                )
                if count
            )


def common_prefix(one: IntArray, other: IntArray) -> int:
    """Tokens that two token arrays share from the start."""
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length
