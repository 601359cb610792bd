# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""What checking memory costs: vLLM's own kernels on a batch of DeepSeek-V4.1's sizes, checked and not, in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from fuzz import triton_cpu

ROUNDS = 21
SECONDS = 0.01
"""That a round takes without checks, for each kernel."""
TOKENS, REQUESTS, WINDOW, BLOCK, LENGTH = 688, 4, 128, 32, 4096


@dataclass(frozen=True)
class Launch:
    """A launch to be timed."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    known: dict[str, torch.Tensor]
    """Tensors that the kernel finds by their address."""

    def run(self) -> None:
        """Launch it once."""
        self.kernel[self.grid](*self.args, **self.constants)


def bench_checker() -> dict[str, float]:
    """Time of checked launches over that of plain ones, by kernel: medians over rounds. ``prepare`` comes first.

    "checked": bounds and races; "bounds": bounds alone. "plain_us": microseconds that a plain launch takes.
    """
    figures: dict[str, float] = {}
    for name, launch in launches().items():
        ways: dict[str, Callable[[], Any]] = {
            "plain": nullcontext,
            "bounds": lambda: triton_cpu.checking(races=False),
            "checked": triton_cpu.checking,
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        seconds = _time(launch, nullcontext, 1)
        for _ in range(ROUNDS):
            for way, context in ways.items():
                times[way].append(_time(launch, context, max(1, int(SECONDS / seconds))))
        figures[f"plain_us_{name}"] = statistics.median(times["plain"]) * 1e6
        for way in ("bounds", "checked"):
            ratios = [some / plain for some, plain in zip(times[way], times["plain"], strict=True)]
            figures[f"{way}_vs_plain_{name}"] = statistics.median(ratios)
    return figures


def _time(launch: Launch, context: Callable[[], Any], count: int) -> float:
    """CPU seconds a launch, the first one aside."""
    with context() as checker:
        for name, tensor in launch.known.items() if checker else ():
            checker.know(name, tensor)
        launch.run()
        started = time.process_time()
        for _ in range(count):
            launch.run()
        return (time.process_time() - started) / count


def launches() -> dict[str, Launch]:
    """Three kernels that vLLM launches in every step: window indices, block tables, slot mappings."""
    from vllm.v1.attention.backends.mla.sparse_swa import _compute_swa_indices_and_lens_kernel
    from vllm.v1.worker.gpu.block_table import _compute_slot_mappings_kernel, _gather_block_tables_kernel

    each, blocks = TOKENS // REQUESTS, LENGTH // BLOCK
    starts = torch.arange(0, TOKENS + 1, each, dtype=torch.int32)
    lens = torch.full((REQUESTS,), LENGTH, dtype=torch.int32)
    table = torch.arange(1, REQUESTS * blocks + 1, dtype=torch.int32).view(REQUESTS, blocks)
    out = torch.zeros_like(table)
    index = torch.arange(REQUESTS, dtype=torch.int32)
    requests = index.repeat_interleave(each)
    positions = torch.arange(LENGTH - each, LENGTH).repeat(REQUESTS)
    indices, found = torch.zeros((TOKENS, WINDOW), dtype=torch.int32), torch.zeros(TOKENS, dtype=torch.int32)
    valid, replay_start = torch.ones(TOKENS, dtype=torch.bool), torch.zeros(REQUESTS, dtype=torch.int32)
    images = torch.zeros((2, TOKENS), dtype=torch.int32)
    slots = torch.zeros((1, TOKENS), dtype=torch.int64)
    size, stride, true = torch.tensor([BLOCK], dtype=torch.int32), torch.tensor([blocks]), torch.tensor([True])
    reach = torch.tensor([WINDOW], dtype=torch.int32)
    counts = torch.full((1, REQUESTS), blocks, dtype=torch.int32)
    pointer, out_pointer = (torch.tensor([t.data_ptr()], dtype=torch.uint64) for t in (table, out))
    return {
        "paged_indices": Launch(
            _compute_swa_indices_and_lens_kernel,
            (TOKENS,),
            (
                *(indices, WINDOW, found, WINDOW, WINDOW, images[0], images[1], starts, lens, requests, valid, table),
                *(blocks, BLOCK, replay_start, 0),
            ),
            {"HAS_IMAGE": False, "TRITON_BLOCK_SIZE": 1024},
            {},
        ),
        "block_tables": Launch(
            _gather_block_tables_kernel,
            (1, REQUESTS),
            (index, pointer, out_pointer, stride, counts, REQUESTS, REQUESTS, lens - each, reach, size),
            {"MASK_SLIDING_WINDOW": True, "BLOCK_SIZE": 1024},
            {"block table": table, "input block table": out},
        ),
        "slot_mappings": Launch(
            _compute_slot_mappings_kernel,
            (1, REQUESTS + 1),
            (TOKENS, index, starts, positions, pointer, stride, size, true, true, slots, TOKENS, 0),
            {"CP_SIZE": 1, "CP_INTERLEAVE": 1, "PAD_ID": -1, "TRITON_BLOCK_SIZE": 1024},
            {"block table": table},
        ),
    }
