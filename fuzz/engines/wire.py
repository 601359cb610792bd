# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Between an engine's process and ours: length-prefixed msgpack frames on a pipe. A trace comes back as it went."""

from __future__ import annotations

import os
import select
import struct
import time
from typing import Any, Literal

import msgspec
import numpy as np

from invariants.trace import Trace

MAX_FRAME = 1 << 30
"""Bytes."""
_LENGTH = struct.Struct("<I")


class Closed(Exception):
    """The other side has closed the pipe, or sent what is no frame."""


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


Answer = Ready | Ran | Failed


def _encode_other(value: Any) -> Any:
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return {"dtype": value.dtype.str, "shape": value.shape, "data": np.ascontiguousarray(value).tobytes()}
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"a {type(value).__name__} cannot be sent")


def _decode_other(_: type[Any], value: Any) -> Any:
    # A copy, since what frombuffer gives cannot be written to.
    return np.frombuffer(value["data"], np.dtype(value["dtype"])).reshape(value["shape"]).copy()


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_trace_decoder = msgspec.msgpack.Decoder(Trace, dec_hook=_decode_other)


def encode_trace(trace: Trace) -> bytes:
    """The trace as msgpack; NumPy arrays by dtype, shape and bytes."""
    return _encoder.encode(trace)


def decode_trace(data: bytes | msgspec.Raw) -> Trace:
    """Raises ``Closed`` for what is no trace."""
    try:
        return _trace_decoder.decode(data)
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise Closed(f"not a trace: {error}") from error


def send(pipe: int, message: Any) -> None:
    """Write one frame to a file descriptor. Raises ``Closed``."""
    data = _encoder.encode(message)
    view = memoryview(_LENGTH.pack(len(data)) + data)
    try:
        while view:
            view = view[os.write(pipe, view) :]
    except BrokenPipeError as error:
        raise Closed("nobody reads") from error


def receive(pipe: int, wanted: Any, deadline: float | None = None) -> Any:
    """Read one frame of a type; ``deadline`` of ``time.monotonic``. Raises ``Closed`` and ``Late``."""
    (length,) = _LENGTH.unpack(_read(pipe, _LENGTH.size, deadline))
    if length > MAX_FRAME:
        raise Closed(f"a frame of {length} bytes")
    try:
        return msgspec.msgpack.decode(_read(pipe, length, deadline), type=wanted)
    except msgspec.DecodeError as error:
        raise Closed(f"not a frame: {error}") from error


def _read(pipe: int, count: int, deadline: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([pipe], [], [], wait)[0]:
            raise Late
        part = os.read(pipe, min(count - len(parts), 1 << 20))
        if not part:
            raise Closed("end of file")
        parts += part
    return bytes(parts)
