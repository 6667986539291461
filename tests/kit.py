# SPDX-License-Identifier: Apache-2.0
"""What tests of the ledger say often: claims of a certain age, events, one pass. All of it through real SQL."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg

from reconciler.configuration.settings import Settings
from reconciler.passes.histories import Histories
from reconciler.passes.reconcile import EVERYTHING, Policies, Report, Scope, run_pass
from reconciler.rule.limits import Limit
from reconciler.rule.policy import Rules

FEED = "mg"
RULES = Settings().rules_for("", "")


def policies(rules: Rules = RULES, key_window: timedelta | None = None, limit: Limit | None = None) -> Policies:
    def rules_for(_feed: str, _class: str) -> Rules:
        return rules

    return Policies(
        rules_for,
        lambda _feed: key_window,
        timedelta(days=7),
        Histories(rules_for, lambda _feed: False),
        (lambda _feed: limit) if limit else Settings().limit_for,
    )


async def make_month(db: asyncpg.Pool | asyncpg.Connection, day: datetime) -> datetime:
    """Let the events of the month that holds this day have a partition, and return when it begins."""
    first = day.astimezone(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    end, part = (first + timedelta(days=32)).replace(day=1), f"provider_event_{first:%Y%m}"
    if not await db.fetchval("SELECT to_regclass($1) IS NOT NULL", part):
        await db.execute(f"CREATE TABLE {part} (LIKE provider_event INCLUDING DEFAULTS INCLUDING CONSTRAINTS)")
        await db.execute(f"ALTER TABLE provider_event ATTACH PARTITION {part} FOR VALUES FROM ('{first}') TO ('{end}')")
    return first


def unlimited(_feed: str) -> Limit:
    return Limit(count=1_000_000, share=1.0, canary=1.0, awaited=timedelta(0))


async def reconcile(
    db: asyncpg.Pool,
    rules: Rules = RULES,
    *,
    key_window: timedelta | None = None,
    scope: Scope = EVERYTHING,
    limit: Limit | None = None,
) -> Report:
    return await run_pass(db, policies(rules, key_window, limit), who="test", scope=scope)


async def call(db: Any, function: str, *args: Any) -> asyncpg.Record:
    marks = ", ".join(f"${n}" for n in range(1, len(args) + 1))
    return await db.fetchrow(f"SELECT * FROM {function}({marks})", *args)  # noqa: S608 - names are the tests' own


async def claim(db: Any, key: str, feed: str = FEED, **options: Any) -> asyncpg.Record:
    return await call(db, "send_claim", key, feed, json.dumps(options))


async def confirm(db: Any, key: str, fence: int, message_id: str = "m-1", **options: Any) -> str:
    return (await call(db, "send_confirm", key, fence, message_id, json.dumps(options)))["outcome"]


async def fail(db: Any, key: str, fence: int, reason: str = "why", *, not_sent: bool | None = None) -> str:
    return (await call(db, "send_fail", key, fence, reason, not_sent))["outcome"]


MAKE_OLDER = """
UPDATE send_log SET claimed_at = claimed_at - $2::interval, first_claimed_at = first_claimed_at - $2::interval,
    submit_by = submit_by - $2::interval, next_check_at = next_check_at - $2::interval,
    released_at = released_at - $2::interval, retry_until = retry_until - $2::interval,
    failed_at = failed_at - $2::interval, held_since = held_since - $2::interval
WHERE wire_key = wire_key($1)
"""


async def make_older(db: Any, key: str, by: timedelta) -> None:
    """Move everything that happened to a send into the past: the tests' way of waiting."""
    await db.execute(MAKE_OLDER, key, by)


async def make_due(db: Any, key: str) -> None:
    """Let the row's next look be due, its age unchanged."""
    await db.execute("UPDATE send_log SET next_check_at = clock_timestamp() WHERE wire_key = wire_key($1)", key)


async def old_claim(
    db: Any, key: str, age: timedelta = timedelta(hours=2), *, cause: str | None = "timed out", **options: Any
) -> int:
    """Claim a send whose call failed for a cause that its sender reported, and let its submit_by lie `age` in the past.

    Returns the fence.
    """
    fence = (await claim(db, key, **options))["fence"]
    if cause:
        await fail(db, key, fence, cause)
    await make_older(db, key, age + timedelta(seconds=60))
    return fence


EVENT = """
INSERT INTO provider_event (feed, message_id, event_id, partition_at, occurred_at, wire_key, kind, testimony, recipient,
                            reason, source)
VALUES ($1, $2, $3, event_partition_at($4), $4, $5, $6, $7, $8, $9, $10)
ON CONFLICT DO NOTHING
"""


async def event(
    db: Any,
    key: str | None,
    testimony: str = "accepted",
    *,
    feed: str = FEED,
    kind: str = "delivered",
    message_id: str = "m-1",
    event_id: str | None = None,
    occurred_at: datetime | None = None,
    recipient: str | None = None,
    reason: str | None = None,
    source: str = "http",
) -> None:
    """Store what the receiver would store of one event, or what a look-up finds."""
    wire_key = await db.fetchval(
        "SELECT CASE WHEN $1::text IS NULL THEN stand_in_key($2, $3) ELSE wire_key($1) END", key, feed, message_id
    )
    at = occurred_at or await db.fetchval("SELECT clock_timestamp()")
    named = event_id or f"{kind}:{recipient}"
    said = (wire_key, kind, testimony, recipient, reason, source)
    await db.execute(EVENT, feed, message_id, named, at, *said)


