# SPDX-License-Identifier: Apache-2.0
"""(b) SendGrid batches of 1,000 events through verify, parse and store, against a bare INSERT of the same rows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import asyncpg

from benchmarks.payloads import feeds, no_fetch, sendgrid_batches
from benchmarks.stand import Result, Scale, Side, compare, connected, copied_database
from reconciler.database import migrate
from reconciler.database.postgres import EmbeddedPostgres
from webhooks.database import connect_pool
from webhooks.inbox import Inbox
from webhooks.provider import Delivery, Verified
from webhooks.registry import PROVIDERS
from webhooks.writer import read_layout

BATCHES: Final = 100
EVENTS: Final = 1_000
SENDGRID: Final = PROVIDERS["sendgrid"]

BARE_INSERT: Final = """
INSERT INTO provider_event (wire_key, message_id, event_id, feed, partition_at,
    occurred_at, kind, testimony, recipient, reason, source, raw)
SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::timestamptz[],
    $6::timestamptz[], $7::text[], $8::text[], $9::text[], $10::text[], $11::text[], $12::bytea[])
"""


async def run(embedded: EmbeddedPostgres, scale: Scale) -> list[Result]:
    """Compare with one batch at a time, as the bare INSERT works, and with four in flight, as a receiver works."""
    batches = sendgrid_batches("batch", scale.of(BATCHES), EVENTS)
    limit = _bare(embedded, batches)
    return [
        await compare(
            f"(b) SendGrid batches of {EVENTS:,}, {many} in flight, to a bare INSERT",
            "events/s",
            0.7,
            _ours(embedded, batches, many),
            limit,
            scale.rounds,
        )
        for many in (1, 4)
    ]


@asynccontextmanager
async def empty_database(embedded: EmbeddedPostgres) -> AsyncIterator[str]:
    """Give the DSN of a database with our tables and nothing in them."""
    async with connected(embedded.dsn()) as connection:
        if not await connection.fetchval("SELECT EXISTS (SELECT FROM pg_database WHERE datname = 'empty')"):
            await connection.execute("CREATE DATABASE empty")
            await migrate.migrate(embedded.dsn("empty"))
    async with copied_database(embedded, "round", "empty") as dsn:
        yield dsn


def _ours(embedded: EmbeddedPostgres, batches: list[Delivery], in_flight: int) -> Side:
    async def side() -> float:
        async with empty_database(embedded) as dsn:
            pool = await connect_pool(dsn, size=2, application="benchmarks")
            inbox = Inbox()
            await inbox.open(pool)
            try:
                await _take(inbox, sendgrid_batches("warm", 1, 10)[0])
                left = iter(batches)
                begun = time.perf_counter()
                await asyncio.gather(*(_take_all(inbox, left) for _ in range(in_flight)))
                return len(batches) * EVENTS / (time.perf_counter() - begun)
            finally:
                await inbox.close()
                await pool.close()

    return side


async def _take_all(inbox: Inbox, left: Any) -> None:
    for delivery in left:
        await _take(inbox, delivery)


async def _take(inbox: Inbox, delivery: Delivery) -> None:
    feed = feeds(Path())["sendgrid"]
    if not isinstance(await SENDGRID.verify(delivery, feed, datetime.now(UTC), no_fetch), Verified):
        raise SystemExit("a batch of our own was refused")
    stored = await inbox.store("sendgrid", SENDGRID.parse(delivery).events)
    if stored.repeated:
        raise SystemExit("an event was stored before: the figures would be those of duplicates")


def _bare(embedded: EmbeddedPostgres, batches: list[Delivery]) -> Side:
    async def side() -> float:
        async with empty_database(embedded) as dsn, connected(dsn) as connection:
            warm, *prepared = await _columns(connection, [sendgrid_batches("warm", 1, 10)[0], *batches])
            await connection.execute(BARE_INSERT, *warm)
            begun = time.perf_counter()
            for columns in prepared:
                await connection.execute(BARE_INSERT, *columns)
            return len(batches) * EVENTS / (time.perf_counter() - begun)

    return side


async def _columns(connection: asyncpg.Connection, batches: list[Delivery]) -> list[list[tuple[Any, ...]]]:
    """Return the rows of each batch as the columns of the statement, sorted by their key."""
    maker = await read_layout(connection)
    made = []
    for delivery in batches:
        rows, _ = maker.make("sendgrid", SENDGRID.parse(delivery).events, "http")
        keys = sorted(rows)
        made.append([*zip(*keys, strict=True), *zip(*(rows[key] for key in keys), strict=True)])
    return made
