# SPDX-License-Identifier: Apache-2.0
"""Tells the application what became of its sends: delivers the outbox that the database's trigger writes.

At least once, and in order per send. An entry is leased before it is delivered and marked afterwards, and no connection
is held meanwhile: a process that dies in between leaves a lease that runs out, and the entry is delivered again under
the same id. What the row has overtaken is cancelled, by the trigger and once more right before the delivery.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from random import SystemRandom
from typing import Any, Final

import asyncpg
import structlog
from prometheus_client import Counter

from reconciler.configuration.tables import OutboxSettings
from reconciler.database.connection import Connection
from reconciler.outbox.channels import Channel, Message, NotTaken, Send, channel_of
from webhooks.quiet import Quiet

OUTBOX_SECONDS: Final = 2.0
"""How often the outbox is looked at."""

AT_ONCE: Final = 20
"""Entries that one process leases, and delivers side by side."""

LEASE: Final = timedelta(seconds=60)
"""How long nobody else delivers an entry that was leased. Well above the longest delivery."""

RUN_SECONDS: Final = 2.0
"""After so long a run leases nothing more: the rest is the next run's, and a shutdown waits for no whole backlog."""

CLEAN_SECONDS: Final = 3600.0
FIRST_WAIT: Final = timedelta(seconds=5)
LONGEST_WAIT: Final = timedelta(hours=1)

DELIVERIES: Final = Counter("reconciler_outbox_deliveries", "What the application was told.", ["what", "outcome"])

_log: Final = structlog.get_logger()
_dice: Final = SystemRandom()


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing to tell, leased by this process, and what the send log says of it now."""

    id: int
    wire_key: str
    what: str
    """released, sent, failed or held."""
    tries: int
    """Deliveries that were begun, this one included."""
    leased_until: datetime
    created_at: datetime
    now: datetime
    stands: bool
    """Whether the row still is as the entry says."""
    send_key: str | None
    feed: str | None
    message_class: str | None
    attempt: int | None
    reason: str | None
    risk: float | None

    @property
    def message(self) -> Message:
        """What the application gets to read: neither recipient nor payload, which it has itself."""
        name = f"outbox_{self.id}_{self.wire_key}"  # ids of two installations, or of before a restore, may be alike
        data = {
            "wire_key": self.wire_key,
            "send_key": self.send_key,
            "feed": self.feed,
            "message_class": self.message_class,
            "attempt": self.attempt,
            "reason": self.reason,
            "risk": self.risk,
        }
        told = {"type": f"send.{self.what}", "id": name, "timestamp": self.created_at.isoformat(), "data": data}
        return Message(name, self.wire_key, self.now, json.dumps(told).encode())


def backoff(tries: int, dice: float) -> timedelta:
    """Return how long to wait after so many deliveries in vain: 5 s, doubled each time, an hour at most.

    `dice`, 0 to 1, takes up to half of it away, so that what failed together does not come back together.
    """
    wait: timedelta = FIRST_WAIT * 2 ** min(tries - 1, 20)
    return min(LONGEST_WAIT, wait) * (1 - dice / 2)


def telling(pool: asyncpg.Pool, settings: OutboxSettings) -> Callable[[], Awaitable[None]]:
    """Return what does one run of telling. Without a channel nothing is written, and only notifications go out."""
    channel = channel_of(settings)
    tell = settings.tell if channel else ()
    return Outbox(pool, channel, tell, settings.give_up_after).run


class Outbox:
    """Delivers what is due over a channel, and removes what was delivered long ago."""

    def __init__(
        self, pool: asyncpg.Pool, channel: Channel | None, tell: Sequence[str], give_up_after: timedelta
    ) -> None:
        self._pool, self._channel, self._tell, self._give_up_after = pool, channel, tell, give_up_after
        self._began = False
        self._clean_at = 0.0
        self._marking = asyncio.Lock()  # deliveries that end together take one connection of the pool, not all
        self._quiet = Quiet()

    async def run(self) -> None:
        """Deliver what is due, for some seconds. Raises the database's errors; then leases run out by themselves."""
        await self._keep_wishes()
        if self._channel and (entries := await lease(self._pool)):
            await self._deliver(self._channel, entries)
        if time.monotonic() >= self._clean_at:
            await clean(self._pool)
            self._clean_at = time.monotonic() + CLEAN_SECONDS

    async def _keep_wishes(self) -> None:
        """Let the trigger know what is to be told; at the start cancel what is no longer asked for.

        Who delivers says so each time: a process that was started without these settings must not silence it for good.
        """
        wished = sorted(set(self._tell))
        if self._channel or not self._began:
            await self._pool.execute(KEEP_WISHES, wished)
        if not self._began:
            await self._pool.execute(FORGET_UNWISHED, wished)
            self._began = True

    async def _deliver(self, channel: Channel, entries: Sequence[Entry]) -> None:
        until = time.monotonic() + RUN_SECONDS
        async with channel() as send:
            while entries:
                try:
                    async with asyncio.TaskGroup() as group:
                        tasks = [group.create_task(self._tell_one(send, entry)) for entry in entries]
                except BaseExceptionGroup as errors:  # the worker knows what a database that is away raises
                    raise errors.exceptions[0] from None
                if time.monotonic() > until or not any(task.result() for task in tasks):
                    return
                entries = await lease(self._pool)

    async def _tell_one(self, send: Send, entry: Entry) -> bool:
        """Deliver one entry and mark it; return whether it is done with."""
        if not entry.stands:
            return await self._done(entry, CANCEL, "cancelled")
        try:
            await send(entry.message)
        except NotTaken as failure:
            await self._put_off(entry, failure)
            return False
        return await self._done(entry, DELIVERED, "delivered")

    async def _done(self, entry: Entry, statement: str, outcome: str) -> bool:
        async with self._marking:
            await self._pool.execute(statement, entry.wire_key, entry.id)
        DELIVERIES.labels(entry.what, outcome).inc()
        return True

    async def _put_off(self, entry: Entry, failure: NotTaken) -> None:
        wait = max(backoff(entry.tries, _dice.random()), failure.wait or timedelta(0))
        give_up_after = timedelta(0) if failure.gone else self._give_up_after
        marks = (entry.wire_key, entry.id, entry.leased_until, failure.reason, wait, give_up_after)
        async with self._marking:
            dead = await self._pool.fetchval(NOT_DELIVERED, *marks)
        DELIVERIES.labels(entry.what, "dead" if dead else "failed").inc()
        event = "outbox_gave_up" if dead else "outbox_not_delivered"
        if (before := self._quiet.silenced(event, failure.reason)) is not None:
            _log.warning(
                event, wire_key=entry.wire_key, reason=failure.reason, tries=entry.tries, unlogged_before=before
            )


