# SPDX-License-Identifier: Apache-2.0
"""The command line: `reconciler COMMAND`. One module a family of commands, all of them hung on `root.cli`."""

from __future__ import annotations

import io
import sys

from reconciler.cli import database, inspect, operate, reconcile, serve, trigger
from reconciler.cli.root import cli

__all__ = ["cli", "main"]

for command in (
    serve.serve,
    reconcile.reconcile,
    inspect.status,
    inspect.why,
    operate.release,
    operate.confirm,
    operate.fail,
    operate.pause,
    operate.resume,
    trigger.trigger,
    database.migrate,
    database.psql,
    inspect.providers,
    inspect.config,
):
    cli.add_command(command)


def main() -> None:
    """Run the command that the program's arguments name, and exit with its status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8 must not end the command
    cli(prog_name="reconciler")
