# SPDX-License-Identifier: Apache-2.0
"""How much is released at once: the budget that all processes share, the canaries first, and the breaker."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import asyncpg
import pytest
from kit import (
    FEED,
    RULES,
    confirm,
    event,
    heard_neighbours,
    old_claim,
    old_claims,
    policies,
    reconcile,
    row,
    state,
    until_it_waits,
)

from reconciler.passes.feeds import resume
from reconciler.passes.ledger import Decided
from reconciler.passes.reconcile import Scope, run_pass
from reconciler.passes.releasing import release
from reconciler.rule.limits import Allowance, Limit, Usage, allowance, held_instead
from reconciler.rule.policy import Action, Verdict

MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
GRACE = 15 * MINUTE
GIVES_UP = replace(RULES, on_unknown="release", give_up_after=GRACE)
"""Releases whatever is older than the grace, so that the limits alone decide how much."""

LIMIT = Limit(count=1000, share=0.2, canary=0.1, awaited=GRACE)


def budget(count: int) -> Limit:
    """Return a limit of so many an hour, whatever the share, and without canaries."""
    return Limit(count, share=1.0, canary=1.0, awaited=GRACE)


async def breaker(db: asyncpg.Pool, feed: str = FEED) -> str | None:
    """Return why a feed's breaker is open; None: it is closed."""
    return await db.fetchval("SELECT reason FROM feed_state WHERE feed = $1 AND breaker_at IS NOT NULL", feed)


async def all_due(db: asyncpg.Pool) -> None:
    await db.execute("UPDATE send_log SET next_check_at = clock_timestamp() WHERE state = 'claimed'")


OLDER = "UPDATE verdict SET decided_at = decided_at - $1::interval WHERE wire_key LIKE $2"


async def held(db: asyncpg.Pool) -> dict[str, int]:
    rows = await db.fetch("SELECT held_reason, count(*) AS n FROM send_log WHERE state = 'claimed' GROUP BY 1")
    return {row["held_reason"]: row["n"] for row in rows}


# How many


@pytest.mark.parametrize(
    ("limit", "usage", "wanted", "allowed"),
    [
        pytest.param(LIMIT, Usage(0, 0, 0, 0), 5, Allowance(10, "canary"), id="ten canaries at least"),
        pytest.param(LIMIT, Usage(4, 0, 4, 0), 30, Allowance(6, "canary"), id="less those that are out"),
        pytest.param(LIMIT, Usage(0, 5000, 0, 0), 1000, Allowance(100, "canary"), id="a tenth of many first"),
        pytest.param(LIMIT, Usage(0, 5000, 0, 0), 995, Allowance(100, "canary"), id="rounded up"),
        pytest.param(LIMIT, Usage(100, 5000, 100, 0), 900, Allowance(0, "canary"), id="the rest waits for them"),
        pytest.param(LIMIT, Usage(100, 5000, 0, 100), 900, Allowance(900, "budget"), id="until they were awaited"),
        pytest.param(LIMIT, Usage(3, 5000, 0, 3), 900, Allowance(90, "canary"), id="few speak for ten times as many"),
        pytest.param(LIMIT, Usage(0, 149, 0, 100), 200, Allowance(29, "budget"), id="a fifth of the claims"),
        pytest.param(LIMIT, Usage(0, 99, 0, 100), 200, Allowance(20, "budget"), id="twenty whatever the share"),
        pytest.param(LIMIT, Usage(0, 5000, 0, 1000), 9000, Allowance(1000, "budget"), id="never more than the count"),
        pytest.param(LIMIT, Usage(999, 5000, 0, 1000), 9000, Allowance(1, "budget"), id="less those of the hour"),
        pytest.param(LIMIT, Usage(1001, 5000, 0, 1000), 1, Allowance(0, "budget"), id="never less than none"),
        pytest.param(budget(7), Usage(0, 9, 7, 0), 9, Allowance(7, "budget"), id="no canary"),
        pytest.param(replace(LIMIT, count=5), Usage(0, 0, 0, 0), 9, Allowance(5, "budget"), id="count below twenty"),
        pytest.param(replace(LIMIT, count=0), Usage(0, 5000, 0, 0), 9, Allowance(0, "budget"), id="none at all"),
        pytest.param(replace(LIMIT, share=0.0), Usage(0, 5000, 0, 99), 99, Allowance(20, "budget"), id="no share"),
    ],
)
def test_how_many_of_the_wanted_releases_are_allowed(
    limit: Limit, usage: Usage, wanted: int, allowed: Allowance
) -> None:
    assert allowance(limit, usage, wanted) == allowed


