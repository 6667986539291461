# SPDX-License-Identifier: Apache-2.0
"""`reconciler reconcile`: one pass, or what one would do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from reconciler.cli.root import App, Command, feed_text, json_option, key_text, operator
from reconciler.cli.text import say, say_json, say_table
from reconciler.errors import UserError

if TYPE_CHECKING:
    from reconciler.passes.reconcile import Report
    from webhooks.database import BoundedPool

MOST_ROWS: Final = 100
"""Rows of a dry run that are printed for people; --json prints all."""


@click.command(cls=Command, epilog="Example: reconciler reconcile --dry-run --feed sendgrid-main")
@click.option("--dry-run", is_flag=True, help="Say what a pass would decide now, and change nothing.")
@click.option("--feed", metavar="FEED", callback=feed_text, help="Only sends of this feed.")
@click.option("--key", metavar="KEY", callback=key_text, help="Only the send with this send key or wire key.")
@json_option
@click.pass_obj
def reconcile(app: App, dry_run: bool, feed: str | None, key: str | None, as_json: bool) -> None:
    """Run one pass now, or say what it would do.

    Evidence settles what it decides, then what is due is judged. The daemon does this by itself; any number of passes
    may run side by side. --key looks at its send whether it is due or not.
    """
    report, names = app.with_database(lambda pool: _pass(app, pool, dry_run, feed, key), create=not dry_run)
    if as_json:
        say_json(_as_json(report, names, dry_run))
    else:
        _say(report, names, dry_run)


SEND_STATE: Final = (
    "SELECT wire_key($1) AS wire_key, (SELECT state FROM send_log WHERE wire_key = wire_key($1)) AS state"
)
SEND_KEYS: Final = "SELECT wire_key, send_key FROM send_log WHERE wire_key = ANY ($1::text[])"


async def _pass(
    app: App, pool: BoundedPool, dry_run: bool, feed: str | None, key: str | None
) -> tuple[Report, dict[str, str]]:
    """Return the report, and the send keys of the sends that it names by their wire keys."""
    from reconciler import composition
    from reconciler.campaigns.caps import caps_of, keep_caps
    from reconciler.passes.reconcile import Scope, look, run_pass
    from reconciler.passes.restore import Heart

    wire_key = None
    async with pool.acquire() as connection:
        if feed:
            await app.check_feed(connection, feed)
        if key:
            found = await connection.fetchrow(SEND_STATE, key)
            if found["state"] is None:
                raise UserError(f"no send has the key {key}: reconciler why {key} says whether events do")
            wire_key = found["wire_key"]
    scope, policies = Scope(feed, wire_key), composition.policies(app.settings)
    if not dry_run:
        await Heart(app.settings.database.data_dir, operator()).check(pool)
        if caps := caps_of(app.settings):  # without any it may be another file than the daemon's
            await keep_caps(pool, caps)
    report = await (look(pool, policies, scope) if dry_run else run_pass(pool, policies, who=operator(), scope=scope))
    rows = await pool.fetch(SEND_KEYS, [key for key, _ in report.verdicts]) if report.verdicts else []
    return report, {row["wire_key"]: row["send_key"] for row in rows}


def _as_json(report: Report, names: dict[str, str], dry_run: bool) -> dict[str, object]:
    counts = {name: n for name, n in sorted(report.counts.items()) if n}
    rows = [{"wire_key": key, "send_key": names.get(key), "verdict": verdict} for key, verdict in report.verdicts]
    return {"dry_run": dry_run, "counts": counts, **({"verdicts": rows} if dry_run else {})}


def _say(report: Report, names: dict[str, str], dry_run: bool) -> None:
    counts = [(name, n) for name, n in sorted(report.counts.items()) if n]
    if not counts:
        say("nothing to decide")
        return
    say_table(("VERDICT", "SENDS"), counts)
    if dry_run:
        say()
        from reconciler.rule.in_words import percent

        shown = report.verdicts[:MOST_ROWS]
        risky = any(verdict.risk is not None for _, verdict in shown)
        header = ("SEND KEY", "WIRE KEY", "ACTION", "REASON", "NEXT LOOK", "RISK")
        rows = [
            (names.get(key), key, v.action, v.reason, v.next_check_at, None if v.risk is None else percent(v.risk))
            for key, v in shown
        ]
        say_table(header[: 5 + risky], [row[: 5 + risky] for row in rows])
        if len(report.verdicts) > MOST_ROWS:
            say(f"... and {len(report.verdicts) - MOST_ROWS} more: see --json")
