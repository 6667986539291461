# SPDX-License-Identifier: Apache-2.0
"""`reconciler replay`, `backfill` and `lookup`: the other roads by which events come."""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from reconciler.cli.root import App, Command, Failed, feed_text, json_option, key_text, operator
from reconciler.cli.text import count, iso, say, say_json, say_table

if TYPE_CHECKING:
    from reconciler.filling.backfill import Backfilled
    from reconciler.filling.reparse import Reparsed
    from reconciler.filling.replay import Source, Summary
    from reconciler.passes.lookup import LookedUp
    from webhooks.database import BoundedPool

_EARLIEST: Final = datetime(1990, 1, 1, tzinfo=UTC)

NOT_ASKED: Final = frozenset(
    {"unsupported", "unconfigured", "hashed_recipient", "no_recipient", "several_recipients", "no_message_id"}
)
"""Reasons for which a look-up asked nobody."""

NO_ANSWER: Final = ("unauthorized", "forbidden", "unreachable", "timeout", "garbage")
"""Reasons for which a question had no answer, and which a person can put right."""

MOST_DAMAGED: Final = 20
"""Damaged entries that are named for people; --json names more."""


def time_text(_context: click.Context, _parameter: click.Parameter, value: str | None) -> datetime | None:
    """Read a time: `2026-11-02T08:00:00Z`, or how long ago: `36h`."""
    from reconciler.units import parse_duration

    if value is None:
        return None
    now = datetime.now(UTC)
    try:
        at = datetime.fromisoformat(value) if "-" in value else now - parse_duration(value)
        at = (at.replace(tzinfo=UTC) if at.tzinfo is None else at).astimezone(UTC)
    except (ValueError, OverflowError):
        raise click.BadParameter("is no time: write 2026-11-02T08:00:00Z, or how long ago as in 36h") from None
    if not _EARLIEST <= at <= now:
        raise click.BadParameter("lies in the future, or before 1990")
    return at


@click.command(cls=Command, epilog="Example: reconciler replay s3://mail-archive/raw/2026/11/02 --region eu-west-1")
@click.argument("source", required=False)
@click.option("--feed", metavar="FEED", callback=feed_text, help="Whose deliveries they are. An archive's say it.")
@click.option("--reparse", is_flag=True, help="Instead of SOURCE: read stored events anew that were not understood.")
@click.option("--dry-run", is_flag=True, help="Read and parse, and store nothing.")
@click.option("--verify", is_flag=True, help="Skip what the provider did not sign. Ages are not looked at.")
@click.option("--region", metavar="REGION", help="AWS region of an s3:// source. Default: archive.region.")
@click.option("--endpoint-url", metavar="URL", help="Where S3 is, where it is not Amazon's.")
@json_option
@click.pass_obj
def replay(
    app: App,
    source: str | None,
    feed: str | None,
    reparse: bool,
    dry_run: bool,
    verify: bool,
    region: str | None,
    endpoint_url: str | None,
    as_json: bool,
) -> None:
    """Store deliveries again that were kept.

    They go through the same parse and store as live ones. SOURCE is a file, a folder, or s3://bucket/prefix: saved
    bodies, NDJSON (SES through Firehose, one event a line), or the archive's own files; each may be gzipped. Doing it
    again changes nothing, except where an event's id is a header that saved bodies lack (Resend, Loops): then it is
    stored once more, which decides nothing new. What is damaged is named and skipped, and then the exit status is 1.
    While it runs the feed's silence releases nothing.

    With --reparse, after an upgrade: events of kinds that no release knew when they came are read anew, of one feed or
    all, so that a send that is held for one (unknown_event) is decided. Where recipients are stored hashed nothing is
    kept that could be read.
    """
    if feed is not None:
        app.feed(feed)
    if reparse:
        if source or verify or region or endpoint_url:
            raise click.UsageError("--reparse reads what is stored: it takes --feed, --dry-run and --json only")
        _reparse(app, [feed] if feed else list(app.settings.feeds), dry_run, as_json)
        return
    if not source:
        raise click.UsageError("name a SOURCE: a file, a folder or s3://bucket/prefix; or use --reparse")
    place = _source(app, source, region, endpoint_url)
    summary = app.with_database(lambda pool: _replayed(app, pool, place, feed, verify, dry_run), create=False)
    if as_json:
        say_json(summary)
    else:
        _say_summary(summary)
    if not summary.entries:
        raise Failed(f"{source} holds nothing that could be replayed")
    if summary.damaged_entries:
        raise Failed(f"{summary.damaged_entries} of {count(summary.entries, 'entry was', 'entries were')} skipped")


def _reparse(app: App, names: list[str], dry_run: bool, as_json: bool) -> None:
    from reconciler import composition
    from reconciler.filling.reparse import reparse

    feeds = composition.feeds(app.settings)

    async def work(pool: BoundedPool) -> dict[str, Reparsed]:
        return {name: await reparse(pool, feeds[name], dry_run=dry_run) for name in names}

    done = app.with_database(work, create=False)
    if as_json:
        say_json(done)
        return
    for name, found in done.items():
        kinds = ", ".join(f"{kind} {n}" for kind, n in sorted(found.known.items())) or "none of them known now"
        say(f"{name}: {count(found.unknown, 'event')} of unknown kinds; {kinds}")


def _source(app: App, source: str, region: str | None, endpoint_url: str | None) -> Source:
    from webhooks.aws import s3_place
    from webhooks.sources import Files, S3Files

    if not source.startswith("s3://"):
        return Files(Path(source))
    archive = app.settings.archive
    try:
        return S3Files(s3_place(source, region or archive.region, endpoint_url or archive.endpoint_url))
    except ValueError as error:
        raise click.BadParameter(f"{source} {error}", param_hint="SOURCE") from None


