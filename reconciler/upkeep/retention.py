# SPDX-License-Identifier: Apache-2.0
"""Prunes what is over: final sends, months of events, and the records of passes and deliveries.

In short transactions with pauses between them, and without waiting for anybody's lock, so that senders are not held up:
what is locked or busy is left to the next run. Any number of processes may prune at once; one that is killed leaves
nothing half done. What the guard promises is lowered before the first row goes: see `keep_memory`.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Final

import asyncpg
import structlog

from reconciler.configuration.tables import RetentionSettings
from reconciler.database.connection import Place
from reconciler.upkeep.retention_look import MARGIN, Ages, Cuts, Month, Pruned, ages_of, cuts_now, old_months

PRUNE_SECONDS: Final = 60.0
"""How often the daemon looks whether there is something to prune ..."""

RUN_SECONDS: Final = 10.0
"""... and for how long it then does at a time: a shutdown waits for no whole prune."""

BATCH: Final = 500
"""Rows of one transaction."""

PAGES: Final = 64
"""Pages of undated events that one statement reads."""

PAUSE: Final = 0.05
"""Seconds between two batches; longer after one that took long, so that at most half of the time is ours."""

TRIES: Final = 20
TRY_SECONDS: Final = 0.5
"""How often, and how far apart, a busy month is tried in one run."""

_log: Final = structlog.get_logger()


class _TimeUp(Exception):
    """The run's time is over; the next one goes on."""


def pruning(pool: asyncpg.Pool, settings: RetentionSettings, late_window: timedelta) -> Callable[[], Awaitable[None]]:
    """Return what the daemon does each minute: some of a prune, where the last one ended `every` ago or more."""
    ages = ages_of(settings, late_window)

    async def work() -> None:
        await keep_memory(pool, ages.rows)
        if not await pool.fetchval(DUE, settings.every):
            return
        done = await prune(pool, ages, seconds=RUN_SECONDS)
        dropped = [f"{month.month:%Y-%m}" for month in done.months if month.outcome == "dropped"]
        if done.rows.total() or dropped:  # a count of nothing is a count
            _log.info("pruned", rows={name: n for name, n in sorted(done.rows.items()) if n}, months=dropped)

    return work


DUE: Final = """
SELECT coalesce(pruned_at NOT BETWEEN clock_timestamp() - $1::interval AND clock_timestamp(), true) FROM installation
"""


async def prune(pool: asyncpg.Pool, ages: Ages, *, seconds: float = math.inf, pause: float = PAUSE) -> Pruned:
    """Delete what is over, for at most so many seconds, and return what was deleted. Raises the database's errors."""
    run = _Run(pool, ages, time.monotonic() + seconds, pause)
    try:
        await run.all()
    except _TimeUp:
        return run.done
    run.done.ended = True
    await pool.execute(NOTE_END, json.dumps(_left(run.done.months)), all(m.outcome != "busy" for m in run.done.months))
    return run.done


# Where a month was busy the daemon comes again in a minute, and looks at all the rest for little.
NOTE_END: Final = """
UPDATE installation SET prune_left = $1::jsonb, pruned_at = CASE WHEN $2 THEN clock_timestamp() ELSE pruned_at END
"""


def _left(months: Sequence[Month]) -> list[dict[str, str | None]]:
    return [
        {"month": m.month.isoformat(), "outcome": m.outcome, "wire_key": m.wire_key}
        for m in months
        if m.outcome != "dropped"
    ]


# Rows that ended before `pruned_until` may be gone, and a job was made before its send ended: only jobs made since can
# be told from new ones. So a longer memory grows as time passes, and a shorter one holds at once.
KEEP_MEMORY: Final = """
UPDATE installation SET memory = least($1::interval, clock_timestamp() - (pruned_until + $2::interval))
WHERE memory <> least($1::interval, clock_timestamp() - (pruned_until + $2::interval))
"""


async def keep_memory(pool: asyncpg.Pool, rows: timedelta) -> None:
    """Let the guard refuse jobs that are older than what the database still remembers, `rows` at most."""
    await pool.execute(KEEP_MEMORY, rows, MARGIN)


