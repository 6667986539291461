# SPDX-License-Identifier: Apache-2.0
"""How fast a feed speaks of what was sent: its lag curve and coverage, what silence is worth, the grace it advises.

The figures are those by which passes decide, shown for where all is well around a claim whose failure was reported.
Ages and lags are seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from reconciler.configuration.facts import LEAST_GRACE, least_grace
from reconciler.configuration.settings import Settings
from reconciler.database.connection import Connection
from reconciler.passes.histories import Histories
from reconciler.rule.history import ENOUGH
from reconciler.rule.in_words import percent
from reconciler.rule.outlook import released_at, silent_for
from reconciler.rule.policy import Rules
from reconciler.rule.silence import FeedHistory, Sighting

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
AGES: Final = (
    *(1, 2, 3, 5, 10, 15, 20, 30, 45),
    *(_MINUTE * n for n in (1, 2, 3, 5, 10, 15, 20, 30, 45)),
    *(_HOUR * n for n in (1, 2, 3, 4, 6, 8, 12, 24)),
    *(_DAY * n for n in (2, 3, 7)),
)
"""The ages that are shown, and the graces that are advised: those that people would write."""

HOURS: Final = 24
"""How far back coverage is told."""


@dataclass(frozen=True, slots=True)
class Point:
    """What is known of one age."""

    age: float
    sends: int
    """Answered sends that have passed it."""
    heard: float | None
    """Share of them that were heard of within it; None: there are none."""
    risk: float | None
    """How likely a release at this age duplicates; None: silence says nothing then."""


@dataclass(frozen=True, slots=True)
class Hour:
    """Answered sends that were claimed within one hour, of a sample."""

    since: datetime
    sends: int
    heard: int
    """Those that the feed has spoken of by now."""


@dataclass(frozen=True, slots=True)
class Lag:
    """How fast one feed speaks of one message class."""

    feed: str
    message_class: str
    sends: int
    """Answered sends that this rests on, of a sample; of the whole feed where the class has too few."""
    missing: int
    """How many are missing before silence means anything."""
    half_after: float | None
    """The age at which half are heard of; None: more are missed at every age."""
    late_after: float | None
    """The age at which 98 in 100 are."""
    grace: timedelta
    """As it is set."""
    max_risk: float
    advised: timedelta | None
    """The grace that would be enough: 98 in 100 are heard of, a silent send may be released, and it is no shorter than
    makes sense with the provider. None: none would."""
    why_advised: str | None
    """Why no shorter one is."""
    why_none: str | None
    """Why none is advised."""
    points: list[Point]
    hours: list[Hour]


async def read_lags(connection: Connection, settings: Settings, feeds: Iterable[str], now: datetime) -> list[Lag]:
    """Return the lags of feeds, each with its message classes."""
    histories = Histories(settings.rules_for, settings.waits_for_delivery)
    found = await histories.of(connection, {(feed, "default") for feed in feeds}, now)
    return [lag for history in found.values() for lag in lags(history, settings)]


def lags(history: FeedHistory, settings: Settings) -> Iterator[Lag]:
    """Yield the lags of the classes of which a feed has answered sends, or of `default` where it has none."""
    configured = settings.feeds.get(history.feed)
    least = least_grace(configured) if configured else LEAST_GRACE
    known = sorted(name for name, controls in history.controls.items() if controls)
    for name in known or ["default"]:
        yield _lag(history, name, settings.rules_for(history.feed, name), least)


def _lag(history: FeedHistory, message_class: str, rules: Rules, least: timedelta) -> Lag:
    curve = history.curve(history.stratum_of(message_class, None), message_class)
    sends = curve.at(0.0).n
    advised, why_advised, why_none = _advised(history, message_class, rules, least)
    return Lag(
        feed=history.feed,
        message_class=message_class,
        sends=sends,
        missing=max(0, ENOUGH - curve.at(rules.grace.total_seconds()).n),
        half_after=curve.heard_after(0.5),
        late_after=curve.late_after,
        grace=rules.grace,
        max_risk=rules.max_risk,
        advised=advised,
        why_advised=why_advised,
        why_none=why_none,
        points=[
            _point(age, history, message_class, rules) for age in AGES if age <= rules.give_up_after.total_seconds()
        ],
        hours=list(_hours(history.controls.get(message_class, ()), history.at)),
    )


def _advised(
    history: FeedHistory, message_class: str, rules: Rules, least: timedelta
) -> tuple[timedelta | None, str | None, str | None]:
    """Return the grace that is enough and what it waits for, or why there is none."""
    curve = history.curve(history.stratum_of(message_class, None), message_class)
    if curve.no_echo:
        return None, None, "the feed never spoke of this class: is it stamped?"
    if (missing := ENOUGH - curve.at(rules.grace.total_seconds()).n) > 0:
        return None, None, f"{missing} answered sends are missing before its silence means anything"
    if curve.late_after is None:
        return None, None, "more than 2 in 100 are missed at every age: does the feed lose events?"
    earliest = released_at(history, message_class, rules, 1.0)
    if earliest is None:
        return None, None, f"a release on silence would never be as safe as max_risk ({percent(rules.max_risk)}) asks"
    enough, why = max(
        (least.total_seconds(), "this provider's first event often takes that long"),
        (curve.late_after, "98 in 100 are heard of by then"),
        (earliest, f"a release is as safe by then as max_risk ({percent(rules.max_risk)}) asks"),
        key=lambda one: one[0],
    )
    return next((timedelta(seconds=age) for age in AGES if age >= enough), None), why, None


def _point(age: float, history: FeedHistory, message_class: str, rules: Rules) -> Point:
    found = silent_for(age, history, message_class, rules)
    n, k = found.counts.n, found.counts.k
    return Point(age, n, (n - k) / n if n else None, found.risk if found.reason in ("", "risk") else None)


def _hours(controls: Iterable[Sighting], now: float) -> Iterator[Hour]:
    """Count controls by hours of the clock, the oldest first; hours without any are left out."""
    by_hour: dict[int, list[Sighting]] = {}
    for seen in controls:
        if now - seen.at < HOURS * _HOUR:
            by_hour.setdefault(int(seen.at // _HOUR), []).append(seen)
    for hour, sends in sorted(by_hour.items()):
        heard = sum(1 for seen in sends if seen.lag is not None)
        yield Hour(datetime.fromtimestamp(hour * _HOUR, UTC), len(sends), heard)
