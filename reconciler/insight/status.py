# SPDX-License-Identifier: Apache-2.0
"""How the whole stands: undecided sends, feeds, deliveries, passes, database. Judged in `findings`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from reconciler.configuration.settings import Settings
from reconciler.database.citus import Layout, read_layout
from reconciler.database.connection import Connection, database_clock
from reconciler.insight.reports import VANISHED_SINCE, Vanished, old_enough, vanished_sends
from reconciler.outbox.delivery import OutboxStatus, read_outbox
from reconciler.passes.feeds import ALL_FEEDS
from reconciler.passes.histories import Histories
from reconciler.rule.outlook import Outlook, outlooks
from reconciler.rule.policy import holds_of
from reconciler.upkeep.retention_look import RetentionStatus, read_retention
from webhooks.database import is_behind_pooler
from webhooks.metrics import UNKNOWN_FEED


def held_in_words(reason: str) -> str:
    """Return why a send is held, where the code alone reads as if the send itself had been meant."""
    return "refused: the feed's newest delivery was refused" if reason == "refused" else reason


@dataclass(frozen=True, slots=True)
class Undecided:
    """Sends of one feed and class that stand alike."""

    state: str
    """pending, claimed, released (pending after a release) or held."""
    feed: str
    message_class: str
    reason: str
    n: int
    since: datetime
    """When the oldest of them came to stand so."""
    submit_by: datetime | None
    """The oldest of theirs."""
    under_hour: int
    under_day: int
    over_day: int


@dataclass(frozen=True, slots=True)
class FeedStatus:
    """How one feed stands."""

    feed: str
    provider: str | None
    """None: not configured here."""
    stored_at: datetime | None
    """When the last delivery of 30 days was stored."""
    refused_at: datetime | None
    """When the last delivery within a day was refused. Unsigned ones hide none with a signature after `stored_at`."""
    refused_reason: str | None
    """Why that one was."""
    holds: tuple[str, ...]
    hold_reason: str | None
    paused_at: datetime | None
    refused_lately: int
    """Deliveries of the last half hour that were refused, unsigned ones left out."""
    lately: int
    """All deliveries of that half hour, unsigned ones left out."""
    put_off_at: datetime | None
    """When one was last answered with "later" within a quarter of an hour; a queue that can't be read is apart."""
    put_off_since: datetime | None
    """The minute of the first one in that time since five minutes passed without any."""
    put_off_reason: str | None
    sends_unheard: bool
    """Sends of the last day were answered an hour ago or more, and nothing was delivered since: of a feed that spoke
    within a day more than six of them, of another any."""
    endpoint_finding: str | None
    """What the daily look at the webhook found at the provider; None: all is well, or nobody looked."""
    queue_unread_at: datetime | None
    """When its queue could not be read, within a day and since anything was stored."""
    filling: bool
    """A replay or back-fill of it runs."""
    released: int
    """Sends that were released in the last hour and may duplicate; they count against its budget."""
    by_look_up: int
    """Sends of the last day of which only the provider's API spoke, up to 1,000."""
    mode: str
    budget: int
    """How many it may release an hour at most."""


@dataclass(frozen=True, slots=True)
class RefusedDeliveries:
    """Deliveries of a day that the receiver refused, of one feed (or to none that there is) and for one reason."""

    feed: str
    reason: str
    last_hour: int
    last_day: int
    last_at: datetime


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Sends of one feed that were found accepted twice, within seven days."""

    feed: str
    n: int
    newest: datetime


@dataclass(frozen=True, slots=True)
class ProcessFinding:
    """What a running process can't do and says itself."""

    code: str
    host: str
    text: str
    since: datetime


@dataclass(frozen=True, slots=True)
class PassStatus:
    """The newest pass over all feeds."""

    started_at: datetime
    ended_at: datetime | None
    who: str
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class Status:
    """How the whole stands, by the database's clock."""

    now: datetime
    undecided: list[Undecided]
    feeds: list[FeedStatus]
    refused: list[RefusedDeliveries]
    foreign: dict[str, tuple[int, int]]
    """By feed: events of the last day with a key, and those of them whose key no row has (of at most 20,000)."""
    duplicates: list[Duplicates]
    vanished: list[Vanished]
    outlooks: list[Outlook]
    """What silence is worth, by feed and message class."""
    processes: list[ProcessFinding]
    outbox: OutboxStatus
    retention: RetentionStatus
    missing_months: list[str]
    last_pass: PassStatus | None
    heartbeat_at: datetime | None
    """The last sign of life of a running process that decides; None: there never was one, or none beats while the
    database is suspect."""
    clock_skew: timedelta
    """How far the database's clock is ahead of this host's."""
    pooler: bool
    collation_changed: bool
    """The system below the server sorts text otherwise than when the indexes were built."""
    hashed_recipients: bool
    """No address is stored: recipients are, hashed."""
    citus: Layout | None
    """How the tables are distributed; None: they are not."""


