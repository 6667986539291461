# SPDX-License-Identifier: Apache-2.0
"""`reconciler report duplicates|vanished|unknown|drift|overlaps|sources`: what no single send shows.

`report lag` is in `report_lag`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import click

from reconciler.cli.roads import time_text
from reconciler.cli.root import App, Command, Root, feed_option, json_option, operator
from reconciler.cli.text import count, say, say_json, say_table
from reconciler.errors import UserError

if TYPE_CHECKING:
    from reconciler.insight.drift import Drift
    from reconciler.insight.inventory import Looked, Overlaps, Senders
    from reconciler.insight.reports import RecordedDuplicate, UnknownEvents, Vanished
    from webhooks.database import BoundedPool

MOST_ROWS: Final = 50
"""Duplicates that are printed for people; --json prints more."""
RUN: Final = 1000
"""Sends of a feed in each part of the time that `vanished` looks at: a person may wait, a status may not."""

limit_option = click.option(
    "--limit", type=click.IntRange(1, 1000), default=MOST_ROWS, show_default=True, help="Most lines of each list."
)


def since_option(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option that says how far back a report looks."""
    text = "2026-11-02T08:00:00Z, or 36h (ago)."
    return click.option("--since", metavar="TIME", default=default, show_default=True, callback=time_text, help=text)


def older_text(_context: click.Context, _parameter: click.Parameter, value: str) -> timedelta:
    """Read an age."""
    from reconciler.units import parse_duration

    try:
        return parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.group(cls=Root)
def report() -> None:
    """Show lags, duplicates, lost sends, drift, and who sends what."""


@report.command(cls=Command, epilog="Example: reconciler report duplicates --since 7d")
@since_option("7d")
@click.option("--look", is_flag=True, help="First look at every send given out again since then, and record.")
@feed_option
@json_option
@click.pass_obj
def duplicates(app: App, since: datetime, look: bool, feed: str | None, as_json: bool) -> None:
    """List sends that were accepted twice, or may have been.

    duplicate: two attempts were accepted, or one kind of id names two messages for the same recipient. ids_differ: a
    send that was given out again has several message ids, which proves nothing yet. The daemon looks every minute and
    records each once; a duplicate stops the feed's releases until reconciler resume.
    """
    from reconciler.insight.duplicates import look_at_retries
    from reconciler.insight.reports import recorded_duplicates

    async def work(pool: BoundedPool) -> list[RecordedDuplicate]:
        async with pool.acquire() as connection:
            if feed:
                await app.check_feed(connection, feed)
            if look:
                await look_at_retries(connection, since, operator())
            return await recorded_duplicates(connection, since, feed)

    found = app.with_database(work, create=False)
    if as_json:
        say_json(found)
    else:
        _say_duplicates(found)


def _say_duplicates(found: list[RecordedDuplicate]) -> None:
    if not found:
        say("no duplicate is recorded")
        return
    say_table(
        ("FOUND", "SORT", "BECAUSE", "FEED", "SEND KEY", "WIRE KEY"),
        [(d.found_at, d.sort, d.because, d.feed, d.send_key, d.wire_key) for d in found[:MOST_ROWS]],
    )
    if len(found) > MOST_ROWS:
        say(f"... and {len(found) - MOST_ROWS} more: see --json")
    say("reconciler why KEY tells on what grounds it was sent again; then reconciler resume --feed F --reason TEXT")


@report.command(cls=Command, epilog="Example: reconciler report vanished --feed mailgun-eu --older 12h")
@since_option("24h")
@click.option("--older", metavar="AGE", default="6h", show_default=True, callback=older_text, help="Only older sends.")
@feed_option
@json_option
@click.pass_obj
def vanished(app: App, since: datetime, older: timedelta, feed: str | None, as_json: bool) -> None:
    """Count answered sends of which nothing was ever heard.

    Only those count as vanished whose neighbours were heard of: at least four of the six nearest on the feed, three on
    each side within an hour. A busy feed is sampled, at most 24,000 sends. The feed's grace counts where it is longer
    than --older. Nothing is ever sent again because of this.
    """
    from reconciler.database.connection import database_clock
    from reconciler.insight.reports import old_enough, vanished_sends

    async def work(pool: BoundedPool) -> list[Vanished]:
        async with pool.acquire() as connection:
            if feed:
                await app.check_feed(connection, feed)
            until = old_enough(
                app.settings, [feed] if feed else app.settings.feeds, await database_clock(connection), older
            )
            if until and all(at <= since for at in until.values()):
                raise UserError("--since lies after --older, or after the feed's grace: look further back")
            return await vanished_sends(connection, until, since, RUN)

    found = app.with_database(work, create=False)
    if as_json:
        say_json([{**asdict(group), "share": group.share} for group in found])
    else:
        _say_vanished(found)


