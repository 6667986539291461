# SPDX-License-Identifier: Apache-2.0
"""One pass: evidence first, then pages of rows that are due. Any number of passes may run side by side."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Concatenate, Final, ParamSpec, TypeVar

import asyncpg

from reconciler.database.connection import BEGINNING, TRY_AGAIN, Connection, Place
from reconciler.passes import evidence, ledger
from reconciler.passes.feeds import open_breaker
from reconciler.passes.histories import Histories
from reconciler.passes.judging import Page, judge_row, read_page
from reconciler.passes.ledger import Decided
from reconciler.passes.outcomes import follow_outcomes
from reconciler.passes.releasing import release
from reconciler.passes.second_witness import NOBODY, SecondWitness
from reconciler.passes.shadow import note_shadow
from reconciler.rule.limits import ALL_LIVE, Limit, Live
from reconciler.rule.policy import Action, Rules, Verdict, Witness

ASKING: Final = 20.0
"""Seconds that questions to providers may take, of a whole pass: the rows of its later pages are not to wait longer."""

LEAST_ASKING: Final = 1.0
AT_ONCE: Final = 2
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Policies:
    """What the settings say about feeds and message classes, as a pass asks it."""

    rules_for: Callable[[str, str], Rules]
    """The rules of a feed and message class."""
    key_window: Callable[[str], timedelta | None]
    """How long the provider of a feed keeps our native idempotency key; None: it keeps none."""
    late_window: timedelta
    """How long after its failure a row may still become sent."""
    histories: Histories
    """What the silence of each feed was worth until now; kept from pass to pass."""
    limit_for: Callable[[str], Limit]
    """How much may be released on a feed."""
    live: Live = ALL_LIVE
    """Feeds whose sends passes move; of the others they only record what they would do."""
    second_witness: SecondWitness = NOBODY
    """Who asks the providers' APIs."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Which rows a pass looks at: all, those of one feed, or one."""

    feed: str | None = None
    wire_key: str | None = None


EVERYTHING: Final = Scope()


@dataclass(slots=True)
class Report:
    """What a pass did (or, dry, would do)."""

    counts: Counter[str] = field(default_factory=Counter)
    """Verdicts by `action:reason`, `outcomes` for changed deliveries, `retried` for statements that were repeated."""
    decided: list[Decided] = field(default_factory=list)
    """What would become of each row that a dry run looked at."""

    @property
    def verdicts(self) -> list[tuple[str, Verdict]]:
        """Wire key and verdict of each row that a dry run looked at."""
        return [(d.wire_key, d.verdict) for d in self.decided]


START_PASS: Final = "INSERT INTO pass (who, feed, wire_key) VALUES ($1, $2, $3) RETURNING id, started_at"
FINISH_PASS: Final = "UPDATE pass SET ended_at = clock_timestamp(), counts = $2::jsonb WHERE id = $1"


async def run_pass(
    pool: asyncpg.Pool, policies: Policies, *, who: str, scope: Scope = EVERYTHING, look_at_failed: bool = True
) -> Report:
    """Run one pass and return what it did. `who` names the process or person in its verdicts."""
    report = Report()
    begun = await pool.fetchrow(START_PASS, who, scope.feed, scope.wire_key)
    assert begun is not None  # noqa: S101 - an INSERT returns its row
    this = _Pass(pool, policies, scope, begun["id"], who, begun["started_at"], report, _now() + ASKING)
    await _side_by_side(_settle(this, partial(evidence.settle_watched, half=half), BEGINNING) for half in (0, 1))
    if look_at_failed:
        await _settle(this, evidence.settle_failed, Place(this.started_at - policies.late_window, ""))
    back = ledger.take_back_same_key_releases
    while await _retried(this, back, this.started_at, scope.feed, scope.wire_key, policies.live):
        pass
    if scope.wire_key:
        await _decide_and_write(this, [scope.wire_key])
    else:
        await _decide_due(this)
    report.counts["outcomes"] += await _retried(this, follow_outcomes, this.started_at)
    await pool.execute(FINISH_PASS, this.id, json.dumps(report.counts))
    return report


async def look(pool: asyncpg.Pool, policies: Policies, scope: Scope = EVERYTHING) -> Report:
    """Say what a pass would decide now of each undecided row in scope, ask no provider, and change nothing."""
    report = Report()
    place: Place | None = BEGINNING
    while place:
        async with pool.acquire() as connection:
            keys, place = await ledger.watched_keys(connection, place, scope.feed, scope.wire_key)
            page = await read_page(connection, policies.rules_for, policies.histories, keys)
        decided = _judged(page, policies, {})
        report.decided += decided
        report.counts.update(f"{d.verdict.action}:{d.verdict.reason}" for d in decided)
    return report


@dataclass(frozen=True, slots=True)
class _Pass:
    pool: asyncpg.Pool
    policies: Policies
    scope: Scope
    id: int
    who: str
    started_at: datetime
    report: Report
    ask_until: float
    """Until when providers are asked, by the event loop's clock."""

    @property
    def of_scope(self) -> tuple[str | None, str | None]:
        return self.scope.feed, self.scope.wire_key


