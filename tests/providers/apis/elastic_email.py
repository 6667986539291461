# SPDX-License-Identifier: Apache-2.0
"""Elastic Email's API: events of a span of time, of all channels or of one, in pages by offset."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime

from aiohttp import web
from api_kit import FakeApi, Sent


@dataclass
class Fake(FakeApi):
    """Answers as `GET /v4/events` and `GET /v4/events/channels/{name}` do; each send has two events."""

    settings: dict[str, str] = field(default_factory=lambda: {"api_key": "elastic-key"})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("X-ElasticEmail-ApiKey") != "elastic-key":
            return web.json_response({"Error": "Unauthorized"}, status=401)
        asked = re.fullmatch(r"/v4/events(?:/channels/([^/]+))?", request.path)
        if asked is None or (asked[1] and asked[1] not in {sent.wire_key for sent in self.sends} and not self.endless):
            return web.json_response({"Error": "Not found"}, status=404)
        if request.query["orderBy"] != "DateAscending" or int(request.query["limit"]) > 1000:
            return web.json_response({"Error": "Bad request"}, status=400)
        since, until = (_time(request.query[name]) for name in ("from", "to"))
        found = [sent for sent in self.sends if since <= sent.at <= until]
        rows = [row for sent in found if asked[1] in (None, sent.wire_key) or self.endless for row in _events(sent)]
        start = 0 if self.endless else int(request.query["offset"])
        return web.json_response(rows[start : start + self.page_size])


def _time(text: str) -> datetime:
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S").replace(tzinfo=UTC)


def _events(sent: Sent) -> list[dict[str, object]]:
    event = {
        "TransactionID": "c2a6f1c0-5b1e-4f0b-9d3a-11aa22bb33cc",
        "MsgID": sent.message_id,
        "FromEmail": "orders@shop.example.com",
        "To": sent.recipient,
        "Subject": "Receipt for order 1042",
        "EventDate": sent.at.strftime("%Y-%m-%dT%H:%M:%S"),
        "ChannelName": sent.wire_key,
        "MessageCategory": "Ignore" if sent.rejected else "Unknown",
        "NextTryOn": None,
    }
    return [event | {"EventType": "Submission"}, event | {"EventType": "Suppress" if sent.rejected else "Sent"}]
