# SPDX-License-Identifier: Apache-2.0
"""Mailjet's list of messages, as dev.mailjet.com/reference/email/messages and its guide to filters have it."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from aiohttp import web
from api_kit import FakeApi, Sent

LOGIN = "Basic " + base64.b64encode(b"public:private").decode()


@dataclass
class Fake(FakeApi):
    """An account in which each send reached the recipient's server, or was blocked."""

    settings: dict[str, str] = field(default_factory=lambda: {"api_key": "public", "api_secret": "private"})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != LOGIN:
            return web.json_response({"ErrorMessage": "API key authentication failure", "StatusCode": 401}, status=401)
        if request.method != "GET" or request.path != "/v3/REST/message":
            return web.json_response({"ErrorMessage": "Object not found", "StatusCode": 404}, status=404)
        found = [_message(send, request) for send in self.sends if _is_asked_for(send, request)]
        offset, limit = int(request.query.get("Offset", 0)), min(self.page_size, int(request.query.get("Limit", 10)))
        if self.endless:
            found, offset = [_message(send, request) for send in self.sends], 0
        page = found[offset : offset + limit]
        return web.json_response({"Count": len(page), "Data": page, "Total": len(page)})


def _is_asked_for(send: Sent, request: web.Request) -> bool:
    query = request.query
    since, until = datetime.fromisoformat(query["FromTS"]), datetime.fromisoformat(query["ToTS"])
    return since <= send.at <= until and query.get("CustomID", send.wire_key) == send.wire_key


def _message(send: Sent, request: web.Request) -> dict[str, Any]:
    shown = {"ShowCustomID": {"CustomID": send.wire_key}, "ShowContactAlt": {"ContactAlt": send.recipient}}
    message: dict[str, Any] = {
        "ArrivedAt": send.at.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "ID": 288_230_412_345_678_901 + int(send.message_id[:8], 16),
        "StateID": 14 if send.rejected else 0,
        "Status": "blocked" if send.rejected else "sent",
        "UUID": send.message_id,
    }
    for name, fields in shown.items():
        message |= fields if request.query.get(name) == "true" else {}
    return message
