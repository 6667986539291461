# SPDX-License-Identifier: Apache-2.0
"""Postal: what its webhooks mean and prove, and which of its two signatures decides."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from anymail_compare import anymail_events
from case_files import FIXTURES, fixture, no_fetch
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from schemes.postal import KEYS, PEM, SECRETS, signature

from webhooks.asking import Searches
from webhooks.event import Event
from webhooks.provider import BadPayload, Delivery, Feed, NoSample, Refused, Verified
from webhooks.providers.postal import PROVIDER, rsa_public_key

NOW = datetime(2026, 11, 2, 9, 0, tzinfo=UTC)
KEY = "e15bd8fd5b6b63a6f91c331d3c0702980d93474c2b1c4474"
ANA = "ana.reyes@example.com"


def parse(body: bytes | dict[str, Any]) -> Event:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    (event,) = PROVIDER.parse(Delivery(data, {})).events
    return event


def about(name: str, **message: Any) -> Event:
    return parse({"event": name, "payload": {"message": {"direction": "outgoing", **message}}})


def at(clock_time: str) -> datetime:
    return datetime.fromisoformat(f"2026-11-02T{clock_time}+00:00")


# -- events ------------------------------------------------------------------------------------------------------------

OF_THE_MESSAGE = (KEY, "88412", ANA)
OF_NOTHING = (None, None, None)
WEBHOOKS = {
    "MessageSent": (
        *("delivered", "accepted", *OF_THE_MESSAGE, "802f24c5-1194-5f78-a85a-36cf14513f72"),
        *(at("08:15:06.100"), None),
    ),
    "MessageDelayed": (
        *("deferred", "accepted", *OF_THE_MESSAGE, "36a1c400-32d4-52f2-9666-83682a7f47c8"),
        *(at("08:15:06.100"), "Temporary error (invented): 451 later"),
    ),
    "MessageDeliveryFailed": (
        *("bounced", "accepted", *OF_THE_MESSAGE, "06426c30-d5cd-598e-a45e-46e2ca4d0652"),
        *(at("08:15:06.100"), "Permanent error (invented): 550 no such user"),
    ),
    "MessageHeld": (
        *("queued", "accepted", *OF_THE_MESSAGE, "93e3dccc-75d9-5c88-9ae0-0e75871aa458"),
        *(at("08:15:05.100"), "Recipient is on the suppression list (invented)"),
    ),
    "MessageBounced": (
        *("bounced", "accepted", *OF_THE_MESSAGE, "a9917b36-e77b-514f-b05d-3c36b01afc4c"),
        *(at("08:21:44.204511"), None),
    ),
    "MessageLinkClicked": (
        *("clicked", "accepted", *OF_THE_MESSAGE, "8afa9822-beed-579d-a245-32ed4dfcf6dd"),
        *(at("08:16:05.204511"), None),
    ),
    "MessageLoaded": (
        *("opened", "accepted", *OF_THE_MESSAGE, "2e927f13-8f8e-5d99-8791-c8edd9147806"),
        *(at("08:16:04.204511"), None),
    ),
    "MessageSent_incoming": (
        *("inbound", "none", None, "88412", ANA, "6eff5859-1983-58c4-bc72-86715c5f816b"),
        *(at("08:15:06.100"), None),
    ),
    "DomainDNSError": (
        *("unknown", "none", *OF_NOTHING, "032b6e0d-6de8-5663-af61-f2a77ed1a6e4"),
        *(at("08:16:04.204511"), None),
    ),
    "SendLimitApproaching": (
        *("unknown", "none", *OF_NOTHING, "114c597e-7690-5f01-b304-f6e9c52bb05c"),
        *(at("08:16:04.204511"), None),
    ),
    "SendLimitExceeded": (
        *("unknown", "none", *OF_NOTHING, "e6312309-f928-5813-9b94-600dd3524456"),
        *(at("08:16:05.204511"), None),
    ),
}
"""Kind, testimony, key, message id, recipient, event id, time and reason."""


@pytest.mark.parametrize("name", WEBHOOKS)
def test_a_webhook_means_and_proves_what_postal_says_of_it(name: str) -> None:
    body = fixture(f"postal/{name}.json")
    event = parse(body)
    said = (event.kind, event.testimony, event.send_key, event.message_id, event.recipient, event.event_id)
    assert (*said, event.occurred_at, event.reason) == WEBHOOKS[name]
    assert event.raw == body


def test_every_webhook_fixture_is_expected() -> None:
    assert {file.stem for file in (FIXTURES / "postal").glob("*")} == {*WEBHOOKS, *ANSWERS}


ANSWERS = {
    "api_send_ok": ("success", "88412", "accepted"),
    "api_message": ("success", "88412", "accepted"),
    "api_error": ("parameter-error", None, "rejected"),
}
"""What the API answers, always with status 200: its own status, the id as a confirmation stores it, what it proves."""


def confirmed(data: dict[str, Any]) -> str | None:
    """Return the id that a sender takes from an answer, as a confirmation stores it."""
    of_a_send = data.get("messages", {}).get(ANA, data)
    return str(of_a_send["id"]).strip("<> ") if "id" in of_a_send else None


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_has_the_message_id_of_its_events_or_proves_that_nothing_was_taken(name: str) -> None:
    answer = json.loads(fixture(f"postal/{name}.json"))
    status, message_id, proves = ANSWERS[name]
    assert (answer["status"], confirmed(answer["data"])) == (status, message_id)
    assert (message_id == parse(fixture("postal/MessageSent.json")).message_id) == (proves == "accepted")
    assert any("data.messages.RECIPIENT.id" in step and "status" in step for step in PROVIDER.facts.setup)


def test_a_message_that_is_asked_for_by_its_number_shows_the_key_as_its_tag() -> None:
    details = json.loads(fixture("postal/api_message.json"))["data"]["details"]
    assert (details["tag"], details["rcpt_to"]) == (KEY, ANA)
    assert "take a message's number only" in PROVIDER.facts.look_up


@pytest.mark.parametrize("name", ["MessageSent", "MessageBounced", "MessageHeld", "SomethingNew"])
def test_incoming_mail_proves_nothing_and_brings_no_key(name: str) -> None:
    event = about(name, direction="incoming", id=1, tag=KEY)
    assert (event.kind, event.testimony, event.send_key) == ("inbound", "none", None)


def test_a_bounce_is_about_the_message_that_bounced() -> None:
    bounce = {"id": 2, "direction": "incoming", "tag": "other", "to": "x1y2z3@rp.example.com"}
    original = {"id": 1, "direction": "outgoing", "tag": KEY, "to": ANA}
    event = parse({"event": "MessageBounced", "payload": {"original_message": original, "bounce": bounce}})
    assert (event.kind, event.message_id, event.send_key, event.recipient) == ("bounced", "1", KEY, ANA)


def test_an_event_nobody_knows_is_kept_and_proves_nothing() -> None:
    event = about("MessageReleased", id=1, tag=KEY)
    assert (event.kind, event.testimony, event.message_id, event.send_key) == ("unknown", "none", "1", KEY)


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"event": 7.5}', b'{"rcpt_to": "x"}', b"event=MessageSent"])
def test_what_is_no_webhook_is_refused(body: bytes) -> None:
    with pytest.raises(BadPayload):
        parse(body)


CLICKED = {
    "event": "MessageLinkClicked",
    "timestamp": 1793607365.0,
    "payload": {"message": {"id": 1, "to": ANA}, "url": "https://shop.example.com/", "ip_address": "203.0.113.25"},
}


def test_without_a_uuid_a_repeat_is_the_same_event_and_another_event_is_not() -> None:
    payload = CLICKED["payload"]
    assert isinstance(payload, dict)
    others = [
        {**CLICKED, "event": "MessageLoaded"},
        {**CLICKED, "timestamp": 1793607366.0},
        {**CLICKED, "payload": {**payload, "message": {"id": 2, "to": ANA}}},
        {**CLICKED, "payload": {**payload, "message": {"id": 1, "to": "bo@example.net"}}},
        {**CLICKED, "payload": {**payload, "url": "https://shop.example.com/other"}},
        {**CLICKED, "payload": {**payload, "ip_address": "203.0.113.26"}},
        {**CLICKED, "payload": {**payload, "timestamp": 1793607365.5}},
    ]
    assert parse(CLICKED).event_id == parse({**CLICKED, "uuid": None}).event_id
    assert len({parse(event).event_id for event in [CLICKED, *others]}) == 8


# -- signatures --------------------------------------------------------------------------------------------------------

BODY = fixture("postal/MessageSent.json")
STRONG = signature(BODY, KEYS[0], hashes.SHA256())
WEAK = signature(BODY, KEYS[0], hashes.SHA1())  # noqa: S303 - what Postal signs with


async def verdict(*secrets: str, body: bytes = BODY, strong: str | None = None, weak: str | None = None) -> str:
    given = {"x-postal-signature-256": strong, "x-postal-signature": weak, "x-postal-signature-kid": "ab" * 32}
    headers = {name: value for name, value in given.items() if value is not None}
    judged = await PROVIDER.verify(Delivery(body, headers), Feed("main", "postal", secrets), NOW, no_fetch)
    return judged.reason if isinstance(judged, Refused) else "verified" if judged == Verified() else repr(judged)


async def test_both_signatures_are_accepted_together_and_the_older_alone() -> None:
    assert await verdict(PEM, strong=STRONG, weak=WEAK) == "verified"
    assert await verdict(PEM, weak=WEAK) == "verified"
    assert await verdict(PEM, strong=STRONG) == "verified"


@pytest.mark.parametrize("strong", ["", " ", WEAK, STRONG[:-4], "AAAA", "x"])
async def test_where_the_stronger_signature_is_there_it_alone_decides(strong: str) -> None:
    assert await verdict(PEM, strong=strong, weak=WEAK) == "signature"
    assert await verdict(PEM, strong=STRONG, weak="AAAA") == "verified"


async def test_a_signature_of_one_kind_is_none_of_the_other() -> None:
    assert await verdict(PEM, weak=STRONG) == "signature"


async def test_the_older_signature_covers_the_body_and_fits_its_key_only() -> None:
    assert await verdict(PEM, body=BODY + b" ", weak=WEAK) == "signature"
    assert await verdict(SECRETS[1], weak=WEAK) == "signature"
    assert await verdict(SECRETS[1], PEM, weak=WEAK) == "verified"


async def test_without_a_signature_or_a_key_nothing_is_accepted() -> None:
    assert await verdict(PEM) == "missing"
    assert await verdict(strong=STRONG) == "no_secret"
    assert await verdict("no key", strong=STRONG) == "no_secret"


def test_the_public_key_is_taken_in_each_form_that_it_is_told_in() -> None:
    der = PEM.replace("-----BEGIN PUBLIC KEY-----", "").replace("-----END PUBLIC KEY-----", "")
    bare = "".join(der.split())
    forms = [PEM, PEM.replace("\n", "\\n"), PEM.replace("\n", "\r\n"), der, bare, f"v=DKIM1; h=sha256; p={bare};"]
    for form in [*forms, f"p={bare}", f'postal._domainkey.example.com TXT "v=DKIM1; t=s; p={bare};"']:
        key = rsa_public_key(form)
        assert key
        assert key.public_numbers() == KEYS[0].public_key().public_numbers()
        assert PROVIDER.objection("secrets", form) is None


def test_what_is_no_rsa_public_key_is_objected_to_and_never_told() -> None:
    elliptic = ec.generate_private_key(ec.SECP256R1()).public_key()
    encodings = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    private = KEYS[0].private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    for text in ("", "a-password", "p=", PEM[:100], elliptic.public_bytes(*encodings).decode(), private.decode()):
        objection = PROVIDER.objection("secrets", text)
        assert objection
        assert "default-dkim-record" in objection
        assert not text or text not in objection
    assert PROVIDER.objection("secrets", "basic:user:password") is None
    assert PROVIDER.objection("topics", "anything") is None


# -- stamp, facts, sample ----------------------------------------------------------------------------------------------


def test_the_stamp_is_the_messages_tag() -> None:
    stamp = PROVIDER.stamp(KEY)
    assert (stamp.body, stamp.headers, stamp.smtp_headers) == ({"tag": KEY}, {}, {"X-Postal-Tag": KEY})


def test_an_outage_of_36_minutes_loses_events_and_nothing_can_be_asked_for_them() -> None:
    facts = PROVIDER.facts
    assert facts.redelivers_for == timedelta(minutes=2 + 3 + 6 + 10 + 15)
    assert (facts.finds_by, facts.lists, facts.same_key_window) == ("nothing", False, None)
    assert facts.first_event_is_delivery
    assert not isinstance(PROVIDER, Searches)


async def test_a_sample_carries_the_feeds_credential() -> None:
    feed = Feed("main", "postal", (PEM, "basic:user:password"))
    for kind, meant in (("sent", "queued"), ("MessageBounced", "bounced"), ("delivered", "delivered")):
        sample = PROVIDER.sample(kind, KEY, feed, NOW)
        assert await PROVIDER.verify(sample, feed, NOW, no_fetch) == Verified()
        event = parse(sample.body)
        assert (event.kind, event.send_key, event.occurred_at) == (meant, KEY, NOW)
    with pytest.raises(NoSample, match="only the installation can sign"):
        PROVIDER.sample("sent", KEY, Feed("main", "postal", (PEM,)), NOW)
    with pytest.raises(NoSample, match="MessageHeld"):
        PROVIDER.sample("complained", KEY, feed, NOW)


# -- a second reading --------------------------------------------------------------------------------------------------

ANYMAIL_DIFFERS = {
    "MessageDeliveryFailed": "anymail says failed; Postal had taken the message, and a server (or Postal) refused it",
    "MessageLoaded": "anymail does not know it",
}


def theirs(name: str) -> list[Any]:
    return anymail_events("postal", Delivery(fixture(f"postal/{name}.json"), {}))


@pytest.mark.parametrize("name", sorted(WEBHOOKS.keys() - {"MessageSent_incoming"}))
def test_django_anymail_reads_the_same(name: str) -> None:
    ours, (read,) = parse(fixture(f"postal/{name}.json")), theirs(name)
    assert (read.event_id, read.recipient) == (ours.event_id, ours.recipient)
    assert (read.message_id and str(read.message_id), read.tags) == (ours.message_id, [ours.send_key])
    assert (read.event_type != ours.kind) == (name in ANYMAIL_DIFFERS)
    # It takes the time at which the webhook was stored, in whole seconds.
    assert ours.occurred_at
    assert abs(read.timestamp - ours.occurred_at) < timedelta(seconds=1)


def test_django_anymail_ignores_incoming_mail_that_we_keep() -> None:
    assert theirs("MessageSent_incoming") == []
