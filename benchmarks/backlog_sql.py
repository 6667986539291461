# SPDX-License-Identifier: Apache-2.0
"""The SQL of the backlog benchmark: how its tables are filled, and the one statement that is a pass's limit."""

from __future__ import annotations

from typing import Final

MAKE_MONTHS: Final = """
DO $$
DECLARE
    first_day timestamptz;
    part text;
BEGIN
    SET LOCAL timezone = 'UTC';
    FOR first_day IN
        SELECT date_trunc('month', clock_timestamp()) - n * interval '1 month' FROM generate_series(2, 3) AS n
    LOOP
        part := 'provider_event_' || to_char(first_day, 'YYYYMM');
        CONTINUE WHEN to_regclass(part) IS NOT NULL;  -- a month has ended since it was migrated
        EXECUTE format('CREATE TABLE %I (LIKE provider_event INCLUDING DEFAULTS INCLUDING CONSTRAINTS)', part);
        EXECUTE format('ALTER TABLE provider_event ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)',
            part, first_day, first_day + interval '1 month');
    END LOOP;
END $$
"""

# $1 sends of the last 90 days, over $2 feeds, more of late, each heard of once: after the first $3 numbers, and before
# the last $4. Those of the last hours were answered:
# they are the controls of the claims. Of those before, four in eleven are known from the feed only, as are the claims
# among the newer ones: that share is usual here, no burst. Keys are hashes, so that nothing lies in the order in which
# it is looked for.
FILL_SENT: Final = """
INSERT INTO send_log (wire_key, send_key, state, feed, recipient, recipient_key, attempt, fence, claimed_by,
    first_claimed_at, claimed_at, submit_by, answered_at, provider_message_id, verdict_source, verdict_reason, sent_at,
    delivery, delivery_at, heard_at, created_at, updated_at)
SELECT left(encode(sha256(('sent:' || n)::bytea), 'hex'), 48), 'order.receipt:' || n || ':user' || n || '@example.com',
    'sent', 'feed-' || n % $2, 'user' || n || '@example.com', 'user' || n || '@example.com', 1, n, 'worker-' || n % 16,
    at, at, at + interval '60 s', CASE WHEN answered THEN at + interval '300 ms' END,
    md5('message:' || n) || '@mx.example.com', CASE WHEN answered THEN 'sender' ELSE 'feed' END,
    CASE WHEN answered THEN 'answered' ELSE 'accepted' END, at + interval '300 ms', 'delivered', at + interval '8 s',
    CASE WHEN answered THEN at + interval '10 s' END, at, at
FROM (SELECT n, age, clock_timestamp() - interval '5 min' - age AS at,
             age < interval '20 hours' OR n * 7 % 11 > 3 AS answered
      FROM generate_series($3::int + 1, $3 + $1::int) AS n,
          LATERAL (SELECT $4 + (interval '90 days' - $4) * (1 - (n - $3) / $1::float8) ^ 5) AS a(age)) AS sends
"""

# A backlog of claims: an hour to twenty old, as thick among the sends everywhere; or ($3) of an outage of two hours
# that ended an hour ago. Of one in ten nothing was heard.
FILL_CLAIMED: Final = """
INSERT INTO send_log (wire_key, send_key, state, feed, recipient, recipient_key, attempt, fence, claimed_by,
    first_claimed_at, claimed_at, submit_by, cause, next_check_at, created_at, updated_at)
SELECT left(encode(sha256(('claimed:' || n)::bytea), 'hex'), 48),
    'order.receipt:c' || n || ':user' || n || '@example.com',
    'claimed', 'feed-' || n % $2, 'user' || n || '@example.com', 'user' || n || '@example.com', 1, 100000000 + n,
    'worker-' || n % 16, at, at, at + interval '60 s', 'timed out', at + interval '16 min', at, at
FROM (SELECT n, clock_timestamp() - CASE WHEN $3 THEN interval '3 hours' - n / $1::float8 * interval '2 hours'
                                    ELSE interval '90 days' * (0.2154 + 0.1766 * (1 - n / $1::float8)) ^ 5 END AS at
      FROM generate_series(1, $1) AS n) AS claims
"""

# One event for each, in the order of its arrival, with some 400 raw bytes: how many pages there are is what matters.
FILL_EVENTS: Final = """
INSERT INTO provider_event (feed, message_id, event_id, partition_at, occurred_at, received_at, wire_key, kind,
    testimony, recipient, source, raw)
SELECT feed, coalesce(provider_message_id, md5('message:' || send_key) || '@mx.example.com'),
    substr(md5('event:' || send_key), 1, 22) || ':' || to_char(at, 'YYYY-MM-DD'), at, at, at + interval '2 s', wire_key,
    'delivered', 'accepted', recipient_key, 'http',
    convert_to(repeat(md5(send_key) || md5(wire_key), 6), 'UTF8')
FROM (SELECT *, claimed_at + interval '8 s' AS at FROM send_log
      WHERE state = 'sent' OR fence % 10 <> 0 ORDER BY claimed_at) AS heard
"""

FILL_DELIVERIES: Final = """
INSERT INTO feed_delivery (feed, minute, outcome, n, last_at)
SELECT 'feed-' || n, date_trunc('minute', clock_timestamp()), 'stored', 1, clock_timestamp()
FROM generate_series(0, $1 - 1) AS n
"""

# Nothing was heard of any claim.
SILENCE_CLAIMS: Final = (
    "DELETE FROM provider_event e USING send_log s WHERE s.wire_key = e.wire_key AND s.state = 'claimed'"
)

