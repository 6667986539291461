# SPDX-License-Identifier: Apache-2.0
"""Fetches the few URLs that a delivery may make us fetch: signing certificates and confirmations."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

from webhooks.provider import Fetch, FetchError

AT_ONCE: Final = 4
"""Requests under way at a time, so that a flood of deliveries can't become a flood of ours."""


@asynccontextmanager
async def open_fetch(seconds: float = 5.0) -> AsyncIterator[Fetch]:
    """Yield a Fetch over a session of its own. A fetch, the wait for its turn included, takes at most `seconds`."""
    async with ClientSession(
        connector=TCPConnector(limit=AT_ONCE),
        timeout=ClientTimeout(total=seconds),
        headers={"Accept-Encoding": "identity", "User-Agent": "esp-reconciler"},
        trust_env=True,
        auto_decompress=False,
    ) as session:

        async def fetch(url: str, *, max_bytes: int = 65_536) -> bytes:
            return await _fetch(session, url, max_bytes)

        yield fetch


async def _fetch(session: ClientSession, url: str, max_bytes: int) -> bytes:
    try:
        async with session.get(url, allow_redirects=False) as response:
            if response.status != 200:  # noqa: PLR2004 - a redirect is no answer either
                raise FetchError(f"answered {response.status}")
            body = bytearray()
            async for piece in response.content.iter_chunked(max_bytes):
                body += piece
                if len(body) > max_bytes:
                    raise FetchError(f"more than {max_bytes} bytes")
            return bytes(body)
    except TimeoutError:
        raise FetchError("no answer in time") from None
    except (ClientError, ValueError) as error:
        raise FetchError(type(error).__name__) from None
