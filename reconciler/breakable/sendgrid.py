# SPDX-License-Identifier: Apache-2.0
"""SendGrid's shape: v3 Mail Send, batches of events signed with ECDSA, the Email Logs API."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from reconciler.breakable.fate import Said
from reconciler.breakable.shape import (
    BOUNCE,
    DELAY,
    SENDER,
    SUBJECT,
    TEXT,
    Answer,
    Asked,
    Message,
    Notice,
    Request,
    Shape,
)
from webhooks.asking import utc
from webhooks.payload import first, load_object, text_at
from webhooks.provider import BadPayload, Delivery
from webhooks.signature import sample_delivery

_LOGS: Final = "/v3/logs"
_TO: Final = re.compile(r"to_email = '([^']*)'")
_SINCE: Final = re.compile(r'sg_message_id_created_at >= TIMESTAMP "([^"]*)"')
_UNTIL: Final = re.compile(r'sg_message_id_created_at < TIMESTAMP "([^"]*)"')

_DETAILS: Final[Mapping[Said, Mapping[str, object]]] = MappingProxyType(
    {
        "deferred": {"response": DELAY, "attempt": "1"},
        "delivered": {"response": "250 OK"},
        "bounced": {"type": "bounce", "status": "5.1.1", "reason": BOUNCE},
    }
)


class SendGrid(Shape):
    """SendGrid on loopback."""

    path = "/v3/mail/send"
    names = MappingProxyType(
        {
            "accepted": "processed",
            "deferred": "deferred",
            "delivered": "delivered",
            "bounced": "bounce",
            "complained": "spamreport",
        }
    )
    refused = Answer(400, {"errors": [{"message": "Does not contain a valid address.", "field": "personalizations"}]})
    busy = Answer(429, {"errors": [{"message": "too many requests", "field": None}]})
    batches = True

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())

    def message_id(self, digest: str) -> str:
        """Return what stands in X-Message-Id."""
        return digest[:22]

    def message(self, recipient: str) -> dict[str, Any]:
        """Return a message with one personalization."""
        return {
            "personalizations": [{"to": [{"email": recipient}]}],
            "from": {"email": SENDER},
            "subject": SUBJECT,
            "content": [{"type": "text/plain", "value": TEXT}],
        }

    def asked(self, request: Request) -> Asked:
        """Return what the only personalization asks for."""
        body = load_object(request.body)
        match body.get("personalizations"):
            case [{"to": [{"email": str(recipient)}, *_]} as personalization]:
                key = first(text_at(part, "custom_args", "send_key") for part in (personalization, body))
                return Asked(key or "", recipient)
        raise BadPayload("this loopback provider takes one personalization a request, with an address in its to")

    def took(self, message: Message) -> Answer:
        """Return the id in a header; the body is empty."""
        return Answer(202, None, {"X-Message-Id": message.id})

    def delivery(self, notices: Sequence[Notice], secret: str | None, now: datetime) -> Delivery:
        """Return a batch, lines ending as SendGrid's do; only its own key can sign it."""
        body = b"[" + b",\r\n".join(msgspec.json.encode(self._event(notice)) for notice in notices) + b"]\r\n"
        if secret is not None:
            return sample_delivery(body, (secret,), None, "a public key signs nothing: use the feed of this provider")
        timestamp = str(int(now.timestamp()))
        signature = self._key.sign(timestamp.encode() + body, ec.ECDSA(SHA256()))
        signed = {
            "x-twilio-email-event-webhook-timestamp": timestamp,
            "x-twilio-email-event-webhook-signature": b64encode(signature).decode(),
        }
        return sample_delivery(body, (), signed, "")

    def feed(self, certificates: Path | None) -> dict[str, Any]:  # noqa: ARG002 - a secret is all it takes
        """Return the verification key."""
        public = self._key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        return {"secrets": [b64encode(public).decode()]}

    def look_up(self, request: Request, messages: Sequence[Message]) -> Answer | None:
        """Return the messages that a query finds, or one of them with its custom arguments."""
        if (request.method, request.path) == ("POST", _LOGS):
            asked = load_object(request.body)
            found = [message for message in messages if _fits(message, text_at(asked, "query") or "")]
            return Answer(200, {"messages": [self._listed(one) for one in found[: int(asked.get("limit", 10))]]})
        if request.method != "GET" or not request.path.startswith(f"{_LOGS}/"):
            return None
        sought = request.path.removeprefix(f"{_LOGS}/")
        shown = next((self._shown(message) for message in messages if _long_id(message) == sought), None)
        return Answer(200, shown) if shown else None

    def _event(self, notice: Notice) -> dict[str, Any]:
        message = notice.message
        return {
            "email": message.recipient,
            "event": self.names[notice.kind],
            "sg_event_id": notice.id,
            "sg_message_id": _long_id(message),
            "timestamp": int(notice.at.timestamp()),
            **({"send_key": message.key} if message.key else {}),
            **_DETAILS.get(notice.kind, {}),
        }

    def _listed(self, message: Message) -> dict[str, Any]:
        return {
            "from_email": SENDER,
            "to_email": message.recipient,
            "sg_message_id": _long_id(message),
            "sg_message_id_created_at": utc(message.at.timestamp()),
            "subject": SUBJECT,
            "status": self.names["accepted"],
        }

    def _shown(self, message: Message) -> dict[str, Any]:
        event = self._event(Notice(message, "accepted"))
        arguments = {"send_key": event.pop("send_key")} if message.key else {}
        return {**self._listed(message), "custom_args": arguments, "events": [event]}


def _long_id(message: Message) -> str:
    return f"{message.id}.recvd-loopback-1.0"


def _fits(message: Message, query: str) -> bool:
    to, since, until = (pattern.search(query) for pattern in (_TO, _SINCE, _UNTIL))
    at = utc(message.at.timestamp())  # texts of one form sort as times do
    return (not to or to[1] == message.recipient) and (not since or at >= since[1]) and (not until or at < until[1])
