# SPDX-License-Identifier: Apache-2.0
"""What the conformance suite needs of a provider: its fixtures, how a delivery is signed, and ways to spoil either."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from sns_signer import CertificateStore, FakeSNS

from webhooks.event import MAX_ID, Event, Kind
from webhooks.payload import SHORT
from webhooks.provider import BadPayload, Delivery, Feed, Parsed
from webhooks.registry import PROVIDERS

FIXTURES = Path(__file__).parent / "fixtures"
NOW = datetime(2026, 11, 2, 9, 0, tzinfo=UTC)
KEY = "e15bd8fd5b6b63a6f91c331d3c0702980d93474c2b1c4474"
"""The wire key of the send that fixtures are about. A provider needs at least one fixture that holds it."""

CONTENT_TYPES = {".json": "application/json", ".form": "application/x-www-form-urlencoded"}
DELETE = object()
Place = tuple[str | int, ...]


# -- fixtures ----------------------------------------------------------------------------------------------------------


@cache
def webhooks_of(provider: str) -> Mapping[str, Delivery]:
    """Return what a provider's webhook posts, by the name of the fixture file.

    `api_*` are answers of its API, `unread_*` a format that is not read; of `sqs_*` the queued message's Body counts.
    """
    files = sorted(file for file in (FIXTURES / provider).iterdir() if file.suffix in CONTENT_TYPES)
    return {file.stem: _delivery(file) for file in files if not file.stem.startswith(("api_", "unread_"))}


def _delivery(file: Path) -> Delivery:
    body = file.read_bytes()
    if file.stem.startswith("sqs_"):
        body = json.loads(body)["Body"].encode()
    return Delivery(body, {"content-type": CONTENT_TYPES[file.suffix]})


def events(provider: str, delivery: Delivery) -> list[Event]:
    return list(PROVIDERS[provider].parse(delivery).events)


@cache
def with_key(provider: str) -> Mapping[str, Delivery]:
    """Return the webhooks that prove acceptance of the send KEY."""
    return {name: delivery for name, delivery in webhooks_of(provider).items() if _accepts_key(provider, delivery)}


def _accepts_key(provider: str, delivery: Delivery) -> bool:
    with suppress(Exception):  # what can't be read is for a test to tell: this runs while tests are collected
        return any(event.send_key == KEY and event.testimony == "accepted" for event in events(provider, delivery))
    return False


def identity(event: Event) -> tuple[str | None, str]:
    return event.message_id, event.event_id


def check(found: Parsed) -> None:
    """Hold what was parsed against what every event promises."""
    assert not (found.events and found.control)
    for event in found.events:
        assert event.raw
        assert 0 < len(event.event_id.encode("utf-8", "surrogatepass")) <= MAX_ID
        assert event.message_id is None or 0 < len(event.message_id.encode("utf-8", "surrogatepass")) <= MAX_ID
        assert "" not in (event.send_key, event.recipient, event.reason)
        assert len(event.reason or "") <= SHORT
        if event.kind is Kind.INBOUND:  # strangers write what comes in
            assert (event.testimony, event.send_key) == ("none", None)
        assert event.occurred_at is None or event.occurred_at.utcoffset() == timedelta(0)


def check_refusal(text: str, *secrets: str) -> None:
    """Hold a refusal's text against what every one promises: a line that gives away nothing."""
    assert text
    assert len(text.splitlines()) == 1
    assert len(text) < 250
    assert not [secret for secret in (KEY, "ana.reyes", *secrets) if secret.strip() and secret in text]


def parsed_or_refused(provider: str, delivery: Delivery) -> Parsed | None:
    """Return what is parsed of a hostile delivery, None where it is refused; anything else is a fault."""
    try:
        found = PROVIDERS[provider].parse(delivery)
    except BadPayload as refusal:
        check_refusal(str(refusal))
        return None
    check(found)
    return found


# -- JSON, spoilt ------------------------------------------------------------------------------------------------------


def value_of(delivery: Delivery) -> Any:
    """Return what a delivery's JSON or form says."""
    if delivery.headers.get("content-type") == CONTENT_TYPES[".form"]:
        return dict(parse_qsl(delivery.body.decode(), keep_blank_values=True))
    return json.loads(delivery.body)


