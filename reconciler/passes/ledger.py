# SPDX-License-Identifier: Apache-2.0
"""The SQL by which a pass reads and moves rows of the send log. Every write repeats its condition in its WHERE."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import asyncpg
import msgspec

from reconciler.database.connection import Connection, Place
from reconciler.passes.feeds import MEET_WHOEVER_PAUSES
from reconciler.rule.limits import LIMITED, Live
from reconciler.rule.policy import Action, Verdict
from reconciler.rule.silence import Judged

LEASE: Final = timedelta(seconds=60)
"""How long a page that one pass has taken is left alone by the others. Only a courtesy: guards make them right."""


@dataclass(frozen=True, slots=True)
class Decided:
    """A verdict on one row, together with what the row must still be when it is written."""

    wire_key: str
    state: str
    fence: int | None
    verdict: Verdict
    witnesses: dict[str, Any]
    feed: str = ""
    judged: Judged | None = None
    """What its feed's silence is worth, where that was asked."""
    may_failover: bool = False
    """Of a release: whether the retry may go to another feed."""
    held_before: str | None = None
    """For which reason the row was held until now."""

    @property
    def witnesses_text(self) -> str:
        """What the witnesses said, as JSON."""
        return msgspec.json.encode(self.witnesses).decode()

    @property
    def inputs(self) -> str | None:
        """What the risk was computed from, as JSON."""
        return self.judged.text if self.judged else None

    @property
    def limited(self) -> bool:
        """Whether it takes a place in the feed's budget."""
        return self.verdict.reason in LIMITED


TAKE_BACK: Final = """
WITH over AS MATERIALIZED (
    SELECT wire_key FROM send_log
    WHERE state = 'pending' AND next_check_at IS NOT NULL AND release_basis = 'same_key_retry'
      AND (retry_until <= $1 OR expires_at <= $1) AND (feed = ANY ($4::text[])) = $5
      AND ($2::text IS NULL OR feed = $2) AND ($3::text IS NULL OR wire_key = $3)
    ORDER BY next_check_at, wire_key
    LIMIT 1000
)
UPDATE send_log s SET state = 'claimed', released_at = NULL, release_basis = NULL, retry_until = NULL,
    held_reason = NULL, held_since = NULL, next_check_at = $1, updated_at = clock_timestamp()
FROM (SELECT * FROM over ORDER BY wire_key) AS o
WHERE s.wire_key = o.wire_key AND s.state = 'pending' AND s.release_basis = 'same_key_retry'
  AND (s.retry_until <= $1 OR s.expires_at <= $1)
"""


async def take_back_same_key_releases(
    connection: Connection, now: datetime, feed: str | None, key: str | None, live: Live
) -> bool:
    """Turn a page of releases whose key window or expiry is reached into the claims they were; False: none was left."""
    return (await connection.execute(TAKE_BACK, now, feed, key, sorted(live.names), live.only)) != "UPDATE 0"


TAKE_DUE: Final = """
WITH due AS MATERIALIZED (
    SELECT wire_key, next_check_at FROM send_log
    WHERE state IN ('pending', 'claimed') AND next_check_at <= $1 AND ($2::text IS NULL OR feed = $2)
    ORDER BY next_check_at, wire_key
    LIMIT 1000
)
UPDATE send_log s SET next_check_at = clock_timestamp() + $3::interval
FROM (SELECT * FROM due ORDER BY wire_key) AS d
WHERE s.wire_key = d.wire_key AND s.next_check_at = d.next_check_at AND s.state IN ('pending', 'claimed')
RETURNING s.wire_key
"""


async def take_due(connection: Connection, due_at: datetime, feed: str | None) -> list[str]:
    """Lease a page of rows whose next look was due at the pass's start, and return their wire keys, sorted."""
    rows = await connection.fetch(TAKE_DUE, due_at, feed, LEASE)
    return sorted(row["wire_key"] for row in rows)


# CASE, not OR: of what an OR leaves the planner expects too little to walk the index, and would sort all for each page.
WATCHED_KEYS: Final = """
SELECT wire_key, next_check_at AS at FROM send_log
WHERE state IN ('pending', 'claimed') AND next_check_at IS NOT NULL
  AND (next_check_at, wire_key) > ($1::timestamptz, $2::text)
  AND CASE WHEN $3::text IS NULL THEN true ELSE feed = $3 END
  AND CASE WHEN $4::text IS NULL THEN true ELSE wire_key = $4 END
ORDER BY next_check_at, wire_key
LIMIT 1000
"""


