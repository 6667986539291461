# SPDX-License-Identifier: Apache-2.0
"""SNS over HTTPS: is this envelope signed for one of our topics, and may its subscription be confirmed?

Amazon's own and services that are compatible with it. Sources: Amazon SNS developer guide, "Verifying the signatures of
Amazon SNS messages" and "HTTP/HTTPS headers".
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.hashes import SHA1, SHA256, HashAlgorithm

from webhooks.payload import iso_time, load_shared
from webhooks.provider import BadPayload, Delivery, Feed, Fetch, FetchError, Later, Parsed, Refused, Verdict, Verified
from webhooks.signature import STALE, carries_credential, decode_base64, is_fresh

NOTIFICATION: Final = "Notification"
SUBSCRIPTION: Final = "SubscriptionConfirmation"
UNSUBSCRIPTION: Final = "UnsubscribeConfirmation"
_TYPES: Final = (NOTIFICATION, SUBSCRIPTION, UNSUBSCRIPTION)

_TOPIC: Final = re.compile(r"arn:(aws|aws-cn|aws-us-gov):sns:([a-z0-9-]+):[0-9]{12}:[A-Za-z0-9_-]+")
_DOMAINS: Final = {"aws": "amazonaws.com", "aws-us-gov": "amazonaws.com", "aws-cn": "amazonaws.com.cn"}
_QUERY: Final = re.compile(r'[!"$-~]+')  # printable ASCII without space and #
# A topic signs with SHA-1 unless it is told otherwise (its SignatureVersion attribute).
_HASHES: Final[dict[str, HashAlgorithm]] = {"1": SHA1(), "2": SHA256()}  # noqa: S303

_FETCHED_AT_MOST: Final = 64

RAW_DELIVERY: Final = Refused(
    "raw_delivery",
    "no SNS envelope, so no signature: raw message delivery is on for this subscription; turn it off,"
    " or configure a credential that the request carries (basic:user:password) in secrets",
)
_NO_TOPIC: Final = Refused("topic", "the feed has no topics: set feeds.<name>.topics to the ARNs that may deliver")
_OTHER_TOPIC: Final = Refused("topic", "the message's topic is not in feeds.<name>.topics")
_TYPE: Final = Refused("message_type", "unknown SNS message type, or another one than x-amz-sns-message-type says")
_MISSING: Final = Refused("missing", "the SNS envelope lacks a field, or one of them is no single line of text")
_VERSION: Final = Refused("signature_version", "SNS signature version is neither 1 nor 2")
_CERTIFICATE_URL: Final = Refused("certificate_url", "SigningCertURL is not on the SNS host of the topic's region")
_ISSUER: Final = Refused(
    "certificate_issuer",
    "the signing certificate does not go back to the provider's authority; if that was renewed, put its new chain into"
    " the folder of feeds.<name>.certificates",
)
_SUBSCRIBE_URL: Final = Refused("subscribe_url", "SubscribeURL does not confirm this topic on its own SNS host")
_DATES: Final = Refused("certificate_dates", "the signing certificate is not valid now: clock skew suspected")
_SIGNATURE: Final = Refused("signature", "the SNS signature does not match its certificate")


class Envelope(msgspec.Struct, frozen=True, rename="pascal"):
    """What SNS wraps around a message, as it is signed."""

    type: str
    message: str
    message_id: str
    timestamp: str
    topic_arn: str
    signature_version: str
    signature: str
    signing_cert_url: str = msgspec.field(name="SigningCertURL")
    subject: str | None = None
    token: str | None = None
    subscribe_url: str | None = msgspec.field(default=None, name="SubscribeURL")


_NAMES: Final = tuple(field.encode_name for field in msgspec.structs.fields(Envelope))


class Certificate(NamedTuple):
    """What is needed of a signing certificate."""

    key: RSAPublicKey
    begins: datetime
    ends: datetime
    whole: x509.Certificate


@dataclass(frozen=True, slots=True)
class Service:
    """One operator of SNS: where it serves what of a topic, and what proves its signing certificates."""

    host: Callable[[str], str | None]
    """Returns the host that confirms subscriptions, by the topic's ARN; None where that is no ARN of this service."""
    folder: Callable[[str], str | None]
    """Returns the URL under which signing certificates lie, with a slash at its end, by the topic's ARN."""
    certificate_name: re.Pattern[str]
    """What the rest of a signing certificate's URL looks like."""
    authority: bytes | None = None
    """PEM of the authority that signing certificates must go back to; None: that they lie in `folder` proves them."""
    chain: str = ""
    """Name of the file, in `folder`, that holds the authorities between. One of this name among the feed's pinned
    certificates is trusted instead of both."""


