# SPDX-License-Identifier: Apache-2.0
"""Postmark's shape: the Email API, webhooks that carry a credential and sign nothing, the Messages API."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from secrets import token_hex
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID

import msgspec

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
from webhooks.payload import load_object, text_at
from webhooks.provider import BadPayload, Delivery
from webhooks.signature import sample_delivery

_STREAM: Final = "outbound"
_NEVER_AGAIN: Final = (200, 403)
_BOUNCES: Final = MappingProxyType(
    {
        "deferred": {"RecordType": "Bounce", "Type": "Transient", "TypeCode": 2, "Details": f"smtp;{DELAY}"},
        "bounced": {"RecordType": "Bounce", "Type": "HardBounce", "TypeCode": 1, "Details": f"smtp;{BOUNCE}"},
        "complained": {"RecordType": "SpamComplaint", "Type": "SpamComplaint", "TypeCode": 100001, "Details": ""},
    }
)


class Postmark(Shape):
    """Postmark on loopback. It never says `accepted`."""

    path = "/email"
    names = MappingProxyType(
        {"deferred": "Bounce", "delivered": "Delivery", "bounced": "Bounce", "complained": "SpamComplaint"}
    )
    refused = Answer(
        422, {"ErrorCode": 406, "Message": "You tried to send to recipient(s) that have been marked as inactive."}
    )
    busy = Answer(429, {"ErrorCode": 429, "Message": "Too many requests."})

    def __init__(self) -> None:
        self._credential = f"basic:postmark:{token_hex(16)}"

    def message_id(self, digest: str) -> str:
        """Return a GUID."""
        return str(UUID(digest[:32]))

    def message(self, recipient: str) -> dict[str, Any]:
        """Return a message in the usual stream."""
        return {"From": SENDER, "To": recipient, "Subject": SUBJECT, "TextBody": TEXT, "MessageStream": _STREAM}

    def asked(self, request: Request) -> Asked:
        """Return what one message asks for."""
        body = load_object(request.body)
        recipient = text_at(body, "To")
        if not recipient:
            raise BadPayload("Zero recipients specified")
        return Asked(text_at(body, "Metadata", "send_key") or "", recipient)

    def took(self, message: Message) -> Answer:
        """Return the id and no error."""
        said = {"To": message.recipient, "SubmittedAt": message.at, "MessageID": message.id}
        return Answer(200, {**said, "ErrorCode": 0, "Message": "OK"})

    def delivery(self, notices: Sequence[Notice], secret: str | None, now: datetime) -> Delivery:  # noqa: ARG002
        """Return one record with the credential."""
        (notice,) = notices
        needs = "Postmark signs nothing: its secret is a credential such as basic:user:password"
        return sample_delivery(msgspec.json.encode(_record(notice)), (secret or self._credential,), None, needs)

    def ends(self, status: int) -> bool:
        """Say whether it was 200, or 403."""
        return status in _NEVER_AGAIN

    def feed(self, certificates: Path | None) -> dict[str, Any]:  # noqa: ARG002 - a secret is all it takes
        """Return the credential."""
        return {"secrets": [self._credential]}

    def look_up(self, request: Request, messages: Sequence[Message]) -> Answer | None:
        """Return a page of messages, by key where one is asked for; dates are not looked at."""
        if (request.method, request.path) != ("GET", "/messages/outbound"):
            return None
        offset, count = int(request.query.get("offset", 0)), int(request.query.get("count", 500))
        key = request.query.get("metadata_send_key")
        found = [message for message in messages if key in (None, message.key)]
        listed = [_listed(message) for message in found[offset : offset + count]]
        return Answer(200, {"TotalCount": len(found), "Messages": listed})


def _record(notice: Notice) -> dict[str, Any]:
    message = notice.message
    said = {
        "MessageID": message.id,
        "MessageStream": _STREAM,
        "Metadata": {"send_key": message.key} if message.key else {},
    }
    if notice.kind == "delivered":
        delivered = {"RecordType": "Delivery", "Recipient": message.recipient, "DeliveredAt": notice.at}
        return {**said, **delivered, "Details": "smtp;250 OK"}
    bounce = {"ID": int(notice.id[:12], 16), "Email": message.recipient, "BouncedAt": notice.at, "From": SENDER}
    return {**said, **bounce, **_BOUNCES[notice.kind]}


def _listed(message: Message) -> dict[str, Any]:
    return {
        "MessageID": message.id,
        "MessageStream": _STREAM,
        "To": [{"Email": message.recipient, "Name": None}],
        "Recipients": [message.recipient],
        "ReceivedAt": message.at,
        "From": SENDER,
        "Subject": SUBJECT,
        "Status": "Sent",
        "Metadata": {"send_key": message.key} if message.key else {},
    }
