# SPDX-License-Identifier: Apache-2.0
"""How Mandrill signs."""

from __future__ import annotations

import base64
import hashlib
import hmac
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import parse_qsl

from hypothesis import assume
from scheme import HMAC_KEYS, Scheme

from webhooks.provider import Delivery

URL = "https://hooks.example.com/webhooks/main?tenant=a%2Fb"
FORM = {"content-type": "application/x-www-form-urlencoded"}


def fields(body: bytes) -> list[tuple[str, str]]:
    return parse_qsl(body.decode("utf-8", "surrogateescape"), keep_blank_values=True, errors="surrogateescape")


def signature(secret: str, url: str, body: bytes) -> str:
    signed = url + "".join(name + value for name, value in sorted(fields(body)))
    digest = hmac.digest(secret.encode(), signed.encode("utf-8", "surrogateescape"), hashlib.sha1)
    return base64.b64encode(digest).decode()


def sign(body: bytes, secret: str, _at: datetime) -> Delivery:
    return Delivery(body, {**FORM, "x-mandrill-signature": signature(secret, URL, body)})


@dataclass(frozen=True)
class FormScheme(Scheme):
    """What a form says is signed, not how it is written: %2c says the same as %2C, and a space the same as +."""

    def with_body(self, delivery: Delivery, body: bytes) -> Delivery:
        assume(fields(body) != fields(delivery.body))
        return super().with_body(delivery, body)


SCHEME = FormScheme(HMAC_KEYS, sign, headers=("x-mandrill-signature",), more={"signed_url": URL})
