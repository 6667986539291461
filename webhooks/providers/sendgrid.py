# SPDX-License-Identifier: Apache-2.0
"""Twilio SendGrid, v3 Mail Send and the Event Webhook.

The Event Webhook posts JSON arrays of up to 768 KB, one flat object an event and recipient, with our custom argument
among the provider's own fields.
"""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Final

import msgspec

from webhooks.event import Event, Kind, Testimony, bounded_id, derived_id
from webhooks.payload import at, has_doubled_names, load_object, short, split, text_at, unix_time
from webhooks.provider import (
    UNKNOWN,
    BadPayload,
    Delivery,
    Facts,
    Feed,
    Fetch,
    Parsed,
    Provider,
    Refused,
    Stamp,
    Verdict,
    sampled_name,
)
from webhooks.signature import (
    carries_credential,
    credential_only,
    decode_base64,
    ecdsa_public_key,
    ecdsa_sha256_matches,
    judge_age,
    octets,
    sample_delivery,
    signing_secrets,
)

FACTS: Final = Facts(
    title="Twilio SendGrid (v3 Mail Send, Event Webhook)",
    key_slot=(
        "custom_args.send_key, of the message or of a personalization (SMTP: unique_args in X-SMTPAPI); comes back at"
        " the top level of each event as send_key. Arguments named like a field of the event vanish"
        " [sendgrid/docs for-developers/tracking-events/event.md]"
    ),
    first_evidence=(
        "processed: received and ready to be delivered; known to go missing while later events arrive"
        " [sendgrid/sendgrid-python#560]"
    ),
    event_id=(
        "sg_event_id; missing on some unsubscribe events [sendgrid/docs#2862], reported to change when an event is"
        " posted again [sendgrid/sendgrid-nodejs#1435]"
    ),
    authentication=(
        "ECDSA P-256 with SHA-256 over the timestamp header and the raw body, X-Twilio-Email-Event-Webhook-Signature"
        " and -Timestamp; secrets: the public keys shown by the settings; off unless switched on, turning it off and on"
        " makes a new key without overlap [sendgrid/docs getting-started-event-webhook-security-features.md]"
    ),
    signs_body=True,
    signs_time=True,
    redelivery=(
        "at growing intervals for 24 hours until any 2xx [sendgrid/docs troubleshooting.md]; the same event three times"
        " on average and 46 times at worst was measured [sendgrid/docs#2933]"
    ),
    redelivers_for=timedelta(hours=24),
    look_up=(
        "not by our key: POST /v3/logs by recipient, subject, category or time (30 days, no paging), then custom_args"
        " of GET /v3/logs/{sg_message_id} [twilio/sendgrid-oai tsg_logs_v3]"
    ),
    registration=(
        "POST /v3/user/webhooks/event/settings, then PATCH .../settings/signed/{id} {enabled: true} answers the public"
        " key [twilio/sendgrid-oai tsg_webhooks_v3]"
    ),
    sources=(
        "github.com/sendgrid/docs, github.com/twilio/sendgrid-oai (2026-01), github.com/sendgrid/sendgrid-python"
        " helpers/eventwebhook, twilio.com/docs/sendgrid"
    ),
    key_is_echoed_in=(
        "every event but asynchronous bounces (no id, no arguments: sendgrid/docs#5177) and some unsubscribe events"
    ),
)

MEANINGS: Final = MappingProxyType(
    {
        "processed": (Kind.QUEUED, Testimony.ACCEPTED),
        "dropped": (Kind.REJECTED, Testimony.REJECTED),
        "delivered": (Kind.DELIVERED, Testimony.ACCEPTED),
        "deferred": (Kind.DEFERRED, Testimony.ACCEPTED),
        "bounce": (Kind.BOUNCED, Testimony.ACCEPTED),  # also what is shown as "blocked"
        "open": (Kind.OPENED, Testimony.ACCEPTED),
        "click": (Kind.CLICKED, Testimony.ACCEPTED),
        "spamreport": (Kind.COMPLAINED, Testimony.ACCEPTED),
        "unsubscribe": (Kind.UNSUBSCRIBED, Testimony.ACCEPTED),
        "group_unsubscribe": (Kind.UNSUBSCRIBED, Testimony.ACCEPTED),
        "group_resubscribe": (Kind.SUBSCRIBED, Testimony.ACCEPTED),
        "account_status_change": (Kind.UNKNOWN, Testimony.NONE),
    }
)
"""What each value of `event` means and proves [twilio.com/docs/sendgrid/for-developers/tracking-events/event]."""

_SIGNATURE: Final = "x-twilio-email-event-webhook-signature"
_TIMESTAMP: Final = "x-twilio-email-event-webhook-timestamp"
_MILLISECONDS: Final = 100_000_000_000  # no timestamp in seconds is that large; marketing samples show milliseconds
_TELLS_APART: Final = ("type", "url", "url_offset", "attempt", "asm_group_id", "useragent", "ip", "reason", "response")


class _Fields(msgspec.Struct, gc=False):
    """The fields that are read of every event, in the types they usually have."""

    event: str | None = None
    email: str | None = None
    timestamp: int | float | str | None = None
    sg_event_id: str | None = None
    sg_message_id: str | None = None
    send_key: str | None = None
    reason: str | None = None
    response: str | None = None


