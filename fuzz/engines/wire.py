# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Between an engine's process and ours: length-prefixed msgpack frames on a pipe. A trace comes back as it went."""

from __future__ import annotations

import math
import os
import re
import select
import struct
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import numpy as np

from invariants.trace import Trace

MAX_FRAME = 1 << 30
"""Bytes."""
MAX_TRACE = MAX_FRAME - (1 << 10)
"""Bytes; what is around a trace in its frame is less than the rest."""
_LENGTH = struct.Struct("<I")
_DTYPE = re.compile(r"[<>|][biuf][1-9][0-9]?")
"""Numbers and truth values. ``np.dtype`` takes much more: objects, records, and Python source in braces."""


class Closed(Exception):
    """The other side has closed the pipe, or is dead."""


class Garbled(Exception):
    """What came is no frame, or no trace."""


class Late(Exception):
    """No whole frame by the deadline."""


class Order(msgspec.Struct, frozen=True):
    """To the engine: run a case."""

    case: bytes
    """Canonical JSON."""
    brisk: bool


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From the engine, once: it can run cases."""

    has_model: bool
    versions: dict[str, str]


class Ran(msgspec.Struct, frozen=True, tag=True):
    """From the engine: the trace of the case."""

    trace: msgspec.Raw


class Failed(msgspec.Struct, frozen=True, tag=True):
    """From the engine: what it raised, in words."""

    kind: Literal["unavailable", "refused", "memory", "own"]
    message: str
    site: str = ""
    """Of what is our own: see ``base.site_of``."""


Answer = Ready | Ran | Failed


def _encode_other(value: Any) -> Any:
    if isinstance(value, np.ndarray) and _DTYPE.fullmatch(value.dtype.str):
        return {"dtype": value.dtype.str, "shape": value.shape, "data": np.ascontiguousarray(value).tobytes()}
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"a {type(value).__name__} cannot be sent")


def _decode_other(_: type[Any], value: Any) -> Any:
    if not _DTYPE.fullmatch(value["dtype"]):
        raise ValueError(f"an array of dtype {value['dtype']!r}")
    # A copy, since what frombuffer gives cannot be written to.
    return np.frombuffer(value["data"], np.dtype(value["dtype"])).reshape(value["shape"]).copy()


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_trace_decoder = msgspec.msgpack.Decoder(Trace, dec_hook=_decode_other)


def encode_trace(trace: Trace) -> bytes:
    """The trace as msgpack; NumPy arrays by dtype, shape and bytes.

    Raises ``NotImplementedError`` for arrays of anything but numbers, ``ValueError`` above ``MAX_TRACE``.
    """
    data = _encoder.encode(trace)
    if len(data) > MAX_TRACE:
        raise ValueError(f"a trace of {len(data)} bytes; at most {MAX_TRACE} can be sent")
    return data


def decode_trace(data: bytes | msgspec.Raw) -> Trace:
    """Raises ``Garbled`` for what is no trace."""
    try:
        return _trace_decoder.decode(data)
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise Garbled(f"not a trace: {error}") from error


def send(pipe: int, message: Any, deadline: float = math.inf) -> None:
    """Write one frame to a file descriptor; ``deadline`` of ``time.monotonic``. Raises ``Closed`` and ``Late``."""
    data = _encoder.encode(message)
    if len(data) > MAX_FRAME:
        raise ValueError(f"a frame of {len(data)} bytes; at most {MAX_FRAME} can be sent")
    view = memoryview(_LENGTH.pack(len(data)) + data)
    try:
        while view:
            while not _wait(pipe, select.POLLOUT, deadline):
                pass
            # No more than a pipe that is ready is sure to take, or the write blocks and the deadline passes.
            view = view[os.write(pipe, view[: select.PIPE_BUF]) :]
    except BrokenPipeError as error:
        raise Closed("nobody reads") from error


def receive(pipe: int, wanted: Any, deadline: float = math.inf, alive: Callable[[], bool] = lambda: True) -> Any:
    """Read one frame of a type; ``deadline`` of ``time.monotonic``. Raises ``Closed``, ``Garbled`` and ``Late``.

    ``alive``: whether the other side lives. A process that it forked may hold the pipe open when it does not.
    """
    (length,) = _LENGTH.unpack(_read(pipe, _LENGTH.size, deadline, alive))
    if length > MAX_FRAME:
        raise Garbled(f"a frame of {length} bytes")
    try:
        return msgspec.msgpack.decode(_read(pipe, length, deadline, alive), type=wanted)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Garbled(f"not a frame: {error}") from error


def _read(pipe: int, count: int, deadline: float, alive: Callable[[], bool]) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        living = alive()  # asked first: what it wrote before it died is still read
        if not _wait(pipe, select.POLLIN, deadline, 0.5 if living else 0.0):
            if not living:
                raise Closed("the other side is dead")
            continue
        part = os.read(pipe, min(count - len(parts), 1 << 20))
        if not part:
            raise Closed("end of file")
        parts += part
    return bytes(parts)


def _wait(pipe: int, what: int, deadline: float, seconds: float = 0.5) -> bool:
    """Whether the pipe gets ready, or is closed, within ``seconds``. Raises ``Late``."""
    left = deadline - time.monotonic()
    poll = select.poll()  # select.select takes no descriptor above 1023
    poll.register(pipe, what)
    if poll.poll(1000 * max(0.0, min(left, seconds))):
        return True
    if left <= 0:
        raise Late
    return False
