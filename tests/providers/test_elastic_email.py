# SPDX-License-Identifier: Apache-2.0
"""What Elastic Email notifies of is read as written in its fact sheet, from a query string or a posted form."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlencode

import pytest
from aiohttp import web
from api_kit import NOW, Sent, asked, search
from apis.elastic_email import Fake
from case_files import FIXTURES, fixture, no_fetch

from webhooks.asking import ApiError, Query
from webhooks.event import Event, Kind, Testimony
from webhooks.provider import BadPayload, Delivery, Feed, NoSample, Refused, Verified
from webhooks.providers.elastic_email import PROVIDER

KEY = "e15bd8fd5b6b63a6f91c331d3c0702980d93474c2b1c4474"
ANA = "ana.reyes@example.com"
MESSAGE = "InVenTedMsgId0001"
YES, NOTHING = Testimony.ACCEPTED, Testimony.NONE
SECRET = "query:secret=s3cret"


def at(clock_time: str) -> datetime:
    return datetime.fromisoformat(f"2026-11-02T{clock_time}+00:00")


EXPECTED = {
    "sent": (Kind.SENT, at("08:15:07"), None),
    "opened": (Kind.OPENED, at("08:16:04"), None),
    "clicked": (Kind.CLICKED, at("08:16:05"), None),
    "error_nomailbox": (Kind.BOUNCED, at("08:15:08"), "NoMailbox"),
    "error_ignore_suppressed": (Kind.BOUNCED, at("08:15:05"), "Ignore"),
    "abusereport": (Kind.COMPLAINED, at("09:15:05"), None),
    "unsubscribed": (Kind.UNSUBSCRIBED, at("08:20:05"), None),
}


def by_get(query: str) -> Delivery:
    return Delivery(b"", {}, "GET", query)


def told(**fields: str) -> Event:
    (event,) = PROVIDER.parse(by_get(urlencode({"status": "Sent", **fields}))).events
    return event


@pytest.mark.parametrize("name", EXPECTED)
def test_every_status_is_read_as_the_facts_say_by_get_and_by_post(name: str) -> None:
    body = fixture(f"elastic_email/{name}.form")
    (posted,) = PROVIDER.parse(Delivery(body, {"content-type": "application/x-www-form-urlencoded"})).events
    (got,) = PROVIDER.parse(by_get("secret=s3cret&" + body.decode())).events
    assert (posted.kind, posted.occurred_at, posted.reason) == EXPECTED[name]
    assert (posted.testimony, posted.send_key, posted.message_id, posted.recipient) == (YES, KEY, MESSAGE, ANA)
    assert posted.raw == body
    assert got == posted


def test_every_webhook_fixture_has_an_expectation() -> None:
    assert {path.stem for path in (FIXTURES / "elastic_email").glob("*.form")} == set(EXPECTED)


def test_event_ids_tell_statuses_links_and_times_apart_and_stay_the_same() -> None:
    events = [
        PROVIDER.parse(by_get(fixture(f"elastic_email/{name}.form").decode())).events[0] for name in sorted(EXPECTED)
    ]
    assert len({event.event_id for event in events}) == len(EXPECTED)
    assert told(target="https://a.example/").event_id != told(target="https://b.example/").event_id
    assert told(date="11/2/2026 8:15:07 AM").event_id != told(date="11/2/2026 8:15:07 PM").event_id
    assert told(postback="k").event_id == told(postback="k", subject="other").event_id


@pytest.mark.parametrize(
    ("date", "time"),
    [
        ("11/2/2026 8:15:07 AM", at("08:15:07")),
        ("11/02/2026 08:15:07 PM", at("20:15:07")),
        ("11/2/2026 12:05:00 AM", at("00:05:00")),
        ("11/2/2026 12:05:00 PM", at("12:05:00")),
        ("2026-11-02T08:15:07", at("08:15:07")),
        ("13/2/2026 8:15:07 AM", None),
        ("1/1/0001 12:00:00 AM", None),
        ("soon", None),
        ("", None),
    ],
)
def test_dates_are_twelve_hour_text_in_utc(date: str, time: datetime | None) -> None:
    assert told(date=date).occurred_at == time


def test_an_event_without_a_message_id_names_its_transaction() -> None:
    assert told(transaction="t", messageid="m").message_id == "m"
    assert told(transaction="t").message_id == "t"


def test_a_status_not_known_yet_is_kept_and_proves_nothing() -> None:
    event = told(status="Teleported", messageid="m", postback="k")
    assert (event.kind, event.testimony, event.send_key, event.message_id) == (Kind.UNKNOWN, NOTHING, "k", "m")


def test_the_first_of_two_values_counts() -> None:
    (event,) = PROVIDER.parse(by_get("status=Sent&postback=first&postback=second")).events
    assert event.send_key == "first"


def test_nothing_of_the_url_but_the_events_own_fields_is_kept() -> None:
    (event,) = PROVIDER.parse(by_get("secret=s3cret&status=Sent&to=a%40b.example&token=x&&postback=k")).events
    assert event.raw == b"status=Sent&to=a%40b.example&postback=k"
    (again,) = PROVIDER.parse(Delivery(event.raw, {})).events
    assert again == event


@pytest.mark.parametrize("body", [b"", b"{}", b"prose", b"to=a", b"status=", b'{"status":"Sent"}', b"\xff=1"])
def test_a_body_that_is_no_notification_is_refused(body: bytes) -> None:
    with pytest.raises(BadPayload, match="no status"):
        PROVIDER.parse(Delivery(body, {}))


# --- what is Elastic Email's and what isn't


async def verdict(request: Delivery, *secrets: str) -> str:
    judged = await PROVIDER.verify(request, Feed("main", "elastic_email", secrets), NOW, no_fetch)
    return judged.reason if isinstance(judged, Refused) else "verified" if judged == Verified() else repr(judged)


async def test_only_the_secret_in_the_url_makes_a_notification_elastic_emails() -> None:
    assert await verdict(by_get("secret=s3cret&status=Sent"), SECRET) == "verified"
    assert await verdict(by_get("secret=other&status=Sent"), SECRET) == "signature"
    for bare in (by_get("status=Sent"), by_get("to=a%40b.example"), Delivery(b"status=Sent", {})):
        assert await verdict(bare, SECRET) in ("signature", "missing")
    assert await verdict(by_get("secret=s3cret&status=Sent"), "s3cret") == "no_secret"


@pytest.mark.parametrize("query", ["", "secret=s3cret", "secret=wrong", "validate=1", "%73tatus=Sent", "secret=x&"])
async def test_a_get_without_an_event_is_a_probe_and_stores_nothing(query: str) -> None:
    assert await verdict(by_get(query), SECRET) == "verified"
    assert await verdict(by_get(query)) == "verified"
    found = PROVIDER.parse(Delivery(b"status=Sent&postback=k", {}, "GET", query))
    assert (list(found.events), found.control) == ([], "ping")
    assert PROVIDER.facts.methods == ("POST", "GET")


RENAMED = "secret=s3cret&Status=Sent&To=ana%40b.example"


async def test_a_notification_none_of_whose_fields_is_known_is_kept_and_counted_if_it_carries_the_secret() -> None:
    assert await verdict(by_get(RENAMED), SECRET) == "verified"
    found = PROVIDER.parse(by_get(RENAMED))
    (event,) = found.events
    assert (found.control, found.anomalies) == (None, {"damaged": 1})
    assert (event.kind, event.testimony, event.message_id) == (Kind.UNKNOWN, NOTHING, None)
    assert PROVIDER.parse(by_get(RENAMED)).events[0].event_id == event.event_id
    assert PROVIDER.parse(by_get(RENAMED.replace("ana", "bo"))).events[0].event_id != event.event_id
    for other in (RENAMED.replace("s3cret", "other"), RENAMED.partition("&")[2]):
        assert await verdict(by_get(other), SECRET) in ("signature", "missing")


def test_what_may_be_the_secret_is_not_kept() -> None:
    (event,) = PROVIDER.parse(by_get(RENAMED)).events
    assert event.raw == b"secret&Status&To"


@pytest.mark.parametrize("name", ["to", "status", "postback", "channel"])
def test_a_secret_of_the_name_of_an_events_field_would_be_kept_so_it_is_objected_to(name: str) -> None:
    objection = PROVIDER.objection("secrets", f"query:{name}=s3cret")  # type: ignore[attr-defined]
    assert f"own field ({name})" in objection
    assert "s3cret" not in objection
    assert PROVIDER.objection("secrets", f"header:{name}=s3cret") is None  # type: ignore[attr-defined]
    assert PROVIDER.objection("topics", f"query:{name}=s3cret") is None  # type: ignore[attr-defined]


def test_a_secret_that_no_request_can_carry_is_objected_to() -> None:
    assert PROVIDER.objection("secrets", "s3cret") is not None  # type: ignore[attr-defined]
    assert PROVIDER.objection("secrets", SECRET) is None  # type: ignore[attr-defined]


# --- what a send is answered

ANSWERS = {"api_send_ok": (MESSAGE, "accepted", "Confirm with the MessageID of the answer, not its TransactionID")}
"""For each answer: its id as the sender's side keeps it, what it proves, and the words that say so in the setup."""


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_names_the_message_as_its_events_do_and_the_setup_says_what_it_proves(name: str) -> None:
    message_id, _, words = ANSWERS[name]
    answer = json.loads(fixture(f"elastic_email/{name}.json"))
    assert answer["MessageID"].strip("<> ") == message_id
    told_of = [by_get(fixture(f"elastic_email/{status}.form").decode()) for status in EXPECTED]
    assert {PROVIDER.parse(request).events[0].message_id for request in told_of} == {message_id}
    assert words in " ".join(PROVIDER.facts.setup)


