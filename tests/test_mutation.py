# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Mutants: what a selector selects, what is said of a bad one, and a few of our own in processes of their own."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fuzz.cli import main
from fuzz.mutants import FILE
from fuzz.mutation import Mutant, MutantError, mutate, read
from invariants import INVARIANTS

SOURCE = """\
class Cache:
    def hit(self, tokens):
        start = tokens - 4
        if start > 0:
            start = max(start, 1)
            self.log(start)
        for one in range(start):
            self.seen.total = one
        return start
"""


def mutant(**fields: Any) -> Mutant:
    given = {"id": "m", "title": "t", "module": "x", "function": "Cache.hit", "action": "delete"}
    return Mutant(**(given | {"engines": (), "expect": ()} | fields))


def changed(**fields: Any) -> list[tuple[str, str]]:
    """Lines before and after, where they differ."""
    pairs = zip(ast.unparse(ast.parse(SOURCE)).splitlines(), mutate(SOURCE, mutant(**fields)).splitlines(), strict=True)
    return [(one.strip(), other.strip()) for one, other in pairs if one != other]


@pytest.mark.parametrize(
    ("fields", "line", "new"),
    [
        ({"target": "start", "occurrence": -1}, "start = max(start, 1)", "pass"),
        ({"target": "start", "occurrence": 0, "action": "replace", "value": "7"}, "start = tokens - 4", "start = 7"),
        ({"target": "self.seen.total"}, "self.seen.total = one", "pass"),
        ({"target": "return", "action": "replace", "value": "0"}, "return start", "return 0"),
        ({"target": "if", "action": "replace", "value": "False"}, "if start > 0:", "if False:"),
        ({"target": "if:start > 0", "action": "replace", "value": "True"}, "if start > 0:", "if True:"),
        ({"target": "for", "action": "replace", "value": "()"}, "for one in range(start):", "for one in ():"),
        ({"target": "call:log"}, "self.log(start)", "pass"),
        ({"target": "call:self.log", "action": "replace", "value": "print()"}, "self.log(start)", "print()"),
    ],
)
def test_selectors(fields: dict[str, Any], line: str, new: str):
    assert changed(**fields) == [(line, new)]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"target": "begin"}, "no statement 'begin'"),
        ({"target": "start"}, "'start' is there 2 times; say which occurrence"),
        ({"target": "start", "occurrence": 2}, "'start' is there 2 times only"),
        ({"target": "start", "function": "Cache.miss"}, "x has no function Cache.miss"),
        ({"target": "if:start < 0"}, "no statement 'if:start < 0'"),
        ({"target": "return", "action": "replace", "value": "1 +"}, "'with' is no expression"),
    ],
)
def test_a_selector_that_selects_nothing_is_an_error(fields: dict[str, Any], words: str):
    with pytest.raises(MutantError, match=words.replace("+", r"\+")):
        mutate(SOURCE, mutant(**fields))


def test_our_own_name_engines_and_invariants_that_exist():
    mutants = read(FILE)
    assert len(mutants) >= 24
    assert {name for one in mutants for name in one.engines} == {"scheduler", "kernels", "cpu"}
    assert {name for one in mutants for name in one.expect} <= INVARIANTS.keys()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[mutant]]\nid = 1", "Expected `str`"),
        ("mutant = [", "Invalid value"),
        ('[[mutant]]\nid = "a"', "missing required field"),
        (None, "No such file"),
    ],
)
def test_bad_files(text: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "mine.toml"
    if text is not None:
        path.write_text(text)
    assert main(["mutants", "--file", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def hunted(folder: Path, *mutants: Mutant) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and JSON of ``replaycheck mutants`` on these."""
    lines = []
    for one in mutants:
        fields = msgspec.to_builtins(one).items()
        # What JSON says of strings, numbers and lists, TOML says as well.
        lines += ["[[mutant]]", *(f"{name} = {json.dumps(value)}" for name, value in fields if value is not None)]
    (folder / "mine.toml").write_text("\n".join(lines))
    out = folder / "out.json"
    code = main(["mutants", "--file", str(folder / "mine.toml"), "--cases", "20", "--json", str(out)])
    return code, json.loads(out.read_text())


def test_killed_inert_and_absent(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (killed,) = [one for one in read(FILE) if one.id == "padding-missing"]
    killed = msgspec.structs.replace(killed, engines=("scheduler",))
    survivor = msgspec.structs.replace(
        killed,
        id="survivor",
        function="_pad_replayed_slots_kernel",
        target="req",
        action="replace",
        value="tl.program_id(0) + 0",
    )
    code, result = hunted(tmp_path, killed, survivor)
    assert code == 1
    assert [(one["id"], one["killed"], one["invariant"]) for one in result] == [
        ("padding-missing", True, "write-fence"),
        ("survivor", False, None),
    ]
    assert result[1]["cases"] == 20
    inert = msgspec.structs.replace(
        killed, id="inert", module="vllm.v1.sample.ops.penalties", function="apply_all_penalties", target="return"
    )
    absent = msgspec.structs.replace(killed, id="absent", target="call:nothing")
    code, result = hunted(tmp_path, inert, absent)
    assert code == 2
    assert not any(one["killed"] for one in result)
    err = capsys.readouterr().err
    assert "mutant absent: vllm.models.deepseek_v41.nvidia.model_state" in err
    assert "no statement 'call:nothing'" in err
    assert "mutant inert: engine scheduler never imports vllm.v1.sample.ops.penalties" in err
