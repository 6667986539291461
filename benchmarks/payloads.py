# SPDX-License-Identifier: Apache-2.0
"""Signed deliveries of the five providers in any number, each event new, from payloads of the usual size."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.sns_signer import TOPIC, FakeSNS
from webhooks.provider import Delivery, Feed, FetchError

FIXTURES: Final = Path(__file__).parent.parent / "tests" / "providers" / "fixtures"
SECRET: Final = "throw-away"  # noqa: S105 - signs nothing but this benchmark's own events
SVIX_SECRET: Final = "whsec_" + base64.b64encode(b"throw-away-throw-away-24").decode()
BASIC_SECRET: Final = "basic:hook:throw-away"  # noqa: S105 - same
# A private key that is the same in the server and in the load generator.
_SENDGRID_KEY: Final = ec.derive_private_key(0x5EED, ec.SECP256R1())


def feeds(certificates: Path) -> dict[str, Feed]:
    """Return a feed of each provider under the provider's name. SES finds its certificate in the folder."""
    public = _SENDGRID_KEY.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return {
        "mailgun": Feed("mailgun", "mailgun", (SECRET,)),
        "sendgrid": Feed("sendgrid", "sendgrid", (base64.b64encode(public).decode(),)),
        "postmark": Feed("postmark", "postmark", (BASIC_SECRET,)),
        "resend": Feed("resend", "resend", (SVIX_SECRET,)),
        "ses": Feed("ses", "ses", topics=(TOPIC,), certificates=str(certificates)),
    }


async def no_fetch(url: str, *, max_bytes: int = 65_536) -> bytes:  # noqa: ARG001 - the shape of Fetch
    """Fetch nothing: certificates are pinned."""
    raise FetchError("a benchmark fetches nothing")


def deliveries(provider: str, mark: str, count: int, certificates: Path) -> Iterator[Delivery]:
    """Return so many signed deliveries of one event; `mark` makes their ids differ from those of other calls."""
    if provider == "ses":
        return _ses(mark, count, certificates)
    one = _ONE[provider]
    return (one(f"{mark}-{n}") for n in range(count))


def mailgun_about(keys: Iterable[str], mark: str) -> Iterator[Delivery]:
    """Return a signed delivery of Mailgun's about each of these sends."""
    return (_mailgun(f"{mark}-{n}", key=key) for n, key in enumerate(keys))


def sendgrid_batches(mark: str, count: int, events: int) -> list[Delivery]:
    """Return signed SendGrid deliveries of so many events each."""
    return [_sendgrid_signed([_sendgrid_event(f"{mark}-{batch}-{n}") for n in range(events)]) for batch in range(count)]


MIX: Final = (*["mailgun"] * 9, *["sendgrid", "postmark", "resend"] * 3, "ses", "batch")
BATCH: Final = 20


def kind_of(number: int) -> str:
    """Return what the post of this number is among mixed ones: a provider, `batch`, `again` or `forged`."""
    if number % 200 == 199:  # noqa: PLR2004 - one in two hundred
        return "forged"
    return "again" if number % 50 == 49 else MIX[number % len(MIX)]  # noqa: PLR2004 - one in fifty


def events_of(number: int) -> int:
    """Return how many new events that post brings."""
    return {"forged": 0, "again": 0, "batch": BATCH}.get(kind_of(number), 1)


def mixed(mark: str, count: int, certificates: Path) -> Iterator[tuple[str, Delivery]]:
    """Return posts of all providers with their feeds, each signed when it is asked for.

    Some come again, some are forged. The first of every twenty is Mailgun's and bears `key_of(f"{mark}-{number}")`.
    """
    ses = _ses(f"{mark}-ses", count, certificates)
    last = "", Delivery(b"", {})
    for number in range(count):
        kind, one = kind_of(number), f"{mark}-{number}"
        if kind == "forged":
            yield "mailgun", _mailgun(one, "forged")
            continue
        if kind == "batch":
            last = "sendgrid", _sendgrid_signed([_sendgrid_event(f"{one}-{n}") for n in range(BATCH)])
        elif kind != "again":
            last = kind, next(ses) if kind == "ses" else _ONE[kind](one)
        yield last


