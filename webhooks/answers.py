# SPDX-License-Identifier: Apache-2.0
"""The receiver's answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from aiohttp import hdrs, web

from webhooks.inbox import Stored

_JSON: Final[dict[str, str]] = {hdrs.CONTENT_TYPE: "application/json"}
_PROBLEM: Final[dict[str, str]] = {hdrs.CONTENT_TYPE: "application/problem+json"}


def stored(result: Stored) -> web.Response:
    """Say that all is stored: exactly 200, since a few providers take no other status for done."""
    return web.Response(body=b'{"stored": %d, "repeated": %d}' % result, headers=_JSON)


def ok() -> web.Response:
    """Say that all is well."""
    return web.Response(body=b'{"status": "ok"}', headers=_JSON)


def problem(status: int, detail: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return an error as RFC 9457 describes it."""
    body = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail}
    return web.Response(body=json.dumps(body).encode(), status=status, headers={**_PROBLEM, **(headers or {})})


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