def topic_host(arn: str) -> str | None:
    """Return the SNS host of a topic's partition and region, or None where the text is no topic's ARN."""
    found = _TOPIC.fullmatch(arn)
    return f"sns.{found[2]}.{_DOMAINS[found[1]]}" if found else None


def _topic_folder(arn: str) -> str | None:
    host = topic_host(arn)
    return f"https://{host}/" if host else None


AWS: Final = Service(topic_host, _topic_folder, re.compile(r"SimpleNotificationService-[A-Za-z0-9]+\.pem"))


async def verify(delivery: Delivery, feed: Feed, now: datetime, fetch: Fetch, service: Service = AWS) -> Verdict:
    """Say whether a delivery comes from one of the feed's topics. Never raises for hostile input.

    An envelope is judged by its signature; where no topics are configured, and for raw delivery, only a credential
    carried by the request counts. `Later` means that the signing certificate, or its chain, could not be had.
    """
    fields = _fields(delivery.body)
    if fields is None or delivery.headers.get("x-amz-sns-rawdelivery", "").lower() == "true":
        return _by_credential(delivery, feed, fields, RAW_DELIVERY)
    if not feed.topics:
        return _by_credential(delivery, feed, fields, _NO_TOPIC)
    envelope = _envelope(fields)
    if envelope is None:
        return _MISSING
    if objection := _objection(envelope, delivery, feed, service):
        return objection
    pem = await _obtain(envelope.signing_cert_url, feed, fetch)
    certificate = read_certificate(pem) if pem else None
    if certificate is None:
        return Later("certificate")
    unproved = await _unproved(certificate.whole, envelope, feed, now, fetch, service)
    return unproved or _judge(envelope, certificate, now, feed.tolerance)


def control(fields: dict[str, Any], service: Service = AWS) -> Parsed | None:
    """Return what an outermost envelope says about the subscription itself, or None where it carries a message.

    A confirmation has its URL only where that is on the topic's own SNS host. Nothing is ever to be confirmed after an
    UnsubscribeConfirmation: somebody removed the feed, which counts as an anomaly.
    """
    kind = fields.get("Type")
    if kind == SUBSCRIPTION:
        envelope = _envelope(fields)
        url = confirmation_url(envelope, service) if envelope else None
        return Parsed(control="subscription_confirmation", confirm_url=url)
    if kind == UNSUBSCRIPTION:
        return Parsed(control="unsubscribe_confirmation", anomalies={"unsubscribed": 1})
    return None


def string_to_sign(envelope: Envelope) -> bytes:
    """Return what SNS signs: name and value of each signed field on lines of their own, in byte order of the names."""
    note = envelope.type == NOTIFICATION
    lines = [
        ("Message", envelope.message),
        ("MessageId", envelope.message_id),
        ("Subject", envelope.subject if note else None),
        ("SubscribeURL", None if note else envelope.subscribe_url),
        ("Timestamp", envelope.timestamp),
        ("Token", None if note else envelope.token),
        ("TopicArn", envelope.topic_arn),
        ("Type", envelope.type),
    ]
    text = "".join(f"{name}\n{value}\n" for name, value in lines if value is not None)
    return text.encode("utf-8", "surrogatepass")


