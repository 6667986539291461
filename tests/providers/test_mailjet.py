# SPDX-License-Identifier: Apache-2.0
"""What Mailjet sends and its API lists is read as written in its fact sheet."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from aiohttp import web
from anymail_compare import anymail_events
from api_kit import Sent, asked, search
from apis.mailjet import LOGIN, Fake
from case_files import FIXTURES, case, clock, delivery, fixture, no_fetch

from webhooks.asking import ApiError, Query
from webhooks.event import Event
from webhooks.provider import BadPayload, Delivery, Feed, NoSample, Refused, Verified
from webhooks.providers.mailjet import PROVIDER, Mailjet

KEY = "e15bd8fd5b6b63a6f91c331d3c0702980d93474c2b1c4474"
ANA = "ana.reyes@example.com"
MESSAGE = "288230412345678901"


def at(clock_time: str) -> datetime:
    return datetime.fromisoformat(f"2026-11-02T{clock_time}+00:00")


EXPECTED = {
    "sent": ("delivered", "accepted", KEY, at("08:15:07"), None),
    "sent_no_custom": ("delivered", "accepted", None, at("08:15:07"), None),
    "open": ("opened", "accepted", KEY, at("08:16:04"), None),
    "click": ("clicked", "accepted", KEY, at("08:16:05"), None),
    "bounce_hard": ("bounced", "accepted", KEY, at("08:15:08"), "recipient: user unknown: 550 (invented)"),
    "bounce_soft_greylisted": ("deferred", "accepted", KEY, at("08:15:08"), "domain: greylisted: 451 (invented)"),
    "blocked_preblocked": ("rejected", "rejected", KEY, at("08:15:06"), "mailjet: preblocked"),
    "blocked_duplicate_in_campaign": ("queued", "accepted", KEY, at("08:15:06"), "mailjet: duplicate in campaign"),
    "spam": ("complained", "accepted", KEY, at("09:15:04"), None),
    "unsub": ("unsubscribed", "accepted", KEY, at("09:16:44"), None),
}


def said(event: Event) -> tuple[Any, ...]:
    return event.kind, event.testimony, event.send_key, event.occurred_at, event.reason


def parse(body: bytes | dict[str, Any]) -> Event:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    (event,) = PROVIDER.parse(Delivery(data, {})).events
    return event


@pytest.mark.parametrize("name", EXPECTED)
def test_every_event_is_read_as_the_facts_say(name: str) -> None:
    body = fixture(f"mailjet/{name}.json")
    event = parse(body)
    assert said(event) == EXPECTED[name]
    assert (event.message_id, event.recipient, event.raw) == (MESSAGE, ANA, body)


def test_every_webhook_fixture_has_an_expectation() -> None:
    names = {path.stem for path in (FIXTURES / "mailjet").iterdir() if not path.stem.startswith("api_")}
    assert names == EXPECTED.keys() | {"grouped"}


def test_a_group_is_as_many_events_of_mixed_types_each_with_its_own_bytes() -> None:
    body = fixture("mailjet/grouped.json")
    events = PROVIDER.parse(Delivery(body, {})).events
    assert [said(event) for event in events] == [EXPECTED["sent"], EXPECTED["open"], EXPECTED["click"]]
    assert [json.loads(event.raw) for event in events] == json.loads(body)


def test_an_event_is_the_same_whether_grouped_or_bare() -> None:
    grouped = PROVIDER.parse(Delivery(fixture("mailjet/grouped.json"), {})).events
    bare = [parse(fixture(f"mailjet/{name}.json")) for name in ("sent", "open", "click")]
    assert [event.event_id for event in grouped] == [event.event_id for event in bare]


def test_one_of_a_group_that_cannot_be_read_fails_none_of_its_neighbours() -> None:
    good = fixture("mailjet/sent.json")
    parsed = PROVIDER.parse(Delivery(b'[7, {"no": "event"}, ' + good + b"]", {}))
    assert parsed.anomalies == {"damaged": 2}
    assert [(event.kind, event.testimony) for event in parsed.events[:2]] == [("unknown", "none")] * 2
    assert [event.raw for event in parsed.events] == [b"7", b'{"no": "event"}', good.strip()]
    assert parsed.events[2].send_key == KEY


@pytest.mark.parametrize("body", [b"", b"7", b"{}", b'{"event": {}}', b"event=sent"])
def test_what_is_no_webhook_of_mailjet_is_refused(body: bytes) -> None:
    with pytest.raises(BadPayload):
        PROVIDER.parse(Delivery(body, {}))


@pytest.mark.parametrize(
    ("fields", "kind", "testimony"),
    [
        ({"event": "blocked", "error": "duplicate in campaign"}, "queued", "accepted"),
        ({"event": "blocked", "error": "Duplicate in Campaign"}, "queued", "accepted"),
        ({"event": "blocked", "error": "blacklisted"}, "rejected", "rejected"),
        ({"event": "blocked"}, "rejected", "rejected"),
        ({"event": "bounce", "error": "duplicate in campaign"}, "bounced", "accepted"),
        ({"event": "bounce", "error": "greylisted", "hard_bounce": True}, "bounced", "accepted"),
        ({"event": "bounce", "error": "greylisted"}, "deferred", "accepted"),
        ({"event": "bounce", "error": "typofix"}, "bounced", "accepted"),
        ({"event": "teleported"}, "unknown", "none"),
    ],
)
def test_only_a_block_that_was_no_duplicate_is_a_rejection(fields: dict[str, Any], kind: str, testimony: str) -> None:
    event = parse(fields)
    assert (event.kind, event.testimony) == (kind, testimony)


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"CustomID": "order-1", "Payload": ""}, "order-1"),
        ({"CustomID": "", "Payload": '{"send_key": "order-1"}'}, "order-1"),
        ({"CustomID": "an id of theirs", "Payload": '{"send_key": "order-1"}'}, "order-1"),
        ({"CustomID": "order-1", "Payload": '{"shop": 7}'}, "order-1"),
        ({"CustomID": "order-1", "Payload": "<shop/>"}, "order-1"),
        ({"CustomID": "order-1", "Payload": '{"cut'}, "order-1"),
        ({"Payload": {"send_key": "order-1"}}, "order-1"),
        ({"CustomID": 1001}, "1001"),
        ({"CustomID": None, "Payload": None}, None),
        ({"CustomID": [], "Payload": []}, None),
        ({}, None),
    ],
)
def test_the_key_is_found_in_payload_and_custom_id(fields: dict[str, Any], key: str | None) -> None:
    assert parse({"event": "sent", **fields}).send_key == key


def test_a_message_id_is_kept_to_its_last_digit_whatever_it_is_called() -> None:
    for number in (1152921515000000123, 9007199254740993, 10**25 + 1):
        assert parse({"event": "sent", "MessageID": number}).message_id == str(number)
    assert parse({"event": "sent", "MessageID": "1152921515000000123"}).message_id == "1152921515000000123"
    assert parse({"event": "sent", "mj_message_id": "18858825588804172"}).message_id == "18858825588804172"


def test_the_id_of_an_event_stays_what_it_was() -> None:
    assert parse(fixture("mailjet/sent.json")).event_id == "260a9a58cfad6ecd5aa910c03fe146f5c3a7ca4b"


CLICK = {
    "event": "click",
    "MessageID": 7,
    "email": ANA,
    "time": 1793607365,
    "url": "https://a.example",
    "ip": "192.0.2.1",
}


@pytest.mark.parametrize(
    "change",
    [
        *({"event": "open"}, {"MessageID": 8}, {"email": "bo"}, {"time": 1793607366}),
        *({"url": "https://b.example"}, {"ip": "192.0.2.2"}, {"agent": "another"}),
    ],
)
def test_a_repeat_is_the_same_event_and_another_event_is_not(change: dict[str, Any]) -> None:
    assert parse(CLICK | {"geo": "looked up anew"}).event_id == parse(CLICK).event_id
    assert parse(CLICK | change).event_id != parse(CLICK).event_id


# -- what a send is answered

ANSWERS = {"api_send_ok": (MESSAGE, "accepted", "confirm with the MessageID (not the MessageUUID)")}
"""For each answer: its id as the sender's side keeps it, what it proves, and the words that say so in the setup."""


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_names_the_message_as_its_events_do_and_the_setup_says_what_it_proves(name: str) -> None:
    message_id, _, words = ANSWERS[name]
    (message,) = json.loads(fixture(f"mailjet/{name}.json"))["Messages"]
    assert message["Status"] == "success"
    assert str(message["To"][0]["MessageID"]).strip("<> ") == message_id
    assert {parse(fixture(f"mailjet/{event}.json")).message_id for event in EXPECTED} == {message_id}
    assert words in " ".join(PROVIDER.facts.setup)


