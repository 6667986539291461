# SPDX-License-Identifier: Apache-2.0
"""SparkPost's search of message events."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

from aiohttp import web
from api_kit import NOW, FakeApi, Sent

PATH = "/api/v1/events/message"


def time_of(text: str) -> datetime:
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)


def keywords(campaign: str) -> set[str]:
    return set(re.split("[ _-]", campaign))


@dataclass
class Fake(FakeApi):
    settings: dict[str, str] = field(default_factory=lambda: {"api_key": "throw-away", "api_scope": "0"})

    def event_of(self, sent: Sent) -> dict[str, Any]:
        return {
            "type": "generation_rejection" if sent.rejected else "injection",
            "event_id": f"92{zlib.crc32(sent.wire_key.encode()):015}",
            "timestamp": sent.at.isoformat(timespec="milliseconds"),
            "transmission_id": sent.message_id,
            "message_id": "65a1c0f27b65e9d81c44",
            "customer_id": "90210",
            "subaccount_id": "0",
            "campaign_id": sent.wire_key,
            "rcpt_meta": {"send_key": sent.wire_key},
            "rcpt_to": sent.recipient,
            "raw_rcpt_to": sent.recipient,
        }

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if (request.method, request.path) != ("GET", PATH):
            return web.Response(status=404)
        if request.headers.get("Authorization") != self.settings["api_key"]:
            return web.json_response({"errors": [{"message": "Unauthorized."}]}, status=401)
        asked = dict(request.query)
        found = [event for sent in self.sends if self._matches(event := self.event_of(sent), asked)]
        size = min(int(asked.get("per_page", "1000")), self.page_size)
        cursor = asked.get("cursor", "initial")
        start = 0 if cursor == "initial" else int(cursor.removeprefix("W1cn+/").removesuffix("=="))
        end = start + size
        links = {}
        if end < len(found) or self.endless:
            links = {"next": f"{PATH}?{urlencode({**asked, 'cursor': f'W1cn+/{min(end, len(found))}=='})}"}
        return web.json_response({"results": found[start:end], "total_count": len(found), "links": links})

    def _matches(self, event: dict[str, Any], asked: dict[str, str]) -> bool:
        at, until = datetime.fromisoformat(event["timestamp"]), time_of(asked["to"]) if "to" in asked else NOW
        if not time_of(asked["from"]) <= at < until or asked.get("subaccounts", "0") != "0":
            return False
        if asked.get("recipients", event["rcpt_to"]) != event["rcpt_to"]:
            return False
        return "campaigns" not in asked or keywords(asked["campaigns"]) <= keywords(event["campaign_id"])
