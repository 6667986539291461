# SPDX-License-Identifier: Apache-2.0
"""How Scaleway's SNS signs, with certificates that go back to an authority of the tests."""

from __future__ import annotations

import tempfile
from datetime import datetime
from pathlib import Path

from scheme import Scheme
from sns_signer import CertificateStore, FakeScaleway

from webhooks.provider import Delivery

_TOPICS = tuple(f"arn:scw:sns:fr-par:project-0f0e0d0c-7777-4888-8999-aaaabbbbcccc:tem-{n}" for n in range(3))
_SNS = {topic: FakeScaleway(topic) for topic in _TOPICS}
_PINNED = tempfile.TemporaryDirectory()
_SNS[_TOPICS[0]].pin(Path(_PINNED.name))


def sign(body: bytes, secret: str, at: datetime) -> Delivery:
    scaleway = _SNS.get(secret) or _SNS[_TOPICS[0]]
    return scaleway.delivery(scaleway.message(body.decode(), now=at))


SCHEME = Scheme(
    _TOPICS,
    sign,
    fields=(("Signature",), ("SignatureVersion",), ("SigningCertURL",), ("Timestamp",), ("TopicArn",)),
    content=("Message",),
    setting="topics",
    more={"certificates": _PINNED.name},
    fetch=CertificateStore({sns.certificate_url: sns.pem for sns in _SNS.values()}),
)
