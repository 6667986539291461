# SPDX-License-Identifier: Apache-2.0
"""Who sends what, and who sends the same as another: seen in bounded samples, told without an address."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
from kit import FEED, call, claim, confirm, fail, make_older, row
from program import Program

from reconciler.insight import inventory as module
from reconciler.insight.inventory import Looked, Overlaps, Senders, overlaps, senders

ADA, BOB = "ada@example.org", "bob@example.org"
HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)
WEEK = timedelta(days=7)


async def sent(db: Any, key: str, ago: timedelta, source: str | None, feed: str = FEED, **options: Any) -> None:
    """A send to Ada that was claimed and answered so long ago."""
    named = {"recipient": ADA, "source": source} | options
    fence = (await claim(db, key, feed, **named))["fence"]
    await confirm(db, key, fence, f"m-{key}")
    await make_older(db, key, ago)


async def look(
    db: asyncpg.Pool, within: timedelta = 10 * MINUTE, limit: int = 50, run: int = 100, feed: str | None = None
) -> Overlaps:
    async with db.acquire() as connection:
        return await overlaps(connection, datetime.now(UTC) - WEEK, feed, within, limit, run)


async def inventory(db: asyncpg.Pool, limit: int = 50, run: int = 100, feed: str | None = None) -> Senders:
    async with db.acquire() as connection:
        return await senders(connection, datetime.now(UTC) - WEEK, feed, limit, run)


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A node of a plan, and all below it."""
    yield plan
    for below in plan.get("Plans", []):
        yield from nodes(below)


# Two systems that send the same


async def test_one_recipient_of_two_sources_within_ten_minutes_is_shown_as_their_pair(db: asyncpg.Pool) -> None:
    await sent(db, "shop-1", 60 * MINUTE, "shop")
    await sent(db, "crm-1", 51 * MINUTE, "crm", "resend-main", recipient="Ada <ADA@Example.org>")
    await sent(db, "shop-2", 40 * MINUTE, "shop", recipient=BOB)
    await sent(db, "crm-2", 31 * MINUTE, "crm", recipient=BOB)
    found = await look(db)
    (pair,) = found.overlaps
    assert (pair.message_class, pair.sources, pair.recipients, pair.times) == ("default", ["crm", "shop"], 2, 2)
    assert pair.examples == [["shop-2", "crm-2"], ["shop-1", "crm-1"]]
    assert timedelta(minutes=28) < pair.last_at - pair.first_at < timedelta(minutes=30)
    assert found.looked_at == [Looked(FEED, 3, 3, sampled=False), Looked("resend-main", 1, 1, sampled=False)]


async def test_what_lies_further_apart_or_differs_is_no_overlap(db: asyncpg.Pool) -> None:
    await sent(db, "shop-1", 60 * MINUTE, "shop")
    await sent(db, "shop-again", 59 * MINUTE, "shop")
    await sent(db, "crm-later", 48 * MINUTE, "crm")
    await sent(db, "crm-class", 59 * MINUTE, "crm", message_class="news")
    await sent(db, "crm-other", 59 * MINUTE, "crm", recipient=BOB)
    await sent(db, "crm-several", 59 * MINUTE, "crm", recipient=f"{ADA}, {BOB}")
    await sent(db, "crm-none", 59 * MINUTE, "crm", recipient=None)
    found = await look(db)
    assert found.overlaps == []
    assert found.looked_at == [Looked(FEED, 7, 5, sampled=False)]
    assert len((await look(db, 12 * MINUTE)).overlaps) == 1


