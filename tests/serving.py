# SPDX-License-Identifier: Apache-2.0
"""Starts `reconciler serve` as a process of its own and speaks to it over loopback, as a provider does."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

from webhooks.provider import Delivery, Feed
from webhooks.registry import PROVIDERS

ROOT = Path(__file__).parent.parent
LIMIT = 20.0
"""Seconds any condition is waited for; only a failing test waits that long."""

FEEDS = {
    "mg": Feed("mg", "mailgun", ("key-0123456789abcdef",)),
    "sg": Feed("sg", "sendgrid", ("basic:hooks:0123456789",)),
    "re": Feed("re", "resend", ("whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=",)),
}


def sample(feed: str, kind: str, wire_key: str) -> Delivery:
    """Return a signed delivery; each call is one more event."""
    configured = FEEDS[feed]
    return PROVIDERS[configured.provider].sample(kind, wire_key, configured, datetime.now(UTC))


def free_port() -> int:
    """A port that nobody has, and that no system gives to whoever asks for any: not even before it is taken."""
    for port in random.sample(range(10_000, 20_000), 1_000):
        with suppress(OSError):
            socket.create_server(("127.0.0.1", port)).close()
            return port
    raise AssertionError("no free port")


async def until(condition: Callable[[], Awaitable[object]], what: str, seconds: float = LIMIT) -> Any:
    """Return the first true answer of a condition that is asked again and again."""
    try:
        async with asyncio.timeout(seconds):
            while not (answer := await condition()):  # noqa: ASYNC110 - it happens in another process
                await asyncio.sleep(0.02)
            return answer
    except TimeoutError:
        raise AssertionError(f"waited {seconds:g} s in vain: {what}") from None


class Server:
    """A running `reconciler serve`. `lines` are its log lines so far."""

    def __init__(self, process: asyncio.subprocess.Process, session: aiohttp.ClientSession) -> None:
        self.process = process
        self.session = session
        self.lines: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self.url = ""
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            text = line.decode().strip()
            try:
                self.lines.append(json.loads(text))
            except ValueError:
                self.errors.append(text)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == name]

    async def told(self, event: str) -> dict[str, Any]:
        """Wait for a log line."""

        async def there() -> list[dict[str, Any]]:
            if self.process.returncode is not None and not self.events(event):
                await self._reading
                raise AssertionError(f"ended with {self.process.returncode}: {self.lines[-3:]} {self.errors[-3:]}")
            return self.events(event)

        line: dict[str, Any] = (await until(there, f"{event} in {self.lines[-3:]} {self.errors[-3:]}"))[0]
        return line

    async def serving(self) -> Server:
        self.url = (await self.told("serving"))["urls"][0]
        return self

    async def status(self, path: str) -> int:
        """Return the status of a GET, 0 where there is no answer."""
        try:
            async with self.session.get(self.url + path) as answer:
                return answer.status
        except (aiohttp.ClientError, OSError):
            return 0

    async def becomes(self, status: int, path: str = "/readyz") -> None:
        async def there() -> bool:
            return await self.status(path) == status

        await until(there, f"{status} of {path}")

    async def deliver(self, feed: str, delivery: Delivery) -> int:
        """Return the status of a delivery, 0 where there was no answer: the provider would come again."""
        try:
            async with self.session.post(
                f"{self.url}/webhooks/{feed}", data=delivery.body, headers=dict(delivery.headers)
            ) as answer:
                await answer.read()
                return answer.status
        except (aiohttp.ClientError, OSError):
            return 0

    async def ended(self) -> int:
        """Wait for the end of the process and return its exit status."""
        async with asyncio.timeout(LIMIT):
            status = await self.process.wait()
            await self._reading
            return status

    async def stop(self) -> int:
        """Ask it to end, as Kubernetes does."""
        self.process.send_signal(signal.SIGTERM)
        return await self.ended()

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.ended()


def environment(config: Path, **settings: str) -> dict[str, str]:
    """Return the environment of a process that knows only this configuration."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RECONCILER_")}
    return {
        **ours,
        "RECONCILER_CONFIG": str(config),
        "RECONCILER_LOG__FORMAT": "json",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "XDG_DATA_HOME": str(config.parent),  # a heartbeat that stays would make other tests' databases suspect
        **settings,
    }


def write_config(folder: Path, extra: str = "") -> Path:
    """Write settings with both feeds, a free port and the embedded database in the folder."""
    feeds = "\n".join(
        f'[feeds.{name}]\nprovider = "{feed.provider}"\nsecrets = {json.dumps(list(feed.secrets))}'
        for name, feed in FEEDS.items()
    )
    config = folder / "reconciler.toml"
    config.write_text(f'[receiver]\nport = 0\n[database]\ndata_dir = "{folder / "pg"}"\n{feeds}\n{extra}')
    return config


async def start(config: Path, session: aiohttp.ClientSession, *arguments: str, **settings: str) -> Server:
    """Start a server; ask it `serving()` to know its address."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "reconciler", "serve", *arguments),
        cwd=config.parent,
        env=environment(config, **settings),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    return Server(process, session)


@asynccontextmanager
async def serving(config: Path, *arguments: str, **settings: str) -> AsyncIterator[Server]:
    """Run a server and stop it at the end, if the test has not done so."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT)) as session:
        server = await start(config, session, *arguments, **settings)
        try:
            yield await server.serving()
        finally:
            if server.process.returncode is None:
                server.process.kill()
            await server.ended()
