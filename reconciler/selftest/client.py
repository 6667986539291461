# SPDX-License-Identifier: Apache-2.0
"""Counts how often one submission of a sender arrives, where its answer gets lost: a server on loopback, HTTP and SMTP.

Hidden retries repeat what may have been taken, inside one claim; nothing but counting shows them for certain.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from reconciler import hidden_retries

_LARGEST: Final = 64 * 2**20
_LONGEST_LINE: Final = 2**20
_NO_SUBMISSIONS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_SAYS: Final = {b"EHLO": b"250-localhost\r\n250 AUTH PLAIN\r\n", b"AUTH": b"235 ok\r\n", b"QUIT": b"221 bye\r\n"}


@dataclass(slots=True)
class Trial:
    """What arrived of one submission."""

    fault: str
    """`reset`: hang up once it was read; `unavailable`: say so (503, 451); `hang`: don't answer."""
    arrived: int = 0
    by: str | None = None
    """Who sent the last: `SMTP`, or what the client calls itself."""
    advice: str | None = None
    """How to switch off that it repeats, where it did."""

    def count(self, by: str) -> None:
        """Count a submission."""
        self.arrived += 1
        self.by = by
        if self.arrived > 1:
            self.advice = next((text for name, text in _ADVICE.items() if name in by), _ELSEWHERE)


_ADVICE: Final = {
    "Boto3": f"create the client with {hidden_retries.AWS}",
    "Botocore": f"create the client with {hidden_retries.AWS}",
    "python-requests": hidden_retries.REQUESTS,
    "python-urllib3": hidden_retries.URLLIB3,
}
_ELSEWHERE: Final = "look for what repeats around the client: a decorator, a transport, an option of the SDK, a loop"


class Server:
    """Takes submissions, counts them, and loses their answers."""

    def __init__(self, trial: Trial, hold: float) -> None:
        self._trial = trial
        self._hold = hold
        self._over = asyncio.Event()
        self.url = ""
        self.smtp = ""

    @property
    def environment(self) -> dict[str, str]:
        """What tells a sender where to submit."""
        return {"RECONCILER_SELFTEST_URL": self.url, "RECONCILER_SELFTEST_SMTP": self.smtp}

    async def take_request(self, request: web.Request) -> web.Response:
        """Answer one HTTP request."""
        await request.read()
        if request.method in _NO_SUBMISSIONS:
            return web.json_response({})
        self._trial.count(request.headers.get("User-Agent", "HTTP"))
        if not await self._keeps_the_connection() and request.transport is not None:
            request.transport.abort()
        return web.json_response({"message": "unavailable"}, status=503, headers={"Retry-After": "0"})

    async def take_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Talk SMTP with one client, until it leaves."""
        writer.write(b"220 localhost\r\n")
        while line := await reader.readline():
            word = line[:4].strip().upper()
            if word != b"DATA":
                writer.write(_SAYS.get(word, b"250 ok\r\n"))
            elif not await self._take_message(reader, writer):
                return
        writer.close()

    async def _take_message(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"354 go on\r\n")
        await reader.readuntil(b"\r\n.\r\n")
        self._trial.count("SMTP")
        if await self._keeps_the_connection():
            writer.write(b"451 unavailable\r\n")
            return True
        writer.transport.abort()
        return False

    async def _keeps_the_connection(self) -> bool:
        if self._trial.fault == "hang":
            with suppress(TimeoutError):
                async with asyncio.timeout(self._hold):
                    await self._over.wait()
        return self._trial.fault == "unavailable"

    def end(self) -> None:
        """Let go of whoever is still held."""
        self._over.set()


@asynccontextmanager
async def running(trial: Trial, hold: float) -> AsyncIterator[Server]:
    """Run a server on free ports of loopback that counts for a trial; `hold`: seconds for which `hang` holds on."""
    server = Server(trial, hold)
    app = web.Application(client_max_size=_LARGEST)
    app.router.add_route("*", "/{path:.*}", server.take_request)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    mail = await asyncio.start_server(server.take_connection, "127.0.0.1", 0, limit=_LONGEST_LINE)
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    server.smtp = f"127.0.0.1:{mail.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        server.end()
        mail.close()
        await runner.cleanup()
