# SPDX-License-Identifier: Apache-2.0
"""Outcomes are followed by a watermark: wherever it stands, a pass gets to now and to nobody's cost."""

from __future__ import annotations

from datetime import timedelta

import asyncpg
from kit import claim, confirm, event, row

from reconciler.passes.outcomes import OVERLAP, SLICE, follow_outcomes

KEY = "order-1"
DAY = timedelta(days=1)
SET_UNTIL = "UPDATE feed_state SET outcomes_until = clock_timestamp() + $1 WHERE feed = '*'"
IS_AHEAD = "SELECT outcomes_until > clock_timestamp() FROM feed_state WHERE feed = '*'"
STORED_AT = "UPDATE provider_event SET received_at = clock_timestamp() - $2::interval WHERE event_id = $1"


async def sent(db: asyncpg.Pool, key: str, delivery: str, ago: timedelta) -> None:
    """Make a sent row of which an event was stored so long ago that says what became of it."""
    fence = (await claim(db, key))["fence"]
    assert await confirm(db, key, fence) == "sent"
    await event(db, key, kind=delivery, event_id=key)
    await db.execute(STORED_AT, key, ago)


async def statements(db: asyncpg.Pool) -> int:
    """Follow outcomes until now, and return by how many statements."""
    said: list[object] = []
    async with db.acquire() as connection:
        now = await connection.fetchval("SELECT clock_timestamp()")
        with connection.query_logger(said.append):
            await follow_outcomes(connection, now)
    return len(said)


async def test_a_time_in_which_nobody_followed_and_nothing_came_is_passed_in_great_steps(db: asyncpg.Pool) -> None:
    ages = {"first": 2 * DAY - SLICE, "third": DAY, "second": DAY + 3 * SLICE, "last": timedelta(0)}
    for key, ago in ages.items():
        await sent(db, key, "bounced", ago)
    await db.execute(SET_UNTIL, -2 * DAY)
    assert await statements(db) < 1000, "two days are more than ten thousand slices"
    assert {key: (await row(db, key))["delivery"] for key in ages} == dict.fromkeys(ages, "bounced")


async def test_what_comes_after_the_databases_clock_went_back_is_followed(db: asyncpg.Pool) -> None:
    await db.execute(SET_UNTIL, 300 * DAY)
    await sent(db, KEY, "bounced", OVERLAP / 2)
    await statements(db)
    assert (await row(db, KEY))["delivery"] == "bounced"
    assert not await db.fetchval(IS_AHEAD)
