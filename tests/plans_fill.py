# SPDX-License-Identifier: Apache-2.0
"""A log as large as a customer's: sends of all states over feeds and months, their events, and all that goes with them.

Of two logs of different size the newest day is alike, and all that is undecided: only the past is longer.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Final

import asyncpg
from kit import make_month

RECENT: Final = 8000
"""Sends of the last day."""
UNDECIDED: Final = 8000
"""Claimed and released ones, which passes look at."""
BUSY: Final = "busy"
"""The feed of every second send."""
FEEDS: Final = (BUSY, *(f"feed-{n}" for n in range(7)))
CLASSES: Final = ("receipts", "news", "alerts")
OF_CAMPAIGN: Final = 5000
"""Sends of each campaign that were never given out."""
HELD_BACK: Final = 300
"""Sends of the campaign that a cap refused."""

SILENT, HEARD, RUNNING, HELD, RELEASED, AGAIN, SAME_KEY = (0, 1, 2, 3), (4,), (5,), (6,), (7,), (8,), (9,)
"""The sorts of undecided sends, by the last digit of their number: claims of which nothing was heard, those that were
accepted, those whose senders may still submit, held ones; released ones; claims after a release; same-key releases."""


def keys(sort: tuple[int, ...], most: int = UNDECIDED) -> list[str]:
    """The wire keys of undecided sends of a sort, sorted."""
    return sorted(wire_key("claim", n) for n in numbers(sort)[:most])


def numbers(sort: tuple[int, ...]) -> list[int]:
    """The numbers of undecided sends of a sort; the fence of each is FIRST_FENCE later."""
    return [n for n in range(1, UNDECIDED + 1) if n % 10 in sort]


def wire_key(table: str, n: int) -> str:
    """The wire key of the nth send of one kind: `send`, `claim` or a campaign."""
    return hashlib.md5(f"{table}:{n}".encode(), usedforsecurity=False).hexdigest()


FIRST_FENCE: Final = 10_000_000

SECONDARY_INDEXES: Final = """
SELECT indexname, indexdef FROM pg_indexes WHERE tablename = 'send_log' AND indexname <> 'send_log_pkey'
"""

FILL_CAMPAIGNS: Final = """
INSERT INTO campaign (name, feed, message_class, state, loaded_at, updated_at)
SELECT name, 'busy', 'news', state, clock_timestamp() - age, clock_timestamp() - age
FROM (VALUES ('spring', 'active', interval '1 day'), ('autumn', 'cancelled', interval '89 days')) AS v(name, state, age)
"""

# $1 sends over 89 days, then RECENT ones over one. A hash of the number spreads them; one in a hundred each was proved
# by its feed, was given out again, was refused at once, or was rejected by an event. All others were answered.
FILL_SENDS: Final = """
INSERT INTO send_log (wire_key, send_key, state, feed, message_class, recipient, recipient_key, campaign, source,
    fingerprint, attempt, fence, claimed_by, first_claimed_at, claimed_at, submit_by, answered_at, provider_message_id,
    known_message_id, verdict_source, verdict_reason, sent_at, failed_at, delivery, delivery_at, created_at, updated_at)
SELECT md5('send:' || n), md5('send:' || n), CASE WHEN fate IN (2, 3) THEN 'failed' ELSE 'sent' END, feed,
    message_class, address, address, CASE WHEN feed = 'busy' AND h % 37 = 0 AND n > $1 THEN 'spring' END,
    'shop-' || h % 3, md5('content:' || n), CASE WHEN fate = 1 THEN 2 ELSE 1 END, n, 'worker-' || n % 16, at,
    CASE WHEN fate = 1 THEN at + interval '5 min' ELSE at END,
    CASE WHEN fate = 1 THEN at + interval '6 min' ELSE at + interval '1 min' END,
    CASE WHEN fate NOT IN (0, 2, 3) THEN ended END, CASE WHEN fate NOT IN (2, 3) THEN 'm-' || n END,
    CASE WHEN h % 50 = 0 THEN 'k-' || n END, CASE WHEN fate IN (0, 3) THEN 'feed' ELSE 'sender' END,
    CASE fate WHEN 0 THEN 'accepted' WHEN 2 THEN 'refused' WHEN 3 THEN 'rejected' ELSE 'answered' END,
    CASE WHEN fate NOT IN (2, 3) THEN ended END, CASE WHEN fate IN (2, 3) THEN ended END,
    CASE WHEN fate NOT IN (2, 3) THEN 'delivered' END, CASE WHEN fate NOT IN (2, 3) THEN ended END, at, ended
