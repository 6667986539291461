# SPDX-License-Identifier: Apache-2.0
"""Reports on what no single send shows: recorded duplicates, sends that vanished, events that belong to nothing.

They read and change nothing. Each is bounded, whatever the size of the log: by a list's length or a sample's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import asyncpg

from reconciler import metrics
from reconciler.configuration.settings import Settings
from reconciler.database.connection import Connection, database_clock

OLDER: Final = timedelta(hours=6)
"""A send of which nothing was heard for so long is not just slow. The grace of the feed where that is longer."""

VANISHED_SINCE: Final = timedelta(hours=24)
"""How far back vanished sends are looked for, unless it is said."""

RUNS: Final = 24
RUN: Final = 100
"""The time looked at is cut into so many parts, and of each the newest so many sends of a feed are looked at."""

MOST_EVENTS: Final = 100_000
MOST_DUPLICATES: Final = 1000


@dataclass(frozen=True, slots=True)
class RecordedDuplicate:
    """A duplicate as it was recorded."""

    wire_key: str
    send_key: str | None
    """None where the row is gone."""
    sort: str
    feed: str
    found_at: datetime
    because: str
    acceptances: list[dict[str, Any]]


DUPLICATES: Final = """
SELECT d.wire_key, s.send_key, d.sort, d.feed, d.found_at, d.evidence
FROM duplicate d LEFT JOIN send_log s USING (wire_key)
WHERE d.found_at > $1 AND ($2::text IS NULL OR d.feed = $2)
ORDER BY d.found_at DESC, d.wire_key LIMIT $3
"""


async def recorded_duplicates(connection: Connection, since: datetime, feed: str | None) -> list[RecordedDuplicate]:
    """Return the duplicates recorded since then, the newest first, at most MOST_DUPLICATES."""
    rows = await connection.fetch(DUPLICATES, since, feed, MOST_DUPLICATES)
    return [_recorded(row) for row in rows]


def _recorded(row: asyncpg.Record) -> RecordedDuplicate:
    values = dict(row)
    evidence = json.loads(values.pop("evidence"))
    return RecordedDuplicate(**values, because=evidence["because"], acceptances=evidence["acceptances"])


@dataclass(frozen=True, slots=True)
class Vanished:
    """Of one feed and message class: answered sends of which nothing was heard though it should have been."""

    feed: str
    message_class: str
    sends: int
    """Answered sends that were looked at."""
    unheard: int
    """Those of them of which no feed ever spoke."""
    vanished: int
    """Those again whose neighbours were heard of."""
    oldest: datetime
    newest: datetime
    wire_keys: list[str]
    """Some of the vanished, the newest first."""

    @property
    def share(self) -> float:
        """How many of those looked at have vanished, 0 to 1."""
        return self.vanished / self.sends


# Runs of neighbours, spread over the time. Heard of: an event by our key, or by the message id where it bears no key.
# A send has vanished where at least four of the six sends nearest to it, three on each side and within an hour, were
# heard of: at the edge of a time in which a feed was deaf it is three at most.
VANISHED: Final = """
WITH sample AS MATERIALIZED (
    SELECT s.wire_key, s.feed, s.message_class, s.claimed_at, CASE
        WHEN EXISTS (
            SELECT FROM feed_event e
            WHERE e.wire_key = s.wire_key
              AND (e.partition_at >= s.claimed_at - interval '1 day' OR e.partition_at = '1970-01-01 00:00:00+00')
        ) THEN 1
        WHEN EXISTS (
            SELECT FROM provider_event e
            WHERE e.wire_key IN (stand_in_key(s.feed, s.provider_message_id), stand_in_key(s.feed, s.known_message_id))
              AND (e.recipient IS NULL OR s.recipient_key IS NULL OR e.recipient = s.recipient_key)
        ) THEN 1 ELSE 0 END AS heard
    FROM unnest($1::text[], $2::timestamptz[]) AS asked(feed, until)
    CROSS JOIN generate_series(1, $4::int) AS part
    CROSS JOIN LATERAL (
        SELECT l.* FROM send_log l
        WHERE l.feed = asked.feed AND l.answered_at IS NOT NULL AND l.attempt = 1
          AND (l.recipient IS NULL OR l.recipient_key IS NOT NULL)
          AND l.claimed_at > $3::timestamptz + (asked.until - $3) * (part - 1) / $4::int
          AND l.claimed_at <= $3::timestamptz + (asked.until - $3) * part / $4::int
        ORDER BY l.claimed_at DESC LIMIT $5
    ) AS s
), near AS (
    SELECT *, sum(heard) OVER (beside ROWS BETWEEN 3 PRECEDING AND 3 FOLLOWING) AS heard_near,
           lag(claimed_at, 3) OVER beside AS before, lead(claimed_at, 3) OVER beside AS after
    FROM sample WINDOW beside AS (PARTITION BY feed ORDER BY claimed_at, wire_key)
), judged AS (
    SELECT *, heard = 0 AND heard_near >= 4 AND before > claimed_at - interval '1 hour'
              AND after < claimed_at + interval '1 hour' AS vanished
    FROM near
)
SELECT feed, message_class, count(*) AS sends, count(*) FILTER (WHERE heard = 0) AS unheard,
       count(*) FILTER (WHERE vanished) AS vanished, min(claimed_at) AS oldest, max(claimed_at) AS newest,
       coalesce((array_agg(wire_key ORDER BY claimed_at DESC) FILTER (WHERE vanished))[1:5], '{}') AS wire_keys
