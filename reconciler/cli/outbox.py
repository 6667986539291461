# SPDX-License-Identifier: Apache-2.0
"""`reconciler outbox list|retry`: what the application was not told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from reconciler.cli.root import App, Command, Root, json_option, key_text
from reconciler.cli.text import say, say_json, say_table

if TYPE_CHECKING:
    from webhooks.database import BoundedPool

MOST_ROWS: Final = 50
"""Messages that are printed for people ..."""
MOST: Final = 1000
"""... and as JSON."""


@click.group(cls=Root)
def outbox() -> None:
    """Show what the application was not told, and tell it again."""


@outbox.command(name="list", cls=Command, epilog="Example: reconciler outbox list --json")
@json_option
@click.pass_obj
def list_(app: App, as_json: bool) -> None:
    """List messages to the application that were not delivered.

    Those that were given up come first (outbox.give_up_after; or the receiver answered 410). The rest is tried again by
    the daemon.
    """
    from reconciler.outbox.delivery import undelivered

    async def work(pool: BoundedPool) -> list[dict[str, Any]]:
        async with pool.acquire() as connection:
            return await undelivered(connection, MOST if as_json else MOST_ROWS)

    found = app.with_database(work, create=False)
    if as_json:
        say_json(found)
    elif not found:
        say("every message was delivered")
    else:
        columns = (
            "what",
            "feed",
            "send_key",
            "wire_key",
            "created_at",
            "tries",
            "next_try_at",
            "dead_at",
            "last_error",
        )
        header = ("WHAT", "FEED", "SEND KEY", "WIRE KEY", "SINCE", "TRIES", "NEXT TRY", "GIVEN UP", "LAST ERROR")
        say_table(header, [[row[name] for name in columns] for row in found])


@outbox.command(cls=Command, epilog="Example: reconciler outbox retry --all")
@click.argument("keys", nargs=-1, metavar="[KEY]...", callback=key_text)
@click.option("--all", "every", is_flag=True, help="All that were given up.")
@json_option
@click.pass_obj
def retry(app: App, keys: tuple[str, ...], every: bool, as_json: bool) -> None:
    """Deliver messages again that were given up.

    KEY is a send key or wire key. The daemon delivers them at once, under the ids that they had.
    """
    from reconciler.outbox.delivery import retry as retry_dead

    if bool(keys) == every:
        raise click.UsageError("name keys, or --all")

    async def work(pool: BoundedPool) -> list[str]:
        async with pool.acquire() as connection:
            return await retry_dead(connection, None if every else keys)

    retried = app.with_database(work, create=False)
    if as_json:
        say_json({"retried": retried})
    else:
        say(f"{len(retried)} will be delivered again")
