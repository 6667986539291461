# SPDX-License-Identifier: Apache-2.0
"""`reconciler suppress import|add|remove|list`: whom no campaign writes to."""

from __future__ import annotations

from collections import Counter
from pathlib import PurePath
from typing import TYPE_CHECKING, BinaryIO, Final

import click

from reconciler.cli.root import App, Command, Failed, Root, json_option, key_text, operator
from reconciler.cli.text import count, say, say_json, say_table

if TYPE_CHECKING:
    from reconciler.campaigns.suppression import Imported, Suppressed
    from webhooks.database import BoundedPool

MOST: Final = 1000


@click.group(cls=Root)
def suppress() -> None:
    """Keep the list of those whom no campaign writes to."""


@suppress.command("import", cls=Command, epilog="Example: reconciler suppress import unsubscribed.csv")
@click.argument("file", type=click.File("rb"))
@json_option
@click.pass_obj
def import_(app: App, file: BinaryIO, as_json: bool) -> None:
    """Add the addresses of a file.

    FILE (- is stdin) holds CSV with a header, or JSON lines. The address is what is called recipient (or else
    email); a reason may stand beside it. Bad lines are named by number and passed over, and then the exit status is
    1. Campaigns that are running see it at once.
    """
    from reconciler.campaigns import suppression
    from reconciler.campaigns.file import read_lines

    source = PurePath(str(getattr(file, "name", "-"))).name

    async def work(pool: BoundedPool) -> Imported:
        return await suppression.import_lines(pool, read_lines(file), source)

    done = app.with_database(work)
    if as_json:
        say_json(done)
    else:
        say(f"{done.added} added, {done.known} there already, {count(done.bad_lines, 'bad line')}")
        if done.bad:
            say_table(("LINE", "WHY"), [(bad.line, bad.why) for bad in done.bad])
    if done.bad_lines:
        raise Failed(f"{count(done.bad_lines, 'line was', 'lines were')} passed over")


@suppress.command(cls=Command, epilog='Example: reconciler suppress add ada@example.com --reason "asked by phone"')
@click.argument("addresses", nargs=-1, required=True, metavar="ADDRESS...", callback=key_text)
@click.option("--reason", metavar="TEXT", help="Why; the list shows it.")
@json_option
@click.pass_obj
def add(app: App, addresses: tuple[str, ...], reason: str | None, as_json: bool) -> None:
    """Add addresses. Campaigns that are running see it at once."""
    from reconciler.campaigns import suppression

    n = app.with_database(lambda pool: suppression.add(pool, addresses, reason, operator()))
    _say_counts(as_json, added=n, known=len(addresses) - n)


@suppress.command(cls=Command, epilog="Example: reconciler suppress remove ada@example.com")
@click.argument("addresses", nargs=-1, required=True, metavar="ADDRESS...", callback=key_text)
@json_option
@click.pass_obj
def remove(app: App, addresses: tuple[str, ...], as_json: bool) -> None:
    """Take addresses from the list. A campaign that left them out gets them by loading its file again."""
    from reconciler.campaigns import suppression

    n = app.with_database(lambda pool: suppression.remove(pool, addresses), create=False)
    _say_counts(as_json, removed=n, unknown=len(addresses) - n)


def _say_counts(as_json: bool, **counts: int) -> None:
    if as_json:
        say_json(counts)
    else:
        say(", ".join(f"{n} {word}" for word, n in counts.items()))


@suppress.command(name="list", cls=Command, epilog="Example: reconciler suppress list --after m@example.com --json")
@click.option("--after", metavar="ADDRESS", default="", help="Begin behind this one.")
@json_option
@click.pass_obj
def list_(app: App, after: str, as_json: bool) -> None:
    """Show the list by address, and how many there are by source.

    A thousand entries at a time.
    """
    from reconciler.campaigns import suppression

    async def work(pool: BoundedPool) -> tuple[Counter[str], list[Suppressed]]:
        return await suppression.counts(pool), await suppression.listed(pool, MOST, after.lower())

    counts, found = app.with_database(work, create=False)
    if as_json:
        say_json({"counts": counts, "suppressed": found})
        return
    if found:
        rows = [(one.recipient_key, one.reason, one.since, one.source) for one in found]
        say_table(("ADDRESS", "REASON", "SINCE", "SOURCE"), rows)
    say(f"{counts.total()} in all" + "".join(f", {n} of {source}" for source, n in counts.most_common(10)))
