# SPDX-License-Identifier: Apache-2.0
"""One pass: evidence first, then pages of rows that are due. Any number of passes may run side by side."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import asyncpg

from reconciler import evidence, ledger
from reconciler.feeds import Health, feed_health
from reconciler.ledger import Connection, Controls, Decided, Place
from reconciler.outcomes import follow_outcomes
from reconciler.policy import Action, FeedView, Heard, Row, Rules, Verdict, Witness, decide
from webhooks.event import Answer

BEGINNING: Final = Place(datetime(1, 1, 1, tzinfo=UTC), "")
CONTROLS_A_SIDE: Final = 3
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
    verdicts: list[tuple[str, Verdict]] = field(default_factory=list)
    """Wire key and verdict of each row that a dry run looked at."""


START_PASS: Final = "INSERT INTO pass (who, feed, wire_key) VALUES ($1, $2, $3) RETURNING id, started_at"
FINISH_PASS: Final = "UPDATE pass SET ended_at = clock_timestamp(), counts = $2::jsonb WHERE id = $1"


async def run_pass(
    pool: asyncpg.Pool, policies: Policies, *, who: str, scope: Scope = EVERYTHING, look_at_failed: bool = True
) -> Report:
    """Run one pass and return what it did. `who` names the process or person in its verdicts."""
    report = Report()
    async with pool.acquire() as connection:
        begun = await connection.fetchrow(START_PASS, who, scope.feed, scope.wire_key)
        assert begun is not None  # noqa: S101 - an INSERT returns its row
        this = _Pass(connection, policies, scope, begun["id"], who, begun["started_at"], report)
        await _settle(this, evidence.settle_watched, BEGINNING)
        if look_at_failed:
            await _settle(this, evidence.settle_failed, Place(this.started_at - policies.late_window, ""))
        while await _retried(this, ledger.take_back_same_key_releases, this.started_at, scope.feed, scope.wire_key):
            pass
        if scope.wire_key:
            await _decide_and_write(this, [scope.wire_key])
        else:
            while keys := await _retried(this, ledger.take_due, this.started_at, scope.feed):
                await _decide_and_write(this, keys)
        report.counts["outcomes"] += await _retried(this, follow_outcomes, this.started_at)
        await connection.execute(FINISH_PASS, this.id, json.dumps(report.counts))
    return report


async def look(pool: asyncpg.Pool, policies: Policies, scope: Scope = EVERYTHING) -> Report:
    """Say what a pass would decide now of each undecided row in scope, and change nothing."""
    report = Report()
    async with pool.acquire() as connection:
        place: Place | None = BEGINNING
        while place:
            keys, place = await ledger.watched_keys(connection, place, scope.feed, scope.wire_key)
            decided, _ = await _decide(connection, policies, keys)
            report.verdicts += [(d.wire_key, d.verdict) for d in decided]
            report.counts.update(f"{d.verdict.action}:{d.verdict.reason}" for d in decided)
    return report


@dataclass(frozen=True, slots=True)
class _Pass:
    connection: Connection
    policies: Policies
    scope: Scope
    id: int
    who: str
    started_at: datetime
    report: Report


async def _retried(
    this: _Pass, statement: Callable[Concatenate[Connection, P], Awaitable[T]], *args: P.args, **named: P.kwargs
) -> T:
    """Run a statement; a deadlock or a plan that a migration made invalid is retried once as a whole, and counted."""
    try:
        return await statement(this.connection, *args, **named)
    except (asyncpg.DeadlockDetectedError, asyncpg.InvalidCachedStatementError):
        this.report.counts["retried"] += 1
        return await statement(this.connection, *args, **named)


async def _settle(this: _Pass, settle: evidence.Settle, place: Place | None) -> None:
    while place:
        page = await _retried(this, settle, place, this.scope.feed, this.scope.wire_key, this.id, this.who)
        this.report.counts["sent:accepted"] += page.sent
        this.report.counts["failed:rejected"] += page.failed
        place = page.place


async def _decide_and_write(this: _Pass, keys: Sequence[str]) -> None:
    decided, now = await _decide(this.connection, this.policies, keys)
    by_action: dict[Action, list[Decided]] = {}
    for d in decided:
        by_action.setdefault(d.verdict.action, []).append(d)
    # Accepted since this pass settled evidence: the next one, which the event's notification has called, settles it.
    by_action.pop(Action.SENT, None)
    postponed = by_action.pop(Action.HELD, []) + by_action.pop(Action.WAITING, [])
    counts = this.report.counts
    if rows := by_action.get(Action.RELEASED):
        counts.update(_labelled("released", await _retried(this, ledger.release, rows, now, this.id, this.who)))
    if rows := by_action.get(Action.FAILED):
        counts.update(_labelled("failed", await _retried(this, ledger.fail, rows, now, this.id, this.who)))
    if postponed:
        rows = sorted(postponed, key=lambda d: d.wire_key)
        counts.update(_labelled("held", await _retried(this, ledger.postpone, rows, this.id, this.who)))


def _labelled(action: str, counts: Counter[str]) -> dict[str, int]:
    return {reason if reason == "waiting" else f"{action}:{reason}": n for reason, n in counts.items()}


async def _decide(connection: Connection, policies: Policies, keys: Sequence[str]) -> tuple[list[Decided], datetime]:
    """Return the verdicts on a page of rows, sorted by key, and the database's time at which they were read."""
    rows = sorted(await ledger.read_rows(connection, keys), key=lambda row: row["wire_key"])
    if not rows:
        return [], BEGINNING.at
    now = max(row["now"] for row in rows)
    health = await feed_health(connection, {row["feed"] for row in rows})
    unheard = [row["wire_key"] for row in rows if _needs_witness(row, policies, now)]
    controls = await ledger.count_controls(connection, unheard) if unheard else {}
    return [_judge(row, policies, health[row["feed"]], controls.get(row["wire_key"]), now) for row in rows], now


