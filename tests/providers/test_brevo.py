# SPDX-License-Identifier: Apache-2.0
"""What Brevo sends and its API lists is read as written in its fact sheet."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web
from anymail_compare import anymail_events
from api_kit import Sent, asked, search
from apis.brevo import Fake
from case_files import FIXTURES, fixture, no_fetch

from webhooks.asking import ApiError, Query
from webhooks.event import Event
from webhooks.provider import BadPayload, Delivery, Feed, NoSample, Refused, Verified
from webhooks.providers.brevo import PROVIDER, Brevo

KEY = "e15bd8fd5b6b63a6f91c331d3c0702980d93474c2b1c4474"
ANA = "ana.reyes@example.com"
MESSAGE = "202611020815.44120937716@smtp-relay.mailin.fr"


def at(clock_time: str) -> datetime:
    return datetime.fromisoformat(f"2026-11-02T{clock_time}+00:00")


EXPECTED = {
    "request": ("queued", "accepted", KEY, at("08:15:05.318"), None),
    "request_custom_bare_string": ("queued", "accepted", KEY, at("08:15:05.318"), None),
    "request_tag_from_smtp_header": ("queued", "accepted", KEY, at("08:15:05.318"), None),
    "request_no_custom_no_tags": ("queued", "accepted", None, at("08:15:05.318"), None),
    "delivered": ("delivered", "accepted", KEY, at("08:15:07.318"), None),
    "deferred": ("deferred", "accepted", KEY, at("08:15:12.318"), "451 try again later (invented text)"),
    "soft_bounce": ("bounced", "accepted", KEY, at("08:15:13.318"), "452 mailbox full (invented text)"),
    "hard_bounce": ("bounced", "accepted", KEY, at("08:15:08.318"), "550 no such user (invented text)"),
    "complaint": ("complained", "accepted", KEY, at("09:21:44.318"), None),
    "complaint_no_ts_epoch": ("complained", "accepted", KEY, at("09:21:44"), None),
    "spam": ("complained", "accepted", KEY, at("09:21:44.318"), None),
    "opened": ("opened", "accepted", KEY, at("08:16:34.318"), None),
    "unique_opened": ("opened", "accepted", KEY, at("08:16:14.318"), None),
    "proxy_open": ("opened", "accepted", KEY, at("08:16:35.318"), None),
    "unique_proxy_open": ("opened", "accepted", KEY, at("08:16:13.318"), None),
    "click": ("clicked", "accepted", KEY, at("08:16:39.318"), None),
    "unsubscribed": ("unsubscribed", "accepted", KEY, at("08:17:04.318"), None),
    "blocked": (
        *("rejected", "rejected", KEY, at("08:15:06.318")),
        "blocked : address is on the blocklist (invented text)",
    ),
    "invalid_email": ("rejected", "rejected", KEY, at("08:15:06.318"), "invalid address (invented text)"),
    "error": ("failed", "rejected", KEY, at("08:15:06.318"), "template rendering failed (invented text)"),
}


def said(event: Event) -> tuple[Any, ...]:
    return event.kind, event.testimony, event.send_key, event.occurred_at, event.reason


def parse(body: bytes | dict[str, Any]) -> Event:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    (event,) = PROVIDER.parse(Delivery(data, {})).events
    return event


def request(**fields: Any) -> Event:
    return parse({"event": "request", "message-id": "m", **fields})


@pytest.mark.parametrize("name", EXPECTED)
def test_every_event_is_read_as_the_facts_say(name: str) -> None:
    body = fixture(f"brevo/{name}.json")
    event = parse(body)
    assert said(event) == EXPECTED[name]
    assert (event.message_id, event.recipient, event.raw) == (MESSAGE, ANA, body)


def test_every_webhook_fixture_has_an_expectation() -> None:
    names = {path.stem for path in (FIXTURES / "brevo").iterdir() if not path.stem.startswith("api_")}
    assert names == EXPECTED.keys() | {"batched", "list_addition"}


def test_a_batch_is_as_many_events_each_with_its_own_bytes() -> None:
    body = fixture("brevo/batched.json")
    events = PROVIDER.parse(Delivery(body, {})).events
    assert [said(event) for event in events] == [
        EXPECTED["request"],
        EXPECTED["delivered"],
        ("opened", "accepted", KEY, at("08:16:14.318"), None),
    ]
    assert [json.loads(event.raw) for event in events] == json.loads(body)
    assert events[0].event_id == parse(fixture("brevo/request.json")).event_id


def test_one_of_a_batch_that_cannot_be_read_fails_none_of_its_neighbours() -> None:
    good = fixture("brevo/request.json")
    parsed = PROVIDER.parse(Delivery(b'[7, {"no": "event"}, ' + good + b"]", {}))
    assert parsed.anomalies == {"damaged": 2}
    assert [(event.kind, event.testimony) for event in parsed.events[:2]] == [("unknown", "none")] * 2
    assert [event.raw for event in parsed.events] == [b"7", b'{"no": "event"}', good.strip()]
    assert parsed.events[2].send_key == KEY


def test_somebody_added_to_a_list_is_no_send() -> None:
    event = parse(fixture("brevo/list_addition.json"))
    assert said(event) == ("subscribed", "none", None, at("08:20:00"), None)
    assert (event.message_id, event.recipient) == (None, ANA)


@pytest.mark.parametrize("body", [b"", b"7", b"{}", b'{"items": []}', b'{"event": {}}', b"event=request"])
def test_what_is_no_webhook_of_brevo_is_refused(body: bytes) -> None:
    with pytest.raises(BadPayload):
        PROVIDER.parse(Delivery(body, {}))


# -- our key


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"X-Mailin-custom": '{"send_key": "order-1"}', "tags": [KEY]}, "order-1"),
        ({"X-Mailin-custom": "order.receipt:1001"}, "order.receipt:1001"),
        ({"X-Mailin-custom": "send_key:order.receipt:1001"}, "order.receipt:1001"),
        ({"X-Mailin-custom": f"shop:7|send_key:{KEY}"}, KEY),
        ({"X-Mailin-custom": "shop:7", "tags": ["order.receipt", KEY]}, KEY),
        ({"X-Mailin-custom": "shop:7|lang:en", "tags": ["send_key:order-1"]}, "order-1"),
        ({"X-Mailin-custom": "shop:7|lang:en", "tags": ["order-1"]}, None),
        ({"X-Mailin-custom": '{"shop": 7}', "tags": [KEY]}, KEY),
        ({"X-Mailin-custom": '{"shop": 7}'}, None),
        ({"X-Mailin-custom": f'{{"send_key": "{KEY[:20]}', "tags": [KEY]}, KEY),  # cut short
        ({"X-Mailin-custom": 1001}, "1001"),
        ({"X-Mailin-custom": None, "tags": None, "tag": None}, None),
        ({"X-Mailin-custom": {}, "tags": {}, "tag": 7}, None),
        ({"tags": ["order.receipt", "send_key:order.receipt:1001"]}, "order.receipt:1001"),
        ({"tags": ["order.receipt", "order-1"]}, None),  # somebody's own tags
        ({"tag": "welcome"}, None),  # the name of a template
        ({"tag": f'["order.receipt", "{KEY}"]'}, KEY),
        ({"tag": f"order.receipt,{KEY}"}, KEY),
        ({"tag": "order.receipt,send_key:order-1"}, "order-1"),
        ({"tag": "[broken"}, None),
        ({"tag": "Welcome, dear customer"}, None),  # the name of a template
        ({"tags": [7, None, "", "Order"]}, None),
    ],
)
def test_the_key_is_found_in_every_form_in_which_it_comes_back(fields: dict[str, Any], key: str | None) -> None:
    assert request(**fields).send_key == key


def test_the_stamp_is_the_custom_header_as_json_text_the_tag_and_a_uuid() -> None:
    stamp = PROVIDER.stamp(KEY)
    assert stamp.body == {
        "headers": {
            "X-Mailin-custom": '{"send_key": "' + KEY + '"}',
            "idempotencyKey": "9fdc8922-d50d-54b4-935c-8e426bddcf66",  # uuid5(uuid5(DNS, "brevo.com"), KEY)
        },
        "tags": [KEY],
    }
    assert stamp.headers == {}
    assert stamp.smtp_headers == {"X-Mailin-custom": '{"send_key": "' + KEY + '"}', "X-Mailin-Tag": KEY}
    assert PROVIDER.stamp("order-1").body["headers"] != stamp.body["headers"]


def test_a_key_that_could_be_anybodys_tag_is_marked() -> None:
    stamp = PROVIDER.stamp("order-1")
    assert stamp.body["tags"] == ["send_key:order-1"]
    assert stamp.smtp_headers["X-Mailin-Tag"] == "send_key:order-1"
    assert request(tags=["welcome", "send_key:order-1"]).send_key == "order-1"


@pytest.mark.parametrize("given", ["<m@x>", "m@x", " <m@x> "])
def test_a_message_id_is_kept_without_its_brackets(given: str) -> None:
    assert request(**{"message-id": given}).message_id == "m@x"
    assert request(**{"message-id": "<>"}).message_id is None


# -- what a send is answered

ANSWERS = {
    "api_send_ok": (["202611020815.44120937716@smtp-relay.mailin.fr"], "accepted", "the answer's messageId"),
    "api_send_batch_ok": (
        [
            "202611020815.44120937716@smtp-relay.mailin.fr",
            "202611020815.44120937717@smtp-relay.mailin.fr",
        ],
        *("accepted", "the answer's messageId"),
    ),
    "api_duplicate_idempotency_key": ([], "accepted", "duplicate_parameter means that the first request was taken"),
}
"""For each answer: its ids as the sender's side keeps them, what it proves, and the words that say so in the setup."""


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_names_the_message_as_its_events_do_and_the_setup_says_what_it_proves(name: str) -> None:
    ids, _, words = ANSWERS[name]
    answer = json.loads(fixture(f"brevo/{name}.json"))
    given = answer.get("messageIds") or [answer[field] for field in ("messageId",) if field in answer]
    assert [message_id.strip("<> ") for message_id in given] == ids
    assert MESSAGE in ids or not ids
    assert words in " ".join(PROVIDER.facts.setup)


