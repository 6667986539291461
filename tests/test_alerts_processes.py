# SPDX-License-Identifier: Apache-2.0
"""Alerts on processes and their database: each real fault is told by `/metrics`, an alert and `status`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from alerts_kit import BEFORE, EARLIER, Scraped, Watched, scraped, value, watching
from aws_server import REGION
from kit import old_claim, until_it_waits
from program import Program
from serving import sample, serving, until, write_config
from structlog.testing import capture_logs
from test_serve_roads import ARCHIVE

from reconciler.composition import Database
from reconciler.database.postgres import EmbeddedPostgres
from reconciler.idempotency import delete_old
from reconciler.passes.restore import Heart
from reconciler.serving.scheduler import Worker
from reconciler.serving.self_check import SelfCheck


@pytest.fixture
async def watched(
    dsn: str, db: asyncpg.Pool, aiohttp_client: Callable[..., Any], tmp_path: Path, program: Program
) -> AsyncIterator[Watched]:
    async with watching(dsn, db, aiohttp_client, tmp_path, program) as found:
        yield found


async def test_passes_that_end_no_more(watched: Watched) -> None:
    await old_claim(watched.db, "order:1")
    await watched.db.execute("UPDATE pass SET started_at = started_at - interval '6 minutes'")
    await watched.alarms("ReconcilerNoPass", "no_pass", await watched.scrape(), BEFORE + 20)


async def test_a_send_that_stays_undecided_because_passes_end_no_more(watched: Watched) -> None:
    await old_claim(watched.db, "order:1", timedelta(hours=7))
    await watched.db.execute("UPDATE pass SET started_at = started_at - interval '6 minutes'")
    await watched.alarms("ReconcilerUndecided", "no_pass", await watched.scrape())


async def test_a_half_that_decides_and_lives_no_more(watched: Watched) -> None:
    await Heart(watched.folder, "test").beat(watched.db)
    assert (await watched.program("status", "--check")).exit_code == 0
    await watched.db.execute("UPDATE pass SET started_at = started_at - interval '6 minutes'")
    assert (await watched.program("status", "--check")).exit_code == 0, "it beats still"
    await watched.db.execute("UPDATE feed_state SET heartbeat_at = heartbeat_at - interval '6 minutes'")
    await watched.alarms("ReconcilerNoPass", "down", await watched.scrape(), BEFORE + 20)


async def test_figures_that_are_read_no_more(watched: Watched) -> None:
    await watched.later(4)
    assert (await watched.program("status", "--check")).exit_code == 0
    await watched.later(2)
    await watched.alarms("ReconcilerFiguresOld", "figures_old", await scraped(watched.client), BEFORE + 20)


async def test_a_database_that_is_slow(watched: Watched) -> None:
    for _ in range(2):
        async with watched.db.acquire() as blocking:
            async with blocking.transaction():
                await blocking.execute("LOCK TABLE installation IN ACCESS EXCLUSIVE MODE")
                checking = asyncio.create_task(watched.daemon._check(watched.db, None))
                await until_it_waits(watched.db, checking)
                await blocking.execute("SELECT pg_sleep(0.6)")  # so slow it is
            await checking
        await watched.later(5)
    after = await watched.scrape()
    count = "reconciler_database_check_seconds_count"
    assert value(after, count) == value(watched.before, count) + 2
    await watched.alarms("ReconcilerDatabaseSlow", "database_slow", after, BEFORE + 15)


@asynccontextmanager
async def away(watched: Watched, pg: EmbeddedPostgres) -> AsyncIterator[None]:
    """Let the database answer nobody."""
    name = await watched.db.fetchval("SELECT current_database()")
    admin = await asyncpg.connect(pg.dsn())
    await admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
    await admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1", name)
    yield
    await admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')
    await admin.close()


async def test_a_database_that_is_away(watched: Watched, pg: EmbeddedPostgres) -> None:
    async with away(watched, pg):
        assert not await Worker("check", lambda: watched.daemon._check(watched.db, None), "away").attempt()
        after = await scraped(watched.client)
        assert value(after, "reconciler_database_up") == 0
        done = await watched.program("status", "--check")
        assert (done.exit_code, "database" in done.output) == (1, True)
        await watched.fires("ReconcilerDatabaseAway", after)


async def test_deliveries_that_are_put_off_for_ten_minutes(watched: Watched, pg: EmbeddedPostgres) -> None:
    for _ in range(4):
        assert (await watched.program("status", "--check")).exit_code == 0
        async with away(watched, pg):
            assert await watched.deliver(1) == 503
        await watched.db.execute(EARLIER, timedelta(minutes=3, seconds=30))
        await watched.daemon._counters.flush(watched.db)
    after = await scraped(watched.client)
    assert value(after, "reconciler_deliveries_total", feed="mg", outcome="later:database") == 4
    await watched.alarms("ReconcilerDeliveriesPutOff", "put_off mg", after, BEFORE + 15)


async def test_a_queue_that_cannot_be_read(watched: Watched) -> None:
    for _ in range(2):
        watched.daemon._counters.note("mg", "later:queue")  # as its reader does
    await watched.daemon._counters.flush(watched.db)
    await watched.alarms("ReconcilerDeliveriesPutOff", "queue mg", await scraped(watched.client), BEFORE + 15)


async def test_background_work_that_fails_again_and_again(watched: Watched) -> None:
    await watched.db.execute("ALTER TABLE idempotency RENAME TO idempotency_away")
    worker = Worker("idempotency", lambda: delete_old(watched.db), "idempotency_not_deleted")
    with capture_logs():
        for _ in range(4):
            assert (await watched.program("status", "--check")).exit_code == 0
            assert not await worker.attempt()
            await watched.later(1)
        for _ in range(4):
            assert not await worker.attempt()
    await watched.later(0)
    await watched.alarms("ReconcilerWorkFails", "work_fails", await watched.scrape(), BEFORE + 20)
    await watched.later(5)
    assert (await watched.program("status", "--check")).exit_code == 0, "it fails no more"


async def test_a_process_takes_back_what_one_of_its_name_left_and_nothing_of_others(watched: Watched) -> None:
    left = "INSERT INTO finding (code, host, text) VALUES ('work_fails', $1, 'x'), ('archive', $1, 'x')"
    for host in ("host:1", "host:2"):
        await watched.db.execute(left, host)
    await SelfCheck("host:1", reconciles=True).tell(watched.db)
    rows = await watched.db.fetch("SELECT host, code FROM finding ORDER BY 1, 2")
    assert [tuple(row) for row in rows] == [("host:1", "archive"), ("host:2", "archive"), ("host:2", "work_fails")]


async def test_a_process_that_ends_takes_back_what_it_told(watched: Watched) -> None:
    left = "INSERT INTO finding (code, host, text) VALUES ('work_fails', $1, 'x')"
    for host in (watched.daemon._who, "host:2"):
        await watched.db.execute(left, host)
    watched.daemon._begin(watched.db, Database("", None))
    await watched.daemon.close()
    assert await watched.db.fetchval("SELECT array_agg(host) FROM finding") == ["host:2"]


async def test_a_process_that_ends_without_its_database_takes_nothing_back_and_ends(
    watched: Watched, pg: EmbeddedPostgres
) -> None:
    await watched.db.execute("INSERT INTO finding (code, host, text) VALUES ('work_fails', 'host:1', 'x')")
    async with away(watched, pg):
        await SelfCheck("host:1", reconciles=True).take_back(watched.db)
    assert await watched.db.fetchval("SELECT array_agg(host) FROM finding") == ["host:1"]


async def test_a_server_whose_archive_is_full_and_which_is_killed_then(
    aws: str, dsn: str, db: asyncpg.Pool, tmp_path: Path, program: Program
) -> None:
    """The whole program: what it tells of itself, and what is told of it once it can't."""
    config = write_config(tmp_path, ARCHIVE.format(region=REGION, url=aws) + "spool_max = 1000\n")
    program.env["RECONCILER_CONFIG"] = str(config)

    async def told() -> bool:
        return bool(await db.fetchval("SELECT count(*) FROM finding WHERE code = 'archive_drops'"))

    async with serving(config, RECONCILER_DATABASE__URL=dsn) as server:
        await server.becomes(200)
        seen = Scraped(folder=tmp_path, program=program, before=await scraped(server.session, server.url))
        for number in range(20):
            assert await server.deliver("mg", sample("mg", "delivered", f"key-{number}")) == 200
        await until(told, "the process to tell that it dropped what no bucket took")
        after = await scraped(server.session, server.url)
        assert value(after, "reconciler_archive_dropped_total") > 0
        await seen.alarms("ReconcilerArchiveDrops", "archive_drops", after, BEFORE + 10)
        await server.kill()
        assert await server.status("/metrics") == 0
    assert "down: " not in (await program("status", "--check")).output, "it was there a moment ago"
    await db.execute("UPDATE pass SET started_at = started_at - interval '6 minutes'")
    await db.execute("UPDATE feed_state SET heartbeat_at = heartbeat_at - interval '6 minutes'")
    await seen.alarms("ReconcilerDown", "down", {})
