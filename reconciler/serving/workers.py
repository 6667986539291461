# SPDX-License-Identifier: Apache-2.0
"""Several receivers on one port, each a process of its own: started, started again where one dies, stopped together.

They share nothing but the port, between whose sockets the kernel spreads connections (Linux), and are to the database
what replicas are. Each tells its own figures, at the port that lies as many above the shared one as its number says.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Final

import structlog

from reconciler.configuration.settings import Settings
from reconciler.errors import UserError
from reconciler.serving.process import no_such_port, stop_on_signals, unless_stopped

AGAIN_SECONDS: Final = 1.0
"""How long after its death a worker is started again; twice as long each time that it dies soon ..."""
MOST_AGAIN_SECONDS: Final = 30.0
"""... up to this, which is also how long one lives that does not die soon."""

NEEDS_A_PERSON: Final = 1
"""The exit status of a worker that has said in a line why it can't run."""

READ_AGAIN: Final = b"\n"
"""What a worker is told over its standard input; its end tells it to stop. No signal could be lost, or come twice."""

_log: Final = structlog.get_logger()


class WorkersEnded(Exception):
    """A worker can't run, and has said why."""


async def serve_with_workers(settings: Settings, count: int, command: Sequence[str]) -> None:
    """Run so many receivers until SIGTERM or SIGINT; at a SIGHUP each reads the settings again.

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
        """Keep it running; cancelled, let it end what it has begun. Returns where it can't run from the first."""
        loop, again, has_lived = asyncio.get_running_loop(), AGAIN_SECONDS, False
        try:
            while True:
                began = loop.time()
                status = await self._run_once()
                if loop.time() - began > MOST_AGAIN_SECONDS:
                    again, has_lived = AGAIN_SECONDS, True
                if status == NEEDS_A_PERSON and not has_lived:  # later the others go on without it
                    return
                _log.error("worker_died", worker=self._number, status=status, again_in_seconds=again)
                await asyncio.sleep(again)
                again = min(2 * again, MOST_AGAIN_SECONDS)
        finally:
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.close()
                await self._process.wait()

    async def _run_once(self) -> int | str:
        """Return its exit status, or why it could not be started."""
        try:
            # A session of its own: the terminal's Ctrl-C is for us.
            self._process = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, start_new_session=True)
        except OSError as error:
            return error.strerror or type(error).__name__
        _log.info("worker_started", worker=self._number, pid=self._process.pid)
        return await self._process.wait()

    def read_again(self) -> None:
        """Let the process read the settings again, where it runs."""
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(READ_AGAIN)


async def _pass_on(hung_up: asyncio.Event, workers: Sequence[Worker]) -> None:
    while await hung_up.wait():
        hung_up.clear()
        for worker in workers:
            worker.read_again()


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


def follow_parent(stop: asyncio.Event, hung_up: asyncio.Event) -> None:
    """Stop, and read the settings again, when the process that started this one says so, or is gone."""
    loop, told = asyncio.get_running_loop(), sys.stdin.fileno()

    def read() -> None:
        if os.read(told, 100):
            hung_up.set()
        else:
            loop.remove_reader(told)
            stop.set()

    loop.add_reader(told, read)