# What an outcome walk begins with; the events of the fixture are older, so that it is not what is measured.
OUTCOMES_ARE_UP_TO_DATE: Final = "UPDATE feed_state SET outcomes_until = clock_timestamp() WHERE feed = '*'"

# Everything that a pass does, in one statement: evidence by wire key, the guarded move to sent with delivery and
# message id, the release of those between three heard controls on each side, the guards of a release, the verdicts.
LIMIT: Final = """
WITH watched AS MATERIALIZED (
    SELECT wire_key, state, fence, feed, message_class, claimed_at, submit_by,
           attempt - not_sent_attempts AS reached
    FROM send_log WHERE state IN ('pending', 'claimed') AND next_check_at IS NOT NULL
), heard AS MATERIALIZED (
    SELECT w.wire_key, bool_or(testimony = 'accepted') AS accepted, bool_or(testimony = 'rejected') AS rejected,
           min(message_id) FILTER (WHERE testimony = 'accepted' AND message_id NOT LIKE '~%') AS message_id,
           max(ARRAY[delivery_rank(kind), extract(epoch FROM coalesce(occurred_at, received_at))]::float8[]) AS best
    FROM watched w JOIN provider_event e ON e.wire_key = w.wire_key
    GROUP BY w.wire_key
), moved AS (
    UPDATE send_log s SET
        state = CASE WHEN h.accepted THEN 'sent' ELSE 'failed' END,
        sent_at = CASE WHEN h.accepted THEN clock_timestamp() END,
        failed_at = CASE WHEN NOT h.accepted THEN clock_timestamp() END,
        verdict_source = 'feed', verdict_reason = CASE WHEN h.accepted THEN 'accepted' ELSE 'rejected' END,
        provider_message_id = coalesce(s.provider_message_id, h.message_id),
        delivery = delivery_name(h.best[1]::int),
        delivery_at = CASE WHEN h.best[1] > 0 THEN to_timestamp(h.best[2]) END,
        next_check_at = NULL, released_at = NULL, release_basis = NULL, retry_until = NULL,
        held_reason = NULL, held_since = NULL, updated_at = clock_timestamp()
    FROM (SELECT w.state AS was, w.fence, w.reached, h.* FROM watched w JOIN heard h USING (wire_key)) AS h
    WHERE s.wire_key = h.wire_key AND s.state = h.was AND s.fence IS NOT DISTINCT FROM h.fence
      AND (h.accepted OR h.rejected AND (h.was = 'pending' OR h.reached <= 1))
    RETURNING s.wire_key, s.attempt, s.fence, s.state, s.verdict_reason, s.feed, s.claimed_at, s.submit_by,
              s.provider_message_id
), absent AS MATERIALIZED (
    SELECT w.wire_key, w.fence, count(*) FILTER (WHERE c.side = 'before') AS before,
           count(*) FILTER (WHERE c.side = 'after') AS after, count(c.heard_at) AS heard
    FROM watched w
    CROSS JOIN LATERAL (
        (SELECT heard_at, 'before' AS side FROM control
         WHERE feed = w.feed AND message_class = w.message_class AND wire_key <> w.wire_key
           AND first_claimed_at <= w.claimed_at AND first_claimed_at > w.claimed_at - interval '1 hour'
         ORDER BY first_claimed_at DESC LIMIT 3)
        UNION ALL
        (SELECT heard_at, 'after' FROM control
         WHERE feed = w.feed AND message_class = w.message_class AND wire_key <> w.wire_key
           AND first_claimed_at > w.claimed_at AND first_claimed_at < w.claimed_at + interval '1 hour'
         ORDER BY first_claimed_at LIMIT 3)
    ) AS c
    WHERE w.state = 'claimed' AND w.submit_by + interval '15 min' <= clock_timestamp()
      AND NOT EXISTS (SELECT FROM heard h WHERE h.wire_key = w.wire_key)
    GROUP BY w.wire_key, w.fence
), released AS (
    UPDATE send_log s SET state = 'pending', released_at = clock_timestamp(), release_basis = 'absent',
        retry_until = NULL, next_check_at = clock_timestamp() + interval '1 min', told = 0, held_reason = NULL,
        held_since = NULL, updated_at = clock_timestamp()
    FROM absent a
    WHERE s.wire_key = a.wire_key AND s.state = 'claimed' AND s.fence = a.fence
      AND a.before = 3 AND a.after = 3 AND a.heard = 6 AND s.feed = ANY ($1)
      AND NOT EXISTS (SELECT FROM feed_state f WHERE f.feed IN (s.feed, '*')
                      AND num_nonnulls(f.paused_at, f.breaker_at, f.suspect_at) > 0)
    RETURNING s.wire_key, s.attempt, s.fence, s.feed, s.claimed_at, s.submit_by, s.provider_message_id,
              a.before, a.after, a.heard
), noted AS (
    INSERT INTO verdict (wire_key, attempt, fence, pass, action, reason, source, who, witnesses, feed, claimed_at,
                         submit_by, message_id)
    SELECT wire_key, attempt, fence, 1, state, verdict_reason, 'feed', 'limit', NULL, feed, claimed_at, submit_by,
           provider_message_id
    FROM moved
    UNION ALL
    SELECT wire_key, attempt, fence, 1, 'released', 'absent', 'inferred', 'limit',
           jsonb_build_object('feed', jsonb_build_object('answer', 'absent', 'reason', 'absent'),
               'controls', jsonb_build_object('before', before, 'after', after, 'heard', heard)),
           feed, claimed_at, submit_by, provider_message_id
    FROM released
)
SELECT (SELECT count(*) FROM moved) AS sent, (SELECT count(*) FROM released) AS released
"""
