# SPDX-License-Identifier: Apache-2.0
"""Amazon SES's shape: SendEmail of API v2, and events through SNS, signed by a certificate of its own.

A receiver takes the certificate from its feed's folder of pinned ones, into which `feed` puts it: SNS serves it from a
host of Amazon's, which nobody can stand in for.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from reconciler.breakable.fate import Said
from reconciler.breakable.shape import (
    BOUNCE,
    DELAY,
    SENDER,
    SUBJECT,
    TEXT,
    Answer,
    Asked,
    Message,
    Notice,
    Request,
    Shape,
)
from webhooks.event import derived_id
from webhooks.payload import first, load_object, text_at
from webhooks.provider import BadPayload, Delivery
from webhooks.signature import CREDENTIAL_SCHEMES, sample_delivery
from webhooks.sns import NOTIFICATION, Envelope, string_to_sign

TOPIC: Final = "arn:aws:sns:eu-west-1:000000000000:ses-events"
_HOST: Final = "https://sns.eu-west-1.amazonaws.com"
_FIRST_FAULT: Final = 500
"""SNS takes any smaller status for an answer: a 4xx ends a delivery for ever."""

_DETAIL: Final[Mapping[Said, str]] = MappingProxyType(
    {
        "accepted": "send",
        "deferred": "deliveryDelay",
        "delivered": "delivery",
        "bounced": "bounce",
        "complained": "complaint",
    }
)


class Ses(Shape):
    """SES and SNS on loopback. SES can't be asked about a send, so there is no look-up."""

    path = "/v2/email/outbound-emails"
    names = MappingProxyType(
        {
            "accepted": "Send",
            "deferred": "DeliveryDelay",
            "delivered": "Delivery",
            "bounced": "Bounce",
            "complained": "Complaint",
        }
    )
    refused = Answer(400, {"message": "Address blacklisted."}, {"x-amzn-ErrorType": "MessageRejected"})
    busy = Answer(429, {"message": "Maximum sending rate exceeded."}, {"x-amzn-ErrorType": "TooManyRequestsException"})

    def message_id(self, digest: str) -> str:
        """Return an id as SES makes them."""
        return f"0100{digest[:36]}-000000"

    def message(self, recipient: str) -> dict[str, Any]:
        """Return the body of SendEmail with simple content."""
        simple = {"Subject": {"Data": SUBJECT}, "Body": {"Text": {"Data": TEXT}}}
        return {
            "FromEmailAddress": SENDER,
            "Destination": {"ToAddresses": [recipient]},
            "Content": {"Simple": simple},
            "ConfigurationSetName": "loopback",
        }

    def asked(self, request: Request) -> Asked:
        """Return what SendEmail asks for; tags go before headers."""
        match load_object(request.body):
            case {"Destination": {"ToAddresses": [str(recipient), *_]}, **body}:
                return Asked(_key(body) or "", recipient)
        raise BadPayload("Missing required header 'To'.")

    def took(self, message: Message) -> Answer:
        """Return the id."""
        return Answer(200, {"MessageId": message.id})

    def delivery(self, notices: Sequence[Notice], secret: str | None, now: datetime) -> Delivery:  # noqa: ARG002
        """Return the envelope of one event. A repeated one is the same, byte for byte: SNS signs when it publishes."""
        (notice,) = notices
        envelope = _signed(Envelope(**_unsigned(notice)))
        fields = {name: value for name, value in msgspec.to_builtins(envelope).items() if value is not None}
        headers = {"x-amz-sns-message-type": envelope.type, "x-amz-sns-message-id": envelope.message_id}
        needs = (
            "SNS signs with the certificate of esp.feed(folder); a secret is a credential such as basic:user:password"
        )
        signed = headers if secret is None or secret.startswith(CREDENTIAL_SCHEMES) else None
        return sample_delivery(msgspec.json.encode(fields), (secret or "",), signed, needs)

    def ends(self, status: int) -> bool:
        """Say whether it was an answer at all: SNS retries after faults only."""
        return 0 < status < _FIRST_FAULT

    def feed(self, certificates: Path | None) -> dict[str, Any]:
        """Return the topic and the folder, into which the certificate is written."""
        if certificates is None:
            raise ValueError("say in which folder the feed finds SNS's certificate: esp.feed(folder)")
        name, pem, _ = _certificate()
        (certificates / name).write_bytes(pem)
        return {"topics": [TOPIC], "certificates": str(certificates)}


