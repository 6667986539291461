# SPDX-License-Identifier: Apache-2.0
"""SparkPost: what its events mean, prove and carry, and what its Events API tells. Expectations are written by hand."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple

import pytest
from aiohttp import web
from anymail_compare import anymail_events
from api_kit import NOW, Sent, asked, search
from apis.sparkpost import Fake
from case_files import FIXTURES, case, delivery, fixture, no_fetch

from webhooks.asking import ApiError, Query
from webhooks.event import Event, Kind, Testimony
from webhooks.provider import BadPayload, Delivery, Feed, NoSample, Refused, Verdict, Verified
from webhooks.providers.sparkpost import MEANINGS, PROVIDER, SparkPost

KEY = "e15bd8fd5b6b63a6f91c331d3c0702980d93474c2b1c4474"
ANA = "ana.reyes@example.com"
TRANSMISSION = "7208811904312553477"
YES, NO, NOTHING = Testimony.ACCEPTED, Testimony.REJECTED, Testimony.NONE


class Expected(NamedTuple):
    kind: Kind
    testimony: Testimony
    event_id: str
    at: str
    send_key: str | None = KEY
    reason: str | None = None


SUPPRESSED = "554 5.7.1 recipient suppressed (invented)"
ON_LIST = "recipient on the suppression list (invented)"
MISSING = "template variable missing (invented)"
EXPECTED = {
    "injection": Expected(Kind.QUEUED, YES, "92244000000007919", "08:15:05"),
    "injection_no_meta": Expected(Kind.QUEUED, YES, "92244000000221732", "08:15:05", None),
    "delivery": Expected(Kind.DELIVERED, YES, "92244000000015838", "08:15:07"),
    "bounce": Expected(Kind.BOUNCED, YES, "92244000000023757", "08:15:07", reason="550 no such user (invented)"),
    "delay": Expected(Kind.DEFERRED, YES, "92244000000031676", "08:15:24", reason="451 later (invented)"),
    "out_of_band": Expected(Kind.BOUNCED, YES, "92244000000039595", "08:30:04", reason="550 (invented)"),
    "spam_complaint": Expected(Kind.COMPLAINED, YES, "92244000000047514", "09:15:04"),
    "policy_rejection": Expected(Kind.REJECTED, NO, "92244000000055433", "08:15:05", reason=SUPPRESSED),
    "sms_status": Expected(Kind.UNKNOWN, NOTHING, "92244000000063352", "08:15:09", None),
    "generation_failure": Expected(Kind.FAILED, NO, "92244000000071271", "08:15:05", reason=MISSING),
    "generation_rejection": Expected(
        Kind.REJECTED, NO, "2ba85664-d66e-5efb-bd16-7524580d4b35", "08:15:05", reason=ON_LIST
    ),
    "open": Expected(Kind.OPENED, YES, "92244000000087109", "08:16:04"),
    "initial_open": Expected(Kind.OPENED, YES, "92244000000095028", "08:16:04"),
    "click": Expected(Kind.CLICKED, YES, "92244000000102947", "08:16:05"),
    "amp_open": Expected(Kind.OPENED, YES, "92244000000110866", "08:16:04"),
    "amp_initial_open": Expected(Kind.OPENED, YES, "92244000000118785", "08:16:04"),
    "amp_click": Expected(Kind.CLICKED, YES, "92244000000126704", "08:16:06"),
    "list_unsubscribe": Expected(Kind.UNSUBSCRIBED, YES, "92244000000134623", "08:20:04"),
    "link_unsubscribe": Expected(Kind.UNSUBSCRIBED, YES, "1f928df9-bf4b-5f7d-a44f-f9618ae4c69b", "08:20:05"),
    "relay_injection": Expected(Kind.INBOUND, NOTHING, "92244000000150461", "08:15:34", None),
    "relay_rejection": Expected(Kind.INBOUND, NOTHING, "92244000000158380", "08:15:34", None, "(invented)"),
    "relay_delivery": Expected(Kind.INBOUND, NOTHING, "92244000000166299", "08:15:35", None),
    "relay_tempfail": Expected(Kind.INBOUND, NOTHING, "92244000000174218", "08:15:35", None, "(invented)"),
    "relay_permfail": Expected(Kind.INBOUND, NOTHING, "92244000000182137", "08:15:35", None, "(invented)"),
    "ab_test_completed": Expected(Kind.UNKNOWN, NOTHING, "92244000000190056", "08:16:04", None),
    "ab_test_cancelled": Expected(Kind.UNKNOWN, NOTHING, "92244000000197975", "08:16:04", None),
    "ingest_success": Expected(Kind.UNKNOWN, NOTHING, "92244000000205894", "08:16:04", None),
    "ingest_error": Expected(Kind.UNKNOWN, NOTHING, "92244000000213813", "08:16:04", None),
}


def read(name: str) -> list[Event]:
    return list(PROVIDER.parse(Delivery(fixture(f"sparkpost/{name}.json"), {})).events)


def parse(*elements: Any) -> list[Event]:
    return list(PROVIDER.parse(Delivery(json.dumps(elements).encode(), {})).events)


def message_event(**fields: Any) -> Event:
    (event,) = parse({"msys": {"message_event": fields}})
    return event


def time(clock_time: str) -> datetime:
    return datetime.fromisoformat(f"2026-11-02T{clock_time}+00:00")


@pytest.mark.parametrize("name", EXPECTED)
def test_every_event_type_is_read_as_the_facts_say(name: str) -> None:
    (event,), expected = read(name), EXPECTED[name]
    assert (event.kind, event.testimony, event.send_key) == (expected.kind, expected.testimony, expected.send_key)
    assert (event.event_id, event.occurred_at) == (expected.event_id, time(expected.at))
    assert (event.message_id, event.recipient, event.reason) == (TRANSMISSION, ANA, expected.reason)


def test_every_webhook_fixture_has_an_expectation() -> None:
    names = {path.stem for path in (FIXTURES / "sparkpost").glob("*.json")}
    assert {name for name in names if not name.startswith("api_")} == {*EXPECTED, "batch_mixed", "ping"}


def test_a_batch_holds_an_event_for_each_element_with_its_exact_bytes() -> None:
    injection, delivered, opened, again = read("batch_mixed")
    assert [event.event_id for event in (injection, delivered, opened)] == [
        "92244000000007919",
        "92244000000015838",
        "92244000000087109",
    ]
    assert again == injection
    whole = fixture("sparkpost/batch_mixed.json")
    assert all(event.raw in whole for event in (injection, delivered, opened))
    assert json.loads(delivered.raw)["cust"] == {"id": "90210"}


@pytest.mark.parametrize("body", [b'[{"msys":{}}]', b'[{"msys":{}},{"msys":{}}]', b'{"msys":{}}'])
def test_a_ping_is_a_control_message(body: bytes) -> None:
    found = PROVIDER.parse(Delivery(body, {}))
    assert (list(found.events), found.control, found.anomalies) == ([], "ping", {})


def test_a_ping_among_events_costs_none_of_them() -> None:
    (event,) = parse({"msys": {}}, {"msys": {"message_event": {"type": "delivery", "event_id": "1"}}})
    assert event.kind is Kind.DELIVERED


@pytest.mark.parametrize("damage", ["7", "null", "[]", "{}", '{"msys":7}', '{"msys":[]}', '"x"', '{"msys":}'])
def test_an_element_that_can_not_be_read_is_kept_and_fails_none_of_its_neighbours(damage: str) -> None:
    body = f'[{{"msys":{{"message_event":{{"type":"delivery","event_id":"1"}}}}}}, {damage}]'.encode()
    found = PROVIDER.parse(Delivery(body, {}))
    good, bad = found.events
    assert (good.kind, good.event_id) == (Kind.DELIVERED, "1")
    assert (bad.kind, bad.testimony, bad.message_id, bad.raw) == (Kind.UNKNOWN, NOTHING, None, damage.encode())
    assert found.anomalies == {"damaged": 1}


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"7", b"hello", b"[7, null]", b'{"msys":null}', b'[{"msys":'])
def test_what_is_no_batch_of_sparkpost_is_refused_in_one_line(body: bytes) -> None:
    with pytest.raises(BadPayload, match="msys|JSON") as refusal:
        PROVIDER.parse(Delivery(body, {}))
    assert "\n" not in str(refusal.value)


def test_an_element_of_two_classes_is_two_events() -> None:
    both = parse({"msys": {"message_event": {"type": "delivery", "event_id": "1"}, "track_event": {"type": "open"}}})
    assert [event.kind for event in both] == [Kind.DELIVERED, Kind.OPENED]


@pytest.mark.parametrize("event_id", [92244000000007919, 9007199254740993, "9007199254740993", 2**64 + 1])
def test_an_id_is_kept_to_its_last_digit_as_number_and_as_text(event_id: object) -> None:
    event = message_event(type="delivery", event_id=event_id, transmission_id=event_id)
    assert (event.event_id, event.message_id) == (str(event_id), str(event_id))


CLICK = {"type": "click", "transmission_id": "1", "raw_rcpt_to": ANA, "timestamp": "1793607365", "ip_address": "a"}


@pytest.mark.parametrize("change", [{"type": "open"}, {"timestamp": "1793607366"}, {"target_link_url": "https://b"}])
def test_without_an_id_a_repeat_is_the_same_event_and_another_event_is_not(change: dict[str, str]) -> None:
    one = message_event(**CLICK)
    assert one.event_id == message_event(**dict(reversed(CLICK.items())), geo_ip={"city": "Madrid"}).event_id
    assert one.event_id != message_event(**(CLICK | change)).event_id


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1793607305", time("08:15:05")),
        (1793607305, time("08:15:05")),
        ("2026-11-02T08:15:05.000Z", time("08:15:05")),
        ("2026-11-02T09:15:05.000+01:00", time("08:15:05")),
        ("soon", None),
        ("0", None),
        (None, None),
    ],
)
def test_times_are_read_as_seconds_and_as_iso(value: object, expected: datetime | None) -> None:
    assert message_event(type="delivery", timestamp=value).occurred_at == expected


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"rcpt_meta": {"send_key": "order-1"}}, "order-1"),
        ({"rcpt_meta": {"send_key": "order-1"}, "campaign_id": "christmas"}, "order-1"),
        ({"rcpt_meta": {}, "campaign_id": KEY}, KEY),
        ({"rcpt_meta": None, "campaign_id": KEY}, KEY),
        ({"rcpt_meta": {"send_key": ""}, "campaign_id": "christmas"}, None),
        ({"campaign_id": "christmas"}, None),
        ({"rcpt_meta": "text", "campaign_id": 7}, None),
        ({}, None),
    ],
)
def test_the_key_is_metadata_or_a_campaign_that_is_nobodys_own(fields: dict[str, Any], key: str | None) -> None:
    assert message_event(type="open", **fields).send_key == key


@pytest.mark.parametrize("kind", ["relay_message", "relay_event", "relay_something_new"])
def test_incoming_mail_proves_nothing_and_brings_no_key(kind: str) -> None:
    content = {"email_rfc822": "From: x", "headers": []}
    fields = {"rcpt_to": "in@example.com", "content": content, "rcpt_meta": {"send_key": KEY}, "type": "delivery"}
    (event,) = parse({"msys": {kind: fields}})
    assert (event.kind, event.testimony, event.send_key) == (Kind.INBOUND, NOTHING, None)
    assert event.recipient == "in@example.com"
    (other,) = parse({"msys": {kind: fields | {"content": {"email_rfc822": "From: y"}}}})
    assert other.event_id != event.event_id


@pytest.mark.parametrize(
    ("bounce_class", "kind"),
    [
        ("10", "bounced"),
        (10, "bounced"),
        ("25", "bounced"),
        ("60", "autoresponded"),
        ("100", "autoresponded"),
        ("80", "subscribed"),
        ("90", "unsubscribed"),
        (None, "bounced"),
    ],
)
@pytest.mark.parametrize("name", ["bounce", "out_of_band"])
def test_a_bounce_may_be_an_answer_and_proves_acceptance_all_the_same(name: str, bounce_class: Any, kind: str) -> None:
    event = message_event(type=name, bounce_class=bounce_class)
    assert (event.kind, event.testimony) == (kind, YES)


def test_a_rejection_stays_one_whatever_its_bounce_class() -> None:
    event = message_event(type="policy_rejection", bounce_class="60")
    assert (event.kind, event.testimony) == (Kind.REJECTED, NO)


# -- credentials -------------------------------------------------------------------------------------------------------


def basic(credential: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(credential.encode()).decode()}


async def verify(request: Delivery, *secrets: str) -> Verdict:
    return await PROVIDER.verify(request, Feed("main", "sparkpost", secrets), NOW, no_fetch)


async def test_a_credential_that_sparkpost_can_carry_verifies() -> None:
    carried = Delivery(b"[]", {**basic("hook:throwaway"), "x-messagesystems-webhook-token": "t"}, query="k=v")
    for secret in ("basic:hook:throwaway", "header:X-MessageSystems-Webhook-Token=t", "query:k=v"):
        assert await verify(carried, "basic:hook:old", secret) == Verified()
        assert isinstance(await verify(Delivery(b"[]", {}), secret), Refused)


async def test_without_a_credential_configured_every_delivery_is_refused() -> None:
    for secrets in ((), ("a-signing-key",), ("",)):
        verdict = await verify(Delivery(b"[]", basic(":")), *secrets)
        assert isinstance(verdict, Refused)
        assert verdict.reason == "no_secret"


async def test_case_020_a_ping_is_answered_and_stores_nothing() -> None:
    reported = case("020")
    request = delivery(reported)
    assert await verify(request, "basic:" + reported["config"]["basic_auth"]) == Verified()
    found = PROVIDER.parse(request)
    assert (len(found.events), found.control) == (reported["expect"]["events_stored"], "ping")


@pytest.mark.parametrize("secret", ["basic:a:b", "header:X-Own=v", "query:k=v", "bearer:t"])
def test_a_secret_that_no_request_carries_is_objected_to(secret: str) -> None:
    provider = SparkPost()
    assert provider.objection("secrets", secret) is None
    assert "basic:user:password" in (provider.objection("secrets", "a-signing-key") or "")
    assert provider.objection("topics", "any") is None


# -- what a send is answered -------------------------------------------------------------------------------------------

ANSWERS = {
    "api_transmission_ok": (TRANSMISSION, "accepted", "Confirm with the answer's results.id"),
    "api_409_other_payload": (
        None,
        "accepted",
        "409 code 1600 (other payload) proves that the first request was taken",
    ),
    "api_409_in_progress": (None, "none", "409 code 1601 says that one is in progress, which proves nothing yet"),
}
"""For each answer: its id as the sender's side keeps it, what it proves, and the words that say so in the facts."""


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_names_the_message_as_its_events_do_and_the_facts_say_what_it_proves(name: str) -> None:
    message_id, _, words = ANSWERS[name]
    answer = json.loads(fixture(f"sparkpost/{name}.json"))
    assert answer.get("results", {}).get("id", "").strip("<> ") == (message_id or "")
    assert {event.message_id for event_name in EXPECTED for event in read(event_name)} == {TRANSMISSION}
    assert words in " ".join((*PROVIDER.facts.setup, PROVIDER.facts.native_key))
    assert [f"code {error['code']}" in words for error in answer.get("errors", [])] == [True] * (message_id is None)


