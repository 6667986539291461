# SPDX-License-Identifier: Apache-2.0
"""What SMTP2GO sends and its API lists is read as written in its fact sheet."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

import pytest
from aiohttp import web
from api_kit import Sent, asked, search
from apis.smtp2go import Fake
from case_files import FIXTURES, fixture, no_fetch

from webhooks.asking import ApiError, Query
from webhooks.event import Event
from webhooks.provider import BadPayload, Delivery, Feed, NoSample, Refused, Verified
from webhooks.providers.smtp2go import PROVIDER, Smtp2Go

KEY = "e15bd8fd5b6b63a6f91c331d3c0702980d93474c2b1c4474"
ANA = "ana.reyes@example.com"
MESSAGE = "1rT9Xy-InVenTedId0-4k"


def at(clock_time: str) -> datetime:
    return datetime.fromisoformat(f"2026-11-02T{clock_time}+00:00")


EXPECTED = {
    "processed": ("queued", "accepted", KEY, at("08:15:05"), None),
    "delivered": ("delivered", "accepted", KEY, at("08:15:07"), None),
    "open": ("opened", "accepted", KEY, at("08:16:04"), None),
    "click": ("clicked", "accepted", KEY, at("08:16:05"), None),
    "bounce_hard": ("bounced", "accepted", KEY, at("08:15:08"), "550 no such user (invented)"),
    "bounce_soft": ("bounced", "accepted", KEY, at("08:15:13"), "452 full (invented)"),
    "spam": ("complained", "accepted", KEY, at("09:15:04"), None),
    "unsubscribe": ("unsubscribed", "accepted", KEY, at("08:20:04"), None),
    "resubscribe": ("subscribed", "accepted", KEY, at("08:21:44"), None),
    "reject": ("rejected", "rejected", KEY, at("08:15:05"), "recipient suppressed (invented)"),
}


def said(event: Event) -> tuple[Any, ...]:
    return event.kind, event.testimony, event.send_key, event.occurred_at, event.reason


def parse(body: bytes | dict[str, Any], **headers: str) -> Event:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    (event,) = PROVIDER.parse(Delivery(data, named)).events
    return event


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("file", ["{}.json", "form_{}.form"])
def test_every_event_is_read_as_the_facts_say_in_either_format(name: str, file: str) -> None:
    body = fixture("smtp2go/" + file.format(name))
    event = parse(body)
    assert said(event) == EXPECTED[name]
    assert (event.message_id, event.recipient, event.raw) == (MESSAGE, ANA, body)


def test_every_webhook_fixture_has_an_expectation() -> None:
    names = {path.stem for path in (FIXTURES / "smtp2go").iterdir() if not path.stem.startswith("api_")}
    assert names == {*EXPECTED, *(f"form_{name}" for name in EXPECTED)}


@pytest.mark.parametrize("name", EXPECTED)
def test_an_event_is_the_same_in_either_format(name: str) -> None:
    form, json_ = parse(fixture(f"smtp2go/form_{name}.form")), parse(fixture(f"smtp2go/{name}.json"))
    assert form.event_id == json_.event_id


@pytest.mark.parametrize("content_type", ["application/json", "application/x-www-form-urlencoded", "text/plain", ""])
def test_the_body_tells_its_format_and_not_the_content_type(content_type: str) -> None:
    for file in ("delivered.json", "form_delivered.form"):
        event = parse(fixture(f"smtp2go/{file}"), content_type=content_type)
        assert said(event) == EXPECTED["delivered"]


def test_a_multipart_form_is_read_too() -> None:
    fields = {"event": "delivered", "email_id": "m", "rcpt": ANA, "X-Send-Key": KEY, "time": "2026-11-02T08:15:07Z"}
    parts = [f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{text}\r\n' for name, text in fields.items()]
    event = parse(("".join(parts) + "--b--\r\n").encode(), content_type="multipart/form-data; boundary=b")
    assert said(event) == EXPECTED["delivered"]


@pytest.mark.parametrize("body", [b"", b"7", b"{}", b"[]", b'[{"event": "open"}]', b'{"event": {}}', b"a=b", b"event="])
def test_what_is_no_webhook_of_smtp2go_is_refused(body: bytes) -> None:
    with pytest.raises(BadPayload):
        PROVIDER.parse(Delivery(body, {}))


@pytest.mark.parametrize("name", ["sms_delivered", "opt-out", "teleported"])
def test_what_is_no_known_event_of_mail_proves_nothing(name: str) -> None:
    event = parse({"event": name, "email_id": "m", "X-Send-Key": KEY})
    assert (event.kind, event.testimony, event.send_key) == ("unknown", "none", KEY)


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"X-Send-Key": "order-1"}, "order-1"),
        ({"x-send-key": "order-1"}, "order-1"),
        ({"X-SEND-KEY": 1001}, "1001"),
        ({"X-Send-Key": ""}, None),
        ({"X-Send-Key": {}}, None),
        ({}, None),
    ],
)
def test_the_key_is_the_header_whatever_its_case(fields: dict[str, Any], key: str | None) -> None:
    assert parse({"event": "open", **fields}).send_key == key


def test_without_rcpt_the_only_recipient_is_named_and_no_other() -> None:
    assert parse({"event": "open", "recipients": [ANA]}).recipient == ANA
    assert parse({"event": "open", "recipients": [ANA, "bo.lind@example.net"]}).recipient is None
    assert parse({"event": "open", "rcpt": ANA, "recipients": [ANA, "bo.lind@example.net"]}).recipient == ANA
    assert parse({"event": "open", "recipients": {}}).recipient is None


def test_the_id_of_an_event_stays_what_it_was() -> None:
    assert parse(fixture("smtp2go/processed.json")).event_id == "a6c652f7d17b3c1efe3ca4c56ad816116f654da6"


CLICK = {"event": "click", "email_id": "m", "rcpt": ANA, "time": "2026-11-02T08:16:05Z", "url": "https://a.example"}


@pytest.mark.parametrize(
    "change",
    [
        *({"event": "open"}, {"email_id": "n"}, {"rcpt": "bo"}, {"time": "2026-11-02T08:16:06Z"}),
        *({"url": "https://b.example"}, {"srchost": "192.0.2.2"}, {"read-secs": 10}),
    ],
)
def test_a_repeat_is_the_same_event_and_another_event_is_not(change: dict[str, Any]) -> None:
    assert parse(CLICK | {"id": "another webhook's", "geoip-city": "looked up anew"}).event_id == parse(CLICK).event_id
    assert parse(CLICK | change).event_id != parse(CLICK).event_id


def test_of_a_field_that_is_there_twice_the_first_counts() -> None:
    body = urlencode([("event", "open"), ("X-Send-Key", "first"), ("X-Send-Key", "second"), ("event", "reject")])
    event = parse(body.encode())
    assert (event.kind, event.send_key) == ("opened", "first")


# -- what a send is answered

ANSWERS = {"api_send_ok": (MESSAGE, "accepted", "confirm with the answer's email_id")}
"""For each answer: its id as the sender's side keeps it, what it proves, and the words that say so in the setup."""


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_names_the_message_as_its_events_do_and_the_setup_says_what_it_proves(name: str) -> None:
    message_id, _, words = ANSWERS[name]
    answer = json.loads(fixture(f"smtp2go/{name}.json"))["data"]
    assert (answer["email_id"].strip("<> "), answer["succeeded"]) == (message_id, 1)
    assert {parse(fixture(f"smtp2go/{event}.json")).message_id for event in EXPECTED} == {message_id}
    assert words in " ".join(PROVIDER.facts.setup)


