# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Our conftest.py at work, in a pytest of its own on engines that run nothing."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import fake_engine
import msgspec
import pytest
from hypothesis import settings

from fuzz import corpus
from fuzz.case import Case
from fuzz.cli import main
from fuzz.engines import ENGINES

ROOT = Path(__file__).parent.parent

FAKES = """
import fake_engine, fuzz.corpus, fuzz.engines

fuzz.corpus.ROOT = Path(__file__).parent / "corpora"
fuzz.engines.ENGINES.clear()
fuzz.engines.ENGINES.update((name, f"fake_engine:{made.__name__}") for name, made in fake_engine.ENGINES.items())
"""

PROPERTY = """
from hypothesis import given
from fuzz.strategies import cases

@given(case=cases("small"))
def test_property(case, check):
    check({engine!r}, case)

def test_other():
    pass
"""


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project with our conftest.py and pytest settings, and the fake engines in place of the real one."""
    pytester.makeconftest((ROOT / "conftest.py").read_text() + FAKES)
    pytester.makepyprojecttoml((ROOT / "pyproject.toml").read_text().replace('testpaths = ["tests"]', ""))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("CI", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
        monkeypatch.delenv(name, raising=False)
    return pytester


def crashes(inner: pytest.Pytester) -> list[Path]:
    return sorted(inner.path.glob("corpora/*/crashes/*.json"))


def last_failure(output: str) -> list[str]:
    """Lines of the failures section, which ends where the summary begins."""
    section = output.partition("= FAILURES =")[2].partition("= short test summary info =")[0]
    return section.rstrip("= \n").splitlines()


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "xdist"])
def test_a_failing_property_saves_its_smallest_case(
    inner: pytest.Pytester, workers: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """And ends with a command, which fails in the same way."""
    inner.makepyfile(test_it=PROPERTY.format(engine="broken"))
    result = inner.runpytest_subprocess(*workers, "--hypothesis-seed=3")
    result.assert_outcomes(failed=1, passed=1)
    (path,) = crashes(inner)
    case = corpus.read(path)
    assert len(case.requests) <= 2
    assert 20 <= max(map(len, case.requests)) < 50
    assert case.provenance.seed == 3
    lines = last_failure(result.stdout.str())
    assert lines[-1].strip() == f"replaycheck replay corpora/broken/crashes/{path.name}"
    shown = "\n".join(lines)
    assert msgspec.json.decode(shown[shown.index("\n{") : shown.index("\n}") + 2], type=Case) == case
    for word in ("no-fault: exception while running: a prompt of 20 tokens or more", "expected", "vllm 0.0.fake"):
        assert word in shown
    assert "Falsifying example" not in shown[: shown.index("\n{")]
    result.stdout.fnmatch_lines(["FAILED test_it.py::test_property - Failed: no-fault: *"])
    # conftest.py's fakes are ours here, too.
    monkeypatch.setitem(ENGINES, "broken", f"fake_engine:{fake_engine.Broken.__name__}")
    assert main(shlex.split(lines[-1])[1:]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == lines[-1]


def test_replaycheck_s_own_fault_is_saved_too(inner: pytest.Pytester):
    inner.makepyfile(test_it=PROPERTY.format(engine="crashing"))
    result = inner.runpytest_subprocess()
    result.assert_outcomes(failed=1, passed=1)
    (path,) = crashes(inner)
    assert path.name.startswith("replaycheck-")
    result.stdout.fnmatch_lines(["*IndexError: no such event*"])


def test_a_missing_engine_skips_with_the_reason(inner: pytest.Pytester):
    inner.makepyfile(test_it=PROPERTY.format(engine="missing"))
    result = inner.runpytest_subprocess()
    result.assert_outcomes(skipped=1, passed=1)
    result.stdout.fnmatch_lines(["SKIPPED*engine 'missing' cannot run here: this machine has no such accelerator*"])


def test_the_header_says_the_world(inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_SOMETHING", "7")
    inner.makepyfile("def test_nothing(): pass")
    result = inner.runpytest_subprocess("--hypothesis-profile=nightly", "--hypothesis-seed=42")
    header = result.stdout.str().partition("collected")[0]
    for word in ("python 3", "hypothesis ", "kernels: ", "profile nightly", "--hypothesis-seed=42", "VLLM_SOMETHING=7"):
        assert word in header


def cases_of(inner: pytest.Pytester, *arguments: str) -> tuple[list[str], str]:
    """The cases that a run made, and the seed that its header gives."""
    result = inner.runpytest_subprocess("-rP", *arguments)
    result.assert_outcomes(passed=2)
    output = result.stdout.str()
    return re.findall(r"^case (.*)$", output, re.MULTILINE), re.search(r"--hypothesis-seed=(\d+)", output)[1]


def test_runs_differ_and_the_seed_brings_one_back(inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Also on a CI server, where Hypothesis by itself would make the same examples every time."""
    monkeypatch.setenv("CI", "true")
    told = PROPERTY.format(engine="clean").replace("    check", "    print('case', case.digest)\n    check")
    inner.makepyfile(test_it=told)
    first, seed = cases_of(inner)
    second, other = cases_of(inner)
    assert len(first) > 50
    assert seed != other
    assert first != second
    assert cases_of(inner, f"--hypothesis-seed={seed}") == (first, seed)


