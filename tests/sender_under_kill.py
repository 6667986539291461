# SPDX-License-Identifier: Apache-2.0
"""Sends one message by `send_once` and kills itself at a step of it: DSN URL FIRST. Prints how many steps there were.

A step is each line that runs, each return and each suspension of an `await`, in the files of the guard. One process a
step, several at once; the last process is the first that lives to the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from types import FrameType
from typing import Any

import aiohttp
import asyncpg

from reconciler import guard
from reconciler.sending import claims

FILES = {module.__file__ for module in (guard, claims)}
AT_ONCE = 8
SUBMIT_WITHIN = 0.4
ALIVE = 42


async def send(executor: guard.Executor, session: aiohttp.ClientSession, url: str, key: str) -> guard.Sent:
    async def submit(claim: guard.Claim) -> aiohttp.ClientResponse:
        return await session.post(url, data=claim.stamp.into({"to": "ada@example.com", "text": "hello"}))

    return await guard.send_once(executor, key, "mg", submit, provider="mailgun", submit_within=SUBMIT_WITHIN)


async def send_alone(dsn: str, url: str, key: str) -> guard.Sent:
    connection = await asyncpg.connect(dsn)
    async with aiohttp.ClientSession() as session:
        try:
            return await send(connection, session, url, key)
        finally:
            await connection.close()


def kill_at(step: int) -> None:
    """Let this process die at a step of the guard, counted from the call of send_once."""
    left = step

    def within(_frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal left
        if event in ("line", "return"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return within

    def called(frame: FrameType, _event: str, _arg: Any) -> Any:
        return within if frame.f_code.co_filename in FILES else None

    sys.settrace(called)


def child(dsn: str, url: str, step: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    kill_at(step)
    sent = asyncio.run(send_alone(dsn, url, f"kill:{step}"))
    os._exit(ALIVE if sent.outcome == "waiting" else 1)


def main(dsn: str, url: str) -> None:
    step, kills, alive = 0, 0, 0
    running: dict[int, int] = {}
    while not alive or running:
        while not alive and len(running) < AT_ONCE:
            step += 1
            running[child(dsn, url, step)] = step
        pid, status = os.wait()
        reached = running.pop(pid)
        if os.WIFSIGNALED(status):
            kills += 1
        elif os.WEXITSTATUS(status) == ALIVE:
            alive += 1
        else:
            sys.exit(f"step {reached}: status {status}")
    sys.stdout.write(json.dumps({"kills": kills, "alive": alive}))


if __name__ == "__main__":
    main(*sys.argv[1:])
