# SPDX-License-Identifier: Apache-2.0
"""What SNS does when it publishes to an HTTPS subscriber, with a key of its own; retries are left to the test.

`FakeSNS` signs as Amazon does and serves its certificate, `FakeScaleway` has its certificate from an authority,
`CertificateStore` serves certificates as the `fetch` of a receiver.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.x509.oid import NameOID

from webhooks.provider import Delivery, FetchError

TOPIC = "arn:aws:sns:eu-west-1:000000000000:ses-events"
SIGNED = {
    "Notification": ("Message", "MessageId", "Subject", "Timestamp", "TopicArn", "Type"),
    "SubscriptionConfirmation": ("Message", "MessageId", "SubscribeURL", "Timestamp", "Token", "TopicArn", "Type"),
    "UnsubscribeConfirmation": ("Message", "MessageId", "SubscribeURL", "Timestamp", "Token", "TopicArn", "Type"),
}


class CertificateStore:
    """The `fetch` of a receiver, answered from memory: certificates by URL, every call is noted."""

    def __init__(self, pems: Mapping[str, str]) -> None:
        self.pems = dict(pems)
        self.calls: list[str] = []

    async def __call__(self, url: str, *, max_bytes: int = 65_536) -> bytes:
        self.calls.append(url)
        if url not in self.pems:
            raise FetchError("no such certificate")
        return self.pems[url].encode()[:max_bytes]


def case_store(case: Mapping[str, Any]) -> CertificateStore:
    """Return the `fetch` that a case file of tests/cases asks for (`config.cert_store`)."""
    return CertificateStore(case.get("config", {}).get("cert_store", {}))


class FakeSNS:
    """One topic. Each instance has a certificate of its own, at a URL of its own, on the topic's SNS host."""

    def __init__(
        self,
        topic: str = TOPIC,
        begins: datetime = datetime(2025, 1, 1, tzinfo=UTC),
        ends: datetime = datetime(2035, 1, 1, tzinfo=UTC),
    ) -> None:
        _, partition, _, region, *_ = topic.split(":")
        self.topic = topic
        self.base = f"https://sns.{region}.amazonaws.com" + (".cn" if partition == "aws-cn" else "")
        self.certificate_url = f"{self.base}/SimpleNotificationService-{uuid.uuid4().hex}.pem"
        self.pem = _certificate(begins, ends)
        self.store = CertificateStore({self.certificate_url: self.pem})

    def message(  # a keyword for each thing that SNS lets a publisher or a topic choose
        self,
        body: str | Mapping[str, Any],
        *,
        now: datetime,
        type: str = "Notification",  # noqa: A002 - SNS calls it so
        version: str = "1",
        subject: str | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """Return a signed envelope; `fields` replace or add fields before it is signed, None takes one away."""
        message: dict[str, Any] = {
            "Type": type,
            "MessageId": str(uuid.uuid4()),
            "TopicArn": self.topic,
            "Subject": subject,
            "Message": body if isinstance(body, str) else json.dumps(body),
            "Timestamp": now.strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z",
            "SignatureVersion": version,
            "SigningCertURL": self.certificate_url,
        }
        if type == "Notification":
            message["UnsubscribeURL"] = f"{self.base}/?Action=Unsubscribe&SubscriptionArn={self.topic}:1"
        else:
            token = uuid.uuid4().hex
            message["Token"] = token
            message["SubscribeURL"] = f"{self.base}/?Action=ConfirmSubscription&TopicArn={self.topic}&Token={token}"
        message |= fields
        return self.sign({name: value for name, value in message.items() if value is not None})

    def sign(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return an envelope with our certificate's URL, unless it has another on purpose, and our signature."""
        names = SIGNED.get(message["Type"], SIGNED["Notification"])
        text = "".join(f"{name}\n{message[name]}\n" for name in names if name in message)
        algorithm = hashes.SHA256() if message.get("SignatureVersion") == "2" else hashes.SHA1()  # noqa: S303
        signature = _key().sign(text.encode("utf-8", "surrogatepass"), padding.PKCS1v15(), algorithm)
        return message | {"Signature": base64.b64encode(signature).decode()}

    def resigned(self, envelope: Mapping[str, Any]) -> dict[str, Any]:
        """Return somebody else's envelope for this topic as if this SNS had signed it."""
        return self.sign(dict(envelope) | {"TopicArn": self.topic, "SigningCertURL": self.certificate_url})

    def delivery(self, message: Mapping[str, Any], **headers: str) -> Delivery:
        """Return an envelope as the request that SNS makes; an underscore in a header's name means a hyphen."""
        sent = {
            "content-type": "text/plain; charset=UTF-8",
            "x-amz-sns-message-type": str(message["Type"]),
            "x-amz-sns-message-id": str(message["MessageId"]),
            "x-amz-sns-topic-arn": self.topic,
            "x-amz-sns-subscription-arn": f"{self.topic}:1",
            "user-agent": "Amazon Simple Notification Service Agent",
        }
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        return Delivery(json.dumps(message).encode(), sent)

    def raw_delivery(self, record: Mapping[str, Any]) -> Delivery:
        """Return the request of a subscription with raw message delivery: no envelope, no signature."""
        headers = {"content-type": "text/plain; charset=UTF-8", "x-amz-sns-rawdelivery": "true"}
        return Delivery(json.dumps(record).encode(), headers | {"x-amz-sns-message-type": "Notification"})

    def pin(self, folder: Path) -> None:
        """Put the certificate where a feed with pinned certificates looks for it."""
        (folder / self.certificate_url.rpartition("/")[2]).write_text(self.pem)


SCALEWAY_TOPIC = "arn:scw:sns:fr-par:project-0f0e0d0c-7777-4888-8999-aaaabbbbcccc:tem-events"
BEGINS, ENDS = datetime(2025, 1, 1, tzinfo=UTC), datetime(2035, 1, 1, tzinfo=UTC)


class FakeScaleway(FakeSNS):
    """A topic of Scaleway's: its certificate, and the chain that leads from it to an authority, lie in a folder."""

    def __init__(self, topic: str = SCALEWAY_TOPIC) -> None:
        region = topic.split(":")[3]
        self.topic = topic
        self.base = f"https://sns.mnq.{region}.scaleway.com"
        self.folder = f"https://messaging.s3.fr-par.scw.cloud/{region}/sns/"
        self.certificate_url = f"{self.folder}sns_certificate_{uuid.uuid4().int}.crt"
        self.chain_url = f"{self.folder}sns-trust-chain.pem"
        self.root = authority("Root for tests")
        self.between = authority("Authority for tests", self.root)
        self.pem = self.between.issue("sns.mnq.srr.scw.cloud (for tests)", _key().public_key(), ca=False)
        self.chain = self.root.pem + "\n" + self.between.pem
        self.store = CertificateStore({self.certificate_url: self.pem, self.chain_url: self.chain})

    def pin(self, folder: Path) -> None:
        """Put the chain where a feed with pinned certificates looks for it."""
        (folder / "sns-trust-chain.pem").write_text(self.chain)


@dataclass(frozen=True)
class Authority:
    """Who issues certificates; its own is `pem`."""

    name: str
    key: rsa.RSAPrivateKey
    pem: str = ""

    def issue(
        self, name: str, key: rsa.RSAPublicKey, *, ca: bool, begins: datetime = BEGINS, ends: datetime = ENDS
    ) -> str:
        """Return a certificate of somebody's key, as PEM."""
        usage = {"key_cert_sign": ca, "crl_sign": ca, "digital_signature": not ca}
        others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
        unused = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
        built = (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(_name(self.name))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(begins)
            .not_valid_after(ends)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.KeyUsage(**usage, **unused), critical=True)
            .sign(self.key, hashes.SHA256())
        )
        return built.public_bytes(serialization.Encoding.PEM).decode()


@cache
def authority(name: str, above: Authority | None = None, begins: datetime = BEGINS, ends: datetime = ENDS) -> Authority:
    """Return an authority with a key of its own, whose certificate the one above issued (or it did itself)."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    issuer = above or Authority(name, key)
    return Authority(name, key, issuer.issue(name, key.public_key(), ca=True, begins=begins, ends=ends))


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


@cache
def _key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def _certificate(begins: datetime, ends: datetime) -> str:
    name = _name("sns.amazonaws.com (for tests)")
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(_key().public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
        .sign(_key(), hashes.SHA256())
    )
    return built.public_bytes(serialization.Encoding.PEM).decode()
