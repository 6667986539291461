# SPDX-License-Identifier: Apache-2.0
"""What no party of ours sees: which messages the provider took, and why a second one of a send may be right. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
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
        "same_key_retry": Cause.BROKEN_PROMISE,
    }
)
"""By what ended the attempt whose message was taken. No cause is `not_sent`, whose sender knew."""


@dataclass(frozen=True, slots=True)
class Release:
    """What ended an attempt so that another one could be given out."""

    reason: str
    """As in its verdict; `pruned` where the row was deleted."""
    risk: float | None = None
    who: str = ""


@dataclass(eq=False, slots=True)
class Attempt:
    """A claim that was granted, as its sender knows it."""

    key: str
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


@dataclass(slots=True)
class Truth:
    """Everything that happened to a few sends. Each has a clock of its own, and begins at zero."""

    grace: timedelta
    give_up_after: timedelta
    max_risk: float
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

    def given_out(self, key: str, fence: int, left: timedelta) -> Attempt:
        """Note a claim that was granted: it must be the only one that runs."""
        before = self.attempts[key][-1:]
        assert not before or before[0].ended_by, f"{key} was given out while {before[0]} was running"
        assert not before or before[0].fence < fence, f"the fence {fence} of {key} came after {before[0]}"
        attempt = Attempt(key, fence, left)
        self.attempts[key].append(attempt)
        return attempt

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
        if release.reason == "absent":
            assert release.risk is not None
            assert release.risk <= self.max_risk, f"the release of {attempt} states more risk than is allowed"
        if release.reason == "looked_up":
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
        if self.keys == "kept" and earlier and now - earlier[-1].at < WINDOW:
            return earlier[-1]  # it answers the repetition as it answered the first
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
        if first.after_release:
            return Cause.LATE if first.late else None
        for attempt in self.attempts[first.key]:
            if first.attempt.fence <= attempt.fence < second.attempt.fence:
                reason = attempt.ended_by.reason if attempt.ended_by else "it runs"
                if reason != "same_key_retry" or self.keys == "broken":
                    return CAUSE_OF_RELEASE.get(reason)
        return Cause.LATE if second.late else None
