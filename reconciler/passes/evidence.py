# SPDX-License-Identifier: Apache-2.0
"""Settles rows by evidence, set by set: what was heard of a send moves its row, whatever the time of its next look."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import asyncpg

from reconciler.database.connection import Connection, Place
from reconciler.rule.limits import Live


@dataclass(frozen=True, slots=True)
class Settled:
    """What settling one page of rows by evidence did."""

    sent: int
    failed: int
    place: Place | None
    """Where the next page begins; None: this was the last."""


Settle = Callable[[Connection, Place, str | None, str | None, Live, int, str], Awaitable[Settled]]
"""Settles one page of rows by evidence: `(connection, after, feed, wire key, live feeds, pass, who)`."""


# One CASE, for the planner knows nothing of it: of what the conditions leave it would expect too little to walk the
# index, and would sort all for each page.
SETTLE_WATCHED: Final = """
WITH page AS MATERIALIZED (
    SELECT wire_key, next_check_at, state, fence, feed, recipient_key, provider_message_id, known_message_id,
           attempt - not_sent_attempts AS reached
    FROM send_log
    WHERE state IN ('pending', 'claimed') AND next_check_at IS NOT NULL
      AND (next_check_at, wire_key) > ($1::timestamptz, $2::text)
      AND CASE WHEN ($3::text IS NULL OR feed = $3) AND ($4::text IS NULL OR wire_key = $4)
                AND (feed = ANY ($7::text[])) = $8 AND hashtext(wire_key) & 1 = $9::int THEN true ELSE false END
    ORDER BY next_check_at, wire_key
    LIMIT 5000
), heard AS (
    SELECT p.*, e.message_id, e.best, e.words,
           CASE WHEN e.accepted THEN testified_by(e.first_accepting, e.last_accepting)
                WHEN by_id.said = 'accepted' THEN 'feed'
                ELSE testified_by(e.first_rejecting, e.last_rejecting) END AS source,
           coalesce(e.accepted, false) OR by_id.said IS NOT DISTINCT FROM 'accepted' AS accepted,
           coalesce(e.rejected, false) OR by_id.said IS NOT DISTINCT FROM 'rejected' AS rejected
    FROM page p
    LEFT JOIN (
        SELECT wire_key, bool_or(testimony = 'accepted') AS accepted, bool_or(testimony = 'rejected') AS rejected,
               min(message_id) FILTER (WHERE testimony = 'accepted' AND message_id NOT LIKE '~%') AS message_id,
               max(ARRAY[delivery_rank(kind), extract(epoch FROM coalesce(occurred_at, received_at))]::float8[])
                   AS best,
               min(reason) FILTER (WHERE testimony = 'rejected') AS words,
               min(source) FILTER (WHERE testimony = 'accepted') AS first_accepting,
               max(source) FILTER (WHERE testimony = 'accepted') AS last_accepting,
               min(source) FILTER (WHERE testimony = 'rejected') AS first_rejecting,
               max(source) FILTER (WHERE testimony = 'rejected') AS last_rejecting
        FROM provider_event WHERE wire_key = ANY (ARRAY(SELECT wire_key FROM page ORDER BY wire_key))
        GROUP BY wire_key
    ) AS e ON e.wire_key = p.wire_key
    CROSS JOIN LATERAL (
        SELECT CASE WHEN num_nonnulls(p.provider_message_id, p.known_message_id) > 0
            THEN send_heard(p.wire_key, p.feed, p.recipient_key, p.provider_message_id, p.known_message_id) END AS said
    ) AS by_id
), moved AS (
    UPDATE send_log s SET
        state = CASE WHEN h.accepted THEN 'sent' ELSE 'failed' END,
        sent_at = CASE WHEN h.accepted THEN clock_timestamp() END,
        failed_at = CASE WHEN NOT h.accepted THEN clock_timestamp() END,
        verdict_source = h.source, verdict_reason = CASE WHEN h.accepted THEN 'accepted' ELSE 'rejected' END,
        provider_message_id = coalesce(s.provider_message_id, h.message_id),
        delivery = delivery_name(h.best[1]::int),
        delivery_at = CASE WHEN h.best[1] > 0 THEN to_timestamp(h.best[2]) END,
        next_check_at = NULL, released_at = NULL, release_basis = NULL, retry_until = NULL,
        held_reason = NULL, held_since = NULL, updated_at = clock_timestamp()
    FROM (SELECT * FROM heard WHERE accepted OR rejected AND (state = 'pending' OR reached <= 1) ORDER BY wire_key) AS h
    WHERE s.wire_key = h.wire_key AND s.state = h.state AND s.fence IS NOT DISTINCT FROM h.fence
    RETURNING s.wire_key, s.attempt, s.fence, s.state, s.verdict_reason, s.verdict_source, s.feed, s.claimed_at,
              s.submit_by, s.provider_message_id, CASE WHEN NOT h.accepted THEN h.words END AS words
), noted AS (
    INSERT INTO verdict (wire_key, attempt, fence, pass, action, reason, source, who, feed, claimed_at, submit_by,
                         message_id, note)
    SELECT wire_key, attempt, fence, $5, state, verdict_reason, verdict_source, $6, feed, claimed_at, submit_by,
           provider_message_id, words
    FROM moved
)
SELECT (SELECT count(*) FROM moved WHERE state = 'sent') AS sent,
       (SELECT count(*) FROM moved WHERE state = 'failed') AS failed, next_check_at AS at, wire_key
