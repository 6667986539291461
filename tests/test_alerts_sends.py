# SPDX-License-Identifier: Apache-2.0
"""Alerts on feeds, sends and what the database holds: each real fault is told by `/metrics`, an alert and `status`."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from alerts_kit import BEFORE, EARLIER, SECRET, SETTINGS, Watched, scraped, value, watching
from kit import (
    call,
    claim,
    confirm,
    event,
    fail,
    heard_neighbours,
    make_older,
    old_claim,
    reconcile,
    stored_delivery,
)
from program import Program

from reconciler.insight.feed_findings import STRAY
from reconciler.insight.figures import read_standing
from reconciler.insight.watch import watch
from reconciler.passes import feeds
from reconciler.passes.restore import Heart

OLD_SECRET = "key-of-before-the-rotation"


@pytest.fixture
async def watched(
    dsn: str, db: asyncpg.Pool, aiohttp_client: Callable[..., Any], tmp_path: Path, program: Program
) -> AsyncIterator[Watched]:
    async with watching(dsn, db, aiohttp_client, tmp_path, program) as found:
        yield found


async def test_a_healthy_daemon_alerts_nobody(watched: Watched) -> None:
    await stored_delivery(watched.db)
    assert (await watched.program("status", "--check")).exit_code == 0
    after = await watched.scrape()
    assert [name for name in after if name.startswith("reconciler_findings") and 'needs_person="1"' in name] == []
    assert value(after, "reconciler_database_up") == 1


async def test_a_rotated_secret(watched: Watched) -> None:
    for number in range(20):
        assert await watched.deliver(number, OLD_SECRET) == 401
    await watched.daemon._counters.flush(watched.db)
    await watch(watched.db, SETTINGS, timedelta(days=7), "test")()
    after = await watched.scrape()
    assert value(after, "reconciler_feed_refused_in_a_row", feed="mg") == 20
    assert value(after, "reconciler_feed_hold", feed="mg", hold="breaker") == 1
    await watched.alarms("ReconcilerFeedRefused", "refused mg", after)
    await watched.alarms("ReconcilerFeedRefused", "breaker mg", after)
    await watched.alarms("ReconcilerBreakerOpen", "breaker mg", after)
    await watched.alarms("ReconcilerSignatureFailures", "refused mg", after, BEFORE + 30)


async def test_a_secret_that_half_of_the_provider_uses(watched: Watched) -> None:
    for number in range(12):
        for _ in range(10):  # strangers without a signature hide nothing
            assert (await watched.client.post("/webhooks/mg", data=b"{}")).status == 401
        assert await watched.deliver(number, OLD_SECRET) == 401
        assert await watched.deliver(100 + number, SECRET) == 200
        await watched.daemon._counters.flush(watched.db)
    after = await watched.scrape()
    await watched.alarms("ReconcilerSignatureFailures", "some_refused mg", after, BEFORE + 30)


async def test_strangers_without_a_signature_wake_nobody(watched: Watched) -> None:
    for _ in range(30):
        assert (await watched.client.post("/webhooks/mg", data=b"{}")).status == 401
    await watched.daemon._counters.flush(watched.db)
    after = await watched.scrape()
    assert value(after, "reconciler_feed_refused_in_a_row", feed="mg") == 0
    assert (await watched.program("status", "--check")).exit_code == 0


async def test_a_feed_that_was_renamed_here_and_not_at_its_provider(watched: Watched) -> None:
    for _ in range(STRAY):
        assert (await watched.client.post("/webhooks/mg-old", data=b"{}")).status == 404
    await watched.daemon._counters.flush(watched.db)
    after = await watched.scrape()
    assert value(after, "reconciler_feed_refused_in_a_row", feed="") is None
    await watched.alarms("ReconcilerNeedsPerson", "no_such_feed", after)
    listed = (await watched.program("status")).output
    assert re.search(r"^- +unknown_feed +5 +5 ", listed, re.MULTILINE), listed
    assert "mg-old" not in listed


async def test_a_single_delivery_of_the_provider_that_can_not_be_read(watched: Watched) -> None:
    await stored_delivery(watched.db, outcome="refused:format")
    await stored_delivery(watched.db)
    await watched.alarms("ReconcilerNeedsPerson", "lost mg", await watched.scrape())


async def test_a_feed_that_was_silenced_while_mail_is_sent(watched: Watched) -> None:
    assert await watched.deliver(1, SECRET) == 200
    await watched.daemon._counters.flush(watched.db)
    await watched.db.execute(EARLIER, timedelta(hours=3))
    for number in range(6):
        await confirm(watched.db, f"order:{number}", (await claim(watched.db, f"order:{number}"))["fence"])
        await make_older(watched.db, f"order:{number}", timedelta(hours=2))
    assert value(await watched.scrape(), "reconciler_feed_sends_unheard", feed="mg") == 0
    await confirm(watched.db, "order:6", (await claim(watched.db, "order:6"))["fence"])
    await make_older(watched.db, "order:6", timedelta(hours=2))
    async with watched.db.acquire() as connection:
        await read_standing(connection, SETTINGS)
    after = await scraped(watched.client)
    assert value(after, "reconciler_feed_sends_unheard", feed="mg") == 1
    await watched.alarms("ReconcilerFeedSilent", "no_delivery mg", after)


async def test_a_feed_that_is_silent_while_mail_is_sent(watched: Watched) -> None:
    await confirm(watched.db, "order:1", (await claim(watched.db, "order:1"))["fence"])
    await make_older(watched.db, "order:1", timedelta(hours=2))
    after = await watched.scrape()
    assert value(after, "reconciler_feed_sends_unheard", feed="mg") == 1
    await watched.alarms("ReconcilerFeedSilent", "no_delivery mg", after)


async def test_a_feed_that_is_deaf_to_our_key(watched: Watched) -> None:
    await heard_neighbours(watched.db, heard=0)
    after = await watched.scrape()
    assert value(after, "reconciler_feed_no_echo", feed="mg", message_class="default") == 1
    await watched.alarms("ReconcilerFeedDeaf", "no_echo mg", after)


async def test_a_feed_that_lost_its_last_hour(watched: Watched) -> None:
    await heard_neighbours(watched.db, timedelta(minutes=50), heard=450)
    after = await watched.scrape()
    assert value(after, "reconciler_feed_coverage_ratio", feed="mg", message_class="default") == pytest.approx(
        144 / 294, abs=0.02
    )
    assert value(after, "reconciler_feed_lag_seconds", feed="mg", message_class="default", quantile="0.5") == 2
    await watched.alarms("ReconcilerFeedLoses", "coverage mg", after)


async def test_events_of_another_installation(watched: Watched) -> None:
    for n in range(20):
        await event(watched.db, f"theirs-{n}", message_id=f"m-{n}")
    after = await watched.scrape()
    assert value(after, "reconciler_feed_unknown_events", feed="mg") == 20
    assert value(after, "reconciler_feed_keyed_events", feed="mg") == 20
    await watched.alarms("ReconcilerNeedsPerson", "foreign mg", after)


async def test_a_send_that_stays_undecided(watched: Watched) -> None:
    await old_claim(watched.db, "order:1", timedelta(hours=5))
    await reconcile(watched.db)
    await make_older(watched.db, "order:1", timedelta(hours=2))
    after = await watched.scrape()
    assert value(after, "reconciler_oldest_claimed_seconds") == pytest.approx(7 * 3600, abs=120)
    assert value(after, "reconciler_sends", state="claimed", held="silent") == 1
    assert value(after, "reconciler_sends_due") == 1
    await watched.alarms("ReconcilerUndecided", "held mg", after)


async def test_a_claim_that_passes_overlook(watched: Watched) -> None:
    await old_claim(watched.db, "order:1", timedelta(hours=7))
    await watched.db.execute("UPDATE send_log SET next_check_at = next_check_at + interval '1 day'")
    await reconcile(watched.db)
    after = await watched.scrape()
    assert value(after, "reconciler_sends", state="claimed", held="") == 1
    await watched.alarms("ReconcilerUndecided", "undecided mg", after)


async def test_a_release_that_nobody_claims(watched: Watched) -> None:
    await fail(watched.db, "order:1", (await claim(watched.db, "order:1"))["fence"], not_sent=True)
    await make_older(watched.db, "order:1", timedelta(hours=2))
    after = await watched.scrape()
    assert value(after, "reconciler_oldest_released_seconds") == pytest.approx(7200, abs=60)
    await watched.alarms("ReconcilerReleaseUnclaimed", "unclaimed mg", after)


async def test_a_breaker_that_a_budget_has_opened(watched: Watched) -> None:
    async with watched.db.acquire() as connection:
        await feeds.open_breaker(connection, "mg", "more releases within an hour than its budget allows", "test")
    after = await watched.scrape()
    await watched.alarms("ReconcilerBreakerOpen", "breaker mg", after)
    async with watched.db.acquire() as connection:
        await feeds.resume(connection, "mg", "looked at", "test")
    assert value(await watched.scrape(), "reconciler_feed_hold", feed="mg", hold="breaker") is None


async def test_a_pause_that_somebody_forgot(watched: Watched) -> None:
    async with watched.db.acquire() as connection:
        await feeds.pause(connection, "mg", "incident 17", "ann@desk")
    await watched.scrape()
    assert (await watched.program("status", "--check")).exit_code == 0
    await watched.db.execute("UPDATE feed_state SET paused_at = paused_at - interval '25 hours'")
    await watched.alarms("ReconcilerNeedsPerson", "paused mg", await watched.scrape())


async def test_a_restored_backup(watched: Watched) -> None:
    heart = Heart(watched.folder, "test")
    for _ in range(3):
        await heart.beat(watched.db)
    await watched.db.execute("UPDATE feed_state SET heartbeat = 1 WHERE feed = '*'")
    assert not await heart.check(watched.db)
    after = await watched.scrape()
    assert value(after, "reconciler_feed_hold", feed="*", hold="suspect") == 1
    await watched.alarms("ReconcilerFeedSuspect", "suspect", after)


async def test_a_message_that_somebody_got_twice(watched: Watched) -> None:
    first = await old_claim(watched.db, "order:1")
    assert (await call(watched.db, "operator_release", "order:1", "note", "ann"))["outcome"] == "released"
    second = (await claim(watched.db, "order:1"))["fence"]
    for fence, message_id in ((first, "m-1"), (second, "m-2")):
        await confirm(watched.db, "order:1", fence, message_id)
    await watch(watched.db, SETTINGS, timedelta(days=7), "test")()
    after = await watched.scrape()
    assert value(after, "reconciler_duplicates_recorded", feed="mg") == 1
    await watched.alarms("ReconcilerDuplicate", "breaker mg", after, BEFORE + 30)
    await watched.alarms("ReconcilerDuplicate", "note: duplicates mg", after, BEFORE + 30)


async def test_an_application_that_takes_no_messages(watched: Watched) -> None:
    await watched.db.execute("UPDATE installation SET tell = '{released}'")
    await fail(watched.db, "order:1", (await claim(watched.db, "order:1"))["fence"], not_sent=True)
    await watched.db.execute("UPDATE release_outbox SET tried_since = tried_since - interval '20 minutes'")
    after = await watched.scrape()
    assert value(after, "reconciler_outbox_waiting") == 1
    await watched.alarms("ReconcilerOutboxStuck", "outbox_waits", after)


async def test_messages_to_the_application_that_were_given_up(watched: Watched) -> None:
    await watched.db.execute("UPDATE installation SET tell = '{released}'")
    await fail(watched.db, "order:1", (await claim(watched.db, "order:1"))["fence"], not_sent=True)
    await watched.db.execute("UPDATE release_outbox SET dead_at = clock_timestamp()")
    after = await watched.scrape()
    assert value(after, "reconciler_outbox_dead") == 1
    await watched.alarms("ReconcilerOutboxStuck", "outbox_dead", after)


DROP_NEXT_MONTH = """
DO $$ BEGIN EXECUTE format('DROP TABLE %I', 'provider_event_' || to_char(
    date_trunc('month', clock_timestamp() AT TIME ZONE 'UTC') + interval '1 month', 'YYYYMM')); END $$
"""


async def test_a_partition_that_is_missing(watched: Watched) -> None:
    await watched.db.execute(DROP_NEXT_MONTH)
    after = await watched.scrape()
    assert value(after, "reconciler_partitions_missing") == 1
    await watched.alarms("ReconcilerPartitionsMissing", "partition", after)
