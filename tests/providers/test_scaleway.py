# SPDX-License-Identifier: Apache-2.0
"""Scaleway TEM: what its events mean and prove, and what its lists are worth. Signatures: tests/sns."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web
from api_kit import NOW, Sent, asked, search
from apis.scaleway import TOPIC, WEBHOOK, Fake, events_of
from case_files import FIXTURES, fixture, no_fetch

from webhooks.asking import ApiError, Query
from webhooks.event import Answer, Event
from webhooks.lookup import Sought, look_up
from webhooks.provider import BadPayload, Delivery, Feed, NoSample, Verified
from webhooks.providers.scaleway import PROVIDER

KEY = "e15bd8fd5b6b63a6f91c331d3c0702980d93474c2b1c4474"
MESSAGE = "3e1b9f7c-21d4-4c8a-b0d7-5f66a1e2c9b0"
ANA = "ana.reyes@example.com"


def parse(body: bytes | dict[str, Any]) -> Event:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    (event,) = PROVIDER.parse(Delivery(data, {})).events
    return event


def at(clock_time: str) -> datetime:
    return datetime.fromisoformat(f"2026-11-02T{clock_time}+00:00")


# -- events ------------------------------------------------------------------------------------------------------------

WEBHOOKS = {
    "email_queued": (
        *("queued", "accepted", KEY, MESSAGE, "fe4257b1-fa46-5ece-8fe3-b44b6f7137e6"),
        *(at("08:15:05.612345"), None),
    ),
    "email_deferred": (
        *("deferred", "accepted", KEY, MESSAGE, "93c0c22e-3b03-55d0-af5c-ae931025d36d"),
        *(at("08:15:13.612345"), "451 later (invented)"),
    ),
    "email_delivered": (
        *("delivered", "accepted", KEY, MESSAGE, "c15bcb7b-aedd-5cf8-8c66-15341e0038d2"),
        *(at("08:15:07.612345"), "250 ok (invented)"),
    ),
    "sns_notification": (
        *("delivered", "accepted", KEY, MESSAGE, "c15bcb7b-aedd-5cf8-8c66-15341e0038d2"),
        *(at("08:15:07.612345"), "250 ok (invented)"),
    ),
    "email_dropped": (
        *("bounced", "accepted", KEY, MESSAGE, "9ab43e67-c508-5350-846f-044ee8bb6a3b"),
        *(at("08:15:08.612345"), "554 refused (invented)"),
    ),
    "email_mailbox_not_found": (
        *("bounced", "accepted", KEY, MESSAGE, "4cd657b3-fea5-52a3-a9e6-28be98c9365e"),
        *(at("08:15:08.612345"), "550 no such user (invented)"),
    ),
    "email_spam": (
        *("bounced", "accepted", KEY, MESSAGE, "7704efcf-6b83-5bfb-b125-6e787f6e4fc1"),
        *(at("08:15:09.612345"), "550 spam (invented)"),
    ),
    "email_blocklisted": (
        *("rejected", "rejected", KEY, None, "92017d85-ce7f-5099-a401-87b9c60f2598"),
        *(at("08:15:05.612345"), "mailbox_not_found earlier hard bounce (invented)"),
    ),
    "blocklist_created": (
        *("unknown", "none", None, None, "7c15d8e3-0020-569f-a135-b508c7d8ec25"),
        *(at("08:15:10"), "mailbox_not_found (invented)"),
    ),
    "unknown_type": (
        *("unknown", "none", KEY, MESSAGE, "9f155687-bcd1-576f-a0d3-8e225d40c6ae"),
        *(at("08:15:10.612345"), None),
    ),
}
"""Kind, testimony, key, message id, event id, time and reason; each is about Ana."""


@pytest.mark.parametrize("name", WEBHOOKS)
def test_a_webhook_means_and_proves_what_scaleway_says_of_it(name: str) -> None:
    event = parse(fixture(f"scaleway/{name}.json"))
    said = (event.kind, event.testimony, event.send_key, event.message_id, event.event_id)
    assert (*said, event.occurred_at, event.reason) == WEBHOOKS[name]
    assert event.recipient == ANA


def test_every_webhook_fixture_is_expected() -> None:
    names = {file.stem for file in (FIXTURES / "scaleway").glob("*")}
    assert names == {*WEBHOOKS, *ANSWERS, "api_webhook_events", "sns_subscription_confirmation"}


ANSWERS = {"api_send_ok": (MESSAGE, "accepted")}
"""What a send is answered: the id as a confirmation stores it, and what the answer proves."""


def test_of_the_two_ids_of_an_answer_events_carry_the_e_mail_s() -> None:
    (email,) = json.loads(fixture("scaleway/api_send_ok.json"))["emails"]
    queued = parse(fixture("scaleway/email_queued.json"))
    assert (email["id"].strip("<> "), queued.testimony) == ANSWERS["api_send_ok"]
    assert queued.message_id == MESSAGE
    assert email["message_id"] != MESSAGE
    assert any(step.startswith("Confirm with emails[].id of the answer") for step in PROVIDER.facts.setup)


def test_an_event_is_the_same_in_its_envelope_bare_and_in_the_apis_list() -> None:
    bare = fixture("scaleway/email_delivered.json")
    for raw in (bare, json.dumps(json.loads(bare)).encode()):
        enveloped = json.dumps({"Type": "Notification", "Message": raw.decode()}).encode()
        assert parse(enveloped) == parse(raw)
        assert parse(enveloped).raw == raw


def test_messages_about_the_subscription_are_no_events() -> None:
    found = PROVIDER.parse(Delivery(fixture("scaleway/sns_subscription_confirmation.json"), {}))
    arn = "arn:scw:sns:fr-par:project-0f0e0d0c-7777-4888-8999-aaaabbbbcccc:tem-events"
    assert found.confirm_url == (
        f"https://sns.mnq.fr-par.scaleway.com/?Action=ConfirmSubscription&TopicArn={arn}&Token=0f0f0f0f0f0f"
    )
    found = PROVIDER.parse(Delivery(b'{"Type": "UnsubscribeConfirmation"}', {}))
    assert (found.control, found.confirm_url) == ("unsubscribe_confirmation", None)


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ([{"key": "X-Send-Key", "value": "k"}], "k"),
        ([{"key": "From", "value": "x"}, {"key": "x-send-key", "value": "k"}], "k"),
        ([{"key": "X-SEND-KEY", "value": ""}, {"key": "X-Send-Key", "value": "k"}], "k"),
        ([None, 7, {}, {"key": 7}, {"value": "k"}, {"key": "X-Send-Key", "value": ["k"]}], None),
        ({"X-Send-Key": "k"}, None),
        ("X-Send-Key: k", None),
        (None, None),
    ],
)
def test_the_key_is_found_in_the_headers_however_they_are_spelt(headers: Any, key: str | None) -> None:
    assert parse({"type": "email_queued", "email_headers": headers}).send_key == key


def test_a_type_nobody_knows_is_kept_and_proves_nothing() -> None:
    event = parse({"type": "email_opened", "email_id": "m", "email_headers": [{"key": "X-Send-Key", "value": "k"}]})
    assert (event.kind, event.testimony, event.message_id, event.send_key) == ("unknown", "none", "m", "k")


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"Type": "Notification"}', b'{"Type": "x", "Message": "{}"}'])
def test_what_is_no_event_is_refused(body: bytes) -> None:
    with pytest.raises(BadPayload):
        parse(body)


RETRIED = {"type": "email_deferred", "email_id": "m", "created_at": "2026-11-02T08:15:13Z", "email_try_count": 1}


@pytest.mark.parametrize("name", ["type", "email_id", "email_to", "created_at", "email_try_count", "blocklist_id"])
def test_without_an_id_a_repeat_is_the_same_event_and_another_event_is_not(name: str) -> None:
    one, other = parse(RETRIED), parse({**RETRIED, name: "2026-11-02T08:15:14Z"})
    assert one.event_id == parse({**RETRIED, "email_headers": []}).event_id
    assert one.event_id != other.event_id


# -- stamp, settings, sample -------------------------------------------------------------------------------------------


def test_the_stamp_is_a_header() -> None:
    stamp = PROVIDER.stamp(KEY)
    assert stamp.body == {"additional_headers": [{"key": "X-Send-Key", "value": KEY}]}
    assert (stamp.headers, stamp.smtp_headers) == ({}, {"X-Send-Key": KEY})


def test_a_refused_delivery_may_come_again() -> None:
    assert (PROVIDER.facts.refused_status, PROVIDER.facts.busy_status) == (503, 503)
    assert PROVIDER.facts.redelivers_for == timedelta(0)


def test_a_topic_that_is_not_scaleways_is_objected_to() -> None:
    assert PROVIDER.objection("topics", TOPIC) is None
    for topic in ("arn:aws:sns:eu-west-1:000000000000:t", "tem-events", "", TOPIC + "\n", TOPIC + "?"):
        assert "arn:scw:sns" in (PROVIDER.objection("topics", topic) or "")
    assert PROVIDER.objection("secrets", "basic:user:password") is None


async def test_a_sample_carries_the_feeds_credential() -> None:
    feed = Feed("main", "scaleway", ("basic:user:password",))
    for kind, meant in (("sent", "queued"), ("email_blocklisted", "rejected"), ("bounced", "bounced")):
        sample = PROVIDER.sample(kind, KEY, feed, NOW)
        assert await PROVIDER.verify(sample, feed, NOW, no_fetch) == Verified()
        event = parse(sample.body)
        assert (event.kind, event.send_key, event.occurred_at) == (meant, KEY, NOW)
    with pytest.raises(NoSample, match="only Scaleway can sign"):
        PROVIDER.sample("sent", KEY, Feed("main", "scaleway", topics=(TOPIC,)), NOW)
    with pytest.raises(NoSample, match="email_queued"):
        PROVIDER.sample("opened", KEY, feed, NOW)


# -- look-up and back-fill ---------------------------------------------------------------------------------------------

SPAN = Query(NOW - timedelta(hours=3), NOW)
SENT = Sent(KEY, message_id=MESSAGE)


def sought(*, wire_key: str = KEY, recipient: str = ANA) -> Query:
    return Query(SPAN.since, SPAN.until, wire_key, recipient)


async def found(fake: Fake, query: Query, *topics: str) -> list[Event]:
    async with asked("scaleway", fake) as (feed, api):
        return await search("scaleway", replace(feed, topics=topics), api, query)


async def test_a_look_up_asks_for_the_recipient_and_reads_what_was_published() -> None:
    fake = Fake([SENT, Sent("b" * 48, "bo@example.net", "another")])
    events = await found(fake, sought())
    assert [(event.kind, event.testimony, event.send_key, event.message_id) for event in events] == [
        ("delivered", "accepted", KEY, MESSAGE),
        ("queued", "accepted", KEY, MESSAGE),
    ]
    emails = next(request for request in fake.requests if request.path.endswith("/emails"))
    assert emails.query["mail_rcpt"] == ANA
    assert (emails.query["since"], emails.query["until"]) == ("2026-11-02T05:59:59Z", "2026-11-02T09:00:01Z")
    assert {request.query.get("email_id") for request in fake.requests} == {None, MESSAGE}


@pytest.mark.parametrize(
    ("sent_to", "wanted"),
    [
        ("Ana.Reyes@Example.com", "ana.reyes@EXAMPLE.com"),
        ("ana.reyes@example.com", "Ana.Reyes@example.com"),
        ("o'brien@example.com", "o'brien@example.com"),
        ("ana@grüße.example", "ana@xn--gre-6ka8l.example"),
    ],
)
async def test_an_address_that_a_filter_might_miss_is_compared_instead(sent_to: str, wanted: str) -> None:
    fake = Fake([Sent(KEY, sent_to, MESSAGE), Sent("b" * 48, "bo@example.net", "another")])
    assert {event.send_key for event in await found(fake, sought(recipient=wanted))} == {KEY}
    emails = next(request for request in fake.requests if request.path.endswith("/emails"))
    assert "mail_rcpt" not in emails.query
    assert "another" not in {request.query.get("email_id") for request in fake.requests}


async def test_what_the_list_holds_is_the_event_that_the_webhook_brings() -> None:
    events = await found(Fake([SENT]), sought())
    published = [item["data"].encode() for item in events_of(SENT)]
    assert sorted(event.raw for event in events) == sorted(published)
    assert sorted(events, key=str) == sorted(map(parse, published), key=str)


def test_the_documented_answer_holds_the_same_event_as_the_webhook() -> None:
    (item,) = json.loads(fixture("scaleway/api_webhook_events.json"))["webhook_events"]
    event, webhook = parse(item["data"].encode()), parse(fixture("scaleway/email_queued.json"))
    assert (event.event_id, event.message_id, event.send_key) == (webhook.event_id, webhook.message_id, KEY)


async def test_an_email_whose_headers_nothing_shows_makes_the_answer_silent() -> None:
    fake = Fake([SENT, Sent("b" * 48, ANA, "another")], unseen=(KEY,))
    with pytest.raises(ApiError, match="^unnamed: .*webhook"):
        await found(fake, sought())
    assert [event.message_id for event in await found(fake, sought(wire_key="b" * 48))] == ["another"] * 2


async def test_an_email_whose_events_have_lost_the_key_may_be_the_sought_one() -> None:
    with pytest.raises(ApiError, match="^unnamed"):
        await found(Fake([Sent("", ANA, "lost")]), sought())
    assert {event.send_key for event in await found(Fake([SENT, Sent("", ANA, "lost")]), sought())} == {None, KEY}


async def test_a_blocked_email_whose_event_is_not_published_may_be_the_sought_one() -> None:
    blocked = [Sent("b" * 48, ANA, "one", rejected=True), Sent("c" * 48, ANA, "two", rejected=True)]
    for unseen in (("b" * 48, "c" * 48), ("b" * 48,)):
        with pytest.raises(ApiError, match="^unnamed"):
            await found(Fake(blocked, unseen=unseen), sought())
    assert len(await found(Fake(blocked), sought())) == 2


async def test_a_blocked_send_is_found_by_its_key_though_its_event_names_no_email() -> None:
    (event,) = await found(Fake([Sent(KEY, message_id=MESSAGE, rejected=True)]), sought())
    assert (event.kind, event.testimony, event.send_key, event.message_id) == ("rejected", "rejected", KEY, None)


async def test_another_blocked_mail_to_the_recipient_is_compared_by_its_key() -> None:
    fake = Fake([Sent("b" * 48, ANA, "another", rejected=True)])
    events = await found(fake, sought())
    assert [(event.testimony, event.send_key) for event in events] == [("rejected", "b" * 48)]


async def test_a_project_without_a_webhook_can_not_be_asked() -> None:
    for query in (sought(), SPAN):
        with pytest.raises(ApiError, match="^not_found.*no webhook"):
            await found(Fake([SENT], webhooks=()), query)


async def test_only_webhooks_of_the_feeds_topics_are_read() -> None:
    assert await found(Fake([SENT]), SPAN, TOPIC)
    with pytest.raises(ApiError, match="^not_found.*no webhook"):
        await found(Fake([SENT]), SPAN, TOPIC + "2")


async def test_a_back_fill_reads_no_further_than_its_span() -> None:
    old = [Sent(f"{i:048x}", ANA, f"old-{i}", NOW - timedelta(days=2, minutes=i)) for i in range(30)]
    late = Sent("f" * 48, ANA, "late", NOW + timedelta(hours=1))
    fake = Fake([*old, SENT, late])
    assert {event.message_id for event in await found(fake, SPAN)} == {MESSAGE}
    assert len([request for request in fake.requests if request.path.endswith("/events")]) <= 3


async def test_without_the_projects_id_it_says_which_setting_is_missing() -> None:
    with pytest.raises(ApiError, match=r"^unconfigured: set feeds\.main\.api_scope"):
        await found(Fake([SENT], settings={"api_key": "throw-away"}), SPAN)


GARBAGE = {
    "no total": {"webhook_events": []},
    "shorter than it says": {"total_count": 9, "webhook_events": []},
    "an odd total": {"total_count": "9", "webhook_events": []},
    "no time": {"total_count": 1, "webhook_events": [{"data": "{}"}]},
    "no payload": {"total_count": 1, "webhook_events": [{"created_at": "2026-11-02T08:15:05Z"}]},
    "no event": {"total_count": 1, "webhook_events": [{"created_at": "2026-11-02T08:15:05Z", "data": "{}"}]},
    "no object": {"total_count": 1, "webhook_events": [7]},
}


@pytest.mark.parametrize("fault", GARBAGE)
async def test_a_list_that_is_not_what_it_says_is_garbage(fault: str) -> None:
    def spoil(request: web.Request) -> web.Response | None:
        return web.json_response(GARBAGE[fault]) if request.path.endswith(f"/{WEBHOOK}/events") else None

    for query in (SPAN, sought()):
        async with asked("scaleway", Fake([SENT]), spoil) as (feed, api):
            with pytest.raises(ApiError, match="^garbage"):
                await search("scaleway", feed, api, query)


async def test_a_key_is_compared_and_never_taken_from_the_recipient() -> None:
    """A send to the same recipient, in the same minute, is not ours; only the control makes its absence count."""
    at_once = NOW - timedelta(minutes=42)
    ours = Sought(KEY, at_once, at_once + timedelta(minutes=1), ANA)
    control = Sought("c" * 48, NOW - timedelta(minutes=40), NOW - timedelta(minutes=39), "bo@example.net")
    others = [Sent("b" * 48, ANA, "another", at_once), Sent("c" * 48, "bo@example.net", "control")]
    later = datetime(2026, 11, 3, tzinfo=UTC)
    async with asked("scaleway", Fake(others)) as (feed, api):
        assert (await look_up(PROVIDER, feed, api, ours, control, later)).answer is Answer.ABSENT
    async with asked("scaleway", Fake([*others, SENT])) as (feed, api):
        assert (await look_up(PROVIDER, feed, api, ours, control, later)).answer is Answer.ACCEPTED
    async with asked("scaleway", Fake([*others, SENT], unseen=(KEY,))) as (feed, api):
        silent = await look_up(PROVIDER, feed, api, ours, control, later)
        assert (silent.answer, silent.reason) == (Answer.SILENT, "unnamed")
