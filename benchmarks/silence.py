# SPDX-License-Identifier: Apache-2.0
"""(d) What risk costs a pass: claims of which nothing was heard, judged, and taken as never sent after their grace."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final
from unittest.mock import patch

import asyncpg

from benchmarks import backlog_sql as sql
from benchmarks.backlog import RULES, policies
from benchmarks.stand import Result, Scale, compare, connected, copied_database, say
from reconciler.database import migrate
from reconciler.database.connection import Connection
from reconciler.database.postgres import EmbeddedPostgres
from reconciler.passes import judging
from reconciler.passes.histories import Histories
from reconciler.passes.reconcile import Report, run_pass
from reconciler.rule.history import Counts
from reconciler.rule.limits import Limit
from reconciler.rule.risk import Assessment, Burst, Recent
from reconciler.rule.silence import Claim, FeedHistory, Judged
from reconciler.serving.serve import calm_collector
from webhooks.database import connect_pool
from webhooks.event import Answer

CLAIMS: Final = 200_000
OTHERS: Final = 2_000_000
FEEDS: Final = 20
LIMIT: Final = Limit(count=1000, share=0.2, canary=0.1, awaited=RULES.grace)
"""What holds where nothing is set: nearly all are held, on both sides."""

NEVER_SENT: Final = Judged(
    Assessment(Answer.ABSENT, "", 0, 0, 0, 0, 1, 0, 0, Counts(), Recent(0, 0, 0, 0, 0), Burst((), 0)), 0, reported=True
)


class Unread(Histories):
    """Histories that nobody reads: a pass without risk asks for none."""

    async def of(self, _: Connection, asked: Iterable[tuple[str, str]], now: datetime) -> dict[str, FeedHistory]:
        """Return histories of which nothing is known."""
        return {feed: FeedHistory(feed, now.timestamp(), by_domain=False) for feed, _ in asked}


async def taken_as_never_sent(
    _: Connection, _histories: Histories, claims: Sequence[Claim], _now: datetime
) -> dict[str, Judged]:
    """Say of each claim that it was never sent: the pass without risk, which goes by the grace alone."""
    return {claim.wire_key: NEVER_SENT for claim in claims}


async def run(embedded: EmbeddedPostgres, scale: Scale) -> list[Result]:
    """Compare a pass that judges silent claims with one that takes them as never sent once their grace is over.

    Both read every row, its evidence and its feed, and write a verdict on each; the limits hold nearly all. What risk
    costs grows with the minutes of each feed that hold claims: those of an outage share them, those of a day less.
    """
    calm_collector()  # for both sides alike, as the daemon does
    crowded = await _compared(embedded, scale, "outage", "of an outage of two hours", crowded=True)
    return [crowded, await _compared(embedded, scale, "thin", "spread over 19 hours", crowded=False)]


async def _compared(embedded: EmbeddedPostgres, scale: Scale, name: str, which: str, *, crowded: bool) -> Result:
    claims, others = scale.of(CLAIMS), scale.of(OTHERS)
    await _prepare(embedded, name, claims, others, crowded=crowded)

    async def judged() -> float:
        return claims / await timed(embedded, name, claims, with_risk=True)

    async def unjudged() -> float:
        return claims / await timed(embedded, name, claims, with_risk=False)

    title = f"(d) pass over {claims:,} silent claims in {FEEDS} feeds, {which}, with risk to without"
    return await compare(title, "claims/s", 1 / 1.3, judged, unjudged, scale.rounds)


async def _prepare(embedded: EmbeddedPostgres, name: str, claims: int, others: int, *, crowded: bool) -> None:
    begun = time.perf_counter()
    async with connected(embedded.dsn()) as connection:
        await connection.execute(f"CREATE DATABASE {name}")
    await migrate.migrate(embedded.dsn(name))
    async with connected(embedded.dsn(name)) as connection:
        await connection.execute(sql.MAKE_MONTHS)
        await connection.execute(sql.FILL_SENT, others, FEEDS, 0, timedelta(0))
        await connection.execute(sql.FILL_CLAIMED, claims, FEEDS, crowded)
        await connection.execute(sql.FILL_EVENTS)
        await connection.execute(sql.SILENCE_CLAIMS)
        await connection.execute("VACUUM (ANALYZE, FREEZE)")
        await connection.execute("CHECKPOINT")
    say(f"    {claims:,} silent claims beside {others:,} sends prepared in {time.perf_counter() - begun:.0f} s")


async def timed(embedded: EmbeddedPostgres, name: str, claims: int, *, with_risk: bool) -> float:
    """Run one pass over the prepared claims, in a copy, and return its seconds."""
    async with copied_database(embedded, "round", name) as dsn:
        async with connected(dsn) as connection:
            await connection.execute(sql.OUTCOMES_ARE_UP_TO_DATE)
            await connection.execute(sql.FILL_DELIVERIES, FEEDS)
        pool = await connect_pool(dsn, size=2, application="benchmarks")
        try:
            begun = time.perf_counter()
            report = await (_judged(pool) if with_risk else _unjudged(pool))
            seconds = time.perf_counter() - begun
        finally:
            await pool.close()
    _check(report, claims)
    return seconds


async def _judged(pool: asyncpg.Pool) -> Report:
    return await run_pass(pool, policies(RULES, LIMIT), who="benchmarks")


async def _unjudged(pool: asyncpg.Pool) -> Report:
    chosen = policies(RULES, LIMIT)
    chosen = replace(chosen, histories=Unread(chosen.rules_for, chosen.histories.by_domain))
    with patch.object(judging, "assess_silence", taken_as_never_sent):
        return await run_pass(pool, chosen, who="benchmarks")


def _check(report: Report, claims: int) -> None:
    settled = sum(n for name, n in report.counts.items() if name.startswith(("held:", "released:")))
    if settled != claims or report.counts["held:silent"]:
        raise SystemExit(f"of {claims} claims of feeds that speak: {dict(report.counts)}")
