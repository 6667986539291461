# SPDX-License-Identifier: Apache-2.0
"""What Loops sends is read as written in its fact sheet; what isn't Loops' is refused."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from case_files import FIXTURES, fixture, no_fetch

from webhooks.event import Event, Kind, Testimony
from webhooks.provider import BadPayload, Delivery, Feed, NoSample, Refused, Verified
from webhooks.providers.loops import PROVIDER

KEY = "e15bd8fd5b6b63a6f91c331d3c0702980d93474c2b1c4474"
ANA = "ana.reyes@example.com"
MESSAGE = "cmInVentedEmail1"
YES, NOTHING = Testimony.ACCEPTED, Testimony.NONE


def at(clock_time: str) -> datetime:
    return datetime.fromisoformat(f"2026-11-02T{clock_time}+00:00")


EXPECTED = {
    "transactional_email_sent": (Kind.SENT, YES, MESSAGE, at("08:15:05")),
    "campaign_email_sent": (Kind.SENT, YES, MESSAGE, at("08:15:05")),
    "loop_email_sent": (Kind.SENT, YES, MESSAGE, at("08:15:05")),
    "email_delivered": (Kind.DELIVERED, YES, MESSAGE, at("08:15:07")),
    "email_softBounced": (Kind.DEFERRED, YES, MESSAGE, at("08:15:13")),
    "email_hardBounced": (Kind.BOUNCED, YES, MESSAGE, at("08:15:08")),
    "email_opened": (Kind.OPENED, YES, MESSAGE, at("08:16:04")),
    "email_clicked": (Kind.CLICKED, YES, MESSAGE, at("08:16:05")),
    "email_unsubscribed": (Kind.UNSUBSCRIBED, YES, MESSAGE, at("08:16:24")),
    "email_resubscribed": (Kind.SUBSCRIBED, YES, MESSAGE, at("08:16:34")),
    "email_spamReported": (Kind.COMPLAINED, YES, MESSAGE, at("09:15:04")),
    "contact_created": (Kind.UNKNOWN, NOTHING, None, at("08:15:05")),
    "contact_deleted": (Kind.UNKNOWN, NOTHING, None, at("08:15:05")),
    "contact_unsubscribed": (Kind.UNSUBSCRIBED, NOTHING, None, at("08:15:05")),
    "contact_mailingList_subscribed": (Kind.SUBSCRIBED, NOTHING, None, at("08:15:05")),
    "contact_mailingList_unsubscribed": (Kind.UNSUBSCRIBED, NOTHING, None, at("08:15:05")),
}


def parse(body: bytes | dict[str, Any], **headers: str) -> Event:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    (event,) = PROVIDER.parse(Delivery(data, {name.replace("_", "-"): value for name, value in headers.items()})).events
    return event


@pytest.mark.parametrize("name", EXPECTED)
def test_every_event_type_is_read_as_the_facts_say(name: str) -> None:
    body = fixture(f"loops/{name}.json")
    event = parse(body, webhook_id="msg_1")
    assert (event.kind, event.testimony, event.message_id, event.occurred_at) == EXPECTED[name]
    assert (event.event_id, event.send_key, event.recipient, event.reason) == ("msg_1", None, ANA, None)
    assert event.raw == body


def test_every_webhook_fixture_has_an_expectation() -> None:
    names = {path.stem for path in (FIXTURES / "loops").glob("*.json")}
    assert {name for name in names if not name.startswith("api_")} == {*EXPECTED, "testing_testEvent"}


def test_the_test_event_of_the_settings_page_is_no_event() -> None:
    found = PROVIDER.parse(Delivery(fixture("loops/testing_testEvent.json"), {}))
    assert (list(found.events), found.control) == ([], "ping")


def test_without_the_header_an_id_is_derived_that_tells_events_apart() -> None:
    events = [parse(fixture(f"loops/{name}.json")) for name in EXPECTED]
    assert len({event.event_id for event in events}) == len(EXPECTED)
    assert events == [parse(fixture(f"loops/{name}.json")) for name in EXPECTED]


def test_a_name_not_known_yet_is_kept_and_proves_nothing() -> None:
    event = parse({"eventName": "email.teleported", "email": {"id": "m"}})
    assert (event.kind, event.testimony, event.message_id) == (Kind.UNKNOWN, NOTHING, "m")


@pytest.mark.parametrize("body", [b"", b"[]", b"7", b"{}", b'{"eventName":7.5}', b'{"type":"email.sent"}', b"\xff"])
def test_a_body_that_is_no_event_is_refused(body: bytes) -> None:
    with pytest.raises(BadPayload, match=r"JSON|eventName"):
        parse(body)


# --- what is Loops' and what isn't

SIGNED_AT = 1793607305
NOW = datetime.fromtimestamp(SIGNED_AT, UTC)
SECRET, OTHER_SECRET = ("whsec_" + base64.b64encode(byte * 24).decode() for byte in (b"a", b"b"))
BODY = b'{"eventName":"email.delivered"}'
SIGNATURE = "2M6BdGuqGd+opB24HHUgL2m+B3JtsmQQxqWIRbzDX4Q="
"""Made by openssl: HMAC-SHA256 of `msg_1.1793607305.` and the body with 24 times the letter a, in base64."""
SIGNED = Delivery(
    BODY, {"webhook-id": "msg_1", "webhook-timestamp": str(SIGNED_AT), "webhook-signature": f"v1,{SIGNATURE}"}
)


async def verdict(request: Delivery, *secrets: str, now: datetime = NOW) -> str:
    feed = Feed("main", "loops", secrets, PROVIDER.facts.tolerance)
    judged = await PROVIDER.verify(request, feed, now, no_fetch)
    return judged.reason if isinstance(judged, Refused) else "verified" if judged == Verified() else repr(judged)


async def test_a_signature_of_any_of_the_feeds_secrets_is_accepted() -> None:
    assert await verdict(SIGNED, SECRET) == "verified"
    assert await verdict(SIGNED, OTHER_SECRET, SECRET) == "verified"
    assert await verdict(SIGNED, OTHER_SECRET) == "signature"
    assert await verdict(Delivery(BODY + b" ", SIGNED.headers), SECRET) == "signature"
    assert await verdict(Delivery(BODY, {}), SECRET) == "missing"
    assert await verdict(SIGNED) == "no_secret"


async def test_a_delivery_signed_more_than_five_minutes_away_is_stale() -> None:
    assert await verdict(SIGNED, SECRET, now=NOW + timedelta(minutes=5)) == "verified"
    assert await verdict(SIGNED, SECRET, now=NOW + timedelta(minutes=5, seconds=1)) == "stale"


def test_a_secret_that_can_sign_nothing_is_objected_to() -> None:
    assert PROVIDER.objection("secrets", "plain words") is not None  # type: ignore[attr-defined]
    assert PROVIDER.objection("secrets", SECRET) is None  # type: ignore[attr-defined]


# --- stamp and sample


def test_the_key_is_sent_as_idempotency_key_and_never_comes_back() -> None:
    stamp = PROVIDER.stamp(KEY)
    assert stamp.headers == {"Idempotency-Key": KEY}
    assert (stamp.body, stamp.smtp_headers, stamp.message_id) == ({}, {}, None)
    assert len(KEY) <= 100
    assert PROVIDER.facts.echoes_key is False


def test_a_repeat_within_a_day_sends_nothing_so_the_same_key_may_be_tried_again() -> None:
    assert PROVIDER.facts.same_key_window == timedelta(hours=24)
    assert PROVIDER.facts.finds_by == "nothing"


ANSWERS = {
    "api_send_ok": (True, "accepted", "2xx means that it was sent now"),
    "api_409_duplicate": (False, "accepted", "409 that it was sent before and is to be confirmed, without an id"),
}
"""For each answer, none of which has an id that events carry: its success, what it proves, and what the facts say."""


@pytest.mark.parametrize("name", ANSWERS)
def test_no_answer_names_a_message_and_the_facts_say_what_it_proves(name: str) -> None:
    success, _, words = ANSWERS[name]
    answer = json.loads(fixture(f"loops/{name}.json"))
    assert answer["success"] is success
    assert answer.keys() <= {"success", "message"}
    assert words in PROVIDER.facts.native_key
    assert "decide nothing" in PROVIDER.facts.key_is_echoed_in


@pytest.mark.parametrize("secrets", [(SECRET,), ("bearer:token",), (SECRET, "query:k=v")])
async def test_a_sample_is_one_that_the_feed_accepts(secrets: tuple[str, ...]) -> None:
    sample = PROVIDER.sample("delivered", KEY, Feed("main", "loops", secrets), NOW)
    for secret in secrets:
        assert await verdict(sample, secret) == "verified"
    event = parse(sample.body)
    assert (event.kind, event.testimony, event.occurred_at) == (Kind.DELIVERED, YES, NOW)


def test_where_no_sample_can_be_made_the_reason_is_told() -> None:
    with pytest.raises(NoSample, match="no whsec_ secret"):
        PROVIDER.sample("delivered", KEY, Feed("main", "loops"), NOW)
    with pytest.raises(NoSample, match=r"'nonsense'.*email\.delivered"):
        PROVIDER.sample("nonsense", KEY, Feed("main", "loops", (SECRET,)), NOW)
