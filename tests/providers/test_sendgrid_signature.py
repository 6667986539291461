# SPDX-License-Identifier: Apache-2.0
"""What isn't SendGrid's is refused; what is stamped on a message comes back, and so do samples."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from case_files import no_fetch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from webhooks.event import Kind, Testimony
from webhooks.provider import Delivery, Feed, NoSample, Refused, Verified
from webhooks.providers.sendgrid import PROVIDER

KEY = "e15bd8fd5b6b63a6f91c331d3c0702980d93474c2b1c4474"
YES = Testimony.ACCEPTED
SIGNED_AT = 1795168860
NOW = datetime.fromtimestamp(SIGNED_AT, UTC)
BODY = b'[{"event":"open"},\r\n{"event":"click"}]\r\n'
PRIVATE, OTHER_PRIVATE = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))


def public(private: ec.EllipticCurvePrivateKey, encoding: Encoding = Encoding.DER) -> str:
    data = private.public_key().public_bytes(encoding, PublicFormat.SubjectPublicKeyInfo)
    return base64.b64encode(data).decode() if encoding is Encoding.DER else data.decode()


def signed(body: bytes = BODY, timestamp: str = str(SIGNED_AT), **headers: str) -> Delivery:
    signature = PRIVATE.sign(timestamp.encode("utf-8", "surrogateescape") + body, ec.ECDSA(SHA256()))
    own = {
        "x-twilio-email-event-webhook-signature": base64.b64encode(signature).decode(),
        "x-twilio-email-event-webhook-timestamp": timestamp,
    }
    return Delivery(body, own | {name.replace("_", "-"): value for name, value in headers.items()})


async def verdict(request: Delivery, *secrets: str, **settings: Any) -> str:
    judged = await PROVIDER.verify(request, Feed("main", "sendgrid", secrets, **settings), NOW, no_fetch)
    return judged.reason if isinstance(judged, Refused) else "verified" if judged == Verified() else repr(judged)


@pytest.mark.parametrize("encoding", [Encoding.DER, Encoding.PEM])
async def test_a_signature_of_the_feeds_key_is_accepted(encoding: Encoding) -> None:
    assert await verdict(signed(), public(PRIVATE, encoding)) == "verified"


async def test_a_key_pasted_with_escaped_line_ends_works() -> None:
    assert await verdict(signed(), public(PRIVATE, Encoding.PEM).replace("\n", "\\n")) == "verified"


async def test_any_of_several_keys_is_enough() -> None:
    assert await verdict(signed(), public(OTHER_PRIVATE), "no key", public(PRIVATE)) == "verified"
    assert await verdict(signed(), public(OTHER_PRIVATE)) == "signature"


async def test_a_changed_body_or_timestamp_is_refused() -> None:
    good = signed()
    assert await verdict(Delivery(good.body.rstrip(), good.headers), public(PRIVATE)) == "signature"
    changed = {**good.headers, "x-twilio-email-event-webhook-timestamp": str(SIGNED_AT + 1)}
    assert await verdict(Delivery(good.body, changed), public(PRIVATE)) == "signature"


@pytest.mark.parametrize("header", ["signature", "timestamp"])
@pytest.mark.parametrize("value", [None, ""])
async def test_an_unsigned_delivery_is_refused(header: str, value: str | None) -> None:
    headers = dict(signed().headers)
    del headers[f"x-twilio-email-event-webhook-{header}"]
    if value is not None:
        headers[f"x-twilio-email-event-webhook-{header}"] = value
    assert await verdict(Delivery(BODY, headers), public(PRIVATE)) == "missing"


@pytest.mark.parametrize("junk", ["é", "\udce9\udcff", "\ud83d", "****", "AAAA", "MEUCIG", "=", " ", "A" * 7000])
async def test_a_malformed_signature_is_refused_and_raises_nothing(junk: str) -> None:
    headers = {**signed().headers, "x-twilio-email-event-webhook-signature": junk}
    assert await verdict(Delivery(BODY, headers), public(PRIVATE)) == "signature"


@pytest.mark.parametrize("junk", ["é", "\ud83d", "9" * 5000, "-1", "1e9", "nan"])
async def test_a_malformed_timestamp_is_refused_and_raises_nothing(junk: str) -> None:
    headers = {**signed().headers, "x-twilio-email-event-webhook-timestamp": junk}
    assert await verdict(Delivery(BODY, headers), public(PRIVATE), tolerance=timedelta(hours=1)) == "signature"


async def test_an_old_delivery_is_accepted_unless_a_tolerance_is_set() -> None:
    old = signed(timestamp=str(SIGNED_AT - 90_000))
    assert PROVIDER.facts.tolerance is None
    assert await verdict(old, public(PRIVATE)) == "verified"
    assert await verdict(old, public(PRIVATE), tolerance=timedelta(hours=25)) == "verified"
    assert await verdict(old, public(PRIVATE), tolerance=timedelta(hours=24)) == "stale"
    assert await verdict(signed(timestamp="9" * 40), public(PRIVATE), tolerance=timedelta(hours=24)) == "missing"


@pytest.mark.parametrize("secrets", [(), ("",), ("  ",), ("basic:",)])
async def test_without_a_secret_everything_is_refused(secrets: tuple[str, ...]) -> None:
    assert await verdict(signed(authorization="Basic "), *secrets) in ("no_secret", "signature")


async def test_a_secret_that_is_no_public_key_is_named_as_the_fault() -> None:
    assert await verdict(signed(), "SG.an-api-key") == "no_secret"


async def test_a_carried_credential_stands_in_for_the_signature() -> None:
    request = Delivery(BODY, {"authorization": "Bearer token"})
    assert await verdict(request, "bearer:token") == "verified"
    assert await verdict(request, public(PRIVATE), "bearer:token") == "verified"
    assert await verdict(request, "bearer:other") == "signature"
    assert await verdict(request, public(PRIVATE)) == "missing"
    assert await verdict(signed(), public(PRIVATE), "bearer:token") == "verified"


# --- stamp and sample


def test_the_stamp_is_what_comes_back() -> None:
    stamp = PROVIDER.stamp(KEY)
    assert stamp.body == {"custom_args": {"send_key": KEY}}
    assert json.loads(stamp.smtp_headers["X-SMTPAPI"]) == {"unique_args": {"send_key": KEY}}
    assert stamp.headers == {}


@pytest.mark.parametrize("secret", ["basic:user:pass", "bearer:token", "header:X-Own=value", "query:k=v v"])
async def test_a_sample_carries_the_feeds_credential(secret: str) -> None:
    sample = PROVIDER.sample("bounced", KEY, Feed("main", "sendgrid", (public(PRIVATE), secret)), NOW)
    assert await verdict(sample, secret) == "verified"
    (event,) = PROVIDER.parse(sample).events
    assert (event.kind, event.testimony, event.send_key, event.occurred_at) == (Kind.BOUNCED, YES, KEY, NOW)
    assert event.message_id


def test_there_is_no_sample_where_only_twilio_can_sign() -> None:
    with pytest.raises(NoSample, match="private key"):
        PROVIDER.sample("bounced", KEY, Feed("main", "sendgrid", (public(PRIVATE),)), NOW)


def test_an_unknown_kind_of_sample_is_named() -> None:
    for kind in ("nonsense", "unknown"):
        with pytest.raises(NoSample, match=f"'{kind}'.*processed"):
            PROVIDER.sample(kind, KEY, Feed("main", "sendgrid", ("bearer:token",)), NOW)
