# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The gather recorder: looks on where a worker of vLLM builds its attention metadata.

Installed by the plugin (``plugin.py``) in any process of vLLM, it wraps ``DeepseekV41ModelState.prepare_attn``, which
returns what a step's kernels will read and write. Three ways to look on:

* count: how many steps, rows, replaying rows and gathered positions. Sums stay on the device; nothing waits for it.
* check: count, and compare every window index, length and replayed slot with the contract, on the device.
* trace: keep a copy of every batch. Waits for the device in every step.

``drain`` hands over what was counted. It is also a method of every worker, so that
``LLM.collective_rpc("replaycheck_drain")`` reaches it in other processes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from fuzz.probe.batch import Batch, Kept, copy_batch

Mode = Literal["count", "check", "trace"]
MODES: tuple[Mode, ...] = ("count", "check", "trace")

ON_DEVICE = ("gathered", "replaying_rows", "wrong_lens", "wrong_indices", "unfenced_writes", "lost_writes")
"""Figures that are summed on the device; the last four by "check" alone, and zero if vLLM keeps the contract."""


class Recorder:
    """One a process. ``install`` before an engine is made."""

    def __init__(self) -> None:
        self.mode: Mode | None = None
        """May be changed at any time; None: nobody looks on."""
        self._installed = False
        self._real = False
        """Whether the step being prepared is one of requests, not one of vLLM's dummies."""
        self._host: Counter[str] = Counter()
        self._device: Any = None
        """int64 [ON_DEVICE], on the device; None before the first step."""
        self._batch: Batch | None = None

    def install(self, mode: Mode) -> None:
        """Look on from now on. Raises ``ImportError`` or ``AttributeError`` where vLLM has nothing to look on at."""
        self.mode = mode
        if self._installed:
            return
        from vllm.models.deepseek_v41.nvidia.model_state import DeepseekV41ModelState
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner
        from vllm.v1.worker.worker_base import WorkerBase

        prepare, execute = DeepseekV41ModelState.prepare_attn, GPUModelRunner.execute_model

        def prepare_attn(
            state: Any, input_batch: Any, mode: Any, tables: Any, slots: Any, *args: Any, **kw: Any
        ) -> Any:
            metadata = prepare(state, input_batch, mode, tables, slots, *args, **kw)
            if self._real and self.mode:
                kept = getattr(state.decoder_replay_layers, "replay_batch", None)
                layout = args[1] if len(args) > 1 else kw["kv_cache_config"]
                self._look(input_batch, slots, metadata, layout, _kept_of(kept, state.decoder_replay_layers))
            return metadata

        def execute_model(runner: Any, *args: Any, **kw: Any) -> Any:
            self._real = not kw.get("dummy_run", len(args) > 2 and args[2])
            try:
                return execute(runner, *args, **kw)
            finally:
                self._real = False

        DeepseekV41ModelState.prepare_attn = prepare_attn
        GPUModelRunner.execute_model = execute_model
        WorkerBase.replaycheck_drain = lambda _worker: self.drain()
        self._installed = True

    def take(self) -> Batch | None:
        """The batch prepared since the last call; mode "trace"."""
        batch, self._batch = self._batch, None
        return batch

    def drain(self) -> dict[str, int]:
        """What was counted since the last call, by figure. Waits for the device."""
        counted = dict(self._host)
        if self._device is not None:
            counted.update(zip(ON_DEVICE, self._device.tolist(), strict=True))
        self._host.clear()
        self._device = None
        return counted

    def _look(self, batch: Any, slots: Any, metadata: Any, layout: Any, kept: Any) -> None:
        windows = _windows(metadata)
        if not windows:
            return
        if self.mode == "trace":
            self._batch = copy_batch(batch, slots, windows[0], kept, windows[1:])
            return
        self._host.update(steps=1, rows=batch.num_reqs, tokens=batch.num_tokens)
        for window in windows:
            self._count(batch, window)
        if self.mode == "check":
            from fuzz.probe import check

            row, position = check.rows_of(batch), batch.positions[: batch.num_tokens]
            for window in windows:
                self._device[2:4] += check.wrong_reads(row, position, window.replay_start, window)
            self._device[4:] += check.wrong_writes(batch, slots, windows[0], layout)
            if kept:
                start, row, position = windows[0].replay_start, row[kept.tokens], position[kept.tokens]
                self._device[2:4] += check.wrong_reads(row, position, start, kept.first)
                start = check.kept_start(batch, row, start, kept.window)
                for window in kept.rest:
                    self._device[2:4] += check.wrong_reads(row, position, start, window)

    def _count(self, batch: Any, window: Any) -> None:
        import torch

        if self._device is None:
            self._device = torch.zeros(len(ON_DEVICE), dtype=torch.int64, device=window.block_table.device)
        self._device[0] += window.decode_swa_lens.sum()
        if window.num_prefill_tokens:
            self._device[0] += window.prefill_swa_lens.sum()
        self._device[1] += (window.replay_start[: batch.num_reqs] > 0).sum()


def _windows(metadata: dict[str, Any]) -> list[Any]:
    """Layers of one group share their metadata; groups differ in their block tables only."""
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadata

    parts = {id(part): part for part in metadata.values() if isinstance(part, DeepseekSparseSWAMetadata)}
    return list(parts.values())


def _kept_of(batch: Any, layers: Any) -> Kept | None:
    """What vLLM's ReplayBatch says; None in a step in which all layers run on all rows."""
    if batch is None:
        return None
    metadata = dict(batch.forward_context.attn_metadata)
    first = metadata.pop(layers.first_swa_prefix)
    return Kept(batch.rows, layers.window, first, _windows(metadata))


recorder = Recorder()
