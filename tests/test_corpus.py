# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Corpus files: what is read, what is refused and with which words, what is written."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from fuzz import corpus
from fuzz.case import MAX_FILE_BYTES, Case, Provenance, Request, encode
from fuzz.corpus import CorpusError
from invariants.trace import Geometry


def make(length: int = 10, note: str = "") -> Case:
    return Case(
        geometry=Geometry(
            window=4, block_size=4, swa_block_size=4, num_blocks=32, max_num_batched_tokens=16, max_num_seqs=2
        ),
        requests=(Request(id="r", arrive=0, prompt=(("s", 0, length),)),),
        provenance=Provenance(note=note),
    )


def write(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def test_a_saved_case_is_read_again(tmp_path: Path):
    case = make(note="why")
    path = corpus.save(case, tmp_path / "new" / "folder", "some-slug")
    assert path == tmp_path / "new" / "folder" / f"some-slug-{case.digest}.json"
    assert path.read_bytes() == encode(case)
    assert corpus.read(path) == case
    assert os.listdir(path.parent) == [path.name]


def test_the_same_case_is_saved_once(tmp_path: Path):
    first = corpus.save(make(note="first"), tmp_path, "one")
    assert corpus.save(make(note="second"), tmp_path, "other") == first
    assert corpus.read(first).provenance.note == "first"
    assert len(corpus.files(tmp_path)) == 1


@pytest.mark.parametrize("content", ["not a case", encode(make(11))], ids=["garbage", "another case"])
def test_nothing_is_overwritten(tmp_path: Path, content: bytes | str):
    case = make()
    taken = write(tmp_path / corpus.file_name(case, "slug"), content)
    before = taken.read_bytes()
    path = corpus.save(case, tmp_path, "slug")
    assert taken.read_bytes() == before
    assert path.name == f"slug-2-{case.digest}.json"
    assert corpus.read(path) == case


def test_a_dangling_link_is_not_written_through(tmp_path: Path):
    case = make()
    (tmp_path / corpus.file_name(case, "slug")).symlink_to(tmp_path / "elsewhere")
    assert corpus.save(case, tmp_path, "slug").name == f"slug-2-{case.digest}.json"
    assert not (tmp_path / "elsewhere").exists()


def test_a_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        corpus.save(make(), tmp_path, "slug")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("slug", ["", "Upper", "with space", "../up", "a--b", "-a", "a/b"])
def test_a_slug_is_words_and_hyphens(slug: str):
    with pytest.raises(ValueError, match="not lower-case words"):
        corpus.file_name(make(), slug)


def test_files_are_found_at_any_depth_sorted(tmp_path: Path):
    (tmp_path / "b").mkdir()
    made = [write(tmp_path / name, "{}") for name in ("b/2.json", "a.json", "c.json")]
    write(tmp_path / ".gitkeep", "")
    assert corpus.files(tmp_path) == sorted(made)
    assert corpus.files(made[0]) == [made[0]]


def test_a_folder_that_is_not_there_or_has_no_case(tmp_path: Path):
    with pytest.raises(CorpusError, match=r"nowhere: no such file or folder$"):
        corpus.files(tmp_path / "nowhere")
    write(tmp_path / "README", "")
    with pytest.raises(CorpusError, match=r"no case in this folder \(\*\.json\)$"):
        corpus.files(tmp_path)


def change(old: str, new: str) -> str:
    text = encode(make()).decode()
    assert old in text
    return text.replace(old, new)


BAD = {
    "empty": ("", "Input data was truncated"),
    "not json": ("nonsense", "JSON is malformed"),
    "not utf-8": (b"\xff\xfe{}", "JSON is malformed"),
    "cut off": (encode(make())[:100], "Input data was truncated"),
    "two documents": (encode(make()) * 2, "JSON is malformed"),
    "a list": ("[]", "Expected `object`, got `array`"),
    "schema": (change('"schema": 1', '"schema": 2'), "this replaycheck reads schema 1 only - at `$.schema`"),
    "unknown key": (change('"schema": 1', '"schema": 1, "more": 1'), "unknown field `more`"),
    "code": (change('"schema": 1', '"schema": 1, "__reduce__": "os.system"'), "unknown field `__reduce__`"),
    "missing key": (change('"window": 4', '"windows": 4'), "unknown field `windows` - at `$.geometry`"),
    "type": (change('"window": 4', '"window": "4"'), "Expected `int`, got `str` - at `$.geometry.window`"),
    "size": (change('"window": 4', '"window": 1000000'), "at `$.geometry.window`"),
    "huge": (change('"num_blocks": 32', '"num_blocks": 1' + "0" * 5000), "at `$.geometry.num_blocks`"),
    "prompt": (change('["s", 0, 10]', '["s", 10, 10]'), "empty slice 10..10 - at `$.requests[0].prompt[0]`"),
    "name": (change('"id": "r"', '"id": "../r"'), "at `$.requests[0].id`"),
    "window groups": (change('"window": 4', '"window": 4, "window_groups": 5'), "at `$.geometry.window_groups`"),
    "retention": (change('"window": 4', '"window": 4, "retention": -1'), "at `$.geometry.retention`"),
    "length": (change('"window": 4', '"window": 4, "max_model_len": 1'), "at `$.geometry.max_model_len`"),
    "priority": (change('"id": "r"', '"id": "r", "priority": -70000'), "at `$.requests[0].priority`"),
    "nesting": ("[" * 100_000, ""),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_content_is_one_line_with_file_and_path(tmp_path: Path, bad: str):
    content, message = BAD[bad]
    path = write(tmp_path / "bad.json", content)
    with pytest.raises(CorpusError) as caught:
        corpus.read(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 200


def test_an_oversized_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "big.json"
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    monkeypatch.setattr(corpus, "decode", lambda _: pytest.fail("read although too big"))
    with pytest.raises(CorpusError, match=f"{MAX_FILE_BYTES + 1} bytes; a case has at most {MAX_FILE_BYTES}"):
        corpus.read(path)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path):
    inside = tmp_path / "corpus"
    target = corpus.save(make(), tmp_path / "outside", "slug")
    inside.mkdir()
    (inside / "link.json").symlink_to(target)
    (inside / "folder").symlink_to(target.parent)
    for path in corpus.files(inside):
        with pytest.raises(CorpusError, match="leaves its folder"):
            corpus.read(path)
    assert len(corpus.files(inside)) == 2


def test_a_link_within_the_folder_is_read(tmp_path: Path):
    target = corpus.save(make(), tmp_path, "slug")
    (tmp_path / "alias.json").symlink_to(target.name)
    assert corpus.read(tmp_path / "alias.json") == make()


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "loop.json").symlink_to("loop.json")
    for name in ("pipe", "folder", "loop", "nothing"):
        with pytest.raises(CorpusError, match=rf"{name}\.json: "):
            corpus.read(tmp_path / f"{name}.json")


@pytest.mark.parametrize("kind", corpus.KINDS)
def test_the_engine_is_told_from_the_folder(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(corpus, "ROOT", tmp_path)
    path = corpus.folder("some-engine", kind) / "x.json"
    assert corpus.engine_of(path) == "some-engine"
    path.parent.mkdir(parents=True)
    monkeypatch.chdir(path.parent)
    assert corpus.engine_of(Path("x.json")) == "some-engine"
    assert corpus.engine_of(tmp_path / "x.json") is None


def test_paths_are_shown_as_a_command_here_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert corpus.shown(tmp_path / "a" / "b.json") == "a/b.json"
    assert corpus.shown(tmp_path.parent / "b.json") == str(tmp_path.parent / "b.json")


def test_provenance_does_not_change_the_name():
    case = make()
    noted = msgspec.structs.replace(case, provenance=Provenance(note="new", seed=1))
    assert corpus.file_name(noted, "slug") == corpus.file_name(case, "slug")
