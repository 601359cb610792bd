# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The memory checker: which tensors a kernel may touch, who wrote what, and what a launch did wrong.

Inside ``checking()`` compiled kernels check each access (``checks``): it has to stay in the storage of the tensor that
its pointer came from and out of rows that are forbidden, and no two programs may store different values to one
address. Relied upon: kernels are launched by one thread, and run one after the other; a tensor's storage does not move
while a kernel runs. Launches under Triton's interpreter are not checked (``fallbacks`` counts them).
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fuzz.triton_cpu import lookup
from fuzz.triton_cpu.checks import Checking, Site
from fuzz.triton_cpu.faults import MemoryFault, MemoryFaults

if TYPE_CHECKING:
    from fuzz.triton_cpu.translate import Translated

MAX_KNOWN = 1024
STAMP_BYTES = 1 << 26
"""Of all stamps together; more are thrown away before the next launch."""
MAX_MADE = 10_000
"""Rows of the table that are remembered."""
_PACK = struct.Struct(f"{lookup.ROW}q").pack


class Rows:
    """The rows of a tensor: stretches of equal length from its first element on (blocks, slots). Some are forbidden."""

    def __init__(self, tensor: torch.Tensor, row_bytes: int) -> None:
        base, size = _storage(tensor)
        before = -(-(tensor.data_ptr() - base) // row_bytes)
        self._first = before
        self._what: dict[int, str] = {}
        self._keep = tensor
        self.row_bytes = row_bytes
        self.start = tensor.data_ptr() - before * row_bytes
        """The address that the first mark stands for."""
        self.marks = np.zeros(-(-(base + size - self.start) // row_bytes), np.uint8)
        """One a row of the storage."""

    def forbid(self, first: int, end: int, what: str) -> None:
        """No access to rows ``first``..``end`` - 1 from now on: ``what`` they are."""
        self.marks[self._first + first : self._first + end] = 1
        self._what.update(dict.fromkeys(range(self._first + first, self._first + end), what))

    def allow(self, first: int, end: int) -> None:
        """These rows are free to use again."""
        self.marks[self._first + first : self._first + end] = 0

    def what(self, address: int, width: int) -> str:
        """What the forbidden row at an address is."""
        rows = range((address - self.start) // self.row_bytes, (address + width - 1 - self.start) // self.row_bytes + 1)
        row = next(row for row in rows if self.marks[row])
        return f"in row {row - self._first}, {self._what[row]}"


class Stamps:
    """For each element of a storage a stamp, 4 bytes: who wrote it last. Stamps of a later launch are larger, so that
    those of earlier launches, and of storages that lay there before, mean nothing."""

    def __init__(self) -> None:
        self.renewed = 0
        """How often addresses that were handed out became invalid."""
        self._next = 1
        self._bytes = 0
        self._arrays: dict[tuple[int, int], tuple[int, int, Any]] = {}
        """By address and bytes of the storage: the stamps' address, how far offsets are shifted, the stamps."""

    def take(self, count: int) -> int:
        """The first of ``count`` new stamps."""
        if self._next + count >= 1 << 31 or self._bytes > STAMP_BYTES:
            self._arrays.clear()
            self._bytes, self._next = 0, 1
            self.renewed += 1
        first, self._next = self._next, self._next + count
        return first

    def of(self, base: int, size: int, itemsize: int) -> tuple[int, int]:
        """The address of a storage's stamps, and by how many bits offsets are shifted to get there."""
        scale = 2 if itemsize == 1 else 1 if itemsize == 2 else 0
        found = self._arrays.get((base, size))
        if found is None or found[1] < scale:
            self.renewed += found is not None
            stamps = np.zeros((size << scale) // 4 + 2, np.int32)
            self._bytes += stamps.nbytes
            found = self._arrays[base, size] = (stamps.ctypes.data, scale, stamps)
        return found[:2]


_stamps = Stamps()


class Checker:
    """What is known about memory. See ``checking``."""

    def __init__(self, checking: Checking) -> None:
        self.checking = checking
        self._words = (ctypes.c_int64 * (lookup.ROWS + lookup.ROW * (lookup.FIRST_KNOWN + MAX_KNOWN)))()
        self._table = ctypes.addressof(self._words)
        self._words[lookup.KNOWN] = lookup.FIRST_KNOWN
        self._known: list[tuple[str, Any]] = []
        self._forbidden: dict[int, Rows] = {}
        """By address of the storage."""
        self._renewed = _stamps.renewed
        self._made: dict[tuple[int, int, int], bytes] = {}
        """Rows of the table, by the storage's address and bytes, and what ``_row`` was told."""

    def know(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor that kernels find by an address in memory (a table of ``data_ptr()``), not as an argument."""
        if len(self._known) == MAX_KNOWN:
            raise ValueError(f"more than {MAX_KNOWN} known tensors")
        number = lookup.FIRST_KNOWN + len(self._known)
        words, places = self._words, range(_row(number), _row(number + 1))

        def forget(_: Any) -> None:
            for place in places:
                words[place] = 0

        self._known.append((name, weakref.ref(tensor, forget)))
        self._put(number, tensor)
        self._words[lookup.KNOWN] = number + 1

    def rows(self, tensor: torch.Tensor, row_bytes: int) -> Rows:
        """Rows of a tensor, all of them allowed so far; instead of any that its storage had before."""
        found = self._forbidden[tensor.untyped_storage().data_ptr()] = Rows(tensor, row_bytes)
        self._renew()
        return found

    def begin(self, code: Translated, tensors: Sequence[torch.Tensor], programs: int) -> int:
        """The address of the table for a launch of ``programs`` programs with these pointer arguments."""
        self._words[lookup.FIRST_STAMP] = _stamps.take(programs)
        rows, renewed = b"", -1
        while renewed != _stamps.renewed:  # again where stamps of an argument had to move for the next one
            renewed = _stamps.renewed
            if renewed != self._renewed or len(self._made) > MAX_MADE:
                self._renew()
            rows = b"".join(map(self._row, tensors, code.stores))
        ctypes.memmove(self._table + 8 * _row(1), rows, len(rows))
        self._words[lookup.ARGUMENTS] = len(tensors) + 1
        return self._table

    def end(self, kernel: str, code: Translated, tensors: Sequence[torch.Tensor], grid: Sequence[int]) -> None:
        """After the launch. Raises ``MemoryFaults``."""
        total = self._words[lookup.COUNT]
        if total:
            self._words[lookup.COUNT] = 0
            records = range(min(total, lookup.MAX_RECORDS))
            raise MemoryFaults([self._fault(kernel, code, tensors, grid, record) for record in records], total)

    def _row(self, tensor: torch.Tensor, stores: int) -> bytes:
        """``stores``: bytes of an element, if the tensor may be written; else 0."""
        storage = tensor.untyped_storage()
        base, size = storage.data_ptr(), storage.nbytes()
        row = self._made.get((base, size, stores))
        if row is None:
            shadow = _stamps.of(base, size, stores) if stores and self.checking.races else (0, 0)
            rows = self._forbidden.get(base)
            marks = (0, 0, 0) if rows is None else (rows.marks.ctypes.data, rows.row_bytes, rows.start)
            row = self._made[base, size, stores] = _PACK(base, size, size if rows is None else 0, *shadow, *marks)
        return row

    def _put(self, number: int, tensor: torch.Tensor) -> None:
        """The row of a known tensor."""
        ctypes.memmove(self._table + 8 * _row(number), self._row(tensor, tensor.itemsize), 8 * lookup.ROW)

    def _renew(self) -> None:
        """Rows of the table are not what they were."""
        self._made.clear()
        self._renewed = _stamps.renewed
        for number, (_, known) in enumerate(self._known, lookup.FIRST_KNOWN):
            tensor = known()
            if tensor is not None:
                self._put(number, tensor)

    def _fault(
        self, kernel: str, code: Translated, tensors: Sequence[torch.Tensor], grid: Sequence[int], record: int
    ) -> MemoryFault:
        start = lookup.RECORDS + record * lookup.RECORD
        words = self._words[start : start + lookup.RECORD]
        site, address, kind = code.sites[words[lookup.SITE]], words[lookup.ADDRESS], words[lookup.KIND]
        name, tensor = self._tensor(words[lookup.NUMBER], code, tensors)
        value = _value(words[lookup.VALUE], site, tensor) if site.store else None
        active, what = True, ""
        if kind == lookup.RACE:
            other, old = _place(words[lookup.OTHER], grid), _value(words[lookup.OLD], site, tensor)
            what = f"a race: program {other} stored {old} there"
        else:
            active = bool(words[lookup.OTHER])
            if tensor is None:
                what = "in no known tensor"
            elif kind == lookup.OUTSIDE:
                what = f"outside the tensor's storage, {_storage(tensor)[1] // tensor.itemsize} elements"
            else:
                what = self._forbidden[_storage(tensor)[0]].what(address, site.width)
            what += "" if active else ", though masked off"
        return MemoryFault(
            kernel=kernel,
            file=site.file,
            line=site.line,
            program=_place(words[lookup.PROGRAM], grid),
            lane=_place(words[lookup.LANE], site.shape),
            tensor=name,
            offset=address if tensor is None else (address - tensor.data_ptr()) // tensor.itemsize,
            access="store" if site.store else "load",
            what=what,
            value=value,
            active=active,
        )

    def _tensor(
        self, number: int, code: Translated, tensors: Sequence[torch.Tensor]
    ) -> tuple[str, torch.Tensor | None]:
        if number == lookup.NOWHERE:
            return "", None
        if number < lookup.FIRST_KNOWN:
            return code.pointers[number - 1], tensors[number - 1]
        name, tensor = self._known[number - lookup.FIRST_KNOWN]
        return name, tensor()


def _row(number: int) -> int:
    """Where the row of a tensor begins in the table."""
    return lookup.ROWS + number * lookup.ROW


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Its address and bytes."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _place(number: int, shape: Sequence[int]) -> Any:
    """The place of element ``number`` of a shape."""
    place: list[int] = []
    for size in reversed(shape):
        number, rest = divmod(number, size)
        place.insert(0, rest)
    return tuple(place)


def _value(bits: int, site: Site, tensor: torch.Tensor | None) -> int | float:
    """The value that a lane's bits are, if it has the type of the tensor's elements; else the bits as a number."""
    raw = (bits & (1 << 64) - 1).to_bytes(8, "little")[: site.width]
    if tensor is None or tensor.itemsize != site.width:
        return int.from_bytes(raw, "little")
    value: int | float = torch.frombuffer(bytearray(raw), dtype=tensor.dtype).item()
    return value


_active: list[Checker] = []


def active() -> Checker | None:
    """What checks the launches at the moment."""
    return _active[-1] if _active else None


@contextmanager
def checking(*, strict: bool = False, races: bool = True) -> Iterator[Checker]:
    """Launches of compiled kernels inside are checked, and raise ``MemoryFaults``.

    ``strict``: lanes that are masked off must have valid addresses, too. ``races``: stores of different values by two
    programs of a launch to one address are faults.
    """
    checker = Checker(Checking(strict, races))
    _active.append(checker)
    try:
        yield checker
    finally:
        _active.remove(checker)
