# SPDX-License-Identifier: Apache-2.0
"""Small servers that speak a provider's API: its filters, its paging, its limits and its faults."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from aiohttp import web
from aiohttp.test_utils import TestServer

from webhooks.api import HttpApi, open_session
from webhooks.asking import Query, Searches
from webhooks.event import Event
from webhooks.provider import Feed
from webhooks.registry import PROVIDERS

NOW = datetime(2026, 11, 2, 9, 0, tzinfo=UTC)
Answers = Callable[[web.Request], "web.StreamResponse | None"]


@dataclass
class Sent:
    """A send that the provider took (or, where `rejected`, will never send)."""

    wire_key: str
    recipient: str = "ana.reyes@example.com"
    message_id: str = "11111111-2222-4333-8444-555555555555"
    at: datetime = NOW - timedelta(minutes=40)
    rejected: bool = False


@dataclass
class FakeApi:
    """One provider's API over what it sent. Subclasses answer as the provider does; see `apis/`."""

    sends: Sequence[Sent]
    endless: bool = False
    """Whether each page names a next one."""
    requests: list[web.Request] = field(default_factory=list)

    page_size = 3
    """Sends on a page, so that a handful needs several."""
    settings: dict[str, str] = field(default_factory=dict)
    """Settings of the feed: api_key, api_secret, api_scope."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request as the provider does; 401 without the right credential, 404 for a place that isn't."""
        raise NotImplementedError


@asynccontextmanager
async def asked(name: str, fake: FakeApi, spoil: Answers = lambda _: None) -> AsyncIterator[tuple[Feed, HttpApi]]:
    """Yield a feed whose API is the fake, and the client to ask it with; `spoil` may answer instead of it."""

    async def handle(request: web.Request) -> web.StreamResponse:
        fake.requests.append(request)
        return spoil(request) or await fake.answer(request)

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", handle)
    async with TestServer(app) as server, open_session(seconds=2) as session:
        feed = Feed("main", name, api_url=str(server.make_url("")).rstrip("/"), **fake.settings)
        yield feed, HttpApi(session, lambda: NOW, pause=0.0, first_pause=0.0)


async def search(name: str, feed: Feed, api: HttpApi, query: Query) -> list[Event]:
    provider = PROVIDERS[name]
    assert isinstance(provider, Searches)
    return [event async for event in provider.search(query, feed, api)]
