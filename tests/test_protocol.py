# SPDX-License-Identifier: Apache-2.0
"""Each trace by which the protocol was broken on paper (H..) or in SQL (E..), run against the real functions."""

from __future__ import annotations

import asyncio
import random
import string
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
    make_due,
    make_older,
    old_claim,
    reasons,
    reconcile,
    row,
    state,
    wait_until_somebody_waits_for_a_lock,
)

from reconciler.feeds import pause, resume
from webhooks.event import bounded_id

KEY = "order:1"
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
NOW = "SELECT clock_timestamp()"


async def release_by_pass(db: asyncpg.Pool, key: str = KEY) -> int:
    """A claim of which nothing was heard, between neighbours that were, released by a pass; returns its fence."""
    fence = await old_claim(db, key)
    await heard_neighbours(db)
    await reconcile(db)
    assert (await row(db, key))["release_basis"] == "absent"
    return fence


# H2: a late confirm is the best proof there is


async def test_h2_a_late_confirm_of_a_released_claim_makes_the_row_sent(db: asyncpg.Pool) -> None:
    fence = await release_by_pass(db)
    assert await confirm(db, KEY, fence) == "sent_late"
    assert await state(db, KEY) == "sent"
    assert (await claim(db, KEY))["outcome"] == "already_sent"


async def test_h2_a_late_confirm_corrects_a_failure(db: asyncpg.Pool) -> None:
    fence = (await claim(db, KEY))["fence"]
    await fail(db, KEY, fence, "422", not_sent=False)
    assert await confirm(db, KEY, fence) == "sent_late"
    assert await state(db, KEY) == "sent"


async def test_h2_a_late_confirm_ends_the_running_attempt_which_learns_of_it(db: asyncpg.Pool) -> None:
    first = await release_by_pass(db)
    second = (await claim(db, KEY))["fence"]
    assert await confirm(db, KEY, first, "m-first") == "sent_late"
    assert await state(db, KEY) == "sent"
    assert await confirm(db, KEY, second, "m-second") == "duplicate"
    assert await state(db, KEY) == "sent"


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


async def test_e1_a_claim_that_waited_for_the_row_sees_evidence_committed_meanwhile(db: asyncpg.Pool) -> None:
    fence = await old_claim(db, KEY)
    async with db.acquire() as releaser, db.acquire() as claimer:
        transaction = releaser.transaction()
        await transaction.start()
        assert await fail(releaser, KEY, fence, "refused", not_sent=True) == "released"
        # The claim's cheap look without a lock must not answer for it: it has to wait for the row itself.
        waiting = asyncio.create_task(call(claimer, "send_claim_unhurried", KEY, FEED))
        await wait_until_somebody_waits_for_a_lock(db)
        await event(db, KEY)
        await transaction.commit()
        assert (await waiting)["outcome"] == "already_sent"
    assert await state(db, KEY) == "sent"


@pytest.fixture(autouse=True)
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
        await wait_until_somebody_waits_for_a_lock(db)
        await transaction.commit()
        assert (await waiting)["outcome"] == "in_flight"


async def test_e1_a_claim_waiting_for_the_row_looks_after_it_got_it(db: asyncpg.Pool) -> None:
    await call(db, "send_enqueue", KEY, FEED, "{}")
    async with db.acquire() as holder, db.acquire() as claimer:
        transaction = holder.transaction()
        await transaction.start()
        await holder.execute("UPDATE send_log SET campaign = 'x'")
        waiting = asyncio.create_task(claim(claimer, KEY))
        await wait_until_somebody_waits_for_a_lock(db)
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
    await release_by_pass(db)
    for told, minutes in ((1, 1), (2, 5), (3, 15)):
        await make_older(db, KEY, timedelta(minutes=minutes))
        await reconcile(db)
        assert (await row(db, KEY))["told"] == told
    assert (await row(db, KEY))["next_check_at"] > await db.fetchval(NOW)


