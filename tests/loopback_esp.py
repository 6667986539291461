# SPDX-License-Identifier: Apache-2.0
"""A provider on loopback with Mailgun's send API, whose faults a test chooses. It counts what it took, by wire key."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web


class Esp:
    """`mode`: answer | silent (takes it and never answers) | reset (takes it and hangs up) | 400 | 429 | 500."""

    def __init__(self) -> None:
        self.mode = "answer"
        self.silent_after: int | None = None
        """So many messages are answered in this mode, later ones are only taken."""
        self.taken: Counter[str] = Counter()
        self.url = ""
        self.arrived = asyncio.Event()
        """Set whenever a message was taken."""
        self.over = asyncio.Event()

    async def post(self, request: web.Request) -> web.Response:
        form = await request.post()
        key = str(form["v:send_key"])
        if self.mode in {"400", "429", "500"}:
            return web.json_response({"message": "no"}, status=int(self.mode))
        self.taken[key] += 1
        self.arrived.set()
        if self.mode == "silent" or (self.silent_after is not None and self.taken.total() > self.silent_after):
            await self.over.wait()
        if self.mode == "reset":
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({"id": f"<{key}@mg.example.com>", "message": "Queued. Thank you."})


@asynccontextmanager
async def esp() -> AsyncIterator[Esp]:
    """Run one on a free port."""
    provider = Esp()
    app = web.Application()
    app.router.add_post("/v3/mg.example.com/messages", provider.post)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    provider.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v3/mg.example.com/messages"
    try:
        yield provider
    finally:
        provider.over.set()
        await runner.cleanup()
