# SPDX-License-Identifier: Apache-2.0
"""Workers of a campaign are killed in the middle: nobody is written to twice, and nobody is forgotten.

CAMPAIGN_RECIPIENTS=200000 is the full size (`make campaign-proof`).
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack

import asyncpg
import pytest
from campaign_kit import batch, decide_claimed, loaded, people, states, worker
from kit import claim
from serving import until

from reconciler import campaign
from reconciler.breakable.esp import Esp, esp
from reconciler.breakable.fate import Fate, Fates

pytestmark = pytest.mark.proof

RECIPIENTS = int(os.environ.get("CAMPAIGN_RECIPIENTS", "3000"))
KILLS = 5
WORKERS = 3
LIMIT = 60 + RECIPIENTS / 50


async def run(dsn: str, url: str) -> None:
    """Let workers work until nothing is given out any more."""
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(worker(dsn, url, 100, 10)) for _ in range(WORKERS)]
        async with asyncio.timeout(LIMIT):
            assert [await process.wait() for process in workers] == [0] * WORKERS


async def taken(provider: Esp, n: int) -> None:
    async def enough() -> bool:
        return provider.taken.total() >= n

    await until(enough, f"{n} messages taken", LIMIT)


async def kill_in_the_middle(dsn: str, provider: Esp) -> None:
    """Kill one of several workers again and again, each time another one takes its place."""
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(worker(dsn, provider.url, 100, 10)) for _ in range(WORKERS)]
        for n in range(1, KILLS + 1):
            await taken(provider, n * RECIPIENTS // (KILLS + 2))
            victim = workers.pop(0)
            assert victim.returncode is None, "it was in the middle of it"
            victim.kill()
            workers.append(await stack.enter_async_context(worker(dsn, provider.url, 100, 10)))
        async with asyncio.timeout(LIMIT):
            assert [await process.wait() for process in workers] == [0] * WORKERS


@pytest.mark.timeout(LIMIT * 3)
async def test_a_campaign_whose_workers_are_killed_writes_to_each_recipient_once(db: asyncpg.Pool, dsn: str) -> None:
    assert (await loaded(db, people(RECIPIENTS))).added == RECIPIENTS
    async with esp("mailgun") as provider:
        await kill_in_the_middle(dsn, provider)
        left = await states(db)
        assert 0 < left["claimed"] <= KILLS * 100, "what the dead had claimed, and nothing else"
        assert left == {"sent": RECIPIENTS - left["claimed"], "claimed": left["claimed"]}
        assert await campaign.standing(db, "spring") == "active", "claimed ones are not finished"

        lost, unsent = await decide_claimed(db, provider.taken)
        print(f"{lost} taken without an answer stored, {unsent} never submitted")  # noqa: T201 - for who wants to know
        await run(dsn, provider.url)
        assert await states(db) == {"sent": RECIPIENTS}
        assert len(provider.taken) == RECIPIENTS
        assert set(provider.taken.values()) == {1}
        assert await campaign.standing(db, "spring") == "finished"


async def test_case_063_a_killed_campaign_resumes_with_what_is_pending(db: asyncpg.Pool, dsn: str) -> None:
    await loaded(db, people(1000))
    async with esp("mailgun", fates=Fates(hangs=1)) as provider:
        provider.next_fates.extend([Fate.ANSWERED] * 424)
        async with worker(dsn, provider.url, 100, 13) as process:
            await taken(provider, 437)

            async def answers_are_stored() -> bool:
                return (await states(db)).get("sent") == 424

            await until(answers_are_stored, "the answers are stored")
            process.kill()
        assert provider.taken.total() == 437
        # Five batches were claimed: of 76 sends nobody knows here whether they were submitted, and 13 of them were.
        assert await states(db) == {"sent": 424, "claimed": 76, "pending": 500}
        provider.fates = Fates()

        for _ in range(2):
            assert await campaign.pause(db, "spring", "", "test")
            assert await batch(db) == []
            assert await campaign.resume(db, "spring", "", "test")
        await run(dsn, provider.url)
        assert await states(db) == {"sent": 924, "claimed": 76}
        assert await campaign.standing(db, "spring") == "active"
        refused = await claim(db, await db.fetchval("SELECT send_key FROM send_log WHERE state = 'claimed' LIMIT 1"))
        assert refused["outcome"] == "in_flight", "no time gives it back, only evidence"

        assert await decide_claimed(db, provider.taken) == (13, 63)
        await run(dsn, provider.url)
        assert await states(db) == {"sent": 1000}
        assert provider.taken.total() == len(provider.taken) == 1000
        assert await campaign.standing(db, "spring") == "finished"
