# SPDX-License-Identifier: Apache-2.0
"""What a run came to, in figures: what befell the sends, what became of them, duplicates, risks, and times."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

from . import truth
from .audit import NAMED, duplicates, risks
from .world import World

BEFELL: Final = "SELECT how, count(*) AS n FROM truth.granted GROUP BY how ORDER BY n DESC, how"
BECAME: Final = """
SELECT CASE WHEN state IN ('pending', 'claimed') THEN 'held' ELSE state END
       || ' (' || CASE WHEN state = 'sent' THEN verdict_source
                       WHEN state = 'failed' AND verdict_source = 'sender' THEN 'refused'
                       ELSE coalesce(held_reason, verdict_reason, 'open') END || ')' AS state, count(*) AS n
FROM send_log GROUP BY 1 ORDER BY n DESC, 1
"""
EVENTS: Final = "SELECT count(*) FROM provider_event WHERE source = 'http'"
SPAN: Final = "SELECT max(began) - min(began) AS span, count(*) AS ticks FROM truth.tick"

# Of an attempt that its sender left open: from its tick's beginning to the first verdict on it.
TIMES: Final = """
SELECT verdict, count(*) AS n, percentile_disc(0.5) WITHIN GROUP (ORDER BY took) AS p50,
       percentile_disc(0.99) WITHIN GROUP (ORDER BY took) AS p99
FROM (
    SELECT CASE WHEN v.action IS NOT NULL THEN v.action || CASE v.action WHEN 'sent' THEN '' ELSE ': ' || v.reason END
                WHEN s.fence = g.fence AND s.state IN ('sent', 'failed') THEN s.state
                ELSE 'held' END AS verdict,
           coalesce(v.decided_at, CASE WHEN s.fence = g.fence THEN coalesce(s.sent_at, s.failed_at) END)
               - t.began AS took
    FROM truth.granted g JOIN truth.tick t ON t.n = g.tick JOIN send_log s ON s.wire_key = g.wire_key
    LEFT JOIN LATERAL (
        SELECT v.action, v.reason, v.decided_at FROM verdict v
        WHERE v.wire_key = g.wire_key AND v.fence = g.fence AND v.action <> 'held' ORDER BY v.id LIMIT 1) AS v ON true
    WHERE g.ambiguous
) AS attempts
GROUP BY verdict ORDER BY n DESC, verdict
"""


async def lines(connection: Any, world: World, losses: int | None) -> list[str]:
    """Return the report; without a number of losses the run is not over."""
    run = await truth.read_run(connection)
    span = await connection.fetchrow(SPAN)
    lived = f"{span['span'].total_seconds() / 3600:,.1f} hours of simulated time in {span['ticks']:,} ticks"
    speed = f"{run['seconds']:,.0f} s here, {world.sends / run['seconds']:,.0f} sends/s"
    found = [
        f"{world.sends:,} sends, seed {world.seed}: {lived}, {speed}",
        f"{await connection.fetchval(EVENTS):,} events of feeds were acknowledged and stored",
        "",
        *_table("what befell the attempts", await connection.fetch(BEFELL)),
        "",
        *_table("what became of the sends", await connection.fetch(BECAME)),
        "",
        *_table("what the parties saw", sorted(json.loads(run["counted"]).items())),
        "",
        *_times(await connection.fetch(TIMES)),
        "",
        *_risks(await risks(connection)),
        "",
        *_duplicates([one.cause for one in await duplicates(connection)]),
        "losses: not counted, since the run is not over" if losses is None else f"losses: {losses:,}",
    ]
    return [line.rstrip() for line in found]


def _table(title: str, rows: Sequence[Any]) -> Iterator[str]:
    yield f"{title:<58} {'n':>10}"
    for name, n in rows:
        yield f"  {name:<56} {n:>10,}"


def _times(rows: Sequence[Any]) -> Iterator[str]:
    yield f"{'attempts left open by their sender, and their verdict':<58} {'n':>10} {'p50':>9} {'p99':>9}"
    for verdict, n, p50, p99 in rows:
        yield f"  {verdict:<56} {n:>10,} {_minutes(p50):>9} {_minutes(p99):>9}"


def _risks(rows: Sequence[Any]) -> Iterator[str]:
    yield f"{'releases that state a risk':<58} {'n':>10} {'stated':>9} {'wrong':>9} {'p':>7}"
    for risk in rows:
        name = f"{risk.reason}, {risk.feed}"
        yield f"  {name:<56} {risk.released:>10,} {risk.stated:>9.2f} {risk.wrong:>9,} {risk.chance:>7.3f}"


def _duplicates(found: Sequence[str]) -> Iterator[str]:
    yield f"{'messages too many, by cause':<58} {len(found):>10,}"
    for cause in (*NAMED, *sorted(set(found) - set(NAMED))):
        if n := found.count(cause):
            yield f"  {cause:<56} {n:>10,}"


def _minutes(span: timedelta | None) -> str:
    return "-" if span is None else f"{span.total_seconds() / 60:,.1f} min"
