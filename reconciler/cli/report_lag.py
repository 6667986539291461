# SPDX-License-Identifier: Apache-2.0
"""`reconciler report lag`: how fast feeds speak of what was sent, and the grace that would be enough."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from reconciler.cli.root import App, Command, feed_option, json_option
from reconciler.cli.text import say, say_json, say_table
from reconciler.errors import UserError

if TYPE_CHECKING:
    from reconciler.insight.lag import Lag, Point
    from webhooks.database import BoundedPool

BAR: Final = 40
"""Characters of a full bar."""


@click.command(cls=Command, epilog="Example: reconciler report lag --feed mailgun-eu --plot lag.svg")
@click.option("--plot", metavar="FILE", type=click.Path(path_type=Path), help="Also draw it, as an SVG picture.")
@feed_option
@json_option
@click.pass_obj
def lag(app: App, plot: Path | None, feed: str | None, as_json: bool) -> None:
    """Show each feed's lag and coverage, and the grace it advises.

    Of answered sends past their grace (of a message class at most 2,000; of a busy one 21 of each quarter of an hour of
    a day): how many were heard of within an age, and how likely a release at that age would duplicate, where all is
    well around the send. The grace advised is the age at which 98 in 100 were heard of and the risk is at most
    max_risk; it is never shorter than makes sense with the provider.
    """
    from reconciler.database.connection import database_clock
    from reconciler.insight.lag import read_lags

    async def work(pool: BoundedPool) -> list[Lag]:
        async with pool.acquire() as connection:
            if feed:
                await app.check_feed(connection, feed)
            feeds = [feed] if feed else sorted(app.settings.feeds)
            return await read_lags(connection, app.settings, feeds, await database_clock(connection))

    found = app.with_database(work, create=False)
    if plot:
        _draw(found, plot)
    if as_json:
        say_json(found)
    else:
        _say_lags(found)
        if plot:
            say(f"drawn: {plot}")


def _draw(found: list[Lag], path: Path) -> None:
    from reconciler.insight.lag_plot import picture

    try:
        path.write_text(picture(found), "utf-8")
    except OSError as error:
        raise UserError(f"{path} can't be written ({error.strerror})") from None


def _say_lags(found: list[Lag]) -> None:
    if not found:
        say("no feed is configured")
    for one in found:
        _say_lag(one)
        say()


def _say_lag(one: Lag) -> None:
    from reconciler.units import format_duration

    say(f"{one.feed}, class {one.message_class}: {one.sends} answered sends")
    if one.sends:
        say_table(("AGE", "HEARD OF", "RISK", ""), [_row(point) for point in _telling(one)])
        say()
        say_table(
            ("HOUR", "SENDS", "HEARD OF", ""),
            [
                (hour.since, hour.sends, f"{hour.heard / hour.sends:.1%}", _bar(hour.heard / hour.sends))
                for hour in one.hours
            ],
        )
    grace = f"the grace is {format_duration(one.grace)}"
    if one.advised is None:
        say(f"{grace}; none is advised: {one.why_none}")
    elif one.advised == one.grace:
        say(f"{grace}, as advised: {one.why_advised}")
    else:
        say(f"{grace}; {format_duration(one.advised)} would be enough: {one.why_advised}")


def _telling(one: Lag) -> list[Point]:
    """Return the points until nothing changes any more: half a minute, the grace, or what is advised at least."""
    last = max(30.0, one.grace.total_seconds(), (one.advised or timedelta()).total_seconds(), one.late_after or 0.0)
    return [point for point in one.points if point.age <= last and point.sends]


def _row(point: Point) -> tuple[object, ...]:
    from reconciler.rule.in_words import percent
    from reconciler.units import format_duration

    risk = percent(point.risk) if point.risk is not None else None
    heard = point.heard or 0.0
    return format_duration(timedelta(seconds=point.age)), f"{heard:.1%}", risk, _bar(heard)


def _bar(share: float) -> str:
    return "#" * round(BAR * share)