def test_the_refusal_of_a_duplicate_is_what_the_facts_name() -> None:
    code = json.loads(fixture("brevo/api_duplicate_idempotency_key.json"))["code"]
    assert f"refused as {code}: that proves the first was taken" in PROVIDER.facts.native_key


# -- time and identity


@pytest.mark.parametrize(
    ("fields", "time"),
    [
        ({"ts_epoch": 1793607305318, "ts_event": 1}, at("08:15:05.318")),
        ({"ts_epoch": 1793607305}, at("08:15:05")),  # in seconds, as complaints have had it
        ({"ts_epoch": None, "ts_event": 1793607305, "ts": 1793610905}, at("08:15:05")),
        ({"ts_epoch": "soon", "ts": 1793607305}, at("08:15:05")),
        ({"ts_epoch": 10**400, "date": "2026-11-02 09:15:05"}, None),
        ({}, None),
    ],
)
def test_the_time_is_the_one_that_is_utc_where_there_is_one(fields: dict[str, Any], time: datetime | None) -> None:
    assert request(**fields).occurred_at == time


def test_the_id_of_an_event_stays_what_it_was() -> None:
    assert parse(fixture("brevo/request.json")).event_id == "907a691d6fbf1b36c4f5b94afdefa926a9d4f4e9"


