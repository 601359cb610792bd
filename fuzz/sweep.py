# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""``replaycheck sweep``: hit tokens of prompts asked twice, across the prefill-chunk boundary, next to published ones.

A replica is a run of its own, with text of its own, on a fresh engine state; hits are counted by vLLM's own metric.
What is expected comes from ``invariants.reference``, not from the published table, and every trace is judged as well.

The published numbers with replay off are not reproduced: from 2,048 tokens up they are 128 less than with replay on,
all eight replicas together (16,256 = 8 * 2,048 - 128). Hits end on multiples of the scheduler block, which is 128 here
and in DeepSeek-V4.1's own layout (four window groups of ten layers, one cacheable group, one ring of compressor states,
as vLLM plans them from the model's cache objects), so seven replicas lost nothing and one lost a block, which no layout
does to equal replicas asked the same. Measured on that layout, too, a prompt asked twice loses nothing, whatever the
retention interval, with DSpark's and MTP's scheduler settings, and with both requests in flight at once. What can cost
one replica a block is another past. vLLM keeps the window only before the last boundary that a prompt sent again can
hit: where a replica has cached the bare prefix, and not the longer prompt, the next request hits 128 less, once, and
with replay on it does not. ``tests/test_sweep.py`` has a past of that kind that gives both published columns; that the
published run had one is not known.
"""

from __future__ import annotations

import argparse
import math
import shlex
import time
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec
from rich.table import Table

from fuzz import options, report
from fuzz.case import Case, Provenance, Request, Slice
from fuzz.engines.base import Engine, Refused
from fuzz.run import CannotRun, Judged, Tally, keep, open_engine, run_case
from invariants import reference
from invariants.trace import Geometry

Arm = Literal["replay", "no-replay"]
ARMS: Final[tuple[Arm, ...]] = ("replay", "no-replay")

PUBLISHED_REPLICAS: Final = 8
NEW_TOKENS: Final = 128
LATER: Final = 64
"""Step before which the second request arrives: the first is over by then."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """A prompt, and a second one that begins as it does. Lengths in tokens."""

    name: str
    prefix: int
    """What the published table calls prefix, or the part of it that is asked again."""
    first: int
    second: int
    common: int
    """Tokens that both prompts begin with."""
    published: dict[Arm, int]
    """Hit tokens of all eight replicas together."""

    def case(self, geometry: Geometry, replica: int) -> Case:
        """What one replica is asked."""
        text = f"replica{replica}"
        again: tuple[Slice, ...] = ((text, 0, self.common),)
        if self.second > self.common:
            again = (*again, (f"{text}-other", 0, self.second - self.common))
        return Case(
            geometry=geometry,
            requests=(
                Request(id="first", arrive=0, prompt=((text, 0, self.first),)),
                Request(id="again", arrive=LATER, prompt=again),
            ),
            provenance=Provenance(note=f"sweep: {self.name}, replica {replica}"),
        )

    def expected(self, geometry: Geometry) -> int:
        """Hit tokens of one replica."""
        unit = math.lcm(geometry.block_size, geometry.swa_block_size)
        hit = reference.full_hit(self.common, self.second, unit)
        return reference.adopted_hit(hit, geometry.window if geometry.replay else 0)


def _twice(name: str, prefix: int, length: int, published: dict[Arm, int]) -> Measurement:
    return Measurement(name, prefix, first=length, second=length, common=length, published=published)


@dataclass(frozen=True, slots=True)
class Sweep:
    """What was measured on a model, and its sizes."""

    geometry: Geometry
    measurements: tuple[Measurement, ...]


SWEEPS: Final[dict[str, Sweep]] = {
    "dsv41": Sweep(
        Geometry(
            window=128,
            block_size=128,
            swa_block_size=32,
            num_blocks=512,
            max_num_batched_tokens=2048,
            max_num_seqs=8,
        ),
        (
            *(
                _twice(f"prefix {prefix:,}", prefix, prefix + NEW_TOKENS, {"replay": on, "no-replay": off})
                for prefix, off, on in (
                    (1920, 15360, 15360),
                    (2048, 16256, 16384),
                    (2176, 17280, 17408),
                    (4096, 32640, 32768),
                )
            ),
            _twice("vault code, 3,027 twice", 3027, 3027, {"replay": 23552}),
            Measurement("vault code, 1,800 of 2,176", 1800, 2176, 1800 + 27, 1800, {"replay": 14336}),
        ),
    )
}
"""Profile to its published measurements."""


@dataclass(slots=True)
class Row:
    """One measurement in one arm, as far as it was run."""

    arm: Arm
    measurement: Measurement
    geometry: Geometry
    hits: list[int] = field(default_factory=list)
    """Hit tokens, replica by replica."""

    @property
    def expected(self) -> int:
        """Hit tokens of the replicas that were run."""
        return self.measurement.expected(self.geometry) * len(self.hits)

    @property
    def right(self) -> bool:
        """Whether each replica that was run hit what is expected."""
        return all(hit == self.measurement.expected(self.geometry) for hit in self.hits)

    @property
    def as_published(self) -> bool | None:
        """None unless as many replicas were run as published."""
        if len(self.hits) != PUBLISHED_REPLICAS:
            return None
        return sum(self.hits) == self.measurement.published[self.arm]

    def run(self, engine: Engine) -> Judged:
        """Run one more replica. Raises ``CannotRun``."""
        try:
            judged = run_case(engine, self.measurement.case(self.geometry, len(self.hits)))
        except Refused as refused:
            raise CannotRun(f"vLLM refuses the sweep's geometry: {refused}") from refused
        metrics = judged.trace.metrics if judged.trace else {"prefix_cache_hits": 0}
        if "prefix_cache_hits" not in metrics:
            raise CannotRun(f"engine '{engine.name}' does not count prefix-cache hits")
        self.hits.append(metrics["prefix_cache_hits"])
        return judged


def plan(sweep: Sweep) -> list[Row]:
    """A row for everything that was published, nothing run yet."""
    return [
        Row(arm, measurement, msgspec.structs.replace(sweep.geometry, replay=arm == "replay"))
        for arm in ARMS
        for measurement in sweep.measurements
        if arm in measurement.published
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``replaycheck sweep``."""
    options.add_engine(parser)
    parser.add_argument("--profile", choices=SWEEPS, default="dsv41", help="whose numbers (default: %(default)s)")
    parser.add_argument(
        "--replicas",
        type=options.positive(int),
        default=PUBLISHED_REPLICAS,
        metavar="N",
        help="independent replicas, each asked twice (default: %(default)s, as published)",
    )
    options.add_json(parser)


