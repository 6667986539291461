# SPDX-License-Identifier: Apache-2.0
"""Forgets a recipient: his address, what was sent to him and what was said of it go, and the guard stays.

A row keeps its wire key and state, so that its send is never made again, and a pseudonym in place of the recipient: by
it events without our key still find the sends they are about, and no others. It is drawn anew each time, so that
nobody can compute it from the address.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final
from uuid import uuid4

import asyncpg

from reconciler.configuration.tables import RuleSettings
from reconciler.keys import normal_recipient

BATCH: Final = 500
"""Sends, or events, of one transaction."""

PAUSE: Final = 0.05
MOST_NAMED: Final = 5
LATE_WINDOW: Final = RuleSettings().late_window
SCAN_SECONDS: Final = 3600.0
"""Longest look for an address: it reads all sends and all events once, without a lock."""


@dataclass(slots=True)
class Forgotten:
    """What was redacted, or would be."""

    rows: Counter[str] = field(default_factory=Counter)
    """By table."""
    undecided: int = 0
    """Sends that need their recipient until they are decided, or late evidence may come: they were left as they are."""
    left: list[str] = field(default_factory=list)
    """The wire keys of the first of them."""
    first_at: datetime | None = None
    """When the oldest of all that was found was recorded, by which an archive is searched."""
    answers: int = 0
    """Answers kept for an Idempotency-Key of his sends; they are deleted by themselves ..."""
    answers_until: datetime | None = None
    """... by then."""
    suppressed: bool = False
    """Whether the suppression list has the address, and keeps it: he would be written to again."""


# A send to several names them in one text, and has no recipient_key; one whose sender gave none may name him in its
# key, or an event names him. Local parts are compared without case: too much is better forgotten than too little. One
# that failed lately may still be proved sent, by an event that names him.
FIND_SENDS: Final = """
SELECT wire_key, created_at,
       state = 'sent' OR state = 'failed' AND failed_at < clock_timestamp() - $2::interval AS final
FROM send_log l
WHERE lower(recipient_key) = (SELECT lower(recipient_here($1)))
   OR recipient LIKE '%,%' AND EXISTS (SELECT FROM regexp_split_to_table(recipient, ',') AS one
                                       WHERE lower(recipient_here(one)) = (SELECT lower(recipient_here($1))))
   OR recipient IS NULL AND recipient_key IS NULL AND (
        strpos(':' || lower(send_key) || ':', ':' || lower(recipient_key($1)) || ':') > 0
        OR EXISTS (SELECT FROM provider_event e
                   WHERE e.wire_key = l.wire_key AND lower(e.recipient) = (SELECT lower(recipient_here($1))) OFFSET 0))
ORDER BY wire_key
"""
# Those of sends that are not decided keep what they are matched by. Words and bytes that name him go from others'
# events, too: of a message to several some providers say all in each.
FIND_EVENTS: Final = """
SELECT e.wire_key, e.message_id, e.event_id, e.feed, e.partition_at, e.received_at FROM provider_event e
WHERE NOT e.wire_key = ANY ($2::text[]) AND (
    lower(e.recipient) = (SELECT lower(recipient_here($1)))
    AND NOT EXISTS (SELECT FROM send_log l WHERE l.wire_key = e.wire_key AND l.wire_key = ANY ($3::text[]))
    AND NOT EXISTS (SELECT FROM send_log l WHERE l.wire_key = e.wire_key AND l.state IN ('pending', 'claimed'))
    AND NOT (e.wire_key LIKE '~%' AND EXISTS (
        SELECT FROM send_log l
        WHERE l.feed = e.feed AND (l.provider_message_id = e.message_id OR l.known_message_id = e.message_id)
          AND (l.state IN ('pending', 'claimed') OR l.wire_key = ANY ($3::text[]))
          AND (l.recipient_key IS NULL OR l.recipient_key = e.recipient)))
    OR lower(e.recipient) IS DISTINCT FROM (SELECT lower(recipient_here($1)))
       AND (e.reason ~* $4 OR position('@'::bytea IN e.raw) > 0 AND encode(e.raw, 'escape') ~* $4))