_FIELDS: Final = msgspec.json.Decoder(_Fields)
_NAMES: Final = re.compile(rb'"(?:event|email|timestamp|sg_event_id|sg_message_id|send_key)"')


class SendGrid:
    """Twilio SendGrid as the receiver and the sender's side know it."""

    name: Final = "sendgrid"
    facts: Final = FACTS

    def stamp(self, wire_key: str) -> Stamp:
        """Return the custom argument that makes the key come back; there is no native idempotency key."""
        arguments = {"send_key": wire_key}
        return Stamp(
            body={"custom_args": arguments},
            smtp_headers={"X-SMTPAPI": json.dumps({"unique_args": arguments})},
        )

    async def verify(self, delivery: Delivery, feed: Feed, now: datetime, fetch: Fetch) -> Verdict:  # noqa: ARG002
        """Judge the signature against each of the feed's public keys, or the credential that the request carries."""
        keys = [key for key in signing_secrets(feed.secrets) if ecdsa_public_key(key)]
        if not keys or carries_credential(delivery, feed.secrets):
            return credential_only(delivery, feed.secrets, "the webhook's public key")
        timestamp, encoded = delivery.headers.get(_TIMESTAMP), delivery.headers.get(_SIGNATURE)
        if not timestamp or not encoded:
            return Refused("missing", "not signed: switch on Signed Event Webhook in SendGrid's settings")
        signature, message = decode_base64(encoded.strip()), octets(timestamp) + delivery.body
        if not signature or not any(ecdsa_sha256_matches(key, signature, message) for key in keys):
            return Refused("signature", "no public key of the feed fits; switching signing off and on makes a new key")
        return judge_age(timestamp, now, feed.tolerance)

    def parse(self, delivery: Delivery) -> Parsed:
        """Return one event for each element; one that can't be read is kept as unknown and counted as `damaged`."""
        anomalies: dict[str, int] = {}
        events = [_event(raw, anomalies) for raw in split(delivery.body)]
        return Parsed(events, anomalies=anomalies)

    def sample(self, kind: str, wire_key: str, feed: Feed, now: datetime) -> Delivery:
        """Return an example batch of one, where the feed has a credential that the request carries."""
        body = _sample_body(sampled_name(self.name, kind, MEANINGS), wire_key, now)
        needs = "SendGrid signs with Twilio's private key: add a secret such as header:Name=value to the feed"
        return sample_delivery(body, feed.secrets, None, needs)


def _event(raw: bytes, anomalies: dict[str, int]) -> Event:
    try:
        return _built(_fields(raw, anomalies), raw)
    except BadPayload:
        _count(anomalies, "damaged")
        event_id = derived_id("sendgrid", raw.decode("latin-1"))
        return Event(kind=Kind.UNKNOWN, testimony=Testimony.NONE, message_id=None, event_id=event_id, raw=raw)


def _fields(raw: bytes, anomalies: dict[str, int]) -> _Fields:
    # Listing names is much cheaper than a parser that notices doubled ones; a false alarm only costs time.
    names = _NAMES.findall(raw)
    if len(set(names)) < len(names) and (first := has_doubled_names(raw)):
        _count(anomalies, "duplicate_keys")
        return _picked(first)
    try:
        return _FIELDS.decode(raw)
    except (msgspec.DecodeError, RecursionError):  # a field of an odd type, or odd characters
        return _picked(load_object(raw))


def _picked(value: dict[str, object]) -> _Fields:
    fields = _Fields(**{name: text_at(value, name) for name in _Fields.__struct_fields__})
    fields.timestamp = at(value, "timestamp")
    return fields


def _count(anomalies: dict[str, int], word: str) -> None:
    anomalies[word] = anomalies.get(word, 0) + 1


def _built(fields: _Fields, raw: bytes) -> Event:
    kind, testimony = MEANINGS.get(fields.event or "", UNKNOWN)
    message_id = (fields.sg_message_id or "").partition(".")[0]
    return Event(
        kind=kind,
        testimony=testimony,
        message_id=bounded_id(message_id) if message_id else None,
        event_id=bounded_id(fields.sg_event_id) if fields.sg_event_id else _event_id(fields, raw),
        send_key=fields.send_key or None,
        recipient=fields.email or None,
        occurred_at=_time(fields.timestamp),
        reason=short(fields.reason or (fields.response if kind is Kind.DEFERRED else None)),
        raw=raw,
    )


def _event_id(fields: _Fields, raw: bytes) -> str:
    value = load_object(raw)
    rest = [json.dumps(value.get(name), sort_keys=True) for name in _TELLS_APART]
    return derived_id("sendgrid", fields.sg_message_id, fields.event, fields.email, str(fields.timestamp), *rest)


def _time(value: object) -> datetime | None:
    if isinstance(value, (int, float)) and _MILLISECONDS < value < _MILLISECONDS * 1000:
        value = value / 1000
    return unix_time(value)


def _sample_body(name: str, wire_key: str, now: datetime) -> bytes:
    event = {
        "email": "sample@example.com",
        "timestamp": int(now.timestamp()),
        "event": name,
        "sg_event_id": derived_id("sample", name, wire_key, now.isoformat()),
        "sg_message_id": derived_id("sample", wire_key)[:22] + ".recvd-sample.0",
        "send_key": wire_key,
    }
    return json.dumps([event]).encode() + b"\r\n"


PROVIDER: Final[Provider] = SendGrid()