async def read_status(
    connection: Connection, settings: Settings, host_clock: Callable[[], datetime], feed: str | None = None
) -> Status:
    """Look at everything that a person should know, of one feed or all. Changes nothing."""
    skew, now = await _clock_skew(connection, host_clock)
    undecided = await _undecided(connection, now, feed)
    names = {feed} if feed else set(settings.feeds) | {group.feed for group in undecided}
    return Status(
        now=now,
        undecided=undecided,
        feeds=await _feeds(connection, settings, sorted(names), now),
        refused=await _refused(connection, sorted(names if feed else names | {UNKNOWN_FEED}), now),
        foreign=await _foreign(connection, now, feed),
        duplicates=await _duplicates(connection, now, feed),
        vanished=await vanished_sends(
            connection, old_enough(settings, names & set(settings.feeds), now), now - VANISHED_SINCE
        ),
        outlooks=await _outlooks(connection, settings, names & set(settings.feeds), now),
        processes=await _process_findings(connection, now),
        outbox=await read_outbox(connection, feed),
        retention=await read_retention(connection),
        missing_months=await _missing_months(connection, now),
        last_pass=await _last_pass(connection),
        heartbeat_at=await connection.fetchval(HEARTBEAT),
        clock_skew=skew,
        pooler=await is_behind_pooler(connection),
        collation_changed=await connection.fetchval(COLLATION_CHANGED),
        hashed_recipients=await connection.fetchval(HASHED_RECIPIENTS),
        citus=await read_layout(connection),
    )


HEARTBEAT: Final = "SELECT heartbeat_at FROM feed_state WHERE feed = '*' AND suspect_at IS NULL"
COLLATION_CHANGED: Final = """
SELECT coalesce(datcollversion <> pg_database_collation_actual_version(oid), false)
FROM pg_database WHERE datname = current_database()
"""
# Told by what hashes them: whoever may only read the reports doesn't read the salt.
HASHED_RECIPIENTS: Final = """
SELECT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'send_log'::regclass AND tgname = 'without_addresses')
"""


async def _clock_skew(connection: Connection, host_clock: Callable[[], datetime]) -> tuple[timedelta, datetime]:
    before = host_clock()
    now = await database_clock(connection)
    after = host_clock()
    return now - (before + (after - before) / 2), now


# The index of rows that passes look at holds just these.
UNDECIDED: Final = """
SELECT state, feed, message_class, reason, count(*) AS n, min(since) AS since, min(submit_by) AS submit_by,
       count(*) FILTER (WHERE since > $1::timestamptz - interval '1 hour') AS under_hour,
       count(*) FILTER (WHERE since <= $1::timestamptz - interval '1 hour'
                          AND since > $1::timestamptz - interval '1 day') AS under_day,
       count(*) FILTER (WHERE since <= $1::timestamptz - interval '1 day') AS over_day
FROM (
    SELECT feed, message_class, submit_by,
        CASE WHEN held_reason IS NOT NULL THEN 'held' WHEN capped_until > $1::timestamptz THEN 'capped'
             WHEN released_at IS NOT NULL THEN 'released' ELSE state END AS state,
        coalesce(held_reason, release_basis,
            CASE WHEN state = 'pending' THEN 'scheduled' WHEN submit_by > $1::timestamptz THEN 'submitting'
                 ELSE 'silence' END) AS reason,
        coalesce(held_since, released_at, CASE WHEN state = 'claimed' THEN claimed_at ELSE updated_at END) AS since
    FROM send_log
    WHERE state IN ('pending', 'claimed') AND next_check_at IS NOT NULL AND ($2::text IS NULL OR feed = $2)
) AS rows
GROUP BY 1, 2, 3, 4
ORDER BY since
"""


async def _undecided(connection: Connection, now: datetime, feed: str | None) -> list[Undecided]:
    return [Undecided(**row) for row in await connection.fetch(UNDECIDED, now, feed)]