# -- stamp, facts and samples ------------------------------------------------------------------------------------------


def test_the_stamp_is_metadata_campaign_and_idempotency_key() -> None:
    stamp = PROVIDER.stamp(KEY)
    assert stamp.body == {"metadata": {"send_key": KEY}, "campaign_id": KEY}
    assert stamp.headers == {"Idempotency-Key": KEY}
    assert json.loads(stamp.smtp_headers["X-MSYS-API"]) == stamp.body
    assert list(stamp.smtp_headers) == ["X-MSYS-API"]


def test_the_same_request_is_answered_anew_for_a_day() -> None:
    assert PROVIDER.facts.same_key_window == timedelta(hours=24)
    for code in ("1600", "1601", "1602", "X-Idempotent-Replayed"):
        assert code in PROVIDER.facts.native_key


def test_the_setup_names_every_event_that_speaks_of_a_send() -> None:
    setup = " ".join(PROVIDER.facts.setup)
    assert "{url}" in setup
    for name, (_, testimony) in MEANINGS.items():
        assert (name in setup) is (testimony is not NOTHING)


@pytest.mark.parametrize("name", [name for name, (_, testimony) in MEANINGS.items() if testimony is not NOTHING])
async def test_a_sample_is_taken_and_shaped_like_the_real_thing(name: str) -> None:
    sample = PROVIDER.sample(name, KEY, Feed("main", "sparkpost", ("basic:a:b",)), NOW)
    assert await verify(sample, "basic:a:b") == Verified()
    (event,) = PROVIDER.parse(sample).events
    assert (event.kind, event.testimony) == MEANINGS[name]
    assert (event.send_key, event.occurred_at, event.recipient) == (KEY, NOW, "sample@example.com")
    (wrapped,) = json.loads(sample.body)
    (real,) = json.loads(fixture(f"sparkpost/{name}.json"))
    assert list(wrapped["msys"]) == list(real["msys"])


