# SPDX-License-Identifier: Apache-2.0
"""Two replicas of each half on one database, as roles of their own: docs/walkthrough.md, without its balancer."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import asyncpg
import pytest
from chaos.processes import PATIENCE
from program import Program
from rolling_kit import Balancer, Load
from serving import FEEDS, LIMIT, Server, free_port, start, until, write_config
from test_roles import API, TOKEN, Dsns, complaints, made, role_of

from reconciler.database.grants import grant

OLD, NEW = FEEDS["mg"].secrets[0], "key-the-rotated-one-0123"
HALVES = ("receiver", "receiver", "reconciler", "reconciler")


class Replica:
    """One process and those that follow it at its address."""

    def __init__(self, config: Path, session: aiohttp.ClientSession, half: str, dsn: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._config, self._session, self._half, self._dsn = config, session, half, dsn
        self.servers: list[Server] = []

    @property
    def lines(self) -> list[dict[str, object]]:
        return [line for server in self.servers for line in server.lines]

    async def start(self) -> None:
        place = {"RECONCILER_DATABASE__URL": self._dsn, "RECONCILER_RECEIVER__PORT": str(self.port)}
        self.servers.append(server := await start(self._config, self._session, "--only", self._half, **place))
        server.url = self.url

        async def ready() -> bool:
            assert server.process.returncode is None, (server.lines, server.errors)
            return await server.status("/readyz") == 200

        await until(ready, f"{self._half} to be ready", PATIENCE)

    async def reload(self) -> None:
        server = self.servers[-1]
        before = len(server.events("settings_reloaded"))
        server.process.send_signal(signal.SIGHUP)

        async def told() -> bool:
            return len(server.events("settings_reloaded")) > before

        await until(told, "the settings to be read again")

    async def stop(self) -> None:
        assert await self.servers[-1].stop() == 0


@asynccontextmanager
async def replicas(config: Path, dsns: Dsns) -> AsyncIterator[list[Replica]]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT)) as session:
        all_of_them = [Replica(config, session, half, dsns[half]) for half in HALVES]
        try:
            for replica in all_of_them:
                await replica.start()
            yield all_of_them
        finally:
            for server in (server for replica in all_of_them for server in replica.servers):
                if server.process.returncode is None:
                    await server.kill()


async def rotate(secrets: Sequence[Path], running: Sequence[Replica], load: Load) -> None:
    """List the new secret beside the old one, switch at the provider, and drop the old one once nothing needs it."""
    secrets[1].write_text(NEW)
    for replica in running:
        await replica.reload()
    load.secret = NEW

    async def unneeded() -> bool:
        return load.waiting[OLD] == 0

    await until(unneeded, "all to be taken that was signed with the old one")
    secrets[0].write_text(NEW)
    for replica in running:
        await replica.reload()


async def stored(db: asyncpg.Pool) -> Counter[str]:
    """Return how often each event of the provider's is there."""
    query = "SELECT split_part(event_id, ':', 1) FROM provider_event WHERE source = 'http'"
    return Counter(row[0] for row in await db.fetch(query))


@pytest.mark.proof
@pytest.mark.usefixtures("interruptible")
async def test_two_replicas_a_rotated_secret_and_a_rolling_restart_under_load_lose_no_event(
    dsn: str, db: asyncpg.Pool, tmp_path: Path, program: Program
) -> None:
    secrets = [tmp_path / "signing-key", tmp_path / "signing-key-next"]
    for secret in secrets:
        secret.write_text(OLD)
    config = write_config(tmp_path, API)
    config.write_text(config.read_text().replace(f'["{OLD}"]', f'["file:{secrets[0]}", "file:{secrets[1]}"]'))
    program.env["RECONCILER_CONFIG"] = str(config)

    async def nothing_needs_a_person() -> None:
        told = await program("status", "--check")
        assert told.exit_code == 0, told.output

    async with made(dsn, "receiver", "reconciler") as dsns:
        await grant(dsn, {role_of(of): [kind] for kind, of in dsns.items()})
        async with replicas(config, dsns) as running, aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
            hooks, api = (Balancer(session, *(replica.url for replica in half)) for half in (running[:2], running[2:]))
            load = Load(tasks, hooks, api, OLD, TOKEN)
            await load.goes_on()
            await nothing_needs_a_person()
            await rotate(secrets, running, load)
            await load.goes_on()
            for replica in running:
                await replica.stop()
                await load.goes_on()  # the other one of its half does all the work
                await nothing_needs_a_person()
                await replica.start()
                await load.goes_on()
            await load.end()

            async def decided() -> bool:
                return await db.fetchval("SELECT count(*) FROM send_log WHERE state <> 'sent'") == 0

            await until(decided, "passes to find that all was sent")
            await nothing_needs_a_person()
            for replica in running:
                await replica.stop()
    assert await stored(db) == Counter(load.acknowledged)
    assert set(load.turned_away) <= {b""}, "no delivery is turned away; a connection may break"
    assert set(load.api_answers) <= {200, 201, 0}
    counted = await db.fetchval("SELECT sum(n) FROM feed_delivery WHERE outcome = 'stored'")
    assert load.answers[200] <= counted <= load.answers[200] + load.answers[0]
    assert await db.fetchval("SELECT count(*) FROM duplicate") == 0
    assert await db.fetchval("SELECT max(attempt) FROM send_log") == 1
    assert [line for replica in running for line in complaints(replica.lines)] == []
