# SPDX-License-Identifier: Apache-2.0
"""The process that `reconciler serve` is, from its first signal handler to its last line: what runs is the daemon's."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Final

import structlog

from reconciler.configuration.settings import Settings
from reconciler.serving.daemon import DRAIN_SECONDS, Daemon, Only
from reconciler.serving.process import stop_on_signals, take_ports, unless_stopped, urls_of
from reconciler.serving.reload import reload_on
from reconciler.serving.workers import follow_parent
from webhooks.fetch import open_fetch
from webhooks.receiver import make_runner

_log: Final = structlog.get_logger()


def calm_collector() -> None:
    """Let the garbage collector leave alone what was loaded, and look rarely: a request leaves no cycles behind."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


async def serve(
    settings: Settings, only: Only = None, read: Callable[[], Settings] | None = None, worker: int = 0
) -> None:
    """Serve until SIGTERM or SIGINT, then end what was begun and return; a second signal exits at once.

    `only` leaves out the other half. `read` gives the settings anew at a SIGHUP, which ends it without. `worker` is
    the number of one of several receivers that share the port (`workers`). Raises UserError where a person must help:
    port in use, account or database name refused, old schema. A database that is away is waited for.
    """
    daemon = Daemon(settings, only)
    if worker:
        structlog.contextvars.bind_contextvars(worker=worker)
        daemon.health.shared_port = settings.receiver.port
    async with AsyncExitStack() as stack:  # left from the end: the last thing entered is the first to stop
        hung_up = asyncio.Event() if read else None
        stop = stop_on_signals(stack, hung_up)
        if worker and hung_up:
            follow_parent(stop, hung_up)
        stack.push_async_callback(daemon.traced.close)
        stack.push_async_callback(daemon.close)
        fetch = await stack.enter_async_context(open_fetch())
        runner = make_runner(daemon.app(fetch), DRAIN_SECONDS)
        stack.push_async_callback(runner.cleanup)
        stack.push_async_callback(runner.wind_down)
        servers = await take_ports(stack, runner, settings, worker)
        stack.callback(daemon.drain)
        if read and hung_up:
            reloading = asyncio.create_task(reload_on(hung_up, read, settings, daemon.take), name="reload")
            stack.callback(reloading.cancel)
        calm_collector()
        await unless_stopped(stop, daemon.open(partial(_tell_feeds, settings, only, urls_of(servers)), servers))
        await stop.wait()
        _log.info("stopping")
    _log.info("stopped")


def _tell_feeds(settings: Settings, only: Only, urls: list[str]) -> None:
    _log.info("serving", urls=urls, only=only or "all", database=settings.database_in_use())
    if not settings.feeds:
        _log.warning("no_feed", hint="nothing is ever heard without one: add [feeds.NAME] to the settings")
    if only == "reconciler":
        return
    base = settings.receiver.public_url or urls[0]
    for name, feed in settings.feeds.items():
        _log.info("feed_configured", feed=name, provider=feed.provider, url=f"{base}/webhooks/{name}")
    for warning in settings.warnings():
        _log.warning("configuration_warning", text=warning)
