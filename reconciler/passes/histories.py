# SPDX-License-Identifier: Apache-2.0
"""The SQL that reads how feeds spoke of the sends that are behind them: bounded samples, found through an index."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from reconciler.database.connection import Connection
from reconciler.rule.policy import Rules
from reconciler.rule.risk import REPORTED, UNREPORTED, Cause, usual_share
from reconciler.rule.silence import FeedHistory, Sighting

KEPT_FOR: Final = timedelta(minutes=5)
"""How long a history is used before it is read anew."""

SAMPLE: Final = 2000
"""Controls of a message class, and ambiguous sends of a feed, that make a history."""

MOST_CLASSES: Final = 20
"""Message classes, those with the newest controls, that make a feed's history; others are read when asked about."""


@dataclass(slots=True)
class Histories:
    """The histories of feeds, each read when it is asked for, and again after `kept_for`."""

    rules_for: Callable[[str, str], Rules]
    by_domain: Callable[[str], bool]
    """Whether a feed's first event comes from the recipient's server."""
    kept_for: timedelta = KEPT_FOR
    _kept: dict[str, FeedHistory] = field(default_factory=dict)
    _reading: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))

    async def of(
        self, connection: Connection, asked: Iterable[tuple[str, str]], now: datetime
    ) -> dict[str, FeedHistory]:
        """Return the histories of feeds as of `now`, give or take some minutes; `asked` are feeds and classes.

        Of pages that are judged side by side the later one may have read what the earlier one asks for.
        """
        classes: dict[str, set[str]] = {}
        for feed, message_class in asked:
            classes.setdefault(feed, set()).add(message_class)
        left = sorted(classes)
        while left:  # pages are judged side by side: each history is read once, and two at a time
            feed = next((feed for feed in left if not self._reading[feed].locked()), left[0])
            left.remove(feed)
            async with self._reading[feed]:
                await self._renew(connection, feed, classes[feed], now)
        return {feed: self._kept[feed] for feed in sorted(classes)}

    async def _renew(self, connection: Connection, feed: str, classes: set[str], now: datetime) -> None:
        kept = self._kept.get(feed)
        if kept is None or abs(now.timestamp() - kept.at) >= self.kept_for.total_seconds():
            newest = [row["message_class"] for row in await connection.fetch(CLASSES, feed, now, MOST_CLASSES)]
            self._kept[feed] = await self._read(connection, feed, newest, classes, now)
        elif missing := classes - kept.controls.keys():
            moment = datetime.fromtimestamp(kept.at, UTC)
            self._kept[feed] = kept.with_classes(await self._controls(connection, feed, missing, moment))

    async def _read(
        self, connection: Connection, feed: str, newest: Sequence[str], asked: Collection[str], now: datetime
    ) -> FeedHistory:
        rules = self.rules_for(feed, "")
        return FeedHistory(
            feed,
            now.timestamp(),
            self.by_domain(feed),
            await self._controls(connection, feed, {*newest, *asked}, now),
            await _proved(connection, feed, now),
            usual_share([(row["sends"], row["ambiguous"]) for row in await connection.fetch(SHARES, feed, now)]),
            await _causes(connection, feed, now - rules.give_up_after),
            newest,
        )

    async def _controls(
        self, connection: Connection, feed: str, classes: Collection[str], now: datetime
    ) -> dict[str, list[Sighting]]:
        until, of_domain = now - self.rules_for(feed, "").grace, self.by_domain(feed)
        return {name: await _controls(connection, feed, name, until, now, of_domain) for name in sorted(classes)}


# Two probes of the index a class.
CLASSES: Final = """
WITH RECURSIVE found AS (
    (SELECT message_class FROM control WHERE feed = $1 ORDER BY message_class LIMIT 1)
    UNION ALL
    SELECT (SELECT c.message_class FROM control c WHERE c.feed = $1 AND c.message_class > f.message_class
            ORDER BY c.message_class LIMIT 1)
    FROM found f WHERE f.message_class IS NOT NULL
)
SELECT f.message_class
FROM found f
CROSS JOIN LATERAL (SELECT c.first_claimed_at FROM control c WHERE c.feed = $1 AND c.message_class = f.message_class
                    ORDER BY c.first_claimed_at DESC LIMIT 1) AS newest
WHERE newest.first_claimed_at > $2::timestamptz - interval '30 days'
ORDER BY newest.first_claimed_at DESC LIMIT $3
"""