# -- stamp, facts, credentials


def test_the_stamp_is_a_header_of_the_message() -> None:
    stamp = PROVIDER.stamp(KEY)
    assert stamp.body == {"custom_headers": [{"header": "X-Send-Key", "value": KEY}]}
    assert (stamp.headers, stamp.smtp_headers) == ({}, {"X-Send-Key": KEY})


def test_a_person_is_told_to_list_the_header_in_the_webhook() -> None:
    assert "headers: add X-Send-Key, or our key doesn't come back" in PROVIDER.facts.setup
    assert PROVIDER.facts.same_key_window is None


async def test_only_a_credential_verifies_as_nothing_is_signed() -> None:
    carried = Delivery(b"{}", {"x-hook": "throw-away"}, query="token=throw-away")
    now = at("09:00")
    for secret in ("header:X-Hook=throw-away", "query:token=throw-away"):
        assert await PROVIDER.verify(carried, Feed("main", "smtp2go", (secret,)), now, no_fetch) == Verified()
    for secrets, reason in [(("header:X-Hook=other",), "signature"), (("throw-away",), "no_secret"), ((), "no_secret")]:
        verdict = await PROVIDER.verify(carried, Feed("main", "smtp2go", secrets), now, no_fetch)
        assert isinstance(verdict, Refused)
        assert verdict.reason == reason


def test_a_secret_that_no_request_carries_is_objected_to() -> None:
    assert "header:Name=value" in (Smtp2Go().objection("secrets", "throw-away") or "")
    assert Smtp2Go().objection("secrets", "header:X-Hook=throw-away") is None
    assert Smtp2Go().objection("topics", "any") is None


def test_no_sample_says_why() -> None:
    with pytest.raises(NoSample, match="'nonsense'; there are processed"):
        PROVIDER.sample("nonsense", KEY, Feed("main", "smtp2go", ("bearer:t",)), at("09:00"))
    with pytest.raises(NoSample, match="header:Name=value"):
        PROVIDER.sample("delivered", KEY, Feed("main", "smtp2go"), at("09:00"))


# -- what its API lists

BY_RECIPIENT = Query(at("08:10"), at("09:20"), KEY, ANA)


