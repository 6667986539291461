# SPDX-License-Identifier: Apache-2.0
"""`reconciler prune` and `forget`: what is over is deleted, and what a person asks to be forgotten is redacted."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from reconciler.cli.root import App, Command, json_option
from reconciler.cli.text import count, iso, say, say_json, say_table
from reconciler.units import format_duration

if TYPE_CHECKING:
    from reconciler.upkeep.forgetting import Forgotten
    from reconciler.upkeep.retention_look import Pruned
    from webhooks.database import BoundedPool


@click.command(cls=Command, epilog="Example: reconciler prune --dry-run")
@click.option("--dry-run", is_flag=True, help="Count what would go, and change nothing. Reads the whole send log.")
@json_option
@click.pass_obj
def prune(app: App, dry_run: bool, as_json: bool) -> None:
    """Delete what is over: final sends, old events and records.

    The daemon does the same once a day. How long things are kept is set in [retention]. A month of events stays while a
    send that is undecided, released, or failed lately may need it: the send that holds it back is named.
    """
    from reconciler import composition
    from reconciler.upkeep import retention
    from reconciler.upkeep.retention_look import ages_of, would_prune

    ages = ages_of(app.settings.retention, composition.policies(app.settings).late_window)

    async def work(pool: BoundedPool) -> Pruned:
        return await (would_prune(pool, ages) if dry_run else retention.prune(pool, ages))

    done = app.with_database(work, create=False)
    if as_json:
        say_json({"dry_run": dry_run, **{name: getattr(done, name) for name in ("rows", "months")}})
        return
    kept = app.settings.retention
    say(f"sends are kept for {format_duration(kept.rows)}, events for {format_duration(kept.events)}")
    rows = [(table, n) for table, n in sorted(done.rows.items()) if n]
    say_table(("TABLE", "WOULD GO" if dry_run else "DELETED"), rows) if rows else say("no row is over")
    if done.months:
        say()
        say_table(
            ("EVENTS OF", "OUTCOME", "HELD BACK BY", "EVENTS"),
            [(f"{m.month:%Y-%m}", _outcome(m.outcome, dry_run), m.wire_key, m.events) for m in done.months],
        )


def _outcome(outcome: str, dry_run: bool) -> str:
    return "would go" if dry_run and outcome == "dropped" else outcome


def recipient_text(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    """Refuse what is no address: a part of one, or a variable that is not set, must not match others."""
    local, at, domain = value.strip().rpartition("@")
    if not (local and at and domain) or "," in value or not value.isprintable():
        raise click.BadParameter("is no address: write one, as in ada@example.com")
    return value.strip()


@click.command(cls=Command, epilog="Example: reconciler forget ada@example.com --dry-run")
@click.argument("recipient", callback=recipient_text)
@click.option("--dry-run", is_flag=True, help="Count what would be redacted, and change nothing.")
@json_option
@click.pass_obj
def forget(app: App, recipient: str, dry_run: bool, as_json: bool) -> None:
    """Redact all that is kept of a recipient.

    Addresses, payloads, answers, raw events and send keys of all sends to RECIPIENT go. The guard stays: nothing is
    sent again under a key that was sent. Sends that are not decided yet keep what they need: run it again for them, and
    for events that come later. It reads all sends and events once.
    """
    from reconciler import composition
    from reconciler.upkeep import forgetting

    late_window = composition.policies(app.settings).late_window

    async def work(pool: BoundedPool) -> Forgotten:
        return await forgetting.forget(pool, recipient, late_window=late_window, dry_run=dry_run)

    done = app.with_database(work, create=False)
    archive = _archived(app, done)
    if as_json:
        say_json({"dry_run": dry_run, **_as_json(done), "archive": archive})
        return
    verb = "would redact" if dry_run else "redacted"
    words = {"send_log": "send", "provider_event": "event", "verdict": "verdict"}
    say(f"{verb} {', '.join(count(done.rows[table], word) for table, word in words.items())}")
    for line in _remains(done, archive):
        say(line)


def _as_json(done: Forgotten) -> dict[str, Any]:
    names = ("rows", "undecided", "left", "first_at", "answers", "answers_until", "suppressed")
    return {name: getattr(done, name) for name in names}


def _archived(app: App, done: Forgotten) -> dict[str, str] | None:
    """Return where in the archive deliveries about the recipient may lie, None where there is none."""
    url = app.settings.archive.url
    if url is None or done.first_at is None:
        return None
    return {
        "first": f"{url.rstrip('/')}/{done.first_at.astimezone(UTC):%Y/%m/%d}/",
        "last": f"{url.rstrip('/')}/{datetime.now(UTC):%Y/%m/%d}/",
    }


def _remains(done: Forgotten, archive: dict[str, str] | None) -> list[str]:
    lines = []
    if done.undecided:
        named = ", ".join(done.left) + (", ..." if done.undecided > len(done.left) else "")
        lines.append(
            f"{count(done.undecided, 'send is', 'sends are')} not decided for good yet and left ({named}): run it "
            "again then; one that nobody will claim is ended by reconciler fail KEY"
        )
    if done.answers and done.answers_until:
        lines.append(
            f"{count(done.answers, 'answer')} kept for an Idempotency-Key: deleted without you by "
            f"{iso(done.answers_until)}"
        )
    if done.suppressed:
        lines.append("the suppression list keeps the address, or campaigns would write to him: see suppress remove")
    if archive:
        lines.append(
            f"the archive may hold it, in deliveries as they came, from {archive['first']} to {archive['last']}, and "
            "so may the files that wait in its spool: delete them there"
        )
    lines.append(
        "not reached: backups and replicas of the database, the application's own tables and logs, the provider"
    )
    lines.append("an event that the provider delivers later brings the address back: run it again some days from now")
    return lines
