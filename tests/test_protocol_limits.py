# SPDX-License-Identifier: Apache-2.0
"""The traces about limits: pauses, expiry, clocks, slow transactions, message ids, and content under a known key."""

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
    reconcile,
    release_by_pass,
    row,
    state,
    until_it_waits,
)

from reconciler.passes.feeds import pause, resume
from webhooks.event import bounded_id

KEY = "order:1"
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
NOW = "SELECT clock_timestamp()"


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
        await until_it_waits(db, running)
        await releaser.execute("INSERT INTO feed_state (feed, paused_at) VALUES ($1, clock_timestamp())", FEED)
        await transaction.commit()
        await running
        assert await pauser.fetchval("SELECT count(*) FROM verdict WHERE action = 'released'") == 0
    assert await state(db, KEY) == "claimed"


async def test_h12_a_pause_stops_claims_of_what_a_pass_released_but_not_first_ones(db: asyncpg.Pool) -> None:
    await release_by_pass(db, KEY)
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


async def test_h12_an_operators_release_of_what_its_sender_called_failed_waits_for_submit_by_too(
    db: asyncpg.Pool,
) -> None:
    await fail(db, KEY, (await claim(db, KEY))["fence"], "422", not_sent=False)
    until = (await row(db, KEY))["submit_by"]
    refused = await call(db, "operator_release", KEY, "address corrected", "me")
    assert refused["outcome"] == "refused"
    assert refused["reason"].startswith(f"its sender may still submit until {until:%Y-%m-%d %H:%M:%S}")
    assert await state(db, KEY) == "failed"
    await make_older(db, KEY, timedelta(seconds=61))
    assert (await call(db, "operator_release", KEY, "address corrected", "me"))["outcome"] == "released"


async def test_h12_while_the_database_is_suspect_not_even_an_operator_releases(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await db.execute("UPDATE feed_state SET suspect_at = clock_timestamp() WHERE feed = '*'")
    refused = await call(db, "operator_release", KEY, "checked", "me")
    assert (refused["outcome"], refused["reason"].partition(":")[2]) == ("refused", " resume first")
    assert await state(db, KEY) == "claimed"
    async with db.acquire() as connection:
        await resume(connection, "*", "gap filled", "me")
    assert (await call(db, "operator_release", KEY, "checked", "me"))["outcome"] == "released"


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


async def test_h23_an_event_about_another_recipient_proves_nothing_of_the_only_row_with_its_message_id(
    db: asyncpg.Pool,
) -> None:
    await claim(db, KEY, known_message_id="m-1", recipient="ada@example.org")
    await event(db, None, message_id="m-1", recipient="bob@example.org")
    await reconcile(db)
    assert await state(db, KEY) == "claimed"


async def test_h23_a_message_id_never_proves_acceptance_of_a_row_that_has_none(db: asyncpg.Pool) -> None:
    await claim(db, KEY, recipient="ada@example.org")
    await event(db, None, message_id="m-9", recipient="ada@example.org")
    await reconcile(db)
    assert await state(db, KEY) == "claimed"


# H24, E7: small things


async def test_e7_two_send_keys_with_one_wire_key_answer_key_reused(db: asyncpg.Pool) -> None:
    first = "order.receipt:1"
    await claim(db, first)
    wire_key = (await row(db, first))["wire_key"]
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
    await release_by_pass(db, KEY)
    assert (await claim(db, KEY, "other-feed"))["outcome"] == "other_feed"
    fence = (await claim(db, KEY))["fence"]
    await fail(db, KEY, fence, not_sent=True)
    assert (await claim(db, KEY, "other-feed"))["outcome"] == "other_feed"


async def test_h14_an_attempt_that_never_left_may_be_repeated_on_another_feed(db: asyncpg.Pool) -> None:
    fence = (await claim(db, KEY))["fence"]
    await fail(db, KEY, fence, not_sent=True)
    assert (await claim(db, KEY, "other-feed"))["outcome"] == "claimed"


async def test_h14_after_an_attempt_elsewhere_that_never_left_the_feed_of_the_ambiguous_one_is_open_again(
    db: asyncpg.Pool,
) -> None:
    await fail_over(db, "sg")
    third = await claim(db, KEY, "third")
    assert (third["outcome"], third["reason"]) == ("other_feed", f"an attempt on {FEED} may have been accepted")
    assert (await claim(db, KEY))["outcome"] == "claimed"


async def test_h14_an_attempt_that_never_left_may_be_repeated_where_it_was_allowed(db: asyncpg.Pool) -> None:
    await fail_over(db, "sg")
    assert (await claim(db, KEY, "sg"))["outcome"] == "claimed"


async def test_h14_of_two_feeds_with_an_attempt_out_the_newest_binds(db: asyncpg.Pool) -> None:
    await fail_over(db, "sg")
    await claim(db, KEY, "sg")
    await make_older(db, KEY, timedelta(hours=1))
    assert (await call(db, "operator_release", KEY, "checked", "me"))["outcome"] == "released"
    back = await claim(db, KEY)
    assert (back["outcome"], back["reason"]) == ("other_feed", "an attempt on sg may have been accepted")


async def fail_over(db: asyncpg.Pool, feed: str) -> None:
    """An attempt whose fate nobody knows, and one on another feed, which was allowed and never left."""
    await release_by_pass(db, KEY)
    await db.execute("UPDATE send_log SET may_failover = true WHERE wire_key = wire_key($1)", KEY)
    assert await fail(db, KEY, (await claim(db, KEY, feed))["fence"], not_sent=True) == "released"


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
    await make_older(db, KEY, timedelta(seconds=61))
    assert (await call(db, "operator_release", KEY, "address corrected", "me"))["outcome"] == "released"
    assert (await claim(db, KEY))["outcome"] == "claimed"
