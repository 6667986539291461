# SPDX-License-Identifier: Apache-2.0
"""Postal, self-hosted: one JSON object a delivery, signed with the installation's RSA key.

PO is the source of Postal 3.3.6, github.com/postalserver/postal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, Literal

import msgspec
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.hashes import SHA1, SHA256, HashAlgorithm
from cryptography.hazmat.primitives.serialization import load_der_public_key

from webhooks.event import Event, Kind, Testimony, derived_id
from webhooks.payload import at, id_at, load_object, load_or_none, short, text_at, unix_time
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
    Verified,
    sampled_name,
)
from webhooks.reply import Reply, all_mean, by_code, by_ids, by_status, is_success, unclear
from webhooks.signature import (
    CREDENTIAL_SCHEMES,
    NO_SECRET,
    carries_credential,
    decode_base64,
    sample_delivery,
    signing_secrets,
)

FACTS: Final = Facts(
    title="Postal (self-hosted)",
    key_slot=(
        "tag of send/message (one, at most 255 characters), in what send/raw and SMTP take the header X-Postal-Tag;"
        " comes back in payload.message.tag, of a bounce in payload.original_message.tag [PO send_controller.rb,"
        " outgoing_message_processor.rb, message_db/message.rb]"
    ),
    first_evidence=(
        "MessageHeld, or the first attempt to deliver: MessageSent, MessageDelayed or MessageDeliveryFailed; nothing is"
        " told when a message was only taken [PO message_db/delivery.rb]"
    ),
    event_id="uuid of the stored request, the same on every retry; two webhooks have two [PO webhook_request.rb]",
    authentication=(
        "X-Postal-Signature-256 (RSA, SHA-256) over the raw body; X-Postal-Signature (SHA-1) only where the other is"
        " missing, as before 3.2. secrets: the installation's public key, as PEM, base64 DER or its DKIM record. Or"
        " basic:user:password in the URL [PO http.rb, signer.rb]"
    ),
    signs_body=True,
    signs_time=False,
    redelivery=(
        "until 2xx within 5 s: after 2, 3, 6, 10 and 15 min, then the event is deleted: 36 minutes of outage lose"
        " events. Payloads of attempts stay 10 days in webhook_requests of the server's message database"
        " [PO webhook_delivery_service.rb, message_db/webhooks.rb]"
    ),
    redelivers_for=timedelta(minutes=36),
    look_up=(
        "not by our key: messages/message and messages/deliveries take a message's number only, which an ambiguous send"
        " doesn't have, and nothing lists messages; the tag is a column of the messages table of the server's own"
        " database [PO legacy_api/messages_controller.rb]"
    ),
    registration="in the web interface only: mail server, Webhooks [PO webhooks_controller.rb]",
    sources="PO: github.com/postalserver/postal (3.3.6, 2026-04); its issues 265, 527, 768, 796, 1773, 3488",
    native_key=(
        "none; send/raw and SMTP keep your Message-ID (payload.message.message_id), but don't look for it"
        " [PO, postalserver/postal#3488]"
    ),
    key_is_echoed_in=(
        "every event about an outgoing message, but a failure before the header X-Postal-Tag was read (domain gone);"
        " not in DomainDNSError, SendLimitApproaching and SendLimitExceeded [PO outgoing_message_processor.rb]"
    ),
    first_event_is_delivery=True,
    setup=(
        "Mail server, Webhooks, Add webhook: enter {url}, one webhook a mail server and feed",
        "Tick MessageSent, MessageDelayed, MessageDeliveryFailed, MessageHeld and MessageBounced",
        "Tick MessageLinkClicked and MessageLoaded too; or choose all events, the rest is kept and proves nothing",
        "Set secrets to the installation's public key: the record that `postal default-dkim-record` prints, whole",
        "Nothing is to be switched on for the key: the tag comes back by itself",
        "Send to one recipient at a time: only a send's own message has the tag of its key",
        "Confirm with the number at data.messages.RECIPIENT.id of the answer; status tells errors, which come with 200",
        "Events are lost after 36 minutes without an answer: run two receivers, or read webhook_requests afterwards",
    ),
)

_ACCEPTED: Final = Testimony.ACCEPTED
_NONE: Final = Testimony.NONE

MEANINGS: Final = MappingProxyType(
    {
        "MessageSent": (Kind.DELIVERED, _ACCEPTED),
        "MessageDelayed": (Kind.DEFERRED, _ACCEPTED),  # one for each attempt
        "MessageDeliveryFailed": (Kind.BOUNCED, _ACCEPTED),
        "MessageHeld": (Kind.QUEUED, _ACCEPTED),  # nothing more is told if it is released or dropped
        "MessageBounced": (Kind.BOUNCED, _ACCEPTED),
        "MessageLinkClicked": (Kind.CLICKED, _ACCEPTED),
        "MessageLoaded": (Kind.OPENED, _ACCEPTED),
        "DomainDNSError": UNKNOWN,
        "SendLimitApproaching": UNKNOWN,
        "SendLimitExceeded": UNKNOWN,
    }
)
"""What each `event` means and proves of an outgoing message: it has a row in Postal's database then, even if Postal
itself refuses to deliver it [PO webhook_event.rb, server.rb, outgoing_message_processor.rb]."""

_STRONG: Final = "x-postal-signature-256"
_WEAK: Final = "x-postal-signature"
_NEEDS_KEY: Final = "set what `postal default-dkim-record` prints, whole, or the installation's public key as PEM"
_SIGNATURE: Final = Refused("signature", "the signature was made with another key: compare the installation's and ours")
_MISSING: Final = Refused("missing", "no X-Postal-Signature-256 and no X-Postal-Signature: not a delivery of Postal")

_ARMOUR: Final = re.compile(r"-----[A-Z ]+-----|\\n|\s")
_DKIM_KEY: Final = re.compile(r"(?:^|;)\s*p=([^;]*)")

_REPLIES: Final = MappingProxyType(
    all_mean("not_sent", "AccessDenied", "InvalidServerAPIKey", "ServerSuspended", "UnauthenticatedFromAddress")
    | all_mean("rejected", "parameter-error", "NoRecipients", "NoContent", "FromAddressMissing")
    | all_mean("rejected", "TooManyToAddresses", "TooManyCCAddresses", "TooManyBCCAddresses")
    | all_mean("rejected", "AttachmentMissingName", "AttachmentMissingData")
)
"""What codes of errors prove: each is found before anything is stored [PO legacy_api/send_controller.rb]."""


class Postal:
    """Postal as the receiver and the sender's side know it."""

    name: Final = "postal"
    facts: Final = FACTS

    def stamp(self, wire_key: str) -> Stamp:
        """Return the tag, a message's only one; there is no native idempotency key."""
        return Stamp(body={"tag": wire_key}, smtp_headers={"X-Postal-Tag": wire_key})

    def read_reply(self, status: int, headers: Mapping[str, str], body: bytes) -> list[Reply]:  # noqa: ARG002
        """Return the one answer to all recipients: its status is always 200, the body's own decides."""
        said = load_or_none(body)
        if not is_success(status):
            return [by_status(status)]
        if at(said, "status") == "success":
            messages = at(said, "data", "messages")
            ids = [id_at(message, "id") for message in messages.values()] if isinstance(messages, dict) else []
            return by_ids(status, ids[:1]) if ids else [unclear(status)]
        code = text_at(said, "data", "code") if at(said, "status") == "error" else text_at(said, "status")
        return [by_code(status, code, _REPLIES)]

    async def verify(self, delivery: Delivery, feed: Feed, now: datetime, fetch: Fetch) -> Verdict:  # noqa: ARG002
        """Judge the stronger signature that there is against each of the feed's public keys."""
        if carries_credential(delivery, feed.secrets):
            return Verified()
        keys = [key for secret in signing_secrets(feed.secrets) if (key := rsa_public_key(secret))]
        if not keys:
            return NO_SECRET
        strong, weak = delivery.headers.get(_STRONG), delivery.headers.get(_WEAK)
        if strong is not None:
            return _judge(keys, strong, SHA256(), delivery.body)
        return _MISSING if weak is None else _judge(keys, weak, SHA1(), delivery.body)  # noqa: S303 - all that it has

    def parse(self, delivery: Delivery) -> Parsed:
        """Return the one event of the delivery."""
        body = load_object(delivery.body)
        name = text_at(body, "event")
        if name is None:
            raise BadPayload("no event: not a webhook of Postal")
        payload = at(body, "payload")
        message = _message(payload)
        incoming = at(message, "direction") == "incoming"
        kind, testimony = (Kind.INBOUND, _NONE) if incoming else MEANINGS.get(name, UNKNOWN)
        event = Event(
            kind=kind,
            testimony=testimony,
            message_id=id_at(message, "id"),
            event_id=id_at(body, "uuid") or _derived_id(name, body),
            send_key=None if incoming else text_at(message, "tag"),  # others write what comes in
            recipient=text_at(message, "to"),
            occurred_at=unix_time(at(payload, "timestamp")) or unix_time(at(body, "timestamp")),
            reason=_reason(payload),
            raw=delivery.body,
        )
        return Parsed((event,))

    def sample(self, kind: str, wire_key: str, feed: Feed, now: datetime) -> Delivery:
        """Return an example delivery that carries the feed's credential: only the installation can sign."""
        body = _sample_body(sampled_name(self.name, kind, MEANINGS), wire_key, now)
        needs = "only the installation can sign, and the feed has no credential to carry: send a stamped mail instead"
        return sample_delivery(body, feed.secrets, None, needs)

    def objection(self, setting: Literal["secrets", "topics"], value: str) -> str | None:
        """Return what is wrong with a secret that is neither an RSA public key nor carried by the request."""
        if setting != "secrets" or value.startswith(CREDENTIAL_SCHEMES) or rsa_public_key(value):
            return None
        return f"is no RSA public key, so it verifies nothing: {_NEEDS_KEY}"


