# SPDX-License-Identifier: Apache-2.0
"""(f) What senders notice of pruning: how long claims take while ten million old rows and their events go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from itertools import count
from typing import Final

import asyncpg

from benchmarks.stand import Figure, Result, Scale, connected, percentile
from reconciler.database import migrate
from reconciler.database.postgres import EmbeddedPostgres
from reconciler.upkeep.retention import prune
from reconciler.upkeep.retention_look import Ages, Pruned

SENDS: Final = 5_000_000
"""Old sends, and as many events of theirs in four old months: ten million rows."""

WORKERS: Final = 4
EVERY_SECONDS: Final = 0.04
"""Each of the workers claims, and confirms, at most so often: together a hundred times a second."""

ALONE_SECONDS: Final = 60.0
"""So long claims go on alone, before the prune and once more after it."""

DAY: Final = timedelta(days=1)
AGES: Final = Ages(rows=30 * DAY, events=60 * DAY, passes=30 * DAY, late_window=7 * DAY)

MAKE_MONTHS: Final = """
DO $$
DECLARE first timestamptz;
BEGIN
    FOR first IN SELECT date_trunc('month', now() AT TIME ZONE 'UTC') AT TIME ZONE 'UTC' - n * interval '1 month'
                 FROM generate_series(4, 7) AS n LOOP
        EXECUTE format('CREATE TABLE provider_event_%s PARTITION OF provider_event FOR VALUES FROM (%L) TO (%L)',
            to_char(first, 'YYYYMM'), first, first + interval '1 month');
    END LOOP;
END $$
"""
# One a second, in the order of their time, as a log grows: what is pruned together lies together.
OLD_SENDS: Final = """
INSERT INTO send_log (wire_key, send_key, state, feed, recipient, recipient_key, attempt, fence, first_claimed_at,
    claimed_at, submit_by, answered_at, provider_message_id, verdict_source, verdict_reason, sent_at, created_at)
SELECT wire_key(key), key, 'sent', 'mg', address, address, 1, nextval('send_fence'), at, at, at + interval '60 s', at,
    'm-' || n, 'sender', 'answered', at, at
FROM generate_series($1::bigint, $2::bigint) AS n
CROSS JOIN LATERAL (SELECT 'order.receipt:' || n AS key, 'user' || n || '@example.com' AS address,
    now() - interval '185 days' + n * interval '1 s' AS at) AS made
"""
OLD_EVENTS: Final = """
INSERT INTO provider_event (feed, message_id, event_id, partition_at, occurred_at, received_at, wire_key, kind,
    testimony, recipient, source, raw)
SELECT 'mg', 'm-' || n, 'e-' || n, at, at, at, wire_key('order.receipt:' || n), 'delivered', 'accepted',
    'user' || n || '@example.com', 'http', convert_to(repeat(md5(n::text), 12), 'UTF8')
FROM generate_series($1::bigint, $2::bigint) AS n
CROSS JOIN LATERAL (SELECT now() - interval '185 days' + n * interval '1 s' AS at) AS made
"""
CLAIM: Final = "CALL send_claim_commit($1, 'mg', '{}')"
CONFIRM: Final = "SELECT outcome FROM send_confirm($1, $2, $3, '{}')"

_numbers: Final = count()


async def run(embedded: EmbeddedPostgres, scale: Scale) -> list[Result]:
    """Claim at a steady rate, alone and while everything old is pruned."""
    async with connected(embedded.dsn()) as connection:
        await connection.execute("CREATE DATABASE pruning")
    dsn = embedded.dsn("pruning")
    await migrate.migrate(dsn)
    sends = scale.of(SENDS)
    await _fill(dsn, sends)
    async with asyncpg.create_pool(dsn, min_size=WORKERS, max_size=WORKERS) as pool:
        async with _claims(pool, []):
            await asyncio.sleep(3)  # warm
        return _figures(*await _pruned(dsn, pool))


async def _fill(dsn: str, sends: int) -> None:
    step = 100_000
    async with connected(dsn) as connection:
        await connection.execute(MAKE_MONTHS)
        for first in range(1, sends + 1, step):
            span = (first, min(first + step - 1, sends))
            await connection.execute(OLD_SENDS, *span)
            await connection.execute(OLD_EVENTS, *span)
        await connection.execute("VACUUM ANALYZE")
        await connection.execute("CHECKPOINT")


async def _pruned(dsn: str, pool: asyncpg.Pool) -> tuple[Pruned, float, list[float], list[float]]:
    """Prune all that is old under live claims, and let claims go on alone before and after.

    Returns what was pruned, in how many seconds, and how long claims took without and beside it.
    """
    alone: list[float] = []
    beside: list[float] = []
    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as own:
        async with _claims(pool, alone):
            await asyncio.sleep(ALONE_SECONDS)
        begun = time.monotonic()
        async with _claims(pool, beside):
            done = await prune(own, AGES)
        seconds = time.monotonic() - begun
        async with _claims(pool, alone):
            await asyncio.sleep(ALONE_SECONDS)
    return done, seconds, alone, beside


@asynccontextmanager
async def _claims(pool: asyncpg.Pool, took: list[float]) -> AsyncIterator[None]:
    """Let workers claim and confirm at their pace, and note how many seconds each claim took."""
    stop = asyncio.Event()
    workers = [asyncio.create_task(_work(pool, took, stop)) for _ in range(WORKERS)]
    yield
    stop.set()
    await asyncio.gather(*workers)


async def _work(pool: asyncpg.Pool, took: list[float], stop: asyncio.Event) -> None:
    async with pool.acquire() as connection:
        while not stop.is_set():
            key = f"order.receipt:new:{next(_numbers)}"
            began = time.monotonic()
            (claim,) = await connection.fetch(CLAIM, key)
            took.append(time.monotonic() - began)
            await connection.fetch(CONFIRM, key, claim["fence"], key)
            await asyncio.sleep(max(0.0, EVERY_SECONDS - (time.monotonic() - began)))


def _figures(done: Pruned, seconds: float, quiet: list[float], during: list[float]) -> list[Result]:
    alone, beside = percentile(quiet, 0.99), percentile(during, 0.99)
    dropped = sum(month.outcome == "dropped" for month in done.months)
    note = (
        f"({alone * 1000:.1f} ms alone, {beside * 1000:.1f} ms beside; the longest {max(quiet) * 1000:.0f} and "
        f"{max(during) * 1000:.0f} ms; {len(during):,} claims)"
    )
    return [
        Figure("(f) p99 of a claim beside a prune, to that without", beside / alone, "times", 2.0, note),
        Figure("(f) sends pruned a second, beside live claims", done.rows["send_log"] / seconds, "sends/s",
               note=f"({done.rows['send_log']:,} sends, {dropped} months of events)"),
    ]  # fmt: skip
