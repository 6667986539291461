# SPDX-License-Identifier: Apache-2.0
"""Posts the webhooks of the loopback provider: when they are due, in batches, and again until they are taken."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from aiohttp import ClientError, ClientSession, ClientTimeout
from yarl import URL

from reconciler.breakable.fate import Said
from reconciler.breakable.shape import Message, Notice, Shape
from webhooks.provider import Delivery
from webhooks.reply import is_success

SECONDS: Final = 15.0
"""How long the answer to a post is waited for, as SNS and Resend do."""

AT_ONCE: Final = 32
"""Posts under way at a time."""

GATHERING: Final = 0.5
"""How many seconds events wait for others to fill a batch."""


@dataclass(frozen=True, slots=True)
class Webhook:
    """Where events are posted."""

    url: str
    """The whole address of the endpoint: `http://127.0.0.1:8080/webhooks/mailgun-main`."""
    secret: str | None = None
    """One of the feed's `secrets` that can sign or be carried; None: the provider's own key, as `Esp.feed` shows it."""
    again: tuple[float, ...] = (0.2, 0.5, 1.0, 2.0, 5.0)
    """Seconds until a post is repeated that was not taken. The last one is repeated for ever: nothing is given up that
    the provider would bring again, though real ones give up after hours."""


class Teller:
    """Tells one webhook what is due.

    `answers` counts the answers by status, 0 where there was none. `acknowledged` holds, by wire key, what was said and
    answered with success.
    """

    def __init__(self, shape: Shape) -> None:
        self.webhook: Webhook | None = None
        self.answers: Counter[int] = Counter()
        self.acknowledged: defaultdict[str, set[Said]] = defaultdict(set)
        self._shape = shape
        self._pending = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._gathered: list[Notice] = []
        self._posts: set[asyncio.Task[None]] = set()
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._session = ClientSession(timeout=ClientTimeout(total=SECONDS))

    async def close(self) -> None:
        """Stop telling; what is not told by now never is."""
        self.webhook = None
        for post in self._posts:
            post.cancel()
        await asyncio.gather(*self._posts, return_exceptions=True)
        await self._session.close()

    async def told(self) -> None:
        """Wait until all that was to be told is: taken, or refused in a way that ends a delivery."""
        await self._idle.wait()

    def tell(self, message: Message, told: Sequence[tuple[float, Said]], batch: int) -> None:
        """Post what is told of a message, each after so many seconds from now."""
        size = batch if self._shape.batches else 1
        for delay, kind in told:
            if kind in self._shape.names:
                self._pending += 1
                self._idle.clear()
                asyncio.get_running_loop().call_later(delay, self._due, Notice(message, kind), size)

    def _due(self, notice: Notice, size: int) -> None:
        self._gathered.append(notice)
        if len(self._gathered) >= size:
            self._post()
        elif len(self._gathered) == 1:
            asyncio.get_running_loop().call_later(GATHERING, self._post)

    def _post(self) -> None:
        if not self._gathered:  # they filled a batch before their time was over
            return
        notices, self._gathered = self._gathered, []
        post = asyncio.create_task(self._deliver(notices))
        self._posts.add(post)
        post.add_done_callback(self._posts.discard)

    async def _deliver(self, notices: Sequence[Notice]) -> None:
        try:
            tries = 0
            while (webhook := self.webhook) and not self._shape.ends(await self._try(webhook, notices)):
                await asyncio.sleep(webhook.again[min(tries, len(webhook.again) - 1)])
                tries += 1
        finally:
            self._pending -= len(notices)
            if not self._pending:
                self._idle.set()

    async def _try(self, webhook: Webhook, notices: Sequence[Notice]) -> int:
        """Return the status of the answer, 0 without one."""
        async with self._turns:
            delivery = self._shape.delivery(notices, webhook.secret, datetime.now(UTC))
            status = await self._status(webhook.url, delivery)
        self.answers[status] += 1
        if is_success(status):
            for notice in notices:
                self.acknowledged[notice.message.key].add(notice.kind)
        return status

    async def _status(self, url: str, delivery: Delivery) -> int:
        target = URL(f"{url}?{delivery.query}" if delivery.query else url, encoded=True)
        try:
            async with self._session.post(
                target, data=delivery.body, headers=delivery.headers, allow_redirects=False
            ) as answer:
                await answer.read()
                return answer.status
        except (TimeoutError, ClientError, OSError):
            return 0
