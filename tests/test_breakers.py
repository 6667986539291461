# SPDX-License-Identifier: Apache-2.0
"""A feed whose deliveries are refused one after the other is stopped, until a person resumes it."""

from __future__ import annotations

import asyncpg
import pytest

from reconciler.passes.feeds import resume, stop_refused_feeds

DELIVERIES = """
INSERT INTO feed_delivery (feed, minute, outcome, n, last_at)
VALUES ($1, date_trunc('minute', clock_timestamp() - $4::int * interval '1 minute'), $2, $3,
        clock_timestamp() - $4::int * interval '1 minute')
ON CONFLICT (feed, minute, outcome) DO UPDATE SET n = feed_delivery.n + $3, last_at = excluded.last_at
"""


async def stopped(db: asyncpg.Pool) -> list[str]:
    async with db.acquire() as connection:
        return await stop_refused_feeds(connection, ["mg", "other"], "test")


async def breaker(db: asyncpg.Pool, feed: str = "mg") -> str | None:
    return await db.fetchval("SELECT reason FROM feed_state WHERE feed = $1 AND breaker_at IS NOT NULL", feed)


@pytest.mark.parametrize(
    ("outcome", "n", "age", "stored", "opens"),
    [
        ("refused:signature", 10, 1, 0, True),
        ("refused:signature", 9, 1, 0, False),
        ("refused:signature", 100, 16, 0, False),
        ("refused:signature", 10, 1, 10, False),
        ("refused:signature", 11, 1, 10, True),
        ("refused:missing", 100, 1, 0, False),
        ("later:database", 100, 1, 0, False),
    ],
)
async def test_ten_refusals_in_a_quarter_of_an_hour_that_outnumber_what_was_stored_stop_a_feed(
    db: asyncpg.Pool, outcome: str, n: int, age: int, stored: int, opens: bool
) -> None:
    await db.execute(DELIVERIES, "mg", outcome, n, age)
    if stored:
        await db.execute(DELIVERIES, "mg", "stored", stored, age)
    assert await stopped(db) == (["mg"] if opens else [])
    assert (await breaker(db) is not None) == opens
    assert await breaker(db, "other") is None


async def test_it_is_stopped_once_and_after_a_resume_only_by_new_refusals(db: asyncpg.Pool) -> None:
    await db.execute(DELIVERIES, "mg", "refused:signature", 30, 1)
    assert await stopped(db) == ["mg"]
    told = str(await breaker(db))
    assert "30 deliveries refused" in told
    assert "where its dashboard shows no failed delivery they were a stranger's" in told, "status shows it"
    assert await stopped(db) == []
    async with db.acquire() as connection:
        assert await resume(connection, "mg", "the secret was changed", "test")
    assert await stopped(db) == []
    await db.execute(DELIVERIES, "mg", "refused:signature", 10, 0)
    assert await stopped(db) == ["mg"]
