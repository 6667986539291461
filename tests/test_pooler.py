# SPDX-License-Identifier: Apache-2.0
"""Migrations through a pooler in transaction mode (runs where PgBouncer is installed)."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from reconciler.database.migrate import MigrationError, load, migrate, pending
from webhooks.database import is_behind_pooler


async def test_migrations_run_through_a_pooler_and_leave_no_lock_behind(pooler, dsn, tmp_path):
    (tmp_path / "0001_thing.sql").write_text("CREATE TABLE thing (id int);\n")
    direct = await asyncpg.connect(dsn)
    await direct.execute("DROP TABLE schema_migration")
    ran = await asyncio.gather(*(migrate(pooler, folder=tmp_path) for _ in range(5)))
    assert sorted(ran) == [[], [], [], [], ["0001_thing.sql"]]
    assert await direct.fetchval("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0
    assert await direct.fetchval("SELECT to_regclass('thing') IS NOT NULL")
    await direct.close()


async def test_a_file_that_needs_a_connection_of_its_own_says_so(pooler, tmp_path):
    for migration in load():
        (tmp_path / migration.name).write_text(migration.sql)
    name = f"{len(load()) + 1:04d}_index.sql"
    (tmp_path / name).write_text("-- no-transaction\nCREATE INDEX CONCURRENTLY IF NOT EXISTS i ON send_log (feed);\n")
    with pytest.raises(MigrationError, match=f"^{name} can't run through a pooler: set database.direct_url"):
        await migrate(pooler, folder=tmp_path)
    assert await pending(pooler, tmp_path) == [name]


async def test_a_direct_connection_is_not_taken_for_a_pooled_one(pooler, dsn):
    direct = await asyncpg.connect(dsn)
    pooled = await asyncpg.connect(pooler, statement_cache_size=0)
    assert [await is_behind_pooler(connection) for connection in (direct, pooled)] == [False, True]
    await pooled.close()
    await direct.close()