FROM (
    SELECT *, at + CASE fate WHEN 0 THEN interval '9 min' WHEN 1 THEN interval '301 s' WHEN 3 THEN interval '8 min'
                        ELSE interval '300 ms' END AS ended
    FROM (
        SELECT n, h, h / 400 % 100 AS fate, CASE h % 2 WHEN 0 THEN 'busy' ELSE 'feed-' || h / 2 % 7 END AS feed,
            (string_to_array('receipts,receipts,receipts,receipts,receipts,receipts,receipts,news,news,alerts', ','))
                [1 + h / 40 % 10] AS message_class,
            'user' || n || '@example' || h / 40000 % 8 || '.com' AS address,
            clock_timestamp() - interval '10 min' - CASE
                WHEN n > $1::int THEN interval '1 day' * ($1 + $2::int - n) / $2
                ELSE interval '1 day' + interval '89 days' * ($1 - n) / $1 END AS at
        FROM (SELECT n, hashint4(n)::bigint + 2147483648 AS h
              FROM generate_series(1, $1::int + $2::int) AS n) AS numbered
    ) AS sends
) AS ended
"""

FILL_UNDECIDED: Final = """
INSERT INTO send_log (wire_key, send_key, state, feed, message_class, recipient, recipient_key, fingerprint, attempt,
    fence, claimed_by, first_claimed_at, claimed_at, submit_by, cause, known_message_id, next_check_at, released_at,
    release_basis, retry_until, told, held_reason, held_since, created_at, updated_at)
SELECT md5('claim:' || n), md5('claim:' || n), CASE WHEN sort IN (7, 9) THEN 'pending' ELSE 'claimed' END,
    CASE n / 10 % 2 WHEN 0 THEN 'busy' ELSE 'feed-' || n / 20 % 7 END,
    (ARRAY['receipts', 'news', 'alerts'])[1 + n / 10 % 3],
    'user' || n || '@example.com', 'user' || n || '@example.com', md5('content:c' || n),
    CASE WHEN sort = 8 THEN 2 ELSE 1 END, 10000000 + n, 'worker-' || n % 16,
    CASE WHEN sort = 8 THEN at - interval '10 min' ELSE at END, at, at + interval '1 min',
    CASE WHEN sort IN (0, 1, 2, 4, 8) THEN 'timed out' END, CASE WHEN n % 50 = 0 THEN 'kc-' || n END,
    CASE WHEN sort IN (5, 6) THEN t + interval '10 min' ELSE t - n * interval '100 ms' END,
    CASE WHEN sort IN (7, 9) THEN t - interval '90 min' - n * interval '100 ms' END,
    CASE sort WHEN 7 THEN 'absent' WHEN 9 THEN 'same_key_retry' END,
    CASE WHEN sort = 9 THEN t - interval '1 min' END, (sort IN (7, 9))::int,
    CASE WHEN sort = 6 THEN 'risk' END, CASE WHEN sort = 6 THEN t - interval '20 min' END, at, at
FROM (SELECT n, n % 10 AS sort, t, CASE WHEN n % 10 = 5 THEN t ELSE
          t - interval '2 hours' + interval '1 hour' * n / $1::int END AS at
      FROM clock_timestamp() AS t, generate_series(1, $1) AS n) AS claims
"""

# Sends that nobody claimed: of both campaigns, refused by a cap, and those of an application, that an operator ended.
FILL_UNCLAIMED: Final = """
INSERT INTO send_log (wire_key, send_key, state, feed, message_class, recipient, recipient_key, campaign, capped_until,
    verdict_source, verdict_reason, sent_at, created_at, updated_at)
SELECT md5('spring:' || n), md5('spring:' || n), 'pending', 'busy', 'news', 's' || n || '@example.com',
    's' || n || '@example.com', 'spring', CASE WHEN n <= $2::int THEN clock_timestamp() + interval '1 day' END, NULL,
    NULL, NULL::timestamptz, clock_timestamp(), clock_timestamp()
