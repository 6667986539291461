# SPDX-License-Identifier: Apache-2.0
"""Law 12: a verdict names who accepted_by, by whatever road it was found out: the sender, the feed, or a look-up."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
from kit import FEED, RULES, call, claim, confirm, event, fail, make_older, reconcile, row

from reconciler import campaign

KEY = "order:1"
Step = Callable[[asyncpg.Pool], Awaitable[Any]]


async def no_row(db: asyncpg.Pool) -> None:
    pass


async def enqueued(db: asyncpg.Pool) -> None:
    await call(db, "send_enqueue", KEY, FEED, "{}")


async def expiring(db: asyncpg.Pool) -> None:
    until = await db.fetchval("SELECT clock_timestamp() + interval '1 hour'")
    await call(db, "send_enqueue", KEY, FEED, f'{{"expires_at": "{until.isoformat()}"}}')


async def claimed(db: asyncpg.Pool) -> None:
    await claim(db, KEY)


async def silent(db: asyncpg.Pool) -> None:
    await claim(db, KEY)
    await make_older(db, KEY, timedelta(hours=1))


async def failed(db: asyncpg.Pool) -> None:
    assert await fail(db, KEY, (await claim(db, KEY))["fence"], "422", not_sent=False) == "failed"


async def of_a_campaign(db: asyncpg.Pool) -> None:
    await db.execute("INSERT INTO campaign (name, feed, loaded_at) VALUES ('spring', $1, now())", FEED)
    fence = (await claim(db, KEY, campaign="spring"))["fence"]
    assert await fail(db, KEY, fence, not_sent=True) == "released"


async def claims(db: asyncpg.Pool) -> None:
    assert (await claim(db, KEY))["outcome"] == "already_sent"


async def fails(db: asyncpg.Pool) -> None:
    assert await fail(db, KEY, (await row(db, KEY))["fence"], not_sent=None) == "sent"


async def releases(db: asyncpg.Pool) -> None:
    assert (await call(db, "operator_release", KEY, "note", "ann"))["outcome"] == "sent"


async def calls_it_failed(db: asyncpg.Pool) -> None:
    assert (await call(db, "operator_decide", KEY, "failed", "note", "ann"))["outcome"] == "sent"


async def cancels(db: asyncpg.Pool) -> None:
    assert await campaign.cancel(db, "spring", "wrong list", "ann")


ROADS: dict[str, tuple[Step, Step]] = {
    "a first claim": (no_row, claims),
    "a claim": (enqueued, claims),
    "a sender's failure": (claimed, fails),
    "an operator's release": (silent, releases),
    "an operator's failure": (silent, calls_it_failed),
    "the cancel of a campaign": (of_a_campaign, cancels),
    "a pass over a claim": (claimed, reconcile),
    "a pass over a pending row": (expiring, reconcile),
    "a pass over a failure": (failed, reconcile),
}
"""How a send comes to be undecided, and who then finds out that it was accepted."""

SPOKEN = {
    "sender": ("sender",),
    "look-up": ("look-up",),
    "feed": ("http",),
    "both": ("look-up", "http"),
    "all": ("sender", "look-up", "replay"),
}


@asynccontextmanager
async def accepted_by(db: asyncpg.Pool, sources: tuple[str, ...]) -> AsyncIterator[None]:
    """Let a send be accepted by these words, of which nobody could know yet within the block.

    A sender's answer that finds no row, since it was written before the answer was committed, moves none.
    """
    async with db.acquire() as sender:
        transaction = sender.transaction()
        await transaction.start()
        if "sender" in sources:
            assert await confirm(sender, KEY, 7) == "unknown_key"
        yield
        await transaction.commit()
    for source in sources:
        if source != "sender":
            await event(db, KEY, message_id=f"m-{source}", source=source)


async def last_verdict(db: asyncpg.Pool) -> tuple[str, str]:
    found = await db.fetchrow("SELECT action, source FROM verdict WHERE wire_key = wire_key($1) ORDER BY id DESC", KEY)
    return found["action"], found["source"]


@pytest.mark.parametrize(
    ("by", "source"), [(name, name if name in ("sender", "look-up") else "feed") for name in SPOKEN]
)
@pytest.mark.parametrize("road", ROADS)
async def test_a_send_that_turns_out_accepted_says_by_whose_word(
    db: asyncpg.Pool, road: str, by: str, source: str
) -> None:
    undecided, finds_out = ROADS[road]
    async with accepted_by(db, SPOKEN[by]):
        await undecided(db)
    await finds_out(db)
    found = await row(db, KEY)
    assert (found["state"], found["verdict_source"], found["verdict_reason"]) == ("sent", source, "accepted")
    assert await last_verdict(db) == ("sent", source)


@pytest.mark.parametrize("road", ["a claim", "a sender's failure", "a pass over a claim", "a pass over a failure"])
async def test_a_word_that_proves_nothing_is_no_source(db: asyncpg.Pool, road: str) -> None:
    undecided, finds_out = ROADS[road]
    await undecided(db)
    await event(db, KEY, "none", kind="queued", message_id="m-0")
    await event(db, KEY, source="look-up")
    await finds_out(db)
    assert (await row(db, KEY))["verdict_source"] == "look-up"
    assert await last_verdict(db) == ("sent", "look-up")


@pytest.mark.parametrize("taken", [True, False])
async def test_what_one_says_was_taken_and_another_refused_is_settled_by_whom_it_follows(
    db: asyncpg.Pool, taken: bool
) -> None:
    await claimed(db)
    await event(db, KEY, "rejected", kind="rejected", source="look-up", message_id="m-0")
    await event(db, KEY, "accepted" if taken else "none", kind="queued")
    await reconcile(db)
    found = await row(db, KEY)
    wanted = ("sent", "feed") if taken else ("failed", "look-up")
    assert (found["state"], found["verdict_source"]) == wanted
    assert await last_verdict(db) == wanted


@pytest.mark.parametrize(("by", "source"), [(("look-up",), "look-up"), (("http", "look-up"), "feed")])
async def test_a_rejection_of_one_of_two_attempts_that_ends_a_send_says_by_whose_word(
    db: asyncpg.Pool, by: tuple[str, ...], source: str
) -> None:
    await silent(db)
    assert (await call(db, "operator_release", KEY, "note", "ann"))["outcome"] == "released"
    await claim(db, KEY)
    await make_older(db, KEY, timedelta(hours=30))
    for who in by:
        await event(db, KEY, "rejected", kind="rejected", message_id=f"m-{who}", source=who)
    await reconcile(db, replace(RULES, give_up_after=timedelta(hours=1)))
    found = await row(db, KEY)
    assert (found["state"], found["verdict_reason"], found["verdict_source"]) == ("failed", "rejected", source)
    assert await last_verdict(db) == ("failed", source)
