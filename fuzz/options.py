# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""What the commands' arguments have in common: engine, profile, ``--json``. Bad values fail before anything runs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fuzz.engines import ENGINES
from fuzz.run import CannotRun

DEFAULT_ENGINE = "scheduler"

Number = TypeVar("Number", int, float)


def add_engine(parser: argparse.ArgumentParser) -> None:
    """``--engine``."""
    parser.add_argument(
        "--engine", choices=ENGINES, default=DEFAULT_ENGINE, help="what runs the cases (default: %(default)s)"
    )


def add_profile(parser: argparse.ArgumentParser, default: str) -> None:
    """``--profile``."""
    from fuzz.strategies import PROFILES

    titles = "; ".join(f"{name}: {profile.title}" for name, profile in PROFILES.items())
    parser.add_argument("--profile", choices=PROFILES, default=default, help=f"{titles} (default: %(default)s)")


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json FILE``."""
    parser.add_argument("--json", type=_writable, metavar="FILE", help="write the result to FILE")


def positive(kind: type[Number]) -> Callable[[str], Number]:
    """An argument type: a number above zero."""

    def parse(text: str) -> Number:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not a number above zero")
        return value

    parse.__name__ = kind.__name__
    return parse


def _writable(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write to {text}")
    return path


def write_json(path: Path | None, value: Any) -> None:
    """Write what msgspec can encode, if there is a path. Raises ``CannotRun``."""
    if path is None:
        return
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    except OSError as error:
        raise CannotRun(f"cannot write to {path}: {error.strerror}") from error
