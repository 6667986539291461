# SPDX-License-Identifier: Apache-2.0
"""What is over: how long things are kept, what a prune would delete, and how pruning stands. Changes nothing."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from typing import Any, Final

import asyncpg

from reconciler.configuration.tables import RetentionSettings
from reconciler.database.connection import Connection, database_clock

MARGIN: Final = timedelta(hours=1)
"""How far ahead of the database's clock the one may go by which a job's `intended_at` was written."""

COUNT_SECONDS: Final = 3600.0
"""Longest count of a dry run, which reads all that is old."""


@dataclass(frozen=True, slots=True)
class Ages:
    """How long what is kept."""

    rows: timedelta
    events: timedelta
    passes: timedelta
    late_window: timedelta
    """A send that failed within it may still need its events."""

    def cuts(self, now: datetime) -> Cuts:
        """Return before when what is over."""
        return Cuts(now - self.rows - MARGIN, now - self.events - MARGIN, now - self.passes)


@dataclass(frozen=True, slots=True)
class Cuts:
    """Before when what is over."""

    rows: datetime
    events: datetime
    passes: datetime


@dataclass(frozen=True, slots=True)
class Month:
    """A month of events that is old enough to go."""

    month: date
    outcome: str
    """`dropped`, `held` (a send may need it), or `busy` (a transaction was in the way). In a dry run as it would be."""
    wire_key: str | None = None
    """Of the send that holds it back."""
    events: int | None = None
    """How many it holds, in a dry run."""


@dataclass(slots=True)
class Pruned:
    """What a run deleted, or would delete."""

    rows: Counter[str] = field(default_factory=Counter)
    """By table."""
    months: list[Month] = field(default_factory=list)
    ended: bool = False
    """False where the time of the run was up first."""


def ages_of(settings: RetentionSettings, late_window: timedelta) -> Ages:
    """Return how long what is kept by these settings."""
    return Ages(settings.rows, settings.events, settings.passes, late_window)


async def cuts_now(pool: asyncpg.Pool, ages: Ages) -> Cuts:
    """Return before when what is over, by the database's clock."""
    return ages.cuts(await database_clock(pool))


MONTHS: Final = """
SELECT month FROM provider_event_months() AS month
WHERE (month + interval '1 month') AT TIME ZONE 'UTC' < $1::timestamptz ORDER BY month
"""


async def old_months(pool: asyncpg.Pool, cuts: Cuts) -> list[date]:
    """Return the months whose last day is old enough, by their first."""
    return [row["month"] for row in await pool.fetch(MONTHS, cuts.events)]


COUNT: Final = """
SELECT (SELECT count(*) FROM send_log l WHERE send_is_over(l, $1, $2)
           AND NOT EXISTS (SELECT FROM asked_again a WHERE a.wire_key = l.wire_key AND a.asked_at >= $1))
       + (SELECT count(*) FROM campaign c JOIN send_log l ON l.campaign = c.name AND l.state = 'pending'
          WHERE c.state = 'cancelled' AND c.updated_at < $1 AND l.attempt = 0 AND l.next_check_at IS NULL
            AND NOT EXISTS (SELECT FROM provider_event e WHERE e.wire_key = l.wire_key)) AS send_log,
       (SELECT count(*) FROM verdict v JOIN send_log l USING (wire_key) WHERE send_is_over(l, $1, $2)) AS verdict,
       (SELECT count(*) FROM provider_event e
        WHERE e.partition_at = '1970-01-01 00:00:00+00' AND e.received_at < $2) AS provider_event,
       (SELECT count(*) FROM pass WHERE started_at < $3) AS pass,
       (SELECT count(*) FROM feed_delivery WHERE minute < $3) AS feed_delivery
"""
COUNT_MONTH: Final = """
SELECT count(*) AS events, provider_event_holder($1, $2) AS wire_key FROM provider_event
WHERE partition_at >= $1::date::timestamp AT TIME ZONE 'UTC'
  AND partition_at < ($1::date + interval '1 month') AT TIME ZONE 'UTC'
"""


async def would_prune(pool: asyncpg.Pool, ages: Ages) -> Pruned:
    """Count what a prune would delete now, and change nothing. It reads the whole send log."""
    cuts = await cuts_now(pool, ages)
    (counts,) = await pool.fetch(COUNT, cuts.rows, cuts.events, cuts.passes, timeout=COUNT_SECONDS)
    months = []
    for month in await old_months(pool, cuts):
        (row,) = await pool.fetch(COUNT_MONTH, month, ages.late_window, timeout=COUNT_SECONDS)
        outcome = "held" if row["wire_key"] else "dropped"
        months.append(Month(month, outcome, row["wire_key"], row["events"]))
    return Pruned(Counter(dict(counts)), months, ended=True)


@dataclass(frozen=True, slots=True)
class RetentionStatus:
    """How pruning stands."""

    pruned_at: datetime | None
    """When a prune last came to its end."""
    left: list[Month]
    """Months of events that it had to leave."""
    memory: timedelta
    """How old a job may be that is claimed."""


STATUS: Final = "SELECT pruned_at, prune_left, memory FROM installation"


async def read_retention(connection: Connection) -> RetentionStatus:
    """Return how pruning stands."""
    (row,) = await connection.fetch(STATUS)
    left: list[dict[str, Any]] = json.loads(row["prune_left"])
    months = [Month(date.fromisoformat(m["month"]), m["outcome"], m["wire_key"]) for m in left]
    return RetentionStatus(row["pruned_at"], months, row["memory"])
