# SPDX-License-Identifier: Apache-2.0
"""(e) What `send_once` costs a sender: to two bare statements, and where a thousand callers want one key."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Final

import asyncpg

from benchmarks.stand import Comparison, Figure, Result, Scale, compare, connected
from reconciler import guard, migrate
from reconciler.postgres import EmbeddedPostgres

SENDS: Final = 4_000
SENDERS: Final = 8
CALLERS: Final = 1_000
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
        return [await _to_two_statements(pool, scale), *await _crowd(pool, scale)]


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


async def _crowd(pool: asyncpg.Pool, scale: Scale) -> list[Figure]:
    """Let all callers want the same key at once; what the winner waits for beside its submission is its overhead."""
    winners, slowest = [], []
    for _ in range(scale.rounds + 1):
        key, begun = f"one:{next(_keys)}", time.perf_counter()
        waits = await asyncio.gather(*(_caller(pool, key, begun) for _ in range(CALLERS)))
        (winner,) = [seconds for seconds, won in waits if won]
        winners.append(winner)
        slowest.append(max(seconds for seconds, _ in waits))
    name = f"(e) {CALLERS:,} callers of one key over {SENDERS} connections"
    return [
        Figure(f"{name}: the winner's overhead", 1000 * max(winners), "ms", 30, "greatest of all rounds"),
        Figure(f"{name}: the last answer", 1000 * max(slowest), "ms", 2000, "greatest of all rounds"),
    ]


async def _caller(pool: asyncpg.Pool, key: str, begun: float) -> tuple[float, bool]:
    sent = await guard.send_once(pool, key, "mailgun-main", _taken)
    return time.perf_counter() - begun, sent.outcome == "sent"
