# SPDX-License-Identifier: Apache-2.0
"""Keys that drift: what was asked for again is noted and never slows a claim down; the report names no address."""

from __future__ import annotations

import asyncio
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from kit import FEED, call, claim, confirm, fail, make_older, release_by_pass, row, state
from program import Program

from reconciler.database.migrate import default_folder, migrate
from reconciler.insight import drift
from reconciler.insight.drift import Drift, key_drift

KEY = "order.receipt:1:ada@example.org"
ADA = "ada@example.org"
HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)


async def sent(db: Any, key: str, ago: timedelta = timedelta(0), feed: str = FEED, **options: Any) -> None:
    """A send that was claimed and answered so long ago."""
    fence = (await claim(db, key, feed, **options))["fence"]
    await confirm(db, key, fence, f"m-{key}")
    await make_older(db, key, ago)
    await db.execute("UPDATE send_log SET sent_at = sent_at - $2::interval WHERE wire_key = wire_key($1)", key, ago)


async def asked(db: Any, key: str) -> tuple[int, str] | None:
    found = await db.fetchrow("SELECT n, asked_as FROM asked_again WHERE wire_key = wire_key($1)", key)
    return found and (found["n"], found["asked_as"])


async def note(db: asyncpg.Pool) -> asyncpg.Record:
    (only,) = await db.fetch("SELECT * FROM asked_again")
    return only


async def later(db: Any, by: timedelta) -> None:
    await db.execute("UPDATE asked_again SET asked_at = asked_at - $1::interval", by)


# What is noted


async def test_a_send_asked_for_again_long_after_it_was_sent_is_noted(db: asyncpg.Pool) -> None:
    await sent(db, KEY, timedelta(minutes=11))
    assert (await claim(db, KEY))["outcome"] == "already_sent"
    assert await asked(db, KEY) == (1, "already_sent")


async def test_a_job_that_comes_twice_within_ten_minutes_is_no_news(db: asyncpg.Pool) -> None:
    await sent(db, KEY, timedelta(minutes=9))
    assert (await claim(db, KEY))["outcome"] == "already_sent"
    assert await asked(db, KEY) is None


async def test_a_key_asked_for_with_other_content_or_by_another_key_is_noted_at_once(db: asyncpg.Pool) -> None:
    await claim(db, KEY, fingerprint="f")
    wire_key = (await row(db, KEY))["wire_key"]
    assert (await claim(db, KEY, fingerprint="g"))["outcome"] == "key_reused"
    assert await asked(db, KEY) == (1, "key_reused")
    await later(db, 2 * MINUTE)
    assert (await claim(db, wire_key))["outcome"] == "key_reused"
    assert await asked(db, KEY) == (2, "key_reused")
    assert await state(db, KEY) == "claimed"


async def test_it_counts_at_most_once_a_minute_and_keeps_the_first_time(db: asyncpg.Pool) -> None:
    await sent(db, KEY, HOUR)
    await claim(db, KEY)
    first = await note(db)
    await claim(db, KEY)
    assert await note(db) == first
    await later(db, timedelta(seconds=55))
    await claim(db, KEY)
    assert await asked(db, KEY) == (1, "already_sent")
    await later(db, timedelta(seconds=6))
    await claim(db, KEY)
    last = await note(db)
    assert (last["n"], last["first_at"]) == (2, first["first_at"])
    assert last["asked_at"] > first["asked_at"]


async def test_what_is_in_flight_failed_or_free_was_not_swallowed(db: asyncpg.Pool) -> None:
    await claim(db, "running")
    await claim(db, "running")
    await fail(db, "failed", (await claim(db, "failed"))["fence"], not_sent=False)
    await make_older(db, "failed", HOUR)
    assert (await claim(db, "failed"))["outcome"] == "failed"
    await fail(db, "free", (await claim(db, "free"))["fence"], not_sent=True)
    assert (await claim(db, "free"))["outcome"] == "claimed"
    assert await db.fetchval("SELECT count(*) FROM asked_again WHERE asked_as <> 'failed'") == 0


