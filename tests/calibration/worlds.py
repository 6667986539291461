# SPDX-License-Identifier: Apache-2.0
"""Invented providers and feeds: what became of each send, which the rule never sees, and when its event is stored.

Times and lags are seconds. In every world 2 % of sends become ambiguous without any fault, half of them accepted when
the sender reported the cause, 95 % when it did not (one in fifty); events take some 20 s, and 1 in 10,000 is lost.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Final, Literal, NamedTuple

HOUR: Final = 3600.0
LOST: Final = math.inf
USUAL_AMBIGUOUS: Final = 0.02
UNREPORTED: Final = 0.02
P_ACCEPTED: Final = (0.5, 0.95)
"""Share of ambiguous sends that were accepted: reported by the sender, and not."""

CONTROL, ACCEPTED, ABSENT = 0, 1, 2
LONGEST: Final = 24 * HOUR
GONE: Final = HOUR
ON_HOLD: Final = 2 * HOUR
"""After a restore: until the operator has replayed what the provider and the archive know, and resumes."""


@dataclass(slots=True)
class Spell:
    """A time in which something is ill."""

    start: float
    end: float
    dice: float
    """Uniform in 0..1, drawn once a spell: which form it takes."""


Fate = Callable[[Random, float, Spell, bool], float]
"""When an event is stored (a lag) of a send accepted inside a spell; told the time, the spell, and if ambiguous."""


@dataclass(frozen=True, slots=True)
class Group:
    """Sends of one message class and recipient domain."""

    weight: float
    message_class: str = "mail"
    domain: str | None = None
    median: float = 20.0
    spread: float = 1.0
    """Of the logarithm of the lag."""
    lost: float = 1e-4
    bad: bool = False
    """Counted with the bad spells."""

    def lag(self, random: Random) -> float:
        return LOST if random.random() < self.lost else self.median * math.exp(random.gauss(0.0, self.spread))


class Spells(NamedTuple):
    """When spells come, in hours."""

    lasts: tuple[float, float]
    """Least and most."""
    gap: float
    """Mean time between two."""


NO_SPELLS: Final = Spells((0.0, 0.0), math.inf)


@dataclass(frozen=True, slots=True)
class World:
    """A feed, what befalls it, and what the rule promises there."""

    name: str
    rate: float
    """Sends an hour."""
    groups: tuple[Group, ...] = (Group(1.0),)
    fate: Fate | None = None
    spells: Spells = NO_SPELLS
    ambiguous: float = USUAL_AMBIGUOUS
    """Share of sends that become ambiguous inside a spell."""
    shard: float = 1.0
    """Share of sends that a spell concerns."""
    for_good: bool = False
    """The first spell begins after 80 % of the claims and never ends."""
    late_ambiguous: Fate | None = None
    """When the event of an accepted ambiguous send is stored, in and out of spells."""
    promise: Literal["", "healthy", "deaf"] = ""
    """Beside those that hold everywhere: healthy feeds state little and are quick, deaf ones release nothing."""
    exception: Literal["", "learning", "shard"] = ""
    restored: bool = False
    """At the end of each spell the database goes back to that moment, GONE later, and all is held for ON_HOLD more."""


@dataclass(slots=True)
class Sends:
    """All sends of a world in order of time."""

    at: array[float] = field(default_factory=lambda: array("d"))
    lag: array[float] = field(default_factory=lambda: array("d"))
    kind: bytearray = field(default_factory=bytearray)
    bad: bytearray = field(default_factory=bytearray)
    group: bytearray = field(default_factory=bytearray)
    unreported: bytearray = field(default_factory=bytearray)
    claims_end: int = 0
    """Where the claims that count end; the sends after them are there for the last ones to have neighbours."""
    holds: list[tuple[float, float]] = field(default_factory=list)
    """When a database that went back had all releases held."""

    def on_hold(self, now: float) -> bool:
        """Whether all releases are held; what was decided between a backup and its restore is forgotten too."""
        place = bisect_right(self.holds, (now, math.inf))
        return place > 0 and now < self.holds[place - 1][1]

    def go_back(self, backup: float) -> float:
        """Lose what happened after a backup, and return when all goes on.

        Sends of that time are gone from the log; events of older ones are replayed before the operator resumes. While
        all is held nothing is claimed either.
        """
        restored, resumed = backup + GONE, backup + GONE + ON_HOLD
        for i in range(bisect_left(self.at, backup - LONGEST), len(self.at)):
            if backup < self.at[i] + self.lag[i] < restored:
                self.lag[i] = resumed - self.at[i]
        self.holds.append((backup, resumed))
        return resumed


def coming_spells(world: World, random: Random, first: float) -> Iterator[Spell]:
    """Yield spells for ever."""
    if world.fate is None:
        yield Spell(math.inf, math.inf, 0.0)
    if world.for_good:
        yield Spell(first, math.inf, random.random())
    end = 0.0
    while True:
        start = end + random.expovariate(1 / (world.spells.gap * HOUR))
        end = start + random.uniform(*world.spells.lasts) * HOUR
        yield Spell(start, end, random.random())


def sends(world: World, random: Random, claims: int) -> Sends:
    """Return the sends of a world until it has the given number of ambiguous ones."""
    made = Sends()
    groups = world.groups
    bounds = [sum(g.weight for g in groups[: i + 1]) for i in range(len(groups))]
    first = 0.8 * claims / (USUAL_AMBIGUOUS * world.rate) * HOUR
    coming = coming_spells(world, random, first)
    spell = next(coming)
    a_second = world.rate / HOUR
    now, found, roll, until, backup = 0.0, 0, random.random, math.inf, 0.0
    while now < until:
        now += random.expovariate(a_second)
        if found == claims and until == math.inf:
            made.claims_end, until = len(made.at), now + min(2.0, 20_000 / world.rate) * HOUR
        while now >= spell.end:
            if world.restored and spell.end > backup:
                backup = spell.end
                now = max(now, made.go_back(backup))
            spell = next(coming)
        inside = now >= spell.start and (world.shard == 1.0 or roll() < world.shard)
        which = 0
        if len(groups) > 1:
            dice = roll() * bounds[-1]
            which = next(i for i, bound in enumerate(bounds) if dice < bound or i == len(bounds) - 1)
        group = groups[which]
        kind, lost_to_us = CONTROL, False
        if roll() < (world.ambiguous if inside else USUAL_AMBIGUOUS):
            found += 1
            lost_to_us = roll() < UNREPORTED
            kind = ACCEPTED if roll() < P_ACCEPTED[lost_to_us] else ABSENT
        lag = LOST
        if kind != ABSENT:
            lag = group.lag(random)
            if inside and world.fate:
                lag = max(lag, world.fate(random, now, spell, kind != CONTROL))
            if kind == ACCEPTED and world.late_ambiguous:
                lag = max(lag, world.late_ambiguous(random, now, spell, True))
        made.at.append(now)
        made.lag.append(lag)
        made.kind.append(kind)
        made.bad.append(inside or group.bad)
        made.group.append(which)
        made.unreported.append(lost_to_us)
    return made


# Fates


def delayed(random: Random, at: float, spell: Spell, ambiguous: bool) -> float:
    """Everything comes in order, one to four hours late."""
    return (1 + 3 * spell.dice) * HOUR


def down(random: Random, at: float, spell: Spell, ambiguous: bool) -> float:
    """Nothing comes, ever, or everything in order once it is over."""
    return LOST if spell.dice < 0.5 else spell.end - at + 0.01 * (at - spell.start)


def draining(random: Random, at: float, spell: Spell, ambiguous: bool) -> float:
    """Nothing comes until it is over, then the backlog in random order within ten minutes to an hour."""
    return spell.end - at + random.random() * (600 + 3000 * spell.dice)


def lossy(random: Random, at: float, spell: Spell, ambiguous: bool) -> float:
    """A share of 30 to 90 % never comes."""
    return LOST if random.random() < 0.3 + 0.6 * spell.dice else 0.0


def half(random: Random, at: float, spell: Spell, ambiguous: bool) -> float:
    """Every second comes without our key."""
    return LOST if random.random() < 0.5 else 0.0


def half_or_late(random: Random, at: float, spell: Spell, ambiguous: bool) -> float:
    """Half of the events never come, or all come six hours late."""
    if spell.dice < 0.5:
        return LOST if random.random() < 0.5 else 0.0
    return 6 * HOUR


def never(random: Random, at: float, spell: Spell, ambiguous: bool) -> float:
    """Nothing ever comes."""
    return LOST


def some_late(random: Random, at: float, spell: Spell, ambiguous: bool) -> float:
    """Three in ten come one to five hours late."""
    return random.uniform(1, 5) * HOUR if random.random() < 0.3 else 0.0


def well(random: Random, at: float, spell: Spell, ambiguous: bool) -> float:
    """Nothing ails the events."""
    return 0.0


# The worlds

DOMAINS: Final = (
    Group(0.40, domain="big.example", median=30.0),
    Group(0.25, domain="large.example", median=30.0),
    Group(0.15, domain="fair.example", median=30.0),
    Group(0.03, domain="slow.example", median=3 * HOUR, spread=0.7, bad=True),
    *(Group(0.17 / 40, domain=f"small-{i}.example", median=40.0) for i in range(40)),
)
"""Domains of a feed whose first event is the delivery; a slow one, and forty that have few sends."""


def _worlds() -> Iterator[World]:
    for rate in (10, 100, 1_000, 10_000, 100_000):
        yield World("healthy", rate, promise="healthy")
    for rate in (10, 1_000, 100_000):
        yield from _ill_worlds(rate)
    for rate in (10, 1_000, 10_000):  # at 100,000 all 20,000 would be over before any of them can be known
        yield World("only ambiguous late", rate, late_ambiguous=some_late, exception="learning")
    for rate in (10, 1_000, 100_000):
        yield from _partly_ill_worlds(rate)
    before_a_backup = Spells((1 / 3, 1 / 2), 24.0)
    for rate in (10, 1_000):
        yield World("restored", rate, fate=well, spells=before_a_backup, ambiguous=0.1, restored=True)
    yield World("never echoing", 1_000, groups=(Group(1.0, lost=1.0, bad=True),), promise="deaf")


def _ill_worlds(rate: float) -> Iterator[World]:
    hours = min(3.0, max(0.3, 60 / rate))
    often = Spells((hours, 2 * hours), 12 * hours)
    yield World("down", rate, fate=down, spells=often)
    yield World("draining", rate, fate=draining, spells=often)
    yield World("dead", rate, fate=never, for_good=True, promise="deaf")
    yield World("sick shard", rate, fate=half_or_late, spells=often, ambiguous=0.6, shard=0.1, exception="shard")
    hours = min(hours, 3_000 / rate)
    yield World("browned out", rate, fate=half_or_late, spells=Spells((hours, 2 * hours), 100 * hours), ambiguous=1.0)


def _partly_ill_worlds(rate: float) -> Iterator[World]:
    hours = min(3.0, max(0.3, 60 / rate))
    often = Spells((hours, 2 * hours), 12 * hours)
    yield World("delayed", rate, fate=delayed, spells=often)
    yield World("lossy", rate, fate=lossy, spells=often)
    yield World("half echoing", rate, fate=half, for_good=True)
    if rate < 100_000:  # where one spell in which three in ten are ambiguous would hold most of the 20,000
        seldom = Spells((hours, 2 * hours), 60 * hours)
        yield World("ill when ambiguous", rate, fate=half_or_late, spells=seldom, ambiguous=0.3)
    yield World("class without echo", rate, groups=(Group(0.95), Group(0.05, "reports", lost=1.0, bad=True)))
    yield World("slow domains", rate, groups=DOMAINS)


WORLDS: Final = tuple(_worlds())
