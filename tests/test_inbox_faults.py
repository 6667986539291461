# SPDX-License-Identifier: Apache-2.0
"""What the inbox does when too much waits, a database is slow or away, or a pooler stands between."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import asyncpg
import pytest
from fault_proxy import FaultProxy, proxied
from inbox_kit import count, event
from receiver_app import Cut

from webhooks.database import connect_pool, is_behind_pooler
from webhooks.inbox import Inbox, InboxBusy, InboxUnavailable, Stored

# Limits and faults


async def test_more_than_may_wait_is_put_off_and_the_rest_is_stored(db):
    box = Inbox(queue_events=10)
    await box.open(db)
    told = await asyncio.gather(*(box.store("main", [event(n)]) for n in range(25)), return_exceptions=True)
    assert [type(result) for result in told] == [Stored] * 10 + [InboxBusy] * 15
    assert await count(db) == 10
    assert await box.store("main", [event(n) for n in range(50)]) == Stored(40, 10), "larger than the queue, but alone"
    await box.close()


async def test_bytes_that_wait_are_bounded(db):
    box = Inbox(queue_bytes=100_000)
    await box.open(db)
    raw = bytes(30_000)
    told = await asyncio.gather(*(box.store("main", [event(n, raw=raw)]) for n in range(5)), return_exceptions=True)
    assert [type(result) for result in told] == [Stored] * 3 + [InboxBusy] * 2
    assert (box._events, box._bytes) == (0, 0)
    await box.close()


@dataclass
class Locked:
    """A transaction that lets nobody write events."""

    connection: asyncpg.Connection

    async def __aenter__(self) -> Self:
        await self.connection.execute("BEGIN; LOCK TABLE provider_event IN SHARE MODE")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.connection.execute("COMMIT")


async def test_case_098_nothing_is_acknowledged_before_the_commit(db, inbox):
    async with db.acquire() as other:
        async with Locked(other):
            waiting = asyncio.create_task(inbox.store("main", [event(1)]))
            while not await other.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
                assert not waiting.done()
            assert not waiting.done()
        assert await waiting == Stored(1, 0)


async def stored_at_last(box: Inbox, *numbers: int) -> Stored:
    """Come again until it is taken, as a provider does: on a busy machine a short limit may be over sooner."""
    while True:
        with suppress(InboxBusy, InboxUnavailable):
            return await box.store("main", [event(n) for n in numbers])


async def test_a_slow_database_is_not_waited_for_longer_than_the_limit(db):
    box = Inbox(seconds=0.3)
    await box.open(db)
    async with db.acquire() as other:
        async with Locked(other):
            told = await asyncio.gather(
                box.store("main", [event(1)]), box.store("main", [event(2)]), return_exceptions=True
            )
        assert {type(result) for result in told} <= {InboxBusy, InboxUnavailable}
    assert sum(await stored_at_last(box, 1, 3)) == 2
    assert await count(db) in (2, 3)
    await box.close()


async def test_an_exhausted_pool_is_not_waited_for_for_ever(dsn):
    pool = await asyncpg.create_pool(dsn, min_size=1, max_size=1)
    box = Inbox(seconds=0.2)
    await box.open(pool)
    async with pool.acquire():
        told = await asyncio.gather(*(box.store("main", [event(n)]) for n in range(50)), return_exceptions=True)
    assert {type(result) for result in told} == {InboxBusy}
    await box.close()
    await asyncio.wait_for(pool.close(), 10)


async def test_a_closed_inbox_takes_nothing_and_stores_what_it_took(db):
    box = Inbox()
    with pytest.raises(InboxBusy):
        await box.store("main", [event(0)])
    await box.open(db)
    waiting = [asyncio.create_task(box.store("main", [event(n)])) for n in range(20)]
    await asyncio.sleep(0)
    await box.close()
    with pytest.raises(InboxBusy):
        await box.store("main", [event(99)])
    assert [await task for task in waiting] == [(1, 0)] * 20
    assert await count(db) == 20


async def test_whoever_is_cancelled_takes_nobody_with_him(db, inbox):
    first, second = (asyncio.create_task(inbox.store("main", [event(n)])) for n in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == Stored(1, 0)
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_a_connection_that_died_is_replaced_without_the_provider_noticing(db, inbox):
    await inbox.store("main", [event(1)])
    await db.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    assert await inbox.store("main", [event(1), event(2)]) == Stored(1, 1)


async def test_a_database_that_is_away_is_said_and_its_return_is_noticed(dsn, sockets):
    async with Cut(dsn, sockets) as cut:
        pool = await connect_pool(cut.dsn, size=3, application="test")
        box = Inbox()
        await box.open(pool)
        assert await box.store("main", [event(1)]) == (1, 0)
        await box.check()
        cut.cut()
        for n in range(3):
            with pytest.raises(InboxUnavailable):
                await box.store("main", [event(n)])
            with pytest.raises(InboxUnavailable):
                await box.check()
        cut.resume()
        assert await box.store("main", [event(1), event(2)]) == (1, 1)
        await box.check()
        await box.close()
        await asyncio.wait_for(pool.close(), 10)


async def test_connections_that_nobody_hears_any_more_are_given_up_one_by_one(dsn, pg):
    async with FaultProxy(pg.root / "sock/.s.PGSQL.5432") as proxy:
        pool = await connect_pool(proxied(proxy, dsn), size=4, min_size=4, application="test")
        box = Inbox(seconds=0.3)
        await box.open(pool)
        assert sum(await stored_at_last(box, 1)) == 1
        assert proxy.lose() == 4
        async with asyncio.timeout(20):  # a statement that is not bounded waits for a minute
            assert sum(await stored_at_last(box, 2)) == 1
        await box.close()
        pool.terminate()


async def test_case_081_a_schema_that_changes_under_the_statement_loses_nothing(db, inbox):
    await inbox.store("main", [event(1)])
    await db.execute("ALTER TABLE provider_event ADD COLUMN more text DEFAULT 'x'")
    await db.execute("ALTER TABLE provider_event ALTER COLUMN reason TYPE varchar(600)")
    assert await inbox.store("main", [event(1), event(2, reason="because")]) == (1, 1)


# Poolers


async def test_behind_a_pooler_each_batch_is_one_explicit_transaction(dsn, sockets):
    async with Cut(dsn, sockets, pooled=True) as pooler:
        pool = await connect_pool(pooler.dsn, size=3, application="test")
        async with pool.acquire() as connection:
            assert await is_behind_pooler(connection)
            assert connection._con._config.statement_cache_size == 0
        box = Inbox()
        await box.open(pool)
        assert await box.store("main", [event(0)]) == (1, 0)
        before = pooler.transactions
        assert await box.store("main", [event(1), event(1), event(2)]) == (2, 1)
        assert pooler.transactions == before + 1
        await box.close()
        await asyncio.wait_for(pool.close(), 10)


async def test_a_direct_connection_keeps_its_statements_prepared(dsn):
    pool = await connect_pool(dsn, size=2, application="test")
    async with pool.acquire() as connection:
        assert not await is_behind_pooler(connection)
        assert connection._con._config.statement_cache_size == 100
    async with pool.acquire(), pool.acquire():
        with pytest.raises(TimeoutError):
            await pool.acquire(timeout=0.05)
    await asyncio.wait_for(pool.close(), 10)


async def test_case_080_200_concurrent_deliveries_through_pgbouncer_are_all_stored(pooler, db):
    pool = await connect_pool(pooler, size=4, application="test")
    box = Inbox(writers=2)
    await box.open(pool)
    for _ in range(5):
        await asyncio.gather(*(box.store("main", [event(n)]) for n in range(200)))
    assert await count(db) == 200
    await box.close()
    await asyncio.wait_for(pool.close(), 10)
