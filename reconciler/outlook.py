# SPDX-License-Identifier: Apache-2.0
"""What a feed's silence is worth in general, as people are told it: coverage, lags, and when it releases. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from reconciler.history import ENOUGH
from reconciler.policy import Rules
from reconciler.risk import MOST, Burst, Recent, assess
from reconciler.silence import FeedHistory
from webhooks.event import Answer

HOUR: Final = 3600.0
STEP: Final = 1.25
"""Ages at which a release is looked for grow by this factor."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the silence of one feed about one message class is worth. Ages and lags are seconds."""

    feed: str
    message_class: str
    controls: int
    """Answered sends behind the grace, of a sample of 2,000; of the whole feed where the class has too few."""
    missing: int
    """How many are missing before silence means anything."""
    asked: int
    """Controls that passed the grace within the last hour."""
    heard: int
    """Those of them that were heard of."""
    late_after: float | None
    """The age at which 2 % are not heard of yet; None: more are missed at every age."""
    no_echo: bool
    """The feed never spoke of any of the class."""
    released_at: float | None
    """The age at which a silent claim is released, its failure reported and all well around it; None: not by then."""


def outlooks(history: FeedHistory, rules: dict[str, Rules]) -> Iterator[Outlook]:
    """Return what is known of message classes of a feed, each with its rules."""
    for name in sorted(rules):
        of = history.stratum_of(name, None)
        curve = history.curve(of, name)
        grace = rules[name].grace.total_seconds()
        counts = curve.at(grace)
        lately = [s for s in history.controls.get(name, ()) if grace <= history.at - s.at < grace + HOUR]
        yield Outlook(
            history.feed,
            name,
            counts.n,
            max(0, ENOUGH - counts.n),
            len(lately),
            sum(1 for seen in lately if seen.lag is not None),
            curve.late_after,
            curve.no_echo,
            _released_at(history, name, rules[name]),
        )


def _released_at(history: FeedHistory, message_class: str, rules: Rules) -> float | None:
    curve = history.curve(history.stratum_of(message_class, None), message_class)
    well = Recent(MOST, MOST, 0, 0, curve.late_after or 0.0)
    prior = max(history.prior(reported=True), rules.prior_floor)
    age, last = max(1.0, rules.grace.total_seconds()), rules.give_up_after.total_seconds()
    while age < last:
        found = assess(age, curve, well, Burst((), history.share), prior, rules.stress, rules.max_risk)
        if found.answer is Answer.ABSENT:
            return age
        age *= STEP
    return None