def _key(body: Mapping[str, Any]) -> str | None:
    tags = body.get("EmailTags") or ()
    headers = ((body.get("Content") or {}).get("Simple") or {}).get("Headers") or ()
    tagged = (text_at(tag, "Value") for tag in tags if text_at(tag, "Name") == "send_key")
    named = (text_at(header, "Value") for header in headers if text_at(header, "Name") == "X-Send-Key")
    return first(tagged) or first(named)


def _unsigned(notice: Notice) -> dict[str, str]:
    name, _, _ = _certificate()
    return {
        "type": NOTIFICATION,
        "message": msgspec.json.encode(_record(notice)).decode(),
        "message_id": notice.id,
        "timestamp": _stamp(notice.at),
        "topic_arn": TOPIC,
        "signature_version": "2",
        "signature": "",
        "signing_cert_url": f"{_HOST}/{name}",
        "subject": "Amazon SES Email Event Notification",
    }


def _signed(envelope: Envelope) -> Envelope:
    _, _, key = _certificate()
    signature = key.sign(string_to_sign(envelope), PKCS1v15(), SHA256())
    return msgspec.structs.replace(envelope, signature=b64encode(signature).decode())


def _record(notice: Notice) -> dict[str, Any]:
    message = notice.message
    mail = {
        "timestamp": _stamp(message.at),
        "source": SENDER,
        "messageId": message.id,
        "destination": [message.recipient],
        "headersTruncated": False,
        "headers": [{"name": "X-Send-Key", "value": message.key}] if message.key else [],
        "commonHeaders": {"from": [SENDER], "to": [message.recipient], "subject": SUBJECT},
        "tags": {"ses:configuration-set": ["loopback"], **({"send_key": [message.key]} if message.key else {})},
    }
    return {"eventType": Ses.names[notice.kind], "mail": mail, _DETAIL[notice.kind]: _detail(notice)}


def _detail(notice: Notice) -> dict[str, Any]:
    address, at = {"emailAddress": notice.message.recipient}, {"timestamp": _stamp(notice.at)}
    match notice.kind:
        case "delivered":
            return {**at, "recipients": [notice.message.recipient], "smtpResponse": "250 OK"}
        case "bounced":
            bounced = [{**address, "status": "5.1.1", "diagnosticCode": f"smtp; {BOUNCE}"}]
            kind = {"bounceType": "Permanent", "bounceSubType": "General", "feedbackId": notice.id}
            return {**at, **kind, "bouncedRecipients": bounced}
        case "deferred":
            delayed = [{**address, "status": "4.7.1", "diagnosticCode": f"smtp; {DELAY}"}]
            return {**at, "delayType": "TransientCommunicationFailure", "delayedRecipients": delayed}
        case "complained":
            return {**at, "complainedRecipients": [address], "feedbackId": notice.id}
    return {}


def _stamp(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


@cache
def _certificate() -> tuple[str, bytes, rsa.RSAPrivateKey]:
    """Return file name, PEM and key of this process's signing certificate; a key takes a tenth of a second to make."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "sns.amazonaws.com (a loopback provider)")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(2025, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(2125, 1, 1, tzinfo=UTC))
        .sign(key, SHA256())
    )
    pem = certificate.public_bytes(Encoding.PEM)
    return f"SimpleNotificationService-{derived_id(pem.decode())}.pem", pem, key
