# SPDX-License-Identifier: Apache-2.0
"""How a provider's deliveries are signed in tests. Each provider that signs has its own in `schemes/`."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from msgspec.structs import replace
from sns_signer import CertificateStore
from spoiling import DELETE, Place, changed, value_at

from webhooks.provider import Delivery, Feed


@dataclass(frozen=True)
class Scheme:
    """How one provider's deliveries are signed in tests, and where the signature and what it covers are found."""

    secrets: tuple[str, str, str]
    """Three settings that verify. The suite configures one or two of them."""
    sign: Callable[[bytes, str, datetime], Delivery]
    """Return a body as it is delivered, signed for one of the secrets (or for any other text) at a time."""
    headers: Sequence[str] = ()
    """Headers that hold the signature or what it needs; without any of them nothing may be accepted."""
    fields: Sequence[Place] = ()
    """The same inside a JSON body."""
    content: Place | None = None
    """Where the body that was signed lies inside the one that is delivered; None: it is the whole."""
    setting: str = "secrets"
    """The field of Feed that the secrets are configured in."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of Feed that are needed to verify."""
    fetch: CertificateStore = CertificateStore({})  # noqa: RUF009 - nothing is in it

    def feed(self, provider: str, *which: int, tolerance: timedelta | None = None) -> Feed:
        """Return a feed that has some of the three secrets."""
        secrets = {self.setting: tuple(self.secrets[i] for i in which)}
        return Feed("main", provider, tolerance=tolerance, **secrets, **self.more)

    def with_body(self, delivery: Delivery, body: bytes) -> Delivery:
        """Return a delivery with another body under the same signature."""
        if self.content is None:
            return replace(delivery, body=body)
        whole = changed(json.loads(delivery.body), self.content, body.decode("latin-1"))
        return replace(delivery, body=json.dumps(whole).encode())

    def spoilt(self, delivery: Delivery, spoil: Callable[[str], Any]) -> Iterator[Delivery]:
        """Yield the delivery with each part of its signature replaced, one at a time; DELETE takes it away."""
        for name in self.headers:
            rest = {header: value for header, value in delivery.headers.items() if header != name}
            if (new := spoil(delivery.headers[name])) is not DELETE:
                rest[name] = new
            yield replace(delivery, headers=rest)
        for path in self.fields:
            whole = json.loads(delivery.body)
            body = json.dumps(changed(whole, path, spoil(value_at(whole, path))))
            yield replace(delivery, body=body.encode())


def seconds(at: datetime) -> str:
    return str(int(at.timestamp()))


HMAC_KEYS = ("first-throw-away", "second-throw-away", "third-throw-away")
SVIX_KEYS = tuple("whsec_" + base64.b64encode(key.encode()).decode() for key in HMAC_KEYS)
SVIX_HEADERS = ("svix-id", "svix-timestamp", "svix-signature")


def standard_webhook(body: bytes, secret: str, at: datetime) -> Delivery:
    key = base64.b64decode(secret.removeprefix("whsec_"))
    digest = hmac.digest(key, b"msg_1.%b.%b" % (seconds(at).encode(), body), hashlib.sha256)
    signature = "v1," + base64.b64encode(digest).decode()
    return Delivery(body, {"svix-id": "msg_1", "svix-timestamp": seconds(at), "svix-signature": signature})
