# SPDX-License-Identifier: Apache-2.0
"""Sends as the page lists them, a page after the other: undecided ones, the oldest first; failed ones, the newest."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

from reconciler.ledger import Connection
from reconciler.reports import database_clock

STATES: Final = ("held", "claimed", "released", "capped", "pending", "failed")
"""As `reconciler status` calls them, and failed."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which sends are asked for; None: whatever it is."""

    state: str | None = None
    feed: str | None = None
    reason: str | None = None
    message_class: str | None = None


class Place(NamedTuple):
    """After which send a page begins."""

    since: datetime
    wire_key: str

    def __str__(self) -> str:
        return f"{self.since.isoformat()}~{self.wire_key}"

    @classmethod
    def parse(cls, text: str) -> Place:
        """Return the place that a link names. Raises ValueError."""
        since, _, wire_key = text.partition("~")
        at = datetime.fromisoformat(since)
        if at.tzinfo is None or "\0" in wire_key:
            raise ValueError("is no place")
        return cls(at, wire_key)


@dataclass(frozen=True, slots=True)
class Listed:
    """One send."""

    wire_key: str
    send_key: str
    feed: str
    message_class: str
    attempt: int
    state: str
    reason: str
    since: datetime
    next_check_at: datetime | None


@dataclass(frozen=True, slots=True)
class Page:
    """Some sends, and where the next page begins, if there is one."""

    now: datetime
    sends: list[Listed]
    then: Place | None


# The index of rows that passes look at holds just these; states and reasons are those of `status.UNDECIDED`.
UNDECIDED: Final = """
SELECT * FROM (
    SELECT wire_key, send_key, feed, message_class, attempt, next_check_at,
        CASE WHEN held_reason IS NOT NULL THEN 'held' WHEN capped_until > $1::timestamptz THEN 'capped'
             WHEN released_at IS NOT NULL THEN 'released' ELSE state END AS state,
        coalesce(held_reason, release_basis,
            CASE WHEN state = 'pending' THEN 'scheduled' WHEN submit_by > $1::timestamptz THEN 'submitting'
                 ELSE 'silence' END) AS reason,
        coalesce(held_since, released_at, CASE WHEN state = 'claimed' THEN claimed_at ELSE updated_at END) AS since
    FROM send_log
    WHERE state IN ('pending', 'claimed') AND next_check_at IS NOT NULL AND ($3::text IS NULL OR feed = $3)
) AS rows
WHERE ($2::text IS NULL OR state = $2) AND ($4::text IS NULL OR reason = $4)
  AND ($5::text IS NULL OR message_class = $5)
  AND ($6::timestamptz IS NULL OR (since, wire_key) > ($6, $7::text))
ORDER BY since, wire_key LIMIT $8
"""

FAILED: Final = """
SELECT wire_key, send_key, feed, message_class, attempt, next_check_at, state,
       coalesce(verdict_reason, '') AS reason, failed_at AS since
FROM send_log
WHERE state = 'failed' AND ($1::text IS NULL OR feed = $1) AND ($2::text IS NULL OR verdict_reason = $2)
  AND ($3::text IS NULL OR message_class = $3)
  AND ($4::timestamptz IS NULL OR (failed_at, wire_key) < ($4, $5::text))
ORDER BY failed_at DESC, wire_key DESC LIMIT $6
"""


async def read_claims(connection: Connection, wanted: Wanted, after: Place | None, size: int) -> Page:
    """Return the sends asked for that come after a place."""
    now = await database_clock(connection)
    rest = (wanted.feed, wanted.reason, wanted.message_class, *(after or (None, None)), size + 1)
    if wanted.state == "failed":
        rows = await connection.fetch(FAILED, *rest)
    else:
        rows = await connection.fetch(UNDECIDED, now, wanted.state, *rest)
    found = [Listed(**row) for row in rows]
    last = found[size - 1] if len(found) > size else None
    return Page(now, found[:size], Place(last.since, last.wire_key) if last else None)


WIRE_KEY: Final = "SELECT wire_key($1)"


async def wire_key_of(connection: Connection, key: str) -> str:
    """Return the wire key of a send key or wire key, with the installation's namespace."""
    found: str = await connection.fetchval(WIRE_KEY, key)
    return found


PASSES: Final = """
SELECT id, started_at, ended_at, who, dry_run, feed, wire_key, counts, clock_timestamp() AS now
FROM pass WHERE $1::bigint IS NULL OR id < $1 ORDER BY id DESC LIMIT $2
"""


async def read_passes(connection: Connection, before: int | None, size: int) -> list[Any]:
    """Return the newest passes before one."""
    return list(await connection.fetch(PASSES, before, size))
