# SPDX-License-Identifier: Apache-2.0
"""Alerts: each fires where Prometheus should, on figures that a real fault has made, and has a runbook that is true.

`/metrics` and `reconciler status --check` tell the same. Without promtool its part is skipped, and counted as that.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from alerts_kit import BEFORE, ROOT, RULES, SETTINGS, Watched, alerts, promtool, scraped, series
from click.testing import CliRunner
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
    until_it_waits,
)
from program import Program
from structlog.testing import capture_logs

from reconciler import feeds
from reconciler.cli.commands import cli
from reconciler.composition import policies
from reconciler.daemon import Daemon
from reconciler.idempotency import delete_old
from reconciler.postgres import EmbeddedPostgres
from reconciler.restore import Heart
from reconciler.scheduler import Worker
from reconciler.watch import watch
from webhooks.provider import Feed
from webhooks.registry import PROVIDERS

RUNBOOKS = (ROOT / "docs/runbooks.md").read_text("utf-8")
NAMES = sorted(alerts())


# The file


def test_promtool_takes_the_rules() -> None:
    promtool("check", "rules", str(RULES))


def test_each_alert_fires_where_it_should_and_not_where_all_is_well() -> None:
    promtool("test", "rules", str(ROOT / "tests/alerts.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_an_alert_has_a_time_a_severity_a_summary_a_runbook_and_a_test(name: str) -> None:
    rule = alerts()[name]
    assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"] in ({"severity": "critical"}, {"severity": "warning"})
    assert rule["annotations"].keys() == {"summary", "runbook"}
    assert rule["annotations"]["runbook"] == f"docs/runbooks.md#{name.lower()}"
    fires = re.compile(rf"alertname: {name}\n +eval_time: \w+\n +exp_alerts:")
    assert fires.search((ROOT / "tests/alerts.yaml").read_text("utf-8"))


def test_each_alert_has_one_runbook_which_says_what_it_means_and_what_to_look_at_and_do() -> None:
    _, *parts = RUNBOOKS.split("\n## ")
    assert sorted(part.partition("\n")[0] for part in parts) == NAMES
    for part in parts:
        assert re.findall(r"^\*\*(\w+):\*\*", part, re.MULTILINE) == ["Means", "Look", "Do"], part


COMMANDS = sorted(set(re.findall(r"(?:`|^)(reconciler [a-z][^`\n]*?)(?:`|$)", RUNBOOKS, re.MULTILINE)))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_runbooks_exist(command: str) -> None:
    words = command.partition(" -- ")[0].partition(' "')[0].split()[1:]
    path = [word for word in words[:2] if word.islower() and not word.startswith("-")]
    shown = CliRunner().invoke(cli, [*path, "--help"])
    if shown.exit_code and len(path) == 2:  # the second word is an argument
        shown = CliRunner().invoke(cli, [path[0], "--help"])
    assert shown.exit_code == 0, shown.output
    for option in (word for word in words if word.startswith("-")):
        assert option in re.split(r"[\s,]+", shown.output), f"{command}: no {option}"


def test_the_runbooks_have_commands_and_their_own_anchors() -> None:
    assert len(COMMANDS) > 20
    anchors = {f"#{name.lower()}" for name in NAMES}
    assert set(re.findall(r"\]\((#\w+)\)", RUNBOOKS)) <= anchors


# Real faults


@pytest.fixture
async def watched(
    dsn: str, db: asyncpg.Pool, aiohttp_client: Callable[..., Any], tmp_path: Path
) -> AsyncIterator[Watched]:
    """A daemon over a fresh database; its work is done by the tests, one piece at a time."""

    async def no_fetch(_url: str) -> bytes:
        raise AssertionError

    settings = SETTINGS.model_copy(
        update={"database": SETTINGS.database.model_copy(update={"url": dsn, "data_dir": tmp_path})}
    )
    daemon = Daemon(settings, None)
    client = await aiohttp_client(daemon.app(no_fetch))
    await daemon._inbox.open(db)
    await daemon._check(db, None)
    await daemon._passes(db, policies(settings))()
    found = Watched(daemon, client, db, tmp_path, {})
    found.before = await found.scrape()
    yield found
    await daemon._inbox.close()


async def check(program: Program) -> str:
    """What `status --check` says that needs a person."""
    done = await program("status", "--check")
    assert done.exit_code == 3, done.output
    return done.output


def value(scrape: dict[str, float], name: str, **labels: str) -> float | None:
    return scrape.get(series(name, **labels))


async def test_a_healthy_daemon_alerts_nobody(watched: Watched, program: Program) -> None:
    await stored_delivery(watched.db)
    assert (await program("status", "--check")).exit_code == 0
    after = await watched.scrape()
    assert [name for name in after if name.startswith("reconciler_findings") and 'needs_person="1"' in name] == []
    assert value(after, "reconciler_database_up") == 1


async def test_a_rotated_secret(watched: Watched, program: Program) -> None:
    old = Feed("mg", "mailgun", ("key-of-before-the-rotation",))
    for n in range(20):
        delivery = PROVIDERS["mailgun"].sample("delivered", f"order-{n}", old, datetime.now(UTC))
        answer = await watched.client.post("/webhooks/mg", data=delivery.body, headers=dict(delivery.headers))
        assert answer.status == 401
    await watched.daemon._counters.flush(watched.db)
    await watch(watched.db, SETTINGS, timedelta(days=7), "test")()
    after = await watched.scrape()
    assert value(after, "reconciler_feed_refused_in_a_row", feed="mg") == 20
    assert value(after, "reconciler_feed_hold", feed="mg", hold="breaker") == 1
    found = await check(program)
    assert "refused mg: the newest delivery was refused (signature)" in found
    assert "breaker mg: " in found
    await watched.fires("ReconcilerFeedRefused", after)
    await watched.fires("ReconcilerBreakerOpen", after)
    await watched.fires("ReconcilerSignatureFailures", after, BEFORE + 30)


async def test_a_feed_that_is_silent_while_mail_is_sent(watched: Watched, program: Program) -> None:
    await confirm(watched.db, "order:1", (await claim(watched.db, "order:1"))["fence"])
    await make_older(watched.db, "order:1", timedelta(hours=2))
    after = await watched.scrape()
    assert value(after, "reconciler_feed_sends_unheard", feed="mg") == 1
    assert "no_delivery mg: " in await check(program)
    await watched.fires("ReconcilerFeedSilent", after)


async def test_a_feed_that_is_deaf_to_our_key(watched: Watched, program: Program) -> None:
    await heard_neighbours(watched.db, heard=0)
    after = await watched.scrape()
    assert value(after, "reconciler_feed_no_echo", feed="mg", message_class="default") == 1
    assert "no_echo mg: " in await check(program)
    await watched.fires("ReconcilerFeedDeaf", after)


async def test_a_feed_that_lost_its_last_hour(watched: Watched, program: Program) -> None:
    await heard_neighbours(watched.db, timedelta(minutes=50), heard=450)
    after = await watched.scrape()
    assert value(after, "reconciler_feed_coverage_ratio", feed="mg", message_class="default") == pytest.approx(
        144 / 294, abs=0.02
    )
    assert value(after, "reconciler_feed_lag_seconds", feed="mg", message_class="default", quantile="0.5") == 2
    assert "coverage mg: " in await check(program)
    await watched.fires("ReconcilerFeedLoses", after)


async def test_events_of_another_installation(watched: Watched, program: Program) -> None:
    for n in range(20):
        await event(watched.db, f"theirs-{n}", message_id=f"m-{n}")
    after = await watched.scrape()
    assert value(after, "reconciler_feed_unknown_events", feed="mg") == 20
    assert value(after, "reconciler_feed_keyed_events", feed="mg") == 20
    assert "foreign mg: " in await check(program)
    await watched.fires("ReconcilerNeedsPerson", after)


async def test_a_send_that_stays_undecided(watched: Watched, program: Program) -> None:
    await old_claim(watched.db, "order:1", timedelta(hours=5))
    await reconcile(watched.db)
    await make_older(watched.db, "order:1", timedelta(hours=2))
    after = await watched.scrape()
    assert value(after, "reconciler_oldest_claimed_seconds") == pytest.approx(7 * 3600, abs=120)
    assert value(after, "reconciler_sends", state="claimed", held="silent") == 1
    assert value(after, "reconciler_sends_due") == 1
    assert "held mg: " in await check(program)
    await watched.fires("ReconcilerUndecided", after)


async def test_a_release_that_nobody_claims(watched: Watched, program: Program) -> None:
    await fail(watched.db, "order:1", (await claim(watched.db, "order:1"))["fence"], not_sent=True)
    await make_older(watched.db, "order:1", timedelta(hours=2))
    after = await watched.scrape()
    assert value(after, "reconciler_oldest_released_seconds") == pytest.approx(7200, abs=60)
    assert "unclaimed mg: " in await check(program)
    await watched.fires("ReconcilerReleaseUnclaimed", after)


async def test_passes_that_end_no_more(watched: Watched, program: Program) -> None:
    await old_claim(watched.db, "order:1")
    await watched.db.execute("UPDATE pass SET started_at = started_at - interval '6 minutes'")
    after = await watched.scrape()
    assert "no_pass: " in await check(program)
    await watched.fires("ReconcilerNoPass", after, BEFORE + 20)
    await watched.fires("ReconcilerFiguresOld", after, BEFORE + 20)


async def test_a_breaker_that_a_budget_has_opened(watched: Watched, program: Program) -> None:
    async with watched.db.acquire() as connection:
        await feeds.open_breaker(connection, "mg", "more releases within an hour than its budget allows", "test")
    after = await watched.scrape()
    assert "breaker mg: " in await check(program)
    await watched.fires("ReconcilerBreakerOpen", after)
    async with watched.db.acquire() as connection:
        await feeds.resume(connection, "mg", "looked at", "test")
    assert value(await watched.scrape(), "reconciler_feed_hold", feed="mg", hold="breaker") is None


async def test_a_restored_backup(watched: Watched, program: Program) -> None:
    heart = Heart(watched.folder, "test")
    for _ in range(3):
        await heart.beat(watched.db)
    await watched.db.execute("UPDATE feed_state SET heartbeat = 1 WHERE feed = '*'")
    assert not await heart.check(watched.db)
    after = await watched.scrape()
    assert value(after, "reconciler_feed_hold", feed="*", hold="suspect") == 1
    assert "suspect: " in await check(program)
    await watched.fires("ReconcilerFeedSuspect", after)


async def test_a_message_that_somebody_got_twice(watched: Watched, program: Program) -> None:
    first = await old_claim(watched.db, "order:1")
    assert (await call(watched.db, "operator_release", "order:1", "note", "ann"))["outcome"] == "released"
    second = (await claim(watched.db, "order:1"))["fence"]
    for fence, message_id in ((first, "m-1"), (second, "m-2")):
        await confirm(watched.db, "order:1", fence, message_id)
    await watch(watched.db, SETTINGS, timedelta(days=7), "test")()
    after = await watched.scrape()
    assert value(after, "reconciler_duplicates_recorded", feed="mg") == 1
    found = await check(program)
    assert "duplicates mg: 1 found within 7 days" in found
    assert "breaker mg: " in found
    await watched.fires("ReconcilerDuplicate", after, BEFORE + 30)


async def test_an_application_that_takes_no_messages(watched: Watched, program: Program) -> None:
    await watched.db.execute("UPDATE installation SET tell = '{released}'")
    await fail(watched.db, "order:1", (await claim(watched.db, "order:1"))["fence"], not_sent=True)
    await watched.db.execute("UPDATE release_outbox SET tried_since = tried_since - interval '20 minutes'")
    after = await watched.scrape()
    assert value(after, "reconciler_outbox_waiting") == 1
    assert "outbox_waits: " in await check(program)
    await watched.fires("ReconcilerOutboxStuck", after)


DROP_NEXT_MONTH = """
DO $$ BEGIN EXECUTE format('DROP TABLE %I', 'provider_event_' || to_char(
    date_trunc('month', clock_timestamp() AT TIME ZONE 'UTC') + interval '1 month', 'YYYYMM')); END $$
