# SPDX-License-Identifier: Apache-2.0
"""Queues for tests: one of moto's, a gate before it that notes every call and fails as AWS does, and a reader of it."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import asyncpg
from aiohttp import ClientError, ClientSession, web
from aws_server import REGION, client
from receiver_app import NOW, Plain, no_fetch
from serving import until

from webhooks.counters import Counters
from webhooks.inbox import Inbox
from webhooks.intake import Intake
from webhooks.provider import Delivery, Feed, Fetch, Provider
from webhooks.registry import PROVIDERS
from webhooks.sqs import Pace, QueueReader

QUICK = Pace(poll=1, hidden=2, renew=0.3, again=0, later=1, latest=1, first_pause=0.05, longest_pause=0.2, drain=10)
"""What AWS counts in whole seconds is as short as it can be, and the rest is shorter."""


@dataclass(frozen=True)
class Call:
    """One call of SQS's API."""

    action: str
    body: Mapping[str, Any]
    access_key: str
    answer: Mapping[str, Any] = field(default_factory=dict)


Answer = Callable[[Mapping[str, Any]], web.Response]


def fails(status: int, code: str) -> Answer:
    """Return what answers a call as SQS does when it refuses."""
    body = json.dumps({"__type": f"com.amazonaws.sqs#{code}", "message": "for a test"}).encode()
    return lambda _: web.Response(status=status, body=body, content_type="application/x-amz-json-1.0")


def deletes_nothing(asked: Mapping[str, Any]) -> web.Response:
    """Answer a batch delete with a failure of each entry."""
    failed = [{"Id": entry["Id"], "SenderFault": False, "Code": "InternalError"} for entry in asked["Entries"]]
    body = json.dumps({"Successful": [], "Failed": failed}).encode()
    return web.Response(body=body, content_type="application/x-amz-json-1.0")


class Gate:
    """Stands before AWS. `next[action]` answers its next calls; while `away`, nobody gets through."""

    def __init__(self, behind: str) -> None:
        self._behind = behind
        self.calls: list[Call] = []
        self.next: dict[str, deque[Answer]] = defaultdict(deque)
        self.always: dict[str, Answer] = {}
        self.away = False
        self.url = ""

    def of(self, action: str) -> list[Call]:
        return [call for call in self.calls if call.action == action]

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Gate]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._pass)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with ClientSession(auto_decompress=False) as self._session:
            yield self
            await runner.cleanup()

    async def _pass(self, request: web.Request) -> web.Response:
        if self.away:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        asked = await request.json()
        action = request.headers["X-Amz-Target"].partition(".")[2]
        key = request.headers["Authorization"].partition("Credential=")[2].partition("/")[0]
        at = len(self.calls)
        self.calls.append(Call(action, asked, key))
        if self.next[action] or action in self.always:
            return (self.next[action].popleft() if self.next[action] else self.always[action])(asked)
        try:
            status, headers, body = await self._forward(request)
        except ClientError:  # a long poll that the end of its test cut short
            return web.Response(status=502)
        self.calls[at] = replace(self.calls[at], answer=json.loads(body))
        return web.Response(status=status, headers=headers, body=body)

    async def _forward(self, request: web.Request) -> tuple[int, dict[str, str], bytes]:
        async with self._session.post(self._behind, data=await request.read(), headers=request.headers) as answer:
            names = ("content-type", "x-amzn-errortype", "x-amzn-query-error")
            kept = {name: value for name, value in answer.headers.items() if name.lower() in names}
            return answer.status, kept, await answer.read()


