# SPDX-License-Identifier: Apache-2.0
"""Whoever waited for a recipient's places, or for anybody else, looks again before he is given a claim."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
from campaign_kit import PLAN, loaded
from kit import FEED, call, claim, event, old_claim, reconcile, row, state, until_it_waits

from reconciler import guard_many
from reconciler.campaigns.caps import Cap, keep_caps
from reconciler.passes.feeds import PAUSE

ADA = {"message_class": "marketing", "recipient": "ada@example.org"}
Meanwhile = Callable[[asyncpg.Pool], Awaitable[object]]


@pytest.fixture(autouse=True)
async def a_cap_that_is_never_reached(db: asyncpg.Pool) -> None:
    await keep_caps(db, [Cap("marketing", 100, timedelta(days=1), None, "UTC")])


async def while_ada_is_taken(db: asyncpg.Pool, ask: Callable[[Any], Awaitable[Any]], meanwhile: Meanwhile) -> Any:
    """Let somebody hold Ada's places while `ask` waits for them and something happens; return what it is told then."""
    async with db.acquire() as first, db.acquire() as second:
        transaction = first.transaction()
        await transaction.start()
        assert (await claim(first, "another", **ADA))["outcome"] == "claimed"
        waiting = asyncio.create_task(ask(second))
        await until_it_waits(db, waiting)
        await meanwhile(db)
        await transaction.commit()
        return await waiting


async def claim_meanwhile(db: asyncpg.Pool, meanwhile: Meanwhile, **options: Any) -> tuple[str, str | None]:
    told = await while_ada_is_taken(db, lambda c: claim(c, "news:1", **ADA, **options), meanwhile)
    return told["outcome"], told["reason"]


def heard_of(key: str, testimony: str = "accepted") -> Meanwhile:
    return lambda db: event(db, key, testimony, kind="spoken")


async def released(db: asyncpg.Pool, key: str) -> None:
    await old_claim(db, key, **ADA)
    assert (await call(db, "operator_release", key, "why", "me"))["outcome"] == "released"


async def released_by_a_pass(db: asyncpg.Pool) -> None:
    """Give `news:1` back for the content that the provider knows, for a day."""
    await old_claim(db, "news:1", timedelta(minutes=5), fingerprint="f", **ADA)
    await reconcile(db, key_window=timedelta(days=1))
    assert (await row(db, "news:1"))["release_basis"] == "same_key_retry"


HEARD = pytest.mark.parametrize(
    ("testimony", "told"),
    [
        ("accepted", ("already_sent", "accepted")),
        ("rejected", ("held", "rejected")),
        ("none", ("held", "unknown_event")),
    ],
)


@HEARD
async def test_a_retry_is_not_given_over_what_was_heard_while_it_waited(
    db: asyncpg.Pool, testimony: str, told: tuple[str, str]
) -> None:
    await released(db, "news:1")
    assert await claim_meanwhile(db, heard_of("news:1", testimony)) == told
    assert await state(db, "news:1") == ("sent" if testimony == "accepted" else "pending")


@HEARD
async def test_nor_is_a_first_claim(db: asyncpg.Pool, testimony: str, told: tuple[str, str]) -> None:
    assert await claim_meanwhile(db, heard_of("news:1", testimony)) == told
    assert await state(db, "news:1") == ("sent" if testimony == "accepted" else "pending")


@HEARD
async def test_nor_is_one_that_was_enqueued(db: asyncpg.Pool, testimony: str, told: tuple[str, str]) -> None:
    await call(db, "send_enqueue", "news:1", FEED, json.dumps(ADA))
    assert await claim_meanwhile(db, heard_of("news:1", testimony)) == told


async def soon(db: asyncpg.Pool, after: timedelta = timedelta(0)) -> str:
    at = await db.fetchval("SELECT clock_timestamp() + interval '2 s' + $1::interval", after)
    return at.isoformat()


async def until_then(db: asyncpg.Pool) -> None:
    """Wait until what is `soon` has passed, by the database's clock."""
    await db.execute("SELECT pg_sleep_until(max(coalesce(retry_until - interval '60 s', expires_at))) FROM send_log")


async def test_a_send_that_expired_while_it_waited_is_not_given_out(db: asyncpg.Pool) -> None:
    expires_at = await soon(db)
    await call(db, "send_enqueue", "news:1", FEED, json.dumps(ADA | {"expires_at": expires_at}))
    assert await claim_meanwhile(db, until_then) == ("expired", "expires_at has passed")
    found = await row(db, "news:1")
    assert (found["state"], found["attempt"]) == ("pending", 0)


async def test_a_same_key_retry_that_waited_too_long_is_not_given_out(db: asyncpg.Pool) -> None:
    await released_by_a_pass(db)
    await db.execute("UPDATE send_log SET retry_until = clock_timestamp() + interval '62 s'")
    told = await claim_meanwhile(db, until_then, fingerprint="f")
    assert told == ("held", "retry_window_over")


async def suspect(db: asyncpg.Pool) -> None:
    await db.execute("UPDATE feed_state SET suspect_at = clock_timestamp() WHERE feed = '*'")


async def test_a_database_that_became_suspect_while_it_waited_gives_out_nothing(db: asyncpg.Pool) -> None:
    assert await claim_meanwhile(db, suspect) == ("held", "suspect")


