# SPDX-License-Identifier: Apache-2.0
"""The daemon's other work: it prunes what is over, forgets a recipient, and looks for duplicates."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

import asyncpg
from hypothesis import strategies as st
from hypothesis.stateful import rule
from state_machine_ageing import Ageing
from state_machine_base import KEY_OF, RECIPIENT, SENDS
from state_machine_truth import NOTHING
from state_machine_world import until_killed

from reconciler.insight.duplicates import look_at_events, look_at_retries
from reconciler.upkeep.forgetting import forget
from reconciler.upkeep.retention import prune
from reconciler.upkeep.retention_look import Ages
from webhooks.event import wire_key

DAY: Final = timedelta(days=1)
AGES: Final = Ages(rows=30 * DAY, events=60 * DAY, passes=30 * DAY, late_window=7 * DAY)
PRUNES: Final = {"prunes": NOTHING, "prunes a month later": 35 * DAY, "prunes months later": 70 * DAY}


class Daemon(Ageing):
    """What is done now and then."""

    @rule(
        work=st.sampled_from([*PRUNES, "forgets a recipient", "looks for duplicates"]),
        dies_at=st.none() | st.integers(2, 8),
    )
    def the_daemon(self, work: str, dies_at: int | None) -> None:
        """`dies_at`: before which of its transactions it is killed."""
        if work in PRUNES:
            self.do(self.let_time_pass(SENDS, PRUNES[work]))
            self.do(self.observe())  # what is pruned is judged as it was then
            self.do(self.pruned(dies_at))
        elif work == "forgets a recipient":
            self.do(self.forgotten(dies_at))
        else:
            self.do(self.looked_for_duplicates(dies_at))

    async def pruned(self, dies_at: int | None) -> None:
        needed = await self.world.clock.fetch(NEEDED)
        await until_killed(prune(self.db, AGES, pause=0.0), dies_at)
        assert await self.world.clock.fetch(NEEDED) == needed, "evidence was pruned that a send may still need"
        left = {KEY_OF.get(row["wire_key"]) for row in await self.world.clock.fetch("SELECT wire_key FROM send_log")}
        for key in set(self.seen.rows) - left:
            assert was_over(self.seen.rows.pop(key)), f"the row of {key} was pruned before it was over"
            self.truth.pruned(key)

    async def forgotten(self, dies_at: int | None) -> None:
        done = await until_killed(forget(self.db, RECIPIENT), dies_at)
        if not await self.world.clock.fetchval(PLACES):
            self.truth.places.clear()
        named = await self.world.clock.fetchval(NAMED, RECIPIENT)
        assert done is None or named == done.undecided, "a send that is decided for good still names its recipient"

    async def looked_for_duplicates(self, dies_at: int | None) -> None:
        looked = await until_killed(look_for_duplicates(self.db), dies_at)
        found = {row["wire_key"] for row in await self.world.clock.fetch(DUPLICATES)}
        true = {wire_key(key) for key in SENDS if len(self.truth.of(key)) > 1}
        assert found <= true, "a duplicate was found that is none"
        answered = {row["wire_key"] for row in await self.world.clock.fetch(ANSWERED_TWICE)}
        assert answered <= found or not looked, "two answers name two messages, and no duplicate was found"


NEEDED: Final = """
SELECT wire_key, count(*) FROM send_log JOIN provider_event USING (wire_key)
WHERE state IN ('pending', 'claimed') OR failed_at > clock_timestamp() - interval '6 days'
GROUP BY wire_key ORDER BY wire_key
"""
PLACES: Final = "SELECT count(*) FROM cap_taken"
NAMED: Final = "SELECT count(*) FROM send_log WHERE recipient = $1 OR recipient_key = $1"


def was_over(row: asyncpg.Record) -> bool:
    """Say whether a row was final for so long that it might be deleted."""
    ended: Any = row["sent_at"] or row["failed_at"]
    return row["state"] in {"sent", "failed"} and row["seen_at"] - ended >= AGES.rows


async def look_for_duplicates(db: asyncpg.Pool) -> bool:
    """Do what the daemon does, now and in each hour."""
    async with db.acquire() as connection:
        await look_at_events(connection, "watch")
    async with db.acquire() as connection:
        await look_at_retries(connection, LONG_AGO, "watch")
    return True


LONG_AGO: Final = datetime(1990, 1, 1, tzinfo=UTC)
DUPLICATES: Final = "SELECT wire_key FROM duplicate WHERE sort = 'duplicate'"
ANSWERED_TWICE: Final = """
SELECT wire_key FROM provider_event e JOIN send_log s USING (wire_key)
WHERE e.source = 'sender' AND s.attempt > 1
GROUP BY wire_key HAVING count(DISTINCT e.fence) > 1 AND min(message_id) <> max(message_id)
"""
