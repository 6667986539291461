# SPDX-License-Identifier: Apache-2.0
"""The world that is lived through: feeds, their bad spells, what is to be sent when. Pure; same seed, same world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from random import Random
from typing import Final, Literal, NamedTuple

from reconciler.rule.limits import Limit
from reconciler.rule.policy import Rules
from webhooks.event import wire_key

BEGIN: Final = datetime(2026, 1, 31, 18, tzinfo=UTC)
"""When it begins: six hours before a month ends, and with it a partition."""

MINUTE: Final = timedelta(minutes=1)
"""How long a tick lasts while sends are made."""

GRACE: Final = timedelta(minutes=15)

Weather = Literal["outage", "burst", "throttled", "paused", "no passes"]
"""What a spell is: events don't come until its end; the provider answers nothing; it takes nothing (429); an operator
has paused the feed; no pass runs (of all feeds)."""

EVERYWHERE: Final = "*"
LASTS: Final[dict[Weather, tuple[int, int]]] = {
    "outage": (20, 60),
    "burst": (4, 12),
    "throttled": (3, 6),
    "paused": (15, 40),
    "no passes": (10, 30),
}
"""Least and most minutes."""

SPELLS_EVERY: Final = 300
"""Minutes that hold one spell of each kind."""


@dataclass(frozen=True, slots=True)
class Place:
    """A feed of the simulation."""

    name: str
    share: float
    """Of all sends."""
    spells: tuple[Weather, ...]
    key_window: timedelta | None = None
    """How long its provider keeps our idempotency key."""
    echoes: bool = True
    """Whether it ever speaks of our sends; else only of others'."""
    budget: int = 1_000
    """Releases an hour."""


PLACES: Final = (
    Place("plain", 0.30, ("paused",), budget=60),
    Place("backlogged", 0.25, ("outage", "paused")),
    Place("keyed", 0.20, ("burst", "throttled"), key_window=timedelta(days=1)),
    Place("bursting", 0.15, ("burst", "outage")),
    Place("deaf", 0.10, ("throttled",), echoes=False),
)
PLACE: Final = {place.name: place for place in PLACES}
CLASSES: Final = {"receipts": 0.6, "alerts": 0.2, "marketing": 0.2}
ON_UNKNOWN: Final[dict[str, Literal["hold", "fail", "release"]]] = {"alerts": "fail", "marketing": "release"}


class Spell(NamedTuple):
    """A time in which something is ill; minutes from the beginning."""

    weather: Weather
    where: str
    begin: int
    end: int


class Wish(NamedTuple):
    """A message that the application wants to be sent."""

    key: str
    wire_key: str
    feed: str
    message_class: str
    options: dict[str, str]
    """For `send_claim`, without a nonce."""
    enqueued: bool
    """Written first, in a transaction of the application's own."""
    twice: bool
    """Two jobs want it at the same time."""

    @property
    def enqueue_options(self) -> dict[str, str]:
        """Return the options for `send_enqueue`, which knows no time to submit."""
        return {name: value for name, value in self.options.items() if name != "submit_within"}


class World:
    """Everything that is fixed before it begins."""

    def __init__(self, sends: int, seed: int) -> None:
        self.sends, self.seed = sends, seed
        self.per_minute = min(600, max(40, sends // 400))
        self.minutes = -(-sends // self.per_minute)
        """How long sends are made."""
        self.give_up = timedelta(hours=6 if sends >= 20_000 else 1)

    def dice(self, *of: object) -> Random:
        """Return the dice of one thing, the same whenever they are asked for."""
        return Random(":".join(map(str, (self.seed, *of))))

    def at(self, minute: int) -> datetime:
        """Return when a minute begins."""
        return BEGIN + minute * MINUTE

    @cached_property
    def spells(self) -> Sequence[Spell]:
        """All spells of all places."""
        found = []
        for where, kinds in [(place.name, place.spells) for place in PLACES] + [(EVERYWHERE, ("no passes",))]:
            for weather in kinds:
                found += self._spells_of(weather, where)
        return found

    def _spells_of(self, weather: Weather, where: str) -> list[Spell]:
        dice = self.dice("spells", weather, where)
        n = max(1, self.minutes // SPELLS_EVERY)
        room = self.minutes // n
        found = []
        for i in range(n):
            long = min(dice.randint(*LASTS[weather]), max(1, room // 3))
            begin = i * room + dice.randint(0, room - long)
            found.append(Spell(weather, where, begin, begin + long))
        return found

    @cached_property
    def _minutes_of_spells(self) -> dict[tuple[Weather, str, int], Spell]:
        return {(s.weather, s.where, minute): s for s in self.spells for minute in range(s.begin, s.end)}

    def spell(self, weather: Weather, where: str, at: datetime) -> Spell | None:
        """Return the spell of this kind that goes on there."""
        return self._minutes_of_spells.get((weather, where, (at - BEGIN) // MINUTE))

    def wishes(self, minute: int) -> list[Wish]:
        """Return what the application wants to be sent in a minute."""
        first = minute * self.per_minute
        return [self._wish(n, minute) for n in range(first, min(first + self.per_minute, self.sends))]

    def _wish(self, n: int, minute: int) -> Wish:
        dice = self.dice("wish", n)
        feed = dice.choices([p.name for p in PLACES], [p.share for p in PLACES])[0]
        name = dice.choices(list(CLASSES), list(CLASSES.values()))[0]
        key = f"order:{n}:receipt" if dice.random() < 0.2 else f"send-{n}"  # some can't travel as they are
        options = {"message_class": name, "submit_within": dice.choices(["60 s", "20 s", "4 min"], [8, 1, 1])[0]}
        if dice.random() < 0.8:
            options["recipient"] = f"r{n}@example.org"
        if PLACE[feed].key_window:
            options["fingerprint"] = f"f{n}"
        if dice.random() < 0.03:
            options["expires_at"] = (self.at(minute) + timedelta(minutes=dice.randint(20, 90))).isoformat()
        return Wish(key, wire_key(key), feed, name, options, dice.random() < 0.1, dice.random() < 0.03)

    def rules(self, _feed: str, message_class: str) -> Rules:
        """Return the rules of a feed and class: the defaults, but for when to give up, and how."""
        return Rules(
            grace=GRACE,
            give_up_after=self.give_up,
            max_risk=0.01,
            max_attempts=5,
            same_key_retry=True,
            retry_backoff=timedelta(seconds=30),
            on_unknown=ON_UNKNOWN.get(message_class, "hold"),
        )


def limit(feed: str) -> Limit:
    """Return how much may be released on a feed: the defaults, but that one has a small budget."""
    return Limit(count=PLACE[feed].budget, share=0.2, canary=0.1, awaited=GRACE)


def key_window(feed: str) -> timedelta | None:
    """Return how long the provider of a feed keeps our idempotency key."""
    return PLACE[feed].key_window
