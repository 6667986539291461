# SPDX-License-Identifier: Apache-2.0
"""A worker that sends order:0 to order:499 by `send_once`, 20 at a time: DSN URL NAME. Begins when it reads a line."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

import aiohttp
import asyncpg

from reconciler import guard

KEYS = 500
AT_ONCE = 20


async def work(pool: asyncpg.Pool, session: aiohttp.ClientSession, url: str, name: str, keys: Iterator[str]) -> None:
    async def submit(claim: guard.Claim) -> aiohttp.ClientResponse:
        return await session.post(url, data=claim.stamp.into({"to": "ada@example.org", "h:X-Worker": name}))

    for key in keys:
        await guard.send_once(pool, key, "mg", submit, provider="mailgun")


async def main(dsn: str, url: str, name: str) -> None:
    keys = iter([f"order:{n}" for n in range(KEYS)])
    async with asyncpg.create_pool(dsn, min_size=5, max_size=5) as pool, aiohttp.ClientSession() as session:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.readline)
        await asyncio.gather(*(work(pool, session, url, name, keys) for _ in range(AT_ONCE)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
