# SPDX-License-Identifier: Apache-2.0
"""Elastic Email, REST API v4 and HTTP notifications: one event a GET, its fields in the query string, unsigned."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Final, Literal
from urllib.parse import urlencode

import msgspec

from webhooks.asking import Api, ApiError, Pages, Query, credential, items
from webhooks.event import Event, Kind, Testimony, derived_id
from webhooks.forms import form_fields, query_fields
from webhooks.payload import first, id_at, iso_time, short, text_at
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
from webhooks.signature import CREDENTIAL_SCHEMES, credential_headers, credential_only, octets

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
        "nothing is signed. secrets: query:name=value for a secret in the notification URL. Webhooks of 2026 can post"
        " JSON and sign it, but what is signed was not found: leave them at Get [help.elasticemail.com 4804685,"
        " api-evangelist/elastic-email 2026-10]"
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
        " UTC (assumed: the notifications' dates are), at most 1,000 items a page. api_key is a key with the access"
        " level ViewReports. How soon it shows a send was not found: 15 min are allowed for"
        " [ElasticEmail/elasticemail-python docs/EventsApi.md]"
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
        "Confirm with the MessageID of the answer, not the TransactionID, and send to one recipient at a time",
        "For look-ups and back-fills set api_key; back-fill after each outage, since nothing is known to come again",
    ),
    key_is_echoed_in=(
        "every notification of a send with a postback; notifications of sends without one are stored and joined by"
        " message id where exactly one row has it; else they decide nothing"
    ),
    first_event_is_delivery=True,
)

MEANINGS: Final[Meanings] = MappingProxyType(
    {
        "Sent": (Kind.SENT, Testimony.ACCEPTED),
        "Opened": (Kind.OPENED, Testimony.ACCEPTED),
        "Clicked": (Kind.CLICKED, Testimony.ACCEPTED),
        # Bounces too. Category Ignore is "suppressed": blocked in the account, cancelled, or not delivered within 48
        # hours [help.elasticemail.com 2300650] - the message was taken, and it may have been tried.
        "Error": (Kind.BOUNCED, Testimony.ACCEPTED),
        "AbuseReport": (Kind.COMPLAINED, Testimony.ACCEPTED),
        "Unsubscribed": (Kind.UNSUBSCRIBED, Testimony.ACCEPTED),
    }
)
"""What each `status` of a notification means and proves [help.elasticemail.com 4804685]."""

_LISTED: Final[Meanings] = MappingProxyType(
    {
        "Submission": (Kind.QUEUED, Testimony.ACCEPTED),
        "FailedAttempt": (Kind.DEFERRED, Testimony.ACCEPTED),
        "Sent": (Kind.SENT, Testimony.ACCEPTED),
        "Error": (Kind.BOUNCED, Testimony.ACCEPTED),
        "Bounce": (Kind.BOUNCED, Testimony.ACCEPTED),
        "Suppress": (Kind.BOUNCED, Testimony.ACCEPTED),  # as category Ignore: whether it was tried is not said
        "Open": (Kind.OPENED, Testimony.ACCEPTED),
        "Click": (Kind.CLICKED, Testimony.ACCEPTED),
        "Complaint": (Kind.COMPLAINED, Testimony.ACCEPTED),
        "Unsubscribe": (Kind.UNSUBSCRIBED, Testimony.ACCEPTED),
        "TransactionalUnsubscribe": (Kind.UNSUBSCRIBED, Testimony.ACCEPTED),
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
_ISO: Final = "%Y-%m-%dT%H:%M:%S"
_API: Final = "https://api.elasticemail.com"
_PAGE: Final = 1_000
_NOT_FOUND: Final = 404
_KEY: Final = re.compile(r"[a-z0-9_-]{1,48}")
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

    async def verify(self, delivery: Delivery, feed: Feed, now: datetime, fetch: Fetch) -> Verdict:  # noqa: ARG002
        """Judge the credential in the URL; a GET without any field is a probe and needs none: nothing is stored."""
        if delivery.method == "GET" and not _told(delivery):
            return Verified()
        return credential_only(delivery, feed.secrets, _CREDENTIAL)

    def parse(self, delivery: Delivery) -> Parsed:
        """Return the one event that the query string tells, or the fields of a posted form."""
        raw = _told(delivery)
        if delivery.method == "GET" and not raw:
            return Parsed(control="ping")
        fields = query_fields(raw) if delivery.method == "GET" else form_fields(delivery)
        return Parsed((_event(dict(reversed(fields)), raw),))

    def sample(self, kind: str, wire_key: str, feed: Feed, now: datetime) -> Delivery:
        """Return an example notification, by Elastic Email's status or a normalised kind."""
        fields = _sample_fields(sampled_name(self.name, kind, MEANINGS), wire_key, now)
        headers, query = credential_headers(feed.secrets)
        if not headers and not query:
            raise NoSample(f"the feed has no credential to carry: set feeds.<name>.secrets to {_CREDENTIAL}")
        return Delivery(b"", headers, "GET", "&".join(filter(None, (query, urlencode(fields)))))

    def objection(self, setting: Literal["secrets", "topics"], value: str) -> str | None:
        """Return what is wrong with a secret that no request can carry."""
        if setting != "secrets" or value.startswith(CREDENTIAL_SCHEMES):
            return None
        return f"verifies nothing, since Elastic Email signs no notification: write {_CREDENTIAL}"

    async def search(self, query: Query, feed: Feed, api: Api) -> AsyncIterator[Event]:
        """Yield the events of the channel that is named like the key, or all events of the span."""
        key = credential(feed.api_key, "api_key", feed)
        place = f"/v4/events/channels/{query.wire_key}" if query.wire_key else "/v4/events"
        span = {"from": query.since.astimezone(UTC), "to": query.until.astimezone(UTC) + timedelta(seconds=1)}
        params = {name: time.strftime(_ISO) for name, time in span.items()}
        params |= {"orderBy": "DateAscending", "limit": str(_PAGE)}
        # What the channel of a key that nobody used is answered was not found. If 404, the control tells what it means.
        expect = (_NOT_FOUND,) if query.wire_key else ()
        pages, offset = Pages(), 0
        while rows := await _page(api, f"{feed.api_url or _API}{place}", key, params | {"offset": str(offset)}, expect):
            pages.turn(derived_id(msgspec.json.encode(rows).decode()))
            for row in rows:
                yield _listed(row)
            offset += len(rows)


