# SPDX-License-Identifier: Apache-2.0
"""Forgets a recipient: his address, what was sent to him and what was said of it go, and the guard stays.

A row keeps its wire key and state, so that its send is never made again, and a pseudonym in place of the recipient: by
it events without our key still find the sends they are about, and no others. It is drawn anew each time, so that
nobody can compute it from the address.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final
from uuid import uuid4

import asyncpg

BATCH: Final = 500
"""Sends, or events, of one transaction."""

PAUSE: Final = 0.05
SCAN_SECONDS: Final = 3600.0
"""Longest look for an address: it reads all sends and all events once, without a lock."""


@dataclass(slots=True)
class Forgotten:
    """What was redacted, or would be."""

    rows: Counter[str] = field(default_factory=Counter)
    """By table."""
    undecided: int = 0
    """Sends that need their recipient until they are decided: they were left as they are."""
    first_at: datetime | None = None
    """When the oldest of all that was found was recorded, by which an archive is searched."""
    answers: int = 0
    """Answers kept for an Idempotency-Key of his sends; they are deleted by themselves ..."""
    answers_until: datetime | None = None
    """... by then."""
    suppressed: bool = False
    """Whether the suppression list has the address, and keeps it: he would be written to again."""


# A send to several names them in one text, and has no recipient_key. Local parts are compared without case: too much is
# better forgotten than too little.
FIND_SENDS: Final = """
SELECT wire_key, state IN ('sent', 'failed') AS final, created_at FROM send_log
WHERE lower(recipient_key) = (SELECT lower(recipient_here($1)))
   OR recipient LIKE '%,%' AND EXISTS (SELECT FROM regexp_split_to_table(recipient, ',') AS one
                                       WHERE lower(recipient_here(one)) = (SELECT lower(recipient_here($1))))
ORDER BY wire_key
"""
# Those of sends that are not decided keep what they are matched by.
FIND_EVENTS: Final = """
SELECT e.wire_key, e.message_id, e.event_id, e.feed, e.partition_at, e.received_at FROM provider_event e
WHERE lower(e.recipient) = (SELECT lower(recipient_here($1))) AND NOT e.wire_key = ANY ($2::text[])
  AND NOT EXISTS (SELECT FROM send_log l WHERE l.wire_key = e.wire_key AND l.state IN ('pending', 'claimed'))
  AND NOT (e.wire_key LIKE '~%' AND EXISTS (
      SELECT FROM send_log l
      WHERE l.feed = e.feed AND (l.provider_message_id = e.message_id OR l.known_message_id = e.message_id)
        AND l.state IN ('pending', 'claimed') AND (l.recipient_key IS NULL OR l.recipient_key = e.recipient)))
"""
COUNT: Final = """
SELECT (SELECT count(*) FROM provider_event WHERE wire_key = ANY ($1::text[])) AS provider_event,
       (SELECT count(*) FROM verdict WHERE wire_key = ANY ($1::text[]) AND note IS NOT NULL) AS verdict,
       (SELECT count(*) FROM cap_taken WHERE recipient_key = lower(recipient_here($2))) AS cap_taken
