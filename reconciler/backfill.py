# SPDX-License-Identifier: Apache-2.0
"""Back-fill: what a provider lists for a span of time becomes stored events, slice by slice, and is resumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import asyncpg

from reconciler.errors import UserError
from reconciler.filling import BATCH, filling, opened_inbox, store
from webhooks.api import open_api
from webhooks.asking import Api, Query, Searches
from webhooks.event import Event
from webhooks.inbox import Inbox
from webhooks.provider import Feed
from webhooks.registry import PROVIDERS

SLICE: Final = timedelta(hours=1)
"""How much of the span one question covers; after each the place is kept."""

# A run that was broken off goes on where it was, if it lies in the same span.
GO_ON: Final = """
SELECT id, done_until FROM backfill
WHERE feed = $1 AND ended_at IS NULL AND since <= $2 AND done_until >= $2 AND done_until < $3
ORDER BY id DESC LIMIT 1
"""
BEGIN: Final = """
INSERT INTO backfill (feed, since, until, done_until, who) VALUES ($1, $2, $3, $2, $4)
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
    async with filling(pool, feed.name), opened_inbox(pool) as inbox, open_api() as api:
        while done.done_until < until:
            end = min(done.done_until + SLICE, until)
            events, stored = await _fill(provider, feed, api, inbox, Query(done.done_until, end))
            await pool.execute(ADVANCE, run["id"], end, until, events, stored)
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