SET_PRUNED_UNTIL: Final = "UPDATE installation SET pruned_until = $1 WHERE pruned_until IS NULL OR pruned_until < $1"
FEEDS: Final = """
WITH RECURSIVE found AS (
    (SELECT feed FROM send_log WHERE claimed_at IS NOT NULL ORDER BY feed LIMIT 1)
    UNION ALL
    SELECT (SELECT l.feed FROM send_log l WHERE l.claimed_at IS NOT NULL AND l.feed > f.feed ORDER BY l.feed LIMIT 1)
    FROM found f WHERE f.feed IS NOT NULL
)
SELECT feed FROM found WHERE feed IS NOT NULL
"""


class _Run:
    """One run: what it may still do, and what it did."""

    def __init__(self, pool: asyncpg.Pool, ages: Ages, until: float, pause: float) -> None:
        self._pool, self._ages, self._until, self._pause = pool, ages, until, pause
        self.done = Pruned()

    async def all(self) -> None:
        """Do everything, rows before their events."""
        cuts = await cuts_now(self._pool, self._ages)
        await self._pool.execute(SET_PRUNED_UNTIL, cuts.rows)  # committed, as the memory is, before the first row goes
        await keep_memory(self._pool, self._ages.rows)
        await self._sends(cuts)
        await self._undated(cuts)
        await self._notes(cuts)
        await self._months(cuts)

    async def _sends(self, cuts: Cuts) -> None:
        for feed in [row["feed"] for row in await self._pool.fetch(FEEDS)]:
            async for keys in self._pages(CLAIMED_PAGE, cuts, feed):
                await self._delete(keys, cuts)
        async for keys in self._pages(FAILED_PAGE, cuts):
            await self._delete(keys, cuts)
        async for keys in self._pages(UNCLAIMED_PAGE, cuts):
            await self._delete(keys, cuts)
        await self._by_batches("send_log", DELETE_CANCELLED, cuts.rows)

    async def _pages(self, statement: str, cuts: Cuts, *feed: str) -> AsyncIterator[list[str]]:
        place = Place(datetime(1970, 1, 1, tzinfo=UTC), "")
        while rows := await self._pool.fetch(statement, place.at, place.wire_key, cuts.rows, cuts.events, BATCH, *feed):
            yield [row["wire_key"] for row in rows]
            place = Place(rows[-1]["at"], rows[-1]["wire_key"])

    async def _delete(self, keys: Sequence[str], cuts: Cuts) -> None:
        began = time.monotonic()
        (row,) = await self._pool.fetch(DELETE_SENDS, keys, cuts.rows, cuts.events)
        self.done.rows.update(dict(row))
        await self._rest(began)

    async def _undated(self, cuts: Cuts) -> None:
        pages = await self._pool.fetchval(UNDATED_PAGES)
        for first in range(0, pages, PAGES):
            began = time.monotonic()
            place = (f"({first},0)", f"({first + PAGES},0)")
            n = await self._pool.fetchval(DELETE_UNDATED, *place, cuts.events, self._ages.late_window)
            self.done.rows["provider_event"] += n
            await self._rest(began)

    async def _notes(self, cuts: Cuts) -> None:
        for table, statement in DELETE_NOTES.items():
            await self._by_batches(table, statement, cuts.passes)

    async def _by_batches(self, table: str, statement: str, cut: datetime) -> None:
        n = BATCH
        while n == BATCH:
            began = time.monotonic()
            n = await self._pool.fetchval(statement, cut, BATCH)
            self.done.rows[table] += n
            await self._rest(began)

    async def _months(self, cuts: Cuts) -> None:
        for month in await old_months(self._pool, cuts):
            self.done.months.append(await self._drop(month))

    async def _drop(self, month: date) -> Month:
        outcome = "busy"
        for _ in range(TRIES):
            began = time.monotonic()
            outcome = await self._pool.fetchval(DROP_MONTH, month, self._ages.late_window)
            if outcome != "busy":
                break
            await self._rest(began, TRY_SECONDS)
        word, _, wire_key = outcome.partition(":")
        return Month(month, "dropped" if word == "gone" else word, wire_key or None)

    async def _rest(self, began: float, least: float = 0.0) -> None:
        took = time.monotonic() - began
        if time.monotonic() + took > self._until:
            raise _TimeUp
        await asyncio.sleep(max(least, self._pause, took if self._pause else 0.0))


