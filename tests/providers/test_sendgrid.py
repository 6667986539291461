# SPDX-License-Identifier: Apache-2.0
"""What SendGrid sends is read as written in its fact sheet."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from anymail_compare import anymail_events
from case_files import FIXTURES, case, clock, delivery, feed, fixture, no_fetch

from webhooks.event import Event, Kind, Testimony
from webhooks.provider import BadPayload, Delivery, Refused, Verified
from webhooks.providers.sendgrid import PROVIDER

KEY = "e15bd8fd5b6b63a6f91c331d3c0702980d93474c2b1c4474"
OTHER_KEY = "5484389ddcae99204cde863d5da0d5f5ad84374a056cdeaf"
ANA = "ana.reyes@example.com"
MESSAGE = "kQ7v1ZrTS9mJ4pXcW2nLbA"
YES, NO, NOTHING = Testimony.ACCEPTED, Testimony.REJECTED, Testimony.NONE


def on(day: int, clock_time: str) -> datetime:
    return datetime.fromisoformat(f"2026-11-{day:02}T{clock_time}+00:00")


PROCESSED = (Kind.QUEUED, YES, KEY, MESSAGE, "cHJvY2Vzc2VkLTAwMDAwMDAxLWV4YW1wbGU", ANA, on(2, "08:15:05"))
DELIVERED = (Kind.DELIVERED, YES, KEY, MESSAGE, "ZGVsaXZlcmVkLTAtMDAwMDAwMDEtZXhhbXBsZQ", ANA, on(2, "08:15:06"))
DEFERRED = (Kind.DEFERRED, YES, KEY, MESSAGE, "ZGVmZXJyZWQtMC0wMDAwMDAwMS1leGFtcGxl", ANA, on(2, "08:15:10"))
OPENED = (Kind.OPENED, YES, KEY, MESSAGE, "b3Blbi0wMDAwMDAwMS1leGFtcGxl", ANA, on(2, "08:43:20"))
DROPPED = (Kind.REJECTED, NO, KEY, MESSAGE, "ZHJvcC0wMDAwMDAwMS1leGFtcGxl", ANA, on(2, "08:15:05"))

EXPECTED = {
    "processed": [PROCESSED],
    "delivered": [DELIVERED],
    "deferred": [DEFERRED],
    "open": [OPENED],
    "dropped": [DROPPED],
    "dropped_no_email": [
        (Kind.REJECTED, NO, KEY, MESSAGE, "ZHJvcC0wMDAwMDAwMi1leGFtcGxl", None, on(2, "08:15:05")),
    ],
    "bounce": [(Kind.BOUNCED, YES, KEY, MESSAGE, "Ym91bmNlLTAtMDAwMDAwMDEtZXhhbXBsZQ", ANA, on(2, "08:15:12"))],
    "bounce_blocked": [
        (Kind.BOUNCED, YES, KEY, MESSAGE, "Ym91bmNlLTAtMDAwMDAwMDItZXhhbXBsZQ", ANA, on(2, "08:15:13")),
    ],
    "bounce_async_without_key": [
        (Kind.BOUNCED, YES, None, None, "Ym91bmNlLWFzeW5jLTAwMDAwMDAx", ANA, on(2, "13:20:00")),
    ],
    "click": [(Kind.CLICKED, YES, KEY, MESSAGE, "Y2xpY2stMDAwMDAwMDEtZXhhbXBsZQ", ANA, on(2, "08:43:40"))],
    "spamreport": [(Kind.COMPLAINED, YES, KEY, MESSAGE, "c3BhbXJlcG9ydC0wMDAwMDAwMQ", ANA, on(3, "10:00:00"))],
    "unsubscribe": [(Kind.UNSUBSCRIBED, YES, KEY, MESSAGE, "dW5zdWJzY3JpYmUtMDAwMDAwMDE", ANA, on(3, "10:01:40"))],
    "group_unsubscribe": [
        (Kind.UNSUBSCRIBED, YES, KEY, MESSAGE, "Z3JvdXBfdW5zdWItMDAwMDAwMDE", ANA, on(3, "10:03:20")),
    ],
    "group_resubscribe": [
        (Kind.SUBSCRIBED, YES, KEY, MESSAGE, "Z3JvdXBfcmVzdWItMDAwMDAwMDE", ANA, on(3, "10:05:00")),
    ],
    "account_status_change": [
        (Kind.UNKNOWN, NOTHING, None, None, "YWNjb3VudC0wMDAwMDAwMQ", None, on(3, "10:06:40")),
    ],
    "batch_mixed": [PROCESSED, DELIVERED, DEFERRED, OPENED, DROPPED],
    "custom_args_collision": [
        (Kind.DELIVERED, YES, KEY, MESSAGE, "ZGVsaXZlcmVkLTAtMDAwMDAwMDktZXhhbXBsZQ", ANA, on(2, "08:15:06")),
    ],
    "duplicate_with_new_sg_event_id": [
        DELIVERED,
        (Kind.DELIVERED, YES, KEY, MESSAGE, "ZGVsaXZlcmVkLTAtMDAwMDAwMDEtZXhhbXBsZQ_2", ANA, on(2, "08:15:06")),
    ],
    "two_personalizations": [
        (Kind.QUEUED, YES, KEY, MESSAGE, "cHJvY2Vzc2VkLW11bHRp0", ANA, on(2, "08:15:05")),
        (Kind.QUEUED, YES, OTHER_KEY, MESSAGE, "cHJvY2Vzc2VkLW11bHRp1", "bo.lind@example.net", on(2, "08:15:05")),
    ],
}


def facts_of(event: Event) -> tuple[Any, ...]:
    return (
        event.kind,
        event.testimony,
        event.send_key,
        event.message_id,
        event.event_id,
        event.recipient,
        event.occurred_at,
    )


def parse(body: bytes) -> list[Event]:
    return list(PROVIDER.parse(Delivery(body, {})).events)


def parse_one(**fields: Any) -> Event:
    (event,) = parse(json.dumps([fields]).encode())
    return event


@pytest.mark.parametrize("name", EXPECTED)
def test_every_event_type_is_read_as_the_facts_say(name: str) -> None:
    assert [facts_of(event) for event in parse(fixture(f"sendgrid/{name}.json"))] == EXPECTED[name]


def test_every_webhook_fixture_has_an_expectation() -> None:
    names = {path.stem for path in (FIXTURES / "sendgrid").glob("*.json")}
    assert {name for name in names if not name.startswith("api_")} == set(EXPECTED)


def test_each_event_keeps_its_exact_bytes() -> None:
    elements = [b'{"event": "open",  "n": 12345678901234567890123}', b'{"event":"click"}']
    assert [event.raw for event in parse(b"[ " + b" ,\r\n".join(elements) + b"]\r\n")] == elements


def test_the_reason_tells_why_a_mail_was_not_delivered() -> None:
    assert parse(fixture("sendgrid/bounce.json"))[0].reason == "550 5.1.1 no such mailbox"
    assert parse(fixture("sendgrid/deferred.json"))[0].reason == "421 4.7.0 try later"
    assert parse(fixture("sendgrid/delivered.json"))[0].reason is None
    assert parse_one(event="bounce", reason="long " * 200).reason == "long " * 40


def test_a_timestamp_in_milliseconds_is_the_same_time() -> None:
    seconds, milliseconds = (parse_one(event="open", timestamp=value) for value in (1793607305, 1793607305000))
    assert seconds.occurred_at == milliseconds.occurred_at == on(2, "08:15:05")


@pytest.mark.parametrize("timestamp", [None, "soon", [], {}, True, 10**400, -1, 0, 1e300])
def test_an_absurd_timestamp_costs_only_the_time(timestamp: object) -> None:
    event = parse_one(event="open", sg_event_id="a", timestamp=timestamp)
    assert (event.kind, event.occurred_at) == (Kind.OPENED, None)


def test_a_field_of_an_odd_type_costs_only_that_field() -> None:
    event = parse_one(
        event="delivered", sg_event_id=77, sg_message_id="m.1", email=["x"], send_key={"a": 1}, timestamp="1793607305"
    )
    assert facts_of(event) == (Kind.DELIVERED, YES, None, "m", "77", None, on(2, "08:15:05"))


@pytest.mark.parametrize("damaged", [b"7", b"null", b'"text"', b"[]", b"{tru}", b"[" * 9000 + b"]" * 9000])
def test_a_damaged_element_is_kept_and_its_neighbours_are_read(damaged: bytes) -> None:
    good = b'{"event":"open","sg_event_id":"%d","sg_message_id":"m.1"}'
    parsed = PROVIDER.parse(Delivery(b"[%b,%b,%b]" % (good % 1, damaged, good % 2), {}))
    first, odd, last = parsed.events
    assert (first.event_id, last.event_id) == ("1", "2")
    assert (odd.kind, odd.testimony, odd.message_id, odd.raw) == (Kind.UNKNOWN, NOTHING, None, damaged)
    assert parsed.anomalies == {"damaged": 1}


def test_two_damaged_elements_are_two_events_and_a_repeat_is_the_same() -> None:
    first, second, again = parse(b"[7,8,7]")
    assert first.event_id == again.event_id != second.event_id


@pytest.mark.parametrize("odd", [b'"\\ud83d"', b"NaN", b"1e999", b'"a\nb"', b'"\xff\xfe"', b'"\\u0000"'])
def test_odd_characters_in_one_event_lose_nothing(odd: bytes) -> None:
    element = b'{"event":"open","sg_event_id":"1","app":%b,"sg_message_id":"m.1","send_key":"k"}' % odd
    (event, neighbour) = parse(b'[%b,{"event":"click"}]' % element)
    assert (event.kind, event.message_id, event.send_key, event.raw) == (Kind.OPENED, "m", "k", element)
    assert neighbour.kind is Kind.CLICKED


def test_a_fractional_timestamp_is_kept_beside_odd_characters() -> None:
    (event,) = parse(b'[{"event":"open","timestamp":1793607305.5,"app":"\\ud83d"}]')
    assert event.occurred_at == on(2, "08:15:05.500")


@pytest.mark.parametrize("body", [b"", b"hello", b"[", b'[{"event":"open"}', b'["'])
def test_a_body_that_is_no_batch_is_refused(body: bytes) -> None:
    with pytest.raises(BadPayload, match="not JSON"):
        PROVIDER.parse(Delivery(body, {}))


def test_an_empty_batch_has_no_events() -> None:
    assert parse(b"[]\r\n") == []


def test_a_derived_id_tells_true_events_apart_and_repeats_together() -> None:
    click = {
        "event": "click",
        "email": ANA,
        "sg_message_id": "m.1",
        "timestamp": 1793607305,
        "url": "https://a.example",
    }
    same = parse_one(**dict(reversed(click.items()))).event_id
    others = [
        parse_one(**click | change).event_id
        for change in (
            {"url": "https://b.example"},
            {"url_offset": {"index": 1, "type": "html"}},
            {"email": "bo.lind@example.net"},
            {"timestamp": 1793607306},
            {"event": "open"},
            {"sg_message_id": "m.2"},
            {"useragent": "x"},
            {"ip": "192.0.2.1"},
        )
    ]
    assert parse_one(**click).event_id == same
    assert len({same, *others}) == 9


@pytest.mark.parametrize("name", ["event", "email", "timestamp", "sg_event_id", "sg_message_id", "send_key"])
def test_of_doubled_names_the_providers_own_comes_first(name: str) -> None:
    own = {
        "event": "open",
        "email": ANA,
        "timestamp": 1793607305,
        "sg_event_id": "i",
        "sg_message_id": "m.1",
        "send_key": "k",
    }
    doubled = json.dumps(own).encode()[:-1] + b', "%b": "ours"}' % name.encode()
    parsed = PROVIDER.parse(Delivery(b"[%b,%b]" % (doubled, json.dumps(own).encode()), {}))
    assert [facts_of(event) for event in parsed.events] == [
        (Kind.OPENED, YES, "k", "m", "i", ANA, on(2, "08:15:05"))
    ] * 2
    assert parsed.anomalies == {"duplicate_keys": 1}


def test_a_value_that_looks_like_a_name_is_no_anomaly() -> None:
    parsed = PROVIDER.parse(Delivery(b'[{"event":"open","category":["event","email"],"x":"\\"event\\""}]', {}))
    assert (parsed.events[0].kind, parsed.anomalies) == (Kind.OPENED, {})


# --- cases from public trouble reports


async def judge_case(number: str) -> list[Event]:
    """Verify and parse each request of a case; the parsed events of all of them."""
    of = case(number)
    further = of.get("requests", [])
    events: list[Event] = []
    for request in [of, *(further if isinstance(further, list) else [])]:
        assert await PROVIDER.verify(delivery(request), feed(of), clock(of), no_fetch) == Verified()
        events += PROVIDER.parse(delivery(request)).events
    return events


async def test_case_006_an_event_without_an_id_gets_a_stable_one() -> None:
    (event,) = await judge_case("006")
    (again,) = await judge_case("006")
    assert event == again
    assert event.event_id
    assert (event.kind, event.testimony) == (Kind.UNSUBSCRIBED, YES)
    assert (event.message_id, event.send_key) == ("TESTmsg0000000000000A", "news:2026-11:ada")


async def test_case_011_a_custom_argument_overrides_nothing() -> None:
    (event,) = await judge_case("011")
    assert (event.kind, event.testimony, event.recipient) == (Kind.DELIVERED, YES, "ada@example.org")
    assert (event.message_id, event.send_key) == ("TESTmsg0000000000000C", "order.receipt:1001")
    assert PROVIDER.parse(delivery(case("011"))).anomalies == {"duplicate_keys": 1}


async def test_case_026_the_signature_covers_the_exact_bytes() -> None:
    assert [event.send_key for event in await judge_case("026")] == ["order.receipt:1001", "order.receipt:1002"]
    of = case("026")
    trimmed = Delivery(delivery(of).body[:-2], delivery(of).headers)
    judged = await PROVIDER.verify(trimmed, feed(of), clock(of), no_fetch)
    assert isinstance(judged, Refused)
    assert judged.reason == "signature"


@pytest.mark.parametrize("number", ["040", "041"])
async def test_case_040_and_041_a_repeat_is_the_same_event(number: str) -> None:
    first, again = await asyncio.gather(judge_case(number), judge_case(number))
    assert first == again
    assert facts_of(first[0]) == (
        Kind.QUEUED,
        YES,
        "order.receipt:1001",
        "TESTmsg0000000000000E",
        "cHJvLTAwMDE",
        "ada@example.org",
        datetime(2026, 11, 20, 10, 0, tzinfo=UTC),
    )


async def test_case_042_a_new_event_id_changes_nothing_else() -> None:
    first, retried = await judge_case("042")
    assert (first.event_id, retried.event_id) == ("ZGVsLVJFVFJZLTE", "ZGVsLVJFVFJZLTI")
    assert facts_of(first)[:4] + facts_of(first)[5:] == facts_of(retried)[:4] + facts_of(retried)[5:]


async def test_case_075_a_huge_event_id_becomes_a_hash() -> None:
    (event,) = await judge_case("075")
    assert event.message_id == "TESTmsg0000000000000Q"
    assert event.event_id.startswith("sha256:")
    assert len(event.event_id) < 100


async def test_case_076_one_batch_may_hold_an_event_twice() -> None:
    events = await judge_case("076")
    assert [event.event_id for event in events] == ["ZHVwLTAwMDE", "ZHVwLTAwMDE", "ZHVwLTAwMDI"]
    assert [event.send_key for event in events] == ["order.receipt:1001", "order.receipt:1001", "order.receipt:1002"]


async def test_case_077_six_thousand_events_in_one_post_are_all_read() -> None:
    events = await judge_case("077")
    assert len({(event.message_id, event.event_id) for event in events}) == 6000
    assert {event.send_key for event in events} == {f"news:2026-11:{number}" for number in range(6000)}


# --- a second reading


@pytest.mark.parametrize("name", EXPECTED)
def test_django_anymail_reads_the_same(name: str) -> None:
    request = Delivery(fixture(f"sendgrid/{name}.json"), {})
    ours, theirs = PROVIDER.parse(request).events, anymail_events("sendgrid", request)
    assert [event.kind.value for event in ours] == [event.event_type for event in theirs]
    assert [event.event_id for event in ours] == [event.event_id for event in theirs]
    assert [event.occurred_at for event in ours] == [event.timestamp for event in theirs]
    assert [event.recipient for event in ours] == [event.recipient or None for event in theirs]
    # Anymail's message id is the whole smtp-id, which opens, clicks and later events lack; ours is the part of it
    # that the API answered with, which sg_message_id begins with in every event.
    for event, their in zip(ours, theirs, strict=True):
        assert their.message_id in (None, f"<{event.message_id}@geopod-ismtpd-7>")
