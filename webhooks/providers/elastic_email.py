# SPDX-License-Identifier: Apache-2.0
"""Elastic Email, REST API v4 and HTTP notifications: one event a GET, its fields in the query string, unsigned."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final, Literal
from urllib.parse import urlencode

from msgspec.structs import replace

from webhooks.asking import Api, Query, Shown, by_offset, credential, items, needed, utc
from webhooks.event import HASHED_KEY, PLAIN_KEY, Event, Kind, Testimony, bounded_id, derived_id, unread
from webhooks.forms import form_fields, query_fields
from webhooks.payload import first, id_at, iso_time, load_or_none, short, text_at
from webhooks.provider import (
    UNKNOWN,
    BadPayload,
    Delivery,
    Facts,
    Feed,
    Fetch,
    Meanings,
    NoSample,
    Parsed,
    Provider,
    Stamp,
    Verdict,
    Verified,
    sampled_name,
)
from webhooks.reply import Reply, by_ids, is_success, unclear
from webhooks.signature import credential_headers, credential_objection, credential_only, octets

FACTS: Final = Facts(
    title="Elastic Email (REST API v4, HTTP notifications)",
    key_slot=(
        "Content.Postback (SMTP: header X-ElasticEmail-Postback) comes back as postback; Options.ChannelName comes back"
        " as ChannelName in the events API, which has no postback; in API v2 a channel is an ID field of up to 191"
        " characters [help.elasticemail.com 4804685, ElasticEmail/elasticemail-python EmailContent, RecipientEvent]"
    ),
    first_evidence="Sent; nothing tells of a submission before it [help.elasticemail.com 4804685]",
    event_id=(
        "none; a hash over transaction, messageid, recipient, status, category, date and clicked link"
        " [help.elasticemail.com 4804685]"
    ),
    authentication=(
        "nothing is signed. secrets: query:name=value for a secret in the notification URL, of a name that no field of"
        " a notification has. Webhooks of 2026 can post JSON and sign it, but what is signed was not found: leave them"
        " at Get [help.elasticemail.com 4804685, api-evangelist/elastic-email 2026-10]"
    ),
    signs_body=False,
    signs_time=False,
    redelivery=(
        "whether a notification that failed comes again was not found: take each as lost. After 1,000 failures the"
        " notifications are switched off [help.elasticemail.com 4804685]"
    ),
    redelivers_for=timedelta(0),
    look_up=(
        "by our key as the channel: GET /v4/events/channels/{key}; all of a span: GET /v4/events with from and to in"
        " UTC (assumed: the notifications' dates are), at most 1,000 items a page. Where the channel holds nothing the"
        " span is read: what went to the recipient by a channel that is no wire key of 48 hex digits makes it unclear."
        " api_key is a key with the access level ViewReports. How soon it shows a send was not found: 15 min are"
        " allowed for [ElasticEmail/elasticemail-python docs/EventsApi.md]"
    ),
    registration=(
        "Settings > Notifications, on PRO plans only; the URL must answer 200 to a GET [help.elasticemail.com 4804685]"
    ),
    sources=(
        "help.elasticemail.com articles 4804685 and 2300650, github.com/ElasticEmail/elasticemail-python (2025-05),"
        " github.com/api-evangelist/elastic-email (2026-10)"
    ),
    methods=("POST", "GET"),
    native_key="none found: a send that is repeated is a second send [help.elasticemail.com, API v4]",
    finds_by="key",
    lists=True,
    setup=(
        "Set secrets to query:secret=VALUE here, with a long random VALUE",
        "Settings > Notifications > HTTP web notification (PRO plans only): enter {url}?secret=VALUE",
        "Tick Sent, Opened, Clicked, Unsubscribed, Complaints and Bounce/Error",
        "Leave the delivery method of a webhook at Get: posted JSON is not read",
        "By SMTP switch on custom headers in the account's settings, else X-ElasticEmail-Postback does not come back",
        "The stamp sets Options.ChannelName to the key, for look-ups: reports by channel then show single sends",
        "Confirm with the MessageID of the answer, not its TransactionID, and send to one recipient at a time",
        "For look-ups and back-fills set api_key; back-fill after each outage, since nothing is known to come again",
    ),
    key_is_echoed_in=("every notification of a send with a postback"),
    first_event_is_delivery=True,
)

_ACCEPTED: Final = Testimony.ACCEPTED

MEANINGS: Final[Meanings] = MappingProxyType(
    {
        "Sent": (Kind.SENT, _ACCEPTED),
        "Opened": (Kind.OPENED, _ACCEPTED),
        "Clicked": (Kind.CLICKED, _ACCEPTED),
        # Bounces too. Category Ignore is "suppressed": blocked in the account, cancelled, or not delivered within 48
        # hours [help.elasticemail.com 2300650] - the message was taken, and it may have been tried.
        "Error": (Kind.BOUNCED, _ACCEPTED),
        "AbuseReport": (Kind.COMPLAINED, _ACCEPTED),
        "Unsubscribed": (Kind.UNSUBSCRIBED, _ACCEPTED),
    }
)
"""What each `status` of a notification means and proves [help.elasticemail.com 4804685]."""

_LISTED: Final[Meanings] = MappingProxyType(
    {
        "Submission": (Kind.QUEUED, _ACCEPTED),
        "FailedAttempt": (Kind.DEFERRED, _ACCEPTED),
        "Sent": (Kind.SENT, _ACCEPTED),
        "Error": (Kind.BOUNCED, _ACCEPTED),
        "Bounce": (Kind.BOUNCED, _ACCEPTED),
        "Suppress": (Kind.BOUNCED, _ACCEPTED),  # as category Ignore: whether it was tried is not said
        "Open": (Kind.OPENED, _ACCEPTED),
        "Click": (Kind.CLICKED, _ACCEPTED),
        "Complaint": (Kind.COMPLAINED, _ACCEPTED),
        "Unsubscribe": (Kind.UNSUBSCRIBED, _ACCEPTED),
        "TransactionalUnsubscribe": (Kind.UNSUBSCRIBED, _ACCEPTED),
    }
)
"""What each `EventType` of the events API means and proves [ElasticEmail/elasticemail-python docs/EventType.md]."""

_FIELDS: Final = frozenset(
    {
        *("transaction", "messageid", "to", "from", "date", "subject"),
        *("status", "channel", "account", "category", "target", "postback"),
    }
)
"""The fields of a notification. Whatever else the URL holds may be the feed's secret: it is neither read nor kept."""

