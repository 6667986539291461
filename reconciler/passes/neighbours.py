# SPDX-License-Identifier: Apache-2.0
"""The SQL that measures how feeds speak around claims: the answered sends beside them, and the ambiguous ones.

What it costs grows with the claims and feeds that are asked about, never with the log: samples are bounded and found
through an index, histories are kept for some minutes, and claims of one minute share their neighbours.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from operator import itemgetter
from typing import Final

import asyncpg

from reconciler.database.connection import Connection
from reconciler.passes.histories import Histories
from reconciler.rule.history import Stratum
from reconciler.rule.risk import CROWDS, FAR, MOST
from reconciler.rule.silence import (
    Around,
    Bucket,
    Claim,
    Crowd,
    FeedHistory,
    Judged,
    Reach,
    Spell,
    buckets,
    slot,
    worse,
)


async def assess_silence(
    connection: Connection, histories: Histories, claims: Sequence[Claim], now: datetime
) -> dict[str, Judged]:
    """Return what silence about each send is worth, by wire key; of several claims of one the worst."""
    known = await histories.of(connection, {(claim.feed, claim.message_class) for claim in claims}, now)
    own = buckets(claims, known)
    near = await _neighbours(connection, own, known, now)
    crowds = await _crowds(connection, own, known, now)
    found: dict[str, Judged] = {}
    at = now.timestamp()
    for bucket, sides, crowd in zip(own, near, crowds, strict=True):
        around = Around(known[bucket.stratum.feed], bucket, *sides, crowd, at, histories.rules_for)
        for claim in bucket.claims:
            judged = around.judge(claim)
            other = found.get(claim.wire_key)
            found[claim.wire_key] = worse(other, judged) if other else judged
    return found


# Where domains differ the sends of others lie between; where they don't nobody takes them out of the recipients. Keys
# are named only where the row doesn't know when its feed first spoke of it.
NEIGHBOURS: Final = """
SELECT asked.n, before.keys AS keys_before, before.at AS before, before.heard AS heard_before,
       before.domains AS domains_before,
       after.keys AS keys_after, after.at AS after, after.heard AS heard_after, after.domains AS domains_after
FROM unnest($1::int[], $2::text[], $3::text[], $4::float8[], $5::float8[], $6::float8[], $7::bool[])
    AS asked(n, feed, message_class, oldest, youngest, until, of_domain)
CROSS JOIN LATERAL (
    SELECT coalesce(array_agg(CASE WHEN heard_at IS NULL THEN wire_key END), '{}') AS keys,
           coalesce(array_agg(at), '{}') AS at,
           coalesce(array_agg(CASE WHEN heard_at <= $8 THEN date_part('epoch', heard_at) END), '{}') AS heard,
           coalesce(array_agg(domain) FILTER (WHERE asked.of_domain), '{}') AS domains
    FROM (SELECT wire_key, heard_at, date_part('epoch', first_claimed_at) AS at,
                 CASE WHEN asked.of_domain THEN domain END AS domain
          FROM control
          WHERE feed = asked.feed AND message_class = asked.message_class
            AND first_claimed_at <= to_timestamp(asked.oldest)
            AND first_claimed_at > to_timestamp(asked.oldest) - interval '1 hour'
          ORDER BY first_claimed_at DESC LIMIT CASE WHEN asked.of_domain THEN 250 ELSE 25 END) AS c
) AS before
CROSS JOIN LATERAL (
    SELECT coalesce(array_agg(CASE WHEN heard_at IS NULL THEN wire_key END), '{}') AS keys,
           coalesce(array_agg(at), '{}') AS at,
           coalesce(array_agg(CASE WHEN heard_at <= $8 THEN date_part('epoch', heard_at) END), '{}') AS heard,
           coalesce(array_agg(domain) FILTER (WHERE asked.of_domain), '{}') AS domains
    FROM (
        (SELECT wire_key, heard_at, date_part('epoch', first_claimed_at) AS at,
                CASE WHEN asked.of_domain THEN domain END AS domain
         FROM control
         WHERE feed = asked.feed AND message_class = asked.message_class
           AND first_claimed_at > to_timestamp(asked.until)
           AND first_claimed_at < to_timestamp(asked.until) + interval '1 hour' AND first_claimed_at <= $8
         ORDER BY first_claimed_at LIMIT CASE WHEN asked.of_domain THEN 250 ELSE 25 END)
        UNION ALL
        (SELECT wire_key, heard_at, date_part('epoch', first_claimed_at) AS at,
                CASE WHEN asked.of_domain THEN domain END AS domain
         FROM control
         WHERE feed = asked.feed AND message_class = asked.message_class
           AND first_claimed_at > to_timestamp(asked.youngest) AND first_claimed_at <= to_timestamp(asked.until)
         ORDER BY first_claimed_at DESC LIMIT CASE WHEN asked.of_domain THEN 250 ELSE 25 END)
    ) AS c
) AS after
"""

Neighbour = tuple[float, float | None, str | None]
"""Of a control: its time, when it was heard of, and its wire key where its row doesn't know that."""