FROM generate_series(1, $1::int) AS n
UNION ALL
SELECT md5('autumn:' || n), md5('autumn:' || n), 'pending', 'busy', 'news', 's' || n || '@example.com',
    's' || n || '@example.com', 'autumn', NULL, NULL, NULL, NULL, clock_timestamp() - interval '89 days',
    clock_timestamp()
FROM generate_series(1, $1) AS n
UNION ALL
SELECT md5('capped:' || n), md5('capped:' || n), 'pending', 'busy', 'news', 's' || n || '@example.com',
    's' || n || '@example.com', NULL, clock_timestamp() - interval '89 days', NULL, NULL, NULL, clock_timestamp(),
    clock_timestamp()
FROM generate_series(1, $2) AS n
UNION ALL
SELECT md5('told:' || n), md5('told:' || n), 'sent', 'busy', 'news', 's' || n || '@example.com',
    's' || n || '@example.com', NULL, NULL, 'operator', 'operator', at, at, at
FROM generate_series(1, $2) AS n, LATERAL (SELECT clock_timestamp() - n * interval '7 hours' AS at) AS past
"""

# Each send was heard of, some without our key, some by a time that no partition is for; two in five were opened, the
# answers of the last day are there, and one event in fifty is another installation's.
FILL_EVENTS: Final = """
INSERT INTO provider_event (feed, message_id, event_id, partition_at, occurred_at, received_at, wire_key, kind,
    testimony, recipient, source, attempt, fence, raw)
SELECT feed, message_id, event_id, CASE WHEN at IS NULL THEN '1970-01-01 00:00:00+00' ELSE at END, at,
    coalesce(at, until) + interval '2 s', wire_key, kind, testimony, recipient_key, source, attempt, fence, raw
FROM (
    SELECT feed, coalesce(provider_message_id, 'm-' || fence) AS message_id, 'd:' || fence AS event_id,
        CASE WHEN wire_key > '04' THEN coalesce(sent_at, failed_at, submit_by) END AS at,
        coalesce(sent_at, failed_at, submit_by) AS until,
        CASE WHEN wire_key < '06' AND provider_message_id IS NOT NULL THEN stand_in_key(feed, provider_message_id)
             ELSE wire_key END AS wire_key, CASE WHEN failed_at IS NULL THEN 'delivered' ELSE 'bounced' END AS kind,
        CASE WHEN failed_at IS NULL OR wire_key < '1' THEN 'accepted' ELSE 'rejected' END AS testimony,
        recipient_key, 'http' AS source, NULL::int AS attempt, NULL::bigint AS fence, '\\x7b7d'::bytea AS raw
    FROM send_log WHERE (sent_at IS NOT NULL OR verdict_source = 'feed' OR state = 'claimed' AND fence % 10 = 4
                         OR state = 'failed' AND wire_key < '1') AND claimed_at IS NOT NULL
    UNION ALL
    SELECT feed, provider_message_id, 'o:' || fence, sent_at + interval '3 min', NULL, wire_key, 'opened', 'accepted',
        recipient_key, 'http', NULL, NULL, '\\x7b7d'
    FROM send_log WHERE provider_message_id IS NOT NULL AND wire_key > '9a'
    UNION ALL
    SELECT feed, provider_message_id, 'answer:' || fence, claimed_at, NULL, wire_key, 'sent', 'accepted', NULL,
        'sender', attempt, fence, ''
    FROM send_log WHERE answered_at > clock_timestamp() - interval '1 day'
    UNION ALL
    SELECT feed, 'x-' || fence, 'x:' || fence, claimed_at, NULL, md5('foreign:' || fence), 'delivered', 'accepted',
        recipient_key, 'http', NULL, NULL, '\\x7b7d'
    FROM send_log WHERE wire_key < '05' AND claimed_at IS NOT NULL
) AS said
ORDER BY coalesce(at, until)
"""

FILL_VERDICTS: Final = """
INSERT INTO verdict (wire_key, decided_at, attempt, fence, action, reason, source, who, feed, claimed_at, submit_by,
    risk, inputs)
