# SPDX-License-Identifier: Apache-2.0
"""Postmark asked: what its Messages API tells of sends, and how its webhooks are looked after."""

from __future__ import annotations

import copy
import json
import sys
import zoneinfo
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from aiohttp import web
from api_kit import NOW, Sent, asked, search
from apis.postmark import Fake
from case_files import fixture

from webhooks.asking import ApiError, Query
from webhooks.event import Event
from webhooks.provider import Feed
from webhooks.providers.postmark import PROVIDER

KEY = "e15bd8fd5b6b63a6f91c331d3c0702980d93474c2b1c4474"
MESSAGE = "3f9d2c1b-7a60-4e58-9c47-0b1a2d3e4f50"
ANA, BO = "ana.reyes@example.com", "bo.lind@example.net"
HOUR = Query(NOW - timedelta(hours=1), NOW, KEY)
URL = "https://hooks.example.com/webhooks/main"


async def found(answer: dict[str, Any], query: Query = HOUR) -> list[Event]:
    """Return what is read of an answer, after which the list is at its end."""

    def spoil(request: web.Request) -> web.Response:
        return web.json_response(answer if request.query["offset"] == "0" else {**answer, "Messages": []})

    async with asked("postmark", Fake([]), spoil) as (feed, api):
        return await search("postmark", feed, api, query)


def listed(**changed: Any) -> dict[str, Any]:
    answer = json.loads(fixture("postmark/api_messages_outbound_by_metadata.json"))
    answer["Messages"][0].update(changed)
    return dict(answer)


# --- the second witness


async def test_a_listed_message_proves_that_it_was_taken() -> None:
    (event,) = await found(listed())
    assert (event.kind, event.testimony, event.reason) == ("sent", "accepted", None)
    assert (event.message_id, event.send_key, event.recipient) == (MESSAGE, KEY, ANA)
    assert event.occurred_at == datetime(2026, 11, 2, 8, 15, 4, 217000, UTC)
    assert json.loads(event.raw) == listed()["Messages"][0]


async def test_the_documented_empty_answer_is_no_event() -> None:
    assert await found(json.loads(fixture("postmark/api_messages_outbound_none.json"))) == []


@pytest.mark.parametrize(
    ("status", "kind", "testimony"),
    [
        ("Sent", "sent", "accepted"),
        ("Processed", "queued", "accepted"),
        ("Queued", "queued", "accepted"),
        ("Teleported", "unknown", "none"),
        (None, "unknown", "none"),
    ],
)
async def test_a_status_means_what_the_vendor_s_types_say(status: str | None, kind: str, testimony: str) -> None:
    (event,) = await found(listed(Status=status))
    assert (event.kind, event.testimony) == (kind, testimony)


async def test_a_message_to_several_is_an_event_of_each() -> None:
    both = await found(listed(Recipients=[ANA, BO]))
    assert [event.recipient for event in both] == [ANA, BO]
    assert len({event.event_id for event in both}) == 2
    assert [event.recipient for event in await found(listed(Recipients=[]))] == [None]


async def test_it_asks_by_key_and_stream_and_a_little_more_than_the_span() -> None:
    fake = Fake([Sent(KEY)])
    async with asked("postmark", fake) as (feed, api):
        for of in (feed, replace(feed, api_scope="")):
            assert [event.send_key for event in await search("postmark", of, api, HOUR)] == [KEY]
        kolkata = timezone(timedelta(hours=5, minutes=30))
        await search("postmark", feed, api, Query(HOUR.since.astimezone(kolkata), NOW.astimezone(kolkata), KEY))
    assert [request.query["offset"] for request in fake.requests] == ["0", "1"] * 3
    for request in fake.requests:
        assert {name: value for name, value in request.query.items() if name != "offset"} == {
            "count": "500",
            "fromdate": "2026-11-02T03:00:00",
            "todate": "2026-11-02T04:00:01",
            "messagestream": "outbound",
            "metadata_send_key": KEY,
        }


NEW_YORK_CHANGES = {
    "the doubled hour": ("2026-11-01T05:30+00:00", "2026-11-01T06:10+00:00"),
    "the lost hour": ("2026-03-08T06:30+00:00", "2026-03-08T07:10+00:00"),
    "summer": ("2026-07-01T11:00+00:00", "2026-07-01T11:00:01+00:00"),
}


@pytest.fixture
def no_time_zones(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "tzdata", None)
    zoneinfo.reset_tzpath(to=())
    zoneinfo.ZoneInfo.clear_cache()
    yield
    zoneinfo.reset_tzpath()


