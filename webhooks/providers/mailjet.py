# SPDX-License-Identifier: Apache-2.0
"""Mailjet, Send API and Event API: one bare JSON object a delivery, or an array where events are grouped; unsigned."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Final, Literal

from webhooks.asking import Api, Query, Shown, basic, by_offset, credentials, items, needed, utc
from webhooks.event import HASHED_KEY, Event, Kind, Testimony, bounded_id, derived_id, unread
from webhooks.payload import at, id_at, iso_time, load_object, load_or_none, load_text, short, split, text_at, unix_time
from webhooks.provider import (
    UNKNOWN,
    BadPayload,
    Delivery,
    Facts,
    Feed,
    Fetch,
    NoSample,
    Parsed,
    Provider,
    Stamp,
    Verdict,
    sampled_name,
)
from webhooks.reply import Reply, by_ids, by_status, each, first_of, is_answer, is_success, unclear
from webhooks.signature import credential_objection, credential_only, sample_delivery

FACTS: Final = Facts(
    title="Mailjet (Send API v3.1, Event API)",
    key_slot=(
        'CustomID and EventPayload (JSON text {"send_key": ...}) of the message, so inside an entry of Messages (v3:'
        " Mj-CustomID, Mj-EventPayLoad; SMTP: X-MJ-CustomID, X-MJ-EventPayload); come back as CustomID and Payload. How"
        " long a CustomID may be was not found [mailjet/api-documentation guides]"
    ),
    first_evidence=(
        "sent: the recipient's server took it; there is no event of Mailjet's own acceptance"
        " [mailjet/api-documentation guides/_event-api.md]"
    ),
    event_id=(
        "none: a hash over MessageID, event, time, recipient, url and what else tells opens and clicks apart; MessageID"
        " is one a recipient and too large for a float [mailjet/api-documentation guides/_event-api.md]"
    ),
    authentication=(
        "nothing is signed. secrets: basic:user:password, in the URL [mailjet/api-documentation guides/_event-api.md]"
    ),
    signs_body=False,
    signs_time=False,
    redelivery=(
        "until exactly 200: up to 10 times, every 10 minutes, says one copy of its guide, every 30 s for 24 hours"
        " another; then the URL is suspended and has to be replaced [mailjet/api-documentation guides/_event-api.md]"
    ),
    redelivers_for=timedelta(minutes=100),
    look_up=(
        "by our key: GET /v3/REST/message?CustomID=...&ShowCustomID=true between FromTS and ToTS, by api_key and"
        " api_secret; a message without its CustomID in the answer is not taken for ours"
        " [dev.mailjet.com/reference/email/messages, mailjet/mailjet-apiv3-nodejs]. The filter has found nothing though"
        " a CustomID was set [mailjet/mailjet-apiv3-php#57], so all messages of the span are read then; one to the"
        " recipient with a CustomID that is no wire key of 48 hex digits makes it unclear. Pages of 1,000 by Limit and"
        " Offset [mailjet/api-documentation guides/_filtering-resources.md]; blocked ones may be left out"
        " [mailjet/mailjet-apiv3-php#201]. How late a message shows and how long it is kept was not found: 15 minutes"
        " are assumed. No api_scope"
    ),
    registration=(
        "POST /v3/REST/eventcallbackurl {EventType, Url, Version, IsBackup}, one for each event type; Version 2 groups"
        " [mailjet/api-documentation guides/_event-api.md, mailjet/mailjet-gem#266]"
    ),
    sources=(
        "github.com/mailjet/api-documentation, dev.mailjet.com/reference, github.com/mailjet/mailjet-apiv3-nodejs,"
        " github.com/mailjet/mailjet-apiv3-python (2026), django-anymail 15.2"
    ),
    native_key=(
        "none documented as such, but CustomCampaign + DeduplicateCampaign (SMTP: X-Mailjet-Campaign,"
        " X-Mailjet-DeduplicateCampaign): of a campaign only the first message to an address goes out, so the wire key"
        " as campaign is a key for each recipient; for how long was not found. The second request is taken like the"
        " first and proves nothing; the event blocked, duplicate in campaign, proves that an earlier one of the same"
        " key was accepted [documentation.mailjet.com article 360042756034]. The header Idempotency-Key is set because"
        " the Python SDK would make one from the text without CustomID; what the server does with it was not found"
        " [mailjet/mailjet-apiv3-python guardrails.py]"
    ),
    finds_by="key",
    lists=True,
    setup=(
        "Account settings > Event notifications (webhooks): {url} as the URL, written https://user:password@host/...",
        "events, each on its own: sent, open, click, bounce, blocked, spam, unsub",
        'here secrets = ["basic:user:password"] with the same user and password',
        "group events may be on or off: both forms are read",
        "send with what stamp returns merged into the message, so into the entry of Messages",
        "confirm with the MessageID (not the MessageUUID) of the answer's recipient, where its Status is success",
        "where you keep campaigns of your own, leave CustomCampaign and DeduplicateCampaign of the stamp out",
        "api_key and api_secret: the pair of the sending account, for the look-up",
        "a URL that failed for 24 hours is suspended: enter it again, or set one with IsBackup beforehand",
    ),
    key_is_echoed_in=("every event of a message that was sent with it"),
    first_event_is_delivery=True,
)

_ACCEPTED: Final = Testimony.ACCEPTED
_REJECTED: Final = Testimony.REJECTED

MEANINGS: Final = MappingProxyType(
    {
        "sent": (Kind.DELIVERED, _ACCEPTED),
        "open": (Kind.OPENED, _ACCEPTED),
        "click": (Kind.CLICKED, _ACCEPTED),
        "bounce": (Kind.BOUNCED, _ACCEPTED),
        "spam": (Kind.COMPLAINED, _ACCEPTED),
        "unsub": (Kind.UNSUBSCRIBED, _ACCEPTED),
        "blocked": (Kind.REJECTED, _REJECTED),
    }
)
"""What each value of `event` means and proves, but what `_meaning` says first [mailjet/api-documentation
guides/_event-api.md]."""

_LISTED: Final = MappingProxyType(
    {
        "queued": (Kind.QUEUED, _ACCEPTED),
        "deferred": (Kind.DEFERRED, _ACCEPTED),
        "sent": (Kind.SENT, _ACCEPTED),
        "opened": (Kind.OPENED, _ACCEPTED),
        "clicked": (Kind.CLICKED, _ACCEPTED),
        "bounce": (Kind.BOUNCED, _ACCEPTED),
        "softbounced": (Kind.BOUNCED, _ACCEPTED),
        "hardbounced": (Kind.BOUNCED, _ACCEPTED),
        "spam": (Kind.COMPLAINED, _ACCEPTED),
        "unsub": (Kind.UNSUBSCRIBED, _ACCEPTED),
        "blocked": (Kind.REJECTED, _REJECTED),
    }
)
"""The same for `Status` in answers of the API [mailjet/mailjet-apiv3-nodejs types/api/Message.ts]."""

_EARLIER_ONE_TAKEN: Final = (Kind.QUEUED, _ACCEPTED)
"""Blocked as a duplicate in its campaign: no fate of this submission's, but proof that an earlier one was accepted."""

