# SPDX-License-Identifier: Apache-2.0
"""Scaleway TEM's lists: webhooks, what each of them published, and e-mails, which come without their headers."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from aiohttp import web
from api_kit import FakeApi, Sent

PATH = "/transactional-email/v1alpha1/regions/fr-par"
PROJECT = "0f0e0d0c-7777-4888-8999-aaaabbbbcccc"
WEBHOOK = "0f0e0d0c-9999-4aaa-8bbb-ccccddddeeee"
TOPIC = f"arn:scw:sns:fr-par:project-{PROJECT}:tem-events"


def rfc3339(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def events_of(sent: Sent) -> list[dict[str, Any]]:
    """What the webhook published about a send."""
    if sent.rejected:
        return [event(sent, "email_blocklisted", 1, blocklist_type="mailbox_not_found")]
    about = {"email_id": sent.message_id}
    return [event(sent, "email_queued", 1, **about), event(sent, "email_delivered", 4, **about)]


def event(sent: Sent, name: str, seconds: int, **more: str) -> dict[str, Any]:
    created = rfc3339(sent.at + timedelta(seconds=seconds))
    payload = {
        "id": str(uuid.uuid5(uuid.NAMESPACE_OID, f"{name} {sent.wire_key} {sent.message_id}")),
        "type": name,
        "created_at": created,
        "email_to": sent.recipient,
        "email_headers": [{"key": "From", "value": "orders@shop.example.com"}, header(sent)],
        **more,
    }
    return {
        "id": payload["id"],
        "webhook_id": WEBHOOK,
        "type": name,
        "status": "sent",
        "data": json.dumps(payload),
        "created_at": created,
        "email_id": more.get("email_id"),
    }


def header(sent: Sent) -> dict[str, str]:
    return {"key": "X-Send-Key", "value": sent.wire_key}


def email_of(sent: Sent) -> dict[str, Any]:
    return {
        "id": sent.message_id,
        "project_id": PROJECT,
        "mail_rcpt": sent.recipient,
        "created_at": rfc3339(sent.at),
        "status": "failed" if sent.rejected else "sent",
        "flags": ["blocklisted"] if sent.rejected else [],
    }


@dataclass
class Fake(FakeApi):
    settings: dict[str, str] = field(default_factory=lambda: {"api_key": "throw-away", "api_scope": PROJECT})
    webhooks: tuple[str, ...] = (TOPIC,)
    """The topics of the project's webhooks."""
    unseen: tuple[str, ...] = ()
    """Wire keys of sends from a domain that has no webhook."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("X-Auth-Token") != self.settings["api_key"]:
            return web.json_response({"type": "denied_authentication"}, status=401)
        asked = dict(request.query)
        if asked.get("project_id") != PROJECT or request.method != "GET":
            return web.json_response({"type": "permissions_denied"}, status=403)
        match request.path.removeprefix(PATH):
            case "/webhooks":
                hooks = [{"id": WEBHOOK, "sns_arn": arn} for arn in self.webhooks]
                return self._page("webhooks", hooks, asked)
            case "/emails":
                return self._page("emails", self._emails(asked), asked)
            case path if path == f"/webhooks/{WEBHOOK}/events":
                return self._page("webhook_events", self._events(asked), asked)
        return web.json_response({"type": "not_found"}, status=404)

    def _emails(self, asked: dict[str, str]) -> list[dict[str, Any]]:
        since, until = (datetime.fromisoformat(asked[name]) for name in ("since", "until"))
        of_span = [sent for sent in self.sends if since < sent.at < until]
        return [email_of(sent) for sent in of_span if asked.get("mail_rcpt") in (None, sent.recipient)]

    def _events(self, asked: dict[str, str]) -> list[dict[str, Any]]:
        events = [event for sent in self.sends if sent.wire_key not in self.unseen for event in events_of(sent)]
        wanted = {"email_id": asked.get("email_id"), "type": asked.get("event_types")}
        filters = {name: value for name, value in wanted.items() if value}
        found = [event for event in events if all(event[name] == value for name, value in filters.items())]
        return sorted(found, key=lambda event: event["created_at"], reverse=True)

    def _page(self, name: str, found: list[dict[str, Any]], asked: dict[str, str]) -> web.StreamResponse:
        size = min(int(asked["page_size"]), self.page_size)
        start = 0 if self.endless else (int(asked["page"]) - 1) * size
        total = 10**6 if self.endless else len(found)
        return web.json_response({"total_count": total, name: found[start : start + size]})
