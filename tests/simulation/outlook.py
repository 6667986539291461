# SPDX-License-Identifier: Apache-2.0
"""What follows from claims: what providers take, what feeds will say of it, and what senders report. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from random import Random
from typing import Any, Final, NamedTuple

from .course import EARLY, Course, Told, course, fates, tell
from .truth import Due, Grant, Message, due
from .world import PLACE, Weather, World

DRAINING: Final = 1200.0
"""Seconds that the backlog of an outage takes."""

PROVIDERS: Final[tuple[Weather, ...]] = ("burst", "throttled")
"""Spells of a provider."""

SETTLED: Final = ("confirm", "not_sent", "refused")
"""What a sender says that leaves nothing open."""


class Job(NamedTuple):
    """A sender that wants to send."""

    wire_key: str
    key: str
    feed: str
    options: dict[str, str]
    nonce: str = ""


class Report(NamedTuple):
    """What a sender says of its attempt."""

    wire_key: str
    fence: int
    says: str
    message_id: str


@dataclass(slots=True)
class Outlook:
    """What follows from the claims of some senders, or from requests that arrive at last."""

    world: World
    tick: int
    at: datetime
    grants: list[Grant] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    agenda: list[tuple[int, Due]] = field(default_factory=list)
    """By fence."""
    reports: list[Report] = field(default_factory=list)
    """What is said at once."""
    early: list[list[Any]] = field(default_factory=list)
    """Events that come before the answer."""

    def attempt(self, job: Job, claim: Mapping[str, Any], known: str | None) -> None:
        """Draw what becomes of a claim; `known` is the message that a provider who keeps our key has of it already."""
        fence, within = claim["fence"], claim["seconds_left"]
        dice = self.world.dice("attempt", job.wire_key, claim["attempt"])
        weather = next((w for w in PROVIDERS if self.world.spell(w, job.feed, self.at)), None)
        one = course(dice, fates(weather), within, 0.75 * self.world.give_up.total_seconds())
        self.grants.append(
            Grant(
                fence,
                job.wire_key,
                claim["attempt"],
                job.feed,
                self.tick,
                one.how,
                one.says,
                self._in(within),
                one.says not in SETTLED or one.says_at > 0,
            )
        )
        if one.taken == 0.0 and not known:
            self.take(job, fence, one, dice)
        elif one.taken:
            body = (job.wire_key, job.key, job.feed, fence, one.how)
            self.agenda.append((fence, due(self._in(one.taken), "submit", *body)))
        self._report(one, Report(job.wire_key, fence, one.says or "", known or f"{job.wire_key}.{fence}"))

    def take(self, job: Job, fence: int, one: Course, dice: Random) -> None:
        """Let the provider take a request, and its feed speak of it."""
        for copy in range(one.copies):
            message_id = f"{job.wire_key}.{fence}" + f".{copy}" * (copy > 0)
            self.messages.append(Message(job.wire_key, fence, copy, message_id, self.at, not one.suppressed))
            if PLACE[job.feed].echoes:
                told = tell(dice, suppressed=one.suppressed)
                events = [self._event(job, message_id, event) for event in told]
                self.agenda += [
                    (fence, due(self._comes(job.feed, message_id, event), "event", *body))
                    for event, body in zip(told, events, strict=True)
                ]
                if events and dice.random() < EARLY:
                    self.early.append(events[0])

    def _event(self, job: Job, message_id: str, told: Told) -> list[Any]:
        key = (job.key if told.again else job.wire_key) if told.keyed else None  # either form is matched
        recipient = job.options.get("recipient")
        return [job.feed, key, message_id, told.event_id, told.kind, told.testimony, self.at, recipient, told.again]

    def _comes(self, feed: str, message_id: str, told: Told) -> datetime:
        """Return when an event comes: in an outage after its end, in any order while the backlog is drained."""
        comes = self._in(told.after)
        if spell := self.world.spell("outage", feed, comes):
            dice = self.world.dice("backlog", message_id, told.event_id)
            comes = self.world.at(spell.end) + timedelta(seconds=dice.uniform(0, DRAINING))
        return comes

    def _report(self, one: Course, report: Report) -> None:
        if one.says is None:
            return
        for _ in range(1 + one.twice):
            if one.says_at:
                self.agenda.append((report.fence, due(self._in(one.says_at), "report", *report)))
            else:
                self.reports.append(report)

    def _in(self, seconds: float) -> datetime:
        return self.at + timedelta(seconds=seconds)