async def _replayed(
    app: App, pool: BoundedPool, source: Source, feed: str | None, verify: bool, dry_run: bool
) -> Summary:
    from reconciler import composition
    from reconciler.filling.replay import replay as replayed
    from webhooks.fetch import open_fetch

    async with AsyncExitStack() as stack:
        fetch = await stack.enter_async_context(open_fetch()) if verify else None
        blobs = await source.blobs()
        bar = stack.enter_context(_bar(sum(blob.size for blob in blobs), "replay"))
        read: dict[str, int] = {}

        def progress(name: str, so_far: int) -> None:
            bar.update(so_far - read.get(name, 0))
            read[name] = so_far

        feeds = composition.feeds(app.settings)
        return await replayed(pool, source, blobs, feeds, feed=feed, verify=fetch, dry_run=dry_run, progress=progress)


def _bar(length: int, label: str) -> Any:
    """Return a progress bar on stderr, which shows itself on a terminal only."""
    return click.progressbar(length=max(1, length), label=label, file=sys.stderr, hidden=not sys.stderr.isatty())


def _say_summary(summary: Summary) -> None:
    entries, events = count(summary.entries, "entry", "entries"), count(summary.events, "event")
    say(f"{entries}: {events}, {summary.stored} new, {summary.repeated} known before")
    if summary.others:
        say(f"{summary.others} are of other feeds and were passed over")
    if summary.controls:
        say(f"{summary.controls} held no event (pings, confirmations)")
    if len(summary.feeds) > 1:
        say_table(("FEED", "EVENTS"), sorted(summary.feeds.items()))
    if summary.damaged:
        say_table(("SKIPPED", "WHY"), summary.damaged[:MOST_DAMAGED])
    if summary.damaged_entries > MOST_DAMAGED:
        say(f"... and {summary.damaged_entries - MOST_DAMAGED} more: see --json")


@click.command(cls=Command, epilog="Example: reconciler backfill --feed mailgun-eu --since 36h")
@click.option("--feed", metavar="FEED", required=True, callback=feed_text, help="Which feed's provider is asked.")
@click.option("--since", metavar="TIME", required=True, callback=time_text, help="2026-11-02T08:00:00Z, or 36h (ago).")
@click.option("--until", metavar="TIME", callback=time_text, help="The same. Default: now.")
@click.option("--afresh", is_flag=True, help="Begin anew, though a run of this day was broken off.")
@json_option
@click.pass_obj
def backfill(app: App, feed: str, since: datetime, until: datetime | None, afresh: bool, as_json: bool) -> None:
    """Pull what a provider lists of a span of time.

    For when the receiver was down for longer than the provider delivers again. Needs the feed's api_key; providers that
    list nothing say so. What is there already is not stored twice; a run that was broken off is resumed. While it runs
    the feed's silence releases nothing.
    """
    from reconciler.filling.backfill import backfill as filled
    from reconciler.units import format_duration
    from webhooks.asking import ApiError
    from webhooks.registry import PROVIDERS

    target = app.feed(feed)
    end = until or datetime.now(UTC)
    if since >= end:
        raise click.BadParameter("lies after --until", param_hint="--since")

    async def work(pool: BoundedPool) -> Backfilled:
        with _bar(int((end - since) / timedelta(seconds=1)), feed) as bar:

            def tell(done: Backfilled) -> None:
                bar.update(int((done.done_until - since) / timedelta(seconds=1)) - bar.pos)

            try:
                return await filled(pool, target, since, end, who=operator(), afresh=afresh, tell=tell)
            except ApiError as error:
                if error.reason != "unconfigured":
                    raise
                raise Failed(f"{feed} was not asked: {error.hint}") from None

    kept_for = PROVIDERS[target.provider].facts.kept_for
    if since < datetime.now(UTC) - kept_for:
        click.echo(f"reconciler: its API may have forgotten what is older than {format_duration(kept_for)}", err=True)
    done = app.with_database(work, create=False)
    if as_json:
        say_json(done)
    else:
        begun = " (an earlier run was resumed)" if done.resumed else ""
        say(f"{iso(done.since)} to {iso(done.until)}: {count(done.events, 'event')}, {done.stored} new{begun}")


@click.command(cls=Command, epilog="Example: reconciler lookup order.receipt:1234")
@click.argument("key", callback=key_text)
@json_option
@click.pass_obj
def lookup(app: App, key: str, as_json: bool) -> None:
    """Ask a send's provider about it, and keep the answer.

    KEY is a send key or a wire key. The answer is accepted, rejected, absent or silent; absent needs a later send that
    was accepted and is found by the same kind of question. Needs the feed's api_key. Nothing is released by it. Exits
    with 1 where nobody could be asked.
    """
    from reconciler import composition
    from reconciler.passes.lookup import look_up_send

    async def work(pool: BoundedPool) -> LookedUp:
        return await look_up_send(pool, composition.feeds(app.settings), key)

    answer = app.with_database(work, create=False)
    asked = answer.found.reason not in NOT_ASKED
    if as_json:
        say_json(answer)
    elif asked:
        _say_answer(key, answer)
    if not asked:
        raise Failed(f"{answer.feed} was not asked: {answer.found.hint}")
    if answer.found.reason in NO_ANSWER:
        raise Failed(f"{answer.feed} could not be asked: {answer.found.hint}")


def _say_answer(key: str, answer: LookedUp) -> None:
    why = f" ({answer.found.reason}: {answer.found.hint})" if answer.found.reason else ""
    say(f"{answer.feed} says: {answer.found.answer}{why}")
    if answer.found.events:
        say(f"{count(len(answer.found.events), 'event')} about it, {answer.stored.stored} of them new")
        say(f"the row is {answer.state}; the next pass settles it, or reconciler reconcile --key {key}")
