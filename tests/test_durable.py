# SPDX-License-Identifier: Apache-2.0
"""What was promised outlives a crash of the server, where synchronous_commit is off for all that it does."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import asyncpg
import pytest
from inbox_kit import event
from kit import FEED, claim, confirm
from places import PREFIX, let_die, parent_folder

from reconciler import campaign
from reconciler.campaigns import suppression
from reconciler.database.migrate import migrate
from reconciler.database.postgres import EmbeddedPostgres
from reconciler.passes import feeds
from reconciler.passes.restore import Heart
from reconciler.sending.idempotency_store import Store
from webhooks.inbox import Inbox

# A lazy commit is on disk when the WAL writer has come by, here not before the crash.
LAZY = {"synchronous_commit": "off", "wal_writer_delay": "10s", "autovacuum": "off"}
LOST = "INSERT INTO scratch VALUES (1)"


@pytest.fixture(scope="module")
def lazy() -> Iterator[EmbeddedPostgres]:
    """A server that makes no commit durable at once, unless it is asked to."""
    root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent_folder()))
    server = EmbeddedPostgres(root)
    server._settings = server._settings | LAZY  # not in place: it is shared
    server.start()
    yield server
    server.stop()
    shutil.rmtree(root, ignore_errors=True)


Deed = Callable[[asyncpg.Pool], Awaitable[object]]


async def claims(db: asyncpg.Pool) -> None:
    await db.execute("CALL send_claim_commit('order:1', $1, '{}')", FEED)


async def confirms(db: asyncpg.Pool) -> None:
    granted = await claim(db, "order:2")
    assert await confirm(db, "order:2", granted["fence"]) == "sent"


async def stores(db: asyncpg.Pool) -> None:
    inbox = Inbox()
    await inbox.open(db)
    assert (await inbox.store(FEED, [event(1)])).stored == 1
    await inbox.close()


async def pauses(db: asyncpg.Pool) -> None:
    async with db.acquire() as connection:
        await feeds.pause(connection, FEED, "incident", "ann")


async def beats(db: asyncpg.Pool) -> None:
    await Heart(Path("/nowhere"), "test").beat(db)


async def begins(db: asyncpg.Pool) -> None:
    await Store(db).begin("request", "content")


async def stops_a_campaign(db: asyncpg.Pool) -> None:
    await db.execute("INSERT INTO campaign (name, feed) VALUES ('sale', $1)", FEED)
    assert await campaign.pause(db, "sale", "wrong price", "ann")


async def suppresses(db: asyncpg.Pool) -> None:
    assert await suppression.add(db, ["ada@example.com"], None, "ann") == 1


DEEDS: dict[str, tuple[Deed, str]] = {
    "a claim": (claims, "SELECT count(*) FROM send_log WHERE state = 'claimed'"),
    "a confirmation": (confirms, "SELECT count(*) FROM send_log WHERE state = 'sent'"),
    "an event": (stores, "SELECT count(*) FROM provider_event"),
    "a pause": (pauses, "SELECT count(*) FROM feed_state WHERE paused_at IS NOT NULL"),
    "a heartbeat": (beats, "SELECT heartbeat FROM feed_state WHERE feed = '*'"),
    "a request": (begins, "SELECT count(*) FROM idempotency"),
    "a campaign's pause": (stops_a_campaign, "SELECT count(*) FROM campaign WHERE state = 'paused'"),
    "a suppression": (suppresses, "SELECT count(*) FROM suppression"),
}


@pytest.fixture
async def place(lazy: EmbeddedPostgres, request: pytest.FixtureRequest) -> str:
    name = f"durable_{list(DEEDS).index(request.getfixturevalue('deed'))}"
    connection = await asyncpg.connect(lazy.dsn())
    await connection.execute(f"CREATE DATABASE {name}")
    await connection.close()
    await migrate(lazy.dsn(name))
    connection = await asyncpg.connect(lazy.dsn(name))
    await connection.execute("CREATE TABLE scratch (n int)")
    await connection.execute("CHECKPOINT")
    await connection.close()
    return lazy.dsn(name)


@pytest.mark.parametrize("deed", list(DEEDS))
async def test_what_somebody_relies_on_is_durable_though_nothing_else_is(
    lazy: EmbeddedPostgres, place: str, deed: str
) -> None:
    do, there = DEEDS[deed]
    async with asyncpg.create_pool(place, min_size=1, max_size=2) as db:
        await do(db)
        await db.execute(LOST)
        let_die(lazy)
        db.terminate()
    lazy.start()
    connection = await asyncpg.connect(place)
    kept = await connection.fetchval(there), await connection.fetchval("SELECT count(*) FROM scratch")
    await connection.close()
    assert kept == (1, 0)