FEEDS: Final = """
SELECT asked.feed, stored.last_at AS stored_at, refused.last_at AS refused_at, refused.reason AS refused_reason,
       ARRAY[s.paused_at, s.breaker_at, s.suspect_at] AS holds,
       (SELECT count(*) FROM verdict v WHERE v.feed = asked.feed AND v.action = 'released'
        AND v.reason IN ('absent', 'looked_up', 'gave_up') AND v.decided_at > $2::timestamptz - interval '1 hour')
           AS released,
       (SELECT count(*) FROM (SELECT verdict_source FROM send_log p WHERE p.feed = asked.feed AND p.state = 'sent'
            AND p.answered_at IS NULL AND p.verdict_source IN ('feed', 'look-up')
            AND p.sent_at > $2::timestamptz - interval '1 day' ORDER BY p.sent_at DESC LIMIT 1000) AS proved
        WHERE verdict_source = 'look-up') AS by_look_up,
       s.reason AS hold_reason, s.paused_at, s.endpoint_finding,
       coalesce(s.filling_until > $2::timestamptz, false) AS filling,
       CASE WHEN stored.last_at < refused.unread_at OR stored.last_at IS NULL THEN refused.unread_at
       END AS queue_unread_at,
       (SELECT count(*) FROM (
            SELECT FROM send_log c WHERE c.feed = asked.feed AND c.answered_at IS NOT NULL AND c.attempt = 1
               AND c.claimed_at > greatest(stored.last_at, $2::timestamptz - interval '1 day')
               AND c.claimed_at < $2::timestamptz - interval '1 hour' ORDER BY c.claimed_at LIMIT 7) AS unheard)
           > CASE WHEN stored.last_at > $2::timestamptz - interval '1 day' THEN 6 ELSE 0 END AS sends_unheard,
       refused.refused_lately, refused.lately, refused.put_off_at, refused.put_off_reason,
       (SELECT max(minute) FROM (
            SELECT minute, minute - lag(minute) OVER (ORDER BY minute) AS pause FROM feed_delivery d
            WHERE d.feed = asked.feed AND d.outcome LIKE 'later:%' AND d.outcome <> 'later:queue'
              AND d.minute > $2::timestamptz - interval '15 min') AS put_off
        WHERE pause IS NULL OR pause > interval '5 min') AS put_off_since
FROM unnest($1::text[]) AS asked(feed)
LEFT JOIN feed_state s ON s.feed = asked.feed
LEFT JOIN LATERAL (
    SELECT last_at FROM feed_delivery d
    WHERE d.feed = asked.feed AND d.outcome = 'stored' AND d.minute > $2::timestamptz - interval '30 days'
    ORDER BY d.minute DESC LIMIT 1
) AS stored ON true
CROSS JOIN LATERAL (
    SELECT (array_agg(d.last_at ORDER BY told.signed DESC, d.last_at DESC)
                FILTER (WHERE d.outcome LIKE 'refused:%'))[1] AS last_at,
           max(last_at) FILTER (WHERE d.outcome = 'later:queue') AS unread_at,
           (array_agg(substr(d.outcome, 9) ORDER BY told.signed DESC, d.last_at DESC)
                FILTER (WHERE d.outcome LIKE 'refused:%'))[1] AS reason,
           coalesce(sum(n) FILTER (WHERE d.outcome LIKE 'refused:%' AND d.outcome <> 'refused:missing'
                                     AND d.minute > $2::timestamptz - interval '30 min'), 0)::bigint AS refused_lately,
           coalesce(sum(n) FILTER (WHERE d.outcome NOT IN ('damaged', 'refused:missing', 'later:queue')
                                     AND d.minute > $2::timestamptz - interval '30 min'), 0)::bigint AS lately,
           max(last_at) FILTER (WHERE d.outcome LIKE 'later:%' AND d.outcome <> 'later:queue'
                                  AND d.minute > $2::timestamptz - interval '15 min') AS put_off_at,
           (array_agg(substr(d.outcome, 7) ORDER BY d.last_at DESC)
                FILTER (WHERE d.outcome LIKE 'later:%' AND d.outcome <> 'later:queue'))[1] AS put_off_reason
    FROM feed_delivery d
    CROSS JOIN LATERAL (SELECT d.outcome <> 'refused:missing'
                           AND d.last_at > coalesce(stored.last_at, '-infinity') AS signed) AS told
    WHERE d.feed = asked.feed AND d.minute > $2::timestamptz - interval '1 day'
) AS refused
ORDER BY asked.feed
"""