CLICK = {"event": "click", "message-id": "m", "email": ANA, "ts_epoch": 1793607399318, "link": "https://a.example"}


@pytest.mark.parametrize(
    "change",
    [{"event": "opened"}, {"message-id": "n"}, {"email": "bo"}, {"ts_epoch": 1}, {"link": "https://b.example"}],
)
def test_a_repeat_is_the_same_event_and_another_event_is_not(change: dict[str, Any]) -> None:
    assert parse(CLICK | {"id": 7, "reason": "else"}).event_id == parse(CLICK).event_id
    assert parse(CLICK | change).event_id != parse(CLICK).event_id


# -- whose deliveries they are, and what they are answered


async def test_only_a_credential_verifies_as_nothing_is_signed() -> None:
    carried = Delivery(b"{}", {"authorization": "Bearer throw-away"})
    now = at("09:00")
    assert await PROVIDER.verify(carried, Feed("main", "brevo", ("bearer:throw-away",)), now, no_fetch) == Verified()
    for secrets, reason in [(("bearer:other",), "signature"), (("throw-away",), "no_secret"), ((), "no_secret")]:
        verdict = await PROVIDER.verify(carried, Feed("main", "brevo", secrets), now, no_fetch)
        assert isinstance(verdict, Refused)
        assert verdict.reason == reason


def test_a_secret_that_no_request_carries_is_objected_to() -> None:
    assert "bearer:TOKEN" in (Brevo().objection("secrets", "xkeysib-throw-away") or "")
    assert Brevo().objection("secrets", "bearer:throw-away") is None
    assert Brevo().objection("topics", "any") is None