def _needs_witness(row: asyncpg.Record, policies: Policies, now: datetime) -> bool:
    if row["state"] != "claimed" or row["accepted"]:
        return False
    return bool(now >= row["submit_by"] + policies.rules_for(row["feed"], row["message_class"]).grace)


def _judge(
    row: asyncpg.Record, policies: Policies, health: Health, controls: Controls | None, now: datetime
) -> Decided:
    witness = feed_witness(health, controls)
    heard = Heard(
        accepted=bool(row["accepted"]) or row["said_by_id"] == "accepted",
        rejected=bool(row["rejected"]) or row["said_by_id"] == "rejected",
        other=bool(row["other"]) or row["said_by_id"] == "none",
        reason=row["words"],
    )
    facts = Row(
        state=row["state"],
        reached=row["reached"],
        submit_by=row["submit_by"],
        first_claimed_at=row["first_claimed_at"],
        expires_at=row["expires_at"],
        has_fingerprint=row["has_fingerprint"],
        released=row["released"],
        told=row["told"],
    )
    view = FeedView(health.hold, witness, policies.key_window(row["feed"]))
    rules = policies.rules_for(row["feed"], row["message_class"])
    verdict = decide(facts, heard, view, None, rules, now)
    witnesses: dict[str, Any] = {"feed": {"answer": witness.answer, "reason": witness.reason}}
    if controls:
        witnesses["controls"] = {"before": controls.before, "after": controls.after, "heard": controls.heard}
    return Decided(row["wire_key"], row["state"], row["fence"], verdict, witnesses)


def feed_witness(health: Health, controls: Controls | None) -> Witness:
    """Return the feed's answer about a claim of which nothing was heard.

    ABSENT needs three answered sends on each side of the claim, within an hour, each heard of by its wire key, and a
    feed whose newest delivery was stored. Anything less is silence, with its reason.
    """
    if controls is None or not health.delivered:
        return Witness(Answer.SILENT, "silent")
    if not health.newest_was_stored:
        return Witness(Answer.SILENT, "refused")
    if health.queue_unread:
        return Witness(Answer.SILENT, "queue")
    if health.filling:
        return Witness(Answer.SILENT, "filling")
    if min(controls.before, controls.after) < CONTROLS_A_SIDE:
        return Witness(Answer.SILENT, "few_controls")
    if controls.heard < controls.before + controls.after:
        return Witness(Answer.SILENT, "silent")
    return Witness(Answer.ABSENT, "absent")
