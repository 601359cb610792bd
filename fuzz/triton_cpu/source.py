# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The source of a kernel: its syntax tree, its names, and where it stands. Relied upon: whoever rewrites a module
leaves a file behind (Triton's interpreter reads kernels from their files, too)."""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from fuzz.triton_cpu.liveness import Liveness, writes
from fuzz.triton_cpu.tiles import Unsupported


@dataclass(frozen=True)
class Source:
    """A function as it is written."""

    function: Any
    tree: ast.FunctionDef
    liveness: Liveness
    local: frozenset[str]
    """Names that it assigns."""
    first_line: int
    signature: inspect.Signature


@cache
def source_of(function: Any) -> Source:
    """Raises ``Unsupported`` where there is no source."""
    try:
        lines, first_line = inspect.getsourcelines(function)
    except (OSError, TypeError) as error:
        raise Unsupported(f"a function without source ({error})") from error
    tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise Unsupported(type(tree).__name__)
    return Source(function, tree, Liveness(tree), writes([tree]), first_line, inspect.signature(function))


@dataclass
class Frame:
    """A function while it is translated."""

    source: Source
    names: dict[str, Any]
    inlined: bool
    live: frozenset[str] = frozenset()
    """Names that the rest of the statement at hand, or anything after it, may read."""
    branches: int = 0
    """Branches and loops, unknown while translating, around the statement at hand."""
    result: Any = None
    statement: ast.stmt | None = field(default=None)

    def enter(self, statement: ast.stmt, read: frozenset[str]) -> None:
        """Begin a statement that itself reads the names in ``read``."""
        self.statement = statement
        self.live = self.source.liveness.after[statement] | read

    def lookup(self, name: str) -> Any:
        """What a name means here. Raises ``Unsupported``."""
        if name in self.names:
            value = self.names[name]
            if isinstance(value, Unknown):
                raise Unsupported(f"{name}, {value.why}")
            return value
        if name in self.source.local:
            raise Unsupported(f"{name}, which may not be set")
        for scope in (self.source.function.__globals__, vars(builtins)):
            if name in scope:
                return scope[name]
        raise Unsupported(f"the unknown name {name}")


@dataclass(frozen=True)
class Unknown:
    """A name whose value or type depends on how the program ran."""

    why: str