DAYS_CONTROLS: Final = """
SELECT count(*) FROM (SELECT FROM control WHERE feed = $1 AND message_class = $2
    AND first_claimed_at > $3::timestamptz - interval '1 day' AND first_claimed_at <= $3
    ORDER BY first_claimed_at DESC LIMIT $4 + 1) AS c
"""

# The events are asked where the row doesn't know when its feed first spoke of it.
NEWEST_CONTROLS: Final = """
SELECT date_part('epoch', c.first_claimed_at) AS at,
       date_part('epoch', CASE WHEN c.heard_at <= $4 THEN c.heard_at WHEN c.heard_at IS NULL THEN (
           SELECT min(e.received_at) FROM feed_event e
           WHERE e.wire_key = c.wire_key AND e.feed = $1 AND e.received_at <= $4
             AND (e.partition_at >= $3::timestamptz - interval '31 days' OR e.partition_at = '1970-01-01 00:00:00+00')
       ) END - c.first_claimed_at) AS lag, c.domain
FROM (SELECT wire_key, first_claimed_at, heard_at, CASE WHEN $6 THEN domain END AS domain FROM control
      WHERE feed = $1 AND message_class = $2
          AND first_claimed_at > $3::timestamptz - interval '30 days' AND first_claimed_at <= $3
      ORDER BY first_claimed_at DESC LIMIT $5) AS c
"""

# As many, 21 of each quarter of an hour: an outage of a minute must not be all of a busy feed's history.
SPREAD_CONTROLS: Final = """
SELECT date_part('epoch', c.first_claimed_at) AS at,
       date_part('epoch', CASE WHEN c.heard_at <= $4 THEN c.heard_at WHEN c.heard_at IS NULL THEN (
           SELECT min(e.received_at) FROM feed_event e
           WHERE e.wire_key = c.wire_key AND e.feed = $1 AND e.received_at <= $4
             AND (e.partition_at >= $3::timestamptz - interval '2 days' OR e.partition_at = '1970-01-01 00:00:00+00')
       ) END - c.first_claimed_at) AS lag, c.domain
FROM generate_series(1, 96) AS quarter
CROSS JOIN LATERAL (
    SELECT wire_key, first_claimed_at, heard_at, CASE WHEN $6 THEN domain END AS domain FROM control
    WHERE feed = $1 AND message_class = $2
        AND first_claimed_at > $3::timestamptz - quarter * interval '15 min'
        AND first_claimed_at <= $3::timestamptz - (quarter - 1) * interval '15 min'
    ORDER BY first_claimed_at DESC LIMIT $5 / 96 + 1) AS c
"""


async def _controls(
    connection: Connection, feed: str, message_class: str, until: datetime, now: datetime, of_domain: bool
) -> list[Sighting]:
    busy = await connection.fetchval(DAYS_CONTROLS, feed, message_class, until, SAMPLE) > SAMPLE
    statement = SPREAD_CONTROLS if busy else NEWEST_CONTROLS
    rows = await connection.fetch(statement, feed, message_class, until, now, SAMPLE, of_domain)
    return [Sighting(*row) for row in rows]


# In the order of their proof, those of the last day spread over it: on a busy feed the newest are all too young to tell
# what comes late. Only of one attempt can it be said when it was accepted. Those whose neighbourhood was found ill
# before they were heard of are left out: recent controls speak for such. A duplicate is one of which the feed spoke too
# late.
PROVED: Final = """
SELECT s.message_class, extract(epoch FROM s.claimed_at)::float8 AS at,
       extract(epoch FROM heard.at - s.claimed_at)::float8 AS lag,
       recipient_domain(s.recipient_key) AS domain
FROM (
    SELECT day.* FROM generate_series(1, 96) AS quarter
    CROSS JOIN LATERAL (
        SELECT * FROM send_log WHERE feed = $1 AND state = 'sent' AND answered_at IS NULL
            AND verdict_source IN ('feed', 'look-up')
            AND sent_at > $2::timestamptz - quarter * interval '15 min'
            AND sent_at <= $2::timestamptz - (quarter - 1) * interval '15 min'
        ORDER BY sent_at DESC LIMIT $3 / 96 + 1) AS day
    UNION ALL
    (SELECT * FROM send_log WHERE feed = $1 AND state = 'sent' AND answered_at IS NULL
         AND verdict_source IN ('feed', 'look-up') AND sent_at <= $2::timestamptz - interval '1 day'
     ORDER BY sent_at DESC LIMIT $3)
) AS s
CROSS JOIN LATERAL (
    SELECT min(e.received_at) AS at FROM feed_event e
    WHERE e.wire_key = s.wire_key AND e.feed = $1 AND e.received_at <= $2
) AS heard
WHERE s.submit_by < $2 AND s.attempt - s.not_sent_attempts = 1
  AND NOT EXISTS (SELECT FROM verdict v WHERE v.wire_key = s.wire_key AND (v.inputs ->> 'ill')::boolean)
UNION ALL
SELECT s.message_class, extract(epoch FROM s.first_claimed_at)::float8, NULL,
       recipient_domain(s.recipient_key)
FROM duplicate d JOIN send_log s USING (wire_key)
WHERE d.feed = $1 AND d.sort = 'duplicate' AND d.found_at BETWEEN $2::timestamptz - interval '30 days' AND $2
  AND EXISTS (SELECT FROM verdict v WHERE v.wire_key = d.wire_key AND v.action = 'released'
              AND v.reason IN ('absent', 'looked_up'))
"""


