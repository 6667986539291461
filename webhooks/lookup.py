# SPDX-License-Identifier: Apache-2.0
"""The second witness: asks a provider's API what became of one send, and says what the answer is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from email.utils import getaddresses
from typing import Final

from msgspec.structs import replace

from webhooks.asking import Api, ApiError, Query, Searches
from webhooks.event import Answer, Event, Testimony, normal_recipient, wire_key
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

    def query(self) -> Query:
        """Return the question that finds it."""
        since, until = self.claimed_at - EARLIER, self.submit_by + LATER
        return Query(since, until, self.wire_key, normal_recipient(self.recipient), self.message_id)


@dataclass(frozen=True, slots=True)
class Found:
    """What a look-up found: its answer, why where it is SILENT, and the events about the send, to be stored."""

    answer: Answer
    reason: str = ""
    """A short stable word: `unsupported`, `no_recipient`, `several_recipients`, `no_message_id`, `not_settled`,
    `too_old`, `no_control`, `control_not_found`, or an ApiError's."""
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
    try:
        if events := await _search(provider, feed, api, sought, namespace):
            return Found(_testified(events), events=events)
        return await _absence(provider, feed, api, sought, control, now, namespace)
    except ApiError as error:
        return Found(Answer.SILENT, error.reason, error.hint)


def _objection(provider: Provider, sought: Sought) -> Found | None:
    facts = provider.facts
    if not isinstance(provider, Searches) or facts.finds_by == "nothing":
        return Found(Answer.SILENT, "unsupported", f"{facts.title} can't be asked: {facts.look_up}")
    if facts.finds_by == "recipient" and not sought.recipient:
        return Found(Answer.SILENT, "no_recipient", "this provider is asked by recipient, and the row holds none")
    if facts.finds_by == "recipient" and len(getaddresses([sought.recipient or ""])) > 1:
        return Found(
            Answer.SILENT, "several_recipients", "this provider is asked by recipient, and the row holds several"
        )
    if facts.finds_by == "id" and not sought.message_id:
        return Found(Answer.SILENT, "no_message_id", "this provider is asked by an id that the claim should hold")
    return None


def _testified(events: Sequence[Event]) -> Answer:
    said = {event.testimony for event in events}
    if Testimony.ACCEPTED in said:
        return Answer.ACCEPTED
    return Answer.REJECTED if Testimony.REJECTED in said else Answer.SILENT


async def _absence(
    provider: Provider,
    feed: Feed,
    api: Api,
    sought: Sought,
    control: Sought | None,
    now: datetime,
    namespace: str,
) -> Found:
    facts = provider.facts
    settled_at = sought.submit_by + facts.settles_after
    if now < settled_at:
        return Found(Answer.SILENT, "not_settled", f"its API may not show the send before {settled_at:%H:%M} UTC")
    if now - sought.claimed_at >= facts.kept_for:
        return Found(Answer.SILENT, "too_old", f"its API forgets sends after {facts.kept_for.days} days")
    if control is None or control.claimed_at < sought.submit_by or _objection(provider, control):
        return Found(Answer.SILENT, "no_control", "no later send is known to be accepted that could prove the question")
    if not await _search(provider, feed, api, control, namespace):
        return Found(Answer.SILENT, "control_not_found", "a later send that was accepted is not found either")
    return Found(Answer.ABSENT)


async def _search(provider: Provider, feed: Feed, api: Api, sought: Sought, namespace: str) -> list[Event]:
    """Return the events about the send, which then bear its key; an API's filter is never taken at its word."""
    assert isinstance(provider, Searches)  # noqa: S101 - `_objection` said so
    found = provider.search(sought.query(), feed, api)
    return [replace(event, send_key=sought.wire_key) async for event in found if is_about(event, sought, namespace)]


def is_about(event: Event, sought: Sought, namespace: str = "") -> bool:
    """Say whether an event is about a send: by our key, or by the id that we chose and the recipient."""
    if event.send_key is not None:
        return wire_key(event.send_key, namespace) == sought.wire_key
    if sought.message_id is None or event.message_id != sought.message_id:
        return False
    both = event.recipient and sought.recipient
    return not both or normal_recipient(event.recipient) == normal_recipient(sought.recipient)
