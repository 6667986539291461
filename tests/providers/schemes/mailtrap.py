# SPDX-License-Identifier: Apache-2.0
"""How Mailtrap signs."""

from __future__ import annotations

import hashlib
import hmac
from datetime import datetime

from scheme import Scheme

from webhooks.provider import Delivery


def sign(body: bytes, secret: str, _: datetime) -> Delivery:
    return Delivery(body, {"mailtrap-signature": hmac.digest(secret.encode(), body, hashlib.sha256).hex()})


KEYS = ("8d9a3c0e7f5b2d4a6c1e9f8b3a7d5c2e", "0f1e2d3c4b5a69788796a5b4c3d2e1f0", "00112233445566778899aabbccddeeff")

SCHEME = Scheme(KEYS, sign, headers=("mailtrap-signature",))
