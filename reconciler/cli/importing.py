# SPDX-License-Identifier: Apache-2.0
"""`reconciler import`: the sends of the time before."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, BinaryIO

import click

from reconciler.cli.root import App, Command, Failed, feed_text, json_option, size_of
from reconciler.cli.text import count, say, say_json, say_table

if TYPE_CHECKING:
    from reconciler.filling.importing import Format, Imported
    from webhooks.database import BoundedPool


@click.command("import", cls=Command, epilog="Example: reconciler import sends.csv --feed mailgun-main --dry-run")
@click.argument("file", type=click.File("rb"))
@click.option("--format", "form", type=click.Choice(["auto", "jsonl", "csv"]), default="auto", help="Default: auto.")
@click.option("--feed", metavar="FEED", callback=feed_text, help="Whose sends they are, where a line doesn't say it.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and keep nothing.")
@json_option
@click.pass_obj
def import_(app: App, file: BinaryIO, form: Format, feed: str | None, dry_run: bool, as_json: bool) -> None:
    """Bring in the sends of the days before, as a history to judge by.

    FILE (- is stdin) holds JSON lines, or CSV with a header. Each line names a key, its feed, and claimed_at: when the
    message was submitted, in ISO form. With answered_at, when the provider took it, it is sent; with failed (true) it
    has failed; without either it is undecided, and passes decide it: keep its feed in shadow mode meanwhile. On absence
    they release it only where stamped (true) says that its message carried the key.

    heard_at is when your own webhook stored the first event of it: only where the event was found by the key that the
    message carried, never by its message id, which an unanswered send doesn't have. More may be given: submit_by,
    message_id, heard_kind, recipient, message_class, campaign, source, fingerprint, known_message_id.

    Doing it again changes nothing. Bad lines are named and passed over, and then the exit status is 1. While it runs
    the feed's silence releases nothing.
    """
    if feed is not None:
        app.feed(feed)
    done = app.with_database(lambda pool: _imported(app, pool, file, form, feed, dry_run), create=False)
    if as_json:
        say_json(done)
    else:
        _say_imported(done, dry_run)
    if not done.sends + done.bad_lines:
        raise Failed(f"{getattr(file, 'name', 'the file')} holds no send")
    if done.bad_lines:
        raise Failed(f"{count(done.bad_lines, 'line was', 'lines were')} passed over")


async def _imported(
    app: App, pool: BoundedPool, file: BinaryIO, form: Format, feed: str | None, dry_run: bool
) -> Imported:
    from reconciler.filling.importing import import_sends, read_sends

    with ExitStack() as stack:
        size = size_of(file)
        hidden = not size or not sys.stderr.isatty()
        bar = stack.enter_context(
            click.progressbar(length=max(1, size), label="import", file=sys.stderr, hidden=hidden)
        )
        found = read_sends(file, form, feed, app.settings.feeds, lambda read: bar.update(read - bar.pos))
        return await import_sends(pool, found, dry_run=dry_run)


def _say_imported(done: Imported, dry_run: bool) -> None:
    counts = [(done.outcomes[name], words) for name, words in _OUTCOMES.items()]
    text = ", ".join(f"{n} {words}" for n, words in counts if n) or "nothing"
    say(f"{count(done.sends, 'send')}: {text}" + (" (a dry run: nothing was kept)" if dry_run else ""))
    if done.unheard:
        say(f"{done.unheard} were answered and have no heard_at: to their feeds' history they are unheard of")
    if done.bad:
        say_table(("LINE", "WHY"), done.bad)
    if done.bad_lines > len(done.bad):
        say(f"... and {done.bad_lines - len(done.bad)} more")


_OUTCOMES = {
    "adopted": "adopted",
    "exists": "there already",
    "key_reused": "left out, since another send or content has their key",
    "beyond_memory": "left out, since they are older than the guard's memory",
}
