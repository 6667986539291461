# SPDX-License-Identifier: Apache-2.0
"""Postmark's API: outbound messages by offset, by New York's clocks; and the webhooks of its message streams."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from aiohttp import web
from api_kit import FakeApi, Sent


@dataclass
class Fake(FakeApi):
    """Answers as `GET /messages/outbound` and `/webhooks` do."""

    settings: dict[str, str] = field(default_factory=lambda: {"api_key": "server-token", "api_scope": "outbound"})
    webhooks: list[dict[str, Any]] = field(default_factory=list)
    most: int = 10_000

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("X-Postmark-Server-Token") != "server-token":
            return web.json_response({"ErrorCode": 10, "Message": "(invented)"}, status=401)
        if request.path == "/messages/outbound" and request.method == "GET":
            return self._messages(request.query)
        if request.path.startswith("/webhooks"):
            return await self._webhooks(request)
        return web.json_response({}, status=404)

    def _messages(self, asked: Any) -> web.Response:
        offset, count = int(asked["offset"]), int(asked["count"])
        if count > 500 or offset + count > self.most or asked["messagestream"] != "outbound":
            return web.json_response({"ErrorCode": 600, "Message": "(invented)"}, status=422)
        since, until = (datetime.fromisoformat(asked[name]).replace(tzinfo=UTC) for name in ("fromdate", "todate"))
        found = [sent for sent in self.sends if since <= _eastern(sent.at) <= until]
        found = [sent for sent in found if asked.get("metadata_send_key") in (None, sent.wire_key)]
        if self.endless:
            found, offset = list(self.sends), 0
        page = sorted(found, key=lambda sent: sent.at, reverse=True)[offset : offset + min(count, self.page_size)]
        return web.json_response({"TotalCount": len(found), "Messages": [_message(sent) for sent in page]})

    async def _webhooks(self, request: web.Request) -> web.Response:
        if request.method == "GET":
            stream = request.query["MessageStream"]
            if stream not in ("outbound", "broadcasts"):
                return web.json_response({"ErrorCode": 1226, "Message": "(invented)"}, status=422)
            return web.json_response({"Webhooks": [w for w in self.webhooks if w["MessageStream"] == stream]})
        body = await request.json()
        if request.method == "POST":
            webhook = {"ID": 1234567 + len(self.webhooks), "MessageStream": "outbound", **body}
            self.webhooks.append(webhook)
        else:
            assert request.method == "PUT"
            webhook = next(w for w in self.webhooks if request.path == f"/webhooks/{w['ID']}")
            webhook.update(body)
        return web.json_response(webhook)


def _eastern(time: datetime) -> datetime:
    # New York's clocks in 2026.
    summer = datetime(2026, 3, 8, 7, tzinfo=UTC) <= time < datetime(2026, 11, 1, 6, tzinfo=UTC)
    return (time - timedelta(hours=4 if summer else 5)).replace(tzinfo=UTC)


def _message(sent: Sent) -> dict[str, object]:
    return {
        "Tag": "receipt",
        "MessageID": sent.message_id,
        "MessageStream": "outbound",
        "To": [{"Email": sent.recipient, "Name": None}],
        "Cc": [],
        "Bcc": [],
        "Recipients": [sent.recipient],
        "ReceivedAt": sent.at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f0Z"),
        "From": "orders@shop.example.com",
        "Subject": "Your receipt for order o-1042",
        "Attachments": [],
        "Status": "Sent",
        "TrackOpens": False,
        "TrackLinks": "None",
        "Metadata": {"send_key": sent.wire_key},
    }