async def listed(answer: Any) -> list[Event]:
    async with asked("smtp2go", Fake([]), lambda _: web.json_response(answer)) as (feed, api):
        return await search("smtp2go", feed, api, BY_RECIPIENT)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("api_activity_search", ("delivered", "accepted", KEY, at("08:15:07"), None)),
        ("api_activity_search_documented", ("bounced", "accepted", KEY, at("08:15:08"), "550 no such user (invented)")),
    ],
)
async def test_an_event_is_listed_with_the_header_that_was_asked_for(file: str, expected: tuple[Any, ...]) -> None:
    answer = json.loads(fixture(f"smtp2go/{file}.json"))
    (event,) = await listed(answer)
    assert said(event) == expected
    assert (event.message_id, event.recipient) == (MESSAGE, ANA)
    assert json.loads(event.raw) == answer["data"]["events"][0]


@pytest.mark.parametrize(
    ("name", "kind", "testimony"),
    [
        ("processed", "queued", "accepted"),
        ("delivered", "delivered", "accepted"),
        ("opened", "opened", "accepted"),
        ("clicked", "clicked", "accepted"),
        ("soft-bounced", "bounced", "accepted"),
        ("hard-bounced", "bounced", "accepted"),
        ("spam", "complained", "accepted"),
        ("unsubscribed", "unsubscribed", "accepted"),
        ("resubscribed", "subscribed", "accepted"),
        ("rejected", "rejected", "rejected"),
        ("teleported", "unknown", "none"),
    ],
)
async def test_the_api_has_names_of_its_own(name: str, kind: str, testimony: str) -> None:
    item = {"email_id": "m", "event": name, "custom_headers": {"x-send-key": KEY}, "headers": "From: a raw text"}
    (event,) = await listed({"data": {"events": [item], "continue_token": None}})
    assert (event.kind, event.testimony, event.send_key) == (kind, testimony, KEY)


@pytest.mark.parametrize(
    "answer",
    [
        *({"data": {"events": None}}, {"data": {"events": [7]}}, {"data": {"events": [{"event": "spam"}]}}),
        *({"data": {"events": [{"email_id": "m"}]}}, {"data": {"error": "no"}}, {"events": []}, []),
    ],
)
async def test_an_answer_of_another_shape_is_an_error(answer: Any) -> None:
    with pytest.raises(ApiError, match="garbage"):
        await listed(answer)


@dataclass
class Noting(Fake):
    """Keeps the questions that it was asked."""

    questions: list[Any] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.questions.append(await request.json())
        return await super().answer(request)


async def questions(sends: list[Sent], query: Query) -> list[Any]:
    fake = Noting(sends)
    async with asked("smtp2go", fake) as (feed, api):
        await search("smtp2go", feed, api, query)
    return fake.questions


async def test_the_question_names_the_recipient_and_the_span_rounded_outwards() -> None:
    since, until = datetime.fromisoformat("2026-11-02T09:10:00.900+01:00"), at("09:20:00.100")
    (question,) = await questions([], Query(since, until, KEY, BY_RECIPIENT.recipient))
    assert question == {
        "search_recipient": "ana.reyes@example.com",
        "start_date": "2026-11-02T08:10:00Z",
        "end_date": "2026-11-02T09:20:02Z",
        "custom_headers": ["X-Send-Key"],
        "limit": 1000,
    }  # the end is not included


@pytest.mark.parametrize(
    "odd", ["Ana@example.com", "ana@Example.com", "ana@xn--mnchen-3ya.example", '"a b"@example.com']
)
async def test_an_address_that_could_be_written_otherwise_is_looked_for_among_all(odd: str) -> None:
    (question,) = await questions([], Query(at("08:10"), at("09:20"), KEY, odd))
    assert "search_recipient" not in question


UNNAMED = {"email_id": "m", "event": "processed", "recipient": ANA, "date": "2026-11-02T08:15:07Z"}


def page(*events: dict[str, Any]) -> dict[str, Any]:
    return {"data": {"events": events, "continue_token": None}}


@pytest.mark.parametrize("change", [{}, {"recipient": "ANA.Reyes@Example.com"}, {"custom_headers": {}}])
async def test_mail_to_the_recipient_without_the_header_may_be_the_sought_one(change: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="^unnamed"):
        await listed(page(UNNAMED | change))


async def test_mail_to_somebody_else_or_beside_the_sought_one_does_not_matter() -> None:
    assert len(await listed(page(UNNAMED | {"recipient": "bo.lind@example.net"}))) == 1
    events = await listed(page(UNNAMED, UNNAMED | {"custom_headers": {"X-Send-Key": KEY}}))
    assert [event.send_key for event in events] == [None, KEY]


async def test_the_same_question_goes_on_with_the_token_to_the_end() -> None:
    sends = [Sent(f"{i:048x}", at=at("08:15")) for i in range(3)]
    first, second = await questions(sends, Query(at("08:10"), at("09:20")))
    assert "search_recipient" not in first
    assert second == {**first, "continue_token": "3"}