"""
SUPPRESSED: Final = "SELECT EXISTS (SELECT FROM suppression WHERE recipient_key = lower(recipient_here($1)))"
ANSWERS: Final = """
SELECT count(*) AS n, max(keep_until) AS until FROM idempotency WHERE wire_key = ANY ($1::text[]) AND body IS NOT NULL
"""


async def forget(pool: asyncpg.Pool, address: str, *, dry_run: bool = False) -> Forgotten:
    """Redact what final sends to an address hold of it, and events about it; in a dry run only count.

    Run it again once what was undecided is decided, and after the time for which providers deliver again: an event that
    comes later brings the address back. Raises the database's errors; what was done until then stays done.
    """
    done = Forgotten()
    sends = await pool.fetch(FIND_SENDS, address, timeout=SCAN_SECONDS)
    final = [row["wire_key"] for row in sends if row["final"]]
    events = await pool.fetch(FIND_EVENTS, address, final, timeout=SCAN_SECONDS)
    done.undecided = len(sends) - len(final)
    done.first_at = min(
        [row["created_at"] for row in sends if row["final"]] + [row["received_at"] for row in events], default=None
    )
    done.suppressed = await pool.fetchval(SUPPRESSED, address)
    (answers,) = await pool.fetch(ANSWERS, final)
    done.answers, done.answers_until = answers["n"], answers["until"]
    if dry_run:
        done.rows.update({"send_log": len(final), "provider_event": len(events)})
        (counts,) = await pool.fetch(COUNT, final, address)
        done.rows.update(dict(counts))
        return done
    done.rows["cap_taken"] = await pool.fetchval(FORGET_PLACES, address)
    pseudonym = f"~forgotten:{uuid4()}"
    for first in range(0, len(events), BATCH):
        done.rows["provider_event"] += await _redact_events(pool, events[first : first + BATCH], pseudonym)
    for first in range(0, len(final), BATCH):  # last: what is broken off is found again by these rows
        (counts,) = await pool.fetch(REDACT_SENDS, final[first : first + BATCH], pseudonym)
        done.rows.update(dict(counts))
        await asyncio.sleep(PAUSE)
    return done


FORGET_PLACES: Final = """
WITH gone AS (DELETE FROM cap_taken WHERE recipient_key = lower(recipient_here($1)) RETURNING true)
SELECT count(*) FROM gone
"""
REDACT_EVENTS: Final = """
WITH gone AS (
    UPDATE provider_event e SET recipient = $6, reason = NULL, raw = ''
    FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::timestamptz[])
        AS k(wire_key, message_id, event_id, feed, partition_at)
    WHERE (e.wire_key, e.message_id, e.event_id, e.feed, e.partition_at)
        = (k.wire_key, k.message_id, k.event_id, k.feed, k.partition_at)
    RETURNING true
)
SELECT count(*) FROM gone
"""


async def _redact_events(pool: asyncpg.Pool, events: Sequence[asyncpg.Record], pseudonym: str) -> int:
    columns = [[row[n] for row in events] for n in range(5)]
    n: int = await pool.fetchval(REDACT_EVENTS, *columns, pseudonym)
    await asyncio.sleep(PAUSE)
    return n


# One row that is locked is waited for; it may be undecided then, and stays. A send to several stays one to several: no
# control. What a provider or a sender said in words may name the address; codes can't.
REDACT_SENDS: Final = """
WITH page AS MATERIALIZED (
    SELECT wire_key FROM send_log WHERE wire_key = ANY ($1::text[]) AND state IN ('sent', 'failed')
    ORDER BY wire_key FOR UPDATE
), sends AS (
    UPDATE send_log l SET send_key = l.wire_key,
        recipient = CASE WHEN l.recipient_key IS NULL THEN '~forgotten' END,
        recipient_key = CASE WHEN l.recipient_key IS NOT NULL THEN $2::text END, payload = NULL, response = NULL,
        cause = CASE WHEN strpos(l.cause, '@') > 0 THEN 'forgotten' ELSE l.cause END,
        verdict_reason = CASE WHEN strpos(l.verdict_reason, '@') > 0 THEN 'forgotten' ELSE l.verdict_reason END,
        updated_at = clock_timestamp()
    FROM page p WHERE l.wire_key = p.wire_key AND l.state IN ('sent', 'failed')
    RETURNING l.wire_key
), events AS (
    UPDATE provider_event e SET recipient = CASE WHEN e.recipient IS NOT NULL THEN $2 END, reason = NULL, raw = ''
    FROM sends s WHERE e.wire_key = s.wire_key
    RETURNING true
), verdicts AS (
    UPDATE verdict v SET note = CASE WHEN v.note IS NOT NULL THEN 'forgotten' END,
        reason = CASE WHEN strpos(v.reason, '@') > 0 THEN 'forgotten' ELSE v.reason END
    FROM sends s WHERE v.wire_key = s.wire_key AND (v.note <> 'forgotten' OR strpos(v.reason, '@') > 0)
    RETURNING true
)
SELECT (SELECT count(*) FROM sends) AS send_log, (SELECT count(*) FROM events) AS provider_event,
       (SELECT count(*) FROM verdicts) AS verdict
"""