async def paused(db: asyncpg.Pool) -> None:
    """As whoever pauses begins; then he waits for the claims that are under way."""
    await db.execute(PAUSE, "*", "why", "me")


async def test_what_was_paused_while_it_waited_is_not_given_out(db: asyncpg.Pool) -> None:
    await released_by_a_pass(db)
    assert await claim_meanwhile(db, paused, fingerprint="f") == ("held", "paused")


async def suppressed(db: asyncpg.Pool) -> None:
    await db.execute("INSERT INTO suppression (recipient_key, source) VALUES ('ada@example.org', 'test')")


async def test_a_campaigns_send_to_somebody_suppressed_while_it_waited_is_not_given_out(db: asyncpg.Pool) -> None:
    await loaded(db, b"recipient\nada@example.org\n", replace(PLAN, message_class="marketing"))
    key = await db.fetchval("SELECT send_key FROM send_log")
    told = await while_ada_is_taken(db, lambda c: claim(c, key), suppressed)
    assert (told["outcome"], told["reason"]) == ("held", "suppressed")


async def test_a_batch_of_released_sends_leaves_out_what_was_heard_of_while_it_waited(db: asyncpg.Pool) -> None:
    await released(db, "news:1")
    await released(db, "news:2")
    claims = await while_ada_is_taken(
        db, lambda c: c.fetchval("CALL send_claim_released_commit($1, 9, '{}')", FEED), heard_of("news:1")
    )
    assert [one["send_key"] for one in json.loads(claims)] == ["news:2"]
    assert await state(db, "news:1") == "sent"


async def test_a_campaigns_batch_leaves_out_what_was_heard_of_while_it_waited(db: asyncpg.Pool) -> None:
    people = b"recipient\nada@example.org\nbob@example.org\n"
    await loaded(db, people, replace(PLAN, message_class="marketing"))
    key = await db.fetchval("SELECT send_key FROM send_log WHERE recipient = 'ada@example.org'")
    claims = await while_ada_is_taken(
        db, lambda c: c.fetchval("CALL send_claim_campaign_commit('spring', 9, '{}')"), heard_of(key)
    )
    assert [one["recipient"] for one in json.loads(claims)] == ["bob@example.org"]
    assert await state(db, key) == "sent"


async def test_a_campaigns_batch_leaves_out_who_was_suppressed_while_it_waited(db: asyncpg.Pool) -> None:
    await loaded(db, b"recipient\nada@example.org\n", replace(PLAN, message_class="marketing"))
    claims = await while_ada_is_taken(
        db, lambda c: c.fetchval("CALL send_claim_campaign_commit('spring', 9, '{}')"), suppressed
    )
    assert [(one["outcome"], one["reason"]) for one in json.loads(claims)] == [("failed", "suppressed")]


async def test_several_in_one_statement_leave_out_what_was_heard_of_while_they_waited(db: asyncpg.Pool) -> None:
    sends = {"news:1": ADA, "news:2": ADA | {"recipient": "bob@example.org"}}
    claims = await while_ada_is_taken(db, lambda c: guard_many.claim_many(c, sends, FEED), heard_of("news:1"))
    assert [one.outcome for one in claims] == ["already_sent", "claimed"]


async def test_what_is_refused_after_it_waited_leaves_no_empty_row_of_places(db: asyncpg.Pool) -> None:
    async with db.acquire() as first, db.acquire() as second:
        transaction = first.transaction()
        await transaction.start()
        assert (await claim(first, "another", **ADA))["outcome"] == "claimed"
        waiting = asyncio.create_task(claim(second, "news:1", **ADA))
        await until_it_waits(db, waiting)
        await event(db, "news:1")
        await transaction.rollback()
        assert (await waiting)["outcome"] == "already_sent"
    assert await db.fetchval("SELECT count(*) FROM cap_taken") == 0


# Without a cap


WAITED = "SELECT pg_sleep(0.2)"
"""What is no mere moment to a claim without a cap."""


async def test_without_a_cap_a_first_claim_that_waited_for_anothers_looks_at_the_clock_again(db: asyncpg.Pool) -> None:
    expires_at = await soon(db)
    async with db.acquire() as first, db.acquire() as second:
        transaction = first.transaction()
        await transaction.start()
        assert (await claim(first, "order:1", expires_at=expires_at))["outcome"] == "claimed"
        waiting = asyncio.create_task(claim(second, "order:1", expires_at=expires_at))
        await until_it_waits(db, waiting)
        await until_then(first)
        await transaction.rollback()
        told = await waiting
    assert (told["outcome"], told["reason"]) == ("expired", "expires_at has passed")


async def test_without_a_cap_a_retry_that_waited_for_whoever_pauses_looks_again(db: asyncpg.Pool) -> None:
    await keep_caps(db, [])
    await released_by_a_pass(db)
    async with db.acquire() as first, db.acquire() as second:
        async with first.transaction():
            await first.execute("SELECT FROM feed_state WHERE feed = '*' FOR UPDATE")
            waiting = asyncio.create_task(claim(second, "news:1", fingerprint="f", **ADA))
            await until_it_waits(db, waiting)
            await event(db, "news:1")
            await first.execute(WAITED)
        told = await waiting
    assert (told["outcome"], told["reason"]) == ("already_sent", "accepted")