async def test_a_thousand_callers_of_one_key_write_once(db: asyncpg.Pool) -> None:
    await sent(db, KEY, HOUR)
    answers = await asyncio.gather(*(claim(db, KEY) for _ in range(1000)))
    assert {answer["outcome"] for answer in answers} == {"already_sent"}
    noted = await note(db)
    assert (noted["n"], noted["asked_at"]) == (1, noted["first_at"])


async def test_nobody_waits_to_note_it(db: asyncpg.Pool) -> None:
    await sent(db, KEY, HOUR)
    async with db.acquire() as slow, slow.transaction():
        await slow.execute("SELECT FROM send_log FOR UPDATE")
        async with asyncio.timeout(10):
            assert (await claim(db, KEY))["outcome"] == "already_sent"
    assert await asked(db, KEY) is None
    async with db.acquire() as slow, slow.transaction():
        await claim(slow, KEY)  # notes it, and has not committed
        async with asyncio.timeout(10):
            assert (await claim(db, KEY))["outcome"] == "already_sent"
    assert await asked(db, KEY) == (1, "already_sent")


async def test_what_was_noted_goes_with_its_send(db: asyncpg.Pool) -> None:
    await sent(db, KEY, HOUR)
    await claim(db, KEY)
    await db.execute("DELETE FROM send_log")
    assert await db.fetchval("SELECT count(*) FROM asked_again") == 0


async def test_a_sender_needs_no_right_to_the_new_table(db: asyncpg.Pool) -> None:
    await sent(db, KEY, HOUR)
    role = f"sender_{(await db.fetchval('SELECT current_database()'))[2:]}"
    async with db.acquire() as connection, connection.transaction():
        await connection.execute(
            f"CREATE ROLE {role}; GRANT USAGE ON SCHEMA public TO {role};"
            f"GRANT EXECUTE ON FUNCTION send_claim(text, text, jsonb) TO {role}; SET LOCAL ROLE {role}"
        )
        assert (await claim(connection, KEY))["outcome"] == "already_sent"
        await connection.execute(f"RESET ROLE; DROP OWNED BY {role}; DROP ROLE {role}")
    assert await asked(db, KEY) == (1, "already_sent")


async def test_a_sender_goes_on_while_the_migration_comes(empty_dsn: str, tmp_path: Path) -> None:
    for path in sorted(default_folder().glob("*.sql"))[:13]:
        shutil.copy(path, tmp_path)
    await migrate(empty_dsn, folder=tmp_path)
    connection = await asyncpg.connect(empty_dsn)  # with plans made before
    for _ in range(6):
        await claim(connection, KEY)
    await sent(connection, "other", HOUR)
    assert (await migrate(empty_dsn))[0] == "0014_drift.sql"
    assert (await claim(connection, KEY))["outcome"] == "in_flight"
    assert (await claim(connection, "other"))["outcome"] == "already_sent"
    assert await asked(connection, "other") == (1, "already_sent")
    await connection.close()


# The report


async def look(db: asyncpg.Pool, within: timedelta = HOUR, limit: int = 50, *feeds: str) -> Drift:
    async with db.acquire() as connection:
        since = datetime.now(UTC) - timedelta(days=7)
        return await key_drift(connection, feeds or (FEED, "resend-main"), since, within, limit)


async def attempt(db: asyncpg.Pool, key: str, ago: timedelta, feed: str = FEED, **options: Any) -> None:
    """A send to Ada that nobody answered, claimed so long ago."""
    await claim(db, key, feed, **{"recipient": ADA, "fingerprint": "f"} | options)
    await make_older(db, key, ago)


async def test_equal_content_to_one_address_under_several_keys_is_shown(db: asyncpg.Pool) -> None:
    await attempt(db, "job-1", 180 * MINUTE)
    await sent(db, "job-2", 125 * MINUTE, "resend-main", recipient="Ada <ADA@Example.org>", fingerprint="f")
    await attempt(db, "job-3", 70 * MINUTE)
    found = await look(db)
    (group,) = found.repeated
    assert (group.message_class, group.feeds, group.n, group.sent) == ("default", [FEED, "resend-main"], 3, 1)
    assert group.wire_keys == ["job-1", "job-2", "job-3"]
    assert timedelta(minutes=109) < group.last_at - group.first_at < timedelta(minutes=111)
    assert (found.looked_at, found.compared, found.swallowed) == (3, 3, [])


