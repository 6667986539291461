# SPDX-License-Identifier: Apache-2.0
"""Checks of signatures and credentials: what fits is accepted, everything else is refused, and nothing raises."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from webhooks.provider import Delivery, Refused, Verdict, Verified
from webhooks.signature import (
    NO_SECRET,
    STALE,
    carries_credential,
    credential_headers,
    credential_only,
    decode_base64,
    ecdsa_public_key,
    ecdsa_sha256_matches,
    hmac_sha256,
    is_fresh,
    judge_age,
    octets,
    same,
    seconds_time,
    sign_standard_webhook,
    signing_secrets,
    standard_webhook,
    standard_webhook_id,
    standard_webhook_key,
)

NOW = datetime(2026, 11, 20, 10, 5, tzinfo=UTC)
TOLERANCE = timedelta(minutes=5)
HALF_AN_EMOJI = chr(0xD83D)
ANY_TEXT = st.text(alphabet=st.characters(codec=None))


def basic(credential: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(credential.encode()).decode()}


def refusal(verdict: Verdict) -> str:
    assert isinstance(verdict, Refused)
    return verdict.reason


# --- comparing


def test_text_and_bytes_of_the_same_octets_are_the_same() -> None:
    assert same("é", "é".encode())
    assert same("\udce9", b"\xe9")
    assert not same("é", "e")
    assert not same("a", "A")
    assert not same("", "a")


@given(ANY_TEXT, ANY_TEXT)
def test_any_two_texts_can_be_compared(one: str, two: str) -> None:
    assert same(one, one)
    assert same(one, two) == (octets(one) == octets(two))


def test_an_hmac_is_the_published_one() -> None:
    # RFC 4231, test case 2
    digest = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
    assert hmac_sha256("Jefe", b"what do ya want for nothing?").hex() == digest


@pytest.mark.parametrize("text", ["é", HALF_AN_EMOJI, "A", "AA=", "A A=", "AA-_", "AAAA\n", "****"])
def test_what_is_no_base64_has_no_bytes(text: str) -> None:
    assert decode_base64(text) is None


# --- carried credentials


@pytest.mark.parametrize(
    ("secret", "headers", "query"),
    [
        ("basic:user:pass:word", basic("user:pass:word"), ""),
        ("basic:user:", basic("user:"), ""),
        ("basic:jürgen:straße", basic("jürgen:straße"), ""),
        ("basic:user:pass", {"authorization": "bAsIc  dXNlcjpwYXNz "}, ""),
        ("bearer:token", {"authorization": "bearer token"}, ""),
        ("header:X-Own-Name=a=b", {"x-own-name": "a=b"}, ""),
        ("query:key=a b&c", {}, "x=1&key=other&key=a+b%26c"),
    ],
)
def test_a_credential_that_fits_is_recognised(secret: str, headers: dict[str, str], query: str) -> None:
    assert carries_credential(Delivery(b"", headers, query=query), ("bearer:other", secret))
    assert not carries_credential(Delivery(b"", headers, query=query), (secret + "x",))
    assert not carries_credential(Delivery(b"", {}), (secret,))


@pytest.mark.parametrize(
    "authorization",
    ["", "Basic", "Basic ", "Basic ***", "Basic é", "Basic " + HALF_AN_EMOJI, "Bearer", "Digest x", "Basic Og=="],
)
def test_a_malformed_credential_is_refused_and_raises_nothing(authorization: str) -> None:
    request = Delivery(b"", {"authorization": authorization})
    assert not carries_credential(request, ("basic:user:pass", "bearer:token", "header:x=y", "query:k=v"))


@pytest.mark.parametrize(
    "empty", ["basic:", "basic::", "bearer:", "bearer: ", "header:", "header:x", "header:x=", "query:k="]
)
@pytest.mark.parametrize("authorization", ["Basic ", "Basic Og==", "Bearer ", "Bearer"])
def test_an_empty_secret_matches_nothing(empty: str, authorization: str) -> None:
    request = Delivery(b"", {"authorization": authorization, "x": "", "": ""}, query="k=&k")
    assert not carries_credential(request, (empty,))


def test_a_provider_that_signs_nothing_needs_a_credential() -> None:
    request = Delivery(b"", basic("user:pass"))
    assert credential_only(request, ("basic:user:pass",), "basic") == Verified()
    assert credential_only(request, (), "basic") is NO_SECRET
    assert credential_only(request, ("signing-key",), "basic") is NO_SECRET
    assert refusal(credential_only(request, ("basic:user:other",), "basic")) == "signature"


@pytest.mark.parametrize("secret", ["basic:user:päss", "bearer:token", "header:X-Name=va=lue", "query:k y=v&w+x"])
def test_what_a_sample_carries_is_what_is_looked_for(secret: str) -> None:
    headers, query = credential_headers(["a-signing-key", secret, "bearer:later"])
    assert carries_credential(Delivery(b"", headers, query=query), (secret,))


def test_without_a_credential_a_sample_carries_nothing() -> None:
    assert credential_headers(["a-signing-key", "whsec_AAAA"]) == ({}, "")


def test_blank_and_carried_secrets_sign_nothing() -> None:
    assert signing_secrets(("", "  ", "basic:a:b", "bearer:x", "header:a=b", "query:a=b", "key")) == ("key",)


# --- age


def test_freshness_looks_both_ways_and_may_be_off() -> None:
    for seconds, fresh in ((-300, True), (300, True), (-301, False), (301, False)):
        assert is_fresh(NOW + timedelta(seconds=seconds), NOW, TOLERANCE) is fresh
    assert is_fresh(datetime(2000, 1, 1, tzinfo=UTC), NOW, None)


@pytest.mark.parametrize("text", ["", "-1", "1.5", "1e9", "nan", "٣", "²", " 1", "1_0", "9" * 12, "9" * 5000])
def test_a_timestamp_that_is_no_number_of_seconds_has_no_time(text: str) -> None:
    assert seconds_time(text) is None
    assert refusal(judge_age(text, NOW, TOLERANCE)) == "missing"
    assert judge_age(text, NOW, None) == Verified()


def test_a_huge_timestamp_is_stale() -> None:
    assert judge_age("9" * 11, NOW, TOLERANCE) is STALE
    assert judge_age("0", NOW, TOLERANCE) is STALE
    assert judge_age(str(int(NOW.timestamp())), NOW, TOLERANCE) == Verified()


# --- ECDSA


EC_KEY = ec.generate_private_key(ec.SECP256R1())
DER = EC_KEY.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
PEM = EC_KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
PUBLIC = base64.b64encode(DER).decode()


@pytest.mark.parametrize(
    "encoded", [PUBLIC, PEM, PEM.strip(), PEM.replace("\n", "\\n"), PEM.replace("\n", " "), f" {PUBLIC}\n"]
)
def test_a_public_key_is_read_however_it_was_pasted(encoded: str) -> None:
    signature = EC_KEY.sign(b"message", ec.ECDSA(SHA256()))
    assert ecdsa_sha256_matches(encoded, signature, b"message")
    assert not ecdsa_sha256_matches(encoded, signature, b"another")
    assert not ecdsa_sha256_matches(encoded, b"", b"message")


def test_what_is_no_ec_key_matches_nothing() -> None:
    other = ed25519.Ed25519PrivateKey.generate().public_key()
    for text in (
        "",
        "é",
        HALF_AN_EMOJI,
        "AAAA",
        PUBLIC[:-8],
        "whsec_AAAA",
        base64.b64encode(other.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).decode(),
    ):
        assert ecdsa_public_key(text) is None
        assert not ecdsa_sha256_matches(text, b"signature", b"message")


# --- Standard Webhooks


SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def test_the_published_example_is_accepted() -> None:
    # The example of Svix's documentation on verifying by hand.
    request = Delivery(
        b'{"test": 2432232314}',
        {
            "svix-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
            "svix-timestamp": "1614265330",
            "svix-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
        },
    )
    signed_at = datetime.fromtimestamp(1614265330, UTC)
    assert standard_webhook(request, (SECRET,), signed_at, TOLERANCE) == Verified()
    assert standard_webhook(request, (SECRET.removeprefix("whsec_"),), signed_at, TOLERANCE) == Verified()
    assert standard_webhook(request, (SECRET,), NOW, TOLERANCE) is STALE
    assert refusal(standard_webhook(Delivery(b"{}", request.headers), (SECRET,), signed_at, None)) == "signature"


@given(ANY_TEXT, ANY_TEXT, ANY_TEXT)
def test_hostile_headers_are_refused_and_raise_nothing(message_id: str, timestamp: str, signature: str) -> None:
    headers = {"svix-id": message_id, "svix-timestamp": timestamp, "svix-signature": signature}
    judged = standard_webhook(Delivery(b"{}", headers), (SECRET,), NOW, TOLERANCE)
    assert refusal(judged) in ("missing", "signature")


def test_the_right_signature_is_found_behind_a_thousand_others() -> None:
    key = standard_webhook_key(SECRET)
    assert key
    good = sign_standard_webhook(key, "id", "1", b"{}")
    headers = {"svix-id": "id", "svix-timestamp": "1", "svix-signature": "v1,AAAA " * 1000 + "v1a,x  " + good}
    assert standard_webhook(Delivery(b"{}", headers), (SECRET,) * 5, NOW, None) == Verified()


@pytest.mark.parametrize(
    "secret", ["", "whsec_", "whsec_***", "whsec_é", "whpk_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "not base64!"]
)
def test_what_is_no_signing_secret_is_none(secret: str) -> None:
    assert standard_webhook_key(secret) is None
    signed = sign_standard_webhook(b"", "id", "1", b"{}")
    request = Delivery(b"{}", {"svix-id": "id", "svix-timestamp": "1", "svix-signature": signed})
    assert standard_webhook(request, (secret,), NOW, None) is NO_SECRET


def test_the_id_that_names_the_event_is_the_one_that_was_signed() -> None:
    both = Delivery(b"", {"svix-id": "svix", "webhook-id": "webhook"})
    assert standard_webhook_id(both) == "svix"
    assert standard_webhook_id(Delivery(b"", {"webhook-id": "webhook", "svix-id": ""})) == "webhook"
    assert standard_webhook_id(Delivery(b"", {})) is None
