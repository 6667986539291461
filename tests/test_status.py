# SPDX-License-Identifier: Apache-2.0
"""`status` counts what is undecided and names what needs a person, and nothing that does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest
from kit import claim, confirm, event, heard_neighbours, make_older, old_claim, reconcile, stored_delivery
from snippets import block

from reconciler.configuration.settings import Settings
from reconciler.insight.feed_findings import STRAY
from reconciler.insight.findings import Finding, judge
from reconciler.insight.status import Status, read_status
from reconciler.passes import feeds
from reconciler.units import roughly
from webhooks.metrics import UNKNOWN_FEED

SETTINGS = Settings.model_validate(
    {
        "feeds": {"mg": {"provider": "mailgun", "secrets": ["key-0123456789abcdef"]}},
        "classes": {"lossy": {"on_unknown": "release", "give_up_after": "6h"}},
    }
)


def host_clock() -> datetime:
    return datetime.now(UTC)


async def status(
    db: asyncpg.Pool,
    settings: Settings = SETTINGS,
    *,
    clock: Callable[[], datetime] = host_clock,
    feed: str | None = None,
) -> Status:
    async with db.acquire() as connection:
        return await read_status(connection, settings, clock, feed)


YOUNG = "few_controls"


async def findings(db: asyncpg.Pool, settings: Settings = SETTINGS, **named: Callable[[], datetime]) -> list[Finding]:
    """Return what is worth knowing, but for what each young installation hears: that controls are missing."""
    return [finding for finding in judge(await status(db, settings, **named), settings) if finding.code != YOUNG]


async def codes(db: asyncpg.Pool, settings: Settings = SETTINGS, **named: Callable[[], datetime]) -> list[str]:
    return [finding.code for finding in await findings(db, settings, **named)]


@pytest.fixture
async def _passes(db: asyncpg.Pool) -> None:
    await db.execute("INSERT INTO pass (who, ended_at) VALUES ('test', now())")


passes_run = pytest.mark.usefixtures("_passes")


async def test_an_empty_installation_needs_nobody(db: asyncpg.Pool) -> None:
    found = await status(db)
    assert (found.undecided, found.refused, found.missing_months, found.last_pass, found.pooler) == (
        [],
        [],
        [],
        None,
        False,
    )
    assert abs(found.clock_skew) < timedelta(seconds=5)
    assert await findings(db) == []


async def test_undecided_sends_are_grouped_by_state_reason_and_age(db: asyncpg.Pool) -> None:
    await old_claim(db, "held-1")
    await old_claim(db, "held-2")
    await reconcile(db)
    await make_older(db, "held-2", timedelta(hours=3))
    await claim(db, "fresh")
    await old_claim(db, "silence", timedelta(minutes=5))
    released = (await claim(db, "released"))["fence"]
    await db.fetch("SELECT * FROM send_fail('released', $1, 'refused', true)", released)
    await confirm(db, "sent", (await claim(db, "sent"))["fence"])
    groups = {(g.state, g.reason): (g.n, g.under_hour, g.under_day, g.over_day) for g in (await status(db)).undecided}
    assert groups == {
        ("held", "silent"): (2, 1, 1, 0),
        ("claimed", "submitting"): (1, 1, 0, 0),
        ("claimed", "silence"): (1, 1, 0, 0),
        ("released", "not_sent"): (1, 1, 0, 0),
    }


@passes_run
async def test_a_send_that_is_held_for_long_needs_a_person(db: asyncpg.Pool) -> None:
    await old_claim(db, "order:1")
    await reconcile(db)
    await make_older(db, "order:1", timedelta(minutes=50))
    assert await codes(db) == []
    await make_older(db, "order:1", timedelta(minutes=20))
    (found,) = await findings(db)
    assert (found.code, found.feed, found.needs_person) == ("held", "mg", True)
    assert found.line() == (
        "held mg: 1 send of class default held (silent), the oldest for 70m: "
        "see reconciler why KEY, then decide with reconciler release, confirm or fail"
    )


@passes_run
async def test_a_class_that_decides_by_itself_needs_a_person_only_after_it_should_have(db: asyncpg.Pool) -> None:
    await old_claim(db, "order:1", message_class="lossy")
    await reconcile(db)
    await make_older(db, "order:1", timedelta(hours=3))  # age 5 h of 6
    assert await codes(db) == []
    await make_older(db, "order:1", timedelta(hours=3))
    assert await codes(db) == ["held"]


@passes_run
async def test_a_claim_that_passes_leave_alone_in_shadow_mode_needs_nobody(db: asyncpg.Pool) -> None:
    feed = SETTINGS.feeds["mg"].model_copy(update={"mode": "shadow"})
    shadow = SETTINGS.model_copy(update={"feeds": {"mg": feed}})
    await old_claim(db, "order:1", timedelta(hours=7))
    assert [(f.code, f.needs_person) for f in await findings(db, shadow)] == [("shadow", False)]
    assert await codes(db) == ["undecided"]


@passes_run
async def test_a_released_send_that_nobody_claims_needs_a_person(db: asyncpg.Pool) -> None:
    fence = (await claim(db, "order:1"))["fence"]
    await db.fetch("SELECT * FROM send_fail('order:1', $1, 'refused', true)", fence)
    await make_older(db, "order:1", timedelta(minutes=14))
    assert await codes(db) == []
    await make_older(db, "order:1", timedelta(minutes=2))
    (found,) = await findings(db)
    assert (found.code, 'docs/sending.md, "Sending again"' in found.advice) == ("unclaimed", True)


async def test_sends_that_wait_while_no_pass_runs_need_a_person(db: asyncpg.Pool) -> None:
    await old_claim(db, "order:1", timedelta(minutes=2))
    assert await codes(db) == []
    await make_older(db, "order:1", timedelta(minutes=4))
    assert [f.text for f in await findings(db)] == ["there never was a pass, and sends wait for one"]
    await reconcile(db)
    assert await codes(db) == []
    await db.execute("UPDATE pass SET started_at = now() - interval '6 minutes'")
    assert [f.text for f in await findings(db)] == ["the last pass began 6m ago, and sends wait for one"]
    await confirm(db, "order:1", 1)
    assert await codes(db) == []


async def test_the_last_pass_is_told_with_its_counts(db: asyncpg.Pool) -> None:
    await old_claim(db, "order:1")
    await reconcile(db)
    last = (await status(db)).last_pass
    assert last is not None
    assert (last.who, last.counts["held:silent"]) == ("test", 1)
    assert last.ended_at is not None


async def test_refused_deliveries_are_counted_by_feed_and_reason(db: asyncpg.Pool) -> None:
    for minutes, n in ((5, 2), (90, 3), (26 * 60, 100)):
        await db.execute(
            "INSERT INTO feed_delivery SELECT 'mg', date_trunc('minute', at), 'refused:signature', $2, at"
            " FROM (SELECT now() - $1 * interval '1 minute' AS at) AS t",
            minutes,
            n,
        )
    await stored_delivery(db)
    found = await status(db)
    assert [(r.feed, r.reason, r.last_hour, r.last_day) for r in found.refused] == [("mg", "signature", 2, 5)]
    assert found.feeds[0].stored_at is not None
    assert await codes(db) == []  # the newest one was stored


async def test_a_feed_whose_newest_delivery_was_refused_needs_a_person(db: asyncpg.Pool) -> None:
    await stored_delivery(db)
    await stored_delivery(db, outcome="refused:signature")
    assert [(f.code, f.feed) for f in await findings(db)] == [("refused", "mg")]


async def test_a_stranger_without_a_signature_does_not_hide_that_the_newest_signed_delivery_was_refused(
    db: asyncpg.Pool,
) -> None:
    await stored_delivery(db)
    await stored_delivery(db, outcome="refused:signature")
    await stored_delivery(db, outcome="refused:missing")
    (found,) = await findings(db)
    assert (found.code, found.needs_person, "(signature)" in found.text) == ("refused", True, True)
    await stored_delivery(db)
    assert await codes(db) == []
    await stored_delivery(db, outcome="refused:missing")
    assert [(f.code, f.needs_person) for f in await findings(db)] == [("refused", False)]


async def refused(db: asyncpg.Pool, outcomes: dict[str, int], minutes_ago: int = 0, feed: str = "mg") -> None:
    for reason, n in outcomes.items():
        await db.execute(REFUSED, feed, f"refused:{reason}", n, minutes_ago)


REFUSED = """
INSERT INTO feed_delivery SELECT $1, date_trunc('minute', at), $2, $3, at
FROM (SELECT clock_timestamp() - $4 * interval '1 minute' AS at) AS t
"""


async def test_deliveries_to_a_feed_that_nobody_has_need_a_person_once_there_are_several_of_an_hour(
    db: asyncpg.Pool,
) -> None:
    await refused(db, {"unknown_feed": 90}, 61, feed=UNKNOWN_FEED)
    await refused(db, {"unknown_feed": STRAY - 1}, feed=UNKNOWN_FEED)
    assert await codes(db) == [], "a stranger may have tried"
    (row,) = (await status(db)).refused
    assert (row.feed, row.reason, row.last_hour, row.last_day) == (UNKNOWN_FEED, "unknown_feed", 4, 94)
    await refused(db, {"unknown_feed": 1}, 1, feed=UNKNOWN_FEED)
    (found,) = await findings(db)
    assert (found.code, found.feed, found.needs_person) == ("no_such_feed", None, True)
    assert found.text == "5 deliveries of an hour were posted to no feed of the settings, and answered 404"
    assert (await status(db, feed="mg")).refused == []


async def test_a_delivery_that_was_proved_and_refused_needs_a_person_for_a_day(db: asyncpg.Pool) -> None:
    await refused(db, {"format": 1, "stale": 2}, 23 * 60)
    await refused(db, {"format": 40}, 26 * 60)
    await stored_delivery(db)
    (found,) = await findings(db)
    assert (found.code, found.feed, found.needs_person) == ("lost", "mg", True)
    assert found.text == "3 deliveries of a day that were proved to be its provider's were refused (format 1, stale 2)"
    assert "reconciler backfill --feed mg" in found.advice
    await db.execute("UPDATE feed_delivery SET minute = minute - interval '2 hours' WHERE outcome LIKE 'refused:%'")
    assert await codes(db) == []


async def test_a_body_that_was_refused_before_anybody_could_tell_whose_it_was_is_noted(db: asyncpg.Pool) -> None:
    await refused(db, {"too_large": 1, "encoding": 3, "body": 1}, 60)
    await refused(db, {"signature": 2, "missing": 9, "slow": 4, "cut_off": 3}, 60)
    await stored_delivery(db)
    (found,) = await findings(db)
    assert (found.code, found.feed, found.needs_person) == ("unread", "mg", False)
    assert "5 deliveries of a day" in found.text
    assert "(body 1, encoding 3, too_large 1)" in found.text
    assert "receiver.max_body" in found.advice


PUT_OFF = """
INSERT INTO feed_delivery SELECT 'mg', date_trunc('minute', at), 'later:database', 1, at
FROM unnest($1::int[]) AS age, LATERAL (SELECT clock_timestamp() - age * interval '1 minute' AS at) AS t
"""


@pytest.mark.parametrize(
    ("minutes_ago", "found"),
    [((11, 10, 1, 0), []), ((12, 1), []), ((12, 8, 4, 0), ["put_off"]), ((7, 3, 0), []), ((13, 10, 7), [])],
)
async def test_deliveries_are_put_off_when_that_goes_on_without_a_pause(
    db: asyncpg.Pool, minutes_ago: tuple[int, ...], found: list[str]
) -> None:
    await db.execute(PUT_OFF, minutes_ago)
    assert await codes(db) == found


async def test_events_that_were_damaged_and_strangers_do_not_thin_out_what_was_refused(db: asyncpg.Pool) -> None:
    counts = {"refused:signature": 12, "stored": 40, "control": 10, "damaged": 500, "refused:missing": 500}
    counts |= {"later:queue": 500, "later:busy": 8}
    for outcome, n in counts.items():
        await stored_delivery(db, outcome=outcome)
        await db.execute("UPDATE feed_delivery SET n = $2 WHERE outcome = $1", outcome, n)
    await stored_delivery(db)
    (feed,) = (await status(db)).feeds
    assert (feed.refused_lately, feed.lately) == (12, 70)
    assert "some_refused" in await codes(db)


async def test_answered_sends_without_any_delivery_need_a_person(db: asyncpg.Pool) -> None:
    await confirm(db, "order:1", (await claim(db, "order:1"))["fence"])
    assert await codes(db) == []
    await make_older(db, "order:1", timedelta(hours=2))
    assert "no_delivery" in await codes(db)
    await stored_delivery(db)
    assert "no_delivery" not in await codes(db)


async def test_a_pause_is_noted_and_needs_nobody_but_a_breaker_does(db: asyncpg.Pool) -> None:
    async with db.acquire() as connection:
        await feeds.pause(connection, "mg", "incident 17", "ann@desk")
        await feeds.pause(connection, feeds.ALL_FEEDS, "all of it", "ann@desk")
    found = await findings(db)
    assert [(f.code, f.feed, f.needs_person) for f in found] == [("paused", None, False), ("paused", "mg", False)]
    assert "incident 17" in found[1].text
    await db.execute("UPDATE feed_state SET paused_at = NULL, breaker_at = now() WHERE feed = 'mg'")
    assert [(f.code, f.needs_person) for f in await findings(db)] == [("paused", False), ("breaker", True)]


async def test_a_pause_that_lasts_for_more_than_a_day_needs_a_person(db: asyncpg.Pool) -> None:
    async with db.acquire() as connection:
        await feeds.pause(connection, "mg", "incident 17", "ann@desk")
        await feeds.pause(connection, feeds.ALL_FEEDS, "all of it", "ann@desk")
    await db.execute("UPDATE feed_state SET paused_at = paused_at - interval '23 hours'")
    assert [f.needs_person for f in await findings(db)] == [False, False]
    async with db.acquire() as connection:  # said again, it is the same pause
        await feeds.pause(connection, "mg", "incident 17, still", "bob@desk")
    await db.execute("UPDATE feed_state SET paused_at = paused_at - interval '3 hours'")
    assert [f.line() for f in await findings(db) if f.needs_person] == [
        f"paused{feed}: {text}: reconciler resume{option} --reason TEXT once the cause is gone"
        for feed, text, option in (
            ("", "no feed releases while it lasts, for 26h so far (all of it)", ""),
            (" mg", "no releases while it lasts, for 26h so far (incident 17, still)", " --feed mg"),
        )
    ]


async def test_a_missing_partition_needs_a_person(db: asyncpg.Pool) -> None:
    await db.execute("""
        DO $$ BEGIN EXECUTE format('DROP TABLE %I', 'provider_event_' || to_char(
            date_trunc('month', clock_timestamp() AT TIME ZONE 'UTC') + interval '1 month', 'YYYYMM')); END $$
    """)
    (found,) = await findings(db)
    assert found.code == "partition"
    await db.fetch("SELECT provider_event_make_partitions()")  # what the finding advises
    assert await codes(db) == []


async def test_text_that_sorts_otherwise_than_its_indexes_needs_a_person(db: asyncpg.Pool) -> None:
    name = await db.fetchval("SELECT current_database()")
    await db.execute("UPDATE pg_database SET datcollversion = 'older' WHERE datname = $1", name)
    (found,) = await findings(db)
    assert (found.code, found.needs_person) == ("collation", True)
    advised = block("docs/operating.md", "sql", "REINDEX DATABASE")
    for statement in advised.replace("mail", name).split(";")[:-1]:
        await db.execute(statement)
    assert await codes(db) == []


@passes_run
async def test_many_events_whose_key_no_send_has_suggest_a_foreign_installation(db: asyncpg.Pool) -> None:
    for n in range(19):
        await event(db, f"theirs-{n}", message_id=f"m-{n}")
    assert "foreign" not in await codes(db)
    await event(db, "theirs-19", message_id="m-19")
    found = await findings(db)
    assert [(f.code, f.feed, f.text) for f in found] == [
        ("foreign", "mg", "20 of 20 events of the last day have a key that no send has")
    ]
    for n in range(20):  # as many of our own, and the share is half
        await claim(db, f"ours-{n}")
        await event(db, f"ours-{n}", message_id=f"o-{n}")
    assert await codes(db) == []


async def test_events_without_a_key_and_old_ones_are_no_sign_of_a_foreign_installation(db: asyncpg.Pool) -> None:
    for n in range(30):
        await event(db, None, message_id=f"m-{n}")
        await event(db, f"old-{n}", message_id=f"o-{n}")
    await db.execute(
        "UPDATE provider_event SET received_at = received_at - interval '25 hours' WHERE wire_key LIKE 'old%'"
    )
    assert (await status(db)).foreign == {}


async def test_a_feed_that_is_not_configured_but_used_needs_a_person(db: asyncpg.Pool) -> None:
    await claim(db, "order:1", feed="mailgun")
    (found,) = await findings(db)
    assert (found.code, found.feed) == ("unknown_feed", "mailgun")
    assert found.advice.startswith("add [feeds.mailgun] to the settings")


async def test_what_the_advice_on_an_unknown_feed_says_of_another_name_is_true(db: asyncpg.Pool) -> None:
    await old_claim(db, "order:1", feed="mailgun")
    await db.fetch("SELECT * FROM operator_release('order:1', 'why', 'ann')")
    assert (await claim(db, "order:1", feed="mg"))["outcome"] == "other_feed"
    assert (await claim(db, "order:1", feed="mailgun"))["outcome"] == "claimed"


async def test_clocks_that_differ_by_more_than_30_seconds_are_told_of(db: asyncpg.Pool) -> None:
    assert await codes(db, clock=lambda: datetime.now(UTC) + timedelta(seconds=20)) == []
    (behind,) = await findings(db, clock=lambda: datetime.now(UTC) + timedelta(seconds=40))
    assert (behind.code, "behind this host's" in behind.text) == ("clock", True)
    (ahead,) = await findings(db, clock=lambda: datetime.now(UTC) - timedelta(minutes=5))
    assert (ahead.code, "ahead of this host's" in ahead.text) == ("clock", True)


async def test_warnings_of_the_settings_are_findings(db: asyncpg.Pool) -> None:
    bare = Settings.model_validate({"feeds": {"mg": {"provider": "mailgun"}}})
    assert [f.line() for f in await findings(db, bare)] == [f"settings: {warning}" for warning in bare.warnings()]


async def test_a_pooler_without_a_direct_url_needs_a_person(db: asyncpg.Pool) -> None:
    found = await status(db)
    pooled = type(found)(**{name: getattr(found, name) for name in found.__slots__} | {"pooler": True})
    (finding,) = [finding for finding in judge(pooled, SETTINGS) if finding.code != YOUNG]
    assert (finding.code, finding.needs_person) == ("pooler", True)
    direct = SETTINGS.model_copy(
        update={"database": SETTINGS.database.model_copy(update={"direct_url": "postgresql://server/mail"})}
    )
    assert [f.needs_person for f in judge(pooled, direct) if f.code != YOUNG] == [False]


# What silence is worth


async def about_silence(db: asyncpg.Pool) -> list[tuple[str, str, bool]]:
    found = judge(await status(db), SETTINGS)
    return [
        (f.code, f.text, f.needs_person) for f in found if f.code in ("few_controls", "no_echo", "coverage", "grace")
    ]


async def test_a_young_installation_is_told_how_many_controls_are_missing(db: asyncpg.Pool) -> None:
    text = "100 answered sends of class default are missing before its silence means anything"
    assert await about_silence(db) == [("few_controls", text, False)]
    await heard_neighbours(db, n=40)
    assert (await about_silence(db))[0][1].startswith("60 answered sends of class default are missing")


async def test_a_well_feed_needs_nobody_and_says_when_it_releases(db: asyncpg.Pool) -> None:
    await heard_neighbours(db)
    assert await about_silence(db) == []
    (outlook,) = (await status(db)).outlooks
    assert (outlook.feed, outlook.message_class, outlook.controls, outlook.missing) == ("mg", "default", 600, 0)
    assert (outlook.late_after, outlook.no_echo, outlook.released_at) == (2.0, False, 900.0)


async def test_a_class_without_echo_needs_a_person_and_the_feeds_other_ones_do_not(db: asyncpg.Pool) -> None:
    await heard_neighbours(db)
    await heard_neighbours(db, n=20, heard=0, message_class="unstamped")
    ((code, text, needs_person),) = await about_silence(db)
    assert (code, needs_person) == ("no_echo", True)
    assert text.startswith("none of 20 answered sends of class unstamped was ever heard of (of fewer than 20 it is not")


async def test_a_new_class_of_few_sends_is_not_called_deaf_beside_a_feed_that_has_many(db: asyncpg.Pool) -> None:
    await heard_neighbours(db)
    await heard_neighbours(db, n=1, heard=0, message_class="new")
    assert await about_silence(db) == []
    await heard_neighbours(db, timedelta(seconds=-60), n=60, heard=0, message_class="young")  # within their grace
    assert await about_silence(db) == []


async def test_case_045_a_feed_that_tells_of_every_second_send_only_needs_a_person(db: asyncpg.Pool) -> None:
    await heard_neighbours(db, timedelta(minutes=30), n=300, every=timedelta(seconds=6))
    assert await about_silence(db) == []
    await db.execute("DELETE FROM provider_event WHERE substring(message_id FROM 3)::int % 2 = 1")
    ((code, text, needs_person),) = await about_silence(db)
    assert (code, needs_person) == ("coverage", True)
    assert text.startswith("only 1")


async def test_a_grace_shorter_than_the_feeds_lag_is_noted(db: asyncpg.Pool) -> None:
    await heard_neighbours(db)
    await db.execute("UPDATE provider_event SET received_at = received_at + interval '40 minutes'")
    ((code, text, needs_person),) = await about_silence(db)
    assert (code, needs_person) == ("grace", False)
    assert text.endswith("are heard of later than after 40m, and the grace is 15m")


async def test_one_feed_is_looked_at_alone(db: asyncpg.Pool) -> None:
    await claim(db, "order:1")
    await claim(db, "order:2", feed="other")
    found = await status(db, feed="mg")
    assert ([g.feed for g in found.undecided], [f.feed for f in found.feeds]) == (["mg"], ["mg"])


async def test_undecided_sends_are_read_by_the_index_of_due_rows(db: asyncpg.Pool) -> None:
    from reconciler.insight.status import UNDECIDED  # noqa: PLC0415

    async with db.acquire() as connection, connection.transaction():
        await connection.execute("SET LOCAL enable_seqscan = off")
        plan = await connection.fetchval(
            f"EXPLAIN (FORMAT JSON) {UNDECIDED}".replace("$1", "now()").replace("$2", "NULL")
        )
    assert "send_log_due" in json.dumps(plan)


@pytest.mark.parametrize(
    ("age", "text"),
    [
        (timedelta(seconds=-5), "0s"),
        (timedelta(seconds=90), "90s"),
        (timedelta(seconds=150), "2m"),
        (timedelta(hours=30, minutes=5), "30h"),
        (timedelta(days=3, hours=5), "3d"),
    ],
)
def test_ages_are_told_in_one_unit(age: timedelta, text: str) -> None:
    assert roughly(age) == text
