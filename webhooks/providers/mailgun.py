# SPDX-License-Identifier: Apache-2.0
"""Mailgun, v3 Messages and JSON webhooks: one event about one recipient in each POST, its signature inside the body."""

from __future__ import annotations

from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Final

import msgspec

from webhooks.event import Event, Kind, Testimony, bounded_id, derived_id
from webhooks.payload import at, load, load_object, short, text_at, unix_time
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
    Refused,
    Stamp,
    Verdict,
    Verified,
)
from webhooks.signature import (
    NO_SECRET,
    carries_credential,
    hmac_sha256,
    judge_age,
    same,
    sample_delivery,
    signing_secrets,
)

FACTS: Final = Facts(
    title="Mailgun (v3 Messages, JSON webhooks)",
    key_slot=(
        "form field v:send_key (SMTP: JSON in the header X-Mailgun-Variables); comes back as event-data.user-variables"
        ".send_key. Recipients can read it; more than 4 KB of variables are cut off in events [mailgun/documentation"
        " user_manual.rst, mailgun/mailgun-mcp-server openapi.yaml]"
    ),
    first_evidence="accepted: taken and queued [documentation.mailgun.com user-manual/events/event-types]",
    event_id=(
        "event-data.id, unique within a day [mailgun/documentation api-events.rst], so with the UTC day of the event's"
        " own timestamp; the message id beside it tells the domains of an account apart. Not the signature's token:"
        " whether a retry repeats it is not documented"
    ),
    authentication=(
        "hex HMAC-SHA256 over timestamp and token, inside the JSON body; the body itself is not covered, so a captured"
        " signature fits any body. secrets: the HTTP webhook signing key, which is not the API key; events of a"
        " subaccount are signed with the parent account's key too"
        " [documentation.mailgun.com user-manual/webhooks/securing-webhooks, anymail/django-anymail#153]"
    ),
    signs_body=False,
    signs_time=True,
    redelivery=(
        "over 8 hours (5, 10, 15 min, 1, 2, 4 h) until 200; 406 ends it at once; for delivered the documents contradict"
        " each other [documentation.mailgun.com user-manual/webhooks/webhook-retries, mailgun/documentation#317]"
    ),
    redelivers_for=timedelta(hours=8),
    look_up=(
        "not by our key: GET /v3/{domain}/events by recipient and time, then compare user-variables; a page is to be"
        " trusted after about 30 minutes [mailgun/documentation api-events.rst]"
    ),
    registration=(
        "POST /v3/domains/{domain}/webhooks with id (accepted, delivered, temporary_fail, permanent_fail, opened,"
        " clicked, unsubscribed, complained) and url [mailgun/mailgun-mcp-server openapi.yaml]"
    ),
    sources=(
        "github.com/mailgun/documentation (2024-07), github.com/mailgun/mailgun-mcp-server openapi.yaml (2026-07),"
        " documentation.mailgun.com, github.com/mailgun/mailgun-go events/enums.go"
    ),
    key_is_echoed_in="every event but delayed bounces, whose user-variables are empty",
)

MEANINGS: Final = MappingProxyType(
    {
        "accepted": (Kind.QUEUED, Testimony.ACCEPTED),
        "delivered": (Kind.DELIVERED, Testimony.ACCEPTED),
        "opened": (Kind.OPENED, Testimony.ACCEPTED),
        "clicked": (Kind.CLICKED, Testimony.ACCEPTED),
        "unsubscribed": (Kind.UNSUBSCRIBED, Testimony.ACCEPTED),
        "complained": (Kind.COMPLAINED, Testimony.ACCEPTED),
        "rejected": (Kind.REJECTED, Testimony.REJECTED),  # no webhook of its own; seen in the Events API
        "stored": (Kind.INBOUND, Testimony.NONE),
    }
)
"""What each value of `event` means and proves, but `failed` [documentation.mailgun.com events/event-types]."""

_NEVER_TRIED: Final = frozenset({"605", "606", "607"})
"""Codes of failures by a suppression list: bounced, unsubscribed, complained [mailgun/mailgun-go events/enums.go]."""


class _Headers(msgspec.Struct, gc=False, rename="kebab"):
    message_id: str | None = None


class _Message(msgspec.Struct, gc=False):
    headers: _Headers | None = None


class _EventData(msgspec.Struct, gc=False, rename="kebab"):
    """The fields that are read of `event-data`, as they come; `_lenient` takes those of any other type."""

    event: str | None = None
    id: str | None = None
    timestamp: float | None = None
    recipient: str | None = None
    severity: str | None = None
    reason: str | None = None
    url: str | None = None
    message: _Message | None = None
    user_variables: Any = None
    flags: Any = None
    routes: Any = None
    delivery_status: Any = None
    reject: Any = None


class _Webhook(msgspec.Struct, gc=False, rename="kebab"):
    event_data: _EventData


