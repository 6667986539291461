# SPDX-License-Identifier: Apache-2.0
"""What a pass writes repeats what it rests on: no hold, nothing heard by key or message id, one row that fits."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
from kit import (
    FEED,
    call,
    claim,
    confirm,
    event,
    fail,
    old_claim,
    reasons,
    reconcile,
    row,
    state,
    unlimited,
    until_it_waits,
)

from reconciler.passes import ledger, releasing
from reconciler.passes.ledger import Decided
from reconciler.rule.policy import Action, Verdict
from webhooks.inbox import LONGEST_SECONDS, Inbox

KEY = "order:1"
NOW = "SELECT clock_timestamp()"
HOLDS = ("paused_at", "breaker_at", "suspect_at")
AFTER_HOLDS = ("attempts", "expired", "gave_up", "unknown_event")
"""Failures that the rule yields for no row whose feed is on hold."""


async def decided(db: asyncpg.Pool, action: Action, reason: str, key: str = KEY) -> list[Decided]:
    """What a pass decided just now of a row as it is."""
    found = await row(db, key)
    verdict = Verdict(action, reason, next_check_at=await db.fetchval(NOW))
    return [Decided(found["wire_key"], found["state"], found["fence"], verdict, {})]


async def fail_by_pass(db: asyncpg.Pool, reason: str, key: str = KEY) -> bool:
    """Write that a row has failed; returns whether that moved it."""
    failed = await decided(db, Action.FAILED, reason, key)
    async with db.acquire() as connection:
        return bool(await ledger.fail(connection, failed, await db.fetchval(NOW), 1, "test"))


async def release(db: asyncpg.Pool, key: str = KEY) -> bool:
    """Write that a row is released; returns whether that moved it."""
    released = await decided(db, Action.RELEASED, "absent", key)
    async with db.acquire() as connection:
        done = await releasing.release(connection, released, unlimited, await db.fetchval(NOW), 1, "test")
    return bool(done.counts)


async def put_on_hold(db: asyncpg.Pool, hold: str, feed: str = FEED) -> None:
    await db.execute(
        f"INSERT INTO feed_state (feed, {hold}) VALUES ($1, clock_timestamp())"  # noqa: S608 - names are the test's own
        f" ON CONFLICT (feed) DO UPDATE SET {hold} = excluded.{hold}",
        feed,
    )


# Holds


@pytest.mark.parametrize("reason", AFTER_HOLDS)
@pytest.mark.parametrize("hold", HOLDS)
async def test_a_hold_that_comes_between_decision_and_failure_stops_the_failure(
    db: asyncpg.Pool, hold: str, reason: str
) -> None:
    await old_claim(db, KEY)
    await put_on_hold(db, hold)
    assert not await fail_by_pass(db, reason)
    assert await state(db, KEY) == "claimed"


async def test_a_hold_on_all_feeds_stops_the_failure_and_one_on_another_feed_does_not(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await put_on_hold(db, "suspect_at", "*")
    assert not await fail_by_pass(db, "attempts")
    await db.execute("UPDATE feed_state SET suspect_at = NULL")
    await put_on_hold(db, "paused_at", "another")
    assert await fail_by_pass(db, "attempts")


async def test_a_rejection_that_may_be_of_an_older_attempt_fails_no_send_whose_feed_is_on_hold(
    db: asyncpg.Pool,
) -> None:
    await old_claim(db, KEY)
    await call(db, "operator_release", KEY, "once more", "me")
    await old_claim(db, KEY)
    await event(db, KEY, "rejected")
    await put_on_hold(db, "paused_at")
    assert not await fail_by_pass(db, "rejected")
    await db.execute("UPDATE feed_state SET paused_at = NULL")
    assert await fail_by_pass(db, "rejected")


async def test_a_rejection_of_the_only_attempt_that_left_fails_its_send_whatever_is_on_hold(db: asyncpg.Pool) -> None:
    fence = (await claim(db, KEY))["fence"]
    await fail(db, KEY, fence, "never left", not_sent=True)
    assert (await claim(db, KEY))["attempt"] == 2
    await event(db, KEY, "rejected")
    await put_on_hold(db, "suspect_at", "*")
    assert await fail_by_pass(db, "rejected")


async def test_a_send_that_waits_for_its_claim_expires_whatever_is_on_hold(db: asyncpg.Pool) -> None:
    past = (await db.fetchval("SELECT clock_timestamp() - interval '1 second'")).isoformat()
    await call(db, "send_enqueue", KEY, FEED, f'{{"expires_at": "{past}"}}')
    await put_on_hold(db, "paused_at", "*")
    await reconcile(db)
    assert await reasons(db, KEY) == ["failed:expired"]


async def test_a_pass_that_has_decided_fails_nothing_past_a_pause(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    async with db.acquire() as pauser:
        transaction = pauser.transaction()
        await transaction.start()
        await pauser.execute("SELECT FROM feed_state WHERE feed = '*' FOR UPDATE")  # as whoever pauses does
        failing = asyncio.create_task(fail_by_pass(db, "attempts"))
        await until_it_waits(db, failing)
        await put_on_hold(db, "paused_at")
        await transaction.commit()
        assert not await failing
    assert await state(db, KEY) == "claimed"


# What was heard by message id


async def by_known_id(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY, known_message_id="op-1", recipient="ada@example.org")


async def by_answers_id(db: asyncpg.Pool) -> None:
    """The answer's id of an attempt that a person took back."""
    await old_claim(db, KEY, recipient="ada@example.org")
    await db.execute("UPDATE send_log SET provider_message_id = 'op-1'")


