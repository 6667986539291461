# SPDX-License-Identifier: Apache-2.0
"""Says to a schema distributed with Citus what Citus takes in another form. Nothing else has to know.

A statement of this program is either taken as it is, or stands here with what is changed in it: what is named in an
edit must be found in the original, so that whoever changes that looks here. `citus_...` are functions that
`migrations/citus` has laid there. The database's clock is read once a statement, on the coordinator: the nodes' own
clocks decide nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import asyncpg

from reconciler import campaign, metrics
from reconciler.api import routes
from reconciler.campaigns import caps, load
from reconciler.configuration.tables import OutboxSettings
from reconciler.database.citus import is_distributed
from reconciler.distributed.silence import SILENCE, Form, edited
from reconciler.errors import UserError
from reconciler.insight import drift, inventory, reports, status, what_if, why
from reconciler.outbox.delivery import LEASE_DUE
from reconciler.passes import evidence, feeds, ledger, lookup, outcomes, releasing, restore, second_witness, shadow
from reconciler.upkeep import forgetting, retention, retention_look

CLOCK: Final = "clock_timestamp()"
ONE_CLOCK: Final = "(SELECT clock_timestamp())"
_TOUCHED: Final = re.compile(r"\b(send_log|provider_event|verdict|shadow_verdict|look_up|asked_again|cap_taken)\b")

# Evidence that commits while the write waits for a row is seen by the next claim, or late.
_SAID_BY_ID: Final = "WITH by_id AS MATERIALIZED (SELECT * FROM citus_said_by_id($1::text[])), v AS ("
_HELD: Final = """NOT EXISTS (SELECT FROM feed_state f WHERE f.feed IN (s.feed, '*')
                      AND num_nonnulls(f.paused_at, f.breaker_at, f.suspect_at) > 0)"""
_HELD_HERE: Final = """NOT ARRAY[s.feed, '*'] && ARRAY(SELECT f.feed FROM feed_state f
                      WHERE num_nonnulls(f.paused_at, f.breaker_at, f.suspect_at) > 0)"""

_PASSES: Final[Mapping[str, Form]] = {
    evidence.SETTLE_WATCHED: "SELECT * FROM citus_settle_watched($1, $2, $3, $4, $5, $6, $7, $8) WHERE $9::int = 0",
    evidence.SETTLE_FAILED: "SELECT * FROM citus_settle_failed($1, $2, $3, $4, $5, $6, $7, $8)",
    # A page has to be judged within the minute for which a decision holds, and each sample costs milliseconds here.
    ledger.TAKE_DUE: partial(edited, ledger.TAKE_DUE, ("LIMIT 1000", "LIMIT 200")),
    ledger.READ_ROWS: partial(
        edited,
        ledger.READ_ROWS,
        (
            "SELECT s.wire_key",
            "WITH by_id AS MATERIALIZED (SELECT * FROM citus_said_by_id($1::text[]))\nSELECT s.wire_key",
        ),
        (
            """CASE WHEN num_nonnulls(s.provider_message_id, s.known_message_id) > 0
            THEN send_heard(s.wire_key, s.feed, s.recipient_key, s.provider_message_id, s.known_message_id)
       END AS said_by_id""",
            "by_id.said AS said_by_id",
        ),
        (") AS e\nWHERE", ") AS e\nLEFT JOIN by_id ON by_id.wire_key = s.wire_key\nWHERE"),
    ),
    ledger.FAIL: partial(
        edited,
        ledger.FAIL,
        ("WITH v AS (", _SAID_BY_ID),
        (
            "witnesses)\n    ORDER BY",
            """witnesses)
    WHERE wire_key <> ALL (ARRAY(SELECT wire_key FROM by_id WHERE said = 'accepted'))
    ORDER BY""",
        ),
        (
            """
      AND CASE WHEN num_nonnulls(s.provider_message_id, s.known_message_id) > 0 THEN send_heard(
              v.wire_key, s.feed, s.recipient_key, s.provider_message_id, s.known_message_id) = 'accepted'
          END IS NOT TRUE""",
            "",
        ),
        (_HELD, _HELD_HERE),
    ),
    ledger.POSTPONE: partial(
        edited,
        ledger.POSTPONE,
        ("SELECT * FROM unnest($1", "SELECT v.*, clock_timestamp() AS now FROM unnest($1"),
        ("WHEN v.held_reason IS NOT NULL THEN clock_timestamp()", "WHEN v.held_reason IS NOT NULL THEN v.now"),
        ("updated_at = clock_timestamp()", "updated_at = v.now"),
    ),
    releasing.RELEASE: partial(
        edited,
        releasing.RELEASE,
        ("WITH v AS (", _SAID_BY_ID),
        (
            "may_failover)\n    ORDER BY",
            "may_failover)\n    WHERE wire_key <> ALL (ARRAY(SELECT wire_key FROM by_id))\n    ORDER BY",
        ),
        (
            """
      AND CASE WHEN num_nonnulls(s.provider_message_id, s.known_message_id) > 0 THEN send_heard(
              v.wire_key, s.feed, s.recipient_key, s.provider_message_id, s.known_message_id)
          END IS NULL""",
            "",
        ),
        (_HELD, _HELD_HERE),
    ),
    releasing.USAGE: """
        SELECT f.feed, hour.n AS last_hour, claims.n AS claims, hour.unproved, awaited.proved
        FROM unnest($1::text[], $2::bigint[], $3::float8[], $4::float8[], $5::interval[])
            AS f(feed, wanted, share, canary, awaited)
        CROSS JOIN LATERAL (
            SELECT greatest(statement_timestamp() - interval '1 hour',
                            max(resumed_at) FILTER (WHERE resumed_at <= statement_timestamp())) AS since
            FROM feed_state WHERE feed IN (f.feed, '*')
        ) AS budget
        CROSS JOIN LATERAL (
            SELECT count(*) FILTER (WHERE at > budget.since) AS n,
                   count(*) FILTER (WHERE at > statement_timestamp() - f.awaited) AS unproved
            FROM citus_released(f.feed, statement_timestamp() - greatest(f.awaited, interval '1 hour')) AS at
        ) AS hour
        CROSS JOIN LATERAL (
            SELECT CASE WHEN f.share > 0 THEN least(ceil((hour.n + f.wanted) / f.share) + 1, 1e7) ELSE 0 END::bigint
                       AS claims,
                   CASE WHEN f.canary < 1 THEN least(ceil(f.canary * (hour.unproved + f.wanted)) + 1, 1000)
                        ELSE 0 END::bigint AS proved
        ) AS needed
        CROSS JOIN LATERAL (
            SELECT count(*) AS n
            FROM citus_claims(f.feed, statement_timestamp() - interval '1 hour', 'infinity', needed.claims, true)
        ) AS claims
        CROSS JOIN LATERAL (
            SELECT coalesce(min(n) FILTER (WHERE wrong) - 1, count(*)) AS proved
            FROM citus_releases(f.feed, statement_timestamp() - interval '1 day', statement_timestamp() - f.awaited,
                                needed.proved)
        ) AS awaited
    """,
    # A row's lock is free when its transaction has ended here, a moment before it has on the nodes; this one later.
    feeds.LOCK_FEEDS: partial(
        edited,
        feeds.LOCK_FEEDS,
        (
            "SELECT FROM feed_state",
            "SELECT pg_advisory_xact_lock(hashtextextended(current_schema() || feed, 0)) FROM feed_state",
        ),
    ),
    outcomes.FOLLOW: "SELECT citus_follow($1, $2)",
    lookup.QUESTIONS: "SELECT * FROM citus_questions($1::text[])",
    lookup.CONTROLS: """
        SELECT a.place, s.*
        FROM unnest($1::text[], $2::text[], $3::text[], $4::timestamptz[], $5::text[]) WITH ORDINALITY
            AS a(wire_key, feed, message_class, submit_by, found_by, place)
        CROSS JOIN LATERAL citus_next_control(a.wire_key, a.feed, a.message_class, a.submit_by, a.found_by) AS s
    """,
    second_witness.RESERVE: "SELECT * FROM citus_reserve($1, $2, $3::text[], $4::bigint[], $5::int)",
    caps.LIFT: "SELECT citus_lift_caps()",
    shadow.SHADOW: partial(
        edited,
        shadow.SHADOW,
        (
            "), seen AS (",
            """), last AS MATERIALIZED (
    SELECT DISTINCT ON (wire_key) wire_key, action, reason, fence FROM shadow_verdict WHERE wire_key = ANY ($1::text[])
    ORDER BY wire_key, id DESC
), seen AS (""",
        ),
        (
            """SELECT FROM (SELECT * FROM shadow_verdict WHERE wire_key = n.wire_key ORDER BY id DESC LIMIT 1) AS o
        WHERE (o.action""",
            """SELECT FROM last o WHERE o.wire_key = n.wire_key AND (o.action""",
        ),
    ),
    restore.KEEP_HIGHEST_FENCE: """
        UPDATE feed_state s SET fence_seen =
            greatest(s.fence_seen, citus_highest_fence(least(s.suspect_at, s.heartbeat_at) - interval '1 day'))
        WHERE s.feed = $1 AND s.suspect_at IS NOT NULL
    """,
}

_PRUNES: Final = {
    retention.FEEDS: "SELECT citus_feeds() AS feed",
    retention.DELETE_SENDS: "SELECT * FROM citus_delete_sends($1::text[], $2, $3)",
    retention.DELETE_CANCELLED: "SELECT citus_delete_cancelled($1, $2)",
    retention.DELETE_DUPLICATES: "SELECT citus_delete_duplicates($1, $2)",
    retention.DELETE_PLACES: "SELECT citus_delete_places($1, $2)",
    retention.UNDATED_PAGES: f"SELECT {retention.PAGES}",
    retention.DELETE_UNDATED: "SELECT citus_delete_undated($3, $4::interval) WHERE $1::text <> '' AND $2::text <> ''",
}

_LOOKS: Final[Mapping[str, Form]] = {
    routes.STANDING: partial(
        edited,
        routes.STANDING,
        (
            "FROM send_log l, clock_timestamp() AS t WHERE wire_key = wire_key($1)",
            "FROM citus_row($1) AS l, clock_timestamp() AS t",
        ),
    ),
    routes.PEEK: partial(
        edited,
        routes.PEEK,
        ("send_log l ON l.wire_key = k.wire_key", "citus_row($1) AS l ON l.wire_key = k.wire_key"),
    ),
    metrics.UNDECIDED: partial(edited, metrics.UNDECIDED, (CLOCK, "statement_timestamp()")),
    why.ROW: partial(edited, why.ROW, ("LEFT JOIN send_log s", "LEFT JOIN citus_row($1) AS s")),
    # Of rows that were there already the status counts those, too.
    load.ADD: partial(
        edited,
        load.ADD,
        ("INSERT INTO", "WITH added AS (INSERT INTO"),
        ("DO NOTHING", "DO NOTHING RETURNING wire_key) SELECT count(*) FROM added"),
    ),
    campaign.STATUS: partial(
        edited,
        campaign.STATUS,
        ("l.feed = c.feed", "l.feed = (SELECT feed FROM campaign WHERE name = $1)"),
        ("AND l.campaign = c.name)", "AND l.campaign = $1)"),
    ),
    retention_look.COUNT: partial(
        edited,
        retention_look.COUNT,
        (
            """FROM campaign c JOIN send_log l ON l.campaign = c.name AND l.state = 'pending'
          WHERE c.state = 'cancelled' AND c.updated_at < $1 AND""",
            """FROM send_log l WHERE l.state = 'pending' AND l.campaign = ANY (ARRAY(
              SELECT c.name FROM campaign c WHERE c.state = 'cancelled' AND c.updated_at < $1)) AND""",
        ),
    ),
    status.FEEDS: partial(
        edited,
        status.FEEDS,
        (
            """FROM verdict v WHERE v.feed = asked.feed AND v.action = 'released'
        AND v.reason IN ('absent', 'looked_up', 'gave_up') AND v.decided_at > $2::timestamptz - interval '1 hour')""",
            "FROM citus_released(asked.feed, $2::timestamptz - interval '1 hour'))",
        ),
        (
            """(SELECT verdict_source FROM send_log p WHERE p.feed = asked.feed AND p.state = 'sent'
            AND p.answered_at IS NULL AND p.verdict_source IN ('feed', 'look-up')
            AND p.sent_at > $2::timestamptz - interval '1 day' ORDER BY p.sent_at DESC LIMIT 1000) AS proved""",
            "citus_proved_by(asked.feed, $2::timestamptz - interval '1 day') AS proved(verdict_source)",
        ),
        (
            """(
            SELECT FROM send_log c WHERE c.feed = asked.feed AND c.answered_at IS NOT NULL AND c.attempt = 1
               AND c.claimed_at > greatest(stored.last_at, $2::timestamptz - interval '1 day')
               AND c.claimed_at < $2::timestamptz - interval '1 hour' ORDER BY c.claimed_at LIMIT 7) AS unheard)""",
            """citus_answered(asked.feed, greatest(stored.last_at, $2::timestamptz - interval '1 day'),
               $2::timestamptz - interval '1 hour', 7) AS unheard)""",
        ),
    ),
    reports.VANISHED: re.sub(
        r"(?s)^.*?(?=\n\), near AS \()",
        "WITH sample AS MATERIALIZED (\n"
        "    SELECT * FROM citus_sample($1::text[], $2::timestamptz[], $3::timestamptz, $4::int, $5::int)",
        reports.VANISHED,
    ),
    status.FOREIGN: "SELECT * FROM citus_foreign($1, $2)",
}

COUNTED: Final = frozenset({outcomes.FOLLOW, load.ADD})
"""Statements whose status is asked how many rows they wrote: here their one value says it."""

FORMS: Final[Mapping[str, Form]] = {**SILENCE, **_PASSES, **_PRUNES, **_LOOKS}

_PIECES: Final = (
    ("SELECT FROM", "SELECT 1 FROM"),  # what has no column can't be brought here
    # A function that knows the row type on the coordinator.
    ("send_is_over(l, ", "send_is_over(jsonb_populate_record(NULL::send_log, to_jsonb(l)), "),
    # The wire key is made first, so that the row is looked for on one node.
    ("send_log WHERE wire_key = wire_key($1) FOR UPDATE NOWAIT", "citus_row($1, 'free')"),
    ("send_log WHERE wire_key = wire_key($1) FOR UPDATE", "citus_row($1, 'lock')"),
    ("send_log WHERE wire_key = wire_key($1)", "citus_row($1)"),
)

REFUSED: Final[Mapping[str, str]] = {
    reports.UNKNOWN: "report unknown",
    drift.REPEATED: "report drift",
    inventory.LOOKED: "report overlaps and sources",
    what_if.SENDS: "what-if",
    forgetting.FIND_SENDS: "forget",
    LEASE_DUE: "the outbox",
}
"""What Citus would have to say in quite another way, by the first statement of each."""


def other_form(statement: str) -> str | None:
    """Return what stands in FORMS for a statement. Raises ValueError where it no longer holds what is to be changed."""
    found = FORMS.get(statement)
    return found if found is None or isinstance(found, str) else found()


def form(statement: str) -> str:
    """Return what is said to Citus instead of a statement. Raises UserError for what is not done there."""
    if what := REFUSED.get(statement):
        raise UserError(f"{what} is not done on tables distributed with Citus: see docs/citus.md")
    statement = other_form(statement) or statement
    for piece, said in _PIECES:
        statement = statement.replace(piece, said)
    if _TOUCHED.search(statement):
        return statement.replace(CLOCK, ONE_CLOCK)
    return statement


class DistributedConnection(asyncpg.Connection):
    """A connection that says each statement in the form that Citus takes."""

    async def execute(self, query: str, *args: Any, **named: Any) -> str:
        """As asyncpg's."""
        if query in COUNTED:
            return f"UPDATE {await self.fetchval(query, *args, **named)}"
        return str(await super().execute(form(query), *args, **named))

    async def fetch(self, query: str, *args: Any, **named: Any) -> list[Any]:
        """As asyncpg's."""
        return list(await super().fetch(form(query), *args, **named))

    async def fetchrow(self, query: str, *args: Any, **named: Any) -> Any:
        """As asyncpg's."""
        return await super().fetchrow(form(query), *args, **named)

    async def fetchval(self, query: str, *args: Any, **named: Any) -> Any:
        """As asyncpg's."""
        return await super().fetchval(form(query), *args, **named)


async def connection_class(connection: asyncpg.Connection) -> type[asyncpg.Connection]:
    """Return what connections to this database are to be. Raises ValueError where a form no longer fits."""
    if not await is_distributed(connection):
        return asyncpg.Connection
    for statement in FORMS:
        other_form(statement)
    return DistributedConnection


async def refuse_outbox(pool: Any, settings: OutboxSettings) -> None:
    """Raise UserError where the settings ask for an outbox that nothing writes."""
    if (settings.url or settings.queue_url) and await is_distributed(pool):
        raise UserError(
            "[outbox] is not done on tables distributed with Citus (docs/citus.md): take it out of the settings"
        )
