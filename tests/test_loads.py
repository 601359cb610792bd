# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""External loads: the rule for their hits by hand, what breaks a correct trace with one, their edges, and bad input.
That vLLM's own scheduler does all this with our connector is what the seeds of that name are for (test_seeds.py)."""

from __future__ import annotations

from collections.abc import Callable

import load_traces
import pytest
from breaks import put
from msgspec.structs import replace

from fuzz.case import CaseError, Event, check, decode
from fuzz.edges import edges
from fuzz.engines.base import Engine
from fuzz.engines.loads import Loads
from invariants import judge
from invariants.reference import loaded_hit
from invariants.trace import Offer, Trace


@pytest.mark.parametrize(
    ("local", "offered", "carried", "replay", "multiple", "expected"),
    [
        (0, 255, False, 128, 128, (0, 0)),  # 255 is cut to 128, which is no longer than the window
        (0, 300, False, 128, 128, (256, 256)),  # CONTRACT 8: cut to whole blocks
        (0, 255, True, 128, 128, (255, 255)),  # CONTRACT 7: with its window it is taken as it is
        (0, 7, True, 8, 4, (7, 7)),  # however short
        (0, 8, False, 8, 4, (0, 0)),  # CONTRACT 5
        (4, 12, False, 8, 4, (12, 8)),  # local and external tokens count together
        (4, 8, False, 8, 4, (0, 0)),
        (12, 8, False, 8, 4, (12, 0)),  # the prefix cache has more
        (12, 15, False, 8, 4, (12, 0)),  # three more are no block
        (12, 15, True, 8, 4, (15, 3)),
        (0, 7, False, 0, 4, (4, 4)),  # replay off
    ],
)
def test_hit(local: int, offered: int, carried: bool, replay: int, multiple: int, expected: tuple[int, int]) -> None:
    assert loaded_hit(local, Offer(offered, carried), replay, multiple) == expected


def test_hit_without_an_offer():
    assert loaded_hit(12, None, 8, 4) == (12, 0)


def _rest(trace: Trace, **fields: object) -> None:
    """Of the first life with a load."""
    life = next(life for life in trace.admissions if life.load)
    for name, value in fields.items():
        owner = life if hasattr(life, name) else life.load
        assert getattr(owner, name) != value
        setattr(owner, name, value)