async def _retried(
    this: _Pass, statement: Callable[Concatenate[Connection, P], Awaitable[T]], *args: P.args, **named: P.kwargs
) -> T:
    """Run a statement; a deadlock or a plan that a migration made invalid is retried once as a whole, and counted."""
    async with this.pool.acquire() as connection:
        try:
            return await statement(connection, *args, **named)
        except TRY_AGAIN:
            this.report.counts["retried"] += 1
            return await statement(connection, *args, **named)


async def _side_by_side(walks: Iterable[Coroutine[None, None, None]]) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for walk in walks:
                group.create_task(walk)
    except BaseExceptionGroup as errors:  # whoever runs passes knows what a database that is away raises
        raise errors.exceptions[0] from None


async def _settle(this: _Pass, settle: evidence.Settle, place: Place | None) -> None:
    while place:
        page = await _retried(this, settle, place, *this.of_scope, this.policies.live, this.id, this.who)
        this.report.counts["sent:accepted"] += page.sent
        this.report.counts["failed:rejected"] += page.failed
        place = page.place


async def _decide_due(this: _Pass) -> None:
    """Decide all that was due at the pass's start, AT_ONCE pages at a time: one is judged while another is written."""
    taking = asyncio.Lock()  # who takes waits for the other: both would choose the same page, and one would get none

    async def take_and_decide() -> None:
        while True:
            async with taking:
                keys = await _retried(this, ledger.take_due, this.started_at, this.scope.feed)
            if not keys:
                return
            await _decide_and_write(this, keys)

    await _side_by_side(take_and_decide() for _ in range(AT_ONCE))


async def _decide_and_write(this: _Pass, keys: Sequence[str]) -> None:
    async with this.pool.acquire() as connection:
        page = await read_page(connection, this.policies.rules_for, this.policies.histories, keys)
    answers = await _ask(this, page)  # holds no connection
    decided = _judged(page, this.policies, answers)
    await _write_shadow(this, [d for d in decided if d.feed not in this.policies.live], page.now)
    await _write(this, [d for d in decided if d.feed in this.policies.live], page.now)


async def _ask(this: _Pass, page: Page) -> Mapping[str, Witness]:
    witness = this.policies.second_witness
    if not witness.feeds:
        return {}
    wanted = [row["wire_key"] for row in page.unheard(this.policies.rules_for) if witness.can_ask(row["feed"])]
    left = this.ask_until - _now()
    if not wanted or left < LEAST_ASKING:
        return {}
    return await witness.ask(this.pool, wanted, who=this.who, seconds=left)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _judged(page: Page, policies: Policies, answers: Mapping[str, Witness]) -> list[Decided]:
    witness = policies.second_witness
    return [
        judge_row(
            row,
            page,
            policies.rules_for(row["feed"], row["message_class"]),
            policies.key_window(row["feed"]),
            answers.get(row["wire_key"]),
            can_be_asked=witness.can_ask(row["feed"]),
        )
        for row in page.rows
    ]


async def _write_shadow(this: _Pass, decided: Sequence[Decided], now: datetime) -> None:
    if decided:
        counts = await _retried(this, note_shadow, decided, now, this.id, this.who)
        this.report.counts.update({f"shadow:{reason}": n for reason, n in counts.items()})


async def _write(this: _Pass, decided: Sequence[Decided], now: datetime) -> None:
    by_action: dict[Action, list[Decided]] = {}
    for d in decided:
        by_action.setdefault(d.verdict.action, []).append(d)
    # Accepted since this pass settled evidence: the next one, which the event's notification has called, settles it.
    by_action.pop(Action.SENT, None)
    postponed = by_action.pop(Action.HELD, []) + by_action.pop(Action.WAITING, [])
    counts = this.report.counts
    if rows := by_action.get(Action.RELEASED):
        postponed += await _release(this, rows, now)
    if rows := by_action.get(Action.FAILED):
        counts.update(_labelled("failed", await _retried(this, ledger.fail, rows, now, this.id, this.who)))
    if postponed:
        rows = sorted(postponed, key=lambda d: d.wire_key)
        counts.update(_labelled("held", await _retried(this, ledger.postpone, rows, this.id, this.who)))


async def _release(this: _Pass, rows: Sequence[Decided], now: datetime) -> Sequence[Decided]:
    """Release what the limits allow, open the breaker of feeds that want more, and return what is held instead."""
    done = await _retried(this, release, rows, this.policies.limit_for, now, this.id, this.who)
    this.report.counts.update(_labelled("released", done.counts))
    over = {d.feed for d in done.refused if d.verdict.reason == "budget"}
    for feed in sorted(feed for feed in over if this.policies.limit_for(feed).count):  # none allowed is no alarm
        await _retried(this, open_breaker, feed, "more releases within an hour than its budget allows", this.who)
    return done.refused


def _labelled(action: str, counts: Counter[str]) -> dict[str, int]:
    return {reason if reason == "waiting" else f"{action}:{reason}": n for reason, n in counts.items()}
