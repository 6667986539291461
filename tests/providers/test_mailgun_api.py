# SPDX-License-Identifier: Apache-2.0
"""Mailgun's API: what its Events API is asked and says, and how a domain's webhooks are set up."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web
from api_kit import Sent, asked, search
from apis.mailgun import DOMAIN, EVENT_TYPES, Fake
from case_files import fixture

from webhooks.asking import ApiError, Query
from webhooks.event import Event
from webhooks.provider import Delivery
from webhooks.providers.mailgun import PROVIDER

KEY = "e15bd8fd5b6b63a6f91c331d3c0702980d93474c2b1c4474"
MESSAGE = "20261102081504.6f1e2d3c4b5a6978@mg.shop.example.com"
ANA = "ana.reyes@example.com"
SINCE = datetime(2026, 11, 2, 8, 10, 0, 500_000, tzinfo=UTC)
UNTIL = datetime(2026, 11, 2, 9, 15, 0, 500_000, tzinfo=UTC)
URL = "https://hooks.example.com/webhooks/main"


def answering(*answers: Any) -> Callable[[web.Request], web.Response]:
    """Return what answers each request with the next of some answers."""
    left = iter(answers)
    return lambda _: web.json_response(next(left))


async def found(fake: Fake, recipient: str | None = ANA, **more: Any) -> list[Event]:
    async with asked("mailgun", fake, **more) as (feed, api):
        return await search("mailgun", feed, api, Query(SINCE, UNTIL, KEY, recipient))


def page(name: str) -> Any:
    return json.loads(fixture(f"mailgun/{name}.json"))


EMPTY = {"items": [], "paging": {"next": "https://api.mailgun.net/v3/mg.shop.example.com/events/W3siexampleNext"}}


# --- the Events API


async def test_its_items_are_the_webhooks_events() -> None:
    rejected = {**EMPTY, "items": [page("api_events_rejected_item")]}
    events = await found(Fake([]), spoil=answering(page("api_events_page"), EMPTY, rejected, EMPTY))
    assert [(event.kind, event.testimony, event.event_id, event.recipient) for event in events] == [
        ("queued", "accepted", "aAbB0000accepted000001:2026-11-02", ANA),
        ("delivered", "accepted", "aAbB0000delivered00001:2026-11-02", ANA),
        ("rejected", "rejected", "aAbB0000rejected000001:2026-11-02", None),
    ]
    assert {(event.message_id, event.send_key) for event in events} == {(MESSAGE, KEY)}
    assert [event.occurred_at for event in events] == [
        datetime(2026, 11, 2, 8, 15, 4, 512301, tzinfo=UTC),
        datetime(2026, 11, 2, 8, 15, 6, 20114, tzinfo=UTC),
        datetime(2026, 11, 2, 8, 15, 4, 900001, tzinfo=UTC),
    ]
    assert [json.loads(event.raw)["event-data"]["event"] for event in events] == ["accepted", "delivered", "rejected"]
    for event in events:
        assert PROVIDER.parse(Delivery(event.raw, {})).events == (event,)


@pytest.mark.parametrize("webhook", ["accepted", "delivered"])
async def test_an_event_is_the_same_by_webhook_and_by_look_up(webhook: str) -> None:
    (posted,) = PROVIDER.parse(Delivery(fixture(f"mailgun/{webhook}.json"), {})).events
    events = await found(Fake([]), spoil=answering(page("api_events_page"), EMPTY, EMPTY))
    assert (posted.message_id, posted.event_id) in {(event.message_id, event.event_id) for event in events}


async def test_it_is_asked_by_recipient_and_by_time_rounded_outwards() -> None:
    fake = Fake([])
    await found(fake)
    by_recipient, rejected = (dict(request.query) for request in fake.requests)
    span = {"begin": "1793607000", "end": "1793610901", "ascending": "yes", "limit": "300"}
    assert by_recipient == {**span, "recipient": ANA}
    assert rejected == {**span, "event": "rejected"}
    login = "Basic " + base64.b64encode(b"api:key-throw-away").decode()
    for request in fake.requests:
        assert (request.method, request.path) == ("GET", "/v3/mg.shop.example.com/events")
        assert request.headers["Authorization"] == login


@pytest.mark.parametrize(
    "recipient", ["Ana@example.com", '"a b"@example.com', "NOT", "a(b)@example.com", "größe@b.c", "a@xn--b-xga.c", ""]
)
async def test_an_address_that_a_filter_might_read_otherwise_is_not_filtered_by(recipient: str) -> None:
    fake = Fake([Sent(KEY, recipient)])
    assert {event.send_key for event in await found(fake, recipient)} == {KEY}
    assert "recipient" not in fake.requests[0].query


def listing(*changes: dict[str, Any]) -> Any:
    """Return a page of accepted events that differ from the recorded one."""
    item = page("api_events_page")["items"][0]
    return {**EMPTY, "items": [{**item, **change} for change in changes]}


NO_KEY: dict[str, Any] = {"user-variables": {}}


@pytest.mark.parametrize(
    "change", [NO_KEY, {**NO_KEY, "recipient": "Ana.REYES@example.com"}, {"user-variables": "{cut"}]
)
async def test_an_event_of_the_recipient_that_shows_no_key_may_be_the_sought_one(change: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="^unnamed"):
        await found(Fake([]), spoil=answering(listing(change), EMPTY, EMPTY))
    events = await found(Fake([]), spoil=answering(listing(change), EMPTY, listing({}), EMPTY))
    assert [event.send_key for event in events] == [None, KEY]
    (event,) = await found(Fake([]), None, spoil=answering(listing(change), EMPTY))
    assert event.send_key is None


async def test_a_rejected_one_without_recipient_and_key_may_be_the_sought_one() -> None:
    rejected = {**EMPTY, "items": [{**page("api_events_rejected_item"), **NO_KEY}]}
    with pytest.raises(ApiError, match="^unnamed"):
        await found(Fake([]), spoil=answering(EMPTY, rejected, EMPTY))


async def test_another_recipient_s_event_without_a_key_is_not_the_sought_one() -> None:
    others = listing({**NO_KEY, "recipient": "bo.lind@example.net"})
    (event,) = await found(Fake([]), "Ana.Reyes@example.com", spoil=answering(others, EMPTY))
    assert event.send_key is None


async def test_all_pages_are_read_until_an_empty_one() -> None:
    fake = Fake([Sent(f"{i:048x}", message_id=f"m{i}") for i in range(7)])
    assert len({event.event_id for event in await found(fake)}) == 14
    assert len(fake.requests) == 5 + 1 + 1


async def test_the_credential_goes_only_where_the_first_page_was() -> None:
    elsewhere = {**page("api_events_page"), "paging": {"next": "https://evil.example/v3/x/events/W3si?a=b"}}
    fake = Fake([])
    await found(fake, None, spoil=answering(elsewhere, EMPTY))
    assert [request.path_qs for request in fake.requests][1] == "/v3/mg.shop.example.com/events/W3si?a=b"


ITEM = {"event": "accepted", "id": "x"}


@pytest.mark.parametrize(
    "answer",
    [
        {"items": None},
        {"items": {}},
        {"items": [7], "paging": EMPTY["paging"]},
        {"items": [{}], "paging": EMPTY["paging"]},
        {"items": [{"event": 7.5}], "paging": EMPTY["paging"]},
        {"items": [ITEM]},
        {"items": [ITEM], "paging": {"next": None}},
        {"items": [ITEM], "paging": {"next": "https://api.mailgun.net/v3/other"}},
    ],
)
async def test_a_page_of_another_shape_is_no_answer(answer: Any) -> None:
    with pytest.raises(ApiError, match="^garbage"):
        await found(Fake([]), spoil=answering(answer))


@pytest.mark.parametrize("setting", ["api_key", "api_scope"])
async def test_a_missing_setting_is_named(setting: str) -> None:
    fake = Fake([])
    async with asked("mailgun", fake) as (feed, api):
        bare = replace(feed, **{setting: ""})
        with pytest.raises(ApiError, match=f"feeds.main.{setting}"):
            await search("mailgun", bare, api, Query(SINCE, UNTIL))
        with pytest.raises(ApiError, match=f"feeds.main.{setting}"):
            await PROVIDER.changes(URL, bare, api)
    assert not fake.requests


async def test_a_wrong_key_is_refused() -> None:
    async with asked("mailgun", Fake([])) as (feed, api):
        with pytest.raises(ApiError, match="^unauthorized"):
            await search("mailgun", replace(feed, api_key="other"), api, Query(SINCE, UNTIL))


def test_its_facts_say_what_look_up_and_back_fill_can_do() -> None:
    facts = PROVIDER.facts
    assert (facts.finds_by, facts.lists, facts.settles_after) == ("recipient", True, timedelta(minutes=30))
    assert facts.native_key.startswith("none")
    assert facts.same_key_window is None
    assert any("{url}" in step for step in facts.setup)


# --- webhooks


async def changed(fake: Fake, url: str = URL) -> list[str]:
    """Make all changes; return their texts and what they tell."""
    async with asked("mailgun", fake) as (feed, api):
        changes = await PROVIDER.changes(url, feed, api)
        told = [await change.make() for change in changes]
        return [change.text for change in changes] + [line for line in told if line]


async def test_a_missing_webhook_is_added_to_every_event_type_once() -> None:
    fake = Fake([])
    assert await changed(fake) == [f"add the endpoint to the URLs of {name}" for name in EVENT_TYPES]
    assert fake.urls == {name: [URL] for name in EVENT_TYPES}
    assert await changed(fake) == []


async def test_looking_changes_nothing() -> None:
    fake = Fake([])
    async with asked("mailgun", fake) as (feed, api):
        assert len(await PROVIDER.changes(URL, feed, api)) == 8
    assert [request.method for request in fake.requests] == ["GET"]


async def test_only_a_missing_event_type_is_added_and_other_urls_stay() -> None:
    other = "https://other.example/hook"
    fake = Fake([], urls={name: [other, URL] for name in EVENT_TYPES} | {"clicked": [other, f"{URL}/x"]})
    assert await changed(fake) == ["add the endpoint to the URLs of clicked"]
    assert fake.urls == {name: [other, URL] for name in EVENT_TYPES} | {"clicked": [other, f"{URL}/x", URL]}
    assert await changed(fake) == []


async def test_where_three_urls_are_there_none_is_removed_and_a_person_is_told() -> None:
    full = [f"https://{i}.example/" for i in range(3)]
    fake = Fake([], urls={name: [URL] for name in EVENT_TYPES} | {"opened": full})
    with pytest.raises(ApiError, match="^refused: opened has 3 URLs, as many as Mailgun takes: remove one by hand"):
        await changed(fake)
    assert fake.urls["opened"] == full


async def test_making_a_change_twice_is_harmless() -> None:
    fake = Fake([])
    async with asked("mailgun", fake) as (feed, api):
        for change in await PROVIDER.changes(URL, feed, api):
            assert [await change.make(), await change.make()] == [None, None]
    assert fake.urls == {name: [URL] for name in EVENT_TYPES}


async def test_a_url_that_mailgun_refuses_is_said() -> None:
    with pytest.raises(ApiError, match="^refused: Mailgun refused the URL"):
        await changed(Fake([]), "https://hooks.invalid")


@pytest.mark.parametrize("answer", [[], {}, 7, None, {"webhooks": None}, {"webhooks": []}])
async def test_webhooks_of_another_shape_are_no_answer(answer: Any) -> None:
    async with asked("mailgun", Fake([]), answering(answer)) as (feed, api):
        with pytest.raises(ApiError, match="^garbage"):
            await PROVIDER.changes(URL, feed, api)


async def test_event_types_of_odd_shapes_count_as_not_set() -> None:
    answer = {"webhooks": {"accepted": None, "delivered": {"urls": None}, "opened": {"urls": URL}, "clicked": []}}
    async with asked("mailgun", Fake([]), answering(answer)) as (feed, api):
        assert len(await PROVIDER.changes(URL, feed, api)) == len(EVENT_TYPES)


async def test_the_domain_is_one_part_of_the_address() -> None:
    fake = Fake([])
    async with asked("mailgun", fake) as (feed, api):
        with pytest.raises(ApiError, match="^not_found"):
            await PROVIDER.changes(URL, replace(feed, api_scope=f"{DOMAIN}/x"), api)
    assert fake.requests[0].raw_path == f"/v3/domains/{DOMAIN}%2Fx/webhooks"
