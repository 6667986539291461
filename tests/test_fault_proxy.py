# SPDX-License-Identifier: Apache-2.0
"""The tool that cuts and loses what we say to PostgreSQL does what it says; else it proves nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import asyncpg
import pytest
from chaos.commit_points import Point, Points, Trap, what
from fault_proxy import FaultProxy, Tap, proxied

from reconciler.database.postgres import EmbeddedPostgres
from webhooks.writer import STORE_EVENTS

LOST = (OSError, asyncpg.PostgresConnectionError, asyncpg.InterfaceError, asyncpg.InternalClientError)
MAKE = "CREATE TABLE thing (n int)"
ADD = "INSERT INTO thing VALUES ($1)"
COUNT = "SELECT count(*) FROM thing"


@asynccontextmanager
async def through(
    pg: EmbeddedPostgres, dsn: str, tap: Callable[[], Tap] | None = None
) -> AsyncIterator[tuple[FaultProxy, asyncpg.Connection]]:
    async with FaultProxy(pg.root / "sock/.s.PGSQL.5432", tap) as proxy:
        connection = await asyncpg.connect(proxied(proxy, dsn))
        yield proxy, connection
        connection.terminate()


async def hears_nothing(answer: asyncio.Task[int]) -> None:
    done, _ = await asyncio.wait({answer}, timeout=0.2)
    assert not done


async def test_what_a_black_hole_for_answers_held_up_was_done_and_is_heard_late(
    pg: EmbeddedPostgres, db: asyncpg.Pool, dsn: str
) -> None:
    await db.execute(MAKE)
    async with through(pg, dsn) as (proxy, connection):
        proxy.close(proxy.answers)
        adding = asyncio.create_task(connection.fetchval(f"{ADD} RETURNING n", 7))
        await hears_nothing(adding)
        proxy.heal()
        assert await adding == 7
        assert await db.fetchval(COUNT) == 1


async def test_what_a_black_hole_for_requests_held_up_is_done_late(
    pg: EmbeddedPostgres, db: asyncpg.Pool, dsn: str
) -> None:
    await db.execute(MAKE)
    async with through(pg, dsn) as (proxy, connection):
        proxy.close(proxy.requests)
        adding = asyncio.create_task(connection.execute("INSERT INTO thing VALUES (7)"))
        await hears_nothing(adding)
        assert await db.fetchval(COUNT) == 0
        proxy.heal()
        await adding
        assert await db.fetchval(COUNT) == 1


async def test_a_forgotten_connection_is_never_heard_again_and_a_new_one_is(pg: EmbeddedPostgres, dsn: str) -> None:
    async with through(pg, dsn) as (proxy, connection):
        assert proxy.lose() == 1
        asking = asyncio.create_task(connection.fetchval("SELECT 1"))
        proxy.heal()
        await hears_nothing(asking)
        asking.cancel()
        async with asyncpg.create_pool(proxied(proxy, dsn), min_size=1, max_size=1) as pool:
            assert await pool.fetchval("SELECT 1") == 1


async def test_a_cut_ends_connections_and_whoever_is_turned_away_gets_none(pg: EmbeddedPostgres, dsn: str) -> None:
    async with through(pg, dsn) as (proxy, connection):
        assert proxy.cut() == 1
        with pytest.raises(LOST):
            await connection.fetchval("SELECT 1")
        proxy.away = True
        with pytest.raises(LOST):
            await asyncpg.connect(proxied(proxy, dsn))


async def test_an_answer_that_ends_in_its_middle_is_none(pg: EmbeddedPostgres, db: asyncpg.Pool, dsn: str) -> None:
    await db.execute(MAKE)
    async with through(pg, dsn) as (proxy, connection):
        proxy.half_an_answer = True
        with pytest.raises(LOST):
            await connection.execute("INSERT INTO thing VALUES (7)")
        assert await db.fetchval(COUNT) == 1
        assert not proxy.half_an_answer


@pytest.mark.parametrize(
    ("statement", "written"),
    [
        ("SELECT 1", ""),
        ("SELECT FROM feed_state WHERE feed = '*' FOR NO KEY UPDATE", ""),
        ("CALL send_claim_commit($1, $2, $3)", "call send_claim_commit"),
        ("SELECT outcome FROM send_confirm($1, $2, $3, $4)", "send_confirm"),
        ("INSERT INTO a VALUES (1) ON CONFLICT (b) DO UPDATE SET c = 1", "insert a"),
        ("WITH m AS (UPDATE a SET b = 1 RETURNING c) INSERT INTO d SELECT c FROM m", "update a, insert d"),
        (STORE_EVENTS, "insert provider_event"),
    ],
)
def test_a_commit_is_known_by_what_it_writes(statement: str, written: str) -> None:
    assert what(statement) == written


async def nothing() -> None:
    """Do no damage: that the connection ends is all."""


@pytest.mark.parametrize("in_transaction", [False, True])
async def test_a_commit_is_struck_once_before_it_is_asked_for_and_once_after_it_was_made(
    pg: EmbeddedPostgres, db: asyncpg.Pool, dsn: str, in_transaction: bool
) -> None:
    await db.execute(MAKE)
    points = Points()
    committed = []
    for _ in range(3):
        trap = Trap(points)
        async with through(pg, dsn, trap.tap) as (_, connection):
            trap.strike = nothing
            try:
                if in_transaction:
                    async with connection.transaction():
                        await connection.execute(ADD, 7)
                        await connection.fetchval(COUNT)
                else:
                    await connection.execute(ADD, 7)
            except LOST:
                pass
        committed.append(await db.fetchval(COUNT))
    assert committed == [0, 1, 2]
    assert points.struck == points.seen == {Point("insert thing", "before"), Point("insert thing", "after")}