_when: Final = itemgetter(0)

Sides = tuple[list[Neighbour], list[Neighbour]]
"""Controls before and after the claims of a bucket."""

AgedSides = tuple[list[tuple[float, float | None]], list[tuple[float, float | None]]]
"""Age and lag of these."""


async def _neighbours(
    connection: Connection, own: Sequence[Bucket], histories: dict[str, FeedHistory], now: datetime
) -> list[AgedSides]:
    """Return for each bucket the controls nearest to its claims, with the lag of those that were heard of."""
    asked = [
        (n, of.feed, name, bucket.oldest, bucket.youngest, bucket.until, of.domain is not None)
        for n, bucket in enumerate(own)
        for of in (bucket.stratum,)
        for name in histories[of.feed].classes(of)
    ]
    columns = [list(column) for column in zip(*asked, strict=True)] or [[] for _ in range(7)]
    found: list[Sides] = [([], []) for _ in own]
    for row in await connection.fetch(NEIGHBOURS, *columns, now):
        of, (before, after) = own[row["n"]].stratum, found[row["n"]]
        before.extend(_of_stratum(histories[of.feed], of, row, "before"))
        after.extend(_of_stratum(histories[of.feed], of, row, "after"))
    near = [
        (sorted(before, key=_when, reverse=True)[:MOST], _nearest(after, bucket.until))
        for bucket, (before, after) in zip(own, found, strict=True)
    ]
    return await _hear(connection, own, near, now)


def _of_stratum(history: FeedHistory, of: Stratum, row: asyncpg.Record, side: str) -> Iterable[Neighbour]:
    controls = zip(row[side], row[f"heard_{side}"], row[f"keys_{side}"], strict=True)
    if of.domain is None:
        return controls
    domains = row[f"domains_{side}"]
    return (control for control, domain in zip(controls, domains, strict=True) if history.belongs(domain, of))


def _nearest(controls: list[Neighbour], edge: float) -> list[Neighbour]:
    return sorted(controls, key=lambda control: abs(control[0] - edge))[:MOST]


# Of controls whose row doesn't know. Their events lie between claim and now: other partitions are not probed. One that
# a wrong clock of the provider put there is missed, and the control counts as unheard: the careful side.
HEARD: Final = """
SELECT asked.n, date_part('epoch', min(e.received_at)) AS at
FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS asked(feed, wire_key, n)
JOIN feed_event e ON e.wire_key = asked.wire_key AND e.feed = asked.feed
WHERE e.received_at <= $4
  AND (e.partition_at BETWEEN to_timestamp($3) - interval '1 day' AND $4 + interval '1 day'
       OR e.partition_at = '1970-01-01 00:00:00+00')
GROUP BY asked.n
"""


async def _hear(connection: Connection, own: Sequence[Bucket], near: Sequence[Sides], now: datetime) -> list[AgedSides]:
    """Return age and lag of all controls. Of those whose row knows no lag the events are asked."""
    sends = sorted(
        {
            (bucket.stratum.feed, key)
            for bucket, sides in zip(own, near, strict=True)
            for side in sides
            for _, _, key in side
            if key
        }
    )
    columns = [feed for feed, _ in sends], [key for _, key in sends]
    earliest = min((bucket.oldest for bucket in own), default=0.0) - FAR
    rows = await connection.fetch(HEARD, *columns, earliest, now) if sends else []
    told: dict[str | None, float] = {sends[n - 1][1]: at for n, at in rows}
    at = now.timestamp()
    return [(_aged(before, told, at), _aged(after, told, at)) for before, after in near]


def _aged(
    controls: Sequence[Neighbour], told: Mapping[str | None, float], now: float
) -> list[tuple[float, float | None]]:
    return [(now - at, _lag(at, told.get(key) if heard is None else heard)) for at, heard, key in controls]


