# SPDX-License-Identifier: Apache-2.0
"""Brevo's list of transactional events, as its reference has it (get-email-event-report)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from aiohttp import web
from api_kit import NOW, FakeApi, Sent

PLACE = "/v3/smtp/statistics/events"


@dataclass
class Fake(FakeApi):
    """An account in which each send was taken and delivered, or blocked. It gives shorter pages than asked for."""

    settings: dict[str, str] = field(default_factory=lambda: {"api_key": "xkeysib-throw-away"})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("api-key") != "xkeysib-throw-away":
            return web.json_response({"message": "Key not found", "code": "unauthorized"}, status=401)
        if request.method != "GET" or request.path != PLACE:
            return web.json_response({"message": "not found", "code": "document_not_found"}, status=404)
        if "days" in request.query and "startDate" in request.query:
            return web.json_response({"code": "invalid_parameter", "message": "days and dates"}, status=400)
        return self._page(request)

    def _page(self, request: web.Request) -> web.Response:
        found = [event for send in self.sends if _is_asked_for(send, request) for event in _events(send)]
        offset, limit = int(request.query["offset"]), min(self.page_size, int(request.query["limit"]))
        if self.endless:
            found, offset = [event for send in self.sends for event in _events(send)], 0
        page = found[offset : offset + limit]
        return web.json_response({"events": page} if page else {})


def _is_asked_for(send: Sent, request: web.Request) -> bool:
    query, day = request.query, send.at.date().isoformat()
    if "days" in query and send.at < NOW - timedelta(days=int(query["days"])):
        return False
    if "startDate" in query and not query["startDate"] <= day <= query["endDate"]:
        return False
    return send.recipient == query.get("email", send.recipient) and (
        "tags" not in query or json.loads(query["tags"]) == [send.wire_key]
    )


def _events(send: Sent) -> list[dict[str, Any]]:
    names = ("blocked",) if send.rejected else ("requests", "delivered")
    return [_event(send, name, seconds) for seconds, name in enumerate(names)]


def _event(send: Sent, name: str, seconds: int) -> dict[str, Any]:
    return {
        "email": send.recipient,
        "date": (send.at + timedelta(seconds=seconds)).isoformat(timespec="milliseconds"),
        "subject": "Receipt for order 1042",
        "messageId": f"<{send.message_id}@smtp-relay.mailin.fr>",
        "event": name,
        "tag": json.dumps([send.wire_key, "order.receipt"]),
        "from": "orders@shop.example.com",
    }