def test_what_is_not_released_now_is_looked_at_again_in_a_minute() -> None:
    now = datetime(2026, 11, 30, tzinfo=UTC)
    wanted = Verdict(Action.RELEASED, "absent", next_check_at=now + 5 * MINUTE, risk=0.004)
    refused = allowance(LIMIT, Usage(10, 5000, 10, 0), 30)
    assert held_instead(wanted, refused, now) == Verdict(Action.HELD, "canary", next_check_at=now + MINUTE, risk=0.004)


def test_where_the_grace_is_shorter_the_canaries_are_awaited_no_longer_than_that() -> None:
    now, short = datetime(2026, 11, 30, tzinfo=UTC), timedelta(seconds=3)
    wanted = Verdict(Action.RELEASED, "absent", next_check_at=now, risk=0.004)
    refused = allowance(replace(LIMIT, awaited=short), Usage(10, 5000, 10, 0), 30)
    assert held_instead(wanted, refused, now).next_check_at == now + short
    over_budget = allowance(replace(LIMIT, awaited=short, canary=1.0), Usage(1000, 5000, 0, 0), 1)
    assert held_instead(wanted, over_budget, now).next_check_at == now + MINUTE


# The budget


async def test_what_the_budget_refuses_is_held_and_opens_the_breaker_until_a_person_resumes(db: asyncpg.Pool) -> None:
    await old_claims(db, "send", 30, age=30 * MINUTE)
    counts = (await reconcile(db, GIVES_UP, limit=budget(5))).counts
    assert (counts["released:gave_up"], counts["held:budget"]) == (5, 25)
    assert await breaker(db) == "more releases within an hour than its budget allows"
    await all_due(db)
    counts = (await reconcile(db, GIVES_UP, limit=budget(5))).counts
    assert (counts["released:gave_up"], counts["held:breaker"]) == (0, 25)


async def released_now(db: asyncpg.Pool, limit: Limit) -> dict[str, int]:
    await all_due(db)
    counts = (await reconcile(db, GIVES_UP, limit=limit)).counts
    return {verdict: n for verdict, n in counts.items() if n and verdict != "outcomes"}


async def test_who_resumes_grants_a_budget_anew_and_the_breaker_opens_when_that_is_used_up(db: asyncpg.Pool) -> None:
    await old_claims(db, "send", 30, age=30 * MINUTE)
    await reconcile(db, GIVES_UP, limit=budget(5))
    async with db.acquire() as connection:
        assert await resume(connection, FEED, "looked at it", "me")
    assert await breaker(db) is None
    assert await released_now(db, budget(5)) == {"released:gave_up": 5, "held:budget": 20}
    assert await breaker(db)


async def test_an_open_breaker_stays_open_when_the_hour_is_over(db: asyncpg.Pool) -> None:
    await old_claims(db, "send", 30, age=30 * MINUTE)
    await reconcile(db, GIVES_UP, limit=budget(5))
    await db.execute(OLDER, HOUR, "%")
    assert await released_now(db, budget(5)) == {"held:breaker": 25}


async def test_the_next_hour_has_a_budget_of_its_own(db: asyncpg.Pool) -> None:
    await old_claims(db, "first", 5, age=30 * MINUTE)
    assert await released_now(db, budget(5)) == {"released:gave_up": 5}
    await db.execute(OLDER, HOUR - MINUTE, "%")
    await old_claims(db, "second", 1, age=30 * MINUTE)
    assert await released_now(db, budget(5)) == {"held:budget": 1}
    await db.execute("UPDATE feed_state SET breaker_at = NULL")
    await db.execute(OLDER, MINUTE, "%")
    assert await released_now(db, budget(5)) == {"released:gave_up": 1}


async def test_the_share_is_of_the_claims_of_the_hour(db: asyncpg.Pool) -> None:
    await heard_neighbours(db, 40 * MINUTE, n=140)
    await heard_neighbours(db, 5 * HOUR, n=500, name="earlier")
    await old_claims(db, "send", 60, age=30 * MINUTE)
    counts = (await reconcile(db, GIVES_UP, limit=Limit(1000, 0.2, 1.0, GRACE))).counts
    assert (counts["released:gave_up"], counts["held:budget"]) == (40, 20)


async def test_each_feed_has_a_budget_of_its_own(db: asyncpg.Pool) -> None:
    for feed in ("one", "two"):
        await old_claims(db, feed, 6, age=30 * MINUTE, feed=feed)
        counts = (await reconcile(db, GIVES_UP, limit=budget(5))).counts
        assert (counts["released:gave_up"], counts["held:budget"]) == (5, 1)


