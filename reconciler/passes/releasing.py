# SPDX-License-Identifier: Apache-2.0
"""The SQL by which a pass releases claims, within the limits of their feeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from reconciler.database.connection import Connection
from reconciler.metrics import EXPECTED_DUPLICATES
from reconciler.passes.feeds import MEET_WHOEVER_PAUSES, lock_feeds
from reconciler.passes.ledger import Decided, counted
from reconciler.rule.limits import Allowance, Limit, Usage, allowance, held_instead

RELEASE: Final = """
WITH v AS (
    SELECT * FROM unnest($1::text[], $2::bigint[], $3::text[], $4::text[], $5::timestamptz[], $6::timestamptz[],
                         $7::float8[], $8::text[], $9::text[], $10::bool[])
        AS v(wire_key, fence, basis, source, look_at, until, risk, witnesses, inputs, may_failover)
    ORDER BY wire_key
), moved AS (
    UPDATE send_log s SET state = 'pending', released_at = clock_timestamp(), release_basis = v.basis,
        retry_until = v.until, next_check_at = v.look_at, may_failover = v.may_failover, told = 1, held_reason = NULL,
        held_since = NULL, updated_at = clock_timestamp()
    FROM v
    WHERE s.wire_key = v.wire_key AND s.state = 'claimed' AND s.fence = v.fence
      AND $11::timestamptz > clock_timestamp() - interval '1 minute'
      AND NOT EXISTS (SELECT FROM provider_event e WHERE e.wire_key = s.wire_key)
      AND CASE WHEN num_nonnulls(s.provider_message_id, s.known_message_id) > 0 THEN send_heard(
              v.wire_key, s.feed, s.recipient_key, s.provider_message_id, s.known_message_id)
          END IS NULL
      AND NOT EXISTS (SELECT FROM feed_state f WHERE f.feed IN (s.feed, '*')
                      AND num_nonnulls(f.paused_at, f.breaker_at, f.suspect_at) > 0)
    RETURNING s.wire_key, s.attempt, s.fence, s.feed, s.claimed_at, s.submit_by,
              coalesce(s.provider_message_id, s.known_message_id) AS message_id,
              v.basis, v.source, v.risk, v.witnesses, v.inputs
), noted AS (
    INSERT INTO verdict (wire_key, attempt, fence, pass, action, reason, source, who, witnesses, risk, inputs, feed,
                         claimed_at, submit_by, message_id)
    SELECT wire_key, attempt, fence, $12, 'released', basis, source, $13, witnesses::jsonb, risk, inputs::jsonb, feed,
           claimed_at, submit_by, message_id
    FROM moved
)
SELECT basis AS reason, count(*) AS n, coalesce(sum(risk), 0)::float8 AS risk FROM moved GROUP BY basis
"""


@dataclass(frozen=True, slots=True)
class Released:
    """What a page of releases became."""

    counts: Counter[str]
    """Sends that were released, by reason."""
    refused: Sequence[Decided]
    """Those that the limits of their feeds don't allow now; their verdicts are `held`."""


async def release(
    connection: Connection,
    decided: Sequence[Decided],
    limit_for: Callable[[str], Limit],
    decided_at: datetime,
    pass_id: int,
    who: str,
) -> Released:
    """Release claims of which nothing was heard, whose feed is not on hold, and whose feed's limits allow it.

    `pause` waits for the lock that is taken here, and the release looks at the holds in a later statement: once
    `pause` has returned nothing is released. Likewise whoever releases on a feed waits for the others' commit before
    it counts what they released: all processes share the limits exactly.
    """
    wanted = Counter(d.feed for d in decided if d.limited)
    async with connection.transaction(isolation="read_committed"):  # a later statement sees what committed
        await connection.execute(MEET_WHOEVER_PAUSES)
        allowed = await _allowances(connection, wanted, limit_for)
        now, refused = _allowed(decided, allowed, decided_at)
        columns = [
            [d.wire_key for d in now],
            [d.fence for d in now],
            [d.verdict.reason for d in now],
            [d.verdict.source for d in now],
            [d.verdict.next_check_at for d in now],
            [d.verdict.retry_until for d in now],
            [d.verdict.risk for d in now],
            [d.witnesses_text for d in now],
            [d.inputs for d in now],
            [d.may_failover for d in now],
        ]
        rows = await connection.fetch(RELEASE, *columns, decided_at, pass_id, who)
    for row in rows:
        EXPECTED_DUPLICATES.labels(row["reason"]).inc(row["risk"])
    return Released(counted(rows), refused)


