# SPDX-License-Identifier: Apache-2.0
"""What a feed's silence is worth in general, as people are told it: coverage, lags, and when it releases. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from reconciler.rule.history import ENOUGH
from reconciler.rule.policy import Rules
from reconciler.rule.risk import MOST, Assessment, Burst, Recent, assess
from reconciler.rule.silence import FeedHistory
from webhooks.event import Answer

HOUR: Final = 3600.0
DEAF: Final = 20
"""Answered sends of which none was heard, from which on a feed counts as deaf."""

STEP: Final = 1.25
"""Ages at which a release is looked for grow by this factor."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the silence of one feed about one message class is worth. Ages and lags are seconds."""

    feed: str
    message_class: str
    controls: int
    """Answered sends behind the grace, of a sample of 2,000; of the whole feed where the class has too few."""
    own: int
    """Those of the class itself."""
    missing: int
    """How many are missing before silence means anything."""
    asked: int
    """Controls that passed the grace within the last hour."""
    heard: int
    """Those of them that were heard of."""
    half_after: float | None
    """The age at which half are heard of; None: more are missed at every age."""
    late_after: float | None
    """The age at which 2 % are not heard of yet; None: more are missed at every age."""
    no_echo: bool
    """The feed never spoke of any of the class."""
    released_at: float | None
    """The age at which a silent claim is released, its failure reported and all well around it; None: not by then."""

    @property
    def deaf(self) -> bool:
        """Whether so many were answered and none was heard of that it is no chance: the key does not come back."""
        return self.no_echo and self.own >= DEAF


def outlooks(history: FeedHistory, rules: dict[str, Rules]) -> Iterator[Outlook]:
    """Return what is known of message classes of a feed, each with its rules."""
    for name in sorted(rules):
        of = history.stratum_of(name, None)
        curve = history.curve(of, name)
        grace = rules[name].grace.total_seconds()
        counts = curve.at(grace)
        own = [s for s in history.controls.get(name, ()) if grace <= history.at - s.at]
        lately = [s for s in own if history.at - s.at < grace + HOUR]
        yield Outlook(
            history.feed,
            name,
            counts.n,
            len(own),
            max(0, ENOUGH - counts.n),
            len(lately),
            sum(1 for seen in lately if seen.lag is not None),
            curve.heard_after(0.5),
            curve.late_after,
            curve.no_echo,
            released_at(history, name, rules[name], grace),
        )


def released_at(history: FeedHistory, message_class: str, rules: Rules, earliest: float) -> float | None:
    """Return the age, not below `earliest`, at which a silent claim is released where all is well around it."""
    age, last = max(1.0, earliest), rules.give_up_after.total_seconds()
    while age < last:
        if silent_for(age, history, message_class, rules).answer is Answer.ABSENT:
            return age
        age *= STEP
    return None


def silent_for(age: float, history: FeedHistory, message_class: str, rules: Rules) -> Assessment:
    """Say what silence of that age is worth about a claim whose failure was reported, where all is well around it."""
    curve = history.curve(history.stratum_of(message_class, None), message_class)
    well = Recent(MOST, MOST, 0, 0, curve.late_after or 0.0)
    prior = max(history.prior(reported=True), rules.prior_floor)
    return assess(age, curve, well, Burst((), history.share), prior, rules.stress, rules.max_risk)
