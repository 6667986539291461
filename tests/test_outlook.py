# SPDX-License-Identifier: Apache-2.0
"""What people are told of a feed's silence: how many controls are missing, what is covered, when silence releases."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import asyncpg
import pytest
from kit import claim, confirm, heard_neighbours, make_older, stored_delivery

from reconciler.configuration.settings import Settings
from reconciler.insight.findings import Finding, judge
from reconciler.insight.status import Status, read_status
from reconciler.rule.outlook import Outlook

SETTINGS = Settings.model_validate({"feeds": {"mg": {"provider": "mailgun", "secrets": ["key-0123456789abcdef"]}}})


async def status(db: asyncpg.Pool, settings: Settings = SETTINGS) -> Status:
    async with db.acquire() as connection:
        return await read_status(connection, settings, lambda: datetime.now(UTC))


async def outlook(db: asyncpg.Pool) -> Outlook:
    (found,) = (await status(db)).outlooks
    return found


async def found(db: asyncpg.Pool, code: str, settings: Settings = SETTINGS) -> list[Finding]:
    return [finding for finding in judge(await status(db, settings), settings) if finding.code == code]


async def test_of_a_feed_without_any_answered_send_all_controls_are_missing(db: asyncpg.Pool) -> None:
    told = await outlook(db)
    assert (told.feed, told.message_class, told.controls, told.missing) == ("mg", "default", 0, 100)
    assert (told.released_at, told.late_after, told.no_echo) == (None, None, False)
    (finding,) = await found(db, "few_controls")
    assert not finding.needs_person
    assert "100 answered sends of class default are missing" in finding.line()


async def test_answered_sends_within_the_grace_are_no_controls_yet(db: asyncpg.Pool) -> None:
    await heard_neighbours(db, timedelta(hours=2), n=90)
    await confirm(db, "young", (await claim(db, "young"))["fence"])
    assert ((await outlook(db)).controls, (await outlook(db)).missing) == (90, 10)


async def test_a_feed_that_speaks_in_time_releases_at_the_grace(db: asyncpg.Pool) -> None:
    await heard_neighbours(db, n=2000)
    told = await outlook(db)
    assert (told.controls, told.missing, told.late_after, told.released_at) == (2000, 0, 2.0, 900.0)
    assert not [finding for finding in judge(await status(db), SETTINGS) if finding.code in ("coverage", "grace")]


async def test_coverage_counts_what_passed_the_grace_within_the_last_hour_and_alerts(db: asyncpg.Pool) -> None:
    # One send in ten seconds, from 126 to 26 minutes ago; those older than 51 minutes were heard of.
    await heard_neighbours(db, timedelta(minutes=50), heard=450)
    told = await outlook(db)
    assert told.asked - told.heard == 150  # 26 to 51 minutes old
    assert told.heard == pytest.approx(144, abs=6)  # 51 to 75, of which one leaves the hour in each ten seconds
    (finding,) = await found(db, "coverage")
    assert finding.needs_person
    assert finding.feed == "mg"


async def test_a_class_that_is_never_echoed_alerts(db: asyncpg.Pool) -> None:
    await heard_neighbours(db, heard=0)
    (finding,) = await found(db, "no_echo")
    assert finding.needs_person
    assert (await outlook(db)).released_at is None


async def test_a_grace_shorter_than_the_measured_lag_is_told(db: asyncpg.Pool) -> None:
    await heard_neighbours(db)
    await db.execute("UPDATE provider_event SET received_at = received_at + interval '20 minutes'")
    (finding,) = await found(db, "grace")
    assert not finding.needs_person
    assert "later than after 20m, and the grace is 15m" in finding.line()


async def test_sends_that_only_the_providers_api_knows_alert_though_the_feed_looks_well(db: asyncpg.Pool) -> None:
    await stored_delivery(db)
    await claim(db, "order:1")
    await make_older(db, "order:1", timedelta(hours=1))
    await db.execute(
        "INSERT INTO provider_event (feed, message_id, event_id, partition_at, wire_key, kind, testimony, source)"
        " SELECT 'mg', 'm-1', 'e', now(), wire_key, 'sent', 'accepted', 'look-up' FROM send_log"
    )
    assert await found(db, "only_look_up") == []
    await db.execute(
        "UPDATE send_log SET state = 'sent', sent_at = now(), next_check_at = NULL, verdict_source = 'look-up',"
        " verdict_reason = 'accepted'"
    )
    (finding,) = await found(db, "only_look_up")
    assert finding.needs_person
    assert "of 1 send of" in finding.line()


async def test_a_feed_in_shadow_mode_says_so(db: asyncpg.Pool) -> None:
    shadow = Settings.model_validate({"feeds": {"mg": {"provider": "mailgun", "secrets": ["k" * 9], "mode": "shadow"}}})
    (finding,) = await found(db, "shadow", shadow)
    assert not finding.needs_person
    assert (await status(db, shadow)).feeds[0].mode == "shadow"