FROM page ORDER BY next_check_at DESC, wire_key DESC LIMIT 1
"""


async def settle_watched(
    connection: Connection,
    after: Place,
    feed: str | None,
    key: str | None,
    live: Live,
    pass_id: int,
    who: str,
    half: int,
) -> Settled:
    """Move a page of claimed and released rows that evidence decides, whatever the time of their next look.

    `half` says of which half of all rows, 0 or 1: two walks go side by side, and meet in no row. (On tables that are
    distributed with Citus the first half is all of them.)
    """
    row = await connection.fetchrow(
        SETTLE_WATCHED, after.at, after.wire_key, feed, key, pass_id, who, sorted(live.names), live.only, half
    )
    return _settled(row)


SETTLE_FAILED: Final = """
WITH page AS MATERIALIZED (
    SELECT wire_key, failed_at, feed, recipient_key, provider_message_id, known_message_id
    FROM send_log
    WHERE state = 'failed' AND (failed_at, wire_key) > ($1::timestamptz, $2::text)
      AND CASE WHEN ($3::text IS NULL OR feed = $3) AND ($4::text IS NULL OR wire_key = $4)
                AND (feed = ANY ($7::text[])) = $8 THEN true ELSE false END
    ORDER BY failed_at, wire_key
    LIMIT 2000
), heard AS (
    SELECT p.*, send_heard(p.wire_key, p.feed, p.recipient_key, p.provider_message_id, p.known_message_id) AS said
    FROM page p
    WHERE num_nonnulls(p.provider_message_id, p.known_message_id) > 0
       OR EXISTS (SELECT FROM provider_event e WHERE e.wire_key = p.wire_key AND e.testimony = 'accepted')
), moved AS (
    UPDATE send_log s SET state = 'sent', sent_at = clock_timestamp(), failed_at = NULL,
        verdict_source = h.source, verdict_reason = 'accepted',
        delivery = delivery_name(h.best[1]::int),
        delivery_at = CASE WHEN h.best[1] > 0 THEN to_timestamp(h.best[2]) END, updated_at = clock_timestamp()
    FROM (SELECT wire_key, heard.failed_at, send_outcome(l) AS best,
                 send_testified_by(wire_key, 'accepted') AS source
          FROM heard JOIN send_log l USING (wire_key)
          WHERE said = 'accepted' ORDER BY wire_key) AS h
    WHERE s.wire_key = h.wire_key AND s.state = 'failed' AND s.failed_at = h.failed_at
    RETURNING s.wire_key, s.attempt, s.fence, s.verdict_source, s.feed, s.claimed_at, s.submit_by,
              s.provider_message_id
), noted AS (
    INSERT INTO verdict (wire_key, attempt, fence, pass, action, reason, source, who, feed, claimed_at, submit_by,
                         message_id, note)
    SELECT wire_key, attempt, fence, $5, 'sent', 'accepted', verdict_source, $6, feed, claimed_at, submit_by,
           provider_message_id, 'late evidence: the row had failed'
    FROM moved
)
SELECT (SELECT count(*) FROM moved) AS sent, 0 AS failed, failed_at AS at, wire_key
FROM page ORDER BY failed_at DESC, wire_key DESC LIMIT 1
"""


async def settle_failed(
    connection: Connection,
    after: Place,
    feed: str | None,
    key: str | None,
    live: Live,
    pass_id: int,
    who: str,
) -> Settled:
    """Turn a page of failed rows into sent ones where acceptance was heard of after all."""
    row = await connection.fetchrow(
        SETTLE_FAILED, after.at, after.wire_key, feed, key, pass_id, who, sorted(live.names), live.only
    )
    return _settled(row)


def _settled(row: asyncpg.Record | None) -> Settled:
    if row is None:
        return Settled(0, 0, None)
    return Settled(row["sent"], row["failed"], Place(row["at"], row["wire_key"]))
