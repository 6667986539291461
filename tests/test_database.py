# SPDX-License-Identifier: Apache-2.0
"""Pools of connections: no wait for a lock beyond what was asked for, and a pooler is asked for nothing it refuses."""

from __future__ import annotations

import asyncpg
import pytest

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


async def test_guards_look_at_the_newest_state_whatever_the_databases_default_isolation_is(dsn: str) -> None:
    pool = await connect_pool(dsn, size=1, application="test")
    name = await pool.fetchval("SELECT current_database()")
    await pool.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'repeatable read'")
    await pool.close()
    pool = await connect_pool(dsn, size=1, application="test")
    assert await pool.fetchval("SHOW transaction_isolation") == "read committed"
    await pool.close()