IDS = [by_known_id, by_answers_id]


@pytest.mark.parametrize("make", IDS)
async def test_acceptance_heard_by_message_id_between_decision_and_failure_stops_the_failure(
    db: asyncpg.Pool, make: Any
) -> None:
    await make(db)
    await event(db, None, message_id="op-1", recipient="ada@example.org")
    assert not await fail_by_pass(db, "attempts")
    assert await state(db, KEY) == "claimed"


@pytest.mark.parametrize("testimony", ["accepted", "rejected", "none"])
@pytest.mark.parametrize("make", IDS)
async def test_anything_heard_by_message_id_between_decision_and_release_stops_the_release(
    db: asyncpg.Pool, make: Any, testimony: str
) -> None:
    await make(db)
    await event(db, None, testimony, message_id="op-1")
    assert not await release(db)
    assert await state(db, KEY) == "claimed"


async def test_what_is_said_by_message_id_of_another_recipient_stops_nothing(db: asyncpg.Pool) -> None:
    await by_known_id(db)
    await event(db, None, message_id="op-1", recipient="bob@example.org")
    assert await release(db)
    await claim(db, KEY)
    assert await fail_by_pass(db, "attempts")


async def test_a_release_names_the_message_id_of_the_attempt_it_ends_known_before_the_call_or_not(
    db: asyncpg.Pool,
) -> None:
    await by_known_id(db)
    assert await release(db)
    assert await db.fetchval("SELECT message_id FROM verdict WHERE action = 'released'") == "op-1"


# What became of messages that share an id


async def sent(db: asyncpg.Pool, key: str, message_id: str = "shared", **options: Any) -> None:
    await confirm(db, key, (await claim(db, key, **options))["fence"], message_id)


async def deliveries(db: asyncpg.Pool) -> dict[str, str | None]:
    return {r["send_key"]: r["delivery"] for r in await db.fetch("SELECT send_key, delivery FROM send_log")}


async def hear_first(db: asyncpg.Pool, what: dict[str, Any]) -> None:
    await event(db, None, **what)
    await sent(db, "ada", recipient="ada@example.org")
    await sent(db, "bob", recipient="bob@example.org")


async def hear_afterwards(db: asyncpg.Pool, what: dict[str, Any]) -> None:
    await sent(db, "ada", recipient="ada@example.org")
    await sent(db, "bob", recipient="bob@example.org")
    await event(db, None, **what)
    await reconcile(db)


BOUNCED: dict[str, Any] = {"kind": "bounced", "message_id": "shared"}


async def test_an_outcome_that_may_be_of_two_sends_is_of_neither(db: asyncpg.Pool) -> None:
    await hear_afterwards(db, BOUNCED)
    assert await deliveries(db) == {"ada": None, "bob": None}