def _say_vanished(found: list[Vanished]) -> None:
    if not found:
        say("no answered send is old enough: see --since and --older")
        return
    say_table(
        ("FEED", "CLASS", "SENDS", "UNHEARD", "VANISHED", "SHARE", "SOME OF THEM"),
        [
            (v.feed, v.message_class, v.sends, v.unheard, v.vanished, f"{v.share:.1%}", ", ".join(v.wire_keys) or None)
            for v in found
        ],
    )
    say("vanished ones: does that class carry the stamp? then ask the provider, by message id (reconciler why KEY)")


@report.command(cls=Command, epilog="Example: reconciler report unknown --since 24h")
@since_option("24h")
@feed_option
@json_option
@click.pass_obj
def unknown(app: App, since: datetime, feed: str | None, as_json: bool) -> None:
    """Count events whose key no send has, or that bear none.

    Events without a key whose message id a send has are not counted: they are joined by it. At most 100,000 events are
    looked at.
    """
    from reconciler.insight.reports import unknown_events

    async def work(pool: BoundedPool) -> UnknownEvents:
        async with pool.acquire() as connection:
            if feed:
                await app.check_feed(connection, feed)
            return await unknown_events(connection, since, feed)

    found = app.with_database(work, create=False)
    if as_json:
        say_json(found)
    else:
        _say_unknown(found)


def _say_unknown(found: UnknownEvents) -> None:
    if not found.groups:
        say(f"{count(found.looked_at, 'event')}: each belongs to a send")
        return
    say_table(
        ("FEED", "KEY", "KIND", "EVENTS", "NEWEST", "FOR EXAMPLE"),
        [(u.feed, u.key, u.kind, u.events, u.newest, ", ".join(u.examples)) for u in found.groups],
    )
    looked_at = count(found.looked_at, "event")
    say(f"of {looked_at}; key unknown: another installation's (see reconciler migrate --namespace)")
    say("or its row is gone; key none: sent without the stamp (see reconciler stamp)")


@report.command(cls=Command, epilog="Example: reconciler report drift --since 30d --within 24h")
@since_option("7d")
@click.option(
    "--within",
    metavar="AGE",
    default="1h",
    show_default=True,
    callback=older_text,
    help="The most between one and the next.",
)
@limit_option
@feed_option
@json_option
@click.pass_obj
def drift(app: App, since: datetime, within: timedelta, limit: int, feed: str | None, as_json: bool) -> None:
    """List messages under several keys, and several under one key.

    First, equal content to one address under several keys, claimed one soon after the other. Only sends with recipient
    and fingerprint can be compared; of each feed at most the newest 50,000 are looked at. Then, sends that were asked
    for again more than ten minutes after they had been sent, or with other content: nothing was sent.
    """
    from reconciler.insight.drift import key_drift

    async def work(pool: BoundedPool) -> Drift:
        async with pool.acquire() as connection:
            if feed:
                await app.check_feed(connection, feed)
            return await key_drift(connection, [feed] if feed else app.settings.feeds, since, within, limit)

    found = app.with_database(work, create=False)
    if as_json:
        say_json(found)
    else:
        _say_drift(found)


