# SPDX-License-Identifier: Apache-2.0
"""Reads stored events anew that no adapter knew when they came: a newer one may. Repeating it changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

import asyncpg
import msgspec

from reconciler.database.connection import Connection, database_clock
from reconciler.filling.common import BATCH, filling, opened_inbox, store
from webhooks.event import Event, Kind
from webhooks.inbox import Inbox
from webhooks.provider import Delivery, Feed, Provider
from webhooks.registry import PROVIDERS
from webhooks.rows import Key, Rest, RowMaker
from webhooks.writer import read_layout

STEP: Final = timedelta(hours=6)
"""How much of the time of storing one statement reads: those in question are few among many."""


@dataclass
class Reparsed:
    """What became of a feed's events of unknown kinds."""

    unknown: int = 0
    """How many there were."""
    known: Counter[str] = field(default_factory=Counter)
    """Those that are known now, by kind."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """An event as it is read now, and its row as it would be stored now."""

    event: Event
    key: Key
    rest: Rest


async def reparse(
    pool: asyncpg.Pool, feed: Feed, *, dry_run: bool = False, providers: Mapping[str, Provider] = PROVIDERS
) -> Reparsed:
    """Read a feed's events of unknown kinds anew and return what became of them. Raises UserError, database errors.

    Those of a look-up or back-fill have another form: ask again. `dry_run` reads and changes nothing.
    """
    done = Reparsed()
    async with AsyncExitStack() as stack:
        if not dry_run:
            await stack.enter_async_context(filling(pool, feed.name))
        inbox = None if dry_run else await stack.enter_async_context(opened_inbox(pool))
        connection = await stack.enter_async_context(pool.acquire())
        maker = await read_layout(connection)
        async for rows in _unknown(connection, feed.name):
            found = {_key(row): now for row in rows if (now := _read(row, feed, providers[feed.provider], maker))}
            done.unknown += len(rows)
            done.known.update(now.event.kind for now in found.values())
            if inbox:
                await _keep(connection, inbox, feed.name, found)
    return done


SINCE: Final = "SELECT min(received_at) FROM provider_event"
UNKNOWN: Final = """
SELECT wire_key, message_id, event_id, feed, partition_at, received_at, raw
FROM provider_event
WHERE feed = $1 AND kind = 'unknown' AND raw <> '' AND source IN ('http', 'sqs', 'replay')
  AND received_at >= $2 AND received_at < $6 AND (received_at, wire_key, message_id, event_id) > ($2, $3, $4, $5)
ORDER BY received_at, wire_key, message_id, event_id
LIMIT $7
"""


async def _unknown(connection: Connection, feed: str) -> AsyncIterator[list[asyncpg.Record]]:
    since, until = await connection.fetchval(SINCE), await database_clock(connection)
    while since and since < until:
        end, after = since + STEP, (since, "", "", "")
        while rows := await connection.fetch(UNKNOWN, feed, *after, end, BATCH):
            yield rows
            after = rows[-1]["received_at"], *_key(rows[-1])[:3]
        since = end


def _key(row: asyncpg.Record) -> Key:
    return row["wire_key"], row["message_id"], row["event_id"], row["feed"], row["partition_at"]


def _read(row: asyncpg.Record, feed: Feed, provider: Provider, maker: RowMaker) -> _Reading | None:
    """Return what a row's bytes say now; None: nothing more than they did."""
    try:
        events = provider.parse(Delivery(bytes(row["raw"]), {})).events
    except Exception:  # noqa: BLE001 - one that our adapter fails at doesn't stop the others
        return None
    if len(events) == 1:  # its id may have been a header, which is not kept
        events = [msgspec.structs.replace(events[0], event_id=row["event_id"])]
    for event in events:
        ((key, rest),) = maker.make(feed.name, [event], "replay")[0].items()
        if event.kind is not Kind.UNKNOWN and key[2] == row["event_id"]:
            return _Reading(event, key, rest)
    return None


CORRECT: Final = """
UPDATE provider_event SET kind = $6, testimony = $7, recipient = $8, reason = $9
WHERE wire_key = $1 AND message_id = $2 AND event_id = $3 AND feed = $4 AND partition_at = $5
  AND kind = 'unknown' AND testimony = 'none'
"""
TELL: Final = "SELECT pg_notify('evidence', '')"


async def _keep(connection: Connection, inbox: Inbox, feed: str, found: Mapping[Key, _Reading]) -> None:
    """Correct the rows; of an event that shows its key, message or time only now, store another one."""
    others = [now.event for key, now in found.items() if now.key != key]
    await store(inbox, feed, others, "replay")
    same = [(*key, *now.rest[1:5]) for key, now in sorted(found.items()) if now.key == key]
    await connection.executemany(CORRECT, same)
    await connection.execute(TELL)
