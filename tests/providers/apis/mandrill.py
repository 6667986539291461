# SPDX-License-Identifier: Apache-2.0
"""Mandrill's search of messages."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from aiohttp import web
from api_kit import FakeApi, Sent

QUERY = re.compile(r'(?:\*|full_email:"(?P<email>(?:[^"\\]|\\.)*)")(?: AND ts:\[(?P<start>\d+) TO (?P<end>\d+)\])?')
INVALID_KEY = {"status": "error", "code": -1, "name": "Invalid_Key", "message": "Invalid API key"}


def message_of(sent: Sent) -> dict[str, Any]:
    return {
        "ts": int(sent.at.timestamp()),
        "_id": sent.message_id,
        "sender": "orders@shop.example.com",
        "template": None,
        "subject": "Receipt for order 1042",
        "email": sent.recipient,
        "tags": ["order.receipt"],
        "opens": 0,
        "opens_detail": [],
        "clicks": 0,
        "clicks_detail": [],
        "state": "rejected" if sent.rejected else "sent",
        "metadata": {"send_key": sent.wire_key},
    }


@dataclass
class Fake(FakeApi):
    settings: dict[str, str] = field(default_factory=lambda: {"api_key": "throw-away"})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if (request.method, request.path) != ("POST", "/messages/search"):
            return web.Response(status=404)
        asked = await request.json()
        if asked["key"] != self.settings["api_key"]:
            return web.json_response(INVALID_KEY, status=401)
        limit = min(asked.get("limit", 100), 1000)
        if self.endless:
            return web.json_response([message_of(self.sends[0])] * limit)
        return web.json_response([message_of(sent) for sent in self.sends if self._matches(sent, asked)][:limit])

    def _matches(self, sent: Sent, asked: dict[str, Any]) -> bool:
        """Say whether a send is meant; days are read as narrowly as they can be."""
        terms = QUERY.fullmatch(asked["query"])
        assert terms
        start, end = (datetime.fromisoformat(asked[name]).replace(tzinfo=UTC) for name in ("date_from", "date_to"))
        email = terms["email"] and re.sub(r"\\(.)", r"\1", terms["email"])
        if not start <= sent.at < end or email not in (None, sent.recipient):
            return False
        return not terms["start"] or int(terms["start"]) <= int(sent.at.timestamp()) <= int(terms["end"])
