# SPDX-License-Identifier: Apache-2.0
"""Draws lags as an SVG picture: of each feed and class the lag curve, the risk over age, and coverage by the hour."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from html import escape
from typing import Final

from reconciler.insight.lag import Hour, Lag, Point
from reconciler.rule.in_words import percent
from reconciler.units import format_duration

WIDTH, HEIGHT, ROW = 320, 160, 260
LEFT, TOP, GAP, MARGIN = 60, 60, 90, 24
LEAST_RISK: Final = 1e-5
MARKED_AGES: Final = (1, 10, 60, 600, 3600, 6 * 3600, 86400)

STYLE: Final = """
text { font: 12px sans-serif; fill: #222 } .title { font-size: 14px; font-weight: bold } .axis { fill: #666 }
.frame { fill: none; stroke: #bbb } .line { fill: none; stroke: #1f5fa8; stroke-width: 2 } .bar { fill: #1f5fa8 }
.less { fill: #c0392b } .mark { stroke: #c0392b; stroke-dasharray: 4 3 } .advice { stroke: #2e7d32; stroke-width: 2 }
.ground { fill: #fff }
"""

Scale = Callable[[float], float]
"""From a value to its place in the panel."""


def picture(lags: Sequence[Lag]) -> str:
    """Return an SVG document; each lag is a row of three panels."""
    width, height = LEFT + 3 * (WIDTH + GAP), TOP + max(1, len(lags)) * ROW
    rows = "\n".join(part for n, lag in enumerate(lags) for part in _row(lag, TOP + n * ROW))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">\n'
        f'<style>{STYLE}</style>\n<rect class="ground" width="{width}" height="{height}"/>\n{rows}\n</svg>\n'
    )


def curve(lag: Lag, label: str) -> str:
    """Return the lag curve as an element for a page, which has the style; `label` says it to those who don't see it."""
    width, height = LEFT + WIDTH + MARGIN, 2 * MARGIN + HEIGHT
    panel = "\n".join(_panel(0, MARGIN, "heard of within", _heard(lag, _ages(lag.points))))
    return (
        f'<svg class="curve" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">\n{panel}\n</svg>'
    )


def _row(lag: Lag, top: float) -> Iterator[str]:
    advice = f"advised grace {format_duration(lag.advised)}" if lag.advised else f"no grace advised: {lag.why_none}"
    title = f"{lag.feed}, class {lag.message_class}: {lag.sends} answered sends, grace {format_duration(lag.grace)}"
    yield _text(LEFT, top - 28, f"{title}, {advice}", "title")
    across = _ages(lag.points)
    yield from _panel(0, top, f"heard of within (98 % by {_age(lag.late_after)})", _heard(lag, across))
    yield from _panel(1, top, f"risk of a release (at most {percent(lag.max_risk)})", _risk(lag, across))
    yield from _panel(2, top, "heard of by now, by hour of the claim", _coverage(lag.hours))


def _panel(column: int, top: float, title: str, parts: Iterable[str]) -> Iterator[str]:
    yield f'<g transform="translate({LEFT + column * (WIDTH + GAP)} {top})">'
    yield _text(0, -8, title)
    yield f'<rect class="frame" width="{WIDTH}" height="{HEIGHT}"/>'
    yield from parts
    yield "</g>"


def _heard(lag: Lag, across: Scale) -> Iterator[str]:
    yield from _marks(across, lag)
    for share in (0.0, 0.5, 1.0):
        yield _text(-8, _share(share) + 4, f"{share:.0%}", "axis", "end")
    yield _line([(across(p.age), _share(p.heard)) for p in lag.points if p.heard is not None])


def _risk(lag: Lag, across: Scale) -> Iterator[str]:
    yield from _marks(across, lag)
    for risk in (1.0, 0.1, 0.01, 0.001, 0.0001, LEAST_RISK):
        yield _text(-8, _log_risk(risk) + 4, percent(risk), "axis", "end")
    at = _log_risk(lag.max_risk)
    yield f'<line class="mark" x1="0" x2="{WIDTH}" y1="{at:.1f}" y2="{at:.1f}"/>'
    yield _line([(across(p.age), _log_risk(p.risk)) for p in lag.points if p.risk is not None])


def _coverage(hours: Sequence[Hour]) -> Iterator[str]:
    step = WIDTH / max(1, len(hours))
    for n, hour in enumerate(hours):
        for share, kind in ((1.0, "less"), (hour.heard / hour.sends, "bar")):
            high = HEIGHT * share
            place = f'x="{n * step + 1:.1f}" y="{HEIGHT - high:.1f}" width="{max(1.0, step - 2):.1f}"'
            yield f'<rect class="{kind}" {place} height="{high:.1f}"/>'
    for n in sorted({0, len(hours) - 1}) if hours else ():
        yield _text((n + 0.5) * step, HEIGHT + 16, f"{hours[n].since:%H:%M}", "axis", "middle")


def _marks(across: Scale, lag: Lag) -> Iterator[str]:
    """Yield the ages below a panel, and upright lines where the grace is and where it could be."""
    last = lag.points[-1].age if lag.points else 1.0
    for age in MARKED_AGES:
        if age <= last:
            yield _text(across(age), HEIGHT + 16, _age(age), "axis", "middle")
    for kind, at in (("mark", lag.grace), ("advice", lag.advised)):
        if at is not None:
            x = across(min(at.total_seconds(), last))
            yield f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{HEIGHT}"/>'


def _ages(points: Sequence[Point]) -> Scale:
    last = math.log(max(2.0, points[-1].age)) if points else 1.0
    return lambda age: WIDTH * math.log(max(1.0, age)) / last


def _share(share: float) -> float:
    return HEIGHT * (1 - share)


def _log_risk(risk: float) -> float:
    return HEIGHT * math.log10(max(LEAST_RISK, min(1.0, risk))) / math.log10(LEAST_RISK)


def _line(points: Sequence[tuple[float, float]]) -> str:
    return f'<polyline class="line" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def _age(seconds: float | None) -> str:
    return "-" if seconds is None else format_duration(timedelta(seconds=round(seconds, 1)))