async def test_only_mail_that_was_sent_or_may_have_been_counts(db: asyncpg.Pool) -> None:
    await sent(db, "shop-1", timedelta(0), "shop")
    options = {"recipient": ADA, "source": "crm"}
    await call(db, "send_enqueue", "crm-waits", FEED, '{"recipient": "ada@example.org", "source": "crm"}')
    await fail(db, "crm-failed", (await claim(db, "crm-failed", **options))["fence"], not_sent=False)
    await fail(db, "crm-free", (await claim(db, "crm-free", **options))["fence"], not_sent=True)
    assert (await look(db)).overlaps == []
    await claim(db, "crm-running", **options)
    (pair,) = (await look(db)).overlaps
    assert pair.examples == [["shop-1", "crm-running"]]


async def test_sends_without_a_source_are_one_source_of_their_own(db: asyncpg.Pool) -> None:
    await sent(db, "nobody-1", 9 * MINUTE, None)
    await sent(db, "nobody-2", 8 * MINUTE, None)
    await sent(db, "blank", 7 * MINUTE, "")
    assert (await look(db)).overlaps == []
    await sent(db, "crm-1", 6 * MINUTE, "crm")
    (pair,) = (await look(db)).overlaps
    assert (pair.sources, pair.times, pair.examples) == ([None, "crm"], 1, [["blank", "crm-1"]])


async def test_three_sources_are_three_pairs_and_a_third_between_two_hides_none(db: asyncpg.Pool) -> None:
    await sent(db, "a", 9 * MINUTE, "a")
    await sent(db, "b", 5 * MINUTE, "b")
    await sent(db, "c", 1 * MINUTE, "c")
    pairs = {tuple(pair.sources): pair.examples for pair in (await look(db)).overlaps}
    assert pairs == {("a", "b"): [["a", "b"]], ("b", "c"): [["b", "c"]], ("a", "c"): [["a", "c"]]}
    assert len((await look(db, 5 * MINUTE)).overlaps) == 2


async def test_a_source_that_names_each_job_is_no_system(db: asyncpg.Pool) -> None:
    for n in range(11):
        await sent(db, f"s-{n}", n * MINUTE, f"job-{n}")
    assert (await look(db)).overlaps == []
    await db.execute("DELETE FROM send_log WHERE wire_key = 's-10'")
    assert len((await look(db, MINUTE * 1.5)).overlaps) == 9


async def test_a_send_counts_at_its_latest_claim_and_not_where_it_was_proved_not_sent(db: asyncpg.Pool) -> None:
    await sent(db, "shop-old", 8 * 24 * HOUR, "shop")
    await sent(db, "shop-new", 5 * MINUTE, "shop")
    await fail(db, "crm-1", (await claim(db, "crm-1", recipient=ADA, source="crm"))["fence"], not_sent=True)
    await make_older(db, "crm-1", 8 * 24 * HOUR)
    await claim(db, "crm-1")
    begun = datetime.now(UTC) - WEEK
    (pair,) = (await look(db)).overlaps
    assert pair.examples == [["shop-new", "crm-1"]]
    assert pair.first_at > begun
    (crm, _) = (await inventory(db)).senders
    assert (crm.source, crm.sends) == ("crm", 1)
    assert crm.first_at == crm.last_at > begun


async def test_sends_that_lie_alone_are_not_multiplied_by_the_other_sources(db: asyncpg.Pool) -> None:
    for n in range(10):
        await sent(db, f"alone-{n}", (n + 1) * HOUR, f"source-{n}")
    await sent(db, "near", 10 * HOUR - MINUTE, "source-1")
    async with db.acquire() as connection:
        asked = ([FEED], datetime.now(UTC) - WEEK, 24, 100, 10 * MINUTE, 50, 10)
        plan = await connection.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {module.OVERLAPS}", *asked)
    (others,) = [node for node in nodes(json.loads(plan)[0]["Plan"]) if node.get("Alias") == "other"]
    assert others["Actual Rows"] * others["Actual Loops"] <= 4, "two of ten sources met, once"


