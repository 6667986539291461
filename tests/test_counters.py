# SPDX-License-Identifier: Apache-2.0
"""What deliveries came to is counted once, in the minute in which it happened, and never lost."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import asyncpg
import pytest
from receiver_app import Cut

from webhooks.counters import Counters
from webhooks.database import connect_pool


async def test_counts_of_deliveries_are_written_once_and_added_up(db):
    now = 100.0
    counters = Counters(lambda: now)
    for outcome in ("stored", "stored", "refused:signature"):
        counters.note("main", outcome)
    assert await counters.flush(db) == 2
    assert await counters.flush(db) == 0
    counters.note("main", "stored", 3)
    now += 1
    await counters.flush(db)
    found = await db.fetch(
        "SELECT feed, outcome, sum(n)::int AS n, bool_and(last_at <= now()) FROM feed_delivery GROUP BY 1, 2 ORDER BY 2"
    )
    assert [tuple(row) for row in found] == [("main", "refused:signature", 1, True), ("main", "stored", 5, True)]


async def test_counts_belong_to_the_minute_of_the_database_in_which_they_were_made(db):
    now = 1_000.0
    counters = Counters(lambda: now)
    counters.note("main", "stored")
    now += 600
    counters.note("main", "stored")
    await counters.flush(db)
    first, second = await db.fetch("SELECT n, last_at, now() AS t FROM feed_delivery ORDER BY minute")
    assert (first["n"], second["n"]) == (1, 1)
    assert timedelta(seconds=595) < first["t"] - first["last_at"] < timedelta(seconds=660)


async def test_counts_survive_a_database_that_is_away(dsn, db, sockets):
    counters = Counters()
    counters.note("main", "stored", 2)
    async with Cut(dsn, sockets) as cut:
        pool = await connect_pool(cut.dsn, size=1, application="test")
        cut.cut()
        with pytest.raises((OSError, asyncpg.PostgresError, asyncpg.InterfaceError)):
            await counters.flush(pool)
        counters.note("main", "stored")
        cut.resume()
        await counters.flush(pool)
        await asyncio.wait_for(pool.close(), 10)
    assert await db.fetchval("SELECT sum(n)::int FROM feed_delivery") == 3
