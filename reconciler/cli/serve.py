# SPDX-License-Identifier: Apache-2.0
"""`reconciler serve`: the long-running process."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from reconciler.cli.root import App, Command

if TYPE_CHECKING:
    from reconciler.serving.daemon import Only


@click.command(cls=Command, epilog="Example: reconciler --config reconciler.toml serve")
@click.option("--only", type=click.Choice(["receiver", "reconciler"]), help="Run just this half.")
@click.option(
    "--workers",
    type=click.IntRange(1, 64),
    default=1,
    metavar="N",
    help="Receivers, each a process, that share receiver.port; figures are at the N ports above it.",
)
@click.option("--worker", type=int, default=0, hidden=True)
@click.pass_obj
def serve(app: App, only: Only, workers: int, worker: int) -> None:
    """Receive events and decide about sends, until SIGTERM or Ctrl-C. SIGHUP reads the settings again.

    Logs go to stderr. Without database.url it brings up its own PostgreSQL in database.data_dir.
    """
    if workers > 1 and only != "receiver":
        raise click.UsageError("--workers needs --only receiver: passes and the API are another process's")
    app.configure_logs()
    if workers > 1:
        _serve_with_workers(app, workers)
    else:
        _serve(app, only, worker)


def _serve_with_workers(app: App, count: int) -> None:
    from reconciler.serving.workers import WorkersEnded, serve_with_workers

    config = ["--config", str(app.config)] if app.config else []
    # -P: nothing is imported from the folder that this happens to be started in.
    command = [sys.executable, "-P", "-m", "reconciler", *config, "serve", "--only", "receiver"]
    try:
        asyncio.run(serve_with_workers(app.settings, count, command))
    except WorkersEnded:
        sys.exit(1)


def _serve(app: App, only: Only, worker: int) -> None:
    from reconciler.serving import serve as serving

    loop_factory = None
    if sys.platform != "win32":
        import uvloop

        loop_factory = uvloop.new_event_loop
        _allow_connections()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(serving.serve(app.settings, only, app.read_settings, worker))


def _allow_connections() -> None:
    """Take all descriptors that we may have: without a free one the receiver is deaf, and uvloop says nothing of it."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
