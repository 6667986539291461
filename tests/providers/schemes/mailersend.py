# SPDX-License-Identifier: Apache-2.0
"""How MailerSend signs."""

from __future__ import annotations

import hashlib
import hmac
from datetime import datetime

from scheme import HMAC_KEYS, Scheme

from webhooks.provider import Delivery


def sign(body: bytes, secret: str, _: datetime) -> Delivery:
    return Delivery(body, {"signature": hmac.digest(secret.encode(), body, hashlib.sha256).hex()})


SCHEME = Scheme(HMAC_KEYS, sign, headers=("signature",))
