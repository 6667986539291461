# SPDX-License-Identifier: Apache-2.0
"""Lets time go by: in each tick all parties act at the same time, and its end is kept, so that a run can be resumed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import count
from typing import Any, Final

import asyncpg

from reconciler.database.migrate import migrate
from webhooks.database import connect_pool

from . import clock, truth
from .application import Application
from .feeds import Feeds
from .operators import Operators
from .passes import Passes
from .senders import GROUPS, Senders
from .world import BEGIN, MINUTE, World

LONG_TICK: Final = timedelta(minutes=5)
"""How long a tick lasts once nothing more is to be sent."""

LAST_WORDS: Final = timedelta(minutes=30)
"""How long it goes on at least once every send could be given up."""

AT_MOST: Final = timedelta(hours=12)
"""How long it goes on at most beyond that: a send that is still open then is lost."""

STATEMENT_SECONDS: Final = 1800.0
MAINTAINED_EVERY: Final = 50
"""Ticks."""

AT_FIRST: Final = (5, 15)
"""Ticks in which the planner's figures are made anew as well: it takes an empty table for one that stays small."""

MAKE_PARTITIONS: Final = "SELECT provider_event_make_partitions()"
VACUUM: Final = "VACUUM (ANALYZE)"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is."""

    tick: int
    at: datetime
    sends: int
    """Made so far."""


async def prepare(dsn: str, sends: int, seed: int) -> None:
    """Give an empty database the clock, the real schema, and the tables of the truth."""
    async with connected(dsn) as connection:
        await clock.install(connection, BEGIN)
    await migrate(dsn)
    async with connected(dsn) as connection:  # it has the new search_path
        await clock.adopt(connection)
        await truth.start(connection, seed, sends)


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    """Give a connection of one's own."""
    connection = await asyncpg.connect(dsn, command_timeout=STATEMENT_SECONDS)
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def parties(dsn: str, world: World) -> AsyncIterator[Life]:
    """Give all parties their connections, and end them."""
    truths = await connect_pool(dsn, size=6, application="truth")
    senders = await connect_pool(dsn, size=GROUPS + 3, application="simulation sender")
    receiver = await connect_pool(dsn, size=3, application="simulation receiver")
    feeds, passes = Feeds(world, receiver), Passes(world, dsn)
    await feeds.open()
    try:
        yield Life(
            world,
            truths,
            Application(world, senders, truths),
            Senders(world, senders, truths, feeds),
            feeds,
            passes,
            Operators(world, truths),
        )
    finally:
        await feeds.close()
        await passes.close()
        for pool in (truths, senders, receiver):
            pool.terminate()


@dataclass(frozen=True, slots=True)
class Life:
    """All parties of a world."""

    world: World
    truths: Any
    application: Application
    senders: Senders
    feeds: Feeds
    passes: Passes
    operators: Operators

    async def run(self, ticks: int | None = None, tell: Callable[[Progress], object] = lambda _: None) -> bool:
        """Live on from where the run is, for some ticks or to its end; return whether this is the end.

        Raises Broken where a promise is seen to be broken on the way.
        """
        first = (await truth.read_run(self.truths))["tick"]
        for tick in count(first):
            if not await self._goes_on(tick):
                return True
            if ticks is not None and tick >= first + ticks:
                return False
            try:
                await self._tick(tick)
            except BaseExceptionGroup as errors:  # the others were cancelled for it
                raise _first(errors) from None
            tell(Progress(tick, self._at(tick), min((tick + 1) * self.world.per_minute, self.world.sends)))
        return True

    def _at(self, tick: int) -> datetime:
        over = max(0, tick - self.world.minutes)
        return BEGIN + (tick - over) * MINUTE + over * LONG_TICK

    async def _goes_on(self, tick: int) -> bool:
        since = self._at(tick) - self._at(self.world.minutes)
        if since < self.world.give_up + LAST_WORDS:
            return True
        return since < self.world.give_up + AT_MOST and await truth.still_open(self.truths) > 0

    async def _tick(self, n: int) -> None:
        begun = time.perf_counter()
        async with self.truths.acquire() as connection:
            await clock.move(connection, self._at(n))
            tick = await truth.begin_tick(self.truths, n, await clock.read(connection))
        if n in AT_FIRST or (n and n % MAINTAINED_EVERY == 0):
            await self._maintain()
        wishes = self.world.wishes(n)
        jobs = await self.application.jobs(tick, wishes)
        enqueued = [(wish.key, wish.feed, json.dumps(wish.enqueue_options)) for wish in wishes if wish.enqueued]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.senders.enqueue(tick, enqueued))
            tasks.create_task(self.senders.work(tick, jobs))
            tasks.create_task(self.feeds.deliver(tick))
            tasks.create_task(self.passes.run(tick))
            tasks.create_task(self.operators.work(tick))
            tasks.create_task(self.operators.cut(tick))
        await self.application.listen(tick)
        tick.done += [entry.id for entry in tick.entries if entry.what != "event"]
        await truth.end_tick(self.truths, tick, time.perf_counter() - begun)

    async def _maintain(self) -> None:
        """Do what a daemon and an autovacuum do: make partitions, and keep the planner's figures true."""
        await self.truths.execute(MAKE_PARTITIONS)
        await self.feeds.new_month()
        await self.truths.execute(VACUUM, timeout=600)


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