def test_where_no_sample_can_be_made_the_reason_is_told() -> None:
    with pytest.raises(NoSample, match="no credential"):
        PROVIDER.sample("delivery", KEY, Feed("main", "sparkpost"), NOW)
    with pytest.raises(NoSample, match=r"'nonsense'.*injection"):
        PROVIDER.sample("nonsense", KEY, Feed("main", "sparkpost", ("basic:a:b",)), NOW)


# -- asking ------------------------------------------------------------------------------------------------------------

SINCE, UNTIL = NOW - timedelta(hours=1), NOW + timedelta(hours=1)


def answering(value: Any) -> Any:
    """Return what answers each request with the value, in place of the fake."""
    return lambda _: web.json_response(value)


async def test_an_event_that_the_api_lists_is_the_webhooks_event() -> None:
    answer = json.loads(fixture("sparkpost/api_events.json"))
    async with asked("sparkpost", Fake([]), answering(answer)) as (feed, api):
        (event,) = await search("sparkpost", feed, api, Query(SINCE, UNTIL, KEY))
    (webhook,) = read("delivery")
    assert json.loads(event.raw) == answer["results"][0]
    assert all_but_raw(event) == all_but_raw(webhook)


def all_but_raw(event: Event) -> dict[str, Any]:
    return {name: getattr(event, name) for name in event.__struct_fields__ if name != "raw"}


