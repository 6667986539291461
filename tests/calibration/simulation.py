# SPDX-License-Identifier: Apache-2.0
"""Lives through a world as passes do: sees only what they would see at each moment, and asks the real rule."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from heapq import heappop, heappush
from random import Random
from typing import Final

from reconciler import history, risk
from reconciler.policy import Action, FeedView, Heard, Row, Rules, Witness, decide

from .worlds import ABSENT, ACCEPTED, CONTROL, HOUR, LOST, USUAL_AMBIGUOUS, Group, Sends, World, sends

EPOCH: Final = datetime(2026, 1, 1, tzinfo=UTC)
FEED: Final = "feed"
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
HISTORY: Final = 2_000
HISTORY_SPAN: Final = 24 * HOUR
OLDEST: Final = 30 * 24 * HOUR
NOBODY: Final = risk.Recent(0, 0, 0, 0, 0.0)
BLOCK: Final = 100
STRETCHES: Final = 300
"""The usual share of ambiguous sends is learned from so many stretches of BLOCK sends."""


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


class Stratum:
    """The controls of one stratum: all since the start, and the sample of them that makes history."""

    def __init__(self, rate: float, groups: list[Group], random: Random) -> None:
        self.at: array[float] = array("d")
        self.lag: array[float] = array("d")
        self.stride = max(1, int(rate * HISTORY_SPAN / HOUR / HISTORY))
        self.seen = 0
        self.old_at: array[float] = array("d")
        self.old_lag: array[float] = array("d")
        self.first_heard = LOST
        self.built: dict[str, tuple[float, int, int, history.Curve]] = {}
        self._live_before(rate, groups, random)

    def _live_before(self, rate: float, groups: list[Group], random: Random) -> None:
        """Let the feed have had a healthy history before the world begins."""
        a_sample = rate / self.stride / HOUR
        n = int(min(HISTORY, OLDEST * a_sample))
        weights = [g.weight for g in groups]
        for i in range(n, 0, -1):
            self.old_at.append(-i / a_sample)
            self.old_lag.append(random.choices(groups, weights)[0].lag(random))
            self.first_heard = min(self.first_heard, self.old_at[-1] + self.old_lag[-1])

    def add(self, at: float, lag: float) -> None:
        self.at.append(at)
        self.lag.append(lag)
        self.seen += 1
        self.first_heard = min(self.first_heard, at + lag)
        if self.seen % self.stride == 0:
            self.old_at.append(at)
            self.old_lag.append(lag)

    def history(self, now: float) -> tuple[int, int]:
        """Return from where to where its sample is history: old enough to have been heard of, and not too old."""
        end = bisect_right(self.old_at, now - GRACE)
        return max(end - HISTORY, bisect_left(self.old_at, now - OLDEST)), end


@dataclass(slots=True)
class Proved:
    """Ambiguous sends of one stratum that were proved accepted, in the order of the proofs; of a busy one a sample."""

    stride: int
    seen: int = 0
    at: array[float] = field(default_factory=lambda: array("d"))
    lag: array[float] = field(default_factory=lambda: array("d"))

    def add(self, at: float, lag: float) -> None:
        self.seen += 1
        if self.seen % self.stride == 0:
            self.at.append(at)
            self.lag.append(lag)


class Simulation:
    """One world from its beginning to its end."""

    def __init__(self, world: World, claims: int, seed: int) -> None:
        random = Random(f"{world.name}:{world.rate}:{seed}")
        self.world = world
        self.outcome = Outcome(world)
        self.sends: Sends = sends(world, random, claims)
        self.strata: dict[history.Stratum, Stratum] = {}
        self.proved: dict[history.Stratum, Proved] = {}
        self.paths = [self._path(g) for g in world.groups]
        """For each group the strata that its controls belong to, narrowest first."""
        self._open_strata(random)
        self.crowd = array("l", [0])
        """How many of the first sends are ambiguous."""
        for which, kind, at, lag in zip(self.sends.group, self.sends.kind, self.sends.at, self.sends.lag, strict=True):
            self.crowd.append(self.crowd[-1] + (kind != CONTROL))
            if kind == CONTROL:
                for name in self.paths[which]:
                    self.strata[name].add(at, lag)
        self.ill = bytearray(len(self.sends.kind))
        self.stated: dict[int, float] = {}
        """Of each claim looked at: the risk last stated."""
        self.learnt, self.asked_next = False, 0.0
        self.causes = {False: risk.REPORTED, True: risk.UNREPORTED}
        self.usual, self.usual_until = 0.0, 0.0
        self.neighbours: dict[int, tuple[float, history.Stratum, float | None, risk.Recent]] = {}
        self.crowds: dict[int, tuple[int, ...]] = {}

    # What a pass sees

    def _path(self, group: Group) -> list[history.Stratum]:
        of_class = [history.Stratum(FEED, group.message_class), history.Stratum(FEED)]
        if group.domain is None:
            return of_class
        kept = min(OLDEST / HOUR * self.world.rate, HISTORY)
        counts = {history.Stratum(FEED, g.message_class, g.domain): int(g.weight * kept) for g in self.world.groups}
        return list(dict.fromkeys([history.stratum(counts, FEED, group.message_class, group.domain), *of_class]))

    def _open_strata(self, random: Random) -> None:
        for name in {name for path in self.paths for name in path}:
            groups = [g for g, path in zip(self.world.groups, self.paths, strict=True) if name in path]
            rate = self.world.rate * sum(g.weight for g in groups)
            self.strata[name] = Stratum(rate, groups, random)
            self.proved[name] = Proved(max(1, int(rate * USUAL_AMBIGUOUS / 2 * HISTORY_SPAN / HOUR / HISTORY)))

    def _stratum(self, which: int, now: float) -> history.Stratum:
        for name in self.paths[which]:
            start, end = self.strata[name].history(now)
            if end - start >= history.ENOUGH:
                return name
        return self.paths[which][-1]

    def _class_heard(self, which: int, now: float) -> bool:
        """Whether any control of the claim's class was ever heard of; of a class without controls too."""
        of_class = self.strata[self.paths[which][-2]]
        start, end = of_class.history(now)
        return of_class.first_heard <= now or start == end

    def _curve(self, name: history.Stratum, which: int, now: float) -> history.Curve:
        """Return the curve, as it was recomputed within the last quarter of an hour or two hundred controls."""
        here, proved = self.strata[name], self.proved[name]
        start, end = here.history(now)
        known = len(proved.at)
        key = self.world.groups[which].message_class
        if built := here.built.get(key):
            when, last, last_known, curve = built
            if now - when < 900 or (end - last < HISTORY // 10 and known - last_known < max(1, known // 10)):
                return curve
        at, lag = here.old_at[start:end], here.old_lag[start:end]
        first = max(0, known - HISTORY)
        curve = history.Curve.of(
            [now - t for t in at],
            [g if t + g <= now else None for t, g in zip(at, lag, strict=True)],
            [now - t for t in proved.at[first:]],
            proved.lag[first:],
            self._class_heard(which, now),
        )
        here.built[key] = (now, end, known, curve)
        return curve

    def _recent(self, i: int, name: history.Stratum, now: float, curve: history.Curve) -> risk.Recent:
        """Return the claim's recent controls, remembered while they can't change and are judged alike."""
        if (kept := self.neighbours.get(i)) and now < kept[0] and kept[1:3] == (name, curve.late_after):
            return kept[3]
        here, claimed, late_after = self.strata[name], self.sends.at[i], curve.late_after or 0.0
        at = here.at
        middle = bisect_left(at, claimed)
        end = bisect_right(at, now - late_after, middle)
        first = max(middle - risk.MOST, bisect_left(at, claimed - risk.NEAR, 0, middle))
        if middle - first < risk.WANTED:
            first = max(middle - risk.WANTED, bisect_left(at, claimed - risk.FAR, 0, middle))
        last = min(middle + risk.MOST, bisect_right(at, claimed + risk.NEAR, middle, end))
        if last - middle < risk.WANTED:
            last = min(middle + risk.WANTED, bisect_right(at, claimed + risk.FAR, middle, end))
        pairs = list(zip(at[first:last], here.lag[first:last], strict=True))
        seen = [(now - t, g if t + g <= now else None) for t, g in pairs]
        found = risk.Recent.of(seen[: middle - first], seen[middle - first :], curve.late_after)
        if now > claimed + risk.FAR + late_after:
            until = min((t + g for t, g in pairs if t + g > now), default=LOST)
            self.neighbours[i] = (until, name, curve.late_after, found)
        return found

    def _crowd(self, i: int, now: float) -> tuple[int, ...]:
        """Count the ambiguous ones among the sends nearest to a claim, remembered once all of these are known."""
        if kept := self.crowds.get(i):
            return kept
        known = bisect_right(self.sends.at, now - SUBMIT_WITHIN)
        counts = []
        for size in risk.CROWDS:
            last = min(i + 1 + size // 2, known)
            first = max(0, last - size - 1)
            counts.append(self.crowd[min(first + size + 1, known)] - self.crowd[first] - 1)
        if known > i + max(risk.CROWDS):
            self.crowds[i] = tuple(counts)
        return tuple(counts)

    def _usual_share(self, now: float) -> float:
        """Return the usual share of ambiguous sends, learned from STRETCHES spread over a day or more."""
        if now >= self.usual_until:
            known = bisect_right(self.sends.at, now - SUBMIT_WITHIN) // BLOCK
            step = max(1, int(self.world.rate * 24 / STRETCHES / BLOCK))
            ends = range(max(0, known - STRETCHES * step) * BLOCK, known * BLOCK, step * BLOCK)
            self.usual = risk.usual_share((BLOCK, self.crowd[at + BLOCK] - self.crowd[at]) for at in ends)
            self.usual_until = now + 3 * step * BLOCK / self.world.rate * HOUR
        return self.usual

    # Its life

    def run(self) -> Outcome:
        """Look at each claim when it is due until it is decided or given up."""
        s = self.sends
        claims = [i for i, kind in enumerate(s.kind) if kind != CONTROL and i < s.claims_end]
        due = [(_tick(s.at[i] + SUBMIT_WITHIN + GRACE), i) for i in claims]
        self.proofs = sorted((s.at[i] + s.lag[i], i) for i in claims if s.kind[i] == ACCEPTED and s.lag[i] < LOST)
        self.settled = [(s.at[i] + SUBMIT_WITHIN + GIVE_UP, i) for i in claims]
        self.next_proof = self.next_settled = 0
        again: list[tuple[float, int]] = []
        place = 0
        while place < len(due) or again:
            if again and (place == len(due) or again[0] < due[place]):
                now, i = heappop(again)
            else:
                now, i = due[place]
                place += 1
            self._learn(now)
            if (later := self._look(i, now)) is not None:
                heappush(again, (_tick(later), i))
        return self.outcome

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
        s = self.sends
        while self.next_proof < len(self.proofs) and self.proofs[self.next_proof][0] <= now:
            when, i = self.proofs[self.next_proof]
            self.next_proof += 1
            if not self.ill[i]:
                for name in self.paths[s.group[i]]:
                    self.proved[name].add(s.at[i], s.lag[i])
        while self.next_settled < len(self.settled) and self.settled[self.next_settled][0] <= now:
            when, i = self.settled[self.next_settled]
            self.next_settled += 1
            self._settle(i, when)
        if not self.learnt and now >= self.asked_next:
            self.asked_next = now + 300
            known = sum(at <= now - history.SETTLED for at in self.proved[self.paths[0][-1]].at)
            if known >= history.MANY:
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

    def _look(self, i: int, now: float) -> float | None:
        s = self.sends
        at = s.at[i]
        if s.kind[i] == ACCEPTED and at + s.lag[i] <= now:
            self._count(i)
            return None
        self.outcome.looks += 1
        which = s.group[i]
        name = self._stratum(which, now)
        curve = self._curve(name, which, now)
        said = risk.assess(
            now - at - SUBMIT_WITHIN,
            curve,
            NOBODY if curve.no_echo else self._recent(i, name, now, curve),
            risk.Burst(self._crowd(i, now), self._usual_share(now)),
            self.causes[bool(s.unreported[i])].p0(),
            None,
            RULES.max_risk,
        )
        self.ill[i] |= said.ill
        self.stated[i] = said.risk
        submit_by = EPOCH + timedelta(seconds=at + SUBMIT_WITHIN)
        row = Row("claimed", 1, submit_by, submit_by - timedelta(seconds=SUBMIT_WITHIN), None, has_fingerprint=False)
        view = FeedView(witness=Witness(said.answer, said.reason, said.risk))
        verdict = decide(row, Heard(), view, None, RULES, EPOCH + timedelta(seconds=now))
        if verdict.action is Action.RELEASED:
            self._release(i, now, said)
            return None
        if now - at - SUBMIT_WITHIN >= GIVE_UP:
            for tally in self._count(i, said):
                tally.held += 1
                tally.reasons[verdict.reason] = tally.reasons.get(verdict.reason, 0) + 1
            return None
        assert verdict.next_check_at
        return (verdict.next_check_at - EPOCH).total_seconds()

    def _release(self, i: int, now: float, said: risk.Assessment) -> None:
        s = self.sends
        absent = s.kind[i] == ABSENT
        for tally in self._count(i, said):
            tally.released += 1
            tally.stated += said.risk
            tally.duplicates += not absent
            tally.absent_released += absent
            tally.in_time += absent and now <= s.at[i] + SUBMIT_WITHIN + GRACE + A_PASS + A_PASS


def _tick(at: float) -> float:
    """Return when the first pass begins that finds it due."""
    return math.ceil(at / A_PASS) * A_PASS