SELECT * FROM (
    SELECT wire_key, sent_at AS at, attempt, fence, 'sent', 'accepted', 'feed', 'pass', feed, claimed_at, submit_by,
        NULL::float8, NULL::jsonb
    FROM send_log WHERE state = 'sent' AND verdict_source = 'feed'
    UNION ALL
    SELECT wire_key, first_claimed_at + interval '4 min', 1, fence + 20000000,
        'released', 'absent', 'inferred', 'pass', feed, first_claimed_at, first_claimed_at + interval '1 min', 0.004,
        '{"risk": 0.004, "reported": true}'
    FROM send_log WHERE attempt = 2 AND state = 'sent'
    UNION ALL
    SELECT wire_key, failed_at, attempt, fence, 'failed', 'rejected', 'feed', 'pass', feed, claimed_at, submit_by, NULL,
        NULL
    FROM send_log WHERE state = 'failed' AND verdict_source = 'feed'
    UNION ALL
    SELECT wire_key, released_at, 1, fence, 'released', release_basis, 'inferred', 'pass', feed, claimed_at, submit_by,
        0.004, '{"risk": 0.004, "reported": true}'
    FROM send_log WHERE released_at IS NOT NULL
    UNION ALL
    SELECT wire_key, claimed_at - interval '1 min', 1, fence + 20000000, 'released', 'gave_up', 'inferred', 'pass',
        feed, first_claimed_at, first_claimed_at + interval '1 min', 0.5, '{"risk": 0.5, "reported": true}'
    FROM send_log WHERE state = 'claimed' AND attempt = 2
    UNION ALL
    SELECT wire_key, held_since, 1, fence, 'held', held_reason, 'inferred', 'pass', feed, claimed_at, submit_by, NULL,
        '{"risk": 0.04, "reported": true}'
    FROM send_log WHERE held_reason IS NOT NULL
    UNION ALL
    SELECT wire_key, sent_at, attempt, fence, 'held', 'few_controls', 'inferred', 'pass', feed, claimed_at, submit_by,
        NULL, '{"risk": 0.04, "reported": true}'
    FROM send_log WHERE answered_at IS NOT NULL AND wire_key > 'e'
    UNION ALL
    SELECT wire_key, sent_at, 0, NULL, 'sent', 'operator', 'operator', 'ada', feed, NULL, NULL, NULL, NULL
    FROM send_log WHERE state = 'sent' AND claimed_at IS NULL
) AS decided ORDER BY at
"""

# What else grows with the log.
FILL_THE_REST: Final = (
    """
    INSERT INTO shadow_verdict (wire_key, decided_at, attempt, fence, action, reason, source, who, feed)
    SELECT md5('send:' || n), clock_timestamp() - interval '40 days' * (1 - n::float8 / $1), 1, n, 'held', 'risk',
        'inferred', 'pass', 'busy' FROM generate_series(1, $1::int, 10) AS n
    """,
    """
    INSERT INTO look_up (wire_key, feed, asked_at, who, answered_at, answer)
    SELECT md5('send:' || n), 'busy', at, 'pass', at, 'absent'
    FROM generate_series(1, $1::int, 4) AS n,
        LATERAL (SELECT clock_timestamp() - interval '80 days' * (1 - n::float8 / $1) AS at) AS t
    """,
    """
    INSERT INTO asked_again (wire_key, first_at, asked_at, asked_as)
    SELECT md5('send:' || n), at, at, 'already_sent'
    FROM generate_series(1, $1::int, 8) AS n,
        LATERAL (SELECT clock_timestamp() - interval '80 days' * (1 - n::float8 / $1) AS at) AS t
    """,
    """
    INSERT INTO release_outbox (wire_key, what, fence, created_at, next_try_at, tried_since, tries, delivered_at)
    SELECT md5('send:' || n), 'sent', n, at, at, at, 1, at
    FROM generate_series(1, $1::int, 10) AS n,
        LATERAL (SELECT clock_timestamp() - interval '175 hours' * (1 - n::float8 / $1) AS at) AS t
    UNION ALL
    SELECT md5('claim:' || n), 'released', 10000000 + n, at, at, at, 0, NULL
    FROM generate_series(7, 3000, 10) AS n,
        LATERAL (SELECT clock_timestamp() + interval '1 s' * (n - 300) AS at) AS t
    """,
    """
    UPDATE release_outbox SET dead_at = clock_timestamp(), last_error = 'gone'
    WHERE delivered_at IS NULL AND id % 9 = 0
    """,
    """
    INSERT INTO idempotency (id, fingerprint, state, lease_until, keep_until, wire_key, status, headers, body)
    SELECT md5('request:' || n), 'f', 'answered', t, t + n * interval '1 s' - interval '200 s', md5('send:' || n), 200,
        '[]', '{}' FROM clock_timestamp() AS t, generate_series(1, $1::int, 10) AS n
    """,
    """
    INSERT INTO feed_delivery (feed, minute, outcome, n, last_at)
    SELECT 'feed-' || f, at, outcome, 5, at
    FROM generate_series(1, $1::int / 40) AS n, generate_series(0, 6) AS f, unnest(ARRAY['stored', 'refused:missing'])
        AS outcome, LATERAL (SELECT date_trunc('minute', clock_timestamp()) - n * interval '5 min' AS at) AS t
    UNION ALL
    SELECT 'busy', at, 'stored', 500, at
    FROM generate_series(0, $1 / 40) AS n,
        LATERAL (SELECT date_trunc('minute', clock_timestamp()) - n * interval '5 min' AS at) AS t
    """,
    """
    INSERT INTO pass (started_at, ended_at, who, counts)
    SELECT at, at, 'host:1', '{"outcomes": 3}'
    FROM generate_series(1, $1::int, 5) AS n,
        LATERAL (SELECT clock_timestamp() - interval '30 days' * (1 - n::float8 / $1) AS at) AS t
    """,
    """
    INSERT INTO duplicate (wire_key, sort, found_at, feed, evidence)
    SELECT md5('send:' || n), 'ids_differ', clock_timestamp() - interval '80 days' * (1 - n::float8 / $1), 'busy',
        '{"because": "ids_differ", "acceptances": []}' FROM generate_series(1, $1::int, 500) AS n
    """,
    """
    INSERT INTO cap_taken (recipient_key, message_class, wire_keys, taken_at)
    SELECT 'user' || n || '@example0.com', 'news', ARRAY[md5('send:' || n)], ARRAY[clock_timestamp()
        - interval '60 days' * (1 - n::float8 / $1)] FROM generate_series(1, $1::int, 10) AS n
    """,
    """
    INSERT INTO suppression (recipient_key, source)
    SELECT 'gone' || n || '@example.com', 'test' FROM generate_series(1, $1::int, 10) AS n
    """,
)


TABLES: Final = "SELECT relname FROM pg_class WHERE relnamespace = current_schema()::regnamespace AND relkind = 'r'"

TIMES: Final = 100
"""How many times as many rows the planner takes to be there: it plans for a log of millions, whose scans cost more than
looking for a thousand keys does."""

PRETEND: Final = """
UPDATE pg_class SET reltuples = reltuples * $1
WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'i')
"""


async def fill(dsn: str, older: int) -> None:
    """Fill a migrated database with `older` sends and what all logs have in common, and let the planner know."""
    connection = await asyncpg.connect(dsn, statement_cache_size=0)
    try:
        await connection.execute("SET session_replication_role = replica; SET jit = off; SET work_mem = '64MB'")
        month = (await connection.fetchval("SELECT clock_timestamp()")).replace(day=15)
        for n in (2, 3, 4):
            await make_month(connection, month - n * timedelta(days=30))
        indexes = await connection.fetch(SECONDARY_INDEXES)
        for index in indexes:
            await connection.execute(f"DROP INDEX {index['indexname']}")
        await connection.execute(FILL_CAMPAIGNS)
        await connection.execute(FILL_SENDS, older, RECENT)
        await connection.execute(FILL_UNDECIDED, UNDECIDED)
        await connection.execute(FILL_UNCLAIMED, OF_CAMPAIGN, HELD_BACK)
        for index in indexes:
            await connection.execute(index["indexdef"])
        await connection.execute("ALTER TABLE provider_event DROP CONSTRAINT provider_event_pkey")
        await connection.execute(FILL_EVENTS)
        await connection.execute(
            "ALTER TABLE provider_event ADD PRIMARY KEY (wire_key, message_id, event_id, feed, partition_at)"
        )
        await connection.execute(FILL_VERDICTS)
        for statement in FILL_THE_REST:
            await connection.execute(statement, *([older] if "$1" in statement else []))
        await connection.execute("SELECT setval('send_fence', 100000000)")
        tables = await connection.fetch(TABLES)
        await connection.execute(f"VACUUM ANALYZE {', '.join(row['relname'] for row in tables)}")
        await connection.execute(PRETEND, TIMES)
    finally:
        await connection.close()