async def test_our_key_is_asked_as_campaign_up_to_now_and_a_subaccount_by_its_id() -> None:
    fake = Fake([])
    async with asked("sparkpost", fake) as (feed, api):
        await search("sparkpost", replace(feed, api_scope="101"), api, Query(SINCE, UNTIL, KEY))
        await search("sparkpost", replace(feed, api_scope=""), api, Query(SINCE, UNTIL, None, None))
    by_key, by_span, everything = (dict(request.query) for request in fake.requests)
    assert by_key.pop("campaigns") == KEY
    assert (by_key.pop("subaccounts"), by_span.pop("subaccounts")) == ("101", "101")
    assert everything.pop("to") == "2026-11-02T10:00:01Z"
    assert by_key == by_span == everything == {"from": "2026-11-02T08:00:00Z", "per_page": "1000", "cursor": "initial"}


async def test_a_recipient_is_asked_for_only_where_it_can_be_written_in_one_way() -> None:
    for recipient, asked_for in ((ANA, ANA), ("Ana@example.com", None), ("ana@xn--mnchen-3ya.example", None)):
        fake = Fake([])
        async with asked("sparkpost", fake) as (feed, api):
            await search("sparkpost", feed, api, Query(SINCE, UNTIL, KEY, recipient))
        assert [request.query.get("recipients") for request in fake.requests] == [None, asked_for]


