# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The CPU engine: the real vLLM engine with the probe model, against its control arms and the dense oracle."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from fuzz.case import Case, Event, Request
from fuzz.corners import cases_for
from fuzz.engines.base import Engine, Refused, Unavailable
from fuzz.engines.cpu import CpuEngine
from invariants import judge
from invariants.dense import tolerance
from invariants.outputs import drift
from invariants.trace import DECODER_FIRST, DECODER_REST, Geometry, Probe, Trace

SIZES = Geometry(window=4, block_size=4, swa_block_size=2, num_blocks=40, max_num_batched_tokens=8, max_num_seqs=4)
PRIME = Request(id="prime", arrive=0, prompt=(("s", 0, 21),), max_tokens=2)
HIT = Request(id="hit", arrive=5, prompt=(("s", 0, 18), ("t", 0, 3)), max_tokens=3)
TWO = Case(geometry=SIZES, requests=(PRIME, HIT))


@pytest.fixture(scope="module")
def cpu(open_engine: Callable[[str], Engine]) -> Engine:
    return open_engine("cpu")


def change(case: Case, probe: Probe, **sizes: Any) -> Case:
    return msgspec.structs.replace(case, probe=probe, geometry=msgspec.structs.replace(case.geometry, **sizes))


def differ(trace: Trace) -> bool:
    """Whether any request's logprobs differ from no-cache in a bit."""
    return any(
        not np.array_equal(request.outputs.logprobs, control.logprobs)
        for request, control in zip(trace.requests, trace.arms["no-cache"], strict=True)
        if request.outputs is not None and control is not None
    )


def test_an_exact_hit_is_a_cold_run_to_the_bit(cpu: Engine):
    trace = cpu.run(change(TWO, Probe(kind="exact", layers=3)))
    assert judge(trace) == []
    assert [(life.hit, life.replay_start) for life in trace.admissions] == [(0, 0), (16, 12)]
    assert not differ(trace)


def test_speculation_changes_no_bit(cpu: Engine, monkeypatch: pytest.MonkeyPatch):
    """And they happen. Drafts are proposed where a token was there before, as some output is in a prompt of 20."""
    from vllm.v1.core.sched.scheduler import Scheduler

    drafted = []
    update = Scheduler.update_draft_token_ids

    def watch(self: Any, drafts: Any) -> None:
        drafted.extend(tokens for tokens in drafts.draft_token_ids if tokens)
        update(self, drafts)

    monkeypatch.setattr(Scheduler, "update_draft_token_ids", watch)
    again = (("s", 0, 10), ("s", 0, 10))
    requests = tuple(Request(id=f"r{arrive}", arrive=arrive, prompt=again, max_tokens=6) for arrive in (0, 9))
    trace = cpu.run(Case(geometry=SIZES, requests=requests, probe=Probe(kind="exact")))
    assert judge(trace) == []
    assert trace.admissions[1].hit == 16
    assert "ngram" in trace.arms
    assert all(outputs is not None and len(outputs.tokens) == 6 for outputs in trace.arms["ngram"])
    arms: Any = cpu
    ran = {name: core.config for name, core in arms._cores.items()}
    assert ran["ngram"].speculative_config.method == "ngram"
    assert not ran["no-cache"].cache_config.enable_prefix_caching
    assert ran["main"].speculative_config is None
    assert drafted


def test_a_deep_hit_is_another_run(cpu: Engine):
    trace = cpu.run(change(TWO, Probe(kind="deep")))
    assert judge(trace) == []
    assert differ(trace)
    assert drift(trace).max() > tolerance(Probe(kind="deep"), keys=24)


def test_a_deep_hit_without_replay_is_a_cold_run_to_the_bit(cpu: Engine):
    same = Request(id="same", arrive=5, prompt=PRIME.prompt, max_tokens=3)
    trace = cpu.run(change(Case(geometry=SIZES, requests=(PRIME, same)), Probe(kind="deep"), replay=False))
    assert judge(trace) == []
    assert trace.admissions[1].hit == 20
    assert trace.admissions[1].replay_start == 0
    assert not differ(trace)


