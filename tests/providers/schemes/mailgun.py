# SPDX-License-Identifier: Apache-2.0
"""How Mailgun signs."""

from __future__ import annotations

import hashlib
import hmac
import json
from datetime import datetime

from scheme import HMAC_KEYS, Scheme, seconds

from webhooks.provider import Delivery


def sign(body: bytes, secret: str, at: datetime) -> Delivery:
    signature = hmac.digest(secret.encode(), f"{seconds(at)}token".encode(), hashlib.sha256).hex()
    block = {"timestamp": seconds(at), "token": "token", "signature": signature}
    return Delivery(json.dumps(json.loads(body) | {"signature": block}).encode(), {})


SCHEME = Scheme(
    HMAC_KEYS, sign, fields=(("signature", "signature"), ("signature", "timestamp"), ("signature", "token"))
)
