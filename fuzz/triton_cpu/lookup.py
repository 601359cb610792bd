# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""What a checked kernel calls when a glance does not do, and the table of i64 words that both sides share.

The table: a header, records of the first faults, then a row for each tensor. ``memory`` fills in the rows and reads the
records. Written in LLVM's own language: it has to be machine code, and there is no compiler to rely upon but LLVM.
"""

from __future__ import annotations

COUNT, FIRST_STAMP, KNOWN, ARGUMENTS = range(4)
"""Header: faults so far; stamp of this launch's program 0 (programs count on from there); past the last number of a
known tensor; past the last number of an argument."""
RECORDS, RECORD, MAX_RECORDS = 4, 10, 8
KIND, SITE, NUMBER, ADDRESS, VALUE, PROGRAM, LANE, OTHER, OLD = range(9)
"""A record. OTHER: of a race the other program, else whether the lane is active. OLD: of a race, what was there."""
OUTSIDE, FORBIDDEN, RACE = range(3)
ROWS, ROW = RECORDS + RECORD * MAX_RECORDS, 8
BASE, SIZE, PLAIN, SHADOW, SCALE, MARKS, GRAIN, MARKED = range(8)
"""A row: storage address and bytes; bytes that need no second look (SIZE, or 0 where some are marked); the address of
the last writers' stamps, and by how many bits an offset is shifted to get at one; the address of the marks (0: none),
bytes that one stands for, and the address that the first one stands for, which is not past BASE."""
NOWHERE, FIRST_KNOWN = 0, 64
"""Numbers: of what an address in no tensor came from, and of the first tensor that is no argument of the launch; the
pointer arguments are numbered from 1 on."""
PREFIX = "replaycheck_"

_HELPERS = (
    f"""
define internal ptr @word(i64 %table, i64 %number) {{
  %place = shl i64 %number, 3
  %address = add i64 %table, %place
  %pointer = inttoptr i64 %address to ptr
  ret ptr %pointer
}}

define internal i64 @cell(i64 %table, i64 %number, i64 %word) {{
  %row = mul i64 %number, {ROW}
  %start = add i64 %row, {ROWS}
  %place = add i64 %start, %word
  %pointer = call ptr @word(i64 %table, i64 %place)
  %value = load i64, ptr %pointer
  ret i64 %value
}}