def command(args: argparse.Namespace) -> int:
    """Sweep. 0: as expected; 1: a shortfall, a surplus or a broken invariant; 2: could not run, or was broken off."""
    started = time.monotonic()
    engine = open_engine(args.engine)
    rows = plan(SWEEPS[args.profile])
    tally, interrupted = Tally(), False
    with report.Meter(f"{args.engine}, {args.profile}", args.replicas * len(rows), None, started) as progress:
        try:
            for row in rows:
                for _ in range(args.replicas):
                    judged = row.run(engine)
                    tally.add(judged)
                    if set(judged.keys).difference(*(finding.judged.keys for finding in tally.findings)):
                        tally.findings.append(keep(judged, engine, seed=None))
                    progress(tally)
        except KeyboardInterrupt:
            interrupted = True
    tally.seconds = time.monotonic() - started
    _print(args, rows, tally, report.versions(engine), interrupted)
    options.write_json(args.json, [_json(row) for row in rows])
    if any(finding.is_violation for finding in tally.findings):
        return 1
    if tally.findings:
        return 2
    if not all(row.right for row in rows):
        return 1
    return 2 if interrupted else 0


def _print(
    args: argparse.Namespace, rows: list[Row], tally: Tally, versions: dict[str, str], interrupted: bool
) -> None:
    """The table, then each finding in full; the last line of a failure is a command that shows it again."""
    shown = Table("arm", "asked twice", "replicas", "hit tokens", "expected", f"published ({PUBLISHED_REPLICAS})", "")
    for row in rows:
        numbers = (len(row.hits), sum(row.hits), row.expected, row.measurement.published[row.arm])
        shown.add_row(row.arm, row.measurement.name, *(f"{number:,}" for number in numbers), _verdict(row))
    for column in shown.columns:
        column.overflow = "fold"
    report.console().print(shown)
    print(f"{tally.cases} cases, {tally.requests} requests, {tally.gathers} gathers judged in {tally.seconds:.1f} s")
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    if any(row.as_published is False and row.right for row in rows):
        print("not reproduced: one replica of eight lost a block in the published run; see fuzz/sweep.py for what can")
    if interrupted:
        print("broken off: what is above is what was done until then")
    for finding in tally.findings:
        print(f"\n{'-' * 20} {finding.judged.violations[0].invariant}")
        print(report.failure_text(finding.judged, finding.path, versions))
    if not tally.findings and not all(row.right for row in rows):
        arguments = ("--engine", args.engine, "--profile", args.profile, "--replicas", str(args.replicas))
        print(shlex.join(["replaycheck", "sweep", *arguments]))


def _verdict(row: Row) -> str:
    if not row.hits:
        return "not run"
    if not row.right:
        return f"WRONG: {', '.join(map(str, row.hits))}"
    return {True: "as published", False: "not reproduced", None: "as expected"}[row.as_published]


def _json(row: Row) -> dict[str, Any]:
    return {
        "arm": row.arm,
        "prefix": row.measurement.prefix,
        "replicas": len(row.hits),
        "hits": sum(row.hits),
        "expected_hits": row.expected,
        "answers_right": None,  # no model answers on the engines there are
        "measurement": row.measurement.name,
        "hits_by_replica": row.hits,
        "published_hits": row.measurement.published[row.arm],
        "as_published": row.as_published,
    }
