# SPDX-License-Identifier: Apache-2.0
"""Mailgun's shape: v3 Messages by form, JSON webhooks with the signature in the body, the Events API."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from secrets import token_hex
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlencode

import msgspec

from reconciler.breakable.fate import Said
from reconciler.breakable.shape import (
    BOUNCE,
    DELAY,
    DOMAIN,
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
from webhooks.event import derived_id, same_mailbox
from webhooks.forms import form_fields
from webhooks.provider import BadPayload, Delivery
from webhooks.signature import hmac_sha256, sample_delivery, signing_secrets

_EVENTS: Final = f"/v3/{DOMAIN}/events"
_NEVER_AGAIN: Final = (200, 406)

_DETAILS: Final[Mapping[Said, Mapping[str, object]]] = MappingProxyType(
    {
        "deferred": {"severity": "temporary", "reason": "generic", "delivery-status": {"code": 451, "message": DELAY}},
        "delivered": {"delivery-status": {"code": 250, "message": "OK"}},
        "bounced": {"severity": "permanent", "reason": "bounce", "delivery-status": {"code": 550, "message": BOUNCE}},
    }
)


class Mailgun(Shape):
    """Mailgun on loopback."""

    path = f"/v3/{DOMAIN}/messages"
    content_type = "application/x-www-form-urlencoded"
    names = MappingProxyType(
        {
            "accepted": "accepted",
            "deferred": "failed",
            "delivered": "delivered",
            "bounced": "failed",
            "complained": "complained",
        }
    )
    refused = Answer(400, {"message": "to parameter is not a valid address. please check documentation"})
    busy = Answer(429, {"message": "Too many requests"})

    def __init__(self) -> None:
        self._key = token_hex(16)

    def message_id(self, digest: str) -> str:
        """Return an id as its events show it; answers put it between angle brackets."""
        return f"{digest}@{DOMAIN}"

    def message(self, recipient: str) -> dict[str, Any]:
        """Return the fields of a form."""
        return {"from": SENDER, "to": recipient, "subject": SUBJECT, "text": TEXT}

    def encode(self, body: Mapping[str, Any]) -> bytes:
        """Return a form."""
        return urlencode(body).encode()

    def asked(self, request: Request) -> Asked:
        """Return what a form asks for, url-encoded or multipart."""
        fields = dict(form_fields(Delivery(request.body, request.headers)))
        if not fields.get("to"):
            raise BadPayload("to parameter is missing")
        return Asked(fields.get("v:send_key", ""), fields["to"])

    def took(self, message: Message) -> Answer:
        """Return the id."""
        return Answer(200, {"id": f"<{message.id}>", "message": "Queued. Thank you."})

    def delivery(self, notices: Sequence[Notice], secret: str | None, now: datetime) -> Delivery:
        """Return one event, its signature beside it."""
        (notice,) = notices
        secrets = (secret or self._key,)
        keys = signing_secrets(secrets)
        timestamp, token = str(int(now.timestamp())), derived_id(notice.id, now.isoformat())
        signature = hmac_sha256(keys[0] if keys else "", f"{timestamp}{token}".encode()).hex()
        body = {
            "signature": {"timestamp": timestamp, "token": token, "signature": signature},
            "event-data": self._event(notice),
        }
        return sample_delivery(msgspec.json.encode(body), secrets, {}, "")

    def ends(self, status: int) -> bool:
        """Say whether it was 200, or 406."""
        return status in _NEVER_AGAIN

    def feed(self, certificates: Path | None) -> dict[str, Any]:  # noqa: ARG002 - a secret is all it takes
        """Return signing key and domain."""
        return {"secrets": [self._key], "api_scope": DOMAIN}

    def look_up(self, request: Request, messages: Sequence[Message]) -> Answer | None:
        """Return a page of the events of taking; the address of the next page holds the whole question."""
        if request.method != "GET" or not request.path.startswith(_EVENTS):
            return None
        page = request.path.removeprefix(_EVENTS).lstrip("/")
        wanted: dict[str, str] = json.loads(bytes.fromhex(page)) if page else dict(request.query)
        skip, limit = int(wanted.get("skip", 0)), int(wanted.get("limit", 100))
        found = [message for message in messages if _fits(message, wanted)]
        following = json.dumps({**wanted, "skip": str(skip + limit)}).encode().hex()
        items = [self._event(Notice(message, "accepted")) for message in found[skip : skip + limit]]
        return Answer(200, {"items": items, "paging": {"next": f"https://api.mailgun.net{_EVENTS}/{following}"}})

    def _event(self, notice: Notice) -> dict[str, Any]:
        message = notice.message
        return {
            "event": self.names[notice.kind],
            "id": notice.id[:22],
            "timestamp": notice.at.timestamp(),
            "user-variables": {"send_key": message.key} if message.key else {},
            "flags": {"is-authenticated": True, "is-routed": False, "is-test-mode": False},
            "message": {"headers": {"to": message.recipient, "message-id": message.id, "from": SENDER}},
            "recipient": message.recipient,
            **_DETAILS.get(notice.kind, {}),
        }


def _fits(message: Message, wanted: Mapping[str, str]) -> bool:
    begin, end = float(wanted.get("begin", 0)), float(wanted.get("end", "inf"))
    return (
        begin <= message.at.timestamp() <= end
        and wanted.get("event", "accepted") == "accepted"
        and ("recipient" not in wanted or same_mailbox(message.recipient, wanted["recipient"]))
    )
