# SPDX-License-Identifier: Apache-2.0
"""The feeds: what providers say is stored by the real inbox; what is not acknowledged they say again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Final

import asyncpg

from webhooks.counters import Counters
from webhooks.event import Event, Kind, Testimony
from webhooks.inbox import LONGEST_SECONDS, Inbox, InboxBusy, InboxUnavailable

from .truth import Entry, Tick
from .world import PLACES, World

LOST: Final = (
    OSError,
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
)
"""What parties survive: connections that were cut, and deadlocks."""

AT_ONCE: Final = 8
"""Deliveries under way."""

LARGEST: Final = 250
"""Events of a delivery."""

FOREIGN: Final = 2
"""Events that each feed delivers in a tick of sends that are not ours."""


class Feeds:
    """All feeds, and the receiver that they deliver to."""

    def __init__(self, world: World, pool: Any) -> None:
        self._world, self._pool = world, pool
        self._inbox, self._counters = Inbox(seconds=LONGEST_SECONDS), Counters()

    async def open(self) -> None:
        """Begin to receive."""
        await self._inbox.open(self._pool)

    async def close(self) -> None:
        """Receive nothing more."""
        await self._inbox.close()

    async def new_month(self) -> None:
        """Learn which partitions there are, as a receiver does now and then."""
        with suppress(*LOST):
            await self._inbox.refresh_partitions()

    async def deliver(self, tick: Tick) -> None:
        """Deliver what is due, in deliveries of any size, some at a time; what is refused stays due."""
        dice, room = self._world.dice("deliveries", tick.n), asyncio.Semaphore(AT_ONCE)
        by_feed: dict[str, list[Entry]] = {place.name: [] for place in PLACES}
        for entry in tick.entries:
            if entry.what == "event":
                by_feed[entry.body[0]].append(entry)
        async with asyncio.TaskGroup() as tasks:
            for feed, entries in by_feed.items():
                tasks.create_task(self._foreign(tick, feed))
                dice.shuffle(entries)
                while entries:
                    size = max(1, int(LARGEST ** dice.random()))
                    tasks.create_task(self._deliver(tick, room, feed, entries[:size]))
                    del entries[:size]
        with suppress(*LOST):  # what was not written is written the next time
            await self._counters.flush(self._pool)

    async def deliver_early(self, bodies: Sequence[list[Any]]) -> None:
        """Deliver events once that come again when they are due."""
        for body in bodies:
            await self._store(body[0], [event(body)])

    async def _deliver(self, tick: Tick, room: asyncio.Semaphore, feed: str, entries: Sequence[Entry]) -> None:
        async with room:
            acknowledged = await self._store(feed, [event(entry.body) for entry in entries])
        if acknowledged:
            tick.done += [entry.id for entry in entries]
            tick.acknowledged[feed] += sum(not entry.body[-1] for entry in entries)
        else:
            tick.counted["deliveries refused"] += 1

    async def _foreign(self, tick: Tick, feed: str) -> None:
        events = [
            Event(
                kind=Kind.DELIVERED,
                testimony=Testimony.ACCEPTED,
                message_id=f"foreign-{tick.n}-{n}",
                event_id="delivered",
                send_key=f"of-others-{tick.n}-{n}" if n else None,
                occurred_at=tick.at,
            )
            for n in range(FOREIGN)
        ]
        while not await self._store(feed, events):
            tick.counted["deliveries refused"] += 1
        tick.acknowledged[feed] += len(events)

    async def _store(self, feed: str, events: Sequence[Event]) -> bool:
        """Store a delivery; return whether it was acknowledged."""
        try:
            await self._inbox.store(feed, events)
        except (InboxBusy, InboxUnavailable):
            self._counters.note(feed, "later:busy")
            return False
        self._counters.note(feed, "stored")
        return True


def event(body: Sequence[Any]) -> Event:
    """Return the event of an entry of the agenda."""
    _, key, message_id, event_id, kind, testimony, at, recipient, _ = body
    return Event(
        kind=Kind(kind),
        testimony=Testimony(testimony),
        message_id=message_id,
        event_id=event_id,
        send_key=key,
        recipient=recipient,
        occurred_at=datetime.fromisoformat(at) if isinstance(at, str) else at,
        raw=b"{}",
    )
