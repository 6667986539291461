# SPDX-License-Identifier: Apache-2.0
"""Report on keys that drift: one message under several keys, and messages that a key of another one swallowed.

It reads and changes nothing. Addresses are compared and never shown. What it looks at is bounded, whatever the size of
the log: the newest claims of each feed, and the newest sends that were asked for again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from reconciler.database.connection import Connection

MOST_CLAIMS: Final = 50_000
"""Of each feed, at most so many of its newest claims are looked at."""

MOST_SWALLOWED: Final = 100_000
"""At most so many of the sends last asked for again are looked at."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """Sends to one address with equal content, each under a key of its own, one soon after the other."""

    message_class: str
    feeds: list[str]
    n: int
    sent: int
    """How many of them were sent: more than one is mail that came twice."""
    first_at: datetime
    last_at: datetime
    wire_keys: list[str]
    """The first five."""


@dataclass(frozen=True, slots=True)
class Swallowed:
    """A send that was asked for again, and so was not sent again."""

    wire_key: str
    feed: str
    message_class: str
    asked_as: str
    """`already_sent`: long after it had been sent; `key_reused`: with other content, or under another send key."""
    n: int
    """How often; what was asked within the same minute is counted once."""
    sent_at: datetime | None
    first_at: datetime
    asked_at: datetime
    """The last time."""


@dataclass(frozen=True, slots=True)
class Drift:
    """What a look at keys found."""

    looked_at: int
    """Claims."""
    compared: int
    """Those of them whose recipient and fingerprint are known: no others can be compared."""
    repeated: list[Repeated]
    swallowed: list[Swallowed]


# Bounded by the index of a feed's claims. A send claimed twice counts from its first claim, when its key was made; the
# case of an address is one of the ways in which keys drift.
REPEATED: Final = """
WITH known AS (
    SELECT s.* FROM unnest($1::text[]) AS asked(feed)
    CROSS JOIN LATERAL (
        SELECT l.wire_key, l.feed, l.message_class, lower(l.recipient_key) AS recipient, l.fingerprint, l.state,
               coalesce(l.first_claimed_at, l.claimed_at) AS at
        FROM send_log l
        WHERE l.feed = asked.feed AND l.claimed_at > $2
        ORDER BY l.claimed_at DESC LIMIT $3
    ) AS s
    WHERE s.recipient IS NOT NULL AND s.fingerprint IS NOT NULL
), spaced AS (
    SELECT *, at - lag(at) OVER same > $4::interval AS apart
    FROM known WINDOW same AS (PARTITION BY message_class, recipient, fingerprint ORDER BY at, wire_key)
), runs AS (
    SELECT *, count(*) FILTER (WHERE apart) OVER same AS run
    FROM spaced WINDOW same AS (PARTITION BY message_class, recipient, fingerprint ORDER BY at, wire_key)
)
SELECT message_class, array_agg(DISTINCT feed) AS feeds, count(*) AS n, count(*) FILTER (WHERE state = 'sent') AS sent,
       min(at) AS first_at, max(at) AS last_at, (array_agg(wire_key ORDER BY at, wire_key))[1:5] AS wire_keys
FROM runs
GROUP BY message_class, recipient, fingerprint, run HAVING count(*) > 1
ORDER BY sent DESC, n DESC, last_at DESC, wire_keys LIMIT $5
"""


async def _repeated(
    connection: Connection, feeds: list[str], since: datetime, within: timedelta, limit: int
) -> list[Repeated]:
    return [Repeated(**row) for row in await connection.fetch(REPEATED, feeds, since, MOST_CLAIMS, within, limit)]


COUNT_CLAIMS: Final = """
SELECT count(*) AS looked_at,
       count(*) FILTER (WHERE s.recipient_key IS NOT NULL AND s.fingerprint IS NOT NULL) AS compared
FROM unnest($1::text[]) AS asked(feed)
CROSS JOIN LATERAL (
    SELECT l.recipient_key, l.fingerprint FROM send_log l
    WHERE l.feed = asked.feed AND l.claimed_at > $2
    ORDER BY l.claimed_at DESC LIMIT $3
) AS s
"""


async def _counts(connection: Connection, feeds: list[str], since: datetime) -> tuple[int, int]:
    (row,) = await connection.fetch(COUNT_CLAIMS, feeds, since, MOST_CLAIMS)
    return row["looked_at"], row["compared"]


SWALLOWED: Final = """
WITH newest AS (
    SELECT * FROM asked_again WHERE asked_at > $2 AND asked_as <> 'failed' ORDER BY asked_at DESC LIMIT $3
)
SELECT a.wire_key, s.feed, s.message_class, a.asked_as, a.n, s.sent_at, a.first_at, a.asked_at
FROM newest a JOIN send_log s USING (wire_key)
WHERE s.feed = ANY ($1)
ORDER BY a.asked_at DESC, a.wire_key LIMIT $4
"""


async def _swallowed(connection: Connection, feeds: list[str], since: datetime, limit: int) -> list[Swallowed]:
    return [Swallowed(**row) for row in await connection.fetch(SWALLOWED, feeds, since, MOST_SWALLOWED, limit)]


async def key_drift(
    connection: Connection, feeds: Iterable[str], since: datetime, within: timedelta, limit: int
) -> Drift:
    """Return what the sends of these feeds claimed, and asked for again, since then say of their keys.

    Equal messages count as one where each was claimed first at most `within` after the one before. The worst come
    first, at most `limit` of each list.
    """
    names = sorted(feeds)
    looked_at, compared = await _counts(connection, names, since)
    repeated = await _repeated(connection, names, since, within, limit)
    return Drift(looked_at, compared, repeated, await _swallowed(connection, names, since, limit))
