# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The memory checker: finds what is planted, where it is planted, and nothing in vLLM's own kernels."""

from __future__ import annotations

from launches import BOOL, F32, I32, I64, Arena, compiled

# isort: split

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import test_triton_cpu
import torch
import triton
import triton.language as tl

from fuzz.triton_cpu import checking, measure
from fuzz.triton_cpu.faults import MemoryFault, MemoryFaults


@pytest.fixture(autouse=True)
def compiled_kernels() -> Iterator[None]:
    with compiled():
        yield


def line_of(kernel: Any, text: str) -> int:
    """Where a kernel has this text."""
    lines, first = inspect.getsourcelines(kernel.fn)
    (line,) = [first + number for number, line in enumerate(lines) if text in line]
    return line


def faults_of(launch: Callable[[], Any], **how: bool) -> tuple[MemoryFault, ...]:
    with checking(**how), pytest.raises(MemoryFaults) as caught:
        launch()
    assert caught.value.total == len(caught.value.faults)
    return caught.value.faults


def told(fault: MemoryFault) -> tuple[Any, ...]:
    return fault.program, fault.lane, fault.tensor, fault.offset, fault.access


@triton.jit
def _copy(source, out, first, count, low, SIZE: tl.constexpr):
    lane = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    values = tl.load(source + first + lane, mask=lane < count, other=-1)
    tl.store(out + lane, values, mask=(lane >= low) & (lane < count))


def test_off_by_one() -> None:
    source, out = torch.arange(10, dtype=I32), torch.zeros(12, dtype=I32)
    (fault,) = faults_of(lambda: _copy[(3,)](source, out, 0, 11, 0, SIZE=4))
    assert told(fault) == ((2, 0, 0), (2,), "source", 10, "load")
    assert (fault.kernel, fault.line) == ("_copy", line_of(_copy, "tl.load"))
    assert fault.file == __file__
    assert out.tolist() == [*range(10), -1, 0]  # the faulty lane loaded ``other``, the launch went on


def test_a_store_past_the_end_is_dropped() -> None:
    memory = torch.arange(12, dtype=I32)
    out = torch.from_numpy(memory.numpy()[:10])  # a storage of its own, in the same memory
    (fault,) = faults_of(lambda: _copy[(3,)](torch.arange(100, 120, dtype=I32), out, 0, 11, 8, SIZE=4))
    assert told(fault) == ((2, 0, 0), (2,), "out", 10, "store")
    assert fault.value == 110
    assert fault.line == line_of(_copy, "tl.store")
    assert memory.tolist() == [*range(8), 108, 109, 10, 11]


def test_below_the_start() -> None:
    source, out = torch.arange(10, dtype=I64), torch.zeros(8, dtype=I64)
    first, second = faults_of(lambda: _copy[(2,)](source, out, -2, 8, 0, SIZE=4))
    assert told(first) == ((0, 0, 0), (0,), "source", -2, "load")
    assert told(second) == ((0, 0, 0), (1,), "source", -1, "load")
    assert out.tolist() == [-1, -1, 0, 1, 2, 3, 4, 5]


def test_a_load_that_nothing_uses_is_checked() -> None:
    source, out = torch.arange(10, dtype=I32), torch.zeros(4, dtype=I32)
    faults = faults_of(lambda: _copy[(3,)](source, out, 0, 12, 12, SIZE=4))
    assert [told(fault)[1:4] for fault in faults] == [((2,), "source", 10), ((3,), "source", 11)]


def test_a_view_may_reach_its_whole_storage() -> None:
    source, out = torch.arange(10, dtype=I32), torch.zeros(8, dtype=I32)
    with checking():
        _copy[(2,)](source[4:5], out, -2, 8, 0, SIZE=4)
    assert out.tolist() == [*range(2, 10)]
    (fault,) = faults_of(lambda: _copy[(2,)](source[4:5], out, -1, 8, 0, SIZE=4))
    assert fault.offset == 6


def test_a_half_is_outside() -> None:
    """The last element of an eight-byte view lies across the end of a storage of 4-byte elements."""
    source, out = torch.arange(9, dtype=I32), torch.zeros(8, dtype=I64)
    (fault,) = faults_of(lambda: _copy[(2,)](source[:8].view(I64), out, 0, 5, 0, SIZE=4))
    assert told(fault)[1:4] == ((0,), "source", 4)


