# SPDX-License-Identifier: Apache-2.0
"""Lives through a world as passes do: sees only what they would see at each moment, and asks the real rule."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from heapq import heapify, heappop, heappush
from random import Random
from typing import Final

from reconciler.rule import history, risk
from reconciler.rule.policy import Action, FeedView, Heard, Row, Rules, Verdict, Witness, decide

from .view import MINUTE, View
from .worlds import ABSENT, ACCEPTED, CONTROL, HOUR, LOST, Sends, World, sends

EPOCH: Final = datetime(2026, 1, 1, tzinfo=UTC)
SUBMIT_WITHIN: Final = 60.0
A_PASS: Final = 15.0
RULES: Final = Rules(
    grace=timedelta(minutes=15),
    give_up_after=timedelta(hours=6),
    max_risk=0.01,
    max_attempts=5,
    same_key_retry=False,
    retry_backoff=timedelta(seconds=30),
    on_unknown="hold",
)
GRACE: Final = RULES.grace.total_seconds()
GIVE_UP: Final = RULES.give_up_after.total_seconds()
NOBODY: Final = risk.Recent(0, 0, 0, 0, 0.0)


@dataclass(slots=True)
class Tally:
    """What became of some claims."""

    ambiguous: int = 0
    absent: int = 0
    released: int = 0
    stated: float = 0.0
    duplicates: int = 0
    in_time: int = 0
    """Absent and released within grace and one pass."""
    absent_released: int = 0
    held: int = 0
    """Neither heard of nor released by give-up."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Of the held, at give-up."""


