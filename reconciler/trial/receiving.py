# SPDX-License-Identifier: Apache-2.0
"""A receiver to be killed: the real one, on a free port of loopback."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Final

import asyncpg
from aiohttp import web

from reconciler.trial.job import Job, do, say
from reconciler.trial.sender import PROVIDER
from webhooks.counters import Counters
from webhooks.database import connect_pool
from webhooks.fetch import open_fetch
from webhooks.inbox import Inbox
from webhooks.intake import Intake
from webhooks.provider import Feed
from webhooks.receiver import add_receiver, make_runner

SERVING: Final = "serving"


def feeds(names: Iterable[str], secret: str) -> dict[str, Feed]:
    """Return the feeds of these names, whose deliveries are signed with the secret."""
    return {name: Feed(name, PROVIDER, (secret,)) for name in names}


async def receive(job: Job) -> str:
    """Take deliveries until there is a line on standard input, or its end."""
    pool = await connect_pool(job.dsn, size=2, application=job.application)
    try:
        async with _receiving(pool, feeds(job.feeds, job.secret)) as url:
            say(step=SERVING, url=url)
            await asyncio.to_thread(sys.stdin.readline)
    finally:
        pool.terminate()  # some of its connections may be broken
    return "done"


@asynccontextmanager
async def _receiving(pool: asyncpg.Pool, taken: dict[str, Feed]) -> AsyncIterator[str]:
    """Take deliveries for these feeds, and give the receiver's address."""
    inbox, app = Inbox(), web.Application()
    await inbox.open(pool)
    async with open_fetch() as fetch:
        add_receiver(app, taken, Intake(inbox, fetch, lambda: datetime.now(UTC), Counters()), fetch)
        runner = make_runner(app, shutdown_seconds=1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.wind_down()
            await runner.cleanup()
            await inbox.close()


if __name__ == "__main__":
    do(receive)
