# SPDX-License-Identifier: Apache-2.0
"""Frequency caps: lets the database know which the settings ask for. The claim keeps to them (migration 0021)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Final

import asyncpg

from reconciler.configuration.settings import Settings
from reconciler.units import format_duration

CAPS_SECONDS: Final = 60.0
"""How often the daemon looks that the database knows them: another daemon may have other settings."""


@dataclass(frozen=True, slots=True)
class Cap:
    """At most so many sends of a class to one recipient, within a window that slides or begins with the calendar."""

    message_class: str
    most: int
    span: timedelta | None
    calendar: str | None
    zone: str

    @property
    def window(self) -> str:
        """The window, in words."""
        return format_duration(self.span) if self.span else f"a {self.calendar} of {self.zone}"


def caps_of(settings: Settings) -> list[Cap]:
    """Return the caps that the settings ask for."""
    return [
        Cap(
            name,
            found.cap,
            found.cap_window if isinstance(found.cap_window, timedelta) else None,
            None if isinstance(found.cap_window, timedelta) else found.cap_window,
            found.cap_zone,
        )
        for name, found in sorted(settings.classes.items())
        if found.cap is not None
    ]


def keeping_caps(pool: asyncpg.Pool, caps: Sequence[Cap]) -> Callable[[], Awaitable[None]]:
    """Return what the daemon does each minute."""
    begun = False

    async def work() -> None:
        nonlocal begun
        await keep_caps(pool, caps, look=not begun)
        begun = True

    return work


# A zone that the database doesn't know fails here, and not in each claim.
KEEP_CAPS: Final = """
WITH wished AS (
    SELECT * FROM unnest($1::text[], $2::int[], $3::interval[], $4::text[], $5::text[])
        AS w(message_class, most, span, calendar, zone)
    WHERE clock_timestamp() AT TIME ZONE w.zone IS NOT NULL
), gone AS (
    DELETE FROM frequency_cap c WHERE c.message_class <> ALL ($1::text[]) RETURNING true
), kept AS (
    INSERT INTO frequency_cap AS c (message_class, most, span, calendar, zone) SELECT * FROM wished
    ON CONFLICT (message_class) DO UPDATE SET most = excluded.most, span = excluded.span, calendar = excluded.calendar,
        zone = excluded.zone, changed_at = clock_timestamp()
    WHERE (c.most, c.span, c.calendar, c.zone)
        IS DISTINCT FROM (excluded.most, excluded.span, excluded.calendar, excluded.zone)
    RETURNING true
)
SELECT (SELECT count(*) FROM gone) + (SELECT count(*) FROM kept)
"""
# What another cap refused is asked again: by whoever pulls, and by a campaign. In the order of the index over what is
# capped: in that of the keys the whole log may be walked over. Whoever holds a row is passed over, not waited for.
LIFT: Final = """
WITH page AS MATERIALIZED (
    SELECT l.wire_key FROM send_log l
    WHERE l.state = 'pending' AND l.capped_until > clock_timestamp()
      AND coalesce((cap_of(l.message_class)).changed_at > l.updated_at, true)
    ORDER BY l.campaign, l.capped_until LIMIT 1000 FOR UPDATE SKIP LOCKED
), lifted AS (
    UPDATE send_log l SET capped_until = NULL, updated_at = clock_timestamp(),
        next_check_at = CASE WHEN l.released_at IS NULL THEN l.next_check_at ELSE clock_timestamp() END
    FROM page p WHERE l.wire_key = p.wire_key AND l.state = 'pending' AND l.capped_until IS NOT NULL
    RETURNING true
)
SELECT count(*) FROM lifted
"""


async def keep_caps(pool: asyncpg.Pool, caps: Sequence[Cap], *, look: bool = True) -> None:
    """Make the table of caps what the settings say, and let sends that an earlier cap refused be claimed again.

    With `look` these are looked for even where nothing has changed: whoever changed it may have died before he did.
    Raises the database's errors; then the table stays what it was.
    """
    columns = zip(*map(astuple, caps), strict=True) if caps else ([],) * 5
    changed = await pool.fetchval(KEEP_CAPS, *map(list, columns))
    while (changed or look) and await pool.fetchval(LIFT):
        pass
