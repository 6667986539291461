# SPDX-License-Identifier: Apache-2.0
"""What Customer.io reports is read as written in its fact sheet; what isn't Customer.io's is refused."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from case_files import FIXTURES, fixture, no_fetch

from webhooks.event import Event, Kind, Testimony
from webhooks.provider import BadPayload, Delivery, Feed, NoSample, Refused, Stamp, Verified
from webhooks.providers.customerio import PROVIDER

KEY = "e15bd8fd5b6b63a6f91c331d3c0702980d93474c2b1c4474"
ANA = "ana.reyes@example.com"
MESSAGE = "dlvInVenTed000000001"
YES, NO, NOTHING = Testimony.ACCEPTED, Testimony.REJECTED, Testimony.NONE


def at(clock_time: str) -> datetime:
    return datetime.fromisoformat(f"2026-11-02T{clock_time}+00:00")


EXPECTED = {
    "email_drafted": (Kind.UNKNOWN, NOTHING, "01K9A0014A44616DAEC4D9485E", at("08:15:04"), None),
    "email_attempted": (Kind.DEFERRED, YES, "01K95E8650B96A1AD689291126", at("08:15:05"), "(invented)"),
    "email_sent": (Kind.SENT, YES, "01K9FF9EEA1238A1CF845A9485", at("08:15:05"), None),
    "email_delivered": (Kind.DELIVERED, YES, "01K9944BA4F61C683F957EB6C0", at("08:15:07"), None),
    "email_opened": (Kind.OPENED, YES, "01K98E8E37E9EEA8C02247115E", at("08:16:04"), None),
    "email_clicked": (Kind.CLICKED, YES, "01K93612987930B32849ADEE9A", at("08:16:05"), None),
    "email_converted": (Kind.SENT, YES, "01K9E01E4611C8B4C1893F3EC4", at("08:16:14"), None),
    "email_unsubscribed": (Kind.UNSUBSCRIBED, YES, "01K94AC82A23D0D2225A444DC4", at("08:16:24"), None),
    "email_bounced": (Kind.BOUNCED, YES, "01K9AF0693CF5CD4167F72C4FC", at("08:15:08"), "550 (invented)"),
    "email_spammed": (Kind.COMPLAINED, YES, "01K9F8A43DE61F6F413B78C413", at("09:15:04"), None),
    "email_dropped": (Kind.REJECTED, NO, "01K95679C1CFBAECAA83009FDC", at("08:15:05"), "suppressed (invented)"),
    "email_failed": (Kind.FAILED, NO, "01K9B65AB32B7E7C291A10C82D", at("08:15:05"), "(invented)"),
    "email_undeliverable": (Kind.FAILED, NO, "01K9B6B17C46AAA323DE63D10F", at("08:15:05"), "(invented)"),
}


def parse(body: bytes | dict[str, Any]) -> Event:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    (event,) = PROVIDER.parse(Delivery(data, {})).events
    return event


@pytest.mark.parametrize("name", EXPECTED)
def test_every_event_type_is_read_as_the_facts_say(name: str) -> None:
    body = fixture(f"customerio/{name}.json")
    event = parse(body)
    assert (event.kind, event.testimony, event.event_id, event.occurred_at, event.reason) == EXPECTED[name]
    assert (event.message_id, event.send_key, event.recipient, event.raw) == (MESSAGE, None, ANA, body)


def test_every_webhook_fixture_has_an_expectation() -> None:
    names = {path.stem for path in (FIXTURES / "customerio").glob("*.json")}
    assert names == {*EXPECTED, *ANSWERS}


ANSWERS = {"api_send_ok": (MESSAGE, YES)}
"""What a send is answered: the id as a confirmation stores it, and what the answer proves."""


def test_the_answer_to_a_send_has_the_message_id_of_its_events() -> None:
    answer = json.loads(fixture("customerio/api_send_ok.json"))
    sent = parse(fixture("customerio/email_sent.json"))
    assert (answer["delivery_id"].strip("<> "), sent.testimony) == ANSWERS["api_send_ok"]
    assert sent.message_id == answer["delivery_id"]
    assert any("delivery_id of the answer" in step for step in PROVIDER.facts.setup)


@pytest.mark.parametrize("object_type", ["push", "sms", "in_app", "slack", "webhook", "customer", "new", None, 7.5])
def test_what_is_about_no_mail_proves_nothing(object_type: object) -> None:
    event = parse({"event_id": "e", "object_type": object_type, "metric": "sent", "data": {"delivery_id": "d"}})
    assert (event.kind, event.testimony, event.message_id, event.event_id) == (Kind.UNKNOWN, NOTHING, "d", "e")


def test_a_metric_not_known_yet_is_kept_and_proves_nothing() -> None:
    event = parse({"event_id": "e", "object_type": "email", "metric": "teleported", "data": {"delivery_id": "d"}})
    assert (event.kind, event.testimony, event.message_id) == (Kind.UNKNOWN, NOTHING, "d")


def test_the_recipient_is_found_in_each_place_where_it_may_be() -> None:
    for data in ({"recipient": ANA}, {"email_address": ANA}, {"identifiers": {"email": ANA}}):
        assert parse({"object_type": "email", "metric": "sent", "data": data}).recipient == ANA


def test_without_an_event_id_one_is_derived_that_tells_events_apart() -> None:
    bodies = [json.loads(fixture(f"customerio/{name}.json")) | {"event_id": None} for name in EXPECTED]
    assert len({parse(body).event_id for body in bodies}) == len(EXPECTED)
    assert [parse(body) for body in bodies] == [parse(body) for body in bodies]


@pytest.mark.parametrize("body", [b"", b"[]", b"7", b"{}", b'{"metric":7.5}', b'{"event_type":"email_sent"}', b"\xff"])
def test_a_body_that_is_no_event_is_refused(body: bytes) -> None:
    with pytest.raises(BadPayload, match=r"JSON|metric"):
        parse(body)


# --- what is Customer.io's and what isn't

SIGNED_AT = 1793607305
NOW = datetime.fromtimestamp(SIGNED_AT, UTC)
SECRET = "throw-away-signing-key"
BODY = b'{"metric":"sent"}'
SIGNATURE = "87b3d765fef4a211a5d8b505d22a851f17147343e3aee12b7537c4ebdf956c3b"
"""Made with `printf 'v0:1793607305:{"metric":"sent"}' | openssl dgst -sha256 -hmac throw-away-signing-key`."""
SIGNED = Delivery(BODY, {"x-cio-timestamp": str(SIGNED_AT), "x-cio-signature": SIGNATURE})


async def verdict(request: Delivery, *secrets: str, now: datetime = NOW, tolerance: timedelta | None = None) -> str:
    judged = await PROVIDER.verify(request, Feed("main", "customerio", secrets, tolerance), now, no_fetch)
    return judged.reason if isinstance(judged, Refused) else "verified" if judged == Verified() else repr(judged)


async def test_the_signature_covers_version_time_and_body() -> None:
    assert await verdict(SIGNED, SECRET) == "verified"
    assert await verdict(SIGNED, "other", SECRET) == "verified"
    assert await verdict(SIGNED, "other") == "signature"
    assert await verdict(Delivery(BODY + b" ", SIGNED.headers), SECRET) == "signature"
    later = {**SIGNED.headers, "x-cio-timestamp": str(SIGNED_AT + 1)}
    assert await verdict(Delivery(BODY, later), SECRET) == "signature"
    assert await verdict(SIGNED) == "no_secret"


@pytest.mark.parametrize("missing", ["x-cio-timestamp", "x-cio-signature"])
async def test_an_unsigned_delivery_is_refused(missing: str) -> None:
    headers = {name: value for name, value in SIGNED.headers.items() if name != missing}
    assert await verdict(Delivery(BODY, headers), SECRET) == "missing"


async def test_age_is_looked_at_only_where_it_is_wanted_since_a_retry_may_keep_its_time() -> None:
    week = NOW + timedelta(days=7)
    assert PROVIDER.facts.tolerance is None
    assert await verdict(SIGNED, SECRET, now=week) == "verified"
    assert await verdict(SIGNED, SECRET, now=week, tolerance=timedelta(days=8)) == "verified"
    assert await verdict(SIGNED, SECRET, now=week, tolerance=timedelta(minutes=5)) == "stale"


async def test_a_carried_credential_stands_in_for_the_signature() -> None:
    request = Delivery(BODY, {}, query="secret=value")
    assert await verdict(request, SECRET, "query:secret=value") == "verified"
    assert await verdict(request, SECRET) == "missing"


# --- stamp and sample


def test_there_is_nothing_to_stamp_and_the_facts_say_so() -> None:
    assert PROVIDER.stamp(KEY) == Stamp()
    facts = PROVIDER.facts
    assert (facts.echoes_key, facts.finds_by, facts.same_key_window) == (False, "nothing", None)
    assert facts.redelivers_for == timedelta(days=7)


async def test_a_sample_is_one_that_the_feed_accepts() -> None:
    sample = PROVIDER.sample("rejected", KEY, Feed("main", "customerio", (SECRET,)), NOW)
    assert await verdict(sample, SECRET, tolerance=timedelta(0)) == "verified"
    event = parse(sample.body)
    assert (event.kind, event.testimony, event.occurred_at) == (Kind.REJECTED, NO, NOW)
    with pytest.raises(NoSample, match="no signing key"):
        PROVIDER.sample("sent", KEY, Feed("main", "customerio"), NOW)
