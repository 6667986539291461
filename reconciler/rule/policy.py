# SPDX-License-Identifier: Apache-2.0
"""The rule of release: what one look at an undecided send concludes. Pure and total: no I/O, no clock, no logging."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final, Literal, get_args

from webhooks.event import Answer

State = Literal["pending", "claimed"]
OnUnknown = Literal["hold", "fail", "release"]
LookUp = Literal["before_release", "silent", "never"]
Hold = Literal["paused", "breaker", "suspect"]
HOLDS: Final[tuple[Hold, ...]] = get_args(Hold)
"""What a feed may be on hold for, as `status` calls it. Statements read `ARRAY[paused_at, breaker_at, suspect_at]`."""

SOONEST_LOOK: Final = timedelta(seconds=15)
LATEST_LOOK: Final = timedelta(minutes=15)
"""A row that can't be decided is looked at again after a tenth of its age, within these bounds."""

TELL_AGAIN: Final = (timedelta(minutes=1), timedelta(minutes=5), timedelta(minutes=15))
"""When a released row that nobody claims is told again: after the first, the second and every later telling."""

LONGEST_BACKOFF: Final = timedelta(days=3650)

WINDOW_MARGIN: Final = timedelta(minutes=10)
"""A same-key retry must be over this long before the provider forgets the key: clocks differ, requests linger."""


def holds_of(since: Sequence[datetime | None]) -> tuple[Hold, ...]:
    """Return what a feed is on hold for, from when on it is: a time or None for each of HOLDS."""
    return tuple(hold for hold, at in zip(HOLDS, since, strict=True) if at is not None)


class Action(StrEnum):
    """What a pass does with one row."""

    SENT = "sent"
    FAILED = "failed"
    RELEASED = "released"
    WAITING = "waiting"
    HELD = "held"


@dataclass(frozen=True, slots=True)
class Rules:
    """What the owner of a feed and message class asked for. Durations count from `submit_by`."""

    grace: timedelta
    """A floor: nothing is decided on absence before it."""
    give_up_after: timedelta
    max_risk: float
    """Highest accepted probability that a release duplicates, 0 to 1."""
    max_attempts: int
    same_key_retry: bool
    retry_backoff: timedelta
    """Before the second attempt with the same key; doubles with each further one."""
    on_unknown: OnUnknown
    stress: float | None = None
    """How many times more than answered sends ambiguous ones are missed; None: learned (`reconciler.rule.risk`)."""
    prior_floor: float = 0.0
    """Least p0: how likely an ambiguous send was accepted before anybody listened."""
    look_up: LookUp = "silent"
    """When the provider's API is asked: before each release, only where its feed can't tell, never."""
    failover: bool = False
    """Whether a retry may go to another feed once each feed with an attempt out says ABSENT."""


@dataclass(frozen=True, slots=True)
class Row:
    """What the ledger knows of one undecided send."""

    state: State
    reached: int
    """Attempts that can have reached the provider: all but those proved not sent."""
    submit_by: datetime | None
    """None before the first claim."""
    first_claimed_at: datetime | None
    expires_at: datetime | None
    has_fingerprint: bool
    released: bool = False
    told: int = 0
    """How often a released row was told to the application."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What was said of a send by any feed, a late answer or a stored look-up, whatever the attempt and the order."""

    accepted: bool = False
    rejected: bool = False
    other: bool = False
    """Something was said that proves neither."""
    reason: str | None = None
    """The provider's words for the rejection."""
    looked_up: bool = False
    """Whether nothing but look-ups told of the rejection."""

    @property
    def anything(self) -> bool:
        """True if any provider spoke of this send at all."""
        return self.accepted or self.rejected or self.other


@dataclass(frozen=True, slots=True)
class Witness:
    """A witness's answer about absence, and why."""

    answer: Answer
    reason: str = ""
    """Why it is silent: silent, risk, burst, no_echo, few_controls, refused ..."""
    risk: float | None = None
    """How likely a release on its ABSENT duplicates, 0 to 1."""


@dataclass(frozen=True, slots=True)
class FeedView:
    """How a row's feed looks at the moment of the decision."""

    hold: Hold | None = None
    witness: Witness = Witness(Answer.SILENT, "silent")
    key_window: timedelta | None = None
    """How long the provider keeps our native idempotency key; None: it keeps none."""
    prior: float = 0.95
    """p0: how likely an ambiguous send was accepted if nothing else is known; the stated risk of giving up."""
    can_be_asked: bool = False
    """Whether its provider's API answers questions about single sends."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be done with a row, why, and when it is looked at next."""

    action: Action
    reason: str
    source: Literal["feed", "look-up", "inferred"] = "inferred"
    next_check_at: datetime | None = None
    """Of a waiting, held or released row; None for a pending row that needs no further look."""
    retry_until: datetime | None = None
    """Of a same-key release: the next claim's submit_by may not pass it."""
    risk: float | None = None
    detail: str | None = None


