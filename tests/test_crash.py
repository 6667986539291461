# SPDX-License-Identifier: Apache-2.0
"""Receiver and PostgreSQL are killed again and again while providers deliver: nothing acknowledged is lost or doubled.

Providers here do what real ones do: whatever was not answered 200 is delivered again, byte for byte, and now and then
something that was. Every kill waits until requests are open.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import asyncpg
import pytest
from places import PREFIX, parent_folder
from serving import LIMIT, Server, free_port, sample, start, until, write_config

from reconciler.database.postgres import EmbeddedPostgres
from webhooks.provider import Delivery

pytestmark = pytest.mark.proof

RECEIVER_KILLS = 14
POSTGRES_KILLS = 8
CONNECTIONS = 12
GROUPS = 30
AGAIN = 0.3
"""Share of acknowledged deliveries that are delivered once more."""

SUBMIT_WITHIN = 35
"""Seconds: longer than the storm, so that no claim is judged in it and left by a killed pass to its lease."""

SETTINGS = """
[rules]
grace = "500ms"
give_up_after = "3s"
on_unknown = "release"
release_budget = 100
release_share = 1
canary_share = 1
[reconcile]
every = "1s"
"""
WORDS = {  # the provider's names of: accepted, delivered, rejected
    "mg": ("accepted", "delivered", "rejected"),
    "sg": ("processed", "delivered", "dropped"),
}
NORMAL = {
    "accepted": "queued",
    "processed": "queued",
    "delivered": "delivered",
    "rejected": "rejected",
    "dropped": "rejected",
}


@pytest.fixture
def config() -> Iterator[Path]:
    """A configuration whose embedded database is durable against kills, and in memory, as the other tests' are."""
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}crash-", dir=parent_folder()))
    yield write_config(folder, SETTINGS)
    EmbeddedPostgres(folder / "pg").stop()
    shutil.rmtree(folder, ignore_errors=True)


class Provider:
    """Delivers over several connections until everything is acknowledged and, while it storms, some of it again."""

    def __init__(self, url: str, deliveries: list[tuple[str, Delivery]], session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session
        self.deliveries = deliveries
        self.waiting = deque(range(len(deliveries)))
        self.acknowledged: set[int] = set()
        self.open: set[int] = set()
        self.answers = Counter[int]()
        self.storms = True
        self.random = random.Random(7)

    async def deliver_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(CONNECTIONS):
                group.create_task(self._deliver())

    async def _deliver(self) -> None:
        while self.storms or len(self.acknowledged) < len(self.deliveries):
            if not self.waiting:
                if not self.storms:
                    await asyncio.sleep(0.01)
                    continue
                self.waiting.append(self.random.randrange(len(self.deliveries)))
            number = self.waiting.popleft()
            self.open.add(number)
            status = await self._post(*self.deliveries[number])
            self.open.discard(number)
            self.answers[status] += 1
            if status == 200:
                self.acknowledged.add(number)
            if status != 200 or self.random.random() < AGAIN:
                self.waiting.append(number)
            if status != 200:
                await asyncio.sleep(0.02)

    async def deliver_some_again(self) -> None:
        """Deliver one of each feed once more, to the process that lives on: counts of a killed one are lost."""
        for feed in WORDS:
            delivery = next(delivery for name, delivery in self.deliveries if name == feed)

            async def taken(feed: str = feed, delivery: Delivery = delivery) -> bool:
                return await self._post(feed, delivery) == 200

            await until(taken, f"a delivery of {feed}")

    async def _post(self, feed: str, delivery: Delivery) -> int:
        try:
            async with self.session.post(
                f"{self.url}/webhooks/{feed}", data=delivery.body, headers=dict(delivery.headers)
            ) as answer:
                return answer.status
        except (aiohttp.ClientError, OSError):
            return 0


class Sends:
    """The sends of the test: what the providers say of each, and the state each must end in."""

    def __init__(self) -> None:
        self.claims: list[tuple[str, str, bool]] = []
        """Feed, key, and whether the provider's answer was got."""
        self.events: list[tuple[str, str, str]] = []
        """Feed, the provider's word, key."""
        self.states: dict[str, tuple[str, str]] = {}
        for feed in WORDS:
            for group in range(GROUPS):
                self._add_group(feed, group)
            self._add_controls(feed, GROUPS)

    def _add_group(self, feed: str, group: int) -> None:
        accepted, delivered, rejected = WORDS[feed]
        self._add_controls(feed, group)
        self._add(feed, f"{feed}-accepted-{group}", "sent", "accepted", accepted, delivered)
        self._add(feed, f"{feed}-rejected-{group}", "failed", "rejected", rejected)
        self._add(feed, f"{feed}-absent-{group}", "pending", "gave_up")  # the storm is no history to judge silence by

    def _add_controls(self, feed: str, group: int) -> None:
        for n in range(4):
            self._add(feed, f"{feed}-control-{group}-{n}", "sent", "answered", *WORDS[feed][:2])

    def _add(self, feed: str, key: str, state: str, reason: str, *words: str) -> None:
        self.claims.append((feed, key, reason == "answered"))
        self.events += [(feed, word, key) for word in words]
        self.states[key] = (state, reason)

    def deliveries(self) -> list[tuple[str, Delivery]]:
        """Return all events, signed: Mailgun's one a delivery, SendGrid's in batches of five."""
        single = [(feed, sample(feed, word, key)) for feed, word, key in self.events if feed == "mg"]
        parts = [sample(feed, word, key) for feed, word, key in self.events if feed == "sg"]
        batches = [
            ("sg", Delivery(json.dumps([json.loads(p.body)[0] for p in parts[n : n + 5]]).encode(), parts[n].headers))
            for n in range(0, len(parts), 5)
        ]
        everything = single + batches
        random.Random(11).shuffle(everything)
        return everything

    async def claim(self, connection: asyncpg.Connection) -> None:
        for feed, key, answered in self.claims:
            options = json.dumps({"submit_within": f"{SUBMIT_WITHIN} seconds"})
            row = await connection.fetchrow("CALL send_claim_commit($1, $2, $3)", key, feed, options)
            assert (row["outcome"], row["wire_key"]) == ("claimed", key)
            if answered:
                await connection.execute("SELECT send_confirm($1, $2, $3, '{}')", key, row["fence"], f"<{key}@example>")


class Storm:
    """Kills and starts again. `broken` counts the requests that a kill of the receiver cut off."""

    def __init__(self, config: Path, port: int, postgres: EmbeddedPostgres, session: aiohttp.ClientSession) -> None:
        self.config, self.port, self.postgres, self.session = config, port, postgres, session
        self.server: Server
        self.kills = Counter[str]()
        self.hits = Counter[str]()
        self.broken = 0

    async def start(self) -> Server:
        self.server = await start(self.config, self.session, RECONCILER_RECEIVER__PORT=str(self.port))
        return await self.server.serving()

    async def rage(self, provider: Provider) -> None:
        whats = ["receiver"] * RECEIVER_KILLS + ["postgres"] * POSTGRES_KILLS
        provider.random.shuffle(whats)
        for what in whats:
            await self._works(provider)
            hit = set(provider.open)
            before = provider.answers[0]
            await (self._kill_receiver() if what == "receiver" else self._kill_postgres())
            self.kills[what] += 1
            self.hits[what] += bool(hit)
            if what == "receiver":
                self.broken += min(len(hit), provider.answers[0] - before)

    async def _works(self, provider: Provider) -> None:
        """Wait until deliveries are acknowledged again and some are open."""
        acknowledged = provider.answers[200]

        async def there() -> bool:
            assert self.server.process.returncode is None, self.server.errors
            return provider.answers[200] > acknowledged + CONNECTIONS and bool(provider.open)

        await until(there, "an acknowledged delivery")

    async def _kill_receiver(self) -> None:
        await self.server.kill()
        await self.start()

    async def _kill_postgres(self) -> None:
        first = int((self.postgres.data / "postmaster.pid").read_text().split()[0])
        os.kill(first, signal.SIGKILL)
        await asyncio.to_thread(self.postgres.start)


@contextlib.asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=CONNECTIONS)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=LIMIT)) as session:
        yield session