async def test_a_budget_of_none_releases_nothing(db: asyncpg.Pool) -> None:
    await heard_neighbours(db)
    await old_claim(db, "absent")
    await old_claims(db, "given-up", 3)
    counts = (await reconcile(db, GIVES_UP, limit=budget(0))).counts
    assert counts["held:budget"] == 4
    assert await db.fetchval("SELECT count(*) FROM send_log WHERE state = 'pending'") == 0
    assert await db.fetchval("SELECT count(*) FROM feed_state WHERE breaker_at IS NOT NULL") == 0  # it was asked for


async def test_retries_with_the_same_key_are_not_limited_and_take_no_place(db: asyncpg.Pool) -> None:
    await old_claims(db, "same-key", 12, age=20 * MINUTE)
    await db.execute("UPDATE send_log SET fingerprint = 'f'")
    counts = (await reconcile(db, GIVES_UP, key_window=24 * HOUR, limit=budget(2))).counts
    assert (counts["released:same_key_retry"], counts["held:budget"]) == (12, 0)
    await old_claims(db, "other", 3, age=20 * MINUTE)
    counts = (await reconcile(db, GIVES_UP, key_window=24 * HOUR, limit=budget(2))).counts
    assert (counts["released:gave_up"], counts["held:budget"]) == (2, 1)


async def test_a_release_that_its_guard_stops_takes_no_place(db: asyncpg.Pool) -> None:
    fence = await old_claim(db, "order-1")
    await event(db, "order-1")
    await old_claim(db, "order-2")
    now = await db.fetchval("SELECT clock_timestamp()")
    verdict = Verdict(Action.RELEASED, "gave_up", next_check_at=now)
    async with db.acquire() as connection:
        done = await release(
            connection, [Decided("order-1", "claimed", fence, verdict, {}, FEED)], lambda _: budget(1), now, 1, "test"
        )
    assert (done.counts, done.refused) == ({}, [])
    assert (await reconcile(db, GIVES_UP, limit=budget(1))).counts["released:gave_up"] == 1


# Many processes


async def test_whoever_releases_waits_for_the_others_commit_and_counts_what_they_released(db: asyncpg.Pool) -> None:
    fence = await old_claim(db, "order-1")
    await old_claim(db, "order-2")
    await db.execute("INSERT INTO feed_state (feed) VALUES ($1)", FEED)
    now = await db.fetchval("SELECT clock_timestamp()")
    verdict = Verdict(Action.RELEASED, "gave_up", next_check_at=now)
    decided = [Decided("order-1", "claimed", fence, verdict, {}, FEED)]
    async with db.acquire() as first:
        transaction = first.transaction()
        await transaction.start()
        await release(first, decided, lambda _: budget(1), now, 1, "test")
        second = asyncio.create_task(
            run_pass(db, policies(GIVES_UP, limit=budget(1)), who="test", scope=Scope(wire_key="order-2"))
        )
        await until_it_waits(db, second)
        await transaction.commit()
        counts = (await second).counts
    assert (counts["released:gave_up"], counts["held:budget"]) == (0, 1)
    assert await state(db, "order-1") == "pending"


