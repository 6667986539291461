# SPDX-License-Identifier: Apache-2.0
"""What of a feed a person should know, what needs one, and what to do about it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby
from typing import Final

from reconciler.configuration.settings import Settings
from reconciler.insight.status import FeedStatus, RefusedDeliveries, Status
from reconciler.passes.feeds import ALL_FEEDS
from reconciler.rule.outlook import DEAF, Outlook
from reconciler.units import format_duration, roughly
from webhooks.metrics import UNKNOWN_FEED

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


PAUSED_TOO_LONG: Final = timedelta(days=1)
"""Paused for longer, a feed may have been forgotten."""


def judge_feed(feed: FeedStatus, now: datetime) -> Iterator[Finding]:
    """Name what of one feed is worth knowing, its controls excepted."""
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
    paused_for = now - feed.paused_at if feed.paused_at else timedelta(0)
    for hold in feed.holds:
        forgotten = hold == "paused" and paused_for > PAUSED_TOO_LONG
        so_far = f", for {roughly(paused_for)} so far" if forgotten else ""
        because = f" ({feed.hold_reason})" if feed.hold_reason else ""
        resume = f"reconciler resume{option} --reason TEXT"
        restored = hold == "suspect"
        yield Finding(
            hold,
            f"{'no' if name else 'no feed'} {'claims or ' if restored else ''}releases while it lasts{so_far}{because}",
            f"bring back what the gap lacks with reconciler replay or reconciler backfill, then {resume}"
            if restored
            else f"{resume} once the cause is gone",
            name,
            needs_person=hold != "paused" or forgotten,
        )
    yield from _judge_roads(feed)
    yield from _judge_deliveries(feed, now)
    if feed.by_look_up:
        yield Finding(
            "only_look_up",
            f"of {feed.by_look_up} send{'s' if feed.by_look_up > 1 else ''} of the last day only the provider's API "
            "spoke, the feed did not",
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


PUT_OFF_FOR: Final = timedelta(minutes=9)
"""Deliveries put off for so long need a person: a restart or a fail-over is over by then."""

PUT_OFF_LATELY: Final = timedelta(minutes=5)
"""Since the newest one that was put off: after that it is over."""

REFUSED_LATELY: Final = 10
REFUSED_SHARE: Final = 0.1
"""More refused deliveries of half an hour, and more than this share of all: half a provider uses another secret."""


def _judge_deliveries(feed: FeedStatus, now: datetime) -> Iterator[Finding]:
    newest_refused = feed.refused_at is not None and (feed.stored_at is None or feed.refused_at > feed.stored_at)
    signed = newest_refused and feed.refused_reason != "missing"
    if newest_refused:
        yield _refused(feed)
    if not signed and feed.refused_lately > REFUSED_LATELY and feed.refused_lately > REFUSED_SHARE * feed.lately:
        yield Finding(
            "some_refused",
            f"{feed.refused_lately} of {feed.lately} deliveries of half an hour were refused, others pass",
            "does the provider sign with two secrets, or does a second webhook or account point here? reconciler "
            "status lists the reasons",
            feed.feed,
        )
    if feed.provider and feed.sends_unheard and not signed:
        since = f"for {roughly(now - feed.stored_at)}" if feed.stored_at else "for a day"
        yield Finding(
            "no_delivery",
            f"sends were answered, and no event was delivered {since}",
            "check that the provider's webhook is registered, active, and reaches this receiver",
            feed.feed,
        )
    if feed.put_off_since and feed.put_off_at and _goes_on(feed.put_off_since, feed.put_off_at, now):
        yield Finding(
            "put_off",
            f"deliveries are put off ({feed.put_off_reason}), the newest {roughly(now - feed.put_off_at)} ago",
            "nothing is lost before the provider gives up: see /readyz and the log, then reconciler backfill if that "
            "was too late",
            feed.feed,
        )


def _goes_on(since: datetime, newest: datetime, now: datetime) -> bool:
    return since <= now - PUT_OFF_FOR and newest > now - PUT_OFF_LATELY


COVERED: Final = 0.9
"""The least share of answered sends past their grace that a well feed has told of ..."""

COVERAGE_OF: Final = 20
"""... of so many or more."""


def judge_outlook(outlook: Outlook, settings: Settings) -> Iterator[Finding]:
    """Name what the controls of a feed's class tell of it."""
    grace = settings.rules_for(outlook.feed, outlook.message_class).grace
    of_class = f"answered sends of class {outlook.message_class}"
    if outlook.deaf:
        yield Finding(
            "no_echo",
            f"none of {outlook.own} {of_class} was ever heard of (of fewer than {DEAF} it is not said), so that none "
            "of its silent sends is released",
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


STRAY: Final = 5
"""So many deliveries of an hour to feeds that are not in the settings need a person: a renamed feed loses all of its.
Fewer are a stranger's who tries, or a feed's of so little mail that `no_delivery` tells of it."""

PROVED: Final = ("format", "stale")
"""Reasons that are only found once a delivery is proved to be the provider's."""

UNPROVED: Final = ("body", "encoding", "too_large")
"""Reasons that are found before: anybody can post such a body, so that none of them needs a person by itself."""


def judge_refused(refused: Sequence[RefusedDeliveries]) -> Iterator[Finding]:
    """Name deliveries that were refused for good and hide among those that pass."""
    for feed, group in groupby(refused, key=lambda found: found.feed):
        found = tuple(group)
        if feed == UNKNOWN_FEED:
            yield from _stray(sum(one.last_hour for one in found))
            continue
        if lost := [one for one in found if one.reason in PROVED]:
            yield Finding(
                "lost",
                f"{_deliveries(lost)} that were proved to be its provider's were refused {_reasons(lost)}",
                "over HTTP most providers don't send such a one again. format: is the URL or queue another provider's? "
                "stale: is this host's clock right, or tolerance too short for its retries? Then "
                f"reconciler backfill --feed {feed} --since 36h",
                feed,
            )
        if unread := [one for one in found if one.reason in UNPROVED]:
            yield Finding(
                "unread",
                f"{_deliveries(unread)} were refused for their bodies {_reasons(unread)}, before it was known whose "
                "they were",
                "does the provider's dashboard show them as failed? Raise receiver.max_body (too_large), see what a "
                f"proxy does to them, then reconciler backfill --feed {feed} --since 36h; else a stranger's",
                feed,
                needs_person=False,
            )


def _stray(lately: int) -> Iterator[Finding]:
    if lately >= STRAY:
        yield Finding(
            "no_such_feed",
            f"{lately} deliveries of an hour were posted to no feed of the settings, and answered 404",
            "was a feed renamed, or a process not told of it (SIGHUP)? Compare the webhooks' URLs at the providers "
            "(the log line delivery_refused with reason unknown_feed names one), then reconciler backfill; else a "
            "stranger's",
        )


def _deliveries(found: Sequence[RefusedDeliveries]) -> str:
    n = sum(one.last_day for one in found)
    return f"{n} deliver{'ies' if n > 1 else 'y'} of a day"


def _reasons(found: Sequence[RefusedDeliveries]) -> str:
    return f"({', '.join(f'{one.reason} {one.last_day}' for one in found)})"


def judge_keys(status: Status) -> Iterator[Finding]:
    """Name the feeds whose events bear keys that no send has."""
    for feed, (keyed, unknown) in sorted(status.foreign.items()):
        if unknown >= FOREIGN_EVENTS and unknown > keyed / 2:
            yield Finding(
                "foreign",
                f"{unknown} of {keyed} events of the last day have a key that no send has",
                "does another installation use this account? Then set a namespace with reconciler migrate --namespace; "
                "else look whether the senders use this database",
                feed,
            )
