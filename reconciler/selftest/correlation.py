# SPDX-License-Identifier: Apache-2.0
"""Finds out whether a provider brings our key back: one stamped message, and the events that come of it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import asyncpg

from webhooks.provider import Feed, Stamp
from webhooks.registry import PROVIDERS

POLL_SECONDS: Final = 0.5
LAST_KINDS: Final = ("delivered", "bounced", "rejected", "failed", "complained")
"""After one of these little more is to be expected."""

LINGER_SECONDS: Final = 15.0
"""How long events are still waited for after it."""


@dataclass(frozen=True, slots=True)
class Marked:
    """The message to be sent: what its sender has to merge into the call."""

    wire_key: str
    stamp: Stamp
    since: datetime
    """When it was made, by the database's clock: no event of it is older."""


@dataclass(frozen=True, slots=True)
class Heard:
    """One event of the message."""

    kind: str
    testimony: str
    after_seconds: float
    key_came_back: bool
    message_id: str | None


MARK: Final = "SELECT wire_key($1) AS wire_key, clock_timestamp() AS since"


async def marked(pool: asyncpg.Pool, feed: Feed) -> Marked:
    """Return a fresh key of this installation and its stamp."""
    row = await pool.fetchrow(MARK, f"selftest-{secrets.token_hex(8)}")
    assert row is not None  # noqa: S101 - it always returns a row
    return Marked(row["wire_key"], PROVIDERS[feed.provider].stamp(row["wire_key"]), row["since"])


# Events without a key count where their message had one in another event, or was given its id by us.
EVENTS: Final = """
SELECT kind, testimony, message_id, event_id, wire_key = $2 AS keyed,
       extract(epoch FROM received_at - $3)::float8 AS after_seconds
FROM provider_event
WHERE feed = $1 AND source <> 'sender' AND received_at >= $3 AND (
    wire_key = $2 OR message_id = $4
    OR message_id IN (SELECT message_id FROM provider_event WHERE feed = $1 AND wire_key = $2))
ORDER BY received_at, event_id
"""


async def listen(pool: asyncpg.Pool, feed: Feed, message: Marked, wait: float) -> AsyncIterator[Heard]:
    """Yield the message's events as they come, until a while after the one that ends its story, or for `wait` seconds.

    The running receiver stores them; this looks at the database.
    """
    end = time.monotonic() + wait
    told: set[tuple[str, str]] = set()
    while time.monotonic() < end:
        rows = await pool.fetch(EVENTS, feed.name, message.wire_key, message.since, message.stamp.message_id)
        for row in rows:
            if (identity := (row["message_id"], row["event_id"])) in told:
                continue
            told.add(identity)
            yield Heard(row["kind"], row["testimony"], row["after_seconds"], row["keyed"], row["message_id"])
            if row["kind"] in LAST_KINDS:
                end = min(end, time.monotonic() + LINGER_SECONDS)
        await asyncio.sleep(POLL_SECONDS)
