# SPDX-License-Identifier: Apache-2.0
"""How SNS signs."""

from __future__ import annotations

from datetime import datetime

from scheme import Scheme
from sns_signer import CertificateStore, FakeSNS

from webhooks.provider import Delivery

_TOPICS = tuple(f"arn:aws:sns:eu-west-1:00000000000{n}:ses-events" for n in range(3))
_SNS = {topic: FakeSNS(topic) for topic in _TOPICS}


def sign(body: bytes, secret: str, at: datetime) -> Delivery:
    aws = _SNS.get(secret) or _SNS[_TOPICS[0]]
    return aws.delivery(aws.message(body.decode(), now=at))


SCHEME = Scheme(
    _TOPICS,
    sign,
    fields=(("Signature",), ("SignatureVersion",), ("SigningCertURL",), ("Timestamp",), ("TopicArn",)),
    content=("Message",),
    setting="topics",
    fetch=CertificateStore({sns.certificate_url: sns.pem for sns in _SNS.values()}),
)
