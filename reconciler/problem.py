# SPDX-License-Identifier: Apache-2.0
"""Errors of the HTTP API as RFC 9457 describes them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import timedelta
from http import HTTPStatus
from typing import Any, Final

from aiohttp import hdrs, web

MEDIA_TYPE: Final = "application/problem+json"


class Problem(web.HTTPException):
    """An error answer, raised: `application/problem+json` with type, title, status, detail, and members of its own.

    `detail` is one line for the caller, free of keys and recipients. Members that are None are left out.
    """

    def __init__(self, status: int, detail: str, *, headers: Mapping[str, str] | None = None, **members: Any) -> None:
        self.outcome: str | None = members.get("outcome")
        self.status_code = status  # which aiohttp knows by the class only
        document = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail}
        document |= {name: value for name, value in members.items() if value is not None}
        super().__init__(text=json.dumps(document), headers=headers, content_type=MEDIA_TYPE)
        self.headers[hdrs.CONTENT_TYPE] = MEDIA_TYPE  # JSON has no charset


def retry_after(wait: timedelta | float) -> dict[str, str]:
    """Return the header that asks to come back later: whole seconds, at least one."""
    seconds = wait.total_seconds() if isinstance(wait, timedelta) else wait
    return {hdrs.RETRY_AFTER: str(max(1, math.ceil(seconds)))}
