# SPDX-License-Identifier: Apache-2.0
"""Operators, who pause and resume feeds, close breakers and decide what is held for long; and a saboteur."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from reconciler.passes.feeds import pause, resume

from . import clock
from .truth import Tick
from .world import PLACES, World

WHO: Final = "operator"
DECIDES_EVERY: Final = 15
"""Ticks between two looks at what is held."""

CUT: Final = 0.1
"""Share of ticks in which a connection is cut."""

PAUSED: Final = "INSERT INTO truth.paused VALUES ($1, $2, NULL)"
GOES_ON: Final = "UPDATE truth.paused SET until = $2 WHERE feed = $1 AND until IS NULL"
IS_PAUSED: Final = "SELECT EXISTS (SELECT FROM truth.paused WHERE feed = $1 AND until IS NULL)"
RESUMED: Final = "INSERT INTO truth.resumed VALUES ($1, $2)"
BREAKERS: Final = """
SELECT feed FROM feed_state WHERE paused_at IS NULL AND breaker_at < statement_timestamp() - interval '20 min'
"""
LONG_HELD: Final = """
SELECT s.wire_key, EXISTS (SELECT FROM truth.message m WHERE m.wire_key = s.wire_key) AS taken FROM send_log s
WHERE s.state = 'claimed' AND s.held_reason IS NOT NULL AND s.submit_by < statement_timestamp() - $1::interval
ORDER BY s.wire_key LIMIT 200
"""
RELEASE: Final = "SELECT outcome FROM operator_release($1, 'nobody knows: once more', $2)"
DECIDE: Final = "SELECT outcome FROM operator_decide($1, $2, 'asked the provider', $3)"
BACKENDS: Final = """
SELECT pid FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'simulation %' ORDER BY pid
"""
TERMINATE: Final = "SELECT pg_terminate_backend($1)"


class Operators:
    """One operator, and one saboteur."""

    def __init__(self, world: World, truths: Any) -> None:
        self._world, self._truths = world, truths

    async def work(self, tick: Tick) -> None:
        """Do what is due in a tick."""
        async with self._truths.acquire() as connection:
            for place in PLACES:
                if "paused" in place.spells:
                    await self._pause_or_resume(tick, connection, place.name)
            for row in await connection.fetch(BREAKERS):
                await self._resume(connection, row["feed"])
                tick.counted["breakers closed"] += 1
            if tick.n % DECIDES_EVERY == 0:
                await self._decide(tick, connection)

    async def cut(self, tick: Tick) -> None:
        """Cut a connection now and then, whatever it does."""
        dice = self._world.dice("cut", tick.n)
        if dice.random() < CUT:
            await asyncio.sleep(dice.uniform(0.0, 0.1))
            async with self._truths.acquire() as connection:
                if found := await connection.fetch(BACKENDS):
                    await connection.execute(TERMINATE, dice.choice(found)["pid"])
                    tick.counted["connections cut"] += 1

    async def _pause_or_resume(self, tick: Tick, connection: Any, feed: str) -> None:
        wanted = self._world.spell("paused", feed, tick.at) is not None
        is_so = await connection.fetchval(IS_PAUSED, feed)
        if wanted and not is_so:
            await pause(connection, feed, "an incident", WHO)
            await connection.execute(PAUSED, feed, await clock.read(connection))
            tick.counted["pauses"] += 1
        elif is_so and not wanted:
            async with connection.transaction(isolation="read_committed"):
                await connection.execute(GOES_ON, feed, await clock.read(connection))
                await self._resume(connection, feed)

    async def _resume(self, connection: Any, feed: str) -> None:
        await connection.execute(RESUMED, feed, await clock.read(connection))
        await resume(connection, feed, "it is over", WHO)

    async def _decide(self, tick: Tick, connection: Any) -> None:
        """Decide some sends that passes could not: release them, or say what the provider's support knows."""
        dice = self._world.dice("operator", tick.n)
        rows = await connection.fetch(LONG_HELD, self._world.give_up)
        for row in dice.sample(rows, min(4, len(rows))):
            if dice.random() < 0.5:
                outcome = await connection.fetchval(RELEASE, row["wire_key"], WHO)
            else:
                verdict = "sent" if row["taken"] else "failed"
                outcome = await connection.fetchval(DECIDE, row["wire_key"], verdict, WHO)
            tick.counted[f"operators {outcome}"] += 1
