# SPDX-License-Identifier: Apache-2.0
"""What the provider says arrives in bad orders: early, twice, reversed, contradictory, for nobody, uncommitted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from reconciler.trial.outcome import Count
from reconciler.trial.promise import Promise
from reconciler.trial.sender import AFTER_CLAIM, BEFORE_CONFIRM
from reconciler.trial.stage import LOCK_ROW, STORED, UNHURRIED, Stage


async def _before_the_answer(stage: Stage) -> Sequence[Count]:
    key = stage.key()
    async with stage.sender(key, BEFORE_CONFIRM, submit_within=UNHURRIED) as sender:
        await sender.reached(BEFORE_CONFIRM)
        await stage.tell(key)
        await stage.decide(key)
        meanwhile, another = (await stage.row(key))["state"], await stage.send(key)
        sender.go_on()
        ended = await sender.ended()
    counts = [Count("before the answer", meanwhile, "sent"), Count("another's", another, "already_sent")]
    return [*await stage.sent_once(key), *counts, Count("its own", ended, "sent")]


async def _twice(stage: Stage) -> Sequence[Count]:
    delivery = stage.event("delivered", stage.key())
    at_once = await asyncio.gather(*(stage.deliver(delivery) for _ in range(5)))
    acknowledged = [*at_once, await stage.deliver(delivery)].count(STORED)
    return [Count("delivered", 6), Count("acknowledged", acknowledged, 6), Count("stored", await stage.stored(), 1)]


async def _ends_as(stage: Stage, key: str, *kinds: str) -> str:
    """Claim a send, let the provider say these things of it one after the other, and return how it stands."""
    await stage.claim(key)
    for kind in kinds:
        await stage.deliver_until_taken(stage.event(kind, key))
        await stage.decide(key)
    row = await stage.row(key)
    return f"{row['state']} ({row['delivery']})"


async def _reversed(stage: Stage) -> Sequence[Count]:
    in_order = await _ends_as(stage, stage.key(1), "accepted", "delivered")
    reverse = await _ends_as(stage, stage.key(2), "delivered", "accepted")
    return [Count("in order", in_order, "sent (delivered)"), Count("reversed", reverse, "sent (delivered)")]


async def _rejected_afterwards(stage: Stage) -> Sequence[Count]:
    key = stage.key()
    await _ends_as(stage, key, "accepted", "rejected")
    return [Count("state", (await stage.row(key))["state"], "sent"), *await _not_given_out(stage, key)]


async def _accepted_afterwards(stage: Stage) -> Sequence[Count]:
    key = stage.key()
    await _ends_as(stage, key, "rejected")
    before = (await stage.row(key))["state"]
    await stage.deliver_until_taken(stage.event("delivered", key))
    await stage.decide(key)
    counts = [Count("at first", before, "failed"), Count("then", (await stage.row(key))["state"], "sent")]
    return [*counts, *await _not_given_out(stage, key)]


async def _for_nobody(stage: Stage) -> Sequence[Count]:
    key = stage.key()
    status = await stage.deliver(stage.event("accepted", key))
    counts = [Count("answer", status, STORED), Count("stored", await stage.stored(), 1)]
    return [*counts, *await _not_given_out(stage, key)]


async def _not_given_out(stage: Stage, key: str) -> Sequence[Count]:
    """Ask for a send that the provider is known to have."""
    asked = await stage.send(key)
    return [Count("asked again", asked, "already_sent"), Count("taken again", stage.provider.taken[key], 0)]


async def _while_a_claim_waits(stage: Stage) -> Sequence[Count]:
    key = stage.key()
    await stage.enqueue(key)
    async with stage.sender(key) as sender:
        async with stage.holding(LOCK_ROW, key) as holder:
            await stage.waiter(holder)
            await stage.deliver_until_taken(stage.event("accepted", key))
        ended = await sender.ended()
    return [Count("answer to the claim", ended, "already_sent"), Count("taken again", stage.provider.taken[key], 0)]


STORE_EVENT: Final = """
INSERT INTO provider_event (feed, message_id, event_id, partition_at, occurred_at, wire_key, kind, testimony, source)
VALUES ($1, $2, $2, event_partition_at(clock_timestamp()), clock_timestamp(), $2, 'queued', 'accepted', 'http')
"""


async def _uncommitted(stage: Stage) -> Sequence[Count]:
    key = stage.key()
    async with stage.pool.acquire() as connection, connection.transaction():
        await connection.execute(STORE_EVENT, stage.feed, key)
        async with stage.sender(key, AFTER_CLAIM) as sender:
            await sender.reached(AFTER_CLAIM)
            await sender.kill()
    await stage.decide(key)
    return [Count("state", (await stage.row(key))["state"], "sent"), *await _not_given_out(stage, key)]


PROMISES: Final = (
    Promise("early", "evidence before the answer wins, the answer changes nothing", _before_the_answer),
    Promise("twice", "an event that is delivered again and again is stored once", _twice),
    Promise("reversed", "events in reverse order end as in order", _reversed),
    Promise("rejected-after", "a rejection after the acceptance takes nothing back", _rejected_afterwards),
    Promise("accepted-after", "an acceptance after the rejection corrects it", _accepted_afterwards),
    Promise("nobodys", "an event of a send unknown here: kept, and never given out", _for_nobody),
    Promise("claim-waits", "evidence stored while a claim waits: not given out", _while_a_claim_waits),
    Promise("uncommitted", "evidence that commits after a claim: found, and not sent again", _uncommitted),
)
