# SPDX-License-Identifier: Apache-2.0
"""The command line: `reconciler COMMAND`. This module imports no other: Ctrl-C may come while `main` does."""

from __future__ import annotations

import io
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command that the program's arguments name, and exit with its status."""
    try:
        from reconciler.cli.commands import cli

        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8 must not end the command
        cli(prog_name="reconciler")
    except KeyboardInterrupt:  # outside of any command: those say so themselves
        sys.stderr.write("reconciler: interrupted\n")
        sys.exit(130)
