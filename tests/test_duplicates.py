# SPDX-License-Identifier: Apache-2.0
"""Duplicates: what proves one, what doesn't, that each is recorded once, and that one stops releases."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest
from kit import FEED, call, claim, confirm, event, fail, make_older, old_claim, release_by_pass, until_it_waits
from program import Program
from prometheus_client import REGISTRY

from reconciler.configuration.settings import Settings
from reconciler.insight.duplicates import Duplicate, look_at_events, look_at_retries
from reconciler.insight.findings import judge
from reconciler.insight.status import read_status
from reconciler.insight.watch import watch
from reconciler.passes import feeds
from reconciler.passes.feeds import MEET_WHOEVER_PAUSES

KEY = "order:1"
ADA, BOB = "ada@example.org", "bob@example.org"


async def look(db: asyncpg.Pool) -> list[Duplicate]:
    async with db.acquire() as connection:
        return await look_at_events(connection, "test")


async def found(db: asyncpg.Pool) -> list[tuple[str, str, str]]:
    """What a look finds that is new."""
    return [(d.wire_key, d.sort, d.because) for d in await look(db)]


async def wire_key(db: asyncpg.Pool, key: str = KEY) -> str:
    return await db.fetchval("SELECT wire_key($1)", key)


async def breaker(db: asyncpg.Pool, feed: str = FEED) -> str | None:
    """Why the feed's breaker is open; None: it is not."""
    return await db.fetchval("SELECT reason FROM feed_state WHERE feed = $1 AND breaker_at IS NOT NULL", feed)


async def two_attempts(db: asyncpg.Pool, key: str = KEY, **options: str) -> tuple[int, int]:
    """Claim a send, let an operator release it, and claim it again; returns both fences."""
    first = await old_claim(db, key, **options)
    assert (await call(db, "operator_release", key, "note", "ann"))["outcome"] == "released"
    return first, (await claim(db, key, **options))["fence"]


# What proves a duplicate


async def test_answers_to_two_attempts_prove_one(db: asyncpg.Pool) -> None:
    first, second = await two_attempts(db)
    await confirm(db, KEY, first, "m-1")
    assert await found(db) == []
    assert await confirm(db, KEY, second, "m-2") == "duplicate"
    assert await found(db) == [(await wire_key(db), "duplicate", "two_attempts")]


async def test_answers_without_ids_to_two_attempts_prove_one(db: asyncpg.Pool) -> None:
    for fence in await two_attempts(db):
        await confirm(db, KEY, fence, "")
    assert await found(db) == [(await wire_key(db), "duplicate", "two_attempts")]


async def test_one_message_answered_to_two_attempts_is_none(db: asyncpg.Pool) -> None:
    for fence in await two_attempts(db):
        await confirm(db, KEY, fence, "<m-1>")
    assert await found(db) == []


async def test_an_answer_without_an_id_to_a_retry_with_the_providers_key_proves_nothing(db: asyncpg.Pool) -> None:
    first, second = await two_attempts(db)
    await db.execute("UPDATE verdict SET reason = 'same_key_retry' WHERE action = 'released'")
    await confirm(db, KEY, first, "m-1")
    await confirm(db, KEY, second, "")
    assert await found(db) == [(await wire_key(db), "ids_differ", "answer_without_id")]
    assert await breaker(db) is None


@pytest.mark.parametrize("attempts", [1, 2])
async def test_two_messages_in_events_of_one_kind_for_one_recipient_prove_one(db: asyncpg.Pool, attempts: int) -> None:
    await (old_claim(db, KEY) if attempts == 1 else two_attempts(db))
    for message_id in ("m-1", "m-2"):
        await event(db, KEY, message_id=message_id, recipient=ADA)
    assert await found(db) == [(await wire_key(db), "duplicate", "two_ids")]


