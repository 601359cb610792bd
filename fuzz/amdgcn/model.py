# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""DeepSeek-V4.1-Flash's sizes, and tensors of them, as its worker has them on a GPU.

Tensors are torch's meta tensors: they have the dtype, the alignment and the storage size of the real thing, which is
all that Triton's JIT looks at, and no memory.
"""

from __future__ import annotations

from typing import Any, Final

WINDOW: Final = 128
HEADS: Final = 64
HEAD: Final = 512
NOPE: Final = 448
ROPE: Final = 64
TOPK: Final = 512
RATIOS: Final = (0, 1, 2)
"""Compress ratios of the layers; 0: window only."""
SWA_BLOCK: Final = 32
"""Tokens of a block of a window group."""
BLOCK: Final = 128
"""Tokens of a block of the others, and of the scheduler."""
GROUPS: Final = 6
"""KV-cache groups: four of windows, one cacheable, one of compressor states."""
DRAFT: Final = 5
"""Tokens that DSpark drafts at once."""
LOOKBACK: Final = 3
"""Tokens before a chunk that n-gram hashes need."""
CHUNK: Final = 2048
"""Most tokens of a step."""
SEQS: Final = 256
"""Most requests of a batch."""
LONGEST: Final = 131072
"""Most tokens of a request."""
POOL: Final = 200_000
"""Blocks of a cache, so that it is larger than 2 GB: the backend treats smaller ones differently."""
MIXED: Final = 3
"""Decode rows before the prefills of a mixed batch: what starts after them is not aligned to 16 bytes."""


def ints(*shape: int, dtype: str = "int32") -> Any:
    """A device tensor."""
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def cache(record_bytes: int, block: int) -> Any:
    """A paged KV cache, bytes of [blocks, block, record_bytes], pages padded as the model's spec pads them."""
    import torch

    align = 576 if record_bytes == 584 else 512
    page = -(-block * record_bytes // align) * align
    return torch.empty_strided((POOL, block, record_bytes), (page, record_bytes, 1), dtype=torch.uint8, device="meta")


class Batch:
    """What the worker has of a batch: three decode rows first, or none, so that slices of it are aligned or not."""

    def __init__(self, decodes: int = 0, prefills: int = 4) -> None:
        self.decodes, self.prefills, self.rows = decodes, prefills, decodes + prefills
        self.starts = ints(SEQS + 1)[: self.rows + 1]
        self.lens = ints(SEQS)[: self.rows]
        self.replay_start = ints(SEQS)[: self.rows]
        self.requests = ints(CHUNK)
        self.valid = ints(CHUNK, dtype="bool")
        self.table = ints(SEQS, LONGEST // SWA_BLOCK)[: self.rows]
