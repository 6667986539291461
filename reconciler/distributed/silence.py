# SPDX-License-Identifier: Apache-2.0
"""How it is measured on tables distributed with Citus what silence is worth: the samples are taken by functions.

For each row of one table no bounded sample of another can be asked of Citus in one statement. There no row remembers
when it was heard of: the events are asked about each control.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from reconciler.passes import histories, neighbours

Form = str | Callable[[], str]
"""What is said instead of a statement, or what makes it of the statement once somebody needs it."""


def edited(statement: str, *edits: tuple[str, str]) -> str:
    """Return a statement with each piece replaced. Raises ValueError where one is not found."""
    for old, new in edits:
        if old not in statement:
            raise ValueError(f"a statement no longer holds {old!r}, which Citus needs in another form")
        statement = statement.replace(old, new)
    return statement


SILENCE: Final[Mapping[str, Form]] = {
    histories.CLASSES: "SELECT message_class FROM citus_classes($1, $2::timestamptz - interval '30 days') "
    "ORDER BY newest DESC LIMIT $3",
    histories.NEWEST_CONTROLS: """
        WITH c AS MATERIALIZED (
            SELECT * FROM citus_controls($1, $2, $3::timestamptz - interval '30 days', $3, $5::int, true)
        ), heard AS (
            SELECT * FROM citus_heard(ARRAY(SELECT wire_key FROM c), $1, $3::timestamptz - interval '31 days', $4)
        )
        SELECT date_part('epoch', c.first_claimed_at) AS at, date_part('epoch', heard.at - c.first_claimed_at) AS lag,
               CASE WHEN $6 THEN c.domain END AS domain
        FROM c LEFT JOIN heard USING (wire_key)
    """,
    histories.SPREAD_CONTROLS: """
        WITH c AS MATERIALIZED (
            SELECT c.* FROM generate_series(1, 96) AS quarter
            CROSS JOIN LATERAL citus_controls($1, $2, $3::timestamptz - quarter * interval '15 min',
                $3::timestamptz - (quarter - 1) * interval '15 min', $5 / 96 + 1, true) AS c
        ), heard AS (
            SELECT * FROM citus_heard(ARRAY(SELECT wire_key FROM c), $1, $3::timestamptz - interval '2 days', $4)
        )
        SELECT date_part('epoch', c.first_claimed_at) AS at, date_part('epoch', heard.at - c.first_claimed_at) AS lag,
               CASE WHEN $6 THEN c.domain END AS domain
        FROM c LEFT JOIN heard USING (wire_key)
    """,
    histories.PROVED: """
        WITH s AS MATERIALIZED (
            SELECT p.* FROM generate_series(1, 96) AS quarter
            CROSS JOIN LATERAL citus_proved($1, $2::timestamptz - quarter * interval '15 min',
                $2::timestamptz - (quarter - 1) * interval '15 min', $3 / 96 + 1) AS p
            UNION ALL
            SELECT * FROM citus_proved($1, '-infinity', $2::timestamptz - interval '1 day', $3)
        ), heard AS (SELECT * FROM citus_heard(ARRAY(SELECT wire_key FROM s), $1, '-infinity', $2))
        SELECT s.message_class, extract(epoch FROM s.claimed_at)::float8 AS at,
               extract(epoch FROM heard.at - s.claimed_at)::float8 AS lag, s.domain
        FROM s LEFT JOIN heard USING (wire_key)
        WHERE s.submit_by < $2 AND s.reached = 1
          AND s.wire_key <> ALL (ARRAY(SELECT citus_ill(ARRAY(SELECT wire_key FROM s))))
        UNION ALL
        SELECT message_class, extract(epoch FROM first_claimed_at)::float8, NULL, domain
        FROM citus_duplicated($1, $2::timestamptz - interval '30 days', $2)
    """,
    histories.SHARES: """
        SELECT counted.sends, (
            SELECT count(*) FROM citus_ambiguous($1, $2::timestamptz - n * stretch.long, counted.last, $2)) AS ambiguous
        FROM generate_series(1, 48) AS n
        CROSS JOIN (VALUES (interval '30 min'), (interval '15 hours')) AS stretch(long)
        CROSS JOIN LATERAL (
            SELECT count(*) AS sends, max(at) AS last
            FROM citus_claims($1, $2::timestamptz - n * stretch.long, $2::timestamptz - (n - 1) * stretch.long, 300,
                              false) AS at
        ) AS counted
    """,
    histories.CAUSES: """
        SELECT reported, count(*) FILTER (WHERE accepted) AS accepted, count(*) FILTER (WHERE NOT accepted) AS unheard,
               coalesce(sum(risk) FILTER (WHERE NOT accepted), 0)::float8 AS risk,
               count(*) FILTER (WHERE NOT accepted AND risk IS NULL) AS unjudged
        FROM citus_causes($1, $2, $3) GROUP BY reported
    """,
    neighbours.NEIGHBOURS: """
        SELECT asked.n, before.keys AS keys_before, before.at AS before, before.heard AS heard_before,
               before.domains AS domains_before,
               after.keys AS keys_after, after.at AS after, after.heard AS heard_after, after.domains AS domains_after
        FROM unnest($1::int[], $2::text[], $3::text[], $4::float8[], $5::float8[], $6::float8[], $7::bool[])
            AS asked(n, feed, message_class, oldest, youngest, until, of_domain)
        CROSS JOIN LATERAL (SELECT CASE WHEN asked.of_domain THEN 250 ELSE 25 END AS n) AS most
        CROSS JOIN LATERAL (
            SELECT coalesce(array_agg(wire_key), '{}') AS keys,
                   coalesce(array_agg(date_part('epoch', first_claimed_at)), '{}') AS at,
                   coalesce(array_agg(NULL::float8), '{}') AS heard,
                   coalesce(array_agg(domain) FILTER (WHERE asked.of_domain), '{}') AS domains
            FROM citus_controls(asked.feed, asked.message_class, to_timestamp(asked.oldest) - interval '1 hour',
                                to_timestamp(asked.oldest), most.n, true)
        ) AS before
        CROSS JOIN LATERAL (
            SELECT coalesce(array_agg(wire_key), '{}') AS keys,
                   coalesce(array_agg(date_part('epoch', first_claimed_at)), '{}') AS at,
                   coalesce(array_agg(NULL::float8), '{}') AS heard,
                   coalesce(array_agg(domain) FILTER (WHERE asked.of_domain), '{}') AS domains
            FROM (
                SELECT * FROM citus_controls(asked.feed, asked.message_class, to_timestamp(asked.until),
                    least(to_timestamp(asked.until) + interval '3599.999999 s', $8::timestamptz), most.n, false)
                UNION ALL
                SELECT * FROM citus_controls(asked.feed, asked.message_class, to_timestamp(asked.youngest),
                    to_timestamp(asked.until), most.n, true)
            ) AS c
        ) AS after
    """,
    neighbours.DENSITY: partial(
        edited,
        neighbours.DENSITY,
        (
            """(SELECT claimed_at FROM send_log WHERE feed = asked.feed AND claimed_at < to_timestamp(asked.at)
          ORDER BY claimed_at DESC LIMIT $4) AS s""",
            """citus_claims(asked.feed, '-infinity', to_timestamp(asked.at) - interval '1 us', $4, true)
              AS s(claimed_at)""",
        ),
        (
            """(SELECT claimed_at FROM send_log WHERE feed = asked.feed AND claimed_at > to_timestamp(asked.at)
            AND claimed_at <= $5
          ORDER BY claimed_at LIMIT $4) AS s""",
            """citus_claims(asked.feed, to_timestamp(asked.at), $5, $4, false) AS s(claimed_at)""",
        ),
    ),
    neighbours.AMBIGUOUS: """
        SELECT ARRAY(SELECT date_part('epoch', at) FROM citus_ambiguous(asked.feed, to_timestamp(asked.since),
                     to_timestamp(asked.until), $4) AS at ORDER BY 1) AS at
        FROM unnest($1::text[], $2::float8[], $3::float8[]) WITH ORDINALITY AS asked(feed, since, until, n)
        ORDER BY asked.n
    """,
}
"""How silence is measured: samples by functions, since no sample can be taken for each row of another table."""
