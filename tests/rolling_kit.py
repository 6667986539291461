# SPDX-License-Identifier: Apache-2.0
"""What is around replicas: a balancer before them, a sender that asks it for claims, a provider that posts to it."""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from collections import Counter
from datetime import UTC, datetime
from typing import Any, Final

import aiohttp
from case_files import fixture
from schemes.mailgun import sign
from serving import until

EVENTS: Final = {kind: json.loads(fixture(f"mailgun/{kind}.json")) for kind in ("accepted", "delivered", "opened")}
AGAIN_SECONDS: Final = 0.1
"""How soon a provider, or a sender, repeats what was not answered."""


class Balancer:
    """Leads each request to a replica in turn, and to the next where the connection is refused, as balancers do."""

    def __init__(self, session: aiohttp.ClientSession, *urls: str) -> None:
        self._session, self._urls, self._turn = session, urls, itertools.count()

    async def post(self, path: str, **request: Any) -> tuple[int, bytes]:
        """Return status and body of the answer; 0 where a connection broke, 502 where no replica is there."""
        first = next(self._turn) % len(self._urls)
        for url in (*self._urls[first:], *self._urls[:first]):
            try:
                async with self._session.post(url + path, **request) as answer:
                    return answer.status, await answer.read()
            except aiohttp.ClientConnectorError:
                continue
            except aiohttp.ClientError:
                return 0, b""
        return 502, b""


class Load:
    """Sends, each of which the provider took and speaks of, though a third of the answers were lost and a third of the
    senders died: one after the other in each of several tasks."""

    def __init__(self, tasks: asyncio.TaskGroup, hooks: Balancer, api: Balancer, secret: str, token: str) -> None:
        self.secret = secret
        """What the provider signs with now."""
        self.waiting: Counter[str] = Counter()
        """Deliveries that are not acknowledged yet, by what they were signed with."""
        self.acknowledged: set[str] = set()
        self.answers: Counter[int] = Counter()
        """What the provider was answered."""
        self.turned_away: Counter[bytes] = Counter()
        """What it was told where that was not 200; nothing where a connection broke."""
        self.api_answers: Counter[int] = Counter()
        self._hooks, self._api = hooks, api
        self._headers = {"Authorization": f"Bearer {token}"}
        self._numbers = itertools.count(1)
        self._stopping = False
        self._tasks = [tasks.create_task(self._run()) for _ in range(8)]

    async def _run(self) -> None:
        while not self._stopping:
            await self._send(f"order-{next(self._numbers)}")

    async def _send(self, key: str) -> None:
        claim = await self._call("/v1/sends", key=key, feed="mg", nonce=uuid.uuid4().hex)
        assert claim["outcome"] == "claimed", claim
        message, fate = f"<{key}@mg.example.com>", int(key[6:]) % 3
        if fate == 0:
            await self._call(f"/v1/sends/{key}/confirm", fence=claim["fence"], message_id=message)
        elif fate == 1:
            await self._call(f"/v1/sends/{key}/fail", fence=claim["fence"], reason="time-out", not_sent=None)
        await asyncio.gather(*(self._deliver(kind, key, message) for kind in EVENTS))

    async def _call(self, path: str, **body: Any) -> dict[str, Any]:
        headers = self._headers | {"Idempotency-Key": f'"{uuid.uuid4()}"'}
        while True:
            status, answer = await self._api.post(path, json=body, headers=headers)
            self.api_answers[status] += 1
            if 200 <= status < 500:
                told: dict[str, Any] = json.loads(answer)
                return told
            await asyncio.sleep(AGAIN_SECONDS)

    async def _deliver(self, kind: str, key: str, message: str) -> None:
        number, secret = uuid.uuid4().hex, self.secret
        about = EVENTS[kind]["event-data"] | {"id": number, "timestamp": datetime.now(UTC).timestamp()}
        about |= {"user-variables": {"send_key": key}, "message": {"headers": {"message-id": message.strip("<>")}}}
        signed = sign(json.dumps({"event-data": about}).encode(), secret, datetime.now(UTC))
        self.waiting[secret] += 1
        while (answer := await self._hooks.post("/webhooks/mg", data=signed.body))[0] != 200:
            self.answers[answer[0]] += 1
            self.turned_away[answer[1]] += 1
            await asyncio.sleep(AGAIN_SECONDS)
        self.answers[200] += 1
        self.waiting[secret] -= 1
        self.acknowledged.add(number)

    async def goes_on(self) -> None:
        """Wait until fifty more deliveries are acknowledged."""
        enough = len(self.acknowledged) + 50

        async def there() -> bool:
            return len(self.acknowledged) >= enough

        await until(there, f"fifty deliveries more after {self.answers} and {self.api_answers}")

    async def end(self) -> None:
        """Begin no further send, and wait until all is acknowledged."""
        self._stopping = True
        await asyncio.gather(*self._tasks)