async def test_the_pair_that_hit_most_people_comes_first(db: asyncpg.Pool) -> None:
    for n in range(3):  # often, and one person
        await sent(db, f"a-{n}", n * 2 * MINUTE, "a", message_class="news")
        await sent(db, f"b-{n}", n * 2 * MINUTE + MINUTE, "b", message_class="news")
    for n, who in enumerate((ADA, BOB)):
        await sent(db, f"x-{n}", HOUR, "x", recipient=who)
        await sent(db, f"y-{n}", HOUR + MINUTE, "y", recipient=who)
    found = (await look(db)).overlaps
    assert [(pair.sources, pair.recipients, pair.times) for pair in found] == [(["x", "y"], 2, 2), (["a", "b"], 1, 5)]
    assert [len(pair.examples) for pair in found] == [2, 3]
    assert [pair.sources for pair in (await look(db, limit=1)).overlaps] == [["x", "y"]]


async def test_a_busy_feed_is_sampled_in_each_part_of_the_time_and_hides_no_other(db: asyncpg.Pool) -> None:
    for n in range(5):
        await sent(db, f"busy-{n}", timedelta(hours=1 + n / 100), "shop", recipient=f"{n}@example.org")
    await sent(db, "busy-old", timedelta(days=6), "shop")
    await sent(db, "quiet", timedelta(days=6), "crm", "resend-main")
    found = await look(db, run=2)
    assert found.looked_at == [Looked(FEED, 3, 3, sampled=True), Looked("resend-main", 1, 1, sampled=False)]
    assert [pair.sources for pair in found.overlaps] == [["crm", "shop"]]
    assert (await look(db, run=6)).looked_at[0] == Looked(FEED, 6, 6, sampled=False)


async def test_each_read_is_bounded_by_the_index_of_a_feeds_claims(db: asyncpg.Pool) -> None:
    for n in range(3):
        await sent(db, f"s-{n}", HOUR, "shop")
    async with db.acquire() as connection, connection.transaction():
        await connection.execute("SET LOCAL enable_seqscan = off")
        now = datetime.now(UTC)
        for query, arguments in (
            (module.LOOKED, (now - WEEK, None, 24, 5)),
            (module.SENDERS, ([FEED], now - WEEK, 24, 5, 50)),
            (module.OVERLAPS, ([FEED], now - WEEK, 24, 5, HOUR, 50, 20)),
        ):
            plan = "\n".join(line for (line,) in await connection.fetch(f"EXPLAIN {query}", *arguments))
            assert "send_log_claims" in plan
            assert "Seq Scan on send_log" not in plan
            assert "Sort Key: l.claimed_at" not in plan  # its order is the index's: the newest are read and no others


# Who sends what


async def test_each_source_class_and_feed_has_a_line_with_what_became_of_its_sends(db: asyncpg.Pool) -> None:
    await sent(db, "s-1", 5 * HOUR, "shop", message_class="receipts")
    await sent(db, "s-2", 1 * HOUR, "shop", message_class="receipts")
    options = {"source": "shop", "message_class": "receipts"}
    await fail(db, "s-3", (await claim(db, "s-3", **options))["fence"], not_sent=False)
    await fail(db, "s-4", (await claim(db, "s-4", **options))["fence"], not_sent=True)
    await claim(db, "s-5", **options)
    await sent(db, "s-6", HOUR, "shop", "resend-main", message_class="receipts")
    await sent(db, "s-7", HOUR, None)
    found = (await inventory(db)).senders
    assert [(s.source, s.message_class, s.feed, s.sends, s.sent, s.failed, s.undecided) for s in found] == [
        (None, "default", FEED, 1, 1, 0, 0),
        ("shop", "receipts", FEED, 5, 2, 1, 2),
        ("shop", "receipts", "resend-main", 1, 1, 0, 0),
    ]
    assert timedelta(hours=4.9) < found[1].last_at - found[1].first_at < timedelta(hours=5.1)
    assert [s.feed for s in (await inventory(db, feed="resend-main")).senders] == ["resend-main"]
    assert len((await inventory(db, limit=2)).senders) == 2