async def test_times_are_asked_in_utc_and_include_the_last_second() -> None:
    fake, since = Fake([]), datetime(2026, 11, 2, 10, 0, 0, 900_000, timezone(timedelta(hours=-2)))
    async with asked("sparkpost", fake) as (feed, api):
        await search("sparkpost", feed, api, Query(since, since))
    assert (fake.requests[0].query["from"], fake.requests[0].query["to"]) == (
        "2026-11-02T12:00:00Z",
        "2026-11-02T12:00:02Z",
    )


async def test_pages_are_read_by_the_cursor_to_the_end() -> None:
    sends = [Sent(f"{n:048x}", message_id=str(n)) for n in range(1, 8)]
    fake = Fake(sends)
    async with asked("sparkpost", fake) as (feed, api):
        events = await search("sparkpost", feed, api, Query(SINCE, UNTIL))
    assert [event.message_id for event in events] == ["1", "2", "3", "4", "5", "6", "7"]
    assert [request.query["cursor"] for request in fake.requests] == ["initial", "W1cn+/3==", "W1cn+/6=="]


async def test_a_keyword_search_may_find_more_than_our_key() -> None:
    found = {"results": [api_event("order-1"), api_event("order-1-copy")], "total_count": 2, "links": {}}
    async with asked("sparkpost", Fake([]), answering(found)) as (feed, api):
        events = await search("sparkpost", feed, api, Query(SINCE, UNTIL, "order-1"))
    assert [event.send_key for event in events] == ["order-1", "order-1-copy"]


