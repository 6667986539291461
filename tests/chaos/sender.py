# SPDX-License-Identifier: Apache-2.0
"""A worker that sends what it is given by `send_once`: DSN, then "pooled" behind a transaction pooler.

Reads a job a line (`World` makes them), and answers each with {"key", "outcome"}: what send_once came to, or the name
of what it raised. It remembers nothing: a job comes again until it is done.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any
from urllib.parse import urlencode

import aiohttp
import asyncpg

from reconciler import guard, keys

CONNECTIONS = 6
COMMAND_SECONDS = 10.0


def encoded(job: dict[str, Any], stamped: dict[str, Any]) -> bytes:
    return (json.dumps if job["content_type"] == "application/json" else urlencode)(stamped).encode()


async def send(pool: asyncpg.Pool, session: aiohttp.ClientSession, job: dict[str, Any]) -> str:
    async def submit(claim: guard.Claim) -> aiohttp.ClientResponse:
        headers = {"Content-Type": job["content_type"], **claim.stamp.headers}
        body = encoded(job, claim.stamp.into(job["body"]))
        timeout = aiohttp.ClientTimeout(total=claim.seconds_left())
        return await session.post(job["url"], data=body, headers=headers, timeout=timeout)

    options = {name: job[name] for name in ("provider", "recipient", "submit_within")}
    fingerprint = keys.fingerprint(job["body"])
    return (await guard.send_once(pool, job["key"], job["feed"], submit, fingerprint=fingerprint, **options)).outcome


async def work(pool: asyncpg.Pool, session: aiohttp.ClientSession, line: bytes) -> None:
    job = json.loads(line)
    try:
        outcome = await send(pool, session, job)
    except Exception as error:  # noqa: BLE001 - nothing was claimed: the job comes again
        outcome = type(error).__name__
    sys.stdout.write(json.dumps({"key": job["key"], "outcome": outcome}) + "\n")
    sys.stdout.flush()


async def main(dsn: str, pooled: str = "") -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    cached = {"statement_cache_size": 0} if pooled else {}
    pool = asyncpg.create_pool(
        dsn, min_size=0, max_size=CONNECTIONS, timeout=COMMAND_SECONDS, command_timeout=COMMAND_SECONDS, **cached
    )
    connector = aiohttp.TCPConnector(limit=0)
    async with pool, aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
        async for line in reader:
            group.create_task(work(pool, session, line))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
