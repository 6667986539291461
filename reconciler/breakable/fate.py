# SPDX-License-Identifier: Apache-2.0
"""What becomes of a request to a provider, and of the webhooks of a message that it took: thrown with dice. Pure.

The dice are `random.Random` of the caller's, so that the same seed gives the same faults.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from random import Random
from typing import Final, Literal

Said = Literal["accepted", "deferred", "delivered", "bounced", "complained"]
"""What a webhook says, in the words of `reconciler trigger`; each provider has its own name for it."""

SAID: Final[tuple[Said, ...]] = ("accepted", "deferred", "delivered", "bounced", "complained")
"""In the order in which they happen to a message."""


class Fate(StrEnum):
    """What becomes of one request to send."""

    ANSWERED = "answered"
    """Taken, and answered so."""
    HANGS = "hangs"
    """Taken, and never answered."""
    RESET = "reset"
    """Taken, and the connection reset."""
    LATE_ERROR = "late_error"
    """Taken, and then answered 500."""
    LOST = "lost"
    """Not taken, and never answered."""
    REFUSED = "refused"
    """Not taken; the answer says that it will never be."""
    BUSY = "busy"
    """Not taken, and answered 429."""
    DOWN = "down"
    """Not taken, and the connection closed without a word."""

    @property
    def taken(self) -> bool:
        """Whether the provider has the message, so that its recipient gets it."""
        return self in _TAKEN


_TAKEN: Final = frozenset({Fate.ANSWERED, Fate.HANGS, Fate.RESET, Fate.LATE_ERROR})


@dataclass(frozen=True, slots=True)
class Fates:
    """The share of requests that meets each fate, from 0 to 1; the rest is answered. Raises ValueError above 1."""

    hangs: float = 0.0
    reset: float = 0.0
    late_error: float = 0.0
    lost: float = 0.0
    refused: float = 0.0
    busy: float = 0.0
    down: float = 0.0

    def __post_init__(self) -> None:
        shares = [share for _, share in self._shares()]
        if min(shares) < 0 or sum(shares) > 1 + 1e-9:
            raise ValueError("the shares of fates are at least 0 each and at most 1 together")

    def draw(self, dice: Random) -> Fate:
        """Return the fate of one request."""
        left = dice.random()
        for fate, share in self._shares():
            left -= share
            if left < 0:
                return fate
        return Fate.ANSWERED

    def _shares(self) -> list[tuple[Fate, float]]:
        return [(Fate(field.name), getattr(self, field.name)) for field in fields(self)]


@dataclass(frozen=True, slots=True)
class Telling:
    """What becomes of the webhooks of a message that was taken. Times are seconds from its taking, shares from 0 to 1.

    Raises ValueError for a share or a time that is none.
    """

    kinds: tuple[Said, ...] = ("accepted", "delivered")
    """What is said of a message, in this order."""
    delay: tuple[float, float] = (0.0, 0.0)
    """The least and greatest time until a webhook is posted."""
    tail: float = 0.0
    """Share of webhooks that come late instead: after `tail_delay`."""
    tail_delay: tuple[float, float] = (0.0, 0.0)
    silent: float = 0.0
    """Share of messages of which nothing is ever said."""
    lost: float = 0.0
    """Share of single webhooks that never come."""
    twice: float = 0.0
    """Share of webhooks that come once more, after another delay."""
    bounced: float = 0.0
    """Share of messages that bounce instead of being delivered."""
    shuffled: bool = False
    """Whether a later word on a message may come before an earlier one."""
    batch: int = 1
    """The most events in one post of a provider that batches (SendGrid); they wait up to half a second for others."""

    def __post_init__(self) -> None:
        shares = (self.tail, self.silent, self.lost, self.twice, self.bounced)
        if min(shares) < 0 or max(shares) > 1:
            raise ValueError("a share lies between 0 and 1")
        for least, greatest in (self.delay, self.tail_delay):
            if not 0 <= least <= greatest:
                raise ValueError("a delay has a least and a greatest time, in seconds")
        if self.batch < 1:
            raise ValueError("a batch holds at least one event")

    def tell(self, dice: Random) -> list[tuple[float, Said]]:
        """Return what is said of one message, and after how many seconds; a kind that comes twice is there twice."""
        if dice.random() < self.silent:
            return []
        bounces = dice.random() < self.bounced
        kinds = ["bounced" if bounces and kind == "delivered" else kind for kind in self.kinds]
        delays = [self._delay(dice) for _ in kinds]
        if not self.shuffled:
            delays.sort()
        told: list[tuple[float, Said]] = []
        for delay, kind in zip(delays, kinds, strict=True):
            if dice.random() < self.lost:
                continue
            told.append((delay, kind))
            if dice.random() < self.twice:
                told.append((delay + self._delay(dice), kind))
        return sorted(told, key=lambda one: one[0])

    def _delay(self, dice: Random) -> float:
        late = dice.random() < self.tail
        return dice.uniform(*(self.tail_delay if late else self.delay))
