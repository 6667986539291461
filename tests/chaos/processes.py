# SPDX-License-Identifier: Apache-2.0
"""Runs our processes and PostgreSQL as a machine does: whatever ends is started again, and nothing else is done."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
from serving import ROOT, Server, free_port, start

from reconciler.database.postgres import EmbeddedPostgres
from reconciler.errors import DatabaseUnavailable
from webhooks.database import FAILURES

from .jobs import Jobs

PATIENCE = 120.0
"""Seconds after which what does not recover is given up."""
PAUSE = 0.2
"""Seconds until what ended is started again."""
STOP_SECONDS = 40.0
"""Longest orderly stop: 30 s are Kubernetes' limit, the rest is for a busy machine."""


class Service:
    """`reconciler serve` on a port of its own. `settings` are those of its next start."""

    def __init__(
        self, config: Path, session: aiohttp.ClientSession, *arguments: str, settings: Mapping[str, str]
    ) -> None:
        self.settings = dict(settings)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.unasked: list[str] = []
        """Ends that nobody asked for, and what it wrote that is no line of its log."""
        self._config, self._session, self._arguments = config, session, arguments
        self._server: Server | None = None
        self._ends = self._over = False

    def twin(self, **settings: str) -> Service:
        """Return another one like it, on another port."""
        return Service(self._config, self._session, *self._arguments, settings=self.settings | settings)

    async def run(self) -> None:
        """Keep it running, until it was stopped or this is cancelled."""
        try:
            while not self._over:
                await self._run_once()
                await asyncio.sleep(PAUSE)
        finally:
            if self._server is not None and self._server.process.returncode is None:
                self._server.process.kill()
                await self._server.ended()

    async def _run_once(self) -> None:
        port = {"RECONCILER_RECEIVER__PORT": str(self.port)}
        self._server = server = await start(self._config, self._session, *self._arguments, **self.settings, **port)
        server.url = self.url
        status = await server.process.wait()
        await server.ended()
        if not self._ends:
            self.unasked.append(f"ended with {status}: {' '.join(server.errors[-1:])}")
        self.unasked += server.errors
        self._ends = False

    def kill(self) -> None:
        """End it without a word."""
        if self._server is not None and self._server.process.returncode is None:
            self._ends = True
            self._server.process.kill()

    async def restart(self, **settings: str) -> None:
        """Stop it in good order, so that it starts anew with other settings."""
        self.settings |= settings
        await self._stop()

    async def stop(self) -> None:
        """Stop it in good order, for good."""
        self._over = True
        await self._stop()

    async def _stop(self) -> None:
        server = self._server
        assert server is not None
        self._ends = True
        server.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(STOP_SECONDS):
            status = await server.process.wait()
        if status:
            self.unasked.append(f"a stop ended with {status}")

    async def ready(self) -> bool:
        """Say whether `/readyz` answers 200."""
        return self._server is not None and await self._server.status("/readyz") == 200


class Sender:
    """A worker process that sends jobs; what it was killed with is given back to the queue."""

    def __init__(self, jobs: Jobs, dsn: str, *, program: Path = ROOT, pooled: bool = False) -> None:
        self.dsn, self.program, self.pooled = dsn, program, pooled
        self.unasked: list[str] = []
        """Ends that nobody asked for."""
        self._jobs = jobs
        self._held: dict[str, dict[str, Any]] = {}
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Keep it running, until this is cancelled."""
        try:
            while True:
                await self._run_once()
                await asyncio.sleep(PAUSE)
        finally:
            self.kill()
            if self._process is not None:
                await self._process.wait()

    async def _run_once(self) -> None:
        script = str(Path(__file__).with_name("sender.py"))
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, script, self.dsn, *(["pooled"] if self.pooled else [])),
            env={**os.environ, "PYTHONPATH": str(self.program)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what becomes of tasks of asyncpg's own that nobody awaits
        )
        giving = asyncio.create_task(self._give(process))
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                answer = json.loads(line)
                self._jobs.answered(self._held.pop(answer["key"]), answer["outcome"])
            if (status := await process.wait()) != -signal.SIGKILL:
                self.unasked.append(f"a sender ended with {status}")
        finally:
            giving.cancel()
            await asyncio.gather(giving, return_exceptions=True)
            self._jobs.give_back(self._held.values())
            self._held = {}

    async def _give(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        with suppress(OSError):
            while True:
                await self._jobs.room(self._held)
                job = await self._jobs.take()
                self._held[job["key"]] = job
                process.stdin.write(json.dumps(job).encode() + b"\n")
                await process.stdin.drain()

    def kill(self) -> None:
        """End it without a word: whatever it was at is left so."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()


class Postgres:
    """An embedded PostgreSQL that is started again whenever it is gone."""

    def __init__(self, root: Path) -> None:
        self.embedded = EmbeddedPostgres(root)
        self.refused = 0
        """Starts that failed."""
        self._socket = Path(self.embedded.dsn().partition("host=")[2].partition("&")[0])
        self._stopping = asyncio.Event()

    @property
    def socket(self) -> Path:
        """Where it listens."""
        return self._socket / ".s.PGSQL.5432"

    @property
    def dsn(self) -> str:
        """Its URL, past every proxy."""
        return self.embedded.dsn()

    async def run(self) -> None:
        """Keep it running until `stop`."""
        while not self._stopping.is_set():
            try:
                await asyncio.to_thread(self.embedded.start)
            except DatabaseUnavailable:
                self.refused += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), PAUSE)

    def stop(self) -> None:
        """Let `run` return."""
        self._stopping.set()

    def kill(self) -> None:
        """Kill its first process, on which all others end."""
        with suppress(OSError, ValueError, IndexError):
            os.kill(int((self.embedded.data / "postmaster.pid").read_text().split()[0]), signal.SIGKILL)

    async def ask(self, query: str, *args: object) -> list[Any]:
        """Return the rows of a query, asked past every proxy; waits for a database that is away.

        Raises AssertionError where it is away for too long.
        """
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            with suppress(*FAILURES):
                connection = await asyncpg.connect(self.dsn, timeout=5)
                try:
                    return await connection.fetch(query, *args, timeout=30)
                finally:
                    connection.terminate()
            await asyncio.sleep(0.05)
        raise AssertionError(f"PostgreSQL did not answer within {PATIENCE:g} s: {query}")
