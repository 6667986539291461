# SPDX-License-Identifier: Apache-2.0
"""Sends that vanished, and events that belong to no send: counted, told of, and never acted on."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import asyncpg
import pytest
from kit import FEED, claim, confirm, event, make_older, state
from program import Program
from prometheus_client import REGISTRY

from reconciler.configuration.settings import Settings
from reconciler.insight import reports
from reconciler.insight.findings import Finding, judge
from reconciler.insight.reports import Vanished, old_enough, read_vanished, unknown_events, vanished_sends
from reconciler.insight.status import read_status

SETTINGS = Settings.model_validate(
    {
        "feeds": {FEED: {"provider": "mailgun", "secrets": ["key-0123456789abcdef"]}},
        "classes": {"slow": {"grace": "2h"}, "slower": {"grace": "8h", "give_up_after": "48h"}},
    }
)
TEN_HOURS = timedelta(hours=10)

ANSWERED = """
INSERT INTO send_log (wire_key, send_key, state, feed, message_class, recipient, recipient_key, attempt, fence,
    first_claimed_at, claimed_at, submit_by, answered_at, provider_message_id, sent_at, verdict_source, verdict_reason)
SELECT 's-' || n, 's-' || n, 'sent', $1, $2, 'ada@example.org', 'ada@example.org', 1, n, at, at, at, at, 'm-' || n, at,
       'sender', 'answered'
FROM generate_series($3::int, $4::int) AS n,
    LATERAL (SELECT statement_timestamp() - $5::interval + n * $6::interval AS at) AS t