def with_value(delivery: Delivery, value: Any, *, ascii_only: bool = True) -> Delivery:
    """Return the delivery with another value, in the same format where it fits that."""
    if delivery.headers.get("content-type") == CONTENT_TYPES[".form"] and isinstance(value, dict):
        pairs = {
            str(name).encode("utf-8", "replace"): str(text).encode("utf-8", "replace") for name, text in value.items()
        }
        return replace(delivery, body=urlencode(pairs).encode())
    return replace(delivery, body=json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass"))


def paths(value: Any, path: Place = ()) -> Iterator[Place]:
    """Yield the path of every value below this one; JSON within a text is entered, as SNS has it."""
    value = _opened(value)
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, entry in entries:
        yield (*path, name)
        yield from paths(entry, (*path, name))


def value_at(value: Any, path: Place) -> Any:
    for name in path:
        value = _opened(value)[name]
    return value


def changed(value: Any, path: Place, new: Any) -> Any:
    """Return a copy with another value at a path, or without it (DELETE)."""
    if not path:
        return new
    inner, (name, *rest) = _opened(value), path
    copy = dict(inner) if isinstance(inner, dict) else list(inner)
    if rest or new is not DELETE:
        copy[name] = changed(copy[name], tuple(rest), new)  # type: ignore[index]
    else:
        del copy[name]  # type: ignore[arg-type]
    return json.dumps(copy) if isinstance(value, str) else copy


def _opened(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(("{", "[")):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


# -- signatures --------------------------------------------------------------------------------------------------------


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
    fetch: CertificateStore = CertificateStore({})  # noqa: RUF009 - nothing is in it

    def feed(self, provider: str, *which: int, tolerance: timedelta | None = None) -> Feed:
        """Return a feed that has some of the three secrets."""
        return Feed("main", provider, tolerance=tolerance, **{self.setting: tuple(self.secrets[i] for i in which)})

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


def _stamp(at: datetime) -> str:
    return str(int(at.timestamp()))


def standard_webhook(body: bytes, secret: str, at: datetime) -> Delivery:
    key = base64.b64decode(secret.removeprefix("whsec_"))
    digest = hmac.digest(key, b"msg_1.%b.%b" % (_stamp(at).encode(), body), hashlib.sha256)
    signature = "v1," + base64.b64encode(digest).decode()
    return Delivery(body, {"svix-id": "msg_1", "svix-timestamp": _stamp(at), "svix-signature": signature})


def mailgun(body: bytes, secret: str, at: datetime) -> Delivery:
    signature = hmac.digest(secret.encode(), f"{_stamp(at)}token".encode(), hashlib.sha256).hex()
    block = {"timestamp": _stamp(at), "token": "token", "signature": signature}
    return Delivery(json.dumps(json.loads(body) | {"signature": block}).encode(), {})


def _public(key: ec.EllipticCurvePrivateKey) -> str:
    der = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return base64.b64encode(der).decode()


_ECDSA_KEYS = {_public(key): key for key in (ec.generate_private_key(ec.SECP256R1()) for _ in range(4))}
_SENDGRID = "x-twilio-email-event-webhook-"


def sendgrid(body: bytes, secret: str, at: datetime) -> Delivery:
    key = _ECDSA_KEYS.get(secret) or list(_ECDSA_KEYS.values())[-1]
    signature = base64.b64encode(key.sign(_stamp(at).encode() + body, ec.ECDSA(SHA256()))).decode()
    return Delivery(body, {f"{_SENDGRID}signature": signature, f"{_SENDGRID}timestamp": _stamp(at)})


_TOPICS = {f"arn:aws:sns:eu-west-1:00000000000{n}:ses-events": "" for n in range(3)}
_SNS = {topic: FakeSNS(topic) for topic in _TOPICS}
_CERTIFICATES = CertificateStore({sns.certificate_url: sns.pem for sns in _SNS.values()})


def sns(body: bytes, secret: str, at: datetime) -> Delivery:
    aws = _SNS.get(secret) or next(iter(_SNS.values()))
    return aws.delivery(aws.message(body.decode(), now=at))


_HMAC_KEYS = ("first-throw-away", "second-throw-away", "third-throw-away")
_SVIX_KEYS = tuple("whsec_" + base64.b64encode(key.encode()).decode() for key in _HMAC_KEYS)

SCHEMES: Mapping[str, Scheme] = {
    "ses": Scheme(
        tuple(_SNS),  # type: ignore[arg-type]
        sns,
        fields=(("Signature",), ("SignatureVersion",), ("SigningCertURL",), ("Timestamp",), ("TopicArn",)),
        content=("Message",),
        setting="topics",
        fetch=_CERTIFICATES,
    ),
    "sendgrid": Scheme(
        tuple(_ECDSA_KEYS)[:3],  # type: ignore[arg-type]
        sendgrid,
        headers=(f"{_SENDGRID}signature", f"{_SENDGRID}timestamp"),
    ),
    "mailgun": Scheme(
        _HMAC_KEYS,
        mailgun,
        fields=(("signature", "signature"), ("signature", "timestamp"), ("signature", "token")),
    ),
    "resend": Scheme(
        _SVIX_KEYS,  # type: ignore[arg-type]
        standard_webhook,
        headers=("svix-id", "svix-timestamp", "svix-signature"),
    ),
}
"""An entry for each provider that signs. What a request carries by itself (basic:user:password ...) needs none."""


CARRIED = {
    "basic:user:throw-away": lambda text: Delivery(
        b"", {"authorization": "Basic " + base64.b64encode(f"user:{text}".encode("utf-8", "surrogatepass")).decode()}
    ),
    "bearer:throw-away": lambda text: Delivery(b"", {"authorization": f"Bearer {text}"}),
    "header:X-Own=throw-away": lambda text: Delivery(b"", {"x-own": text}),
    "query:own=throw-away": lambda text: Delivery(b"", {}, query=f"own={text}"),
}
"""Each credential that a request may carry, with the request that carries a text in its place."""
