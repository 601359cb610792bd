# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""No part of a trace goes unjudged: change any one number of an accepted trace, and some invariant speaks up.

What may change unnoticed is listed in ``HARMLESS``, with the reason: in every trace, or in one, NAME/PATH.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import msgspec
import numpy as np
import traces
from load_traces import LOADED

from invariants import judge
from invariants.trace import Trace

GOOD = traces.GOOD | LOADED

HARMLESS = {
    r"geometry/(block_size|swa_block_size)": "asked for; what counts is the block size that a group has",
    r"geometry/(max_num_batched_tokens|max_num_seqs|long_prefill_token_threshold)": "a limit that does not bind",
    r"geometry/replay": "asked for; whether it is on is in replay_expected",
    r"requests/\d/arrive": "nothing but long_prefill_token_threshold depends on it, and that is off",
    r"requests/\d/(prompt|output)/\d+": "a token in no block that is hit",
    r"steps/\d/index": "the last step: nothing refers to it",
    r"steps/\d/tables/[12]/\d/[0-3]": "an entry below the window when a life begins: null there is allowed, not owed",
    r"steps/\d/idled": "what its batch writes and reads is judged, not that it ran",
    r"steps/\d/gathers/\d/sampled": "asked in every step that there is",
    r"admissions/\d/load/begun": "an async load: nobody else had its blocks, whenever it began",
    r"admissions/\d/load/over": "one that is known to be over sooner may be used as late as this",
    r"load_failed/(admissions/0/load/(carried|tables/\d/\d)|requests/0/offer/carried)": "nothing of it is kept",
    r"loaded_\w+/admissions/\d/load/tables/1/[0-2]": "an entry below the window, likewise",
    r"loaded_then_replayed/requests/1/offer/tokens": "a token less, or more, makes no whole block",
    r"load_failed/steps/[01]/writes/\d/group": "a step without rows writes nothing",
    r"steps/2/gathers/\d/cell_writer/[0-2]": "replay off: KV that the request wrote itself is as good as adopted KV",
}

POINTS_NOWHERE = re.compile(r"admissions/\d/request|steps/\d/finished/\d|steps/\d/queue/\d/1")
"""An index that the engine makes up itself: judging one that points nowhere raises IndexError or KeyError."""


def numbers(thing: object, path: str) -> Iterator[str]:
    """Paths of all numbers in it; arrays by entry."""
    if is_dataclass(thing):
        for field in fields(thing):
            yield from numbers(getattr(thing, field.name), f"{path}/{field.name}")
    elif isinstance(thing, msgspec.Struct):
        for name in thing.__struct_fields__:
            yield from numbers(getattr(thing, name), f"{path}/{name}")
    elif isinstance(thing, dict):
        for name, value in thing.items():
            yield from numbers(value, f"{path}/{name}")
    elif isinstance(thing, list | tuple | np.ndarray):
        for index, value in enumerate(thing):
            yield from numbers(value, f"{path}/{index}")
    elif isinstance(thing, int | np.integer | np.bool_):
        yield path[1:]


def change(trace: Trace, path: str, by: int) -> None:
    """Add to the number at the path; a bool is turned over."""
    *walk, last = path.split("/")
    thing: object = trace
    owner: object = trace
    for name in walk:
        owner, thing = thing, step_into(thing, name)
    value = step_into(thing, last)
    changed = not value if isinstance(value, bool | np.bool_) else value + by
    if isinstance(thing, msgspec.Struct):
        setattr(owner, walk[-1], msgspec.structs.replace(thing, **{last: changed}))
    elif isinstance(thing, tuple):
        owner[int(walk[-1])] = (*thing[: int(last)], changed, *thing[int(last) + 1 :])
    elif isinstance(thing, dict):
        thing[last] = changed
    elif isinstance(thing, list | np.ndarray):
        thing[int(last)] = changed
    else:
        setattr(thing, last, changed)


def step_into(thing: object, name: str) -> object:
    if isinstance(thing, dict):
        return thing[name]
    return thing[int(name)] if isinstance(thing, list | tuple | np.ndarray) else getattr(thing, name)


def unjudged(name: str) -> set[str]:
    """Paths of numbers of that trace which may change, up or down, without a word."""
    trace = GOOD[name]()
    silent = set()
    for path in list(numbers(trace, "")):
        for by in (1, -1):
            change(trace, path, by)
            try:
                if not judge(trace):
                    silent.add(path)
            except LookupError:
                assert POINTS_NOWHERE.fullmatch(path), path
            change(trace, path, -by)
    assert judge(trace) == []
    return silent


def test_sweep():
    used = set()
    for name in GOOD:
        for path in unjudged(name):
            reasons = [pattern for pattern in HARMLESS if re.fullmatch(rf"({name}/)?({pattern})", f"{name}/{path}")]
            assert reasons, f"{path} of {name} may change unnoticed"
            used.update(reasons)
    assert used == set(HARMLESS)
