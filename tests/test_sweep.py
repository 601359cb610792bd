# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""``replaycheck sweep``: published hit counts on the real scheduler, and engines that get them wrong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_engine
import msgspec
import pytest

from fuzz import corpus, sweep
from fuzz.case import Case, Request
from fuzz.cli import main
from fuzz.engines import ENGINES
from fuzz.engines import config as vllm_setup
from fuzz.engines.base import Engine
from fuzz.sweep import SWEEPS, plan
from invariants.trace import Geometry, Trace

DSV41 = SWEEPS["dsv41"]

REPLAY_ON = {
    "prefix 1,920": 15_360,
    "prefix 2,048": 16_384,
    "prefix 2,176": 17_408,
    "prefix 4,096": 32_768,
    "vault code, 3,027 twice": 23_552,
    "vault code, 1,800 of 2,176": 14_336,
}
REPLAY_OFF = {"prefix 1,920": 15_360, "prefix 2,048": 16_256, "prefix 2,176": 17_280, "prefix 4,096": 32_640}


@pytest.fixture(autouse=True)
def corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Findings of these tests are none."""
    monkeypatch.setattr(corpus, "ROOT", tmp_path / "corpora")
    return tmp_path / "corpora"


@dataclasses.dataclass
class Brisk:
    """The engine without its kernels: hits are the scheduler's alone."""

    engine: Engine

    @property
    def name(self) -> str:
        return self.engine.name

    def run(self, case: Case, brisk: bool = True) -> Trace:
        return self.engine.run(case, brisk)

    def versions(self) -> dict[str, str]:
        return self.engine.versions()


@pytest.fixture
def scheduler(open_engine: Callable[[str], Engine]) -> Engine:
    return open_engine("scheduler")


class TestPublished:
    def test_the_published_table_is_whole(self):
        assert {m.name: m.published["replay"] for m in DSV41.measurements} == REPLAY_ON
        assert {m.name: m.published["no-replay"] for m in DSV41.measurements if len(m.published) > 1} == REPLAY_OFF

    def test_the_formula_gives_the_replay_column(self):
        assert {m.name: 8 * m.expected(DSV41.geometry) for m in DSV41.measurements} == REPLAY_ON

    def test_eight_replicas_of_the_real_scheduler(self, scheduler: Engine):
        rows = plan(DSV41)
        for row in rows:
            for _ in range(8):
                assert not row.run(Brisk(scheduler)).violations
        assert {row.measurement.name: sum(row.hits) for row in rows if row.arm == "replay"} == REPLAY_ON
        assert all(row.right for row in rows)
        # One replica asked like the others cannot lose a block, see the module.
        off = {row.measurement.name: sum(row.hits) for row in rows if row.arm == "no-replay"}
        assert off == {name: REPLAY_ON[name] for name in REPLAY_OFF}
        assert [row.as_published for row in rows if row.arm == "no-replay"] == [True, False, False, False]

    def test_replicas_share_nothing(self):
        one, other = (plan(DSV41)[0].measurement.case(DSV41.geometry, replica) for replica in (0, 1))
        assert not {piece[0] for request in one.requests for piece in request.prompt} & {
            piece[0] for request in other.requests for piece in request.prompt
        }

    @pytest.mark.parametrize(("replay", "published"), [(True, REPLAY_ON), (False, REPLAY_OFF)])
    def test_one_replica_with_another_past_gives_both_columns(
        self, scheduler: Engine, monkeypatch: pytest.MonkeyPatch, replay: bool, published: dict[str, int]
    ):
        """The eighth has seen the bare prefix, and the 2,048 tokens that the sweep begins with, of the same text."""
        made = vllm_setup.kv_cache_config

        def as_vllm_plans_it(config: Any, geometry: Geometry) -> Any:
            layout = made(config, geometry)
            layout.prefix_cache_retention_interval = config.cache_config.prefix_cache_retention_interval
            return layout

        monkeypatch.setattr(vllm_setup, "kv_cache_config", as_vllm_plans_it)
        geometry = msgspec.structs.replace(DSV41.geometry, replay=replay)
        for prefix in (1920, 2048, 2176, 4096):
            asked = prefix + 128
            hits = [
                scheduler.run(_asks(geometry, *past, asked), brisk=True).admissions[-1].hit
                for past in [*[(asked,)] * 7, (prefix, 2048)]
            ]
            assert sum(hits) == published[f"prefix {prefix:,}"], hits


def _asks(geometry: Geometry, *lengths: int) -> Case:
    """Prompts of one text, one after the other."""
    return Case(
        geometry=geometry,
        requests=tuple(
            Request(id=f"r{index}", arrive=index * sweep.LATER, prompt=(("text", 0, length),))
            for index, length in enumerate(lengths)
        ),
    )


