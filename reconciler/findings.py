# SPDX-License-Identifier: Apache-2.0
"""What of a status a person should know, what needs one, and what to do about it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from reconciler.feeds import ALL_FEEDS
from reconciler.outbox import OutboxStatus
from reconciler.outlook import Outlook
from reconciler.settings import Settings
from reconciler.settings_facts import can_be_asked
from reconciler.status import FeedStatus, Status, Undecided, held_in_words
from reconciler.units import format_duration, roughly
from webhooks.registry import PROVIDERS

HELD_TOO_LONG: Final = timedelta(hours=1)
"""Held for longer, a send needs a person, unless its class decides by itself after `give_up_after`."""

UNCLAIMED_TOO_LONG: Final = timedelta(minutes=15)
"""Released for longer and claimed by nobody: the application does not retry."""

UNTOLD_TOO_LONG: Final = timedelta(minutes=15)
"""The application could not be told of a send for longer."""

NO_PASS: Final = timedelta(minutes=5)
"""Without a pass for longer, while sends wait for one. Four times `reconcile.every` where that is more."""

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

FOREIGN_EVENTS: Final = 20
"""So many events of a day, and more than half, whose key no row has: another installation's, or the wrong database."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing worth knowing."""

    code: str
    """A stable word: held, unclaimed, refused, partition, foreign, duplicates, vanished ..."""
    text: str
    advice: str
    """What to do about it."""
    feed: str | None = None
    needs_person: bool = True

    def line(self) -> str:
        """Return it as one line."""
        place = f" {self.feed}" if self.feed else ""
        return f"{self.code}{place}: {self.text}: {self.advice}"


