# SPDX-License-Identifier: Apache-2.0
"""Passes: whole ones, ones that die half way or stand still for long, by a clock that went back, with look-ups."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

import asyncpg
import kit
from api_kit import Sent
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from state_machine_base import RECIPIENT, RULES, SENDS
from state_machine_senders import Senders
from state_machine_truth import NOTHING, WINDOW
from state_machine_world import CLOCK, FEEDS, Died, Fate, fated

from reconciler.passes.feeds import pause
from reconciler.passes.reconcile import Policies, run_pass
from reconciler.passes.second_witness import SecondWitness
from reconciler.rule.limits import Limit
from reconciler.rule.policy import OnUnknown
from webhooks.event import wire_key

DAY: Final = timedelta(days=1)
WISHES: Final = st.sampled_from(["hold", "hold", "release", "fail"])
MINUTES, HOURS, DAYS = timedelta(minutes=2), timedelta(hours=2), timedelta(days=2)
TIMES: Final = st.sampled_from([MINUTES, HOURS, HOURS, HOURS, DAYS, 70 * DAY])
LATER: Final = st.sampled_from([NOTHING, NOTHING, MINUTES, HOURS, HOURS, HOURS, DAYS])
"""At two hours the feed can speak of absence; after two days passes give up."""

PLACES: Final = st.sampled_from([8, 8, 8, 8, 7, 6, 5, 4, 2, 9])
"""The eighth is mostly the first write of what was decided."""

MEANWHILE: Final = st.sampled_from([None, "the feed speaks", "a person pauses it", "the database goes back"])

BEHIND: Final = {"goes by a clock minutes behind": MINUTES, "goes by a clock a day behind": DAY}
ASKING: Final = {
    "asks the provider": {"first": False, "shown": True},
    "asks the provider first": {"first": True, "shown": True},
    "asks the provider too early": {"first": True, "shown": False},
}


@dataclass(frozen=True, slots=True)
class Frozen:
    """A pass that stands still."""

    task: asyncio.Task[Any]
    fate: Fate


class Passes(Senders):
    """The scheduler's side, in several processes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen: Frozen | None = None

    @property
    def passing(self) -> bool:
        return self.frozen is not None

    @rule(sends=st.sampled_from([SENDS, *((key,) for key in SENDS)]), by=TIMES, on_unknown=st.none() | WISHES)
    def time_passes(self, sends: Sequence[str], by: timedelta, on_unknown: OnUnknown | None) -> None:
        """Then comes a pass, as it does each few seconds, or (None) the scheduler is down."""
        self.do(self.let_time_pass(sends, by))
        if on_unknown:
            self.do(self.passed(on_unknown))

    @rule(later=LATER, on_unknown=WISHES, count=st.sampled_from([None, None, 1]), elsewhere=st.booleans())
    def a_pass_runs(self, later: timedelta, on_unknown: OnUnknown, count: int | None, elsewhere: bool) -> None:
        """`count`: how many releases an hour it allows. `elsewhere`: one takes them for the other feed, and dies."""
        self.do(self.let_time_pass(SENDS, later))
        self.do(self.passed(on_unknown, count))
        if elsewhere:
            self.do(self.observe())
            self.do(self.failed_over())

    @rule(later=LATER, on_unknown=WISHES, how=st.sampled_from([*BEHIND, *ASKING]))
    def a_pass(self, later: timedelta, on_unknown: OnUnknown, how: str) -> None:
        self.do(self.let_time_pass(SENDS, later))
        if how in BEHIND:
            self.do(self.passed_by_a_clock_behind(on_unknown, BEHIND[how]))
        else:
            self.do(self.passed_with_questions(on_unknown, **ASKING[how]))

    @precondition(lambda self: not self.frozen)
    @rule(later=LATER, on_unknown=WISHES, at=PLACES, dies=st.sampled_from([False, False, True]), meanwhile=MEANWHILE)
    def a_pass_stands_still_or_dies(
        self, later: timedelta, on_unknown: OnUnknown, at: int, dies: bool, meanwhile: str | None
    ) -> None:
        """`at`: before which of its transactions."""
        self.do(self.let_time_pass(SENDS, later))
        self.do(self.passed_half_way(on_unknown, Fate(at, dies=dies)))
        if meanwhile == "the feed speaks":
            self.do(self.all_heard())
        elif meanwhile == "a person pauses it":
            self.do(self.paused())
        elif meanwhile:
            self.do(self.made_suspect())

    def run(self, on_unknown: OnUnknown, policies: Policies) -> Any:
        return run_pass(self.db, policies, who=f"a pass that would {on_unknown}")

    def policies(self, on_unknown: OnUnknown, count: int | None = None, **rules: Any) -> Policies:
        limit = None if count is None else Limit(count, share=1.0, canary=1.0, awaited=NOTHING)
        window = None if self.truth.keys == "none" else WINDOW
        rules |= {"on_unknown": on_unknown, "failover": self.truth.failover}
        return kit.policies(replace(RULES, **rules), window, limit)

    async def passed(self, on_unknown: OnUnknown, count: int | None = None) -> None:
        before = await self.used()
        await self.run(on_unknown, self.policies(on_unknown, count))
        for was, now in zip(before, await self.used(), strict=True):
            released = now["ever"] - was["ever"]
            assert count is None or released <= max(0, count - was["lately"]), (
                "more was released than the budget allows"
            )
        await self.check_evidence_has_moved_rows()

    async def used(self) -> list[asyncpg.Record]:
        return await self.world.clock.fetch(USED, FEEDS)

    async def passed_half_way(self, on_unknown: OnUnknown, fate: Fate) -> None:
        task = fated(self.run(on_unknown, self.policies(on_unknown)), fate)
        await fate.met_by(task)
        if not task.done():
            await self.world.until_still()
            self.frozen = Frozen(task, fate)
        elif not isinstance(task.exception(), Died):
            task.result()

    async def all_heard(self) -> None:
        for message in self.truth.messages:
            await kit.event(self.db, message.key, message_id=message.id, feed=message.attempt.feed)

    async def paused(self) -> None:
        async with self.db.acquire() as connection:
            await pause(connection, kit.FEED, "incident", "ann")

    @precondition(lambda self: self.frozen)
    @rule(dies=st.sampled_from([False, False, True]))
    def the_pass_that_stood_still_goes_on_or_dies(self, dies: bool) -> None:
        self.do(self.end_frozen_pass(dies=dies))

    async def end_frozen_pass(self, *, dies: bool = False) -> None:
        if self.frozen is None:
            return
        frozen, self.frozen = self.frozen, None
        (frozen.task.cancel if dies else frozen.fate.go_on.set)()
        await asyncio.wait([frozen.task])
        if not dies:
            frozen.task.result()

    async def all_die(self) -> None:
        await self.end_frozen_pass(dies=True)
        await super().all_die()

    async def passed_by_a_clock_behind(self, on_unknown: OnUnknown, by: timedelta) -> None:
        """To a clock that went back all that was written lies in the future, or less far in the past."""
        await self.move(SENDS, -by)
        await self.run(on_unknown, self.policies(on_unknown))
        await self.move(SENDS, by)
        await self.check_evidence_has_moved_rows()

    # The second witness

    async def passed_with_questions(self, on_unknown: OnUnknown, *, first: bool, shown: bool) -> None:
        """`first`: its API is asked before each release. `shown`: it shows by now what was taken."""
        now = await self.world.clock.fetchval(CLOCK)
        self.world.api.sends = self.world.neighbours + (self.taken(now) if shown else [])
        policies = self.policies(on_unknown, look_up="before_release" if first else "silent")
        await self.run(on_unknown, replace(policies, second_witness=SecondWitness({kit.FEED: self.world.feed})))

    def taken(self, now: datetime) -> list[Sent]:
        """What the provider took, as its API shows it."""
        return [
            Sent(wire_key(message.key), RECIPIENT, message.id, at=now - (self.truth.clock[message.key] - message.at))
            for message in self.truth.messages
            if message.attempt.feed == kit.FEED
        ]


# The budget of an hour, which a person who resumes grants anew.
USED: Final = """
SELECT count(*) FILTER (WHERE v.decided_at > greatest(clock_timestamp() - interval '1 hour', (
           SELECT max(resumed_at) FROM feed_state WHERE feed IN (f.feed, '*')))) AS lately, count(v.id) AS ever
FROM unnest($1::text[]) AS f(feed)
LEFT JOIN verdict v ON v.feed = f.feed AND v.action = 'released' AND v.reason IN ('absent', 'looked_up', 'gave_up')
GROUP BY f.feed ORDER BY f.feed
"""
