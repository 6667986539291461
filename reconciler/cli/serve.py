# SPDX-License-Identifier: Apache-2.0
"""`reconciler serve`: the long-running process."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from typing import Literal

import click

from reconciler.cli.root import App, Command


@click.command(cls=Command, epilog="Example: reconciler serve --config reconciler.toml")
@click.option("--only", type=click.Choice(["receiver", "reconciler"]), help="Run just this half.")
@click.pass_obj
def serve(app: App, only: Literal["receiver", "reconciler"] | None) -> None:
    """Receive events and decide about sends, until SIGTERM or Ctrl-C. SIGHUP reads the settings again.

    Logs go to stderr. Without database.url it brings up its own PostgreSQL in database.data_dir.
    """
    app.configure_logs()
    from reconciler import daemon

    loop_factory = None
    if sys.platform != "win32":
        import uvloop

        loop_factory = uvloop.new_event_loop
        _allow_connections()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(daemon.serve(app.settings, only, app.read_settings))


def _allow_connections() -> None:
    """Take all descriptors that we may have: without a free one the receiver is deaf, and uvloop says nothing of it."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
