# SPDX-License-Identifier: Apache-2.0
"""Senders in each other's way: one has not committed its claim, another waits for it, and things happen meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import kit
from hypothesis import strategies as st
from hypothesis.stateful import multiple, precondition, rule
from state_machine_base import FEED, SENDS
from state_machine_senders import HOW_IT_GOES, STEPS, Senders, Worker
from state_machine_truth import Attempt

JOB: Final[Mapping[str, Any]] = {"fingerprint": "f", "expires": False, "made": False}
FREE: Final = st.runner().flatmap(lambda machine: st.sampled_from(machine.free))
MEANWHILE: Final = st.sampled_from(["the feed speaks", "the feed speaks", "rejected", "none", "the database goes back"])
"""What is said of the send that waits, or what else happens."""


class Crowds(Senders):
    """Claims for one recipient at once."""

    @property
    def free(self) -> list[str]:
        """Sends that may perhaps be given out."""
        return [key for key in SENDS if key not in self.seen.rows or self.seen.rows[key]["state"] == "pending"]

    @precondition(lambda self: self.free)
    @rule(
        target=Senders.workers,
        keys=st.tuples(FREE, FREE),
        feeds=st.tuples(FEED, FEED),
        meanwhile=MEANWHILE,
        dies=st.sampled_from([False, False, True]),
        goes=HOW_IT_GOES,
        steps=STEPS,
    )
    def a_claim_waits_for_another(self, goes: str, steps: int, **course: Any) -> Any:
        """`dies`: the first, before its commit."""
        attempts = self.do(self.one_waits(**course))
        return multiple(*(self.started(Worker(attempt, goes, looks=True), steps) for attempt in attempts))

    async def one_waits(
        self, keys: tuple[str, str], feeds: tuple[str, str], meanwhile: str, dies: bool
    ) -> list[Attempt]:
        (one, other), (here, there) = keys, feeds
        said = [await self.said(one, here), await self.said(other, there)]
        asked = [await self.asked(key, **JOB) for key in keys]
        async with self.db.acquire() as connection:
            transaction = connection.transaction()
            await transaction.start()
            answers = [await kit.claim(connection, one, here, **asked[0])]
            claim = asyncio.create_task(kit.claim(self.db, other, there, **asked[1]))
            suspect = False
            if await self.waits(claim):
                suspect = await self.happens(meanwhile, other)
                said[1] = await self.said(other, there)
            await (transaction.rollback() if dies else transaction.commit())
        answers.append(await claim)
        claims = list(zip(keys, feeds, answers, said, strict=True))[dies:]
        granted = []
        for key, feed, answer, heard in claims:
            self.seen.suspect |= suspect and answer is answers[1]  # the first was given out before
            if answer["outcome"] == "claimed":
                granted.append(self.granted(key, feed, answer, heard))
        return granted

    async def waits(self, claim: asyncio.Task[Any]) -> bool:
        """Return whether a claim waits for a lock; False: it is answered."""
        while not claim.done():
            if await self.world.clock.fetchval(kit.WAITING_FOR_LOCK):
                return True
            await asyncio.wait([claim], timeout=0.002)
        return False

    async def happens(self, meanwhile: str, key: str) -> bool:
        """Return whether the database became suspect. The feed speaks of what was taken, if anything was."""
        if meanwhile == "the database goes back":
            return not self.seen.suspect and await self.made_suspect()
        if meanwhile != "the feed speaks":
            await kit.event(self.db, key, meanwhile, kind="failed", message_id="m-x", event_id=meanwhile)
        for message in self.truth.of(key):
            await kit.event(self.db, key, feed=message.attempt.feed, message_id=message.id, event_id="meanwhile")
        return False