ROOT = Path(__file__).parents[1]
BY_SETTINGS = {
    "RECONCILER_RULES__ON_UNKNOWN": "release",
    "RECONCILER_RULES__GIVE_UP_AFTER": "15m",
    "RECONCILER_RULES__RELEASE_BUDGET": "1500",
    "RECONCILER_RULES__RELEASE_SHARE": "1",
    "RECONCILER_RULES__CANARY_SHARE": "1",
}
WAITING = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%feed_state%'
"""


async def reconcile_by_cli(dsn: str) -> int:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "reconciler", "reconcile"),
        cwd=ROOT,
        env={**os.environ, **BY_SETTINGS, "RECONCILER_DATABASE__URL": dsn},
        stdout=asyncio.subprocess.DEVNULL,
    )
    return await process.wait()


async def until_wait(db: asyncpg.Pool, n: int, task: asyncio.Task[object]) -> None:
    """Wait until so many wait for the lock of a feed, each with a page of its own."""
    async with asyncio.timeout(30):
        while await db.fetchval(WAITING) < n:
            assert not task.done()
            await asyncio.sleep(0.02)


async def test_two_daemons_and_a_cli_share_a_budget_exactly(dsn: str, db: asyncpg.Pool) -> None:
    await old_claims(db, "send", 3000, timedelta(milliseconds=1), age=30 * MINUTE)
    await db.execute("INSERT INTO feed_state (feed) VALUES ($1)", FEED)
    pools = [await asyncpg.create_pool(dsn, min_size=1, max_size=2) for _ in range(2)]  # patient: no lock_timeout
    async with db.acquire() as holder, asyncio.TaskGroup() as tasks:
        transaction = holder.transaction()
        await transaction.start()
        await holder.execute("SELECT FROM feed_state WHERE feed = $1 FOR NO KEY UPDATE", FEED)
        passes = []
        for n, pool in enumerate(pools):
            work = run_pass(pool, policies(GIVES_UP, limit=budget(1500)), who=f"daemon {n}")
            passes.append(tasks.create_task(work))
            await until_wait(db, n + 1, passes[-1])
        by_hand = tasks.create_task(reconcile_by_cli(dsn))
        await until_wait(db, 3, by_hand)
        await transaction.commit()
    for pool in pools:
        await pool.close()
    assert by_hand.result() == 0
    assert await db.fetchval("SELECT count(*) FROM send_log WHERE state = 'pending'") == 1500
    assert await db.fetchval("SELECT count(*) FROM verdict WHERE action = 'released'") == 1500
    assert sum((await held(db)).values()) == 1500
    assert set(await held(db)) <= {"budget", "breaker"}
    assert sum(done.result().counts["released:gave_up"] for done in passes) <= 1500
    assert await breaker(db)


# Canaries

CANARY = Limit(count=1000, share=1.0, canary=0.25, awaited=GRACE)


async def release_canaries(db: asyncpg.Pool) -> list[str]:
    """Let a pass release ten of forty sends; returns their keys."""
    await old_claims(db, "send", 40, age=30 * MINUTE)
    counts = (await reconcile(db, GIVES_UP, limit=CANARY)).counts
    assert (counts["released:gave_up"], counts["held:canary"]) == (10, 30)
    rows = await db.fetch("SELECT wire_key FROM send_log WHERE state = 'pending' ORDER BY 1")
    return [row["wire_key"] for row in rows]


async def released_next(db: asyncpg.Pool) -> int:
    await all_due(db)
    return (await reconcile(db, GIVES_UP, limit=CANARY)).counts["released:gave_up"]


async def test_a_few_are_released_first_and_the_rest_once_nothing_was_heard_of_them_for_a_grace(
    db: asyncpg.Pool,
) -> None:
    await release_canaries(db)
    assert await breaker(db) is None
    assert await released_next(db) == 0
    await db.execute(OLDER, GRACE - MINUTE, "%")
    assert await released_next(db) == 0
    await db.execute(OLDER, MINUTE, "%")
    assert await released_next(db) == 30
    assert await breaker(db) is None


async def test_releases_that_proved_right_speak_for_all_that_their_share_allows_whatever_the_rounding(
    db: asyncpg.Pool,
) -> None:
    await old_claims(db, "earlier", 20, age=30 * MINUTE)
    assert (await reconcile(db, GIVES_UP, limit=budget(20))).counts["released:gave_up"] == 20
    await db.execute(OLDER, GRACE, "earlier%")
    await old_claims(db, "send", 25, age=30 * MINUTE)
    counts = (await reconcile(db, GIVES_UP, limit=replace(CANARY, canary=0.68))).counts  # 17 / 0.68 is less than 25
    assert (counts["released:gave_up"], counts["held:canary"]) == (25, 0)


@pytest.mark.parametrize("found", ["late evidence", "a late answer", "a duplicate"])
async def test_a_canary_that_was_wrong_begins_it_anew(db: asyncpg.Pool, found: str) -> None:
    canaries = await release_canaries(db)
    await db.execute(OLDER, GRACE, "%")
    await db.execute(OLDER, MINUTE, "send-%")
    await db.execute(OLDER, -MINUTE, canaries[0])  # the newest
    if found == "late evidence":
        await event(db, canaries[0])
    elif found == "a late answer":
        fence = await db.fetchval("SELECT fence FROM send_log WHERE wire_key = $1", canaries[0])
        assert await confirm(db, canaries[0], fence) == "sent_late"
    else:
        await db.execute("INSERT INTO duplicate (wire_key, sort, feed) VALUES ($1, 'duplicate', $2)", canaries[0], FEED)
    assert await released_next(db) == 10
    assert await held(db) == {"canary": 20}


async def test_a_canary_whose_retry_was_accepted_was_right(db: asyncpg.Pool) -> None:
    canaries = await release_canaries(db)
    await db.execute(OLDER, GRACE + MINUTE, "%")
    await db.execute(OLDER, -MINUTE, canaries[0])  # the newest
    fence = await db.fetchval("SELECT fence FROM send_claim($1, $2, '{}')", canaries[0], FEED)
    assert fence > (await db.fetchval("SELECT fence FROM verdict WHERE wire_key = $1", canaries[0]))
    await event(db, canaries[0])
    assert await released_next(db) == 30
    assert (await row(db, canaries[0]))["state"] == "sent"


async def test_one_send_alone_needs_no_canary(db: asyncpg.Pool) -> None:
    await old_claim(db, "order-1")
    await reconcile(db, GIVES_UP, limit=CANARY)
    assert await state(db, "order-1") == "pending"