class _Signature(msgspec.Struct, gc=False, rename="kebab"):
    timestamp: str | None = None
    token: str | None = None
    signature: str | None = None
    parent_signature: str | None = None


class _Signed(msgspec.Struct, gc=False):
    signature: _Signature


_WEBHOOK: Final = msgspec.json.Decoder(_Webhook)
_SIGNED: Final = msgspec.json.Decoder(_Signed)


class Mailgun:
    """Mailgun as the receiver and the sender's side know it."""

    name: Final = "mailgun"
    facts: Final = FACTS

    def stamp(self, wire_key: str) -> Stamp:
        """Return the user variable that makes the key come back; there is no native idempotency key."""
        return Stamp(
            body={"v:send_key": wire_key},
            smtp_headers={"X-Mailgun-Variables": msgspec.json.encode({"send_key": wire_key}).decode()},
        )

    async def verify(self, delivery: Delivery, feed: Feed, now: datetime, fetch: Fetch) -> Verdict:  # noqa: ARG002
        """Judge the signature inside the body against each of the feed's keys, or the credential of the request."""
        if not any(feed.secrets):
            return NO_SECRET
        if carries_credential(delivery, feed.secrets):
            return Verified()
        return _judge_signature(_signature_block(delivery.body), signing_secrets(feed.secrets), feed, now)

    def parse(self, delivery: Delivery) -> Parsed:
        """Return the one event of a JSON webhook. Legacy form posts raise BadPayload."""
        data = _event_data(delivery.body)
        send_key = _send_key(data.user_variables)
        message_id = _message_id(data.message)
        occurred_at = unix_time(data.timestamp)
        incoming = _is_incoming(data, send_key)
        kind, testimony = _meaning(data, incoming=incoming)
        event = Event(
            kind=kind,
            testimony=testimony,
            message_id=message_id,
            event_id=_event_id(data, message_id, occurred_at),
            send_key=None if incoming else send_key,  # others write what comes in
            recipient=data.recipient or None,
            occurred_at=occurred_at,
            reason=_reason(data) if data.event in ("failed", "rejected") else None,
            raw=delivery.body,
        )
        return Parsed((event,))

    def sample(self, kind: str, wire_key: str, feed: Feed, now: datetime) -> Delivery:
        """Return an example delivery, by Mailgun's names of events and webhooks or by normalised kinds."""
        if kind not in _SAMPLES:
            raise NoSample(f"mailgun has no sample {kind!r}; there are {', '.join(_SAMPLES)}")
        keys = signing_secrets(feed.secrets)
        body = {
            "signature": _signature(keys[0] if keys else "", kind, wire_key, now),
            "event-data": _sample_event(kind, wire_key, now),
        }
        needs = "the feed has no secrets, so no sample would be taken: set feeds.<name>.secrets"
        return sample_delivery(msgspec.json.encode(body), feed.secrets, {} if keys else None, needs)


def _signature_block(body: bytes) -> _Signature:
    try:
        return _SIGNED.decode(body).signature
    except (msgspec.DecodeError, RecursionError):
        try:
            block = load_object(body).get("signature")
        except BadPayload:
            return _Signature()
        return _Signature(*(text_at(block, name) for name in _Signature.__struct_encode_fields__))


def _judge_signature(block: _Signature, keys: tuple[str, ...], feed: Feed, now: datetime) -> Verdict:
    timestamp, token = block.timestamp, block.token
    given = [signature for signature in (block.signature, block.parent_signature) if signature]
    if not (timestamp and token and given):
        return Refused("missing", "no signature in a JSON body; Mailgun's legacy form webhooks are not read")
    message = f"{timestamp}{token}".encode("utf-8", "surrogatepass")
    wanted = [hmac_sha256(key, message).hex() for key in keys]
    if not any([same(signature, want) for signature in given for want in wanted]):
        return Refused("signature", "no key of the feed fits; it takes the HTTP webhook signing key, not the API key")
    return judge_age(timestamp, now, feed.tolerance)


def _event_data(body: bytes) -> _EventData:
    try:
        return _WEBHOOK.decode(body).event_data
    except (msgspec.DecodeError, RecursionError):  # odd characters, or not Mailgun's JSON at all
        data = at(_object(body), "event-data")
    if not isinstance(data, dict):
        raise BadPayload("no event-data object: not a webhook of Mailgun")
    return _lenient(data)


def _lenient(data: dict[str, Any]) -> _EventData:
    """Return the fields whatever their types: an odd one must not lose the event."""
    texts = ("event", "id", "recipient", "severity", "reason", "url")
    others = ("user_variables", "flags", "routes", "delivery_status", "reject")
    at_time = unix_time(data.get("timestamp"))
    return _EventData(
        timestamp=at_time.timestamp() if at_time else None,
        message=_Message(_Headers(text_at(data, "message", "headers", "message-id"))),
        **{name: text_at(data, name) for name in texts},
        **{name: data.get(name.replace("_", "-")) for name in others},
    )