_DATE: Final = "%m/%d/%Y %I:%M:%S %p"  # assumed: the documents only say that it is text in UTC
_API: Final = "https://api.elasticemail.com"
_EVENTS: Final = "/v4/events"
_PAGE: Final = 1_000
"""Events on a page, at most [ElasticEmail/elasticemail-python docs/EventsApi.md]."""
_CREDENTIAL: Final = "query:name=value"


class ElasticEmail:
    """Elastic Email as the receiver and the sender's side know it."""

    name: Final = "elastic_email"
    facts: Final = FACTS

    def stamp(self, wire_key: str) -> Stamp:
        """Return the postback, which notifications carry, and the channel, which the events API carries."""
        return Stamp(
            body={"Content": {"Postback": wire_key}, "Options": {"ChannelName": wire_key}},
            smtp_headers={"X-ElasticEmail-Postback": wire_key},
        )

    def read_reply(self, status: int, headers: Mapping[str, str], body: bytes) -> list[Reply]:  # noqa: ARG002
        """Return the one answer to all recipients, of API v4: version 2 answers its errors with 200, too."""
        said = load_or_none(body)
        message_id = id_at(said, "MessageID") or id_at(said, "TransactionID")
        return [unclear(status)] if is_success(status) and not message_id else by_ids(status, [message_id])

    async def verify(self, delivery: Delivery, feed: Feed, now: datetime, fetch: Fetch) -> Verdict:  # noqa: ARG002
        """Judge the credential in the URL; a GET of one field that is none of an event's is a probe and needs none.

        Of a probe nothing is stored.
        """
        return Verified() if _is_probe(delivery) else credential_only(delivery, feed.secrets, _CREDENTIAL)

    def parse(self, delivery: Delivery) -> Parsed:
        """Return the one event that the query string tells, or the fields of a posted form."""
        if _is_probe(delivery):
            return Parsed(control="ping")
        raw = _told(delivery)
        if delivery.method != "GET":
            return Parsed((_event(form_fields(delivery), raw),))
        if not raw:  # its fields have other names than are known here
            return Parsed((_unread(delivery.query),), anomalies={"damaged": 1})
        return Parsed((_event(query_fields(raw), raw),))

    def sample(self, kind: str, wire_key: str, feed: Feed, now: datetime) -> Delivery:
        """Return an example notification, by Elastic Email's status or a normalised kind."""
        fields = _sample_fields(sampled_name(self.name, kind, MEANINGS), wire_key, now)
        headers, query = credential_headers(feed.secrets)
        if not headers and not query:
            raise NoSample(f"the feed has no credential to carry: set feeds.<name>.secrets to {_CREDENTIAL}")
        return Delivery(b"", headers, "GET", "&".join(filter(None, (query, urlencode(fields)))))

    def objection(self, setting: Literal["secrets", "topics"], value: str) -> str | None:
        """Return what is wrong with a secret that no request can carry, or that would be kept as an event's field."""
        if setting != "secrets":
            return None
        name = value.removeprefix("query:").partition("=")[0]
        if value.startswith("query:") and name in _FIELDS:
            return f"has the name of a notification's own field ({name}), so it would be stored: choose another name"
        return credential_objection("Elastic Email", _CREDENTIAL, value)

    async def search(self, query: Query, feed: Feed, api: Api) -> AsyncIterator[Event]:
        """Yield the events of the channel that is named like the key; where there are none, and without a key, all.

        Raises ApiError where the recipient was sent to by a channel that is no key of ours: it may be the sought one.
        """
        shown = Shown(query)
        for place in [f"{_EVENTS}/channels/{query.wire_key}", _EVENTS] if query.wire_key else [_EVENTS]:
            async for item in _listed(place, query, feed, api):
                event = _found(item)
                shown.note(event, unnamed=_may_be_sought(event, query))
                yield event
            if shown.found:
                return
        shown.settle("an event to this recipient has a channel that is no key: it may be the sought one's")