KEEP_WISHES: Final = "UPDATE installation SET tell = $1::text[] WHERE tell <> $1::text[]"
# Nobody is waited for: whoever holds an entry moves its row, and will have it cancelled or delivered.
FORGET_UNWISHED: Final = """
WITH unwished AS MATERIALIZED (
    SELECT wire_key, id FROM release_outbox
    WHERE delivered_at IS NULL AND cancelled_at IS NULL AND what <> ALL ($1::text[])
    ORDER BY wire_key, id FOR UPDATE SKIP LOCKED
)
UPDATE release_outbox o SET cancelled_at = clock_timestamp() FROM unwished u
WHERE o.wire_key = u.wire_key AND o.id = u.id AND o.delivered_at IS NULL AND o.cancelled_at IS NULL
"""


# Of each key only the first that is open, and none while an older one, though cancelled, is still under way. (A
# volatile time would use no index: while the application is away, all that waits would be read each time.)
LEASE_DUE: Final = """
WITH due AS MATERIALIZED (
    SELECT o.wire_key, o.id FROM release_outbox o
    WHERE o.delivered_at IS NULL AND o.cancelled_at IS NULL AND o.dead_at IS NULL
      AND o.next_try_at <= statement_timestamp() AND (o.leased_until IS NULL OR o.leased_until <= clock_timestamp())
      AND NOT EXISTS (
          SELECT FROM release_outbox e WHERE e.wire_key = o.wire_key AND e.id < o.id
             AND (num_nonnulls(e.delivered_at, e.cancelled_at, e.dead_at) = 0 OR e.leased_until > clock_timestamp()))
    ORDER BY o.next_try_at, o.id
    LIMIT $1
    FOR UPDATE SKIP LOCKED
), leased AS (
    UPDATE release_outbox o SET leased_until = clock_timestamp() + $2::interval, tries = o.tries + 1
    FROM due d
    WHERE o.wire_key = d.wire_key AND o.id = d.id AND num_nonnulls(o.delivered_at, o.cancelled_at, o.dead_at) = 0
      AND (o.leased_until IS NULL OR o.leased_until <= clock_timestamp())
    RETURNING o.*
)
SELECT l.id, l.wire_key, l.what, l.tries, l.leased_until, l.created_at, clock_timestamp() AS now,
       coalesce(send_stands_for(s) = l.what AND s.fence IS NOT DISTINCT FROM l.fence, false) AS stands,
       s.send_key, s.feed, s.message_class, s.attempt,
       CASE l.what WHEN 'released' THEN s.release_basis WHEN 'held' THEN s.held_reason ELSE s.verdict_reason END
           AS reason,
       (SELECT v.risk FROM verdict v
        WHERE v.wire_key = l.wire_key AND v.fence = l.fence AND v.action = 'released' AND l.what = 'released'
        ORDER BY v.id DESC LIMIT 1) AS risk
FROM leased l LEFT JOIN send_log s ON s.wire_key = l.wire_key
"""


async def lease(pool: asyncpg.Pool) -> list[Entry]:
    """Lease some entries that are due, and return them with what their rows say."""
    return [Entry(**row) for row in await pool.fetch(LEASE_DUE, AT_ONCE, LEASE)]


