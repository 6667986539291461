# SPDX-License-Identifier: Apache-2.0
"""The senders and the providers that they call: claims, submissions and reports, by the real functions.

What several senders do at one time is done in one statement, each on a connection of its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Final

from . import truth
from .course import Course
from .feeds import LOST, Feeds
from .outlook import Job, Outlook, Report
from .truth import Tick, due
from .world import PLACE, World

GROUPS: Final = 3
"""Senders at one time."""

DIES_CLAIMING: Final = 0.01
"""Of a group: it dies before its claims are committed, and its jobs come again."""

TRIES: Final = 20

CLAIM: Final = """
SELECT asked.n, c.* FROM unnest($1::text[], $2::text[], $3::text[]) WITH ORDINALITY AS asked(key, feed, options, n),
    send_claim(asked.key, asked.feed, asked.options::jsonb) AS c
"""
ENQUEUE: Final = """
SELECT e.outcome FROM unnest($1::text[], $2::text[], $3::text[]) AS asked(key, feed, options),
    send_enqueue(asked.key, asked.feed, asked.options::jsonb) AS e
"""
CONFIRM: Final = """
SELECT asked.key, c.outcome FROM unnest($1::text[], $2::bigint[], $3::text[]) AS asked(key, fence, id),
    send_confirm(asked.key, asked.fence, asked.id, '{}') AS c
"""
FAIL: Final = """
SELECT f.outcome
FROM unnest($1::text[], $2::bigint[], $3::text[], $4::bool[]) AS asked(key, fence, reason, not_sent),
    send_fail(asked.key, asked.fence, asked.reason, asked.not_sent) AS f
"""
NOT_SENT: Final = {"open": None, "not_sent": True, "refused": False}
HEARD: Final = ("sent", "sent_late", "duplicate")


class Broken(Exception):
    """A promise was broken; the text says which, and of which send."""


class Senders:
    """All senders and providers."""

    def __init__(self, world: World, pool: Any, truths: Any, feeds: Feeds) -> None:
        self._world, self._pool, self._truths, self._feeds = world, pool, truths, feeds

    async def enqueue(self, tick: Tick, sends: Sequence[tuple[str, str, str]]) -> None:
        """Write sends (key, feed, options) that are claimed later."""
        if sends:
            await self._ask(tick, ENQUEUE, *zip(*sorted(sends), strict=True))

    async def work(self, tick: Tick, jobs: Sequence[Job]) -> None:
        """Let requests arrive that were on their way, report what is due, and send what is to be sent."""
        await self._arrive(tick)
        groups = [sorted(jobs[n::GROUPS], key=itemgetter(0)) for n in range(GROUPS)]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._report(tick, [Report(*body) for body in tick.due("report")]))
            for n, group in enumerate(groups):
                if group and self._world.dice("claiming", tick.n, n).random() < DIES_CLAIMING:
                    tasks.create_task(self._die_claiming(tick, group))
                elif group:
                    tasks.create_task(self._send(tick, group))

    async def _send(self, tick: Tick, jobs: Sequence[Job]) -> None:
        answers = await self._ask(tick, CLAIM, *_claims(jobs))
        tick.counted.update(f"claim: {row['outcome']}" for row in answers)
        granted = [(jobs[row["n"] - 1], row) for row in answers if row["outcome"] == "claimed"]
        known = await self._known(tick, [(job.wire_key, job.feed) for job, row in granted if row["attempt"] > 1])
        outlook = Outlook(self._world, tick.n, tick.at)
        for job, row in granted:
            outlook.attempt(job, row, known.get(job.wire_key))
        await self._keep(outlook)
        await self._feeds.deliver_early(outlook.early)
        await self._report(tick, outlook.reports)

    async def _die_claiming(self, tick: Tick, jobs: Sequence[Job]) -> None:
        async with self._truths.acquire() as connection:
            await truth.plan(connection, [due(tick.at, "claim", *job[:-1]) for job in jobs])
        tick.counted["senders that died before their claims were committed"] += len(jobs)
        try:
            async with self._pool.acquire() as connection:
                transaction = connection.transaction()
                await transaction.start()
                await connection.fetch(CLAIM, *_claims(jobs))
                await transaction.rollback()
        except LOST:
            tick.counted["statements repeated"] += 1

    async def _keep(self, outlook: Outlook) -> None:
        """Keep what became of attempts, unless it was kept before the whole run was killed."""
        if not outlook.grants:
            return
        async with self._truths.acquire() as connection, connection.transaction():
            new = await truth.keep_grants(connection, outlook.grants)
            await truth.keep_messages(connection, [message for message in outlook.messages if message.fence in new])
            await truth.plan(connection, [entry for fence, entry in outlook.agenda if fence in new])

    async def _arrive(self, tick: Tick) -> None:
        """Let providers take the requests that were on their way for long."""
        bodies = tick.due("submit")
        known = await self._known(tick, [(wire_key, feed) for wire_key, _, feed, *_ in bodies])
        outlook = Outlook(self._world, tick.n, tick.at)
        for wire_key, key, feed, fence, how in bodies:
            if wire_key not in known:
                dice = self._world.dice("arrives", fence)
                outlook.take(Job(wire_key, key, feed, {}), fence, Course(how), dice)
        if outlook.messages:
            async with self._truths.acquire() as connection, connection.transaction():
                new = await truth.keep_messages(connection, outlook.messages)
                await truth.plan(connection, [entry for fence, entry in outlook.agenda if fence in new])

    async def _known(self, tick: Tick, sends: Sequence[tuple[str, str]]) -> dict[str, str]:
        """Return the message that a provider who keeps our key has of each of these sends (wire key, feed)."""
        kept = [(wire_key, tick.at - window) for wire_key, feed in sends if (window := PLACE[feed].key_window)]
        return await truth.taken(self._truths, kept)

    async def _report(self, tick: Tick, reports: Sequence[Report]) -> None:
        confirmed = sorted(report for report in reports if report.says == "confirm")
        failed = sorted(report for report in reports if report.says != "confirm")
        if confirmed:
            for row in await self._ask(tick, CONFIRM, *_columns(confirmed, 0, 1, 3)):
                tick.counted[f"confirm: {row['outcome']}"] += 1
                if row["outcome"] not in HEARD:
                    raise Broken(f"what a sender knows is never lost: the answer of {row['key']} was {row['outcome']}")
        if failed:
            not_sent = [NOT_SENT[report.says] for report in failed]
            answers = await self._ask(tick, FAIL, *_columns(failed, 0, 1, 2), not_sent)
            tick.counted.update(f"fail: {row['outcome']}" for row in answers)

    async def _ask(self, tick: Tick, statement: str, *columns: Any) -> list[Any]:
        """Run a statement, again where the connection was cut and nobody knows whether it was heard."""
        for _ in range(TRIES):
            try:
                rows: list[Any] = await self._pool.fetch(statement, *columns)
            except LOST:
                tick.counted["statements repeated"] += 1
            else:
                return rows
        raise Broken(f"a sender was not heard in {TRIES} tries")


def _claims(jobs: Sequence[Job]) -> list[list[str]]:
    options = [json.dumps(job.options | {"nonce": job.nonce}) for job in jobs]
    return [*_columns(jobs, 1, 2), options]


def _columns(rows: Sequence[tuple[Any, ...]], *which: int) -> list[list[Any]]:
    return [list(map(itemgetter(n), rows)) for n in which]
