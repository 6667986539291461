# SPDX-License-Identifier: Apache-2.0
"""How much may be released at once, and of which feeds: the blast radius of a rule that is wrong. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final, Literal

from reconciler.rule.policy import Action, Verdict

LIMITED: Final = ("absent", "looked_up", "gave_up")
"""Reasons of the releases that may duplicate. Those with the same key may not, by the provider's promise."""

LEAST_BUDGET: Final = 20
"""So many releases an hour are allowed whatever the share, unless `count` is less."""

LEAST_CANARY: Final = 10
"""So many releases are allowed before the evidence of any was awaited."""

LOOK_AGAIN: Final = timedelta(minutes=1)
"""After so long a release that was not allowed is looked at again; after a canary's grace, where that is shorter."""


@dataclass(frozen=True, slots=True)
class Live:
    """The feeds whose sends passes move: only those named, or all but those named. Of the others they only record."""

    names: frozenset[str]
    only: bool

    def __contains__(self, feed: object) -> bool:
        return (feed in self.names) == self.only


ALL_LIVE: Final = Live(frozenset(), only=False)


@dataclass(frozen=True, slots=True)
class Limit:
    """How much the owner of a feed lets passes release."""

    count: int
    """Releases an hour."""
    share: float
    """Releases an hour as a share of the feed's claims of that hour, 0 to 1."""
    canary: float
    """Share of many that is released first, above 0 to 1; the rest after the first ones' evidence was awaited."""
    awaited: timedelta
    """How long the evidence of a release is awaited."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What was released on a feed."""

    last_hour: int
    claims: int
    """Claims of the last hour, at most as many as the wanted releases need."""
    unproved: int
    """Releases whose evidence is still awaited."""
    proved: int
    """Releases of the last day, at most a thousand and as many as the wanted ones need, whose evidence was awaited,
    since one of them was found wrong."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """How many of the wanted releases may be done now, and why the others may not."""

    n: int
    otherwise: Literal["budget", "canary"]
    again: timedelta = LOOK_AGAIN
    """When the others are looked at again."""


def allowance(limit: Limit, usage: Usage, wanted: int) -> Allowance:
    """Return how many of the wanted releases of a feed may be done now."""
    budget = min(limit.count, max(LEAST_BUDGET, math.floor(limit.share * usage.claims))) - usage.last_hour
    if limit.canary >= 1:
        return Allowance(max(0, budget), "budget")
    first = max(LEAST_CANARY, math.ceil(limit.canary * wanted), math.floor(usage.proved / limit.canary))
    canary = first - usage.unproved
    if canary < budget:
        return Allowance(max(0, canary), "canary", min(LOOK_AGAIN, limit.awaited))
    return Allowance(max(0, budget), "budget")


def held_instead(release: Verdict, allowed: Allowance, now: datetime) -> Verdict:
    """Return what becomes of a release that is not allowed now."""
    return replace(release, action=Action.HELD, reason=allowed.otherwise, next_check_at=now + allowed.again)
