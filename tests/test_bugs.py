# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The map of public bugs (corpora/BUGS.md): no row is missing, every seed, invariant and mutant it names exists, and a
row that nothing reaches or catches says why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fuzz import mutation
from fuzz.strategies import PROFILES
from invariants import INVARIANTS

ROOT = Path(__file__).parent.parent
COLUMNS = ("number", "bug", "trigger", "reached", "caught", "missing")
MUTANTS = {mutant.id: mutant for mutant in mutation.read(ROOT / "tests" / "mutants.toml")}
ROWS = [
    dict(zip(COLUMNS, (cell.strip() for cell in line.strip("|\n").split("|")), strict=True))
    for line in (ROOT / "corpora" / "BUGS.md").read_text().splitlines()
    if re.match(r"\| \d", line)
]
SLUGS = {path.stem.rsplit("-", 1)[0] for path in (ROOT / "corpora").glob("*/seeds/*.json")}


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_no_row_is_missing():
    assert [row["number"] for row in ROWS] == [str(number) for number in range(1, 67)]
    assert all(row["bug"] and row["trigger"] for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['number']}-{row['bug'].split(',')[0].replace(' ', '-')}")
def test_row(row: dict[str, str]):
    assert row["missing"] or (row["reached"] and row["caught"]), "neither reached and caught, nor said why not"
    for name in quoted(row["reached"]):
        if name.startswith("corpora/"):
            assert list(ROOT.glob(name)), name
        else:
            assert name in SLUGS or name in PROFILES or name in {"kernels", "dspark"}, name
    for part in filter(None, row["caught"].split(";")):
        invariant, *mutants = quoted(part)
        if invariant.startswith("corpora/"):
            assert list(ROOT.glob(invariant)), invariant
            continue
        assert invariant in INVARIANTS, invariant
        assert mutants, f"{invariant} of row {row['number']} is not shown by any"
        for name in mutants:
            assert invariant in MUTANTS[name].expect, f"{name} is not for {invariant}"