# --- stamp and sample


def test_the_stamp_is_what_comes_back_in_notifications_and_in_the_events_api() -> None:
    stamp = PROVIDER.stamp(KEY)
    assert stamp.body == {"Content": {"Postback": KEY}, "Options": {"ChannelName": KEY}}
    assert stamp.smtp_headers == {"X-ElasticEmail-Postback": KEY}
    assert (stamp.headers, stamp.message_id) == ({}, None)
    assert PROVIDER.facts.same_key_window is None


def test_nothing_is_known_to_be_delivered_again() -> None:
    assert PROVIDER.facts.redelivers_for == timedelta(0)


async def test_a_sample_is_a_get_as_elastic_email_makes_it() -> None:
    sample = PROVIDER.sample("bounced", KEY, Feed("main", "elastic_email", (SECRET,)), NOW)
    assert (sample.method, sample.body) == ("GET", b"")
    assert await verdict(sample, SECRET) == "verified"
    (event,) = PROVIDER.parse(sample).events
    assert (event.kind, event.send_key, event.occurred_at, event.reason) == (Kind.BOUNCED, KEY, NOW, "NoMailbox")
    with pytest.raises(NoSample, match="no credential to carry"):
        PROVIDER.sample("bounced", KEY, Feed("main", "elastic_email", ("plain",)), NOW)


