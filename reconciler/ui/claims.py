# SPDX-License-Identifier: Apache-2.0
"""Sends as the page lists them, a page after the other: undecided ones by their next look, failed ones newest first."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from reconciler.database.connection import Connection, as_wire_key, database_clock

STATES: Final = ("held", "claimed", "released", "capped", "pending", "failed")
"""As `reconciler status` calls them, and failed."""


class Wanted(NamedTuple):
    """Which sends are asked for; None: whatever it is."""

    state: str | None = None
    feed: str | None = None
    reason: str | None = None
    message_class: str | None = None


class Place(NamedTuple):
    """After which send a page begins."""

    at: datetime
    """Its next look, or when it failed."""
    wire_key: str

    def __str__(self) -> str:
        return f"{self.at.isoformat()}~{self.wire_key}"

    @classmethod
    def parse(cls, text: str) -> Place:
        """Return the place that a link names. Raises ValueError."""
        begin, _, wire_key = text.partition("~")
        at = datetime.fromisoformat(begin)
        if at.tzinfo is None or "\0" in wire_key:
            raise ValueError("is no place")
        try:
            return cls(at.astimezone(UTC), wire_key)
        except OverflowError:
            raise ValueError("is no time of our era") from None


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
    """None: it failed."""
    row_state: str
    """As the row has it: what a decision is about."""

    @property
    def place(self) -> Place:
        """Return where it stands in its list."""
        return Place(self.next_check_at or self.since, self.wire_key)


@dataclass(frozen=True, slots=True)
class Page:
    """Some sends, and where the next page begins, if there is one."""

    now: datetime
    sends: list[Listed]
    then: Place | None


# Of a thousand along the index of rows that passes look at those that fit, and the last one, after which the next
# thousand begins: so no plan depends on how many a filter seems to fit. A row whose next look moves on comes again:
# a later page may repeat it, none misses it. States and reasons are those of `insight.status.UNDECIDED`, which a test
# holds it to.
UNDECIDED: Final = """
SELECT wire_key, send_key, feed, message_class, attempt, state, reason, since, next_check_at, row_state, fits
FROM (
    SELECT *, ($4::text IS NULL OR state = $4) AND ($5::text IS NULL OR feed = $5) AND ($6::text IS NULL OR reason = $6)
              AND ($7::text IS NULL OR message_class = $7) AS fits,
           lead(wire_key) OVER (ORDER BY next_check_at, wire_key) IS NULL AS last
    FROM (
        SELECT wire_key, send_key, feed, message_class, attempt, next_check_at, state AS row_state,
            CASE WHEN held_reason IS NOT NULL THEN 'held' WHEN capped_until > $1::timestamptz THEN 'capped'
                 WHEN released_at IS NOT NULL THEN 'released' ELSE state END AS state,
            coalesce(held_reason, release_basis,
                CASE WHEN state = 'pending' THEN 'scheduled' WHEN submit_by > $1::timestamptz THEN 'submitting'
                     ELSE 'silence' END) AS reason,
            coalesce(held_since, released_at, CASE WHEN state = 'claimed' THEN claimed_at ELSE updated_at END) AS since
        FROM send_log
        WHERE state IN ('pending', 'claimed') AND next_check_at IS NOT NULL
          AND (next_check_at, wire_key) > (coalesce($2::timestamptz, '-infinity'), coalesce($3::text, ''))
        ORDER BY next_check_at, wire_key LIMIT 1000
    ) AS looked_at
) AS rows
WHERE fits OR last
ORDER BY next_check_at, wire_key
"""


async def _undecided(
    connection: Connection, wanted: Wanted, now: datetime, after: Place | None, size: int
) -> list[Listed]:
    found: dict[str, Listed] = {}
    while len(found) < size:
        rows = await connection.fetch(UNDECIDED, now, *(after or (None, None)), *wanted)
        if not rows:
            break
        for row in rows:
            if row["fits"]:  # the first reading stays: after the place of a later one, sends would be passed over
                found.setdefault(row["wire_key"], Listed(*tuple(row)[:-1]))
        after = Place(rows[-1]["next_check_at"], rows[-1]["wire_key"])
    return list(found.values())[:size]


FAILED: Final = """
SELECT wire_key, send_key, feed, message_class, attempt, next_check_at, state, state AS row_state,
       coalesce(verdict_reason, '') AS reason, failed_at AS since
FROM send_log
WHERE state = 'failed' AND ($1::text IS NULL OR feed = $1) AND ($2::text IS NULL OR verdict_reason = $2)
  AND ($3::text IS NULL OR message_class = $3)
  AND (failed_at, wire_key) < (coalesce($4::timestamptz, 'infinity'), coalesce($5::text, ''))
ORDER BY failed_at DESC, wire_key DESC LIMIT $6
"""


async def read_claims(connection: Connection, wanted: Wanted, after: Place | None, size: int) -> Page:
    """Return the sends asked for that come after a place."""
    now = await database_clock(connection)
    if wanted.state == "failed":
        rest = (wanted.feed, wanted.reason, wanted.message_class, *(after or (None, None)), size + 1)
        found = [Listed(**row) for row in await connection.fetch(FAILED, *rest)]
    else:
        found = await _undecided(connection, wanted, now, after, size + 1)
    return Page(now, found[:size], found[size - 1].place if len(found) > size else None)


OF_A_SEND: Final = "SELECT wire_key FROM send_log WHERE wire_key = wire_key($1)"


async def wire_key_of(connection: Connection, key: str) -> str:
    """Return the wire key of a send key or wire key, with the installation's namespace.

    Of the key as it was written, if a send has it; else without the spaces that came with it from where it was copied.
    """
    found: str | None = await connection.fetchval(OF_A_SEND, key)
    return found or await as_wire_key(connection, key.strip() or key)


PASSES: Final = """
SELECT id, started_at, ended_at, who, dry_run, feed, wire_key, counts, clock_timestamp() AS now
FROM pass WHERE $1::bigint IS NULL OR id < $1 ORDER BY id DESC LIMIT $2
"""


async def read_passes(connection: Connection, before: int | None, size: int) -> list[Any]:
    """Return the newest passes before one."""
    return list(await connection.fetch(PASSES, before, size))
