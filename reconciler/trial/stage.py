# SPDX-License-Identifier: Apache-2.0
"""What a promise is put to the test with: a feed and a provider of its own, workers, passes, deliveries, and locks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import aiohttp
import asyncpg

from reconciler import guard
from reconciler.breakable import Esp
from reconciler.passes.reconcile import Policies, Scope, run_pass
from reconciler.trial.backends import PATIENCE, POLL, holding, until, waiter
from reconciler.trial.job import Job
from reconciler.trial.outcome import Count
from reconciler.trial.passing import WHO
from reconciler.trial.processes import Worker, working
from reconciler.trial.receiving import SERVING, feeds
from reconciler.trial.scratch import Scratch
from reconciler.trial.sender import MESSAGE, PROVIDER
from webhooks.database import BoundedPool
from webhooks.provider import Delivery
from webhooks.registry import PROVIDERS

STORED: Final = 200
"""The answer to a delivery that says so."""

SUBMIT_WITHIN: Final = 2.0
"""Seconds that a sender has who is killed: so long, and `passing.GIVE_UP_AFTER`, its claim is waited for."""

UNHURRIED: Final = 60.0

# Whoever inserts the same row next waits until it is known whether this one stays.
SAME_ROW: Final = "INSERT INTO send_log (wire_key, send_key, feed) VALUES ($1, $1, $2)"
LOCK_ROW: Final = "SELECT FROM send_log WHERE wire_key = $1 FOR UPDATE"


@dataclass(frozen=True, slots=True)
class Ground:
    """What all promises share."""

    scratch: Scratch
    pool: BoundedPool
    session: aiohttp.ClientSession
    policies: Policies
    secret: str
    receiver: str
    """Where deliveries go."""


ROW: Final = "SELECT * FROM send_log WHERE wire_key = $1"
EVENTS: Final = "SELECT count(*) FROM provider_event WHERE feed = $1 AND source = 'http'"


class Stage:
    """One promise's part of the ground. Its feed has the promise's name, its keys begin with it."""

    def __init__(self, ground: Ground, name: str, provider: Esp) -> None:
        self.ground, self.pool, self.feed, self.provider = ground, ground.pool, name, provider

    @property
    def application(self) -> str:
        """What the connections of its workers call themselves."""
        return f"{self.ground.scratch.name} {self.feed}"

    def key(self, number: int = 1) -> str:
        """Return a send key, which is its wire key, too."""
        return f"{self.feed}-{number}"

    def sender(
        self, key: str, stop_at: str | None = None, *, submit_within: float = SUBMIT_WITHIN
    ) -> AbstractAsyncContextManager[Worker]:
        """Start a process that sends a message."""
        return working("sender", self._job(key, url=self.provider.url, stop_at=stop_at, submit_within=submit_within))

    def one_pass(self) -> AbstractAsyncContextManager[Worker]:
        """Start a process that runs a pass."""
        return working("passing", self._job())

    @asynccontextmanager
    async def receiver(self) -> AsyncIterator[tuple[Worker, str]]:
        """Start a receiver of this feed's own, and give its address, too."""
        async with working("receiving", self._job(secret=self.ground.secret)) as worker:
            yield worker, (await worker.reached(SERVING))["url"]

    def _job(self, key: str = "", **named: Any) -> Job:
        return Job(self.ground.scratch.dsn, self.application, [self.feed], key, **named)

    async def send(self, key: str) -> str:
        """Send a message as another sender would, and return the outcome."""

        async def submit(claim: guard.Claim) -> aiohttp.ClientResponse:
            timeout = aiohttp.ClientTimeout(total=claim.seconds_left())
            return await self.ground.session.post(self.provider.url, data=claim.stamp.into(MESSAGE), timeout=timeout)

        sent = await guard.send_once(self.pool, key, self.feed, submit, provider=PROVIDER, submit_within=UNHURRIED)
        return sent.outcome

    async def claim(self, key: str, submit_within: float = SUBMIT_WITHIN) -> guard.Claim:
        """Claim a send."""
        return await guard.claim(self.pool, key, self.feed, provider=PROVIDER, submit_within=submit_within)

    async def enqueue(self, key: str) -> None:
        """Write a send that is to be claimed later."""
        await guard.enqueue(self.pool, key, self.feed)

    def event(self, kind: str, key: str) -> Delivery:
        """Return a signed delivery of one event; each call is one more event."""
        feed = feeds([self.feed], self.ground.secret)[self.feed]
        return PROVIDERS[PROVIDER].sample(kind, key, feed, datetime.now(UTC))

    async def deliver(self, delivery: Delivery, receiver: str | None = None) -> int:
        """Post a delivery, and return the status of the answer; 0: there was none."""
        url = f"{receiver or self.ground.receiver}/webhooks/{self.feed}"
        try:
            async with self.ground.session.post(url, data=delivery.body, headers=dict(delivery.headers)) as answer:
                await answer.read()
                return answer.status
        except (aiohttp.ClientError, OSError):
            return 0

    async def deliver_until_taken(self, delivery: Delivery) -> None:
        """Post a delivery again and again, as providers do. Raises NotTried where it is never taken."""

        async def taken() -> bool:
            return await self.deliver(delivery) == STORED

        await until(taken, "the receiver to take a delivery")

    async def tell(self, key: str) -> None:
        """Let the provider tell of a message, if it took it."""
        if self.provider.taken[key]:
            await self.deliver_until_taken(self.event("accepted", key))

    async def decide(self, *keys: str) -> None:
        """Run passes until no send of these is claimed, one each at least; give up where verdicts are long overdue."""
        end = time.monotonic() + PATIENCE
        for key in keys:
            await self.run_pass(key)
            while (await self.row(key))["state"] == "claimed" and time.monotonic() < end:
                await asyncio.sleep(POLL)
                await self.run_pass(key)

    async def run_pass(self, key: str) -> None:
        """Run one pass over one send, whether it is due or not."""
        await run_pass(self.pool, self.ground.policies, who=WHO, scope=Scope(self.feed, key))

    async def row(self, key: str) -> asyncpg.Record | dict[str, Any]:
        """Return what the ledger knows of a send."""
        return await self.pool.fetchrow(ROW, key) or {"state": None, "attempt": 0, "delivery": None}

    async def stored(self) -> int:
        """Return how many events of this feed are stored."""
        n: int = await self.pool.fetchval(EVENTS, self.feed)
        return n

    async def until_taken(self, key: str) -> None:
        """Wait until the provider has taken a message."""

        async def taken() -> bool:
            return self.provider.taken[key] > 0

        await until(taken, "the provider to take the message")

    def holding(self, statement: str, *args: Any) -> AbstractAsyncContextManager[int]:
        """Keep locked what this statement locks; gives what `waiter` asks for."""
        return holding(self.pool, statement, *args)

    async def waiter(self, holder: int) -> int:
        """Wait until a worker of this promise stands still before what is held; return its server process's id."""
        return await waiter(self.pool, self.application, holder)

    async def sent_once(self, key: str) -> Sequence[Count]:
        """Return what is to be counted of a send that must have reached the provider once."""
        row = await self.row(key)
        return [
            Count("taken", self.provider.taken[key], 1),
            Count("state", row["state"], "sent"),
            Count("attempts", row["attempt"]),
        ]
