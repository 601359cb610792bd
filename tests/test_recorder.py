# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The gather recorder: counts are right, the check on the device finds breaks, it works across processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_canaries import replayed_slots_not_padded, trimmed_layers_read_what_they_did_not_write

from fuzz.case import Case, Request
from fuzz.engines.base import Engine
from invariants.trace import Geometry, Probe

CASE = Case(
    geometry=Geometry(
        window=4, block_size=4, swa_block_size=2, num_blocks=40, max_num_batched_tokens=8, max_num_seqs=4
    ),
    requests=(
        Request(id="prime", arrive=0, prompt=(("s", 0, 9),), max_tokens=2),
        Request(id="hit", arrive=5, prompt=(("s", 0, 9),), max_tokens=1),
    ),
)
BY_HAND = {
    "steps": 4,
    "rows": 4,
    # Chunks of 8 and 1 tokens, a decode; then the hit of 8 tokens: positions 4 to 8.
    "tokens": 8 + 1 + 1 + 5,
    # Windows of 4: 1 + 2 + 3 + 4 * 5, then 4 and 4; replayed from 4: 1 + 2 + 3 + 4, and 4.
    "gathered": 26 + 4 + 4 + 14,
    "replaying_rows": 1,
    "wrong_lens": 0,
    "wrong_indices": 0,
    "unfenced_writes": 0,
    "lost_writes": 0,
}


@pytest.fixture
def count(open_engine: Callable[[str], Engine]) -> Iterator[Callable[[str], dict[str, int]]]:
    """Runs CASE with the recorder in a mode, and says what it counted."""
    from fuzz.probe.recorder import recorder

    engine: Any = open_engine("cpu")

    def run(mode: Any, case: Case = CASE) -> dict[str, int]:
        engine.time_plain(case)  # also makes the engine, whose first step warms up
        recorder.drain()
        recorder.mode = mode
        engine.time_plain(case)
        return recorder.drain()

    yield run
    recorder.mode = "trace"
    recorder.drain()


@pytest.mark.parametrize("mode", ["count", "check"])
def test_counts(mode: str, count: Callable[[str], dict[str, int]]):
    assert count(mode) == BY_HAND


def test_nothing_is_counted_twice(count: Callable[[str], dict[str, int]]):
    assert count("count") == count("count")


def test_check_sees_a_dropped_floor(count: Callable[[str], dict[str, int]], monkeypatch: pytest.MonkeyPatch):
    """The builder gets no replay_start: the metadata then carries none, and reads at 4 to 6 go below it."""
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadataBuilder

    build = DeepseekSparseSWAMetadataBuilder.build

    def broken(self: Any, prefix: int, common: Any, fast_build: bool = False, replay_start: Any = None) -> Any:
        metadata = build(self, prefix, common, fast_build)
        if replay_start is not None:
            metadata.replay_start = replay_start
        return metadata

    monkeypatch.setattr(DeepseekSparseSWAMetadataBuilder, "build", broken)
    counted = count("check")
    assert counted["wrong_lens"] == 3
    assert counted["wrong_indices"] == 3


def test_check_sees_trimmed_layers(count: Callable[..., dict[str, int]], monkeypatch: pytest.MonkeyPatch):
    """The last 4 of 8 rows are kept in each step, the hit's included. Three of each four then read too low."""
    trimmed = msgspec.structs.replace(CASE, probe=Probe(kind="decoder", layers=3))
    hit = msgspec.structs.replace(CASE.requests[1], prompt=(("s", 0, 8), ("t", 0, 4)))
    trimmed = msgspec.structs.replace(trimmed, requests=(CASE.requests[0], hit))
    clean = count("check", trimmed)
    assert (clean["wrong_lens"], clean["wrong_indices"]) == (0, 0)
    trimmed_layers_read_what_they_did_not_write(monkeypatch)
    broken = count("check", trimmed)
    assert (broken["wrong_lens"], broken["wrong_indices"]) == (6, 6)


def test_check_sees_replayed_tokens_that_write(count: Callable[[str], dict[str, int]], monkeypatch: pytest.MonkeyPatch):
    replayed_slots_not_padded(monkeypatch)
    assert count("check")["unfenced_writes"] == 4


def test_check_sees_tokens_that_write_nothing(count: Callable[[str], dict[str, int]], monkeypatch: pytest.MonkeyPatch):
    """The first token of each step, in both groups; the hit's is replayed, so that only its window slot is missed."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    prepare = GPUModelRunner.prepare_attn

    def broken(*args: Any, **kwargs: Any) -> Any:
        tables, slots = prepare(*args, **kwargs)
        slots[:, 0] = -1
        return tables, slots

    monkeypatch.setattr(GPUModelRunner, "prepare_attn", broken)
    assert count("check")["lost_writes"] == 3 * 2 + 1


ACROSS = """
import json, sys
from fuzz.probe.model import Sizes, hf_config
from invariants.trace import Probe
from pathlib import Path
sizes = Sizes(probe=Probe(), window=4, block_size=4, swa_block_size=2)
if __name__ == "__main__":
    Path("config.json").write_text(json.dumps(hf_config(sizes, 64)))
    from vllm import LLM, SamplingParams
    llm = LLM(model=".", load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, dtype="float32",
              max_model_len=64, max_num_batched_tokens=8, max_num_seqs=4, num_gpu_blocks_override=40,
              enable_prefix_caching=True, swa_bounded_replay=True, async_scheduling=False,
              compilation_config={"mode": 0})
    prompt = list(range(10, 19))
    for tokens in (2, 1):
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    print("COUNTED", json.dumps(llm.collective_rpc("replaycheck_drain")))
"""


def across(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """LLM with its engine core in a process of its own, which vLLM starts."""
    script = tmp_path / "across.py"
    script.write_text(ACROSS)
    environment = {
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "REPLAYCHECK_KERNELS": "compiled",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    return subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_across_processes(tmp_path: Path, open_engine: Callable[[str], Engine]):
    open_engine("cpu")  # or a skip
    done = across(tmp_path, REPLAYCHECK_RECORD="check")
    counted = [line for line in done.stdout.splitlines() if line.startswith("COUNTED")]
    assert counted, done.stderr[-3000:]
    assert json.loads(counted[0].removeprefix("COUNTED")) == [BY_HAND]
