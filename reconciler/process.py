# SPDX-License-Identifier: Apache-2.0
"""What `serve` needs of the operating system: signals, and a port to listen on."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

from aiohttp import web

from reconciler.errors import UserError
from reconciler.settings import Settings


async def until_open(stop: asyncio.Event, opening: Coroutine[Any, Any, None]) -> None:
    """Wait until it is open, or give up opening when told to stop. Raises what opening raises."""
    opened = asyncio.create_task(opening, name="open")
    stopped = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait((opened, stopped), return_when=asyncio.FIRST_COMPLETED)
        if opened.done():
            opened.result()
    finally:
        opened.cancel()
        stopped.cancel()
        await asyncio.gather(opened, stopped, return_exceptions=True)


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


async def listen_http(runner: web.AppRunner, settings: Settings) -> list[str]:
    """Begin to answer, and return the addresses. Raises UserError where the port can't be had."""
    host, port = settings.receiver.host, settings.receiver.port
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except UnicodeError as error:
        raise UserError(f"receiver.host {host!r} is no name of a host: set receiver.host") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} on {host} is in use: stop the other program, or set receiver.port") from error
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror  # resolvers' are < 0
        raise UserError(f"port {port} on {host} can't be had ({reason}): set receiver.host or receiver.port") from error
    return [f"http://{f'[{host}]' if ':' in host else host}:{port}" for host, port, *_ in runner.addresses]
