# SPDX-License-Identifier: Apache-2.0
"""SendGrid's Email Logs and the settings of its Event Webhooks, as documented in twilio/sendgrid-oai."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from aiohttp import web
from api_kit import FakeApi, Sent

QUERY = re.compile(
    r'sg_message_id_created_at >= TIMESTAMP "(?P<since>[0-9T:Z-]{20})"'
    r' AND sg_message_id_created_at < TIMESTAMP "(?P<until>[0-9T:Z-]{20})"'
    r"( AND to_email = '(?P<to_email>[^']+)')?"
)
MAX_WEBHOOKS = 2
SETTINGS = "/v3/user/webhooks/event/settings"


@dataclass
class Fake(FakeApi):
    """An account in which each send was processed and delivered, or dropped."""

    settings: dict[str, str] = field(default_factory=lambda: {"api_key": "SG.throw-away"})
    hooks: list[dict[str, Any]] = field(default_factory=list)
    queries: list[str] = field(default_factory=list)
    """What was searched for."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != "Bearer SG.throw-away":
            return _error(401, "authorization required")
        value = await request.json() if request.can_read_body else {}
        answers: dict[str, Callable[[str, dict[str, Any]], web.Response]] = {
            "POST /v3/logs": self._search,
            "GET /v3/logs/": self._message,
            f"GET {SETTINGS}/all": lambda *_: web.json_response({"max_allowed": 2, "webhooks": self.hooks or [{}]}),
            f"POST {SETTINGS}": self._create,
            f"PATCH {SETTINGS}/signed/": self._sign,
            f"PATCH {SETTINGS}/": self._update,
        }
        place = f"{request.method} {request.path}"
        for known, give in answers.items():
            if place == known or (known.endswith("/") and place.startswith(known)):
                return give(place.removeprefix(known), value)
        return _error(404, "not found")

    def _search(self, _: str, asked: dict[str, Any]) -> web.Response:
        self.queries.append(asked["query"])
        query, limit = QUERY.fullmatch(asked["query"]), asked["limit"]
        if query is None or not 1 <= limit <= 1000:
            return _error(400, "invalid query")
        since, until = (datetime.fromisoformat(query[name]) for name in ("since", "until"))
        sends = self.sends
        if not self.endless:
            sends = [send for send in sends if since <= send.at < until]
            sends = [send for send in sends if query["to_email"] in (None, send.recipient)]
        listed = itertools.islice(itertools.cycle(sends) if self.endless else sends, limit)
        return web.json_response({"messages": [_summary(send) for send in listed]})

    def _message(self, message_id: str, _: dict[str, Any]) -> web.Response:
        for send in self.sends:
            if _summary(send)["sg_message_id"] == message_id:
                return web.json_response(_details(send))
        return _error(404, "message not found")

    def _create(self, _: str, value: dict[str, Any]) -> web.Response:
        for hook in self.hooks:
            if hook["url"] == value["url"]:
                message = f"Webhook at '{hook['url']}' already exists. Please provide a unique URL."
                return web.json_response(
                    {"errors": [{"id": hook["id"], "message": message, "url": hook["url"]}]}, status=400
                )
        if len(self.hooks) >= MAX_WEBHOOKS:
            return _error(400, "You have reached the maximum number of webhooks per your current billing plan.")
        self.hooks.append({**value, "id": f"hook-{len(self.hooks)}"})
        return web.json_response(self.hooks[-1], status=201)

    def _update(self, hook_id: str, value: dict[str, Any]) -> web.Response:
        return self._changed(hook_id, value)

    def _sign(self, hook_id: str, value: dict[str, Any]) -> web.Response:
        return self._changed(hook_id, {"public_key": f"key-of-{hook_id}" if value["enabled"] else ""})

    def _changed(self, hook_id: str, value: dict[str, Any]) -> web.Response:
        for hook in self.hooks:
            if hook["id"] == hook_id:
                hook.update(value)
                return web.json_response(hook)
        return _error(404, "Invalid id provided.")


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"errors": [{"message": message}]}, status=status)


def _summary(send: Sent) -> dict[str, Any]:
    return {
        "from_email": "orders@shop.example.com",
        "sg_message_id": f"{send.message_id}.recvd-6c5d9f8b7a-x2p4q-1-6907A1B2-3F.0",
        "subject": "Your receipt",
        "to_email": send.recipient,
        "reason": "",
        "status": "dropped" if send.rejected else "delivered",
        "sg_message_id_created_at": f"{send.at:%Y-%m-%dT%H:%M:%SZ}",
    }


def _details(send: Sent) -> dict[str, Any]:
    names = ["received", "dropped"] if send.rejected else ["received", "processed", "delivered"]
    return {
        **_summary(send),
        "api_key_id": "exampleKeyId",
        "client_ip": "203.0.113.24",
        "custom_args": {"send_key": send.wire_key},
        "events": [_event(send, name, seconds) for seconds, name in enumerate(names)],
    }


def _event(send: Sent, name: str, seconds: int) -> dict[str, Any]:
    event = {"event": name, "sg_event_id": f"{name}-{send.message_id}", "timestamp": int(send.at.timestamp()) + seconds}
    if name == "received":
        return {**event, "recv_msgid": send.message_id, "recipient_count": 1, "protocol": "HTTP", "size": 1412}
    return {**event, "email": send.recipient, "sg_message_id": _summary(send)["sg_message_id"]}