async def test_what_lies_apart_or_differs_or_can_not_be_compared_is_not(db: asyncpg.Pool) -> None:
    await attempt(db, "job-1", 180 * MINUTE)
    await attempt(db, "later", 119 * MINUTE)
    await attempt(db, "other-content", 119 * MINUTE, fingerprint="g")
    await attempt(db, "other-class", 119 * MINUTE, message_class="news")
    await attempt(db, "other-address", 119 * MINUTE, recipient="bob@example.org")
    await attempt(db, "several", 119 * MINUTE, recipient=f"{ADA}, bob@example.org")
    await attempt(db, "no-fingerprint", 119 * MINUTE, fingerprint=None)
    await attempt(db, "also-without", 119 * MINUTE, fingerprint=None)
    found = await look(db)
    assert (found.repeated, found.looked_at, found.compared) == ([], 8, 5)
    assert [group.wire_keys for group in (await look(db, 62 * MINUTE)).repeated] == [["job-1", "later"]]


async def test_two_bouts_of_one_message_are_two_lines(db: asyncpg.Pool) -> None:
    for key, ago in (("a-1", 300), ("a-2", 290), ("b-1", 100), ("b-2", 90), ("b-3", 80)):
        await attempt(db, key, ago * MINUTE)
    assert [g.wire_keys for g in (await look(db)).repeated] == [["b-1", "b-2", "b-3"], ["a-1", "a-2"]]
    assert [g.n for g in (await look(db, HOUR, 1)).repeated] == [3]


async def test_what_was_sent_twice_comes_before_what_was_tried_often(db: asyncpg.Pool) -> None:
    for n in range(3):
        await attempt(db, f"tried-{n}", n * MINUTE)
    for n in range(2):
        await sent(db, f"sent-{n}", HOUR + n * MINUTE, recipient="bob@example.org", fingerprint="f")
    assert [(g.n, g.sent) for g in (await look(db)).repeated] == [(2, 2), (3, 0)]


async def test_a_send_claimed_again_counts_from_its_first_claim_and_alone_is_no_drift(db: asyncpg.Pool) -> None:
    await attempt(db, "job-1", 5 * HOUR)
    await call(db, "operator_release", "job-1", "checked", "me")
    await claim(db, "job-1")
    assert (await look(db)).repeated == []
    await attempt(db, "job-2", 5 * HOUR)
    (group,) = (await look(db)).repeated
    assert (group.n, group.last_at - group.first_at < MINUTE) == (2, True)


