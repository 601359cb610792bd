# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""``replaycheck compile``: what is compiled is what vLLM launches, and what goes wrong is said."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fuzz import compile as compiling
from fuzz.amdgcn import Answer, Row, Unavailable, baseline, compile_for
from fuzz.case import Case, Request
from fuzz.cli import main
from fuzz.engines.base import Engine
from invariants.trace import Geometry

VERSIONS = {"vllm": "0.33.0", "triton": "3.9.0"}
GOOD = Row("_good_kernel", "a thing", "gfx950", True, 12, 34, 56, 0)
BAD = Row("_bad_kernel", "a thing", "gfx950", False, error="CompilationError: at 2:4\nno such thing")
GONE = Row("_gone_kernel", "a thing", "gfx950", None, error="vLLM has no x._gone_kernel")
CHANGED = Row("_changed_kernel", "a thing", "gfx950", None, error="cannot be launched: TypeError: n", cannot=True)
SPILLING = Row("_good_kernel", "a thing", "gfx950", True, 512, 34, 56, 96)


# What the process does


@pytest.mark.slow_test
def test_kernels_as_on_an_mi355x(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process for all of it: importing vLLM takes most of the time."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    path = os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, sys.path)])
    script = Path(__file__).with_name("odd_kernels.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    rows = [msgspec.convert(row, Row) for row in said["rows"]]
    check_odd_kernels({row.kernel: row for row in rows})
    check_specialisations([entry for kernel, entry in said["specialised"] if kernel == "_copy"])
    check_vllm(rows, said["vllm"], [msgspec.convert(row, Row) for row in said["lost"]])
    check_dtypes(said["vllm"], launched_by(engine, monkeypatch))


def check_odd_kernels(rows: dict[str, Row]) -> None:
    assert rows["_refused"].ok is False
    assert "n is too large" in (rows["_refused"].error or "")
    assert rows["_dying"].error == "the compiler was ended by SIGABRT\nLLVM ERROR: Cannot select"
    spilling = rows["_spilling"]
    assert spilling.ok
    assert spilling.scratch_bytes
    assert spilling.lds_bytes
    assert spilling.vgprs == 512, "what spills has used all there are"
    gone, elsewhere, changed = rows["_gone_kernel"], rows["_elsewhere_kernel"], rows["_changed_kernel"]
    assert gone.ok is elsewhere.ok is changed.ok is None
    assert "vLLM has no vllm.envs._gone_kernel" in (gone.error or "")
    assert elsewhere.error == "vLLM does not launch it on gfx950"
    assert "cannot be launched: TypeError" in (changed.error or "")
    assert (gone.cannot, elsewhere.cannot, changed.cannot) == (False, False, True)


def check_specialisations(copies: list[dict[str, Any]]) -> None:
    """Of the launches in ``odd_kernels.copies``, the second is the first again."""

    def told(entry: dict[str, Any]) -> tuple[str, str, list[str], int]:
        source, _, n, _ = (dict(attributes) for attributes in entry["attrs_vals"])
        signature = entry["signature"]
        attributes = [*source, *(f"n: {name}" for name in n)]
        return signature["source"], signature["n"], attributes, entry["options"]["num_warps"]

    aligned, within = "tt.divisibility", "tt.pointer_range"
    assert [told(entry) for entry in copies] == [
        ("*i32", "i32", [aligned, within], 4),
        ("*i32", "i32", [within], 4),
        ("*i32", "i32", [aligned, within, "n: tt.divisibility"], 4),
        ("*i32", "constexpr", [aligned, within], 4),
        ("*i32", "i32", [aligned], 4),
        ("*fp16", "i32", [aligned, within], 2),
    ]


def check_vllm(rows: list[Row], launches: list[tuple[str, str, dict[str, Any]]], lost: list[Row]) -> None:
    figures = {row.kernel: row for row in rows}
    for kernel in ("ComputePrefillMetadataKernel", "_pad_replayed_slots_kernel", "_gather_replay_batch_kernel"):
        assert figures[kernel].ok
        assert figures[kernel].vgprs
        assert figures[kernel].scratch_bytes == 0
    assert not [row for row in lost if row.cannot]
    kernels = {kernel for kernel, _, _ in launches}
    assert "_sparse_attn_decode_gfx950_partial_kernel" in kernels
    assert "_dequantize_and_gather_k_one_pass_kernel" in kernels
    assert {row.kernel for row in lost} == {  # these are for other GPUs
        "_decode_swa_meta_kernel",
        "_sparse_attn_decode_partial_kernel",
        "_sparse_attn_decode_ragged_kernel",
    }
    caches = [entry for kernel, _, entry in launches if kernel == "_sparse_attn_prefill_ragged_kernel"]
    assert [entry["signature"]["q_ptr"] for entry in caches] == ["*bf16"]
    assert {entry["target"]["arch"] for _, _, entry in launches} == {"gfx950"}


def launched_by(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    """By kernel: the types of the tensors that vLLM's worker launches it with, when the engine runs it here."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import mangle_type

    seen: dict[str, dict[str, str]] = {}
    run = InterpretedFunction.run

    def look(self: Any, *args: Any, **kwargs: Any) -> Any:
        names = inspect.signature(self.fn).parameters
        given = dict(zip(names, args, strict=False)) | kwargs
        types = {name: mangle_type(value) for name, value in given.items() if hasattr(value, "data_ptr")}
        seen[self.fn.__qualname__.removesuffix(".kernel")] = types
        return run(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", look)
    prompt = (("s", 0, 700),)
    engine.run(
        Case(
            geometry=Geometry(
                window=128, block_size=128, swa_block_size=32, num_blocks=99, max_num_batched_tokens=512, max_num_seqs=2
            ),
            requests=(Request(id="prime", arrive=0, prompt=prompt), Request(id="hit", arrive=9, prompt=prompt)),
        )
    )
    return seen


def check_dtypes(launches: list[tuple[str, str, dict[str, Any]]], seen: dict[str, dict[str, str]]) -> None:
    """Tensors that are compiled for have the types of those that a worker has."""
    both = set()
    for kernel, title, entry in launches:
        for name, kind in seen.get(kernel, {}).items():
            assert entry["signature"][name] == kind, f"{kernel} for {title}: {name}"
            both.add(kernel)
    assert both >= {
        "ComputePrefillMetadataKernel",
        "_compute_slot_mappings_kernel",
        "_compute_swa_indices_and_lens_kernel",
        "_gather_block_tables_kernel",
        "_pad_replayed_slots_kernel",
        "_token_request_mapping_kernel",
    }


def test_a_process_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(Unavailable, match="for gfx950 ended with 1: it said nothing"):
        compile_for(["gfx950"], 1)


def test_the_other_process_ends_with_the_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *gfx942*) exit 3;; esac\nsleep 90 & wait\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    started = time.monotonic()
    with pytest.raises(Unavailable, match="for gfx942 ended with 3"):
        compile_for(["gfx942", "gfx950"], 2)
    assert time.monotonic() - started < 60


def test_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(Unavailable, match="did not start"):
        compile_for(["gfx950"], 1)


def test_triton_without_an_amd_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = pytest.importorskip("triton.backends").backends

    from fuzz.amdgcn import device

    monkeypatch.delitem(backends, "amd")
    with pytest.raises(Unavailable, match="this Triton has no AMD backend"):
        device._use_amd_backend("gfx950")


# What the command makes of it


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Has these rows compiled, with a baseline in which ``GOOD`` is. Returns what runs the command."""
    known = tmp_path / "baseline.json"
    baseline.write(known, {"gfx950": baseline.record([GOOD], VERSIONS)})

    def run(rows: list[Row], *arguments: str, triton: str = "3.9.0") -> int:
        answer = Answer(rows, VERSIONS | {"triton": triton})
        monkeypatch.setattr(compiling, "compile_for", lambda archs, _: dict.fromkeys(archs, answer))
        return main(["compile", "--arch", "gfx950", "--baseline", str(known), *arguments])

    return run


def test_nothing_found(compiled: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert compiled([GOOD, GONE]) == 0
    said = capsys.readouterr().out
    assert "_good_kernel  a thing          12     34   56        0" in said
    assert "not compiled for gfx950: _gone_kernel: vLLM has no x._gone_kernel" in said
    assert "1 launches compiled in 0 s, 0 findings" in said


def test_a_kernel_that_does_not_compile(compiled: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert compiled([GOOD, BAD]) == 1
    said = capsys.readouterr().out
    assert "_bad_kernel [a thing], gfx950: CompilationError: at 2:4\nno such thing\n" in said
    assert "FOUND: _bad_kernel [a thing] does not compile for gfx950\n" in said
    assert said.endswith("replaycheck compile --arch gfx950\n")


def test_a_new_spill(compiled: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert compiled([SPILLING]) == 1
    said = capsys.readouterr().out
    assert "512 (+500)" in said
    assert "FOUND: _good_kernel [a thing] spills on gfx950: 96 bytes of scratch memory a lane, 0 recorded\n" in said


def test_a_spill_that_is_known(compiled: Any) -> None:
    assert compiled([SPILLING], "--record") == 0
    assert compiled([SPILLING]) == 0
    assert compiled([msgspec.structs.replace(SPILLING, scratch_bytes=100)]) == 1


def test_a_spill_of_a_kernel_that_is_not_in_the_baseline(compiled: Any) -> None:
    assert compiled([GOOD, msgspec.structs.replace(SPILLING, launch="another thing")]) == 1


def test_a_spill_under_another_triton(compiled: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert compiled([SPILLING], triton="3.10.0") == 0
    said = capsys.readouterr().out
    assert "note: the baseline of gfx950 is of Triton 3.9.0, this is 3.10.0: not judged by it\n" in said
    assert "note: _good_kernel [a thing] spills on gfx950: 96 bytes" in said


def test_what_the_baseline_has_and_vllm_has_not(compiled: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert compiled([msgspec.structs.replace(GOOD, launch="another thing")]) == 0
    said = capsys.readouterr().out
    assert "note: _good_kernel [a thing] is in the baseline of gfx950, and is not launched now" in said


def test_a_launch_that_fails_is_no_all_clear(compiled: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert compiled([GOOD, CHANGED]) == 2
    assert "not everything could be launched" in capsys.readouterr().err
    assert compiled([BAD, CHANGED]) == 1
    assert compiled([GONE]) == 2


def test_json(compiled: Any, tmp_path: Path) -> None:
    assert compiled([GOOD, BAD, GONE], "--json", str(tmp_path / "rows.json")) == 1
    good, bad, gone = json.loads((tmp_path / "rows.json").read_text())
    assert good == {
        "kernel": "_good_kernel",
        "launch": "a thing",
        "arch": "gfx950",
        "ok": True,
        "vgprs": 12,
        "sgprs": 34,
        "lds_bytes": 56,
        "scratch_bytes": 0,
        "error": None,
    }
    assert good.keys() == bad.keys() == gone.keys()
    assert (bad["ok"], bad["error"]) == (False, BAD.error)
    assert (gone["ok"], gone["vgprs"]) == (None, None)


def test_recording_one_architecture_keeps_the_other(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    both = {arch: baseline.record([GOOD, SPILLING, BAD, GONE], VERSIONS) for arch in ("gfx942", "gfx950")}
    baseline.write(path, both)
    assert baseline.read(path) == both
    assert both["gfx950"].kernels == {"_good_kernel [a thing]": baseline.Figures(512, 34, 56, 96)}


def test_our_own_baseline_can_be_read() -> None:
    known = baseline.read(baseline.FILE)
    assert known.keys() == {"gfx942", "gfx950"}
    assert all(figures.vgprs for found in known.values() for figures in found.kernels.values())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--arch", "gfx1"], "argument --arch: invalid choice: 'gfx1'"),
        (["--arch"], "argument --arch: expected at least one argument"),
        (["--json", "/no/such/folder/x.json"], "argument --json: cannot write to /no/such/folder/x.json"),
        (["--baseline", "/no/such/file"], "there is no baseline /no/such/file: make one with --record"),
        (["--baseline", "/"], "cannot read /: Is a directory"),
        (["--baseline", __file__], "is no baseline: JSON is malformed"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["compile", *arguments])
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    assert code == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_what_cannot_run_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: Any) -> None:
        raise Unavailable("this Triton has no AMD backend")

    monkeypatch.setattr(compiling, "compile_for", refuse)
    assert main(["compile", "--arch", "gfx950"]) == 2
    assert capsys.readouterr().err == "replaycheck: this Triton has no AMD backend\n"