@pytest.mark.parametrize("hear", [hear_first, hear_afterwards])
async def test_an_outcome_that_names_its_recipient_is_of_the_one_send_that_it_fits(db: asyncpg.Pool, hear: Any) -> None:
    await hear(db, {**BOUNCED, "recipient": "ada@example.org"})
    assert await deliveries(db) == {"ada": "bounced", "bob": None}


async def test_an_outcome_that_was_there_is_not_of_the_second_send_with_its_message_id(db: asyncpg.Pool) -> None:
    """The first had it while it was the only one: nobody could know."""
    await hear_first(db, BOUNCED)
    assert await deliveries(db) == {"ada": "bounced", "bob": None}


async def test_an_outcome_is_of_neither_where_one_sends_recipient_is_unknown(db: asyncpg.Pool) -> None:
    await sent(db, "ada", recipient="ada@example.org")
    await sent(db, "unknown")
    await event(db, None, recipient="ada@example.org", **BOUNCED)
    await reconcile(db)
    assert await deliveries(db) == {"ada": None, "unknown": None}


async def test_an_outcome_is_of_neither_where_the_other_send_knew_the_id_before_the_call(db: asyncpg.Pool) -> None:
    await claim(db, "known", known_message_id="shared")
    await sent(db, "answered")
    await event(db, None, **BOUNCED)
    await reconcile(db)
    assert await deliveries(db) == {"known": None, "answered": None}


async def test_what_is_said_of_two_sends_does_not_hide_what_is_said_of_one(db: asyncpg.Pool) -> None:
    await sent(db, "ada", recipient="ada@example.org")
    await sent(db, "bob", recipient="bob@example.org")
    await event(db, None, **BOUNCED)
    await event(db, None, kind="delivered", message_id="shared", recipient="ada@example.org")
    await event(db, "bob", kind="deferred", message_id="shared")
    await reconcile(db)
    assert await deliveries(db) == {"ada": "delivered", "bob": "deferred"}


async def test_late_acceptance_of_a_failed_send_brings_no_outcome_that_may_be_anothers(db: asyncpg.Pool) -> None:
    await fail(db, KEY, (await claim(db, KEY, known_message_id="shared"))["fence"], not_sent=False)
    await sent(db, "other")
    await event(db, KEY, kind="delivered")
    await event(db, None, **BOUNCED)
    await reconcile(db)
    assert await deliveries(db) == {KEY: "delivered", "other": None}


async def test_an_outcome_that_was_there_of_another_recipient_is_not_the_sends(db: asyncpg.Pool) -> None:
    await event(db, None, recipient="ada@example.org", **BOUNCED)
    await sent(db, "bob", recipient="bob@example.org")
    assert await deliveries(db) == {"bob": None}


async def test_an_outcome_that_was_there_is_not_of_the_second_send_that_knows_its_id(db: asyncpg.Pool) -> None:
    await claim(db, "known", known_message_id="shared")
    await event(db, None, **BOUNCED)
    await sent(db, "answered")
    assert await deliveries(db) == {"known": None, "answered": None}


@pytest.mark.parametrize("first", [True, False])
async def test_a_send_of_another_feed_with_the_same_id_takes_no_outcome_away(db: asyncpg.Pool, first: bool) -> None:
    await confirm(db, "other", (await claim(db, "other", feed="another"))["fence"], "shared")
    if first:
        await event(db, None, **BOUNCED)
    await sent(db, KEY)
    if not first:
        await event(db, None, **BOUNCED)
        await reconcile(db)
    assert await deliveries(db) == {"other": None, KEY: "bounced"}


# How far back outcomes are read again


def test_no_inbox_may_take_longer() -> None:
    with pytest.raises(ValueError, match="25 seconds"):
        Inbox(seconds=LONGEST_SECONDS + 1)


async def test_an_outcome_committed_as_late_as_an_inbox_may_is_followed_after_all(db: asyncpg.Pool) -> None:
    await sent(db, KEY, "m-1")
    await reconcile(db)
    await event(db, None, kind="bounced", message_id="m-1")
    longest = timedelta(seconds=LONGEST_SECONDS)
    await db.execute("UPDATE provider_event SET received_at = received_at - $1::interval", longest)
    await reconcile(db)
    assert (await row(db, KEY))["delivery"] == "bounced"
