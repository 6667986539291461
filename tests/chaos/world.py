# SPDX-License-Identifier: Apache-2.0
"""What faults are done to: providers, a job queue, senders, receiver, daemon and PostgreSQL, always under load."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from fault_proxy import FaultProxy
from serving import until

from reconciler.breakable import SHAPES, Esp

from .commit_points import Trap
from .jobs import ANSWERS, Job, Jobs
from .machine import Clock, Disk, Pooler
from .processes import PATIENCE, Postgres, Sender, Service
from .upgrade import Older

STEADY = 2.0
"""Seconds for which something has to work to be called working."""
STALE = 1.0
"""Seconds after which something that has not happened once more does not go on."""

FEEDS = {"mailgun": "mg", "sendgrid": "sg", "resend": "re", "postmark": "pm", "ses": "ses"}
"""The feed of each shape of provider."""


Works = Callable[[], Awaitable[bool]]
"""Says whether something works, each time it is asked."""


@dataclass(frozen=True)
class Pace:
    """How much goes on, and how patient everybody is. Times are in seconds."""

    rate: float
    """Jobs a second."""
    submit_within: float
    grace: float
    late: tuple[float, float]
    """When the webhooks come that come late."""


FULL_PACE = Pace(rate=25, submit_within=5, grace=5, late=(8, 25))
SMALL_PACE = Pace(rate=25, submit_within=2, grace=2, late=(2, 4))


class Seconds(NamedTuple):
    """How long after a fault each part did not work: until a first pass was over, until the last failure of others."""

    ready: float
    """`/readyz` of receiver and daemon answered anything but 200."""
    stored: float
    """A delivery was put off, or none came through."""
    passed: float
    """A pass was over that began after the fault."""
    sent: float
    """A sender was told of a database that failed, or none of any send that was taken."""


@dataclass
class Party:
    """A process of ours, its way to PostgreSQL, and what sees the commits on it."""

    name: str
    proxy: FaultProxy
    trap: Trap
    process: Service | Sender
    works: Callable[[], Awaitable[object]]
    """Returns once it has done something since it was called."""


LAST_PASS = "SELECT coalesce(max(id), 0) FROM pass"
PASS_ENDED = "SELECT count(*) FROM pass WHERE id > $1 AND ended_at IS NOT NULL"


class World:
    """All of it: `building.world` puts it together. What is None this machine does not allow, or has not."""

    def __init__(self, folder: Path, seed: int, pace: Pace) -> None:
        self.folder, self.seed, self.pace = folder, seed, pace
        self.config = folder / "reconciler.toml"
        self.dice = Random(seed)
        self.jobs = Jobs(self._job)
        self.postgres = Postgres(folder / "pg")
        self.clock: Clock | None = None
        self.disk: Disk | None = None
        self.pooler: Pooler | None = None
        self.older: Older | None = None
        self.providers: dict[str, Esp] = {}
        """By feed."""
        self.parties: list[Party] = []
        self.receiver: Service
        self.daemon: Service
        self.leaving: Service | None = None
        """The old daemon, while a new one works beside it."""
        self.producing: asyncio.Task[None]
        self._tasks: list[asyncio.Task[None]] = []

    def _job(self, number: int) -> Job:
        """Return a job: the providers take turns."""
        shape = tuple(SHAPES)[number % len(SHAPES)]
        form, feed = SHAPES[shape](), FEEDS[shape]
        recipient = f"person{number}@example.com"
        return {
            "key": f"job-{self.seed}-{number}",
            "feed": feed,
            "provider": shape,
            "url": self.providers[feed].url,
            "content_type": form.content_type,
            "body": form.message(recipient),
            "recipient": recipient,
            "submit_within": self.pace.submit_within,
        }

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something beside everything else, as long as the world stands."""
        task = asyncio.create_task(work)
        self._tasks.append(task)
        return task

    async def end(self) -> None:
        """Cancel what `run` began. Raises what one of it raised."""
        for task in self._tasks:
            task.cancel()
        ends = await asyncio.gather(*self._tasks, return_exceptions=True)
        for error in ends:
            if isinstance(error, Exception):
                raise error

    @property
    def services(self) -> list[Service]:
        """Receiver and daemon."""
        return [self.receiver, self.daemon]

    @property
    def proxies(self) -> list[FaultProxy]:
        """The ways to PostgreSQL."""
        return [party.proxy for party in self.parties]

    def party(self, name: str) -> Party:
        """Return the first one of a name."""
        return next(party for party in self.parties if party.name == name)

    def senders(self) -> list[Party]:
        """The senders' parties."""
        return [party for party in self.parties if isinstance(party.process, Sender)]

    def heal(self) -> None:
        """Let everything pass between us and PostgreSQL."""
        for proxy in self.proxies:
            proxy.heal()

    def answers(self) -> Counter[int]:
        """Return how often deliveries were answered with each status so far, 0: not at all."""
        return sum((provider.answers for provider in self.providers.values()), Counter())

    async def recovered(self) -> Seconds:
        """Wait until everything works that worked before, for a while, and say when each part of it began to."""
        parts = (
            self._steady(self._ready),
            self._steady(self._stores()),
            _lasts(self.passed()),
            self._steady(self._sends()),
        )
        return Seconds(*await asyncio.gather(*parts))

    async def ready(self) -> None:
        """Wait for `/readyz` of receiver and daemon."""
        await until(self._ready, "readyz", PATIENCE)

    async def stored(self) -> None:
        """Wait until one more delivery is acknowledged."""
        before = self.answers()[200]

        async def more() -> bool:
            return self.answers()[200] > before

        await until(more, "a delivery to be acknowledged", PATIENCE)

    async def passed(self) -> None:
        """Wait until a pass is over that began by now."""
        last = (await self.postgres.ask(LAST_PASS))[0][0]

        async def more() -> bool:
            return bool((await self.postgres.ask(PASS_ENDED, last))[0][0])

        await until(more, "a pass to end", PATIENCE)

    async def sent(self) -> None:
        """Wait until one more job is done."""
        before = self.jobs.outcomes["sent"]

        async def more() -> bool:
            return self.jobs.outcomes["sent"] > before

        await until(more, "a job to be done", PATIENCE)

    async def _ready(self) -> bool:
        return all([await service.ready() for service in self.services])

    def _stores(self) -> Works:
        def count() -> tuple[int, int]:
            answers = self.answers()
            return answers[200], answers.total()

        return _goes_on(count)

    def _sends(self) -> Works:
        def count() -> tuple[int, int]:
            known = sum(n for outcome, n in self.jobs.outcomes.items() if outcome in ANSWERS)
            return known, self.jobs.outcomes.total()

        return _goes_on(count)

    async def _steady(self, works: Works) -> float:
        """Wait until it has worked for a while; return how long from now it did not."""
        began = last_bad = time.monotonic()
        while (now := time.monotonic()) - last_bad < STEADY:
            assert now - began < PATIENCE, f"for {PATIENCE:g} s: {works.__name__}"
            if not await works():
                last_bad = time.monotonic()
            await asyncio.sleep(0.05)
        return last_bad - began


def _goes_on(count: Callable[[], tuple[int, int]]) -> Works:
    """Say, each time it is asked, whether it goes on, and nothing has failed since. `count`: good ones, and all."""
    good, everything = count()
    last_good = time.monotonic()

    async def goes_on() -> bool:
        nonlocal good, everything, last_good
        more, total = count()
        failed = total - everything > more - good
        last_good = time.monotonic() if more > good else last_good
        good, everything = more, total
        return not failed and time.monotonic() - last_good < STALE

    return goes_on


async def _lasts(work: Awaitable[object]) -> float:
    began = time.monotonic()
    await work
    return time.monotonic() - began
