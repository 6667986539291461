# SPDX-License-Identifier: Apache-2.0
"""`reconciler campaign load|status|pause|resume|cancel|list`: many sends that belong together."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import click

from reconciler.cli.root import App, Command, Failed, Root, feed_text, json_option, operator, size_of
from reconciler.cli.text import count, iso, say, say_json, say_table, when

if TYPE_CHECKING:
    from reconciler.campaign import Status
    from reconciler.campaigns.load import Loaded, Told
    from webhooks.database import BoundedPool

LINE_SECONDS: Final = 10.0
"""How often progress is told where there is no terminal."""

FOLLOW_SECONDS: Final = 2.0
MOST_LISTED: Final = 50


@click.group(cls=Root)
def campaign() -> None:
    """Load many sends at once, watch, pause and end them."""


def name_text(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    """Refuse names that a campaign can't have."""
    from reconciler.campaign import NAME

    if not NAME.fullmatch(value):
        raise click.BadParameter("a campaign's name is made of letters, digits, and . _ - after the first of them")
    return value


def start_text(_context: click.Context, _parameter: click.Parameter, value: str | None) -> datetime | None:
    """Read a time."""
    if value is None:
        return None
    try:
        at = datetime.fromisoformat(value)
        return (at.replace(tzinfo=UTC) if at.tzinfo is None else at).astimezone(UTC)
    except (ValueError, OverflowError):
        raise click.BadParameter("is no time: write 2026-11-02T08:00:00Z") from None


def lateness_text(_context: click.Context, _parameter: click.Parameter, value: str | None) -> timedelta | None:
    """Read how late a campaign may start."""
    from reconciler.units import parse_duration

    if value is None:
        return None
    try:
        if (found := parse_duration(value)) > timedelta(0):
            return found
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    raise click.BadParameter("is no time at all: write 2h")


_name = click.argument("name", callback=name_text)
_reason = click.option("--reason", metavar="TEXT", default=None, help="Why; status will show it.")


@campaign.command(cls=Command, epilog="Example: reconciler campaign load spring spring.csv --feed sendgrid-main")
@_name
@click.argument("file", type=click.File("rb"))
@click.option("--feed", metavar="FEED", required=True, callback=feed_text, help="How it is sent.")
@click.option("--class", "message_class", metavar="CLASS", help="Its message class. Default: default.")
@click.option("--starts-at", metavar="TIME", callback=start_text, help="Nothing is given out before. Default: at once.")
@click.option(
    "--max-lateness",
    metavar="DURATION",
    callback=lateness_text,
    help="So long after --starts-at it may still start by itself. Default: 2h.",
)
@click.option("--source", metavar="TEXT", help="What names the file, for one that moves. Default: its path.")
@json_option
@click.pass_obj
def load(app: App, /, name: str, file: BinaryIO, as_json: bool, source: str | None, **asked: Any) -> None:
    """Load recipients from a file.

    FILE (- is stdin) holds CSV with a header, or JSON lines. The address is what is called recipient (or else
    email), whatever else a line says is given to the worker as the send's payload. Who is there twice, was loaded
    before, or is suppressed is passed over and counted. Bad lines are named by number and passed over, and then the
    exit status is 1.

    Where recipients are stored hashed the worker gets no address: something else of a line has to lead it to one.

    Nothing is given out before a file was loaded to its end. A load that was broken off is run again; doing it again
    changes nothing.
    """
    from reconciler.campaigns.load import Plan
    from reconciler.campaigns.load import load as load_file

    provider = app.feed(asked["feed"]).provider
    plan = Plan(name, source=source or _path(file), **asked)

    async def work(pool: BoundedPool) -> Loaded:
        from webhooks.registry import PROVIDERS

        with _progress(file) as told:
            return await load_file(pool, plan, file, PROVIDERS[provider], told)

    done = app.with_database(work)
    if as_json:
        say_json(done)
    else:
        _say_loaded(done)
    if done.bad_lines:
        raise Failed(f"{count(done.bad_lines, 'line was', 'lines were')} passed over")


def _path(file: BinaryIO) -> str:
    given = str(getattr(file, "name", "-"))
    return str(Path(given).resolve()) if Path(given).exists() else given


