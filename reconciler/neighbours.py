# SPDX-License-Identifier: Apache-2.0
"""The SQL that measures how feeds speak around claims: the answered sends beside them, and the ambiguous ones.

What it costs grows with the claims and feeds that are asked about, never with the log: samples are bounded and found
through an index, histories are kept for some minutes, and claims of one minute share their neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final

from reconciler.histories import Histories
from reconciler.history import Stratum
from reconciler.ledger import Connection
from reconciler.risk import CROWDS
from reconciler.silence import (
    Around,
    Bucket,
    Claim,
    Crowd,
    Density,
    FeedHistory,
    Judged,
    Sighting,
    buckets,
    slot,
    worse,
)

MOST_HEARD: Final = 5000
"""Controls of a feed of which it is remembered when they were heard of."""


async def assess_silence(
    connection: Connection, histories: Histories, claims: Sequence[Claim], now: datetime
) -> dict[str, Judged]:
    """Return what silence about each send is worth, by wire key; of several claims of one the worst."""
    known = await histories.of(connection, {(claim.feed, claim.message_class) for claim in claims}, now)
    own = buckets(claims, known)
    near = await _neighbours(connection, own, known, now)
    crowds = await _crowds(connection, own, known, now)
    found: dict[str, Judged] = {}
    for bucket, (before, after), crowd in zip(own, near, crowds, strict=True):
        around = Around(known[bucket.stratum.feed], bucket, before, after, crowd, now.timestamp())
        for claim in bucket.claims:
            judged = around.judge(claim, histories.rules_for(claim.feed, claim.message_class))
            other = found.get(claim.wire_key)
            found[claim.wire_key] = worse(other, judged) if other else judged
    return found


# Where domains differ the sends of others lie between.
NEIGHBOURS: Final = """
SELECT asked.n, before.keys AS keys_before, before.at AS before, before.domains AS domains_before,
       after.keys AS keys_after, after.at AS after, after.domains AS domains_after
FROM unnest($1::int[], $2::text[], $3::text[], $4::float8[], $5::float8[], $6::float8[], $7::bool[])
    AS asked(n, feed, message_class, oldest, youngest, until, of_domain)
CROSS JOIN LATERAL (
    SELECT coalesce(array_agg(wire_key), '{}') AS keys,
           coalesce(array_agg(extract(epoch FROM first_claimed_at)::float8), '{}') AS at,
           coalesce(array_agg(CASE WHEN asked.of_domain THEN domain END), '{}')
               AS domains
    FROM (SELECT wire_key, first_claimed_at, domain FROM control
          WHERE feed = asked.feed AND message_class = asked.message_class
            AND first_claimed_at <= to_timestamp(asked.oldest)
            AND first_claimed_at > to_timestamp(asked.oldest) - interval '1 hour'
          ORDER BY first_claimed_at DESC LIMIT CASE WHEN asked.of_domain THEN 250 ELSE 25 END) AS c
) AS before
CROSS JOIN LATERAL (
    SELECT coalesce(array_agg(wire_key), '{}') AS keys,
           coalesce(array_agg(extract(epoch FROM first_claimed_at)::float8), '{}') AS at,
           coalesce(array_agg(CASE WHEN asked.of_domain THEN domain END), '{}')
               AS domains
    FROM (
        (SELECT wire_key, first_claimed_at, domain FROM control
         WHERE feed = asked.feed AND message_class = asked.message_class
           AND first_claimed_at > to_timestamp(asked.until)
           AND first_claimed_at < to_timestamp(asked.until) + interval '1 hour' AND first_claimed_at <= $8
         ORDER BY first_claimed_at LIMIT CASE WHEN asked.of_domain THEN 250 ELSE 25 END)
        UNION ALL
        (SELECT wire_key, first_claimed_at, domain FROM control
         WHERE feed = asked.feed AND message_class = asked.message_class
           AND first_claimed_at > to_timestamp(asked.youngest) AND first_claimed_at <= to_timestamp(asked.until)
         ORDER BY first_claimed_at DESC LIMIT CASE WHEN asked.of_domain THEN 250 ELSE 25 END)
    ) AS c
) AS after
"""

Neighbour = tuple[str, float, str | None]
"""Wire key, time and domain of a control."""

Found = tuple[list[Neighbour], list[Neighbour]]
Sides = tuple[list[Sighting], ...]
"""Controls before and after the claims of a bucket."""


async def _neighbours(
    connection: Connection, own: Sequence[Bucket], histories: dict[str, FeedHistory], now: datetime
) -> list[Sides]:
    """Return for each bucket the controls before and after its claims."""
    asked = [
        (n, of.feed, name, bucket.oldest, bucket.youngest, bucket.until, of.domain is not None)
        for n, bucket in enumerate(own)
        for of in (bucket.stratum,)
        for name in histories[of.feed].classes(of)
    ]
    columns = [list(column) for column in zip(*asked, strict=True)] or [[] for _ in range(7)]
    found: list[Found] = [([], []) for _ in own]
    for row in await connection.fetch(NEIGHBOURS, *columns, now):
        of, (before, after) = own[row["n"]].stratum, found[row["n"]]
        before.extend(_of_stratum(histories[of.feed], of, row["keys_before"], row["before"], row["domains_before"]))
        after.extend(_of_stratum(histories[of.feed], of, row["keys_after"], row["after"], row["domains_after"]))
    await _hear(connection, own, found, histories, now)
    return [
        tuple(_sightings(side, histories[bucket.stratum.feed]) for side in sides)
        for bucket, sides in zip(own, found, strict=True)
    ]


def _of_stratum(
    history: FeedHistory, of: Stratum, keys: Sequence[str], times: Sequence[float], domains: Sequence[str | None]
) -> Iterable[Neighbour]:
    if of.domain is None:
        return zip(keys, times, domains, strict=True)
    return (found for found in zip(keys, times, domains, strict=True) if history.belongs(found[2], of))


def _sightings(controls: Sequence[Neighbour], history: FeedHistory) -> list[Sighting]:
    heard = history.heard
    return [Sighting(at, heard[key] - at if key in heard else None, domain) for key, at, domain in controls]


# Events of a control lie after its claim: older partitions are not probed. An event that a wrong clock of the provider
# put there is missed, and the control counts as unheard: the careful side.
HEARD: Final = """
SELECT asked.feed, asked.wire_key, extract(epoch FROM min(e.received_at))::float8 AS at
FROM unnest($1::text[], $2::text[]) AS asked(feed, wire_key)
JOIN feed_event e ON e.wire_key = asked.wire_key AND e.feed = asked.feed
WHERE e.received_at <= $4
  AND (e.partition_at >= to_timestamp($3) - interval '1 day' OR e.partition_at = '1970-01-01 00:00:00+00')
GROUP BY 1, 2
"""


async def _hear(
    connection: Connection,
    own: Sequence[Bucket],
    found: Sequence[Found],
    histories: dict[str, FeedHistory],
    now: datetime,
) -> None:
    """Ask when feeds first spoke of controls, where that isn't known yet: it never changes."""
    asked: dict[str, set[str]] = {}
    earliest = now.timestamp()
    for bucket, sides in zip(own, found, strict=True):
        keys = asked.setdefault(bucket.stratum.feed, set())
        for side in sides:
            keys.update(key for key, _, _ in side)
            earliest = min(earliest, min((at for _, at, _ in side), default=earliest))
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
        (bucket.stratum.feed, bucket.oldest - back[-1][0] - 0.001, bucket.until + forth[-1][0] + 0.001)
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
