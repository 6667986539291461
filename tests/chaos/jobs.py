# SPDX-License-Identifier: Apache-2.0
"""The application's job queue: a job is given out again until it is done, whoever was killed with it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

GOOD = frozenset({"sent", "already_sent", "sent_late", "duplicate", "failed"})
"""Outcomes of `send_once` with which a job is done, as the README has it."""
BAD = frozenset({"unknown_key", "key_reused", "other_feed", "beyond_memory", "expired", "capped", "GuardError"})
"""Outcomes that nobody asked for here: the job is done, and a promise broken."""
ANSWERS = GOOD | {"waiting", "in_flight", "released", "held", "not_yours"}
"""What `send_once` comes to where the database works; anything else names an error."""
OPEN = 400
"""Most jobs that are not done, after which no new ones are made."""
AT_ONCE = 60
"""Most jobs of one sender."""

Job = dict[str, Any]


class Jobs:
    """Makes jobs by number, and keeps those that are not done."""

    def __init__(self, make: Callable[[int], Job]) -> None:
        self.made = 0
        self.done: dict[str, str] = {}
        """What each job that is done came to, by its key."""
        self.outcomes: Counter[str] = Counter()
        """How often each outcome was answered."""
        self._make = make
        self._ready: asyncio.Queue[Job] = asyncio.Queue()
        self._tries: Counter[str] = Counter()
        self._answered = asyncio.Event()

    @property
    def open(self) -> int:
        """How many are not done."""
        return self.made - len(self.done)

    async def produce(self, rate: float) -> None:
        """Make so many jobs a second, until this is cancelled; none while too many are open."""
        while True:
            await asyncio.sleep(1 / rate)
            if self.open < OPEN:
                self._ready.put_nowait(self._make(self.made))
                self.made += 1

    async def take(self) -> Job:
        """Return the next job."""
        return await self._ready.get()

    async def room(self, held: Mapping[str, Job]) -> None:
        """Wait until a sender that holds these may have another."""
        while len(held) >= AT_ONCE:
            self._answered.clear()
            await self._answered.wait()

    def answered(self, job: Job, outcome: str) -> None:
        """Note what a job came to; what is not done comes again, ever more rarely."""
        self.outcomes[outcome] += 1
        self._answered.set()
        if outcome in GOOD | BAD:
            self.done[job["key"]] = outcome
            return
        self._tries[job["key"]] += 1
        pause = min(0.25 * 2 ** self._tries[job["key"]], 6.0)
        asyncio.get_running_loop().call_later(pause, self._ready.put_nowait, job)

    def give_back(self, jobs: Iterable[Job]) -> None:
        """Take back the jobs of a sender that was killed."""
        for job in jobs:
            self._ready.put_nowait(job)
