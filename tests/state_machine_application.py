# SPDX-License-Identifier: Apache-2.0
"""The application that is told what became of its sends, and the daemon that tells it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Final

from hypothesis import strategies as st
from hypothesis.stateful import rule
from state_machine_base import KEY_OF
from state_machine_restore import Restores
from state_machine_world import Died

from reconciler.outbox.channels import Message, NotTaken, Send
from reconciler.outbox.delivery import Outbox, retry

ALL_NEWS: Final = ("failed", "held", "released", "sent")
STANDS: Final = "SELECT send_stands_for(s) FROM send_log s WHERE wire_key = $1"
OPEN: Final = "SELECT * FROM release_outbox WHERE num_nonnulls(delivered_at, cancelled_at) = 0"


class Application(Restores):
    """Whom the outbox tells, and what it does with that."""

    def __init__(self) -> None:
        super().__init__()
        self.outbox = Outbox(self.db, self.channel, ALL_NEWS, give_up_after=timedelta(days=1))
        self.answer = "taken"

    @rule(answer=st.sampled_from(["taken", "taken", "not taken", "the daemon dies"]))
    def the_application_is_told(self, answer: str) -> None:
        self.do(self.tell(answer))

    async def tell(self, answer: str = "taken") -> None:
        self.answer = answer
        with suppress(Died):
            await self.outbox.run()

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[Send]:
        yield self.take

    async def take(self, message: Message) -> None:
        key, what = KEY_OF[message.wire_key], json.loads(message.body)["type"].removeprefix("send.")
        number = int(message.id.split("_")[1])
        stands = await self.db.fetchval(STANDS, message.wire_key)
        assert stands == what, f"the application is told that {key} is {what}, but it is {stands}"
        newest, _ = self.told.get(key, (0, ""))
        assert number > newest or number in self.unmarked, f"{key}: entry {number} came after {newest}"
        if self.answer == "not taken":
            raise NotTaken("busy")
        self.told[key] = number, what
        if self.answer == "the daemon dies":
            self.unmarked.add(number)
            raise Died
        self.unmarked.discard(number)

    async def check_the_application_knows(self) -> None:
        """Once everything is delivered, it was told of each send that waits for it or for a person."""
        async with self.db.acquire() as connection:
            await retry(connection, None)
        await self.tell()
        assert not await self.world.clock.fetch(OPEN), "the outbox is not empty"
        for wire, key in KEY_OF.items():
            stands = await self.world.clock.fetchval(STANDS, wire)
            if stands in {"released", "held"}:
                assert self.told.get(key, (0, ""))[1] == stands, f"nobody told the application that {key} is {stands}"
