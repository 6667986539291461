# SPDX-License-Identifier: Apache-2.0
"""What Resend sends is read as written in its fact sheet; what isn't Resend's is refused."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from anymail_compare import anymail_events
from case_files import FIXTURES, case, clock, delivery, feed, fixture, no_fetch

from webhooks.event import Event, Kind, Testimony
from webhooks.provider import BadPayload, Delivery, Feed, NoSample, Refused, Verified
from webhooks.providers.resend import PROVIDER
from webhooks.signature import sign_standard_webhook

KEY = "e15bd8fd5b6b63a6f91c331d3c0702980d93474c2b1c4474"
ANA = "ana.reyes@example.com"
MESSAGE = "7c1f0a52-3d0b-4e8e-9a57-b1c64d20e9f3"
INBOUND_MESSAGE = "1e77d3b9-80c2-4f3a-8f6e-0d9a5bb2c417"
YES, NO, NOTHING = Testimony.ACCEPTED, Testimony.REJECTED, Testimony.NONE


def at(clock_time: str) -> datetime:
    return datetime.fromisoformat(f"2026-11-02T{clock_time}+00:00")


EXPECTED = {
    "email_sent": (Kind.SENT, YES, KEY, MESSAGE, ANA, at("08:15:05.640")),
    "email_scheduled": (Kind.QUEUED, YES, KEY, MESSAGE, ANA, at("08:15:04.640")),
    "email_delivered": (Kind.DELIVERED, YES, KEY, MESSAGE, ANA, at("08:15:08.640")),
    "email_delivered_multi_to": (Kind.DELIVERED, YES, KEY, MESSAGE, None, at("08:15:08.640")),
    "email_delivery_delayed": (Kind.DEFERRED, YES, KEY, MESSAGE, ANA, at("08:16:34.640")),
    "email_bounced_permanent": (Kind.BOUNCED, YES, KEY, MESSAGE, ANA, at("08:15:09.640")),
    "email_bounced_transient": (Kind.BOUNCED, YES, KEY, MESSAGE, ANA, at("10:16:44.640")),
    "email_bounced_suppressed_legacy": (Kind.REJECTED, NO, KEY, MESSAGE, ANA, at("08:15:06.640")),
    "email_complained": (Kind.COMPLAINED, YES, KEY, MESSAGE, ANA, at("09:45:04.640")),
    "email_opened": (Kind.OPENED, YES, KEY, MESSAGE, ANA, at("08:25:04.640")),
    "email_clicked": (Kind.CLICKED, YES, KEY, MESSAGE, ANA, at("08:25:44.640")),
    "email_failed": (Kind.FAILED, NO, KEY, MESSAGE, ANA, at("08:15:05.640")),
    "email_suppressed": (Kind.REJECTED, NO, KEY, MESSAGE, ANA, at("08:15:05.640")),
    "email_sent_no_tags_no_headers": (Kind.SENT, YES, None, MESSAGE, ANA, at("08:15:05.640")),
    "email_received": (Kind.INBOUND, NOTHING, None, INBOUND_MESSAGE, "help@shop.example.com", at("08:15:54.640")),
    "contact_created": (Kind.UNKNOWN, NOTHING, None, None, ANA, at("08:16:04.640")),
    "contact_updated": (Kind.UNKNOWN, NOTHING, None, None, ANA, at("08:16:04.640")),
    "contact_deleted": (Kind.UNKNOWN, NOTHING, None, None, ANA, at("08:16:04.640")),
    "domain_created": (Kind.UNKNOWN, NOTHING, None, None, None, at("08:16:04.640")),
    "domain_updated": (Kind.UNKNOWN, NOTHING, None, None, None, at("08:16:04.640")),
    "domain_deleted": (Kind.UNKNOWN, NOTHING, None, None, None, at("08:16:04.640")),
    "suppression_added": (Kind.UNKNOWN, NOTHING, None, None, ANA, at("08:16:05.640")),
    "suppression_removed": (Kind.UNKNOWN, NOTHING, None, None, ANA, at("08:16:05.640")),
}


def facts_of(event: Event) -> tuple[Any, ...]:
    return event.kind, event.testimony, event.send_key, event.message_id, event.recipient, event.occurred_at


def parse(body: bytes | dict[str, Any], **headers: str) -> Event:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    (event,) = PROVIDER.parse(Delivery(data, {name.replace("_", "-"): value for name, value in headers.items()})).events
    return event


def sent(**data: Any) -> Event:
    return parse({"type": "email.sent", "data": data})


@pytest.mark.parametrize("name", EXPECTED)
def test_every_event_type_is_read_as_the_facts_say(name: str) -> None:
    body = fixture(f"resend/{name}.json")
    event = parse(body, svix_id="msg_1")
    assert facts_of(event) == EXPECTED[name]
    assert (event.event_id, event.raw) == ("msg_1", body)


def test_every_webhook_fixture_has_an_expectation() -> None:
    names = {path.stem for path in (FIXTURES / "resend").glob("*.json")}
    assert {name for name in names if not name.startswith("api_")} == set(EXPECTED)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("email_bounced_transient", "Mailbox over quota (invented text)."),
        ("email_failed", "reached_daily_quota"),
        ("email_suppressed", "Recipient is suppressed (invented text)."),
        ("email_delivered", None),
    ],
)
def test_the_reason_tells_why_a_mail_was_not_delivered(name: str, reason: str | None) -> None:
    assert parse(fixture(f"resend/{name}.json")).reason == reason


@pytest.mark.parametrize(
    ("bounce", "testimony"),
    [
        ({"subType": "OnAccountSuppressionList"}, NO),
        ({"message": "Resend has suppressed sending to this address"}, NO),
        ({"subType": "General", "message": "the mailbox is full"}, YES),
        (None, YES),
        ("odd", YES),
    ],
)
def test_a_bounce_that_was_a_suppression_was_never_sent(bounce: object, testimony: Testimony) -> None:
    event = parse({"type": "email.bounced", "data": {"bounce": bounce}})
    assert event.testimony is testimony
    assert event.kind is (Kind.REJECTED if testimony is NO else Kind.BOUNCED)


def test_the_key_is_found_in_each_place_where_it_may_come_back() -> None:
    pair = {"name": "send_key", "value": "k"}
    assert sent(tags={"send_key": "k"}).send_key == "k"
    assert sent(tags=[{"name": "other", "value": "x"}, pair]).send_key == "k"
    assert sent(headers=[{"name": "X-SEND-KEY", "value": "k"}]).send_key == "k"
    assert sent(headers={"X-Send-Key": "k"}).send_key == "k"
    assert sent(tags={"send_key": "tag"}, headers=[{"name": "X-Send-Key", "value": "header"}]).send_key == "tag"


@pytest.mark.parametrize("odd", [None, 7, "send_key", [], [None, 7, "x", {}, {"name": 7}], {"send_key": {}}, {"": ""}])
def test_odd_tags_and_headers_cost_only_the_key(odd: object) -> None:
    event = sent(email_id="m", tags=odd, headers=odd)
    assert (event.kind, event.message_id, event.send_key) == (Kind.SENT, "m", None)


def test_a_recipient_is_named_only_where_there_is_no_other() -> None:
    assert sent(to=[ANA]).recipient == ANA
    assert sent(to=ANA, cc=[], bcc=None).recipient == ANA
    assert sent(to=[ANA], cc=["bo.lind@example.net"]).recipient is None
    assert sent(to=[ANA], bcc=["bo.lind@example.net"]).recipient is None
    assert sent(to=[]).recipient is None
    assert sent(to=[{"odd": 1}]).recipient is None


@pytest.mark.parametrize("name", ["svix_id", "webhook_id"])
def test_the_event_id_is_the_header_that_stays_the_same_on_retries(name: str) -> None:
    assert parse(fixture("resend/email_sent.json"), **{name: "msg_2"}).event_id == "msg_2"


def test_without_the_header_an_id_is_derived_that_tells_events_apart() -> None:
    names = ["email_sent", "email_delivered", "email_opened", "email_clicked", "contact_created", "suppression_added"]
    events = [parse(fixture(f"resend/{name}.json")) for name in names]
    assert len({event.event_id for event in events}) == len(names)
    assert events == [parse(fixture(f"resend/{name}.json")) for name in names]


def test_an_id_too_long_for_an_index_becomes_a_hash() -> None:
    event = parse({"type": "email.sent", "data": {"email_id": "m" * 300}}, svix_id="i" * 300)
    assert event.message_id is not None
    assert event.message_id.startswith("sha256:")
    assert event.event_id.startswith("sha256:")


@pytest.mark.parametrize("data", [None, 7, "x", [], {}])
def test_an_event_without_usable_data_is_still_an_event(data: object) -> None:
    assert facts_of(parse({"type": "email.sent", "data": data})) == (Kind.SENT, YES, None, None, None, None)


def test_a_type_not_known_yet_is_kept_and_proves_nothing() -> None:
    event = parse({"type": "email.teleported", "data": {"email_id": "m", "tags": {"send_key": "k"}}})
    assert facts_of(event)[:4] == (Kind.UNKNOWN, NOTHING, "k", "m")


@pytest.mark.parametrize("body", [b"", b"hello", b"[]", b"7", b"{}", b'{"type":7.5}', b'{"type":"email.sent"', b"\xff"])
def test_a_body_that_is_no_event_is_refused(body: bytes) -> None:
    with pytest.raises(BadPayload, match=r"JSON|type"):
        parse(body)


# --- what is Resend's and what isn't


SIGNED_AT = 1795168860
NOW = datetime.fromtimestamp(SIGNED_AT, UTC)
SECRET, OTHER_SECRET = ("whsec_" + base64.b64encode(byte * 24).decode() for byte in (b"a", b"b"))
BODY = b'{"type":"email.sent"}\n'
HALF_AN_EMOJI = chr(0xD83D)


def signed(secret: str = SECRET, timestamp: str = str(SIGNED_AT), prefix: str = "svix") -> Delivery:
    key = base64.b64decode(secret.removeprefix("whsec_"))
    headers = {
        f"{prefix}-id": "msg_1",
        f"{prefix}-timestamp": timestamp,
        f"{prefix}-signature": sign_standard_webhook(key, "msg_1", timestamp, BODY),
    }
    return Delivery(BODY, headers)


async def verdict(request: Delivery, *secrets: str, tolerance: timedelta | None = PROVIDER.facts.tolerance) -> str:
    judged = await PROVIDER.verify(request, Feed("main", "resend", secrets, tolerance), NOW, no_fetch)
    return judged.reason if isinstance(judged, Refused) else "verified" if judged == Verified() else repr(judged)


@pytest.mark.parametrize("prefix", ["svix", "webhook"])
async def test_a_signature_of_any_of_the_feeds_secrets_is_accepted(prefix: str) -> None:
    assert await verdict(signed(prefix=prefix), SECRET) == "verified"
    assert await verdict(signed(prefix=prefix), OTHER_SECRET, SECRET) == "verified"
    assert await verdict(signed(OTHER_SECRET, prefix=prefix), SECRET) == "signature"


async def test_a_delivery_signed_more_than_five_minutes_away_is_stale() -> None:
    assert PROVIDER.facts.tolerance == timedelta(minutes=5)
    for offset, wanted in ((-300, "verified"), (300, "verified"), (-301, "stale"), (301, "stale")):
        assert await verdict(signed(timestamp=str(SIGNED_AT + offset)), SECRET) == wanted
    assert await verdict(signed(timestamp="1"), SECRET, tolerance=None) == "verified"


@pytest.mark.parametrize(
    "junk", ["v1,é", "v1,\udce9", "v1," + HALF_AN_EMOJI, "v1,*", "v1,", "v1", "v2,AAAA", ",", " ", "x" * 7000]
)
async def test_a_malformed_signature_is_refused_and_raises_nothing(junk: str) -> None:
    assert await verdict(Delivery(BODY, {**signed().headers, "svix-signature": junk}), SECRET) == "signature"


@pytest.mark.parametrize("missing", ["id", "timestamp", "signature"])
async def test_an_unsigned_delivery_is_refused(missing: str) -> None:
    headers = {name: value for name, value in signed().headers.items() if name != f"svix-{missing}"}
    assert await verdict(Delivery(BODY, headers), SECRET) == "missing"


async def test_a_public_key_is_never_taken_for_a_secret() -> None:
    public = SECRET.replace("whsec_", "whpk_")
    assert await verdict(signed(public.replace("whpk_", "")), public) == "no_secret"


async def test_a_carried_credential_stands_in_for_the_signature() -> None:
    request = Delivery(BODY, {"x-own": "value"})
    assert await verdict(request, SECRET, "header:X-Own=value") == "verified"
    assert await verdict(request, "header:X-Own=other") == "signature"
    assert await verdict(request, SECRET) == "missing"


# --- stamp and sample


def test_the_stamp_is_what_comes_back() -> None:
    stamp = PROVIDER.stamp(KEY)
    assert stamp.body == {"tags": [{"name": "send_key", "value": KEY}]}
    assert stamp.headers == {"Idempotency-Key": KEY}
    assert stamp.smtp_headers == {"X-Send-Key": KEY, "Resend-Idempotency-Key": KEY}
    assert sent(**stamp.body).send_key == KEY
    assert PROVIDER.facts.same_key_window == timedelta(hours=24)


@pytest.mark.parametrize("secrets", [(SECRET,), ("bearer:token",), (SECRET, "query:k=v")])
async def test_a_sample_is_one_that_the_feed_accepts(secrets: tuple[str, ...]) -> None:
    sample = PROVIDER.sample("delivered", KEY, Feed("main", "resend", secrets), NOW)
    for secret in secrets:
        assert await verdict(sample, secret) == "verified"
    (event,) = PROVIDER.parse(sample).events
    assert (event.kind, event.testimony, event.send_key, event.occurred_at) == (Kind.DELIVERED, YES, KEY, NOW)
    assert event.message_id


def test_where_no_sample_can_be_made_the_reason_is_told() -> None:
    with pytest.raises(NoSample, match="no whsec_ secret"):
        PROVIDER.sample("delivered", KEY, Feed("main", "resend", ("whpk_AAAA",)), NOW)
    with pytest.raises(NoSample, match=r"'nonsense'.*email\.sent"):
        PROVIDER.sample("nonsense", KEY, Feed("main", "resend", (SECRET,)), NOW)


# --- cases from public trouble reports


async def judge_case(number: str) -> list[Event]:
    """Verify and parse each request of a case; the parsed events of all of them."""
    of = case(number)
    events: list[Event] = []
    for request in [of, *of.get("requests", [])]:
        judged = await PROVIDER.verify(delivery(request), feed(of, tolerance=timedelta(minutes=5)), clock(of), no_fetch)
        assert judged == Verified()
        events += PROVIDER.parse(delivery(request)).events
    return events


@pytest.mark.parametrize(
    ("number", "event_id", "message_id"),
    [
        ("028", "msg_test_0003", "00000000-aaaa-4bbb-8ccc-000000000003"),
        ("039", "msg_test_0009", None),
        ("072", "msg_test_0020", "00000000-aaaa-4bbb-8ccc-000000000020"),
    ],
)
async def test_case_028_039_072_one_accepted_event(number: str, event_id: str, message_id: str | None) -> None:
    (event,) = await judge_case(number)
    assert (event.kind, event.testimony, event.send_key) == (Kind.DELIVERED, YES, "order.receipt:1001")
    assert event.event_id == event_id
    assert message_id in (None, event.message_id)


async def test_case_028_with_both_secrets_the_old_signature_alone_is_enough() -> None:
    of = case("028")
    request = delivery(of)
    old = request.headers["svix-signature"].split(" ")[-1]
    both = (SECRET, *feed(of).secrets)
    judged = await PROVIDER.verify(
        Delivery(request.body, {**request.headers, "svix-signature": old}), Feed("main", "resend", both), NOW, no_fetch
    )
    assert judged == Verified()


@pytest.mark.parametrize("secrets", [(), ("",), ("  ",), ("whsec_",)])
async def test_case_036_without_a_secret_everything_is_refused(secrets: tuple[str, ...]) -> None:
    assert await verdict(delivery(case("036")), *secrets) == "no_secret"


async def test_case_048_delivered_and_bounced_are_two_events_of_one_message() -> None:
    delivered, bounced = await judge_case("048")
    assert delivered.message_id == bounced.message_id == "00000000-aaaa-4bbb-8ccc-000000000010"
    assert (delivered.kind, bounced.kind, bounced.testimony) == (Kind.DELIVERED, Kind.BOUNCED, YES)
    assert (delivered.event_id, bounced.event_id) == ("msg_test_0010", "msg_test_0011")


async def test_case_099_a_body_of_zeros_is_refused_before_it_is_read() -> None:
    assert await verdict(delivery(case("099")), *feed(case("099")).secrets) == "signature"


# --- a second reading


DIFFERENT_KINDS = {
    "email_scheduled": "anymail does not know it; Resend's documents say that the request was taken",
    "email_failed": "anymail does not know it; Resend's documents say that it will not be sent",
    "email_suppressed": "anymail does not know it; the newer name of what follows",
    "email_bounced_suppressed_legacy": "anymail says bounced, with the suppression as its reason; it was never sent",
    "email_received": "anymail reads it at another address, as an inbound message",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_django_anymail_reads_the_same(name: str) -> None:
    request = Delivery(fixture(f"resend/{name}.json"), {"svix-id": "msg_1"})
    (ours,), (theirs,) = PROVIDER.parse(request).events, anymail_events("resend", request)
    assert (ours.message_id, ours.event_id, ours.occurred_at) == (theirs.message_id, theirs.event_id, theirs.timestamp)
    assert (ours.kind.value == theirs.event_type) is (name not in DIFFERENT_KINDS)
    # anymail takes the first of several recipients, though the event doesn't say which one it is about
    assert ours.recipient in (theirs.recipient, None) or theirs.recipient is None
