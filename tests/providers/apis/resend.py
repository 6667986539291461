# SPDX-License-Identifier: Apache-2.0
"""Resend's API: e-mails newest first by cursor, each with its tags by id; and webhooks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from api_kit import FakeApi, Sent


@dataclass
class Fake(FakeApi):
    """Answers as `GET /emails`, `GET /emails/{id}` and `/webhooks` do."""

    settings: dict[str, str] = field(default_factory=lambda: {"api_key": "re_key"})
    webhooks: list[dict[str, Any]] = field(default_factory=list)
    tagged: bool = True
    """Whether the e-mails were sent by the API, with tags; by SMTP they have none."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != "Bearer re_key":
            return web.json_response({"statusCode": 401, "name": "missing_api_key"}, status=401)
        place, _, identity = request.path.removeprefix("/").partition("/")
        if place == "webhooks":
            return await self._webhooks(request, identity)
        if place != "emails" or request.method != "GET":
            return web.json_response({"statusCode": 404, "name": "not_found"}, status=404)
        emails = [_email(sent) for sent in sorted(self.sends, key=lambda sent: sent.at, reverse=True)]
        if not identity:
            return self._page(emails, request)
        email = next(email for email in emails if email["id"] == identity)
        tags = {"tags": [{"name": "send_key", "value": self._key_of(identity)}]} if self.tagged else {}
        return web.json_response({"object": "email", "html": None, "text": "...", **email, **tags})

    def _key_of(self, identity: str) -> str:
        return next(sent.wire_key for sent in self.sends if sent.message_id == identity)

    def _page(self, listed: list[dict[str, Any]], request: web.Request) -> web.Response:
        limit, after = int(request.query["limit"]), request.query.get("after")
        assert 1 <= limit <= 100
        start = 1 + [item["id"] for item in listed].index(after) if after else 0
        start %= len(listed) or 1
        page = listed[start : start + min(limit, self.page_size)]
        more = self.endless or start + len(page) < len(listed)
        return web.json_response({"object": "list", "has_more": more, "data": page})

    async def _webhooks(self, request: web.Request, identity: str) -> web.Response:
        if request.method == "GET":
            return self._page(self.webhooks, request)
        body = await request.json()
        if request.method == "POST":
            number = len(self.webhooks)
            self.webhooks.append({"id": f"479e3145-{number}", "status": "enabled", "created_at": "2026-11-02", **body})
            answer = {"object": "webhook", "id": f"479e3145-{number}", "signing_secret": "whsec_dGhyb3ctYXdheQ=="}
            return web.json_response(answer, status=201)
        assert request.method == "PATCH"
        next(webhook for webhook in self.webhooks if webhook["id"] == identity).update(body)
        return web.json_response({"object": "webhook", "id": identity})


def _email(sent: Sent) -> dict[str, Any]:
    return {
        "id": sent.message_id,
        "to": [sent.recipient],
        "from": "Shop Orders <orders@shop.example.com>",
        "created_at": sent.at.strftime("%Y-%m-%d %H:%M:%S.%f+00"),
        "subject": "Receipt for order 1042",
        "bcc": None,
        "cc": None,
        "reply_to": None,
        "last_event": "suppressed" if sent.rejected else "delivered",
        "scheduled_at": None,
    }
