# SPDX-License-Identifier: Apache-2.0
"""What must be true whatever happened, asked of the database past every proxy, and of what the providers took."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from calibration.judge import p_value
from serving import ROOT, until

from reconciler.breakable import Fates

from .building import command
from .jobs import BAD
from .world import World

SAID = {"queued": "accepted", "sent": "accepted", "delivered": "delivered"}
"""What a provider said, by the kind that is stored."""
HONEST = 0.001
"""How unlikely so many duplicates of releases on silence may be, by the risks that these state."""
SECOND_LOOK = 2.0
"""Seconds after the grace in which a pass must have looked at a claim."""
DONE_SECONDS = 120.0
"""How long anything of the end is waited for."""

STORED = """
SELECT wire_key, kind, count(*) AS n FROM provider_event
WHERE feed = $1 AND source = 'http' AND wire_key = ANY ($2) GROUP BY wire_key, kind
"""
UNDECIDED = """
SELECT count(*) AS n FROM send_log
WHERE state = 'claimed' AND held_reason IS NULL AND submit_by + $1 * interval '1 second' < clock_timestamp()
"""
STANDING = """
SELECT CASE WHEN held_reason IS NOT NULL THEN 'held: ' || held_reason
            WHEN release_basis IS NOT NULL THEN 'released: ' || release_basis ELSE state END AS standing, count(*) AS n
FROM send_log GROUP BY 1 ORDER BY 2 DESC
"""
LOOK_NOW = "UPDATE send_log SET next_check_at = clock_timestamp() WHERE state = 'claimed'"
RELEASED = "SELECT wire_key, fence, reason, risk FROM verdict WHERE action = 'released'"
GIVEN_OUT_OVER_EVIDENCE = """
SELECT count(*) AS n FROM (
    SELECT wire_key, claimed_at FROM send_log WHERE attempt > 1
    UNION ALL
    SELECT wire_key, claimed_at FROM verdict WHERE action = 'released' AND attempt > 1) AS c
WHERE EXISTS (SELECT FROM provider_event e WHERE e.wire_key = c.wire_key AND e.testimony = 'accepted'
              AND e.received_at < c.claimed_at - interval '15 seconds')
"""
STOPPED = "SELECT feed, reason FROM feed_state WHERE num_nonnulls(paused_at, breaker_at, suspect_at) > 0"


@dataclass(frozen=True)
class Kept:
    """A promise, what was counted for it, and whether it was kept."""

    promise: str
    counted: str
    kept: bool


class Acknowledged:
    """What providers were told is stored. Only what was not found stored before is looked for again."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.found: set[tuple[str, str, str]] = set()
        self.lost: set[tuple[str, str, str]] = set()

    async def check(self) -> None:
        """Look for all that was acknowledged by now."""
        for feed, provider in self._world.providers.items():
            told = {(feed, key, said) for key, kinds in provider.acknowledged.items() for said in kinds}
            wanted = told - self.found - self.lost
            rows = await self._world.postgres.ask(STORED, feed, list({key for _, key, _ in wanted}))
            stored = {(feed, row["wire_key"], SAID[row["kind"]]) for row in rows}
            self.found |= wanted & stored
            self.lost |= wanted - stored

    async def twice(self) -> int:
        """Return how many events are stored more often than they happened."""
        return sum([await self._twice(feed) for feed in self._world.providers])

    async def _twice(self, feed: str) -> int:
        taken = self._world.providers[feed].taken
        rows = await self._world.postgres.ask(STORED, feed, list(taken))
        return sum(max(0, row["n"] - taken[row["wire_key"]]) for row in rows)


