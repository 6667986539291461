# SPDX-License-Identifier: Apache-2.0
"""The SQL that measures how far a feed's silence can be trusted: its history, and the sends around claims.

What it costs grows with the claims and feeds that are asked about, never with the log: samples are bounded and found
through an index, histories are kept for some minutes, and claims of one minute share their neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

import asyncpg

from reconciler.history import Stratum
from reconciler.ledger import Connection
from reconciler.policy import Rules
from reconciler.risk import CROWDS, REPORTED, UNREPORTED, Cause, usual_share
from reconciler.silence import (
    Around,
    Bucket,
    Claim,
    Crowd,
    Density,
    FeedHistory,
    Judged,
    Limits,
    Sighting,
    buckets,
    slot,
)

KEPT_FOR: Final = timedelta(minutes=5)
"""How long a history is used before it is read anew."""

SAMPLE: Final = 2000
"""Controls of a message class, and ambiguous sends of a feed, that make a history."""

MOST_HEARD: Final = 5000
"""Controls of a feed of which it is remembered when they were heard of."""


@dataclass(slots=True)
class Histories:
    """The histories of feeds, each read when it is asked for, and again after `kept_for`."""

    rules_for: Callable[[str, str], Rules]
    by_domain: Callable[[str], bool]
    """Whether a feed's first event comes from the recipient's server."""
    kept_for: timedelta = KEPT_FOR
    _kept: dict[str, FeedHistory] = field(default_factory=dict)

    async def of(self, connection: Connection, feeds: Iterable[str], now: datetime) -> dict[str, FeedHistory]:
        """Return the histories of feeds as of `now`, or of some minutes before."""
        found = {}
        for feed in sorted(feeds):
            kept = self._kept.get(feed)
            if kept is None or not 0 <= now.timestamp() - kept.at < self.kept_for.total_seconds():
                kept = self._kept[feed] = await self._read(connection, feed, now)
            found[feed] = kept
        return found

    async def _read(self, connection: Connection, feed: str, now: datetime) -> FeedHistory:
        grace = self.rules_for(feed, "").grace
        controls = {
            row["message_class"]: await _controls(connection, feed, row["message_class"], now - grace, now)
            for row in await connection.fetch(CLASSES, feed)
        }
        return FeedHistory(
            feed,
            now.timestamp(),
            self.by_domain(feed),
            controls,
            await _proved(connection, feed, now),
            usual_share([(row["sends"], row["ambiguous"]) for row in await connection.fetch(SHARES, feed, now)]),
            await _causes(connection, feed, now - self.rules_for(feed, "").give_up_after),
        )


# One probe of the index a class.
CLASSES: Final = """
WITH RECURSIVE found AS (
    (SELECT message_class FROM control WHERE feed = $1 ORDER BY message_class LIMIT 1)
    UNION ALL
    SELECT (SELECT c.message_class FROM control c WHERE c.feed = $1 AND c.message_class > f.message_class
            ORDER BY c.message_class LIMIT 1)
    FROM found f WHERE f.message_class IS NOT NULL
)
SELECT message_class FROM found WHERE message_class IS NOT NULL
"""

DAYS_CONTROLS: Final = """
SELECT count(*) FROM (SELECT FROM control WHERE feed = $1 AND message_class = $2
    AND first_claimed_at > $3::timestamptz - interval '1 day' AND first_claimed_at <= $3 LIMIT $4 + 1) AS c
"""

NEWEST_CONTROLS: Final = """
SELECT extract(epoch FROM c.first_claimed_at)::float8 AS at,
       extract(epoch FROM heard.at - c.first_claimed_at)::float8 AS lag,
       substring(c.recipient_key FROM '@([^@]*)$') AS domain
FROM (SELECT * FROM control WHERE feed = $1 AND message_class = $2
          AND first_claimed_at > $3::timestamptz - interval '30 days' AND first_claimed_at <= $3
      ORDER BY first_claimed_at DESC LIMIT $5) AS c
CROSS JOIN LATERAL (
    SELECT min(e.received_at) AS at FROM provider_event e
    WHERE e.wire_key = c.wire_key AND e.feed = $1 AND e.source IN ('http', 'sqs', 'replay', 'back-fill')
      AND (e.partition_at >= $3::timestamptz - interval '31 days' OR e.partition_at = '1970-01-01 00:00:00+00')
      AND e.received_at <= $4
) AS heard
"""

# As many, 21 of each quarter of an hour: an outage of a minute must not be all of a busy feed's history.
SPREAD_CONTROLS: Final = """
SELECT extract(epoch FROM c.first_claimed_at)::float8 AS at,
       extract(epoch FROM heard.at - c.first_claimed_at)::float8 AS lag,
       substring(c.recipient_key FROM '@([^@]*)$') AS domain
