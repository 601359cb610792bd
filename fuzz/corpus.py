# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The corpus folders ``corpora/<engine>/<kind>/<slug>-<8 hex>.json``: find cases, read them, keep a new one.

Relied upon: the 8 hex digits are the case's content hash, so one case has one file in a folder whatever it is called.
Files come from other people: they are bounded, decoded strictly and never followed out of their folder. ``corpora/``
lies beside the packages, which is where an editable install has it.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Final

from fuzz.case import MAX_FILE_BYTES, Case, CaseError, decode, encode

ROOT: Path = Path(__file__).resolve().parent.parent / "corpora"
KINDS: Final = {
    "seeds": "readable cases, each for one edge",
    "regressions": "cases that broke an invariant once and must not again",
    "known": "cases that break an invariant for a reason in the register (fuzz/known.py)",
    "crashes": "what runs have found and nobody has looked at yet",
}


class CorpusError(Exception):
    """A corpus file or folder that cannot be used; the message is one line and names it."""


def folder(engine: str, kind: str) -> Path:
    """Where cases of a kind in ``KINDS`` are kept for an engine."""
    return ROOT / engine / kind


def files(path: Path) -> list[Path]:
    """The case files at or below ``path``, sorted. Raises ``CorpusError`` if it does not exist or has none.

    Links to folders are listed, not followed, so that ``read`` refuses them by name.
    """
    if not path.is_dir():
        if not os.path.lexists(path):
            raise CorpusError(f"{path}: no such file or folder")
        return [path]
    found = []
    for base, folders, names in os.walk(path):
        links = [name for name in folders if (Path(base) / name).is_symlink()]
        found += [Path(base) / name for name in (*links, *names) if name in links or name.endswith(".json")]
    if not found:
        raise CorpusError(f"{path}: no case in this folder (*.json)")
    return sorted(found)


def engine_of(path: Path) -> str | None:
    """The engine whose corpus the file is in, told from ``<engine>/<kind>/<file>``; None elsewhere."""
    kind = path.absolute().parent
    return kind.parent.name if kind.name in KINDS else None


def read(path: Path) -> Case:
    """The case in a file. Raises ``CorpusError``, which names the file and, for bad content, the JSON path."""
    try:
        if path.resolve(strict=True).parent != path.parent.resolve(strict=True):
            raise CorpusError(f"{path}: a link that leaves its folder")
        with open(path, "rb", opener=_open_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CorpusError(f"{path}: not a file")
            if status.st_size > MAX_FILE_BYTES:
                raise CorpusError(f"{path}: {status.st_size} bytes; a case has at most {MAX_FILE_BYTES}")
            data = file.read(MAX_FILE_BYTES + 1)
        return decode(data)
    except CaseError as error:
        raise CorpusError(f"{path}: {error}") from None
    except (OSError, RuntimeError) as error:
        # RuntimeError: how Path.resolve reports a loop of links before Python 3.13.
        raise CorpusError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _open_without_waiting(path: str, flags: int) -> int:
    """A named pipe would make a plain open wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def file_name(case: Case, slug: str) -> str:
    """``<slug>-<8 hex>.json``. Raises ``ValueError`` if the slug is not lower-case words joined by hyphens."""
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", slug):
        raise ValueError(f"'{slug}' is not lower-case words joined by hyphens")
    return f"{slug}-{case.digest}.json"


def save(case: Case, place: Path, slug: str) -> Path:
    """Write the case's canonical form into a folder, which is made if need be, all of it or nothing.

    Where the folder has the case already, whatever its name and provenance, that file stays and is returned. Nothing
    is ever overwritten. Raises ``OSError``.
    """
    place.mkdir(parents=True, exist_ok=True)
    for path in sorted(place.glob(f"*-{case.digest}.json")):
        if _holds(path, case):
            return path
    name, number = file_name(case, slug), 1
    while os.path.lexists(place / name):
        number += 1
        name = file_name(case, f"{slug}-{number}")
    handle, temporary = tempfile.mkstemp(dir=place, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(encode(case))
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(temporary, place / name)
    except BaseException:
        os.unlink(temporary)
        raise
    return place / name


def _holds(path: Path, case: Case) -> bool:
    try:
        return read(path).digest == case.digest
    except CorpusError:
        return False


def shown(path: Path) -> str:
    """The path as a command run from here takes it: relative where that is shorter."""
    path = path.absolute()
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
