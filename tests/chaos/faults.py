# SPDX-License-Identifier: Apache-2.0
"""The faults. Each does its damage and undoes what a machine would not undo by itself, and returns; then all must work.

What it returns is a word on what happened, for the table.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

import asyncpg
from serving import ROOT, until

from webhooks.database import ABANDONED_SECONDS, FAILURES

from .building import command
from .commit_points import Points
from .processes import PATIENCE, Sender
from .world import Party, World

HOLE = 12.0
"""Seconds of a black hole: longer than the ten for which an answer of the database is waited for."""
RESET_SHARE = 0.5
"""Share of black holes at whose end connections are reset."""
SLOW = 0.15
"""Seconds that everything takes more, each way."""
FULL_DISK = 8.0
"""Seconds."""
SEGMENTS = 40
"""More than the write-ahead log may have set aside."""
STEP_SHARE = 0.8
"""How far the clock is set, as a share of the grace: what is judged by the clock has that much leeway."""
UNSEEN = 10.0
"""Seconds in which no new commit point comes by, so that all were struck."""
POSTGRES_SHARE = 0.15
"""Share of strikes at a commit point that kill PostgreSQL instead of the program."""


@dataclass(frozen=True)
class Fault:
    """Something that happens, and how often."""

    name: str
    strike: Callable[[World], Awaitable[str | None]]
    times: int = 1
    limit: float = 30.0
    """Seconds after which all works again, without a person."""


async def receiver_killed(world: World) -> None:
    world.receiver.kill()


async def daemon_killed(world: World) -> None:
    world.daemon.kill()


async def sender_killed(world: World) -> None:
    world.dice.choice(world.senders()).process.kill()


async def postgres_killed(world: World) -> None:
    world.postgres.kill()


def kill_one(world: World) -> str:
    """Kill one of our processes; return its name."""
    party = world.dice.choice(world.parties)
    party.process.kill()
    return party.name


async def all_killed(world: World) -> None:
    world.postgres.kill()
    for party in world.parties:
        party.process.kill()


BACKENDS = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"


async def backend_killed(world: World) -> None:
    """PostgreSQL ends all connections and recovers by itself when one of its processes is killed."""
    victim = world.dice.choice(await world.postgres.ask(BACKENDS))["pid"]
    with suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)


async def connections_cut(world: World) -> str:
    return f"{sum(proxy.cut() for proxy in world.proxies)} connections"


async def answers_cut(world: World) -> str:
    """Let the next answer on each way end in its middle."""
    for proxy in world.proxies:
        proxy.half_an_answer = True
    with suppress(TimeoutError):
        async with asyncio.timeout(5):
            while any(proxy.half_an_answer for proxy in world.proxies):  # noqa: ASYNC110 - it happens elsewhere
                await asyncio.sleep(0.02)
    cut = sum(not proxy.half_an_answer for proxy in world.proxies)
    world.heal()
    return f"{cut} answers"


async def requests_lost(world: World) -> str:
    for proxy in world.proxies:
        proxy.close(proxy.requests)
    return await _hole(world)


async def answers_lost(world: World) -> str:
    for proxy in world.proxies:
        proxy.close(proxy.answers)
    return await _hole(world)


async def both_lost(world: World) -> str:
    for proxy in world.proxies:
        proxy.close(proxy.requests, proxy.answers)
    return await _hole(world)


async def _hole(world: World) -> str:
    """Keep the hole for its time; one of us has to start in it.

    By the dice what it held up comes out of it, or the connections are reset.
    """
    await asyncio.sleep(HOLE / 3)
    killed = kill_one(world)
    await asyncio.sleep(HOLE * 2 / 3)
    if reset := world.dice.random() < RESET_SHARE:
        await connections_cut(world)
    world.heal()
    return f"{killed} killed in it, then {'reset' if reset else 'late'}"


async def connections_forgotten(world: World) -> str:
    return f"{sum(proxy.lose(ABANDONED_SECONDS) for proxy in world.proxies)} connections"


async def slow_network(world: World) -> None:
    for proxy in world.proxies:
        proxy.requests.delay = proxy.answers.delay = SLOW
    await asyncio.sleep(HOLE)
    world.heal()


OTHERS = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE backend_type = 'client backend' AND application_name <> 'chaos'
"""


async def too_many_connections(world: World) -> str:
    """Let somebody else take all of the server's connections, ours too, while one of us has to start."""
    async with AsyncExitStack() as stack:
        held = [await _hold(world, stack)]
        killed = kill_one(world)
        end = time.monotonic() + HOLE / 2
        while time.monotonic() < end:
            try:
                held.append(await _hold(world, stack))
            except (OSError, asyncpg.PostgresError):
                await held[0].execute(OTHERS)
    return f"{len(held)} taken, {killed} killed"


async def _hold(world: World, stack: AsyncExitStack) -> asyncpg.Connection:
    connection = await asyncpg.connect(world.postgres.dsn, timeout=5, server_settings={"application_name": "chaos"})
    stack.callback(connection.terminate)
    return connection


SLOW_COMMITS = (
    "ALTER SYSTEM SET commit_delay = 100000",
    "ALTER SYSTEM SET commit_siblings = 0",
    "SELECT pg_reload_conf()",
)
QUICK_COMMITS = (
    "ALTER SYSTEM RESET commit_delay",
    "ALTER SYSTEM RESET commit_siblings",
    "SELECT pg_reload_conf()",
)
"""As they were."""


