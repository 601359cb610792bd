# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the replaycheck project
"""The command ``replaycheck``. A command is a module with ``add_arguments(parser)`` and ``command(args) -> int``.

To add one: that module, and a line in ``COMMANDS``. Only the module of the command asked for is imported, so that
``--help`` is there at once. Whatever cannot be done is one line on standard error, never a traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final, Never

COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "doctor": ("fuzz.doctor", "what this machine has, and which engines can run here"),
    "run": ("fuzz.explore", "make cases, run and judge them, keep what breaks an invariant"),
    "replay": ("fuzz.replay", "run kept cases again: FIXED, FAILED or ERROR"),
    "sweep": ("fuzz.sweep", "hit tokens across prefix lengths, against published numbers"),
    "bench": ("fuzz.bench", "how fast it is, as ratios"),
    "mutants": ("fuzz.mutants", "break vLLM on purpose, and see which invariant notices"),
    "compile": ("fuzz.compile", "vLLM's kernels as AMD machine code: do they compile, do they spill"),
}
"""Command to (module, what it does)."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Never:
        self.exit(2, f"replaycheck: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: the process's). Returns 0: clean, 1: a finding, 2: could not run."""
    try:
        return _main(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:
        print("replaycheck: interrupted", file=sys.stderr)
    except BrokenPipeError:
        # Whoever read our output has seen enough; nothing is left to be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 2


def _main(arguments: list[str]) -> int:
    parser = _Parser(
        prog="replaycheck",
        description="Fuzzing and invariant checks for prefix-cache replay in vLLM.",
        epilog="Exit codes: 0 clean, 1 a finding, 2 could not run.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, (module, title) in COMMANDS.items():
        subparser = commands.add_parser(name, help=title, description=title)
        if name == asked:
            import_module(module).add_arguments(subparser)
    args = parser.parse_args(arguments)

    from fuzz.engines.base import Unavailable
    from fuzz.run import CannotRun

    try:
        code: int = import_module(COMMANDS[args.command][0]).command(args)
    except (CannotRun, Unavailable) as error:
        print(f"replaycheck: {error}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
