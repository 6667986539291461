# SPDX-License-Identifier: Apache-2.0
"""The application: it wants messages to be sent, and sends again what its outbox says was released."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, Final

from reconciler.outbox.channels import Message, NotTaken, Send
from reconciler.outbox.delivery import Outbox

from . import truth
from .feeds import LOST
from .outlook import Job
from .truth import Due, Tick, due
from .world import Wish, World

NOT_TAKEN: Final = 0.01
"""Of what the outbox tells: the application is down, and is told again."""

GIVE_UP_TELLING: Final = timedelta(days=1)
JOBS: Final = "SELECT wire_key, send_key, feed, options FROM truth.send WHERE wire_key = ANY ($1::text[]) ORDER BY 1"


class Application:
    """One application with one outbox."""

    def __init__(self, world: World, pool: Any, truths: Any) -> None:
        self._world, self._pool, self._truths = world, pool, truths
        self._outbox = Outbox(pool, self._channel, ("released",), GIVE_UP_TELLING)
        self._dice = world.dice("application")
        self._released: set[str] = set()

    async def jobs(self, tick: Tick, wishes: Sequence[Wish]) -> list[Job]:
        """Return what is to be claimed now; what is written first is claimed in the next tick."""
        await truth.keep_sends(self._truths, [(w.wire_key, w.key, w.feed, json.dumps(w.options)) for w in wishes])
        later = [w for w in wishes if w.enqueued]
        await self._plan([due(tick.at, "claim", w.wire_key, w.key, w.feed, w.options) for w in later])
        claims = tick.due("claim")
        for wish in wishes:
            claims += [[wish.wire_key, wish.key, wish.feed, wish.options]] * (wish.twice + (not wish.enqueued))
        return [Job(w, key, feed, options, f"{tick.n}.{n}") for n, (w, key, feed, options) in enumerate(claims)]

    async def listen(self, tick: Tick) -> None:
        """Let the outbox tell what was released, and plan to send it again."""
        try:
            await self._outbox.run()
        except LOST:
            tick.counted["runs of the outbox that died"] += 1
        released, self._released = sorted(self._released), set()
        rows = await self._truths.fetch(JOBS, released) if released else []
        await self._plan([due(tick.at, "claim", *names, json.loads(options)) for *names, options in rows])

    async def _plan(self, entries: Sequence[Due]) -> None:
        if entries:
            async with self._truths.acquire() as connection:
                await truth.plan(connection, entries)

    @asynccontextmanager
    async def _channel(self) -> AsyncIterator[Send]:
        yield self._told

    async def _told(self, message: Message) -> None:
        if self._dice.random() < NOT_TAKEN:
            raise NotTaken("the application is down")
        self._released.add(message.wire_key)