DELIVERED: Final = """
UPDATE release_outbox SET delivered_at = clock_timestamp(), leased_until = NULL, last_error = NULL
WHERE wire_key = $1 AND id = $2 AND delivered_at IS NULL
"""
CANCEL: Final = """
UPDATE release_outbox SET cancelled_at = clock_timestamp(), leased_until = NULL
WHERE wire_key = $1 AND id = $2 AND delivered_at IS NULL AND cancelled_at IS NULL
"""
NOT_DELIVERED: Final = """
UPDATE release_outbox SET leased_until = NULL, last_error = $4, next_try_at = clock_timestamp() + $5::interval,
    dead_at = CASE WHEN cancelled_at IS NULL AND tried_since <= clock_timestamp() - $6::interval
                   THEN clock_timestamp() END
WHERE wire_key = $1 AND id = $2 AND leased_until = $3 AND delivered_at IS NULL
RETURNING dead_at IS NOT NULL
"""

# Those given up are kept until somebody had the time to see them. (A volatile time would use no index.)
CLEAN: Final = """
DELETE FROM release_outbox WHERE (wire_key, id) IN (
    (SELECT wire_key, id FROM release_outbox
     WHERE coalesce(delivered_at, cancelled_at) < statement_timestamp() - interval '7 days' LIMIT 1000)
    UNION ALL
    (SELECT wire_key, id FROM release_outbox
     WHERE dead_at < statement_timestamp() - interval '30 days' AND delivered_at IS NULL AND cancelled_at IS NULL
     LIMIT 1000))
"""


async def clean(pool: asyncpg.Pool) -> None:
    """Remove entries that ended a week ago and those given up a month ago, a thousand at a time."""
    while await pool.execute(CLEAN) != "DELETE 0":
        pass


@dataclass(frozen=True, slots=True)
class OutboxStatus:
    """What the application was not told yet."""

    waiting: int
    oldest: datetime | None
    """Since when the oldest of them waits."""
    dead: int
    """Given up."""
    last_error: str | None
    """Of the newest of those that failed."""


# What waits has one index, what was given up another: all that was delivered is not read.
STATUS: Final = """
SELECT count(*) FILTER (WHERE o.dead_at IS NULL) AS waiting,
       min(o.tried_since) FILTER (WHERE o.dead_at IS NULL) AS oldest,
       count(*) FILTER (WHERE o.dead_at IS NOT NULL) AS dead,
       (array_agg(o.last_error ORDER BY o.id DESC) FILTER (WHERE o.last_error IS NOT NULL))[1] AS last_error
FROM (
    SELECT * FROM release_outbox WHERE delivered_at IS NULL AND cancelled_at IS NULL AND dead_at IS NULL
    UNION ALL
    SELECT * FROM release_outbox WHERE delivered_at IS NULL AND cancelled_at IS NULL AND dead_at IS NOT NULL
) AS o LEFT JOIN send_log s ON s.wire_key = o.wire_key
WHERE $1::text IS NULL OR s.feed = $1
"""


async def read_outbox(connection: Connection, feed: str | None) -> OutboxStatus:
    """Return how the outbox stands, for one feed or all."""
    row = await connection.fetchrow(STATUS, feed)
    assert row is not None  # noqa: S101 - an aggregate has a row
    return OutboxStatus(**row)


UNDELIVERED: Final = """
SELECT o.wire_key, s.send_key, s.feed, o.what, o.created_at, o.tries, o.next_try_at, o.dead_at, o.last_error
FROM (
    SELECT * FROM release_outbox WHERE delivered_at IS NULL AND cancelled_at IS NULL AND dead_at IS NULL
    UNION ALL
    SELECT * FROM release_outbox WHERE delivered_at IS NULL AND cancelled_at IS NULL AND dead_at IS NOT NULL
) AS o LEFT JOIN send_log s ON s.wire_key = o.wire_key
ORDER BY o.dead_at NULLS LAST, o.id
LIMIT $1
"""


async def undelivered(connection: Connection, most: int) -> list[dict[str, Any]]:
    """Return what the application was not told, those given up first."""
    return [dict(row) for row in await connection.fetch(UNDELIVERED, most)]


RETRY: Final = """
WITH dead AS MATERIALIZED (
    SELECT wire_key, id FROM release_outbox
    WHERE dead_at IS NOT NULL AND delivered_at IS NULL AND cancelled_at IS NULL
      AND ($1::text[] IS NULL OR wire_key IN (SELECT wire_key(key) FROM unnest($1::text[]) AS key))
    ORDER BY wire_key, id FOR UPDATE SKIP LOCKED
)
UPDATE release_outbox o SET dead_at = NULL, next_try_at = clock_timestamp(), tried_since = clock_timestamp(), tries = 0
FROM dead d
WHERE o.wire_key = d.wire_key AND o.id = d.id AND o.dead_at IS NOT NULL AND o.delivered_at IS NULL
  AND o.cancelled_at IS NULL
RETURNING o.wire_key
"""


async def retry(connection: Connection, keys: Sequence[str] | None) -> list[str]:
    """Let entries that were given up be tried again, of these (send or wire) keys or all; returns their wire keys."""
    return sorted(row["wire_key"] for row in await connection.fetch(RETRY, keys))