async def all_of(span: str) -> list[str | None]:
    since, until = map(datetime.fromisoformat, NEW_YORK_CHANGES[span])
    times = [since + (until - since) * part / 8 for part in range(9)]
    sends = [Sent(f"{i:048x}", message_id=str(i), at=at) for i, at in enumerate(times)]
    async with asked("postmark", Fake(sends)) as (feed, api):
        events = await search("postmark", feed, api, Query(since, until))
    return sorted(event.message_id or "" for event in events)


@pytest.mark.parametrize("span", NEW_YORK_CHANGES)
async def test_no_change_of_new_york_s_clocks_leaves_anything_out(span: str) -> None:
    assert await all_of(span) == ["0", "1", "2", "3", "4", "5", "6", "7", "8"]


@pytest.mark.parametrize("span", NEW_YORK_CHANGES)
@pytest.mark.usefixtures("no_time_zones")
async def test_a_host_without_time_zones_asks_for_more_instead(span: str) -> None:
    assert await all_of(span) == ["0", "1", "2", "3", "4", "5", "6", "7", "8"]


async def test_more_than_a_question_may_list_are_asked_for_in_halves() -> None:
    since = NOW - timedelta(hours=1)
    fake = Fake([Sent(f"{i:048x}", message_id=str(i), at=since + timedelta(seconds=i / 4)) for i in range(10_001)])
    fake.page_size = 500
    async with asked("postmark", fake) as (feed, api):
        events = await search("postmark", feed, api, Query(since, NOW))
    assert {event.message_id for event in events} == {str(i) for i in range(10_001)}


async def test_more_than_that_within_a_second_is_told() -> None:
    fake = Fake([Sent(f"{i:048x}", message_id=str(i), at=NOW) for i in range(10_001)])
    fake.page_size = 500
    async with asked("postmark", fake) as (feed, api):
        with pytest.raises(ApiError, match="^too_many"):
            await search("postmark", feed, api, Query(NOW - timedelta(seconds=1), NOW))


@pytest.mark.parametrize("metadata", [None, {}, {"app": "checkout"}, {"send_key": ""}, "send_key"])
async def test_what_is_listed_for_a_key_and_does_not_show_it_may_be_anybody_s(metadata: object) -> None:
    with pytest.raises(ApiError, match="^unnamed"):
        await found(listed(Metadata=metadata))
    (event,) = await found(listed(Metadata=metadata), Query(HOUR.since, HOUR.until))
    assert event.send_key is None
    both = listed()
    both["Messages"].append({**both["Messages"][0], "MessageID": "another", "Metadata": metadata})
    assert [event.send_key for event in await found(both)] == [KEY, None]


@pytest.mark.parametrize(
    "answer",
    [
        {"TotalCount": 1, "Messages": []},
        {**listed(), "TotalCount": 2},
        {"TotalCount": None, "Messages": []},
        {"TotalCount": -1, "Messages": []},
        {"TotalCount": 1},
        {"TotalCount": 1, "Messages": [None]},
        {"TotalCount": 1, "Messages": [{"MessageID": MESSAGE}]},
        listed(MessageID=None),
    ],
)
async def test_an_answer_that_does_not_hold_what_it_should_is_told(answer: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="^garbage"):
        await found(answer)


# --- the webhook


TRIGGERS = {
    "Delivery": {"Enabled": True},
    "Bounce": {"Enabled": True},
    "SpamComplaint": {"Enabled": True},
    "Open": {"Enabled": True},
    "Click": {"Enabled": True},
    "SubscriptionChange": {"Enabled": True},
}
CREDENTIALS = {
    "basic:hook:throw:away": {"Url": URL, "HttpAuth": {"Username": "hook", "Password": "throw:away"}},
    "header:X-Hook=throw=away": {"Url": URL, "HttpHeaders": [{"Name": "X-Hook", "Value": "throw=away"}]},
    "bearer:throw-away": {"Url": URL, "HttpHeaders": [{"Name": "Authorization", "Value": "Bearer throw-away"}]},
    "query:token=throw away": {"Url": URL + "?token=throw+away"},
}
BASIC = "basic:hook:throw:away"


def webhook(**changed: Any) -> dict[str, Any]:
    return {"ID": 7, "MessageStream": "outbound", "Triggers": TRIGGERS, **CREDENTIALS[BASIC], **changed}


async def looked_after(fake: Fake, *secrets: str, scope: str = "outbound") -> list[str]:
    """Return what was changed, having seen that nothing is left to change."""
    async with asked("postmark", fake) as (feed, api):
        of: Feed = replace(feed, secrets=secrets, api_scope=scope)
        before = copy.deepcopy(fake.webhooks)
        changes = await PROVIDER.changes(URL, of, api)
        assert fake.webhooks == before
        for change in changes:
            assert await change.make() is None
        assert await PROVIDER.changes(URL, of, api) == []
    texts = [change.text for change in changes]
    assert not [text for text in texts if "throw" in text]
    return texts