def _told(delivery: Delivery) -> bytes:
    """Return what the provider said, as it came: a query string's own fields, or the whole of a body."""
    if delivery.method != "GET":
        return delivery.body
    pieces = octets(delivery.query).split(b"&")
    return b"&".join(piece for piece in pieces if piece.partition(b"=")[0].decode("latin-1") in _FIELDS)


def _event(fields: dict[str, str], raw: bytes) -> Event:
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


async def _page(api: Api, url: str, key: str, params: dict[str, str], expect: tuple[int, ...]) -> list[object]:
    reply = await api.call("GET", url, headers={"X-ElasticEmail-ApiKey": key}, params=params, expect=expect)
    return [] if reply.status == _NOT_FOUND else items(reply.value)


def _listed(row: object) -> Event:
    event_type = text_at(row, "EventType")
    message_id = id_at(row, "MsgID") or id_at(row, "TransactionID")
    if event_type is None or message_id is None:
        raise ApiError("garbage", "an item of the API's answer is no event")
    kind, testimony = _LISTED.get(event_type, UNKNOWN)
    channel = text_at(row, "ChannelName") or ""
    recipient, date = text_at(row, "To"), text_at(row, "EventDate")
    return Event(
        kind=kind,
        testimony=testimony,
        message_id=message_id,
        event_id=derived_id("elastic_email", "look-up", message_id, recipient, event_type, date),
        send_key=channel if _KEY.fullmatch(channel) else None,  # others name their channels as they like
        recipient=recipient,
        occurred_at=iso_time(date),
        reason=_category(kind, row),
        raw=msgspec.json.encode(row),
    )


def _category(kind: Kind, row: object) -> str | None:
    if kind not in (Kind.BOUNCED, Kind.DEFERRED):
        return None
    return short(first(text_at(row, name) for name in ("MessageCategory", "Message")))


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