def certificate_name(url: str, topic_arn: str, service: Service = AWS) -> str | None:
    """Return the file name of a signing certificate's URL, or None where the URL must not be fetched.

    Only a name of the service's own kind in its own folder passes, for AWS `https://<SNS host of the topic>/
    SimpleNotificationService-<letters, digits>.pem`, so that neither port, user information, query nor another host can
    hide in it.
    """
    name = _after(url, service.folder(topic_arn))
    return name if name and service.certificate_name.fullmatch(name) else None


def confirmation_url(envelope: Envelope, service: Service = AWS) -> str | None:
    """Return the URL that confirms a subscription, or None unless it does so for this topic on its own SNS host."""
    url, host = envelope.subscribe_url or "", service.host(envelope.topic_arn)
    query = _after(url, f"https://{host}/?" if host else None)
    if not query or not _QUERY.fullmatch(query):
        return None
    asked = [pair for pair in parse_qsl(query, keep_blank_values=True) if pair[0] in ("Action", "TopicArn")]
    return url if sorted(asked) == [("Action", "ConfirmSubscription"), ("TopicArn", envelope.topic_arn)] else None


def _after(url: str, begin: str | None) -> str | None:
    return url.removeprefix(begin) if begin and url.startswith(begin) else None


def _fields(body: bytes) -> dict[str, Any] | None:
    try:
        fields = load_shared(body)
    except BadPayload:
        return None
    return fields if isinstance(fields, dict) and "Type" in fields else None


def _envelope(fields: dict[str, Any]) -> Envelope | None:
    try:
        # Only the names that are known: msgspec can't convert what has half an emoji for a name.
        envelope = msgspec.convert({name: fields[name] for name in _NAMES if name in fields}, Envelope)
    except msgspec.ValidationError:
        return None
    complete = envelope.type == NOTIFICATION or (envelope.token and envelope.subscribe_url)
    # The string to sign separates by line feeds only: with one inside a field its text could be cut elsewhere.
    lines = (envelope.message_id, envelope.subject, envelope.timestamp, envelope.token, envelope.subscribe_url)
    return envelope if complete and not any("\n" in line for line in lines if line) else None


def _by_credential(delivery: Delivery, feed: Feed, fields: dict[str, Any] | None, otherwise: Refused) -> Verdict:
    # A carried credential proves the caller, not the topic: it must never make us confirm somebody's subscription.
    confirms = fields is not None and fields.get("Type") == SUBSCRIPTION
    return Verified() if not confirms and carries_credential(delivery, feed.secrets) else otherwise


def _objection(envelope: Envelope, delivery: Delivery, feed: Feed, service: Service) -> Refused | None:
    announced = delivery.headers.get("x-amz-sns-message-type", envelope.type)
    checks = (
        (_TYPE, envelope.type in _TYPES and announced == envelope.type),
        (_OTHER_TOPIC, envelope.topic_arn in feed.topics),
        (_VERSION, envelope.signature_version in _HASHES),
        (_CERTIFICATE_URL, certificate_name(envelope.signing_cert_url, envelope.topic_arn, service) is not None),
        (_SUBSCRIBE_URL, envelope.type != SUBSCRIPTION or confirmation_url(envelope, service) is not None),
    )
    return next((refused for refused, passed in checks if not passed), None)


def _judge(envelope: Envelope, certificate: Certificate, now: datetime, tolerance: timedelta | None) -> Verdict:
    if not certificate.begins <= now <= certificate.ends:
        return _DATES
    signature = decode_base64(envelope.signature)
    try:
        certificate.key.verify(
            signature or b"", string_to_sign(envelope), PKCS1v15(), _HASHES[envelope.signature_version]
        )
    except InvalidSignature:
        return _SIGNATURE
    signed_at = iso_time(envelope.timestamp)
    return Verified() if tolerance is None or (signed_at and is_fresh(signed_at, now, tolerance)) else STALE


