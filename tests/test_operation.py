# SPDX-License-Identifier: Apache-2.0
"""What operation does to us: skewed clocks, odd dates, schema changes under load, many processes over the same rows."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import asyncpg
import kit
import pytest

from reconciler.database.postgres import EmbeddedPostgres
from reconciler.passes.reconcile import run_pass
from reconciler.rule.limits import Limit
from webhooks.database import connect_pool
from webhooks.event import Event, Kind, Testimony
from webhooks.inbox import Inbox

ROOT = Path(__file__).parents[1]
KEY = "order:1"


def said(key: str, number: int, at: datetime | None = None, kind: Kind = Kind.DELIVERED) -> Event:
    return Event(
        kind=kind,
        testimony=Testimony.ACCEPTED,
        message_id=f"m-{key}",
        event_id=f"e-{number}",
        send_key=key,
        occurred_at=at,
        raw=b"{}",
    )


@asynccontextmanager
async def receiver(dsn: str) -> AsyncIterator[Inbox]:
    """The storing half of a receiver process: its own pool and writer."""
    pool = await connect_pool(dsn, size=2, application="test receiver")
    inbox = Inbox()
    await inbox.open(pool)
    yield inbox
    await inbox.close()
    await pool.close()


@pytest.mark.parametrize("ahead", [7 * 60, -7 * 60])
async def test_case_093_a_skewed_clock_of_this_host_releases_nothing_early(
    db: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    rules = replace(kit.RULES, grace=timedelta(minutes=10))
    await kit.old_claim(db, KEY, timedelta(minutes=4))
    await kit.heard_neighbours(db, timedelta(minutes=4))
    true_time = time.time
    monkeypatch.setattr(time, "time", lambda: true_time() + ahead)
    await kit.reconcile(db, rules)
    assert await kit.state(db, KEY) == "claimed"
    assert await kit.reasons(db, KEY) == []
    submit_by = (await kit.row(db, KEY))["submit_by"]
    assert (await kit.row(db, KEY))["next_check_at"] == submit_by + timedelta(minutes=10)


async def test_case_095_events_of_any_date_are_stored_and_decide_alike(dsn: str, db: asyncpg.Pool) -> None:
    now = await db.fetchval("SELECT clock_timestamp()")
    dates = [
        now - timedelta(days=400),
        now - timedelta(days=1),
        now + timedelta(days=2),
        None,
        datetime(1, 1, 1, tzinfo=UTC),
    ]
    for n, _ in enumerate(dates):
        await kit.claim(db, f"order:{n}")
    async with receiver(dsn) as inbox:
        for n, at in enumerate(dates):
            assert (await inbox.store(kit.FEED, [said(f"order:{n}", 1, at)])).stored == 1
    await kit.reconcile(db)
    assert {await kit.state(db, f"order:{n}") for n, _ in enumerate(dates)} == {"sent"}


async def test_case_095_a_repeat_with_another_timestamp_changes_no_verdict(dsn: str, db: asyncpg.Pool) -> None:
    fence = (await kit.claim(db, KEY))["fence"]
    assert await kit.confirm(db, KEY, fence, f"m-{KEY}") == "sent"
    now = await db.fetchval("SELECT clock_timestamp()")
    async with receiver(dsn) as inbox:
        for at in (now, now - timedelta(seconds=1), now - timedelta(days=400)):
            await inbox.store(kit.FEED, [said(KEY, 1, at)])
    await kit.reconcile(db)
    assert await kit.state(db, KEY) == "sent"
    assert await kit.reasons(db, KEY) == []
    assert await kit.confirm(db, KEY, fence, f"m-{KEY}") == "sent", "counted as a duplicate"


async def test_case_081_a_unique_index_made_anew_under_posts_loses_no_event(dsn: str, db: asyncpg.Pool) -> None:
    async with receiver(dsn) as inbox:

        async def post() -> int:
            return sum([(await inbox.store(kit.FEED, [said(f"k{n}", 1)])).stored for n in range(200)])

        posts = asyncio.create_task(post())
        async with db.acquire() as connection, connection.transaction():
            await connection.execute("ALTER TABLE provider_event ADD COLUMN more text")
            await connection.execute("ALTER TABLE provider_event DROP CONSTRAINT provider_event_pkey")
            await connection.execute(
                "ALTER TABLE provider_event ADD PRIMARY KEY (wire_key, message_id, event_id, feed, partition_at)"
            )
        assert await posts == 200
    assert await db.fetchval("SELECT count(*) FROM provider_event") == 200


async def test_three_passes_two_receivers_and_a_cli_over_the_same_rows_are_as_one(
    pg: EmbeddedPostgres, dsn: str, db: asyncpg.Pool
) -> None:
    deadlocks = pg.log_file.read_text().count("deadlock detected")
    await make_claims_among_controls(db)
    pools = [await connect_pool(dsn, size=2, application=f"test pass {n}") for n in range(3)]
    async with receiver(dsn) as one, receiver(dsn) as two:

        async def receive(inbox: Inbox, firsts: Iterable[int]) -> None:
            for first in firsts:
                await inbox.store(kit.FEED, [said(f"k-{n}", 2) for n in range(first, first + 300, 6)])

        async with asyncio.TaskGroup() as tasks:
            for n, pool in enumerate(pools):
                tasks.create_task(run_pass(pool, kit.policies(GIVES_UP, limit=UNLIMITED), who=f"p{n}"))
            # Both receivers bring the same events, one of them backwards.
            tasks.create_task(receive(one, range(1, 6000, 300)))
            tasks.create_task(receive(two, reversed(range(1, 6000, 300))))
            by_hand = tasks.create_task(reconcile_by_cli(dsn))
    for pool in pools:
        await pool.close()
    await kit.reconcile(db, GIVES_UP, limit=UNLIMITED)
    await assert_released_at_most_once(db)
    ends = await db.fetch("""
        SELECT substr(wire_key, 3)::int % 6 AS rest, array_agg(DISTINCT state ORDER BY state) AS states
        FROM send_log WHERE wire_key LIKE 'k-%' GROUP BY 1 ORDER BY 1
    """)
    # Ones of which events came during the passes; ones of which nobody spoke; the others were answered.
    assert [tuple(end) for end in ends] == [(n, ["pending"] if n == 4 else ["sent"]) for n in range(6)]
    assert by_hand.result() == 0
    assert pg.log_file.read_text().count("deadlock detected") == deadlocks


GIVES_UP = replace(kit.RULES, on_unknown="release", give_up_after=timedelta(minutes=15))
"""So many at once are a burst: only who gives up releases them."""

UNLIMITED = Limit(count=100_000, share=1.0, canary=1.0, awaited=timedelta(0))
"""Fewer are released than were claimed within the last hour."""

THE_SAME_BY_SETTINGS = {
    "RECONCILER_RULES__ON_UNKNOWN": "release",
    "RECONCILER_RULES__GIVE_UP_AFTER": "15m",
    "RECONCILER_RULES__RELEASE_BUDGET": "100000",
    "RECONCILER_RULES__RELEASE_SHARE": "1",
    "RECONCILER_RULES__CANARY_SHARE": "1",
}


async def make_claims_among_controls(db: asyncpg.Pool) -> None:
    """6,000 sends of the last hour: two thirds answered and heard of, the others failed."""
    await db.execute("""
        INSERT INTO send_log (wire_key, send_key, feed, state, attempt, fence, first_claimed_at, claimed_at, submit_by,
                              next_check_at, answered_at, sent_at, verdict_source, verdict_reason, cause)
        SELECT 'k-' || n, 'k-' || n, 'mg', CASE WHEN answered THEN 'sent' ELSE 'claimed' END, 1, n, t, t, t,
            CASE WHEN NOT answered THEN t END, CASE WHEN answered THEN t END, CASE WHEN answered THEN t END,
            CASE WHEN answered THEN 'sender' END, CASE WHEN answered THEN 'answered' END,
            CASE WHEN NOT answered THEN 'timed out' END
        FROM generate_series(0, 5999) n,
            LATERAL (SELECT now() - interval '50 minutes' + n * interval '300 ms' AS t, n % 3 <> 1 AS answered) AS made
    """)
    await db.execute("""
        INSERT INTO provider_event (feed, message_id, event_id, partition_at, received_at, wire_key, kind, testimony,
                                    source)
        SELECT 'mg', 'm-' || wire_key, 'e-1', '1970-01-01 00:00:00+00', claimed_at + interval '2 s', wire_key,
            'delivered', 'accepted', 'http'
        FROM send_log WHERE state = 'sent' AND wire_key LIKE 'k-%'
    """)
    await kit.stored_delivery(db)


async def reconcile_by_cli(dsn: str) -> int:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "reconciler",
        "reconcile",
        cwd=ROOT,
        env={**os.environ, **THE_SAME_BY_SETTINGS, "RECONCILER_DATABASE__URL": dsn},
        stdout=asyncio.subprocess.DEVNULL,
    )
    return await process.wait()


async def assert_released_at_most_once(db: asyncpg.Pool) -> None:
    twice = await db.fetchval("""
        SELECT count(*) FROM (
            SELECT FROM verdict WHERE action = 'released' GROUP BY wire_key, fence HAVING count(*) > 1) AS twice
    """)
    assert twice == 0