@dataclass
class Renamed(Fake):
    """An account whose sends have a campaign of their sender's own."""

    campaign: str = "christmas"
    metadata: bool = True

    def event_of(self, sent: Sent) -> dict[str, Any]:
        return {**super().event_of(sent), "campaign_id": self.campaign, **({} if self.metadata else {"rcpt_meta": {}})}


async def looked_up(fake: Fake, key: str = KEY, recipient: str = ANA) -> list[Event]:
    async with asked("sparkpost", fake) as (feed, api):
        return await search("sparkpost", feed, api, Query(SINCE, UNTIL, key, recipient))


async def test_a_send_whose_campaign_was_replaced_is_found_by_its_metadata() -> None:
    assert KEY in [event.send_key for event in await looked_up(Renamed([Sent(f"{1:048x}"), Sent(KEY)]))]


async def test_a_send_that_shows_neither_may_be_the_sought_one() -> None:
    with pytest.raises(ApiError, match="^unnamed"):
        await looked_up(Renamed([Sent(KEY)], metadata=False))
    with pytest.raises(ApiError, match="^unnamed"):
        await looked_up(
            Renamed([Sent(KEY, "ANA.Reyes@Example.com")], metadata=False), recipient="Ana.Reyes@example.com"
        )
    assert len(await looked_up(Renamed([Sent(KEY, "bo.lind@example.net")], metadata=False))) == 0


async def test_a_campaign_that_is_the_key_asked_for_is_ours_whatever_it_looks_like() -> None:
    (event,) = await looked_up(Renamed([Sent("order-1")], campaign="order-1", metadata=False), "order-1")
    assert event.send_key == "order-1"


def api_event(key: str) -> dict[str, Any]:
    return {"type": "injection", "event_id": key, "campaign_id": key, "rcpt_meta": {"send_key": key}}


@pytest.mark.parametrize(
    "answer",
    [
        {"results": []},
        {"results": [], "links": []},
        {"results": [], "links": {"next": 7}},
        {"results": [], "links": {"next": "https://elsewhere.example/api/v1/events/message?cursor=x"}},
        {"results": [], "links": {"next": "@elsewhere.example/"}},
        {"results": [], "links": {"next": ""}},
        {"results": {}, "links": {}},
        {"results": [7], "links": {}},
        {"results": [{"event_id": "1"}], "links": {}},
    ],
)
async def test_an_answer_of_another_shape_is_garbage_and_no_other_host_is_asked(answer: Any) -> None:
    async with asked("sparkpost", Fake([]), answering(answer)) as (feed, api):
        with pytest.raises(ApiError, match="garbage"):
            await search("sparkpost", feed, api, Query(SINCE, UNTIL, KEY))


# -- a second reading --------------------------------------------------------------------------------------------------

DIFFERENT_KINDS = {
    "initial_open": "anymail counts it only if told to: an open follows, too; for us each proves acceptance",
    "amp_initial_open": "likewise",
    "relay_injection": "anymail reads incoming mail at another address",
    "relay_rejection": "likewise",
    "relay_delivery": "likewise",
    "relay_tempfail": "likewise",
    "relay_permfail": "likewise",
}
DIFFERENT_TIMES = {"generation_failure": "anymail reads no ISO 8601, in which generation events have come"}


@pytest.mark.parametrize("name", EXPECTED)
def test_django_anymail_reads_the_same(name: str) -> None:
    request = Delivery(fixture(f"sparkpost/{name}.json"), {"content-type": "application/json"})
    (ours,), (theirs,) = PROVIDER.parse(request).events, anymail_events("sparkpost", request)
    assert (ours.message_id, ours.event_id, ours.recipient) == (theirs.message_id, theirs.event_id, theirs.recipient)
    assert theirs.metadata.get("send_key") == ours.send_key
    assert (ours.kind.value == theirs.event_type) is (name not in DIFFERENT_KINDS)
    assert (ours.occurred_at == theirs.timestamp) is (name not in DIFFERENT_TIMES)


@pytest.mark.parametrize("bounce_class", ["1", "10", "25", "40", "51", "60", "70", "80", "90", "100"])
def test_django_anymail_reads_every_class_of_bounce_the_same(bounce_class: str) -> None:
    fields = {"type": "bounce", "bounce_class": bounce_class}
    request = Delivery(json.dumps([{"msys": {"message_event": fields}}]).encode(), {})
    (theirs,) = anymail_events("sparkpost", request)
    assert message_event(**fields).kind.value == theirs.event_type