_DUPLICATE_STATE: Final = "15"  # DuplicateInCampaign [mailjet/mailjet-apiv3-nodejs types/api/Message.ts]
_TELLS_APART: Final = ("url", "ip", "agent", "error", "mj_list_id")
_API: Final = "https://api.mailjet.com"
_PAGE: Final = 1_000
"""Messages on a page, at most [mailjet/api-documentation guides/_filtering-resources.md]."""
_CREDENTIAL: Final = "basic:user:password"

_ERROR_CODE: Final = re.compile(r"(?:mj|send)-\d{4}")
"""What an error of a message is called [mailjet/api-documentation guides/_send-api.md]."""
_OF_THE_CALL: Final = frozenset({401, 429})
"""Refusals that can't list messages: of the key, and of the rate."""


class Mailjet:
    """Mailjet as the receiver and the sender's side know it."""

    name: Final = "mailjet"
    facts: Final = FACTS

    def stamp(self, wire_key: str) -> Stamp:
        """Return fields of one message (an entry of v3.1's Messages), those that keep a second one back included."""
        payload = json.dumps({"send_key": wire_key})
        return Stamp(
            body={
                "CustomID": wire_key,
                "EventPayload": payload,
                "CustomCampaign": wire_key,
                "DeduplicateCampaign": True,
            },
            headers={"Idempotency-Key": wire_key},
            smtp_headers={
                "X-MJ-CustomID": wire_key,
                "X-MJ-EventPayload": payload,
                "X-Mailjet-Campaign": wire_key,
                "X-Mailjet-DeduplicateCampaign": "1",
            },
        )

    def read_reply(self, status: int, headers: Mapping[str, str], body: bytes) -> list[Reply]:  # noqa: ARG002
        """Return the answer to each of v3.1's Messages, which a 4xx lists too: each is taken or refused by itself."""
        said = load_or_none(body)
        messages = at(said, "Messages")
        if is_answer(status) and isinstance(messages, list) and messages:
            return each(_reply(status, message) for message in messages)
        of_the_call = status in _OF_THE_CALL or (isinstance(said, dict) and messages is None)
        if is_success(status) or (is_answer(status) and not of_the_call):
            return [unclear(status)]
        return [by_status(status)]

    async def verify(self, delivery: Delivery, feed: Feed, now: datetime, fetch: Fetch) -> Verdict:  # noqa: ARG002
        """Judge the credential that the request carries: Mailjet signs nothing."""
        return credential_only(delivery, feed.secrets, _CREDENTIAL)

    def parse(self, delivery: Delivery) -> Parsed:
        """Return the event, or those of a group; one that can't be read there is kept as unknown and counted."""
        parts = split(delivery.body)
        if parts == [delivery.body]:
            return Parsed((_event(delivery.body),))
        anomalies: Counter[str] = Counter()
        return Parsed([_kept(raw, anomalies) for raw in parts], anomalies=anomalies)

    def sample(self, kind: str, wire_key: str, feed: Feed, now: datetime) -> Delivery:
        """Return an example group of one that carries the feed's first credential."""
        if kind == Kind.QUEUED:
            raise NoSample("mailjet has no sample 'queued': its first event is sent, by the recipient's server")
        body = _sample_body(sampled_name(self.name, kind, MEANINGS), wire_key, now)
        needs = f"the feed has no credential to carry: set feeds.<name>.secrets to {_CREDENTIAL}"
        return sample_delivery(body, feed.secrets, None, needs)

    def objection(self, setting: Literal["secrets", "topics"], value: str) -> str | None:
        """Return what is wrong with a secret that no request can carry."""
        return credential_objection("Mailjet", _CREDENTIAL, value) if setting == "secrets" else None

    async def search(self, query: Query, feed: Feed, api: Api) -> AsyncIterator[Event]:
        """Yield a message each that the API lists for the key; where none shows it, and without a key, of the span.

        Raises ApiError where one of them shows no key and may be the sought one.
        """
        shown = Shown(query)
        for filters in [{"CustomID": query.wire_key}, {}] if query.wire_key else [{}]:
            async for item in _listed(query, filters, feed, api):
                event = _found(item)
                shown.note(event, unnamed=not event.send_key if filters else _may_be_sought(event, query))
                yield event
            if shown.found:
                return
        shown.settle("a message of the API's answer shows no CustomID of ours: it may be the sought one")


