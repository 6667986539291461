# SPDX-License-Identifier: Apache-2.0
"""What became of messages that were taken: `delivery` of sent rows follows the events that come after the verdict.

An outcome never decides anything, so here a watermark on the time of storing is good enough; it is walked again by
OVERLAP, which outlasts the longest transaction of an inbox. Verdicts look from the rows' side instead.

With it goes when the feed first spoke of the send, by which passes measure feeds. Where that is missed, the events are
asked; where an earlier event is committed later, it is noted too late. Both are the careful side.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from reconciler.database.connection import Connection
from webhooks.inbox import LONGEST_SECONDS

OVERLAP: Final = timedelta(seconds=LONGEST_SECONDS + 5)
FIRST_LOOK: Final = timedelta(hours=1)
"""How far back the first walk begins."""
SLICE: Final = timedelta(seconds=15)
"""How much of the events' time one statement covers: two seconds of work where a thousand sends a second change."""
FAR: Final = timedelta(hours=1)
"""How far behind a walk is where nobody ran passes for long, and how much silence it then passes at a time at most."""

OUTCOMES_UNTIL: Final = "SELECT outcomes_until FROM feed_state WHERE feed = '*'"
SET_OUTCOMES_UNTIL: Final = """
UPDATE feed_state SET outcomes_until = $1
WHERE feed = '*' AND (outcomes_until IS NULL OR outcomes_until < $1 OR outcomes_until > clock_timestamp())
"""
STORED: Final = "SELECT count(*) FROM provider_event WHERE received_at > $1 AND received_at <= $2"

# The function `send_outcome`, asked of each row, says the same and takes five times as long.
FOLLOW: Final = """
WITH spoken AS MATERIALIZED (
    SELECT wire_key, feed, message_id, recipient,
           ARRAY[delivery_rank(kind), extract(epoch FROM coalesce(occurred_at, received_at))]::float8[] AS said
    FROM provider_event
    WHERE received_at > $1 AND received_at <= $2 AND source <> 'sender' AND delivery_rank(kind) > 0
), touched AS (  -- only rows of which it says more than is known: the overlap is walked for little
    SELECT l.wire_key FROM spoken e JOIN send_log l ON l.wire_key = e.wire_key
    WHERE l.state = 'sent' AND e.said > ARRAY[delivery_rank(l.delivery), extract(epoch FROM l.delivery_at)]::float8[]
    UNION
    SELECT l.wire_key FROM spoken e
    CROSS JOIN LATERAL (  -- the only row that it fits
        SELECT min(wire_key) AS wire_key FROM (
            SELECT l.wire_key FROM send_log l
            WHERE l.feed = e.feed AND (l.provider_message_id = e.message_id OR l.known_message_id = e.message_id)
              AND (e.recipient IS NULL OR l.recipient_key IS NULL OR l.recipient_key = e.recipient)
            LIMIT 2) AS two
        HAVING count(*) = 1
    ) AS one
    JOIN send_log l ON l.wire_key = one.wire_key
    WHERE e.wire_key LIKE '~%'
      AND l.state = 'sent' AND e.said > ARRAY[delivery_rank(l.delivery), extract(epoch FROM l.delivery_at)]::float8[]
), outcome AS (
    SELECT l.wire_key, best.best, best.heard_at
    FROM touched JOIN send_log l USING (wire_key)
    CROSS JOIN LATERAL (
        SELECT max(ARRAY[delivery_rank(kind), extract(epoch FROM coalesce(occurred_at, received_at))]::float8[])
                   AS best,
               min(received_at) FILTER (WHERE e.wire_key = l.wire_key AND e.feed = l.feed AND is_feeds_voice(source)
                   AND received_at >= l.first_claimed_at) AS heard_at
        FROM provider_event e
        WHERE e.wire_key = l.wire_key
           OR e.wire_key IN (stand_in_key(l.feed, l.provider_message_id), stand_in_key(l.feed, l.known_message_id))
              AND (e.recipient IS NULL OR l.recipient_key IS NULL OR l.recipient_key = e.recipient)
              AND NOT EXISTS (
                  SELECT FROM send_log o
                  WHERE o.feed = l.feed AND (o.provider_message_id = e.message_id OR o.known_message_id = e.message_id)
                    AND o.wire_key <> l.wire_key
                    AND (e.recipient IS NULL OR o.recipient_key IS NULL OR o.recipient_key = e.recipient))
    ) AS best
    WHERE l.state = 'sent' AND best.best[1] > 0
    ORDER BY l.wire_key
)
UPDATE send_log l SET delivery = delivery_name(o.best[1]::int), delivery_at = to_timestamp(o.best[2]),
    heard_at = coalesce(l.heard_at, o.heard_at), updated_at = clock_timestamp()
FROM outcome o
WHERE l.wire_key = o.wire_key AND l.state = 'sent'
  AND (l.delivery, l.delivery_at) IS DISTINCT FROM (delivery_name(o.best[1]::int), to_timestamp(o.best[2]))
"""


async def follow_outcomes(connection: Connection, now: datetime) -> int:
    """Bring `delivery` of sent rows up to date with the events stored until now; returns how many rows changed."""
    until = await connection.fetchval(OUTCOMES_UNTIL)
    since = min(until, now) - OVERLAP if until else now - FIRST_LOOK  # the clock may have gone back
    changed, step = 0, SLICE
    while since < now:
        upto = min(since + step, now)
        if now - since > FAR and not await connection.fetchval(STORED, since, upto):
            step = min(2 * step, FAR)
        elif step > SLICE:
            step = SLICE
            continue
        else:
            changed += int((await connection.execute(FOLLOW, since, upto)).rpartition(" ")[2])
        await connection.execute(SET_OUTCOMES_UNTIL, upto)
        since = upto
    return changed