async def test_what_was_never_given_out_is_no_mail_and_what_is_too_old_is_not_looked_at(db: asyncpg.Pool) -> None:
    await call(db, "send_enqueue", "waits", FEED, '{"source": "shop"}')
    await sent(db, "old", timedelta(days=8), "shop")
    assert await inventory(db) == Senders([], [])


async def test_a_feed_that_is_no_longer_configured_is_in_the_inventory(db: asyncpg.Pool) -> None:
    for feed in ("aa", "zz", FEED):
        await sent(db, f"s-{feed}", HOUR, "shop", feed)
    assert [one.feed for one in (await inventory(db)).looked_at] == ["aa", FEED, "zz"]


# As the program tells it


async def test_the_reports_show_neither_addresses_nor_send_keys(program: Program, db: asyncpg.Pool) -> None:
    assert (await program("report", "overlaps")).stdout == (
        "looked at 0 sends, 0 of them with a recipient\nno two sources wrote to the same people\n"
    )
    assert (await program("report", "sources")).stdout == "looked at 0 sends, 0 of them with a recipient\n"
    await sent(db, f"welcome:1:{ADA}", 2 * HOUR, "shop", message_class="welcome")
    await sent(db, f"crm.welcome:1:{ADA}", 2 * HOUR, None, "resend-main", message_class="welcome")
    keys = [(await row(db, key))["wire_key"] for key in (f"welcome:1:{ADA}", f"crm.welcome:1:{ADA}")]
    told = [await program("report", "overlaps"), await program("report", "sources")]
    told += [await program("report", name, "--json") for name in ("overlaps", "sources")]
    assert not [done for done in told if "example.org" in done.output or "welcome:1" in done.output]
    lines = [line.split() for line in told[0].stdout.splitlines()]
    assert " ".join(lines[0]) == "looked at 2 sends, 2 of them with a recipient"
    assert lines[2][:5] == ["welcome", "-", "shop", "1", "1"]
    assert lines[2][7:] == [keys[0], "and", keys[1]]
    lines = [line.split() for line in told[1].stdout.splitlines()]
    assert lines[1] == ["SOURCE", "CLASS", "FEED", "SENDS", "SENT", "FAILED", "UNDECIDED", "FIRST", "LAST"]
    assert [line[:7] for line in lines[2:]] == [
        ["-", "welcome", "resend-main", "1", "1", "0", "0"],
        ["shop", "welcome", FEED, "1", "1", "0", "0"],
    ]
    found = await program.json("report", "overlaps", "--since", "3h", "--within", "1m", "--limit", "1")
    assert (found["overlaps"][0]["sources"], found["overlaps"][0]["examples"]) == ([None, "shop"], [keys])
    assert (await program.json("report", "overlaps", "--feed", FEED))["overlaps"] == []
    assert (await program.json("report", "overlaps", "--since", "1h"))["looked_at"] == []
    (mine,) = (await program.json("report", "sources", "--feed", FEED))["senders"]
    assert (mine["source"], mine["sent"]) == ("shop", 1)


async def test_an_unknown_feed_or_a_time_that_is_none_is_refused(program: Program) -> None:
    for name in ("overlaps", "sources"):
        done = await program("report", name, "--feed", "resend-mian")
        assert done.stderr == 'reconciler: no feed is named "resend-mian": did you mean "resend-main"?\n'
        assert (await program("report", name, "--since", "soon")).exit_code == 2
    assert (await program("report", "overlaps", "--within", "soon")).exit_code == 2


async def test_the_reports_change_nothing(program: Program, db: asyncpg.Pool) -> None:
    await sent(db, "s-1", HOUR, "shop")
    before = await db.fetch("SELECT * FROM send_log")
    for name in ("overlaps", "sources"):
        assert (await program("report", name)).exit_code == 0
    assert await db.fetch("SELECT * FROM send_log") == before