"""


async def test_a_partition_that_is_missing(watched: Watched, program: Program) -> None:
    await watched.db.execute(DROP_NEXT_MONTH)
    after = await watched.scrape()
    assert value(after, "reconciler_partitions_missing") == 1
    assert "partition: " in await check(program)
    await watched.fires("ReconcilerPartitionsMissing", after)


async def test_a_database_that_is_slow(watched: Watched) -> None:
    async with watched.db.acquire() as blocking:
        async with blocking.transaction():
            await blocking.execute("LOCK TABLE installation IN ACCESS EXCLUSIVE MODE")
            checking = asyncio.create_task(watched.daemon._check(watched.db, None))
            await until_it_waits(watched.db, checking)
            await blocking.execute("SELECT pg_sleep(0.6)")  # so slow it is
        await checking
    after = await watched.scrape()
    assert value(after, "reconciler_database_check_seconds_count") > value(
        watched.before, "reconciler_database_check_seconds_count"
    )
    await watched.fires("ReconcilerDatabaseSlow", after, BEFORE + 15)


async def test_a_database_that_is_away(watched: Watched, program: Program, pg: EmbeddedPostgres, dsn: str) -> None:
    name = await watched.db.fetchval("SELECT current_database()")
    admin = await asyncpg.connect(pg.dsn())
    await admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
    await admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1", name)
    assert not await Worker("check", lambda: watched.daemon._check(watched.db, None), "away").attempt()
    delivery = PROVIDERS["mailgun"].sample(
        "delivered", "order-1", Feed("mg", "mailgun", tuple(SETTINGS.feeds["mg"].secrets)), datetime.now(UTC)
    )
    for _ in range(2):
        answer = await watched.client.post("/webhooks/mg", data=delivery.body, headers=dict(delivery.headers))
        assert answer.status == 503
    after = await scraped(watched.client)
    assert value(after, "reconciler_database_up") == 0
    done = await program("status", "--check")
    assert (done.exit_code, "database" in done.output) == (1, True)
    await admin.close()
    await watched.fires("ReconcilerDatabaseAway", after)
    await watched.fires("ReconcilerDeliveriesPutOff", after, BEFORE + 15)


async def test_background_work_that_fails_again_and_again(watched: Watched) -> None:
    await watched.db.execute("ALTER TABLE idempotency RENAME TO idempotency_away")
    worker = Worker("idempotency", lambda: delete_old(watched.db), "idempotency_not_deleted")
    with capture_logs():
        for _ in range(6):
            assert not await worker.attempt()
    await watched.fires("ReconcilerWorkFails", await watched.scrape(), BEFORE + 20)