# --- look-up

ROW = {
    "TransactionID": "t",
    "MsgID": "m",
    "To": ANA,
    "EventType": "Sent",
    "EventDate": "2026-11-02T08:15:07",
    "ChannelName": KEY,
    "MessageCategory": "Unknown",
}


async def looked_up(*pages: object, key: str = KEY) -> list[Event]:
    """What search yields of these pages, after which there is none."""
    answers = iter(pages)

    def spoil(_: web.Request) -> web.Response:
        return web.json_response(next(answers, []))

    async with asked("elastic_email", Fake([]), spoil) as (feed, api):
        return await search("elastic_email", feed, api, Query(NOW - timedelta(hours=1), NOW, key, ANA))


@pytest.mark.parametrize(
    ("event_type", "kind"),
    [
        ("Submission", Kind.QUEUED),
        ("FailedAttempt", Kind.DEFERRED),
        ("Sent", Kind.SENT),
        ("Error", Kind.BOUNCED),
        ("Bounce", Kind.BOUNCED),
        ("Suppress", Kind.BOUNCED),
        ("Open", Kind.OPENED),
        ("Click", Kind.CLICKED),
        ("Complaint", Kind.COMPLAINED),
        ("Unsubscribe", Kind.UNSUBSCRIBED),
        ("TransactionalUnsubscribe", Kind.UNSUBSCRIBED),
    ],
)
async def test_what_the_events_api_lists_proves_that_the_mail_was_taken(event_type: str, kind: Kind) -> None:
    (event,) = await looked_up([{**ROW, "EventType": event_type}])
    assert (event.kind, event.testimony, event.send_key, event.message_id) == (kind, YES, KEY, "m")
    assert (event.recipient, event.occurred_at) == (ANA, at("08:15:07"))


