# SPDX-License-Identifier: Apache-2.0
"""Resend: one JSON object a delivery, signed by the Standard Webhooks scheme under Svix's header names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Final, Literal

from webhooks.event import Event, Kind, Testimony, bounded_id, derived_id
from webhooks.payload import at, first, id_at, iso_time, load_object, short, text_at
from webhooks.provider import (
    UNKNOWN,
    BadPayload,
    Delivery,
    Facts,
    Feed,
    Fetch,
    Parsed,
    Provider,
    Stamp,
    Verdict,
    sampled_name,
)
from webhooks.signature import (
    sample_delivery,
    sign_standard_webhook,
    standard_webhook,
    standard_webhook_id,
    standard_webhook_keys,
    standard_webhook_objection,
)

FACTS: Final = Facts(
    title="Resend",
    key_slot=(
        "tags [{name: send_key}] (letters, digits, _ and -, at most 256; by SMTP the header X-Send-Key); comes back as"
        " data.tags.send_key, the header in data.headers [resend/resend-openapi OutboundEmailEventData]"
    ),
    first_evidence="email.sent, or email.scheduled: the API request was successful [resend/resend-openapi]",
    event_id=(
        "header svix-id, the same on each retry and on a replay from dashboard or API; none in the body [svix-docs]."
        " Events of a message to several recipients don't say which one: use one recipient a send"
    ),
    authentication=(
        "Standard Webhooks: HMAC-SHA256 of id, timestamp and raw body; secrets: the whsec_ signing secret, several"
        " while it is rotated; never a whpk_ key, which is public [standard-webhooks spec]"
    ),
    signs_body=True,
    signs_time=True,
    redelivery=(
        "at once, then after 5 s, 5 min, 30 min, 2 h, 5 h, 10 h and 10 h, until any 2xx; the endpoint is disabled after"
        " about 5 days of failure [resend.com/docs/webhooks/retries-and-replays, svix-docs]"
    ),
    redelivers_for=timedelta(hours=27),
    look_up=(
        "not by our key: the same request with the same Idempotency-Key answers with the first id for 24 hours; later"
        " GET /emails (by cursor, no filter) and GET /emails/{id} [resend/resend-openapi]"
    ),
    registration="POST /webhooks {endpoint, events} answers id and signing_secret [resend/resend-openapi]",
    sources="github.com/resend/resend-openapi, resend-node 6.22, resend.com/docs, github.com/svix/svix-docs",
    same_key_window=timedelta(hours=24),
    tolerance=timedelta(minutes=5),
    key_is_echoed_in="every email.* event of an outbound message",
)

MEANINGS: Final = MappingProxyType(
    {
        "email.sent": (Kind.SENT, Testimony.ACCEPTED),
        "email.scheduled": (Kind.QUEUED, Testimony.ACCEPTED),
        "email.delivered": (Kind.DELIVERED, Testimony.ACCEPTED),
        "email.delivery_delayed": (Kind.DEFERRED, Testimony.ACCEPTED),
        "email.bounced": (Kind.BOUNCED, Testimony.ACCEPTED),
        "email.complained": (Kind.COMPLAINED, Testimony.ACCEPTED),
        "email.opened": (Kind.OPENED, Testimony.ACCEPTED),
        "email.clicked": (Kind.CLICKED, Testimony.ACCEPTED),
        "email.failed": (Kind.FAILED, Testimony.REJECTED),
        "email.suppressed": (Kind.REJECTED, Testimony.REJECTED),
        "email.received": (Kind.INBOUND, Testimony.NONE),
    }
)
"""What each value of `type` means and proves; others (contact.*, domain.*, suppression.*) speak of no send
[resend/resend-node webhook-event.interface.ts, resend/resend-openapi]."""

_SUPPRESSED: Final = (Kind.REJECTED, Testimony.REJECTED)
_REASONS: Final = (("bounce", "message"), ("failed", "reason"), ("suppressed", "message"))
_TELLS_APART: Final = (("click", "link"), ("click", "timestamp"), ("id",))


class Resend:
    """Resend as the receiver and the sender's side know it."""

    name: Final = "resend"
    facts: Final = FACTS

    def stamp(self, wire_key: str) -> Stamp:
        """Return tag, header and native idempotency key (kept 24 hours: the same request sends nothing again)."""
        return Stamp(
            body={"tags": [{"name": "send_key", "value": wire_key}]},
            headers={"Idempotency-Key": wire_key},
            smtp_headers={"X-Send-Key": wire_key, "Resend-Idempotency-Key": wire_key},
        )

    async def verify(self, delivery: Delivery, feed: Feed, now: datetime, fetch: Fetch) -> Verdict:  # noqa: ARG002
        """Judge the signature against each of the feed's `whsec_` secrets."""
        return standard_webhook(delivery, feed.secrets, now, feed.tolerance)

    def parse(self, delivery: Delivery) -> Parsed:
        """Return the one event of the delivery."""
        body = load_object(delivery.body)
        name = text_at(body, "type")
        if name is None:
            raise BadPayload("no type: not a Resend event")
        data = at(body, "data")
        kind, testimony = _meaning(name, data)
        event = Event(
            kind=kind,
            testimony=testimony,
            message_id=id_at(data, "email_id"),
            event_id=bounded_id(standard_webhook_id(delivery) or _event_id(name, body)),
            send_key=None if kind is Kind.INBOUND else _send_key(data),  # others write what comes in
            recipient=_recipient(data),
            occurred_at=iso_time(at(body, "created_at")),
            reason=short(first(text_at(data, *path) for path in _REASONS)),
            raw=delivery.body,
        )
        return Parsed((event,))

    def sample(self, kind: str, wire_key: str, feed: Feed, now: datetime) -> Delivery:
        """Return an example delivery, signed with the feed's first `whsec_` secret or carrying its credential."""
        body = _sample_body(sampled_name(self.name, kind, MEANINGS), wire_key, now)
        keys = standard_webhook_keys(feed.secrets)
        signed = _signature(keys[0], body, now) if keys else None
        return sample_delivery(body, feed.secrets, signed, "the feed has no whsec_ secret to sign with")

    def objection(self, setting: Literal["secrets", "topics"], value: str) -> str | None:
        """Return what is wrong with a secret that is no `whsec_` signing secret."""
        return standard_webhook_objection(value) if setting == "secrets" else None