"""


async def answered(
    db: asyncpg.Pool,
    first: int,
    last: int,
    *,
    message_class: str = "default",
    age: timedelta = TEN_HOURS,
    apart: timedelta = timedelta(minutes=1),
) -> None:
    """Answered sends s-<first> to s-<last>, a minute apart, the first of all of them that old."""
    await db.execute(ANSWERED, FEED, message_class, first, last, age, apart)


async def heard(db: asyncpg.Pool, *numbers: int) -> None:
    for n in numbers:
        await event(db, f"s-{n}", message_id=f"m-{n}")


async def vanished(db: asyncpg.Pool, older: timedelta = reports.OLDER, run: int = reports.RUN) -> list[Vanished]:
    async with db.acquire() as connection:
        now = await connection.fetchval("SELECT clock_timestamp()")
        return await vanished_sends(connection, {FEED: now - older}, now - timedelta(hours=24), run)


async def counted(db: asyncpg.Pool) -> tuple[int, int, int, list[str]]:
    (group,) = await vanished(db)
    return group.sends, group.unheard, group.vanished, group.wire_keys


async def test_an_answered_send_of_which_nothing_was_heard_between_others_that_were_has_vanished(
    db: asyncpg.Pool,
) -> None:
    await answered(db, 1, 20)
    await heard(db, *(n for n in range(1, 21) if n != 10))
    assert await counted(db) == (20, 1, 1, ["s-10"])
    (group,) = await vanished(db)
    assert (group.feed, group.message_class, group.share) == (FEED, "default", 0.05)
    assert await state(db, "s-10") == "sent"


async def test_sends_at_the_edge_of_a_time_in_which_the_feed_was_deaf_have_not(db: asyncpg.Pool) -> None:
    await answered(db, 1, 20)
    await heard(db, *range(1, 8), *range(14, 21))
    assert await counted(db) == (20, 6, 0, [])


@pytest.mark.parametrize(("unheard_beside", "wanted"), [((9, 11), 1), ((9, 11, 12), 0)])
async def test_four_of_the_six_nearest_must_have_been_heard_of(
    db: asyncpg.Pool, unheard_beside: tuple[int, ...], wanted: int
) -> None:
    await answered(db, 1, 20)
    await heard(db, *(n for n in range(1, 21) if n not in (10, *unheard_beside)))
    assert ("s-10" in (await counted(db))[3]) == bool(wanted)


async def test_neighbours_lie_within_an_hour_on_each_side(db: asyncpg.Pool) -> None:
    await answered(db, 1, 7, age=timedelta(hours=12), apart=timedelta(minutes=19))
    await heard(db, 1, 2, 3, 5, 6, 7)
    assert (await counted(db))[2] == 1
    await db.execute("UPDATE send_log SET claimed_at = claimed_at + interval '4 minutes' WHERE wire_key = 's-7'")
    assert (await counted(db))[2] == 0


async def test_one_heard_of_by_message_id_or_through_another_feed_has_not_vanished(db: asyncpg.Pool) -> None:
    await answered(db, 1, 20)
    await heard(db, *(n for n in range(1, 21) if n not in (9, 12, 15, 16)))
    await event(db, None, message_id="m-9")
    await event(db, None, message_id="m-12", recipient="bob@example.org")  # of another's message
    await event(db, "s-15", message_id="m-15", feed="mg-queue")
    assert await counted(db) == (20, 2, 2, ["s-16", "s-12"])


async def test_neither_an_answer_nor_a_look_up_is_the_feeds_word(db: asyncpg.Pool) -> None:
    await answered(db, 1, 20)
    await heard(db, *(n for n in range(1, 21) if n != 10))
    await confirm(db, "s-10", 10, "m-10")
    await event(db, "s-10", message_id="m-10")
    await db.execute("UPDATE provider_event SET source = 'look-up' WHERE wire_key = 's-10' AND source = 'http'")
    assert (await counted(db))[3] == ["s-10"]


async def test_only_sends_that_are_old_enough_are_looked_at(db: asyncpg.Pool) -> None:
    await answered(db, 1, 20, age=timedelta(hours=6, minutes=10, seconds=30))
    (group,) = await vanished(db)
    assert (group.sends, group.newest - group.oldest) == (10, timedelta(minutes=9))
    assert await vanished(db, timedelta(hours=23)) == []
    assert await vanished(db, timedelta(hours=25)) == []


def test_old_enough_is_what_was_asked_or_the_longest_grace() -> None:
    now = datetime(2026, 11, 2, 12, tzinfo=UTC)
    assert old_enough(SETTINGS, [FEED], now) == {FEED: now - timedelta(hours=8)}
    assert old_enough(SETTINGS, [FEED], now, timedelta(hours=12)) == {FEED: now - timedelta(hours=12)}
    assert old_enough(Settings(), [FEED], now) == {FEED: now - timedelta(hours=6)}


async def test_a_busy_feed_is_sampled_in_runs_spread_over_the_time(db: asyncpg.Pool) -> None:
    await answered(db, 1, 600, age=timedelta(hours=23), apart=timedelta(minutes=1))
    (group,) = await vanished(db, run=5)
    assert group.sends == 5 * 14  # 14 of the 24 parts, of 45 minutes each, hold sends: ten hours and a little
    assert group.newest - group.oldest > timedelta(hours=9)


async def findings(db: asyncpg.Pool) -> list[Finding]:
    async with db.acquire() as connection:
        status = await read_status(connection, SETTINGS, lambda: datetime.now(UTC))
    return [one for one in judge(status, SETTINGS) if one.code == "vanished"]


async def test_status_names_it_where_it_stands_out(db: asyncpg.Pool) -> None:
    await answered(db, 1, 420, age=timedelta(hours=20))
    lost = set(range(10, 410, 20))  # 20 of 420 are not more than 5 %
    await heard(db, *(n for n in range(1, 421) if n not in lost))
    assert await findings(db) == []
    await db.execute("DELETE FROM provider_event WHERE wire_key IN ('s-15', 's-35')")
    (one,) = await findings(db)
    assert (one.feed, one.needs_person) == (FEED, True)
    assert one.text == (
        "of 22 of 420 answered sends of class default nothing was ever heard, though their neighbours were heard of"
    )


async def test_nineteen_are_too_few_to_stand_out_whatever_their_share(db: asyncpg.Pool) -> None:
    await answered(db, 1, 120, age=timedelta(hours=20))
    lost = set(range(4, 118, 6))
    assert len(lost) == 19
    await heard(db, *(n for n in range(1, 121) if n not in lost))
    assert await counted(db) == (120, 19, 19, [f"s-{n}" for n in (112, 106, 100, 94, 88)])
    assert await findings(db) == []
    await db.execute("DELETE FROM provider_event WHERE wire_key = 's-7'")
    assert len(await findings(db)) == 1


async def test_the_figures_are_there_to_alert_on(db: asyncpg.Pool) -> None:
    await answered(db, 1, 20)
    await heard(db, *(n for n in range(1, 21) if n != 10))
    async with db.acquire() as connection:
        await read_vanished(connection, SETTINGS)
    labels = {"feed": FEED, "message_class": "default"}
    assert REGISTRY.get_sample_value("reconciler_sends_vanished", labels) == 1
    assert REGISTRY.get_sample_value("reconciler_sends_vanished_of", labels) == 20


async def test_the_report_counts_and_names_some(program: Program, db: asyncpg.Pool) -> None:
    assert (await program("report", "vanished")).stdout == "no answered send is old enough: see --since and --older\n"
    await answered(db, 1, 20)
    await heard(db, *(n for n in range(1, 21) if n != 10))
    done = await program("report", "vanished")
    assert [line.split() for line in done.stdout.splitlines()[:2]] == [
        ["FEED", "CLASS", "SENDS", "UNHEARD", "VANISHED", "SHARE", "SOME", "OF", "THEM"],
        [FEED, "default", "20", "1", "1", "5.0%", "s-10"],
    ]
    (group,) = await program.json("report", "vanished", "--feed", FEED, "--older", "9h")
    assert (group["vanished"], group["share"], group["wire_keys"]) == (1, 0.05, ["s-10"])
    assert await program.json("report", "vanished", "--feed", "resend-main") == []


async def test_a_span_that_holds_nothing_old_enough_is_refused(program: Program) -> None:
    done = await program("report", "vanished", "--since", "3h")
    assert (done.exit_code, done.stderr) == (
        1,
        "reconciler: --since lies after --older, or after the feed's grace: look further back\n",
    )
    assert (await program("report", "vanished", "--older", "soon")).exit_code == 2


# Events that belong to no send


async def unknown(db: asyncpg.Pool, feed: str | None = None) -> list[tuple[str, str, str, int, list[str]]]:
    async with db.acquire() as connection:
        found = await unknown_events(connection, datetime.now(UTC) - timedelta(hours=24), feed)
    return [(u.feed, u.key, u.kind, u.events, u.examples) for u in found.groups]


async def test_events_of_no_send_are_counted_by_feed_key_and_kind(db: asyncpg.Pool) -> None:
    fence = (await claim(db, "known", known_message_id="known-id"))["fence"]
    await confirm(db, "known", fence, "m-known")
    await event(db, "known", message_id="m-known")
    for n in range(3):
        await event(db, "foreign-1", message_id=f"m-{n}", kind="delivered")
    await event(db, "foreign-2", message_id="m-9", kind="opened", feed="resend-main")
    await event(db, None, message_id="unstamped")
    await event(db, None, message_id="m-known")  # joined by their ids
    await event(db, None, message_id="known-id")
    await event(db, None, message_id="known-id", feed="resend-main")
    await confirm(db, "pruned", 77, "m-77", feed=FEED)
    assert await unknown(db) == [
        (FEED, "unknown", "delivered", 3, ["foreign-1"]),
        (FEED, "unknown", "answer", 1, ["pruned"]),
        (FEED, "none", "delivered", 1, ["unstamped"]),
        ("resend-main", "unknown", "opened", 1, ["foreign-2"]),
        ("resend-main", "none", "delivered", 1, ["known-id"]),
    ]
    assert [group[0] for group in await unknown(db, "resend-main")] == ["resend-main"] * 2


async def test_the_report_of_unknown_events_looks_back_a_day_and_is_bounded(
    program: Program, db: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await claim(db, "known")
    await event(db, "known")
    assert (await program("report", "unknown")).stdout == "1 event: each belongs to a send\n"
    for n in range(5):
        await event(db, "foreign", message_id=f"m-{n}")
    await db.execute(
        "UPDATE provider_event SET received_at = received_at - interval '25 hours' WHERE message_id = 'm-4'"
    )
    done = await program("report", "unknown")
    header, line, *advice = done.stdout.splitlines()
    assert header.split() == ["FEED", "KEY", "KIND", "EVENTS", "NEWEST", "FOR", "EXAMPLE"]
    assert line.split()[:4] == [FEED, "unknown", "delivered", "4"]
    assert advice[0].startswith("of 5 events; key unknown: another installation's")
    found = await program.json("report", "unknown", "--since", "26h")
    assert (found["looked_at"], found["groups"][0]["events"]) == (6, 5)
    monkeypatch.setattr(reports, "MOST_EVENTS", 2)
    assert (await program.json("report", "unknown"))["looked_at"] == 2


@pytest.mark.parametrize("name", ["duplicates", "vanished", "unknown"])
async def test_a_report_of_an_unknown_feed_says_which_is_meant(program: Program, name: str) -> None:
    done = await program("report", name, "--feed", "resend-mian")
    assert (done.exit_code, done.stderr) == (
        1,
        'reconciler: no feed is named "resend-mian": did you mean "resend-main"?\n',
    )


async def test_reports_change_nothing(program: Program, db: asyncpg.Pool) -> None:
    await answered(db, 1, 20)
    await make_older(db, "s-1", timedelta(minutes=1))
    before = await db.fetch("SELECT * FROM send_log ORDER BY wire_key")
    for name in ("duplicates", "vanished", "unknown"):
        assert (await program("report", name)).exit_code == 0
    assert await db.fetch("SELECT * FROM send_log ORDER BY wire_key") == before
