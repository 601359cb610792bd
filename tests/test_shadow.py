# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The shadow cache, by hand: who holds which cell, and what an index list reads."""

from __future__ import annotations

import numpy as np
import pytest

from fuzz.engines.shadow import Queries, ShadowGroup, Tables, gathers_from_indices, slot_map, stretch
from invariants.trace import NOBODY, Gathers, IntArray


def ints(*values: int, kind: type = np.int64) -> IntArray:
    return np.array(values, kind)


@pytest.fixture
def shadow() -> ShadowGroup:
    """8 blocks of 2; admission 0 has blocks 3 and 5, and wrote positions 0..3 of itself."""
    shadow = ShadowGroup(num_blocks=8, block_size=2)
    shadow.admit(0, ints(3, 5), adopted=0)
    shadow.write(ints(0, 0, 0, 0), ints(0, 1, 2, 3), ints(6, 7, 10, 11))
    return shadow


def held(shadow: ShadowGroup, *slots: int) -> list[tuple[int, int]]:
    writer, position = shadow.read(ints(*slots))
    return list(zip(writer.tolist(), position.tolist(), strict=True))


def test_a_cell_remembers_its_last_writer(shadow: ShadowGroup) -> None:
    assert held(shadow, 7, 10) == [(0, 1), (0, 2)]
    shadow.write(ints(1), ints(9), ints(10))
    assert held(shadow, 7, 10) == [(0, 1), (1, 9)]


def test_a_new_owner_finds_nothing(shadow: ShadowGroup) -> None:
    shadow.admit(1, ints(5), adopted=0)
    assert held(shadow, 7, 10, 11) == [(0, 1), (NOBODY, -1), (NOBODY, -1)]


def test_an_adopted_block_keeps_what_it_holds(shadow: ShadowGroup) -> None:
    shadow.admit(1, ints(3, 4), adopted=1)
    assert held(shadow, 6, 7) == [(0, 0), (0, 1)]
    shadow.extend(1, ints(3, 4, 5))
    assert held(shadow, 10, 11) == [(NOBODY, -1), (NOBODY, -1)]


def test_a_block_that_is_replaced_in_the_middle_of_a_table_is_new(shadow: ShadowGroup) -> None:
    shadow.write(ints(1), ints(4), ints(8))
    shadow.extend(0, ints(4, 5))
    assert held(shadow, 8, 10) == [(NOBODY, -1), (0, 2)]


def test_slots_outside_the_pool_hold_and_change_nothing(shadow: ShadowGroup) -> None:
    shadow.write(ints(1, 1, 1), ints(8, 9, 7), ints(-1, 16, 6))
    assert held(shadow, -1, 16, 1 << 40, 6, 15) == [(NOBODY, -1), (NOBODY, -1), (NOBODY, -1), (1, 7), (NOBODY, -1)]


def test_copy_on_write_takes_the_cells_along(shadow: ShadowGroup) -> None:
    shadow.copy_block(5, 1)
    assert held(shadow, 2, 3) == [(0, 2), (0, 3)]


def test_slots_beyond_a_table_are_padded() -> None:
    table = ints(3, 5)
    assert Tables([table, ints(1)], 2).slots(ints(0, 0, 1, 1), ints(1, 2, 1, 2)).tolist() == [7, 10, 3, -1]
    maps = [slot_map(table, 2), slot_map(ints(1), 2)]
    assert stretch(maps, [1, 1], [3, 4]).tolist() == [7, 10, 3, -1, -1]


def gather(shadow: ShadowGroup, position: list[int], lists: list[list[int]], lens: list[int]) -> Gathers:
    queries = Queries(np.zeros(len(position), np.int32), ints(*position))
    tables = Tables([ints(3, 5)], 2)
    return gathers_from_indices("paged", queries, ints(*lists, kind=np.int32), ints(*lens), tables, shadow)


def runs(gathers: Gathers) -> list[tuple[int, int, int]]:
    return list(zip(gathers.position.tolist(), gathers.first.tolist(), gathers.last.tolist(), strict=True))


def cells(gathers: Gathers) -> list[tuple[int, int, int, int]]:
    columns = (gathers.cell_position, gathers.cell_slot, gathers.cell_writer, gathers.cell_written)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_a_regular_list_is_one_run_a_query(shadow: ShadowGroup) -> None:
    gathers = gather(shadow, [2, 3], [[7, 10, -1], [7, 10, 11]], [2, 3])
    assert runs(gathers) == [(2, 1, 2), (3, 1, 3)]
    assert cells(gathers) == [(1, 7, 0, 1), (2, 10, 0, 2), (3, 11, 0, 3)]


def test_a_hole_makes_two_runs(shadow: ShadowGroup) -> None:
    gathers = gather(shadow, [3], [[7, -1, 11]], [3])
    assert runs(gathers) == [(3, 1, 1), (3, 3, 3)]
    assert cells(gathers) == [(1, 7, 0, 1), (2, -1, NOBODY, -1), (3, 11, 0, 3)]


def test_a_filler_inside_the_length_is_read(shadow: ShadowGroup) -> None:
    gathers = gather(shadow, [2, 3], [[-1, 7, 10], [7, 10, 11]], [3, 3])
    assert runs(gathers) == [(2, 1, 2), (3, 1, 3)]
    assert (0, -1, NOBODY, -1) in cells(gathers)


def test_a_stale_entry_past_the_length_is_read_past_the_query(shadow: ShadowGroup) -> None:
    gathers = gather(shadow, [2], [[7, 10, 6]], [2])
    assert runs(gathers) == [(2, 1, 3)]
    assert cells(gathers)[-1] == (3, 6, 0, 0)


def test_a_foreign_slot_is_seen_where_it_is_read(shadow: ShadowGroup) -> None:
    gathers = gather(shadow, [2, 3], [[7, 10, -1], [7, 4, 11]], [2, 3])
    assert runs(gathers) == [(2, 1, 2), (3, 1, 3)]
    assert (2, 4, NOBODY, -1) in cells(gathers)
    assert (2, 10, 0, 2) in cells(gathers)


def test_an_empty_list_reads_nothing(shadow: ShadowGroup) -> None:
    gathers = gather(shadow, [2, 3], [[-1, -1, -1], [7, 10, 11]], [0, 3])
    assert runs(gathers) == [(2, 3, 2), (3, 1, 3)]