async def come_to_an_end(world: World, acknowledged: Acknowledged) -> str:
    """Stop the load, let providers tell all, see that each claim is decided or held, then let all jobs be done.

    Returns how the sends stood when each was decided or held. After that everything was told, so that silence means
    absence, and passes may give up what is held: a job that is then sent a second time breaks a promise.
    """
    world.producing.cancel()
    world.heal()
    for provider in world.providers.values():
        provider.fates = Fates()
        async with asyncio.timeout(DONE_SECONDS):
            await provider.told()
    await acknowledged.check()
    leeway = world.pace.grace + SECOND_LOOK

    async def decided() -> bool:
        return not (await world.postgres.ask(UNDECIDED, leeway))[0]["n"]

    await until(decided, "each claim to be decided or held", DONE_SECONDS)
    rows = await world.postgres.ask(STANDING)
    for row in await world.postgres.ask(STOPPED):
        await command(world, ROOT, "resume", "--reason", "the end", *_of_feed(row["feed"]))
    gives_up = {"RECONCILER_RULES__GIVE_UP_AFTER": "1s", "RECONCILER_RULES__ON_UNKNOWN": "release"}
    await world.daemon.restart(RECONCILER_RULES__GRACE="1s", **gives_up)

    async def done() -> bool:
        await world.postgres.ask(LOOK_NOW)
        return not world.jobs.open

    await until(done, f"all jobs to be done; {world.jobs.open} are not", DONE_SECONDS)
    return ", ".join(f"{row['n']:,} {row['standing']}" for row in rows)


def _of_feed(feed: str) -> list[str]:
    return [] if feed == "*" else ["--feed", feed]


async def judge(world: World, acknowledged: Acknowledged, standing: str) -> AsyncIterator[Kept]:
    """Yield each promise, once all has come to its end."""
    await acknowledged.check()
    found, lost, twice = len(acknowledged.found), len(acknowledged.lost), await acknowledged.twice()
    yield Kept(
        "every acknowledged event is there once",
        f"{found:,} there, {lost} missing, {twice} twice",
        kept=bool(found) and not lost and not twice,
    )
    released = await world.postgres.ask(RELEASED)
    claims = Counter((row["wire_key"], row["fence"]) for row in released)
    doubled = sum(n > 1 for n in claims.values())
    bases = ", ".join(f"{n:,} {basis}" for basis, n in Counter(row["reason"] for row in released).most_common())
    yield Kept("no claim is released twice", f"{len(claims):,} released ({bases}), {doubled} twice", kept=not doubled)
    yield _accepted_once(world, released)
    over = (await world.postgres.ask(GIVEN_OUT_OVER_EVIDENCE))[0]["n"]
    yield Kept("no send is given out over evidence", f"{over} given out", kept=not over)
    yield Kept("every claim is decided or visibly held", standing, kept=True)
    yield _jobs_done(world)
    ends = [end for party in world.parties for end in party.process.unasked]
    yield Kept("no process ends, or speaks, out of turn", "; ".join(ends) or "none did", kept=not ends)


def _accepted_once(world: World, released: Sequence[Mapping[str, Any]]) -> Kept:
    """Judge what was accepted twice: a release on silence may have been wrong, and said how likely that was."""
    taken = sum((provider.taken for provider in world.providers.values()), Counter())
    on_silence = {row["wire_key"] for row in released if row["reason"] == "absent"}
    stated = sum(row["risk"] for row in released if row["reason"] == "absent")
    twice = {key for key, n in taken.items() if n > 1}
    named, unnamed = twice & on_silence, twice - on_silence
    return Kept(
        "no key is accepted twice but by a stated risk",
        f"{len(taken):,} taken; twice {len(unnamed)}{_some(unnamed)}, and {len(named)} where {stated:.2f} was stated",
        kept=not unnamed and p_value(stated, len(named)) >= HONEST,
    )


def _jobs_done(world: World) -> Kept:
    """Judge what came of the jobs: sent where the provider has it, failed where it has not."""
    taken = sum((provider.taken for provider in world.providers.values()), Counter())
    wrong = {key for key, outcome in world.jobs.done.items() if (outcome == "failed") is (taken[key] > 0)}
    wrong |= {key for key, outcome in world.jobs.done.items() if outcome in BAD}
    failed = sum(outcome == "failed" for outcome in world.jobs.done.values())
    return Kept(
        "every job is done, and nobody forgotten",
        f"{len(world.jobs.done):,} done, {failed} of them refused by the provider; {len(wrong)} wrong{_some(wrong)}",
        kept=not wrong and not world.jobs.open,
    )


def _some(keys: Collection[str]) -> str:
    return f" ({', '.join(sorted(keys)[:3])})" if keys else ""