FROM generate_series(1, 96) AS quarter
CROSS JOIN LATERAL (
    SELECT * FROM control WHERE feed = $1 AND message_class = $2
        AND first_claimed_at > $3::timestamptz - quarter * interval '15 min'
        AND first_claimed_at <= $3::timestamptz - (quarter - 1) * interval '15 min'
    ORDER BY first_claimed_at DESC LIMIT $5 / 96 + 1) AS c
CROSS JOIN LATERAL (
    SELECT min(e.received_at) AS at FROM provider_event e
    WHERE e.wire_key = c.wire_key AND e.feed = $1 AND e.source IN ('http', 'sqs', 'replay', 'back-fill')
      AND (e.partition_at >= $3::timestamptz - interval '2 days' OR e.partition_at = '1970-01-01 00:00:00+00')
      AND e.received_at <= $4
) AS heard
"""


async def _controls(
    connection: Connection, feed: str, message_class: str, until: datetime, now: datetime
) -> list[Sighting]:
    busy = await connection.fetchval(DAYS_CONTROLS, feed, message_class, until, SAMPLE) > SAMPLE
    statement = SPREAD_CONTROLS if busy else NEWEST_CONTROLS
    return [Sighting(*row) for row in await connection.fetch(statement, feed, message_class, until, now, SAMPLE)]


# Only of one attempt can it be said when it was accepted. Those whose neighbourhood was found ill before they were
# heard of are left out: recent controls speak for such. A duplicate is one of which the feed spoke too late.
PROVED: Final = """
SELECT s.message_class, extract(epoch FROM s.claimed_at)::float8 AS at,
       extract(epoch FROM heard.at - s.claimed_at)::float8 AS lag,
       substring(s.recipient_key FROM '@([^@]*)$') AS domain
FROM (SELECT * FROM send_log WHERE feed = $1 AND state = 'sent' AND answered_at IS NULL
          AND verdict_source IN ('feed', 'look-up') AND sent_at <= $2
      ORDER BY sent_at DESC LIMIT $3) AS s
CROSS JOIN LATERAL (
    SELECT min(e.received_at) AS at FROM provider_event e
    WHERE e.wire_key = s.wire_key AND e.feed = $1 AND e.source IN ('http', 'sqs', 'replay', 'back-fill')
      AND e.received_at <= $2
) AS heard
WHERE s.submit_by < $2 AND s.attempt - s.not_sent_attempts = 1
  AND NOT EXISTS (SELECT FROM verdict v WHERE v.wire_key = s.wire_key AND (v.inputs ->> 'ill')::boolean)
UNION ALL
SELECT s.message_class, extract(epoch FROM s.first_claimed_at)::float8, NULL,
       substring(s.recipient_key FROM '@([^@]*)$')
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


# (sends, ambiguous ones) of a hundred sends in each half hour of the last day.
SHARES: Final = """
SELECT count(*) AS sends, count(*) FILTER (WHERE s.ambiguous) AS ambiguous
FROM generate_series(1, 48) AS half
CROSS JOIN LATERAL (
    SELECT attempt - not_sent_attempts > (answered_at IS NOT NULL)::int
           AND (state <> 'failed' OR verdict_source <> 'sender') AS ambiguous
    FROM send_log
    WHERE feed = $1 AND submit_by < $2
      AND claimed_at > $2::timestamptz - half * interval '30 min'
      AND claimed_at <= $2::timestamptz - (half - 1) * interval '30 min'
    ORDER BY claimed_at LIMIT 100) AS s
GROUP BY half
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
    WHERE NOT (s.state = 'failed' AND s.verdict_source = 'feed')
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


async def assess_silence(
    connection: Connection, histories: Histories, claims: Sequence[Claim], now: datetime
) -> dict[str, Judged]:
    """Return what silence about each claim is worth, by wire key."""
    known = await histories.of(connection, {claim.feed for claim in claims}, now)
    own = buckets(claims, known)
    near = await _neighbours(connection, own, known, now)
    crowds = await _crowds(connection, own, known, now)
    found = {}
    for bucket, (before, after), crowd in zip(own, near, crowds, strict=True):
        around = Around(known[bucket.stratum.feed], bucket, before, after, crowd, now.timestamp())
        for claim in bucket.claims:
            rules = histories.rules_for(claim.feed, claim.message_class)
            found[claim.wire_key] = around.judge(claim, Limits(rules.max_risk, rules.stress, rules.prior_floor))
    return found


# Where domains differ the sends of others lie between.
NEIGHBOURS: Final = """
SELECT asked.n, before.keys AS keys_before, before.at AS before, before.domains AS domains_before,
       after.keys AS keys_after, after.at AS after, after.domains AS domains_after
FROM unnest($1::int[], $2::text[], $3::text[], $4::float8[], $5::float8[], $6::bool[])
    AS asked(n, feed, message_class, oldest, youngest, of_domain)
