# SPDX-License-Identifier: Apache-2.0
"""Reports on who sends what: an inventory of sources, and mail that two of them send to the same people.

They read and change nothing. Addresses are compared and never shown. A send counts at its latest claim, the one that is
looked at; an earlier one may be proved not sent. What was never given out (pending rows of an application that
enqueues, of a campaign that was cancelled) is no mail.

What is looked at is bounded, whatever the size of the log: the time is cut into parts, and of each part the newest
sends of each feed are read through the index of its claims. So a busy feed hides no other one, and no day the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from reconciler.database.connection import Connection

PARTS: Final = 24
RUN: Final = 5_000
"""Of each part of the time, at most so many of a feed's sends are looked at."""

MOST_SOURCES: Final = 10
"""A recipient who got one class of mail from more sources than that is passed over: they name jobs, not systems."""


@dataclass(frozen=True, slots=True)
class Looked:
    """How much of a feed was looked at."""

    feed: str
    sends: int
    with_recipient: int
    """Those to one known recipient: no others can be compared."""
    sampled: bool
    """True: there were more sends, so that counts are those of a sample and what is rare may be missing."""


# The feeds are found by leaps through the index of claims; those that are no longer configured are among them.
LOOKED: Final = """
WITH RECURSIVE known(feed) AS (
    SELECT min(feed) FROM send_log WHERE claimed_at IS NOT NULL
    UNION ALL
    SELECT (SELECT min(l.feed) FROM send_log l WHERE l.claimed_at IS NOT NULL AND l.feed > k.feed)
    FROM known k WHERE k.feed IS NOT NULL
)
SELECT k.feed, sum(s.sends)::bigint AS sends, sum(s.with_recipient)::bigint AS with_recipient,
       bool_or(s.sends = $4) AS sampled
FROM known k
CROSS JOIN generate_series(1, $3::int) AS part
CROSS JOIN LATERAL (
    SELECT count(*) AS sends, count(recipient_key) AS with_recipient FROM (
        SELECT l.recipient_key FROM send_log l
        WHERE l.feed = k.feed
          AND l.claimed_at > $1::timestamptz + (statement_timestamp() - $1) * (part - 1) / $3::int
          AND l.claimed_at <= $1::timestamptz + (statement_timestamp() - $1) * part / $3::int
        ORDER BY l.claimed_at DESC LIMIT $4
    ) AS newest
) AS s
WHERE k.feed IS NOT NULL AND ($2::text IS NULL OR k.feed = $2)
GROUP BY k.feed HAVING sum(s.sends) > 0
ORDER BY k.feed
"""


async def _looked_at(connection: Connection, since: datetime, feed: str | None, run: int) -> list[Looked]:
    return [Looked(**row) for row in await connection.fetch(LOOKED, since, feed, PARTS, run)]


@dataclass(frozen=True, slots=True)
class Sender:
    """What one source sends: a class of messages through a feed."""

    source: str | None
    """None: the sends name none."""
    message_class: str
    feed: str
    sends: int
    """All that were given out, of those looked at."""
    sent: int
    failed: int
    undecided: int
    """Claimed, or free for another attempt."""
    first_at: datetime
    """When the first of them was claimed (each by its latest claim)."""
    last_at: datetime
    """When the last one was."""


@dataclass(frozen=True, slots=True)
class Senders:
    """Who sends what."""

    looked_at: list[Looked]
    senders: list[Sender]


SENDERS: Final = """
SELECT s.source, s.message_class, asked.feed, count(*) AS sends, count(*) FILTER (WHERE s.state = 'sent') AS sent,
       count(*) FILTER (WHERE s.state = 'failed') AS failed,
       count(*) FILTER (WHERE s.state IN ('claimed', 'pending')) AS undecided,
       min(s.at) AS first_at, max(s.at) AS last_at
FROM unnest($1::text[]) AS asked(feed)
CROSS JOIN generate_series(1, $3::int) AS part
CROSS JOIN LATERAL (
    SELECT nullif(l.source, '') AS source, l.message_class, l.state, l.claimed_at AS at FROM send_log l
    WHERE l.feed = asked.feed
      AND l.claimed_at > $2::timestamptz + (statement_timestamp() - $2) * (part - 1) / $3::int
      AND l.claimed_at <= $2::timestamptz + (statement_timestamp() - $2) * part / $3::int
    ORDER BY l.claimed_at DESC LIMIT $4
) AS s
GROUP BY 1, 2, 3
ORDER BY source NULLS FIRST, message_class, feed LIMIT $5
"""


