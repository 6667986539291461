# SPDX-License-Identifier: Apache-2.0
"""Puts all promises to the test, several at a time, in one scratch schema."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import aiohttp

from reconciler import composition
from reconciler.breakable import esp
from reconciler.trial import crashes, orders, restarts
from reconciler.trial.job import Job
from reconciler.trial.outcome import NotTried, Result, Tried
from reconciler.trial.passing import policies
from reconciler.trial.processes import working
from reconciler.trial.promise import Promise
from reconciler.trial.receiving import SERVING
from reconciler.trial.scratch import Scratch
from reconciler.trial.sender import PROVIDER
from reconciler.trial.stage import Ground, Stage

PROMISES: Final[Sequence[Promise]] = (*crashes.PROMISES, *orders.PROMISES, *restarts.PROMISES)
AT_ONCE: Final = 4
"""Promises that are tried side by side: most of the time each waits for a process to start, or for a claim to age."""

CONNECTIONS: Final = 8
LONGEST: Final = 75.0
"""Seconds that one promise may take."""


async def try_promises(scratch: Scratch, promises: Sequence[Promise] = PROMISES) -> list[Tried]:
    """Put promises to the test, and return what became of each, in their order."""
    free = asyncio.Semaphore(AT_ONCE)
    async with _ground(scratch, [promise.name for promise in promises]) as ground:

        async def one(promise: Promise) -> Tried:
            async with free:
                return await _tried(ground, promise)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(promise)) for promise in promises]
    return [task.result() for task in tasks]


@asynccontextmanager
async def _ground(scratch: Scratch, feeds: list[str]) -> AsyncIterator[Ground]:
    secret = secrets.token_hex(16)
    receive = Job(scratch.dsn, f"{scratch.name} receiver", feeds, secret=secret)
    async with AsyncExitStack() as stack:
        pool = await composition.open_pool(scratch.dsn, size=CONNECTIONS, application=scratch.name)
        stack.push_async_callback(composition.close_pool, pool)
        session = await stack.enter_async_context(aiohttp.ClientSession(trust_env=False))
        receiver = await stack.enter_async_context(working("receiving", receive))
        url = (await receiver.reached(SERVING))["url"]
        yield Ground(scratch, pool, session, policies(), secret, url)


async def _tried(ground: Ground, promise: Promise) -> Tried:
    began = time.monotonic()
    try:
        async with asyncio.timeout(LONGEST), esp(PROVIDER) as provider:
            counted = await promise.attempt(Stage(ground, promise.name, provider))
    except NotTried as error:
        return _not_tried(promise, str(error), began)
    except TimeoutError:
        return _not_tried(promise, f"it took more than {LONGEST:g} s, or the database did not answer", began)
    except Exception as error:  # noqa: BLE001 - whatever it is: it is no pass, and the others are to be tried
        first_line, *_ = str(error).splitlines() or [""]
        return _not_tried(promise, f"{type(error).__name__}: {first_line}", began)
    result: Result = "kept" if all(count.holds for count in counted) else "broken"
    return Tried(promise.name, promise.words, result, counted, None, time.monotonic() - began)


def _not_tried(promise: Promise, reason: str, began: float) -> Tried:
    return Tried(promise.name, promise.words, "not tried", [], reason, time.monotonic() - began)
