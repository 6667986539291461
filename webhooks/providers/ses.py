# SPDX-License-Identifier: Apache-2.0
"""Amazon SES (API v2 and SMTP); its events arrive through SNS, EventBridge or queues, all as the same record.

An SES record holds no event id, and one fact reaches us with another envelope id on each road: by SNS, by EventBridge,
as an event (`eventType`) and as an identity notification (`notificationType`). So the event id is always derived from
the record's content, and is the same on all of them.
"""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta
from typing import Any, Final, Literal, NamedTuple

from webhooks import sns
from webhooks.event import Event, Kind, Testimony, derived_id
from webhooks.payload import SHORT, at, first, id_at, iso_time, load, short, text_at
from webhooks.provider import BadPayload, Delivery, Facts, Feed, Fetch, NoSample, Parsed, Provider, Stamp, Verdict

FACTS: Final = Facts(
    title="Amazon SES (API v2, SMTP)",
    key_slot=(
        "EmailTags send_key, back in mail.tags.send_key[0]; header X-Send-Key, back in mail.headers; by SMTP"
        " X-SES-MESSAGE-TAGS. Tags take [A-Za-z0-9_-] and need a configuration set [SES-DG send-email, BC MessageTag]"
    ),
    first_evidence="Send: the request was successful and SES will attempt to deliver [BC EventDestination]",
    event_id="none in the record; derived from message id, type, recipient, time and feedback id [SNS-HH, AM-SES]",
    authentication=(
        "SNS: RSA signature of the envelope, version 1 (SHA-1) or 2 (SHA-256), by a certificate on the SNS host of the"
        " topic's region, topics on an allow-list; raw delivery has no signature. SQS: IAM [SNS-DG verify, SNS-RAW]"
    ),
    signs_body=True,
    signs_time=True,
    redelivery=(
        "SNS to HTTPS: 3 retries 20 s apart, at most 1 h with an own delivery policy, never after a 4xx: give the"
        " subscription a dead-letter queue. SNS to SQS: 23 days [SNS-DG retries, prepare, dlq]"
    ),
    redelivers_for=timedelta(minutes=1),
    look_up="not by our key; GetMessageInsights by message id only, with VDM on, 1 call/s [BC GetMessageInsights]",
    registration=(
        "sesv2 CreateConfigurationSetEventDestination with an SnsDestination, then sns Subscribe (https, raw delivery"
        " off, SignatureVersion 2); the receiver confirms subscriptions of the feed's topics [BC, SES-DG]"
    ),
    sources=(
        "BC: boto/botocore sesv2/2019-09-27; SES-DG: Amazon SES developer guide (event-publishing-*,"
        " notification-contents); SNS-DG: Amazon SNS developer guide; SNS-HH: its http-header page; SNS-RAW: its"
        " raw-message-delivery page; AM-SES: django-anymail's notes on Amazon SES"
    ),
    tolerance=timedelta(hours=8),  # SNS signs the time of publishing, not of the attempt
    key_is_echoed_in=(
        "every event of a configuration set; identity notifications only with original headers included, and no"
        " headers over 10 KB"
    ),
)


class _Type(NamedTuple):
    kind: Kind
    testimony: Testimony
    detail: str
    """Name of the object that holds what is particular to the event."""
    recipients: tuple[str, ...] = ()
    """Where the event names its recipients; empty where it doesn't."""


_DESTINATION: Final = ("mail", "destination")
MEANINGS: Final = {
    "Send": _Type(Kind.SENT, Testimony.ACCEPTED, "send", _DESTINATION),
    "Delivery": _Type(Kind.DELIVERED, Testimony.ACCEPTED, "delivery", ("delivery", "recipients")),
    "Bounce": _Type(Kind.BOUNCED, Testimony.ACCEPTED, "bounce", ("bounce", "bouncedRecipients")),
    "Complaint": _Type(Kind.COMPLAINED, Testimony.ACCEPTED, "complaint", ("complaint", "complainedRecipients")),
    "Reject": _Type(Kind.REJECTED, Testimony.REJECTED, "reject", _DESTINATION),
    "Rendering Failure": _Type(Kind.FAILED, Testimony.REJECTED, "failure", _DESTINATION),
    "DeliveryDelay": _Type(Kind.DEFERRED, Testimony.ACCEPTED, "deliveryDelay", ("deliveryDelay", "delayedRecipients")),
    "Open": _Type(Kind.OPENED, Testimony.ACCEPTED, "open"),
    "Click": _Type(Kind.CLICKED, Testimony.ACCEPTED, "click"),
    "Subscription": _Type(Kind.SUBSCRIBED, Testimony.ACCEPTED, "subscription"),
    "Received": _Type(Kind.INBOUND, Testimony.NONE, "receipt"),
}
"""What each `eventType` or `notificationType` means and proves [SES-DG contents, notification-contents]."""
_UNKNOWN: Final = _Type(Kind.UNKNOWN, Testimony.NONE, "")

