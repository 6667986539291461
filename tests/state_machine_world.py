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
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar
from uuid import uuid4

import asyncpg
import kit
from api_kit import Sent, asked
from apis.mailgun import Fake

from webhooks.api import HttpApi, open_session
from webhooks.provider import Feed

T = TypeVar("T")
BUSY: Final = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend' AND state <> 'idle' AND pid <> ALL ($1::int[])
"""
CLOCK: Final = "SELECT clock_timestamp()"
OTHER: Final = "other"
FEEDS: Final = (kit.FEED, OTHER)
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
    folder: Path
    """Where processes keep what they remember outside of the database."""
    neighbours: list[Sent] = field(default_factory=list)
    """Those that it is asked about."""
    filled_at: datetime | None = None
    seen: Counter[str] = field(default_factory=Counter)
    """What came about in all examples."""

    def new_folder(self) -> Path:
        """Return a folder that nothing was written to."""
        return self.folder / uuid4().hex

    async def until_still(self) -> None:
        """Wait until no process is in a transaction: where one of its tasks stands still another may go on a little."""
        others = [self.slow.get_server_pid(), self.clock.get_server_pid()]
        while await self.clock.fetchval(BUSY, others):
            pass  # each look is a round trip

    async def begin(self) -> None:
        """Let an example find no send but the neighbours, by which the feed can speak of absence."""
        await self.clock.execute(EMPTY)
        now = await self.clock.fetchval(CLOCK)
        if self.filled_at is None or now - self.filled_at > NEIGHBOURS_LAST:
            await self.clock.execute("DELETE FROM send_log; DELETE FROM provider_event")
            age, every = timedelta(minutes=150), timedelta(minutes=2)
            for feed in FEEDS:
                await kit.heard_neighbours(self.clock, age, feed, n=200, every=every)
            await self.clock.execute(NAME_NEIGHBOURS)
            await self.clock.execute(LET_SOME_TIME_OUT)
            self.neighbours = [Sent(*row) for row in await self.clock.fetch(NEIGHBOURS, kit.FEED)]
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
    await clock.execute(LET_BACK_UP)
    async with (
        asyncpg.create_pool(dsn, min_size=2, max_size=6, setup=_meet_fate) as db,
        asked("mailgun", api := Fake([])) as (feed, _),
    ):
        with TemporaryDirectory() as folder:
            yield World(asyncio.get_running_loop(), db, slow, clock, replace(feed, name=kit.FEED), api, Path(folder))
    await slow.close()
    await clock.close()


# Its examples delete rows, which is a hundred times as quick as a new database.
EMPTY: Final = """
DELETE FROM verdict; DELETE FROM shadow_verdict; DELETE FROM pass; DELETE FROM release_outbox; DELETE FROM duplicate;
DELETE FROM look_up; DELETE FROM asked_again; DELETE FROM frequency_cap; DELETE FROM cap_taken;
DELETE FROM send_log WHERE send_key NOT LIKE 'neighbour:%';
DELETE FROM provider_event WHERE message_id NOT LIKE 'n-%';
DELETE FROM feed_state WHERE feed <> '*';
DELETE FROM feed_delivery WHERE outcome <> 'stored';
UPDATE feed_state SET paused_at = NULL, breaker_at = NULL, suspect_at = NULL, resumed_at = NULL,
    outcomes_until = clock_timestamp(), duplicates_until = clock_timestamp(), heartbeat_seen = 0, fence_seen = 0;
UPDATE installation SET pruned_until = NULL, memory = interval '30 days', tell = '{failed,held,released,sent}';
"""
# A backup is a copy of what the examples write. It stands in a schema that nobody looks at.
OF_EXAMPLES: Final = {
    "send_log": "send_key NOT LIKE 'neighbour:%'",
    "provider_event": "message_id NOT LIKE 'n-%'",
    **dict.fromkeys(["verdict", "shadow_verdict", "pass", "release_outbox", "duplicate", "look_up"], "true"),
    **dict.fromkeys(["asked_again", "cap_taken", "feed_state", "installation"], "true"),
}
LET_BACK_UP: Final = "CREATE SCHEMA backup;" + "".join(
    f"CREATE TABLE backup.{table} (LIKE {table});" for table in OF_EXAMPLES
)
BACK_UP: Final = "".join(
    f"DELETE FROM backup.{table}; INSERT INTO backup.{table} SELECT * FROM {table} WHERE {own};"  # noqa: S608 - all ours
    for table, own in OF_EXAMPLES.items()
)
RESTORE: Final = "".join(
    f"DELETE FROM {table} WHERE {own};"  # noqa: S608 - all ours
    f"INSERT INTO {table} OVERRIDING SYSTEM VALUE SELECT * FROM backup.{table};"
    for table, own in OF_EXAMPLES.items()
)
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
WHERE claimed_at > clock_timestamp() - interval '3 hours' AND feed = $1
"""