# -- stamp, facts, credentials


def test_the_stamp_is_of_one_message_and_makes_a_campaign_of_its_key() -> None:
    stamp = PROVIDER.stamp(KEY)
    payload = '{"send_key": "' + KEY + '"}'
    assert stamp.body == {
        "CustomID": KEY,
        "EventPayload": payload,
        "CustomCampaign": KEY,
        "DeduplicateCampaign": True,
    }
    assert stamp.headers == {"Idempotency-Key": KEY}
    assert stamp.smtp_headers == {
        "X-MJ-CustomID": KEY,
        "X-MJ-EventPayload": payload,
        "X-Mailjet-Campaign": KEY,
        "X-Mailjet-DeduplicateCampaign": "1",
    }


def test_absence_means_less_as_no_event_comes_before_the_recipients_server_answered() -> None:
    assert PROVIDER.facts.first_event_is_delivery


def test_a_second_submission_is_not_answered_with_the_first_so_there_is_no_same_key_retry() -> None:
    assert PROVIDER.facts.same_key_window is None
    assert "duplicate in campaign" in PROVIDER.facts.native_key


async def test_only_a_credential_verifies_as_nothing_is_signed() -> None:
    carried = Delivery(b"{}", {"authorization": LOGIN})
    now = at("09:00")
    fitting = Feed("main", "mailjet", ("basic:public:private",))
    assert await PROVIDER.verify(carried, fitting, now, no_fetch) == Verified()
    for secrets, reason in [(("basic:public:other",), "signature"), (("private",), "no_secret"), ((), "no_secret")]:
        verdict = await PROVIDER.verify(carried, Feed("main", "mailjet", secrets), now, no_fetch)
        assert isinstance(verdict, Refused)
        assert verdict.reason == reason


