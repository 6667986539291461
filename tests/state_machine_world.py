# SPDX-License-Identifier: Apache-2.0
"""The surroundings of the state machine, kept from example to example: connections, neighbours, a provider's API.

Opening them takes as long as an example does.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

import asyncpg
import kit
from api_kit import Sent, asked
from apis.mailgun import Fake

from webhooks.api import HttpApi, open_session
from webhooks.provider import Feed

T = TypeVar("T")
CLOCK: Final = "SELECT clock_timestamp()"
NEIGHBOURS_LAST: Final = timedelta(minutes=10)
"""Claims are judged by neighbours that are one to three hours old: then they are made anew."""


class Died(Exception):
    """A process was killed: what it had not committed is as if it had never been."""


class Fate:
    """What becomes of a process when it turns to the database for the n-th time: it dies, or stands still."""

    def __init__(self, at: int, *, dies: bool) -> None:
        self.left, self.dies = at, dies
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()

    async def met_by(self, task: asyncio.Task[Any]) -> None:
        """Wait until a process has died, stands still, or has ended before."""
        still = asyncio.ensure_future(self.reached.wait())
        await asyncio.wait([task, still], return_when=asyncio.FIRST_COMPLETED)
        still.cancel()

    async def meet(self) -> None:
        self.left -= 1
        if self.left > 0:
            return
        if self.dies:
            raise Died
        self.reached.set()
        await self.go_on.wait()


FATE: ContextVar[Fate | None] = ContextVar("fate", default=None)


def fated(work: Coroutine[Any, Any, T], fate: Fate | None) -> asyncio.Task[T]:
    """Start the work of a process, and of all its tasks, that has a fate."""
    context = copy_context()
    context.run(FATE.set, fate)
    return asyncio.get_running_loop().create_task(work, context=context)


async def until_killed(work: Coroutine[Any, Any, T], at: int | None) -> T | None:
    """Return what the work of a process came to; None: it was killed before the n-th of its transactions."""
    with suppress(Died):
        return await fated(work, Fate(at, dies=True) if at else None)
    return None


async def _meet_fate(_connection: Any) -> None:
    """Whoever has a fate meets it before one of his transactions: the database can tell no other moments apart."""
    if fate := FATE.get():
        await fate.meet()


@dataclass(slots=True)
class World:
    """What all examples share."""

    loop: asyncio.AbstractEventLoop
    db: asyncpg.Pool
    slow: asyncpg.Connection
    """Of a receiver whose transaction is open for long."""
    clock: asyncpg.Connection
    """For what no party does: it looks, and it moves times, without triggers."""
    feed: Feed
    """How its API is reached."""
    api: Fake
    """What the provider's API shows."""
    neighbours: list[Sent] = field(default_factory=list)
    """Those that it is asked about."""
    filled_at: datetime | None = None
    seen: Counter[str] = field(default_factory=Counter)
    """What came about in all examples."""

    async def begin(self) -> None:
        """Let an example find no send but the neighbours, by which the feed can speak of absence."""
        await self.clock.execute(EMPTY)
        now = await self.clock.fetchval(CLOCK)
        if self.filled_at is None or now - self.filled_at > NEIGHBOURS_LAST:
            await self.clock.execute("DELETE FROM send_log; DELETE FROM provider_event")
            age, every = timedelta(minutes=150), timedelta(minutes=2)
            await kit.heard_neighbours(self.clock, age, n=200, every=every)
            await self.clock.execute(NAME_NEIGHBOURS)
            await self.clock.execute(LET_SOME_TIME_OUT)
            self.neighbours = [Sent(*row) for row in await self.clock.fetch(NEIGHBOURS)]
            self.filled_at = now


@asynccontextmanager
async def hasty_api() -> AsyncIterator[HttpApi]:
    """As `webhooks.api.open_api`, and calls follow each other at once."""
    async with open_session() as session:
        yield HttpApi(session, lambda: datetime.now(UTC), pause=0.0)


@asynccontextmanager
async def opened_world(dsn: str) -> AsyncIterator[World]:
    """Connect to a database of the machine's own."""
    slow = await asyncpg.connect(dsn)
    silent = {"session_replication_role": "replica"}  # the outbox's trigger would take a moved time for news
    clock = await asyncpg.connect(dsn, server_settings=silent)
    async with (
        asyncpg.create_pool(dsn, min_size=2, max_size=6, setup=_meet_fate) as db,
        asked("mailgun", api := Fake([])) as (feed, _),
    ):
        yield World(asyncio.get_running_loop(), db, slow, clock, replace(feed, name=kit.FEED), api)
    await slow.close()
    await clock.close()


# Its examples delete rows, which is a hundred times as quick as a new database.
EMPTY: Final = """
DELETE FROM verdict; DELETE FROM shadow_verdict; DELETE FROM pass; DELETE FROM release_outbox; DELETE FROM duplicate;
DELETE FROM look_up; DELETE FROM asked_again;
DELETE FROM send_log WHERE send_key NOT LIKE 'neighbour:%';
DELETE FROM provider_event WHERE message_id NOT LIKE 'n-%';
DELETE FROM feed_state WHERE feed <> '*';
UPDATE feed_state SET paused_at = NULL, breaker_at = NULL, resumed_at = NULL, outcomes_until = clock_timestamp(),
    duplicates_until = clock_timestamp();
UPDATE installation SET pruned_until = NULL, memory = interval '30 days', tell = '{failed,held,released,sent}';
"""
# By their recipients the provider is asked about them.
NAME_NEIGHBOURS: Final = """
UPDATE send_log SET recipient = provider_message_id || '@example.org',
    recipient_key = provider_message_id || '@example.org'
"""
# Where a feed has had time-outs before, two at once are no burst.
LET_SOME_TIME_OUT: Final = """
UPDATE send_log SET answered_at = NULL, verdict_source = 'feed', verdict_reason = 'accepted', cause = 'timed out'
WHERE provider_message_id LIKE '%7'
"""
NEIGHBOURS: Final = """
SELECT wire_key, recipient, provider_message_id, claimed_at FROM send_log
WHERE claimed_at > clock_timestamp() - interval '3 hours'
"""