class Counting(fake_engine.Clean):
    """Admits nothing, so that there is nothing to break, and counts no hit."""

    name = "counting"

    def misbehave(self, case: Case, trace: Trace) -> None:  # noqa: ARG002
        trace.metrics["prefix_cache_hits"] = 0


class Faulty(Counting):
    name = "faulty"

    def misbehave(self, case: Case, trace: Trace) -> None:
        super().misbehave(case, trace)
        fake_engine.Broken.misbehave(self, case, trace)


class Crashing(Counting):
    name = "crashing"

    def misbehave(self, case: Case, trace: Trace) -> None:  # noqa: ARG002
        raise IndexError("not my day")


class Interrupted(Counting):
    name = "interrupted"

    def misbehave(self, case: Case, trace: Trace) -> None:
        super().misbehave(case, trace)
        if self.runs == 3:
            raise KeyboardInterrupt


class TestCommand:
    @pytest.fixture
    def run(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        def run(name: str, *arguments: str) -> tuple[int, str, str]:
            monkeypatch.setitem(ENGINES, name, f"{'fake_engine' if name in ('Clean', 'Picky') else __name__}:{name}")
            code = main(["sweep", "--engine", name, *arguments])
            captured = capsys.readouterr()
            return code, captured.out, captured.err

        return run

    def test_real_scheduler_with_its_kernels(self, scheduler: Engine, tmp_path: Path, capsys, monkeypatch):
        monkeypatch.setattr("fuzz.sweep.open_engine", lambda _: scheduler)
        file = tmp_path / "out.json"
        assert main(["sweep", "--engine", "scheduler", "--replicas", "1", "--json", str(file)]) == 0
        out = capsys.readouterr().out
        assert "10 cases, 20 requests" in out
        assert "WRONG" not in out
        rows = json.loads(file.read_bytes())
        assert [(row["arm"], row["prefix"], row["replicas"], row["hits"]) for row in rows] == [
            ("replay", 1920, 1, 1920),
            ("replay", 2048, 1, 2048),
            ("replay", 2176, 1, 2176),
            ("replay", 4096, 1, 4096),
            ("replay", 3027, 1, 2944),
            ("replay", 1800, 1, 1792),
            ("no-replay", 1920, 1, 1920),
            ("no-replay", 2048, 1, 2048),
            ("no-replay", 2176, 1, 2176),
            ("no-replay", 4096, 1, 4096),
        ]
        assert all(row["expected_hits"] == row["hits"] and row["answers_right"] is None for row in rows)
        assert all(row["as_published"] is None for row in rows)

    def test_shortfall(self, run):
        code, out, _ = run("Counting", "--replicas", "2")
        assert code == 1
        assert " ".join(out.split()).count("WRONG: 0, 0") == 10
        assert out.splitlines()[-1] == "replaycheck sweep --engine Counting --profile dsv41 --replicas 2"

    def test_a_broken_invariant_is_kept_once_and_ends_with_its_command(self, run, corpora: Path):
        code, out, _ = run("Faulty", "--replicas", "2")
        assert code == 1
        (path,) = corpora.glob("*/crashes/*.json")
        assert "no-fault: " in out
        assert out.splitlines()[-1].startswith("replaycheck replay ")
        assert path.name in out.splitlines()[-1]

    def test_our_own_fault_is_no_finding_of_vllm(self, run):
        code, out, _ = run("Crashing", "--replicas", "1")
        assert code == 2
        assert "IndexError: not my day" in out

    def test_interrupted(self, run, tmp_path: Path):
        file = tmp_path / "out.json"
        code, out, _ = run("Interrupted", "--replicas", "2", "--json", str(file))
        assert code == 1  # what was done was wrong
        assert "broken off" in out
        assert "not run" in out
        assert [row["replicas"] for row in json.loads(file.read_bytes())][:3] == [2, 0, 0]

    @pytest.mark.parametrize(
        ("engine", "why"),
        [
            ("Clean", "does not count prefix-cache hits"),
            ("Picky", "refuses the sweep's geometry: a pool of 512 blocks"),
        ],
    )
    def test_cannot_run(self, run, engine: str, why: str):
        code, out, err = run(engine)
        assert (code, out) == (2, "")
        assert why in err
        assert len(err.splitlines()) == 1

    @pytest.mark.parametrize("arguments", [("--profile", "small"), ("--replicas", "0")])
    def test_bad_arguments(self, arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]):
        with pytest.raises(SystemExit, match="2"):
            main(["sweep", *arguments])
        assert len(capsys.readouterr().err.splitlines()) == 1