async def test_h6_a_released_row_past_its_expiry_fails(db: asyncpg.Pool) -> None:
    await release_by_pass(db)
    await db.execute("UPDATE send_log SET expires_at = clock_timestamp() WHERE wire_key = $1", await wire(db))
    await make_older(db, KEY, timedelta(minutes=2))
    await reconcile(db)
    assert (await row(db, KEY))["verdict_reason"] == "expired"


async def test_h6_a_released_row_becomes_sent_on_late_evidence(db: asyncpg.Pool) -> None:
    await release_by_pass(db)
    await event(db, KEY)
    await reconcile(db)
    assert await state(db, KEY) == "sent"


async def wire(db: asyncpg.Pool, key: str = KEY) -> str:
    return await db.fetchval("SELECT wire_key($1)", key)


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
    await release_by_pass(db)
    second = (await claim(db, KEY))["fence"]
    await event(db, KEY, "rejected")
    await reconcile(db)
    assert await state(db, KEY) == "claimed"
    assert await confirm(db, KEY, second) == "sent"


async def test_h8_acceptance_of_the_first_attempt_corrects_a_failure_of_the_second(db: asyncpg.Pool) -> None:
    await release_by_pass(db)
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


# H12, E10: pause


async def test_e10_nothing_is_released_after_pause_has_returned(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db)
    async with db.acquire() as pauser:
        await pause(pauser, FEED, "incident", "me")
    await reconcile(db)
    assert (await row(db, KEY))["held_reason"] == "paused"
    async with db.acquire() as pauser:
        assert await resume(pauser, FEED, "over", "me")
    await make_due(db, KEY)
    await reconcile(db)
    assert await state(db, KEY) == "pending"


async def test_e10_a_pass_that_has_decided_writes_nothing_past_a_pause(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db)
    async with db.acquire() as releaser, db.acquire() as pauser:
        transaction = releaser.transaction()
        await transaction.start()
        await releaser.execute("SELECT FROM feed_state WHERE feed = '*' FOR UPDATE")  # the pass must meet this lock
        running = asyncio.create_task(reconcile(db))
        await wait_until_somebody_waits_for_a_lock(db)
        await releaser.execute("INSERT INTO feed_state (feed, paused_at) VALUES ($1, clock_timestamp())", FEED)
        await transaction.commit()
        await running
        assert await pauser.fetchval("SELECT count(*) FROM verdict WHERE action = 'released'") == 0
    assert await state(db, KEY) == "claimed"


async def test_h12_a_pause_stops_claims_of_what_a_pass_released_but_not_first_ones(db: asyncpg.Pool) -> None:
    await release_by_pass(db)
    async with db.acquire() as pauser:
        await pause(pauser, "*", "incident", "me")
    answer = await claim(db, KEY)
    assert (answer["outcome"], answer["reason"]) == ("held", "paused")
    assert (await claim(db, "order:2"))["outcome"] == "claimed"


async def test_h12_an_operators_release_passes_a_pause_but_never_evidence_nor_submit_by(db: asyncpg.Pool) -> None:
    async with db.acquire() as pauser:
        await pause(pauser, "*", "incident", "me")
    await claim(db, "running")
    await old_claim(db, "silent")
    await old_claim(db, "spoken of")
    await event(db, "spoken of", "none", kind="unknown")
    await old_claim(db, "accepted")
    await event(db, "accepted")
    keys = ("running", "silent", "spoken of", "accepted", "nobody's")
    outcomes = [(await call(db, "operator_release", key, "checked", "me"))["outcome"] for key in keys]
    assert outcomes == ["refused", "released", "refused", "sent", "unknown_key"]
    assert (await claim(db, "silent"))["outcome"] == "claimed"


# H15: expiry


async def test_h15_a_claim_past_the_expiry_is_refused_and_a_pass_ends_the_row(db: asyncpg.Pool) -> None:
    past = (await db.fetchval("SELECT clock_timestamp() - interval '1 second'")).isoformat()
    await call(db, "send_enqueue", KEY, FEED, f'{{"expires_at": "{past}"}}')
    assert (await claim(db, KEY))["outcome"] == "expired"
    await reconcile(db)
    assert (await row(db, KEY))["verdict_reason"] == "expired"