def test_a_second_run_of_an_engine_knows_nothing_of_the_first(cpu: Engine):
    first, second = cpu.run(TWO), cpu.run(TWO)
    assert [life.hit for life in second.admissions] == [life.hit for life in first.admissions]
    for one, other in zip(first.requests, second.requests, strict=True):
        assert one.outputs is not None
        assert other.outputs is not None
        np.testing.assert_array_equal(one.outputs.logprobs, other.outputs.logprobs)


def test_prompt_logprobs(cpu: Engine):
    asks = msgspec.structs.replace(HIT, prompt_logprobs=True)
    trace = cpu.run(change(msgspec.structs.replace(TWO, requests=(PRIME, asks)), Probe(kind="deep")))
    assert judge(trace) == []
    outputs = trace.requests[1].outputs
    assert outputs is not None
    assert outputs.prompt_logprobs is not None
    assert outputs.prompt_ids is not None
    assert outputs.prompt_ids[:, 0].tolist() == HIT.tokens()[1:].tolist()
    assert trace.admissions[1].hit == 0


def test_last_layers_run_on_the_last_rows_only(cpu: Engine):
    """Chunks of 14: of the cold one [0, 14) 10 to 13 are kept, of [14, 21) 17 to 20; of the hit's [12, 21) likewise."""
    probe = Probe(kind="decoder", layers=4)
    trace = cpu.run(change(TWO, probe, max_num_batched_tokens=14))
    assert judge(trace) == []
    kept = [
        (step.index, consumer, gathers.position.tolist(), gathers.first.tolist())
        for step in trace.steps
        for consumer in (DECODER_FIRST, DECODER_REST)
        for gathers in step.gathers
        if gathers.consumer == consumer
    ]
    assert kept == [
        (0, DECODER_FIRST, [10, 11, 12, 13], [7, 8, 9, 10]),
        (0, DECODER_REST, [10, 11, 12, 13], [10, 10, 10, 10]),
        (1, DECODER_FIRST, [17, 18, 19, 20], [14, 15, 16, 17]),
        (1, DECODER_REST, [17, 18, 19, 20], [17, 17, 17, 17]),
        (5, DECODER_FIRST, [17, 18, 19, 20], [14, 15, 16, 17]),
        (5, DECODER_REST, [17, 18, 19, 20], [17, 17, 17, 17]),
    ]
    assert drift(trace).max() > tolerance(probe, keys=24)


def test_last_layers_run_on_every_row_that_is_wanted(cpu: Engine):
    asks = msgspec.structs.replace(PRIME, prompt_logprobs=True)
    probe = Probe(kind="decoder", layers=3)
    trace = cpu.run(change(msgspec.structs.replace(TWO, requests=(asks,)), probe, max_num_batched_tokens=14))
    assert judge(trace) == []
    assert {gathers.consumer for step in trace.steps for gathers in step.gathers} == {"paged-index", "gather-length"}
    off = cpu.run(change(TWO, probe, max_num_batched_tokens=14, replay=False))
    assert judge(off) == []
    assert not differ(off)


def test_preempted_by_the_pool_and_resumed(cpu: Engine):
    requests = tuple(
        Request(id=f"r{number}", arrive=0, prompt=((f"s{number}", 0, 12),), max_tokens=12) for number in range(3)
    )
    case = Case(geometry=msgspec.structs.replace(SIZES, num_blocks=21), requests=requests, probe=Probe(kind="deep"))
    trace = cpu.run(case)
    assert judge(trace) == []
    assert any(step.preempted for step in trace.steps)
    assert any(life.resumed for life in trace.admissions)


def test_abort(cpu: Engine):
    case = msgspec.structs.replace(TWO, events=(Event(step=8, kind="abort", request="hit"),))
    trace = cpu.run(case)
    assert judge(trace) == []
    assert trace.requests[1].finished == "abort"
    assert len(trace.requests[1].output) < 3


