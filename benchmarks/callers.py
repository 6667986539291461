# SPDX-License-Identifier: Apache-2.0
"""Callers of one key, as a process of their own: `python -m benchmarks.callers WAY WHERE ESP KEY HOW_MANY`.

WAY is python (`send_once`), sql (the functions, as a sender in any language calls them) or http (`/v1/sends`); WHERE is
a DSN, or `URL TOKEN` in one argument. ESP is a provider with Mailgun's send API. Says `ready`, waits for a line on
stdin, lets all callers go at once, and prints what each waited for: JSON, a list of [seconds, waited, served, outcome].
`waited` leaves out the provider's call; `served` is the time of the caller's own statements or requests, without his
wait for one of the few connections that all callers of a process share.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, Final
from urllib.parse import quote

import aiohttp
import asyncpg

from reconciler import guard

CONNECTIONS: Final = 2
"""Of each process."""
WARM_UP: Final = 8
"""Sends over each of them beforehand: PostgreSQL plans a statement anew until its sixth use."""
FEED: Final = "mg"

Submit = Callable[[str], Awaitable[str]]
"""Submits a message that bears a wire key, and returns its message id."""
Caller = Callable[[str, Submit, "Served"], Awaitable[str]]
"""Sends under a key, and returns the outcome."""


class Served:
    """Counts the seconds that a caller is served, and lends him a pool that counts them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.pool: asyncpg.Pool | None = None

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the time of a block."""
        begun = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - begun

    async def fetchrow(self, query: str, /, *args: Any) -> Any:
        """Run one statement on a connection of the pool."""
        if self.pool is None:
            raise RuntimeError("no pool")
        async with self.pool.acquire() as connection:
            with self.counted():
                return await connection.fetchrow(query, *args)


@asynccontextmanager
async def python(where: str) -> AsyncIterator[Caller]:
    """Callers of `send_once`."""
    async with asyncpg.create_pool(where, min_size=CONNECTIONS, max_size=CONNECTIONS) as pool:

        async def call(key: str, submit: Submit, served: Served) -> str:
            served.pool = pool
            sent = await guard.send_once(served, key, FEED, lambda claim: submit(claim.wire_key))
            return sent.outcome

        yield call


CLAIM: Final = "CALL send_claim_commit($1, $2, '{}')"
CONFIRM: Final = "SELECT * FROM send_confirm($1, $2, $3, '{}')"


@asynccontextmanager
async def sql(where: str) -> AsyncIterator[Caller]:
    """Callers of the SQL functions."""
    async with asyncpg.create_pool(where, min_size=CONNECTIONS, max_size=CONNECTIONS) as pool:

        async def call(key: str, submit: Submit, served: Served) -> str:
            served.pool = pool
            claim = await served.fetchrow(CLAIM, key, FEED)
            if claim["outcome"] != "claimed":
                return str(claim["outcome"])
            message_id = await submit(claim["wire_key"])
            return str((await served.fetchrow(CONFIRM, key, claim["fence"], message_id))["outcome"])

        yield call


@asynccontextmanager
async def http(where: str) -> AsyncIterator[Caller]:
    """Callers of the HTTP API."""
    url, token = where.split()
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=64)) as session,
        aiohttp.ClientSession(headers=headers) as reports,  # a caller has a client of his own: here 64 share one
    ):
        number = 0

        async def call(key: str, submit: Submit, served: Served) -> str:
            nonlocal number
            number += 1
            asked = {"Idempotency-Key": f'"{token}-{key}-{number}"'}
            with served.counted():
                async with session.post(f"{url}/v1/sends", json={"key": key, "feed": FEED}, headers=asked) as answer:
                    claim = await answer.json(content_type=None)
            if answer.status != 201:  # noqa: PLR2004 - claimed
                return str(claim.get("outcome") or claim.get("state"))
            said = {"fence": claim["fence"], "message_id": await submit(claim["wire_key"])}
            with served.counted():
                async with reports.post(f"{url}/v1/sends/{quote(key, safe='')}/confirm", json=said) as answer:
                    return str((await answer.json())["outcome"])

        yield call


WAYS: Final = {"python": python, "sql": sql, "http": http}


async def main(way: str, where: str, esp: str, key: str, callers: str) -> None:
    """Let the callers go and print what they waited for."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        call = await stack.enter_async_context(WAYS[way](where))

        async def one() -> tuple[float, float, float, str]:
            at_provider, served = 0.0, Served()

            async def submit(wire_key: str) -> str:
                nonlocal at_provider
                begun = time.perf_counter()
                async with session.post(esp, data={"to": "ada@example.com", "v:send_key": wire_key}) as answer:
                    message_id = str((await answer.json())["id"])
                at_provider = time.perf_counter() - begun
                return message_id

            begun = time.perf_counter()
            outcome = await call(key, submit, served)
            took = time.perf_counter() - begun
            return took, took - at_provider, served.seconds, outcome

        for number in range(WARM_UP):  # a sender's connections have been in use, and know their statements
            warm = (f"warm-up:{key}:{os.getpid()}:{number}:{n}" for n in range(CONNECTIONS))
            await asyncio.gather(*(call(one, lambda _: asyncio.sleep(0, "warm"), Served()) for one in warm))
        print("ready", flush=True)  # noqa: T201 - read by whoever started this
        await asyncio.to_thread(sys.stdin.readline)
        print(json.dumps(await asyncio.gather(*(one() for _ in range(int(callers))))))  # noqa: T201 - the same


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