def test_what_was_not_stored_is_answered_429_as_anything_else_loses_it() -> None:
    assert PROVIDER.facts.busy_status == 429
    assert PROVIDER.facts.redelivers_for == timedelta(hours=8)


def test_a_refused_duplicate_is_no_replay_so_there_is_no_same_key_retry() -> None:
    assert PROVIDER.facts.same_key_window is None
    assert "duplicate_parameter" in PROVIDER.facts.native_key


def test_no_sample_says_why() -> None:
    with pytest.raises(NoSample, match="'nonsense'; there are request"):
        PROVIDER.sample("nonsense", KEY, Feed("main", "brevo", ("bearer:t",)), at("09:00"))
    with pytest.raises(NoSample, match="bearer:TOKEN"):
        PROVIDER.sample("delivered", KEY, Feed("main", "brevo"), at("09:00"))


# -- what its API lists

BY_KEY = Query(at("08:00"), at("10:00"), KEY, ANA)


async def listed(*answers: Any, query: Query = BY_KEY) -> list[Event]:
    """What search yields of these pages, after which there is none."""
    pages = iter(answers)
    async with asked("brevo", Fake([]), lambda _: web.json_response(next(pages, {}))) as (feed, api):
        return await search("brevo", feed, api, query)


async def test_an_event_that_the_api_lists_is_read_with_its_time_zone() -> None:
    item = json.loads(fixture("brevo/api_events.json"))
    (event,) = await listed(item)
    assert said(event) == ("delivered", "accepted", KEY, at("08:15:07"), None)
    assert (event.message_id, event.recipient) == (MESSAGE, ANA)
    assert json.loads(event.raw) == item["events"][0]


@pytest.mark.parametrize(
    ("name", "kind", "testimony"),
    [
        ("requests", "queued", "accepted"),
        ("deferred", "deferred", "accepted"),
        ("softBounces", "bounced", "accepted"),
        ("hardBounces", "bounced", "accepted"),
        ("clicks", "clicked", "accepted"),
        ("loadedByProxy", "opened", "accepted"),
        ("spam", "complained", "accepted"),
        ("blocked", "rejected", "rejected"),
        ("invalid", "rejected", "rejected"),
        ("error", "failed", "rejected"),
        ("somethingNew", "unknown", "none"),
        (None, "unknown", "none"),  # seen in sendinblue/APIv3-python-library#87
    ],
)
async def test_the_api_has_names_of_its_own(name: str | None, kind: str, testimony: str) -> None:
    (event,) = await listed({"events": [{"messageId": "m", "event": name, "tag": KEY}]})
    assert (event.kind, event.testimony, event.send_key) == (kind, testimony, KEY)


async def test_among_several_tags_the_one_that_was_asked_for_is_the_key() -> None:
    for tag in ("order-1", "send_key:order-1"):
        item = {"events": [{"messageId": "m", "event": "requests", "tag": f'["send_key:first", "{tag}"]'}]}
        (event,) = await listed(item, query=Query(at("08:00"), at("10:00"), "order-1"))
        assert event.send_key == "order-1"


UNTAGGED = {"messageId": "m", "event": "requests", "email": ANA, "date": "2026-11-02T08:15:07Z", "tag": "welcome"}


@pytest.mark.parametrize(
    "change",
    [{}, {"tag": None}, {"email": "ANA.Reyes@Example.com"}, {"email": None}, {"date": None}],
)
async def test_mail_to_the_recipient_without_a_tag_of_ours_may_be_the_sought_one(change: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="^unnamed"):
        await listed({}, {"events": [UNTAGGED | change]})


@pytest.mark.parametrize("change", [{"email": "bo.lind@example.net"}, {"tag": "0" * 48}, {"tag": "send_key:other"}])
async def test_mail_to_somebody_else_or_of_another_key_is_not(change: dict[str, Any]) -> None:
    assert len(await listed({}, {"events": [UNTAGGED | change]})) == 1


async def test_of_whole_days_what_is_of_another_time_is_left_out() -> None:
    times = ("2026-11-02T07:59:59Z", "2026-11-02T10:00:01Z")
    assert await listed({}, {"events": [UNTAGGED | {"date": time} for time in times]}) == []