@dataclass
class Queue:
    """A queue of moto's. Feeds reach it through the gate, the test past it."""

    sqs: Any
    gate: Gate
    url: str = ""

    async def make(self, name: str = "events", **attributes: str) -> str:
        self.url = (await self.sqs.create_queue(QueueName=name, Attributes=attributes))["QueueUrl"]
        return self.url

    def feed(self, provider: str = "trusted", secrets: tuple[str, ...] = (), **settings: Any) -> Feed:
        places = {"region": REGION, "endpoint_url": self.gate.url, "queue_url": self.url}
        return Feed("queue", provider, secrets, **{**places, **settings})

    async def send(self, body: str, **headers: str) -> None:
        """Put a message on it; an underscore in a header's name means a hyphen."""
        attributes = {
            name.replace("_", "-"): {"DataType": "String", "StringValue": value} for name, value in headers.items()
        }
        await self.sqs.send_message(QueueUrl=self.url, MessageBody=body, MessageAttributes=attributes)

    async def send_all(self, *bodies: str) -> None:
        for start in range(0, len(bodies), 10):
            entries = [{"Id": str(n), "MessageBody": body} for n, body in enumerate(bodies[start : start + 10])]
            await self.sqs.send_message_batch(QueueUrl=self.url, Entries=entries)

    async def left(self, url: str | None = None) -> int:
        """Return how many messages there are, hidden ones, too.

        Two kinds are counted one after the other, so that messages which come to be seen in between are in neither: a
        second count has them.
        """
        return max([await self._left(url), await self._left(url)])

    async def _left(self, url: str | None) -> int:
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        found = await self.sqs.get_queue_attributes(QueueUrl=url or self.url, AttributeNames=names)
        return sum(int(found["Attributes"][name]) for name in names)

    async def emptied(self) -> None:
        async def empty() -> bool:
            return await self.left() == 0

        await until(empty, "the queue to be empty")

    def received(self) -> int:
        """Return how often a message was handed out."""
        return sum(len(call.answer.get("Messages", ())) for call in self.gate.of("ReceiveMessage"))


@asynccontextmanager
async def open_queue(aws: str) -> AsyncIterator[Queue]:
    async with client("sqs", aws) as sqs, Gate(aws).open() as gate:
        queue = Queue(sqs, gate)
        await queue.make()
        yield queue


class Trusted(Plain):
    """The provider of `receiver_app`, as one that fills queues by itself."""

    name = "trusted"

    def __init__(self) -> None:
        super().__init__()
        self.facts = replace(self.facts, fills_queues=True)


def provider_of(feed: Feed) -> Provider:
    return {"trusted": Trusted(), "plain": Plain()}.get(feed.provider) or PROVIDERS[feed.provider]


@dataclass
class Reading:
    """A running reader and what it writes to."""

    reader: QueueReader
    inbox: Inbox
    counters: Counters
    db: asyncpg.Pool

    async def outcomes(self) -> dict[str, int]:
        await self.counters.flush(self.db)
        rows = await self.db.fetch("SELECT outcome, sum(n)::int AS n FROM feed_delivery GROUP BY 1")
        return {row["outcome"]: row["n"] for row in rows}

    async def counted(self, outcome: str, n: int = 1) -> None:
        async def there() -> bool:
            return (await self.outcomes()).get(outcome, 0) >= n

        await until(there, f"{outcome} to be counted")


@asynccontextmanager
async def reading(
    db: asyncpg.Pool,
    feed: Feed,
    *,
    loops: int = 1,
    pace: Pace = QUICK,
    fetch: Fetch = no_fetch,
    inbox: Inbox | None = None,
    pool: asyncpg.Pool | None = None,
) -> AsyncIterator[Reading]:
    """Read a queue; its clock stands still at NOW. The inbox writes to `pool`, the counts and the test to `db`."""
    inbox, counters = inbox or Inbox(), Counters()
    await inbox.open(pool or db)
    intake = Intake(inbox, fetch, lambda: NOW, counters)
    reader = QueueReader(feed, provider_of(feed), intake, loops, pace)
    reader.start()
    try:
        yield Reading(reader, inbox, counters, db)
    finally:
        await reader.finish()
        await inbox.close()


async def stored(db: asyncpg.Pool) -> list[asyncpg.Record]:
    return await db.fetch("SELECT * FROM provider_event ORDER BY event_id")


def events(*ids: object) -> str:
    """Return a delivery of the test provider."""
    return json.dumps([{"id": str(name), "message": f"m-{name}", "key": f"order-{name}"} for name in ids])


def as_proxy(delivery: Delivery, **changes: Any) -> str:
    """Return a delivery as a proxy's envelope, headers in the case that their sender chose."""
    headers = {name.title(): value for name, value in delivery.headers.items()}
    return json.dumps(
        {"headers": headers, "body": delivery.body.decode(errors="replace"), "isBase64Encoded": False, **changes}
    )
