# SPDX-License-Identifier: Apache-2.0
"""A TCP port before a server's unix socket: what goes through it is cut, lost, or held up, as a test chooses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, Self
from urllib.parse import urlsplit

CHUNK = 65_536


class Tap(Protocol):
    """Sees what goes over one connection, before it goes on. False: this is lost, and the connection with it."""

    async def request(self, data: bytes) -> bool: ...

    async def answer(self, data: bytes) -> bool: ...


class Road:
    """One direction of all connections: open, a black hole, or slow by `delay` seconds."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.delay = 0.0

    async def pass_on(self) -> None:
        if self.delay:
            await asyncio.sleep(self.delay)
        await self.open.wait()


class Link:
    """One connection through the proxy. `lost`: nothing is ever heard over it again, in either direction."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter, tap: Tap | None) -> None:
        self.client, self.server, self.tap = client, server, tap
        self.lost = False


class FaultProxy:
    """Listens on `port`; `behind` is the socket that it leads to, and may be changed for connections that come later.

    A black hole is one for closing connections, too: neither side learns that the other one has gone.
    """

    def __init__(self, behind: Path, tap: Callable[[], Tap] | None = None) -> None:
        self.behind = behind
        self.port = 0
        self.away = False
        """Whoever connects is turned away."""
        self.half_an_answer = False
        """The next answer ends in its middle, and its connection with it."""
        self.requests, self.answers = Road(), Road()
        self._tap = tap
        self._links: set[Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def links(self) -> int:
        return len(self._links)

    def cut(self) -> int:
        """Reset all connections; return how many there were."""
        for link in self._links:
            link.client.transport.abort()
            link.server.transport.abort()
        cut, self._links = len(self._links), set()
        return cut

    def lose(self, noticed_after: float | None = None) -> int:
        """Let nothing more be heard over the connections that there are; new ones pass. Return how many there were.

        So it is where a firewall or a load balancer has forgotten its connections. After so many seconds the server's
        system notices it, as TCP's keepalives let it (None: never); the client's never does.
        """
        for link in self._links:
            link.lost = True
            if noticed_after is not None:
                asyncio.get_running_loop().call_later(noticed_after, link.server.transport.abort)
        return len(self._links)

    def close(self, *roads: Road) -> None:
        """Make black holes of these directions, until `heal`."""
        for road in roads:
            road.open.clear()

    def heal(self) -> None:
        """Let everything pass again, what was held up included; what was lost stays lost."""
        self.away = self.half_an_answer = False
        for road in (self.requests, self.answers):
            road.delay = 0.0
            road.open.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self.away:
                raise ConnectionRefusedError
            behind_reader, behind = await asyncio.open_unix_connection(self.behind)
        except OSError:
            writer.transport.abort()
            return
        link = Link(writer, behind, self._tap() if self._tap else None)
        self._links.add(link)
        try:
            await self._pump_both(link, reader, behind_reader)
        finally:
            writer.transport.abort()
            behind.transport.abort()
            self._links.discard(link)

    async def _pump_both(self, link: Link, requests: asyncio.StreamReader, answers: asyncio.StreamReader) -> None:
        pumps = [asyncio.create_task(self._requests(link, requests)), asyncio.create_task(self._answers(link, answers))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _requests(self, link: Link, reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while data := await self._read(link, reader, self.requests):
                if link.tap and not await link.tap.request(data):
                    return
                await _write(link.server, data)

    async def _answers(self, link: Link, reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while data := await self._read(link, reader, self.answers):
                if link.tap and not await link.tap.answer(data):
                    return
                if self.half_an_answer and len(data) > 1:
                    self.half_an_answer = False
                    await _write(link.client, data[: len(data) // 2])
                    return
                await _write(link.client, data)

    async def _read(self, link: Link, reader: asyncio.StreamReader, road: Road) -> bytes:
        data = await reader.read(CHUNK)
        await road.pass_on()
        if link.lost:
            await asyncio.Event().wait()
        return data


def proxied(proxy: FaultProxy, dsn: str) -> str:
    """Return the URL of the same database through a proxy."""
    database = urlsplit(dsn).path
    return f"postgresql://postgres@127.0.0.1:{proxy.port}{database}?sslmode=disable"


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()
