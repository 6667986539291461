# SPDX-License-Identifier: Apache-2.0
"""Checks that a delivery is the provider's: several secrets, constant time, nothing raised for hostile input. Pure."""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final
from urllib.parse import parse_qsl, urlencode

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_der_public_key

from webhooks.provider import Delivery, NoSample, Refused, Verdict, Verified

CREDENTIAL_SCHEMES: Final = ("basic:", "bearer:", "header:", "query:")
"""Secrets of these forms are carried by the request itself and may stand in for any provider's signature."""

NO_SECRET: Final = Refused("no_secret", "the feed has no secret of a form that can verify: set feeds.<name>.secrets")

_ARMOUR: Final = re.compile(r"-----[A-Z ]+-----|\\n|\s")
_SECONDS: Final = re.compile(r"[0-9]{1,11}")


def same(given: str | bytes, wanted: str | bytes) -> bool:
    """Compare in constant time; text is compared as UTF-8, so a non-ASCII signature is just wrong."""
    return hmac.compare_digest(octets(given), octets(wanted))


def octets(value: str | bytes) -> bytes:
    """Return the bytes that a header's text stood for (servers keep what is no UTF-8 as lone surrogates)."""
    if isinstance(value, bytes):
        return value
    try:
        return value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half an emoji in a signature that came in a JSON body
        return value.encode("utf-8", "surrogatepass")


def hmac_sha256(key: str | bytes, message: bytes) -> bytes:
    """Return the HMAC-SHA256 of a message."""
    keyed = _keyed(key).copy()
    keyed.update(message)
    return keyed.digest()


@lru_cache(maxsize=1024)  # to take in the key costs as much as a short message
def _keyed(key: str | bytes) -> hmac.HMAC:
    return hmac.new(octets(key), digestmod="sha256")