_fetched: dict[str, bytes] = {}


async def _obtain(url: str, feed: Feed, fetch: Fetch, *, anew: bool = False) -> bytes | None:
    """Return what lies at a URL that was checked: pinned, remembered (unless it is wanted `anew`) or fetched."""
    known = _pinned(feed, url.rpartition("/")[2]) or (None if anew else _fetched.get(url))
    if known:
        return known
    try:
        pem = await fetch(url)
    except FetchError:
        return None
    if read_certificate(pem):
        _remember(url, pem)
    return pem


async def _unproved(
    certificate: x509.Certificate, envelope: Envelope, feed: Feed, now: datetime, fetch: Fetch, service: Service
) -> Verdict | None:
    """Return why a signing certificate is not proved to be the service's, or None where it is."""
    if service.authority is None:
        return None
    if pinned := _pinned(feed, service.chain):
        return None if _goes_back(certificate, read_certificates(pinned), (), now) else _ISSUER
    trusted = read_certificates(service.authority)
    for anew in (False, True):  # the authorities between are renewed sooner than the one that is trusted
        between = await _obtain(f"{service.folder(envelope.topic_arn)}{service.chain}", feed, fetch, anew=anew)
        if between is None:
            return Later("certificate")
        if _goes_back(certificate, trusted, read_certificates(between), now):
            return None
    return _ISSUER


def _goes_back(
    certificate: x509.Certificate,
    trusted: Sequence[x509.Certificate],
    between: Sequence[x509.Certificate],
    now: datetime,
) -> bool:
    """Say whether authorities that are valid now lead from one of the trusted to a certificate."""
    proved = list(trusted)
    for authority in proved:  # it grows on the way
        if _issued(certificate, authority, now):
            return True
        proved += [other for other in between if other not in proved and _issued(other, authority, now)]
    return False


def _issued(certificate: x509.Certificate, authority: x509.Certificate, now: datetime) -> bool:
    if not authority.not_valid_before_utc <= now <= authority.not_valid_after_utc or not _may_issue(authority):
        return False
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def _may_issue(authority: x509.Certificate) -> bool:
    try:
        extensions = authority.extensions
        return (
            extensions.get_extension_for_class(x509.BasicConstraints).value.ca
            and extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
        )
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension):
        return False


def _pinned(feed: Feed, name: str) -> bytes | None:
    if not feed.certificates:
        return None
    path = f"{feed.certificates}/{name}"
    try:
        found = os.stat(path)  # noqa: PTH116 - at each delivery, and a Path takes as long as reading the file
        return _read(path, (found.st_ino, found.st_size, found.st_mtime_ns))
    except OSError:
        return None


@lru_cache(maxsize=_FETCHED_AT_MOST)
def _read(path: str, version: tuple[int, int, int]) -> bytes:  # noqa: ARG001 - a file that was replaced is read anew
    return Path(path).read_bytes()


def _remember(url: str, pem: bytes) -> None:
    while len(_fetched) >= _FETCHED_AT_MOST:
        del _fetched[next(iter(_fetched))]
    _fetched[url] = pem


@lru_cache(maxsize=_FETCHED_AT_MOST)
def read_certificate(pem: bytes) -> Certificate | None:
    """Return what is needed of a PEM certificate, or None where it is none or holds no RSA key."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        key = certificate.public_key()
    except (ValueError, UnsupportedAlgorithm):
        return None
    if not isinstance(key, RSAPublicKey):
        return None
    return Certificate(key, certificate.not_valid_before_utc, certificate.not_valid_after_utc, certificate)


@lru_cache(maxsize=_FETCHED_AT_MOST)
def read_certificates(pem: bytes) -> tuple[x509.Certificate, ...]:
    """Return the certificates of a PEM text in their order, none where one of them can't be read."""
    try:
        return tuple(x509.load_pem_x509_certificates(pem))
    except ValueError:
        return ()
