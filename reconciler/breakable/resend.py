# SPDX-License-Identifier: Apache-2.0
"""Resend's shape: the e-mail API with its Idempotency-Key, webhooks signed as Svix does, e-mails listed and shown."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from secrets import token_bytes
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID

import msgspec

from reconciler.breakable.fate import Said
from reconciler.breakable.shape import (
    BOUNCE,
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
from webhooks.payload import first, load_object, text_at
from webhooks.provider import BadPayload, Delivery
from webhooks.signature import sample_delivery, sign_standard_webhook, standard_webhook_keys

_EMAILS: Final = "/emails"
_DETAILS: Final[Mapping[Said, Mapping[str, object]]] = MappingProxyType(
    {"bounced": {"bounce": {"type": "Permanent", "subType": "General", "message": BOUNCE}}}
)


class Resend(Shape):
    """Resend on loopback. A request with a key that it knows sends nothing again, as Resend promises."""

    path = _EMAILS
    names = MappingProxyType(
        {
            "accepted": "email.sent",
            "deferred": "email.delivery_delayed",
            "delivered": "email.delivered",
            "bounced": "email.bounced",
            "complained": "email.complained",
        }
    )
    refused = Answer(422, {"statusCode": 422, "name": "validation_error", "message": "Invalid `to` field."})
    busy = Answer(429, {"statusCode": 429, "name": "rate_limit_exceeded", "message": "Too many requests."})
    reused = Answer(
        409,
        {
            "statusCode": 409,
            "name": "invalid_idempotent_request",
            "message": "This idempotency key was used with another payload.",
        },
    )

    def __init__(self) -> None:
        self._secret = "whsec_" + b64encode(token_bytes(24)).decode()

    def message_id(self, digest: str) -> str:
        """Return a UUID."""
        return str(UUID(digest[:32]))

    def message(self, recipient: str) -> dict[str, Any]:
        """Return an e-mail."""
        return {"from": SENDER, "to": [recipient], "subject": SUBJECT, "text": TEXT}

    def asked(self, request: Request) -> Asked:
        """Return what one e-mail asks for."""
        body = load_object(request.body)
        to = body.get("to")
        recipient = text_at(to[0] if isinstance(to, list) and to else to)
        if not recipient:
            raise BadPayload("Missing `to` field.")
        return Asked(first(_keys(body.get("tags"))) or "", recipient, request.headers.get("idempotency-key"))

    def took(self, message: Message) -> Answer:
        """Return the id."""
        return Answer(200, {"id": message.id})

    def delivery(self, notices: Sequence[Notice], secret: str | None, now: datetime) -> Delivery:
        """Return one event; its id is a header."""
        (notice,) = notices
        secrets, body = (secret or self._secret,), msgspec.json.encode(self._event(notice))
        keys = standard_webhook_keys(secrets)
        identity, timestamp = f"msg_{notice.id}", str(int(now.timestamp()))
        signed = {"svix-id": identity, "svix-timestamp": timestamp}
        if keys:
            signed["svix-signature"] = sign_standard_webhook(keys[0], identity, timestamp, body)
        return sample_delivery(body, secrets, signed, "")

    def feed(self, certificates: Path | None) -> dict[str, Any]:  # noqa: ARG002 - a secret is all it takes
        """Return the signing secret."""
        return {"secrets": [self._secret]}

    def look_up(self, request: Request, messages: Sequence[Message]) -> Answer | None:
        """Return a page of e-mails, newest first and without tags, or one e-mail with them."""
        if request.method != "GET" or not request.path.startswith(_EMAILS):
            return None
        newest = list(reversed(messages))
        sought = request.path.removeprefix(_EMAILS).lstrip("/")
        if sought:
            return next((Answer(200, _shown(message)) for message in newest if message.id == sought), None)
        after, limit = request.query.get("after"), int(request.query.get("limit", 20))
        begin = next((place for place, message in enumerate(newest, 1) if message.id == after), 0)
        page = [_listed(message) for message in newest[begin : begin + limit]]
        return Answer(200, {"object": "list", "has_more": begin + limit < len(newest), "data": page})

    def _event(self, notice: Notice) -> dict[str, Any]:
        message = notice.message
        data = {
            "created_at": message.at,
            "email_id": message.id,
            "from": SENDER,
            "to": [message.recipient],
            "subject": SUBJECT,
            "tags": {"send_key": message.key} if message.key else {},
            **_DETAILS.get(notice.kind, {}),
        }
        return {"type": self.names[notice.kind], "created_at": notice.at, "data": data}


def _keys(tags: object) -> Iterator[str | None]:
    for tag in tags if isinstance(tags, list) else ():
        if text_at(tag, "name") == "send_key":
            yield text_at(tag, "value")


def _listed(message: Message) -> dict[str, Any]:
    return {
        "id": message.id,
        "to": [message.recipient],
        "from": SENDER,
        "created_at": message.at,
        "subject": SUBJECT,
        "last_event": "sent",
    }


def _shown(message: Message) -> dict[str, Any]:
    tags = [{"name": "send_key", "value": message.key}] if message.key else []
    return {"object": "email", **_listed(message), "tags": tags}