FROM judged
GROUP BY feed, message_class
ORDER BY feed, message_class
"""


async def vanished_sends(
    connection: Connection, until: dict[str, datetime], since: datetime, run: int = RUN
) -> list[Vanished]:
    """Return for each feed named and each class of its sends how many have vanished, whose sends lie after `since`.

    `until` says for each feed which sends are old enough: those before that time.
    """
    asked = sorted((feed, at) for feed, at in until.items() if at > since)
    names, times = [feed for feed, _ in asked], [at for _, at in asked]
    return [Vanished(**row) for row in await connection.fetch(VANISHED, names, times, since, RUNS, run)]


def old_enough(
    settings: Settings, feeds: Iterable[str], now: datetime, older: timedelta = OLDER
) -> dict[str, datetime]:
    """Return for each feed before which time a send should have been heard of: `older`, or its longest grace."""
    classes = ("", *settings.classes)
    return {feed: now - max(older, *(settings.rules_for(feed, name).grace for name in classes)) for feed in feeds}


async def read_vanished(connection: Connection, settings: Settings) -> None:
    """Set the figures of vanished sends of the configured feeds."""
    now = await database_clock(connection)
    until = old_enough(settings, settings.feeds, now)
    metrics.VANISHED.clear()
    metrics.VANISHED_OF.clear()
    found = await vanished_sends(connection, until, now - VANISHED_SINCE)
    for group in metrics.largest(found, lambda group: group.sends):
        metrics.VANISHED.labels(group.feed, group.message_class).set(group.vanished)
        metrics.VANISHED_OF.labels(group.feed, group.message_class).set(group.sends)


@dataclass(frozen=True, slots=True)
class Unknown:
    """Events of one feed and kind that belong to no send."""

    feed: str
    key: str
    """`unknown`: they bear a key that no row has; `none`: they bear none, and no row has their message id."""
    kind: str
    """As events are called; `answer` where a sender told an answer."""
    events: int
    newest: datetime
    examples: list[str]
    """Some of the keys, or of the message ids where there is no key."""


@dataclass(frozen=True, slots=True)
class UnknownEvents:
    """What a look at events found."""

    looked_at: int
    """At most MOST_EVENTS: there may have been more."""
    groups: list[Unknown]


# Bounded by the events' index by time of storing, and the newest where there are more.
UNKNOWN: Final = """
WITH sample AS MATERIALIZED (
    SELECT feed, wire_key, message_id, CASE WHEN source = 'sender' THEN 'answer' ELSE kind END AS kind, received_at,
           wire_key NOT LIKE '~%' AS keyed
    FROM provider_event
    WHERE received_at > $1 AND ($2::text IS NULL OR feed = $2)
    ORDER BY received_at DESC LIMIT $3
), unknown AS (
    SELECT * FROM sample e
    WHERE CASE WHEN keyed THEN NOT EXISTS (SELECT FROM send_log s WHERE s.wire_key = e.wire_key)
        ELSE NOT EXISTS (SELECT FROM send_log s WHERE s.feed = e.feed AND s.provider_message_id = e.message_id)
         AND NOT EXISTS (SELECT FROM send_log s WHERE s.feed = e.feed AND s.known_message_id = e.message_id) END
)
SELECT feed, CASE WHEN keyed THEN 'unknown' ELSE 'none' END AS key, kind, count(*) AS events,
       max(received_at) AS newest,
       (array_agg(DISTINCT CASE WHEN keyed THEN wire_key ELSE message_id END))[1:3] AS examples
FROM unknown
GROUP BY feed, keyed, kind
ORDER BY feed, keyed DESC, events DESC, kind
"""

COUNT_EVENTS: Final = """
SELECT count(*) FROM (
    SELECT FROM provider_event WHERE received_at > $1 AND ($2::text IS NULL OR feed = $2)
    ORDER BY received_at DESC LIMIT $3
) AS sample
"""


async def unknown_events(connection: Connection, since: datetime, feed: str | None) -> UnknownEvents:
    """Return the events stored since then that belong to no send, by feed, key and kind."""
    groups = [Unknown(**row) for row in await connection.fetch(UNKNOWN, since, feed, MOST_EVENTS)]
    return UnknownEvents(await connection.fetchval(COUNT_EVENTS, since, feed, MOST_EVENTS), groups)
