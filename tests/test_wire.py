# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""A trace on the wire: it comes back to the bit, what is no trace is refused, and nothing waits for ever."""

from __future__ import annotations

import dataclasses
import os
import struct
import time
from collections.abc import Iterator
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.engines import wire
from invariants.trace import (
    Admission,
    CachedBytes,
    Fault,
    Final,
    Gathers,
    Geometry,
    Group,
    Load,
    Offer,
    Outputs,
    Probe,
    Step,
    Trace,
    TracedRequest,
    Writes,
)

NANS = np.array([0x7FC00000, 0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000], np.uint32).view(np.float32)
"""Two quiet NaNs, one with its sign, a signalling one, and -0: equal to nothing or not told apart by ==."""


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def longs(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def full() -> Trace:
    """A trace in which nothing is left at its default."""
    outputs = Outputs(ints(7), ints(7, 8).reshape(1, 2), NANS[:2].reshape(1, 2), ints(3), NANS[2:3], hit=16)
    runs, cells = (ints(0), ints(9), ints(6), ints(9)), (ints(0), ints(6), longs(1 << 40), ints(-1), ints(-1))
    gathers = Gathers("combine", "query", *runs, *cells, serves="prefills", sampled=True, group=1)
    step = Step(
        index=3,
        request=ints(0),
        admission=ints(0),
        computed=ints(4),
        scheduled=ints(8),
        prefill=np.array([True]),
        replay_start=ints(4),
        tables=[[ints(1, 2)], [ints()]],
        gathers=[gathers],
        writes=[Writes(1, ints(0), ints(4), longs(-1))],
        preempted=[0],
        finished=[0],
        events=["preempt"],
        idled=True,
        queue=[("look up", 0)],
        processed=2,
        drafts=ints(2),
        accepted=ints(1),
        delivered={0: 2},
    )
    load = Load(4, carried=True, begun=1, waits=True, tables=[ints(1, 2)], over=2, failed=True)
    digests = np.array([(1 << 64) - 1], np.uint64)
    return Trace(
        engine="wired",
        geometry=Geometry(
            window=4,
            block_size=8,
            swa_block_size=2,
            num_blocks=9,
            max_num_batched_tokens=6,
            max_num_seqs=2,
            replay=False,
        ),
        requests=[
            TracedRequest(
                "r", 2, ints(3, 4), 5, [6, 7], "abort", outputs, False, Offer(8, True), priority=3, continues=0
            )
        ],
        groups=[Group("window", 2, False, 4)],
        replay_expected=True,
        kernels="compiled",
        admissions=[Admission(1, 0, 9, 8, 4, 4, 5, resumed=True, load=load)],
        steps=[step],
        final=Final(7, 8, ints(5)),
        faults=[Fault("nan", 3, "not a \N{LATIN SMALL LETTER N WITH TILDE}umber", "logprobs")],
        metrics={"prefix_cache_hits": 8},
        probe=Probe(kind="deep", layers=3, compress_ratio=2, seed=5),
        arms={"twice": [outputs, None], "alone": []},
        cached=[CachedBytes(0, ints(4), ints(1), ints(2), digests, digests - np.uint64(1))],
        interpreted={"a_kernel": 2},
        versions={"vllm": "0.0"},
        seconds=0.1,
    )


GOOD = wire.encode_trace(full())


def bits(value: object) -> object:
    """The same with every array as dtype, shape and bytes, so that == compares NaNs too."""
    if isinstance(value, np.ndarray):
        return ("array", value.dtype.str, value.shape, value.tobytes())
    if dataclasses.is_dataclass(value):
        return (type(value), [bits(getattr(value, field.name)) for field in dataclasses.fields(value)])
    if isinstance(value, list):
        return [bits(item) for item in value]
    if isinstance(value, dict):
        return {name: bits(item) for name, item in value.items()}
    return (type(value), value)


def test_a_trace_comes_back_to_the_bit():
    assert bits(wire.decode_trace(wire.encode_trace(full()))) == bits(full())


def test_the_trace_has_every_field_set():
    """Or the test above would not see a field that is lost."""

    def check(value: object) -> None:
        for field in dataclasses.fields(value):  # type: ignore[arg-type]
            there = getattr(value, field.name)
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            assert isinstance(there, np.ndarray) or there != default, f"{type(value).__name__}.{field.name}"
            for item in there if isinstance(there, list) else [there]:
                if dataclasses.is_dataclass(item):
                    check(item)

    check(full())


@pytest.mark.parametrize(
    "array",
    [
        np.array(5, np.int32),
        np.zeros(0, np.int64),
        np.zeros((0, 3), np.float32),
        np.array([1, 258], ">i4"),
        np.arange(12, dtype=np.int32).reshape(3, 4).T,
        np.arange(12, dtype=np.int64)[::-2],
        np.array([1.5, np.inf], np.float16),
        NANS,
    ],
    ids=lambda array: f"{array.dtype.str}{array.shape}",
)
def test_an_array_comes_back_to_the_bit(array: np.ndarray):
    trace = full()
    trace.requests[0].prompt = array
    back = wire.decode_trace(wire.encode_trace(trace)).requests[0].prompt
    assert bits(back) == bits(array)
    assert back.flags.writeable


@given(
    st.sampled_from(("|b1", "|i1", "|u1", "<i2", "<i4", "<i8", "<u8", "<f2", "<f4", "<f8", ">f4")),
    st.lists(st.integers(0, 4), max_size=3),
    st.randoms(use_true_random=False),
)
def test_any_array_comes_back_to_the_bit(dtype: str, shape: list[int], chance: Random):
    size = int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize
    data = bytes(chance.randrange(2) for _ in range(size)) if dtype == "|b1" else chance.randbytes(size)
    trace = full()
    trace.arms["alone"] = [
        dataclasses.replace(trace.requests[0].outputs, ids=np.frombuffer(data, dtype).reshape(shape))
    ]
    back = wire.decode_trace(wire.encode_trace(trace))
    assert bits(back) == bits(trace)


@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=4))
def test_spoiled_bytes_are_refused_or_a_trace(changes: list[tuple[int, int]]):
    data = bytearray(GOOD)
    for at, byte in changes:
        data[at % len(data)] = byte
    try:
        assert isinstance(wire.decode_trace(bytes(data)), Trace)
    except wire.Garbled:
        return