VALIDATION: Final = "Successfully validated SNS topic for Amazon SES event publishing."
"""The sentence that SES publishes, as it is, after an event destination was added [AM-SES]."""

_SUBSCRIBED: Final = "AmazonSnsSubscriptionSucceeded"
_STEPS: Final = 8
"""Envelopes and texts within texts that are opened; EventBridge within SNS within SQS takes three."""
_ADDRESS: Final = re.compile(r"[^\s<>@]+@[^\s<>@]+")
_NEVER_TRIED: Final = ("Suppressed", "OnAccountSuppressionList")
"""Sub-types of bounces and complaints about messages that SES took but never attempted to send [SES-DG contents]."""
_TELLS_APART: Final = ("feedbackId", "link", "ipAddress", "userAgent")
_REASONS: Final = (
    "bounceType",
    "bounceSubType",
    "complaintSubType",
    "complaintFeedbackType",
    "delayType",
    "reason",
    "errorMessage",
)


class _Record(NamedTuple):
    raw: bytes
    """The innermost JSON text that holds the record, byte by byte."""
    fields: dict[str, Any]
    published: datetime | None
    """When the outermost envelope that says so was made."""
    bridged: bool
    """Whether EventBridge brought it."""


class _Recipient(NamedTuple):
    address: str | None
    diagnosis: str | None = None


class Ses:
    """Amazon SES as the receiver and the sender's side know it."""

    name: Final = "ses"
    facts: Final = FACTS

    def stamp(self, wire_key: str) -> Stamp:
        """Return tag and header: identity notifications have no tags, and long headers are cut from events.

        The body is that of SendEmail with `Content.Simple`. Raw content takes X-Send-Key among its own headers.
        """
        return Stamp(
            body={
                "EmailTags": [{"Name": "send_key", "Value": wire_key}],
                "Content": {"Simple": {"Headers": [{"Name": "X-Send-Key", "Value": wire_key}]}},
            },
            smtp_headers={"X-Send-Key": wire_key, "X-SES-MESSAGE-TAGS": f"send_key={wire_key}"},
        )

    async def verify(self, delivery: Delivery, feed: Feed, now: datetime, fetch: Fetch) -> Verdict:
        """Say whether one of the feed's SNS topics signed the delivery, or the request carries a credential."""
        return await sns.verify(delivery, feed, now, fetch)

    def parse(self, delivery: Delivery) -> Parsed:
        """Return one event a recipient, out of SNS and EventBridge envelopes in any order or of a bare record."""
        value = _load(delivery.body)
        about_subscription = sns.control(value) if isinstance(value, dict) else None
        return about_subscription or _read(_unwrap(delivery.body, value))

    def sample(self, kind: str, wire_key: str, feed: Feed, now: datetime) -> Delivery:  # noqa: ARG002
        """Raise NoSample: only AWS has the key that signs SNS messages."""
        raise NoSample(
            "only AWS can sign SNS messages: send a stamped mail to the SES mailbox simulator instead"
            " (success@, bounce@, complaint@ or suppressionlist@simulator.amazonses.com)"
        )

    def objection(self, setting: Literal["secrets", "topics"], value: str) -> str | None:
        """Return what is wrong with a topic that is no ARN."""
        if setting != "topics" or sns.topic_host(value):
            return None
        return "is no ARN of an SNS topic: write arn:aws:sns:REGION:ACCOUNT:NAME"


def _load(raw: bytes) -> Any:
    # The sentence says in prose what identity notifications say in JSON.
    return {"notificationType": _SUBSCRIBED} if raw.strip() == VALIDATION.encode() else load(raw)


def _unwrap(raw: bytes, value: Any) -> _Record:
    published, bridged = None, False
    for _ in range(_STEPS):
        if isinstance(value, str):
            raw = value.encode("utf-8", "surrogatepass")
            value = _load(raw)
        elif at(value, "Type") == sns.NOTIFICATION:
            published = published or iso_time(at(value, "Timestamp"))
            value = at(value, "Message")
        elif at(value, "detail-type"):
            published, bridged = published or iso_time(at(value, "time")), at(value, "source") == "aws.ses"
            value = at(value, "detail")
        elif isinstance(value, dict):
            return _Record(raw, value, published, bridged)
    raise BadPayload("no SES record in it, or too many envelopes around it")


