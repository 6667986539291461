# SPDX-License-Identifier: Apache-2.0
"""Connections are cut, passes and receivers killed, in the middle of what they do; then they begin again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

from reconciler.trial.backends import cut, cut_all, gone, until
from reconciler.trial.outcome import Count, NotTried
from reconciler.trial.passing import GIVE_UP_AFTER
from reconciler.trial.processes import Worker
from reconciler.trial.promise import Promise
from reconciler.trial.sender import BEFORE_CONFIRM
from reconciler.trial.stage import LOCK_ROW, SAME_ROW, STORED, UNHURRIED, Stage

SENDS: Final = 20
DELIVERIES: Final = 300
AT_ONCE: Final = 8
KILLS: Final = 3
CUTS: Final = 9


async def _claim_cut(stage: Stage) -> Sequence[Count]:
    key = stage.key()
    async with stage.sender(key) as sender, stage.holding(SAME_ROW, key, stage.feed) as holder:
        await cut(stage.pool, await stage.waiter(holder))
        ended = await sender.ended()
    another = await stage.send(key)
    counts = [Count("its own", ended.partition(":")[0]), Count("another's", another, "sent")]
    return [*await stage.sent_once(key), *counts]


async def _confirm_cut(stage: Stage) -> Sequence[Count]:
    key = stage.key()
    async with stage.sender(key, BEFORE_CONFIRM, submit_within=UNHURRIED) as sender:
        await sender.reached(BEFORE_CONFIRM)
        async with stage.holding(LOCK_ROW, key) as holder:
            sender.go_on()
            await cut(stage.pool, await stage.waiter(holder))
        ended = await sender.ended()
    return [*await stage.sent_once(key), Count("told again", ended, "sent")]


RELEASED: Final = """
SELECT count(*) AS verdicts, count(DISTINCT wire_key) AS sends FROM verdict WHERE feed = $1 AND action = 'released'
"""


async def _releases(stage: Stage) -> tuple[int, int]:
    """Return how many releases there were, and of how many sends."""
    ((releases, sends),) = await stage.pool.fetch(RELEASED, stage.feed)
    return releases, sends


Break = Callable[[Stage, Worker, int], Awaitable[None]]


async def _kill_pass(_stage: Stage, worker: Worker, _pid: int) -> None:
    await worker.kill()


async def _cut_pass(stage: Stage, worker: Worker, pid: int) -> None:
    await cut(stage.pool, pid)
    if await worker.ended() == "done":
        raise NotTried("the pass ended as if nothing had happened")


# A pass takes its page first, then counts what its feed may still release: there it waits.
LOCK_FEED: Final = "INSERT INTO feed_state (feed) VALUES ($1)"
OVERDUE: Final = "SELECT bool_and(submit_by + $2 < clock_timestamp()) FROM send_log WHERE feed = $1"


async def _pass_broken(break_off: Break, stage: Stage) -> Sequence[Count]:
    keys = [stage.key(n) for n in range(SENDS)]
    for key in keys:
        await stage.claim(key, submit_within=0.2)
    await until(lambda: stage.pool.fetchval(OVERDUE, stage.feed, GIVE_UP_AFTER), "claims to be overdue")
    async with stage.holding(LOCK_FEED, stage.feed) as holder, stage.one_pass() as worker:
        pid = await stage.waiter(holder)
        await break_off(stage, worker, pid)
    await gone(stage.pool, stage.application, pid)
    before, _ = await _releases(stage)
    await stage.decide(*keys)
    releases, released = await _releases(stage)
    for key in keys:
        await stage.send(key)
    taken = [stage.provider.taken[key] for key in keys]
    return [
        Count("released before", before),
        Count("releases", releases, SENDS),
        Count("of sends", released, SENDS),
        Count("taken once", taken.count(1), SENDS),
    ]


class _Deliveries:
    """Deliveries that are posted again until they are acknowledged."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._waiting = deque(stage.event("delivered", stage.key(n)) for n in range(DELIVERIES))
        self.acknowledged = self.again = 0

    async def post(self, url: str, enough: int, then: Callable[[], Awaitable[object]]) -> None:
        """Post until so many are acknowledged; `then` happens while the last ones are under way."""
        posters = [asyncio.create_task(self._post(url, enough)) for _ in range(AT_ONCE)]
        try:
            await asyncio.wait(posters, return_when=asyncio.FIRST_COMPLETED)
            await then()
            await asyncio.gather(*posters)
        finally:
            for poster in posters:
                poster.cancel()

    async def _post(self, url: str, enough: int) -> None:
        while self._waiting and self.acknowledged < enough:
            delivery = self._waiting.popleft()
            if await self._stage.deliver(delivery, url) == STORED:
                self.acknowledged += 1
            else:
                self.again += 1
                self._waiting.append(delivery)

    async def counts(self) -> Sequence[Count]:
        """Return what must hold once all were posted."""
        return [
            Count("acknowledged", self.acknowledged, DELIVERIES),
            Count("stored", await self._stage.stored(), DELIVERIES),
            Count("posted again", self.again),
        ]


async def _nothing() -> None:
    pass


async def _receiver_killed(stage: Stage) -> Sequence[Count]:
    deliveries = _Deliveries(stage)
    for part in range(KILLS):
        async with stage.receiver() as (worker, url):
            await deliveries.post(url, DELIVERIES * (part + 1) // (KILLS + 1), worker.kill)
    async with stage.receiver() as (_, url):
        await deliveries.post(url, DELIVERIES, _nothing)
    return [Count("kills", KILLS), *await deliveries.counts()]


async def _receiver_cut(stage: Stage) -> Sequence[Count]:
    deliveries, cuts = _Deliveries(stage), 0

    async def cut_now() -> None:
        nonlocal cuts
        cuts += await cut_all(stage.pool, stage.application)

    async with stage.receiver() as (_, url):
        for part in range(CUTS):
            await deliveries.post(url, DELIVERIES * (part + 1) // (CUTS + 1), cut_now)
        await deliveries.post(url, DELIVERIES, _nothing)
    if not cuts:
        raise NotTried("the receiver had no connection that could be cut")
    return [Count("cuts", cuts), *await deliveries.counts()]


PROMISES: Final = (
    Promise("claim-cut", "a connection cut in the middle of a claim: sent once", _claim_cut),
    Promise("confirm-cut", "a connection cut while the answer is stored: it is told again", _confirm_cut),
    Promise("pass-killed", "a pass killed half-way: every send is released once", partial(_pass_broken, _kill_pass)),
    Promise("pass-cut", "a pass cut off half-way: every send is released once", partial(_pass_broken, _cut_pass)),
    Promise("receiver-killed", "a receiver killed: nothing acknowledged is lost", _receiver_killed),
    Promise("receiver-cut", "a receiver whose connections are cut: nothing acknowledged is lost", _receiver_cut),
)