async def _feeds(connection: Connection, settings: Settings, names: list[str], now: datetime) -> list[FeedStatus]:
    found = []
    for row in await connection.fetch(FEEDS, [*names, ALL_FEEDS], now):
        configured = settings.feeds.get(row["feed"])
        holds = holds_of(row["holds"])
        if row["feed"] != ALL_FEEDS or holds:
            rules = settings.rule_settings_for(row["feed"], "")
            values = {
                **row,
                "holds": holds,
                "provider": configured.provider if configured else None,
                "mode": rules.mode,
                "budget": rules.release_budget,
            }
            found.append(FeedStatus(**values))
    return found


async def _outlooks(connection: Connection, settings: Settings, feeds: set[str], now: datetime) -> list[Outlook]:
    found: list[Outlook] = []
    histories = Histories(settings.rules_for, settings.waits_for_delivery)
    asked = {(feed, "default") for feed in feeds}
    for feed, history in (await histories.of(connection, asked, now)).items():
        known = [name for name, controls in history.controls.items() if controls] or ["default"]
        found += outlooks(history, {name: settings.rules_for(feed, name) for name in known})
    return found


PROCESS_FINDINGS: Final = """
SELECT code, host, text, since FROM finding WHERE seen_at > $1::timestamptz - interval '15 minutes' ORDER BY code, host
"""


async def _process_findings(connection: Connection, now: datetime) -> list[ProcessFinding]:
    return [ProcessFinding(**row) for row in await connection.fetch(PROCESS_FINDINGS, now)]


REFUSED: Final = """
SELECT feed, substr(outcome, 9) AS reason,
       coalesce(sum(n) FILTER (WHERE minute > $2::timestamptz - interval '1 hour'), 0)::bigint AS last_hour,
       sum(n)::bigint AS last_day, max(last_at) AS last_at
FROM feed_delivery
WHERE feed = ANY ($1::text[]) AND minute > $2::timestamptz - interval '1 day' AND outcome LIKE 'refused:%'
GROUP BY 1, 2
ORDER BY 1, 2
"""


async def _refused(connection: Connection, names: list[str], now: datetime) -> list[RefusedDeliveries]:
    return [RefusedDeliveries(**row) for row in await connection.fetch(REFUSED, names, now)]


# Bounded: one or two partitions, their index by time of storing, and the newest where there are more.
FOREIGN: Final = """
SELECT e.feed, count(*) AS keyed,
       count(*) FILTER (WHERE NOT EXISTS (SELECT FROM send_log s WHERE s.wire_key = e.wire_key)) AS unknown
FROM (
    SELECT feed, wire_key FROM provider_event
    WHERE partition_at > $1::timestamptz - interval '2 days' AND received_at > $1::timestamptz - interval '1 day'
      AND wire_key NOT LIKE '~%' AND source IN ('http', 'sqs') AND ($2::text IS NULL OR feed = $2)
    ORDER BY received_at DESC LIMIT 20000
) AS e
GROUP BY e.feed
"""


async def _foreign(connection: Connection, now: datetime, feed: str | None) -> dict[str, tuple[int, int]]:
    return {row["feed"]: (row["keyed"], row["unknown"]) for row in await connection.fetch(FOREIGN, now, feed)}


DUPLICATES: Final = """
SELECT feed, count(*) AS n, max(found_at) AS newest FROM duplicate
WHERE sort = 'duplicate' AND found_at > $1::timestamptz - interval '7 days' AND ($2::text IS NULL OR feed = $2)
GROUP BY feed ORDER BY feed
"""


async def _duplicates(connection: Connection, now: datetime, feed: str | None) -> list[Duplicates]:
    return [Duplicates(**row) for row in await connection.fetch(DUPLICATES, now, feed)]


MISSING_MONTHS: Final = """
SELECT to_char(month, 'YYYY-MM') AS month
FROM (SELECT date_trunc('month', $1::timestamptz AT TIME ZONE 'UTC') + n * interval '1 month' AS month
      FROM generate_series(0, 1) AS n) AS wanted
WHERE month::date NOT IN (SELECT provider_event_months())
ORDER BY 1
"""


async def _missing_months(connection: Connection, now: datetime) -> list[str]:
    return [row["month"] for row in await connection.fetch(MISSING_MONTHS, now)]


LAST_PASS: Final = """
SELECT started_at, ended_at, who, counts FROM pass WHERE feed IS NULL AND wire_key IS NULL
ORDER BY started_at DESC LIMIT 1
"""


async def _last_pass(connection: Connection) -> PassStatus | None:
    row = await connection.fetchrow(LAST_PASS)
    return PassStatus(**{**row, "counts": json.loads(row["counts"])}) if row else None