def _read(record: _Record) -> Parsed:
    fields = record.fields
    name = text_at(fields, "eventType") or text_at(fields, "notificationType") or ""
    if name == _SUBSCRIBED:
        return Parsed(control="topic_validation")
    if record.bridged and not name:
        return Parsed(control="account_notice")  # advisor recommendations, sending enabled or disabled
    found = MEANINGS.get(name, _UNKNOWN)
    if not isinstance(at(fields, "mail"), dict) or (found is _UNKNOWN and not text_at(fields, "mail", "messageId")):
        raise BadPayload("no SES record: neither a known event type nor a message id")
    return Parsed([_event(record, name, found, recipient) for recipient in _recipients(fields, found)])


def _event(record: _Record, name: str, found: _Type, recipient: _Recipient) -> Event:
    fields, detail = record.fields, at(record.fields, found.detail)
    message_id = id_at(fields, "mail", "messageId")
    return Event(
        kind=Kind.UNSUBSCRIBED if _opted_out(detail) else found.kind,
        testimony=Testimony.REJECTED if _never_tried(detail) else found.testimony,
        message_id=message_id,
        event_id=derived_id("ses", message_id, name, recipient.address, *_telling(fields, found)),
        send_key=None if found.kind is Kind.INBOUND else _send_key(fields),  # others write what comes in
        recipient=recipient.address,
        occurred_at=_time(detail) or iso_time(at(fields, "mail", "timestamp")) or record.published,
        reason=short(name) if found is _UNKNOWN else _reason(detail, recipient.diagnosis),
        raw=record.raw,
    )


def _telling(fields: dict[str, Any], found: _Type) -> list[str | None]:
    # What tells apart two events of one type about one message and recipient; the envelope must have no part in it.
    detail = at(fields, found.detail)
    time = _time(detail)
    parts = [
        time.isoformat() if time else text_at(detail, "timestamp"),
        *(text_at(detail, part) for part in _TELLS_APART),
    ]
    if found is _UNKNOWN:
        parts.append(_content(fields))
    if not text_at(fields, "mail", "messageId"):  # emulators
        parts += [_send_key(fields), text_at(fields, "mail", "timestamp")]
    return parts


def _content(fields: dict[str, Any]) -> str | None:
    try:
        return json.dumps({**fields, "eventType": None, "notificationType": None}, sort_keys=True)
    except RecursionError:  # nested more deeply than can be written, though not than can be read
        return None


def _recipients(fields: dict[str, Any], found: _Type) -> list[_Recipient]:
    """Return whom the event is about: those it names, else the only destination, else nobody in particular."""
    named = [_recipient(entry) for entry in _list(at(fields, *found.recipients) if found.recipients else None)]
    if named := [recipient for recipient in named if recipient.address]:
        return named
    destination = _list(at(fields, *_DESTINATION))
    return [_recipient(destination[0]) if len(destination) == 1 else _Recipient(None)]


def _recipient(entry: object) -> _Recipient:
    if isinstance(entry, str):
        return _Recipient(entry or None)
    return _Recipient(text_at(entry, "emailAddress"), text_at(entry, "diagnosticCode"))


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _send_key(fields: dict[str, Any]) -> str | None:
    tag = at(fields, "mail", "tags", "send_key")
    tagged = text_at(tag[0] if isinstance(tag, list) and tag else tag)
    headers = _list(at(fields, "mail", "headers"))
    named = (text_at(header, "value") for header in headers if (text_at(header, "name") or "").lower() == "x-send-key")
    return tagged or first(named)


def _time(detail: object) -> datetime | None:
    return iso_time(at(detail, "timestamp"))


def _never_tried(detail: object) -> bool:
    return at(detail, "bounceSubType") in _NEVER_TRIED or at(detail, "complaintSubType") in _NEVER_TRIED


def _opted_out(detail: object) -> bool:
    return bool(_refused(at(detail, "newTopicPreferences")) - _refused(at(detail, "oldTopicPreferences")))


def _refused(preferences: object) -> set[str | None]:
    topics = _list(at(preferences, "topicSubscriptionStatus"))
    refused = {text_at(topic, "topicName") for topic in topics if at(topic, "subscriptionStatus") == "OptOut"}
    return refused | ({"*"} if at(preferences, "unsubscribeAll") is True else set())


def _reason(detail: object, diagnosis: str | None) -> str | None:
    words = "/".join(word for part in _REASONS if (word := text_at(detail, part)))
    # Cut before the addresses are looked for, which takes time quadratic in the length of a word.
    text = ": ".join(part[: 2 * SHORT] for part in (words, diagnosis) if part)
    return short(_ADDRESS.sub("<address>", text))


PROVIDER: Final[Provider] = Ses()
