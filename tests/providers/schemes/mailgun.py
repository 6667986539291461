# SPDX-License-Identifier: Apache-2.0
"""How Mailgun signs: inside the JSON, or among the fields of a legacy form."""

from __future__ import annotations

import hashlib
import hmac
import json
from datetime import datetime
from urllib.parse import parse_qsl, urlencode

from scheme import HMAC_KEYS, Scheme, seconds
from spoiling import CONTENT_TYPES

from webhooks.provider import Delivery


def sign(body: bytes, secret: str, at: datetime) -> Delivery:
    signature = hmac.digest(secret.encode(), f"{seconds(at)}token".encode(), hashlib.sha256).hex()
    block = {"timestamp": seconds(at), "token": "token", "signature": signature}
    if body.startswith(b"{"):
        return Delivery(json.dumps(json.loads(body) | {"signature": block}).encode(), {})
    return Delivery(
        urlencode(dict(parse_qsl(body.decode())) | block).encode(), {"content-type": CONTENT_TYPES[".form"]}
    )


SCHEME = Scheme(
    HMAC_KEYS, sign, fields=(("signature", "signature"), ("signature", "timestamp"), ("signature", "token"))
)
