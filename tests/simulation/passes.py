# SPDX-License-Identifier: Apache-2.0
"""The reconciler's passes: one after the other, two side by side, killed half way, and in a time that leaps."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, Final, Literal

from reconciler.insight.duplicates import look_at_events, look_at_retries
from reconciler.passes.histories import Histories
from reconciler.passes.reconcile import Policies, run_pass
from webhooks.database import connect_pool

from . import clock
from .feeds import LOST
from .truth import Tick
from .world import BEGIN, EVERYWHERE, World, key_window, limit

Manner = Literal["alone", "two", "killed", "leap"]
MANNERS: Final[dict[Manner, float]] = {"alone": 0.8, "two": 0.1, "killed": 0.06, "leap": 0.04}
LEAP: Final = timedelta(seconds=90)
"""How far the clock leaps while a pass decides: what it decided is old then."""

FAILED_EVERY: Final = 5
DUPLICATES_EVERY: Final = 5
RETRIES_EVERY: Final = 30
"""Ticks between two looks at failed rows, at new events, and at all that was given out again."""


def policies(world: World) -> Policies:
    """Return the policies of a process that runs passes."""
    histories = Histories(world.rules, lambda _feed: False)
    return Policies(world.rules, key_window, timedelta(days=7), histories, limit)


class Passes:
    """Two processes that run passes."""

    def __init__(self, world: World, dsn: str) -> None:
        self._world, self._dsn = world, dsn
        self._pools: dict[int, Any] = {}
        self._policies = {0: policies(world), 1: policies(world)}

    async def close(self) -> None:
        """End both."""
        for pool in self._pools.values():
            pool.terminate()

    async def run(self, tick: Tick) -> None:
        """Do what the reconciler does in a tick, in one manner or another."""
        if self._world.spell("no passes", EVERYWHERE, tick.at):
            return
        dice = self._world.dice("pass", tick.n)
        manner = dice.choices(list(MANNERS), list(MANNERS.values()))[0]
        failed = tick.n % FAILED_EVERY == 0
        tick.counted["passes"] += 1
        match manner:
            case "alone":
                await self._pass(tick, 0, look_at_failed=failed)
            case "two":
                await asyncio.gather(
                    self._pass(tick, 0, look_at_failed=failed), self._pass(tick, 1, look_at_failed=True)
                )
            case "killed":
                await self._kill(tick, dice.uniform(0.0, 0.1))
            case "leap":
                leap = self._leap(tick, dice.uniform(0.0, 0.05))
                await asyncio.gather(self._pass(tick, 0, look_at_failed=failed), leap)
        if tick.n % DUPLICATES_EVERY == 0:
            await self._look_for_duplicates(tick)

    async def _pool(self, process: int) -> Any:
        if process not in self._pools:
            self._pools[process] = await connect_pool(self._dsn, size=3, application="simulation pass")
        return self._pools[process]

    async def _pass(self, tick: Tick, process: int, *, look_at_failed: bool) -> None:
        pool = await self._pool(process)
        policies_now, who = self._policies[process], f"pass {process}"
        try:
            report = await run_pass(pool, policies_now, who=who, look_at_failed=look_at_failed)
        except LOST:
            tick.counted["passes that died"] += 1
        else:
            tick.counted.update({f"pass {name}": n for name, n in report.counts.items()})

    async def _kill(self, tick: Tick, after: float) -> None:
        """Let a process die within a pass: its connections end without a word, and what it had learnt is lost."""
        task = asyncio.create_task(self._pass(tick, 0, look_at_failed=True))
        await asyncio.wait([task], timeout=after)
        if 0 in self._pools:
            self._pools.pop(0).terminate()
        self._policies[0] = policies(self._world)
        await task

    async def _leap(self, tick: Tick, after: float) -> None:
        await asyncio.sleep(after)
        try:
            async with (await self._pool(1)).acquire() as connection:
                await clock.move(connection, await clock.read(connection) + LEAP)
        except LOST:  # its server process was killed since it was used last
            tick.counted["leaps that died"] += 1

    async def _look_for_duplicates(self, tick: Tick) -> None:
        try:
            async with (await self._pool(1)).acquire() as connection:
                found = await look_at_events(connection, "watch")
                if tick.n % RETRIES_EVERY == 0:
                    found += await look_at_retries(connection, BEGIN, "watch")
        except LOST:
            tick.counted["looks for duplicates that died"] += 1
        else:
            tick.counted["duplicates that the product found"] += sum(one.sort == "duplicate" for one in found)
