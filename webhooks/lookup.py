# SPDX-License-Identifier: Apache-2.0
"""The second witness: asks a provider's API what became of one send, and says what the answer is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from email.utils import getaddresses
from typing import Final

from msgspec.structs import replace

from webhooks.asking import Api, ApiError, Query, Searches
from webhooks.event import (
    Answer,
    Event,
    Testimony,
    hashed_recipient,
    normal_recipient,
    same_mailbox,
    wire_key,
)
from webhooks.provider import Feed, Provider

EARLIER: Final = timedelta(minutes=5)
LATER: Final = timedelta(hours=1)
"""How much before its claim and after its `submit_by` a send is looked for: clocks differ, and servers queue."""


@dataclass(frozen=True, slots=True)
class Sought:
    """A send that is looked for: its key, its recipient, and when it was, or may have been, submitted."""

    wire_key: str
    claimed_at: datetime
    submit_by: datetime
    recipient: str | None = None
    message_id: str | None = None
    """An id that was known before the call."""
    salt: bytes | None = field(default=None, repr=False)
    """What the recipient is hashed with; None: it is an address."""

    def query(self) -> Query:
        """Return the question that finds it; a hashed recipient can't be asked for."""
        since, until = self.claimed_at - EARLIER, self.submit_by + LATER
        recipient = normal_recipient(self.recipient) if self.salt is None else None
        return Query(since, until, self.wire_key, recipient, self.message_id)

    def comparable(self, address: str | None) -> str | None:
        """Return an address in the form in which the recipient is kept."""
        normal = normal_recipient(address)
        return hashed_recipient(normal, self.salt) if normal and self.salt is not None else normal


@dataclass(frozen=True, slots=True)
class Found:
    """What a look-up found: its answer, why where it is SILENT, and the events about the send, to be stored."""

    answer: Answer
    reason: str = ""
    """A short stable word: `unsupported`, `hashed_recipient`, `no_recipient`, `several_recipients`, `no_message_id`,
    `not_settled`, `too_old`, `no_control`, `control_not_found`, `unknown_event`, or an ApiError's."""
    hint: str = ""
    events: Sequence[Event] = ()


async def look_up(
    provider: Provider, feed: Feed, api: Api, sought: Sought, control: Sought | None, now: datetime, namespace: str = ""
) -> Found:
    """Ask the provider about a send, and where nothing is found, about the control by the same kind of question.

    `control` is a send known to be accepted, submitted no earlier than the sought one's `submit_by`; finding it proves
    that the question is answered at all. ABSENT means: the API had time to show the send, was read to its end, found
    the control and not the send. Never raises for what the API does.
    """
    if objection := _objection(provider, sought):
        return objection
    ask = _Ask(provider, feed, api, namespace)
    try:
        if events := await ask.about(sought):
            return _testified(events)
        return await _absence(ask, sought, control, now)
    except ApiError as error:
        return Found(Answer.SILENT, error.reason, error.hint)


def _objection(provider: Provider, sought: Sought) -> Found | None:
    facts = provider.facts
    if not isinstance(provider, Searches) or facts.finds_by == "nothing":
        return Found(Answer.SILENT, "unsupported", f"it can't be asked: see reconciler providers {provider.name}")
    if facts.finds_by == "recipient" and sought.salt is not None:
        return Found(
            Answer.SILENT, "hashed_recipient", "this provider is asked by recipient, and recipients are stored hashed"
        )
    if facts.finds_by == "recipient" and not sought.recipient:
        return Found(Answer.SILENT, "no_recipient", "this provider is asked by recipient, and the row holds none")
    if facts.finds_by == "recipient" and len(getaddresses([sought.recipient or ""])) > 1:
        return Found(
            Answer.SILENT, "several_recipients", "this provider is asked by recipient, and the row holds several"
        )
    if facts.finds_by == "id" and not sought.message_id:
        return Found(
            Answer.SILENT, "no_message_id", "it is asked by the id that the claim's option known_message_id should hold"
        )
    return None


def _testified(events: Sequence[Event]) -> Found:
    said = {event.testimony for event in events}
    if Testimony.ACCEPTED in said:
        return Found(Answer.ACCEPTED, events=events)
    if Testimony.REJECTED in said:
        return Found(Answer.REJECTED, events=events)
    return Found(Answer.SILENT, "unknown_event", "it speaks of the send and says neither accepted nor rejected", events)


async def _absence(ask: _Ask, sought: Sought, control: Sought | None, now: datetime) -> Found:
    facts = ask.provider.facts
    settled_at = sought.submit_by + facts.settles_after
    if now < settled_at:
        return Found(Answer.SILENT, "not_settled", f"its API may not show the send before {settled_at:%H:%M} UTC")
    if now - sought.claimed_at >= facts.kept_for:
        return Found(Answer.SILENT, "too_old", f"its API forgets sends after {facts.kept_for.days} days")
    if control is None or control.claimed_at < sought.submit_by or _objection(ask.provider, control):
        return Found(Answer.SILENT, "no_control", "no later send of its class is known to be accepted")
    if not await ask.about(control):
        return Found(Answer.SILENT, "control_not_found", "a later send that was accepted is not found either")
    return Found(Answer.ABSENT)


@dataclass(frozen=True, slots=True)
class _Ask:
    """Whom to ask, and whose keys are ours."""

    provider: Provider
    feed: Feed
    api: Api
    namespace: str

    async def about(self, sought: Sought) -> list[Event]:
        """Return the events about the send, which then bear its key; an API's filter is never taken at its word.

        Raises ApiError where the range could not be read to its end, or holds an event that may be about the send.
        """
        assert isinstance(self.provider, Searches)  # noqa: S101 - `_objection` said so
        found, unnamed = [], False
        async for event in self.provider.search(sought.query(), self.feed, self.api):
            if is_about(event, sought, self.namespace):
                found.append(replace(event, send_key=sought.wire_key))
            elif event.send_key is None and _may_be_to(event, sought):
                unnamed = True
        if unnamed and not found and self.provider.facts.echoes_key:
            raise ApiError("unnamed", "it lists a send to this recipient that shows no key, so that it may be this one")
        return found


def is_about(event: Event, sought: Sought, namespace: str = "") -> bool:
    """Say whether an event is about a send: by our key, or by the id that we chose and the recipient."""
    if event.send_key is not None:
        return wire_key(event.send_key, namespace) == sought.wire_key
    if sought.message_id is None or event.message_id != sought.message_id:
        return False
    both = event.recipient and sought.recipient
    return not both or sought.comparable(event.recipient) == sought.comparable(sought.recipient)


def _may_be_to(event: Event, sought: Sought) -> bool:
    return bool(sought.recipient) and same_mailbox(sought.comparable(event.recipient), sought.recipient)
