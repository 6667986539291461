# SPDX-License-Identifier: Apache-2.0
"""Pools of connections: no wait for a lock beyond what was asked for, and a pooler is asked for nothing it refuses."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest
from fault_proxy import FaultProxy, proxied

from reconciler.database.postgres import EmbeddedPostgres
from reconciler.passes.feeds import MEET_WHOEVER_PAUSES, pause
from webhooks import database
from webhooks.database import connect_pool

LOCK = "SELECT FROM feed_state WHERE feed = '*' FOR UPDATE"


async def test_a_statement_that_waits_for_a_lock_too_long_fails_in_one_line(dsn: str) -> None:
    pool = await connect_pool(dsn, size=2, application="test", lock_seconds=0.05)
    async with pool.acquire() as idle, pool.acquire() as waiting, idle.transaction():
        await idle.execute(LOCK)
        with pytest.raises(asyncpg.LockNotAvailableError, match="lock timeout"):
            await waiting.execute(LOCK)
    await pool.close()


async def test_without_a_limit_the_servers_own_holds(dsn: str) -> None:
    pool = await connect_pool(dsn, size=1, application="test")
    assert await pool.fetchval("SHOW lock_timeout") == "0"
    await pool.close()


async def test_a_pooler_is_asked_for_no_limit(pooler: str) -> None:
    pool = await connect_pool(pooler, size=1, application="test", lock_seconds=10)
    async with pool.acquire() as connection, connection.transaction():
        assert await connection.fetchval("SELECT current_setting('lock_timeout')") == "0"
    await pool.close()


async def test_what_a_client_locked_that_is_gone_without_a_word_is_free_again(
    dsn: str, pg: EmbeddedPostgres, db: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass whose machine vanished in the middle of a release kept `pause` waiting, for as long as TCP does."""
    monkeypatch.setattr(database, "ABANDONED_SECONDS", 0.3)
    async with FaultProxy(pg.root / "sock/.s.PGSQL.5432") as proxy:
        pool = await connect_pool(proxied(proxy, dsn), size=1, application="test")
        connection = await pool.acquire()
        await connection.execute("BEGIN")
        await connection.execute(MEET_WHOEVER_PAUSES)
        proxy.lose()
        async with db.acquire() as operator, asyncio.timeout(10):
            await pause(operator, "*", "stop", "test")
        pool.terminate()


async def test_over_tcp_the_server_is_asked_to_notice_within_a_minute_that_we_are_gone(
    dsn: str, pg: EmbeddedPostgres
) -> None:
    async with FaultProxy(pg.root / "sock/.s.PGSQL.5432") as proxy:
        pool = await connect_pool(proxied(proxy, dsn), size=1, application="test")
        rows = await pool.fetch(
            "SELECT name, source FROM pg_settings WHERE name LIKE 'tcp_%' OR name LIKE 'idle_in_tr%'"
        )
        assert {row["name"] for row in rows if row["source"] == "client"} == {
            *("idle_in_transaction_session_timeout", "tcp_keepalives_idle", "tcp_keepalives_interval"),
            *("tcp_keepalives_count", "tcp_user_timeout"),
        }
        pool.terminate()


async def test_guards_look_at_the_newest_state_whatever_the_databases_default_isolation_is(dsn: str) -> None:
    pool = await connect_pool(dsn, size=1, application="test")
    name = await pool.fetchval("SELECT current_database()")
    await pool.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'repeatable read'")
    await pool.close()
    pool = await connect_pool(dsn, size=1, application="test")
    assert await pool.fetchval("SHOW transaction_isolation") == "read committed"
    await pool.close()


class Forgetting:
    """Notices when plans are to be forgotten, and what is asked after that."""

    def __init__(self) -> None:
        self.asked, self.more = asyncio.Event(), asyncio.Event()

    async def request(self, data: bytes) -> bool:
        if self.asked.is_set():
            self.more.set()
        if database.FORGET_PLANS.encode() in data:
            self.asked.set()
        return True

    async def answer(self, _data: bytes) -> bool:
        return True


async def test_a_connection_that_is_dead_without_a_word_is_waited_for_no_longer_than_asked_and_keeps_no_place(
    dsn: str, pg: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "PLANS_SECONDS", 0.0)
    async with FaultProxy(pg.root / "sock/.s.PGSQL.5432") as proxy, asyncio.timeout(20):
        pool = await connect_pool(proxied(proxy, dsn), size=1, application="test")
        proxy.answers.open.clear()
        with pytest.raises(TimeoutError):
            await pool.acquire(timeout=0.2)
        proxy.answers.open.set()
        assert await pool.fetchval("SELECT 1") == 1
        await pool.close()


async def test_whoever_is_given_a_connection_while_the_pool_is_closed_is_told_so(
    dsn: str, pg: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "PLANS_SECONDS", 0.0)
    tap = Forgetting()
    async with FaultProxy(pg.root / "sock/.s.PGSQL.5432", lambda: tap) as proxy, asyncio.timeout(20):
        pool = await connect_pool(proxied(proxy, dsn), size=1, application="test")
        proxy.answers.open.clear()
        asks = asyncio.create_task(pool.fetchval("SELECT 1"))
        await tap.asked.wait()
        closes = asyncio.create_task(pool.close())
        await tap.more.wait()
        proxy.answers.open.set()
        with pytest.raises(asyncpg.InterfaceError, match="closed"):
            await asks
        await closes