def _say_drift(found: Drift) -> None:
    say(f"looked at {count(found.looked_at, 'send')}, {found.compared} of them with recipient and fingerprint")
    if found.repeated:
        say()
        say_table(
            ("CLASS", "FEED", "KEYS", "SENT", "FIRST", "LAST", "SOME OF THEM"),
            [
                (r.message_class, ", ".join(r.feeds), r.n, r.sent, r.first_at, r.last_at, ", ".join(r.wire_keys))
                for r in found.repeated
            ],
        )
        say("equal content to one address: make the key once, where the job is made, from what does not change")
    if found.swallowed:
        say()
        say_table(
            ("FEED", "CLASS", "AS", "TIMES", "SENT", "LAST ASKED", "WIRE KEY"),
            [(s.feed, s.message_class, s.asked_as, s.n, s.sent_at, s.asked_at, s.wire_key) for s in found.swallowed],
        )
        say("not sent again: right for a job that came twice; a wanted repeat needs a key of its own (a version)")
    if not (found.repeated or found.swallowed):
        say("no message has several keys, and none was asked for again")


@report.command(cls=Command, epilog="Example: reconciler report overlaps --since 30d --within 1h")
@since_option("7d")
@click.option(
    "--within", metavar="AGE", default="10m", show_default=True, callback=older_text, help="The most between the two."
)
@limit_option
@feed_option
@json_option
@click.pass_obj
def overlaps(app: App, since: datetime, within: timedelta, limit: int, feed: str | None, as_json: bool) -> None:
    """List pairs of sources that write to the same people.

    Mail of one message class to one recipient from two sources, one soon after the other: two systems send the same.
    Only sends with a recipient can be compared, those that were sent or may have been; of each 24th part of the time at
    most the newest 5,000 of a feed are looked at. What names no class is all of one class, `default`; what names no
    source is all of one, shown as -.
    """
    from reconciler.insight import inventory

    async def work(pool: BoundedPool) -> Overlaps:
        async with pool.acquire() as connection:
            found = await inventory.overlaps(connection, since, feed, within, limit)
            if feed and not found.looked_at:
                await app.check_feed(connection, feed)
            return found

    found = app.with_database(work, create=False)
    if as_json:
        say_json(found)
    else:
        _say_overlaps(found)


def _say_overlaps(found: Overlaps) -> None:
    _say_looked_at(found.looked_at)
    if not found.overlaps:
        say("no two sources wrote to the same people")
        return
    say_table(
        ("CLASS", "SOURCE", "AND SOURCE", "RECIPIENTS", "TIMES", "FIRST", "LAST", "WIRE KEYS, FOR EXAMPLE"),
        [
            (o.message_class, *o.sources, o.recipients, o.times, o.first_at, o.last_at, " and ".join(o.examples[0]))
            for o in found.overlaps
        ],
    )
    say("the same mail from both? Then one of them should not send it, or both should make the same send key")


@report.command(cls=Command, epilog="Example: reconciler report sources --since 7d")
@since_option("30d")
@limit_option
@feed_option
@json_option
@click.pass_obj
def sources(app: App, since: datetime, limit: int, feed: str | None, as_json: bool) -> None:
    """List who sends what: source, message class, feed.

    A source is what senders give as the option source; - is who gives none. Sends count at their latest claim: what
    was never given out is no mail. UNDECIDED is claimed, or free for another attempt. FIRST and LAST lie within the
    time looked at. Of each 24th part of it at most the newest 5,000 sends of a feed are looked at.
    """
    from reconciler.insight import inventory

    async def work(pool: BoundedPool) -> Senders:
        async with pool.acquire() as connection:
            found = await inventory.senders(connection, since, feed, limit)
            if feed and not found.looked_at:
                await app.check_feed(connection, feed)
            return found

    found = app.with_database(work, create=False)
    if as_json:
        say_json(found)
    else:
        _say_senders(found)


def _say_senders(found: Senders) -> None:
    _say_looked_at(found.looked_at)
    if found.senders:
        say_table(
            ("SOURCE", "CLASS", "FEED", "SENDS", "SENT", "FAILED", "UNDECIDED", "FIRST", "LAST"),
            [
                (s.source, s.message_class, s.feed, s.sends, s.sent, s.failed, s.undecided, s.first_at, s.last_at)
                for s in found.senders
            ],
        )


def _say_looked_at(looked_at: list[Looked]) -> None:
    from reconciler.insight.inventory import sampled

    sends, compared = (sum(getattr(one, name) for one in looked_at) for name in ("sends", "with_recipient"))
    say(f"looked at {count(sends, 'send')}, {compared} of them with a recipient")
    if some := sampled(looked_at):
        say(f"of {', '.join(some)} at a sample: counts are the sample's, and what is rare may be missing (--since)")
