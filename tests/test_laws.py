# SPDX-License-Identifier: Apache-2.0
"""Laws that no other test holds: who looks after waiting, what is never written, what is no control."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
from kit import (
    FEED,
    call,
    claim,
    event,
    fail,
    make_older,
    old_claim,
    reasons,
    reconcile,
    release_by_pass,
    row,
    state,
    unlimited,
    until_it_waits,
)

from reconciler import guard
from reconciler.database.connection import BEGINNING
from reconciler.passes import ledger, releasing
from reconciler.passes.evidence import settle_watched
from reconciler.passes.feeds import MEET_WHOEVER_PAUSES, pause
from reconciler.passes.ledger import Decided
from reconciler.rule.limits import ALL_LIVE
from reconciler.rule.policy import Action, Verdict
from webhooks.event import Event, Kind, Testimony
from webhooks.inbox import Inbox
from webhooks.provider import Delivery
from webhooks.registry import PROVIDERS

KEY = "order:1"
HOUR = timedelta(hours=1)
NOW = "SELECT clock_timestamp()"


# Lock first, look afterwards


WHO_WAITS = {
    "send_fail": "SELECT outcome FROM send_fail('order:1', $1, 'refused', true)",
    "operator_release": "SELECT outcome FROM operator_release('order:1', 'note', 'fence ' || $1::bigint)",
    "operator_decide": "SELECT outcome FROM operator_decide('order:1', 'failed', 'note', 'fence ' || $1::bigint)",
}


@pytest.mark.parametrize("who", WHO_WAITS)
async def test_whoever_waited_for_the_row_sees_evidence_committed_meanwhile(db: asyncpg.Pool, who: str) -> None:
    fence = await old_claim(db, KEY)
    async with db.acquire() as holder:
        transaction = holder.transaction()
        await transaction.start()
        await holder.execute("UPDATE send_log SET campaign = 'x'")
        waiting = asyncio.create_task(db.fetchval(WHO_WAITS[who], fence))
        await until_it_waits(db, waiting)
        await event(db, KEY)
        await transaction.commit()
        assert await waiting == "sent"
    assert await state(db, KEY) == "sent"


@pytest.mark.parametrize("who", WHO_WAITS)
async def test_whoever_would_look_with_an_old_snapshot_is_refused(db: asyncpg.Pool, who: str) -> None:
    fence = await old_claim(db, KEY)
    async with db.acquire() as connection:
        with pytest.raises(asyncpg.InvalidTransactionStateError, match="READ COMMITTED"):
            async with connection.transaction(isolation="repeatable_read"):
                await connection.fetchval(WHO_WAITS[who], fence)


async def test_evidence_of_any_feed_forbids_a_claim(db: asyncpg.Pool) -> None:
    await event(db, KEY, feed="another")
    assert (await claim(db, KEY))["outcome"] == "already_sent"


async def test_a_claim_over_acceptance_and_rejection_is_already_sent(db: asyncpg.Pool) -> None:
    for testimony in ("none", "rejected", "accepted"):
        await event(db, KEY, testimony, event_id=testimony)
    assert (await claim(db, KEY))["outcome"] == "already_sent"


async def test_acceptance_and_rejection_that_one_pass_finds_together_are_sent(db: asyncpg.Pool) -> None:
    await claim(db, KEY)
    for testimony in ("rejected", "accepted"):
        await event(db, KEY, testimony, event_id=testimony)
    await reconcile(db)
    assert await reasons(db, KEY) == ["sent:accepted"]


async def test_an_operator_can_not_fail_what_was_accepted(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await event(db, KEY)
    assert (await call(db, "operator_decide", KEY, "failed", "note", "me"))["outcome"] == "sent"


async def test_an_operator_can_not_fail_a_send_that_may_still_be_submitted(db: asyncpg.Pool) -> None:
    await claim(db, KEY)
    assert (await call(db, "operator_decide", KEY, "failed", "note", "me"))["outcome"] == "refused"
    assert await state(db, KEY) == "claimed"


# Every change repeats its condition


async def test_a_rejection_that_a_pass_saw_before_a_claim_never_fails_that_claim(db: asyncpg.Pool) -> None:
    await release_by_pass(db, KEY)
    async with db.acquire() as claimer:
        transaction = claimer.transaction()
        await transaction.start()
        assert (await claim(claimer, KEY))["outcome"] == "claimed"
        await event(db, KEY, "rejected")
        running = asyncio.create_task(reconcile(db))
        await until_it_waits(db, running)
        await transaction.commit()
        await running
    assert await state(db, KEY) == "claimed"


async def test_a_late_failure_of_an_older_attempt_never_ends_the_running_one(db: asyncpg.Pool) -> None:
    first = await release_by_pass(db, KEY)
    assert (await claim(db, KEY))["attempt"] == 2
    assert await fail(db, KEY, first, "422", not_sent=False) == "not_yours"
    assert await state(db, KEY) == "claimed"


WRITES = {"release": Action.RELEASED, "fail": Action.FAILED, "postpone": Action.HELD}


async def write_verdict(db: asyncpg.Pool, verb: str, fence: int) -> Any:
    """Write what a pass decided just now of a claim."""
    now = await db.fetchval(NOW)
    verdict = Verdict(WRITES[verb], "absent", next_check_at=now)
    decided = [Decided((await row(db, KEY))["wire_key"], "claimed", fence, verdict, {})]
    async with db.acquire() as connection:
        if verb == "postpone":
            return await ledger.postpone(connection, decided, 1, "test")
        if verb == "release":
            return (await releasing.release(connection, decided, unlimited, now, 1, "test")).counts
        return await ledger.fail(connection, decided, now, 1, "test")


@pytest.mark.parametrize("verb", WRITES)
async def test_a_verdict_on_an_older_claim_changes_nothing(db: asyncpg.Pool, verb: str) -> None:
    first = await old_claim(db, KEY)
    await fail(db, KEY, first, not_sent=True)
    await claim(db, KEY)
    before = await row(db, KEY)
    assert not await write_verdict(db, verb, first)
    assert await row(db, KEY) == before


@pytest.mark.parametrize("verb", WRITES)
async def test_sent_is_left_by_no_verdict(db: asyncpg.Pool, verb: str) -> None:
    fence = await old_claim(db, KEY)
    assert (await call(db, "operator_decide", KEY, "sent", "seen in the inbox", "me"))["outcome"] == "sent"
    assert not await write_verdict(db, verb, fence)
    assert await state(db, KEY) == "sent"


async def test_sent_is_left_by_no_operator_and_no_sender(db: asyncpg.Pool) -> None:
    fence = await old_claim(db, KEY)
    await call(db, "operator_decide", KEY, "sent", "seen in the inbox", "me")
    assert (await call(db, "operator_release", KEY, "note", "me"))["outcome"] == "refused"
    assert (await call(db, "operator_decide", KEY, "failed", "note", "me"))["outcome"] == "refused"
    assert await fail(db, KEY, fence, not_sent=True) == "sent"
    await event(db, KEY, "rejected")
    await reconcile(db)
    assert await state(db, KEY) == "sent"


async def test_acceptance_that_commits_between_decision_and_failure_stops_the_failure(db: asyncpg.Pool) -> None:
    fence = await old_claim(db, KEY)
    await event(db, KEY)
    assert not await write_verdict(db, "fail", fence)
    assert await state(db, KEY) == "claimed"


async def test_a_page_that_one_pass_has_taken_is_left_alone_by_the_others(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    async with db.acquire() as connection:
        now = await db.fetchval(NOW)
        assert await ledger.take_due(connection, now, None) == [(await row(db, KEY))["wire_key"]]
        assert await ledger.take_due(connection, now, None) == []


MANY_OF_ONE_MOMENT = """
INSERT INTO send_log (wire_key, send_key, feed, state, attempt, fence, first_claimed_at, claimed_at, submit_by,
                      next_check_at, failed_at, verdict_source, verdict_reason)
