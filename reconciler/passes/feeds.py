# SPDX-License-Identifier: Apache-2.0
"""What a pass knows of each feed: holds, and whether its last delivery could be stored. Pause and resume."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from reconciler.database.connection import Connection
from reconciler.passes import restore
from reconciler.rule.policy import HOLDS, Hold, holds_of

ALL_FEEDS: Final = "*"

FEED_HEALTH: Final = """
SELECT asked.feed, send_hold(asked.feed) AS hold,
       d.stored_at IS NOT NULL AND (d.refused_at IS NULL OR d.stored_at > d.refused_at) AS newest_was_stored,
       d.unread_at IS NOT NULL AND (d.stored_at IS NULL OR d.unread_at >= d.stored_at) AS queue_unread,
       d.stored_at IS NOT NULL OR d.refused_at IS NOT NULL AS delivered,
       EXISTS (SELECT FROM feed_state s WHERE s.feed = asked.feed AND s.filling_until > clock_timestamp()) AS filling
FROM unnest($1::text[]) AS asked(feed)
CROSS JOIN LATERAL (
    SELECT max(last_at) FILTER (WHERE outcome = 'stored') AS stored_at,
           max(last_at) FILTER (WHERE outcome LIKE 'refused:%' AND outcome <> 'refused:missing') AS refused_at,
           max(last_at) FILTER (WHERE outcome = 'later:queue') AS unread_at
    FROM feed_delivery
    WHERE feed = asked.feed AND minute > statement_timestamp() - interval '1 day'  -- a volatile time uses no index
) AS d
"""


@dataclass(frozen=True, slots=True)
class Health:
    """How a feed stands."""

    hold: Hold | None = None
    delivered: bool = False
    """True if anything arrived within a day, stored or refused."""
    newest_was_stored: bool = False
    """False too where the newest delivery was refused (a rotated secret): such a feed can't speak of absence. A request
    that carries no signature at all doesn't count: anybody can send one, and its neighbours would be unheard of."""
    queue_unread: bool = False
    """True where its queue could not be read since anything was stored."""
    filling: bool = False
    """True while a replay or back-fill of the feed runs: what it will bring is not known yet."""

    @property
    def cannot_speak(self) -> Literal["silent", "refused", "queue", "filling"] | None:
        """Why the feed's silence means nothing at all, whatever it tells of the sends around one; None: it may."""
        if not self.delivered:
            return "silent"
        if not self.newest_was_stored:
            return "refused"
        if self.queue_unread:
            return "queue"
        return "filling" if self.filling else None


async def feed_health(connection: Connection, feeds: set[str]) -> dict[str, Health]:
    """Return how the given feeds stand."""
    rows = await connection.fetch(FEED_HEALTH, sorted(feeds))
    return {row.pop("feed"): Health(**row) for row in map(dict, rows)}


# The pause is committed first, so that it works at once; then whoever pauses waits for every release and failure under
# way (they share this lock, and look at the holds after they got it).
MEET_RELEASES: Final = "SELECT FROM feed_state WHERE feed = '*' FOR UPDATE"
MEET_WHOEVER_PAUSES: Final = "SELECT FROM feed_state WHERE feed = '*' FOR KEY SHARE"
PAUSE: Final = """
INSERT INTO feed_state (feed, paused_at, reason, who) VALUES ($1, clock_timestamp(), $2, $3)
ON CONFLICT (feed) DO UPDATE SET paused_at = coalesce(feed_state.paused_at, clock_timestamp()), reason = $2, who = $3,
    updated_at = clock_timestamp()
"""


async def pause(connection: Connection, feed: str, reason: str, who: str) -> None:
    """Stop releases of a feed (or ALL_FEEDS). Once this has returned nothing is released, or failed unheard of."""
    await connection.execute(PAUSE, feed, reason, who)
    await connection.execute(MEET_RELEASES)


class UnseenHold(Exception):
    """A hold came after whoever resumes had looked. Its text names it."""


# The lock keeps further holds out until these are lifted.
HELD: Final = """
SELECT ARRAY[paused_at, breaker_at, suspect_at] FROM feed_state WHERE feed = $1 FOR NO KEY UPDATE
"""
RESUME: Final = """
UPDATE feed_state SET paused_at = NULL, breaker_at = NULL, suspect_at = NULL, reason = $2, who = $3,
    resumed_at = clock_timestamp(), updated_at = clock_timestamp()
WHERE feed = $1 AND num_nonnulls(paused_at, breaker_at, suspect_at) > 0
"""


