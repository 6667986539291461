# SPDX-License-Identifier: Apache-2.0
"""(g) How quickly a campaign is loaded, to a bare COPY of the same rows, and how quickly workers get it in batches."""

from __future__ import annotations

import asyncio
import io
import time
from typing import Final

import asyncpg

from benchmarks.stand import Figure, Result, Scale, compare, connected, copied_database
from reconciler import campaign
from reconciler.campaigns import load as campaign_load
from reconciler.database import migrate
from reconciler.database.postgres import EmbeddedPostgres
from webhooks.database import connect_pool
from webhooks.registry import PROVIDERS

RECIPIENTS: Final = 200_000
WORKERS: Final = 4
BATCH: Final = 500
PLAN: Final = campaign_load.Plan("spring", "mailgun-main", "people.csv")
TEMPLATE: Final = "campaigns"
COLUMNS: Final = (
    *("wire_key", "send_key", "feed", "message_class", "recipient", "recipient_key", "campaign", "payload"),
)
# In the order of the file, which is none as far as keys go.
ROWS: Final = """
SELECT wire_key, send_key, feed, message_class, recipient, recipient_key, campaign, payload FROM send_log
ORDER BY (payload ->> 'number')::int
"""


async def run(embedded: EmbeddedPostgres, scale: Scale) -> list[Result]:
    """Compare loading with COPY, and claim what was loaded."""
    async with connected(embedded.dsn()) as connection:
        await connection.execute(f"CREATE DATABASE {TEMPLATE}")
    await migrate.migrate(embedded.dsn(TEMPLATE))
    recipients = scale.of(RECIPIENTS)
    file = _file(recipients)
    async with copied_database(embedded, "filled", TEMPLATE) as dsn:
        await _load(dsn, file)
        rows = await _rows(dsn)
        claims = await _claims(dsn)

    async def ours() -> float:
        async with copied_database(embedded, "loaded", TEMPLATE) as dsn:
            return recipients / await _load(dsn, file)

    async def bare() -> float:
        async with copied_database(embedded, "copied", TEMPLATE) as dsn:
            return recipients / await _copy(dsn, rows)

    name = f"(g) {recipients:,} recipients loaded, to a bare COPY of the same rows"
    return [
        await compare(name, "rows/s", 0.7, ours, bare, scale.rounds),
        Figure(f"(g) a campaign given out to {WORKERS} workers, {BATCH} at a time", claims, "claims/s"),
    ]


def _file(recipients: int) -> bytes:
    lines = (f"person{n}@example{n % 97}.com,Person,{n}\n" for n in range(recipients))
    return ("recipient,name,number\n" + "".join(lines)).encode()


async def _load(dsn: str, file: bytes) -> float:
    pool = await connect_pool(dsn, size=2, min_size=2, application="benchmark")
    try:
        begun = time.perf_counter()
        await campaign_load.load(pool, PLAN, io.BytesIO(file), PROVIDERS["mailgun"], lambda _lines: None)
        return time.perf_counter() - begun
    finally:
        await pool.close()


async def _rows(dsn: str) -> bytes:
    copied = io.BytesIO()
    async with connected(dsn) as connection:
        await connection.copy_from_query(ROWS, output=copied)
    return copied.getvalue()


async def _copy(dsn: str, rows: bytes) -> float:
    async with connected(dsn) as connection:
        begun = time.perf_counter()
        await connection.copy_to_table("send_log", source=io.BytesIO(rows), columns=COLUMNS)
        return time.perf_counter() - begun


async def _claims(dsn: str) -> float:
    async with asyncpg.create_pool(dsn, min_size=WORKERS, max_size=WORKERS) as pool:
        begun = time.perf_counter()
        counts = await asyncio.gather(*(_worker(pool) for _ in range(WORKERS)))
        return sum(counts) / (time.perf_counter() - begun)


async def _worker(pool: asyncpg.Pool) -> int:
    return sum([len(batch) async for batch in campaign.batches(pool, PLAN.name, size=BATCH)])
