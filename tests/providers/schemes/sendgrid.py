# SPDX-License-Identifier: Apache-2.0
"""How SendGrid signs."""

from __future__ import annotations

import base64
from datetime import datetime

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from scheme import Scheme, seconds

from webhooks.provider import Delivery


def _public(key: ec.EllipticCurvePrivateKey) -> str:
    der = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return base64.b64encode(der).decode()


_KEYS = {_public(key): key for key in (ec.generate_private_key(ec.SECP256R1()) for _ in range(4))}
_HEADER = "x-twilio-email-event-webhook-"


def sign(body: bytes, secret: str, at: datetime) -> Delivery:
    key = _KEYS.get(secret) or list(_KEYS.values())[-1]
    signature = base64.b64encode(key.sign(seconds(at).encode() + body, ec.ECDSA(SHA256()))).decode()
    return Delivery(body, {f"{_HEADER}signature": signature, f"{_HEADER}timestamp": seconds(at)})


SCHEME = Scheme(tuple(_KEYS)[:3], sign, headers=(f"{_HEADER}signature", f"{_HEADER}timestamp"))
