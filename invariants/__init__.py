# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""Judges traces. Each invariant is a function from a trace to the violations it finds; its id is stable.

To add one: a function in a file of its own (or of its family), and a line in ``INVARIANTS``.
"""
