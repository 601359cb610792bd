# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Whose fault an exception is: told from the file that raised it."""

from __future__ import annotations

import sys
import types

import pytest

from fuzz.engines.follow import fault_of


def raised_in(path: str) -> Exception:
    """A ValueError out of a file of that name."""
    try:
        exec(compile("def f():\n    raise ValueError('no')\nf()", path, "exec"), {})
    except ValueError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/x/lib/python3.12/site-packages/vllm/v1/a.py", "vllm/v1/a.py, f"),
        ("/usr/lib/python3/dist-packages/vllm/v1/a.py", "vllm/v1/a.py, f"),
        ("/clones/vllm-main/vllm/v1/a.py", "vllm/v1/a.py, f"),
        ("/x/fuzz/probe/model.py", "probe/model.py, f"),
    ],
)
def test_vllms_fault(path: str, place: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__file__="/clones/vllm-main/vllm/__init__.py"))
    fault = fault_of(raised_in(path), 3)
    assert (fault.kind, fault.step, fault.place) == ("exception", 3, place)


@pytest.mark.parametrize("path", ["/x/fuzz/engines/record.py", "/clones/vllm-main/other/a.py", "/x/my-packages/a.py"])
def test_our_own(path: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__file__="/clones/vllm-main/vllm/__init__.py"))
    with pytest.raises(ValueError, match="no"):
        fault_of(raised_in(path), 3)
