# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The command line in a process of its own: imports, a machine without vLLM, Ctrl-C."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fuzz.cli import COMMANDS

TESTS = Path(__file__).parent
SEED = next(TESTS.parent.glob("corpora/scheduler/seeds/*.json"))


def bootstrap(root: Path, *before: str) -> list[str]:
    """A command line that is ``replaycheck`` with the fake engines and their corpora."""
    lines = [
        "import signal, sys; from pathlib import Path; import fuzz.corpus, fuzz.engines",
        # A shell starts what runs in its background with SIGINT ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)",
        f"sys.path.insert(0, {str(TESTS)!r}); fuzz.corpus.ROOT = Path({str(root)!r})",
        "fuzz.engines.ENGINES.update(broken='fake_engine:Broken', clean='fake_engine:Clean')",
        *before,
        "from fuzz.cli import main; sys.exit(main())",
    ]
    return [sys.executable, "-c", "\n".join(lines)]


def test_help_is_instant():
    """In CPU seconds, since this is about what is imported and not about the machine's load."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "fuzz.cli", "--help"], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert all(name in done.stdout for name in COMMANDS)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3


def test_no_vllm_until_an_engine_is_opened():
    code = "import sys, fuzz.cli, fuzz.explore, fuzz.replay, fuzz.doctor; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"vllm", "torch", "triton"} & set(done.stdout.split())


@pytest.mark.parametrize(
    ("package", "command"),
    [("vllm", ["run"]), ("torch", ["run"]), ("torch", ["doctor"]), ("torch", ["replay", str(SEED)])],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_without_vllm(package: str, command: list[str], tmp_path: Path):
    hide = (
        "import importlib.metadata as m; found = m.version",
        "def version(name):",
        "    if name == 'vllm': raise m.PackageNotFoundError(name)",
        "    return found(name)",
        f"m.version = version; sys.modules[{package!r}] = None",
    )
    done = subprocess.run([*bootstrap(tmp_path, *hide), *command], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("replaycheck: engine 'scheduler' cannot run here: ")
    assert "pip install --no-deps -r requirements/cpu.txt" in line


def test_ctrl_c(tmp_path: Path):
    """A summary, the finding and the JSON of what was done until then."""
    command = [*bootstrap(tmp_path), "run", "--engine", "broken", "--cases", "1000000", "--json", "out.json"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("broken/crashes/*.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=30)
    assert run.returncode == 1, err
    assert "Traceback" not in err
    assert "broken off" in out
    assert "replaycheck replay" in out.splitlines()[-1]
    result = json.loads((tmp_path / "out.json").read_bytes())
    assert result["interrupted"]
    assert result["cases"] > 0


def test_ctrl_c_before_anything_ran(tmp_path: Path):
    """While vLLM is imported, say: still no traceback."""
    slow = "import fake_engine; fake_engine.Clean.__init__ = lambda _: signal.raise_signal(signal.SIGINT)"
    command = [*bootstrap(tmp_path, slow), "run", "--engine", "clean"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "replaycheck: interrupted\n"


def test_ctrl_c_while_a_finaliser_runs(tmp_path: Path):
    """Python prints that exception and drops it; the run ends all the same, with the next case."""
    deaf = "type('Deaf', (), {'__del__': lambda _: signal.raise_signal(signal.SIGINT)})"
    slow = f"import fake_engine; fake_engine.Clean.misbehave = lambda *_: {deaf}() and None"
    command = [*bootstrap(tmp_path, slow), "run", "--engine", "clean", "--cases", "1000000"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert done.returncode == 2
    assert "broken off" in done.stdout


def test_a_reader_that_has_seen_enough(tmp_path: Path):
    """As in ``replaycheck replay corpora | head -1``."""
    command = [*bootstrap(tmp_path), "replay", "--engine", "clean", *[str(SEED)] * 3000]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert run.stdout.readline().startswith("FIXED")
    run.stdout.close()
    assert run.stderr.read() == ""
    assert run.wait() == 2