CROSS JOIN LATERAL (
    SELECT coalesce(array_agg(wire_key), '{}') AS keys,
           coalesce(array_agg(extract(epoch FROM first_claimed_at)::float8), '{}') AS at,
           coalesce(array_agg(CASE WHEN asked.of_domain THEN substring(recipient_key FROM '@([^@]*)$') END), '{}')
               AS domains
    FROM (SELECT wire_key, first_claimed_at, recipient_key FROM control
          WHERE feed = asked.feed AND message_class = asked.message_class
            AND first_claimed_at <= to_timestamp(asked.oldest)
            AND first_claimed_at > to_timestamp(asked.oldest) - interval '1 hour'
          ORDER BY first_claimed_at DESC LIMIT CASE WHEN asked.of_domain THEN 250 ELSE 25 END) AS c
) AS before
CROSS JOIN LATERAL (
    SELECT coalesce(array_agg(wire_key), '{}') AS keys,
           coalesce(array_agg(extract(epoch FROM first_claimed_at)::float8), '{}') AS at,
           coalesce(array_agg(CASE WHEN asked.of_domain THEN substring(recipient_key FROM '@([^@]*)$') END), '{}')
               AS domains
    FROM (SELECT wire_key, first_claimed_at, recipient_key FROM control
          WHERE feed = asked.feed AND message_class = asked.message_class
            AND first_claimed_at > to_timestamp(asked.youngest)
            AND first_claimed_at < to_timestamp(asked.youngest) + interval '1 hour' AND first_claimed_at <= $7
          ORDER BY first_claimed_at LIMIT CASE WHEN asked.of_domain THEN 250 ELSE 25 END) AS c
) AS after
"""

Sides = tuple[list[Sighting], list[Sighting]]


async def _neighbours(
    connection: Connection, own: Sequence[Bucket], histories: dict[str, FeedHistory], now: datetime
) -> list[Sides]:
    """Return for each bucket the controls before and after its claims."""
    asked = [
        (n, of.feed, name, bucket.oldest, bucket.youngest, of.domain is not None)
        for n, bucket in enumerate(own)
        for of in (bucket.stratum,)
        for name in histories[of.feed].classes(of)
    ]
    columns = [list(column) for column in zip(*asked, strict=True)] or [[] for _ in range(6)]
    rows = await connection.fetch(NEIGHBOURS, *columns, now)
    await _heard(connection, own, rows, histories, now)
    sides: list[Sides] = [([], []) for _ in own]
    for row in rows:
        of, (before, after) = own[row["n"]].stratum, sides[row["n"]]
        before += _sightings(histories[of.feed], of, row["keys_before"], row["before"], row["domains_before"])
        after += _sightings(histories[of.feed], of, row["keys_after"], row["after"], row["domains_after"])
    return sides


def _sightings(
    history: FeedHistory, of: Stratum, keys: Sequence[str], times: Sequence[float], domains: Sequence[str | None]
) -> list[Sighting]:
    found = []
    for key, at, domain in zip(keys, times, domains, strict=True):
        if history.belongs(domain, of):
            heard = history.heard.get(key)
            found.append(Sighting(at, heard - at if heard else None, domain))
    return found


# Events of a control lie after its claim: older partitions are not probed. An event that a wrong clock of the provider
# put there is missed, and the control counts as unheard: the careful side.
HEARD: Final = """
SELECT asked.feed, asked.wire_key, extract(epoch FROM min(e.received_at))::float8 AS at
FROM unnest($1::text[], $2::text[]) AS asked(feed, wire_key)
JOIN provider_event e ON e.wire_key = asked.wire_key AND e.feed = asked.feed
WHERE e.source IN ('http', 'sqs', 'replay', 'back-fill') AND e.received_at <= $4
  AND (e.partition_at >= to_timestamp($3) - interval '1 day' OR e.partition_at = '1970-01-01 00:00:00+00')
GROUP BY 1, 2
"""


async def _heard(
    connection: Connection,
    own: Sequence[Bucket],
    rows: Sequence[asyncpg.Record],
    histories: dict[str, FeedHistory],
    now: datetime,
) -> None:
    """Ask when feeds first spoke of controls, where that isn't known yet: it never changes."""
    asked: dict[str, set[str]] = {}
    for row in rows:
        asked.setdefault(own[row["n"]].stratum.feed, set()).update(row["keys_before"], row["keys_after"])
    earliest = min((at for row in rows for at in (*row["before"][-1:], *row["after"][:1])), default=now.timestamp())
    for feed in asked:
        if len(histories[feed].heard) > MOST_HEARD:
            histories[feed].heard.clear()
    sends = sorted((feed, key) for feed, keys in asked.items() for key in keys - histories[feed].heard.keys())
    columns = [feed for feed, _ in sends], [key for _, key in sends]
    for row in await connection.fetch(HEARD, *columns, earliest, now):
        histories[row["feed"]].heard[row["wire_key"]] = row["at"]


