# SPDX-License-Identifier: Apache-2.0
"""Back-fill: what a provider lists for a span of time becomes stored events, slice by slice, and is resumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import asyncpg

from reconciler.errors import UserError
from reconciler.filling.common import BATCH, filling, opened_inbox, store
from webhooks.api import open_api
from webhooks.asking import Api, Query, Searches
from webhooks.event import Event
from webhooks.provider import Feed
from webhooks.registry import PROVIDERS

SLICE: Final = timedelta(hours=1)
"""How much of the span one question covers; after each the place is kept."""

# A run that was broken off within a day goes on where it was, if it asks the same place for the same span.
GO_ON: Final = """
SELECT id, done_until FROM backfill
WHERE feed = $1 AND ended_at IS NULL AND since <= $2 AND done_until >= $2 AND done_until < $3 AND asked = $4
  AND started_at > clock_timestamp() - interval '1 day'
ORDER BY id DESC LIMIT 1
"""
BEGIN: Final = """
INSERT INTO backfill (feed, since, until, done_until, asked, who) VALUES ($1, $2, $3, $2, $4, $5)
RETURNING id, done_until
"""
ADVANCE: Final = """
UPDATE backfill SET done_until = $2, until = greatest(until, $3), events = events + $4, stored = stored + $5
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
    pool: asyncpg.Pool,
    feed: Feed,
    since: datetime,
    until: datetime,
    *,
    who: str,
    afresh: bool = False,
    tell: Told = lambda _: None,
) -> Backfilled:
    """Pull what a provider lists for a span of time into `provider_event`, slice by slice, and return what came.

    What is there already is not stored twice, so that it may be run again. A run that was broken off within the span is
    resumed, unless `afresh`. What its API may not show yet is asked for and not counted as done. Raises UserError for a
    provider that lists nothing, ApiError for an API that fails.
    """
    provider = PROVIDERS[feed.provider]
    if not isinstance(provider, Searches) or not provider.facts.lists:
        raise UserError(
            f"{provider.facts.title} lists no events of a span of time: replay an archive instead; reconciler "
            f"providers {feed.provider} says what it can be asked"
        )
    asked = f"{feed.api_url or ''} {feed.api_scope}"
    earlier = None if afresh else await pool.fetchrow(GO_ON, feed.name, since, until, asked)
    run = earlier or await pool.fetchrow(BEGIN, feed.name, since, until, asked, who)
    assert run is not None  # noqa: S101 - an INSERT returns its row
    done = Backfilled(since, until, run["done_until"], resumed=earlier is not None)
    settled = until - provider.facts.settles_after
    async with filling(pool, feed.name), open_api() as api:
        while done.done_until < until:
            end = min(done.done_until + SLICE, until)
            events, stored = await _fill(provider, feed, api, pool, Query(done.done_until, end))
            if end <= settled:
                await pool.execute(ADVANCE, run["id"], end, until, events, stored)
            done.done_until, done.events, done.stored = end, done.events + events, done.stored + stored
            tell(done)
        await pool.execute(END, run["id"])
    return done


async def _fill(provider: Searches, feed: Feed, api: Api, pool: asyncpg.Pool, query: Query) -> tuple[int, int]:
    """Return how many events came and how many of them were new. No connection is held while the API is asked."""
    events = stored = 0
    batch: list[Event] = []
    async for event in provider.search(query, feed, api):
        batch.append(event)
        if len(batch) >= BATCH:
            stored += await _stored(pool, feed, batch)
            events, batch = events + len(batch), []
    stored += await _stored(pool, feed, batch)
    return events + len(batch), stored


async def _stored(pool: asyncpg.Pool, feed: Feed, events: list[Event]) -> int:
    if not events:
        return 0
    async with opened_inbox(pool) as inbox:
        return (await store(inbox, feed.name, events, "back-fill")).stored