# A send is claimed before it ends; the index on the time of the claim is there for other reasons.
CLAIMED_PAGE: Final = """
SELECT l.wire_key, l.claimed_at AS at FROM send_log l
WHERE l.feed = $6 AND l.claimed_at >= $1 AND (l.claimed_at, l.wire_key) > ($1, $2) AND l.claimed_at < $3
  AND send_is_over(l, $3, $4)
ORDER BY l.claimed_at, l.wire_key LIMIT $5
"""
FAILED_PAGE: Final = """
SELECT l.wire_key, l.failed_at AS at FROM send_log l
WHERE l.state = 'failed' AND (l.failed_at, l.wire_key) > ($1, $2) AND l.failed_at < $3 AND send_is_over(l, $3, $4)
ORDER BY l.failed_at, l.wire_key LIMIT $5
"""
# Sent without ever having been claimed here: whoever decided that wrote a verdict. Verdicts go with their sends, so few
# are old.
UNCLAIMED_PAGE: Final = """
SELECT l.wire_key, max(v.decided_at) AS at
FROM verdict v JOIN send_log l USING (wire_key)
WHERE v.decided_at < $3 AND v.action = 'sent' AND l.claimed_at IS NULL AND send_is_over(l, $3, $4)
GROUP BY l.wire_key HAVING (max(v.decided_at), l.wire_key) > ($1, $2)
ORDER BY 2, 1 LIMIT $5
"""

# A send that somebody still asks for is kept: to him the guard's word is no history. What is locked is somebody's.
DELETE_SENDS: Final = """
WITH page AS MATERIALIZED (
    SELECT l.wire_key FROM send_log l
    WHERE l.wire_key = ANY ($1::text[]) AND send_is_over(l, $2, $3)
      AND NOT EXISTS (SELECT FROM asked_again a WHERE a.wire_key = l.wire_key AND a.asked_at >= $2)
    ORDER BY l.wire_key FOR UPDATE SKIP LOCKED
), sends AS (
    DELETE FROM send_log l USING page p WHERE l.wire_key = p.wire_key AND send_is_over(l, $2, $3) RETURNING l.wire_key
), verdicts AS (
    DELETE FROM verdict v USING sends s WHERE v.wire_key = s.wire_key RETURNING true
), shadow_verdicts AS (
    DELETE FROM shadow_verdict v USING sends s WHERE v.wire_key = s.wire_key RETURNING true
), look_ups AS (
    DELETE FROM look_up u USING sends s WHERE u.wire_key = s.wire_key RETURNING true
)
SELECT (SELECT count(*) FROM sends) AS send_log, (SELECT count(*) FROM verdicts) AS verdict,
       (SELECT count(*) FROM shadow_verdicts) AS shadow_verdict, (SELECT count(*) FROM look_ups) AS look_up
"""

# What a campaign left when it was cancelled: never given out, nothing heard of it, and every claim of it is refused. Of
# each campaign the first: all of them in one order would be read, and looked for in the events, for each batch.
DELETE_CANCELLED: Final = """
WITH page AS MATERIALIZED (
    SELECT l.wire_key FROM campaign c
    CROSS JOIN LATERAL (
        SELECT l.wire_key FROM send_log l
        WHERE l.campaign = c.name AND l.state = 'pending' AND l.attempt = 0 AND l.next_check_at IS NULL
          AND NOT EXISTS (SELECT FROM provider_event e WHERE e.wire_key = l.wire_key OFFSET 0)
        ORDER BY l.wire_key LIMIT $2 FOR UPDATE SKIP LOCKED
    ) AS l
    WHERE c.state = 'cancelled' AND c.updated_at < $1 LIMIT $2
), gone AS (
    DELETE FROM send_log l USING page p
    WHERE l.wire_key = p.wire_key AND l.state = 'pending' AND l.attempt = 0 AND l.next_check_at IS NULL
    RETURNING true
)
SELECT count(*) FROM gone
"""