@dataclass(slots=True)
class Outcome:
    """What became of the claims of one world."""

    world: World
    all: Tally = field(default_factory=Tally)
    bad: Tally = field(default_factory=Tally)
    learning: Tally = field(default_factory=Tally)
    """Where the world excepts them: those decided while fewer than MANY ambiguous sends were known of their age."""
    learning_hours: float = 0.0
    looks: int = 0
    on_hold: int = 0
    """Releases while all had to be held."""
    hours: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Releases of each hour, of the whole world."""

    @property
    def peak(self) -> int:
        """The most releases of an hour."""
        return max(self.hours.values(), default=0)


class Simulation:
    """One world from its beginning to its end."""

    def __init__(self, world: World, claims: int, seed: int) -> None:
        random = Random(f"{world.name}:{world.rate}:{seed}")
        self.world = world
        self.outcome = Outcome(world)
        self.sends: Sends = sends(world, random, claims)
        self.view = View(world, self.sends, GRACE, SUBMIT_WITHIN, random)
        self.ill = bytearray(len(self.sends.kind))
        self.stated: dict[int, float] = {}
        """Of each claim looked at: the risk last stated."""
        self.learnt, self.asked_next = False, 0.0
        self.causes = {False: risk.REPORTED, True: risk.UNREPORTED}

    def run(self) -> Outcome:
        """Look at each claim when it is due until it is decided or given up."""
        s = self.sends
        claims = [i for i, kind in enumerate(s.kind) if kind != CONTROL and i < s.claims_end]
        self.proofs = sorted((s.at[i] + s.lag[i], i) for i in claims if s.kind[i] == ACCEPTED and s.lag[i] < LOST)
        self.settled = [(s.at[i] + SUBMIT_WITHIN + GIVE_UP, i) for i in claims]
        self.next_proof = self.next_settled = 0
        due = [(_tick(s.at[i] + SUBMIT_WITHIN + GRACE), i) for i in claims]
        heapify(due)
        while due:
            now = due[0][0]
            page = []
            while due and due[0][0] == now:
                page.append(heappop(due)[1])
            self._learn(now)
            for i, later in self._pass(page, now):
                heappush(due, (_tick(later), i))
        return self.outcome

    def _pass(self, page: list[int], now: float) -> Iterator[tuple[int, float]]:
        """Decide the claims that are due; yield those that are looked at again, and when."""
        s = self.sends
        alike: dict[tuple[int, history.Stratum, str], list[int]] = defaultdict(list)
        for i in page:
            if s.kind[i] == ACCEPTED and s.at[i] + s.lag[i] <= now:
                self._count(i)
            else:
                which = s.group[i]
                name = self.view.stratum(which, now)
                alike[int(s.at[i] // MINUTE), name, self.world.groups[which].message_class].append(i)
        for (_, name, _), claims in alike.items():
            curve = self.view.curve(name, s.group[claims[0]], now)
            recent = NOBODY
            if not curve.no_echo:
                recent = self.view.recent(name, s.at[min(claims)], s.at[max(claims)], now, curve.late_after)
            reach = self.view.reach(sorted(claims)[len(claims) // 2], now)
            for i in claims:
                if (later := self._look(i, now, curve, recent, self.view.burst(i, reach, now))) is not None:
                    yield i, later

    def _look(self, i: int, now: float, curve: history.Curve, recent: risk.Recent, burst: risk.Burst) -> float | None:
        """Decide one claim; return when it is looked at again, None if it is over."""
        self.outcome.looks += 1
        s, age = self.sends, now - self.sends.at[i] - SUBMIT_WITHIN
        prior = self.causes[bool(s.unreported[i])].p0()
        said = risk.assess(age, curve, recent, burst, prior, None, RULES.max_risk)
        self.ill[i] |= said.ill
        self.stated[i] = said.risk
        verdict = self._decide(i, now, said)
        if verdict.action is Action.RELEASED:
            self._release(i, now, said)
            return None
        if age >= GIVE_UP:
            for tally in self._count(i, said):
                tally.held += 1
                tally.reasons[verdict.reason] = tally.reasons.get(verdict.reason, 0) + 1
            return None
        assert verdict.next_check_at
        return (verdict.next_check_at - EPOCH).total_seconds()

    def _decide(self, i: int, now: float, said: risk.Assessment) -> Verdict:
        submit_by = EPOCH + timedelta(seconds=self.sends.at[i] + SUBMIT_WITHIN)
        row = Row("claimed", 1, submit_by, submit_by - timedelta(seconds=SUBMIT_WITHIN), None, has_fingerprint=False)
        hold = "suspect" if self.sends.on_hold(now) else None
        view = FeedView(hold=hold, witness=Witness(said.answer, said.reason, said.risk))
        return decide(row, Heard(), view, None, RULES, EPOCH + timedelta(seconds=now))

    def _count(self, i: int, said: risk.Assessment | None = None) -> list[Tally]:
        """Count a claim that is over, and return the tallies that it belongs to."""
        s, out = self.sends, self.outcome
        known = self.learnt if said is None else said.counts.ambiguous_n >= history.MANY
        if self.world.exception == "learning" and not known:
            tallies = [out.learning]
        else:
            tallies = [out.all, out.bad] if s.bad[i] else [out.all]
        for tally in tallies:
            tally.ambiguous += 1
            tally.absent += s.kind[i] == ABSENT
        return tallies

    def _learn(self, now: float) -> None:
        while self.next_proof < len(self.proofs) and self.proofs[self.next_proof][0] <= now:
            when, i = self.proofs[self.next_proof]
            self.next_proof += 1
            if not self.ill[i]:
                self.view.prove(i)
        while self.next_settled < len(self.settled) and self.settled[self.next_settled][0] <= now:
            when, i = self.settled[self.next_settled]
            self.next_settled += 1
            self._settle(i, when)
        if not self.learnt and now >= self.asked_next:
            self.asked_next = now + 300
            if self.view.known(now) >= history.MANY:
                self.learnt, self.outcome.learning_hours = True, now / HOUR

    def _settle(self, i: int, now: float) -> None:
        """Let a claim that is given up or decided by now teach the prior of its cause."""
        s = self.sends
        cause = self.causes[bool(s.unreported[i])]
        if s.kind[i] == ACCEPTED and s.at[i] + s.lag[i] <= now:
            cause = replace(cause, accepted=cause.accepted + 1)
        elif i in self.stated:
            cause = replace(cause, unheard=cause.unheard + 1, risk=cause.risk + self.stated[i])
        self.causes[bool(s.unreported[i])] = cause

    def _release(self, i: int, now: float, said: risk.Assessment) -> None:
        s = self.sends
        absent = s.kind[i] == ABSENT
        self.outcome.hours[int(now // HOUR)] += 1
        self.outcome.on_hold += s.on_hold(now)
        for tally in self._count(i, said):
            tally.released += 1
            tally.stated += said.risk
            tally.duplicates += not absent
            tally.absent_released += absent
            tally.in_time += absent and now <= s.at[i] + SUBMIT_WITHIN + GRACE + A_PASS + A_PASS


def _tick(at: float) -> float:
    """Return when the first pass begins that finds it due."""
    return math.ceil(at / A_PASS) * A_PASS
