# SPDX-License-Identifier: Apache-2.0
"""Asks providers' APIs: about one send (look-up, the second witness), or for all of a span of time (back-fill)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import asyncpg

from reconciler.errors import UserError
from reconciler.filling import filling
from webhooks.api import HttpApi, open_session
from webhooks.asking import Api, Query, Searches
from webhooks.event import Event
from webhooks.inbox import Inbox, InboxBusy, InboxUnavailable, Stored
from webhooks.lookup import Found, Sought, look_up
from webhooks.provider import Feed
from webhooks.registry import PROVIDERS

SLICE: Final = timedelta(hours=1)
"""How much of the span one question of a back-fill covers; after each the place is kept."""

BATCH: Final = 500
"""Events that are stored at a time."""


@asynccontextmanager
async def opened_api() -> AsyncIterator[Api]:
    """Yield a client for one feed's API."""
    async with open_session() as session:
        yield HttpApi(session, lambda: datetime.now(UTC))


@asynccontextmanager
async def opened_inbox(pool: asyncpg.Pool) -> AsyncIterator[Inbox]:
    """Yield an inbox that stores what was asked for or read again; it takes one of the pool's connections."""
    inbox = Inbox(seconds=60.0)
    await inbox.open(pool)
    try:
        yield inbox
    finally:
        await inbox.close()


async def store(inbox: Inbox, feed: str, events: list[Event], source: str) -> Stored:
    """Store events. Raises UserError where the database can't."""
    try:
        return await inbox.store(feed, events, source)
    except (InboxBusy, InboxUnavailable) as error:
        raise UserError(f"the database could not store ({error}): run the same command again, it goes on") from None


SOUGHT: Final = """
SELECT wire_key, feed, recipient, coalesce(first_claimed_at, created_at) AS claimed_at, state,
       coalesce(submit_by, first_claimed_at, created_at) AS submit_by, known_message_id, clock_timestamp() AS now
FROM send_log WHERE wire_key = wire_key($1)
"""

# The nearest later one has had the most time to show.
CONTROL: Final = """
SELECT s.wire_key, s.recipient, s.claimed_at, coalesce(s.submit_by, s.answered_at) AS submit_by, s.known_message_id
FROM control c JOIN send_log s USING (wire_key)
WHERE c.feed = $1 AND c.first_claimed_at >= $2 AND c.wire_key <> $3 AND s.recipient IS NOT NULL
ORDER BY c.first_claimed_at LIMIT 1
"""

NAMESPACE: Final = "SELECT namespace FROM installation"


@dataclass(frozen=True, slots=True)
class LookedUp:
    """What a provider's API said about one send."""

    wire_key: str
    feed: str
    state: str
    found: Found
    stored: Stored


async def look_up_send(pool: asyncpg.Pool, feeds: dict[str, Feed], key: str) -> LookedUp:
    """Ask the provider of a send's feed about it, and keep what it says as events. Raises UserError."""
    row = await pool.fetchrow(SOUGHT, key)
    if row is None:
        raise UserError(f"no send has the key {key}: reconciler why {key} says whether events do")
    if row["feed"] not in feeds:
        raise UserError(f"the send's feed {row['feed']} is not configured: add [feeds.{row['feed']}] to the settings")
    feed, sought = feeds[row["feed"]], _sought(row)
    control = await pool.fetchrow(CONTROL, feed.name, sought.submit_by, sought.wire_key)
    namespace = await pool.fetchval(NAMESPACE)
    async with opened_api() as api:
        found = await look_up(
            PROVIDERS[feed.provider], feed, api, sought, _sought(control) if control else None, row["now"], namespace
        )
    async with opened_inbox(pool) as inbox:
        stored = await store(inbox, feed.name, list(found.events), "look-up")
    return LookedUp(sought.wire_key, feed.name, row["state"], found, stored)


def _sought(row: asyncpg.Record) -> Sought:
    return Sought(
        row["wire_key"], row["claimed_at"], row["submit_by"], row["recipient"], message_id=row["known_message_id"]
    )


# A run that was broken off goes on where it was, if it lies in the same span.
GO_ON: Final = """
SELECT id, since, until, done_until, events, stored FROM backfill
WHERE feed = $1 AND ended_at IS NULL AND since <= $2 AND done_until >= $2 AND done_until < $3
ORDER BY id DESC LIMIT 1
"""
BEGIN: Final = """
INSERT INTO backfill (feed, since, until, done_until, who) VALUES ($1, $2, $3, $2, $4)
RETURNING id, since, until, done_until, events, stored
"""
ADVANCE: Final = """
UPDATE backfill SET done_until = $2, until = greatest(until, $5), events = events + $3, stored = stored + $4
WHERE id = $1 AND done_until < $2
"""
END: Final = "UPDATE backfill SET ended_at = clock_timestamp() WHERE id = $1"


@dataclass
class Backfilled:
    """How far a back-fill has come."""

    since: datetime
    until: datetime
    done_until: datetime
    resumed: bool = False
    events: int = 0
    stored: int = 0


Told = Callable[[Backfilled], None]


async def backfill(
    pool: asyncpg.Pool, feed: Feed, since: datetime, until: datetime, *, who: str, tell: Told = lambda _: None
) -> Backfilled:
    """Pull what a provider lists for a span of time into `provider_event`, slice by slice, and return what came.

    What is there already is not stored twice, so that it may be run again. A run that was broken off within the span
    is resumed. Raises UserError for a provider that lists nothing, ApiError for an API that fails.
    """
    provider = PROVIDERS[feed.provider]
    if not isinstance(provider, Searches) or not provider.facts.lists:
        raise UserError(f"{provider.facts.title} lists no events of a span of time: {provider.facts.look_up}")
    earlier = await pool.fetchrow(GO_ON, feed.name, since, until)
    run = earlier or await pool.fetchrow(BEGIN, feed.name, since, until, who)
    assert run is not None  # noqa: S101 - an INSERT returns its row
    done = Backfilled(since, until, run["done_until"], resumed=earlier is not None)
    async with filling(pool, feed.name), opened_inbox(pool) as inbox, opened_api() as api:
        while done.done_until < until:
            end = min(done.done_until + SLICE, until)
            events, stored = await _fill(provider, feed, api, inbox, Query(done.done_until, end))
            await pool.execute(ADVANCE, run["id"], end, events, stored, until)
            done.done_until, done.events, done.stored = end, done.events + events, done.stored + stored
            tell(done)
        await pool.execute(END, run["id"])
    return done


async def _fill(provider: Searches, feed: Feed, api: Api, inbox: Inbox, query: Query) -> tuple[int, int]:
    events = stored = 0
    batch: list[Event] = []
    async for event in provider.search(query, feed, api):
        batch.append(event)
        if len(batch) >= BATCH:
            stored += (await store(inbox, feed.name, batch, "back-fill")).stored
            events, batch = events + len(batch), []
    stored += (await store(inbox, feed.name, batch, "back-fill")).stored
    return events + len(batch), stored