def test_only_the_first_faults_are_listed() -> None:
    with checking(), pytest.raises(MemoryFaults) as caught:
        _copy[(8,)](torch.zeros(0, dtype=I32), torch.zeros(64, dtype=I32), 0, 32, 0, SIZE=4)
    assert (len(caught.value.faults), caught.value.total) == (8, 32)
    assert "(and 31 more)" in str(caught.value)
    with checking():  # nothing of it is left
        _copy[(1,)](torch.zeros(4, dtype=I32), torch.zeros(4, dtype=I32), 0, 4, 0, SIZE=4)


@triton.jit
def _indirect(source, index, out, count, other, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    place = tl.load(index + lane, mask=lane < count, other=other)
    tl.store(out + lane, tl.load(source + place) + tl.load(source + place % 2))


def test_equal_lanes_are_told_once() -> None:
    """All lanes past the mask of the first load read one and the same place."""
    source, index = torch.arange(10, 16, dtype=I32), torch.tensor([5, 3, 0, 1], dtype=I32)
    out = torch.zeros(16, dtype=I32)
    with checking():
        _indirect[(1,)](source, index, out, 4, 2, SIZE=16)
        assert out.tolist() == [26, 24, 20, 22, *[22] * 12]
        _indirect[(1,)](source, index, out, 0, 3, SIZE=16)
        assert out.tolist() == [24] * 16
    (fault,) = faults_of(lambda: _indirect[(1,)](source, index, out, 3, 6, SIZE=16))
    assert told(fault)[1:] == ((3,), "source", 6, "load")
    assert out.tolist() == [26, 24, 20, *[10] * 13]
    with checking():
        _indirect[(1,)](source, torch.arange(6, dtype=I32).repeat(3), out, 18, 6, SIZE=16)
    assert out.tolist() == [(20, 22, 22, 24, 24, 26)[lane % 6] for lane in range(16)]


@triton.jit
def _tiles(source, out, row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    place = (row + tl.arange(0, ROWS))[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + place, tl.load(source + place) + 0.5)


def test_lanes_of_two_axes() -> None:
    source, out = torch.zeros(3, 4, dtype=F32), torch.zeros(4, 4, dtype=F32)
    faults = faults_of(lambda: _tiles[(1, 1)](source, out, 0, ROWS=4, COLUMNS=4))
    assert [fault.lane for fault in faults] == [(3, column) for column in range(4)]
    faults = faults_of(lambda: _tiles[(1, 1)](out, source, 0, ROWS=4, COLUMNS=4))
    assert [(fault.lane, fault.access, fault.value) for fault in faults] == [
        ((3, column), "store", 1.0) for column in range(4)
    ]


# regions


def test_a_forbidden_row() -> None:
    cache, out = torch.arange(24, dtype=I32).view(6, 4), torch.zeros(24, dtype=I32)
    with checking() as checker:
        rows = checker.rows(cache, 16)
        rows.forbid(0, 1, "the null block")
        rows.forbid(3, 5, "a freed block")
        with pytest.raises(MemoryFaults) as caught:
            _copy[(2,)](cache, out, 10, 3, 0, SIZE=4)
        (fault,) = caught.value.faults
        assert told(fault) == ((0, 0, 0), (2,), "source", 12, "load")
        assert fault.what == "in row 3, a freed block"
        assert out[:3].tolist() == [10, 11, -1]
        _copy[(1,)](out, cache[1:], 0, 1, 0, SIZE=1)  # clean: row 1
        with pytest.raises(MemoryFaults, match="in row 0, the null block"):
            _copy[(1,)](out, cache, 0, 1, 0, SIZE=1)
        assert cache[0, 0] == 0
        rows.allow(3, 5)
        _copy[(1,)](cache, out, 12, 8, 0, SIZE=8)
        assert out[:8].tolist() == [*range(12, 20)]
        with pytest.raises(MemoryFaults, match="outside"):
            _copy[(1,)](cache, out, 20, 8, 0, SIZE=8)


def test_rows_of_a_view_are_counted_from_its_start() -> None:
    cache, out = torch.arange(26, dtype=I32), torch.zeros(8, dtype=I32)
    with checking() as checker:
        checker.rows(cache[2:], 16).forbid(1, 2, "never written")
        _copy[(1,)](cache, out, 0, 6, 0, SIZE=8)
        with pytest.raises(MemoryFaults, match="in row 1, never written") as caught:
            _copy[(1,)](cache, out, 2, 5, 0, SIZE=8)
    assert told(caught.value.faults[0])[1:4] == ((4,), "source", 6)


def test_rows_may_be_marked_between_launches() -> None:
    cache, out = torch.arange(8, dtype=I32), torch.zeros(8, dtype=I32)
    with checking() as checker:
        _copy[(1,)](cache, out, 0, 8, 0, SIZE=8)
        checker.rows(cache, 8).forbid(1, 2, "freed since")
        with pytest.raises(MemoryFaults, match="in row 1, freed since"):
            _copy[(1,)](cache, out, 0, 8, 0, SIZE=8)


# pointers from memory


@triton.jit
def _through_table(table, out, group, count, SIZE: tl.constexpr):
    row = tl.load(table + group).to(tl.pointer_type(tl.int32))
    lane = tl.arange(0, SIZE)
    tl.store(out + lane, tl.load(row + lane, mask=lane < count, other=-1))


def test_a_table_of_pointers() -> None:
    groups = [torch.arange(10, 13, dtype=I32), torch.arange(20, 23, dtype=I32)]
    table, out = torch.tensor([group.data_ptr() for group in groups], dtype=torch.uint64), torch.zeros(4, dtype=I32)
    with checking() as checker:
        for number, group in enumerate(groups):
            checker.know(f"group {number}", group)
        _through_table[(1,)](table, out, 1, 3, SIZE=4)
        assert out.tolist() == [20, 21, 22, -1]
        with pytest.raises(MemoryFaults) as caught:
            _through_table[(1,)](table, out, 1, 4, SIZE=4)
        assert told(caught.value.faults[0])[1:] == ((3,), "group 1", 3, "load")
        with pytest.raises(MemoryFaults) as caught:
            _through_table[(1,)](table, out, 2, 0, SIZE=4)  # past the table: nothing is read through what is there
        assert told(caught.value.faults[0])[1:] == ((), "table", 2, "load")
        address = groups[0].data_ptr()
        del groups[0], group
        with pytest.raises(MemoryFaults, match="no known tensor") as caught:  # its tensor is gone
            _through_table[(1,)](table, out, 0, 1, SIZE=4)
        assert told(caught.value.faults[0])[1:] == ((0,), "", address, "load")


@triton.jit
def _store_through(table, out, SIZE: tl.constexpr):
    row = tl.load(table).to(tl.pointer_type(tl.int32))
    tl.store(row + tl.arange(0, SIZE), tl.program_id(0))


def test_a_race_through_a_table_of_pointers() -> None:
    row = torch.zeros(2, dtype=I32)
    table = torch.tensor([row.data_ptr()], dtype=torch.uint64)
    with checking() as checker:
        checker.know("row", row)
        with pytest.raises(MemoryFaults, match="a race") as caught:
            _store_through[(2,)](table, row, SIZE=2)
    assert [told(fault) for fault in caught.value.faults] == [
        ((1, 0, 0), (lane,), "row", lane, "store") for lane in range(2)
    ]


@triton.jit
def _chosen(one, other, out, flag, count, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    pointer = one if flag else other
    tl.store(out + lane, tl.load(pointer + lane, mask=lane < count))


@pytest.mark.parametrize(("flag", "name"), [(True, "one"), (False, "other")])
def test_a_pointer_of_a_conditional_expression(flag: bool, name: str) -> None:
    one, other, out = torch.arange(3, dtype=I32), torch.arange(3, dtype=I32), torch.zeros(4, dtype=I32)
    with checking():
        _chosen[(1,)](one, other, out, flag, 3, SIZE=4)
    (fault,) = faults_of(lambda: _chosen[(1,)](one, other, out, flag, 4, SIZE=4))
    assert told(fault)[1:] == ((3,), name, 3, "load")


@triton.jit
def _either(one, other, out, flag, count, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    scalar = one
    if flag:
        scalar = other
    tile = tl.where(lane % 2 == 0, one + lane, other + lane)
    tl.store(out + lane, tl.load(scalar + lane, mask=lane < count) + tl.load(tile, mask=lane < count))


@pytest.mark.parametrize("flag", [True, False])
def test_a_pointer_that_is_one_of_two(flag: bool) -> None:
    one, other, out = torch.arange(4, dtype=I32), torch.arange(3, dtype=I32), torch.zeros(8, dtype=I32)
    with checking():
        _either[(1,)](one, other, out, flag, 3, SIZE=4)
    faults = faults_of(lambda: _either[(1,)](one, other, out, flag, 4, SIZE=4))
    assert {fault.tensor for fault in faults} == {"other"}
    assert {fault.line for fault in faults} == {line_of(_either, "tl.store")}
    assert len(faults) == 1 + flag  # lane 3 is odd, so that the tile has it from ``other``


@triton.jit
def _walk(source, out, steps, SIZE: tl.constexpr):
    place, tile = source, source + tl.arange(0, SIZE)
    total = tl.zeros([SIZE], tl.int32)
    for _ in range(steps):
        total += tl.load(place) + tl.load(tile)
        place += SIZE
        tile += SIZE
    tl.store(out + tl.arange(0, SIZE), total)


def test_a_pointer_that_walks_in_a_loop() -> None:
    memory = torch.arange(16, dtype=I32)
    source, out = torch.from_numpy(memory.numpy()[:12]), torch.zeros(4, dtype=I32)
    with checking() as checker:
        checker.know("what comes after it", torch.from_numpy(memory.numpy()[12:]))
        _walk[(1,)](source, out, 3, SIZE=4)
        with pytest.raises(MemoryFaults) as caught:
            _walk[(1,)](source, out, 4, SIZE=4)
    assert [(fault.tensor, fault.offset) for fault in caught.value.faults] == [
        ("source", offset) for offset in (12, 12, 13, 14, 15)
    ]


@triton.jit
def _inner(pointer, lane):
    return tl.load(pointer + lane + 1)


@triton.jit
def _outer(source, out, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    tl.store(out + lane, _inner(source, lane))


def test_a_called_function_has_the_line() -> None:
    (fault,) = faults_of(lambda: _outer[(1,)](torch.zeros(4, dtype=I32), torch.zeros(4, dtype=I32), SIZE=4))
    assert (fault.kernel, fault.line, fault.lane) == ("_outer", line_of(_inner, "tl.load"), (3,))


# races


@triton.jit
def _collide(out, values, at, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    tl.store(out + lane + at, tl.load(values + tl.program_id(1) * SIZE + lane))


@pytest.mark.parametrize("dtype", [I32, I64, F32, torch.int16, torch.int8, BOOL])
def test_a_race(dtype: torch.dtype) -> None:
    values = torch.zeros(3, 4, dtype=dtype)
    values[2, 1] = 1
    out = torch.zeros(8, dtype=dtype)
    (fault,) = faults_of(lambda: _collide[(1, 3)](out, values, 2, SIZE=4))
    assert told(fault) == ((0, 2, 0), (1,), "out", 3, "store")
    assert fault.value == 1
    assert fault.what == f"a race: program (0, 1, 0) stored {values[1, 1].item()} there"
    assert fault.line == line_of(_collide, "tl.store")
    with checking(races=False):
        _collide[(1, 3)](out, values, 2, SIZE=4)


@pytest.mark.parametrize("dtype", [I32, I64, F32, torch.int16, torch.int8, BOOL])
def test_equal_values_and_other_launches_are_no_race(dtype: torch.dtype) -> None:
    same, others = torch.ones(3, 4, dtype=dtype), torch.zeros(1, 4, dtype=dtype)
    out = torch.zeros(8, dtype=dtype)
    with checking():
        _collide[(1, 3)](out, same, 2, SIZE=4)
        _collide[(1, 1)](out, others, 1, SIZE=4)
        _collide[(1, 1)](out, same, 3, SIZE=4)


@triton.jit
def _twice(out, again, SIZE: tl.constexpr):
    lane = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + lane, 0)
    tl.store(again + lane, 1)


def test_a_program_does_not_race_with_itself() -> None:
    out = torch.zeros(8, dtype=I32)
    with checking():
        _twice[(2,)](out, out, SIZE=4)
    (fault, *_) = faults_of(lambda: _twice[(2,)](out, out[1:], SIZE=4))
    assert told(fault) == ((1, 0, 0), (0,), "out", 4, "store")
    assert fault.what.startswith("a race: program (0, 0, 0) stored 1")


@triton.jit
def _bytes(out):
    number = tl.program_id(0)
    tl.store(out.to(tl.pointer_type(tl.int8)) + 7 - number, number + 1)


def test_bytes_of_a_larger_element_are_no_race() -> None:
    out = torch.zeros(2, dtype=I32)
    with checking():
        _bytes[(8,)](out)
    assert out.view(torch.int8).tolist() == [8, 7, 6, 5, 4, 3, 2, 1]


# strict


def test_masked_lanes_count_when_strict() -> None:
    source, out = torch.arange(10, dtype=I32), torch.zeros(12, dtype=I32)
    with checking():
        _copy[(3,)](source, out, 0, 10, 0, SIZE=4)
    faults = faults_of(lambda: _copy[(3,)](source, out, 0, 10, 0, SIZE=4), strict=True)
    assert [(told(fault)[1:4], fault.active) for fault in faults] == [
        (((2,), "source", 10), False),
        (((3,), "source", 11), False),
    ]
    assert out.tolist() == [*range(10), 0, 0]
    assert "masked off" in str(faults[0])


# vLLM's kernels

_NAMES = [name for name in vars(test_triton_cpu) if name.startswith("test_")]
VLLM = _NAMES[: _NAMES.index("test_ragged_indices") + 1]


class Tensors:
    """Tensors of a test, each in a storage of its own."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.all: list[torch.Tensor] = []
        self.launches = 0
        patch.setattr(Arena, "__init__", self._begin(Arena.__init__))
        patch.setattr(Arena, "empty", lambda *args: self._empty(*args))

    def _begin(self, begin: Callable[..., None]) -> Callable[..., None]:
        def init(arena: Arena, *args: Any) -> None:
            self.all.clear()
            begin(arena, *args)

        return init

    def _empty(self, arena: Arena, shape: Any, dtype: torch.dtype = I32) -> torch.Tensor:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        memory = torch.from_numpy(arena.random.integers(0, 256, math.prod(shape) * dtype.itemsize, dtype=np.uint8))
        self.all.append(memory.view(dtype).view(shape))
        return self.all[-1]

    def check(self, _: Arena, launch: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Launch it checked, then on the same bytes unchecked: only what is clean may run in these storages."""
        self.launches += 1
        before = [tensor.clone() for tensor in self.all]
        with checking() as checker:
            for number, tensor in enumerate(self.all):
                checker.know(f"tensor {number}", tensor)
            launch(*args, **kwargs)
        found = [tensor.clone() for tensor in self.all]
        for tensor, value in zip(self.all, before, strict=True):
            tensor.copy_(value)
        launch(*args, **kwargs)
        for tensor, value in zip(self.all, found, strict=True):
            assert tensor.numpy().tobytes() == value.numpy().tobytes()


@pytest.mark.parametrize("name", VLLM)
def test_vllm_is_clean(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = Tensors(monkeypatch)
    monkeypatch.setattr(test_triton_cpu, "agree", tensors.check)
    getattr(test_triton_cpu, name)()
    assert tensors.launches


def test_the_benchmark_has_a_figure_for_each_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(measure, "SECONDS", 0)
    figures = measure.bench_checker()
    kernels = measure.launches().keys()
    assert {name for name in figures if name.startswith("checked")} == {f"checked_vs_plain_{name}" for name in kernels}
    assert all(figure > 0 for figure in figures.values())


@pytest.mark.parametrize("name", ["paged_indices", "block_tables", "slot_mappings"])
def test_the_benchmark_is_checked(name: str) -> None:
    """Its launches are clean, and would be told on if they were not."""
    launch = measure.launches()[name]
    with checking() as checker:
        for known, tensor in launch.known.items():
            checker.know(known, tensor)
        launch.run()
    with checking(), pytest.raises(MemoryFaults):
        replace(launch, grid=tuple(size * 1000 for size in launch.grid)).run()
