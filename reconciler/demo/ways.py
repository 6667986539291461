# SPDX-License-Identifier: Apache-2.0
"""Three senders: one retries what it has no answer to, one never does, and one asks the reconciler."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import aiohttp

from reconciler import guard
from reconciler.demo.stand import FEED, PROVIDER
from webhooks.database import BoundedPool

PATIENCE: Final = 1.0
"""Seconds after which each sender gives up a call."""

CALM: Final = 20
"""Messages at the beginning, and at the end, whose calls are all answered: silence is judged between such sends."""

TRIES: Final = 3
"""Calls that the naive sender makes at most for one message."""

PAUSE: Final = 0.25
"""Seconds between two questions of the worker that sends what was released."""

AT_ONCE: Final = 10
NO_ANSWER: Final = 500
"""From this status on the provider says nothing of whether it took the message."""

Post = Callable[[guard.Claim], Awaitable[aiohttp.ClientResponse]]


def key_of(n: int) -> str:
    """Return the send key of a message, the same in all three ways. Its wire key is the same text."""
    return f"message-{n}"


class Caller:
    """One sender's client of the provider. It counts its calls, and what they ended with."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url
        self.calls = 0
        self.through: set[str] = set()
        """Keys of the messages whose sender has done with them what it does at once."""
        self.unclear: set[str] = set()
        """Keys of the messages whose first call had no answer."""

    async def post(self, form: Mapping[str, str], seconds: float) -> aiohttp.ClientResponse:
        """Make one call."""
        self.calls += 1
        timeout = aiohttp.ClientTimeout(total=seconds)
        return await self._session.post(self._url, data=form, timeout=timeout)


async def naive_retry(caller: Caller, key: str) -> None:
    """Send a message as most retry decorators do: again where there was no answer."""
    for _ in range(TRIES):
        if await _answered(caller, key):
            break
    caller.through.add(key)


async def never_retry(caller: Caller, key: str) -> None:
    """Send a message once, whatever becomes of the call."""
    if not await _answered(caller, key):
        caller.unclear.add(key)
    caller.through.add(key)


async def _answered(caller: Caller, key: str) -> bool:
    form = guard.stamp(PROVIDER, key).into(message(key))  # by its key the provider counts
    try:
        async with await caller.post(form, PATIENCE) as answer:
            return answer.status < NO_ANSWER
    except (aiohttp.ClientError, TimeoutError):
        return False


def message(key: str) -> dict[str, str]:
    """Return the message of a key, as it is posted."""
    return {"from": "shop@example.com", "to": f"{key}@example.com", "subject": "Receipt", "text": "Thank you."}


async def reconciled(pool: BoundedPool, caller: Caller, key: str) -> None:
    """Send a message with `send_once`: what has no answer stays claimed, and the passes decide."""
    await guard.send_once(
        pool, key, FEED, _submit(caller), provider=PROVIDER, submit_within=PATIENCE, recipient=message(key)["to"]
    )
    caller.through.add(key)


async def send_released(pool: BoundedPool, caller: Caller) -> None:
    """Send what was released, for ever: the worker that docs/sending.md speaks of."""
    submit = _submit(caller)
    while True:
        free = await guard.claim_released(pool, FEED, AT_ONCE, provider=PROVIDER, submit_within=PATIENCE)
        await asyncio.gather(*(guard.submit_claimed(pool, released.claim, submit) for released in free))
        await asyncio.sleep(PAUSE)


def _submit(caller: Caller) -> Post:
    async def submit(claim: guard.Claim) -> aiohttp.ClientResponse:
        form = claim.stamp.into(message(claim.send_key))
        return await caller.post(form, claim.seconds_left())

    return submit