async def test_two_ids_in_events_of_different_kinds_prove_one(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await event(db, KEY, message_id="m-1", recipient=ADA, kind="delivered")
    await event(db, KEY, message_id="m-2", recipient=ADA, kind="bounced")
    assert await found(db) == [(await wire_key(db), "duplicate", "two_ids")]


async def test_two_ids_in_answers_to_one_attempt_about_one_recipient_prove_one(db: asyncpg.Pool) -> None:
    fence = await old_claim(db, KEY, recipient=ADA)
    for message_id in ("m-1", "m-2"):
        await confirm(db, KEY, fence, message_id)
    assert await found(db) == [(await wire_key(db), "duplicate", "two_ids")]


# What doesn't


@pytest.mark.parametrize("recipients", [(ADA, BOB), (None, None)], ids=["several", "unknown"])
@pytest.mark.parametrize("attempts", [1, 2])
async def test_ids_of_other_or_unknown_recipients_prove_nothing(
    db: asyncpg.Pool, attempts: int, recipients: tuple[str | None, str | None]
) -> None:
    await (old_claim(db, KEY, recipient=f"{ADA}, {BOB}") if attempts == 1 else two_attempts(db))
    for number, recipient in enumerate(recipients):
        await event(db, KEY, message_id=f"m-{number}", recipient=recipient, event_id=f"e-{number}")
    anything_less = [(await wire_key(db), "ids_differ", "ids_differ")]
    assert await found(db) == ([] if attempts == 1 else anything_less)
    assert await breaker(db) is None


@pytest.mark.parametrize("attempts", [1, 2])
async def test_an_answers_id_and_an_events_prove_nothing(db: asyncpg.Pool, attempts: int) -> None:
    fence = (await two_attempts(db, recipient=ADA))[1] if attempts == 2 else await old_claim(db, KEY, recipient=ADA)
    await confirm(db, KEY, fence, "m-1")
    await event(db, KEY, message_id="m-2", recipient=ADA)
    anything_less = [(await wire_key(db), "ids_differ", "ids_differ")]
    assert await found(db) == ([] if attempts == 1 else anything_less)
    assert await breaker(db) is None


@pytest.mark.parametrize("attempts", [1, 2])
@pytest.mark.parametrize(
    ("other", "differ"),
    [
        ({"message_id": "m-1"}, False),
        ({"message_id": "~stand-in"}, False),
        ({"testimony": "rejected"}, False),
        ({"source": "look-up"}, True),
    ],
    ids=["one_message", "no_id", "rejected", "another_kind_of_id"],
)
async def test_what_may_be_one_message_is_no_duplicate(
    db: asyncpg.Pool, attempts: int, other: dict[str, str], differ: bool
) -> None:
    await (old_claim(db, KEY) if attempts == 1 else two_attempts(db))
    await event(db, KEY, message_id="m-1", recipient=ADA)
    how = {"testimony": "accepted", "kind": "delivered", "message_id": "m-2", **other}
    source = how.pop("source", "http")
    await event(db, KEY, **how, recipient=ADA, event_id="other")  # type: ignore[arg-type]
    await db.execute("UPDATE provider_event SET source = $1 WHERE event_id = 'other'", source)
    anything_less = [(await wire_key(db), "ids_differ", "ids_differ")]
    assert await found(db) == (anything_less if differ and attempts == 2 else [])


async def test_the_same_message_told_by_two_feeds_is_one(db: asyncpg.Pool) -> None:
    await two_attempts(db)
    for feed in (FEED, "mg-queue"):
        await event(db, KEY, feed=feed, message_id="m-1", recipient=ADA)
    assert await found(db) == []


async def test_two_messages_of_a_key_that_no_row_has_are_nobodys_duplicate(db: asyncpg.Pool) -> None:
    for message_id in ("m-1", "m-2"):
        await event(db, "foreign", message_id=message_id, recipient=ADA)
    assert await found(db) == []


# Where candidates come from


async def test_events_years_apart_of_a_send_given_out_again_are_seen_when_the_second_comes(db: asyncpg.Pool) -> None:
    await two_attempts(db)
    await event(db, KEY, message_id="m-1", recipient=ADA)
    await db.execute("UPDATE provider_event SET received_at = received_at - interval '300 days'")
    await event(db, KEY, message_id="m-2", recipient=ADA)
    assert await found(db) == [(await wire_key(db), "duplicate", "two_ids")]


async def test_a_look_begins_where_the_last_one_ended_and_walks_a_little_again(db: asyncpg.Pool) -> None:
    assert await found(db) == []
    await db.execute("UPDATE feed_state SET duplicates_until = clock_timestamp() - interval '25 minutes'")
    for key, age in (("late", 26), ("before", 28)):
        await old_claim(db, key)
        for message_id in ("m-1", "m-2"):
            await event(db, key, message_id=message_id, recipient=ADA)
        await db.execute(
            "UPDATE provider_event SET received_at = clock_timestamp() - make_interval(mins => $2) WHERE wire_key = $1",
            key,
            age,
        )
    assert [key for key, _, _ in await found(db)] == ["late"]
    assert await db.fetchval(
        "SELECT clock_timestamp() - duplicates_until < interval '1 minute' FROM feed_state WHERE feed = '*'"
    )


async def test_an_answer_stored_in_a_long_transaction_is_found_by_the_thorough_look(db: asyncpg.Pool) -> None:
    first, second = await two_attempts(db)
    await confirm(db, KEY, first, "m-1")
    async with db.acquire() as slow:
        transaction = slow.transaction()
        await transaction.start()
        await confirm(slow, KEY, second, "m-2")
        await slow.execute("UPDATE provider_event SET received_at = received_at - interval '3 minutes'")
        assert await found(db) == []
        await transaction.commit()
    assert await found(db) == []
    async with db.acquire() as connection:
        (one,) = await look_at_retries(connection, datetime.now(UTC) - timedelta(days=7), "test")
        assert (one.wire_key, one.sort) == (await wire_key(db), "duplicate")
        assert await look_at_retries(connection, datetime.now(UTC) - timedelta(days=7), "test") == []


async def test_the_thorough_look_walks_all_pages_and_leaves_out_what_is_too_old(
    db: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reconciler.insight.duplicates.GIVEN_OUT_AGAIN", pages_of_one())
    for key in ("one", "two", "old"):
        for fence in await two_attempts(db, key):
            await confirm(db, key, fence, f"m-{fence}")
    await make_older(db, "old", timedelta(days=8))
    async with db.acquire() as connection:
        new = await look_at_retries(connection, datetime.now(UTC) - timedelta(days=7), "test")
    assert sorted(one.wire_key for one in new) == ["one", "two"]


def pages_of_one() -> str:
    from reconciler.insight.duplicates import GIVEN_OUT_AGAIN  # noqa: PLC0415

    assert "LIMIT 1000" in GIVEN_OUT_AGAIN
    return GIVEN_OUT_AGAIN.replace("LIMIT 1000", "LIMIT 1")


# What follows from one


async def duplicate(db: asyncpg.Pool, key: str = KEY) -> None:
    for fence in await two_attempts(db, key):
        await confirm(db, key, fence, f"m-{fence}")


async def test_each_is_recorded_and_counted_once_with_its_evidence_and_without_addresses(db: asyncpg.Pool) -> None:
    count = REGISTRY.get_sample_value("reconciler_duplicates_total", {"feed": FEED, "sort": "duplicate"}) or 0
    first, second = await two_attempts(db, recipient=ADA)
    await confirm(db, KEY, first, "m-1")
    await confirm(db, KEY, second, "m-2")
    assert len(await look(db)) == 1
    assert await look(db) == []
    recorded = await db.fetchrow("SELECT * FROM duplicate")
    assert (recorded["wire_key"], recorded["sort"], recorded["feed"]) == (await wire_key(db), "duplicate", FEED)
    evidence = json.loads(recorded["evidence"])
    assert evidence["because"] == "two_attempts"
    assert [(one["fence"], one["message_id"], one["road"]) for one in evidence["acceptances"]] == [
        (first, "m-1", "answer"),
        (second, "m-2", "answer"),
    ]
    assert ADA not in recorded["evidence"]
    counted = REGISTRY.get_sample_value("reconciler_duplicates_total", {"feed": FEED, "sort": "duplicate"})
    assert counted == count + 1


async def test_what_was_unclear_and_is_proved_later_is_recorded_as_both(db: asyncpg.Pool) -> None:
    first, second = await two_attempts(db)
    await confirm(db, KEY, second, "m-2")
    await event(db, KEY, message_id="m-1", recipient=ADA)
    assert [sort for _, sort, _ in await found(db)] == ["ids_differ"]
    await confirm(db, KEY, first, "m-1")
    assert [sort for _, sort, _ in await found(db)] == ["duplicate"]


async def test_one_stops_the_releases_of_its_feed_until_an_operator_resumes_and_only_once(
    db: asyncpg.Pool,
) -> None:
    await duplicate(db)
    await look(db)
    assert await breaker(db) == f"duplicate of {await wire_key(db)}: see reconciler report duplicates"
    assert (await claim(db, "other"))["outcome"] == "claimed"  # first claims go on
    async with db.acquire() as connection:
        assert await feeds.resume(connection, FEED, "the provider apologised", "ann")
        assert await look_at_events(connection, "test") == []
        assert await look_at_retries(connection, datetime.now(UTC) - timedelta(days=7), "test") == []
    assert await breaker(db) is None
    await duplicate(db, "order:2")
    assert len(await look(db)) == 1
    assert "duplicate of" in (await breaker(db) or "")


async def test_the_feed_whose_silence_was_believed_is_the_one_that_is_stopped(db: asyncpg.Pool) -> None:
    first = await release_by_pass(db, KEY)
    await db.execute("UPDATE send_log SET may_failover = true WHERE wire_key = wire_key($1)", KEY)
    second = (await claim(db, KEY, "resend-main"))["fence"]
    await confirm(db, KEY, second, "m-2")
    await confirm(db, KEY, first, "m-1")
    await look(db)
    assert (await breaker(db, FEED) is not None, await breaker(db, "resend-main")) == (True, None)


async def test_a_breaker_keeps_the_reason_of_the_hold_that_came_first(db: asyncpg.Pool) -> None:
    async with db.acquire() as connection:
        assert await feeds.open_breaker(connection, FEED, "first", "ann")
        assert not await feeds.open_breaker(connection, FEED, "second", "bob")
        assert await breaker(db) == "first"
        await feeds.pause(connection, "other", "maintenance", "ann")
        assert await feeds.open_breaker(connection, "other", "a breaker", "bob")
    row = await db.fetchrow(
        "SELECT reason, who, num_nonnulls(paused_at, breaker_at) FROM feed_state WHERE feed = 'other'"
    )
    assert tuple(row) == ("maintenance", "ann", 2)


async def test_whoever_opens_a_breaker_waits_for_the_releases_under_way(db: asyncpg.Pool) -> None:
    async with db.acquire() as releasing, db.acquire() as connection:
        transaction = releasing.transaction()
        await transaction.start()
        await releasing.execute(MEET_WHOEVER_PAUSES)
        opening = asyncio.create_task(feeds.open_breaker(connection, FEED, "why", "test"))
        await until_it_waits(db, opening)
        assert await breaker(db) == "why"  # it holds at once
        await transaction.commit()
        assert await opening


async def test_whoever_records_a_duplicate_waits_for_the_releases_under_way(db: asyncpg.Pool) -> None:
    await duplicate(db)
    async with db.acquire() as releasing:
        transaction = releasing.transaction()
        await transaction.start()
        await releasing.execute(MEET_WHOEVER_PAUSES)
        looking = asyncio.create_task(look(db))
        await until_it_waits(db, looking)
        assert await breaker(db) is not None
        await transaction.commit()
        assert len(await looking) == 1


async def test_two_processes_record_one_duplicate_once(db: asyncpg.Pool) -> None:
    await duplicate(db)
    both = await asyncio.gather(look(db), look(db))
    assert sorted(len(new) for new in both) == [0, 1]


async def test_status_tells_of_them_and_the_open_breaker_needs_a_person(db: asyncpg.Pool) -> None:
    await duplicate(db)
    _, second = await two_attempts(db, "order:2")
    await confirm(db, "order:2", second, "m-2")
    await event(db, "order:2", message_id="m-1", recipient=ADA)
    assert len(await look(db)) == 2
    settings = Settings.model_validate({"feeds": {FEED: {"provider": "mailgun", "secrets": ["key-0123456789abcdef"]}}})
    async with db.acquire() as connection:
        status = await read_status(connection, settings, lambda: datetime.now(UTC))
    lines = {one.code: one for one in judge(status, settings)}
    assert lines["duplicates"].line() == (
        f"duplicates {FEED}: 1 found within 7 days, the newest 0s ago: see reconciler report duplicates --feed {FEED}"
    )
    assert (lines["duplicates"].needs_person, lines["breaker"].needs_person) == (False, True)
    assert "report duplicates" in lines["breaker"].text
    await db.execute("UPDATE duplicate SET found_at = found_at - interval '8 days'")
    async with db.acquire() as connection:
        assert (await read_status(connection, settings, lambda: datetime.now(UTC))).duplicates == []


async def test_the_daemons_look_finds_one_and_its_first_is_thorough(db: asyncpg.Pool) -> None:
    await duplicate(db)
    await db.execute("UPDATE provider_event SET received_at = received_at - interval '3 hours'")
    look_now = watch(db, Settings(), timedelta(days=7), "daemon:1")
    await look_now()
    assert await db.fetchval("SELECT count(*) FROM duplicate") == 1
    assert await db.fetchval("SELECT who FROM feed_state WHERE feed = $1", FEED) == "daemon:1"
    await duplicate(db, "order:2")
    await look_now()
    assert await db.fetchval("SELECT count(*) FROM duplicate") == 2


# The report


async def test_the_report_lists_what_is_recorded_and_looks_only_when_asked(program: Program, db: asyncpg.Pool) -> None:
    await duplicate(db)
    done = await program("report", "duplicates")
    assert (done.exit_code, done.stdout) == (0, "no duplicate is recorded\n")
    done = await program("report", "duplicates", "--look")
    header, line, advice = done.stdout.splitlines()
    assert header.split("  ")[0] == "FOUND"
    assert line.split()[1:] == ["duplicate", "two_attempts", FEED, KEY, await wire_key(db)]
    assert "reconciler why KEY" in advice
    assert await breaker(db) is not None


async def test_the_report_is_of_a_feed_and_a_time(program: Program, db: asyncpg.Pool) -> None:
    await duplicate(db)
    await look(db)
    (one,) = await program.json("report", "duplicates", "--feed", FEED)
    assert (one["send_key"], one["sort"], len(one["acceptances"])) == (KEY, "duplicate", 2)
    assert await program.json("report", "duplicates", "--feed", "resend-main") == []
    await db.execute("UPDATE duplicate SET found_at = found_at - interval '8 days'")
    assert await program.json("report", "duplicates") == []
    assert len(await program.json("report", "duplicates", "--since", "9d")) == 1


async def test_a_failed_retry_is_no_duplicate(db: asyncpg.Pool) -> None:
    first, second = await two_attempts(db)
    await confirm(db, KEY, first, "m-1")
    assert await fail(db, KEY, second, "422", not_sent=False) == "sent"
    assert await found(db) == []