async def slow_commits(world: World) -> None:
    """Let each commit take 100 ms more."""
    for statement in SLOW_COMMITS:
        await world.postgres.ask(statement)
    await asyncio.sleep(HOLE)
    for statement in QUICK_COMMITS:
        await world.postgres.ask(statement)


async def events_locked(world: World) -> None:
    await _locked(world, "LOCK TABLE provider_event IN SHARE MODE")


async def sends_locked(world: World) -> None:
    await _locked(world, "LOCK TABLE send_log IN SHARE MODE")


async def _locked(world: World, statement: str) -> None:
    """Let somebody's open transaction hold up all writers of a table, for longer than they wait."""
    connection = await asyncpg.connect(world.postgres.dsn)
    try:
        async with connection.transaction():
            await connection.execute(statement)
            await asyncio.sleep(HOLE)
    finally:
        connection.terminate()


NEXT_WAL = "SELECT pg_logical_emit_message(false, 'chaos', ''), pg_switch_wal()"


async def disk_full(world: World) -> str:
    """Leave no byte of the disk; once what was set aside for the write-ahead log is used, PostgreSQL ends itself."""
    assert world.disk is not None
    refused = world.postgres.refused
    await asyncio.to_thread(world.disk.fill)
    await asyncio.sleep(FULL_DISK / 2)
    with suppress(*FAILURES):
        async with AsyncExitStack() as stack:
            connection = await _hold(world, stack)
            for _ in range(SEGMENTS):
                await connection.execute(NEXT_WAL, timeout=5)
    await asyncio.sleep(FULL_DISK / 2)
    world.disk.free()
    return f"{world.postgres.refused - refused} starts of PostgreSQL failed"


AHEAD = "SELECT extract(epoch FROM clock_timestamp())::float8 - $1"


async def clock_steps(world: World) -> str:
    """Set the database's clock ahead, back behind, and right again."""
    assert world.clock is not None
    step = world.pace.grace * STEP_SHARE
    ahead = []
    for seconds in (step, -step, 0):
        world.clock.set(seconds)
        await asyncio.sleep(step)
        ahead.append((await world.postgres.ask(AHEAD, time.time()))[0][0])
    assert ahead[0] - ahead[1] > step, "PostgreSQL does not go by the clock that was set"
    return f"{ahead[0]:+.0f} s, {ahead[1]:+.0f} s, {ahead[2]:+.0f} s"


async def schema_migrated(world: World) -> str:
    """Bring the schema to this release's under load; the old program works on."""
    assert world.older is not None
    await command(world, ROOT, "migrate")
    return f"from {world.older.schema}"


async def receiver_upgraded(world: World) -> None:
    """Replace the old receiver; old daemon and senders work beside it."""
    await world.receiver.restart(PYTHONPATH=str(ROOT))


async def daemon_joined(world: World) -> None:
    """Start a new daemon beside the old one, and replace one of the old senders."""
    world.leaving, world.daemon = world.daemon, world.daemon.twin(PYTHONPATH=str(ROOT))
    world.party("daemon").process = world.daemon
    world.run(world.daemon.run())
    _upgrade(world.senders()[0])


async def old_ones_gone(world: World) -> None:
    """Let only the new ones work."""
    assert world.leaving is not None
    await world.leaving.stop()
    world.daemon.unasked += world.leaving.unasked
    for sender in world.senders()[1:]:
        _upgrade(sender)


def _upgrade(sender: Party) -> None:
    assert isinstance(sender.process, Sender)
    sender.process.program = ROOT
    sender.process.kill()


async def to_pooler(world: World) -> None:
    """Put PgBouncer before PostgreSQL: our processes find out when they start."""
    assert world.pooler is not None
    world.run(world.pooler.run())
    await until(world.pooler.listens, "the pooler")
    for party in world.parties:
        party.proxy.behind = world.pooler.socket
    for service in world.services:
        await service.restart()
    for sender in world.senders():
        assert isinstance(sender.process, Sender)
        sender.process.pooled = True
        sender.process.kill()


async def pooler_killed(world: World) -> None:
    assert world.pooler is not None
    world.pooler.kill()


async def struck_at_commits(world: World, party: Party) -> list[float]:
    """Strike a party at each commit point that comes by, and return how long it took until it worked again.

    The next strike may come while it starts: then the one before has no time. By the dice PostgreSQL is killed instead.
    """
    seconds: list[float] = []
    strike = _next_strike(world, party)
    while await _comes(strike, party.trap.points):
        began = time.monotonic()
        strike = _next_strike(world, party)
        working = asyncio.ensure_future(party.works())
        await asyncio.wait({working, strike}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            seconds.append(time.monotonic() - began)
        working.cancel()
    party.trap.strike = None
    return seconds


def _next_strike(world: World, party: Party) -> asyncio.Future[None]:
    """Let the trap strike at the next commit point; return what is done then."""
    struck = asyncio.get_running_loop().create_future()

    async def strike() -> None:
        victim = world.postgres if world.dice.random() < POSTGRES_SHARE else party.process
        victim.kill()
        struck.set_result(None)

    party.trap.strike = strike
    return struck


async def _comes(strike: asyncio.Future[None], points: Points) -> bool:
    """Wait for the next strike; longer where it is known that one is still to come."""
    await asyncio.wait({strike}, timeout=UNSEEN)
    if points.seen - points.struck:
        await asyncio.wait({strike}, timeout=PATIENCE)
    return strike.done()
