# SPDX-License-Identifier: Apache-2.0
"""`reconciler what-if`: other rules over recorded history."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from reconciler.cli.roads import time_text
from reconciler.cli.root import App, Command, feed_text, json_option
from reconciler.cli.text import iso, say, say_json, say_table

if TYPE_CHECKING:
    from reconciler.insight.what_if import Replay, Tally
    from reconciler.passes.reconcile import Policies
    from webhooks.database import BoundedPool

HEADER: Final = (
    *("FEED", "CLASS", "AMBIGUOUS", "SETTLED", "RELEASED", "DUPLICATES", "STATED", "FAILED", "HELD", "MEDIAN", "95 %"),
    *("RELEASED THEN", "DUPLICATES THEN"),
)


@click.command(cls=Command, epilog="Example: reconciler what-if --rules stricter.toml --since 7d")
@click.option(
    "--rules",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A settings file, whose rules of all, of feeds and of classes count. Default: the present settings.",
)
@click.option(
    "--since", metavar="TIME", default="7d", callback=time_text, help="2026-11-02T08:00:00Z, or 36h (ago). Default: 7d."
)
@click.option("--feed", metavar="FEED", callback=feed_text, help="Only sends of this feed. Default: all feeds.")
@json_option
@click.pass_obj
def what_if(app: App, rules: Path | None, since: datetime, feed: str | None, as_json: bool) -> None:
    """Say what other rules would have decided.

    Decides the sends that were ambiguous since then once more, on what was stored at the times at which a pass would
    have looked, changes nothing and asks no provider. DUPLICATES are releases of which acceptance was proved later
    (whatever nobody ever heard of stays unknown), STATED is how many the releases' risks expected, and THEN is what
    passes really released, or would have in shadow mode, of the same sends. same_key_retry is never a duplicate by the
    provider's promise. MEDIAN and 95 % are times from submit_by to the verdict.

    Not replayed: holds, refused deliveries, budgets, canaries, look-ups, sends that were answered after submit_by and
    that no pass had judged, what retention has dropped. Environment variables win over FILE, as in a daemon.
    """
    from reconciler.insight.what_if import what_if as replayed

    policies = _policies(app, rules)

    async def work(pool: BoundedPool) -> Replay:
        if feed is not None:
            async with pool.acquire() as connection:
                await app.check_feed(connection, feed)
        bar = click.progressbar(length=1, label="what-if", file=sys.stderr, hidden=not sys.stderr.isatty())
        with bar:

            def tell(done: int, of_all: int) -> None:
                bar.length = of_all
                bar.update(done - bar.pos)

            return await replayed(pool, policies, since, feed=feed, tell=tell)

    found = app.with_database(work, create=False)
    if as_json:
        say_json(found)
    else:
        _say(found)


def _policies(app: App, rules: Path | None) -> Policies:
    """Return the present settings' policies with the rules of another file. Raises ConfigError."""
    from reconciler import composition
    from reconciler.configuration.settings import load_settings
    from webhooks.registry import PROVIDERS

    present = composition.policies(app.settings)
    if rules is None:
        return present
    return dataclasses.replace(present, rules_for=load_settings(rules, os.environ, PROVIDERS).rules_for)


def _say(found: Replay) -> None:
    from reconciler.units import roughly

    say(f"{iso(found.since)} to {iso(found.until)}, looked at every {roughly(found.tick)}")
    if found.tallies:
        say_table(HEADER, map(_cells, found.tallies))
    else:
        say("no send was ambiguous")


def _cells(tally: Tally) -> tuple[object, ...]:
    from reconciler.units import roughly

    return (
        tally.feed,
        tally.message_class,
        tally.ambiguous,
        tally.settled,
        _reasons(tally.released),
        _reasons(tally.duplicates),
        tally.stated,
        _reasons(tally.failed),
        _reasons(tally.held),
        None if tally.median is None else roughly(tally.median),
        None if tally.most is None else roughly(tally.most),
        tally.released_then,
        tally.duplicates_then,
    )


def _reasons(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {reason}" for reason, n in sorted(counts.items())) or "0"
