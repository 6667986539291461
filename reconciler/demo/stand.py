# SPDX-License-Identifier: Apache-2.0
"""What the demo runs of the product: a database of its own, the receiver, and later the passes. All is gone at the end.

They are the parts of `reconciler serve --only receiver` and `--only reconciler`, in this process.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Final

from reconciler import composition
from reconciler.configuration.settings import Settings
from reconciler.configuration.tables import (
    DatabaseSettings,
    FeedRuleSettings,
    FeedSettings,
    ReceiverSettings,
    ReconcileSettings,
)
from reconciler.database.postgres import EmbeddedPostgres
from reconciler.serving.daemon import Daemon
from reconciler.serving.process import take_ports, urls_of
from webhooks.database import BoundedPool
from webhooks.fetch import open_fetch
from webhooks.receiver import make_runner

FEED: Final = "demo"
PROVIDER: Final = "mailgun"

GRACE: Final = timedelta(seconds=3)
"""Instead of 15 minutes; longer than any webhook of the demo's provider takes."""

EVERY: Final = timedelta(seconds=1)
"""Between two passes, instead of 15 s."""

CLOSE_SECONDS: Final = 1.0
SENDERS_CONNECTIONS: Final = 10


@contextmanager
def folder() -> Iterator[Path]:
    """Give a folder for the database; at the end no server runs in it, and it is removed."""
    root = Path(tempfile.mkdtemp(prefix="reconciler-demo-"))
    try:
        yield root
    finally:
        EmbeddedPostgres(root).remove()


def settings_in(root: Path, secret: str) -> Settings:
    """Return the demo's settings. What they don't name is as in production: all limits, and the ceiling of the risk."""
    return Settings(
        database=DatabaseSettings(data_dir=root),
        receiver=ReceiverSettings(port=0),
        feeds={FEED: FeedSettings(provider=PROVIDER, secrets=(secret,))},
        rules=FeedRuleSettings(grace=GRACE),
        reconcile=ReconcileSettings(every=EVERY),
    )


@asynccontextmanager
async def senders_pool(settings: Settings) -> AsyncIterator[BoundedPool]:
    """Start the database, with its schema, and give what a sender has of it."""
    async with composition.open_database(settings) as database:
        pool = await composition.open_pool(database.dsn, size=SENDERS_CONNECTIONS, application="reconciler demo")
        try:
            yield pool
        finally:
            await composition.close_pool(pool)


@asynccontextmanager
async def receiving(settings: Settings) -> AsyncIterator[str]:
    """Take webhooks, and give the URL to which the provider posts them."""
    daemon = Daemon(settings, "receiver")
    async with AsyncExitStack() as stack:
        stack.push_async_callback(daemon.close)
        fetch = await stack.enter_async_context(open_fetch())
        runner = make_runner(daemon.app(fetch), CLOSE_SECONDS)
        stack.push_async_callback(runner.cleanup)
        stack.push_async_callback(runner.wind_down)
        servers = await take_ports(stack, runner, settings)
        stack.callback(daemon.drain)
        await daemon.open(_tell_nobody, servers)
        yield f"{urls_of(servers)[0]}/webhooks/{FEED}"


@asynccontextmanager
async def deciding(settings: Settings) -> AsyncIterator[None]:
    """Run passes."""
    daemon = Daemon(settings, "reconciler")
    try:
        await daemon.open(_tell_nobody)
        yield
    finally:
        await daemon.close()


def _tell_nobody() -> None:
    """Stand where `serve` logs its addresses."""