def _allowed(
    decided: Sequence[Decided], allowed: Mapping[str, Allowance], decided_at: datetime
) -> tuple[list[Decided], list[Decided]]:
    """Return the releases that the limits allow, and those that they don't as held ones."""
    left = Counter({feed: allowance.n for feed, allowance in allowed.items()})
    now, refused = [], []
    for d in decided:
        if not d.limited:
            now.append(d)
        elif left[d.feed] > 0:
            left[d.feed] -= 1
            now.append(d)
        else:
            refused.append(replace(d, verdict=held_instead(d.verdict, allowed[d.feed], decided_at)))
    return now, refused


# The verdicts are the places taken; who resumes a feed grants it new ones. A release was wrong if its send was accepted
# after all. Claims and proved releases are counted no further than the wanted ones need, or what each page costs would
# grow with the feed. (A volatile time would use no index.)
USAGE: Final = """
SELECT f.feed, hour.n AS last_hour, claims.n AS claims, hour.unproved, awaited.proved
FROM unnest($1::text[], $2::bigint[], $3::float8[], $4::float8[], $5::interval[])
    AS f(feed, wanted, share, canary, awaited)
CROSS JOIN LATERAL (
    SELECT greatest(statement_timestamp() - interval '1 hour',
                    max(resumed_at) FILTER (WHERE resumed_at <= statement_timestamp())) AS since
    FROM feed_state WHERE feed IN (f.feed, '*')
) AS budget
CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE decided_at > budget.since) AS n,
           count(*) FILTER (WHERE decided_at > statement_timestamp() - f.awaited) AS unproved
    FROM verdict
    WHERE feed = f.feed AND action = 'released' AND reason IN ('absent', 'looked_up', 'gave_up')
      AND decided_at > statement_timestamp() - greatest(f.awaited, interval '1 hour')
) AS hour
CROSS JOIN LATERAL (
    SELECT CASE WHEN f.share > 0 THEN least(ceil((hour.n + f.wanted) / f.share) + 1, 1e7) ELSE 0 END::bigint AS claims,
           CASE WHEN f.canary < 1 THEN least(ceil(f.canary * (hour.unproved + f.wanted)) + 1, 1000) ELSE 0 END::bigint
               AS proved
) AS needed
CROSS JOIN LATERAL (
    SELECT count(*) AS n FROM (SELECT FROM send_log WHERE feed = f.feed
        AND claimed_at > statement_timestamp() - interval '1 hour' ORDER BY claimed_at DESC LIMIT needed.claims) AS c
) AS claims
CROSS JOIN LATERAL (
    SELECT coalesce(min(n) FILTER (WHERE wrong) - 1, count(*)) AS proved
    FROM (
        SELECT row_number() OVER (ORDER BY v.decided_at DESC) AS n,
               s.state = 'sent' AND s.attempt = v.attempt
               OR EXISTS (SELECT FROM duplicate d WHERE d.wire_key = v.wire_key AND d.sort = 'duplicate') AS wrong
        FROM (SELECT * FROM verdict
              WHERE feed = f.feed AND action = 'released' AND reason IN ('absent', 'looked_up', 'gave_up')
                AND decided_at > statement_timestamp() - interval '1 day'
                AND decided_at <= statement_timestamp() - f.awaited
              ORDER BY decided_at DESC LIMIT needed.proved) AS v
        JOIN send_log s USING (wire_key)
    ) AS earlier
) AS awaited
"""


async def _allowances(
    connection: Connection, wanted: Counter[str], limit_for: Callable[[str], Limit]
) -> dict[str, Allowance]:
    if not wanted:
        return {}
    feeds = sorted(wanted)
    limits = {feed: limit_for(feed) for feed in feeds}
    await lock_feeds(connection, feeds)
    columns = [(wanted[feed], limits[feed].share, limits[feed].canary, limits[feed].awaited) for feed in feeds]
    found = {}
    for feed, *used in await connection.fetch(USAGE, feeds, *map(list, zip(*columns, strict=True))):
        found[feed] = allowance(limits[feed], Usage(*used), wanted[feed])
    return found