@pytest.mark.parametrize(
    "array",
    [np.array([None]), np.zeros(1, [("x", "i4")]), np.zeros(1, "M8[s]"), np.array(["text"])],
    ids=["objects", "records", "dates", "text"],
)
def test_an_array_that_is_not_its_bytes_is_refused(array: np.ndarray):
    trace = full()
    trace.requests[0].prompt = array
    with pytest.raises(NotImplementedError, match="ndarray cannot be sent"):
        wire.encode_trace(trace)


def test_a_trace_too_large_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wire, "MAX_TRACE", len(GOOD))
    assert wire.encode_trace(full()) == GOOD
    monkeypatch.setattr(wire, "MAX_TRACE", len(GOOD) - 1)
    with pytest.raises(ValueError, match=f"a trace of {len(GOOD)} bytes"):
        wire.encode_trace(full())


def spoiled() -> Iterator[tuple[str, bytes]]:
    good = wire.encode_trace(full())
    yield "nothing", b""
    yield "cut off", good[:-1]
    yield "longer", good + b"\0"
    yield "text", b"Traceback (most recent call last)"
    yield "a list", msgspec.msgpack.encode([1, 2])
    array = {"dtype": "<i4", "shape": [2], "data": b"\0" * 8}
    for name, change in {
        "no bytes": {"data": b""},
        "bytes left over": {"data": b"\0" * 12},
        "text for bytes": {"data": "eight by"},
        "no such dtype": {"dtype": "<q9"},
        "objects": {"dtype": "|O"},
        "dates": {"dtype": "<M8"},
        "source": {"dtype": "<01i4"},
        "number for dtype": {"dtype": 4},
        "huge": {"shape": [1 << 60, 1 << 60]},
        "shape of text": {"shape": "two"},
    }.items():
        plain = msgspec.msgpack.decode(good)
        plain["requests"][0]["prompt"] = array | change
        yield name, msgspec.msgpack.encode(plain)
    plain = msgspec.msgpack.decode(good)
    plain["requests"][0]["prompt"] = [1, 2]
    yield "a list for an array", msgspec.msgpack.encode(plain)
    plain = msgspec.msgpack.decode(good)
    plain["geometry"]["window"] = "four"
    yield "text for a number", msgspec.msgpack.encode(plain)


@pytest.mark.parametrize("data", [pytest.param(data, id=name) for name, data in spoiled()])
def test_what_is_no_trace_is_refused(data: bytes):
    with pytest.raises(wire.Garbled, match="not a trace"):
        wire.decode_trace(data)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            continue


def soon() -> float:
    return time.monotonic() + 0.2


def test_frames_come_in_order(pipe: tuple[int, int]):
    orders = [wire.Order(b"one", True), wire.Order(b"", False)]
    for order in orders:
        wire.send(pipe[1], order, soon())
    assert [wire.receive(pipe[0], wire.Order, soon()) for _ in orders] == orders


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", wire.Late),
        (b"\5\0", wire.Late),
        (struct.pack("<I", 5) + b"ab", wire.Late),
        (struct.pack("<I", 2) + b"\xc1\xc1", wire.Garbled),
        (struct.pack("<I", 3) + b"\xa2\xff\xff", wire.Garbled),  # text that is no UTF-8
        (struct.pack("<I", (1 << 30) + 1), wire.Garbled),
    ],
)
def test_what_is_no_frame(data: bytes, error: type[Exception], pipe: tuple[int, int]):
    os.write(pipe[1], data)
    with pytest.raises(error):
        wire.receive(pipe[0], wire.Order, soon())


def test_a_closed_pipe(pipe: tuple[int, int]):
    os.close(pipe[1])
    with pytest.raises(wire.Closed):
        wire.receive(pipe[0], wire.Order, soon())


def test_nobody_reads(pipe: tuple[int, int]):
    os.close(pipe[0])
    with pytest.raises(wire.Closed):
        wire.send(pipe[1], wire.Order(b"", True), soon())


def test_a_full_pipe_is_late(pipe: tuple[int, int]):
    with pytest.raises(wire.Late):
        wire.send(pipe[1], wire.Order(b"x" * (1 << 20), True), soon())


def test_last_words_are_read_before_death_is_seen(pipe: tuple[int, int]):
    wire.send(pipe[1], wire.Order(b"last", True))
    assert wire.receive(pipe[0], wire.Order, alive=lambda: False).case == b"last"
    with pytest.raises(wire.Closed):
        wire.receive(pipe[0], wire.Order, alive=lambda: False)