@lru_cache(maxsize=256)
def rsa_public_key(encoded: str) -> RSAPublicKey | None:
    """Return the RSA key of a PEM, of a base64 DER SubjectPublicKeyInfo or of a DKIM record, or None."""
    found = _DKIM_KEY.search(encoded)
    der = decode_base64(_ARMOUR.sub("", found[1] if found else encoded))
    try:
        key = load_der_public_key(der) if der else None
    except (ValueError, UnsupportedAlgorithm):
        return None
    return key if isinstance(key, RSAPublicKey) else None


def _judge(keys: list[RSAPublicKey], given: str, algorithm: HashAlgorithm, body: bytes) -> Verdict:
    signature = decode_base64(given) or b""
    return Verified() if any([_signed(key, signature, algorithm, body) for key in keys]) else _SIGNATURE


def _signed(key: RSAPublicKey, signature: bytes, algorithm: HashAlgorithm, body: bytes) -> bool:
    try:
        key.verify(signature, body, PKCS1v15(), algorithm)
    except InvalidSignature:
        return False
    return True


def _message(payload: object) -> Any:
    return at(payload, "message") or at(payload, "original_message")


def _derived_id(name: str, body: dict[str, Any]) -> str:
    payload = body.get("payload")
    message = _message(payload)
    stamped = (unix_time(at(source, "timestamp")) for source in (payload, body))
    told_apart = (text_at(payload, field) for field in ("status", "url", "ip_address", "domain"))
    times = (time.isoformat() if time else None for time in stamped)
    return derived_id("postal", name, id_at(message, "id"), text_at(message, "to"), *times, *told_apart)


def _reason(payload: object) -> str | None:
    if at(payload, "status") == "Sent":
        return None
    words = (text_at(payload, field) for field in ("details", "output"))
    return short(": ".join(part[:200] for part in words if part))


def _sample_body(name: str, wire_key: str, now: datetime) -> bytes:
    message = {
        "id": int(derived_id("sample", wire_key)[:8], 16),
        "direction": "outgoing",
        "to": "sample@example.com",
        "tag": wire_key,
    }
    sample = {
        "event": name,
        "timestamp": now.timestamp(),
        "payload": {"original_message" if name == "MessageBounced" else "message": message},
        "uuid": derived_id("sample", name, wire_key, now.isoformat()),
    }
    return msgspec.json.encode(sample)


PROVIDER: Final[Provider] = Postal()