async def _proved(connection: Connection, feed: str, now: datetime) -> dict[str, list[Sighting]]:
    found: dict[str, list[Sighting]] = {}
    for message_class, *seen in await connection.fetch(PROVED, feed, now, SAMPLE):
        found.setdefault(message_class, []).append(Sighting(*seen))
    return found


# (sends, ambiguous ones) of 300 sends in each half hour of the last day, and in each 15 hours of the last month: at ten
# sends an hour a day is too little to tell what is usual. Indexes alone answer it: sends in flight count among the
# sends of the newest stretch, which makes the usual share no greater.
SHARES: Final = """
SELECT counted.sends, (
    SELECT count(*) FROM ambiguous a
    WHERE a.feed = $1 AND a.claimed_at > $2::timestamptz - n * stretch.long AND a.claimed_at <= counted.last
      AND a.submit_by < $2) AS ambiguous
FROM generate_series(1, 48) AS n
CROSS JOIN (VALUES (interval '30 min'), (interval '15 hours')) AS stretch(long)
CROSS JOIN LATERAL (
    SELECT count(*) AS sends, max(s.claimed_at) AS last
    FROM (
        SELECT claimed_at FROM send_log
        WHERE feed = $1 AND claimed_at > $2::timestamptz - n * stretch.long
          AND claimed_at <= $2::timestamptz - (n - 1) * stretch.long
        ORDER BY claimed_at LIMIT 300) AS s
) AS counted
"""

# A send that was never judged counts with the prior's start, which is NULL here.
CAUSES: Final = """
SELECT a.reported, count(*) FILTER (WHERE a.accepted) AS accepted, count(*) FILTER (WHERE NOT a.accepted) AS unheard,
       coalesce(sum(a.risk) FILTER (WHERE NOT a.accepted), 0)::float8 AS risk,
       count(*) FILTER (WHERE NOT a.accepted AND a.risk IS NULL) AS unjudged
FROM (
    SELECT coalesce(v.reported, s.cause IS NOT NULL) AS reported, v.risk,
           s.state = 'sent' AND s.verdict_source IN ('feed', 'look-up')
           OR EXISTS (SELECT FROM duplicate d WHERE d.wire_key = s.wire_key AND d.sort = 'duplicate') AS accepted
    FROM (SELECT * FROM ambiguous WHERE feed = $1 AND claimed_at < $2 ORDER BY claimed_at DESC LIMIT $3) AS s
    LEFT JOIN LATERAL (
        SELECT coalesce(risk, (inputs ->> 'risk')::float8) AS risk, (inputs ->> 'reported')::boolean AS reported
        FROM verdict WHERE wire_key = s.wire_key AND action IN ('released', 'held') AND inputs IS NOT NULL
        ORDER BY id DESC LIMIT 1) AS v ON true
    WHERE NOT (s.state = 'failed' AND s.verdict_source IN ('feed', 'look-up'))
      AND s.verdict_source IS DISTINCT FROM 'operator'
) AS a
GROUP BY a.reported
"""


async def _causes(connection: Connection, feed: str, until: datetime) -> dict[bool, Cause]:
    found = {}
    for row in await connection.fetch(CAUSES, feed, until, SAMPLE):
        start = (REPORTED if row["reported"] else UNREPORTED).start
        found[row["reported"]] = Cause(start, row["accepted"], row["unheard"], row["risk"] + start * row["unjudged"])
    return found