async def test_what_is_listed_under_our_tag_and_does_not_show_it_makes_nothing_certain() -> None:
    elsewhere = UNTAGGED | {"email": "bo.lind@example.net"}
    with pytest.raises(ApiError, match="^unnamed"):
        await listed({"events": [elsewhere]})
    events = await listed({"events": [elsewhere, UNTAGGED | {"tag": KEY}]})
    assert [event.send_key for event in events] == [None, KEY]


@pytest.mark.parametrize("answer", [{"events": None}, {"events": [7]}, {"events": [{"event": "requests"}]}, []])
async def test_an_answer_of_another_shape_is_an_error(answer: Any) -> None:
    with pytest.raises(ApiError, match="garbage"):
        await listed(answer)


async def questions(query: Query) -> list[dict[str, str]]:
    fake = Fake([])
    async with asked("brevo", fake) as (feed, api):
        await search("brevo", feed, api, query)
    return [dict(question.query) for question in fake.requests]


async def test_a_key_is_asked_for_as_a_list_of_tags_in_json() -> None:
    question, *_ = await questions(BY_KEY)
    assert question == {"tags": f'["{KEY}"]', "days": "90", "sort": "asc", "limit": "2500", "offset": "0"}
    question, *_ = await questions(Query(at("08:00"), at("10:00"), "order-1", ANA))
    assert question["tags"] == '["send_key:order-1"]'


async def test_where_nothing_has_our_tag_the_days_are_read_and_by_recipient_only_where_it_is_plain() -> None:
    _, by_day = await questions(BY_KEY)
    assert (by_day["email"], by_day["startDate"], "tags" in by_day) == (ANA, "2026-11-01", False)
    for odd in ("Ana@example.com", "ana@xn--mnchen-3ya.example", None):
        _, by_day = await questions(Query(at("08:00"), at("10:00"), KEY, odd))
        assert "email" not in by_day


async def test_a_span_is_asked_for_by_whole_days_of_utc_and_in_parts_that_are_short_enough() -> None:
    since, until = datetime.fromisoformat("2026-09-20T01:00+02:00"), datetime(2026, 11, 2, 23, 59, tzinfo=UTC)
    spans = [(question["startDate"], question["endDate"]) for question in await questions(Query(since, until))]
    assert spans == [("2026-09-18", "2026-10-17"), ("2026-10-18", "2026-11-02")]
    (by_recipient,) = await questions(Query(at("08:00"), at("10:00"), recipient=ANA))
    assert (by_recipient["email"], by_recipient["startDate"], by_recipient["endDate"]) == (
        *(ANA, "2026-11-01"),
        "2026-11-02",
    )


async def test_the_list_is_read_to_its_end_though_pages_are_shorter_than_asked_for() -> None:
    fake = Fake([Sent(f"{i:048x}", at=at("08:15")) for i in range(4)])
    async with asked("brevo", fake) as (feed, api):
        events = await search("brevo", feed, api, Query(at("08:00"), at("10:00")))
    assert len(events) == 8
    assert [question.query["offset"] for question in fake.requests] == ["0", "3", "6", "8"]


# -- a second reading

DIFFERENT_KINDS = {
    "invalid_email": "anymail says bounced; it was never handed to a server, so it is rejected",
    "unsubscribed": "anymail knows unsubscribe only; both are in use",
}
DIFFERENT_TIMES = {"complaint_no_ts_epoch": "anymail has none; ts_event may be in the account's zone"}
DIFFERENT_KEYS = {"request_tag_from_smtp_header": "anymail has it as a tag"}


@pytest.mark.parametrize("name", sorted(EXPECTED.keys() - {"request_custom_bare_string"}))  # which anymail can't read
def test_django_anymail_reads_the_same(name: str) -> None:
    request_ = Delivery(fixture(f"brevo/{name}.json"), {"content-type": "application/json"})
    (ours,), (theirs,) = PROVIDER.parse(request_).events, anymail_events("brevo", request_)
    assert (theirs.message_id or "").strip("<>") == ours.message_id  # anymail keeps the brackets
    assert theirs.recipient == ours.recipient
    assert (theirs.event_type != ours.kind) == (name in DIFFERENT_KINDS)
    assert (theirs.timestamp != ours.occurred_at) == (name in DIFFERENT_TIMES)
    assert (theirs.metadata.get("send_key") != ours.send_key) == (name in DIFFERENT_KEYS)
