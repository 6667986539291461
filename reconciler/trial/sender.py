# SPDX-License-Identifier: Apache-2.0
"""A sender to be killed: `send_once` as an application calls it, with an asyncpg pool and an aiohttp client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final
from urllib.parse import urlencode

import aiohttp
import asyncpg

from reconciler import guard
from reconciler.trial.job import Job, Steps, do

PROVIDER: Final = "mailgun"
MESSAGE: Final = {"from": "a@example.com", "to": "b@example.com", "subject": "self-test", "text": "self-test"}

BEFORE_CLAIM: Final = "before claim"
AFTER_CLAIM: Final = "after claim"
HALF_WRITTEN: Final = "half written"
ANSWERED: Final = "answered"
BEFORE_CONFIRM: Final = "before confirm"
AFTER_CONFIRM: Final = "after confirm"
BEFORE_FAIL: Final = "before fail"
AFTER_FAIL: Final = "after fail"

_STEPS: Final = {
    guard.CLAIM: (BEFORE_CLAIM, AFTER_CLAIM),
    guard.CONFIRM: (BEFORE_CONFIRM, AFTER_CONFIRM),
    guard.FAIL: (BEFORE_FAIL, AFTER_FAIL),
}


class _Watched:
    """A pool for the guard that says what it is asked for and when it has answered."""

    def __init__(self, pool: asyncpg.Pool, steps: Steps) -> None:
        self._pool, self._steps = pool, steps

    async def fetchrow(self, query: str, /, *args: Any) -> Any:
        """Run one statement of the guard."""
        before, after = _STEPS[query]
        self._steps.reached(before)
        row = await self._pool.fetchrow(query, *args)
        self._steps.reached(after)
        return row


async def send(job: Job) -> str:
    """Send one message, and return the outcome."""
    steps, own = Steps(job.stop_at), {"application_name": job.application}
    async with (
        asyncpg.create_pool(job.dsn, min_size=1, max_size=1, server_settings=own) as pool,
        aiohttp.ClientSession() as session,
    ):

        async def submit(claim: guard.Claim) -> aiohttp.ClientResponse:
            body = urlencode(claim.stamp.into(MESSAGE)).encode()
            headers = {"Content-Type": "application/x-www-form-urlencoded", "Content-Length": str(len(body))}
            timeout = aiohttp.ClientTimeout(total=claim.seconds_left())
            answer = await session.post(job.url, data=_in_halves(body, steps), headers=headers, timeout=timeout)
            steps.reached(ANSWERED)
            return answer

        sent = await guard.send_once(
            _Watched(pool, steps), job.key, job.feeds[0], submit, provider=PROVIDER, submit_within=job.submit_within
        )
    return sent.outcome


async def _in_halves(body: bytes, steps: Steps) -> AsyncIterator[bytes]:
    half = len(body) // 2
    yield body[:half]
    steps.reached(HALF_WRITTEN)
    yield body[half:]


if __name__ == "__main__":
    do(send)
