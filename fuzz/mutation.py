# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Mutants: small, declared breaks of vLLM, applied to a module's syntax tree as the module is imported.

A mutant is data (TOML). Installed files are not touched: the changed source goes to a temporary file, from which the
module is then loaded, since Triton and tracebacks read source from files. Relied upon: ``install`` comes before the
module is imported, in a process of its own; ``applied`` says afterwards whether it was.
"""

from __future__ import annotations

import ast
import atexit
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MAX_FILE_BYTES = 1 << 20
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")]
Text = Annotated[str, Meta(max_length=2000)]


class MutantError(ValueError):
    """A mutant that cannot be read or applied; the message names it."""


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename={"value": "with"}):
    """One break. ``function``, ``target`` and ``occurrence`` select a statement, ``action`` says what becomes of it."""

    id: Name
    title: Text
    module: Text
    function: Text
    """Function, or "Class.method"."""
    target: Text
    """An assignment to this name or attribute ("request.replay_start"); or "return", "if", "for"; or "if:TEXT", one
    whose condition has TEXT in it; or "call:NAME", an expression statement that calls NAME."""
    action: Literal["delete", "replace"]
    value: Text = ""
    """For "replace": the new right-hand side, returned value, condition or iterable; of a call, the new expression."""
    occurrence: int | None = None
    """Which of several within the function, in source order; -1 = the last. None: there has to be just one."""
    engines: tuple[Name, ...]
    expect: tuple[Name, ...]
    """Invariants, any of which may be the first to catch it."""
    upstream: Text = ""
    """The public bug it stands for."""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    mutant: tuple[Mutant, ...]


def read(path: Path) -> tuple[Mutant, ...]:
    """The mutants of a TOML file. Raises ``MutantError``."""
    try:
        data = path.read_bytes()
        if len(data) > MAX_FILE_BYTES:
            raise MutantError(f"{path}: {len(data)} bytes; at most {MAX_FILE_BYTES} are read")
        mutants = msgspec.toml.decode(data, type=_File).mutant
    except OSError as error:
        raise MutantError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MutantError(f"{path}: {error}") from error
    seen: set[str] = set()
    for mutant in mutants:
        if mutant.id in seen:
            raise MutantError(f"{path}: two mutants are called {mutant.id}")
        seen.add(mutant.id)
    return mutants


def mutate(source: str, mutant: Mutant) -> str:
    """The module's source with the mutant in it. Raises ``MutantError`` if it selects no statement, or several."""
    tree = ast.parse(source)
    function = _function(tree, mutant)
    found = [node for node in _statements(function) if _matches(node, mutant.target)]
    where = f"mutant {mutant.id}: {mutant.module}, {mutant.function}"
    if not found:
        raise MutantError(f"{where}: no statement '{mutant.target}'")
    if mutant.occurrence is None and len(found) > 1:
        raise MutantError(f"{where}: '{mutant.target}' is there {len(found)} times; say which occurrence")
    try:
        node = found[mutant.occurrence or 0]
    except IndexError as error:
        raise MutantError(f"{where}: '{mutant.target}' is there {len(found)} times only") from error
    _change(tree, node, mutant)
    return ast.unparse(ast.fix_missing_locations(tree))


def _function(tree: ast.Module, mutant: Mutant) -> ast.AST:
    scope: ast.AST = tree
    for name in mutant.function.split("."):
        named = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        inside = [node for node in ast.iter_child_nodes(scope) if isinstance(node, named) and node.name == name]
        if len(inside) != 1:
            how = "no function" if not inside else f"{len(inside)} functions"
            raise MutantError(f"mutant {mutant.id}: {mutant.module} has {how} {mutant.function}")
        scope = inside[0]
    return scope


def _statements(function: ast.AST) -> Iterator[ast.stmt]:
    """In source order, those of nested blocks included."""
    nodes = [node for node in ast.walk(function) if isinstance(node, ast.stmt) and node is not function]
    yield from sorted(nodes, key=lambda node: (node.lineno, node.col_offset))


def _matches(node: ast.stmt, target: str) -> bool:
    if target.startswith("call:"):
        called = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
        return called is not None and target[5:] in (ast.unparse(called), ast.unparse(called).rpartition(".")[2])
    if target.startswith("if:"):
        return isinstance(node, ast.If) and target[3:] in ast.unparse(node.test)
    if target in ("return", "if", "for"):
        return isinstance(node, {"return": ast.Return, "if": ast.If, "for": ast.For}[target])
    if isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        return ast.unparse(node.target) == target
    return isinstance(node, ast.Assign) and any(ast.unparse(one) == target for one in node.targets)


def _change(tree: ast.Module, node: Any, mutant: Mutant) -> None:
    if mutant.action == "delete":
        _replace(tree, node, ast.copy_location(ast.Pass(), node))
        return
    try:
        value = ast.parse(mutant.value, mode="eval").body
    except SyntaxError as error:
        raise MutantError(f"mutant {mutant.id}: 'with' is no expression: {error.msg}") from error
    if isinstance(node, ast.If):
        node.test = value
    elif isinstance(node, ast.For):
        node.iter = value
    else:  # of an assignment, a return, or an expression
        node.value = value


def _replace(tree: ast.Module, node: ast.stmt, new: ast.stmt) -> None:
    for parent in ast.walk(tree):
        for _, block in ast.iter_fields(parent):
            if isinstance(block, list) and any(one is node for one in block):
                block[:] = [new if one is node else one for one in block]


class _Finder:
    """Finds the mutant's module before anybody else does."""

    def __init__(self, mutant: Mutant, folder: Path) -> None:
        self._mutant = mutant
        self._folder = folder
        self.applied = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See ``importlib.abc.MetaPathFinder``."""
        if name != self._mutant.module:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or not spec.origin or spec.submodule_search_locations is not None:
            raise MutantError(f"mutant {self._mutant.id}: there is no module {name}")
        changed = self._folder / Path(spec.origin).name
        changed.write_text(mutate(Path(spec.origin).read_text(), self._mutant))
        self.applied = True
        return importlib.util.spec_from_file_location(name, changed)


_installed: list[_Finder] = []


def install(mutant: Mutant) -> None:
    """Break the module when it is imported. Raises ``MutantError`` if it has been."""
    if mutant.module in sys.modules:
        raise MutantError(f"mutant {mutant.id}: {mutant.module} is imported already")
    folder = Path(tempfile.mkdtemp(prefix="replaycheck-mutant-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    finder: Any = _Finder(mutant, folder)
    sys.meta_path.insert(0, finder)
    _installed.append(finder)


def applied() -> bool:
    """Whether what was installed has been imported."""
    return all(finder.applied for finder in _installed)
