# SPDX-License-Identifier: Apache-2.0
"""A sender is killed (SIGKILL) or frozen at each step of `send_once`, and another one tries the same send again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

from reconciler.breakable.fate import Fate
from reconciler.trial.backends import gone
from reconciler.trial.outcome import Count
from reconciler.trial.promise import Promise
from reconciler.trial.sender import (
    AFTER_CLAIM,
    AFTER_CONFIRM,
    ANSWERED,
    BEFORE_CLAIM,
    BEFORE_CONFIRM,
    BEFORE_FAIL,
    HALF_WRITTEN,
)
from reconciler.trial.stage import LOCK_ROW, SAME_ROW, UNHURRIED, Stage

SHORT: Final = 1.0
"""Seconds to submit of a sender that is frozen for longer."""

Kill = Callable[[Stage, str], Awaitable[None]]


async def _kill_at(step: str, stage: Stage, key: str) -> None:
    async with stage.sender(key, step) as sender:
        await sender.reached(step)
        await sender.kill()


async def _kill_while_claiming(stage: Stage, key: str) -> None:
    async with stage.sender(key) as sender:
        async with stage.holding(SAME_ROW, key, stage.feed) as holder:
            pid = await stage.waiter(holder)
            await sender.kill()
        await gone(stage.pool, stage.application, pid)


async def _kill_while_the_provider_has_it(stage: Stage, key: str) -> None:
    stage.provider.next_fates.append(Fate.HANGS)
    async with stage.sender(key) as sender:
        await stage.until_taken(key)
        await sender.kill()


async def _kill_while_confirming(stage: Stage, key: str) -> None:
    async with stage.sender(key, BEFORE_CONFIRM, submit_within=UNHURRIED) as sender:
        await sender.reached(BEFORE_CONFIRM)
        async with stage.holding(LOCK_ROW, key) as holder:
            sender.go_on()
            pid = await stage.waiter(holder)
            await sender.kill()
        await gone(stage.pool, stage.application, pid)


async def _kill_after_a_reset(stage: Stage, key: str) -> None:
    stage.provider.next_fates.append(Fate.RESET)
    await _kill_at(BEFORE_FAIL, stage, key)


async def _killed(kill: Kill, stage: Stage) -> Sequence[Count]:
    key = stage.key()
    await kill(stage, key)
    asked = [await stage.send(key)]
    await stage.tell(key)
    await stage.decide(key)
    asked.append(await stage.send(key))
    return [*await stage.sent_once(key), Count("asked again", ", ".join(asked))]


async def _frozen_before_it_submits(stage: Stage) -> Sequence[Count]:
    key = stage.key()
    async with stage.sender(key, AFTER_CLAIM, submit_within=SHORT) as sender:
        await sender.reached(AFTER_CLAIM)
        await stage.decide(key)
        another = await stage.send(key)
        sender.go_on()
        ended = await sender.ended()
    return [*await stage.sent_once(key), Count("another's", another, "sent"), Count("its own", ended)]


async def _frozen_with_the_answer(stage: Stage) -> Sequence[Count]:
    key = stage.key()
    async with stage.sender(key, BEFORE_CONFIRM, submit_within=SHORT) as sender:
        await sender.reached(BEFORE_CONFIRM)
        await stage.decide(key)
        released = (await stage.row(key))["state"]
        sender.go_on()
        ended = await sender.ended()
    another = await stage.send(key)
    counts = [Count("meanwhile", released, "pending"), Count("its own", ended, "sent_late")]
    return [*await stage.sent_once(key), *counts, Count("another's", another, "already_sent")]


CROWD: Final = 40


async def _two_claims(stage: Stage) -> Sequence[Count]:
    key = stage.key()
    claims = await asyncio.gather(*(stage.claim(key) for _ in range(CROWD)))
    outcomes = Counter(claim.outcome for claim in claims)
    return [
        Count("asked", CROWD),
        Count("given", outcomes["claimed"], 1),
        Count("refused as in_flight", outcomes["in_flight"], CROWD - 1),
    ]


_KILLS: Final[Sequence[tuple[str, str, Kill]]] = (
    ("before-claim", "before it asks for the claim", partial(_kill_at, BEFORE_CLAIM)),
    ("claiming", "while its claim is being stored", _kill_while_claiming),
    ("claimed", "with the claim in hand", partial(_kill_at, AFTER_CLAIM)),
    ("writing", "half-way through its request", partial(_kill_at, HALF_WRITTEN)),
    ("taken", "after the provider took the message", _kill_while_the_provider_has_it),
    ("answered", "when the answer has come", partial(_kill_at, ANSWERED)),
    ("confirming", "while the answer is being stored", _kill_while_confirming),
    ("confirmed", "after the answer was stored", partial(_kill_at, AFTER_CONFIRM)),
    ("reset", "after a call that broke off", _kill_after_a_reset),
)

PROMISES: Final = (
    *(
        Promise(f"killed-{name}", f"a sender killed {when}: sent once", partial(_killed, kill))
        for name, when, kill in _KILLS
    ),
    Promise("frozen-claimed", "a sender frozen until its time was over submits nothing", _frozen_before_it_submits),
    Promise("frozen-answered", "an answer that comes after the release still counts", _frozen_with_the_answer),
    Promise("crowd", "many claims of one key at once: one is given", _two_claims),
)