def _is_probe(delivery: Delivery) -> bool:
    # The URL as it was entered, which has one field at most: its secret.
    return delivery.method == "GET" and not _told(delivery) and "&" not in delivery.query.strip("&")


def _told(delivery: Delivery) -> bytes:
    """Return what the provider said, as it came: a query string's own fields, or the whole of a body."""
    if delivery.method != "GET":
        return delivery.body
    pieces = octets(delivery.query).split(b"&")
    return b"&".join(piece for piece in pieces if piece.partition(b"=")[0].decode("latin-1") in _FIELDS)


def _unread(query: str) -> Event:
    # Which of its fields is the secret can't be told, so only their names are kept.
    names = b"&".join(piece.partition(b"=")[0] for piece in octets(query).split(b"&"))
    return replace(unread(names, "elastic_email"), event_id=derived_id("elastic_email", query))


def _event(pairs: list[tuple[str, str]], raw: bytes) -> Event:
    fields = dict(reversed(pairs))  # the first of a name that is there twice
    status = text_at(fields, "status")
    if status is None:
        raise BadPayload("no status: not a notification of Elastic Email")
    kind, testimony = MEANINGS.get(status, UNKNOWN)
    told_apart = ("transaction", "messageid", "to", "status", "category", "date", "target")
    return Event(
        kind=kind,
        testimony=testimony,
        message_id=id_at(fields, "messageid") or id_at(fields, "transaction"),
        event_id=derived_id("elastic_email", *(text_at(fields, name) for name in told_apart)),
        send_key=text_at(fields, "postback"),
        recipient=text_at(fields, "to"),
        occurred_at=_time(fields.get("date", "")),
        reason=short(text_at(fields, "category")) if kind is Kind.BOUNCED else None,
        raw=raw,
    )


def _time(date: str) -> datetime | None:
    with suppress(ValueError):  # if it isn't so written, it may be ISO 8601
        date = datetime.strptime(date.strip(), _DATE).replace(tzinfo=UTC).isoformat()
    return iso_time(date)


# -- asking ------------------------------------------------------------------------------------------------------------


def _listed(place: str, query: Query, feed: Feed, api: Api) -> AsyncIterator[Any]:
    """Yield the events of a place, page by page until an empty one. Raises ApiError."""
    headers = {"X-ElasticEmail-ApiKey": credential(feed.api_key, "api_key", feed)}
    since, until = (utc(seconds).removesuffix("Z") for seconds in query.seconds())
    span = {"from": since, "to": until, "orderBy": "DateAscending", "limit": str(_PAGE)}
    # What the channel of a key that nobody used is answered was not found. If 404, the control tells what it means.
    expect = () if place == _EVENTS else (HTTPStatus.NOT_FOUND,)

    async def ask(offset: int) -> list[Any]:
        params = {**span, "offset": str(offset)}
        reply = await api.call("GET", (feed.api_url or _API) + place, headers=headers, params=params, expect=expect)
        return [] if reply.status == HTTPStatus.NOT_FOUND else items(reply.value)

    return by_offset(ask)


def _may_be_sought(event: Event, query: Query) -> bool:
    # A channel of such a form as a plain key may be the application's own, which took the place of our key.
    return query.may_be_to(event.recipient) and not HASHED_KEY.fullmatch(event.send_key or "")


def _found(item: object) -> Event:
    event_type = needed(item, "EventType")
    message_id = id_at(item, "MsgID") or bounded_id(needed(item, "TransactionID"))
    kind, testimony = _LISTED.get(event_type, UNKNOWN)
    channel = text_at(item, "ChannelName") or ""
    recipient, date = text_at(item, "To"), text_at(item, "EventDate")
    return Event(
        kind=kind,
        testimony=testimony,
        message_id=message_id,
        event_id=derived_id("elastic_email", "look-up", message_id, recipient, event_type, date),
        send_key=channel if PLAIN_KEY.fullmatch(channel) else None,  # others name their channels as they like
        recipient=recipient,
        occurred_at=iso_time(date),
        reason=_category(kind, item),
        raw=json.dumps(item).encode(),
    )


def _category(kind: Kind, item: object) -> str | None:
    if kind not in (Kind.BOUNCED, Kind.DEFERRED):
        return None
    return short(first(text_at(item, name) for name in ("MessageCategory", "Message")))


# -- samples -----------------------------------------------------------------------------------------------------------


def _sample_fields(name: str, wire_key: str, now: datetime) -> dict[str, str]:
    return {
        "transaction": "sample-" + derived_id("transaction", wire_key),
        "messageid": "sample-" + derived_id("sample", wire_key),
        "to": "sample@example.com",
        "from": "sample@example.com",
        "date": now.astimezone(UTC).strftime(_DATE),
        "subject": "Sample",
        "status": name,
        "category": "NoMailbox" if name == "Error" else "",
        "postback": wire_key,
    }


PROVIDER: Final[Provider] = ElasticEmail()