@contextmanager
def _progress(file: BinaryIO) -> Iterator[Told]:
    """Give what shows progress and rate: a bar on a terminal, now and then a line elsewhere."""
    begun = time.monotonic()
    if not sys.stderr.isatty() or not (size := size_of(file)):
        yield _lines(begun)
        return
    with click.progressbar(length=size, label="load", file=sys.stderr, item_show_func=lambda rate: rate) as bar:

        def told(lines: int) -> None:
            bar.update(file.tell() - bar.pos, f"{lines / (time.monotonic() - begun):,.0f} lines/s")

        yield told


def _lines(begun: float) -> Told:
    last = begun

    def told(lines: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= LINE_SECONDS:
            last = now
            click.echo(f"{lines} lines, {lines / (now - begun):,.0f} lines/s", err=True)

    return told


def _say_loaded(done: Loaded) -> None:
    say(
        f"{count(done.lines, 'line')}: {done.added} added, {count(done.duplicates, 'duplicate')}, "
        f"{done.suppressed} suppressed, "
        f"{done.bad_lines} bad"
    )
    if done.added and not done.addresses_kept:
        say("recipients are stored hashed: workers get what else a line says, and no address (docs/campaigns.md)")
    if done.bad:
        say_table(("LINE", "WHY"), [(bad.line, bad.why) for bad in done.bad])
    if done.bad_lines > len(done.bad):
        say(f"... and {done.bad_lines - len(done.bad)} more")


@campaign.command(cls=Command, epilog="Example: reconciler campaign status spring --follow")
@_name
@click.option("--follow", is_flag=True, help="Show progress until it has finished or was cancelled.")
@json_option
@click.pass_obj
def status(app: App, name: str, follow: bool, as_json: bool) -> None:
    """Show how a campaign stands, its rate, and what is left.

    A campaign has finished when each file was loaded to its end and nothing is pending or claimed.
    """

    async def work(pool: BoundedPool) -> Status:
        if follow:
            await _follow(pool, name)
        return await _status(pool, name)

    found = app.with_database(work, create=False)
    if as_json:
        from dataclasses import asdict

        say_json(asdict(found) | {"total": found.total, "done": found.done, "seconds_left": found.seconds_left})
    else:
        _say_status(found)


async def _status(pool: BoundedPool, name: str) -> Status:
    from reconciler import campaign

    if (found := await campaign.status(pool, name)) is None:
        raise campaign.UnknownCampaign(name)
    return found


async def _follow(pool: BoundedPool, name: str) -> None:
    from reconciler.campaign import ENDED

    found = await _status(pool, name)
    hidden = not sys.stderr.isatty()
    last = 0.0
    with click.progressbar(
        length=max(1, found.total), label=name, file=sys.stderr, hidden=hidden, item_show_func=lambda text: text
    ) as bar:
        while found.standing not in ENDED:
            bar.length = max(1, found.total)
            bar.update(found.done - bar.pos, _in_short(found))
            if hidden and time.monotonic() - last >= LINE_SECONDS:
                last = time.monotonic()
                click.echo(f"{found.done} of {found.total}, {_in_short(found)}", err=True)
            await asyncio.sleep(FOLLOW_SECONDS)
            found = await _status(pool, name)
        bar.update(found.done - bar.pos, found.standing)


def _in_short(found: Status) -> str:
    return f"{found.per_second:,.1f}/s, {found.claimed} claimed, {found.standing}"


def _say_status(found: Status) -> None:
    now = datetime.now(UTC)
    note = f" by {found.who}" if found.who else ""
    note += f": {found.reason}" if found.reason else ""
    say(f"{found.name}: {found.standing}{note}")
    if found.standing == "late":
        say(f"it was to start at {iso_or_dash(found.starts_at)}: reconciler campaign resume {found.name} --late")
    rows = [
        ("feed, class", f"{found.feed}, {found.message_class}"),
        ("starts at", when(found.starts_at, now)),
        ("sent", str(found.sent)),
        ("failed", str(found.failed)),
        ("claimed", f"{found.claimed} ({found.running} running, {found.undecided} undecided)"),
        ("oldest claim", when(found.oldest_claim, now)),
        ("pending", f"{found.pending} ({found.released} released, {found.capped} capped)"),
        ("held", str(found.held)),
        ("suppressed", f"{found.suppressed} when loaded"),
        ("rate", f"{found.per_second:,.1f}/s taken by the provider, last minute"),
        ("the rest takes", _takes(found)),
    ]
    for label, value in rows:
        say(f"  {label:<15}{value}")
    for one in found.loads:
        if one.ended_at is None:
            say(f"{one.source} is being loaded since {iso(one.started_at)}, or that was broken off: load it again")


def iso_or_dash(at: datetime | None) -> str:
    """Return a time, or what stands for none."""
    return iso(at) if at else "-"


def _takes(found: Status) -> str:
    from reconciler.units import roughly

    return "-" if found.seconds_left is None else f"about {roughly(timedelta(seconds=found.seconds_left))}"


@campaign.command(name="list", cls=Command, epilog="Example: reconciler campaign list --json")
@json_option
@click.pass_obj
def list_(app: App, as_json: bool) -> None:
    """List campaigns, the newest first."""
    from reconciler import campaign

    async def work(pool: BoundedPool) -> list[Status]:
        found = [await campaign.status(pool, name) for name in await campaign.names(pool, MOST_LISTED)]
        return [one for one in found if one is not None]

    found = app.with_database(work, create=False)
    if as_json:
        say_json(found)
    elif not found:
        say("there is no campaign")
    else:
        columns = ("name", "standing", "feed", "pending", "claimed", "sent", "failed", "starts_at")
        say_table(
            [name.upper().replace("_", " ") for name in columns],
            [[getattr(one, name) for name in columns] for one in found],
        )


@campaign.command(cls=Command, epilog='Example: reconciler campaign pause spring --reason "wrong picture"')
@_name
@_reason
@json_option
@click.pass_obj
def pause(app: App, name: str, reason: str | None, as_json: bool) -> None:
    """Let a campaign give out nothing. Once this has returned nothing is given out.

    What workers have claimed before, they may still submit within their time; it is looked after as ever.
    """
    from reconciler import campaign

    _change(app, name, as_json, lambda pool: campaign.pause(pool, name, reason or "", operator()))


@campaign.command(cls=Command, epilog="Example: reconciler campaign resume spring --late")
@_name
@click.option("--late", is_flag=True, help="Let it start although its time is long over.")
@_reason
@json_option
@click.pass_obj
def resume(app: App, name: str, late: bool, reason: str | None, as_json: bool) -> None:
    """Let a paused campaign go on, or a late one start.

    With --late it may start although its time is long over. A campaign that did not start within --max-lateness of
    its time gives out nothing before: a database that was restored may not know that it was sent.
    """
    from reconciler import campaign

    found = _change(app, name, as_json, lambda pool: campaign.resume(pool, name, reason or "", operator(), late=late))
    if found.standing == "late":
        raise Failed(f"{name} was to start at {iso_or_dash(found.starts_at)}: say --late to start it all the same")
    if found.standing == "cancelled":
        raise Failed(f"{name} was cancelled, which is final")


@campaign.command(cls=Command, epilog='Example: reconciler campaign cancel spring --reason "wrong list"')
@_name
@_reason
@click.option("--yes", is_flag=True, help="Do not ask, which is done on a terminal only.")
@json_option
@click.pass_obj
def cancel(app: App, name: str, reason: str | None, yes: bool, as_json: bool) -> None:
    """End a campaign for good. Once this has returned nothing is given out.

    What was never claimed is kept and refused to everybody. Released sends are failed. What is claimed is never
    touched: passes decide it, and what they release since is failed by saying cancel again.
    """
    from reconciler import campaign

    if not yes and sys.stdin.isatty():
        click.confirm(f"end campaign {name} for good?", abort=True, err=True)
    _change(app, name, as_json, lambda pool: campaign.cancel(pool, name, reason or "", operator()))


def _change(app: App, name: str, as_json: bool, work: Callable[[BoundedPool], Awaitable[bool]]) -> Status:
    """Do what changes a campaign's state, and say how it stands then."""

    async def run(pool: BoundedPool) -> tuple[bool, Status]:
        await _status(pool, name)
        return await work(pool), await _status(pool, name)

    changed, found = app.with_database(run, create=False)
    if as_json:
        say_json({"name": name, "changed": changed, "standing": found.standing})
    else:
        say(f"{name}: {found.standing}{'' if changed else ' (as before)'}")
    return found
