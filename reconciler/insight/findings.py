# SPDX-License-Identifier: Apache-2.0
"""What of a status a person should know, what needs one, and what to do about it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

from reconciler.configuration.facts import can_be_asked
from reconciler.configuration.settings import Settings
from reconciler.insight.feed_findings import Finding, judge_feed, judge_keys, judge_outlook, judge_refused
from reconciler.insight.status import ProcessFinding, Status, Undecided, held_in_words
from reconciler.outbox.delivery import OutboxStatus
from reconciler.units import roughly
from webhooks.registry import PROVIDERS

__all__ = ["Finding", "judge"]

HELD_TOO_LONG: Final = timedelta(hours=1)
"""Held for longer, a send needs a person, unless its class decides by itself after `give_up_after`."""

UNCLAIMED_TOO_LONG: Final = timedelta(minutes=15)
"""Released for longer and claimed by nobody: the application does not retry."""

UNTOLD_TOO_LONG: Final = timedelta(minutes=15)
"""The application could not be told of a send for longer."""

NO_PASS: Final = timedelta(minutes=5)
"""Without a pass for longer, while sends wait for one, or without any sign of life of what decides. Four times
`reconcile.every` where that is more."""

UNDECIDED_TOO_LONG: Final = timedelta(hours=6)
"""For longer a claim was neither decided nor held, though its grace is over."""

LEFT_TOO_LONG: Final = timedelta(days=7)
"""For longer than they should be kept events could not be dropped."""

NOT_PRUNED: Final = timedelta(days=3)
"""No prune came to its end for longer. Three times `retention.every` where that is more."""

SKEW: Final = timedelta(seconds=30)
"""Greatest difference between this host's clock and the database's."""

VANISHED_SENDS: Final = 20
VANISHED_SHARE: Final = 0.05
"""So many answered sends of a feed and class, and more than this share of them, of which nothing was ever heard: feeds
lose single events, and an alert on every one of them would be ignored; a class without the stamp, or a provider that
drops what it took, shows far more."""


def judge(status: Status, settings: Settings) -> Iterator[Finding]:
    """Name what of a status is worth knowing, and whether it needs a person."""
    for group in status.undecided:
        yield from _judge_undecided(group, status.now, settings)
    yield from _judge_passes(status, settings)
    for feed in status.feeds:
        yield from judge_feed(feed, status.now)
    yield from judge_refused(status.refused)
    yield from judge_keys(status)
    yield from _judge_sent(status)
    for outlook in status.outlooks:
        yield from judge_outlook(outlook, settings)
    yield from map(_of_process, status.processes)
    yield from _judge_outbox(status.outbox, status.now)
    yield from _judge_retention(status, settings)
    yield from _judge_database(status, settings)
    if status.hashed_recipients:
        yield from _judge_hashed(settings)
    for warning in settings.warnings():
        yield Finding("settings", *_split_advice(warning))


def _split_advice(warning: str) -> tuple[str, str]:
    text, _, advice = warning.rpartition(": ")
    return text, advice


def _judge_undecided(group: Undecided, now: datetime, settings: Settings) -> Iterator[Finding]:
    age = now - group.since
    if group.state == "held" and age > _patience(group, now, settings):
        yield Finding(
            "held",
            f"{_sends(group)} held ({held_in_words(group.reason)}), the oldest for {roughly(age)}",
            "see reconciler why KEY, then decide with reconciler release, confirm or fail",
            group.feed,
        )
    if group.state == "claimed" and _overlooked(group, now, settings):
        yield Finding(
            "undecided",
            f"{_sends(group)} neither decided nor held, the oldest for {roughly(age)}",
            "passes should have: see reconciler why KEY, and what reconciler reconcile says",
            group.feed,
        )
    if group.state == "released" and age > UNCLAIMED_TOO_LONG:
        yield Finding(
            "unclaimed",
            f"{_sends(group)} released ({group.reason}) and claimed by nobody, the oldest for {roughly(age)}",
            'let the application claim them again (see docs/sending.md, "Sending again", and docs/outbox.md), or end '
            "them with reconciler fail",
            group.feed,
        )


def _patience(group: Undecided, now: datetime, settings: Settings) -> timedelta:
    """Return how long such sends may be held before a person is needed."""
    rules = settings.rules_for(group.feed, group.message_class)
    if rules.on_unknown == "hold" or group.submit_by is None:
        return HELD_TOO_LONG
    # The class decides by itself then; still held an hour later, something keeps it from that.
    decides_at = group.submit_by + rules.give_up_after
    return max(HELD_TOO_LONG, decides_at + HELD_TOO_LONG - group.since) if now < decides_at else HELD_TOO_LONG


def _overlooked(group: Undecided, now: datetime, settings: Settings) -> bool:
    """Say whether a pass must have decided or held such sends; those of a feed in shadow mode it leaves alone."""
    if group.submit_by is None or group.feed not in settings.live():
        return False
    grace = settings.rules_for(group.feed, group.message_class).grace
    return now - group.submit_by > max(UNDECIDED_TOO_LONG, grace + HELD_TOO_LONG)


def _sends(group: Undecided) -> str:
    return f"{group.n} send{'s' if group.n > 1 else ''} of class {group.message_class}"


def _judge_passes(status: Status, settings: Settings) -> Iterator[Finding]:
    longest = max(NO_PASS, 4 * settings.reconcile.every)
    last = status.last_pass
    waiting_since = min((group.since for group in status.undecided), default=status.now)
    if max(waiting_since, last.started_at if last else waiting_since) < status.now - longest:
        when = f"the last pass began {roughly(status.now - last.started_at)} ago" if last else "there never was a pass"
        yield Finding(
            "no_pass", f"{when}, and sends wait for one", "start reconciler serve, or run reconciler reconcile"
        )
    signs = [at for at in (status.heartbeat_at, last.started_at if last else None) if at]
    if status.heartbeat_at and max(signs) < status.now - longest:
        yield Finding(
            "down",
            f"no process that decides has given a sign of life for {roughly(status.now - max(signs))}",
            "start reconciler serve; the last line of its log says why it ended",
        )


_OF_PROCESS: Final = {
    "archive": "no event is lost by it, but the spool has a limit",
    "archive_drops": "the events are stored, a replay would lack them: mend the way to S3, or raise archive.spool_max",
    "database_slow": 'look in pg_stat_activity for what blocks it (see docs/runbooks.md, "ReconcilerDatabaseSlow")',
    "figures_old": "alerts are blind: the log line figures_not_read says why",
    "work_fails": "the log says why: the line of that work, and where it went on its reason",
}


def _of_process(found: ProcessFinding) -> Finding:
    since = f"since {found.since:%Y-%m-%dT%H:%M:%SZ}"
    return Finding(found.code, f"on {found.host}, {found.text}", f"{since}; {_OF_PROCESS[found.code]}")


def _judge_sent(status: Status) -> Iterator[Finding]:
    """Name what went wrong with sends that count as sent."""
    for found in status.duplicates:
        yield Finding(
            "duplicates",
            f"{found.n} found within 7 days, the newest {roughly(status.now - found.newest)} ago",
            f"see reconciler report duplicates --feed {found.feed}",
            found.feed,
            needs_person=False,  # while it has not been looked at the open breaker needs one
        )
    for group in status.vanished:
        if group.vanished >= VANISHED_SENDS and group.share > VANISHED_SHARE:
            yield Finding(
                "vanished",
                f"of {group.vanished} of {group.sends} answered sends of class {group.message_class} nothing was ever "
                "heard, though their neighbours were heard of",
                f"see reconciler report vanished --feed {group.feed}: does the class carry the stamp? Then ask the "
                "provider",
                group.feed,
            )


def _judge_outbox(outbox: OutboxStatus, now: datetime) -> Iterator[Finding]:
    because = f", the newest failure: {outbox.last_error}" if outbox.last_error else ""
    if outbox.dead:
        yield Finding(
            "outbox_dead",
            f"{outbox.dead} message{'s' if outbox.dead > 1 else ''} to the application given up{because}",
            "put outbox.url or outbox.queue_url right, then reconciler outbox retry --all; reconciler outbox list",
        )
    if outbox.oldest and now - outbox.oldest > UNTOLD_TOO_LONG:
        waits = f"{outbox.waiting} message{'s' if outbox.waiting > 1 else ''} to the application"
        yield Finding(
            "outbox_waits",
            f"{waits} not delivered, the oldest for {roughly(now - outbox.oldest)}{because}",
            "does outbox.url or outbox.queue_url take them? Does reconciler serve run? See reconciler outbox list",
        )


def _judge_retention(status: Status, settings: Settings) -> Iterator[Finding]:
    kept = settings.retention
    for left in status.retention.left:
        ended = datetime(left.month.year, left.month.month, 1, tzinfo=UTC) + timedelta(days=31)
        if status.now - ended - kept.events < LEFT_TOO_LONG:
            continue
        by = f"send {left.wire_key}" if left.wire_key else "a transaction that never ends"
        yield Finding(
            "retention",
            f"events of {left.month:%Y-%m} are too old to be kept, and {by} holds them back",
            f"see reconciler why {left.wire_key}, then decide it with reconciler release, confirm or fail"
            if left.wire_key
            else "look for it in pg_stat_activity",
        )
    longest = max(NOT_PRUNED, 3 * kept.every)
    if status.retention.pruned_at and status.now - status.retention.pruned_at > longest:
        yield Finding(
            "not_pruned",
            f"the last prune ended {roughly(status.now - status.retention.pruned_at)} ago, so the tables grow",
            "does reconciler serve run? Its log line prune_failed says why, or run reconciler prune",
        )


def _judge_database(status: Status, settings: Settings) -> Iterator[Finding]:
    if status.missing_months:
        yield Finding(
            "partition",
            f"provider_event has no partition for {' and '.join(status.missing_months)}",
            'run reconciler psql -c "SELECT provider_event_make_partitions()", and see why the daemon did not',
        )
    if status.collation_changed:
        yield Finding(
            "collation",
            "the system below PostgreSQL sorts otherwise than when indexes were built, so that a send may get two rows",
            'stop senders and passes, and rebuild them (see docs/operating.md, "A new system below the database")',
        )
    if abs(status.clock_skew) > SKEW:
        ahead = "ahead of" if status.clock_skew > timedelta(0) else "behind"
        yield Finding(
            "clock",
            f"the database's clock is {roughly(abs(status.clock_skew))} {ahead} this host's",
            "set both by NTP; decisions use the database's alone, signed timestamps are checked by this host's",
        )
    if status.pooler:
        direct = settings.database.direct_url is not None
        yield Finding(
            "pooler",
            "database.url leads through a pooler in transaction mode, where LISTEN and session locks do not work",
            "direct_url is used for those" if direct else "set database.direct_url to the server itself",
            needs_person=not direct,
        )


def _judge_hashed(settings: Settings) -> Iterator[Finding]:
    for name, feed in settings.feeds.items():
        if can_be_asked(feed) and PROVIDERS[feed.provider].facts.finds_by == "recipient":
            text = "its provider can only be asked by recipient, and recipients are stored hashed"
            yield Finding("not_asked", text, "its feed decides alone", name, needs_person=False)
