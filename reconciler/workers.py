# SPDX-License-Identifier: Apache-2.0
"""Several receivers on one port, each a process of its own: started, started again where one dies, stopped together.

They share nothing but the port, between whose sockets the kernel spreads connections (Linux), and are to the database
what replicas are. Each tells its own figures, at the port that lies as many above the shared one as its number says.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from typing import Final

import structlog

from reconciler.errors import UserError
from reconciler.process import no_such_port, stop_on_signals, unless_stopped
from reconciler.settings import Settings

AGAIN_SECONDS: Final = 1.0
"""How long after its death a worker is started again."""

NEEDS_A_PERSON: Final = 1
"""The exit status of a worker that has said in a line why it can't run."""

_log: Final = structlog.get_logger()


class WorkersEnded(Exception):
    """A worker can't run, and has said why."""


async def serve_with_workers(settings: Settings, count: int, command: Sequence[str]) -> None:
    """Run so many receivers until SIGTERM or SIGINT; SIGHUP is passed on to each.

    `command` is one receiver's, to which `--worker` and its number are added. Raises UserError where the port can't be
    shared or had, and WorkersEnded.
    """
    _check_ports(settings, count)
    async with AsyncExitStack() as stack:
        hung_up = asyncio.Event()
        stop = stop_on_signals(stack, hung_up)
        workers = [Worker(number, [*command, "--worker", str(number)]) for number in range(1, count + 1)]
        stack.callback(asyncio.create_task(_pass_on(hung_up, workers)).cancel)
        await unless_stopped(stop, _run_all(workers))


async def _run_all(workers: Sequence[Worker]) -> None:
    running = [asyncio.create_task(worker.run()) for worker in workers]
    try:
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        raise WorkersEnded
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class Worker:
    """One receiver, whatever process it is just now."""

    def __init__(self, number: int, command: Sequence[str]) -> None:
        self._number, self._command = number, command
        self._process: Process | None = None

    async def run(self) -> None:
        """Keep it running. Returns where it ended and a person must help; cancelled, it ends what it has begun."""
        try:
            while (status := await self._run_once()) != NEEDS_A_PERSON:
                _log.error("worker_died", worker=self._number, status=status, again_in_seconds=AGAIN_SECONDS)
                await asyncio.sleep(AGAIN_SECONDS)
        finally:
            if self._process is not None:
                self.send(signal.SIGTERM)
                await self._process.wait()

    async def _run_once(self) -> int:
        # A session of its own: the terminal's Ctrl-C is for us, who pass it on once. Its standard input ends with us.
        self._process = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, start_new_session=True)
        _log.info("worker_started", worker=self._number, pid=self._process.pid)
        return await self._process.wait()

    def send(self, number: int) -> None:
        """Send a signal to the process, where it runs."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)


async def _pass_on(hung_up: asyncio.Event, workers: Sequence[Worker]) -> None:
    while await hung_up.wait():
        hung_up.clear()
        for worker in workers:
            worker.send(signal.SIGHUP)


def _check_ports(settings: Settings, count: int) -> None:
    """Raise UserError where another program has one of the ports: workers would share the first with it in silence."""
    host, port = settings.receiver.host, settings.receiver.port
    if port == 0:
        raise UserError("workers share one port: set receiver.port")
    for wanted in range(port, port + count + 1):
        try:
            socket.create_server((host, wanted), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
        except (OSError, OverflowError, UnicodeError) as error:
            raise no_such_port(host, wanted, error) from error


def stop_with_parent() -> None:
    """Let this process stop as by SIGTERM once the one that started it is gone, which its standard input's end says."""

    def read() -> None:
        if not os.read(sys.stdin.fileno(), 1):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            os.kill(os.getpid(), signal.SIGTERM)

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), read)