"""
COUNT: Final = """
SELECT (SELECT count(*) FROM provider_event WHERE wire_key = ANY ($1::text[])) AS provider_event,
       (SELECT count(*) FROM verdict WHERE wire_key = ANY ($1::text[]) AND note IS NOT NULL) AS verdict,
       (SELECT count(*) FROM cap_taken WHERE recipient_key = lower(recipient_here($2)) AND $3 = 0) AS cap_taken
"""
SUPPRESSED: Final = "SELECT EXISTS (SELECT FROM suppression WHERE recipient_key = lower(recipient_here($1)))"
ANSWERS: Final = """
SELECT count(*) AS n, max(keep_until) AS until FROM idempotency WHERE wire_key = ANY ($1::text[]) AND body IS NOT NULL
"""


async def forget(
    pool: asyncpg.Pool, address: str, *, late_window: timedelta = LATE_WINDOW, dry_run: bool = False
) -> Forgotten:
    """Redact what final sends to an address hold of it, and events about it; in a dry run only count.

    A failed send is final once `late_window` is over. Run it again once what was undecided is decided, and after the
    time for which providers deliver again: an event that comes later brings the address back. Raises the database's
    errors; what was done until then stays done.
    """
    done = Forgotten()
    sends = await pool.fetch(FIND_SENDS, address, late_window, timeout=SCAN_SECONDS)
    final = [row["wire_key"] for row in sends if row["final"]]
    undecided = [row["wire_key"] for row in sends if not row["final"]]
    events = await pool.fetch(FIND_EVENTS, address, final, undecided, _named(address), timeout=SCAN_SECONDS)
    done.undecided, done.left = len(undecided), undecided[:MOST_NAMED]
    done.first_at = min(
        [row["created_at"] for row in sends if row["final"]] + [row["received_at"] for row in events], default=None
    )
    done.suppressed = await pool.fetchval(SUPPRESSED, address)
    (answers,) = await pool.fetch(ANSWERS, final)
    done.answers, done.answers_until = answers["n"], answers["until"]
    if dry_run:
        done.rows.update({"send_log": len(final), "provider_event": len(events)})
        (counts,) = await pool.fetch(COUNT, final, address, done.undecided)
        done.rows.update(dict(counts))
        return done
    done.rows["cap_taken"] = 0 if undecided else await pool.fetchval(FORGET_PLACES, address)
    pseudonym = f"~forgotten:{uuid4()}"
    for first in range(0, len(events), BATCH):
        done.rows["provider_event"] += await _redact_events(pool, events[first : first + BATCH], pseudonym, address)
    for first in range(0, len(final), BATCH):  # last: what is broken off is found again by these rows
        (counts,) = await pool.fetch(REDACT_SENDS, final[first : first + BATCH], pseudonym)
        done.rows.update(dict(counts))
        await asyncio.sleep(PAUSE)
    return done


def _named(address: str) -> str:
    """Return the pattern of an address in a text, and of no longer one."""
    return rf"(?<![A-Za-z0-9._%+-]){re.escape(normal_recipient(address))}(?![A-Za-z0-9-]|\.[A-Za-z0-9])"


FORGET_PLACES: Final = """
WITH gone AS (DELETE FROM cap_taken WHERE recipient_key = lower(recipient_here($1)) RETURNING true)
SELECT count(*) FROM gone
"""
REDACT_EVENTS: Final = """
WITH gone AS (
    UPDATE provider_event e SET reason = NULL, raw = '',
        recipient = CASE WHEN lower(e.recipient) = lower(recipient_here($7)) THEN $6 ELSE e.recipient END
    FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::timestamptz[])
        AS k(wire_key, message_id, event_id, feed, partition_at)
    WHERE (e.wire_key, e.message_id, e.event_id, e.feed, e.partition_at)
        = (k.wire_key, k.message_id, k.event_id, k.feed, k.partition_at)
    RETURNING true
)
SELECT count(*) FROM gone
"""


async def _redact_events(pool: asyncpg.Pool, events: Sequence[asyncpg.Record], pseudonym: str, address: str) -> int:
    columns = [[row[n] for row in events] for n in range(5)]
    n: int = await pool.fetchval(REDACT_EVENTS, *columns, pseudonym, address)
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