def _object(body: bytes) -> dict[str, Any]:
    try:
        return load_object(body)
    except BadPayload:
        raise BadPayload("no JSON object; Mailgun's legacy form webhooks are not read") from None


def _message_id(message: _Message | None) -> str | None:
    found = message.headers.message_id if message and message.headers else None
    return bounded_id(bare) if found and (bare := found.strip("<> ")) else None


def _send_key(variables: Any) -> str | None:
    if isinstance(variables, str):  # Mailgun's Logs API writes the variables as JSON text
        try:
            variables = load(variables.encode("utf-8", "surrogatepass"))
        except BadPayload:
            return None
    return text_at(variables, "send_key")


def _meaning(data: _EventData, *, incoming: bool) -> tuple[Kind, Testimony]:
    name = data.event or ""
    kind, testimony = _failure(data) if name == "failed" else MEANINGS.get(name, UNKNOWN)
    if not incoming:
        return kind, testimony
    return Kind.INBOUND if kind is Kind.QUEUED else kind, Testimony.NONE


def _failure(data: _EventData) -> tuple[Kind, Testimony]:
    if data.severity == "temporary":
        return Kind.DEFERRED, Testimony.ACCEPTED
    suppressed = (data.reason or "").startswith("suppress-")
    if suppressed or text_at(data.delivery_status, "code") in _NEVER_TRIED:
        return Kind.REJECTED, Testimony.REJECTED
    return Kind.BOUNCED, Testimony.ACCEPTED


def _is_incoming(data: _EventData, send_key: str | None) -> bool:
    """Say whether the event is about mail that came in or that a route passed on, which proves nothing of a send.

    A stranger can write our key into the headers of such mail, so a route decides whatever the key says. Without one,
    `is-authenticated` false speaks only where no key came back: samples of ordinary sends have it too
    [mailgun/mailgun-go events_test.go].
    """
    if data.routes or data.event == "stored" or at(data.flags, "is-routed") is True:
        return True
    return data.event == "accepted" and not send_key and at(data.flags, "is-authenticated") is False


def _event_id(data: _EventData, message_id: str | None, occurred_at: datetime | None) -> str:
    if data.id:
        return bounded_id(f"{data.id}:{occurred_at.date().isoformat()}" if occurred_at else data.id)
    return derived_id("mailgun", message_id, repr(data.timestamp), data.event, data.severity, data.recipient, data.url)


def _reason(data: _EventData) -> str | None:
    status = data.delivery_status
    words = (
        data.reason or text_at(data.reject, "reason"),
        text_at(status, "code"),
        text_at(status, "description") or text_at(status, "message"),
    )
    return short(" ".join(filter(None, words)))


_BOUNCED: Final = {
    "severity": "permanent",
    "reason": "bounce",
    "delivery-status": {"code": 550, "message": "no such user"},
}
_DEFERRED: Final = {
    "severity": "temporary",
    "reason": "generic",
    "delivery-status": {"code": 451, "message": "try later"},
}
_SUPPRESSED: Final = {"severity": "permanent", "reason": "suppress-bounce", "delivery-status": {"code": 605}}

_SAMPLES: Final[dict[str, dict[str, object]]] = {
    "accepted": {"event": "accepted"},
    "queued": {"event": "accepted"},
    "delivered": {"event": "delivered"},
    "failed": {"event": "failed", **_BOUNCED},
    "permanent_fail": {"event": "failed", **_BOUNCED},
    "bounced": {"event": "failed", **_BOUNCED},
    "temporary_fail": {"event": "failed", **_DEFERRED},
    "deferred": {"event": "failed", **_DEFERRED},
    "rejected": {"event": "failed", **_SUPPRESSED},
    "opened": {"event": "opened"},
    "clicked": {"event": "clicked", "url": "https://example.com/"},
    "complained": {"event": "complained"},
    "unsubscribed": {"event": "unsubscribed"},
}


def _sample_event(kind: str, wire_key: str, now: datetime) -> dict[str, object]:
    return {
        "id": derived_id("sample", kind, wire_key, now.isoformat())[:22],
        "timestamp": now.timestamp(),
        "user-variables": {"send_key": wire_key},
        "message": {"headers": {"message-id": f"sample.{derived_id(wire_key)[:16]}@example.com"}},
        "recipient": "sample@example.com",
        **_SAMPLES[kind],
    }


def _signature(key: str, kind: str, wire_key: str, now: datetime) -> dict[str, str]:
    timestamp = str(int(now.timestamp()))
    token = derived_id("token", kind, wire_key, now.isoformat())
    return {
        "timestamp": timestamp,
        "token": token,
        "signature": hmac_sha256(key, f"{timestamp}{token}".encode()).hex(),
    }


PROVIDER: Final[Provider] = Mailgun()
