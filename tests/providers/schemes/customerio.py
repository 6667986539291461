# SPDX-License-Identifier: Apache-2.0
"""How Customer.io signs."""

from __future__ import annotations

import hashlib
import hmac
from datetime import datetime

from scheme import HMAC_KEYS, Scheme, seconds

from webhooks.provider import Delivery


def sign(body: bytes, secret: str, at: datetime) -> Delivery:
    signed = b"v0:" + seconds(at).encode() + b":" + body
    signature = hmac.digest(secret.encode(), signed, hashlib.sha256).hex()
    return Delivery(body, {"x-cio-timestamp": seconds(at), "x-cio-signature": signature})


SCHEME = Scheme(HMAC_KEYS, sign, headers=("x-cio-timestamp", "x-cio-signature"))
