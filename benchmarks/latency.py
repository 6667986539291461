# SPDX-License-Identifier: Apache-2.0
"""(h) How long a row waits to be `sent` after its event was stored, while 2,000 events a second come over HTTP.

A receiver and a reconciler run as two processes. Every event is that of a claim which its sender left unanswered: each
moves a row. Seen twice: by the database's own times, and by somebody who asks for the rows of a sample.
"""

from __future__ import annotations

import asyncio
import io
import math
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import asyncpg

from benchmarks.events import empty_database
from benchmarks.programs import Load, daemon, feed_settings
from benchmarks.stand import Figure, Result, Scale, connected, percentile
from reconciler import campaign
from reconciler.campaigns import load as campaign_load
from reconciler.database.postgres import EmbeddedPostgres
from webhooks.database import connect_pool
from webhooks.registry import PROVIDERS

RATE: Final = 2_000
SECONDS: Final = 60
LEAST_SECONDS: Final = 4
FEED: Final = "mailgun"
PLAN: Final = campaign_load.Plan("spring", FEED, "people.csv")

AHEAD: Final = 5.0
"""Seconds between a claim and its event."""

WARM_SHARE: Final = 0.1
"""Of the time, which does not count: connections are made, statements planned."""

BATCH: Final = 200
"""Sends that are claimed together."""

SAMPLE: Final = 50
"""One in so many rows is looked for from outside ..."""

LOOK_EVERY: Final = 0.01
"""... so often, in seconds."""

SETTLE_SECONDS: Final = 60.0
"""How long after the last answer a row may still move."""

# In this order a campaign is given out.
KEYS: Final = "SELECT wire_key FROM send_log ORDER BY wire_key"
SENT: Final = "SELECT wire_key FROM send_log WHERE wire_key = ANY ($1::text[]) AND state = 'sent'"
# An event before its claim would settle it at once.
SENT_OTHERWISE: Final = """
SELECT count(*) FROM send_log WHERE state <> 'sent' OR verdict_source <> 'feed' OR attempt <> 1
"""
WAITED: Final = """
SELECT extract(epoch FROM s.sent_at - e.received_at)::float8 AS waited, extract(epoch FROM e.received_at)::float8 AS at
FROM send_log s JOIN provider_event e USING (wire_key)
WHERE e.received_at >= (SELECT min(received_at) FROM provider_event) + $1::float8 * interval '1 s'
"""
PASSES: Final = """
SELECT extract(epoch FROM ended_at - started_at)::float8 AS took FROM pass WHERE ended_at IS NOT NULL
"""


async def run(embedded: EmbeddedPostgres, scale: Scale) -> list[Result]:
    """Let claims and events come at the rate, and measure how long rows wait."""
    sends = RATE * max(LEAST_SECONDS, scale.of(SECONDS))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        halves = {half: folder / half for half in ("receiver", "reconciler")}
        for place in halves.values():
            place.mkdir()
        settings = feed_settings([FEED], folder)
        async with empty_database(embedded) as dsn, AsyncExitStack() as stack:
            keys = await _prepare(dsn, sends)
            (folder / "keys").write_text("\n".join(keys))
            receiver, _ = [
                await stack.enter_async_context(daemon(place, dsn, settings, "--only", half))
                for half, place in halves.items()
            ]
            load = await Load.prepared(
                *("benchmarks.paced", FEED, "h", folder, receiver.port, sends, RATE, "--keys", folder / "keys")
            )
            return await _figures(dsn, keys, *await _all_at_once(dsn, load, keys))


async def _prepare(dsn: str, sends: int) -> list[str]:
    """Load a campaign, and return the keys of its sends in the order in which they will be claimed."""
    people = "".join(f"person{n}@example{n % 97}.com\n" for n in range(sends))
    pool = await connect_pool(dsn, size=2, application="benchmarks")
    try:
        await campaign_load.load(
            pool, PLAN, io.BytesIO(f"recipient\n{people}".encode()), PROVIDERS[FEED], lambda _lines: None
        )
        return [row["wire_key"] for row in await pool.fetch(KEYS)]
    finally:
        await pool.close()