# When the sends of half a crowd of each size begin and end, and how many sends there are on each side, at most half of
# the largest. The send in the middle is not counted.
DENSITY: Final = """
SELECT cardinality(before.at) AS n_before, cardinality(after.at) AS n_after,
       ARRAY(SELECT asked.at - extract(epoch FROM before.at[least(half, cardinality(before.at))])::float8
             FROM unnest($3::int[]) AS half) AS back,
       ARRAY(SELECT extract(epoch FROM after.at[least(half, cardinality(after.at))])::float8 - asked.at
             FROM unnest($3::int[]) AS half) AS forth
FROM unnest($1::text[], $2::float8[]) WITH ORDINALITY AS asked(feed, at, n)
CROSS JOIN LATERAL (
    SELECT coalesce(array_agg(claimed_at), '{}') AS at
    FROM (SELECT claimed_at FROM send_log WHERE feed = asked.feed AND claimed_at < to_timestamp(asked.at)
          ORDER BY claimed_at DESC LIMIT $4) AS s
) AS before
CROSS JOIN LATERAL (
    SELECT coalesce(array_agg(claimed_at), '{}') AS at
    FROM (SELECT claimed_at FROM send_log WHERE feed = asked.feed AND claimed_at > to_timestamp(asked.at)
            AND claimed_at <= $5
          ORDER BY claimed_at LIMIT $4) AS s
) AS after
ORDER BY asked.n
"""

# In flight is not ambiguous. The index alone answers it.
AMBIGUOUS: Final = """
SELECT asked.feed, ARRAY(
    SELECT extract(epoch FROM a.claimed_at)::float8 FROM ambiguous a
    WHERE a.feed = asked.feed AND a.claimed_at BETWEEN to_timestamp(asked.since) AND to_timestamp(asked.until)
      AND a.submit_by < $4
    ORDER BY a.claimed_at) AS at
FROM unnest($1::text[], $2::float8[], $3::float8[]) AS asked(feed, since, until)
ORDER BY asked.feed, asked.since
"""


async def _crowds(
    connection: Connection, own: Sequence[Bucket], histories: dict[str, FeedHistory], now: datetime
) -> list[Crowd]:
    """Return for each bucket how dense sends lie around it, and the ambiguous ones within reach."""
    await _densities(connection, own, histories, now)
    densities = [histories[bucket.stratum.feed].density[slot(bucket.oldest)] for bucket in own]
    spans = [
        (bucket.stratum.feed, bucket.oldest - back[-1][0] - 0.001, bucket.youngest + forth[-1][0] + 0.001)
        for bucket, (back, forth) in zip(own, densities, strict=True)
    ]
    columns = [list(column) for column in zip(*joined(spans), strict=True)] or [[], [], []]
    ambiguous: dict[str, list[float]] = {}
    for row in await connection.fetch(AMBIGUOUS, *columns, now):
        ambiguous.setdefault(row["feed"], []).extend(row["at"])
    return [
        Crowd(density, ambiguous.get(bucket.stratum.feed, [])) for bucket, density in zip(own, densities, strict=True)
    ]


async def _densities(
    connection: Connection, own: Sequence[Bucket], histories: dict[str, FeedHistory], now: datetime
) -> None:
    """Measure where it isn't known yet, at a claim of each slot."""
    asked = {
        (bucket.stratum.feed, slot(bucket.oldest)): bucket.oldest
        for bucket in own
        if slot(bucket.oldest) not in histories[bucket.stratum.feed].density
    }
    halves = [size // 2 for size in CROWDS]
    columns = [feed for feed, _ in asked], list(asked.values())
    rows = await connection.fetch(DENSITY, *columns, halves, halves[-1], now)
    for (feed, of), row in zip(asked, rows, strict=True):
        sides = (row["back"], row["n_before"]), (row["forth"], row["n_after"])
        histories[feed].density[of] = Density(*(_reach(halves, far, n) for far, n in sides))


def _reach(halves: Sequence[int], far: Sequence[float | None], n: int) -> list[tuple[float, int]]:
    """Return how far half of each crowd reaches, and how many sends that are: fewer at an edge of the log."""
    return [(reach or 0.0, min(half, n)) for half, reach in zip(halves, far, strict=True)]


def joined(spans: Iterable[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """Return spans of time, by feed, with those that meet made one."""
    found: list[tuple[str, float, float]] = []
    for feed, since, until in sorted(spans):
        if found and found[-1][0] == feed and since <= found[-1][2]:
            found[-1] = (feed, found[-1][1], max(found[-1][2], until))
        else:
            found.append((feed, since, until))
    return found
