# SPDX-License-Identifier: Apache-2.0
"""(c) A pass over a large backlog, against one SQL statement that does the same; and the memory that a pass takes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import asyncpg

from benchmarks import backlog_sql as sql
from benchmarks.stand import Figure, Result, Scale, compare, connected, copied_database, say
from reconciler.database import migrate
from reconciler.database.postgres import EmbeddedPostgres
from reconciler.passes.histories import Histories
from reconciler.passes.reconcile import Policies, look, run_pass
from reconciler.rule.limits import Limit
from reconciler.rule.policy import Rules
from webhooks.database import connect_pool

CLAIMS: Final = 200_000
SMALL: Final = 20_000
FEEDS: Final = 4
OTHERS: Final = 2_000_000
"""Sent rows beside the claims, and as many events."""
BEFORE: Final = timedelta(hours=30)
"""Age of the youngest send of a longer past: none lies around a claim."""

RULES: Final = Rules(
    grace=timedelta(minutes=15),
    give_up_after=timedelta(hours=24),
    max_risk=0.01,
    max_attempts=5,
    same_key_retry=True,
    retry_backoff=timedelta(seconds=30),
    on_unknown="hold",
)
LIMIT: Final = Limit(count=1_000_000, share=1.0, canary=1.0, awaited=timedelta(0))


def policies(rules: Rules, limit: Limit) -> Policies:
    """Return policies of one rule for all."""

    def rules_for(_feed: str, _class: str) -> Rules:
        return rules

    histories = Histories(rules_for, lambda _feed: False)
    return Policies(rules_for, lambda _feed: None, timedelta(days=7), histories, lambda _feed: limit)


async def run(embedded: EmbeddedPostgres, scale: Scale) -> list[Result]:
    """Compare the pass with its limit and with one beside a shorter log; weigh one over a tenth of the claims."""
    claims, small, others = scale.of(CLAIMS), scale.of(SMALL), scale.of(OTHERS)
    few = claims // 8  # lie as thick among an eighth of the sends as all among all: more would be a burst
    await _prepare(embedded, "backlog", claims, others)

    async def ours(template: str, claims: int) -> float:
        async with _round(embedded, template) as dsn:
            return claims / await timed_pass(dsn, claims)

    async def limit() -> float:
        async with _round(embedded, "backlog") as dsn:
            return claims / await _timed_limit(dsn, claims)

    name = f"(c) pass over {claims:,} claims beside {others:,} events and rows"
    speed = await compare(name, "claims/s", 0.95, partial(ours, "backlog", claims), limit, scale.rounds)
    speed.notes.append("the limit judges silence by three controls a side, the pass by its risk")
    speed.notes.append("no event lies in the time that the walk of outcomes covers")
    await _prepare(embedded, "backlog_few", few, others)
    await _prepare(embedded, "backlog_eighth", few, others // 8)
    await _prepare(embedded, "backlog_longer", few, others // 8, others - others // 8)
    long, longer, short = [partial(_warm, embedded, f"backlog_{log}", few) for log in ("few", "longer", "eighth")]
    name = f"(c) pass over {few:,} claims in a log eight times as {{}}, to that"
    rounds = min(3, scale.rounds)
    growth = [
        await compare(name.format("long"), "claims/s", 1 / 1.2, longer, short, rounds),
        await compare(name.format("dense"), "claims/s", None, long, short, rounds),
    ]
    growth[0].notes.append(
        "each after a look at all of them: what a pass reads lies in memory, as the last pass left it"
    )
    growth[1].notes.append(
        "eight times as many sends lie around each claim: up to 50 a minute and feed are asked about"
    )
    large_peak = await _peak(embedded, "backlog", claims)
    await _prepare(embedded, "backlog_small", small, others)
    small_peak = await _peak(embedded, "backlog_small", small)
    note = f"{large_peak / 1024:.0f} MB against {small_peak / 1024:.0f} MB"
    memory = Figure(f"(c) peak memory, {claims:,} claims to {small:,}", large_peak / small_peak, "x", 1.2, note)
    return [speed, *growth, memory]


async def _prepare(embedded: EmbeddedPostgres, name: str, claims: int, others: int, before: int = 0) -> None:
    begun = time.perf_counter()
    async with connected(embedded.dsn()) as connection:
        await connection.execute(f"CREATE DATABASE {name}")
    await migrate.migrate(embedded.dsn(name))
    async with connected(embedded.dsn(name)) as connection:
        await connection.execute(sql.MAKE_MONTHS)
        await connection.execute(sql.FILL_SENT, others, FEEDS, 0, timedelta(0))
        if before:
            await connection.execute(sql.FILL_SENT, before, FEEDS, others, BEFORE)
        await connection.execute(sql.FILL_CLAIMED, claims, FEEDS, False)
        await connection.execute(sql.FILL_EVENTS)
        await connection.execute(sql.FILL_DELIVERIES, FEEDS)
        await connection.execute("VACUUM (ANALYZE, FREEZE)")
        await connection.execute("CHECKPOINT")
    say(f"    {claims:,} claims beside {others + before:,} sends prepared in {time.perf_counter() - begun:.0f} s")


@asynccontextmanager
async def _round(embedded: EmbeddedPostgres, template: str) -> AsyncIterator[str]:
    async with copied_database(embedded, "round", template) as dsn:
        async with connected(dsn) as connection:
            await connection.execute(sql.OUTCOMES_ARE_UP_TO_DATE)
        yield dsn


async def _warm(embedded: EmbeddedPostgres, template: str, claims: int) -> float:
    """Return the rate of a pass after a look at the same rows: a copied database has nothing in memory at first."""
    async with _round(embedded, template) as dsn:
        pool = await connect_pool(dsn, size=2, application="benchmarks")
        try:
            await look(pool, policies(RULES, LIMIT))
        finally:
            await pool.close()
        return claims / await timed_pass(dsn, claims)


async def timed_pass(dsn: str, claims: int) -> float:
    """Run one pass over a prepared database and return its seconds."""
    pool = await connect_pool(dsn, size=2, application="benchmarks")
    try:
        begun = time.perf_counter()
        report = await run_pass(pool, policies(RULES, LIMIT), who="benchmarks")
        seconds = time.perf_counter() - begun
    finally:
        await pool.close()
    _check(claims, report.counts["sent:accepted"], report.counts["released:absent"])
    return seconds


async def _timed_limit(dsn: str, claims: int) -> float:
    async with connected(dsn) as connection:
        await connection.execute("SET work_mem = '256MB'")  # the statement at its best
        feeds = [f"feed-{n}" for n in range(FEEDS)]
        begun = time.perf_counter()
        row: asyncpg.Record | None = await connection.fetchrow(sql.LIMIT, feeds)
        seconds = time.perf_counter() - begun
    assert row is not None  # noqa: S101 - a SELECT of two counts
    _check(claims, row["sent"], row["released"])
    return seconds


def _check(claims: int, sent: int, released: int) -> None:
    absent = claims // 10  # of a small log a few may be held, for want of controls
    if sent != claims - absent or not 0.7 * absent <= released <= absent:
        raise SystemExit(f"the backlog was not settled as it should be: {sent} sent, {released} released of {claims}")


async def _peak(embedded: EmbeddedPostgres, template: str, claims: int) -> int:
    """Return the largest resident size, in KB, of a process of its own that runs one pass."""
    async with _round(embedded, template) as dsn:
        command = [sys.executable, "-m", "benchmarks.backlog", dsn, str(claims)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: ASYNC221, S603 - nothing else runs
    result: dict[str, Any] = json.loads(done.stdout)
    return int(result["peak"])


def _one_pass_alone(dsn: str, claims: int) -> None:
    import asyncio  # noqa: PLC0415 - only where this file is a program

    asyncio.run(timed_pass(dsn, claims))
    say(json.dumps({"peak": _own_peak()}))


def _own_peak() -> int:
    # Not getrusage: on Linux its maximum begins with what the parent held when it started this process.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    _one_pass_alone(sys.argv[1], int(sys.argv[2]))
