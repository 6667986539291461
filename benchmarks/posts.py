# SPDX-License-Identifier: Apache-2.0
"""(a) One signed event a POST, durable before the answer, against an empty handler and against one INSERT a request."""

from __future__ import annotations

import asyncio
import gc
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, cast

import asyncpg
from aiohttp import web

from benchmarks.events import empty_database
from benchmarks.load import CONNECTIONS
from benchmarks.payloads import POSTED, deliveries, feeds, no_fetch
from benchmarks.programs import Load
from benchmarks.stand import Comparison, Result, Scale, Side, compare
from reconciler.database.postgres import EmbeddedPostgres
from reconciler.serving.serve import calm_collector
from webhooks.counters import Counters
from webhooks.database import connect_pool
from webhooks.event import Event
from webhooks.inbox import Inbox, Stored
from webhooks.intake import Intake
from webhooks.receiver import add_receiver, make_runner
from webhooks.registry import PROVIDERS
from webhooks.rows import RowMaker
from webhooks.writer import Writer, read_layout

MAIN: Final = "mailgun"
POSTS: Final = 20_000
POSTS_OF_OTHERS: Final = 5_000
WRITERS: Final = 16
"""Connections of the receiver that inserts each request by itself."""


class OneInsertEach:
    """An inbox without group commit: every delivery is a statement and a transaction of its own."""

    def __init__(self) -> None:
        self._rows = RowMaker()
        self._free: asyncio.Queue[Writer] = asyncio.Queue()

    async def open(self, pool: asyncpg.Pool) -> None:
        """Read the partitions and make the writers."""
        async with pool.acquire() as connection:
            self._rows = await read_layout(connection)
        for _ in range(WRITERS):
            self._free.put_nowait(Writer(pool, 10.0))

    async def store(self, feed: str, events: Sequence[Event], source: str = "http") -> Stored:
        """Store one delivery, as soon as a connection is free."""
        rows, _ = self._rows.make(feed, events, source)
        writer = await self._free.get()
        try:
            fresh = len(await writer.store(rows))
        finally:
            self._free.put_nowait(writer)
        return Stored(fresh, len(events) - fresh)

    async def close(self) -> None:
        """Give the connections back."""
        while not self._free.empty():
            await self._free.get_nowait().close()


async def run(embedded: EmbeddedPostgres, scale: Scale) -> list[Result]:
    """Compare the receiver with both limits for Mailgun, and with the empty handler for the other providers."""
    calm_collector()  # for both sides alike, as the daemon does
    posts, rounds = scale.of(POSTS_OF_OTHERS), min(3, scale.rounds)
    with tempfile.TemporaryDirectory() as folder:
        bench = _Posts(embedded, Path(folder))
        results: list[Result] = [
            await bench.against_empty(MAIN, scale.of(POSTS), scale.rounds, 0.8),
            await bench.against_single_inserts(posts, rounds),
        ]
        others = [provider for provider in POSTED if provider != MAIN]
        return results + [await bench.against_empty(provider, posts, rounds, None) for provider in others]


class _Posts:
    """Serves and posts, round by round; each round's events are new."""

    def __init__(self, embedded: EmbeddedPostgres, certificates: Path) -> None:
        self._embedded, self._certificates = embedded, certificates
        self._round = 0
        self._busiest = 0.0
        self._slow: dict[str, list[float]] = {}
        """The p99 of each round, of ours and of the limit."""

    async def against_empty(self, provider: str, posts: int, rounds: int, wanted: float | None) -> Comparison:
        self._busiest, self._slow = 0.0, {"ours": [], "limit": []}
        check = await self._signature_check(provider)
        done = await compare(
            f"(a) {provider}, one event a POST, to an empty handler",
            "posts/s",
            wanted,
            self._receiver(provider, posts, Inbox),
            self._empty(provider, posts),
            rounds,
        )
        ours, limit = (statistics.median(self._slow[side]) * 1000 for side in ("ours", "limit"))
        done.notes.append(f"p99 {ours:.1f} ms against {limit:.1f} ms")
        done.notes.append(f"bare signature check {check * 1e6:.0f} us")
        done.notes.append(f"load generator busy {self._busiest:.0%} of a core at most")
        return done

    async def against_single_inserts(self, posts: int, rounds: int) -> Comparison:
        ours, single = self._receiver(MAIN, posts, Inbox), self._receiver(MAIN, posts, OneInsertEach)
        return await compare(f"(a) {MAIN}, to one INSERT a request", "posts/s", None, ours, single, rounds)

    def _receiver(self, provider: str, posts: int, kind: type[Inbox | OneInsertEach]) -> Side:
        async def side() -> float:
            async with empty_database(self._embedded) as dsn:
                pool = await connect_pool(dsn, size=WRITERS + 2, application="benchmarks")
                inbox = kind()
                await inbox.open(pool)
                app, known = web.Application(), feeds(self._certificates)
                intake = Intake(cast("Inbox", inbox), no_fetch, lambda: datetime.now(UTC), Counters())
                add_receiver(app, known, intake, no_fetch)
                try:
                    async with _served(make_runner(app)) as port:
                        return await self._rate("ours", port, provider, posts)
                finally:
                    await inbox.close()
                    await pool.close()

        return side

    def _empty(self, provider: str, posts: int) -> Side:
        async def side() -> float:
            app = web.Application()
            app.router.add_post("/webhooks/{feed}", _answer_at_once)
            async with _served(web.AppRunner(app, access_log=None)) as port:
                return await self._rate("limit", port, provider, posts)

        return side

    async def _rate(self, side: str, port: int, provider: str, posts: int) -> float:
        self._round += 1
        path, mark, folder = f"/webhooks/{provider}", f"r{self._round}", str(self._certificates)
        load = await Load.prepared("benchmarks.load", provider, path, mark, folder, port, posts)
        gc.collect()
        result = await load.run()
        if result["answers"] != {"200": posts}:
            raise SystemExit(f"not every post was answered 200: {result['answers']}")
        self._busiest = max(self._busiest, result["busy"])
        self._slow.setdefault(side, []).append(result["p99"])
        return float(posts / result["seconds"])

    async def _signature_check(self, provider: str) -> float:
        """Return the seconds that one `verify` takes, without anything around it."""
        many = list(deliveries(provider, "check", 300, self._certificates))
        feed, now = feeds(self._certificates)[provider], datetime.now(UTC)
        verify = PROVIDERS[provider].verify
        await verify(many[0], feed, now, no_fetch)  # reads the key or certificate
        begun = time.perf_counter()
        for delivery in many:
            await verify(delivery, feed, now, no_fetch)
        return (time.perf_counter() - begun) / len(many)


async def _answer_at_once(_request: web.Request) -> web.Response:
    return web.Response()


@asynccontextmanager
async def _served(runner: web.AppRunner) -> AsyncIterator[int]:
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=CONNECTIONS).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
