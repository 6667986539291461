# SPDX-License-Identifier: Apache-2.0
"""How fast a feed speaks, as a page shows it: a curve, what that says in words, and its numbers as a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from markupsafe import Markup

from reconciler.insight.lag import Lag, Point
from reconciler.insight.lag_plot import curve
from reconciler.rule.in_words import percent
from reconciler.ui.render import Table, table, visible
from reconciler.units import format_duration, roughly

MOST: Final = 5
"""Curves of a feed: those of the classes with the most answered sends. `reconciler report lag` has them all."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One message class of a feed."""

    picture: Markup
    said: str
    numbers: Table


def curves(lags: Iterable[Lag]) -> Mapping[str, list[Curve]]:
    """Return the curves of each feed, the class with the most answered sends first; none where nothing was answered."""
    found: defaultdict[str, list[Curve]] = defaultdict(list)
    for lag in sorted(lags, key=lambda lag: (-lag.sends, lag.message_class)):
        if lag.sends and len(found[lag.feed]) < MOST:
            found[lag.feed].append(_curve(lag))
    return found


def _curve(lag: Lag) -> Curve:
    label = f"Lag curve of {lag.feed}, class {lag.message_class}. {_speed(lag)}"
    return Curve(
        Markup(curve(lag, visible(label))),  # noqa: S704 - numbers, and text that it escapes
        f"Class {lag.message_class}: {_speed(lag)} {_graces(lag)}",
        table(
            f"How fast {lag.feed} speaks of class {lag.message_class}",
            ("Age", "Sends that passed it", "Heard of by then", "Risk of a release then"),
            [_row(point) for point in lag.points if point.sends],
            "nothing was answered",
        ),
    )


def _speed(lag: Lag) -> str:
    if lag.half_after is None:
        return f"Of {lag.sends:,} answered sends not even half were heard of at any age."
    late = f", 98 in 100 within {_age(lag.late_after)}" if lag.late_after is not None else ""
    return f"Of {lag.sends:,} answered sends half were heard of within {_age(lag.half_after)}{late}."


def _age(seconds: float) -> str:
    return roughly(timedelta(seconds=seconds))


def _graces(lag: Lag) -> str:
    dashed = f"The dashed line is the grace, {format_duration(lag.grace)};"
    if lag.advised is None:
        return f"{dashed} none is advised: {lag.why_none}."
    return f"{dashed} the other one the grace that is advised, {format_duration(lag.advised)}."


def _row(point: Point) -> tuple[object, ...]:
    heard = None if point.heard is None else f"{100 * point.heard:.1f} %"
    risk = None if point.risk is None else percent(point.risk)
    return format_duration(timedelta(seconds=point.age)), point.sends, heard, risk