define internal void @record(i64 %table, i64 %kind, i32 %number, i64 %address, i64 %value, i32 %site, i64 %program,
                             i64 %lane, i64 %other, i64 %old) {{
  %at = call ptr @word(i64 %table, i64 {COUNT})
  %count = load i64, ptr %at
  %more = add i64 %count, 1
  store i64 %more, ptr %at
  %room = icmp ult i64 %count, {MAX_RECORDS}
  br i1 %room, label %write, label %done
write:
  %offset = mul i64 %count, {RECORD}
  %place = add i64 %offset, {RECORDS}
  %row = call ptr @word(i64 %table, i64 %place)
  %wide_site = zext i32 %site to i64
  %wide_number = zext i32 %number to i64
"""
    + "".join(
        f"""
  %at{word} = getelementptr i64, ptr %row, i64 {word}
  store i64 %{name}, ptr %at{word}"""
        for word, name in enumerate(
            ("kind", "wide_site", "wide_number", "address", "value", "program", "lane", "other", "old")
        )
    )
    + """
  br label %done
done:
  ret void
}
"""
)

_FIND = f"""
define i32 @{PREFIX}find(i64 %table, i64 %address) {{
  %known = call i32 @search(i64 %table, i64 %address, i64 {FIRST_KNOWN}, i64 {KNOWN})
  %unknown = icmp eq i32 %known, {NOWHERE}
  br i1 %unknown, label %other, label %done
done:
  ret i32 %known
other:
  %argument = call i32 @search(i64 %table, i64 %address, i64 1, i64 {ARGUMENTS})
  ret i32 %argument
}}

define internal i32 @search(i64 %table, i64 %address, i64 %first, i64 %end_word) {{
  %end_at = call ptr @word(i64 %table, i64 %end_word)
  %end = load i64, ptr %end_at
  br label %head
head:
  %number = phi i64 [ %first, %0 ], [ %next, %again ]
  %past = icmp uge i64 %number, %end
  br i1 %past, label %none, label %try
try:
  %base = call i64 @cell(i64 %table, i64 %number, i64 {BASE})
  %size = call i64 @cell(i64 %table, i64 %number, i64 {SIZE})
  %offset = sub i64 %address, %base
  %inside = icmp ult i64 %offset, %size
  br i1 %inside, label %found, label %again
again:
  %next = add i64 %number, 1
  br label %head
found:
  %narrow = trunc i64 %number to i32
  ret i32 %narrow
none:
  ret i32 {NOWHERE}
}}
"""

_ARGUMENTS = (
    "i64 %table, i32 %number, i64 %width, i64 %address, i64 %value, i32 %site, i64 %program, i64 %lane, i64 %other"
)

_LOOK = f"""
define i1 @{PREFIX}look({_ARGUMENTS}) {{
  %wide = zext i32 %number to i64
  %base = call i64 @cell(i64 %table, i64 %wide, i64 {BASE})
  %size = call i64 @cell(i64 %table, i64 %wide, i64 {SIZE})
  %offset = sub i64 %address, %base
  %starts = icmp ult i64 %offset, %size
  %rest = sub i64 %size, %offset
  %ends = icmp uge i64 %rest, %width
  %inside = and i1 %starts, %ends
  br i1 %inside, label %marks, label %outside
outside:
  call void @record(i64 %table, i64 {OUTSIDE}, i32 %number, i64 %address, i64 %value, i32 %site, i64 %program,
                    i64 %lane, i64 %other, i64 0)
  ret i1 false
marks:
  %map = call i64 @cell(i64 %table, i64 %wide, i64 {MARKS})
  %unmarked = icmp eq i64 %map, 0
  br i1 %unmarked, label %fine, label %marked
marked:
  %grain = call i64 @cell(i64 %table, i64 %wide, i64 {GRAIN})
  %start = call i64 @cell(i64 %table, i64 %wide, i64 {MARKED})
  %from = sub i64 %address, %start
  %upto = add i64 %from, %width
  %last_byte = sub i64 %upto, 1
  %first = udiv i64 %from, %grain
  %last = udiv i64 %last_byte, %grain
  br label %head
head:
  %mark = phi i64 [ %first, %marked ], [ %next, %again ]
  %left = icmp ule i64 %mark, %last
  br i1 %left, label %read, label %fine
read:
  %place = add i64 %map, %mark
  %pointer = inttoptr i64 %place to ptr
  %byte = load i8, ptr %pointer
  %free = icmp eq i8 %byte, 0
  br i1 %free, label %again, label %forbidden
again:
  %next = add i64 %mark, 1
  br label %head
forbidden:
  call void @record(i64 %table, i64 {FORBIDDEN}, i32 %number, i64 %address, i64 %value, i32 %site, i64 %program,
                    i64 %lane, i64 %other, i64 0)
  ret i1 false
fine:
  ret i1 true
}}
"""

_RACE = f"""
define void @{PREFIX}race({_ARGUMENTS}, i64 %old) {{
  %wide = zext i32 %number to i64
  %scale = call i64 @cell(i64 %table, i64 %wide, i64 {SCALE})
  %room = shl i64 %width, %scale
  %told_apart = icmp uge i64 %room, 4
  br i1 %told_apart, label %tell, label %done
tell:
  call void @record(i64 %table, i64 {RACE}, i32 %number, i64 %address, i64 %value, i32 %site, i64 %program,
                    i64 %lane, i64 %other, i64 %old)
  br label %done
done:
  ret void
}}
"""

CODE = _HELPERS + _FIND + _LOOK + _RACE
"""A module. ``find`` gives the number of the tensor that an address lies in; ``look`` whether an access is allowed, and
records it if not; ``race`` records one, unless the writers of neighbours narrower than a stamp cannot be told apart."""
