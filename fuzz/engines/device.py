# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""What is known on the device, without a model: how far each request is computed, and which tokens it samples.

The device is ahead of a scheduler that schedules a step while the one before is in flight. A request's next token is a
fixed function of all tokens so far, so that equal prompts get equal outputs, as greedy decoding gives; how many drafts
are right is one of the request's name and the position. Relied upon: steps run on the device in the order in which
they were scheduled, each one's writes and reads before the next one's.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from msgspec import UNSET

from fuzz.case import FIRST_TOKEN, TOKENS, Case
from invariants.trace import IntArray


class Sample(NamedTuple):
    """What one row of a step comes to."""

    tokens: list[int]
    """Sampled: the accepted drafts and one more. Empty where known tokens are left to compute."""
    drafts: int
    accepted: int

    @property
    def rejected(self) -> int:
        """Drafts whose tokens are not part of the request: it goes on where the first of them was."""
        return self.drafts - self.accepted


@dataclass(slots=True)
class _Life:
    computed: int
    known: int


class Device:
    """For one case."""

    def __init__(self, case: Case) -> None:
        geometry = case.geometry
        self._most = 0 if geometry.drafts is UNSET else geometry.drafts
        self._eager = geometry.drafter is not UNSET
        self._lives: dict[str, _Life] = {}
        self._prompts: dict[str, int] = {}
        self._next: dict[str, int] = {}
        self._outputs: dict[str, list[int]] = {}

    def add(self, name: str, prompt: IntArray) -> None:
        """A request as it is handed over, with int32 [its whole prompt]."""
        self._prompts[name] = len(prompt)
        self._next[name] = zlib.crc32(prompt.tobytes())
        self._outputs[name] = []

    def execute(self, output: Any) -> dict[str, Sample]:
        """One step, a vLLM SchedulerOutput: what each of its requests samples."""
        for data in output.scheduled_new_reqs:
            self._lives[data.req_id] = _Life(data.num_computed_tokens, len(data.prefill_token_ids))
        fresh = {data.req_id for data in output.scheduled_new_reqs}
        samples = {}
        for name, scheduled in output.num_scheduled_tokens.items():
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            # A prefill's drafts are there to make it as long as a decode; no stream has the token that they are.
            accepted = 0 if name in fresh else right(name, drafts, self._lives[name].computed)
            samples[name] = self._row(name, scheduled, drafts, accepted)
        return samples

    def _row(self, name: str, scheduled: int, drafts: int, accepted: int) -> Sample:
        life = self._lives[name]
        end = life.computed + scheduled
        if end - drafts < life.known:
            life.computed = end
            return Sample([], drafts, drafts)
        tokens = [self.token(name, end - drafts + number) for number in range(accepted + 1)]
        life.computed = end - drafts + accepted
        life.known = life.computed + 1
        return Sample(tokens, drafts, accepted)

    def drafts(self, name: str) -> list[int]:
        """What is drafted after the request's latest step: a drafter with KV of its own always drafts as many as it
        may. Which tokens they are is of no account, ``right`` says how many are."""
        most = self._most if self._eager else right(f"{name} drafts", self._most + 1, self._lives[name].computed)
        return [FIRST_TOKEN] * min(most, self._most)

    def token(self, name: str, position: int) -> int:
        """The request's token at a position past its prompt."""
        outputs = self._outputs[name]
        while len(outputs) <= position - self._prompts[name]:
            outputs.append(FIRST_TOKEN + self._next[name] % TOKENS)
            self._next[name] = zlib.crc32(np.int32(outputs[-1]).tobytes(), self._next[name])
        return outputs[position - self._prompts[name]]


def right(name: str, count: int, position: int) -> int:
    """How many of so many drafts after a position are right: 0 to ``count``."""
    return zlib.crc32(f"{name} {position}".encode()) % (count + 1)