def _lag(at: float, heard: float | None) -> float | None:
    return None if heard is None else heard - at


# When the sends of half a crowd of each size begin and end, and how many sends there are on each side, at most half of
# the largest. The send in the middle is not counted.
DENSITY: Final = """
SELECT cardinality(before.at) AS n_before, cardinality(after.at) AS n_after,
       ARRAY(SELECT asked.at - date_part('epoch', before.at[least(half, cardinality(before.at))])
             FROM unnest($3::int[]) AS half) AS back,
       ARRAY(SELECT date_part('epoch', after.at[least(half, cardinality(after.at))]) - asked.at
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
SELECT ARRAY(
    SELECT date_part('epoch', a.claimed_at) FROM ambiguous a
    WHERE a.feed = asked.feed AND a.claimed_at > to_timestamp(asked.since) AND a.claimed_at <= to_timestamp(asked.until)
      AND a.submit_by < $4
    ORDER BY a.claimed_at) AS at
FROM unnest($1::text[], $2::float8[], $3::float8[]) WITH ORDINALITY AS asked(feed, since, until, n)
ORDER BY asked.n
"""


async def _crowds(
    connection: Connection, own: Sequence[Bucket], histories: dict[str, FeedHistory], now: datetime
) -> list[Crowd]:
    """Return for each bucket how dense sends lie around it, and the ambiguous ones within reach."""
    await _densities(connection, own, histories, now)
    densities = [histories[bucket.stratum.feed].density[slot(bucket.oldest)] for bucket in own]
    spans = [
        (bucket.stratum.feed, bucket.oldest - density[-1].back - 0.001, bucket.until + density[-1].forth + 0.001)
        for bucket, density in zip(own, densities, strict=True)
    ]
    ambiguous = await _ambiguous(connection, joined(spans), histories, now)
    return [Crowd(density, ambiguous[bucket.stratum.feed]) for bucket, density in zip(own, densities, strict=True)]


async def _ambiguous(
    connection: Connection, spans: Sequence[tuple[str, float, float]], histories: dict[str, FeedHistory], now: datetime
) -> dict[str, list[float]]:
    """Return by feed when its ambiguous sends were. Of what was asked a moment ago only the rest is."""
    at = now.timestamp()
    known = [
        old if (old := histories[feed].ambiguous) and old.reaches(since, at) else Spell(since, since, at, ())
        for feed, since, _ in spans
    ]
    columns = [feed for feed, _, _ in spans], [old.until for old in known], [until for _, _, until in spans]
    found: dict[str, list[float]] = {feed: [] for feed, _, _ in spans}
    rows = await connection.fetch(AMBIGUOUS, *columns, now)
    for (feed, since, until), old, row in zip(spans, known, rows, strict=True):
        spell = histories[feed].ambiguous = old.onwards(since, until, row["at"])
        found[feed].extend(spell.times[: bisect_right(spell.times, until)])
    return found


async def _densities(
    connection: Connection, own: Sequence[Bucket], histories: dict[str, FeedHistory], now: datetime
) -> None:
    """Measure where it isn't known yet, at a claim of each slot."""
    asked = {
        (bucket.stratum.feed, slot(bucket.oldest)): bucket.oldest
        for bucket in own
        if slot(bucket.oldest) not in histories[bucket.stratum.feed].density
    }
    if not asked:
        return
    halves = [size // 2 for size in CROWDS]
    columns = [feed for feed, _ in asked], list(asked.values())
    rows = await connection.fetch(DENSITY, *columns, halves, halves[-1], now)
    for (feed, of), row in zip(asked, rows, strict=True):
        before, after = row["n_before"], row["n_after"]
        histories[feed].density[of] = tuple(
            Reach(back or 0.0, forth or 0.0, min(half, before) + min(half, after))  # fewer at an edge of the log
            for half, back, forth in zip(halves, row["back"], row["forth"], strict=True)
        )


def joined(spans: Iterable[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """Return spans of time, by feed, with those that meet made one."""
    found: list[tuple[str, float, float]] = []
    for feed, since, until in sorted(spans):
        if found and found[-1][0] == feed and since <= found[-1][2]:
            found[-1] = (feed, found[-1][1], max(found[-1][2], until))
        else:
            found.append((feed, since, until))
    return found
