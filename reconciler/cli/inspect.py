# SPDX-License-Identifier: Apache-2.0
"""The commands that look and change nothing: `status`, `why`, `providers` and `config`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from reconciler.cli.root import (
    LOOKED_FOR,
    NEEDS_A_PERSON,
    NO_FILE,
    App,
    Command,
    Failed,
    feed_text,
    json_option,
    key_text,
    unknown,
)
from reconciler.cli.text import printable, say, say_json, say_table, when
from reconciler.units import roughly

if TYPE_CHECKING:
    from reconciler.insight.findings import Finding
    from reconciler.insight.status import Status
    from reconciler.insight.why import Story
    from reconciler.rule.outlook import Outlook
    from webhooks.database import BoundedPool


@click.command(cls=Command, epilog="Example: reconciler status --check || notify the one on duty")
@click.option(
    "--check",
    is_flag=True,
    help="Print what needs a person, then notes, a line each; exit with 3 if anything does.",
)
@click.option("--feed", metavar="FEED", callback=feed_text, help="Only this feed and its sends.")
@json_option
@click.pass_obj
def status(app: App, check: bool, feed: str | None, as_json: bool) -> None:
    """Show how everything stands and what needs a person.

    Undecided sends by reason and age, feeds, refused deliveries, passes, the database. Deliveries of the last 5 s may
    not be counted yet.

    A person is needed where a send is held for more than 1 h (or, if its class decides by itself, for 1 h after its
    give_up_after); where a released one is claimed by nobody for 15 min; where sends wait and no pass ran for 5 min, or
    no process that decides gave a sign of life; where a process tells of itself that its work fails again and again,
    the database is slow, its figures are old or its archive lost something; where a feed's newest delivery of the day
    was refused, or more than one in ten of half an hour, or one of the day that was proved to be its provider's; where
    five of an hour were for no feed of the settings; where a feed's deliveries are put off for 10 min, or none came
    though sends were answered, or fewer than nine in ten answered sends of an hour were heard of, or none of a class
    ever, or a twentieth vanished, or only the provider's API knew of one; where its queue can't be read or its webhook
    is not as it should be; where a breaker is open or the database may have gone back; where sends name a feed that is
    not configured; where 20 events of a day and more than half have a key that no send has; where the archive can't be
    written; where this month or the next has no partition; where clocks differ by more than 30 s; where a pooler has no
    database.direct_url beside it; and where the settings hold a warning.
    """
    from reconciler.insight.status import read_status

    async def work(pool: BoundedPool) -> Status:
        async with pool.acquire() as connection:
            if feed:
                await app.check_feed(connection, feed)
            return await read_status(connection, app.settings, lambda: datetime.now(UTC), feed)

    from reconciler.insight.findings import judge

    found = app.with_database(work, create=False)
    findings = list(judge(found, app.settings))
    alarms = [finding for finding in findings if finding.needs_person]
    if as_json:
        say_json({"ok": not alarms, **_looked_at(app), "findings": findings, **_status_as_json(found)})
    elif check:
        for line in [alarm.line() for alarm in alarms] or ["nothing needs a person"]:
            say(line)
        for note in [finding for finding in findings if not finding.needs_person]:
            say(f"note: {note.line()}")
    else:
        for name, place in _looked_at(app).items():
            say(f"{name.replace('_', ' ') + ':':15}{place or f'none {LOOKED_FOR}'}")
        if found.citus:
            say(f"{'citus:':15}{found.citus.shards} shards on {found.citus.workers} nodes ({found.citus.version})")
        if found.hashed_recipients:
            say(f"{'recipients:':15}stored hashed")
        say()
        _say_status(found, findings)
    if check and alarms:
        sys.exit(NEEDS_A_PERSON)


def _looked_at(app: App) -> dict[str, str | None]:
    """Return which settings and which database this was about: another directory may mean others."""
    file = app.settings_file
    return {"settings_file": str(file.resolve()) if file else None, "database": app.settings.database_in_use()}


def _status_as_json(found: Status) -> dict[str, Any]:
    values = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    values["clock_skew_seconds"] = values.pop("clock_skew").total_seconds()
    values["foreign"] = [{"feed": feed, "keyed": n, "unknown": k} for feed, (n, k) in sorted(found.foreign.items())]
    return values


def _say_status(found: Status, findings: list[Finding]) -> None:
    now = found.now
    say("Undecided sends")
    if found.undecided:
        say_table(
            ("STATE", "REASON", "FEED", "CLASS", "SENDS", "<1H", "<1D", ">1D", "OLDEST"),
            [
                (
                    g.state,
                    g.reason,
                    g.feed,
                    g.message_class,
                    g.n,
                    g.under_hour,
                    g.under_day,
                    g.over_day,
                    when(g.since, now),
                )
                for g in found.undecided
            ],
        )
    else:
        say("none")
    _say_part(
        "Feeds (the deliveries of the last 5 s may not be counted yet)",
        ("FEED", "PROVIDER", "MODE", "LAST STORED", "LAST REFUSED", "RELEASED 1H", "BUDGET", "HOLDS"),
        [
            (
                f.feed,
                f.provider,
                f.mode,
                when(f.stored_at, now),
                when(f.refused_at, now),
                f.released,
                f.budget,
                ", ".join(f.holds) or None,
            )
            for f in found.feeds
        ],
    )
    _say_part(
        "What silence is worth (of samples: at most 2,000 answered sends a class, 21 a quarter hour of busy ones)",
        ("FEED", "CLASS", "ANSWERED", "MISSING", "HEARD 1H", "98 % HEARD BY", "SILENT ONE RELEASED AT"),
        [_outlook_row(o) for o in found.outlooks],
    )
    _say_part(
        "Refused deliveries",
        ("FEED", "REASON", "LAST HOUR", "LAST DAY", "NEWEST"),
        [(r.feed or None, r.reason, r.last_hour, r.last_day, when(r.last_at, now)) for r in found.refused],
    )
    say()
    say(_last_pass(found))
    say()
    for finding in findings:
        say(("! " if finding.needs_person else "- ") + finding.line())
    if not findings:
        say("nothing needs a person")


def _say_part(title: str, header: Sequence[str], rows: Sequence[tuple[object, ...]]) -> None:
    """Print a table under its title, and nothing where it has no row."""
    if rows:
        say()
        say(title)
        say_table(header, rows)


def _outlook_row(outlook: Outlook) -> tuple[object, ...]:
    heard = f"{outlook.heard} of {outlook.asked}" if outlook.asked else None
    by = roughly(timedelta(seconds=outlook.late_after)) if outlook.late_after is not None else None
    at = roughly(timedelta(seconds=outlook.released_at)) if outlook.released_at is not None else "not on silence"
    return outlook.feed, outlook.message_class, outlook.controls, outlook.missing, heard, by, at


def _last_pass(found: Status) -> str:
    last = found.last_pass
    if last is None:
        return "Last pass: never"
    counts = ", ".join(f"{name} {n}" for name, n in sorted(last.counts.items()) if n) or "nothing to decide"
    return f"Last pass: {when(last.started_at, found.now)} by {last.who}: {counts if last.ended_at else 'not ended'}"


@click.command(cls=Command, epilog="Example: reconciler why order.receipt:1234")
@click.argument("key", callback=key_text)
@click.option("--show-recipient", is_flag=True, help="Show addresses, too.")
@json_option
@click.pass_obj
def why(app: App, key: str, show_recipient: bool, as_json: bool) -> None:
    """Tell the story of one send, and what happens next.

    KEY is a send key or a wire key. Exits with 1 where no send has it, and says whether events do.
    """
    from reconciler import composition
    from reconciler.insight.why import tell

    policies = composition.policies(app.settings)
    story = app.with_database(lambda pool: tell(pool, policies, key, show_recipient=show_recipient), create=False)
    if as_json:
        say_json(story)
    else:
        _say_story(key, story, traced=app.settings.tracing.endpoint is not None)
    if story.state is None:
        raise Failed(f"{printable(key)}: {story.standing}")


def _say_story(key: str, story: Story, *, traced: bool) -> None:
    from reconciler.sending.tracing import trace_id

    say(f"key       {key}")
    if story.wire_key != key:
        say(f"wire key  {story.wire_key}")
    if traced:
        say(f"trace     {trace_id(story.wire_key)}")
    if story.state:
        say(f"state     {story.standing}")
    if story.next:
        at = f"next look {when(story.next.at, story.now)}: " if story.next.at else ""
        say(f"next      {at}{story.next.text}")
        if story.next.missing:
            say(f"missing   {story.next.missing}")
    if story.timeline:
        say()
        say_table(("TIME", "WHAT", "STORY"), [(when(e.at, story.now), e.what, e.text) for e in story.timeline])


@click.command(cls=Command, epilog="Example: reconciler providers mailgun")
@click.argument("name", required=False)
@json_option
def providers(name: str | None, as_json: bool) -> None:
    """List the providers, or what is known of one.

    Where our key goes and comes back, signatures, redelivery (so, how long the receiver may be down), idempotency,
    look-up, set-up, and the sources of all that.
    """
    from webhooks.provider import JOINED_BY_ID
    from webhooks.registry import PROVIDERS

    if name is not None and name not in PROVIDERS:
        raise unknown("provider", name, PROVIDERS, "there are no providers")
    facts = {n: dataclasses.asdict(p.facts) for n, p in PROVIDERS.items() if name in (None, n)}
    for known in facts.values():
        known["redelivers_for"] = known["redelivers_for"] or None  # 0 s stands for what no document says
    if as_json:
        say_json(facts)
    elif name:
        for field, value in facts[name].items():
            _say_fact(field.replace("_", " "), _known(field, value))
            if field == "finds_by" and value == "recipient":
                say(f"{'':26}(so it can't be asked where recipients are stored hashed)")
        say(JOINED_BY_ID)
    else:
        columns = ("title", "redelivers_for", "same_key_window", "finds_by", "lists", "first_event_is_delivery")
        header = ("NAME", "PROVIDER", "REDELIVERS FOR", "KEEPS OUR KEY FOR", "FOUND BY", "LISTS", "FIRST IS A DELIVERY")
        say_table(header, [(n, *(_fact(_known(c, f[c])) for c in columns)) for n, f in facts.items()])


def _known(field: str, value: object) -> object:
    return "not known" if field == "redelivers_for" and value is None else value


def _say_fact(field: str, value: object) -> None:
    if field == "setup" and isinstance(value, tuple):
        say("setup:")
        for number, step in enumerate(value, 1):
            say(f"  {number}. {step}")
    else:
        say(f"{field + ':':26}{_fact(value)}")


def _fact(value: object) -> object:
    from reconciler.units import format_duration

    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case str() | int():
            return value
        case tuple():
            return ", ".join(map(str, value))
    return format_duration(value)  # type: ignore[arg-type]


@click.command(cls=Command, epilog="Example: reconciler stamp --feed mailgun-eu order.receipt:1234")
@click.option(
    "--feed", metavar="FEED", required=True, callback=feed_text, help="Through which feed's provider it goes."
)
@click.argument("key", callback=key_text)
@json_option
@click.pass_obj
def stamp(app: App, feed: str, key: str, as_json: bool) -> None:
    """Show what a sender adds so that a key comes back.

    For senders in any language: what to merge into the API call's body, HTTP headers (the provider's own idempotency
    key), message headers for SMTP, and the message id where we may choose it. Uses the installation's namespace.
    """
    from webhooks.registry import PROVIDERS

    target = app.feed(feed)
    wire_key = app.with_database(lambda pool: pool.fetchval("SELECT wire_key($1)", key), create=False)
    found = {"wire_key": wire_key, **dataclasses.asdict(PROVIDERS[target.provider].stamp(wire_key))}
    if as_json:
        say_json(found)
    else:
        for name, value in found.items():
            say(f"{name.replace('_', ' ') + ':':14}{value if isinstance(value, str) else json.dumps(value)}")


@click.command(cls=Command, epilog="Examples: reconciler config --json; reconciler config --feed ses --class receipt")
@click.option("--feed", metavar="FEED", callback=feed_text, help="Say what happens when to a send of this feed ...")
@click.option("--class", "message_class", metavar="CLASS", help="... and of this message class (`default`).")
@json_option
@click.pass_obj
def config(app: App, feed: str | None, message_class: str | None, as_json: bool) -> None:
    """Show the effective settings, secrets masked. Warnings go to stderr.

    With --feed: what will happen when to an ambiguous send, by the rules of feed and class.
    """
    if feed or message_class:
        _say_timetable(app, feed, message_class or "default", as_json)
        _warn(app)
        return
    shown = app.settings.masked()
    shown["database"]["data_dir"] = str(app.data_dir)
    if as_json:
        say_json(shown)
    else:
        say(f"# from {app.settings_file.resolve()}" if app.settings_file else f"# {NO_FILE}")
        for line in _toml(shown, ()):
            say(line)
    _warn(app)


def _warn(app: App) -> None:
    for warning in app.settings.warnings():
        click.echo(f"reconciler: {warning}", err=True)


def _say_timetable(app: App, feed: str | None, message_class: str, as_json: bool) -> None:
    from reconciler.insight.timetable import timetable

    if feed is None:
        raise click.UsageError("--class needs --feed: the rules of a class depend on the feed")
    if feed not in app.settings.feeds:
        raise unknown("feed", feed, app.settings.feeds, "no feed is configured: add [feeds.NAME] to the settings")
    lines = list(timetable(app.settings, feed, message_class))
    if as_json:
        say_json([{"when": when_, "what": what} for when_, what in lines])
    else:
        say_table(("WHEN", "WHAT HAPPENS"), lines)


def _toml(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """Return settings as a settings file would hold them, line by line; what is not set is a comment."""
    tables = {name: value for name, value in table.items() if isinstance(value, Mapping)}
    if path and len(tables) < len(table):
        yield f"[{'.'.join(_quoted_name(part) for part in path)}]"
    for name, value in table.items():
        if name not in tables:
            yield f"# {name}: not set" if value is None else f"{name} = {json.dumps(value, ensure_ascii=False)}"
    if path and len(tables) < len(table):
        yield ""
    for name, value in tables.items():
        yield from _toml(value, (*path, name))


def _quoted_name(name: str) -> str:
    return name if name.replace("-", "").replace("_", "").isalnum() and name.isascii() else json.dumps(name)