UNDATED_PAGES: Final = "SELECT pg_relation_size('provider_event_undated') / current_setting('block_size')::int"
# What a send may still need stays: by its key, or where the event has none, by the message id.
DELETE_UNDATED: Final = """
WITH gone AS (
    DELETE FROM provider_event e
    WHERE e.partition_at = '1970-01-01 00:00:00+00' AND e.ctid >= $1::text::tid AND e.ctid < $2::text::tid
      AND e.received_at < $3
      AND NOT EXISTS (
          SELECT FROM send_log l WHERE l.wire_key = e.wire_key
             AND (l.state IN ('pending', 'claimed') OR l.failed_at > clock_timestamp() - $4::interval))
      AND NOT (e.wire_key LIKE '~%' AND EXISTS (
          SELECT FROM send_log l
          WHERE l.feed = e.feed AND (l.provider_message_id = e.message_id OR l.known_message_id = e.message_id)
             AND (l.state IN ('pending', 'claimed') OR l.failed_at > clock_timestamp() - $4::interval)))
    RETURNING true
)
SELECT count(*) FROM gone
"""

DELETE_PASSES: Final = """
WITH gone AS (
    DELETE FROM pass WHERE id IN (SELECT id FROM pass WHERE started_at < $1 ORDER BY started_at LIMIT $2) RETURNING true
)
SELECT count(*) FROM gone
"""
DELETE_DELIVERIES: Final = """
WITH gone AS (
    DELETE FROM feed_delivery WHERE (feed, minute, outcome) IN (
        SELECT feed, minute, outcome FROM feed_delivery WHERE minute < $1 LIMIT $2)
    RETURNING true
)
SELECT count(*) FROM gone
"""
DELETE_BACKFILLS: Final = """
WITH gone AS (
    DELETE FROM backfill WHERE id IN (SELECT id FROM backfill WHERE coalesce(ended_at, started_at) < $1 LIMIT $2)
    RETURNING true
)
SELECT count(*) FROM gone
"""
DELETE_FINDINGS: Final = """
WITH gone AS (
    DELETE FROM finding WHERE (code, host) IN (SELECT code, host FROM finding WHERE seen_at < $1 LIMIT $2)
    RETURNING true
)
SELECT count(*) FROM gone
"""
# One is kept while its send is there, so that it is not found anew.
DELETE_DUPLICATES: Final = """
WITH gone AS (
    DELETE FROM duplicate WHERE (wire_key, sort) IN (
        SELECT d.wire_key, d.sort FROM duplicate d
        WHERE d.found_at < $1 AND NOT EXISTS (SELECT FROM send_log l WHERE l.wire_key = d.wire_key) LIMIT $2)
    RETURNING true
)
SELECT count(*) FROM gone
"""
# Questions about a send that no prune can delete, asked each hour for months, and about one that was deleted otherwise.
DELETE_LOOK_UPS: Final = """
WITH gone AS (
    DELETE FROM look_up WHERE (wire_key, id) IN (SELECT wire_key, id FROM look_up WHERE asked_at < $1 LIMIT $2)
    RETURNING true
)
SELECT count(*) FROM gone
"""
# Places of a recipient of which none counts any more.
DELETE_PLACES: Final = """
WITH gone AS (
    DELETE FROM cap_taken WHERE (recipient_key, message_class) IN (
        SELECT h.recipient_key, h.message_class FROM cap_taken h
        WHERE h.taken_at[1] < $1 AND NOT EXISTS (
            SELECT FROM frequency_cap c
            WHERE c.message_class = h.message_class AND h.taken_at[1] > cap_since(c, clock_timestamp()))
        LIMIT $2 FOR UPDATE SKIP LOCKED)
    RETURNING true
)
SELECT count(*) FROM gone
"""
DELETE_NOTES: Final = {
    "pass": DELETE_PASSES,
    "feed_delivery": DELETE_DELIVERIES,
    "backfill": DELETE_BACKFILLS,
    "finding": DELETE_FINDINGS,
    "duplicate": DELETE_DUPLICATES,
    "look_up": DELETE_LOOK_UPS,
    "cap_taken": DELETE_PLACES,
}

DROP_MONTH: Final = "SELECT provider_event_drop_month($1, $2)"
