# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The command line: results, exit codes, JSON, and one clear line for everything that cannot be done."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path

import fake_engine
import msgspec
import pytest

from fuzz import corpus, explore, known, options, report
from fuzz.case import MAX_FILE_BYTES, Case, Event, Known, Provenance, Request
from fuzz.cli import COMMANDS, main
from fuzz.edges import EDGES
from fuzz.engines import ENGINES
from invariants.trace import Geometry, Violation
from invariants.view import View


@pytest.fixture(autouse=True)
def corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fake engines, their corpora, and a working directory above them."""
    monkeypatch.delitem(ENGINES, "scheduler")
    for name, engine in fake_engine.ENGINES.items():
        monkeypatch.setitem(ENGINES, name, f"fake_engine:{engine.__name__}")
    monkeypatch.setattr(corpus, "ROOT", tmp_path / "corpora")
    monkeypatch.setattr(options, "DEFAULT_ENGINE", "clean")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "corpora"


def make(length: int = 10, **more) -> Case:
    return Case(
        geometry=Geometry(
            window=4, block_size=4, swa_block_size=4, num_blocks=32, max_num_batched_tokens=16, max_num_seqs=2
        ),
        requests=(Request(id="r", arrive=0, prompt=(("s", 0, length),)),),
        **more,
    )


def keep(engine: str, kind: str, case: Case) -> Path:
    return corpus.save(case, corpus.folder(engine, kind), "some-case")


def run_json(*arguments: str) -> tuple[int, dict]:
    code = main([*arguments, "--json", "out.json"])
    return code, json.loads(Path("out.json").read_bytes())


class TestRun:
    def test_clean(self, capsys: pytest.CaptureFixture[str]):
        keep("clean", "seeds", make())
        code, result = run_json("run", "--engine", "clean", "--cases", "30", "--seed", "7")
        assert code == 0
        assert result["engine"] == "clean"
        assert (result["profile"], result["seed"], result["cases"]) == ("small", 7, 30)
        assert result["violations"] == result["known"] == result["errors"] == []
        assert result["skipped"] == {}
        assert result["versions"]["vllm"] == "0.0.fake"
        assert result["interrupted"] is False
        assert {"requests", "steps", "gathers", "seconds", "kernels"} <= result.keys()
        assert sorted(result["edges"]["reached"] + result["edges"]["missing"]) == sorted(EDGES)
        out = capsys.readouterr().out
        for word in (
            "cases",
            "requests",
            "steps",
            "gathers checked",
            "edges reached",
            "violations",
            "known",
            "skipped",
        ):
            assert word in out

    def test_a_finding(self, capsys: pytest.CaptureFixture[str]):
        code, result = run_json("run", "--engine", "broken", "--cases", "100", "--seed", "1")
        assert code == 1
        (violation,) = result["violations"]
        assert violation["invariant"] == "no-fault"
        assert "a prompt of 20 tokens or more" in violation["message"]
        case = corpus.read(Path(violation["case"]))
        assert case.provenance.seed == 1
        out = capsys.readouterr().out
        assert out.splitlines()[-1] == f"replaycheck replay {violation['case']}"
        shown = out[out.rindex("\n{") : out.rindex("\n}") + 2]
        assert msgspec.json.decode(shown, type=Case) == case
        for word in ("expected", "seen", "vllm 0.0.fake", "python 3", "kernels compiled", "no-fault: exception"):
            assert word in out

    def test_the_last_line_replays_the_finding(self, capsys: pytest.CaptureFixture[str]):
        main(["run", "--engine", "broken", "--cases", "100"])
        command = shlex.split(capsys.readouterr().out.splitlines()[-1])
        assert command[0] == "replaycheck"
        assert main(command[1:]) == 1
        assert capsys.readouterr().out.splitlines()[-1] == shlex.join(command)

    @pytest.mark.usefixtures("a_known_one")
    def test_known_is_neither_clean_nor_failed(self, corpora: Path, capsys: pytest.CaptureFixture[str]):
        path = keep("broken", "known", make(30, provenance=Provenance(known=Known(id="long", condition="n >= 20"))))
        code, result = run_json("run", "--engine", "broken", "--cases", "100")
        assert code == 0
        assert result["violations"] == []
        ((entry),) = result["known"]
        assert (entry["id"], entry["case"]) == ("long", corpus.shown(path))
        assert entry["count"] > 5
        assert not list(corpora.glob("*/crashes/*"))
        assert "prompts of 20 tokens" in capsys.readouterr().out

    def test_our_own_fault_is_not_a_clean_run(self, capsys: pytest.CaptureFixture[str]):
        code, result = run_json("run", "--engine", "crashing", "--cases", "200")
        assert code == 2
        assert result["violations"] == []
        (error,) = result["errors"]
        assert "IndexError: no such event" in error["message"]
        assert corpus.read(Path(error["case"])).events
        assert capsys.readouterr().out.splitlines()[-1] == f"replaycheck replay {error['case']}"

    def test_refused_cases_are_skipped_with_the_reason(self, capsys: pytest.CaptureFixture[str]):
        code, result = run_json("run", "--engine", "picky", "--cases", "40")
        assert code == 2, "nothing was judged, so nothing is clean"
        assert result["cases"] == 0
        assert sum(result["skipped"].values()) == 40
        assert list(result["skipped"]) == ["a pool of N blocks is not to my taste"]
        assert "a pool of N blocks is not to my taste" in capsys.readouterr().out

    @pytest.mark.parametrize("count", [0, 1])
    def test_an_interrupt(self, count: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        """2 without a finding, 1 with one; a summary and the JSON either way."""
        if not count:
            monkeypatch.setattr(fake_engine.Broken, "misbehave", lambda *_: None)
        code, result = run_json("run", "--engine", "interrupted", "--cases", "10000", "--seed", "1")
        assert code == (1 if count else 2)
        assert result["interrupted"]
        assert result["cases"] > 10
        assert len(result["violations"]) == count
        out = capsys.readouterr().out
        assert "gathers checked" in out
        assert "broken off" in out

    def test_seeds_that_cannot_be_read_are_named_and_passed_over(self, capsys: pytest.CaptureFixture[str]):
        path = keep("clean", "seeds", make())
        path.with_name("bad.json").write_text("{")
        assert main(["run", "--engine", "clean", "--cases", "5"]) == 0
        assert "replaycheck: corpora/clean/seeds/bad.json: " in capsys.readouterr().err.replace(f"{Path.cwd()}/", "")

    def test_default_is_a_minute(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(explore, "DEFAULT_SECONDS", 0.5)
        started = time.monotonic()
        assert main(["run", "--engine", "clean"]) == 0
        assert 0.4 < time.monotonic() - started < 5

    def test_progress_is_a_plain_line_now_and_then(self, monkeypatch: pytest.MonkeyPatch, capsys):
        monkeypatch.setattr(report, "LINE_SECONDS", 0.2)
        monkeypatch.setenv("CI", "true")
        main(["run", "--engine", "clean", "--time", "1"])
        lines = capsys.readouterr().err.splitlines()
        progress = [line for line in lines if line.startswith("replaycheck: clean, small: ")]
        assert 2 <= len(progress) <= 5
        assert "\x1b" not in "".join(lines)


@pytest.fixture
def a_known_one(monkeypatch: pytest.MonkeyPatch):
    def matches(violation: Violation, view: View) -> bool:
        return violation.site == "exception" and any(len(request.prompt) >= 20 for request in view.trace.requests)

    entry = known.Known("long", ("no-fault",), "prompts of 20 tokens fault", "n >= 20", None, matches)
    for module in (known, report, sys.modules["fuzz.replay"]):
        monkeypatch.setattr(module, "REGISTER", (entry,))


class TestReplay:
    def test_fixed_and_failed(self, capsys: pytest.CaptureFixture[str]):
        good, bad = keep("broken", "regressions", make(5)), keep("broken", "crashes", make(50))
        code, result = run_json("replay", "corpora")
        assert code == 1
        assert [(entry["file"], entry["outcome"], entry["invariant"], entry["fired"]) for entry in result] == [
            (corpus.shown(bad), "FAILED", "no-fault", 1),
            (corpus.shown(good), "FIXED", None, 0),
        ]
        assert {"file", "outcome", "invariant", "message", "known", "runs", "fired"} == result[0].keys()
        out = capsys.readouterr().out
        assert f"FIXED   {corpus.shown(good)}" in out
        assert out.splitlines()[-1] == f"replaycheck replay {corpus.shown(bad)}"

    def test_a_clean_folder(self):
        keep("clean", "seeds", make())
        assert main(["replay", "corpora/clean", "corpora/clean/seeds"]) == 0

    def test_a_bad_file_does_not_stop_the_others(self, capsys: pytest.CaptureFixture[str]):
        good = keep("clean", "seeds", make())
        good.with_name("a-bad.json").write_text('{"schema": 1}')
        code, result = run_json("replay", "corpora", "nowhere")
        assert code == 2
        assert [entry["outcome"] for entry in result] == ["ERROR", "FIXED", "ERROR"]
        assert [entry["runs"] for entry in result] == [0, 1, 0]
        err = capsys.readouterr().err.splitlines()
        assert len(err) == 2
        assert err[0].startswith("replaycheck: corpora/clean/seeds/a-bad.json: Object missing required field")

    def test_a_finding_outweighs_a_bad_file(self):
        keep("broken", "crashes", make(50)).with_name("bad.json").write_text("")
        assert main(["replay", "corpora"]) == 1

    @pytest.mark.usefixtures("a_known_one")
    def test_a_known_case_that_fires(self, capsys: pytest.CaptureFixture[str]):
        keep("broken", "known", make(30, provenance=Provenance(known=Known(id="long", condition="n >= 20"))))
        code, ((entry),) = run_json("replay", "corpora")
        assert code == 0
        assert (entry["outcome"], entry["known"], entry["fired"]) == ("FAILED", True, 1)
        assert "prompts of 20 tokens fault" in capsys.readouterr().out

    @pytest.mark.usefixtures("a_known_one")
    def test_a_known_case_that_no_longer_fires(self, capsys: pytest.CaptureFixture[str]):
        keep("clean", "known", make(30, provenance=Provenance(known=Known(id="long", condition="n >= 20"))))
        code, ((entry),) = run_json("replay", "corpora")
        assert code == 1
        assert (entry["outcome"], entry["known"], entry["fired"]) == ("ERROR", True, 0)
        assert "known finding long no longer fires" in entry["message"]
        assert "move the case to regressions/" in capsys.readouterr().out

    @pytest.mark.usefixtures("a_known_one")
    def test_a_known_case_that_breaks_something_else_too(self):
        known_one = Provenance(known=Known(id="long", condition="n >= 20"))
        requests = tuple(Request(id=f"r{i}", arrive=0, prompt=(("s", 0, 30),)) for i in range(3))
        keep("twice-broken", "known", msgspec.structs.replace(make(provenance=known_one), requests=requests))
        code, ((entry),) = run_json("replay", "corpora")
        assert code == 1
        assert (entry["outcome"], entry["known"]) == ("FAILED", False)
        assert "three requests or more" in entry["message"]

    def test_what_vllm_refuses_is_an_error(self, capsys: pytest.CaptureFixture[str]):
        keep("picky", "seeds", make())
        assert main(["replay", "corpora"]) == 2
        assert "vLLM refuses this case: a pool of 32 blocks" in capsys.readouterr().err

    def test_our_own_fault_is_an_error(self, capsys: pytest.CaptureFixture[str]):
        path = keep("crashing", "crashes", make(events=(Event(step=0, kind="drop_blocks"),)))
        assert main(["replay", "corpora"]) == 2
        out = capsys.readouterr().out
        assert f"ERROR   {corpus.shown(path)}  replaycheck failed: IndexError: no such event" in out
        assert "Traceback" in out

    def test_engine_from_the_folder_or_as_asked(self):
        path = keep("broken", "crashes", make(50))
        assert main(["replay", str(path)]) == 1
        assert main(["replay", str(path), "--engine", "clean"]) == 0
        assert main(["replay", str(path.rename("loose.json"))]) == 0

    def test_an_interrupt(self, capsys: pytest.CaptureFixture[str]):
        """The 200th of 300 replays is broken off."""
        keep("interrupted", "seeds", make())
        code, result = run_json("replay", *["corpora"] * 300)
        assert code == 2
        assert len(result) == 199
        assert "replaycheck: broken off after 199 files" in capsys.readouterr().err


BAD_LINES = {
    "no command": ([], "the following arguments are required: COMMAND"),
    "command": (["frobnicate"], "invalid choice: 'frobnicate'"),
    "option": (["run", "--frobnicate"], "unrecognized arguments: --frobnicate"),
    "engine": (["run", "--engine", "nope"], "argument --engine: invalid choice: 'nope'"),
    "profile": (["run", "--profile", "nope"], "argument --profile: invalid choice: 'nope'"),
    "no cases": (["run", "--cases", "0"], "argument --cases: 0 is not a number above zero"),
    "no number": (["run", "--cases", "many"], "argument --cases: invalid int value: 'many'"),
    "no time": (["run", "--time", "-1"], "argument --time: -1 is not a number above zero"),
    "endless": (["run", "--time", "nan"], "argument --time: nan is not a number above zero"),
    "seed": (["run", "--seed", "x"], "argument --seed: invalid int value: 'x'"),
    "json folder": (["run", "--json", "."], "argument --json: cannot write to ."),
    "json nowhere": (["doctor", "--json", "no/where.json"], "argument --json: cannot write to no/where.json"),
    "no path": (["replay"], "the following arguments are required: PATH"),
    "missing path": (["replay", "nowhere"], "nowhere: no such file or folder"),
    "empty folder": (["replay", "empty"], "empty: no case in this folder (*.json)"),
    "garbage": (["replay", "garbage.json"], "garbage.json: JSON is malformed"),
    "schema": (["replay", "schema.json"], "schema.json: this replaycheck reads schema 1 only - at `$.schema`"),
    "oversized": (["replay", "big.json"], f"big.json: {MAX_FILE_BYTES + 1} bytes; a case has at most {MAX_FILE_BYTES}"),
    "missing engine": (["run", "--engine", "missing"], "engine 'missing' cannot run here: this machine has no such"),
    "replay missing engine": (["replay", "ok.json", "--engine", "missing"], "engine 'missing' cannot run here"),
}


@pytest.mark.parametrize("bad", BAD_LINES)
def test_bad_input_is_one_line_and_2(bad: str, capsys: pytest.CaptureFixture[str]):
    Path("empty").mkdir()
    Path("garbage.json").write_text("garbage")
    Path("schema.json").write_text('{"schema": 2}')
    Path("big.json").write_bytes(b" " * (MAX_FILE_BYTES + 1))
    corpus.save(make(), Path(), "ok").rename("ok.json")
    arguments, message = BAD_LINES[bad]
    try:
        code = main(arguments)
    except SystemExit as stopped:
        code = stopped.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("replaycheck: ")
    assert message in line


def test_a_command_that_meets_a_missing_engine_by_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("fuzz.explore.open_engine", lambda *_, **__: fake_engine.Missing())
    assert main(["run"]) == 2
    assert capsys.readouterr().err == "replaycheck: this machine has no such accelerator\n"


class TestDoctor:
    def test_it_says_what_can_run(self, capsys: pytest.CaptureFixture[str]):
        keep("clean", "seeds", make())
        code, result = run_json("doctor")
        assert code == 0
        assert result["engines"]["clean"] == {"can_run": True, "missing": None}
        assert result["engines"]["missing"]["can_run"] is False
        assert "no such accelerator" in result["engines"]["missing"]["missing"]
        assert "not to my taste" in result["engines"]["picky"]["missing"]
        assert result["corpora"]["clean"] == {"seeds": 1, "regressions": 0, "known": 0, "crashes": 0}
        assert set(result["profiles"]) == {"small", "dsv41", "wild"}
        out = capsys.readouterr().out
        assert "this machine has no such accelerator" in out
        assert "kernels" in out

    def test_2_without_the_default_engine(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        monkeypatch.setattr(options, "DEFAULT_ENGINE", "missing")
        assert main(["doctor"]) == 2
        assert "replaycheck: engine 'missing' cannot run here" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    assert COMMANDS[name][1] in capsys.readouterr().out