def test_blocks_that_vllm_would_change_are_refused(cpu: Engine):
    with pytest.raises(Refused, match="do not hold states of 2 tokens"):
        cpu.run(change(TWO, Probe(compress_ratio=2), block_size=3))


@pytest.mark.parametrize("kind", ["exact", "deep"])
def test_a_nan_in_the_logits_is_a_fault(kind: Any, cpu: Engine, monkeypatch: pytest.MonkeyPatch):
    from fuzz.probe.model import ReplayProbeForCausalLM

    logits = ReplayProbeForCausalLM.compute_logits
    monkeypatch.setattr(ReplayProbeForCausalLM, "compute_logits", lambda *args: logits(*args) * float("nan"))
    found = judge(cpu.run(change(TWO, Probe(kind=kind))))
    assert ("no-fault", "nan in logprobs") in {(violation.invariant, violation.site) for violation in found}


def test_an_exception_in_the_model_is_a_fault(cpu: Engine, monkeypatch: pytest.MonkeyPatch):
    from vllm.models.deepseek_v41.sparse_mla import DeepseekV4SparseMLAMetadataBuilder

    build = DeepseekV4SparseMLAMetadataBuilder.build

    def broken(*args: Any, **kwargs: Any) -> Any:
        metadata = build(*args, **kwargs)
        metadata.block_table = metadata.block_table + 1000
        return metadata

    monkeypatch.setattr(DeepseekV4SparseMLAMetadataBuilder, "build", broken)
    faults = cpu.run(TWO).faults
    assert [fault.kind for fault in faults] == ["exception"]
    assert "out of bounds" in faults[0].message


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("vllm.models.deepseek_v41.nvidia.model_state", "lacks what the CPU engine is made of"),
        ("vllm.v1.worker.gpu.model_runner", "lacks what the CPU engine is made of"),
    ],
)
def test_a_vllm_without_bounded_replay(module: str, reason: str, cpu: Engine, monkeypatch: pytest.MonkeyPatch):
    """None in sys.modules is how Python spells a module that is not there."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(Unavailable, match=f"{reason}: .*{module}"):
        CpuEngine()


def test_a_vllm_whose_model_state_was_renamed(cpu: Engine, monkeypatch: pytest.MonkeyPatch):
    from vllm.models.deepseek_v41.nvidia import model_state

    monkeypatch.delattr(model_state, "DeepseekV41ModelState")
    with pytest.raises(Unavailable, match=r"cannot import name 'DeepseekV41ModelState'"):
        CpuEngine()


def test_an_architecture_that_stays_unregistered(cpu: Engine, monkeypatch: pytest.MonkeyPatch):
    from vllm import ModelRegistry

    from fuzz.probe.plugin import ARCHITECTURE

    monkeypatch.setattr(type(ModelRegistry), "register_model", lambda *_: None)
    monkeypatch.delitem(ModelRegistry.models, ARCHITECTURE)
    with pytest.raises(Unavailable, match=f"does not know the architecture {ARCHITECTURE}"):
        CpuEngine()


def test_a_plugin_that_fails_is_one_line_and_exit_code_2():
    """In the child, which loads vLLM's plugins as every worker does."""
    environment = os.environ | {"REPLAYCHECK_RECORD": "everything"}
    command = [sys.executable, "-m", "fuzz.cli", "run", "--engine", "cpu", "--cases", "1"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 2
    assert ran.stdout == ""
    (line,) = [line for line in ran.stderr.splitlines() if "replaycheck" in line.lower()]
    assert "a plugin of vLLM fails to load: REPLAYCHECK_RECORD=everything: it can be count, check, trace" in line
    assert "Traceback" not in ran.stderr


@settings(max_examples=max(1, settings.default.max_examples // 10))
@given(case=cases_for("cpu", "small"))
def test_every_case_holds(case: Case, check: Callable[[str, Case], None]):
    check("cpu", case)
