# SPDX-License-Identifier: Apache-2.0
"""A worker of a campaign: DSN URL NAME SIZE AT_ONCE. Submits each send by itself; ends when nothing is given out."""

from __future__ import annotations

import asyncio
import sys

import aiohttp
import asyncpg

from reconciler import campaign, guard


async def main(dsn: str, url: str, name: str, size: str, at_once: str) -> None:
    turns = asyncio.Semaphore(int(at_once))
    connector = aiohttp.TCPConnector(limit=int(at_once))
    async with (
        asyncpg.create_pool(dsn, min_size=4, max_size=4) as pool,
        aiohttp.ClientSession(connector=connector) as session,
    ):

        async def send(one: guard.Released) -> None:
            async def submit(claim: guard.Claim) -> aiohttp.ClientResponse:
                return await session.post(
                    url, data=claim.stamp.into({"to": one.recipient, "text": one.payload["name"]})
                )

            async with turns:
                await guard.submit_claimed(pool, one.claim, submit)

        async for batch in campaign.batches(pool, name, size=int(size), provider="mailgun"):
            await asyncio.gather(*map(send, batch))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
