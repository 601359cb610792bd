# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Mutants: what a selector selects, what is said of a bad one, and our own in processes of their own.

A few of ours are hunted each time, all of them, with five seeds, with ``--hypothesis-profile=nightly``.
"""

from __future__ import annotations

import ast
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fuzz import mutants, mutation
from fuzz.cli import main
from fuzz.fixed import CASES, fixed_cases
from fuzz.hunt import Hunted
from fuzz.mutants import FILE, Result, line
from fuzz.mutation import Mutant, MutantError, mutate, read
from invariants import INVARIANTS, judge

OURS = {one.id: one for one in read(FILE)}
FEW = {
    "replay-not-published": "scheduler",
    "replay-alone-in-its-step": "scheduler",
    "gather-length-prefix-not-reduced": "kernels",
    "slots-past-the-mapping": "kernels",
    "cacheable-blocks-nulled": "cpu",
}
"""On which engine: from the first thing that an invariant judges to the last, and each engine once at least."""

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
        ({"target": "return", "action": "replace", "value": "start"}, "x, Cache.hit: it changes nothing"),
    ],
)
def test_a_selector_that_selects_nothing_is_an_error(fields: dict[str, Any], words: str):
    with pytest.raises(MutantError, match=words.replace("+", r"\+")):
        mutate(SOURCE, mutant(**fields))


def test_what_is_executed_says_so():
    """A statement as it is reached, a kernel as it is launched, and not as it is warmed up."""
    names: dict[str, Any] = {}
    exec(mutate("def f(x):\n    if x:\n        y = 1\n", mutant(function="f", target="y"), watch=True), names)
    mutation._reached.clear()
    names["f"](0)
    assert not mutation.reached()
    names["f"](1)
    assert mutation.reached()

    class Kernel:
        def __init__(self, function: Any) -> None: ...

        def run(self, *args: int, **options: bool) -> tuple[Any, ...]:
            return args, options

    source = "@triton.jit\ndef k(x):\n    y = x\n    z = y\n"
    names = {"triton": type("triton", (), {"jit": Kernel})}
    exec(mutate(source, mutant(function="k", target="y"), watch=True), names)
    mutation._reached.clear()
    assert names["k"].run(1, warmup=True) == ((1,), {"warmup": True})
    assert not mutation.reached()
    assert names["k"].run(2) == ((2,), {})
    assert mutation.reached()
    mutation._reached.clear()


def test_our_own_name_engines_and_invariants_that_exist():
    assert len(OURS) >= 40
    assert sum(not {"scheduler", "kernels"}.isdisjoint(one.engines) for one in OURS.values()) >= 24
    assert {name for one in OURS.values() for name in one.engines} == {"scheduler", "kernels", "cpu"}
    assert {name for one in OURS.values() for name in one.expect} <= INVARIANTS.keys()


def test_every_invariant_is_the_first_to_catch_a_mutant():
    alone = {one.expect[0] for one in OURS.values() if len(one.expect) == 1}
    assert not INVARIANTS.keys() - alone, "no mutant expects these, and these alone"


@pytest.mark.parametrize("name", FEW)
def test_a_few_of_ours(name: str, tmp_path: Path):
    found = caught(tmp_path, "--id", name, "--engine", FEW[name])
    assert [one["invariant"] in OURS[name].expect for one in found] == [True]


@pytest.mark.slow_test
def test_all_of_ours(request: pytest.FixtureRequest, tmp_path: Path):
    if request.config.getoption("--hypothesis-profile") != "nightly":
        pytest.skip("every mutant takes most of an hour: run with --hypothesis-profile=nightly")
    found = caught(tmp_path, "--seeds", "5")
    first = {one["invariant"] for one in found}
    strange = [one for one in found if one["invariant"] not in OURS[one["id"]].expect]
    assert not strange
    assert first == INVARIANTS.keys()
    assert len(found) == 5 * sum(len(one.engines) for one in OURS.values())


def caught(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    out = folder / "out.json"
    assert main(["mutants", *arguments, "--json", str(out)]) == 0
    found: list[dict[str, Any]] = json.loads(out.read_text())
    assert all(one["killed"] for one in found)
    return found


@pytest.mark.parametrize("name", ["scheduler", "kernels", "cpu"])
def test_cases_of_fixed_sizes_are_clean_and_replay(name: str, open_engine):
    engine = open_engine(name)
    for case in fixed_cases(name)[: len(CASES)]:
        trace = engine.run(case)
        assert judge(trace) == []
        assert [life.hit for life in trace.admissions] == [0, 0 if len(case.requests[0]) == 32 else 96]


def test_what_is_said_of_hunts():
    def said(*hunts: Hunted) -> str:
        return line(Result(mutant(target="x", title="breaks", expect=("gating",)), "cpu", [*hunts]))

    killed = Hunted(seed=0, invariant="gating", cases=3)
    assert said(killed) == "m on cpu: gating after 3 cases"
    assert said(killed, Hunted(seed=1, invariant="progress", cases=5), killed) == (
        "m on cpu: gating 2x, progress! 1x (expected gating) after 3 to 5 cases"
    )
    assert said(killed, Hunted(seed=1, cases=20)) == "m on cpu survives 20 cases, 1 times of 2: breaks"
    words = "m on cpu survives 20 cases: breaks; what it changes was never executed"
    assert said(Hunted(seed=0, cases=20, reached=False)) == words


GOOD = """\
[[mutant]]
id = "m"
title = "t"
module = "vllm.v1.core.block_pool"
function = "BlockPool.touch"
target = "block.ref_cnt"
action = "replace"
with = "2"
engines = ["scheduler"]
expect = ["progress"]
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (GOOD, "[[mutant]]\nid = 1", "Expected `str`"),
        (GOOD, "mutant = [", "Invalid value"),
        (GOOD, '[[mutant]]\nid = "a"', "missing required field"),
        (GOOD, "mutant = []", "has no mutants"),
        (GOOD, GOOD + GOOD, "two mutants are called m"),
        (GOOD, "#" * (1 << 20) + "\n" + GOOD, "bytes; at most 1048576 are read"),
        ('id = "m"', 'id = "m"\ncolour = "red"', "unknown field `colour`"),
        ('"scheduler"', '"schedular"', "mutant m names engine schedular; there are "),
        ('"progress"', '"progres"', "mutant m names invariant progres; there are gating, "),
        ("block_pool", "block_pol", "mutant m: there is no module vllm.v1.core.block_pol here"),
        ("vllm.v1.core.block_pool", "nowhere", "mutant m: there is no module nowhere here"),
        ("vllm.v1.core.block_pool", "vllm.v1.core", "mutant m: there is no module vllm.v1.core here"),
        ("vllm.v1.core.block_pool", "..", "mutant m: there is no module .. here"),
        ("vllm.v1.core.block_pool", "vllm./etc/passwd", "mutant m: there is no module vllm./etc/passwd here"),
        ("BlockPool.touch", "BlockPool.tuch", "mutant m: vllm.v1.core.block_pool has no function BlockPool.tuch"),
        ('"block.ref_cnt"', '"if"', "'if' is there 3 times; say which occurrence"),
        ('"block.ref_cnt"', '"block.count"', "no statement 'block.count'"),
        ('with = "2"', 'with = "2 +"', "mutant m: 'with' is no expression: "),
        ('with = "2"', 'with = "1"', "BlockPool.touch: it changes nothing"),
    ],
)
def test_bad_files(old: str, new: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.replace(old, new))
    assert main(["mutants", "--file", str(path)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert words in said


@pytest.mark.parametrize(
    ("content", "words"), [(None, "No such file"), (b"\xff\xfe", "mine.toml: "), (b"", "missing required field")]
)
def test_no_such_file(content: bytes | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "mine.toml"
    if content is not None:
        path.write_bytes(content)
    assert main(["mutants", "--file", str(path)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert words in said


def hunted(folder: Path, *broken: Mutant, seeds: int = 1) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and JSON of ``replaycheck mutants`` on these."""
    lines = []
    for one in broken:
        fields = msgspec.to_builtins(one).items()
        # What JSON says of strings, numbers and lists, TOML says as well.
        lines += ["[[mutant]]", *(f"{name} = {json.dumps(value)}" for name, value in fields if value is not None)]
    (folder / "mine.toml").write_text("\n".join(lines))
    out = folder / "out.json"
    limits = ["--cases", "20", "--seeds", str(seeds)]
    code = main(["mutants", "--file", str(folder / "mine.toml"), *limits, "--json", str(out)])
    return code, json.loads(out.read_text())


def test_killed_survives_inert_and_idle(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
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
    assert "survivor on scheduler survives 20 cases: " in capsys.readouterr().err
    inert = msgspec.structs.replace(
        killed, id="inert", module="vllm.v1.sample.ops.penalties", function="apply_all_penalties", target="return"
    )
    idle = msgspec.structs.replace(
        killed,
        id="idle",
        module="vllm.v1.core.sched.scheduler",
        function="Scheduler.shutdown",
        target="if",
        occurrence=0,
    )
    code, result = hunted(tmp_path, inert, idle)
    assert code == 2
    assert not any(one["killed"] for one in result)
    err = capsys.readouterr().err
    assert "mutant inert: engine scheduler never imports vllm.v1.sample.ops.penalties" in err
    assert "idle on scheduler survives 20 cases: " in err
    assert "; what it changes was never executed" in err


def test_a_death_is_a_fault_and_other_seeds_go_on(tmp_path: Path):
    dies = mutant(
        id="dies",
        module="vllm.v1.core.block_pool",
        function="BlockPool.touch",
        target="for",
        action="replace",
        value="__import__('os').abort()",
        engines=("scheduler",),
        expect=("no-fault",),
    )
    raises = msgspec.structs.replace(dies, id="raises", value="1 / 0")
    code, result = hunted(tmp_path, dies, raises, seeds=2)
    assert code == 0
    assert [(one["id"], one["seed"], one["invariant"]) for one in result] == [
        ("dies", 0, "no-fault"),
        ("dies", 1, "no-fault"),
        ("raises", 0, "no-fault"),
        ("raises", 1, "no-fault"),
    ]
    # The case that it died in counts: it is the one in which the other raises.
    assert [one["cases"] for one in result[:2]] == [one["cases"] for one in result[2:]]


def test_a_hunt_that_hangs_is_ended():
    died = mutants._died(signal.SIGALRM, Hunted(seed=4, cases=7, running=True))
    assert (died.invariant, died.seed, died.cases, died.running) == ("no-fault", 4, 7, False)
    assert "hangs" in died.message


def test_a_module_that_is_imported_anew():
    """As vLLM's ROCm modules are for each engine: it is broken again."""
    code = (
        "import sys, msgspec; from fuzz import mutation; "
        "mutation.install(msgspec.convert(msgspec.json.decode(sys.argv[1]), mutation.Mutant)); "
        "import colorsys; del sys.modules['colorsys']; import colorsys; print(colorsys.rgb_to_yiq(1, 1, 1))"
    )
    broken = mutant(module="colorsys", function="rgb_to_yiq", target="return", action="replace", value="'broken'")
    told = msgspec.json.encode(broken).decode()
    done = subprocess.run(
        [sys.executable, "-c", code, told], capture_output=True, text=True, cwd=Path(__file__).parent.parent
    )
    assert done.stdout == "broken\n", done.stderr