async def test_h15_an_expired_claim_is_never_failed_while_the_feed_is_silent(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await db.execute("UPDATE send_log SET expires_at = clock_timestamp() - interval '1 hour'")
    await reconcile(db)
    assert await state(db, KEY) == "claimed"
    await heard_neighbours(db)
    await make_due(db, KEY)
    await reconcile(db)
    assert (await row(db, KEY))["verdict_reason"] == "expired"


# H16: one clock


async def test_h16_the_claim_answers_a_duration_never_a_wall_clock(db: asyncpg.Pool) -> None:
    answer = await claim(db, KEY, submit_within="90s")
    claimed = await row(db, KEY)
    assert answer["seconds_left"] == 90
    assert claimed["submit_by"] - claimed["claimed_at"] == timedelta(seconds=90)


# H22, E9: evidence in slow transactions


async def test_e9_evidence_in_a_slow_transaction_is_found_from_the_rows_side(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY, timedelta(minutes=5))
    fence = (await claim(db, "failed"))["fence"]
    await fail(db, "failed", fence, "422", not_sent=False)
    async with db.acquire() as slow:
        transaction = slow.transaction()
        await transaction.start()
        await event(slow, KEY)
        await event(slow, "failed", message_id="m-2")
        for n in range(3):  # later events are committed and passes run over them
            await event(db, f"other:{n}", message_id=f"o-{n}")
            await reconcile(db)
        await transaction.commit()
    await reconcile(db)
    assert [await state(db, KEY), await state(db, "failed")] == ["sent", "sent"]


# H23: message ids


async def test_h23_an_id_known_before_the_call_joins_events_without_a_key(db: asyncpg.Pool) -> None:
    await claim(db, KEY, known_message_id="guid-1")
    await event(db, None, message_id="guid-1")
    await reconcile(db)
    assert await state(db, KEY) == "sent"


async def test_h23_an_answers_id_in_brackets_is_the_one_that_events_name_without(db: asyncpg.Pool) -> None:
    fence = (await claim(db, KEY))["fence"]
    await confirm(db, KEY, fence, "<2026.1@mg.example>")
    assert (await row(db, KEY))["provider_message_id"] == "2026.1@mg.example"


async def test_case_075_an_answers_id_longer_than_an_index_entry_is_kept_as_its_hash(db: asyncpg.Pool) -> None:
    fence = (await claim(db, KEY))["fence"]
    long = "".join(random.Random(1).choices(string.ascii_letters, k=6001))
    assert await confirm(db, KEY, fence, long) == "sent"
    assert (await row(db, KEY))["provider_message_id"] == bounded_id(long)


async def test_h23_an_id_that_fits_several_rows_proves_nothing(db: asyncpg.Pool) -> None:
    for n in (1, 2):
        await claim(db, f"order:{n}", known_message_id="shared")
    await event(db, None, message_id="shared")
    await reconcile(db)
    assert [await state(db, "order:1"), await state(db, "order:2")] == ["claimed", "claimed"]


async def test_h23_the_recipient_tells_rows_of_one_message_id_apart(db: asyncpg.Pool) -> None:
    for name in ("ada", "bob"):
        await claim(db, name, known_message_id="shared", recipient=f"{name}@example.org")
    await event(db, None, message_id="shared", recipient="ada@example.org")
    await reconcile(db)
    assert [await state(db, "ada"), await state(db, "bob")] == ["sent", "claimed"]


async def test_h23_a_message_id_never_proves_acceptance_of_a_row_that_has_none(db: asyncpg.Pool) -> None:
    await claim(db, KEY, recipient="ada@example.org")
    await event(db, None, message_id="m-9", recipient="ada@example.org")
    await reconcile(db)
    assert await state(db, KEY) == "claimed"


# H24, E7: small things


async def test_e7_two_send_keys_with_one_wire_key_answer_key_reused(db: asyncpg.Pool) -> None:
    first = "order.receipt:1"
    await claim(db, first)
    wire_key = await wire(db, first)
    answer = await claim(db, wire_key)
    assert (answer["outcome"], answer["reason"]) == ("key_reused", "another send key has this wire key")


async def test_h24_other_content_under_a_known_key_is_refused(db: asyncpg.Pool) -> None:
    await claim(db, KEY, fingerprint="f")
    assert (await claim(db, KEY, fingerprint="g"))["outcome"] == "key_reused"
    assert (await claim(db, KEY))["outcome"] == "in_flight"


async def test_h24_the_same_call_again_gets_the_same_claim(db: asyncpg.Pool) -> None:
    first = await claim(db, KEY, nonce="call-1")
    again = await claim(db, KEY, nonce="call-1")
    assert (again["outcome"], again["fence"], again["attempt"]) == ("claimed", first["fence"], 1)
    assert again["seconds_left"] <= first["seconds_left"]
    assert (await claim(db, KEY, nonce="call-2"))["outcome"] == "in_flight"


async def test_h24_a_claim_that_nobody_would_look_at_can_not_exist(db: asyncpg.Pool) -> None:
    await claim(db, KEY)
    for column in ("next_check_at", "fence", "submit_by", "claimed_at"):
        with pytest.raises(asyncpg.CheckViolationError, match="claimed_is_watched"):
            await db.execute(f"UPDATE send_log SET {column} = NULL")  # noqa: S608
    fence = (await row(db, KEY))["fence"]
    await fail(db, KEY, fence, not_sent=True)
    with pytest.raises(asyncpg.CheckViolationError, match="released_is_watched"):
        await db.execute("UPDATE send_log SET next_check_at = NULL")


async def test_h24_a_fence_is_never_given_twice(db: asyncpg.Pool) -> None:
    fences = []
    for _ in range(5):
        fence = (await claim(db, KEY))["fence"]
        fences.append(fence)
        await fail(db, KEY, fence, not_sent=True)
    assert fences == sorted(set(fences))
    assert (await row(db, KEY))["not_sent_attempts"] == 5


async def test_h14_a_retry_on_another_feed_is_refused_while_an_attempt_may_have_been_accepted(db: asyncpg.Pool) -> None:
    await release_by_pass(db)
    assert (await claim(db, KEY, "other-feed"))["outcome"] == "other_feed"
    fence = (await claim(db, KEY))["fence"]
    await fail(db, KEY, fence, not_sent=True)
    assert (await claim(db, KEY, "other-feed"))["outcome"] == "other_feed"


async def test_h14_an_attempt_that_never_left_may_be_repeated_on_another_feed(db: asyncpg.Pool) -> None:
    fence = (await claim(db, KEY))["fence"]
    await fail(db, KEY, fence, not_sent=True)
    assert (await claim(db, KEY, "other-feed"))["outcome"] == "claimed"


async def test_unknown_options_and_bad_keys_are_refused_in_one_line(db: asyncpg.Pool) -> None:
    for key, feed, options, said in [
        (KEY, FEED, '{"recipent": "x"}', "unknown option: recipent"),
        ("", FEED, "{}", "1 to 255 bytes"),
        ("k" * 256, FEED, "{}", "this one has 256"),
        (KEY, "No Feed", "{}", "not a feed's name"),
        (KEY, FEED, "[]", "must be a JSON object"),
        (KEY, FEED, '{"submit_within": "2 days"}', "submit_within"),
    ]:
        with pytest.raises(asyncpg.InvalidParameterValueError, match=said):
            await call(db, "send_claim", key, feed, options)


async def test_a_job_older_than_the_guards_memory_is_refused(db: asyncpg.Pool) -> None:
    made = (await db.fetchval("SELECT clock_timestamp() - interval '31 days'")).isoformat()
    assert (await claim(db, KEY, intended_at=made))["outcome"] == "beyond_memory"
    assert await row(db, KEY) is None


async def test_case_062_failed_is_terminal_unless_an_operator_opens_it_again(db: asyncpg.Pool) -> None:
    fence = (await claim(db, KEY))["fence"]
    await fail(db, KEY, fence, "invalid_recipient", not_sent=False)
    assert (await claim(db, KEY))["outcome"] == "failed"
    assert (await call(db, "operator_release", KEY, "address corrected", "me"))["outcome"] == "released"
    assert (await claim(db, KEY))["outcome"] == "claimed"
