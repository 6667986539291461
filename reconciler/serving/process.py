# SPDX-License-Identifier: Apache-2.0
"""What `serve` needs of the operating system: signals, and a port to listen on."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any, cast

from aiohttp import web

from reconciler.configuration.settings import Settings
from reconciler.errors import UserError


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Wait until the work is done, or cancel it when told to stop. Raises what the work raises."""
    done = asyncio.create_task(work, name="work")
    stopped = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait((done, stopped), return_when=asyncio.FIRST_COMPLETED)
        if done.done():
            done.result()
    finally:
        done.cancel()
        stopped.cancel()
        await asyncio.gather(done, stopped, return_exceptions=True)


def stop_on_signals(stack: AsyncExitStack, hung_up: asyncio.Event | None = None) -> asyncio.Event:
    """Return what the first signal sets. The handlers are Python's own: they run while something blocks the loop.

    A hang-up sets `hung_up` instead, where there is one, unless it says that our terminal was closed.
    """
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    signals: list[int] = []
    had_terminal = _has_terminal()

    def heard(number: int, _frame: object) -> None:
        if number == signal.SIGHUP and hung_up and (_has_terminal() or not had_terminal):
            loop.call_soon_threadsafe(hung_up.set)
            return
        signals.append(number)
        if len(signals) > 1:
            os._exit(128 + number)
        loop.call_soon_threadsafe(stop.set)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
            stack.callback(signal.signal, number, signal.signal(number, heard))
    return stop


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


async def take_ports(
    stack: AsyncExitStack, runner: web.AppRunner, settings: Settings, worker: int = 0
) -> list[asyncio.Server]:
    """Return what has our ports until the stack is left, and refuses connections until it is told to serve.

    A worker, which has a number, shares the port with others, and is reached alone at the one that is so many higher.
    Raises UserError where a port can't be had.
    """
    host, port = settings.receiver.host, settings.receiver.port
    await runner.setup()
    servers = []
    for at, shared in ((port, True), (port + worker, False)) if worker else ((port, False),):
        try:
            server = await asyncio.get_running_loop().create_server(
                cast("web.Server", runner.server), host, at, backlog=128, reuse_port=shared, start_serving=False
            )
        except (OSError, UnicodeError) as error:
            raise no_such_port(host, at, error) from error
        stack.callback(server.close)
        servers.append(server)
    return servers


async def begin_to_answer(servers: Sequence[asyncio.Server]) -> None:
    """Listen. Raises UserError where another program was faster: until somebody listens a port can be had twice."""
    for server in servers:
        host, port, *_ = server.sockets[0].getsockname()
        try:
            await server.start_serving()
        except OSError as error:
            raise no_such_port(host, port, error) from error


def urls_of(servers: Sequence[asyncio.Server]) -> list[str]:
    """Return the addresses at which they are reached."""
    places = [socket.getsockname() for server in servers for socket in server.sockets]
    return [f"http://{f'[{host}]' if ':' in host else host}:{port}" for host, port, *_ in places]


def no_such_port(host: str, port: int, error: OSError | OverflowError | UnicodeError) -> UserError:
    """Return the line that says why a port can't be listened on."""
    if isinstance(error, UnicodeError):
        return UserError(f"receiver.host {host!r} is no name of a host: set receiver.host")
    if not isinstance(error, OSError):
        return UserError(f"there is no port {port}: set receiver.port")
    if error.errno == errno.EADDRINUSE:
        return UserError(f"port {port} on {host} is in use: stop the other program, or set receiver.port")
    reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror  # resolvers' are < 0
    return UserError(f"port {port} on {host} can't be had ({reason}): set receiver.host or receiver.port")