async def test_what_was_acknowledged_outlives_every_kill_exactly_once_and_every_claim_gets_its_verdict(
    config: Path,
) -> None:
    port = free_port()
    postgres = EmbeddedPostgres(config.parent / "pg")
    sends = Sends()
    async with client() as session:
        storm = Storm(config, port, postgres, session)
        server = await storm.start()
        await server.becomes(200)
        postgres.start()  # joins, so that it can start again what it kills
        try:
            connection = await asyncpg.connect(postgres.dsn())
            claimed_at = time.monotonic()
            await sends.claim(connection)
            await connection.close()
            provider = Provider(server.url, sends.deliveries(), session)
            async with asyncio.TaskGroup() as group:
                group.create_task(provider.deliver_all())
                await storm.rage(provider)
                provider.storms = False
            await provider.deliver_some_again()
            connection = await asyncpg.connect(postgres.dsn())
            events, states = await outcome(connection, claimed_at)
            await connection.close()
            assert await storm.server.stop() == 0
        finally:
            if storm.server.process.returncode is None:
                await storm.server.kill()
            await asyncio.to_thread(postgres.stop)
    assert sum(storm.kills.values()) >= 20
    assert storm.hits == storm.kills  # each met open requests
    assert storm.broken > 0
    assert provider.acknowledged == set(range(len(provider.deliveries)))
    assert sum(provider.answers.values()) > len(provider.deliveries)
    assert events == Counter((feed, NORMAL[word], key) for feed, word, key in sends.events)
    assert states == sends.states


async def outcome(
    connection: asyncpg.Connection, claimed_at: float
) -> tuple[Counter[tuple[str, str, str]], dict[str, tuple[str, str]]]:
    """Return what is stored, how often each, and what became of each send, once all are decided."""

    async def decided() -> bool:
        return not await connection.fetchval("SELECT count(*) FROM send_log WHERE state = 'claimed'")

    # Held meanwhile, a row is looked at again after 15 s; on a busy machine the storm may have lasted long.
    limit = max(claimed_at + SUBMIT_WITHIN + LIMIT - time.monotonic(), 3 * LIMIT)
    with contextlib.suppress(AssertionError):  # the states say more
        await until(decided, "every claim to be decided", limit)
    stored = await connection.fetch(
        "SELECT feed, kind, wire_key, count(*) AS n FROM provider_event WHERE source = 'http' GROUP BY 1, 2, 3"
    )
    rows = await connection.fetch(
        "SELECT wire_key, state, coalesce(verdict_reason, release_basis, held_reason) AS reason FROM send_log"
    )
    events = Counter({(row["feed"], row["kind"], row["wire_key"]): row["n"] for row in stored})
    return events, {row["wire_key"]: (row["state"], row["reason"]) for row in rows}
