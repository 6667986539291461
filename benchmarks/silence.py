# SPDX-License-Identifier: Apache-2.0
"""(d) What risk costs a pass: claims of which nothing was heard, judged with their feed's silence and without it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from benchmarks import backlog_sql as sql
from benchmarks.backlog import RULES, policies
from benchmarks.stand import Result, Scale, compare, connected, copied_database, say
from reconciler import migrate
from reconciler.histories import Histories
from reconciler.ledger import Connection
from reconciler.limits import Limit
from reconciler.postgres import EmbeddedPostgres
from reconciler.reconcile import run_pass
from reconciler.serving import calm_collector
from reconciler.silence import FeedHistory
from webhooks.database import connect_pool

CLAIMS: Final = 200_000
OTHERS: Final = 2_000_000
FEEDS: Final = 20
LIMIT: Final = Limit(count=0, share=0.0, canary=1.0, awaited=timedelta(0))


class Unread(Histories):
    """Histories that nobody reads: a pass without risk asks for none."""

    async def of(self, _: Connection, asked: Iterable[tuple[str, str]], now: datetime) -> dict[str, FeedHistory]:
        """Return histories of which nothing is known."""
        return {feed: FeedHistory(feed, now.timestamp(), by_domain=False) for feed, _ in asked}


async def run(embedded: EmbeddedPostgres, scale: Scale) -> list[Result]:
    """Compare a pass that judges silent claims with one over the same claims whose feeds have delivered nothing.

    Both read every row, its evidence and its feed, and hold every claim with a verdict; neither releases. The limit
    reads no history: a pass would, for the risk that it states where it gives up.
    """
    claims, others = scale.of(CLAIMS), scale.of(OTHERS)
    await _prepare(embedded, claims, others)
    calm_collector()  # for both sides alike, as the daemon does

    async def judged() -> float:
        return claims / await timed(embedded, claims, feeds_speak=True)

    async def unjudged() -> float:
        return claims / await timed(embedded, claims, feeds_speak=False)

    name = f"(d) pass over {claims:,} silent claims in {FEEDS} feeds, with risk to without"
    return [await compare(name, "claims/s", 1 / 1.3, judged, unjudged, scale.rounds)]


async def _prepare(embedded: EmbeddedPostgres, claims: int, others: int) -> None:
    begun = time.perf_counter()
    async with connected(embedded.dsn()) as connection:
        await connection.execute("CREATE DATABASE silence")
    await migrate.migrate(embedded.dsn("silence"))
    async with connected(embedded.dsn("silence")) as connection:
        await connection.execute(sql.MAKE_MONTHS)
        await connection.execute(sql.FILL_SENT, others, FEEDS)
        await connection.execute(sql.FILL_CLAIMED, claims, FEEDS)
        await connection.execute(sql.FILL_EVENTS)
        await connection.execute(sql.SILENCE_CLAIMS)
        await connection.execute("VACUUM (ANALYZE, FREEZE)")
        await connection.execute("CHECKPOINT")
    say(f"    {claims:,} silent claims beside {others:,} sends prepared in {time.perf_counter() - begun:.0f} s")


async def timed(embedded: EmbeddedPostgres, claims: int, *, feeds_speak: bool) -> float:
    """Run one pass over the prepared claims, in a copy, and return its seconds."""
    async with copied_database(embedded, "round", "silence") as dsn:
        async with connected(dsn) as connection:
            await connection.execute(sql.OUTCOMES_ARE_UP_TO_DATE)
            if feeds_speak:
                await connection.execute(sql.FILL_DELIVERIES, FEEDS)
        pool = await connect_pool(dsn, size=2, application="benchmarks")
        try:
            chosen = policies(replace(RULES, max_risk=0.0), LIMIT)
            if not feeds_speak:
                chosen = replace(chosen, histories=Unread(chosen.rules_for, lambda _feed: False))
            begun = time.perf_counter()
            report = await run_pass(pool, chosen, who="benchmarks")
            seconds = time.perf_counter() - begun
        finally:
            await pool.close()
    silent, held = report.counts["held:silent"], sum(n for name, n in report.counts.items() if name.startswith("held:"))
    if held != claims or (silent == claims) == feeds_speak:
        raise SystemExit(f"of {claims} claims {held} were held, {silent} of them unjudged")
    return seconds
