# SPDX-License-Identifier: Apache-2.0
"""What no party of ours sees: which messages the provider took, and why a second one of a send may be right. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, Literal

WINDOW: Final = timedelta(days=1)
"""How long the provider keeps our native idempotency key."""

NOTHING: Final = timedelta(0)


class Cause(StrEnum):
    """Why a send may have been taken twice: the list `Duplicates that remain` of the design, and no other reason."""

    RISK = "a release that stated its risk"
    LATE = "a worker frozen before its write, or a request that the network held back"
    OPERATOR = "an operator's release"
    GAVE_UP = "gave_up, as the owner of the class asked"
    FORGOTTEN = "row and evidence both gone"
    BROKEN_PROMISE = "a provider that broke its own promise about keys"
    HIDDEN_RETRY = "a retry hidden inside one attempt"


CAUSE_OF_RELEASE: Final[Mapping[str, Cause]] = MappingProxyType(
    {
        "absent": Cause.RISK,
        "looked_up": Cause.RISK,
        "gave_up": Cause.GAVE_UP,
        "operator": Cause.OPERATOR,
        "pruned": Cause.FORGOTTEN,
        "restored": Cause.FORGOTTEN,
        "same_key_retry": Cause.BROKEN_PROMISE,
    }
)
"""By what ended the attempt whose message was taken. No cause is `not_sent`, whose sender knew."""

JUDGED: Final = frozenset({"absent", "looked_up", "not_sent"})
"""Of attempts that ended so no witness is asked again."""

CAP_SPAN: Final = timedelta(days=1)
"""The window of the cap."""


@dataclass(frozen=True, slots=True)
class Release:
    """What ended an attempt so that another one could be given out."""

    reason: str
    """As in its verdict; `pruned` where the row was deleted, `restored` where a restore forgot the attempt."""
    risk: float | None = None
    who: str = ""


@dataclass(eq=False, slots=True)
class Attempt:
    """A claim that was granted, as its sender knows it."""

    key: str
    feed: str
    fence: int
    left: timedelta
    """In which the submission must be over, on the sender's own clock; below zero afterwards."""
    over: bool = False
    """Its sender has said how it ended, and submits no more."""
    ended_by: Release | None = None
    """None while it runs: nothing gave the send free again."""

    def __repr__(self) -> str:
        return f"{self.key}#{self.fence}"


@dataclass(frozen=True, eq=False, slots=True)
class Message:
    """One message that the provider took: its recipient gets it."""

    id: str
    attempt: Attempt
    at: timedelta
    """On its send's clock."""
    late: bool
    """Taken when the time to submit was over ..."""
    after_release: bool
    """... and when another attempt might have been given out."""

    def __repr__(self) -> str:
        return f"{self.id} of {self.attempt}"

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        printer.text(repr(self))  # so Hypothesis prints it

    @property
    def key(self) -> str:
        return self.attempt.key


@dataclass(frozen=True, slots=True)
class Kept:
    """What a backup of the database knows."""

    attempts: Mapping[str, Sequence[tuple[Attempt, Release | None]]]
    places: Mapping[str, timedelta]
    clock: Mapping[str, timedelta]