def test_a_secret_that_no_request_carries_is_objected_to() -> None:
    assert "basic:user:password" in (Mailjet().objection("secrets", "throw-away") or "")
    assert Mailjet().objection("secrets", "basic:user:password") is None
    assert Mailjet().objection("topics", "any") is None


def test_no_sample_says_why() -> None:
    feed = Feed("main", "mailjet", ("basic:user:password",))
    with pytest.raises(NoSample, match="'nonsense'; there are sent"):
        PROVIDER.sample("nonsense", KEY, feed, at("09:00"))
    with pytest.raises(NoSample, match="first event is sent"):
        PROVIDER.sample("queued", KEY, feed, at("09:00"))
    with pytest.raises(NoSample, match="basic:user:password"):
        PROVIDER.sample("sent", KEY, Feed("main", "mailjet"), at("09:00"))


# -- cases from public trouble reports


@pytest.mark.parametrize("number", ["008", "079"])
async def test_case_008_079_a_bare_object_is_a_batch_of_one_and_its_id_keeps_every_digit(number: str) -> None:
    of = case(number)
    feed = Feed("main", "mailjet", ("basic:" + of["config"]["basic_auth"],))
    assert await PROVIDER.verify(delivery(of), feed, clock(of), no_fetch) == Verified()
    (event,) = PROVIDER.parse(delivery(of)).events
    expected = of["expect"]
    assert (event.message_id, event.send_key, event.testimony) == (
        expected["message_id"],
        expected["send_key"],
        expected["evidence"],
    )
    assert (event.kind, event.recipient) == ("delivered", "ada@example.org")


# -- what its API lists

BY_KEY = Query(at("08:10"), at("09:20"), KEY, ANA)
NOTHING_FOUND = json.loads(fixture("mailjet/api_message_by_customid_none.json"))


async def listed(*answers: Any, key: str = KEY) -> list[Event]:
    """What search yields of these pages, after which there is none."""
    pages = iter(answers)
    async with asked("mailjet", Fake([]), lambda _: web.json_response(next(pages, NOTHING_FOUND))) as (feed, api):
        return await search("mailjet", feed, api, replace(BY_KEY, wire_key=key))


async def test_a_message_is_listed_with_its_key_and_its_recipient() -> None:
    answer = json.loads(fixture("mailjet/api_message_show_customid.json"))
    (event,) = await listed(answer)
    assert said(event) == ("sent", "accepted", KEY, at("08:15:05"), None)
    assert (event.message_id, event.recipient) == (MESSAGE, ANA)
    assert json.loads(event.raw) == answer["Data"][0]


async def test_a_message_that_does_not_show_its_custom_id_makes_nothing_certain() -> None:
    hidden = json.loads(fixture("mailjet/api_message_by_customid.json"))
    with pytest.raises(ApiError, match="^unnamed"):
        await listed(hidden)
    shown = json.loads(fixture("mailjet/api_message_show_customid.json"))
    events = await listed({"Data": hidden["Data"] + shown["Data"]})
    assert [(event.send_key, event.message_id) for event in events] == [(None, MESSAGE), (KEY, MESSAGE)]


IN_SPAN = {"ID": 7, "Status": "sent", "ContactAlt": ANA, "CustomID": "1042"}


async def test_what_the_filter_did_not_find_is_found_in_the_span() -> None:
    (event,) = await listed(NOTHING_FOUND, {"Data": [IN_SPAN | {"CustomID": KEY}]})
    assert (event.send_key, event.testimony) == (KEY, "accepted")
    (event,) = await listed(NOTHING_FOUND, {"Data": [IN_SPAN]}, key="1042")
    assert event.send_key == "1042"


