# SPDX-License-Identifier: Apache-2.0
"""Each trace by which the protocol was broken on paper (H..) or in SQL (E..), run against the real functions."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import asyncpg
import pytest
from kit import (
    FEED,
    call,
    claim,
    confirm,
    event,
    fail,
    heard_neighbours,
    make_older,
    old_claim,
    reasons,
    reconcile,
    release_by_pass,
    row,
    state,
    until_it_waits,
)

KEY = "order:1"
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
NOW = "SELECT clock_timestamp()"


# H2: a late confirm is the best proof there is


async def test_h2_a_late_confirm_of_a_released_claim_makes_the_row_sent(db: asyncpg.Pool) -> None:
    fence = await release_by_pass(db, KEY)
    assert await confirm(db, KEY, fence) == "sent_late"
    assert await state(db, KEY) == "sent"
    assert (await claim(db, KEY))["outcome"] == "already_sent"


async def test_h2_a_late_confirm_corrects_a_failure(db: asyncpg.Pool) -> None:
    fence = (await claim(db, KEY))["fence"]
    await fail(db, KEY, fence, "422", not_sent=False)
    assert await confirm(db, KEY, fence) == "sent_late"
    assert await state(db, KEY) == "sent"


async def test_h2_a_late_confirm_ends_the_running_attempt_which_learns_of_it(db: asyncpg.Pool) -> None:
    first = await release_by_pass(db, KEY)
    second = (await claim(db, KEY))["fence"]
    assert await confirm(db, KEY, first, "m-first") == "sent_late"
    assert await state(db, KEY) == "sent"
    assert await confirm(db, KEY, second, "m-second") == "duplicate"
    assert await state(db, KEY) == "sent"


@pytest.mark.parametrize("by", ["http", "look-up"])
async def test_h2_an_attempt_that_was_made_again_learns_that_its_send_was_found_sent_meanwhile(
    db: asyncpg.Pool, by: str
) -> None:
    await release_by_pass(db, KEY)
    second = (await claim(db, KEY))["fence"]
    await event(db, KEY, message_id="m-first", source=by)
    await reconcile(db)
    told = [await call(db, "send_confirm", KEY, second, "m-second", "{}") for _ in range(2)]
    source = "feed" if by == "http" else by
    reason = f"it was sent already ({source}): an earlier attempt may have been accepted"
    assert [tuple(one) for one in told] == [("sent", reason)] * 2
    assert (await row(db, KEY))["verdict_source"] == source


@pytest.mark.parametrize("earlier", ["none", "not_sent"])
async def test_h2_evidence_that_can_only_be_of_the_attempt_itself_is_no_news_to_it(
    db: asyncpg.Pool, earlier: str
) -> None:
    if earlier == "not_sent":
        await fail(db, KEY, (await claim(db, KEY))["fence"], not_sent=True)
    fence = (await claim(db, KEY))["fence"]
    await event(db, KEY)
    await reconcile(db)
    assert await state(db, KEY) == "sent"
    assert tuple(await call(db, "send_confirm", KEY, fence, "m-1", "{}")) == ("sent", None)


async def test_h2_a_repeated_confirm_of_a_second_attempt_is_no_news_either(db: asyncpg.Pool) -> None:
    await release_by_pass(db, KEY)
    second = (await claim(db, KEY))["fence"]
    told = [tuple(await call(db, "send_confirm", KEY, second, "m-2", "{}")) for _ in range(2)]
    assert told == [("sent", None)] * 2


async def test_h2_an_answer_without_a_row_is_kept_and_forbids_the_first_claim(db: asyncpg.Pool) -> None:
    assert await confirm(db, KEY, 7) == "unknown_key"
    assert (await claim(db, KEY))["outcome"] == "already_sent"


async def test_h2_a_repeated_confirm_is_stored_once(db: asyncpg.Pool) -> None:
    fence = (await claim(db, KEY))["fence"]
    assert [await confirm(db, KEY, fence), await confirm(db, KEY, fence)] == ["sent", "sent"]
    assert await db.fetchval("SELECT count(*) FROM provider_event") == 1


# H4: the claim and the caller's transaction


async def test_h4_the_committing_claim_is_refused_inside_a_transaction(db: asyncpg.Pool) -> None:
    async with db.acquire() as connection:
        with pytest.raises(asyncpg.InvalidTransactionTerminationError):
            async with connection.transaction():
                await connection.fetchrow("CALL send_claim_commit($1, $2, '{}')", KEY, FEED)
    assert await row(db, KEY) is None


async def test_h4_a_claim_with_an_old_snapshot_is_refused(db: asyncpg.Pool) -> None:
    for isolation in ("repeatable_read", "serializable"):
        async with db.acquire() as connection:
            with pytest.raises(asyncpg.InvalidTransactionStateError, match="READ COMMITTED"):
                async with connection.transaction(isolation=isolation):
                    await claim(connection, KEY)


async def test_h4_a_claim_in_an_old_transaction_is_not_born_old(db: asyncpg.Pool) -> None:
    async with db.acquire() as connection, connection.transaction():
        began = await connection.fetchval("SELECT now()")
        before = await db.fetchval(NOW)
        await claim(connection, KEY)
        claimed_at = (await row(connection, KEY))["claimed_at"]
        assert began < before < claimed_at


# H5, E1, E2, E8: lock first, look afterwards


async def test_e1_a_claim_that_waited_for_the_row_sees_evidence_committed_meanwhile(
    db: asyncpg.Pool, unhurried_claim: None
) -> None:
    fence = await old_claim(db, KEY)
    async with db.acquire() as releaser, db.acquire() as claimer:
        transaction = releaser.transaction()
        await transaction.start()
        assert await fail(releaser, KEY, fence, "refused", not_sent=True) == "released"
        # The claim's cheap look without a lock must not answer for it: it has to wait for the row itself.
        waiting = asyncio.create_task(call(claimer, "send_claim_unhurried", KEY, FEED))
        await until_it_waits(db, waiting)
        await event(db, KEY)
        await transaction.commit()
        assert (await waiting)["outcome"] == "already_sent"
    assert await state(db, KEY) == "sent"


@pytest.fixture
async def unhurried_claim(db: asyncpg.Pool) -> None:
    """A claim that first waits for the row, as one does that read it while it was still pending."""
    await db.execute("""
        CREATE FUNCTION send_claim_unhurried(key text, feed text)
        RETURNS TABLE (outcome text, wire_key text, attempt int, fence bigint) LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM FROM send_log l WHERE l.wire_key = wire_key(key) FOR UPDATE;
            RETURN QUERY SELECT c.outcome, c.wire_key, c.attempt, c.fence FROM send_claim(key, feed, '{}') c;
        END $$
    """)


async def test_e1_two_claims_of_one_free_row_meet_at_its_lock_and_one_wins(db: asyncpg.Pool) -> None:
    await call(db, "send_enqueue", KEY, FEED, "{}")
    async with db.acquire() as one, db.acquire() as two:
        transaction = one.transaction()
        await transaction.start()
        assert (await claim(one, KEY))["outcome"] == "claimed"
        waiting = asyncio.create_task(claim(two, KEY))
        await until_it_waits(db, waiting)
        await transaction.commit()
        assert (await waiting)["outcome"] == "in_flight"


async def test_e1_a_claim_waiting_for_the_row_looks_after_it_got_it(db: asyncpg.Pool) -> None:
    await call(db, "send_enqueue", KEY, FEED, "{}")
    async with db.acquire() as holder, db.acquire() as claimer:
        transaction = holder.transaction()
        await transaction.start()
        await holder.execute("UPDATE send_log SET campaign = 'x'")
        waiting = asyncio.create_task(claim(claimer, KEY))
        await until_it_waits(db, waiting)
        await event(db, KEY)
        await transaction.commit()
        assert (await waiting)["outcome"] == "already_sent"


async def test_e2_what_a_pass_releases_over_evidence_in_flight_is_never_given_out(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db)
    async with db.acquire() as receiver:
        transaction = receiver.transaction()
        await transaction.start()
        await event(receiver, KEY)
        await reconcile(db)
        assert await state(db, KEY) == "pending"
        await transaction.commit()
    assert (await claim(db, KEY))["outcome"] == "already_sent"


async def test_e8_the_first_claim_looks_too(db: asyncpg.Pool) -> None:
    await event(db, KEY)
    assert (await claim(db, KEY))["outcome"] == "already_sent"
    assert await state(db, KEY) == "sent"


@pytest.mark.parametrize(("testimony", "reason"), [("rejected", "rejected"), ("none", "unknown_event")])
async def test_h5_anything_heard_forbids_a_claim_and_calls_the_next_pass(
    db: asyncpg.Pool, testimony: str, reason: str
) -> None:
    await event(db, KEY, testimony)
    answer = await claim(db, KEY)
    assert (answer["outcome"], answer["reason"]) == ("held", reason)
    assert (await row(db, KEY))["next_check_at"] <= await db.fetchval(NOW)


async def test_h5_the_senders_failure_looks_before_it_believes_itself(db: asyncpg.Pool) -> None:
    for not_sent in (True, False):
        key = f"order:{not_sent}"
        fence = (await claim(db, key))["fence"]
        await event(db, key)
        assert await fail(db, key, fence, not_sent=not_sent) == "sent"


# H6: a released row is watched


async def test_h6_a_released_row_that_nobody_claims_is_told_again_and_shown(db: asyncpg.Pool) -> None:
    await release_by_pass(db, KEY)
    waits = []
    for _ in range(4):
        wait = (await row(db, KEY))["next_check_at"] - await db.fetchval(NOW)
        waits.append(round(wait / timedelta(minutes=1)))
        await make_older(db, KEY, wait)
        await reconcile(db)
    assert waits == [1, 5, 15, 15]


async def test_h6_a_released_row_past_its_expiry_fails(db: asyncpg.Pool) -> None:
    await release_by_pass(db, KEY)
    await db.execute("UPDATE send_log SET expires_at = clock_timestamp() WHERE send_key = $1", KEY)
    await make_older(db, KEY, timedelta(minutes=2))
    await reconcile(db)
    assert (await row(db, KEY))["verdict_reason"] == "expired"


async def test_h6_a_released_row_becomes_sent_on_late_evidence(db: asyncpg.Pool) -> None:
    await release_by_pass(db, KEY)
    await event(db, KEY)
    await reconcile(db)
    assert await state(db, KEY) == "sent"


# H7: the window of a same-key retry


async def test_h7_a_same_key_release_is_refused_to_a_claim_that_could_outlast_the_window(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY, timedelta(minutes=5), fingerprint="f")
    await reconcile(db, key_window=DAY)
    released = await row(db, KEY)
    assert released["release_basis"] == "same_key_retry"
    await make_older(db, KEY, DAY - timedelta(minutes=16, seconds=30))
    answer = await claim(db, KEY, fingerprint="f")
    assert (answer["outcome"], answer["reason"]) == ("held", "retry_window_over")


async def test_h7_a_release_whose_window_is_over_is_the_same_claim_again(db: asyncpg.Pool) -> None:
    fence = await old_claim(db, KEY, timedelta(minutes=5), fingerprint="f")
    await reconcile(db, key_window=DAY)
    await make_older(db, KEY, DAY)
    await reconcile(db, key_window=DAY)
    after = await row(db, KEY)
    assert (after["state"], after["fence"], after["attempt"]) == ("claimed", fence, 1)
    assert after["held_reason"] is not None


async def test_h7_the_window_counts_from_the_first_claim_for_ever(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY, 20 * HOUR, fingerprint="f")
    await reconcile(db, key_window=DAY)
    first = (await row(db, KEY))["first_claimed_at"]
    assert (await claim(db, KEY, fingerprint="f"))["attempt"] == 2
    assert (await row(db, KEY))["first_claimed_at"] == first
    await make_older(db, KEY, 5 * HOUR)
    await reconcile(db, key_window=DAY)
    assert "released:same_key_retry" not in (await reasons(db, KEY))[1:]


async def test_h7_a_same_key_retry_needs_the_same_content(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY, timedelta(minutes=5), fingerprint="f")
    await reconcile(db, key_window=DAY)
    assert (await claim(db, KEY))["outcome"] == "key_reused"
    assert (await claim(db, KEY, fingerprint="g"))["outcome"] == "key_reused"
    assert (await claim(db, KEY, fingerprint="f"))["outcome"] == "claimed"


# H8: the state is a function of the set of testimonies


@pytest.mark.parametrize("order", [("accepted", "rejected"), ("rejected", "accepted")])
async def test_h8_acceptance_wins_in_either_order(db: asyncpg.Pool, order: tuple[str, str]) -> None:
    await claim(db, KEY)
    for testimony in order:
        await event(db, KEY, testimony, event_id=testimony)
        await reconcile(db)
    assert await state(db, KEY) == "sent"


async def test_h8_a_rejection_of_an_older_attempt_never_fails_a_running_one(db: asyncpg.Pool) -> None:
    await release_by_pass(db, KEY)
    second = (await claim(db, KEY))["fence"]
    await event(db, KEY, "rejected")
    await reconcile(db)
    assert await state(db, KEY) == "claimed"
    assert await confirm(db, KEY, second) == "sent"


async def test_h8_acceptance_of_the_first_attempt_corrects_a_failure_of_the_second(db: asyncpg.Pool) -> None:
    await release_by_pass(db, KEY)
    second = (await claim(db, KEY))["fence"]
    assert await fail(db, KEY, second, "422", not_sent=False) == "failed"
    await event(db, KEY)
    await reconcile(db)
    assert await state(db, KEY) == "sent"
    assert (await row(db, KEY))["failed_at"] is None


async def test_h8_an_operators_failure_is_corrected_too(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    assert (await call(db, "operator_decide", KEY, "failed", "gave up", "me"))["outcome"] == "failed"
    await event(db, KEY)
    await reconcile(db)
    assert await state(db, KEY) == "sent"
