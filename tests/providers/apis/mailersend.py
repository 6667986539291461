# SPDX-License-Identifier: Apache-2.0
"""MailerSend's list of activities: of one domain and a span of at most a day, by pages, without any other filter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from aiohttp import web
from api_kit import FakeApi, Sent

DAY = 86_400


@dataclass
class Fake(FakeApi):
    settings: dict[str, str] = field(default_factory=lambda: {"api_key": "mlsn.throw-away", "api_scope": "dominvented"})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != "Bearer mlsn.throw-away":
            return web.json_response({"message": "Unauthenticated."}, status=401)
        if (request.method, request.path) != ("GET", "/v1/activity/dominvented"):
            return web.json_response({"message": "Resource not found."}, status=404)
        since, until, limit = (int(request.query.get(name, "0")) for name in ("date_from", "date_to", "limit"))
        if not (10 <= limit <= 100 and 0 < until - since <= DAY):
            return web.json_response({"message": "The given data was invalid."}, status=422)
        return self._page(int(request.query["page"]), self._activities(since, until))

    def _activities(self, since: int, until: int) -> Sequence[dict[str, Any]]:
        within = [sent for sent in self.sends if since <= sent.at.timestamp() <= until]
        return [activity(sent, kind) for sent in within for kind in kinds(sent)]

    def _page(self, page: int, found: Sequence[dict[str, Any]]) -> web.Response:
        start = 0 if self.endless else (page - 1) * self.page_size
        more = self.endless or start + self.page_size < len(found)
        url = f"https://api.mailersend.com/v1/activity/dominvented?page={page + 1}"
        answer = {
            "data": found[start : start + self.page_size],
            "links": {"first": None, "last": None, "prev": None, "next": url if more else None},
            "meta": {"current_page": page, "per_page": self.page_size},
        }
        return web.json_response(answer)


def kinds(sent: Sent) -> tuple[str, ...]:
    return ("suppressed",) if sent.rejected else ("queued", "sent")


def activity(sent: Sent, kind: str) -> dict[str, Any]:
    return {
        "id": f"{sent.message_id[:8]}-{kind}",
        "created_at": iso(sent.at),
        "updated_at": iso(sent.at),
        "type": kind,
        "email": {
            "id": f"{sent.message_id[:8]}-email",
            "from": "orders@shop.example.com",
            "subject": "Receipt",
            "status": "sent",
            "tags": [sent.wire_key, "order.receipt"],
            "recipient": {"id": "r1", "email": sent.recipient, "deleted_at": ""},
        },
    }


def iso(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%S.000000Z")
