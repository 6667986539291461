# SPDX-License-Identifier: Apache-2.0
"""One run: a world, its faults one after the other, its end, and what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .building import world
from .faults import Fault, struck_at_commits
from .plan import COMMITS, COMMITS_NAME, Plan
from .promises import Acknowledged, Kept, come_to_an_end, judge
from .report import Row
from .world import Pace, Party, Seconds, World

PRUNE_AGAIN = "UPDATE installation SET pruned_at = NULL"
"""What is deleted once a day is deleted at the next start, so that its commits come by."""


@dataclass
class Result:
    """What came of a run."""

    rows: dict[str, Row] = field(default_factory=dict)
    kept: list[Kept] = field(default_factory=list)
    commits: list[str] = field(default_factory=list)
    """What each program commits, as far as it came by."""
    not_tried: list[str] = field(default_factory=list)

    @property
    def broken(self) -> list[str]:
        """What was not kept."""
        late = [
            f"{row.name}: all worked again after {max(row.worst):.1f} s only"
            for row in self.rows.values()
            if not row.kept
        ]
        return [*late, *(f"{one.promise}: {one.counted}" for one in self.kept if not one.kept)]


async def run(seed: int, pace: Pace, plan: Plan, say: Callable[[str], object]) -> Result:
    """Run all of a plan; `say` is told each line of the table as soon as it is known."""
    result = Result()
    async with world(seed, pace, whole=plan.whole, upgrades=plan.upgrades) as built:
        result.not_tried = plan.not_tried(built)
        sufferer = Sufferer(built, result, say)
        try:
            await sufferer.suffer_all(plan.faults(built))
            if plan.commits and plan.only in COMMITS_NAME:
                await sufferer.suffer_at_commits()
            await sufferer.suffer_all(plan.behind_pooler(built))
            standing = await come_to_an_end(built, sufferer.acknowledged)
        except AssertionError as error:
            result.kept.append(Kept("all works again by itself", str(error), kept=False))
            return result
        result.kept += [kept async for kept in judge(built, sufferer.acknowledged, standing)]
    return result


class Sufferer:
    """Does the faults to a world and takes the times."""

    def __init__(self, built: World, result: Result, say: Callable[[str], object]) -> None:
        self.acknowledged = Acknowledged(built)
        self._world, self._result, self._say = built, result, say

    async def suffer_all(self, faults: Iterable[Fault]) -> None:
        """Let faults strike one after the other."""
        for fault in faults:
            await self._suffer(fault)

    async def _suffer(self, fault: Fault) -> None:
        before = self._world.answers()
        row = self._row(fault.name, fault.limit)
        note = await fault.strike(self._world)
        row.seconds.append(await self._world.recovered())
        row.times += 1
        row.answers += self._world.answers() - before
        row.notes.append(note or "")
        self._say(row.line)
        await self.acknowledged.check()

    async def suffer_at_commits(self) -> None:
        """Strike all parties at their commit points, at the same time."""
        before = self._world.answers()
        await self._world.postgres.ask(PRUNE_AGAIN)
        for party in self._world.parties:
            party.trap.points.seen.clear()
        await asyncio.gather(*map(self._strike, self._world.parties))
        everything = self._row("all three of them", COMMITS)
        everything.seconds.append(await self._world.recovered())
        everything.times = 1
        everything.answers += self._world.answers() - before
        self._say(everything.line)
        self._note_points()
        await self.acknowledged.check()

    async def _strike(self, party: Party) -> None:
        seconds = await struck_at_commits(self._world, party)
        row = self._row(f"{party.name} or PostgreSQL {COMMITS_NAME}", COMMITS)
        place = {"receiver": "stored", "daemon": "passed", "sender": "sent"}[party.name]
        row.seconds += [Seconds(0, 0, 0, 0)._replace(**{place: one}) for one in seconds]
        row.times = len(party.trap.points.struck)
        self._say(row.line)

    def _note_points(self) -> None:
        points = {party.name: party.trap.points for party in self._world.parties}
        counted = ", ".join(f"{len(p.struck)} of the {name}'s {len(p.seen)}" for name, p in points.items())
        kept = all(p.seen == p.struck for p in points.values())
        self._result.kept.append(Kept("every commit that came by was struck, before and after", counted, kept))
        for name, p in points.items():
            self._result.commits.append(f"{name} commits: {' | '.join(sorted({point.what for point in p.seen}))}")

    def _row(self, name: str, limit: float) -> Row:
        return self._result.rows.setdefault(name, Row(name, limit))
