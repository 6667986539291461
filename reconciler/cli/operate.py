# SPDX-License-Identifier: Apache-2.0
"""The operator's verbs: `release`, `confirm`, `fail` of sends, `pause` and `resume` of feeds."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from reconciler.cli.root import (
    App,
    Command,
    Failed,
    feed_option,
    feed_text,
    json_option,
    key_text,
    operator,
    reason_text,
)
from reconciler.cli.text import say, say_json, say_table

if TYPE_CHECKING:
    from reconciler.database.connection import Connection
    from webhooks.database import BoundedPool

NOT_DONE: Final = ("refused", "unknown_key")
HELD_EXAMPLE: Final = (
    'Examples: reconciler {verb} order.receipt:1234 --reason "seen in the provider\'s log"; '
    'reconciler {verb} --held --feed sendgrid-main --reason "outage of 1 May"'
)


class Done(NamedTuple):
    """What became of one key."""

    key: str
    outcome: str
    reason: str | None


class Wish(NamedTuple):
    """Which sends an operator means, and why."""

    keys: tuple[str, ...]
    held: bool
    feed: str | None
    reason: str
    yes: bool


HELD_KEYS: Final = """
SELECT wire_key FROM send_log
WHERE state IN ('pending', 'claimed') AND next_check_at IS NOT NULL AND held_reason IS NOT NULL
  AND ($1::text IS NULL OR feed = $1)
ORDER BY wire_key
"""


def _verb(verb: str, summary: str) -> click.Command:
    """Return the command that performs a verb for each key. `summary` is its help."""

    @click.command(verb, cls=Command, help=summary, epilog=HELD_EXAMPLE.format(verb=verb))
    @click.argument("keys", metavar="[KEY]...", nargs=-1, callback=key_text)
    @click.option("--held", is_flag=True, help="All held sends, instead of keys.")
    @click.option("--feed", metavar="FEED", callback=feed_text, help="With --held: those of this feed only.")
    @click.option("--reason", metavar="TEXT", required=True, callback=reason_text, help="Why; why KEY will show it.")
    @click.option("--yes", is_flag=True, help="Do not ask before --held, which is asked on a terminal only.")
    @json_option
    @click.pass_obj
    def command(app: App, /, as_json: bool, **named: Any) -> None:
        wish = Wish(**named)
        if bool(wish.keys) == wish.held:
            raise click.UsageError("name keys, or say --held: one of the two")
        if wish.feed and not wish.held:
            raise click.UsageError("--feed belongs to --held")
        _report(app.with_database(lambda pool: _run(app, pool, verb, wish)), as_json)

    return command


release = _verb(
    "release",
    "Give claimed or failed sends free for another attempt.\n\nRefused where any provider spoke of the send, and while "
    "its sender may still submit. It passes a pause. The retry duplicates the message if it was accepted after all.",
)
confirm = _verb("confirm", "Say that sends were sent: they are never given out again.")
fail = _verb(
    "fail",
    "Say that sends will never be sent.\n\nWhere a provider did accept one, it becomes sent instead, now or when that "
    "is heard of.",
)


async def _run(app: App, pool: BoundedPool, verb: str, wish: Wish) -> list[Done]:
    from reconciler.passes import by_hand

    keys = sorted(set(wish.keys)) if wish.keys else await _held_keys(app, pool, verb, wish)
    who = operator()
    done = []
    for key in keys:
        # Not held while a person is asked, and at the level that lock-then-look needs, whatever the role's default.
        async with pool.acquire() as connection, connection.transaction(isolation="read_committed"):
            ruled = await by_hand.decide(connection, verb, key, wish.reason, who)
        done.append(Done(key, *ruled))
    return done


async def _held_keys(app: App, pool: BoundedPool, verb: str, wish: Wish) -> list[str]:
    async with pool.acquire() as connection:
        if wish.feed:
            await app.check_feed(connection, wish.feed)
        keys = [row["wire_key"] for row in await connection.fetch(HELD_KEYS, wish.feed)]
    if keys and not wish.yes and sys.stdin.isatty():
        of_feed = f" of feed {wish.feed}" if wish.feed else ""
        click.confirm(f"{verb} {len(keys)} held send{'s' if len(keys) > 1 else ''}{of_feed}?", abort=True, err=True)
    return keys


def _report(done: list[Done], as_json: bool) -> None:
    counts = Counter(one.outcome for one in done)
    if as_json:
        say_json({"counts": counts, "sends": [one._asdict() for one in done]})
    elif done:
        say_table(("KEY", "OUTCOME", "REASON"), done)
    else:
        say("no send is held")
    if refused := sum(counts[outcome] for outcome in NOT_DONE):
        raise Failed(f"{refused} of {len(done)} refused")


def _on_feeds(function: Callable[..., None]) -> Callable[..., None]:
    """Add what pause and resume take."""
    function = click.option("--reason", metavar="TEXT", required=True, callback=reason_text, help="Why.")(function)
    return feed_option(function)


@click.command(cls=Command, epilog='Example: reconciler pause --feed sendgrid-main --reason "incident 17"')
@_on_feeds
@json_option
@click.pass_obj
def pause(app: App, feed: str | None, reason: str, as_json: bool) -> None:
    """Stop releases of a feed, or of all. Once this has returned, nothing is released.

    Events are received and evidence decides as ever; an operator's release passes.
    """

    async def work(connection: Connection, name: str) -> bool:
        from reconciler.passes import feeds

        await feeds.pause(connection, name, reason, operator())
        return True

    _change_hold(app, feed, work, as_json)


@click.command(cls=Command, epilog='Example: reconciler resume --feed sendgrid-main --reason "incident 17 is over"')
@_on_feeds
@json_option
@click.pass_obj
def resume(app: App, feed: str | None, reason: str, as_json: bool) -> None:
    """Lift the holds of a feed, or those on all.

    Holds are a pause, an open breaker, and the suspicion of a restored database. Without --feed it lifts what was put
    on all feeds; a hold of a single feed stays.

    After a restore first bring back what the gap lacks, with replay or backfill: what is still unknown then may be sent
    twice. Resuming accepts the database as it is, and makes all fences to come greater than any given out before.
    """

    async def work(connection: Connection, name: str) -> bool:
        from reconciler.passes import feeds

        return await feeds.resume(connection, name, reason, operator())

    _change_hold(app, feed, work, as_json)


def _change_hold(app: App, feed: str | None, work: Callable[[Connection, str], Awaitable[bool]], as_json: bool) -> None:
    from reconciler.passes import feeds

    async def run(pool: BoundedPool) -> tuple[bool, dict[str, str]]:
        async with pool.acquire() as connection:
            if feed:
                await app.check_feed(connection, feed)
            changed = await work(connection, feed or feeds.ALL_FEEDS)
            asked = {feed, feeds.ALL_FEEDS} if feed else {feeds.ALL_FEEDS, *app.settings.feeds}
            health = await feeds.feed_health(connection, asked)
        return changed, {name: found.hold for name, found in sorted(health.items()) if found.hold}

    changed, holds = app.with_database(run)
    if as_json:
        say_json({"feed": feed, "changed": changed, "holds": holds})
        return
    if not changed:
        say(f"nothing was on hold for {f'feed {feed}' if feed else 'all feeds together'}")
    if feeds.ALL_FEEDS in holds:
        say(f"all feeds: {holds[feeds.ALL_FEEDS]}")
    elif holds:
        for name, hold in holds.items():
            say(f"feed {name}: {hold}")
    elif changed:
        say(f"{f'feed {feed}' if feed else 'all feeds'}: not on hold")