def test_workers_have_the_seed_of_the_header(inner: pytest.Pytester):
    inner.makepyfile(
        "def test_seed(pytestconfig):\n"
        "    import conftest, os\n"
        "    assert os.environ['OMP_NUM_THREADS'] == '1'\n"
        "    raise AssertionError(f'seed {pytestconfig.stash[conftest.seed_key]}')\n"
    )
    output = inner.runpytest_subprocess("-n", "2").stdout.str()
    assert f"seed {re.search(r'--hypothesis-seed=([0-9]+)', output)[1]}" in output


def test_a_seed_that_is_no_number(inner: pytest.Pytester):
    result = inner.runpytest_subprocess("--hypothesis-seed=x")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --hypothesis-seed=x: not a number"])


def test_corpus_files_come_first(inner: pytest.Pytester):
    inner.makepyfile(test_a="def test_one(): pass", test_replay="def test_two(): pass", test_z="def test_three(): pass")
    result = inner.runpytest_subprocess("--collect-only", "-q")
    assert [line for line in result.outlines if "::" in line] == [
        "test_replay.py::test_two",
        "test_a.py::test_one",
        "test_z.py::test_three",
    ]


def test_a_crash_that_fires_fails_its_replay(inner: pytest.Pytester):
    """With the text of a finding, and without being saved again."""
    inner.makepyfile(test_it=PROPERTY.format(engine="broken"))
    inner.runpytest_subprocess()
    (path,) = crashes(inner)
    inner.path.joinpath("test_it.py").unlink()
    inner.makepyfile(test_replay=(ROOT / "tests" / "test_replay.py").read_text())
    result = inner.runpytest_subprocess("-k", "crashes")
    assert crashes(inner) == [path]
    shown = last_failure(result.stdout.str())
    assert shown[-1] == f"replaycheck replay corpora/broken/crashes/{path.name}"
    result.stdout.fnmatch_lines(
        [f"FAILED test_replay.py::test_replay?broken/crashes/{path.name}? - Failed: no-fault: *"]
    )


def test_an_unknown_marker_is_an_error(inner: pytest.Pytester):
    inner.makepyfile("import pytest\n@pytest.mark.slow_tset\ndef test_nothing(): pass")
    assert inner.runpytest_subprocess().ret == pytest.ExitCode.INTERRUPTED


def test_edges_are_in_the_statistics(inner: pytest.Pytester):
    inner.makepyfile(
        test_it=PROPERTY.format(engine="clean"),
        conftest=inner.path.joinpath("conftest.py").read_text()
        + "\nrun.edges = lambda _: {'some-edge', 'other-edge'}\n",
    )
    result = inner.runpytest_subprocess("--hypothesis-show-statistics")
    result.stdout.fnmatch_lines(["*%, other-edge", "*%, some-edge", "*Highest target score: 2 *edges in one case*"])


def test_refused_cases_are_in_the_statistics(inner: pytest.Pytester):
    inner.makepyfile(test_it=PROPERTY.format(engine="picky"))
    result = inner.runpytest_subprocess("--hypothesis-show-statistics")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*%, refused by vLLM: a pool of N blocks is not to my taste"])


@pytest.mark.parametrize("name", ["dev", "ci", "nightly"])
def test_profiles(name: str):
    profile = settings.get_profile(name)
    assert profile.derandomize is False
    assert profile.database is not None
    assert profile.deadline is None
    assert profile.print_blob is True
