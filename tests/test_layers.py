# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Who may import whom: a file imports only from floors below its own, or from its own package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

FLOORS = (
    {"invariants", "fuzz.triton_cpu"},
    {"fuzz.case", "fuzz.amdgcn", "fuzz.flight_edges", "fuzz.load_edges"},
    {"fuzz.strategies", "fuzz.corpus", "fuzz.edges", "fuzz.known", "fuzz.probe", "fuzz.mutation", "fuzz.fixed"},
    {"fuzz.engines"},
    {"fuzz.corners"},
    {"fuzz.run"},
    {"fuzz.hunt", "fuzz.options"},
    {"fuzz.report"},
    {"fuzz.explore", "fuzz.replay", "fuzz.doctor", "fuzz.sweep", "fuzz.bench", "fuzz.compile", "fuzz.mutants"},
    {"fuzz.cli"},
)
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
FILES = sorted(path for package in ("fuzz", "invariants") for path in (ROOT / package).rglob("*.py"))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    """Modules of ours that a file imports, anywhere in it; ``from fuzz import corpus`` is ``fuzz.corpus``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.partition(".")[0] in ("fuzz", "invariants"))


def unit(module: str) -> str:
    """The part of the layout that a module, or something in it, belongs to: a file of ``fuzz/``, or a package."""
    first, *rest = module.split(".")
    return first if first == "invariants" or not rest else f"{first}.{rest[0]}"


@pytest.mark.parametrize("path", [path for path in FILES if module_of(path) != "fuzz"], ids=module_of)
def test_imports_come_from_below(path: Path):
    own = unit(module_of(path))
    assert own in FLOOR, f"{own} has no floor: give it one here"
    for name in imports(path):
        other = unit(name)
        assert other == own or FLOOR[other] < FLOOR[own], f"{own} imports {name}"


def test_an_engine_knows_no_invariant():
    """It fills in a trace; what is right is none of its business."""
    for path in FILES:
        if unit(module_of(path)) == "fuzz.engines":
            used = {name for name in imports(path) if name.startswith("invariants.")}
            assert all(name.startswith("invariants.trace.") for name in used), path


def test_only_engines_and_triton_import_vllm():
    """So that everything else can be used, and looked at, where no vLLM is."""
    for path in FILES:
        if unit(module_of(path)) in ("fuzz.engines", "fuzz.probe", "fuzz.triton_cpu", "fuzz.amdgcn"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] in ("vllm", "torch", "triton")], path


def test_the_check_sees_imports(tmp_path: Path):
    path = tmp_path / "x.py"
    path.write_text("import fuzz.cli\ndef f():\n    from fuzz import run\n    from invariants.trace import Trace\n")
    assert list(imports(path)) == ["fuzz.cli", "fuzz.run", "invariants.trace.Trace"]
