# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Mutants: small, declared breaks of vLLM, applied to a module's syntax tree as the module is imported.

A mutant is data (TOML). Installed files are not touched: the changed source goes to a temporary file, from which the
module is then loaded, since Triton and tracebacks read source from files. Relied upon: ``install`` comes before the
module is imported, in a process of its own; ``applied`` says afterwards whether it was, ``reached`` whether what is
changed was ever executed.
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


def check(mutant: Mutant) -> None:
    """Raises ``MutantError`` if it cannot be applied here. Imports nothing."""
    mutate(_source(mutant).read_text(), mutant)


def _source(mutant: Mutant) -> Path:
    """The file of its module, as Python would find it."""
    top, *rest = mutant.module.split(".")
    found: list[Path] = []
    if all(part.isidentifier() for part in (top, *rest)) and (spec := PathFinder.find_spec(top)):
        places = spec.submodule_search_locations
        if places is None:
            found = [Path(spec.origin)] if spec.origin and not rest else []
        else:
            found = [Path(place, *rest).with_suffix(".py") for place in places]
    found = [path for path in found if path.is_file()]
    if not found:
        raise MutantError(f"mutant {mutant.id}: there is no module {mutant.module} here")
    return found[0]


def mutate(source: str, mutant: Mutant, watch: bool = False) -> str:
    """The module's source with the mutant in it; ``watch``: and with what ``reached`` needs.

    Raises ``MutantError`` if it selects no statement, or several, or changes nothing.
    """
    tree = ast.parse(source)
    before = ast.unparse(tree)
    function = _function(tree, mutant)
    node = _statement(function, mutant)
    new = _change(tree, node, mutant)
    if ast.unparse(ast.fix_missing_locations(tree)) == before:
        raise MutantError(f"mutant {mutant.id}: {mutant.module}, {mutant.function}: it changes nothing")
    if watch:
        _watch(tree, function, new)
    return ast.unparse(ast.fix_missing_locations(tree))


def _statement(function: ast.AST, mutant: Mutant) -> ast.stmt:
    found = [node for node in _statements(function) if _matches(node, mutant.target)]
    where = f"mutant {mutant.id}: {mutant.module}, {mutant.function}"
    if not found:
        raise MutantError(f"{where}: no statement '{mutant.target}'")
    if mutant.occurrence is None and len(found) > 1:
        raise MutantError(f"{where}: '{mutant.target}' is there {len(found)} times; say which occurrence")
    try:
        return found[mutant.occurrence or 0]
    except IndexError as error:
        raise MutantError(f"{where}: '{mutant.target}' is there {len(found)} times only") from error


def _function(tree: ast.Module, mutant: Mutant) -> Any:
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


def _change(tree: ast.Module, node: Any, mutant: Mutant) -> ast.stmt:
    """The statement that is there now."""
    if mutant.action == "delete":
        new: ast.stmt = ast.copy_location(ast.Pass(), node)
        _replace(tree, node, [new])
        return new
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
    changed: ast.stmt = node
    return changed


def _replace(tree: ast.Module, node: ast.stmt, new: list[ast.stmt]) -> None:
    for parent in ast.walk(tree):
        for _, block in ast.iter_fields(parent):
            if isinstance(block, list) and any(one is node for one in block):
                at = next(index for index, one in enumerate(block) if one is node)
                block[at : at + 1] = new


def _watch(tree: ast.Module, function: Any, node: ast.stmt) -> None:
    """Have what is executed say so: the statement, or the launch of a kernel, in which nothing of ours may stand."""
    for index, decorator in enumerate(function.decorator_list):
        if "jit" in ast.unparse(decorator):
            function.decorator_list.insert(index, _here("launched"))
            return
    _replace(tree, node, [ast.Expr(ast.Call(_here("reach"), [], [])), node])


def _here(name: str) -> ast.expr:
    """A function of this module, wherever it is named."""
    return ast.parse(f"__import__('{__name__}', fromlist=['{name}']).{name}", mode="eval").body


_reached: list[bool] = []


def reach() -> None:
    """Called by what the mutant changes."""
    _reached[:] = [True]


def launched(kernel: Any) -> Any:
    """Decorates a Triton kernel that the mutant changes: its launches are seen."""
    if not hasattr(kernel, "run"):
        reach()  # none of Triton's: nobody knows
        return kernel

    def watched(*args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("warmup"):
            reach()
        return type(kernel).run(kernel, *args, **kwargs)

    kernel.run = watched
    return kernel


def reached() -> bool:
    """Whether the changed statement was executed, or the kernel that it is in launched, in this process."""
    return bool(_reached)


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
        # By such a path what it raises is known to have come out of an installed package.
        changed = self._folder / "site-packages" / Path(*name.split(".")).with_suffix(".py")
        changed.parent.mkdir(parents=True, exist_ok=True)  # a module may be imported anew
        changed.write_text(mutate(Path(spec.origin).read_text(), self._mutant, watch=True))
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
