# SPDX-License-Identifier: Apache-2.0
"""Postmark, Email API and webhooks: one record about one recipient in each POST, with a credential, unsigned."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Literal
from urllib.parse import quote, urlencode
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from webhooks.asking import Api, ApiError, Change, Query, Shown, by_halves, by_offset, credential, items, needed
from webhooks.event import Event, Kind, Testimony, derived_id
from webhooks.payload import at, first, id_at, iso_time, load_object, load_or_none, short, text_at
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
)
from webhooks.reply import Reply, all_mean, by_code, by_ids, each, is_success
from webhooks.signature import credential_objection, credential_only, sample_delivery

FACTS: Final = Facts(
    title="Postmark (Email API, webhooks)",
    key_slot=(
        "Metadata.send_key (SMTP: header X-PM-Metadata-send_key, taken out before delivery); comes back as"
        " Metadata.send_key. Names up to 20 characters, values up to 80, ten fields"
        " [postmarkapp.com/support/article/1125-custom-metadata-faq, bennadel.com/blog/3906]"
    ),
    first_evidence="none before Delivery or Bounce: there is no webhook for acceptance [anymail/django-anymail docs]",
    event_id=(
        "ID of Bounce and SpamComplaint; else a hash over record type, message id, recipient, time, link and"
        " suppression [ActiveCampaign/postmark.js models]"
    ),
    authentication=(
        "nothing is signed (a sample with x-postmark-signature in the vendor's overview is wrong). secrets:"
        " basic:user:password for HttpAuth or the URL, header:Name=value for HttpHeaders, query:name=value"
        " [postmarkapp.com/developer/webhooks/webhooks-overview, ActiveCampaign/postmark-skills]"
    ),
    signs_body=False,
    signs_time=False,
    redelivery=(
        "until exactly 200; bounces over 10.5 hours (1, 5, 10, 10, 10, 15, 30 min, 1, 2, 6 h), deliveries, opens,"
        " clicks and subscription changes after 1, 5 and 15 min only; 403 ends it at once"
        " [api-evangelist/postmark conventions, reading the overview of 2026-08]"
    ),
    redelivers_for=timedelta(minutes=21),
    look_up=(
        "by our key: GET /messages/outbound?metadata_send_key=... with the server's API token (api_key) in one message"
        " stream (api_scope; outbound if empty); at most 10,000 messages a question, dates in US Eastern time. It shows"
        " 45 days by default, but 7 to 365 can be set, so that only the last 7 count"
        " [postmarkapp.com/developer/api/messages-api]. How soon it shows a send is not documented: 15 min are allowed"
        " for"
    ),
    registration=(
        "POST /webhooks with X-Postmark-Server-Token: Url, MessageStream, HttpAuth or HttpHeaders, Triggers; ten URLs a"
        " message stream [postmarkapp.com/developer/api/webhooks-api, ActiveCampaign/postmark-skills]"
    ),
    sources=(
        "postmarkapp.com/developer, github.com/ActiveCampaign/postmark.js (2026-02), github.com/ActiveCampaign/"
        "postmark-skills (2026-02), github.com/api-evangelist/postmark (2026-08)"
    ),
    native_key=(
        "none: a send that is repeated is a second send; message streams do not de-duplicate. A MessageID proves that"
        " it was taken, with ErrorCode 0 or none; 422 with ErrorCode 406 that all its recipients are inactive and"
        " nothing is sent [api-evangelist/postmark conventions, ActiveCampaign/postmark-skills,"
        " ActiveCampaign/postmark.js#87]"
    ),
    finds_by="key",
    kept_for=timedelta(days=7),  # the shortest that can be set
    lists=True,
    setup=(
        "Servers > your server > your message stream > Webhooks > Add webhook: enter {url}",
        "Tick Delivery, Bounce, Spam complaint, Open, Link click and Subscription change",
        "Basic auth: invent a user and a long password and set secrets to basic:USER:PASSWORD; Postmark signs nothing",
        "Nothing is to be switched on for the key: Metadata.send_key comes back by itself",
        "For look-ups set api_key to the server's API token and api_scope to the stream; each stream has its own feed",
        "Inactive recipients of a message to several get no event at all: send to one recipient at a time",
    ),
    key_is_echoed_in=(
        "every event of a message. Suppressions made or lifted by hand (SubscriptionChange without MessageID) belong to"
        " no message: they are stored and decide nothing"
    ),
    first_event_is_delivery=True,
)

_ACCEPTED: Final = Testimony.ACCEPTED
_REJECTED: Final = Testimony.REJECTED
_NONE: Final = Testimony.NONE

MEANINGS: Final = MappingProxyType(
    {
        "Delivery": (Kind.DELIVERED, _ACCEPTED),
        "Open": (Kind.OPENED, _ACCEPTED),
        "Click": (Kind.CLICKED, _ACCEPTED),
        "SpamComplaint": (Kind.COMPLAINED, _ACCEPTED),
        "Inbound": (Kind.INBOUND, _NONE),
    }
)
"""What each `RecordType` means and proves, but Bounce and SubscriptionChange [ActiveCampaign/postmark.js models]."""

_BOUNCES: Final = MappingProxyType(
    {
        "HardBounce": (Kind.BOUNCED, _ACCEPTED),
        "Transient": (Kind.DEFERRED, _ACCEPTED),
        "AutoResponder": (Kind.AUTORESPONDED, _ACCEPTED),
        "AddressChange": (Kind.AUTORESPONDED, _ACCEPTED),
        "DnsError": (Kind.DEFERRED, _ACCEPTED),
        "SpamNotification": (Kind.COMPLAINED, _ACCEPTED),
        "OpenRelayTest": (Kind.DEFERRED, _ACCEPTED),
        "Unknown": (Kind.UNKNOWN, _ACCEPTED),
        "SoftBounce": (Kind.BOUNCED, _ACCEPTED),
        "VirusNotification": (Kind.BOUNCED, _ACCEPTED),
        "ChallengeVerification": (Kind.AUTORESPONDED, _ACCEPTED),
        "SpamComplaint": (Kind.COMPLAINED, _ACCEPTED),
        "Blocked": (Kind.BOUNCED, _ACCEPTED),  # by the recipient's server: Postmark had taken it and tried
        "DMARCPolicy": (Kind.BOUNCED, _ACCEPTED),  # likewise
        "Unconfirmed": (Kind.REJECTED, _ACCEPTED),
        "Subscribe": (Kind.SUBSCRIBED, _ACCEPTED),
        "Unsubscribe": (Kind.UNSUBSCRIBED, _ACCEPTED),
        "BadEmailAddress": (Kind.REJECTED, _REJECTED),
        "ManuallyDeactivated": (Kind.REJECTED, _REJECTED),
        "SMTPApiError": (Kind.FAILED, _REJECTED),
        "TemplateRenderingFailed": (Kind.FAILED, _REJECTED),
        "InboundError": (Kind.INBOUND, _NONE),
    }
)
"""What each `Type` of a Bounce means and proves [ActiveCampaign/postmark.js Bounce.ts; what is rejected: own reading of
the names, as in django-anymail]. A type that is not here proves nothing."""

_SUPPRESSIONS: Final = MappingProxyType(
    {
        "HardBounce": Kind.BOUNCED,
        "SpamComplaint": Kind.COMPLAINED,
        "ManualSuppression": Kind.UNSUBSCRIBED,
    }
)
"""What each `SuppressionReason` of a SubscriptionChange means [ActiveCampaign/postmark.js models]."""

_STATES: Final = MappingProxyType(
    {"sent": (Kind.SENT, _ACCEPTED), "processed": (Kind.QUEUED, _ACCEPTED), "queued": (Kind.QUEUED, _ACCEPTED)}
)
"""What each `Status` of an outbound message means and proves [ActiveCampaign/postmark.js OutboundMessageStatus]."""

_CREDENTIALS: Final = "basic:user:password, header:Name=value or query:name=value"
_TRIGGERS: Final = ("Delivery", "Bounce", "SpamComplaint", "Open", "Click", "SubscriptionChange")
_API: Final = "https://api.postmarkapp.com"
_STREAM: Final = "outbound"
"""The stream of messages that name none [postmarkapp.com/support/article/1207-how-to-create-and-send-...]."""
_PAGE: Final = 500
_MOST: Final = 10_000
"""Messages on a page, and of one question [postmarkapp.com/developer/api/messages-api]."""

_WITHOUT_MESSAGE: Final = frozenset({"Subscribe", "Unsubscribe"})
_TIMES: Final = ("DeliveredAt", "BouncedAt", "ReceivedAt", "ChangedAt")

_REPLIES: Final = MappingProxyType(
    all_mean("rejected", "ErrorCode 300", "ErrorCode 402", "ErrorCode 403", "ErrorCode 406", "ErrorCode 411")
    | all_mean("not_sent", "ErrorCode 10", "ErrorCode 100", "ErrorCode 400", "ErrorCode 401", "ErrorCode 405")
    | all_mean("not_sent", "ErrorCode 410", "ErrorCode 412", "ErrorCode 413", "ErrorCode 1101")
    | all_mean("not_sent", "ErrorCode 1235", "ErrorCode 1236")
)
"""What error codes prove: invalid, inactive recipient, forbidden; token, maintenance, sender, credits, batch, approval,
template, stream [postmarkapp.com/developer/api/overview#api-error-codes]."""


class Postmark:
    """Postmark as the receiver and the sender's side know it."""

    name: Final = "postmark"
    facts: Final = FACTS

    def stamp(self, wire_key: str) -> Stamp:
        """Return the metadata that makes the key come back; there is no native idempotency key."""
        return Stamp(body={"Metadata": {"send_key": wire_key}}, smtp_headers={"X-PM-Metadata-send_key": wire_key})

    def read_reply(self, status: int, headers: Mapping[str, str], body: bytes) -> list[Reply]:  # noqa: ARG002
        """Return the answer to a message, or to each of a batch."""
        said = load_or_none(body)
        if is_success(status) and isinstance(said, list) and said:
            return each(_reply(status, item) for item in said)
        return [_reply(status, said)]

    async def verify(self, delivery: Delivery, feed: Feed, now: datetime, fetch: Fetch) -> Verdict:  # noqa: ARG002
        """Judge the credential that the request carries: Postmark signs nothing."""
        return credential_only(delivery, feed.secrets, _CREDENTIALS)

    def parse(self, delivery: Delivery) -> Parsed:
        """Return the one event of a webhook."""
        record = load_object(delivery.body)
        message_id = id_at(record, "MessageID")
        if not any(name in record for name in ("RecordType", "FromFull", "MessageID")):
            raise BadPayload("no RecordType: not a webhook of Postmark")
        kind, testimony = _meaning(record, message_id)
        event = Event(
            kind=kind,
            testimony=testimony,
            message_id=message_id,
            event_id=_event_id(record, message_id),
            send_key=None if kind is Kind.INBOUND else _send_key(at(record, "Metadata")),
            recipient=_recipient(record),
            occurred_at=iso_time(_time(record)),
            reason=_reason(record),
            raw=delivery.body,
        )
        return Parsed((event,))

    def sample(self, kind: str, wire_key: str, feed: Feed, now: datetime) -> Delivery:
        """Return an example delivery, by Postmark's record and bounce types or by normalised kinds."""
        name = _SAMPLED.get(kind, kind)
        if name not in _SAMPLES:
            raise NoSample(f"postmark has no sample {kind!r}; there are {', '.join((*_SAMPLES, *_SAMPLED))}")
        body = msgspec.json.encode(_sample_record(name, wire_key, now))
        needs = "the feed has no credential to carry: set feeds.<name>.secrets to basic:user:password"
        return sample_delivery(body, feed.secrets, None, needs)

    def objection(self, setting: Literal["secrets", "topics"], value: str) -> str | None:
        """Return what is wrong with a secret that no request can carry."""
        return credential_objection("Postmark", _CREDENTIALS, value) if setting == "secrets" else None

    async def search(self, query: Query, feed: Feed, api: Api) -> AsyncIterator[Event]:
        """Yield the message that carries the key, or all of the span, as the Messages API lists them.

        Raises ApiError where what is listed for the key shows none.
        """
        shown = Shown(query)
        async for message in by_halves(partial(_listed, query.wire_key, feed, api), *query.seconds(), _MOST):
            for event in _found(message):
                shown.note(event, unnamed=event.send_key is None)
                yield event
        shown.settle("a message that is listed for the key does not show it, so it may be another's")

    async def changes(self, url: str, feed: Feed, api: Api) -> list[Change]:
        """Return what the webhook with our URL lacks in the feed's message stream, or its creation."""
        carried = list(_carried(url, feed.secrets))
        if not carried:
            raise ApiError("unconfigured", f"set feeds.{feed.name}.secrets to basic:user:password: nothing is signed")
        stream = feed.api_scope or _STREAM
        answer = await _call(api, feed, "GET", "/webhooks", params={"MessageStream": stream})
        for webhook in items(answer, "Webhooks"):
            if _bare(text_at(webhook, "Url") or "") == url:
                return _corrections(webhook, carried, feed, api)
        body = {**carried[0], "MessageStream": stream, "Triggers": _switched_on({})}
        text = f"create the webhook of message stream {stream} with {', '.join(_TRIGGERS)}"
        return [Change(text, partial(_write, api, feed, "POST", "/webhooks", body))]


def _reply(status: int, item: object) -> Reply:
    code, message_id = text_at(item, "ErrorCode") or "0", id_at(item, "MessageID")
    if code == "0" and message_id:  # without a code: accepted, to be delivered late
        return by_ids(status, [message_id])[0]
    return by_code(status, f"ErrorCode {code}" if code != "0" else None, _REPLIES)


def _meaning(record: dict[str, Any], message_id: str | None) -> tuple[Kind, Testimony]:
    record_type = text_at(record, "RecordType")
    if record_type == "Bounce":
        return _bounce(text_at(record, "Type") or "", message_id)
    if record_type == "SubscriptionChange":
        return _subscription_change(record), _ACCEPTED if message_id else _NONE
    if record_type is None and "FromFull" in record:  # inbound webhooks have no RecordType
        return Kind.INBOUND, _NONE
    return MEANINGS.get(record_type or "", UNKNOWN)


def _bounce(bounce_type: str, message_id: str | None) -> tuple[Kind, Testimony]:
    kind, testimony = _BOUNCES.get(bounce_type, (Kind.BOUNCED, _NONE))
    return kind, _NONE if bounce_type in _WITHOUT_MESSAGE and not message_id else testimony


def _subscription_change(record: dict[str, Any]) -> Kind:
    if record.get("SuppressSending") is False:
        return Kind.SUBSCRIBED
    return _SUPPRESSIONS.get(text_at(record, "SuppressionReason") or "", Kind.UNSUBSCRIBED)


def _send_key(metadata: Any) -> str | None:
    # Names have come back in other cases than they were sent in (backstagephp/laravel-mails#62).
    if not isinstance(metadata, dict):
        return None
    spelt = [name for name in metadata if name.lower() == "send_key"]
    return first(text_at(metadata, name) for name in ("send_key", *spelt))


def _recipient(record: dict[str, Any]) -> str | None:
    return text_at(record, "Email") or text_at(record, "Recipient")


def _time(record: dict[str, Any]) -> str | None:
    return first(text_at(record, name) for name in _TIMES)


def _event_id(record: dict[str, Any], message_id: str | None) -> str:
    if identity := id_at(record, "ID"):
        return identity
    told_apart = ("RecordType", "Type", "OriginalLink", "SuppressionReason")
    suppressed = str(record.get("SuppressSending"))
    said = (text_at(record, name) for name in told_apart)
    return derived_id("postmark", message_id, _recipient(record), _time(record), suppressed, *said)


def _reason(record: dict[str, Any]) -> str | None:
    if record.get("RecordType") == "SubscriptionChange":
        return short(text_at(record, "SuppressionReason"))
    if record.get("RecordType") != "Bounce":
        return None
    return short(text_at(record, "Type"), text_at(record, "Details") or text_at(record, "Description"))


async def _call(api: Api, feed: Feed, method: str, path: str, **sent: Any) -> Any:
    headers = {"X-Postmark-Server-Token": credential(feed.api_key, "api_key", feed)}
    return (await api.call(method, (feed.api_url or _API) + path, headers=headers, **sent)).value


async def _listed(wire_key: str | None, feed: Feed, api: Api, since: int, until: int) -> list[Any]:
    """Return the messages of a span in seconds since 1970: all, or as many as one question may list."""
    begin, end = _eastern(since, until)
    params = {
        "fromdate": begin,
        "todate": end,
        "messagestream": feed.api_scope or _STREAM,
        **({"metadata_send_key": wire_key} if wire_key else {}),
    }
    return [message async for message in by_offset(partial(_page, params, feed, api))]


async def _page(params: Mapping[str, str], feed: Feed, api: Api, offset: int) -> list[Any]:
    count = min(_PAGE, _MOST - offset)
    if not count:
        return []
    asked = {"count": str(count), "offset": str(offset), **params}
    answer = await _call(api, feed, "GET", "/messages/outbound", params=asked)
    found, total = items(answer, "Messages"), needed(answer, "TotalCount")  # a text in the vendor's own types
    if not total.isdecimal() or (not found and offset < int(total)):
        raise ApiError("garbage", "the API listed fewer messages than it announced, or announced no number")
    return found


def _eastern(since: int, until: int) -> tuple[str, str]:
    """Return a span by New York's clocks, with the whole of its last second.

    Across a change of the clocks, and where this host does not know it, both offsets count: nothing is left out.
    """
    times = [datetime.fromtimestamp(seconds, UTC) for seconds in (since, until + 1)]
    try:
        zone = ZoneInfo("America/New_York")
        offsets = [time.astimezone(zone).utcoffset() or timedelta() for time in times]
    except ZoneInfoNotFoundError:
        offsets = [timedelta(hours=-5), timedelta(hours=-4)]
    begin, end = times[0] + min(offsets), times[1] + max(offsets)
    return begin.strftime("%Y-%m-%dT%H:%M:%S"), end.strftime("%Y-%m-%dT%H:%M:%S")


def _found(message: object) -> Iterator[Event]:
    """Yield what a listed message says of each of its recipients. Raises ApiError."""
    message_id, recipients = needed(message, "MessageID"), items(message, "Recipients")
    status = (text_at(message, "Status") or "").lower()
    kind, testimony = _STATES.get(status, UNKNOWN)
    for recipient in map(text_at, recipients or [None]):
        yield Event(
            kind=kind,
            testimony=testimony,
            message_id=message_id,
            event_id=derived_id("postmark", "look-up", message_id, recipient, status),
            send_key=_send_key(at(message, "Metadata")),
            recipient=recipient,
            occurred_at=iso_time(at(message, "ReceivedAt")),
            reason=short(status) if kind is Kind.UNKNOWN else None,
            raw=msgspec.json.encode(message),
        )


def _carried(url: str, secrets: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield, for each secret, the fields of a webhook that carries it."""
    for secret in secrets:
        scheme, _, value = secret.partition(":")
        name, _, named = value.partition("=")
        match scheme:
            case "basic":
                user, _, password = value.partition(":")
                yield {"Url": url, "HttpAuth": {"Username": user, "Password": password}}
            case "bearer":
                yield {"Url": url, "HttpHeaders": [{"Name": "Authorization", "Value": f"Bearer {value}"}]}
            case "header":
                yield {"Url": url, "HttpHeaders": [{"Name": name.strip(), "Value": named}]}
            case "query":
                yield {"Url": f"{url}?{urlencode({name: named})}"}


def _bare(url: str) -> str:
    # A person may have written the credential into the URL.
    return re.sub(r"(?<=://)[^/@]*@", "", url).partition("?")[0]


def _corrections(webhook: dict[str, Any], carried: list[dict[str, Any]], feed: Feed, api: Api) -> list[Change]:
    """Return the one change that a webhook with our URL needs, if any."""
    off = [name for name in _TRIGGERS if at(webhook, "Triggers", name, "Enabled") is not True]
    fits = any(all(webhook.get(name) == value for name, value in wanted.items()) for wanted in carried)
    needs = [f"switch on {', '.join(off)}"] if off else []
    needs += [] if fits else ["carry the feed's credential"]
    body = {**({} if fits else carried[0]), "Triggers": _switched_on(webhook.get("Triggers"))}
    identity = needed(webhook, "ID")
    change = partial(_write, api, feed, "PUT", f"/webhooks/{quote(identity, safe='')}", body)
    return [Change(f"webhook {identity}: {' and '.join(needs)}", change)] if needs else []


def _switched_on(triggers: object) -> dict[str, object]:
    found = {name: at(triggers, name) for name in _TRIGGERS}
    return {
        name: {**(options if isinstance(options, dict) else {}), "Enabled": True} for name, options in found.items()
    }


async def _write(api: Api, feed: Feed, method: str, path: str, body: dict[str, Any]) -> None:
    await _call(api, feed, method, path, json=body)


_SAMPLES: Final[Mapping[str, Mapping[str, object]]] = MappingProxyType(
    {
        "Delivery": {"RecordType": "Delivery"},
        "Bounce": {"RecordType": "Bounce", "Type": "HardBounce", "TypeCode": 1, "Details": "smtp;550 no such user"},
        "Transient": {"RecordType": "Bounce", "Type": "Transient", "TypeCode": 2, "Details": "smtp;451 try later"},
        "ManuallyDeactivated": {"RecordType": "Bounce", "Type": "ManuallyDeactivated", "TypeCode": 100002},
        "SMTPApiError": {"RecordType": "Bounce", "Type": "SMTPApiError", "TypeCode": 100007},
        "Open": {"RecordType": "Open"},
        "Click": {"RecordType": "Click", "OriginalLink": "https://example.com/"},
        "SpamComplaint": {"RecordType": "SpamComplaint", "Type": "SpamComplaint", "TypeCode": 100001},
        "SubscriptionChange": {
            "RecordType": "SubscriptionChange",
            "SuppressSending": True,
            "SuppressionReason": "ManualSuppression",
        },
    }
)
_SAMPLED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "delivered": "Delivery",
        "bounced": "Bounce",
        "deferred": "Transient",
        "rejected": "ManuallyDeactivated",
        "failed": "SMTPApiError",
        "opened": "Open",
        "clicked": "Click",
        "complained": "SpamComplaint",
        "unsubscribed": "SubscriptionChange",
    }
)
"""The sample of each normalised kind."""
_SAMPLE_TIMES: Final = MappingProxyType(
    {"Delivery": "DeliveredAt", "Open": "ReceivedAt", "Click": "ReceivedAt", "SubscriptionChange": "ChangedAt"}
)


def _sample_record(name: str, wire_key: str, now: datetime) -> dict[str, object]:
    record = _SAMPLES[name]
    time = _SAMPLE_TIMES.get(str(record["RecordType"]), "BouncedAt")
    bounce = {"ID": int(now.timestamp() * 1_000_000)} if time == "BouncedAt" else {}
    return {
        **record,
        **bounce,
        "MessageID": derived_id("sample", wire_key),
        "MessageStream": "outbound",
        "Metadata": {"send_key": wire_key},
        "Email" if time == "BouncedAt" else "Recipient": "sample@example.com",
        time: now.isoformat(),
    }


PROVIDER: Final[Provider] = Postmark()