@pytest.mark.parametrize("secret", CREDENTIALS)
async def test_a_missing_webhook_is_created_with_every_event_and_the_feed_s_credential(secret: str) -> None:
    fake = Fake([])
    every = "Delivery, Bounce, SpamComplaint, Open, Click, SubscriptionChange"
    assert await looked_after(fake, secret) == [f"create the webhook of message stream outbound with {every}"]
    assert fake.webhooks == [
        {"ID": 1234567, "MessageStream": "outbound", "Triggers": TRIGGERS, **CREDENTIALS[secret]},
    ]


async def test_a_webhook_of_another_stream_does_not_count() -> None:
    fake = Fake([], webhooks=[webhook()])
    await looked_after(fake, BASIC, scope="broadcasts")
    assert [hook["MessageStream"] for hook in fake.webhooks] == ["outbound", "broadcasts"]


async def test_what_is_switched_off_is_switched_on_and_its_options_stay() -> None:
    triggers = {
        **TRIGGERS,
        "Bounce": {"Enabled": False, "IncludeContent": True},
        "Open": {"Enabled": True, "PostFirstOpenOnly": True},
        "Click": None,
    }
    fake = Fake([], webhooks=[webhook(Triggers=triggers)])
    assert await looked_after(fake, BASIC) == ["webhook 7: switch on Bounce, Click"]
    assert fake.webhooks[0]["Triggers"] == {
        **TRIGGERS,
        "Bounce": {"Enabled": True, "IncludeContent": True},
        "Open": {"Enabled": True, "PostFirstOpenOnly": True},
    }


async def test_a_credential_that_the_feed_would_refuse_is_replaced() -> None:
    other = {"Username": "hook", "Password": "forgotten"}
    fake = Fake([], webhooks=[webhook(HttpAuth=other, HttpHeaders=[{"Name": "X-Trace", "Value": "1"}])])
    assert await looked_after(fake, BASIC) == ["webhook 7: carry the feed's credential"]
    assert fake.webhooks == [webhook(HttpHeaders=[{"Name": "X-Trace", "Value": "1"}])]


async def test_either_of_two_secrets_is_enough() -> None:
    assert await looked_after(Fake([], webhooks=[webhook()]), "header:X-Hook=new", BASIC) == []


async def test_a_credential_written_into_the_url_is_seen_as_our_webhook() -> None:
    url = URL.replace("//", "//hook:forgotten@") + "?token=old"
    fake = Fake([], webhooks=[webhook(Url=url, HttpAuth=None)])
    assert await looked_after(fake, BASIC) == ["webhook 7: carry the feed's credential"]
    assert fake.webhooks == [webhook()]


async def test_other_people_s_webhooks_are_left_alone() -> None:
    others = [webhook(ID=8, Url="https://other.example.org/hook", Triggers={}), webhook(ID=9, Url=None)]
    fake = Fake([], webhooks=copy.deepcopy(others))
    await looked_after(fake, BASIC)
    assert fake.webhooks[:2] == others
    assert len(fake.webhooks) == 3


async def test_what_cannot_be_looked_after_says_why() -> None:
    with pytest.raises(ApiError, match=r"^unconfigured: set feeds\.main\.secrets"):
        await looked_after(Fake([]), "a-signing-key")
    with pytest.raises(ApiError, match="^refused"):
        await looked_after(Fake([]), BASIC, scope="no-such-stream")
    with pytest.raises(ApiError, match=r"^unconfigured: set feeds\.main\.api_key"):
        await looked_after(Fake([], settings={"api_key": ""}), BASIC)


@pytest.mark.parametrize("answer", [None, [], {}, {"Webhooks": {}}, 7])
async def test_an_odd_list_of_webhooks_is_told(answer: object) -> None:
    async with asked("postmark", Fake([]), spoil=lambda _: web.json_response(answer)) as (feed, api):
        with pytest.raises(ApiError, match="^garbage"):
            await PROVIDER.changes(URL, replace(feed, secrets=(BASIC,)), api)


def test_its_facts_say_that_it_can_be_asked_by_key() -> None:
    facts = PROVIDER.facts
    assert (facts.finds_by, facts.lists, facts.same_key_window) == ("key", True, None)
    assert facts.settles_after == timedelta(minutes=15)
    assert facts.kept_for == timedelta(days=7)
    assert "45 days by default, but 7 to 365 can be set, so that only the last 7 count" in facts.look_up
    assert any("{url}" in step for step in facts.setup)