async def row(db: Any, key: str) -> asyncpg.Record:
    return await db.fetchrow("SELECT * FROM send_log WHERE wire_key = wire_key($1)", key)


async def state(db: Any, key: str) -> str:
    return (await row(db, key))["state"]


async def reasons(db: Any, key: str) -> list[str]:
    rows = await db.fetch(
        "SELECT action || ':' || reason AS said FROM verdict WHERE wire_key = wire_key($1) ORDER BY id", key
    )
    return [r["said"] for r in rows]


NEIGHBOURS = """
WITH sends AS (
    SELECT n, $7 || ':' || $1 || CASE WHEN $5 <> 'default' THEN '/' || $5 ELSE '' END || ':' || n AS key,
           clock_timestamp() - $2::interval - interval '60 s' + (n - $3::int * 3 / 4 + 0.5) * $6::interval AS at
    FROM generate_series(0, $3::int - 1) AS n
), rows AS (
    INSERT INTO send_log (wire_key, send_key, state, feed, message_class, attempt, fence, first_claimed_at, claimed_at,
        submit_by, answered_at, provider_message_id, verdict_source, verdict_reason, sent_at)
    SELECT wire_key(key), key, 'sent', $1, $5, 1, nextval('send_fence'), at, at, at + interval '60 s',
        at + interval '1 s', 'n-' || n, 'sender', 'answered', at + interval '1 s'
    FROM sends ORDER BY 1
)
INSERT INTO provider_event (feed, message_id, event_id, partition_at, occurred_at, received_at, wire_key, kind,
                            testimony, source)
SELECT $1, 'n-' || n, 'delivered:' || n, event_partition_at(at), at, at + interval '2 s', wire_key(key), 'delivered',
    'accepted', 'http'
FROM sends WHERE n < $4
"""


async def heard_neighbours(
    db: Any,
    age: timedelta = timedelta(hours=2),
    feed: str = FEED,
    *,
    heard: int | None = None,
    n: int = 600,
    message_class: str = "default",
    every: timedelta = timedelta(seconds=10),
    name: str = "neighbour",
) -> None:
    """Make sends that were answered, one in each ten seconds, three quarters of them before a claim of that age.

    The feed spoke of all of them two seconds later, or of the first `heard`.
    """
    await db.execute(NEIGHBOURS, feed, age, n, n if heard is None else heard, message_class, every, name)
    await stored_delivery(db, feed)


async def keep_neighbours(db: Any, numbers: Iterable[int]) -> None:
    """Forget the other neighbours. Number 449 is the last one before a claim of their age, 450 the first after it."""
    await db.execute(
        "DELETE FROM send_log WHERE send_key LIKE 'neighbour:%' AND split_part(send_key, ':', 3)::int <> ALL ($1)",
        list(numbers),
    )


CLAIMS = """
INSERT INTO send_log (wire_key, send_key, state, feed, message_class, attempt, fence, first_claimed_at, claimed_at,
    submit_by, cause, next_check_at)
SELECT $1 || '-' || n, $1 || '-' || n, 'claimed', $2, $3, 1, nextval('send_fence'), at, at, at + interval '60 s', $4, at
FROM generate_series(0, $5::int - 1) AS n,
LATERAL (SELECT clock_timestamp() - $6::interval - interval '60 s' + n * $7::interval AS at) AS claimed
"""


async def old_claims(
    db: Any,
    prefix: str,
    n: int,
    every: timedelta = timedelta(seconds=1),
    *,
    age: timedelta = timedelta(hours=2),
    feed: str = FEED,
    message_class: str = "default",
    cause: str | None = "timed out",
) -> None:
    """Make claims `prefix-0` ... whose calls failed for a cause; `age` is the first one's, each next one is younger."""
    await db.execute(CLAIMS, prefix, feed, message_class, cause, n, age, every)


async def release_by_pass(db: Any, key: str) -> int:
    """A claim of which nothing was heard, between neighbours that were, released by a pass; returns its fence."""
    fence = await old_claim(db, key)
    await heard_neighbours(db)
    await reconcile(db)
    assert (await row(db, key))["release_basis"] == "absent"
    return fence


async def stored_delivery(db: Any, feed: str = FEED, outcome: str = "stored") -> None:
    await db.execute(
        "INSERT INTO feed_delivery VALUES ($1, date_trunc('minute', clock_timestamp()), $2, 1, clock_timestamp())"
        " ON CONFLICT (feed, minute, outcome) DO UPDATE SET last_at = clock_timestamp()",
        feed,
        outcome,
    )


WAITING_FOR_LOCK = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
"""


async def until_it_waits(db: Any, *tasks: asyncio.Task[Any]) -> None:
    """Wait on the server's own word that the tasks are blocked by a lock."""
    async with asyncio.timeout(10):
        while await db.fetchval(WAITING_FOR_LOCK) < len(tasks):
            assert not any(task.done() for task in tasks), "it did not wait for the lock"
            await asyncio.sleep(0.005)
