# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Cases of fixed sizes, as vLLM's own public tests of replay have them: what generated cases are measured against.

Those tests (vllm#56227) have blocks of 16, a window of 32 and a prompt of 100 tokens, two requests one after the other:
the same prompt twice, the same in chunks of 16, and a hit no longer than the window. There are two cases more here.
"""

from __future__ import annotations

import msgspec

from fuzz.case import Case, Request, Slice
from invariants.trace import Geometry, Probe

_GEOMETRY = Geometry(
    window=32, block_size=16, swa_block_size=16, num_blocks=200, max_num_batched_tokens=8192, max_num_seqs=16
)
_CHUNKED = msgspec.structs.replace(_GEOMETRY, long_prefill_token_threshold=16)
_PROMPT: Slice = ("text", 0, 100)


def _case(geometry: Geometry, first: tuple[Slice, ...], second: tuple[Slice, ...], arrive: int = 1) -> Case:
    requests = (
        Request(id="first", arrive=0, prompt=first, max_tokens=4),
        Request(id="second", arrive=arrive, prompt=second, max_tokens=4),
    )
    return Case(geometry=geometry, requests=requests)


CASES = (
    _case(_GEOMETRY, (_PROMPT,), (_PROMPT,)),
    _case(_CHUNKED, (_PROMPT,), (_PROMPT,)),
    _case(_GEOMETRY, (("text", 0, 32),), (_PROMPT,)),
    _case(_GEOMETRY, (_PROMPT,), (_PROMPT, ("more", 0, 20))),
    _case(_GEOMETRY, (_PROMPT,), (_PROMPT,), arrive=20),
)


def fixed_cases(engine: str) -> list[Case]:
    """For the engine of that name; where a model runs, with each kind of it."""
    if engine != "cpu":
        return list(CASES)
    probes = (Probe(kind="exact"), Probe(kind="deep"), Probe(kind="decoder", layers=3))
    return [msgspec.structs.replace(case, probe=probe) for probe in probes for case in CASES]
