# SPDX-License-Identifier: Apache-2.0
"""Mailgun's Events API and the webhooks of a domain, as documented in api-events.rst and openapi.yaml."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from api_kit import FakeApi, Sent

DOMAIN = "mg.shop.example.com"
LOGIN = "Basic " + base64.b64encode(b"api:key-throw-away").decode()
EVENT_TYPES = (
    *("accepted", "delivered", "temporary_fail", "permanent_fail"),
    *("opened", "clicked", "unsubscribed", "complained"),
)


@dataclass
class Fake(FakeApi):
    """A domain in which each send was accepted and delivered, or rejected."""

    settings: dict[str, str] = field(default_factory=lambda: {"api_key": "key-throw-away", "api_scope": DOMAIN})
    urls: dict[str, list[str]] = field(default_factory=dict)
    """The URLs of each event type."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != LOGIN:
            return web.json_response({"message": "Invalid private key"}, status=401)
        place = f"{request.method} {request.path}"
        if place == f"GET /v3/{DOMAIN}/events":
            return self._page(request, request.query, 0)
        if place.startswith(f"GET /v3/{DOMAIN}/events/"):
            offset, asked = json.loads(base64.urlsafe_b64decode(request.path.rpartition("/")[2]))
            return self._page(request, asked, offset)
        if place == f"GET /v3/domains/{DOMAIN}/webhooks":
            return web.json_response({"webhooks": {name: self._listed(name) for name in EVENT_TYPES}})
        if place == f"POST /v4/domains/{DOMAIN}/webhooks":
            return self._added(**await request.post())
        return web.json_response({"message": "Domain not found"}, status=404)

    def _page(self, request: web.Request, asked: Mapping[str, str], offset: int) -> web.Response:
        found = [item for send in self.sends for item in _items(send) if _fits(item, asked)]
        found.sort(key=lambda item: float(item["timestamp"]))
        place = request.url.origin() / "v3" / DOMAIN / "events"
        further = 0 if self.endless else offset + self.page_size
        page = found[offset : offset + min(self.page_size, int(asked["limit"]))]
        links = {name: str(place / _cursor(at, asked)) for name, at in (("next", further), ("previous", 0))}
        return web.json_response({"items": page, "paging": links})

    def _listed(self, name: str) -> dict[str, Any] | None:
        return {"urls": self.urls[name]} if name in self.urls else None

    def _added(self, url: str, event_types: str) -> web.Response:
        urls = self.urls.setdefault(event_types, [])
        if url in urls:
            reason = f"Webhook for event type '{event_types}' with URL '{url}' already exists"
            return web.json_response({"Reason": reason}, status=400)
        if url.endswith(".invalid") or len(urls) > 2:
            return web.json_response({"Reason": f"{url} is not a valid url: host not found"}, status=400)
        urls.append(url)
        return web.json_response({"webhooks": {name: self._listed(name) for name in EVENT_TYPES}})


def _cursor(offset: int, asked: Mapping[str, str]) -> str:
    return base64.urlsafe_b64encode(json.dumps([offset, dict(asked)]).encode()).decode()


def _items(send: Sent) -> list[dict[str, Any]]:
    names = ["rejected"] if send.rejected else ["accepted", "delivered"]
    return [_item(send, name, seconds) for seconds, name in enumerate(names)]


def _item(send: Sent, event: str, seconds: int) -> dict[str, Any]:
    headers = {"to": send.recipient, "message-id": f"{send.message_id}@{DOMAIN}", "from": "orders@shop.example.com"}
    return {
        "event": event,
        "id": f"{event}-{send.message_id}",
        "timestamp": send.at.timestamp() + seconds,
        "user-variables": {"send_key": send.wire_key},
        "flags": {"is-authenticated": True, "is-routed": False, "is-test-mode": False},
        "message": {"headers": headers, "attachments": [], "size": 1412},
        **({"reject": {"reason": "Sandbox", "description": ""}} if send.rejected else {"recipient": send.recipient}),
    }


def _fits(item: Mapping[str, Any], asked: Mapping[str, str]) -> bool:
    wanted = [asked[name] == item.get(name) for name in ("recipient", "event") if name in asked]
    return all(wanted) and float(asked["begin"]) <= item["timestamp"] <= float(asked["end"])