@pytest.mark.parametrize(
    "change", [{}, {"CustomID": ""}, {"CustomID": None}, {"ContactAlt": "ANA.Reyes@Example.com"}, {"ContactAlt": None}]
)
async def test_mail_to_the_recipient_under_another_id_of_somebodys_may_be_the_sought_one(
    change: dict[str, Any],
) -> None:
    with pytest.raises(ApiError, match="^unnamed"):
        await listed(NOTHING_FOUND, {"Data": [IN_SPAN | change]})


@pytest.mark.parametrize("change", [{"ContactAlt": "bo.lind@example.net", "CustomID": None}, {"CustomID": "0" * 48}])
async def test_mail_to_somebody_else_or_of_another_key_is_not(change: dict[str, Any]) -> None:
    assert len(await listed(NOTHING_FOUND, {"Data": [IN_SPAN | change]})) == 1


async def test_nothing_found_is_an_empty_list() -> None:
    assert await listed() == []


@pytest.mark.parametrize(
    ("status", "state", "kind", "testimony"),
    [
        ("queued", 0, "queued", "accepted"),
        ("deferred", 0, "deferred", "accepted"),
        ("opened", 0, "opened", "accepted"),
        ("clicked", 0, "clicked", "accepted"),
        ("bounce", 1, "bounced", "accepted"),
        ("softbounced", 3, "bounced", "accepted"),
        ("hardbounced", 1, "bounced", "accepted"),
        ("spam", 0, "complained", "accepted"),
        ("unsub", 0, "unsubscribed", "accepted"),
        ("blocked", 14, "rejected", "rejected"),
        ("blocked", 15, "queued", "accepted"),  # a duplicate in its campaign
        ("unknown", 0, "unknown", "none"),
        (None, None, "unknown", "none"),
    ],
)
async def test_the_status_of_a_message_says_what_became_of_it(
    status: str | None, state: int | None, kind: str, testimony: str
) -> None:
    (event,) = await listed({"Data": [{"ID": 7, "CustomID": KEY, "Status": status, "StateID": state}]})
    assert (event.kind, event.testimony, event.send_key) == (kind, testimony, KEY)


@pytest.mark.parametrize("answer", [{"Data": None}, {"Data": [7]}, {"Data": [{"Status": "sent"}]}, {"Count": 0}, []])
async def test_an_answer_of_another_shape_is_an_error(answer: Any) -> None:
    with pytest.raises(ApiError, match="garbage"):
        await listed(answer)


async def test_the_question_names_the_key_and_the_span_rounded_outwards() -> None:
    fake = Fake([])
    async with asked("mailjet", fake) as (feed, api):
        since, until = datetime.fromisoformat("2026-11-02T09:10:00.900+01:00"), at("09:20:00.100")
        await search("mailjet", feed, api, Query(since, until, KEY, ANA))
    by_key, by_span = (dict(question.query) for question in fake.requests)
    assert by_key.pop("CustomID") == KEY
    assert (
        by_key
        == by_span
        == {
            "FromTS": "2026-11-02T08:10:00Z",
            "ToTS": "2026-11-02T09:20:01Z",
            "ShowCustomID": "true",
            "ShowContactAlt": "true",
            "Limit": "1000",
            "Offset": "0",
        }
    )


async def test_the_list_is_read_to_its_end_whatever_total_says() -> None:
    fake = Fake([Sent(f"{i:048x}", at=at("08:15")) for i in range(4)])
    async with asked("mailjet", fake) as (feed, api):
        events = await search("mailjet", feed, api, Query(at("08:10") - timedelta(days=1), at("09:20")))
    assert len(events) == 4
    assert [question.query["Offset"] for question in fake.requests] == ["0", "3", "4"]


async def test_both_halves_of_the_credential_are_needed() -> None:
    fake = Fake([], settings={"api_key": "public"})
    async with asked("mailjet", fake) as (feed, api):
        with pytest.raises(ApiError, match=r"unconfigured: set feeds\.main\.api_secret"):
            await search("mailjet", feed, api, BY_KEY)


# -- a second reading

DIFFERENT_KINDS = {
    "blocked_duplicate_in_campaign": "anymail says rejected; it proves that an earlier one of the same key was taken",
}


@pytest.mark.parametrize("name", [*EXPECTED, "grouped"])
def test_django_anymail_reads_the_same(name: str) -> None:
    request = Delivery(fixture(f"mailjet/{name}.json"), {"content-type": "application/json"})
    for ours, theirs in zip(PROVIDER.parse(request).events, anymail_events("mailjet", request), strict=True):
        assert (theirs.message_id, theirs.recipient, theirs.timestamp) == (
            ours.message_id,
            ours.recipient,
            ours.occurred_at,
        )
        assert theirs.metadata.get("send_key") == ours.send_key
        assert (theirs.event_type != ours.kind) == (name in DIFFERENT_KINDS)
