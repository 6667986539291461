# SPDX-License-Identifier: Apache-2.0
"""Puts the world together, and takes it apart."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import aiohttp
from fault_proxy import FaultProxy, proxied
from places import parent_folder
from serving import LIMIT, ROOT, environment

from reconciler.breakable import Fates, Telling, Webhook, esp
from reconciler.database.postgres import EmbeddedPostgres

from .commit_points import Points, Trap
from .machine import Clock, Disk, Pooler
from .processes import Sender, Service
from .upgrade import older_program
from .world import FEEDS, Pace, Party, World

PREFIX = "esp-reconciler-chaos-"
"""Of a run's folder. Not that of the tests' clusters: their sessions remove what looks as if nobody used it."""
FATES = Fates(hangs=0.02, reset=0.02, late_error=0.02, lost=0.015, refused=0.01, busy=0.02, down=0.015)
TWICE = 0.1
"""Share of webhooks that are told again after they were acknowledged; the others would be missed for ever."""
SENDERS = 2
MEGABYTES = 1024
NOT_HERE = ("api_key", "api_url", "api_scope")
"""Settings of a feed for look-ups, which say nothing about faults of ours."""

CONFIG = """
[receiver]
port = 0
[database]
data_dir = "{folder}"
[reconcile]
every = "1s"
[rules]
grace = "{grace}s"
max_risk = 0.02
max_attempts = 50
retry_backoff = "2s"
release_budget = 100000
release_share = 1
canary_share = 1
"""
OF_THE_SERVER = (  # so that a small disk is enough, and there are checkpoints
    "ALTER SYSTEM SET max_wal_size = '128MB'",
    "ALTER SYSTEM SET checkpoint_timeout = '30s'",
    "SELECT pg_reload_conf()",
)


@asynccontextmanager
async def world(seed: int, pace: Pace, *, whole: bool, upgrades: bool) -> AsyncIterator[World]:
    """Build one, and let its load begin.

    `whole`: with what takes rights, or other programs, where these can be had; `upgrades`: with an older program.
    """
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent_folder()))
    async with AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.callback(os.close, _lock(folder))
        built = World(folder, seed, pace)
        if whole:
            _choose_machine(built, stack)
        if upgrades:
            built.older = older_program(folder / "older", seed)
        await _start_postgres(built, stack)
        await _start_providers(built, stack)
        _write_config(built)
        await command(built, built.older.folder if built.older else ROOT, "migrate")
        await _start_parties(built, stack)
        built.producing = built.run(built.jobs.produce(pace.rate))
        await built.ready()
        yield built


def _lock(folder: Path) -> int:
    """Say that this run lives. Raises BlockingIOError where another process has said so."""
    running = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(running, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(running)
        raise
    return running


def _sweep() -> None:
    """Stop and remove what a killed run left behind."""
    for folder in parent_folder().glob(f"{PREFIX}*"):
        with suppress(OSError):  # it lives
            os.close(_lock(folder))
            EmbeddedPostgres(folder / "pg").stop()
            Disk(folder / "pg", MEGABYTES).unmount()
            shutil.rmtree(folder, ignore_errors=True)


def _choose_machine(built: World, stack: AsyncExitStack) -> None:
    clock, disk = Clock(built.folder / "time"), Disk(built.folder / "pg", MEGABYTES)
    pooler = Pooler(built.folder / "pool", built.postgres)
    if clock.install():
        stack.callback(clock.remove)
        built.clock = clock
    if disk.mount():
        stack.callback(disk.unmount)
        built.disk = disk
    if pooler.is_installed:
        built.pooler = pooler


async def _start_postgres(built: World, stack: AsyncExitStack) -> None:
    postgres = built.postgres

    async def stop() -> None:
        postgres.stop()
        await running
        await asyncio.to_thread(postgres.embedded.stop)

    running = asyncio.create_task(postgres.run())
    stack.push_async_callback(stop)
    for statement in OF_THE_SERVER:
        await postgres.ask(statement)


async def _start_providers(built: World, stack: AsyncExitStack) -> None:
    late = {"tail": 0.03, "tail_delay": built.pace.late}
    telling = Telling(delay=(0.05, 1.5), twice=TWICE, shuffled=True, batch=20, **late)
    for shape, feed in FEEDS.items():
        provider = esp(shape, seed=built.seed, fates=FATES, telling=telling)
        built.providers[feed] = await stack.enter_async_context(provider)


async def command(built: World, program: Path, *words: str) -> None:
    """Run a command of a program. Raises AssertionError if it fails."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "reconciler", *words),
        cwd=built.folder,
        env=environment(built.config, PYTHONPATH=str(program), RECONCILER_DATABASE__URL=built.postgres.dsn),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()


async def _start_parties(built: World, stack: AsyncExitStack) -> None:
    program = built.older.folder if built.older else ROOT
    session = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT)))
    stack.push_async_callback(built.end)

    async def service(name: str, only: str) -> Service:
        trap = Trap(Points())
        proxy = await stack.enter_async_context(FaultProxy(built.postgres.socket, trap.tap))
        settings = {"PYTHONPATH": str(program), "RECONCILER_DATABASE__URL": proxied(proxy, built.postgres.dsn)}
        started = Service(built.config, session, "--only", only, settings=settings)
        works = {"receiver": built.stored, "daemon": built.passed}[name]
        built.parties.append(Party(name, proxy, trap, started, works))
        built.run(started.run())
        return started

    built.receiver = await service("receiver", "receiver")
    built.daemon = await service("daemon", "reconciler")
    for feed, provider in built.providers.items():
        provider.webhook = Webhook(f"{built.receiver.url}/webhooks/{feed}")
    points = Points()
    for _ in range(SENDERS):
        trap = Trap(points)
        proxy = await stack.enter_async_context(FaultProxy(built.postgres.socket, trap.tap))
        sender = Sender(built.jobs, proxied(proxy, built.postgres.dsn), program=program)
        built.parties.append(Party("sender", proxy, trap, sender, built.sent))
        built.run(sender.run())


def _write_config(built: World) -> None:
    text = CONFIG.format(folder=built.folder / "data", grace=built.pace.grace)
    for name, provider in built.providers.items():
        text += f"[feeds.{name}]\n"
        for setting, value in provider.feed(built.folder).items():
            if setting not in NOT_HERE:
                text += f"{setting} = {json.dumps(value)}\n"
    built.config.write_text(text)