async def senders(connection: Connection, since: datetime, feed: str | None, limit: int, run: int = RUN) -> Senders:
    """Return who sent what since then, by source, message class and feed; sends without a source come first."""
    looked_at = await _looked_at(connection, since, feed, run)
    rows = await connection.fetch(SENDERS, [one.feed for one in looked_at], since, PARTS, run, limit)
    return Senders(looked_at, [Sender(**row) for row in rows])


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two sources that sent one class of message to the same people, one soon after the other."""

    message_class: str
    sources: list[str | None]
    """The two; None stands for the sends that name none."""
    recipients: int
    times: int
    """How often; each is a mail of the one soon after a mail of the other."""
    first_at: datetime
    last_at: datetime
    examples: list[list[str]]
    """The wire keys of the newest three pairs."""


@dataclass(frozen=True, slots=True)
class Overlaps:
    """What a look at mail to the same people found."""

    looked_at: list[Looked]
    overlaps: list[Overlap]


# Sends that were sent, or were given out and may have been: neither what failed nor what is free again. A recipient's
# sends fall into runs, each send soon after the one before it, whatever their sources; two that lie close are of one
# run, so that what lies alone goes no further. For each two sources of a run their sends are put in one line, where a
# change of the source between neighbours is what is looked for: two that lie close have such a change between them. So
# the cost grows with the sends that lie close, not their square. The case of an address makes no difference.
OVERLAPS: Final = """
WITH sample AS MATERIALIZED (
    SELECT s.* FROM unnest($1::text[]) AS asked(feed)
    CROSS JOIN generate_series(1, $3::int) AS part
    CROSS JOIN LATERAL (
        SELECT l.wire_key, l.message_class, lower(l.recipient_key) AS recipient, coalesce(l.source, '') AS source,
               l.state, l.claimed_at AS at
        FROM send_log l
        WHERE l.feed = asked.feed
          AND l.claimed_at > $2::timestamptz + (statement_timestamp() - $2) * (part - 1) / $3::int
          AND l.claimed_at <= $2::timestamptz + (statement_timestamp() - $2) * part / $3::int
        ORDER BY l.claimed_at DESC LIMIT $4
    ) AS s
    WHERE s.recipient IS NOT NULL AND s.state IN ('sent', 'claimed')
), hit AS (
    SELECT message_class, recipient FROM sample
    GROUP BY message_class, recipient HAVING count(DISTINCT source) BETWEEN 2 AND $7
), stepped AS (
    SELECT s.*, s.at - lag(s.at) OVER (PARTITION BY message_class, recipient ORDER BY s.at, s.wire_key) AS step
    FROM sample s JOIN hit USING (message_class, recipient)
), near AS MATERIALIZED (
    SELECT *, count(*) FILTER (WHERE step > $5::interval)
              OVER (PARTITION BY message_class, recipient ORDER BY at, wire_key) AS run
    FROM stepped
), mixed AS MATERIALIZED (
    SELECT message_class, recipient, run, array_agg(DISTINCT source) AS sources
    FROM near GROUP BY message_class, recipient, run HAVING count(DISTINCT source) > 1
), lines AS (
    SELECT m.message_class, m.recipient, one, other, s.source, s.at, s.wire_key,
           lag(s.source) OVER line AS source_before, lag(s.at) OVER line AS before,
           lag(s.wire_key) OVER line AS key_before
    FROM mixed m
    CROSS JOIN unnest(m.sources) AS one
    JOIN unnest(m.sources) AS other ON one < other
    JOIN near s ON s.message_class = m.message_class AND s.recipient = m.recipient AND s.run = m.run
               AND s.source IN (one, other)
    WINDOW line AS (PARTITION BY m.message_class, m.recipient, m.run, one, other ORDER BY s.at, s.wire_key)
)
SELECT message_class, ARRAY[nullif(one, ''), other] AS sources, count(DISTINCT recipient) AS recipients,
       count(*) AS times, min(before) AS first_at, max(at) AS last_at,
       (array_agg(ARRAY[key_before, wire_key] ORDER BY at DESC, wire_key))[1:3] AS examples
FROM lines
WHERE source_before <> source AND at - before <= $5::interval
GROUP BY message_class, one, other
ORDER BY recipients DESC, times DESC, last_at DESC, message_class, one, other LIMIT $6
"""


async def overlaps(
    connection: Connection, since: datetime, feed: str | None, within: timedelta, limit: int, run: int = RUN
) -> Overlaps:
    """Return the pairs of sources that wrote to the same people since then, at most `within` apart, the worst first."""
    looked_at = await _looked_at(connection, since, feed, run)
    names = [one.feed for one in looked_at]
    rows = await connection.fetch(OVERLAPS, names, since, PARTS, run, within, limit, MOST_SOURCES)
    return Overlaps(looked_at, [Overlap(**row) for row in rows])


def sampled(looked_at: Iterable[Looked]) -> list[str]:
    """Return the feeds of which only a sample was looked at."""
    return [one.feed for one in looked_at if one.sampled]
