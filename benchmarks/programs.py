# SPDX-License-Identifier: Apache-2.0
"""The programs that benchmarks run as their users do: `reconciler serve`, and load generators."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.payloads import feeds

START_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Program:
    """A program that serves."""

    url: str
    pid: int

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rpartition(":")[2])


def feed_settings(names: Iterable[str], certificates: Path) -> str:
    """Return the settings of the feeds that `payloads` signs for."""
    known = feeds(certificates)
    return "\n".join(
        f"[feeds.{feed.name}]\nprovider = {json.dumps(feed.provider)}\nsecrets = {json.dumps(feed.secrets)}"
        + (f'\ntopics = {json.dumps(feed.topics)}\ncertificates = "{feed.certificates}"' if feed.topics else "")
        for feed in (known[name] for name in names)
    )


@asynccontextmanager
async def daemon(folder: Path, dsn: str, settings: str, *arguments: str, workers: int = 1) -> AsyncIterator[Program]:
    """Run `reconciler serve` on a database, on a free port."""
    config = folder / "reconciler.toml"
    port = 0 if workers == 1 else free_ports(workers + 1)
    database = f"[database]\ndata_dir = {json.dumps(str(folder))}"
    config.write_text(f'{database}\n[receiver]\nport = {port}\n[log]\nformat = "json"\n{settings}\n')
    command = [sys.executable, "-m", "reconciler", "--config", str(config), "serve", *arguments]
    if workers > 1:
        command += ["--workers", str(workers)]
    left = iter(range(workers))

    def address(line: str) -> str | None:
        told = json.loads(line) if line.startswith("{") else {}
        if told.get("event") != "serving" or next(left) < workers - 1:
            return None
        return f"http://127.0.0.1:{port}" if port else str(told["urls"][0])

    async with serving(command, {"RECONCILER_DATABASE__URL": dsn}, address) as program:
        yield program


def free_ports(count: int) -> int:
    """Return the first of so many ports in a row that nobody has."""
    while True:
        with ExitStack() as stack:
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            with suppress(OSError, OverflowError):
                for port in range(first + 1, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
                return int(first)


@asynccontextmanager
async def serving(
    command: list[str], variables: Mapping[str, str], address: Callable[[str], str | None]
) -> AsyncIterator[Program]:
    """Run a program until the end of the block. `address` finds in a line of its log where it serves."""
    process = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, **variables}, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE
    )
    lines = _lines(process)
    reading: asyncio.Task[None] | None = None
    try:
        url = await asyncio.wait_for(_told(lines, address), START_SECONDS)
        reading = asyncio.create_task(_read_on(lines))  # or the program would wait once the pipe is full
        yield Program(url, process.pid)
    finally:
        if process.returncode is None:
            process.terminate()
        await (reading or _read_on(lines))
        await process.wait()


async def _lines(process: Process) -> AsyncIterator[str]:
    if process.stderr is None:
        raise RuntimeError("no pipe")
    async for line in process.stderr:
        yield line.decode(errors="replace")


async def _told(lines: AsyncIterator[str], address: Callable[[str], str | None]) -> str:
    said = []
    async for line in lines:
        if url := address(line):
            return url
        said.append(line)
    raise SystemExit(f"the program did not start: {''.join(said[-5:]).strip()}")


async def _read_on(lines: AsyncIterator[str]) -> None:
    async for _ in lines:
        pass


class Load:
    """A load generator, a process of its own: it says that it is ready, waits for the word, and tells what came."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def prepared(cls, module: str, *arguments: object) -> Load:
        """Start it and wait until all that it needs is built."""
        command = [sys.executable, "-m", module, *map(str, arguments)]
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        if process.stdout is None or not await process.stdout.readline():
            raise SystemExit(f"{module} did not start")
        return cls(process)

    async def run(self) -> Any:
        """Let it go, and return what it tells in the end: JSON."""
        try:
            said, _ = await self._process.communicate(b"go\n")
        finally:
            if self._process.returncode is None:  # whoever waited for it was cancelled
                self._process.kill()
        if not said:
            raise SystemExit("the load generator ended without a word")
        return json.loads(said)