def _meaning(name: str, data: object) -> tuple[Kind, Testimony]:
    return _SUPPRESSED if _is_old_suppression(name, data) else MEANINGS.get(name, UNKNOWN)


def _is_old_suppression(name: str, data: object) -> bool:
    # Before email.suppressed existed, a suppressed send was reported as a bounce [anymail/webhooks/resend.py].
    if name != "email.bounced":
        return False
    sub_type, message = (text_at(data, "bounce", field) or "" for field in ("subType", "message"))
    return "suppress" in sub_type.lower() or "suppressed sending" in message.lower()


def _send_key(data: object) -> str | None:
    return _named(at(data, "tags"), "send_key") or _named(at(data, "headers"), "x-send-key")


def _named(pairs: object, wanted: str) -> str | None:
    # Tags come as an object, headers as a list of {name, value}; either is taken for both.
    for name, value in _pairs(pairs):
        if isinstance(name, str) and name.lower() == wanted:
            return text_at(value)
    return None


def _pairs(value: object) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list):
        yield from ((at(entry, "name"), at(entry, "value")) for entry in value)


def _recipient(data: object) -> str | None:
    listed = [at(data, field) for field in ("to", "cc", "bcc")]
    everybody = [address for entry in listed for address in (entry if isinstance(entry, list) else [entry]) if address]
    if len(everybody) > 1:
        return None  # the event doesn't say which of them it is about
    return text_at(everybody[0]) if everybody else text_at(data, "email")


def _event_id(name: str, body: dict[str, Any]) -> str:
    data = at(body, "data")
    rest = [text_at(data, *path) for path in (("email_id",), *_TELLS_APART)]
    return derived_id("resend", name, text_at(body, "created_at"), _recipient(data), *rest)


def _sample_body(name: str, wire_key: str, now: datetime) -> bytes:
    when = now.isoformat()
    data = {
        "email_id": "sample-" + derived_id("sample", wire_key)[:32],
        "created_at": when,
        "to": ["sample@example.com"],
        "tags": {"send_key": wire_key},
    }
    return json.dumps({"type": name, "created_at": when, "data": data}).encode()


def _signature(key: bytes, body: bytes, now: datetime) -> dict[str, str]:
    message_id, timestamp = "msg_" + derived_id("sample", body.decode()), str(int(now.timestamp()))
    signature = sign_standard_webhook(key, message_id, timestamp, body)
    return {"svix-id": message_id, "svix-timestamp": timestamp, "svix-signature": signature}


PROVIDER: Final[Provider] = Resend()
