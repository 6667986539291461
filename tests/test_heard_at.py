# SPDX-License-Identifier: Apache-2.0
"""A sent row remembers when its feed first spoke of it, and a pass believes it as it believes the events themselves."""

from __future__ import annotations

from datetime import datetime, timedelta

import asyncpg
import pytest
from kit import FEED, claim, confirm, event, heard_neighbours, old_claim, policies, row

from reconciler.passes.histories import NEWEST_CONTROLS, SAMPLE, SPREAD_CONTROLS
from reconciler.passes.judging import read_page
from reconciler.passes.outcomes import follow_outcomes
from reconciler.rule.risk import Assessment

KEY = "order-1"
NOW = "SELECT clock_timestamp()"


async def follow(db: asyncpg.Pool) -> None:
    """Walk the events of the last hours for outcomes, as passes did when they came."""
    async with db.acquire() as connection:
        now = await connection.fetchval(NOW)
        await connection.execute("UPDATE feed_state SET outcomes_until = $1 WHERE feed = '*'", now - timedelta(hours=4))
        await follow_outcomes(connection, now)


async def sent(db: asyncpg.Pool) -> datetime:
    """Make a sent row and return when an event of its own feed that came first was stored."""
    fence = (await claim(db, KEY))["fence"]
    await event(db, KEY, kind="queued", event_id="first")
    assert await confirm(db, KEY, fence) == "sent"
    await event(db, KEY, event_id="second")
    return await db.fetchval("SELECT received_at FROM provider_event WHERE event_id = 'first'")


async def test_a_sent_row_remembers_when_its_feed_first_spoke_of_it(db: asyncpg.Pool) -> None:
    first = await sent(db)
    assert (await row(db, KEY))["heard_at"] is None
    await follow(db)
    assert (await row(db, KEY))["heard_at"] == first


async def test_a_row_that_is_confirmed_after_its_event_remembers_it_from_the_start(db: asyncpg.Pool) -> None:
    fence = (await claim(db, KEY))["fence"]
    await event(db, KEY, event_id="first")
    assert await confirm(db, KEY, fence) == "sent"
    assert (await row(db, KEY))["heard_at"] == await db.fetchval("SELECT received_at FROM provider_event LIMIT 1")
    await db.execute("DELETE FROM provider_event")
    await event(db, KEY, kind="bounced")
    before = (await row(db, KEY))["heard_at"]
    assert await confirm(db, KEY, fence) == "sent"
    assert ((await row(db, KEY))["delivery"], (await row(db, KEY))["heard_at"]) == ("bounced", before)


@pytest.mark.parametrize("walked", [False, True])
async def test_what_was_said_of_its_key_before_its_claim_is_no_echo_of_a_send(db: asyncpg.Pool, walked: bool) -> None:
    fence = (await claim(db, KEY))["fence"]
    await event(db, KEY, event_id="first")
    await db.execute("UPDATE provider_event SET received_at = received_at - interval '1 day'")
    assert await confirm(db, KEY, fence) == "sent"
    assert (await row(db, KEY))["heard_at"] is None
    if walked:
        await event(db, KEY, kind="bounced", event_id="second")
        await follow(db)
        second = await db.fetchval("SELECT received_at FROM provider_event WHERE event_id = 'second'")
        assert (await row(db, KEY))["heard_at"] == second


async def test_what_is_remembered_stays_when_its_event_is_gone(db: asyncpg.Pool) -> None:
    first = await sent(db)
    await follow(db)
    await db.execute("DELETE FROM provider_event WHERE event_id = 'first'")
    await event(db, KEY, kind="bounced", event_id="third")
    await follow(db)
    assert (await row(db, KEY))["heard_at"] == first


@pytest.mark.parametrize(
    ("key", "feed", "source"), [(KEY, FEED, "look-up"), (KEY, "another", "http"), (None, FEED, "http")]
)
async def test_only_the_rows_own_feed_by_wire_key_is_remembered(
    db: asyncpg.Pool, key: str | None, feed: str, source: str
) -> None:
    assert await confirm(db, KEY, (await claim(db, KEY))["fence"]) == "sent"
    await event(db, key, feed=feed, event_id="said")
    await db.execute("UPDATE provider_event SET source = $1 WHERE event_id = 'said'", source)
    await follow(db)
    found = await row(db, KEY)
    assert (found["delivery"], found["heard_at"]) == ("delivered", None)


async def judged(db: asyncpg.Pool) -> Assessment:
    histories = policies().histories
    async with db.acquire() as connection:
        page = await read_page(connection, histories.rules_for, histories, [KEY])
    return page.silence[KEY].assessment


async def test_a_claim_is_judged_alike_by_rows_that_remember_and_by_events(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db, heard=460)
    by_events = await judged(db)
    assert (by_events.reason, by_events.recent.k > 0) == ("risk", True)
    await follow(db)
    assert await db.fetchval("SELECT count(heard_at) FROM control") == 460
    for forgotten in (False, True):
        if forgotten:
            await db.execute("DELETE FROM provider_event")
        by_rows = await judged(db)
        assert (by_rows.reason, by_rows.recent) == (by_events.reason, by_events.recent)


@pytest.mark.parametrize("statement", [NEWEST_CONTROLS, SPREAD_CONTROLS], ids=["newest", "spread"])
async def test_histories_are_alike_by_rows_that_remember_and_by_events(db: asyncpg.Pool, statement: str) -> None:
    await heard_neighbours(db, heard=460)
    now = await db.fetchval(NOW)

    async def history(at: datetime) -> set[tuple[float, float | None]]:
        rows = await db.fetch(statement, FEED, "default", now, at, SAMPLE, False)
        return {(row["at"], row["lag"]) for row in rows}

    by_events = await history(now)
    assert {lag for _, lag in by_events} == {2.0, None}
    await follow(db)
    await db.execute("DELETE FROM provider_event")
    assert await history(now) == by_events
    earlier = await history(now - timedelta(minutes=150))
    assert len(earlier) == len(by_events)
    assert sum(lag is None for _, lag in earlier) > sum(lag is None for _, lag in by_events)


async def test_what_was_heard_later_than_a_pass_looks_does_not_count_for_it(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db)
    await follow(db)
    await db.execute("UPDATE send_log SET heard_at = clock_timestamp() + interval '1 hour' WHERE heard_at IS NOT NULL")
    assessment = await judged(db)
    assert assessment.reason == "no_echo"
    assert assessment.recent.k == assessment.recent.n
