# SPDX-License-Identifier: Apache-2.0
"""How Postal signs: RSA over the raw body. The older signature, by SHA-1, is for the provider's own tests."""

from __future__ import annotations

import base64
from datetime import datetime

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from scheme import Scheme

from webhooks.provider import Delivery

KEYS = tuple(rsa.generate_private_key(public_exponent=65537, key_size=2048) for _ in range(3))
_DER = [
    base64.b64encode(
        key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    ).decode()
    for key in KEYS
]
PEM = KEYS[0].public_key().public_bytes(
    serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
).decode()  # fmt: skip
SECRETS = (PEM, _DER[1], f"v=DKIM1; t=s; h=sha256; p={_DER[2]};")
"""The public keys in each form that an installation tells."""


def signature(body: bytes, key: rsa.RSAPrivateKey, algorithm: hashes.HashAlgorithm) -> str:
    return base64.b64encode(key.sign(body, padding.PKCS1v15(), algorithm)).decode()


def sign(body: bytes, secret: str, at: datetime) -> Delivery:
    key = dict(zip(SECRETS, KEYS, strict=True)).get(secret, KEYS[0])
    return Delivery(body, {"x-postal-signature-256": signature(body, key, hashes.SHA256())})


SCHEME = Scheme(SECRETS, sign, headers=("x-postal-signature-256",))
