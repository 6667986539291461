# SPDX-License-Identifier: Apache-2.0
"""Mailtrap's e-mail logs: filters that it knows are applied, others are ignored; the next page by the last message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from aiohttp import web
from api_kit import FakeApi, Sent

LOGS = "/api/email_logs"


@dataclass
class Fake(FakeApi):
    by_template: frozenset[str] = frozenset()
    """Keys of sends by template, which have no category."""
    settings: dict[str, str] = field(default_factory=lambda: {"api_key": "throw-away"})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != "Bearer throw-away":
            return web.json_response({"error": "Incorrect API token"}, status=401)
        if (request.method, request.path) == ("GET", LOGS):
            return self._page(request.query)
        for sent in self.sends:
            if (request.method, request.path) == ("GET", f"{LOGS}/{sent.message_id}"):
                return web.json_response({**self._message(sent), "events": history(sent)})
        return web.json_response({"error": "Not Found"}, status=404)

    def _page(self, query: Mapping[str, str]) -> web.Response:
        found = [message for sent in self.sends if passes(message := self._message(sent), query)]
        ids = [message["message_id"] for message in found]
        start = ids.index(query["search_after"]) + 1 if "search_after" in query else 0
        page = found[start : start + self.page_size] or (found[-1:] if self.endless else [])
        more = start + self.page_size < len(found) or (self.endless and bool(found))
        cursor = page[-1]["message_id"] if more else None
        return web.json_response({"messages": page, "total_count": len(found), "next_page_cursor": cursor})

    def _message(self, sent: Sent) -> dict[str, Any]:
        return {
            "message_id": sent.message_id,
            "status": "not_delivered" if sent.rejected else "enqueued",
            "subject": "Receipt",
            "from": "orders@shop.example.com",
            "to": sent.recipient,
            "sent_at": sent.at.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "sending_stream": "transactional",
            "category": None if sent.wire_key in self.by_template else sent.wire_key,
            "custom_variables": {"send_key": sent.wire_key},
        }


def passes(message: Mapping[str, Any], query: Mapping[str, str]) -> bool:
    sent_at = datetime.fromisoformat(message["sent_at"])
    return (
        datetime.fromisoformat(query.get("filters[sent_after]", "2000-01-01T00:00:00Z")) <= sent_at
        and sent_at <= datetime.fromisoformat(query.get("filters[sent_before]", "2200-01-01T00:00:00Z"))
        and (
            query.get("filters[category][operator]") != "equal"
            or query.get("filters[category][value]") == message["category"]
        )
    )


def history(sent: Sent) -> list[dict[str, Any]]:
    details = {"reject_reason": "recipient suppressed (invented)"}
    return [{"event_type": "reject", "created_at": "2026-11-02T08:20:02Z", "details": details}] if sent.rejected else []
