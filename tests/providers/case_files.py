# SPDX-License-Identifier: Apache-2.0
"""The recorded cases of `tests/cases`, as deliveries and feeds."""

from __future__ import annotations

import base64
import gzip
import json
from datetime import datetime
from pathlib import Path
from typing import Any

from webhooks.provider import Delivery, Feed

CASES = Path(__file__).parent.parent / "cases"
FIXTURES = Path(__file__).parent / "fixtures"


def case(number: str) -> dict[str, Any]:
    (path,) = CASES.glob(f"{number}-*.json")
    return json.loads(path.read_text(encoding="utf-8"))


def delivery(request: dict[str, Any]) -> Delivery:
    """A request of a case (the case itself, or one of its further `requests`), its body inflated."""
    body = request["body_text"].encode() if "body_text" in request else base64.b64decode(request["body_base64"])
    headers = {name.lower(): value for name, value in request["headers"].items()}
    return Delivery(gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body, headers)


def clock(of: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(of["clock"])


def feed(of: dict[str, Any], **settings: Any) -> Feed:
    secrets = of["config"].get("sendgrid_public_keys") or of["config"].get("svix_secrets") or ()
    return Feed("main", of["provider"], secrets=tuple(secrets), **settings)


def fixture(name: str) -> bytes:
    return (FIXTURES / name).read_bytes()


async def no_fetch(url: str, *, max_bytes: int = 65_536) -> bytes:
    raise AssertionError(f"nothing is fetched to verify this provider, but {url} was")
