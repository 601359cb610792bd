# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""pytest integration: Hypothesis profiles, report header, corpus files first, failures that say how to replay them.

Profiles are chosen with ``--hypothesis-profile`` (dev, ci, nightly; dev if not said). All are randomised: the seed is
in the header, and ``--hypothesis-seed`` sets it. Hypothesis's own "ci" profile, which makes the same examples every
time and which it takes on a CI server by itself, is replaced.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Never

# Before anything imports torch: each xdist worker has one core.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from fuzz import report, run
from fuzz.case import Case
from fuzz.engines.base import Engine, Refused

pytest_plugins = ["pytester"]

for name, examples in (("dev", 100), ("ci", 300), ("nightly", 10_000)):
    settings.register_profile(
        name,
        parent=settings.get_profile("default"),
        max_examples=examples,
        derandomize=False,
        database=DirectoryBasedExampleDatabase(Path(__file__).parent / ".hypothesis" / "examples"),
        deadline=None,
        print_blob=True,
        # Not "target": its hill climbing can go round in circles for minutes. Not "explain": it runs the smallest case
        # hundreds of times more, for a text that says less than the case.
        phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
        # One failure, of which exactly one smallest case is kept.
        report_multiple_bugs=False,
        # Time to make a case is measured with the rest of the machine's load.
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("dev")

FIRST = "test_replay.py"
OUR_VARIABLES = ("VLLM_", "TRITON_", "HIP_", "ROCR_", "CUDA_VISIBLE_DEVICES", "HYPOTHESIS_", "OMP_NUM_THREADS")
seed_key = pytest.StashKey[int]()


class CaseFailed(AssertionError):
    """A case broke an invariant. Hypothesis raises it again with the smallest case, which is then saved."""

    def __init__(self, judged: run.Judged, engine: Engine, path: Path | None) -> None:
        super().__init__(str(judged.violations[0]))
        self.judged, self.engine, self.path = judged, engine, path


def pytest_configure(config: pytest.Config) -> None:
    given = config.getoption("--hypothesis-seed")
    try:
        drawn = random.randrange(1 << 32) if given is None else int(given)
    except ValueError:
        raise pytest.UsageError(f"--hypothesis-seed={given}: not a number") from None
    config.stash[seed_key] = getattr(config, "workerinput", {}).get("replaycheck_seed", drawn)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give an xdist worker the seed that the header shows."""
    node.workerinput["replaycheck_seed"] = node.config.stash[seed_key]


def pytest_report_header(config: pytest.Config) -> list[str]:
    from fuzz.engines.scheduler import KERNEL_MODE

    variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(OUR_VARIABLES)]
    return [
        ", ".join(f"{name} {version}" for name, version in run.installed().items()),
        f"kernels: {KERNEL_MODE}, on a GPU if vLLM has one",
        f"hypothesis profile {settings.get_current_profile_name()}: {settings.default.max_examples} examples; "
        f"again with --hypothesis-seed={config.stash[seed_key]}",
        f"environment: {' '.join(variables) or 'nothing of ours set'}",
    ]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Corpus files first. Property tests get the seed one by one: a global one turns Hypothesis's database off."""
    items.sort(key=lambda item: item.path.name != FIRST)
    if config.getoption("--hypothesis-seed") is not None:
        return
    for item in items:
        if isinstance(item, pytest.Function) and hypothesis.is_hypothesis_test(item.function):
            hypothesis.seed(config.stash[seed_key])(item.function)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Generator[None, Any, Any]:
    """Save the smallest case of a failure, and make the failure end with the command that replays it."""
    failed = call.excinfo.value if call.excinfo else None
    if not isinstance(failed, CaseFailed):
        return (yield)
    if failed.path:
        judged, path = failed.judged, failed.path
    else:
        finding = run.keep(failed.judged, failed.engine, item.config.stash[seed_key])
        judged, path = finding.judged, finding.path
    try:
        pytest.fail(report.failure_text(judged, path, report.versions(failed.engine)), pytrace=False)
    except pytest.fail.Exception:
        call.excinfo = pytest.ExceptionInfo.from_current()
    made = yield
    if made.sections:
        made.sections.append(("Replay", report.replay_command(path)))
    return made


@pytest.fixture(scope="session")
def open_engine() -> Callable[[str], Engine]:
    """Gives an engine by name; a test that needs one that cannot run here is skipped with what is missing."""
    engines: dict[str, Engine] = {}

    def opened(name: str) -> Engine:
        try:
            return engines.get(name) or engines.setdefault(name, run.open_engine(name))
        except run.CannotRun as reason:
            pytest.skip(str(reason))

    return opened


@pytest.fixture(scope="session")
def engine(open_engine: Callable[[str], Engine]) -> Engine:
    """The scheduler engine."""
    return open_engine("scheduler")


@pytest.fixture(scope="session")
def fail_with() -> Callable[[run.Judged, Engine, Path | None], Never]:
    """Fails a test with a case that broke an invariant: saved, unless it is in the file ``path`` already."""

    def fail(judged: run.Judged, engine: Engine, path: Path | None = None) -> Never:
        raise CaseFailed(judged, engine, path)

    return fail


@pytest.fixture(scope="session")
def check(open_engine, fail_with) -> Callable[[str, Case], None]:
    """Runs a case on an engine and fails if it breaks an invariant; the edges it reached are in the statistics."""

    def run_and_judge(name: str, case: Case) -> None:
        engine = open_engine(name)
        try:
            judged = run.run_case(engine, case)
        except Refused as refused:
            hypothesis.event(f"refused by vLLM: {run.general(refused)}")
            return
        for seen in (*sorted(judged.edges), *(f"known finding {finding}" for finding in judged.known)):
            hypothesis.event(seen)
        hypothesis.target(len(judged.edges), label="edges in one case")
        if judged.violations:
            fail_with(judged, engine)

    return run_and_judge
