# SPDX-License-Identifier: Apache-2.0
"""Azure Communication Services' API: the status of one operation."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from aiohttp import web
from api_kit import FakeApi


@dataclass
class Fake(FakeApi):
    """Answers as `GET /emails/operations/{operationId}` of 2023-03-31 does."""

    settings: dict[str, str] = field(default_factory=lambda: {"api_key": "entra-token"})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != "Bearer entra-token":
            return _error(401, "Denied")
        if request.query.get("api-version") != "2023-03-31":
            return _error(400, "UnsupportedApiVersionValue")
        asked = re.fullmatch(r"/emails/operations/([0-9a-f-]{36})", request.path)
        sent = next((sent for sent in self.sends if asked and sent.message_id == asked[1]), None)
        if sent is None:
            return _error(404, "NotFound")
        if sent.rejected:
            error = {"code": "EmailDroppedAllRecipientsSuppressed", "message": "all recipients are suppressed"}
            return web.json_response({"id": sent.message_id, "status": "Failed", "error": error})
        return web.json_response({"id": sent.message_id, "status": "Succeeded", "error": None})


def _error(status: int, code: str) -> web.Response:
    return web.json_response({"error": {"code": code, "message": "(invented)"}}, status=status)
