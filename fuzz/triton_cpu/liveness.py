# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Which names of a kernel may still be read after each statement: what a store must not disturb, what a branch or a
loop has to hand on. Relied upon: kernels have no closures, no deletions and no exceptions."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence


def reads(node: ast.AST | None) -> frozenset[str]:
    """Names read anywhere in ``node``."""
    if node is None:
        return frozenset()
    return frozenset(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))


def writes(nodes: Iterable[ast.AST]) -> frozenset[str]:
    """Names assigned anywhere in ``nodes``."""
    return frozenset(
        n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    )


class Liveness:
    """``after[statement]``: names that may be read after it. ``again[loop]``: names that an iteration may read from
    the one before, or that may be read after the loop."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self.after: dict[ast.stmt, frozenset[str]] = {}
        self.again: dict[ast.stmt, frozenset[str]] = {}
        self._block(function.body, frozenset())

    def _block(self, body: Sequence[ast.stmt], live: frozenset[str]) -> frozenset[str]:
        for statement in reversed(body):
            self.after[statement] = live
            live = self._before(statement, live)
        return live

    def _before(self, statement: ast.stmt, live: frozenset[str]) -> frozenset[str]:
        match statement:
            case ast.Assign(targets=targets, value=value):
                return (live - writes(targets)) | reads(value)
            case ast.AnnAssign(target=target, value=value):
                return (live - writes([target])) | reads(value)
            case ast.AugAssign(target=target, value=value):
                return live | writes([target]) | reads(value)
            case ast.Return(value=value):
                return reads(value)
            case ast.If(test=test, body=body, orelse=orelse):
                return reads(test) | self._block(body, live) | self._block(orelse, live)
            case ast.For(target=target, iter=iterator, body=body):
                return self._loop(statement, body, live, writes([target])) | reads(iterator)
            case ast.While(test=test, body=body):
                return self._loop(statement, body, live | reads(test), frozenset())
        return live | reads(statement)

    def _loop(
        self, loop: ast.stmt, body: Sequence[ast.stmt], live: frozenset[str], target: frozenset[str]
    ) -> frozenset[str]:
        while True:
            again = live | (self._block(body, live) - target)
            if again == live:
                self.again[loop] = live
                return live
            live = again
