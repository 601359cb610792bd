# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Where vLLM's own layers replay: the table of CONTRACT 3, and what the installed vLLM makes of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fuzz.engines.base import Unavailable
from fuzz.engines.gate import WINDOW, gates
from fuzz.triton_cpu.rocm import current
from invariants.gating import as_the_contract, replays
from invariants.trace import Gate

pytestmark = pytest.mark.usefixtures("engine")

OUT, IN = (False, WINDOW), (True, 0)
"""Of the prefix cache, and W tokens replayed; or in it, and none."""
CONTRACT = {
    ("other", True): OUT,
    ("other", False): IN,
    ("CDNA4", True): OUT,
    ("CDNA4", False): IN,
    ("CDNA3", True): IN,
    ("CDNA3", False): IN,
}
OFF_ON_ALL_ROCM = {**CONTRACT, ("CDNA4", True): IN}
"""vLLM 0.33.0 (PR 57906)."""


def table() -> dict[tuple[str, bool], tuple[bool | None, int | None]]:
    return {
        (gate.architecture, gate.asked): (gate.prefix_cacheable, gate.replay_tokens)
        for gate in gates()
        if gate.runner == 2 and gate.prefix_caching
    }


def test_the_contract_as_code():
    for (architecture, asked), answer in CONTRACT.items():
        gate = Gate(architecture, asked, WINDOW, prefix_cacheable=answer[0], replay_tokens=answer[1])  # type: ignore[arg-type]
        assert as_the_contract(gate)
        assert replays(gate) == (answer == OUT)
        other = IN if answer == OUT else OUT
        gate.prefix_cacheable, gate.replay_tokens = other
        assert not as_the_contract(gate)


def test_this_vllm():
    assert table() in (CONTRACT, OFF_ON_ALL_ROCM)
    assert [gate for gate in gates() if not as_the_contract(gate)] == [
        gate for gate in gates() if table() == OFF_ON_ALL_ROCM and gate.architecture == "CDNA4" and replays(gate)
    ]


def test_off_without_model_runner_2_or_with_context_parallelism_and_no_cache():
    special = [gate for gate in gates() if gate.runner == 1 or not gate.prefix_caching]
    assert len(special) == 6
    assert {(gate.prefix_cacheable, gate.replay_tokens) for gate in special} == {IN}


def test_after_an_engine_has_run():
    """It has vLLM read its environment once and for all."""
    from vllm import envs

    before = gates()
    envs.enable_envs_cache()
    try:
        assert gates() == before
    finally:
        envs.disable_envs_cache()


def _turn_on_where(version: int, patch: pytest.MonkeyPatch) -> None:
    """The layer takes a GPU of this CDNA version for one that is not AMD's, and so turns replay on."""
    from vllm.models.deepseek_v41 import attention
    from vllm.platforms import current_platform

    def is_rocm() -> bool:
        if not current():
            return False
        from vllm.platforms.rocm import get_cdna_version

        return bool(get_cdna_version() != version)

    class Platform(SimpleNamespace):
        def __getattr__(self, name: str) -> Any:
            return getattr(current_platform, name)

    patch.setattr(attention, "current_platform", Platform(is_rocm=is_rocm))


def test_with_the_gate_open_for_cdna4_it_is_the_contract(monkeypatch: pytest.MonkeyPatch):
    _turn_on_where(4, monkeypatch)
    assert table() == CONTRACT


def test_a_gate_that_is_open_for_cdna3_is_seen(monkeypatch: pytest.MonkeyPatch):
    _turn_on_where(3, monkeypatch)
    assert ("CDNA3", True) in [(gate.architecture, gate.asked) for gate in gates() if not as_the_contract(gate)]


def test_a_gpu_answers_for_itself(monkeypatch: pytest.MonkeyPatch):
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    with pytest.raises(Unavailable, match="on a CPU only"):
        gates()


def test_doctor_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    from fuzz import cli, engines

    monkeypatch.setattr("fuzz.doctor.ENGINES", {"scheduler": engines.ENGINES["scheduler"]})
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out
    assert "replay on other, asked for" in lines
    for architecture in ("CDNA4", "CDNA3"):
        assert f"replay on {architecture}, turned off" in lines
    assert ("by the contract" in lines) == (table() == OFF_ON_ALL_ROCM)