async def _all_at_once(dsn: str, load: Load, keys: Sequence[str]) -> tuple[dict[str, Any], dict[int, float]]:
    """Claim and post, and look; return what the load generator told, and when the rows of a sample were seen sent."""
    posted = asyncio.Event()
    async with connected(dsn) as sender, connected(dsn) as onlooker, asyncio.TaskGroup() as group:
        group.create_task(_claim(sender))
        looking = group.create_task(_look(onlooker, keys, posted))
        await asyncio.sleep(AHEAD)
        told = await load.run()
        posted.set()
    return told, looking.result()


async def _claim(connection: asyncpg.Connection) -> None:
    """Claim all of the campaign at the rate of its events, and say nothing of what became of it."""
    begun, claimed = time.monotonic(), 0
    async for batch in campaign.batches(connection, PLAN.name, size=BATCH):
        claimed += len(batch)
        await asyncio.sleep(begun + claimed / RATE - time.monotonic())


async def _look(connection: asyncpg.Connection, keys: Sequence[str], posted: asyncio.Event) -> dict[int, float]:
    """Return when each row of the sample was first seen sent, by the machine's monotonic clock."""
    begun, until = time.monotonic() + AHEAD, math.inf
    coming = deque(range(0, len(keys), SAMPLE))
    unseen: dict[str, int] = {}
    seen: dict[int, float] = {}
    while coming or unseen:
        while coming and coming[0] / RATE <= time.monotonic() - begun:
            number = coming.popleft()
            unseen[keys[number]] = number
        found = await connection.fetch(SENT, list(unseen))
        seen |= {unseen.pop(row["wire_key"]): time.monotonic() for row in found}
        if posted.is_set():
            until = min(until, time.monotonic() + SETTLE_SECONDS)
        if time.monotonic() > until:
            raise SystemExit(f"{len(unseen)} rows of the sample were not sent in {SETTLE_SECONDS:.0f} s")
        await asyncio.sleep(LOOK_EVERY)
    return seen


async def _figures(dsn: str, keys: Sequence[str], told: dict[str, Any], seen: dict[int, float]) -> list[Result]:
    if told["answers"] != {"200": len(keys)}:
        raise SystemExit(f"not every post was answered 200: {told['answers']}")
    warm = len(keys) / RATE * WARM_SHARE
    async with connected(dsn) as connection:
        if moved := await connection.fetchval(SENT_OTHERWISE):
            raise SystemExit(f"{moved} rows are not sent by a pass: too much else goes on here")
        rows = await connection.fetch(WAITED, warm)
        passes = [row["took"] for row in await connection.fetch(PASSES)]
    took = told["took"][round(warm * RATE) :]
    outside = [
        when - (told["begun"] + number / RATE + told["took"][number])
        for number, when in seen.items()
        if number / RATE >= warm
    ]
    times = [row["at"] for row in rows]
    rate = f"{len(rows) / (max(times) - min(times)):,.0f} events were stored a second"
    return [
        *_two(
            f"(h) an event stored, to its row sent, at {RATE:,} a second",
            [row["waited"] for row in rows],
            1.0,
            5.0,
            rate,
        ),
        *_two(
            "(h) the same from outside: post answered, to row seen",
            outside,
            None,
            None,
            f"{len(passes)} passes took {percentile(passes, 0.5):.2f} s (p50); posts were answered in "
            f"{1000 * percentile(took, 0.5):.0f} and {1000 * percentile(took, 0.99):.0f} ms (p50, p99)",
        ),
    ]


def _two(name: str, seconds: list[float], middle: float | None, most: float | None, note: str) -> list[Figure]:
    return [
        Figure(f"{name}: p50", percentile(seconds, 0.5), "s", middle, note),
        Figure(f"{name}: p99", percentile(seconds, 0.99), "s", most),
    ]
