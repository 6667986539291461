# SPDX-License-Identifier: Apache-2.0
"""Starts the real receiver on a loopback port for a test, with a small provider and a way to cut the database off."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import struct
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import MISSING, dataclass, fields
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import asyncpg
from aiohttp import ClientSession, web

from webhooks.counters import Counters
from webhooks.event import Event, Kind, Testimony
from webhooks.inbox import Inbox
from webhooks.intake import Intake, Keep
from webhooks.payload import load_object, split
from webhooks.provider import BadPayload, Delivery, Facts, Feed, Fetch, FetchError, Parsed, Refused, Verified
from webhooks.receiver import RECEIVER, Limits, Receiver, Runner, Watch, add_receiver, make_runner
from webhooks.registry import PROVIDERS
from webhooks.signature import hmac_sha256, same

NOW = datetime(2026, 11, 20, 10, 5, tzinfo=UTC)
SECRET = "throw-away"


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Plain:
    """A provider for tests: a JSON array of events, signed with HMAC-SHA256 (hex) in the header `x-signature`."""

    name = "plain"

    def __init__(self, busy_status: int = 503, refused_status: int = 401) -> None:
        texts = {field.name: "" for field in fields(Facts) if field.default is MISSING}
        self.facts = Facts(**texts, busy_status=busy_status, refused_status=refused_status)

    async def verify(self, delivery: Delivery, feed: Feed, now: datetime, fetch: Fetch) -> Any:  # noqa: ARG002
        if delivery.headers.get("x-fault") == "verify":
            raise RuntimeError("a fault in verify")
        given = delivery.headers.get("x-signature")
        if not given:
            return Refused("missing", "no x-signature")
        matches = any(same(given, signature(delivery.body, secret)) for secret in feed.secrets)
        return Verified() if matches else Refused("signature", "no secret fits")

    def parse(self, delivery: Delivery) -> Parsed:
        if delivery.headers.get("x-fault") == "parse":
            raise RuntimeError("a fault in parse, about ada@example.org")
        if delivery.body == b"ping":
            return Parsed(control="ping")
        if url := delivery.headers.get("x-confirm"):
            return Parsed(control="subscription_confirmation", confirm_url=url)
        return Parsed([_event(raw) for raw in split(delivery.body)])


def _event(raw: bytes) -> Event:
    value = load_object(raw)
    if "id" not in value:
        raise BadPayload("an event has an id")
    at = value.get("at")
    return Event(
        kind=Kind(value.get("kind", "delivered")),
        testimony=Testimony(value.get("testimony", "accepted")),
        message_id=value.get("message"),
        event_id=value["id"],
        send_key=value.get("key"),
        recipient=value.get("recipient"),
        occurred_at=datetime.fromtimestamp(at, UTC) if at is not None else None,
        reason=value.get("reason"),
        raw=raw,
    )


def signature(body: bytes, secret: str = SECRET) -> str:
    return hmac_sha256(secret, body).hex()


def signed(body: bytes, secret: str = SECRET) -> dict[str, str]:
    return {"x-signature": signature(body, secret)}


PLAIN = Feed("plain-main", "plain", secrets=(SECRET,))


async def no_fetch(url: str, *, max_bytes: int = 65_536) -> bytes:
    raise FetchError("nothing may be fetched here")


@dataclass
class Running:
    """A receiver that listens; `post` speaks to it as a provider does."""

    port: int
    app: web.Application
    inbox: Inbox
    counters: Counters
    session: ClientSession
    runner: Runner

    @property
    def receiver(self) -> Receiver:
        return self.app[RECEIVER]

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    async def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        data = BytesIO(body) if body is not None else None
        async with self.session.request(
            method, self.url(path), data=data, headers=headers, allow_redirects=False
        ) as response:
            return Answer(response.status, await response.read(), response.headers.copy())

    async def post(self, feed: str, body: bytes, headers: Mapping[str, str] | None = None) -> Answer:
        return await self.request("POST", f"/webhooks/{feed}", body, headers)

    async def send(self, *events: Mapping[str, Any]) -> Answer:
        """Post events of the test provider, signed."""
        body = json.dumps(events).encode()
        return await self.post(PLAIN.name, body, signed(body))


@asynccontextmanager
async def running(
    db: asyncpg.Pool,
    feeds: Iterable[Feed] = (PLAIN,),
    *,
    now: datetime = NOW,
    fetch: Fetch = no_fetch,
    limits: Limits | None = None,
    plain: Plain | None = None,
    inbox: Inbox | None = None,
    keep: Keep | None = None,
    watch: Watch | None = None,
) -> AsyncIterator[Running]:
    """Run the receiver over the pool `db`; its clock stands still at `now`."""
    inbox = inbox or Inbox()
    await inbox.open(db)
    counters = Counters()
    providers = {**PROVIDERS, "plain": plain or Plain()}
    app = web.Application()
    by_name = {feed.name: feed for feed in feeds}
    intake = Intake(inbox, fetch, lambda: now, counters, keep)
    add_receiver(app, by_name, intake, fetch, limits, providers, watch)
    runner = make_runner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    async with ClientSession(auto_decompress=False) as session:
        try:
            yield Running(runner.addresses[0][1], app, inbox, counters, session, runner)
        finally:
            await session.close()
            await runner.cleanup()
            await inbox.close()


class Cut:
    """A unix socket before the database's that can be cut, so that the database is away for whoever connects there.

    With `pooled` it answers as a pooler does: with another process id than the server's.
    """

    def __init__(self, dsn: str, directory: Path, *, pooled: bool = False) -> None:
        parts = urlsplit(dsn)
        query = parse_qs(parts.query)
        port = query["port"][0]
        self._behind = f"{query['host'][0]}/.s.PGSQL.{port}"
        self._socket = directory / f".s.PGSQL.{port}"
        self.dsn = f"postgresql://{parts.netloc}{parts.path}?host={directory}&port={port}"
        self.away = False
        self.transactions = 0
        """Explicit transactions that were begun through it."""
        self.refused = b""
        """Whoever sends this is cut off, such as an application of this name."""
        self._pooled = pooled
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, self._socket)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        self._server.close()
        await self._server.wait_closed()

    def cut(self) -> None:
        self.away = True
        for writer in list(self._writers):
            writer.transport.abort()

    def resume(self) -> None:
        self.away = False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.away:
            writer.transport.abort()
            return
        behind_reader, behind = await asyncio.open_unix_connection(self._behind)
        self._writers |= {writer, behind}
        with suppress(ConnectionError, asyncio.CancelledError):
            await asyncio.gather(self._pump(reader, behind), self._pump(behind_reader, writer, self._pooled))
        for end in (writer, behind):
            end.transport.abort()
            self._writers.discard(end)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pooled: bool = False) -> None:
        while data := await reader.read(65_536):
            if self.refused and self.refused in data:
                raise ConnectionAbortedError
            self.transactions += data.count(b"BEGIN;")
            if pooled and (at := data.find(b"K\0\0\0\x0c")) >= 0:  # BackendKeyData: the process id follows
                data = data[: at + 5] + struct.pack("!i", 1) + data[at + 9 :]
                pooled = False
            writer.write(data)
            await writer.drain()
        writer.close()


def case_request(case: Mapping[str, Any]) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of a request in a case file."""
    body = base64.b64decode(case["body_base64"]) if "body_base64" in case else case["body_text"].encode()
    return body, dict(case.get("headers", {}))


def random_bytes(n: int, seed: str) -> bytes:
    """Return bytes that don't compress, the same for the same seed."""
    blocks = (hmac.digest(seed.encode(), struct.pack("!i", i), "sha256") for i in range(n // 32 + 1))
    return b"".join(blocks)[:n]