def decide(row: Row, heard: Heard, feed: FeedView, look_up: Witness | None, rules: Rules, now: datetime) -> Verdict:
    """Return the verdict on one row, a function of the set of testimonies and never of their order.

    `now` is the database's clock. A pending row is one that was released, or whose claim was answered `held` or
    `expired`.
    """
    if heard.accepted:
        return Verdict(Action.SENT, "accepted", source="feed")
    if look_up and look_up.answer is Answer.ACCEPTED:
        return Verdict(Action.SENT, "accepted", source="look-up")
    if look_up and look_up.answer is Answer.REJECTED:
        heard = replace(heard, rejected=True, looked_up=heard.looked_up or not heard.rejected)
    if row.state == "pending" or row.submit_by is None or row.first_claimed_at is None:
        return _decide_pending(row, heard, now)
    if heard.rejected and row.reached <= 1:
        return _rejected(heard)
    if now < row.submit_by:
        return Verdict(Action.WAITING, "submitting", next_check_at=row.submit_by)
    retry_until = row.first_claimed_at + feed.key_window - WINDOW_MARGIN if feed.key_window else None
    if retry_until and _may_retry_same_key(row, heard, feed, rules, now) and now < retry_until:
        due = row.submit_by + min(rules.retry_backoff * 2 ** min(row.reached - 1, 16), LONGEST_BACKOFF)
        if now < due:
            return Verdict(Action.WAITING, "backoff", next_check_at=due)
        return Verdict(
            Action.RELEASED, "same_key_retry", next_check_at=now + TELL_AGAIN[0], retry_until=retry_until, risk=0.0
        )
    if now < row.submit_by + rules.grace:
        return Verdict(Action.WAITING, "grace", next_check_at=row.submit_by + rules.grace)
    return _decide_after_grace(row, heard, feed, look_up, rules, now)


def _decide_after_grace(
    row: Row, heard: Heard, feed: FeedView, look_up: Witness | None, rules: Rules, now: datetime
) -> Verdict:
    assert row.submit_by is not None  # noqa: S101 - decide has looked
    age = now - row.submit_by
    given_up = age >= rules.give_up_after
    objection = _objection(feed, look_up, rules)
    absent = next((w for w in (look_up, feed.witness) if w and w.answer is Answer.ABSENT and not objection), None)
    silent = objection if objection and feed.witness.answer is Answer.ABSENT else feed.witness.reason or "silent"
    later = now + min(max(age / 10, SOONEST_LOOK), LATEST_LOOK)
    if feed.hold:
        return Verdict(Action.HELD, feed.hold, next_check_at=later)
    if heard.rejected:
        if absent or given_up:
            return _rejected(heard)
        return Verdict(Action.HELD, "rejection", next_check_at=later)
    if heard.other:
        if given_up and rules.on_unknown == "fail":
            return Verdict(Action.FAILED, "unknown_event")
        return Verdict(Action.HELD, "unknown_event", next_check_at=later)
    if absent is None and not given_up:
        return Verdict(Action.HELD, silent, next_check_at=later)
    if over := _no_attempt_left(row, rules, now):
        return Verdict(Action.FAILED, over)
    if absent:
        by_look_up = absent is look_up
        reason = "looked_up" if by_look_up else "absent"
        source: Literal["look-up", "inferred"] = "look-up" if by_look_up else "inferred"
        return Verdict(Action.RELEASED, reason, source, next_check_at=now + TELL_AGAIN[0], risk=absent.risk)
    if rules.on_unknown == "release":
        return Verdict(Action.RELEASED, "gave_up", next_check_at=now + TELL_AGAIN[0], risk=feed.prior)
    if rules.on_unknown == "fail":
        return Verdict(Action.FAILED, "gave_up")
    return Verdict(Action.HELD, silent, next_check_at=later)


CANNOT_TELL: Final = (
    *("hashed_recipient", "no_recipient", "several_recipients", "no_message_id"),
    *("unsupported", "too_old", "no_control"),
)
"""Why an API has nothing to say of a send, however often it is asked: then its feed decides alone."""

MAY_BE_IT: Final = ("unnamed", "unknown_event")
"""What an API says that knows of something which may be the send."""


def _objection(feed: FeedView, look_up: Witness | None, rules: Rules) -> str | None:
    """Return why an absence doesn't count: the API may know the send, or has to be asked first and has not answered."""
    if look_up and look_up.answer is Answer.SILENT and look_up.reason in MAY_BE_IT:
        return look_up.reason
    if rules.look_up != "before_release" or not feed.can_be_asked:
        return None
    answered = look_up and (look_up.answer is not Answer.SILENT or look_up.reason in CANNOT_TELL)
    return None if answered else "look_up"


def _decide_pending(row: Row, heard: Heard, now: datetime) -> Verdict:
    if heard.rejected:
        return _rejected(heard)
    if heard.other:
        return Verdict(Action.HELD, "unknown_event", next_check_at=now + LATEST_LOOK)
    if row.expires_at and row.expires_at <= now:
        return Verdict(Action.FAILED, "expired")
    if not row.released:
        return Verdict(Action.WAITING, "pending", next_check_at=row.expires_at)
    wait = TELL_AGAIN[min(row.told, len(TELL_AGAIN) - 1)]
    return Verdict(Action.WAITING, "told_again", next_check_at=_earliest(now + wait, row.expires_at))


def _earliest(first: datetime, second: datetime | None) -> datetime:
    return min(first, second) if second else first


def _rejected(heard: Heard) -> Verdict:
    source: Literal["feed", "look-up"] = "look-up" if heard.looked_up else "feed"
    return Verdict(Action.FAILED, "rejected", source=source, detail=heard.reason)


def _may_retry_same_key(row: Row, heard: Heard, feed: FeedView, rules: Rules, now: datetime) -> bool:
    return (
        rules.same_key_retry
        and row.has_fingerprint
        and not heard.anything
        and not feed.hold
        and not _no_attempt_left(row, rules, now)
    )


def _no_attempt_left(row: Row, rules: Rules, now: datetime) -> Literal["expired", "attempts"] | None:
    if row.expires_at and row.expires_at <= now:
        return "expired"
    return "attempts" if row.reached >= rules.max_attempts else None
