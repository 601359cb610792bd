# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""KV that is in the prefix cache is never written again, whoever adopts it. Needs an engine with KV tensors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from invariants.trace import Violation
from invariants.view import View, examples


def cached_bytes(view: View) -> Iterator[Violation]:
    """Each block has the same bytes at the end of its stay in the prefix cache as at the beginning."""
    for cached in view.trace.cached:
        for stay, more in examples(np.asarray(cached.before != cached.after)):
            block, since, until = (int(column[stay]) for column in (cached.block, cached.since, cached.until))
            yield Violation(
                "cached-bytes",
                f"block {block} of group {cached.group}, in the prefix cache since step {since}, has other bytes after "
                f"step {until}{more}",
                expected=f"digest {int(cached.before[stay]):016x}",
                seen=f"{int(cached.after[stay]):016x}",
                step=until,
                site=f"group {cached.group}",
            )
