# SPDX-License-Identifier: Apache-2.0
"""Mailgun: what its JSON webhooks mean and prove. Expectations were written from its documents by hand."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pytest
from anymail_compare import anymail_events
from case_files import FIXTURES, case, delivery, fixture
from hypothesis import given
from hypothesis import strategies as st
from test_mailgun_signature import KEY, feed, signed, verify

from webhooks.event import Event
from webhooks.provider import BadPayload, Delivery, Refused, Verified
from webhooks.providers.mailgun import PROVIDER

OUR_KEY = "e15bd8fd5b6b63a6f91c331d3c0702980d93474c2b1c4474"
MESSAGE = "20261102081504.6f1e2d3c4b5a6978@mg.shop.example.com"


def parse(**event: Any) -> Event:
    return parse_body(json.dumps({"event-data": event}).encode())


def parse_body(body: bytes) -> Event:
    (event,) = PROVIDER.parse(Delivery(body, {})).events
    return event


class Expected(NamedTuple):
    kind: str
    testimony: str
    event_id: str
    occurred_at: str
    send_key: str | None = OUR_KEY
    reason: str | None = None


WEBHOOKS = {
    "accepted": Expected("queued", "accepted", "aAbB0000accepted000001:2026-11-02", "2026-11-02T08:15:04.512301+00:00"),
    "delivered": Expected(
        "delivered", "accepted", "aAbB0000delivered00001:2026-11-02", "2026-11-02T08:15:06.020114+00:00"
    ),
    "delivery_status_null": Expected(
        "delivered", "accepted", "aAbB0000delivered00009:2026-11-02", "2026-11-02T08:15:06.920114+00:00"
    ),
    "failed_permanent": Expected(
        "bounced",
        "accepted",
        "aAbB0000failedperm0001:2026-11-02",
        "2026-11-02T08:15:12.900001+00:00",
        reason="bounce 550 5.1.1 no such mailbox",
    ),
    "failed_temporary": Expected(
        "deferred",
        "accepted",
        "aAbB0000failedtemp0001:2026-11-02",
        "2026-11-02T08:15:10.700001+00:00",
        reason="generic 451 4.7.1 greylisted",
    ),
    "failed_suppressed": Expected(
        "rejected",
        "rejected",
        "aAbB0000failedsupp0001:2026-11-02",
        "2026-11-02T08:15:05.100001+00:00",
        reason="suppress-bounce 605 Not delivering to previously bounced address",
    ),
    "failed_suppressed_unsubscribe": Expected(
        "rejected",
        "rejected",
        "aAbB0000failedsupp0002:2026-11-02",
        "2026-11-02T08:15:05.100002+00:00",
        reason="suppress-unsubscribe 606 Not delivering to unsubscribed address",
    ),
    "failed_delayed_bounce": Expected(
        "bounced",
        "accepted",
        "aAbB0000faileddely0001:2026-11-02",
        "2026-11-02T13:20:00.404668+00:00",
        send_key=None,
        reason="generic 550 delayed bounce",
    ),
    "opened": Expected("opened", "accepted", "aAbB0000opened00000001:2026-11-02", "2026-11-02T08:43:20.100001+00:00"),
    "clicked": Expected("clicked", "accepted", "aAbB0000clicked0000001:2026-11-02", "2026-11-02T08:43:40.100001+00:00"),
    "complained": Expected(
        "complained", "accepted", "aAbB0000complain000001:2026-11-03", "2026-11-03T10:00:00.100001+00:00"
    ),
    "unsubscribed": Expected(
        "unsubscribed", "accepted", "aAbB0000unsubscr000001:2026-11-03", "2026-11-03T10:01:40.100001+00:00"
    ),
}
ANSWERS = {"api_messages_response": (MESSAGE, "accepted")}
"""What a send is answered: the id as a confirmation stores it, and what the answer proves."""
NO_WEBHOOKS = {*ANSWERS, "api_events_page", "api_logs_page", "api_events_rejected_item"}


def test_every_fixture_is_expected() -> None:
    assert {file.stem for file in (FIXTURES / "mailgun").glob("*.json")} == WEBHOOKS.keys() | NO_WEBHOOKS


@pytest.mark.parametrize("name", WEBHOOKS)
def test_a_webhook_means_and_proves_what_mailgun_says_of_it(name: str) -> None:
    body = fixture(f"mailgun/{name}.json")
    event, expected = parse_body(body), WEBHOOKS[name]
    assert event.occurred_at is not None
    assert expected == (
        event.kind, event.testimony, event.event_id, event.occurred_at.isoformat(), event.send_key, event.reason,
    )  # fmt: skip
    assert event.message_id == MESSAGE
    assert event.recipient == "ana.reyes@example.com"
    assert event.raw == body


@pytest.mark.parametrize("name", ANSWERS)
def test_the_answer_to_a_send_has_the_message_id_of_its_events_in_brackets(name: str) -> None:
    answer = json.loads(fixture(f"mailgun/{name}.json"))
    accepted = parse_body(fixture("mailgun/accepted.json"))
    assert (answer["id"].strip("<> "), accepted.testimony) == ANSWERS[name]
    assert accepted.message_id == MESSAGE
    assert answer["id"] == f"<{MESSAGE}>"


def test_a_rejected_message_of_the_events_api_is_rejected_as_a_whole() -> None:
    event = parse(**json.loads(fixture("mailgun/api_events_rejected_item.json")))
    assert (event.kind, event.testimony, event.recipient) == ("rejected", "rejected", None)
    assert (event.message_id, event.send_key) == (MESSAGE, OUR_KEY)
    assert event.event_id == "aAbB0000rejected000001:2026-11-02"
    assert event.reason == "Sandbox subdomains are for test purposes only."


def test_variables_that_come_as_json_text_are_read() -> None:
    (item,) = json.loads(fixture("mailgun/api_logs_page.json"))["items"]
    event = parse(**item)
    assert (event.kind, event.testimony, event.send_key) == ("delivered", "accepted", OUR_KEY)
    assert event.event_id == "aAbB0000delivered00001"  # the Logs API gives the time elsewhere


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"1",
        b'"x"',
        b"\xff\xfe",
        b"{}",
        b'{"event-data": null}',
        b'{"event-data": [1]}',
        b"[" * 9999,
    ],
)
async def test_what_is_no_webhook_of_mailgun_is_refused_in_one_line(body: bytes) -> None:
    with pytest.raises(BadPayload) as refusal:
        PROVIDER.parse(Delivery(body, {}))
    assert "\n" not in str(refusal.value)
    assert isinstance(await verify(Delivery(body, {}), feed(KEY)), Refused)


@pytest.mark.parametrize(
    "reason", ["bounce", "generic", "espblock", "greylisted", "blacklisted", "old", "hardfail", None]
)
def test_a_permanent_failure_proves_that_delivery_was_tried(reason: str | None) -> None:
    event = parse(event="failed", severity="permanent", reason=reason, **{"delivery-status": {"code": 550}})
    assert (event.kind, event.testimony) == ("bounced", "accepted")


@pytest.mark.parametrize("reason", ["suppress-bounce", "suppress-complaint", "suppress-unsubscribe"])
def test_a_suppressed_message_is_rejected_whatever_its_code(reason: str) -> None:
    event = parse(event="failed", severity="permanent", reason=reason)
    assert (event.kind, event.testimony) == ("rejected", "rejected")


@pytest.mark.parametrize("code", [605, 606, 607, "605"])
def test_a_suppression_code_is_rejected_whatever_its_reason(code: int | str) -> None:
    event = parse(event="failed", severity="permanent", reason="hardfail", **{"delivery-status": {"code": code}})
    assert (event.kind, event.testimony) == ("rejected", "rejected")


def test_a_failure_without_severity_is_a_bounce_as_nothing_says_that_it_is_tried_again() -> None:
    assert (parse(event="failed").kind, parse(event="failed").testimony) == ("bounced", "accepted")


@pytest.mark.parametrize("name", ["list_uploaded", "something_new", None, 7, ["accepted"], {"a": 1}])
def test_an_event_that_is_not_known_is_kept_and_proves_nothing(name: Any) -> None:
    event = parse(event=name, id="e1", **{"user-variables": {"send_key": "k"}})
    assert (event.kind, event.testimony, event.send_key) == ("unknown", "none", "k")


def test_a_message_in_test_mode_was_accepted() -> None:
    event = parse(event="delivered", flags={"is-test-mode": True})
    assert (event.kind, event.testimony) == ("delivered", "accepted")


INCOMING = [
    {"routes": [{"expression": "match_recipient('.*')", "actions": ["stop()"]}]},
    {"flags": {"is-routed": True}},
]


@pytest.mark.parametrize("mark", INCOMING)
@pytest.mark.parametrize("variables", [{}, {"send_key": "order-1"}])
def test_mail_that_came_in_proves_nothing_even_with_our_key(mark: dict[str, Any], variables: dict[str, str]) -> None:
    accepted = parse(event="accepted", **mark, **{"user-variables": variables})
    assert (accepted.kind, accepted.testimony) == ("inbound", "none")
    passed_on = parse(event="delivered", **mark, **{"user-variables": variables})
    assert (passed_on.kind, passed_on.testimony) == ("delivered", "none")


def test_stored_incoming_mail_proves_nothing() -> None:
    assert (parse(event="stored").kind, parse(event="stored").testimony) == ("inbound", "none")


def test_accepted_from_a_stranger_proves_nothing_but_with_our_key_it_does() -> None:
    flags = {"is-authenticated": False, "is-routed": None}
    stranger = parse(event="accepted", flags=flags)
    assert (stranger.kind, stranger.testimony) == ("inbound", "none")
    ours = parse(event="accepted", flags=flags, **{"user-variables": {"send_key": "order-1"}})
    assert (ours.kind, ours.testimony) == ("queued", "accepted")
    bounce = parse(event="failed", severity="permanent", flags=flags)
    assert (bounce.kind, bounce.testimony) == ("bounced", "accepted")


@pytest.mark.parametrize(
    ("variables", "key"),
    [
        ({"send_key": "order-1"}, "order-1"),
        ({"send_key": 123}, "123"),
        ({"send_key": 10**22 + 1}, "10000000000000000000001"),
        ('{"send_key": "order-1"}', "order-1"),
        ('{"send_key": "order-1", "cut of', None),
        ("\ud800", None),
        ({"send_key": ""}, None),
        ({"send_key": ["order-1"]}, None),
        ({}, None),
        ([], None),
        (None, None),
        (7, None),
    ],
)
def test_the_key_is_found_in_every_form_of_user_variables(variables: Any, key: str | None) -> None:
    assert parse(event="accepted", **{"user-variables": variables}).send_key == key


@pytest.mark.parametrize(
    ("message", "message_id"),
    [
        ({"headers": {"message-id": "<a@b>"}}, "a@b"),
        ({"headers": {"message-id": "a@b"}}, "a@b"),
        ({"headers": {"message-id": "<>"}}, None),
        ({"headers": {"message-id": None}}, None),
        ({"headers": []}, None),
        ({"headers": None}, None),
        ("text", None),
        (None, None),
    ],
)
def test_a_message_id_has_no_brackets(message: Any, message_id: str | None) -> None:
    assert parse(event="accepted", message=message).message_id == message_id


def test_an_id_is_unique_within_a_day_so_the_utc_day_is_part_of_it() -> None:
    last, first = 1793663999.9, 1793664000.1  # around midnight
    assert parse(event="opened", id="e1", timestamp=last).event_id == "e1:2026-11-02"
    assert parse(event="opened", id="e1", timestamp=first).event_id == "e1:2026-11-03"
    assert parse(event="opened", id="e1").event_id == "e1"
    assert parse(event="opened", id="e1", timestamp="1793664000.1").event_id == "e1:2026-11-03"


def test_without_an_id_a_repeat_is_the_same_event_and_another_event_is_not() -> None:
    one: dict[str, Any] = {
        "event": "clicked",
        "timestamp": 1793664000.25,
        "recipient": "a@example.org",
        "url": "https://a.example",
    }
    other: list[dict[str, Any]] = [
        {"event": "opened"},
        {"timestamp": 1793664000.5},
        {"recipient": "b@example.org"},
        {"url": "https://b.example"},
    ]
    ids = [parse(**{**one, **change}).event_id for change in ({}, *other)]
    assert len(set(ids)) == 5
    assert parse(**one).event_id == ids[0]


def test_an_id_longer_than_an_index_entry_is_hashed() -> None:
    event = parse(event="opened", id="x" * 3000, message={"headers": {"message-id": "y" * 3000}})
    assert event.event_id.startswith("sha256:")
    assert str(event.message_id).startswith("sha256:")


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)
)
FIELDS = st.sampled_from(
    [
        "event", "id", "timestamp", "recipient", "severity", "reason", "user-variables", "flags", "routes", "message",
        "delivery-status", "reject", "url",
    ]
)  # fmt: skip


@given(FIELDS, ODD)
def test_no_field_of_an_odd_type_loses_the_event(name: str, value: Any) -> None:
    event = json.loads(fixture("mailgun/delivered.json"))["event-data"]
    assert len(PROVIDER.parse(signed(**{**event, name: value})).events) == 1


@pytest.mark.parametrize("subject", [rb'"half an emoji \ud83d"', b"NaN", b'"\xff"', b'"\x01"'])
async def test_odd_characters_lose_neither_signature_nor_event(subject: bytes) -> None:
    body = signed(event="opened", id="e1", subject="?").body.replace(b'"?"', subject)
    assert await verify(Delivery(body, {}), feed(KEY)) == Verified()
    assert (parse_body(body).kind, parse_body(body).event_id, parse_body(body).raw) == ("opened", "e1", body)


@pytest.mark.parametrize("number", ["009", "051"])
async def test_a_reported_acceptance_is_testimony_though_objects_are_null_or_absent(number: str) -> None:
    reported = case(number)
    request = delivery(reported)
    assert await verify(request, feed(*reported["config"]["mailgun_signing_keys"])) == Verified()
    (event,) = PROVIDER.parse(request).events
    assert (event.kind, event.testimony) == ("queued", reported["expect"]["evidence"])
    assert event.send_key == reported["expect"]["send_key"]
    assert event.message_id == "20261120100000.1.ABCD@mg.sender.example"
    assert event.recipient == "ada@example.org"
    assert event.occurred_at == datetime(2026, 11, 20, 10, 0, 2, 250000, tzinfo=UTC)


ANYMAIL_DIFFERS = {
    "failed_suppressed": "anymail says bounced and gives the suppression as its reason; delivery was never tried",
    "failed_suppressed_unsubscribe": "the same",
}


@pytest.mark.parametrize("name", WEBHOOKS)
def test_django_anymail_reads_the_same(name: str) -> None:
    request = Delivery(fixture(f"mailgun/{name}.json"), {"content-type": "application/json"})
    (ours,), (theirs,) = PROVIDER.parse(request).events, anymail_events("mailgun", request)
    assert theirs.message_id == f"<{ours.message_id}>"  # anymail adds the brackets, we take them off
    assert (theirs.recipient, theirs.timestamp) == (ours.recipient, ours.occurred_at)
    assert theirs.metadata.get("send_key") == ours.send_key
    assert (theirs.event_type != ours.kind) == (name in ANYMAIL_DIFFERS)