async def watched_keys(
    connection: Connection, after: Place, feed: str | None, key: str | None
) -> tuple[list[str], Place | None]:
    """Return a page of the keys that passes watch, and where the next page begins. Changes nothing (dry runs)."""
    rows = await connection.fetch(WATCHED_KEYS, after.at, after.wire_key, feed, key)
    place = Place(rows[-1]["at"], rows[-1]["wire_key"]) if rows else None
    return [row["wire_key"] for row in rows], place


READ_ROWS: Final = """
SELECT s.wire_key, s.state, s.attempt - s.not_sent_attempts AS reached, s.fence, s.feed, s.message_class, s.submit_by,
       s.first_claimed_at, extract(epoch FROM s.claimed_at)::float8 AS claimed_at, s.cause IS NOT NULL AS reported,
       recipient_domain(s.recipient_key) AS domain, s.held_reason,
       s.unstamped, s.fingerprint IS NOT NULL AS has_fingerprint, s.released_at IS NOT NULL AS released, s.told,
       -- A same-key release that expires is taken back, never failed as one that surely wasn't sent.
       CASE WHEN s.release_basis IS DISTINCT FROM 'same_key_retry' THEN s.expires_at END AS expires_at,
       CASE WHEN num_nonnulls(s.provider_message_id, s.known_message_id) > 0
            THEN send_heard(s.wire_key, s.feed, s.recipient_key, s.provider_message_id, s.known_message_id)
       END AS said_by_id, e.*, clock_timestamp() AS now
FROM unnest($1::text[]) AS asked(wire_key)
JOIN send_log s ON s.wire_key = asked.wire_key
CROSS JOIN LATERAL (
    SELECT bool_or(testimony = 'accepted') AS accepted, bool_or(testimony = 'rejected') AS rejected,
           bool_or(testimony = 'none') AS other, min(reason) FILTER (WHERE testimony = 'rejected') AS words,
           bool_and(source = 'look-up') FILTER (WHERE testimony = 'rejected') AS rejection_looked_up
    FROM provider_event WHERE wire_key = s.wire_key
) AS e
WHERE s.state IN ('pending', 'claimed')
"""


async def read_rows(connection: Connection, keys: Sequence[str]) -> list[asyncpg.Record]:
    """Return undecided rows with what was heard of them, and the database's clock."""
    return await connection.fetch(READ_ROWS, keys)


# One that a witness called absent was judged at its release; one proved not sent can't have been accepted.
UNJUDGED_ATTEMPTS: Final = """
SELECT wire_key, feed, extract(epoch FROM claimed_at)::float8 AS claimed_at,
       extract(epoch FROM submit_by)::float8 AS submit_by
FROM verdict
WHERE wire_key = ANY ($1::text[]) AND action = 'released' AND reason IN ('same_key_retry', 'gave_up', 'operator')
  AND num_nulls(feed, claimed_at, submit_by) = 0
ORDER BY wire_key, id
"""


async def unjudged_attempts(connection: Connection, keys: Sequence[str]) -> list[asyncpg.Record]:
    """Return the earlier attempts of sends that may have been accepted and that no witness judged."""
    return await connection.fetch(UNJUDGED_ATTEMPTS, keys)


# What the rule decides in spite of a hold: what became of a row that has no attempt out, and the rejection of the only
# attempt. A send with a message id may have been heard of by it alone.
FAIL: Final = """
WITH v AS (
    SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[], $4::text[], $5::text[], $6::text[], $7::text[])
        AS v(wire_key, state, fence, reason, source, words, witnesses)
    ORDER BY wire_key
), moved AS (
    UPDATE send_log s SET state = 'failed', failed_at = clock_timestamp(), verdict_source = v.source,
        verdict_reason = v.reason, next_check_at = NULL, released_at = NULL, release_basis = NULL, retry_until = NULL,
        held_reason = NULL, held_since = NULL, updated_at = clock_timestamp()
    FROM v
    WHERE s.wire_key = v.wire_key AND s.state = v.state AND s.fence IS NOT DISTINCT FROM v.fence
      AND $8::timestamptz > clock_timestamp() - interval '1 minute'
      AND NOT EXISTS (SELECT FROM provider_event e WHERE e.wire_key = s.wire_key AND e.testimony = 'accepted')
      AND CASE WHEN num_nonnulls(s.provider_message_id, s.known_message_id) > 0 THEN send_heard(
              v.wire_key, s.feed, s.recipient_key, s.provider_message_id, s.known_message_id) = 'accepted'
          END IS NOT TRUE
      AND (NOT EXISTS (SELECT FROM feed_state f WHERE f.feed IN (s.feed, '*')
                      AND num_nonnulls(f.paused_at, f.breaker_at, f.suspect_at) > 0)
           OR s.state = 'pending' OR v.reason = 'rejected' AND s.attempt - s.not_sent_attempts <= 1)
    RETURNING s.wire_key, s.attempt, s.fence, s.feed, s.claimed_at, s.submit_by, s.provider_message_id,
              v.reason, v.source, v.words, v.witnesses
), noted AS (
    INSERT INTO verdict (wire_key, attempt, fence, pass, action, reason, source, who, witnesses, feed, claimed_at,
                         submit_by, message_id, note)
    SELECT wire_key, attempt, fence, $9, 'failed', reason, source, $10, witnesses::jsonb, feed, claimed_at, submit_by,
           provider_message_id, words
    FROM moved
)
SELECT reason, count(*) AS n FROM moved GROUP BY reason
"""