@dataclass(slots=True)
class Truth:
    """Everything that happened to a few sends. Each has a clock of its own, and begins at zero."""

    grace: timedelta
    give_up_after: timedelta
    max_risk: float
    askable: str
    """The feed whose provider can be asked."""
    failover: bool = False
    """Whether what was released on absence may go to another feed."""
    mute: set[str] = field(default_factory=set)
    """Feeds whose silence means nothing now."""
    cap: int | None = None
    """How many sends the recipient may be sent in `CAP_SPAN`."""
    places: dict[str, timedelta] = field(default_factory=dict)
    """When each send that has a place under the cap took it, on its clock."""
    fences: set[int] = field(default_factory=set)
    """All that were ever given out."""
    keys: Literal["none", "kept", "broken"] = "none"
    """Whether the provider keeps our native key, and whether it keeps its promise."""
    known_ids: bool = False
    """Whether we choose the message id, the same for all attempts."""
    clock: defaultdict[str, timedelta] = field(default_factory=lambda: defaultdict(timedelta))
    attempts: defaultdict[str, list[Attempt]] = field(default_factory=lambda: defaultdict(list))
    messages: list[Message] = field(default_factory=list)
    said_sent: set[str] = field(default_factory=set)
    """Sends of which an operator said that they were sent."""
    causes: list[Cause] = field(default_factory=list)
    """Of each second acceptance."""
    reasons: list[str] = field(default_factory=list)
    """Of each release."""

    def time_passes(self, key: str, by: timedelta) -> None:
        """Let everybody's clocks go on for one send: the database's, its senders', the provider's."""
        self.clock[key] += by
        for attempt in self.attempts[key]:
            attempt.left -= by

    def given_out(self, key: str, feed: str, fence: int, left: timedelta) -> Attempt:
        """Note a claim that was granted: it must be the only one that runs, and its feed one that it may go to."""
        before = self.attempts[key][-1:]
        assert not before or before[0].ended_by, f"{key} was given out while {before[0]} was running"
        assert not before or before[0].fence < fence, f"the fence {fence} of {key} came after {before[0]}"
        assert fence not in self.fences, f"the fence {fence} of {key} was given out before a restore"
        self._may_go_to(key, feed)
        self.fences.add(fence)
        attempt = Attempt(key, feed, fence, left)
        self.attempts[key].append(attempt)
        return attempt

    def _may_go_to(self, key: str, feed: str) -> None:
        """Where an attempt may have been accepted its send may leave that feed only if a witness denies it."""
        remembered = self._remembered(key)
        reached = [one for one in remembered if one.ended_by and one.ended_by.reason != "not_sent"]
        if reached and feed not in {reached[-1].feed, remembered[-1].feed}:
            last = remembered[-1].ended_by
            allowed = self.failover and last is not None and last.reason in {"absent", "looked_up"}
            assert allowed, f"{key} went to {feed} after {reached[-1]} on {reached[-1].feed}: {last}"

    def _remembered(self, key: str) -> Sequence[Attempt]:
        """Return the attempts since a send's row was last deleted."""
        attempts = self.attempts[key]
        pruned = [n for n, one in enumerate(attempts, 1) if one.ended_by and one.ended_by.reason == "pruned"]
        return attempts[max(pruned, default=0) :]

    def takes_place(self, key: str, reached_nobody: AbstractSet[str]) -> None:
        """Note that a claim under the cap was granted: a place must have been free."""
        held = {
            other: at
            for other, at in self.places.items()
            if other not in {key, *reached_nobody} and self.clock[other] - at < CAP_SPAN
        }
        assert len(held) < (self.cap or 0), f"{key} was given out though {sorted(held)} have all places"
        self.places = held | {key: self.clock[key]}

    def kept(self) -> Kept:
        """What a backup that is taken now will bring back."""
        attempts = {key: [(one, one.ended_by) for one in attempts] for key, attempts in self.attempts.items()}
        return Kept(attempts, dict(self.places), dict(self.clock))

    def restored(self, kept: Kept) -> None:
        """Note that the database has gone back: what came later is forgotten, and who submits goes on."""
        for key, attempts in self.attempts.items():
            remembered = dict(kept.attempts.get(key, ()))
            for attempt in attempts:
                attempt.ended_by = remembered.get(attempt, Release("restored"))
            attempts[:] = remembered
        self.places = dict(kept.places)

    def runs(self, key: str, fence: int) -> None:
        """Note that a row is claimed: by the newest claim that was granted. A same-key release may be taken back."""
        newest = self.attempts[key][-1]
        assert newest.fence == fence, f"{key} is claimed by {fence}, which nobody was granted after {newest}"
        newest.ended_by = None

    def released(self, key: str, fence: int, release: Release) -> None:
        """Note that an attempt was ended by a release: never before its time."""
        [attempt] = [one for one in self.attempts[key] if one.fence == fence]
        assert attempt is self.attempts[key][-1], f"{release.reason} released {attempt}, which had been given out again"
        waits = {"absent": self.grace, "looked_up": self.grace, "gave_up": self.give_up_after}
        may_submit = attempt.left > -waits.get(release.reason, NOTHING) and not attempt.over
        assert not may_submit, f"{release.reason} released {attempt} before its time"
        if release.reason == "not_sent":
            assert not any(message.attempt is attempt for message in self.messages), f"{attempt} was taken"
        out = [one for one in self._remembered(key) if one.ended_by is None or one.ended_by.reason not in JUDGED]
        feeds = {attempt.feed, *(one.feed for one in out)}
        if release.reason == "absent":
            assert not feeds & self.mute, f"{attempt} was released though of {feeds} {self.mute} can't speak"
            assert release.risk is not None
            assert release.risk <= self.max_risk, f"the release of {attempt} states more risk than is allowed"
        if release.reason == "looked_up":
            assert feeds == {self.askable}, f"{attempt} was released though only {self.askable} was asked of {feeds}"
            assert release.risk is not None
        if release.reason == "gave_up":
            assert release.who.endswith("release"), f"{attempt} was given up by rules that hold: {release.who}"
        attempt.ended_by = release
        self.reasons.append(release.reason)

    def pruned(self, key: str) -> None:
        """Note that a send's row was deleted."""
        for attempt in self.attempts[key][-1:]:
            attempt.ended_by = Release("pruned")

    def of(self, key: str) -> Sequence[Message]:
        """What the recipient of a send got."""
        return [message for message in self.messages if message.key == key]

    def take(self, attempt: Attempt) -> Message:
        """Let the provider take a message. A second one of its send must have a cause that the design names."""
        earlier, now = self.of(attempt.key), self.clock[attempt.key]
        here = [message for message in earlier if message.attempt.feed == attempt.feed]
        if self.keys == "kept" and here and now - here[-1].at < WINDOW:
            return here[-1]  # it answers the repetition as it answered the first
        number = sum(message.attempt is attempt for message in earlier)
        message = Message(
            id=f"known-{attempt.key}" if self.known_ids else f"m-{attempt.fence}{'-again' * number}",
            attempt=attempt,
            at=now,
            late=attempt.left <= NOTHING,
            after_release=attempt.ended_by is not None,
        )
        for other in earlier:
            cause = self._cause(*sorted((other, message), key=lambda one: one.attempt.fence))
            assert cause, f"{other} and {message} are a duplicate without a cause"
            self.causes.append(cause)
        self.messages.append(message)
        return message

    def _cause(self, first: Message, second: Message) -> Cause | None:
        """Return why two messages of one send were taken; `first` is that of the older attempt."""
        if first.attempt is second.attempt:
            return Cause.HIDDEN_RETRY
        if any(one.attempt.ended_by and one.attempt.ended_by.reason == "restored" for one in (first, second)):
            return Cause.FORGOTTEN
        if first.after_release:
            return Cause.LATE if first.late else None
        for attempt in self.attempts[first.key]:
            if first.attempt.fence <= attempt.fence < second.attempt.fence:
                reason = attempt.ended_by.reason if attempt.ended_by else "it runs"
                if reason != "same_key_retry" or self.keys == "broken":
                    return CAUSE_OF_RELEASE.get(reason)
        return Cause.LATE if second.late else None