def key_of(mark: str) -> str:
    """Return the send key, which is the wire key as well, that a delivery of this mark and number bears."""
    return hashlib.sha256(mark.encode()).hexdigest()[:48]


@cache
def _fixture(provider: str, name: str) -> str:
    return (FIXTURES / provider / name).read_text()


def _loaded(provider: str, name: str) -> Any:
    return json.loads(_fixture(provider, name))


def _dumped(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _mailgun(mark: str, secret: str = SECRET, key: str | None = None) -> Delivery:
    stamp, token = str(int(time.time())), key_of(mark) + "00"
    event = _loaded("mailgun", "delivered.json")
    signature = hmac.digest(secret.encode(), (stamp + token).encode(), "sha256").hex()
    event["signature"] = {"timestamp": stamp, "token": token, "signature": signature}
    data = event["event-data"]
    data |= {"id": mark, "timestamp": time.time()}
    data["user-variables"]["send_key"] = key or key_of(mark)
    data["message"]["headers"]["message-id"] = f"{mark}@mg.shop.example.com"
    return Delivery(_dumped(event), {"content-type": "application/json"})


def _sendgrid_event(mark: str) -> dict[str, Any]:
    event: dict[str, Any] = _loaded("sendgrid", "delivered.json")[0]
    return event | {
        "sg_event_id": mark,
        "sg_message_id": f"{mark}.recvd-6c5d9f8b7a-x2p4q-1-6907A1B2-3F.0",
        "timestamp": int(time.time()),
        "send_key": key_of(mark),
    }


def _sendgrid_signed(events: list[dict[str, Any]]) -> Delivery:
    body, stamp = json.dumps(events).encode(), str(int(time.time()))
    signature = _SENDGRID_KEY.sign(stamp.encode() + body, ec.ECDSA(hashes.SHA256()))
    headers = {
        "content-type": "application/json",
        "x-twilio-email-event-webhook-signature": base64.b64encode(signature).decode(),
        "x-twilio-email-event-webhook-timestamp": stamp,
    }
    return Delivery(body, headers)


def _postmark(mark: str) -> Delivery:
    record = _loaded("postmark", "delivery.json")
    record |= {"MessageID": mark, "DeliveredAt": _iso()}
    record["Metadata"] = {"send_key": key_of(mark)}
    credential = base64.b64encode(BASIC_SECRET.removeprefix("basic:").encode()).decode()
    return Delivery(_dumped(record), {"content-type": "application/json", "authorization": f"Basic {credential}"})


def _resend(mark: str) -> Delivery:
    event = _loaded("resend", "email_delivered.json")
    event["created_at"] = _iso()
    event["data"] |= {"email_id": mark, "tags": {"send_key": key_of(mark)}}
    body, stamp, message = _dumped(event), str(int(time.time())), f"msg_{mark}"
    key = base64.b64decode(SVIX_SECRET.removeprefix("whsec_"))
    signature = base64.b64encode(hmac.digest(key, f"{message}.{stamp}.".encode() + body, "sha256")).decode()
    headers = {"svix-id": message, "svix-timestamp": stamp, "svix-signature": f"v1,{signature}"}
    return Delivery(body, headers | {"content-type": "application/json"})


def _ses(mark: str, count: int, certificates: Path) -> Iterator[Delivery]:
    sns = FakeSNS()
    sns.pin(certificates)
    record = _loaded("ses", "event_delivery.json")
    for n in range(count):
        record["mail"] |= {"messageId": f"{mark}-{n}", "timestamp": _iso()}
        record["mail"]["tags"] = {"send_key": [key_of(f"{mark}-{n}")]}
        yield sns.delivery(sns.message(record, now=datetime.now(UTC)))


def _iso() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


_ONE: Final[dict[str, Callable[[str], Delivery]]] = {
    "mailgun": _mailgun,
    "sendgrid": lambda mark: _sendgrid_signed([_sendgrid_event(mark)]),
    "postmark": _postmark,
    "resend": _resend,
}
POSTED: Final = ("ses", *_ONE)
"""The providers of which deliveries of one event can be made."""