def _reply(status: int, message: object) -> Reply:
    error, said = first_of(at(message, "Errors")), at(message, "Status")
    if said == "success":
        return by_ids(200, [id_at(first_of(at(message, "To")), "MessageID")])[0]
    of_error = at(error, "StatusCode")
    if said != "error" or type(of_error) is not int or of_error not in range(400, 600):
        return unclear(status)
    code = text_at(error, "ErrorCode") or ""
    return replace(by_status(of_error), reason=code) if _ERROR_CODE.fullmatch(code) else by_status(of_error)


def _kept(raw: bytes, anomalies: Counter[str]) -> Event:
    try:
        return _event(raw)
    except BadPayload:
        anomalies["damaged"] += 1
        return unread(raw, "mailjet")


def _event(raw: bytes) -> Event:
    entry = load_object(raw)
    name = text_at(entry, "event")
    if name is None:
        raise BadPayload("no event: not a webhook of Mailjet")
    kind, testimony = _meaning(name, entry)
    message_id = id_at(entry, "MessageID") or id_at(entry, "mj_message_id")  # the older name, once the only one
    return Event(
        kind=kind,
        testimony=testimony,
        message_id=message_id,
        event_id=_event_id(name, message_id, entry),
        send_key=_send_key(entry),
        recipient=text_at(entry, "email"),
        occurred_at=unix_time(entry.get("time")),
        reason=_reason(entry),
        raw=raw,
    )