async def resume(connection: Connection, feed: str, reason: str, who: str, seen: Collection[str] = HOLDS) -> bool:
    """Lift every hold of a feed (or ALL_FEEDS); returns False where there was none.

    Of a suspicion too: then the database is accepted as it is, and fences jump past all that were ever given out.
    Raises UnseenHold, and lifts none, where there is one that is not among those `seen`.
    """
    await restore.keep_highest_fence(connection, feed)
    async with connection.transaction(isolation="read_committed"):
        since = await connection.fetchval(HELD, feed)
        if unseen := set(holds_of(since) if since else ()) - set(seen):
            raise UnseenHold(" and ".join(sorted(unseen)))
        await restore.accept(connection, feed)
        return (await connection.execute(RESUME, feed, reason, who)) == "UPDATE 1"


FEEDS_EXIST: Final = "INSERT INTO feed_state (feed) SELECT unnest($1::text[]) ON CONFLICT DO NOTHING"
LOCK_FEEDS: Final = """
SELECT FROM feed_state WHERE feed = ANY ($1::text[]) ORDER BY feed COLLATE "C" FOR NO KEY UPDATE
"""


async def lock_feeds(connection: Connection, feeds: Sequence[str]) -> None:
    """Wait, in a transaction, for others who count what these feeds may still do; a later statement sees theirs."""
    await connection.execute(FEEDS_EXIST, feeds)
    await connection.execute(LOCK_FEEDS, feeds)


async def meet_releases(connection: Connection) -> None:
    """Wait for every release under way. Called after a hold was committed; from then on nothing passes it."""
    await connection.execute(MEET_RELEASES)


# Where another hold stands its reason is kept: it came first, and `resume` lifts both together.
OPEN_BREAKER: Final = """
INSERT INTO feed_state (feed, breaker_at, reason, who) VALUES ($1, clock_timestamp(), $2, $3)
ON CONFLICT (feed) DO UPDATE SET breaker_at = clock_timestamp(), updated_at = clock_timestamp(),
    reason = CASE WHEN num_nonnulls(feed_state.paused_at, feed_state.suspect_at) = 0 THEN $2 ELSE feed_state.reason END,
    who = CASE WHEN num_nonnulls(feed_state.paused_at, feed_state.suspect_at) = 0 THEN $3 ELSE feed_state.who END
WHERE feed_state.breaker_at IS NULL
"""


async def set_breaker(connection: Connection, feed: str, reason: str, who: str) -> bool:
    """Open a feed's breaker as a part of the caller's transaction; returns False where it was open already.

    After its commit the caller must `meet_releases`.
    """
    return (await connection.execute(OPEN_BREAKER, feed, reason, who)) == "INSERT 0 1"


async def open_breaker(connection: Connection, feed: str, reason: str, who: str) -> bool:
    """Stop releases of a feed until a person resumes; returns False where they were stopped already.

    Once this has returned nothing is released. Not to be called within a transaction: it would wait for releases that
    wait for it.
    """
    opened = await set_breaker(connection, feed, reason, who)
    await meet_releases(connection)
    return opened


REFUSED_TOO_OFTEN: Final = """
SELECT asked.feed, d.refused
FROM unnest($1::text[]) AS asked(feed)
LEFT JOIN feed_state s ON s.feed = asked.feed
CROSS JOIN LATERAL (
    SELECT coalesce(sum(n) FILTER (WHERE outcome LIKE 'refused:%' AND outcome <> 'refused:missing'), 0)::bigint
               AS refused,
           coalesce(sum(n) FILTER (WHERE outcome = 'stored'), 0)::bigint AS stored
    FROM feed_delivery
    WHERE feed = asked.feed AND minute > statement_timestamp() - interval '15 min'
      AND (s.resumed_at IS NULL OR last_at > s.resumed_at)
) AS d
WHERE d.refused >= $2 AND d.refused > d.stored AND s.breaker_at IS NULL
"""
TOO_OFTEN: Final = 10
"""Refused deliveries within a quarter of an hour, and more than were stored: the secrets don't fit any more."""


async def stop_refused_feeds(connection: Connection, feeds: Sequence[str], who: str) -> list[str]:
    """Open the breakers of feeds whose deliveries are refused one after the other, and return which."""
    found = []
    for feed, refused in await connection.fetch(REFUSED_TOO_OFTEN, feeds, TOO_OFTEN):
        reason = (
            f"{refused} deliveries refused within 15 minutes: compare its secrets with the provider's settings; where "
            "its dashboard shows no failed delivery they were a stranger's"
        )
        if await open_breaker(connection, feed, reason, who):
            found.append(feed)
    return found