async def fail(
    connection: Connection, decided: Sequence[Decided], decided_at: datetime, pass_id: int, who: str
) -> Counter[str]:
    """Fail rows of which no acceptance was heard, and whose feed is not on hold where that counts.

    Returns how many it moved, by reason. Once `pause` has returned nothing fails for want of evidence: see `release`.
    """
    columns = [
        [d.wire_key for d in decided],
        [d.state for d in decided],
        [d.fence for d in decided],
        [d.verdict.reason for d in decided],
        [d.verdict.source for d in decided],
        [d.verdict.detail for d in decided],
        [d.witnesses_text for d in decided],
    ]
    async with connection.transaction(isolation="read_committed"):  # a later statement sees what committed
        await connection.execute(MEET_WHOEVER_PAUSES)
        rows = await connection.fetch(FAIL, *columns, decided_at, pass_id, who)
    return counted(rows)


# Many rows share what their risk was computed from.
POSTPONE: Final = """
WITH shared AS MATERIALIZED (
    SELECT n, inputs FROM jsonb_array_elements($9::text::jsonb) WITH ORDINALITY AS t(inputs, n)
), v AS (
    SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[], $4::text[], $5::timestamptz[], $6::int[], $7::text[],
                         $8::int[])
        AS v(wire_key, state, fence, held_reason, look_at, told, witnesses, shared)
    ORDER BY wire_key
), moved AS (
    UPDATE send_log s SET next_check_at = v.look_at, held_reason = v.held_reason, told = s.told + v.told,
        held_since = CASE WHEN s.held_reason IS NOT DISTINCT FROM v.held_reason THEN s.held_since
                          WHEN v.held_reason IS NOT NULL THEN clock_timestamp() END,
        updated_at = clock_timestamp()
    FROM v JOIN send_log old ON old.wire_key = v.wire_key
    WHERE s.wire_key = v.wire_key AND s.state = v.state AND s.fence IS NOT DISTINCT FROM v.fence
    RETURNING s.wire_key, s.attempt, s.fence, s.feed, s.claimed_at, s.submit_by, s.provider_message_id, v.witnesses,
              v.shared, v.held_reason, v.held_reason IS DISTINCT FROM old.held_reason AS changed
), noted AS (
    INSERT INTO verdict (wire_key, attempt, fence, pass, action, reason, source, who, witnesses, inputs, feed,
                         claimed_at, submit_by, message_id)
    SELECT wire_key, attempt, fence, $10, 'held', held_reason, 'inferred', $11, witnesses::jsonb, inputs, feed,
           claimed_at, submit_by, provider_message_id
    FROM moved LEFT JOIN shared ON shared.n = moved.shared WHERE changed AND held_reason IS NOT NULL
)
SELECT coalesce(held_reason, 'waiting') AS reason, count(*) AS n FROM moved GROUP BY held_reason
"""


async def postpone(connection: Connection, decided: Sequence[Decided], pass_id: int, who: str) -> Counter[str]:
    """Note of rows that can't be decided when they are looked at next and, where held, why."""
    columns = [
        [d.wire_key for d in decided],
        [d.state for d in decided],
        [d.fence for d in decided],
        [d.verdict.reason if d.verdict.action is Action.HELD else None for d in decided],
        [d.verdict.next_check_at for d in decided],
        [int(d.verdict.reason == "told_again") for d in decided],
        # Only a new reason is written down.
        [d.witnesses_text if d.verdict.reason != d.held_before else None for d in decided],
    ]
    inputs = [d.inputs if d.verdict.reason != d.held_before else None for d in decided]
    places = {one: n for n, one in enumerate(dict.fromkeys(one for one in inputs if one), 1)}
    shared = [places[one] if one else None for one in inputs]
    return counted(await connection.fetch(POSTPONE, *columns, shared, f"[{','.join(places)}]", pass_id, who))


def counted(rows: Sequence[asyncpg.Record]) -> Counter[str]:
    """Return rows of (reason, n) as counts."""
    return Counter({row["reason"]: row["n"] for row in rows})
