# SPDX-License-Identifier: Apache-2.0
"""Says that a replay or back-fill of a feed is running: until it has ended the feed's silence means nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Final

import asyncpg

LEASE: Final = timedelta(seconds=60)
"""How long the word of a process that was killed holds."""

RENEW_SECONDS: Final = 20.0

SET_FILLING: Final = """
INSERT INTO feed_state (feed, filling_until) VALUES ($1, clock_timestamp() + $2)
ON CONFLICT (feed) DO UPDATE SET filling_until = greatest(feed_state.filling_until, excluded.filling_until)
"""


@asynccontextmanager
async def filling(pool: asyncpg.Pool, feed: str) -> AsyncIterator[None]:
    """Keep a feed marked while something is read into it. The mark ends by itself, a lease after the last renewal."""
    await pool.execute(SET_FILLING, feed, LEASE)
    renewing = asyncio.create_task(_renew(pool, feed), name="filling")
    try:
        yield
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)


async def _renew(pool: asyncpg.Pool, feed: str) -> None:
    while True:
        await asyncio.sleep(RENEW_SECONDS)
        with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):  # what is being read fails by itself
            await pool.execute(SET_FILLING, feed, LEASE)