async def test_what_the_events_api_lists_and_nobody_knows_proves_nothing() -> None:
    (event,) = await looked_up([{**ROW, "EventType": "Teleported"}])
    assert (event.kind, event.testimony) == (Kind.UNKNOWN, NOTHING)


@pytest.mark.parametrize(
    "change",
    [{"ChannelName": channel} for channel in ("HTTP API", "Orders", "orders", "", None, "k" * 49)]
    + [{"ChannelName": "HTTP API", "To": to} for to in ("ANA.Reyes@Example.com", None)],
)
async def test_mail_to_the_recipient_by_a_channel_that_is_no_key_may_be_the_sought_one(change: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="^unnamed"):
        await looked_up([], [ROW | change])


@pytest.mark.parametrize(
    "change", [{"To": "bo.lind@example.net", "ChannelName": "HTTP API"}, {"ChannelName": "0" * 48}]
)
async def test_mail_to_somebody_else_or_of_another_key_is_not(change: dict[str, Any]) -> None:
    (event,) = await looked_up([], [ROW | change])
    assert event.send_key in (None, "0" * 48)


async def test_a_plain_key_is_known_by_its_channel() -> None:
    (event,) = await looked_up([ROW | {"ChannelName": "order-1"}], key="order-1")
    assert (event.send_key, event.testimony) == ("order-1", YES)


@pytest.mark.parametrize("page", [{"Error": "no"}, [7], [{}], [{"MsgID": "m"}], [{"EventType": "Sent"}], None])
async def test_an_answer_that_is_no_list_of_events_is_garbage(page: object) -> None:
    with pytest.raises(ApiError, match="garbage"):
        await looked_up(page)


def paths(fake: Fake) -> list[str]:
    return [request.path for request in fake.requests]


def asked_of(fake: Fake, name: str) -> Iterable[str]:
    return [request.query[name] for request in fake.requests]


async def test_a_key_is_asked_for_as_a_channel_in_utc_to_the_end_of_the_list() -> None:
    fake = Fake([Sent(KEY, message_id=f"m{i}") for i in range(2)])
    span = Query(datetime.fromisoformat("2026-11-02T09:00:00.9+01:00"), NOW + timedelta(seconds=0.5), KEY)
    async with asked("elastic_email", fake) as (feed, api):
        events = await search("elastic_email", feed, api, span)
    assert [event.message_id for event in events] == ["m0", "m0", "m1", "m1"]
    assert set(paths(fake)) == {f"/v4/events/channels/{KEY}"}
    assert asked_of(fake, "offset") == ["0", "3", "4"]
    assert set(asked_of(fake, "from")) == {"2026-11-02T08:00:00"}
    assert set(asked_of(fake, "to")) == {"2026-11-02T09:00:01"}


async def test_a_place_that_is_not_there_is_no_empty_back_fill() -> None:
    def spoil(_: web.Request) -> web.Response:
        return web.Response(status=404)

    async with asked("elastic_email", Fake([]), spoil) as (feed, api):
        with pytest.raises(ApiError, match="not_found"):
            await search("elastic_email", feed, api, Query(NOW - timedelta(hours=1), NOW))


async def test_of_a_channel_that_nobody_used_the_span_is_read() -> None:
    fake = Fake([Sent("0" * 48)])
    async with asked("elastic_email", fake) as (feed, api):
        events = await search("elastic_email", feed, api, Query(NOW - timedelta(hours=1), NOW, KEY, ANA))
    assert {event.send_key for event in events} == {"0" * 48}
    assert paths(fake) == [f"/v4/events/channels/{KEY}", "/v4/events", "/v4/events"]
