# SPDX-License-Identifier: Apache-2.0
"""SendGrid's API: what its Email Logs are asked and say, and how its Event Webhook is set up."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web
from api_kit import Sent, asked, search
from apis.sendgrid import Fake
from case_files import FIXTURES, fixture

from webhooks.asking import ApiError, Query
from webhooks.event import Event
from webhooks.provider import Delivery
from webhooks.providers.sendgrid import PROVIDER

KEY = "e15bd8fd5b6b63a6f91c331d3c0702980d93474c2b1c4474"
MESSAGE = "kQ7v1ZrTS9mJ4pXcW2nLbA"
ANA = "ana.reyes@example.com"
SINCE = datetime(2026, 11, 2, 8, 10, 0, 500_000, tzinfo=UTC)
UNTIL = datetime(2026, 11, 2, 9, 15, 0, 500_000, tzinfo=UTC)
URL = "https://hooks.example.com/webhooks/main"


def answering(*answers: Any) -> Callable[[web.Request], web.Response]:
    """Return what answers each request with the next of some answers."""
    left = iter(answers)
    return lambda _: web.json_response(next(left))


async def found(fake: Fake, recipient: str | None = ANA, **more: Any) -> list[Event]:
    async with asked("sendgrid", fake, **more) as (feed, api):
        return await search("sendgrid", feed, api, Query(SINCE, UNTIL, KEY, recipient))


def answer(name: str) -> Any:
    return json.loads(fixture(f"sendgrid/{name}.json"))


SEARCHED, MESSAGE_OF_IT = answer("api_logs_search"), answer("api_logs_message")


ANSWERS = {"api_mail_send_response_headers": (202, MESSAGE, "accepted")}
"""What a send is answered: status, the id as a confirmation stores it, and what the answer proves."""


@pytest.mark.parametrize("name", ANSWERS)
def test_the_answer_to_a_send_has_the_message_id_of_its_events_in_a_header(name: str) -> None:
    answered = answer(name)
    (processed,) = PROVIDER.parse(Delivery(fixture("sendgrid/processed.json"), {})).events
    assert (answered["status"], answered["headers"]["X-Message-Id"].strip("<> "), processed.testimony) == ANSWERS[name]
    assert processed.message_id == MESSAGE
    assert any("X-Message-Id of the answer" in step for step in PROVIDER.facts.setup)


def test_every_answer_of_the_api_is_expected() -> None:
    names = {file.stem for file in (FIXTURES / "sendgrid").glob("api_*")}
    assert names == {*ANSWERS, "api_logs_search", "api_logs_message"}


# --- Email Logs


async def test_the_events_of_a_message_are_the_webhooks() -> None:
    (event,) = await found(Fake([]), spoil=answering(SEARCHED, MESSAGE_OF_IT))
    assert (event.kind, event.testimony, event.send_key) == ("queued", "accepted", KEY)
    assert (event.message_id, event.event_id) == (MESSAGE, "cHJvY2Vzc2VkLTAwMDAwMDAxLWV4YW1wbGU")
    assert (event.recipient, event.occurred_at) == (ANA, datetime(2026, 11, 2, 8, 15, 5, tzinfo=UTC))
    (posted,) = PROVIDER.parse(Delivery(fixture("sendgrid/processed.json"), {})).events
    assert (posted.message_id, posted.event_id) == (event.message_id, event.event_id)
    assert list(PROVIDER.parse(Delivery(event.raw, {})).events) == [event]


async def test_it_is_asked_by_recipient_and_by_time_rounded_outwards_then_for_each_message() -> None:
    fake = Fake([Sent(KEY, message_id="m1"), Sent(KEY, "bo.lind@example.net", message_id="m2")])
    assert [(event.message_id, event.kind) for event in await found(fake)] == [("m1", "queued"), ("m1", "delivered")]
    (query,) = fake.queries
    assert query == (
        'sg_message_id_created_at >= TIMESTAMP "2026-11-02T08:10:00Z"'
        ' AND sg_message_id_created_at < TIMESTAMP "2026-11-02T09:15:01Z"'
        " AND to_email = 'ana.reyes@example.com'"
    )
    assert [(request.method, request.path) for request in fake.requests] == [
        ("POST", "/v3/logs"),
        ("GET", "/v3/logs/m1.recvd-6c5d9f8b7a-x2p4q-1-6907A1B2-3F.0"),
    ]
    assert {request.headers["Authorization"] for request in fake.requests} == {"Bearer SG.throw-away"}


@pytest.mark.parametrize(
    ("sent_to", "sought"),
    [
        ("Ana.Reyes@Example.com", "ana.reyes@example.COM"),
        ("ana.reyes@example.com", "Ana.Reyes@example.com"),
        ("o'brien@example.com", "o'brien@example.com"),
        ("ana@grüße.example", "ana@xn--gre-6ka8l.example"),
        ("", "Ana@example.com"),
    ],
)
async def test_an_address_that_a_query_might_miss_is_compared_instead(sent_to: str, sought: str) -> None:
    fake = Fake([Sent(KEY, sent_to, message_id="m1"), Sent("k", "bo.lind@example.net", message_id="m2")])
    events = await found(fake, sought)
    assert {event.message_id for event in events} == {"m1"}
    assert "to_email" not in fake.queries[0]


async def test_a_span_with_more_messages_than_an_answer_is_halved_until_all_are_read() -> None:
    others = [Sent("k", f"{i}@example.net", f"m{i}", SINCE + timedelta(seconds=2 * i)) for i in range(1500)]
    fake = Fake([*others, Sent(KEY, "Ana@example.com", "ours", UNTIL)])
    assert {event.send_key for event in await found(fake, "Ana@example.com")} == {KEY}
    spans = [query.split('"')[1::2] for query in fake.queries]
    assert spans == [
        ["2026-11-02T08:10:00Z", "2026-11-02T09:15:01Z"],
        ["2026-11-02T08:10:00Z", "2026-11-02T08:42:30Z"],
        ["2026-11-02T08:42:30Z", "2026-11-02T09:15:01Z"],
    ]


async def test_a_second_with_more_messages_than_an_answer_is_an_error() -> None:
    fake = Fake([Sent("k", f"{i}@example.net", f"m{i}", SINCE) for i in range(1000)])
    with pytest.raises(ApiError, match="^too_many"):
        await found(fake, "Ana@example.com")


async def test_a_dropped_message_is_rejected() -> None:
    (event,) = await found(Fake([Sent(KEY, message_id="m1", rejected=True)]))
    assert (event.kind, event.testimony, event.send_key, event.message_id) == ("rejected", "rejected", KEY, "m1")


async def test_a_cancelled_scheduled_message_is_rejected() -> None:
    cancelled = {**MESSAGE_OF_IT, "events": [{**MESSAGE_OF_IT["events"][0], "event": "cancel_drop"}]}
    (event,) = await found(Fake([]), spoil=answering(SEARCHED, cancelled))
    assert (event.kind, event.testimony) == ("rejected", "rejected")


@pytest.mark.parametrize(
    ("status", "meaning"),
    [
        ("processed", ("queued", "accepted")),
        ("delivered", ("delivered", "accepted")),
        ("deferred", ("deferred", "accepted")),
        ("bounced", ("bounced", "accepted")),
        ("blocked", ("bounced", "accepted")),
        ("dropped", ("rejected", "rejected")),
        ("something new", ("unknown", "none")),
    ],
)
@pytest.mark.parametrize("events", [[], [{"event": "received", "sg_event_id": "r", "recv_msgid": MESSAGE}]])
async def test_without_an_event_of_its_own_a_message_is_what_its_status_says(
    status: str, meaning: tuple[str, str], events: list[Any]
) -> None:
    told = {**MESSAGE_OF_IT, "events": events, "status": status}
    (event,) = await found(Fake([]), spoil=answering(SEARCHED, told))
    (again,) = await found(Fake([]), spoil=answering(SEARCHED, told))
    assert (event.kind, event.testimony, event.send_key, event.message_id) == (*meaning, KEY, MESSAGE)
    assert (event.recipient, event.occurred_at) == (ANA, None)
    assert event == again


@pytest.mark.parametrize("arguments", [None, {}, {"app": "checkout"}, {"send_key": ""}])
async def test_a_message_to_the_recipient_that_shows_no_key_may_be_the_sought_one(arguments: Any) -> None:
    unnamed = {**MESSAGE_OF_IT, "custom_args": arguments}
    with pytest.raises(ApiError, match="^unnamed"):
        await found(Fake([]), spoil=answering(SEARCHED, unnamed))
    (event,) = await found(Fake([]), None, spoil=answering(SEARCHED, unnamed))
    assert (event.testimony, event.send_key) == ("accepted", None)
    both = {"messages": SEARCHED["messages"] * 2}
    assert [event.send_key for event in await found(Fake([]), spoil=answering(both, unnamed, MESSAGE_OF_IT))] == [
        None,
        KEY,
    ]


async def test_a_message_to_somebody_else_is_not_read() -> None:
    fake = Fake([Sent("", "bo.lind@example.net", "m1"), Sent("", "bo.lind@example.net", "m2")])
    assert await found(fake, "Ana.Reyes@example.com") == []
    assert len(fake.requests) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"custom_args": "{}"},
        {"custom_args": []},
        {"events": None},
        {"events": [7]},
        {"events": [{}]},
        {"sg_message_id": None},
        {"events": [], "status": None},
    ],
)
async def test_a_message_of_another_shape_is_no_answer(change: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="^garbage"):
        await found(Fake([]), spoil=answering(SEARCHED, MESSAGE_OF_IT | change))


@pytest.mark.parametrize("searched", [{"messages": [7]}, {"messages": [{}]}, {"messages": None}, {"result": []}])
async def test_a_search_of_another_shape_is_no_answer(searched: Any) -> None:
    with pytest.raises(ApiError, match="^garbage"):
        await found(Fake([]), spoil=answering(searched))


def test_its_facts_say_what_look_up_and_back_fill_can_do() -> None:
    facts = PROVIDER.facts
    assert (facts.finds_by, facts.lists, facts.settles_after) == ("recipient", True, timedelta(minutes=15))
    assert facts.native_key.startswith("none")
    assert facts.same_key_window is None
    assert any("{url}" in step for step in facts.setup)


# --- the Event Webhook


EVENTS = (
    *("processed", "dropped", "delivered", "deferred", "bounce", "open", "click"),
    *("spam_report", "unsubscribe", "group_unsubscribe", "group_resubscribe"),
)
ALL_ON = dict.fromkeys(EVENTS, True)
OTHER = {**dict.fromkeys(EVENTS, False), "enabled": False, "url": f"{URL}/x", "id": "other", "public_key": "k"}


def hook(**changes: Any) -> dict[str, Any]:
    return {
        "enabled": True,
        "url": URL,
        "id": "ours",
        "public_key": "key",
        "friendly_name": "mine",
        **ALL_ON,
        **changes,
    }


async def changed(fake: Fake) -> list[str]:
    """Make all changes; return their texts and what they tell."""
    async with asked("sendgrid", fake) as (feed, api):
        changes = await PROVIDER.changes(URL, feed, api)
        told = [await change.make() for change in changes]
        return [change.text for change in changes] + [line for line in told if line]


@pytest.mark.parametrize("others", [[], [OTHER]])
async def test_a_missing_webhook_is_created_for_all_events_and_signed(others: list[dict[str, Any]]) -> None:
    fake = Fake([], hooks=[dict(other) for other in others])
    made = f"hook-{len(others)}"
    assert await changed(fake) == [
        "create the webhook, for all events and signed",
        f"set feeds.main.secrets to key-of-{made}",
    ]
    ours = hook(id=made, public_key=f"key-of-{made}", friendly_name="esp-reconciler")
    assert fake.hooks == [*others, ours]
    assert await changed(fake) == []


async def test_looking_changes_nothing() -> None:
    fake = Fake([])
    async with asked("sendgrid", fake) as (feed, api):
        assert len(await PROVIDER.changes(URL, feed, api)) == 1
    assert [request.method for request in fake.requests] == ["GET"]


@pytest.mark.parametrize(
    ("wrong", "texts"),
    [
        ({"enabled": False}, ["switch on enabled"]),
        ({"processed": False, "group_resubscribe": None}, ["switch on processed, group_resubscribe"]),
        ({"public_key": ""}, ["switch on the webhook's signature", "set feeds.main.secrets to key-of-ours"]),
        (
            {"enabled": False, "click": False, "public_key": None},
            [
                "switch on enabled, click",
                "switch on the webhook's signature",
                "set feeds.main.secrets to key-of-ours",
            ],
        ),
    ],
)
async def test_what_is_wrong_with_the_webhook_is_put_right_and_others_stay(
    wrong: dict[str, Any], texts: list[str]
) -> None:
    fake = Fake([], hooks=[dict(OTHER), hook(**wrong)])
    assert await changed(fake) == texts
    key = "key-of-ours" if "public_key" in wrong else "key"
    assert fake.hooks == [OTHER, hook(public_key=key)]
    assert await changed(fake) == []


async def test_a_key_that_is_there_already_is_not_touched() -> None:
    fake = Fake([], hooks=[hook(click=False)])
    assert await changed(fake) == ["switch on click"]
    assert [request.path for request in fake.requests if "signed" in request.path] == []


async def test_creating_it_twice_is_harmless() -> None:
    fake = Fake([])
    async with asked("sendgrid", fake) as (feed, api):
        (change,) = await PROVIDER.changes(URL, feed, api)
        told = {await change.make(), await change.make()}
    assert told == {"set feeds.main.secrets to key-of-hook-0"}
    assert len(fake.hooks) == 1


async def test_a_webhook_that_sendgrid_refuses_is_said() -> None:
    full = Fake([], hooks=[{**OTHER, "url": f"https://{i}.example"} for i in range(2)])
    with pytest.raises(ApiError, match="^refused: SendGrid refused the webhook"):
        await changed(full)


@pytest.mark.parametrize("answered", [[], {}, 7, None, {"webhooks": None}, {"webhooks": {}}])
async def test_webhooks_of_another_shape_are_no_answer(answered: Any) -> None:
    async with asked("sendgrid", Fake([]), answering(answered)) as (feed, api):
        with pytest.raises(ApiError, match="^garbage"):
            await PROVIDER.changes(URL, feed, api)


async def test_without_the_key_that_signing_was_switched_on_for_nothing_is_told() -> None:
    async with asked("sendgrid", Fake([]), answering({"webhooks": [hook(public_key="")]}, {"id": "ours"})) as (
        feed,
        api,
    ):
        (change,) = await PROVIDER.changes(URL, feed, api)
        with pytest.raises(ApiError, match="^garbage: an item of the API's answer has no public_key"):
            await change.make()


async def test_a_missing_credential_is_named_before_anything_is_asked() -> None:
    fake = Fake([])
    async with asked("sendgrid", fake) as (feed, api):
        with pytest.raises(ApiError, match="feeds.main.api_key"):
            await PROVIDER.changes(URL, replace(feed, api_key=""), api)
    assert not fake.requests
