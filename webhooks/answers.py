# SPDX-License-Identifier: Apache-2.0
"""The receiver's answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Final

from aiohttp import HttpVersion11, hdrs, web

from webhooks.inbox import Stored
from webhooks.provider import Handshake

_JSON: Final[dict[str, str]] = {hdrs.CONTENT_TYPE: "application/json"}
PROBLEM: Final = "application/problem+json"
_PROBLEM: Final[dict[str, str]] = {hdrs.CONTENT_TYPE: PROBLEM}


def stored(result: Stored, request: web.BaseRequest) -> web.StreamResponse:
    """Say that all is stored: exactly 200, since a few providers take no other status for done."""
    body = b'{"stored": %d, "repeated": %d}' % result
    if request.keep_alive and request.version == HttpVersion11:
        return _Ready(b"%b%d\r\n\r\n%b" % (_head(int(time.time())), len(body), body))
    return web.Response(body=body, headers=_JSON)


class _Ready(web.StreamResponse):
    """An answer whose bytes are ready: making its headers one by one takes a third of a small request's time."""

    def __init__(self, octets: bytes) -> None:
        super().__init__()
        self._octets = octets
        self._transport: asyncio.Transport | None = None

    async def prepare(self, request: web.BaseRequest) -> None:
        """Remember where the answer goes; the connection is kept."""
        self._transport = request.transport
        self._keep_alive = True

    async def write_eof(self, _data: bytes = b"") -> None:
        """Send it, unless the client has gone."""
        if self._transport is not None:
            self._transport.write(self._octets)


@lru_cache(maxsize=2)
def _head(second: int) -> bytes:
    date = formatdate(second, usegmt=True)
    return (
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Content-Type-Options: nosniff\r\n"
        f"Cache-Control: no-store\r\nDate: {date}\r\nContent-Length: "
    ).encode()


def ok() -> web.Response:
    """Say that all is well."""
    return web.Response(body=b'{"status": "ok"}', headers=_JSON)


def handshake(answer: Handshake) -> web.Response:
    """Say what the provider wants to hear."""
    return web.Response(body=answer.body, headers=answer.headers)


def problem(
    status: int, detail: str, headers: Mapping[str, str] | None = None, members: Mapping[str, object] | None = None
) -> web.Response:
    """Return an error as RFC 9457 describes it, with members of its own where it has some."""
    body = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail}
    body |= members or {}
    return web.Response(body=json.dumps(body).encode(), status=status, headers={**_PROBLEM, **(headers or {})})


def not_served(error: web.HTTPException) -> web.Response:
    """Return what aiohttp itself answers in plain text, such as where nothing is served, as such an error."""
    kept = {name: value for name, value in error.headers.items() if name in (hdrs.ALLOW, hdrs.RETRY_AFTER)}
    return problem(error.status, error.reason, kept)


def refused(status: int, reason: str, hint: str, retry_after: int) -> web.Response:
    """Say that a delivery is not proved to be the provider's."""
    if status == HTTPStatus.UNAUTHORIZED:
        # SNS sends its credentials only after it was asked for them.
        headers: dict[str, str] = {hdrs.WWW_AUTHENTICATE: 'Basic realm="webhooks"'}
    else:
        headers = {hdrs.RETRY_AFTER: str(retry_after)}
    return problem(status, f"{reason}: {hint}" if hint else reason, headers)


def later(status: int, reason: str, retry_after: int) -> web.Response:
    """Ask the provider to deliver again: not stored, for our reasons."""
    return problem(status, f"not stored, deliver again ({reason})", {hdrs.RETRY_AFTER: str(retry_after)})