def decode_base64(text: str) -> bytes | None:
    """Return the bytes of standard base64, or None where it isn't."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None


@lru_cache(maxsize=1024)  # asked at every delivery, of the few lists of secrets that are configured
def signing_secrets(secrets: tuple[str, ...]) -> tuple[str, ...]:
    """Return the secrets that sign, without those that the request carries by itself."""
    return tuple(secret for secret in secrets if secret.strip() and not secret.startswith(CREDENTIAL_SCHEMES))


@lru_cache(maxsize=1024)
def _credentials(secrets: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(secret for secret in secrets if secret.startswith(CREDENTIAL_SCHEMES))


def carries_credential(delivery: Delivery, secrets: tuple[str, ...]) -> bool:
    """Say whether the request carries one of the `basic:`, `bearer:`, `header:` or `query:` secrets."""
    credentials = _credentials(secrets)
    return bool(credentials) and any(_carries(delivery, credential) for credential in credentials)


def _carries(delivery: Delivery, secret: str) -> bool:
    scheme, _, credential = secret.partition(":")
    name, _, value = credential.partition("=")
    match scheme:
        case "basic":
            return _matches(_authorization(delivery, "basic"), credential)
        case "bearer":
            return _matches(_authorization(delivery, "bearer"), credential)
        case "header":
            return _matches(delivery.headers.get(name.strip().lower()), value)
        case "query":
            pairs = parse_qsl(delivery.query, keep_blank_values=True)
            return any(_matches(given, value) for key, given in pairs if key == name)
    return False


def _matches(given: str | bytes | None, wanted: str) -> bool:
    # An empty secret is no secret: it must never match an empty header.
    return given is not None and wanted.strip() not in ("", ":") and same(given, wanted)


def _authorization(delivery: Delivery, scheme: str) -> str | bytes | None:
    kind, _, given = delivery.headers.get("authorization", "").partition(" ")
    if kind.lower() != scheme:
        return None
    return decode_base64(given.strip()) if scheme == "basic" else given.strip()


def credential_only(delivery: Delivery, secrets: tuple[str, ...], how: str) -> Verdict:
    """Judge a delivery of a provider that signs nothing: one of the carried secrets must be there.

    `how` says in a few words what to configure ("basic:user:password").
    """
    if not any(secret.startswith(CREDENTIAL_SCHEMES) for secret in secrets):
        return NO_SECRET
    if carries_credential(delivery, secrets):
        return Verified()
    reason = "signature" if _carries_any(delivery, secrets) else "missing"
    return Refused(reason, f"no matching credential; configure {how} at the provider and in secrets")


def _carries_any(delivery: Delivery, secrets: tuple[str, ...]) -> bool:
    """Say whether the request carries a credential where one of the secrets would be, right or wrong."""
    names = {secret.partition(":")[2].partition("=")[0].strip().lower() for secret in _credentials(secrets)}
    asked = {name.lower() for name, _ in parse_qsl(delivery.query, keep_blank_values=True)}
    return "authorization" in delivery.headers or any(name in delivery.headers or name in asked for name in names)


def credential_objection(title: str, how: str, secret: str) -> str | None:
    """Return what is wrong with a configured secret of a provider that signs nothing, or None."""
    if secret.startswith(CREDENTIAL_SCHEMES):
        return None
    return f"verifies nothing, since {title} signs no webhook: write {how}"


def credential_headers(secrets: Iterable[str]) -> tuple[dict[str, str], str]:
    """Return the request headers and the query string that carry the first such secret; both empty if there is none."""
    for secret in secrets:
        scheme, _, value = secret.partition(":")
        name, _, named = value.partition("=")
        match scheme:
            case "basic":
                return {"authorization": "Basic " + base64.b64encode(octets(value)).decode()}, ""
            case "bearer":
                return {"authorization": f"Bearer {value}"}, ""
            case "header":
                return {name.strip().lower(): named}, ""
            case "query":
                return {}, urlencode({name: named})
    return {}, ""


def sample_delivery(body: bytes, secrets: Iterable[str], signed: Mapping[str, str] | None, needs: str) -> Delivery:
    """Return an example as it would be posted: with the headers that sign it, and a credential where one is configured.

    `signed` is None where there is no key to sign with; without a credential that is NoSample, which says `needs`.
    """
    headers, query = credential_headers(secrets)
    if signed is None and not headers and not query:
        raise NoSample(needs)
    return Delivery(body, {"content-type": "application/json", **headers, **(signed or {})}, query=query)


def is_fresh(signed_at: datetime, now: datetime, tolerance: timedelta | None) -> bool:
    """Say whether a signed time lies within the tolerance of now, on either side; None: always."""
    return tolerance is None or abs(now - signed_at) <= tolerance


STALE: Final = Refused(
    "stale", "signed too long ago or in the future: clock skew suspected; check this host's clock or raise tolerance"
)


@lru_cache(maxsize=256)
def public_key(encoded: str) -> PublicKeyTypes | None:
    """Return the key of a base64 DER SubjectPublicKeyInfo, or None; PEM armour and white space are ignored."""
    der = decode_base64(_ARMOUR.sub("", encoded))
    try:
        return load_der_public_key(der) if der else None
    except (ValueError, UnsupportedAlgorithm):
        return None


def ecdsa_public_key(encoded: str) -> ec.EllipticCurvePublicKey | None:
    """Return the EC key of a text as `public_key` reads it, or None where it is none."""
    key = public_key(encoded)
    return key if isinstance(key, ec.EllipticCurvePublicKey) else None


def ecdsa_sha256_matches(encoded: str, signature: bytes, message: bytes) -> bool:
    """Say whether a DER ECDSA signature over SHA-256 of the message was made with the key."""
    key = ecdsa_public_key(encoded)
    if key is None:
        return False
    try:
        key.verify(signature, message, ec.ECDSA(SHA256()))
    except InvalidSignature:
        return False
    return True


def seconds_time(text: str) -> datetime | None:
    """Return the time of a signed timestamp in whole seconds since 1970, or None where it is no such number."""
    return datetime.fromtimestamp(int(text), UTC) if _SECONDS.fullmatch(text) else None


def judge_age(timestamp: str, now: datetime, tolerance: timedelta | None) -> Verdict:
    """Judge a timestamp whose signature is proved; without a tolerance it is not looked at."""
    if tolerance is None:
        return Verified()
    signed_at = seconds_time(timestamp)
    if signed_at is None:
        return Refused("missing", "the timestamp is not a number of seconds")
    return Verified() if is_fresh(signed_at, now, tolerance) else STALE


def standard_webhook(
    delivery: Delivery, secrets: tuple[str, ...], now: datetime, tolerance: timedelta | None
) -> Verdict:
    """Judge a delivery signed by the Standard Webhooks scheme, under its own or Svix's header names.

    Any of the space-separated `v1` signatures may match any of the secrets; unknown versions are passed over. A
    credential that the request carries stands in for the signature, where one is configured.
    """
    keys = standard_webhook_keys(secrets)
    if not keys or carries_credential(delivery, secrets):
        return credential_only(delivery, secrets, "a whsec_ signing secret")
    message_id, timestamp, given = (_standard_header(delivery, part) for part in ("id", "timestamp", "signature"))
    if not (message_id and timestamp and given):
        return Refused("missing", "no id, timestamp or signature header (webhook-..., or svix-...)")
    wanted = [sign_standard_webhook(key, message_id, timestamp, delivery.body) for key in keys]
    if not any(same(entry, want) for entry in given.split() for want in wanted):
        return Refused("signature", "no v1 signature matches one of the feed's secrets")
    return judge_age(timestamp, now, tolerance)


def standard_webhook_id(delivery: Delivery) -> str | None:
    """Return the id that names the event of a Standard Webhooks delivery: the same on each retry and replay."""
    return _standard_header(delivery, "id") or None


@lru_cache(maxsize=1024)
def standard_webhook_keys(secrets: tuple[str, ...]) -> tuple[bytes, ...]:
    """Return the HMAC keys among the secrets: `whsec_` and base64, or bare base64."""
    return tuple(key for secret in signing_secrets(secrets) if (key := standard_webhook_key(secret)))


def standard_webhook_key(secret: str) -> bytes | None:
    """Return the bytes of a `whsec_` secret, or None where it is none (`whpk_` is a public key, never a secret)."""
    # The underscore of another prefix is no base64.
    return decode_base64(secret.strip().removeprefix("whsec_")) or None


def standard_webhook_objection(secret: str) -> str | None:
    """Return what is wrong with a configured secret that can neither sign nor be carried by the request, or None."""
    if secret.startswith(CREDENTIAL_SCHEMES) or standard_webhook_key(secret):
        return None
    return "is no signing secret of a webhook, so it verifies nothing: set the one that begins with whsec_, whole"


def sign_standard_webhook(key: bytes, message_id: str, timestamp: str, body: bytes) -> str:
    """Return the signature header of a Standard Webhooks delivery: `v1,` and base64."""
    signed = hmac_sha256(key, b"%b.%b.%b" % (octets(message_id), octets(timestamp), body))
    return "v1," + base64.b64encode(signed).decode()


def _standard_header(delivery: Delivery, part: str) -> str:
    return delivery.headers.get(f"svix-{part}") or delivery.headers.get(f"webhook-{part}") or ""