async def test_the_report_looks_at_the_newest_claims_of_each_feed(
    db: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await attempt(db, "old-1", 30 * MINUTE)
    await attempt(db, "old-2", 20 * MINUTE)
    await attempt(db, "new", 5 * HOUR, "resend-main")
    monkeypatch.setattr(drift, "MOST_CLAIMS", 1)
    found = await look(db)
    assert (found.looked_at, found.repeated) == (2, [])


async def test_the_report_shows_both_without_an_address(program: Program, db: asyncpg.Pool) -> None:
    assert (await program("report", "drift")).stdout == (
        "looked at 0 sends, 0 of them with recipient and fingerprint\n"
        "no message has several keys, and none was asked for again\n"
    )
    await sent(db, KEY, HOUR, recipient=ADA, fingerprint="f", message_class="receipts")
    await sent(db, f"{KEY}:try-2", HOUR, recipient=ADA, fingerprint="f", message_class="receipts")
    await claim(db, KEY)
    wire_key = (await row(db, KEY))["wire_key"]
    done = await program("report", "drift")
    lines = [line.split() for line in done.stdout.splitlines() if line]
    assert lines[0][:3] == ["looked", "at", "2"]
    assert lines[1] == ["CLASS", "FEED", "KEYS", "SENT", "FIRST", "LAST", "SOME", "OF", "THEM"]
    assert (lines[2][:4], lines[2][6]) == (["receipts", FEED, "2", "2"], f"{wire_key},")
    assert lines[4] == ["FEED", "CLASS", "AS", "TIMES", "SENT", "LAST", "ASKED", "WIRE", "KEY"]
    assert (lines[5][:4], lines[5][-1]) == ([FEED, "receipts", "already_sent", "1"], wire_key)
    told = await program("report", "drift", "--json")
    assert "example.org" not in done.output + told.output
    found = await program.json("report", "drift", "--within", "10m", "--limit", "1", "--feed", FEED)
    assert (found["looked_at"], found["compared"]) == (2, 2)
    (group,), (swallowed,) = found["repeated"], found["swallowed"]
    assert (group["n"], group["sent"], group["feeds"], group["message_class"]) == (2, 2, [FEED], "receipts")
    assert (swallowed["wire_key"], swallowed["asked_as"], swallowed["n"]) == (wire_key, "already_sent", 1)
    elsewhere = await program.json("report", "drift", "--feed", "resend-main")
    assert elsewhere == {"looked_at": 0, "compared": 0, "repeated": [], "swallowed": []}
    assert (await program.json("report", "drift", "--since", "1m"))["repeated"] == []


async def test_swallowed_sends_come_newest_first_and_as_many_as_were_asked_for(db: asyncpg.Pool) -> None:
    for n in range(3):
        await sent(db, f"s-{n}", HOUR)
        await claim(db, f"s-{n}")
    await db.execute("UPDATE asked_again SET asked_at = asked_at - interval '8 days' WHERE wire_key = 's-0'")
    assert [s.wire_key for s in (await look(db)).swallowed] == ["s-2", "s-1"]
    assert [s.wire_key for s in (await look(db, HOUR, 1)).swallowed] == ["s-2"]


async def test_the_report_of_an_unknown_feed_or_a_limit_of_none_is_refused(program: Program) -> None:
    done = await program("report", "drift", "--feed", "resend-mian")
    assert done.stderr == 'reconciler: no feed is named "resend-mian": did you mean "resend-main"?\n'
    assert (await program("report", "drift", "--limit", "0")).exit_code == 2
    assert (await program("report", "drift", "--within", "soon")).exit_code == 2


async def test_the_report_changes_nothing(program: Program, db: asyncpg.Pool) -> None:
    await sent(db, KEY, HOUR)
    await claim(db, KEY)
    before = await db.fetch("SELECT * FROM send_log, asked_again")
    assert (await program("report", "drift")).exit_code == 0
    assert await db.fetch("SELECT * FROM send_log, asked_again") == before


# What the database makes of a key


async def test_case_062_a_job_delivered_again_sends_nothing_after_a_failure_and_something_after_a_release(
    db: asyncpg.Pool,
) -> None:
    await fail(db, "failed", (await claim(db, "failed"))["fence"], "invalid_recipient", not_sent=False)
    answers = [await claim(db, "failed", claimed_by=f"delivery {n}") for n in (2, 3)]
    assert [(a["outcome"], a["reason"], a["fence"]) for a in answers] == [("failed", "invalid_recipient", None)] * 2
    failed = await row(db, "failed")
    assert (failed["state"], failed["attempt"], failed["claimed_by"]) == ("failed", 1, None)
    await release_by_pass(db, "released")
    answer = await claim(db, "released")
    assert (answer["outcome"], answer["attempt"]) == ("claimed", 2)


@pytest.mark.parametrize("key", ["k" * 256, "ü" * 128, "", None])
async def test_case_075_no_function_takes_a_key_that_an_index_might_not(db: asyncpg.Pool, key: str | None) -> None:
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("send_enqueue", (key, FEED, "{}")),
        ("send_claim", (key, FEED, "{}")),
        ("send_confirm", (key, 1, "m-1", "{}")),
        ("send_fail", (key, 1, "why", True)),
    ]
    for name, args in calls:
        with pytest.raises(
            asyncpg.InvalidParameterValueError, match="a send key is text of 1 to 255 bytes, this one has"
        ):
            await call(db, name, *args)
    with pytest.raises(asyncpg.InvalidParameterValueError, match="1 to 255 bytes"):
        await db.fetchrow("CALL send_claim_commit($1, $2, $3::jsonb)", key, FEED, "{}")
    assert await db.fetchval("SELECT count(*) FROM send_log") == 0


@pytest.mark.parametrize("key", ["k" * 255, "ü" * 127 + "x"])
async def test_case_075_a_key_of_255_bytes_is_taken(db: asyncpg.Pool, key: str) -> None:
    assert (await claim(db, key))["outcome"] == "claimed"
    assert (await row(db, key))["send_key"] == key