SELECT 'many-' || lpad(n::text, 5, '0'), 'many-' || lpad(n::text, 5, '0'), 'mg', $1, 1, n, t, t, t,
    CASE WHEN $1 = 'claimed' THEN t + interval '1 day' END, CASE WHEN $1 = 'failed' THEN t END,
    CASE WHEN $1 = 'failed' THEN 'sender' END, CASE WHEN $1 = 'failed' THEN 'why' END
FROM generate_series(1, 11000) AS n, (SELECT clock_timestamp() - interval '1 hour') AS old(t)
"""


LAST_OF_EACH_HALF = """
SELECT max(wire_key) AS key FROM send_log GROUP BY hashtext(wire_key) & 1 HAVING count(*) > 5000
"""


@pytest.mark.parametrize("of_state", ["claimed", "failed"])
async def test_more_rows_of_one_moment_than_a_page_holds_are_all_looked_at(db: asyncpg.Pool, of_state: str) -> None:
    """There are so many that the page of either half of them is full, and the last of each half is heard of."""
    await db.execute(MANY_OF_ONE_MOMENT, of_state)
    last = [row["key"] for row in await db.fetch(LAST_OF_EACH_HALF)]
    for key in last:
        await event(db, key)
    await reconcile(db)
    assert [await state(db, key) for key in last] == ["sent", "sent"]


async def test_the_two_halves_of_the_undecided_rows_are_all_of_them_and_share_none(db: asyncpg.Pool) -> None:
    await db.execute(MANY_OF_ONE_MOMENT, "claimed")
    await db.execute("DELETE FROM send_log WHERE wire_key > 'many-00100'")
    keys = [f"many-{n:05}" for n in range(1, 101)]
    for key in keys:
        await event(db, key)
    moved = []
    for half in (0, 1):
        async with db.acquire() as connection:
            page = await settle_watched(connection, BEGINNING, None, None, ALL_LIVE, 1, "test", half)
        moved.append(page.sent)
    assert sum(moved) == 100
    assert min(moved) > 20


async def test_an_attempt_that_never_left_is_no_older_attempt(db: asyncpg.Pool) -> None:
    fence = (await claim(db, KEY))["fence"]
    await fail(db, KEY, fence, not_sent=True)
    assert (await claim(db, KEY))["attempt"] == 2
    await event(db, KEY, "rejected", reason="suppressed")
    await reconcile(db)
    assert (await row(db, KEY))["verdict_reason"] == "rejected"


FINAL = "next_check_at = NULL, verdict_source = 'sender', verdict_reason = 'x'"


@pytest.mark.parametrize(
    ("change", "constraint"),
    [
        ("attempt = 0", "claimed_is_watched"),
        ("released_at = now(), release_basis = 'absent'", "released_is_watched"),
        ("release_basis = 'absent'", "basis_belongs_to_release"),
        ("retry_until = now()", "retry_until_belongs_to_same_key"),
        (f"state = 'sent', {FINAL}", "sent_has_its_time"),
        (f"state = 'failed', {FINAL}", "failed_has_its_time"),
        ("state = 'sent', sent_at = now(), next_check_at = NULL", "verdict_has_its_source"),
        (f"state = 'sent', sent_at = now(), {FINAL}".replace("NULL", "now()"), "final_is_not_watched"),
        ("held_reason = 'silent'", "held_has_its_time"),
        ("not_sent_attempts = 2", "not_sent_is_part_of_attempts"),
    ],
)
async def test_a_row_that_contradicts_itself_can_not_exist(db: asyncpg.Pool, change: str, constraint: str) -> None:
    await claim(db, KEY)
    with pytest.raises(asyncpg.CheckViolationError, match=constraint):
        await db.execute(f"UPDATE send_log SET {change}")  # noqa: S608


# Holds


async def test_a_suspect_feed_gives_out_no_claim_at_all(db: asyncpg.Pool) -> None:
    await db.execute("INSERT INTO feed_state (feed, suspect_at) VALUES ($1, clock_timestamp())", FEED)
    answer = await claim(db, KEY)
    assert (answer["outcome"], answer["reason"]) == ("held", "suspect")


async def test_a_claim_of_what_a_pass_released_meets_whoever_is_pausing(db: asyncpg.Pool) -> None:
    await release_by_pass(db, KEY)
    async with db.acquire() as pauser:
        transaction = pauser.transaction()
        await transaction.start()
        await pause(pauser, FEED, "incident", "me")
        waiting = asyncio.create_task(claim(db, KEY))
        await until_it_waits(db, waiting)
        await transaction.commit()
        answer = await waiting
    assert (answer["outcome"], answer["reason"]) == ("held", "paused")


async def test_a_pause_waits_for_the_releases_under_way(db: asyncpg.Pool) -> None:
    async with db.acquire() as releaser, db.acquire() as pauser:
        transaction = releaser.transaction()
        await transaction.start()
        await releaser.execute(MEET_WHOEVER_PAUSES)
        waiting = asyncio.create_task(pause(pauser, FEED, "incident", "me"))
        await until_it_waits(db, waiting)
        await transaction.commit()
        await waiting
    assert await db.fetchval("SELECT paused_at IS NOT NULL FROM feed_state WHERE feed = $1", FEED)


# The same call and the same content


async def test_a_repeated_call_gets_no_claim_once_submit_by_has_passed(db: asyncpg.Pool) -> None:
    await claim(db, KEY, nonce="call-1")
    await make_older(db, KEY, HOUR)
    assert (await claim(db, KEY, nonce="call-1"))["outcome"] == "in_flight"


async def test_the_first_fingerprint_given_is_kept(db: asyncpg.Pool) -> None:
    await call(db, "send_enqueue", KEY, FEED, "{}")
    await claim(db, KEY, fingerprint="f")
    assert (await claim(db, KEY, fingerprint="g"))["outcome"] == "key_reused"


async def enqueue(db: Any, **options: Any) -> str:
    return (await call(db, "send_enqueue", KEY, FEED, json.dumps(options)))["outcome"]


async def test_the_first_fingerprint_that_is_enqueued_is_kept_though_the_row_was_there_without_one(
    db: asyncpg.Pool,
) -> None:
    assert [await enqueue(db), await enqueue(db, fingerprint="f"), await enqueue(db)] == [
        "enqueued",
        "exists",
        "exists",
    ]
    assert await enqueue(db, fingerprint="g") == "key_reused"
    assert (await claim(db, KEY, fingerprint="g"))["outcome"] == "key_reused"
    assert (await claim(db, KEY, fingerprint="f"))["outcome"] == "claimed"


async def test_of_two_fingerprints_that_are_enqueued_at_once_one_is_kept_and_the_other_is_told(
    db: asyncpg.Pool,
) -> None:
    await enqueue(db)
    async with db.acquire() as other:
        transaction = other.transaction()
        await transaction.start()
        await other.execute("SELECT FROM send_log FOR UPDATE")  # both have seen none when they come to write theirs
        both = [asyncio.create_task(enqueue(db, fingerprint=name)) for name in "fg"]
        await until_it_waits(db, *both)
        await transaction.commit()
    told = dict(zip("fg", await asyncio.gather(*both), strict=True))
    assert sorted(told.values()) == ["exists", "key_reused"]
    assert told[(await row(db, KEY))["fingerprint"]] == "exists"


async def test_what_was_submitted_without_a_fingerprint_gets_none_by_being_enqueued_again(db: asyncpg.Pool) -> None:
    await claim(db, KEY)
    assert await enqueue(db, fingerprint="f") == "exists"
    assert (await row(db, KEY))["fingerprint"] is None


# The sender's guard


class Stopwatch:
    """An executor that notes when the database was asked."""

    def __init__(self, pool: asyncpg.Pool) -> None:
        self.pool = pool
        self.asked_at = 0.0

    async def fetchrow(self, query: str, /, *args: Any) -> Any:
        self.asked_at = guard.boot_time()
        return await self.pool.fetchrow(query, *args)


async def test_the_deadline_counts_from_before_the_question_not_from_the_answer(db: asyncpg.Pool) -> None:
    stopwatch = Stopwatch(db)
    claimed = await guard.claim(stopwatch, KEY, FEED, submit_within=30)
    assert claimed.deadline <= stopwatch.asked_at + 30


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="this system has no boot-time clock")
def test_deadlines_run_on_the_clock_that_goes_on_while_the_machine_sleeps() -> None:
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= guard.boot_time() <= time.clock_gettime(time.CLOCK_BOOTTIME)


async def test_confirm_and_fail_are_refused_inside_a_transaction(db: asyncpg.Pool) -> None:
    claimed = await guard.claim(db, KEY, FEED)
    async with db.acquire() as connection, connection.transaction():
        with pytest.raises(guard.GuardError, match="inside a transaction"):
            await guard.confirm(connection, claimed, "m-1")
        with pytest.raises(guard.GuardError, match="inside a transaction"):
            await guard.fail(connection, claimed, "time-out", not_sent=None)


# Batches


async def test_a_batch_goes_into_its_statement_sorted_by_key(db: asyncpg.Pool) -> None:
    box = Inbox()
    await box.open(db)
    events = [
        Event(kind=Kind.DELIVERED, testimony=Testimony.ACCEPTED, message_id="m", event_id="e", send_key=f"order-{n}")
        for n in (3, 1, 4, 0, 2)
    ]
    assert await box.store(FEED, events) == (5, 0)
    await box.close()
    written = await db.fetch("SELECT wire_key FROM provider_event ORDER BY ctid")
    assert [key for (key,) in written] == [f"order-{n}" for n in range(5)]


# Deadlocks


async def let_the_first_write_end_as_a_deadlock(db: asyncpg.Pool, table: str) -> None:
    """A sequence is not rolled back: the first statement fails as one that a deadlock ended, later ones don't."""
    await db.execute(f"""
        CREATE SEQUENCE writes;
        CREATE FUNCTION end_the_first() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF nextval('writes') = 1 THEN RAISE deadlock_detected; END IF;
            RETURN NEW;
        END $$;
        CREATE TRIGGER end_the_first BEFORE INSERT OR UPDATE ON {table} FOR EACH ROW EXECUTE FUNCTION end_the_first();
    """)


async def test_a_pass_that_a_deadlock_ended_is_done_again_and_counts_it(db: asyncpg.Pool) -> None:
    await claim(db, KEY)
    await event(db, KEY)
    await let_the_first_write_end_as_a_deadlock(db, "send_log")
    assert (await reconcile(db)).counts["retried"] == 1
    assert await state(db, KEY) == "sent"


async def test_a_batch_that_a_deadlock_ended_is_stored_after_all(db: asyncpg.Pool) -> None:
    await let_the_first_write_end_as_a_deadlock(db, "provider_event")
    box = Inbox()
    await box.open(db)
    one = Event(kind=Kind.DELIVERED, testimony=Testimony.ACCEPTED, message_id="m", event_id="e", send_key="order-1")
    assert await box.store(FEED, [one]) == (1, 0)
    await box.close()


# What is not understood


def test_an_event_that_sendgrid_does_not_document_proves_nothing() -> None:
    body = b'[{"event": "teleported", "sg_event_id": "e", "sg_message_id": "m.1", "send_key": "order-1"}]'
    (found,) = PROVIDERS["sendgrid"].parse(Delivery(body, {})).events
    assert (found.kind, found.testimony, found.send_key) == (Kind.UNKNOWN, Testimony.NONE, "order-1")
