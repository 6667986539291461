# SPDX-License-Identifier: Apache-2.0
"""SMTP2GO's search of activity, as its reference and developers.smtp2go.com/docs/view-account-activity have it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from aiohttp import web
from api_kit import FakeApi, Sent


@dataclass
class Fake(FakeApi):
    """An account in which each send was processed and delivered, or rejected."""

    settings: dict[str, str] = field(default_factory=lambda: {"api_key": "api-throw-away"})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("X-Smtp2go-Api-Key") != "api-throw-away":
            return web.json_response({"data": {"error_code": "E_ApiResponseCodes.API_KEY_INVALID"}}, status=401)
        if request.method != "POST" or request.path != "/v3/activity/search":
            return web.json_response({"data": {"error": "not found"}}, status=404)
        return self._page(await request.json())

    def _page(self, asked: dict[str, Any]) -> web.Response:
        found = [event for send in self.sends for event in _events(send, asked) if _is_asked_for(event, asked)]
        offset, limit = int(asked.get("continue_token", "0")), min(self.page_size, asked["limit"])
        page, further = found[offset : offset + limit], offset + limit
        if self.endless:
            page, further = found[:limit], 1
        token = str(further) if self.endless or further < len(found) else None
        data = {"events": page, "total_events": len(found), "continue_token": token}
        return web.json_response({"request_id": "00000000-0000-4000-8000-000000000002", "data": data})


def _is_asked_for(event: dict[str, Any], asked: dict[str, Any]) -> bool:
    start, end = (datetime.fromisoformat(asked[name]) for name in ("start_date", "end_date"))
    in_time = start <= datetime.fromisoformat(event["date"]) < end
    return in_time and asked.get("search_recipient", "") in event["recipient"]


def _events(send: Sent, asked: dict[str, Any]) -> list[dict[str, Any]]:
    names = ("rejected",) if send.rejected else ("processed", "delivered")
    headers = {"X-Send-Key": send.wire_key}
    return [
        {
            "recipient": send.recipient,
            "email_id": send.message_id,
            "date": (send.at + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "event": name,
            "sender": "orders@shop.example.com",
            "smtp_response": "",
            "custom_headers": {name: headers[name] for name in asked.get("custom_headers", []) if name in headers},
        }
        for seconds, name in enumerate(names)
    ]
