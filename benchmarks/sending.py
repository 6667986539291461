# SPDX-License-Identifier: Apache-2.0
"""(e) What `send_once` costs a sender: to two bare statements, and where a thousand callers want one key."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import asyncpg
from aiohttp import web

from benchmarks.programs import Load, daemon
from benchmarks.stand import Comparison, Figure, Result, Scale, compare, connected
from reconciler import guard
from reconciler.database import migrate
from reconciler.database.postgres import EmbeddedPostgres
from reconciler.tokens import hash_of, new_token

SENDS: Final = 4_000
SENDERS: Final = 8
CALLERS: Final = 167
"""Of each process."""
PROCESSES: Final = ("python", "sql", "http") * 2
SETTINGS: Final = """
[feeds.mg]
provider = "mailgun"
secrets = ["key-0123456789abcdef"]
[api.tokens.callers]
hash = ["{hash}"]
"""
OPTIONS: Final = {"message_class": "receipts", "recipient": "ada@example.com", "fingerprint": "5f2c8e"}

# What a sender would write that keeps a table of its sends and nothing else: no lock, no evidence, no fence.
BARE_TABLE: Final = """
CREATE TABLE bare (key text PRIMARY KEY, state text NOT NULL, feed text, message_class text, recipient text,
    fingerprint text, message_id text, claimed_at timestamptz, sent_at timestamptz)
"""
BARE_CLAIM: Final = """
INSERT INTO bare (key, state, feed, message_class, recipient, fingerprint, claimed_at)
VALUES ($1, 'claimed', $2, $3, $4, $5, clock_timestamp()) ON CONFLICT DO NOTHING
"""
BARE_CONFIRM: Final = "UPDATE bare SET state = 'sent', message_id = $2, sent_at = clock_timestamp() WHERE key = $1"

GREATEST: Final = "greatest of all rounds"
_keys: Final = count()

Connection = asyncpg.Connection | asyncpg.pool.PoolConnectionProxy
Send = Callable[[Connection, str], Awaitable[object]]


async def run(embedded: EmbeddedPostgres, scale: Scale) -> list[Result]:
    """Compare a sender that guards its sends with one that writes two rows' worth, and crowd one key."""
    async with connected(embedded.dsn()) as connection:
        await connection.execute("CREATE DATABASE sending")
    dsn = embedded.dsn("sending")
    await migrate.migrate(dsn)
    async with connected(dsn) as connection:
        await connection.execute(BARE_TABLE)
    async with asyncpg.create_pool(dsn, min_size=SENDERS, max_size=SENDERS) as pool:
        compared = await _to_two_statements(pool, scale)
    return [compared, *await _crowd(dsn, scale)]


async def _to_two_statements(pool: asyncpg.Pool, scale: Scale) -> Comparison:
    sends = scale.of(SENDS)
    name = f"(e) send_once to two bare statements, {SENDERS} senders"
    return await compare(
        name, "sends/s", None, lambda: _rate(pool, sends, _guarded), lambda: _rate(pool, sends, _bare), scale.rounds
    )


async def _rate(pool: asyncpg.Pool, sends: int, send: Send) -> float:
    async def sender() -> None:
        async with pool.acquire() as connection:
            for _ in range(sends // SENDERS + 1):
                await send(connection, f"order.receipt:{next(_keys)}:ada@example.com")

    begun = time.perf_counter()
    await asyncio.gather(*(sender() for _ in range(SENDERS)))
    return (sends // SENDERS + 1) * SENDERS / (time.perf_counter() - begun)


async def _guarded(connection: Connection, key: str) -> None:
    await guard.send_once(connection, key, "mailgun-main", _taken, **OPTIONS)


async def _bare(connection: Connection, key: str) -> None:
    await connection.execute(BARE_CLAIM, key, "mailgun-main", *OPTIONS.values())
    await connection.execute(BARE_CONFIRM, key, await _taken(None))


async def _taken(_claim: guard.Claim | None) -> str:
    return "<message@mg.example.com>"


async def _crowd(dsn: str, scale: Scale) -> list[Figure]:
    """Let callers of all ways and several processes want one key at once, round after round."""
    token = new_token()
    with TemporaryDirectory() as folder:
        settings = SETTINGS.format(hash=hash_of(token))
        async with _provider() as esp, daemon(Path(folder), dsn, settings, "--only", "reconciler") as served:
            places = {"python": dsn, "sql": dsn, "http": f"{served.url} {token}"}
            rounds = [await _round(places, esp, f"one:{n}") for n in range(scale.rounds + 1)][1:]  # the first warms up
    winners = [(served, waited) for told in rounds for _, waited, served, outcome in told if outcome == "sent"]
    slowest = [max(seconds for seconds, *_ in told) for told in rounds]
    if len(winners) != len(rounds):
        raise SystemExit(f"{len(rounds)} keys were submitted {len(winners)} times")
    name = f"(e) {CALLERS * len(PROCESSES):,} callers of one key over Python, SQL and HTTP"
    return [
        _median(f"{name}: the winner's overhead", [1000 * served for served, _ in winners], 30),
        _median(f"{name}: with his wait for connections", [1000 * waited for _, waited in winners]),
        Figure(f"{name}: the last answer", 1000 * max(slowest), "ms", 2000, GREATEST),
    ]


def _median(name: str, found: list[float], wanted: float | None = None) -> Figure:
    least, middle, most = min(found), statistics.median(found), max(found)
    return Figure(name, middle, "ms", wanted, f"{least:.0f}-{middle:.0f}-{most:.0f} in {len(found)} rounds")


async def _round(places: Mapping[str, str], esp: str, key: str) -> list[list[Any]]:
    """Return what each caller waited for, what of it the provider did not take, and his outcome."""
    loads = await asyncio.gather(
        *(Load.prepared("benchmarks.callers", way, places[way], esp, key, CALLERS) for way in PROCESSES)
    )
    told = await asyncio.gather(*(load.run() for load in loads))
    return [one for callers in told for one in callers]


@asynccontextmanager
async def _provider() -> AsyncIterator[str]:
    """Run a provider that takes everything, with the answer of Mailgun's send API."""

    async def take(_: web.Request) -> web.Response:
        return web.json_response({"id": "<message@mg.example.com>"})

    app = web.Application()
    app.router.add_post("/messages", take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/messages"
    finally:
        await runner.cleanup()
