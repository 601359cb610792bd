# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Replay is on exactly where configuration and architecture say so, and the published KV-cache spec says the same."""

from __future__ import annotations

from collections.abc import Iterator

from invariants.trace import PAD_SLOT, Gate, Group, Violation
from invariants.view import View, examples


def replays(gate: Gate) -> bool:
    """Whether bounded replay has to be on in these circumstances (CONTRACT 3)."""
    possible = gate.runner == 2 and (gate.context_parallel == 1 or gate.prefix_caching)
    return gate.asked and possible and gate.architecture != "CDNA3"


def as_the_contract(gate: Gate) -> bool:
    """Whether vLLM's answer is what it has to be: the window out of the prefix cache and W tokens replayed, or neither
    (CONTRACT 1)."""
    on = replays(gate)
    return (gate.prefix_cacheable, gate.replay_tokens) == (not on, gate.window if on else 0)


def gating(view: View) -> Iterator[Violation]:
    """On: the window is out of the prefix cache and W tokens are replayed. Off: neither (CONTRACT 1, 3)."""
    trace = view.trace
    on = "on" if view.replay else "off"
    if view.replay and not trace.geometry.replay:
        message = "replay is expected to be on, though it was not asked for"
        yield Violation("gating", message, expected="off", seen="on", site="replay_expected")
    kinds = {group.kind for group in trace.groups}
    for kind in ("cacheable", "window"):
        if kind not in kinds:
            yield Violation("gating", f"no {kind} group is published", expected="one", seen="none", site=kind)
    for index, group in enumerate(trace.groups):
        wanted = (True, 0) if group.kind == "cacheable" else (not view.replay, view.replay)
        if (group.prefix_cacheable, group.replay_tokens) != wanted:
            yield Violation(
                "gating",
                f"replay is {on} (window {trace.geometry.window}), but {group.kind} group {index} publishes otherwise",
                expected=_spec(*wanted),
                seen=_spec(group.prefix_cacheable, group.replay_tokens),
                site=f"group {index}",
            )
    if not view.replay:
        yield from _no_replay(view, trace.groups)


def _no_replay(view: View, groups: list[Group]) -> Iterator[Violation]:
    """With replay off nothing is replayed and every computed token writes its cacheable KV."""
    trace = view.trace
    for life in trace.admissions:
        if life.replay_start:
            yield Violation(
                "gating",
                f"replay is off, but a hit of {life.hit} tokens is replayed from {life.replay_start} on",
                expected="replay_start 0",
                seen=f"replay_start {life.replay_start}",
                request=trace.requests[life.request].id,
                step=life.step,
                site="replay_start",
            )
    for index, group in enumerate(groups):
        if group.kind != "cacheable":
            continue
        stores = view.stores(index)
        for token, more in examples(stores.slot == PAD_SLOT):
            at = stores.row[token], stores.position[token]
            message = f"replay is off, but token {at[1]} writes nothing into cacheable group {index}{more}"
            yield view.violation("gating", f"group {index}", at, message, "a slot", f"slot {PAD_SLOT}")


def _spec(cacheable: bool, replayed: int) -> str:
    return f"prefix-cacheable {'yes' if cacheable else 'no'}, prefix_replay_tokens {replayed}"