def _meaning(name: str, entry: dict[str, Any]) -> tuple[Kind, Testimony]:
    error = (text_at(entry, "error") or "").lower()
    if name == "blocked" and error == "duplicate in campaign":
        return _EARLIER_ONE_TAKEN
    if name == "bounce" and error == "greylisted" and entry.get("hard_bounce") is not True:
        return Kind.DEFERRED, _ACCEPTED  # it will be tried again
    return MEANINGS.get(name, UNKNOWN)


def _event_id(name: str, message_id: str | None, entry: dict[str, Any]) -> str:
    rest = [text_at(entry, field) for field in ("time", "email", *_TELLS_APART)]
    return derived_id("mailjet", message_id, name, *rest)


def _send_key(entry: dict[str, Any]) -> str | None:
    # What names our field goes before CustomID, where an application may have an id of its own.
    return _named(entry.get("Payload")) or text_at(entry, "CustomID")


def _named(payload: object) -> str | None:
    return text_at(load_text(payload) if isinstance(payload, str) else payload, "send_key")


def _reason(entry: dict[str, Any]) -> str | None:
    words = [text_at(entry, field) for field in ("error_related_to", "error", "comment")]
    return short(": ".join(filter(None, words)))


# -- asking ------------------------------------------------------------------------------------------------------------


def _listed(query: Query, filters: dict[str, str], feed: Feed, api: Api) -> AsyncIterator[Any]:
    """Yield the messages of the span that pass the filters, page by page until an empty one. Raises ApiError."""
    headers = basic(*credentials(feed, "api_key", "api_secret"))
    url, (since, until) = (feed.api_url or _API) + "/v3/REST/message", query.seconds()
    shown = {"ShowCustomID": "true", "ShowContactAlt": "true", "FromTS": utc(since), "ToTS": utc(until)}

    async def ask(offset: int) -> list[Any]:
        # Total is the number on the page as often as that of all: only an empty page tells the end.
        params = {**shown, **filters, "Limit": str(_PAGE), "Offset": str(offset)}
        return items((await api.call("GET", url, headers=headers, params=params)).value, "Data")

    return by_offset(ask)


def _may_be_sought(event: Event, query: Query) -> bool:
    # A CustomID that is no hash may be the application's own, which took the place of our key.
    return query.may_be_to(event.recipient) and not HASHED_KEY.fullmatch(event.send_key or "")


def _found(item: object) -> Event:
    message_id, status = bounded_id(needed(item, "ID")), text_at(item, "Status") or ""
    state = text_at(item, "StateID")
    duplicate = status == "blocked" and state == _DUPLICATE_STATE
    kind, testimony = _EARLIER_ONE_TAKEN if duplicate else _LISTED.get(status, UNKNOWN)
    return Event(
        kind=kind,
        testimony=testimony,
        message_id=message_id,
        event_id=derived_id("mailjet", "look-up", message_id, status, state),
        send_key=text_at(item, "CustomID"),
        recipient=text_at(item, "ContactAlt"),
        occurred_at=iso_time(at(item, "ArrivedAt")),
        raw=json.dumps(item).encode(),
    )


# -- samples -----------------------------------------------------------------------------------------------------------


def _sample_body(name: str, wire_key: str, now: datetime) -> bytes:
    event = {
        "event": name,
        "time": int(now.timestamp()),
        "MessageID": int(derived_id("sample", wire_key)[:14], 16),
        "email": "sample@example.com",
        "CustomID": wire_key,
        "Payload": json.dumps({"send_key": wire_key}),
    }
    return json.dumps([event]).encode()


PROVIDER: Final[Provider] = Mailjet()