BREAKS: dict[str, tuple[str, str, str, Callable[[Trace], None]]] = {
    "a load is not cut to blocks": (
        "loaded_then_replayed", "hit-count", "hit", lambda t: _rest(t, hit=9, tokens=9),
    ),
    "an async load is not rewound": (
        "loaded_then_replayed", "hit-count", "replay_start", lambda t: _rest(t, replay_start=0),
    ),
    "tokens are scheduled before the load is there": (
        "loaded_then_replayed", "progress", "load", lambda t: _rest(t, over=2),
    ),
    "nobody said that it is there": (
        "loaded_then_replayed", "progress", "load", lambda t: _rest(t, over=None),
    ),
    "it failed and is used": (
        "loaded_then_replayed", "progress", "load", lambda t: _rest(t, failed=True),
    ),
    "its blocks are another's meanwhile": (
        "loaded_then_replayed", "write-fence", "group 0, load", lambda t: put(t.admissions[1].load.tables[0], 0, 2),
    ),
    "a row has other blocks than were loaded": (
        "loaded_then_replayed", "write-fence", "group 1, load", lambda t: put(t.admissions[1].load.tables[1], 2, 20),
    ),
    "it has too few blocks": (
        "loaded_then_replayed", "write-fence", "group 0, load",
        lambda t: t.admissions[1].load.tables.__setitem__(0, t.admissions[1].load.tables[0][:1]),
    ),
    "what carries its window is replayed": (
        "loaded_with_its_window", "hit-count", "replay_start", lambda t: _rest(t, replay_start=6),
    ),
    "a load at once comes late": (
        "loaded_with_its_window", "progress", "load", lambda t: _rest(t, begun=1),
    ),
    "nobody was looked up before it runs": (
        "loaded_then_replayed", "progress", "queue", lambda t: t.steps[0].queue.pop(0),
    ),
    "a request begins anew before its load is known to have failed": (
        "load_failed", "progress", "load", lambda t: _rest(t, over=2),
    ),
    "something of a failed load is computed": (
        "load_failed", "progress", "load", lambda t: _rest(t, computed=4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_rejects(name: str):
    trace, invariant, site, break_it = BREAKS[name]
    broken = load_traces.LOADED[trace]()
    break_it(broken)
    assert (invariant, site) in {(violation.invariant, violation.site) for violation in judge(broken)}


def test_blocks_that_a_load_fills_are_in_no_other_row():
    trace = load_traces.loaded_then_replayed()
    put(trace.admissions[1].load.tables[0], 0, 2)
    assert any("while a load fills it" in violation.message for violation in judge(trace))


@pytest.mark.parametrize("abort", [False, True])
def test_a_long_load_is_no_hang_and_keeps_no_block(engine: Engine, abort: bool):
    """Longer than an engine may idle, with nobody else there; aborted, it ends after its request."""
    case = decode((CASE % ("true", '{"tokens": 8, "window": "whole", "how": "async", "steps": 20}')).encode())
    events = (Event(step=3, kind="abort", request="r"),) if abort else ()
    trace = engine.run(replace(case, events=events), brisk=True)
    assert judge(trace) == []
    assert len(trace.steps) >= 20
    assert ("load-aborted" in edges(trace)) == abort


def test_edges():
    assert {"load-replayed", "load-cut-to-blocks", "load-waited-for", "loaded-blocks-hit"} <= edges(
        load_traces.loaded_then_replayed()
    )
    found = edges(load_traces.loaded_with_its_window())
    assert {"load-with-window", "load-ends-mid-block"} <= found
    assert not {"load-waited-for", "load-replayed", "load-failed"} & found
    assert {name for name in edges(load_traces.load_failed()) if name.startswith("load")} == {"load-failed"}


@pytest.mark.parametrize(
    ("log", "runs", "expected"),
    [
        ("+a +b", "a", "+a !a +b"),  # b waits for its load; a was through before b was looked up
        ("+a +b", "a b", "+a !a +b !b"),
        ("+a >b +c", "b c", "+a >b !b +c !c"),
        (">a +b", "a b", ">a !a +b !b"),
        ("+b", "a b", "!a +b !b"),  # a's load had arrived before this step
        (">a +a", "", "+a"),  # what arrived is not used, and the request looked up anew
        ("", "a", "!a"),
        ("+a", "", "+a"),
    ],
)
def test_queue(log: str, runs: str, expected: str) -> None:
    """+: looked up, >: its load has arrived, !: run."""
    turns = {"+": "look up", ">": "arrive", "!": "run"}
    number = {"a": 0, "b": 1, "c": 2}
    queue = Loads.queue([(turns[entry[0]], entry[1], 0) for entry in log.split()], runs.split(), number)
    assert queue == [(turns[entry[0]], number[entry[1]]) for entry in expected.split()]


CASE = """{"schema": 1, "geometry": {"window": 4, "block_size": 4, "swa_block_size": 2, "num_blocks": 40,
"max_num_batched_tokens": 8, "max_num_seqs": 2, "replay": %s},
"requests": [{"id": "r", "arrive": 0, "prompt": [["s", 0, 9]], "max_tokens": 1, "load": %s}]}"""


@pytest.mark.parametrize(
    ("load", "replay", "field"),
    [
        ('{"tokens": 0, "window": "none", "how": "sync", "steps": 0}', "true", "tokens"),
        ('{"tokens": 10, "window": "none", "how": "sync", "steps": 0}', "true", "tokens"),
        ('{"tokens": 9, "window": "whole", "how": "sync", "steps": 0}', "true", "tokens"),
        ('{"tokens": 8, "window": "none", "how": "sync", "steps": 1}', "true", "steps"),
        ('{"tokens": 8, "window": "none", "how": "async", "steps": 0}', "true", "steps"),
        ('{"tokens": 8, "window": "none", "how": "async", "steps": 100000}', "true", "steps"),
        ('{"tokens": 8, "window": "none", "how": "async", "steps": 1}', "false", "window"),
        ('{"tokens": 8, "window": "part", "how": "async", "steps": 1}', "true", "window"),
        ('{"tokens": 8, "window": "half", "how": "async", "steps": 1}', "true", "window"),
        ('{"tokens": 8, "window": "none", "how": "later", "steps": 1}', "true", "how"),
    ],
)
def test_bad_input(load: str, replay: str, field: str):
    with pytest.raises(CaseError, match=rf"requests\[(0|\.\.\.)\]\.load\.{field}"):
        check(decode((CASE % (replay, load)).encode()))


def test_good_input():
    check(decode((CASE % ("true", '{"tokens": 9, "window": "none", "how": "sync", "steps": 0}')).encode()))
