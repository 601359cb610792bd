# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Every corpus file, replayed before anything else runs; one test a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz import corpus
from fuzz.cli import main
from fuzz.engines import ENGINES
from fuzz.known import REGISTER
from fuzz.replay import replay


def corpus_files(*kinds: str) -> list[Path]:
    return [path for engine in ENGINES for kind in kinds for path in sorted(corpus.folder(engine, kind).glob("*.json"))]


def name(path: Path) -> str:
    return str(path.relative_to(corpus.ROOT))


@pytest.mark.parametrize("path", corpus_files("regressions", "known", "crashes", "seeds"), ids=name)
def test_replay(path: Path, open_engine, fail_with):
    engine = open_engine(corpus.engine_of(path))
    result = replay(path, lambda: engine)
    if result.judged and result.judged.violations:
        fail_with(result.judged, engine, path)
    expected = ("FAILED", True) if path.parent.name == "known" else ("FIXED", False)
    assert (result.outcome, result.known) == expected, result.message


@pytest.mark.parametrize(("engine", "least"), [("scheduler", 30), ("cpu", 14)])
def test_there_are_seeds(engine: str, least: int):
    assert len(corpus.files(corpus.folder(engine, "seeds"))) >= least


def test_known_files_and_register_are_the_same():
    """A file says which entry it is for; no entry is without a file, no file without an entry."""
    entries = [corpus.read(path).provenance.known for path in corpus_files("known")]
    assert None not in entries
    assert {entry.id for entry in entries} == {entry.id for entry in REGISTER}


def test_known_cases_are_nowhere_else():
    for path in corpus_files("seeds", "regressions", "crashes"):
        assert corpus.read(path).provenance.known is None, f"{name(path)} belongs into known/"


@pytest.mark.parametrize("path", corpus_files(*corpus.KINDS), ids=name)
def test_file_is_canonical(path: Path):
    """Named by its content, with its keys in order, so that two people who keep one case get one file."""
    case = corpus.read(path)
    slug, _, digest = path.stem.rpartition("-")
    assert path.name == corpus.file_name(case, slug)
    assert corpus.encode(case) == path.read_bytes(), digest


def test_a_single_file_says_what_happened(capsys: pytest.CaptureFixture[str]):
    """18 tokens in blocks of 4, twice: 16 are hit, and W = 8 of them replayed."""
    (path,) = corpus.folder("scheduler", "seeds").glob("whole-prompt-twice-*.json")
    assert main(["replay", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "        step 0: first, 18 tokens, no hit",
        "        step 2: second, 18 tokens, hit 16, replays from 8",
    ]
