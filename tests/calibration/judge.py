# SPDX-License-Identifier: Apache-2.0
"""The promises that a simulated world must keep."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from .simulation import Outcome, Tally

SIGNIFICANT: Final = 0.01
BUSY: Final = 1_000
IN_TIME: Final = 0.99
AT_MOST: Final = 20.0
TIMES_ACTUAL: Final = 30
BUDGET: Final = (1_000, 20, 0.2)
"""What the product's release budget is by default: at most so many an hour, and of the feed's sends of the last hour so
large a share, but so few at least. The rule is judged without it."""

SHARD_SHARE: Final = 0.10
"""Of the ambiguous sends of a sick shard's spells that may become duplicates. One send in ten is the shard's, and the
controls beside it are well: only the crowd of ambiguous ones tells it from chance, and at ten sends an hour there is no
crowd. Absence can't be told from acceptance there but by a look-up."""


def p_value(stated: float, actual: int) -> float:
    """Return the probability of `actual` duplicates or more where their number is Poisson with the stated mean."""
    if actual == 0:
        return 1.0
    if stated <= 0:
        return 0.0
    below = math.fsum(math.exp(i * math.log(stated) - stated - math.lgamma(i + 1)) for i in range(actual))
    return max(0.0, 1 - below)


def budget(rate: float) -> float:
    """Return how many releases an hour the default budget of a feed allows."""
    most, least, share = BUDGET
    return min(most, max(least, share * rate))


def broken(outcome: Outcome) -> list[str]:
    """Return a sentence for each promise that the world breaks."""
    world = outcome.world
    return [f"BROKEN {world.name}@{world.rate}: {why}" for why in _broken(outcome)]


def _broken(outcome: Outcome) -> Iterator[str]:
    world, everything, bad = outcome.world, outcome.all, outcome.bad
    if world.exception == "shard":
        if bad.duplicates > SHARD_SHARE * bad.ambiguous:
            yield f"{bad.duplicates} of {bad.ambiguous} ambiguous sends in its spells became duplicates"
        yield from _untrue("outside its spells", _without(everything, bad))
    else:
        yield from _untrue("all", everything)
        yield from _untrue("bad spells", bad)
    allowed = budget(world.rate) * outcome.learning_hours
    if outcome.learning.duplicates > allowed:
        yield f"{outcome.learning.duplicates} duplicates before it could know are more than the budget's {allowed:.0f}"
    if world.promise == "healthy":
        yield from _unhealthy(world.rate, everything)
    if outcome.on_hold:
        yield f"{outcome.on_hold} releases while all was to be held"
    if world.promise == "deaf" and bad.released:
        yield f"{bad.released} releases on the silence of a deaf feed"


def _untrue(part: str, tally: Tally) -> Iterator[str]:
    if (p := p_value(tally.stated, tally.duplicates)) < SIGNIFICANT:
        yield f"{part}: {tally.duplicates} duplicates, {tally.stated:.2f} stated (p = {p:.4f})"


def _unhealthy(rate: float, tally: Tally) -> Iterator[str]:
    if tally.stated > max(AT_MOST, TIMES_ACTUAL * tally.duplicates):
        yield f"{tally.stated:.1f} stated, {tally.duplicates} duplicates: too careful to be true"
    if rate >= BUSY and tally.in_time < IN_TIME * tally.absent:
        yield f"{tally.in_time} of {tally.absent} absent sends released in time"


def _without(everything: Tally, bad: Tally) -> Tally:
    return Tally(stated=everything.stated - bad.stated, duplicates=everything.duplicates - bad.duplicates)
