# SPDX-License-Identifier: Apache-2.0
"""The HTTP API on a test's database, and a caller of it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import asyncpg
from aiohttp import TCPConnector, web
from aiohttp.test_utils import TestClient, TestServer
from multidict import CIMultiDict
from yarl import URL

from reconciler.api.application import add_api
from reconciler.configuration.tables import ApiSettings, TokenSettings
from reconciler.idempotency import Store
from reconciler.tokens import Scope, hash_of
from webhooks.registry import PROVIDERS

FEEDS = {"mg": PROVIDERS["mailgun"], "sg": PROVIDERS["sendgrid"], "acs": PROVIDERS["azure_acs"]}
SHOP, OTHER, OPS = "espr_shop", "espr_other", "espr_ops"
KEY = "order.receipt:1234/a:ada@example.org"

_numbers = itertools.count(1)


def fresh() -> str:
    """A value for Idempotency-Key that no other call has."""
    return f"call-{next(_numbers)}"


def token(*tokens: str, scopes: tuple[Scope, ...] = ("send",)) -> TokenSettings:
    return TokenSettings(hash=tuple(map(hash_of, tokens)), scopes=scopes)


SETTINGS = ApiSettings(tokens={"shop": token(SHOP), "other": token(OTHER), "ops": token(OPS, scopes=("operate",))})


class Sender:
    """Calls the API as a sender does. Each answer is (status, body); `headers` are those of the last one."""

    def __init__(self, client: TestClient[Any, Any], bearer: str = SHOP) -> None:
        self.client, self.bearer = client, bearer
        self.headers: dict[str, str] = {}

    async def call(
        self, method: str, path: str | URL, json: Any = None, *, key: str | None = None, **more: Any
    ) -> tuple[int, Any]:
        headers = CIMultiDict(more.pop("headers", {}), Authorization=f"Bearer {self.bearer}")
        headers.update({"Idempotency-Key": key} if key else {})
        given = {"json": json} if json is not None else {}
        async with self.client.request(method, path, headers=headers, **given, **more) as answer:
            self.headers = dict(answer.headers)
            return answer.status, await answer.json(content_type=None) if method != "HEAD" else None

    async def claim(
        self, key: str = KEY, feed: str = "mg", *, call: str | None = None, **options: Any
    ) -> tuple[int, Any]:
        return await self.call("POST", "/v1/sends", {"key": key, "feed": feed, **options}, key=call or fresh())

    async def confirm(self, fence: int, key: str = KEY, *, call: str | None = None, **said: Any) -> tuple[int, Any]:
        return await self.call("POST", path(key, "confirm"), {"fence": fence, **said}, key=call)

    async def fail(self, fence: int, key: str = KEY, *, call: str | None = None, **said: Any) -> tuple[int, Any]:
        return await self.call("POST", path(key, "fail"), {"fence": fence, "reason": "why", **said}, key=call)

    async def look(self, key: str = KEY) -> tuple[int, Any]:
        return await self.call("GET", path(key))

    async def decide(self, verb: str, key: str = KEY, reason: str = "seen in the log") -> tuple[int, Any]:
        return await self.call("POST", path(key, "operator", verb), {"reason": reason})


def path(key: str, *verbs: str) -> URL:
    return URL("/".join(("/v1/sends", quote(key, safe=""), *verbs)), encoded=True)


class Losing(asyncpg.Connection):  # type: ignore[type-arg]
    """A connection that breaks once, when a statement with `statement` in it was performed, before it is answered."""

    statement: str | None = None

    async def execute(self, query: str, *args: Any, **given: Any) -> Any:
        return self.break_after(query, await super().execute(query, *args, **given))

    async def fetchval(self, query: str, *args: Any, **given: Any) -> Any:
        return self.break_after(query, await super().fetchval(query, *args, **given))

    def break_after(self, query: str, answer: Any) -> Any:
        if Losing.statement is None or Losing.statement not in query:
            return answer
        Losing.statement = None
        self.terminate()
        raise asyncpg.ConnectionDoesNotExistError("lost")


@asynccontextmanager
async def losing(dsn: str) -> AsyncIterator[asyncpg.Pool]:
    """A pool of such connections."""
    async with asyncpg.create_pool(dsn, min_size=1, max_size=2, connection_class=Losing) as pool:
        yield pool
    Losing.statement = None


@asynccontextmanager
async def api(pool: asyncpg.Pool | None, settings: ApiSettings = SETTINGS) -> AsyncIterator[Sender]:
    """Serve the API on a free port."""
    app, store = web.Application(), Store(pool, retention=settings.idempotency_retention)
    add_api(app, settings, FEEDS, store, lambda _feed, of: timedelta(seconds=45 if of == "slow" else 60))
    async with TestClient(TestServer(app), connector=TCPConnector(limit=0)) as client:
        yield Sender(client)