def judge(status: Status, settings: Settings) -> Iterator[Finding]:
    """Name what of a status is worth knowing, and whether it needs a person."""
    for group in status.undecided:
        yield from _judge_undecided(group, status.now, settings)
    yield from _judge_passes(status, settings)
    for feed in status.feeds:
        yield from _judge_feed(feed)
    yield from _judge_deliveries(status)
    yield from _judge_sent(status)
    for outlook in status.outlooks:
        yield from _judge_outlook(outlook, settings)
    for found in status.processes:
        advice = f"since {found.since:%Y-%m-%dT%H:%M:%SZ}; no event is lost by it, but the spool has a limit"
        yield Finding(found.code, f"on {found.host}, {found.text}", advice)
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
    if group.state == "released" and age > UNCLAIMED_TOO_LONG:
        yield Finding(
            "unclaimed",
            f"{_sends(group)} released ({group.reason}) and claimed by nobody, the oldest for {roughly(age)}",
            'let the application claim them again (see README, "Send again", and docs/outbox.md), or end them with '
            "reconciler fail",
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


def _judge_feed(feed: FeedStatus) -> Iterator[Finding]:
    if feed.provider is None and feed.feed != ALL_FEEDS:
        yield Finding(
            "unknown_feed",
            "sends name this feed, and no settings do, so nothing is ever heard of them",
            f"add [feeds.{feed.feed}] to the settings; another name in the sender helps only sends to come, since a "
            "row keeps the feed of its ambiguous attempt and a claim on another one is refused (other_feed)",
            feed.feed,
        )
    name = None if feed.feed == ALL_FEEDS else feed.feed
    option = f" --feed {name}" if name else ""
    for hold in feed.holds:
        because = f" ({feed.hold_reason})" if feed.hold_reason else ""
        resume = f"reconciler resume{option} --reason TEXT"
        restored = hold == "suspect"
        yield Finding(
            hold,
            f"{'no' if name else 'no feed'} {'claims or ' if restored else ''}releases while it lasts{because}",
            f"bring back what the gap lacks with reconciler replay or reconciler backfill, then {resume}"
            if restored
            else f"{resume} once the cause is gone",
            name,
            needs_person=hold != "paused",
        )
    yield from _judge_roads(feed)
    if feed.by_look_up:
        yield Finding(
            "only_look_up",
            f"of {feed.by_look_up} sends of the last day only the provider's API spoke, the feed did not",
            "it loses events, or they come late: see reconciler report vanished",
            feed.feed,
        )
    if feed.mode == "shadow":
        yield Finding(
            "shadow",
            "passes record what they would do with its sends, and change nothing",
            f'reconciler what-if shows it; to begin, set feeds.{feed.feed}.mode = "live"',
            feed.feed,
            needs_person=False,
        )
    if feed.refused_at and (feed.stored_at is None or feed.refused_at > feed.stored_at):
        yield _refused(feed)
    elif feed.provider and feed.sends_unheard:
        yield Finding(
            "no_delivery",
            "sends were answered, and no event was delivered for a day",
            "check that the provider's webhook is registered, active, and reaches this receiver",
            feed.feed,
        )


def _judge_roads(feed: FeedStatus) -> Iterator[Finding]:
    if feed.queue_unread_at:
        yield Finding(
            "queue",
            f"its queue could not be read, last at {feed.queue_unread_at:%Y-%m-%dT%H:%M:%SZ}, so its silence proves "
            "nothing",
            "the log line queue_failed of reconciler serve says why: credentials, region, or the queue's name",
            feed.feed,
        )
    if feed.endpoint_finding:
        yield Finding(
            "endpoint",
            f"the webhook at the provider is not as it should be: {feed.endpoint_finding}",
            f"reconciler endpoints check --feed {feed.feed}, then reconciler endpoints apply --feed {feed.feed}",
            feed.feed,
        )
    if feed.filling:
        yield Finding(
            "filling",
            "a replay, back-fill or import runs or has just ended, so its silence proves nothing",
            "wait for its end",
            feed.feed,
            needs_person=False,
        )


COVERED: Final = 0.9
"""The least share of answered sends past their grace that a well feed has told of ..."""

COVERAGE_OF: Final = 20
"""... of so many or more."""


def _judge_outlook(outlook: Outlook, settings: Settings) -> Iterator[Finding]:
    grace = settings.rules_for(outlook.feed, outlook.message_class).grace
    of_class = f"answered sends of class {outlook.message_class}"
    if outlook.deaf:
        yield Finding(
            "no_echo",
            f"none of the {of_class} was ever heard of, so that none of its silent sends is released",
            f"are they stamped? See reconciler selftest correlation --feed {outlook.feed}",
            outlook.feed,
        )
    elif outlook.asked >= COVERAGE_OF and outlook.heard < COVERED * outlook.asked:
        yield Finding(
            "coverage",
            f"only {outlook.heard} of {outlook.asked} {of_class} of an hour, all past the grace, were heard of",
            "is the provider late, or does it lose events? See its status page, then reconciler backfill",
            outlook.feed,
        )
    elif outlook.missing:
        yield Finding(
            "few_controls",
            f"{outlook.missing} {of_class} are missing before its silence means anything",
            "until then silence releases nothing; reconciler import brings older sends in",
            outlook.feed,
            needs_person=False,
        )
    elif outlook.late_after and outlook.late_after > grace.total_seconds():
        lag = roughly(timedelta(seconds=outlook.late_after))
        yield Finding(
            "grace",
            f"2 % of the {of_class} are heard of later than after {lag}, and the grace is {format_duration(grace)}",
            f"claims wait longer by themselves; a grace of {lag} says so",
            outlook.feed,
            needs_person=False,
        )


_ABOUT_REFUSALS: Final = {
    "format": "what arrives is not this provider's format: is the URL or queue another provider's?",
    "topic": "set the feed's topics to the one that publishes",
    "stale": "look at this host's clock, or raise the feed's tolerance",
    "no_secret": "set the feed's secrets",
    "missing": "if it was the provider's, switch on its signature or credential; anybody else may be passed over",
}


def _refused(feed: FeedStatus) -> Finding:
    reason = feed.refused_reason or ""
    about = "compare the feed's secrets with the provider's settings; reconciler status lists the reasons"
    anybody = reason == "missing"  # anybody can send a request without a signature: it makes no feed silent
    return Finding(
        "refused",
        f"the newest delivery was refused ({reason})" + ("" if anybody else ", so its silence proves nothing"),
        _ABOUT_REFUSALS.get(reason, about),
        feed.feed,
        needs_person=not anybody,
    )


def _judge_deliveries(status: Status) -> Iterator[Finding]:
    for feed, (keyed, unknown) in sorted(status.foreign.items()):
        if unknown >= FOREIGN_EVENTS and unknown > keyed / 2:
            yield Finding(
                "foreign",
                f"{unknown} of {keyed} events of the last day have a key that no send has",
                "does another installation use this account? Then set a namespace with reconciler migrate --namespace; "
                "else look whether the senders use this database",
                feed,
            )


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
