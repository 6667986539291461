# SPDX-License-Identifier: Apache-2.0
"""What all have in common who read into the stored events: an inbox, and a mark on the feed.

While a replay or back-fill of a feed runs, the feed's silence means nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Final

import asyncpg

from reconciler.errors import UserError
from webhooks.event import Event
from webhooks.inbox import LONGEST_SECONDS, Inbox, InboxBusy, InboxUnavailable, Stored

LEASE: Final = timedelta(seconds=60)
"""How long the word of a process that was killed holds."""

RENEW_SECONDS: Final = 20.0

BATCH: Final = 500
"""Events that are stored at a time."""

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


@asynccontextmanager
async def opened_inbox(pool: asyncpg.Pool) -> AsyncIterator[Inbox]:
    """Yield an inbox that stores what was asked for or read again; it takes one of the pool's connections."""
    inbox = Inbox(seconds=LONGEST_SECONDS)
    await inbox.open(pool)
    try:
        yield inbox
    finally:
        await inbox.close()


async def store(inbox: Inbox, feed: str, events: Sequence[Event], source: str) -> Stored:
    """Store events. Raises UserError where the database can't."""
    try:
        return await inbox.store(feed, events, source)
    except (InboxBusy, InboxUnavailable) as error:
        raise UserError(f"the database could not store ({error}): run the same command again, it goes on") from None
