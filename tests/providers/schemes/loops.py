# SPDX-License-Identifier: Apache-2.0
"""How Loops signs: as Standard Webhooks say, under their own header names."""

from __future__ import annotations

from datetime import datetime

from scheme import SVIX_KEYS, Scheme, standard_webhook

from webhooks.provider import Delivery


def sign(body: bytes, secret: str, at: datetime) -> Delivery:
    signed = standard_webhook(body, secret, at)
    return Delivery(body, {name.replace("svix", "webhook"): value for name, value in signed.headers.items()})


SCHEME = Scheme(SVIX_KEYS, sign, headers=("webhook-id", "webhook-timestamp", "webhook-signature"))
