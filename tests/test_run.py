# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The run loop and the register of known findings, on engines that run nothing and on traces laid out by hand."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import fake_engine
import numpy as np
import pytest
import traces
from traces import Row

from fuzz import corpus, explore, known, run
from fuzz.case import Case, Request
from fuzz.engines import ENGINES
from fuzz.engines.base import Engine, Refused
from fuzz.explore import Explorer
from fuzz.run import OWN_FAULT, CannotRun, run_case
from fuzz.strategies import cases
from invariants import judge
from invariants.trace import Admission, Fault, Geometry, Trace, Violation


@pytest.fixture(autouse=True)
def corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Findings of these tests are none."""
    monkeypatch.setattr(corpus, "ROOT", tmp_path / "corpora")
    return tmp_path / "corpora"


def make(*lengths: int) -> Case:
    return Case(
        geometry=Geometry(
            window=4, block_size=4, swa_block_size=4, num_blocks=32, max_num_batched_tokens=16, max_num_seqs=2
        ),
        requests=tuple(Request(id=f"r{i}", arrive=i, prompt=(("s", 0, n),)) for i, n in enumerate(lengths)),
    )


def explore_with(engine: Engine, limit: int | None = 300, seeds: tuple[Case, ...] = (), **more) -> Explorer:
    explorer = Explorer(engine, cases("small"), seed=1, cases=limit, **more)
    explorer.run(seeds)
    return explorer


def crash_files(root: Path) -> list[Path]:
    return sorted(root.glob("*/crashes/*.json"))


class TestRunCase:
    def test_clean(self):
        judged = run_case(fake_engine.Clean(), make(30))
        assert (judged.violations, judged.known, judged.keys) == ([], {}, [])

    def test_a_violation(self):
        judged = run_case(fake_engine.Broken(), make(30))
        assert judged.keys == [("no-fault", "exception")]

    def test_refused_is_not_a_finding(self):
        with pytest.raises(Refused):
            run_case(fake_engine.Picky(), make(30))

    def test_our_own_fault_is_told_with_its_traceback(self, monkeypatch: pytest.MonkeyPatch):
        def broken(_: Trace) -> list[Violation]:
            raise KeyError("oops")

        monkeypatch.setattr(run, "judge", broken)
        judged = run_case(fake_engine.Clean(), make(30))
        assert judged.trace is None
        assert judged.keys == [(OWN_FAULT, "test_run.py:broken")]
        assert "Traceback" in judged.violations[0].message
        assert "KeyError: 'oops'" in judged.violations[0].message

    @pytest.mark.parametrize("name", ["judge", "edges"])
    def test_whatever_of_ours_fails(self, name: str, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(run, name, lambda _: 1 // 0)
        assert "ZeroDivisionError" in run_case(fake_engine.Clean(), make(30)).violations[0].message

    def test_unknown_and_missing_engines(self, monkeypatch: pytest.MonkeyPatch):
        with pytest.raises(CannotRun, match=r"no engine is called 'nope'; there are: .*scheduler"):
            run.open_engine("nope")
        monkeypatch.setitem(ENGINES, "missing", "fake_engine:Missing")
        with pytest.raises(CannotRun, match="engine 'missing' cannot run here: this machine has no such accelerator"):
            run.open_engine("missing")


class TestExplore:
    def test_clean(self, corpora: Path):
        engine = fake_engine.Clean()
        tally = explore_with(engine).tally
        assert tally.cases == engine.runs == 300
        assert tally.requests > 300
        assert 0 < tally.kernels["compiled"] < 300
        assert not tally.findings
        assert not corpora.exists()

    def test_the_same_seed_makes_the_same_cases(self):
        def ran(seed: int) -> set[int]:
            explorer = Explorer(fake_engine.Clean(), cases("small"), seed, cases=100)
            explorer.run([])
            return explorer._seen

        assert ran(5) == ran(5)
        assert ran(5) != ran(6)

    def test_seeds_come_first_and_count(self):
        engine = fake_engine.Clean()
        explorer = explore_with(engine, 3, (make(1), make(2), make(3), make(4)))
        assert explorer.tally.cases == engine.runs == 3
        assert explorer._seen == {hash(make(n)) for n in (1, 2, 3)}

    def test_the_smallest_case_is_kept_once_and_the_run_goes_on(self, corpora: Path):
        tally = explore_with(fake_engine.Broken()).tally
        assert tally.cases == 300
        (finding,) = tally.findings
        (request,) = finding.judged.case.requests
        assert 20 <= len(request) < 40
        assert not finding.judged.case.events
        assert tally.repeats["no-fault", "exception"] > 10
        assert crash_files(corpora) == [finding.path]
        assert finding.path.name.startswith("no-fault-")

    def test_provenance(self, corpora: Path):
        explore_with(fake_engine.Broken())
        provenance = json.loads(crash_files(corpora)[0].read_bytes())["provenance"]
        assert provenance.items() >= {"invariant": "no-fault", "seed": 1}.items()
        assert time.strftime("%Y-") in provenance["found"]
        assert "exception" in provenance["note"]

    def test_two_bugs_are_two_findings(self, corpora: Path):
        tally = explore_with(fake_engine.TwiceBroken()).tally
        assert {finding.judged.keys[0] for finding in tally.findings} == {
            ("no-fault", "exception"),
            ("no-fault", "hang"),
        }
        sizes = {finding.judged.keys[0][1]: finding.judged.case.requests for finding in tally.findings}
        assert len(sizes["exception"]) == 1
        assert len(sizes["hang"]) == 3
        assert len(crash_files(corpora)) == 2

    def test_a_seed_that_breaks_something_is_kept_as_it_is(self, corpora: Path):
        case = make(50, 60)
        tally = explore_with(fake_engine.Broken(), 1, (case,)).tally
        assert [finding.judged.case.requests for finding in tally.findings] == [case.requests]
        assert len(crash_files(corpora)) == 1

    def test_of_the_seeds_that_break_it_the_smallest_is_kept(self):
        cases_ = make(50, 60), make(50), make(50, 60, 70), make(3)
        (finding,) = explore_with(fake_engine.Broken(), 4, cases_).tally.findings
        assert finding.judged.case.requests == make(50).requests

    def test_an_interrupt_while_a_finding_is_saved_does_not_lose_it(self, corpora: Path):
        class InterruptedAgain(fake_engine.Broken):
            def misbehave(self, case: Case, trace: Trace) -> None:
                if self.runs == 2:
                    raise KeyboardInterrupt
                super().misbehave(case, trace)

        with pytest.raises(KeyboardInterrupt):
            explore_with(InterruptedAgain(), 10, (make(50),))
        assert len(crash_files(corpora)) == 1

    def test_what_only_a_brisk_run_shows_is_kept(self):
        class OnlyBrisk(fake_engine.Broken):
            def misbehave(self, case: Case, trace: Trace) -> None:
                if trace.kernels == "none":
                    super().misbehave(case, trace)

        (finding,) = explore_with(OnlyBrisk()).tally.findings
        assert finding.judged.keys == [("no-fault", "exception")]

    def test_a_finding_that_does_not_come_back_is_kept(self):
        class Racy(fake_engine.Clean):
            def misbehave(self, case: Case, trace: Trace) -> None:  # noqa: ARG002
                if self.runs == 50:
                    trace.faults.append(Fault("signal", 0, "once"))

        tally = explore_with(Racy()).tally
        assert len(tally.findings) == 1
        assert tally.cases == 300

    def test_shrinking_takes_no_longer_than_it_may(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(explore, "SHRINK_SECONDS", 0.0)
        (finding,) = explore_with(fake_engine.Broken()).tally.findings
        assert any(len(request) >= 20 for request in finding.judged.case.requests)

    def test_our_own_fault_keeps_the_case(self):
        tally = explore_with(fake_engine.Crashing()).tally
        (finding,) = tally.findings
        assert not finding.is_violation
        assert len(finding.judged.case.events) == 1
        assert finding.path.name.startswith("replaycheck-")
        assert tally.cases == 300

    def test_refused_cases_are_counted_by_reason(self):
        explorer = explore_with(fake_engine.Picky(), None, deadline=time.monotonic() + 1)
        assert explorer.tally.cases == 0
        assert set(explorer.tally.refused) == {"a pool of N blocks is not to my taste"}

    def test_time_is_kept(self):
        started = time.monotonic()
        tally = explore_with(fake_engine.Clean(), None, deadline=started + 0.5).tally
        assert 0.4 < time.monotonic() - started < 2
        assert tally.cases

    def test_an_interrupt_loses_nothing(self, corpora: Path):
        explorer = Explorer(fake_engine.Interrupted(), cases("small"), seed=1, cases=10_000)
        with pytest.raises(KeyboardInterrupt):
            explorer.run([])
        assert explorer.tally.cases > 10
        assert len(explorer.tally.findings) == len(crash_files(corpora)) == 1

    def test_a_folder_that_cannot_be_written_costs_its_place_alone(self, corpora: Path):
        (corpora / "broken").mkdir(parents=True)
        (corpora / "broken" / "crashes").write_text("a file, not a folder")
        (finding,) = explore_with(fake_engine.Broken()).tally.findings
        assert corpora not in finding.path.parents
        assert corpus.read(finding.path).requests == finding.judged.case.requests


class TestKnown:
    """The entry null-replay-block takes its own violation and no other."""

    @pytest.fixture(autouse=True)
    def _window(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(traces, "W", 3)

    def test_it_takes_its_own(self):
        news, old = known.split(*judged(null_replay_block()))
        assert news == []
        assert {(v.invariant, v.position) for v in old["null-replay-block"]} == {("gather-live", 1), ("write-fence", 1)}

    def test_any_number_of_them(self):
        news, old = known.split(*judged(null_replay_block(hits=9)))
        assert news == []
        assert "more" in str(old["null-replay-block"])

    def test_a_trace_without_it_is_left_alone(self):
        trace = null_replay_block(window=[7, 8, 9])
        assert known.split(*judged(trace)) == ([], {})

    def test_not_another_null_block(self):
        news, _ = known.split(*judged(null_replay_block(window=[0, 0, 8])))
        assert {(v.invariant, v.position) for v in news} >= {("gather-live", 2), ("write-fence", 3)}

    def test_not_another_null_block_that_the_examples_hide(self):
        trace = null_replay_block(hits=9, last_window=[0, 0, 27])
        news, _ = known.split(*judged(trace))
        assert {violation.invariant for violation in news} >= {"gather-live", "write-fence"}

    def test_not_a_replay_that_starts_inside_its_block(self, monkeypatch: pytest.MonkeyPatch):
        """W = 2: replay_start 2 is the first position of window block 1, which retention keeps."""
        monkeypatch.setattr(traces, "W", 2)
        news, old = known.split(*judged(null_replay_block(start=2, window=[0, 0, 8])))
        assert old == {}
        assert {(v.invariant, v.position) for v in news} >= {("gather-live", 2), ("write-fence", 2)}

    def test_not_a_read_below_replay_start(self):
        trace = null_replay_block()
        for gathers in trace.steps[1].gathers:
            gathers.first = np.maximum(gathers.first - 1, 0)
            gathers.cell_position = np.maximum(gathers.cell_position - 1, 0)
        news, _ = known.split(*judged(trace))
        assert {violation.invariant for violation in news} >= {"gather-floor", "gather-live"}

    def test_not_a_cacheable_group(self):
        trace = null_replay_block()
        trace.steps[1].tables[traces.CACHEABLE][0] = traces.ints(0, 6)
        writes = trace.steps[1].writes[traces.CACHEABLE]
        writes.slot = np.where(writes.position == 1, 1, writes.slot)
        news, _ = known.split(*judged(trace))
        assert ("write-fence", 1) in {(v.invariant, v.position) for v in news if v.site.startswith("group 0")}

    def test_not_without_replay(self):
        trace = null_replay_block()
        trace.replay_expected = False
        _, old = known.split(*judged(trace))
        assert old == {}

    def test_not_what_another_invariant_says(self):
        trace = null_replay_block()
        violation = next(v for v in judge(trace) if v.invariant == "gather-live")
        changed = replace(violation, invariant="gather-window")
        assert known.split([changed], trace) == ([changed], {})


def judged(trace: Trace) -> tuple[list[Violation], Trace]:
    return judge(trace), trace


def null_replay_block(
    hits: int = 1, start: int = 1, window: list[int] | None = None, last_window: list[int] | None = None
) -> Trace:
    """W = 3, blocks 4 and 2: the same 5 tokens again and again. H = 4, replay_start 1 ends window block 0.

    Retention keeps positions from H - W + 1 = 2 on, which is block 1 of the window table: block 0 is null.
    """
    numbers = range(hits + 1)
    trace = traces.trace_of(
        [traces.request(f"r{i}", i, range(100, 105), [200]) for i in numbers],
        [
            Admission(i, i, tokens=5, hit=hit, replay_start=first, computed=first, scheduled=5 - first, resumed=False)
            for i, (hit, first) in enumerate([(0, 0)] + [(4, start)] * hits)
        ],
    )
    tables = [window or [0, 7, 8] for _ in numbers]
    tables[-1] = last_window or tables[-1]
    rows = [Row(i, start, 5 - start, True, start, [1, 6], table) for i, table in enumerate(tables)]
    rows[0] = Row(0, 0, 5, True, 0, [1, 2], [3, 4, 5])
    traces.lay(trace, [[row] for row in rows])
    for step in trace.steps:
        step.finished = [step.index]
    trace.metrics = {"prefix_cache_queries": 5 * (hits + 1), "prefix_cache_hits": 4 * hits, "preempted_hits": 0}
    return trace
