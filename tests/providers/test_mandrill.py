# SPDX-License-Identifier: Apache-2.0
"""Mandrill: what its forms mean, prove and carry, what is signed, and what its search tells. Written by hand."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple
from urllib.parse import urlencode

import pytest
from aiohttp import web
from anymail_compare import anymail_events
from api_kit import NOW, Sent, asked, search
from apis.mandrill import Fake
from case_files import FIXTURES, case, clock, delivery, fixture, no_fetch

from webhooks.asking import ApiError, Query
from webhooks.event import Event, Kind, Testimony
from webhooks.provider import BadPayload, Delivery, Feed, NoSample, Refused, Verified
from webhooks.providers.mandrill import MEANINGS, PROVIDER

KEY = "e15bd8fd5b6b63a6f91c331d3c0702980d93474c2b1c4474"
ANA = "ana.reyes@example.com"
MESSAGE = "c0d5e9f1a2b34768905d1e2f3a4b5c6d"
YES, NO, NOTHING = Testimony.ACCEPTED, Testimony.REJECTED, Testimony.NONE
FORM = {"content-type": "application/x-www-form-urlencoded"}


class Expected(NamedTuple):
    kind: Kind
    testimony: Testimony
    at: str
    send_key: str | None = KEY
    message_id: str | None = MESSAGE
    recipient: str = ANA
    reason: str | None = None


HELP = "help@shop.example.com"
EXPECTED = {
    "send": Expected(Kind.SENT, YES, "08:15:05"),
    "send_no_metadata": Expected(Kind.SENT, YES, "08:15:05", None),
    "deferral": Expected(Kind.DEFERRED, YES, "08:15:09", reason="451 later (invented)"),
    "hard_bounce": Expected(Kind.BOUNCED, YES, "08:15:08", reason="bad_mailbox smtp;550 no such user (invented)"),
    "soft_bounce": Expected(Kind.BOUNCED, YES, "08:15:44", reason="mailbox_full smtp;452 full (invented)"),
    "delivered": Expected(Kind.DELIVERED, YES, "08:15:07"),
    "open": Expected(Kind.OPENED, YES, "08:16:04"),
    "click": Expected(Kind.CLICKED, YES, "08:16:05"),
    "spam": Expected(Kind.COMPLAINED, YES, "09:15:04"),
    "unsub": Expected(Kind.UNSUBSCRIBED, YES, "08:20:04"),
    "reject": Expected(Kind.REJECTED, NO, "08:15:05", reason="hard-bounce"),
    "inbound": Expected(Kind.INBOUND, NOTHING, "08:15:54", None, None, HELP),
}


def form(listed: str) -> Delivery:
    return Delivery(urlencode({"mandrill_events": listed}).encode(), FORM)


def read(name: str) -> list[Event]:
    return list(PROVIDER.parse(Delivery(fixture(f"mandrill/{name}.form"), FORM)).events)


def parse(*elements: Any) -> list[Event]:
    return list(PROVIDER.parse(form(json.dumps(elements))).events)


def time(clock_time: str) -> datetime:
    return datetime.fromisoformat(f"2026-11-02T{clock_time}+00:00")


def facts_of(event: Event) -> Expected:
    assert event.occurred_at
    at = event.occurred_at.time().isoformat()
    assert event.recipient
    return Expected(event.kind, event.testimony, at, event.send_key, event.message_id, event.recipient, event.reason)


@pytest.mark.parametrize("name", EXPECTED)
def test_every_event_type_is_read_as_the_facts_say(name: str) -> None:
    (event,) = read(name)
    assert facts_of(event) == EXPECTED[name]
    assert event.occurred_at
    assert event.occurred_at.date().isoformat() == "2026-11-02"


def test_every_webhook_fixture_has_an_expectation() -> None:
    others = {"batch", "test_ping", "sync_blacklist_add", "sync_whitelist_add"}
    assert {path.stem for path in (FIXTURES / "mandrill").glob("*.form")} == {*EXPECTED, *others}


def test_a_batch_holds_an_event_for_each_element_with_its_bytes_as_they_were_before_the_form() -> None:
    events = read("batch")
    assert [event.kind for event in events] == [Kind.SENT, Kind.DELIVERED, Kind.OPENED]
    assert {(event.message_id, event.send_key) for event in events} == {(MESSAGE, KEY)}
    assert json.loads(events[2].raw)["user_agent"] == "ExampleBrowser/1.0"
    assert events[0].raw.startswith(b'{"event": "send", "_id": "c0d5')
    assert [event.event_id for event in events] == [read(name)[0].event_id for name in ("send", "delivered", "open")]


@pytest.mark.parametrize(
    ("name", "control", "anomalies"),
    [
        ("test_ping", "ping", {}),
        ("sync_blacklist_add", "sync", {"sync": 1}),
        ("sync_whitelist_add", "sync", {"sync": 1}),
    ],
)
def test_what_tells_of_no_message_is_a_control_message(name: str, control: str, anomalies: dict[str, int]) -> None:
    found = PROVIDER.parse(Delivery(fixture(f"mandrill/{name}.form"), FORM))
    assert (list(found.events), found.control, found.anomalies) == ([], control, anomalies)


@pytest.mark.parametrize("name", ["denylist", "allowlist", "blacklist", "whitelist"])
def test_a_list_of_addresses_has_had_two_names(name: str) -> None:
    assert PROVIDER.parse(form(json.dumps([{"type": name, "action": "add"}]))).control == "sync"


def test_another_type_without_an_event_is_kept() -> None:
    (event,) = parse({"type": "something_new", "_id": "m", "msg": {"metadata": {"send_key": KEY}}})
    assert (event.kind, event.testimony, event.message_id, event.send_key) == (Kind.UNKNOWN, NOTHING, "m", KEY)


@pytest.mark.parametrize("damage", ["7", "null", "[]", '"x"', '{"event":}'])
def test_an_element_that_can_not_be_read_is_kept_and_fails_none_of_its_neighbours(damage: str) -> None:
    found = PROVIDER.parse(form(f'[{{"event":"send","_id":"m"}}, {damage}]'))
    good, bad = found.events
    assert (good.kind, good.message_id) == (Kind.SENT, "m")
    assert (bad.kind, bad.testimony, bad.message_id, bad.raw) == (Kind.UNKNOWN, NOTHING, None, damage.encode())
    assert found.anomalies == {"damaged": 1}


@pytest.mark.parametrize(
    "body", [b"", b"hello", b"events=%5B%5D", b"mandrill_events=", b"mandrill_events=%5B", b"a=b&c=d", b"&" * 2000]
)
def test_what_is_no_form_of_mandrill_is_refused_in_one_line(body: bytes) -> None:
    with pytest.raises(BadPayload) as refusal:
        PROVIDER.parse(Delivery(body, FORM))
    assert "\n" not in str(refusal.value)


def test_a_multipart_form_is_read_as_well() -> None:
    head = b'--b\r\nContent-Disposition: form-data; name="mandrill_events"\r\n\r\n'
    body = head + b'[{"event":"send","_id":"m"}]\r\n--b--\r\n'
    (event,) = PROVIDER.parse(Delivery(body, {"content-type": "multipart/form-data; boundary=b"})).events
    assert (event.kind, event.message_id) == (Kind.SENT, "m")


CLICK = {"event": "click", "_id": "m", "ts": 1793607365, "url": "https://a", "ip": "192.0.2.3", "msg": {"email": ANA}}


@pytest.mark.parametrize(
    "change",
    [
        {"event": "open"},
        {"_id": "other"},
        {"ts": 1793607366},
        {"url": "https://b"},
        {"ip": "192.0.2.4"},
        {"msg": {"email": "bo@example.net"}},
    ],
)
def test_a_repeat_is_the_same_event_and_another_event_is_not(change: dict[str, Any]) -> None:
    (one,) = parse(CLICK)
    changed_since = {"email": ANA, "opens": [{"ts": 1}], "state": "spam"}
    assert one.event_id == parse(CLICK | {"msg": changed_since, "location": {"city": "Madrid"}})[0].event_id
    assert one.event_id != parse(CLICK | change)[0].event_id


def test_two_mails_that_come_in_within_a_second_are_two_events() -> None:
    one, other = parse(*({"event": "inbound", "ts": 1, "msg": {"email": ANA, "raw_msg": text}} for text in "ab"))
    assert one.event_id != other.event_id


@pytest.mark.parametrize("metadata", [[], None, "text", {}, {"send_key": None}, {"send_key": ["x"]}, {"other": "x"}])
def test_odd_metadata_costs_only_the_key(metadata: Any) -> None:
    (event,) = parse({"event": "send", "_id": "m", "msg": {"metadata": metadata}})
    assert (event.kind, event.message_id, event.send_key) == (Kind.SENT, "m", None)


def test_incoming_mail_brings_no_key() -> None:
    (event,) = parse({"event": "inbound", "msg": {"metadata": {"send_key": KEY}}})
    assert (event.kind, event.testimony, event.send_key) == (Kind.INBOUND, NOTHING, None)


# -- signatures --------------------------------------------------------------------------------------------------------

URL = "https://hooks.example.com/webhooks/main"
SECRET = "throw-away-key"
EVENT = b"mandrill_events=%5B%7B%22event%22%3A%22send%22%7D%5D"
TEST = b"mandrill_events=%5B%5D"


def signed(body: bytes, says: str, secret: str = SECRET) -> Delivery:
    """Return a form signed over what Mandrill signs, which is written out here."""
    digest = hmac.digest(secret.encode(), says.encode(), hashlib.sha1)
    return Delivery(body, {**FORM, "x-mandrill-signature": base64.b64encode(digest).decode()})


async def verdict(request: Delivery, *secrets: str, url: str | None = URL) -> str:
    feed = Feed("main", "mandrill", secrets, signed_url=url)
    judged = await PROVIDER.verify(request, feed, NOW, no_fetch)
    return judged.reason if isinstance(judged, Refused) else "verified" if judged == Verified() else repr(judged)


SIGNED_EVENT = signed(EVENT, URL + 'mandrill_events[{"event":"send"}]')


async def test_what_is_signed_is_the_url_and_each_field_sorted_by_name() -> None:
    assert await verdict(SIGNED_EVENT, SECRET) == "verified"
    assert await verdict(SIGNED_EVENT, "other", SECRET) == "verified"
    assert await verdict(SIGNED_EVENT, "other") == "signature"
    two = signed(b"z=1&a=%C3%A9+2&mandrill_events=%5B%5D", URL + "aé 2mandrill_events[]z1")
    assert await verdict(two, SECRET) == "verified"


@pytest.mark.parametrize(
    "other",
    [
        "http://hooks.example.com/webhooks/main",
        "https://hooks.example.com/webhooks/main/",
        "https://user:password@hooks.example.com/webhooks/main",
        "https://hooks.example.com/webhooks/main?tenant=a",
    ],
)
async def test_the_url_must_be_the_one_that_mandrill_has_to_the_last_character(other: str) -> None:
    assert await verdict(SIGNED_EVENT, SECRET, url=other) == "signature"
    assert await verdict(signed(EVENT, other + 'mandrill_events[{"event":"send"}]'), SECRET, url=other) == "verified"


async def test_without_the_url_nothing_that_is_signed_can_be_verified_and_the_setting_is_named() -> None:
    feed = Feed("main", "mandrill", (SECRET,))
    judged = await PROVIDER.verify(SIGNED_EVENT, feed, NOW, no_fetch)
    assert isinstance(judged, Refused)
    assert judged.reason == "no_url"
    assert "feeds.<name>.signed_url" in judged.hint
    assert "receiver.public_url" in judged.hint


async def test_the_fixed_key_of_test_posts_opens_the_door_to_an_empty_list_only() -> None:
    assert await verdict(signed(TEST, URL + "mandrill_events[]", "test-webhook"), SECRET) == "verified"
    assert await verdict(signed(TEST, URL + "mandrill_events[]", "test-webhook"), "basic:user:password") == "verified"
    assert await verdict(signed(TEST, URL + "mandrill_events[]", "other"), SECRET) == "signature"
    assert (
        await verdict(signed(EVENT, URL + 'mandrill_events[{"event":"send"}]', "test-webhook"), SECRET) == "signature"
    )
    assert await verdict(Delivery(TEST, FORM), SECRET) == "missing"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'[{"event":"send"}]&mandrill_events=%5B%5D', '[{"event":"send"}]mandrill_events[]'),
        (
            b"mandrill_events=%5B%5D&mandrill_events=%5B%7B%22event%22%3A%22send%22%7D%5D",
            'mandrill_events[]mandrill_events[{"event":"send"}]',
        ),
    ],
)
async def test_a_form_that_only_looks_like_an_empty_list_is_none(body: bytes, says: str) -> None:
    assert await verdict(signed(body, URL + says, "test-webhook"), SECRET) == "signature"
    assert await verdict(Delivery(body, FORM)) == "no_secret"
    both = b"mandrill_events=%5B%7B%22event%22%3A%22send%22%7D%5D&mandrill_events=%5B%5D"
    accepted = signed(both, URL + 'mandrill_events[{"event":"send"}]mandrill_events[]', "test-webhook")
    assert await verdict(accepted, SECRET) == "verified"
    assert PROVIDER.parse(accepted).control == "ping"  # the last field of a name counts, for both


def test_the_fixed_key_is_no_secret() -> None:
    objection = PROVIDER.objection("secrets", "test-webhook")  # type: ignore[attr-defined]
    assert objection
    assert "everybody" in objection
    assert PROVIDER.objection("secrets", SECRET) is None  # type: ignore[attr-defined]
    assert PROVIDER.objection("topics", "test-webhook") is None  # type: ignore[attr-defined]


async def test_a_form_of_too_many_fields_is_refused() -> None:
    assert await verdict(Delivery(b"a=b&" * 2000, {"x-mandrill-signature": "x"}), SECRET) == "signature"


# -- cases from public trouble reports ---------------------------------------------------------------------------------


async def judge_case(number: str) -> list[Event]:
    """Verify and parse each request of a case; the parsed events of all of them."""
    of = case(number)
    feed = Feed("main", "mandrill", tuple(of["config"]["mandrill_keys"]), signed_url=of["config"]["public_url"])
    events: list[Event] = []
    for request in map(delivery, [of, *of.get("requests", [])]):
        assert await PROVIDER.verify(request, feed, clock(of), no_fetch) == Verified()
        events += PROVIDER.parse(request).events
    assert len({(event.message_id, event.event_id) for event in events}) == of["expect"]["events_stored"]
    return events


async def test_case_015_sync_events_are_counted_and_fail_no_send_beside_them() -> None:
    (event,) = await judge_case("015")
    assert (event.kind, event.testimony, event.send_key) == (Kind.SENT, YES, "order.receipt:1001")
    assert (event.message_id, event.recipient) == ("testmandrillid0000000000000000001", "ada@example.org")
    assert PROVIDER.parse(delivery(case("015"))).anomalies == {"sync": 2}


async def test_case_016_the_check_of_the_url_is_accepted_before_there_is_a_key() -> None:
    assert await judge_case("016") == []
    assert await verdict(delivery(case("016"))) == "verified"
    assert await verdict(delivery(case("016")), " ", url=None) == "verified"
    assert await verdict(Delivery(EVENT, FORM)) == "no_secret"


async def test_case_031_behind_a_proxy_the_configured_url_is_what_is_signed() -> None:
    (event,) = await judge_case("031")
    assert (event.testimony, event.send_key) == (YES, "order.receipt:1001")
    of = case("031")
    for other in ("http://recon-7c9f.internal:8080/v1/mandrill", of["config"]["public_url"].replace("%2F", "/")):
        assert await verdict(delivery(of), *of["config"]["mandrill_keys"], url=other) == "signature"


async def test_case_047_clicks_of_one_second_on_two_links_are_two_events_and_a_repeat_is_none() -> None:
    first, second, repeated, opened = await judge_case("047")
    assert first.event_id == repeated.event_id
    assert [event.kind for event in (first, second, opened)] == [Kind.CLICKED, Kind.CLICKED, Kind.OPENED]
    assert {event.message_id for event in (first, second, opened)} == {"testmandrillid0000000000000000003"}


# -- what a send is answered -------------------------------------------------------------------------------------------

ANSWERS = {
    "api_send_ok": ("queued", "accepted", "Confirm with the answer's _id where its status is sent, queued or"),
    "api_send_rejected": (
        "rejected",
        "rejected",
        "Its status rejected or invalid, with HTTP 200 too, means that it is",
    ),
}
"""For each answer, which names its message: its status, what it proves, and the words that say so in the setup."""


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_names_the_message_as_its_events_do_and_the_setup_says_what_it_proves(name: str) -> None:
    status, _, words = ANSWERS[name]
    (answer,) = json.loads(fixture(f"mandrill/{name}.json"))
    assert (answer["_id"].strip("<> "), answer["status"]) == (MESSAGE, status)
    assert {event.message_id for event_name in EXPECTED for event in read(event_name)} == {MESSAGE, None}
    assert words in " ".join(PROVIDER.facts.setup)


# -- stamp, facts and samples ------------------------------------------------------------------------------------------


def test_the_stamp_is_metadata_which_comes_back() -> None:
    stamp = PROVIDER.stamp(KEY)
    assert stamp.body == {"message": {"metadata": {"send_key": KEY}}}
    assert stamp.headers == {}
    assert stamp.smtp_headers == {"X-MC-Metadata": '{"send_key": "' + KEY + '"}'}
    assert len(stamp.smtp_headers["X-MC-Metadata"]) < 200


def test_the_same_request_again_is_a_second_message() -> None:
    assert PROVIDER.facts.same_key_window is None
    assert "none" in PROVIDER.facts.native_key


@pytest.mark.parametrize("name", [name for name, (_, testimony) in MEANINGS.items() if testimony is not NOTHING])
@pytest.mark.parametrize("secret", [SECRET, "basic:a:b"])
async def test_a_sample_is_a_form_that_the_feed_accepts(name: str, secret: str) -> None:
    sample = PROVIDER.sample(name, KEY, Feed("main", "mandrill", (secret,), signed_url=URL), NOW)
    assert await verdict(sample, secret) == "verified"
    assert sample.headers["content-type"] == "application/x-www-form-urlencoded"
    (event,) = PROVIDER.parse(sample).events
    assert (event.kind, event.testimony) == MEANINGS[name]
    assert (event.send_key, event.occurred_at, event.recipient) == (KEY, NOW, "sample@example.com")
    assert event.message_id


def test_where_no_sample_can_be_made_the_reason_is_told() -> None:
    for feed in (Feed("main", "mandrill", signed_url=URL), Feed("main", "mandrill", (SECRET,))):
        with pytest.raises(NoSample, match=r"secrets, and its signed_url or receiver\.public_url"):
            PROVIDER.sample("send", KEY, feed, NOW)
    with pytest.raises(NoSample, match=r"'nonsense'.*deferral"):
        PROVIDER.sample("nonsense", KEY, Feed("main", "mandrill", (SECRET,), signed_url=URL), NOW)


# -- asking ------------------------------------------------------------------------------------------------------------

SINCE, UNTIL = NOW - timedelta(hours=1), NOW + timedelta(hours=1)


def answering(value: Any) -> Any:
    """Return what answers each request with the value, in place of the fake."""
    return lambda _: web.json_response(value)


async def found(answer: Any, query: Query) -> list[Event]:
    async with asked("mandrill", Fake([]), answering(answer)) as (feed, api):
        return await search("mandrill", feed, api, query)


async def test_a_message_that_the_search_tells_is_read_as_the_facts_say() -> None:
    (event,) = await found(json.loads(fixture("mandrill/api_search.json")), Query(SINCE, UNTIL, KEY, ANA))
    assert facts_of(event) == Expected(Kind.SENT, YES, "08:15:04")
    assert json.loads(event.raw)["subject"] == "Receipt for order 1042"
    assert event.event_id != read("send")[0].event_id


STATES = {
    "sent": (Kind.SENT, YES),
    "queued": (Kind.QUEUED, YES),
    "scheduled": (Kind.QUEUED, YES),
    "deferred": (Kind.DEFERRED, YES),
    "bounced": (Kind.BOUNCED, YES),
    "soft-bounced": (Kind.BOUNCED, YES),
    "spam": (Kind.COMPLAINED, YES),
    "unsub": (Kind.UNSUBSCRIBED, YES),
    "rejected": (Kind.REJECTED, NO),
    "canceled": (Kind.UNKNOWN, NOTHING),
    "something new": (Kind.UNKNOWN, NOTHING),
}


async def test_each_state_proves_what_it_says() -> None:
    events = await found([{"_id": "m", "state": state} for state in STATES], Query(SINCE, UNTIL))
    assert [(event.kind, event.testimony) for event in events] == list(STATES.values())
    assert len({event.event_id for event in events}) == len(STATES)


async def test_text_messages_are_no_mail() -> None:
    assert await found([{"_id": "m", "state": "sent", "channel": "sms", "to": "+15550100"}], Query(SINCE, UNTIL)) == []


@pytest.mark.parametrize("answer", [{}, None, {"status": "error"}, [7], [{}], [{"_id": "m"}], [{"state": "sent"}]])
async def test_an_answer_of_another_shape_is_garbage(answer: Any) -> None:
    with pytest.raises(ApiError, match="garbage"):
        await found(answer, Query(SINCE, UNTIL, KEY, ANA))


@dataclass
class Noting(Fake):
    """Notes what was asked, beside answering it."""

    asked: list[dict[str, Any]] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        return await super().answer(request)


async def test_it_is_asked_by_recipient_on_the_days_around_the_span_in_utc() -> None:
    fake = Noting([])
    zone = timezone(timedelta(hours=-5))
    late = datetime(2026, 11, 2, 23, 30, tzinfo=zone)  # the third in UTC
    async with asked("mandrill", fake) as (feed, api):
        await search("mandrill", feed, api, Query(late, late, KEY, ANA))
        await search("mandrill", feed, api, Query(SINCE, UNTIL))
    by_recipient, everything = fake.asked
    assert by_recipient == {
        "key": "throw-away",
        "query": 'full_email:"ana.reyes@example.com"',
        "date_from": "2026-11-02",
        "date_to": "2026-11-04",
        "limit": 1000,
    }
    assert (everything["query"], everything["date_from"], everything["date_to"]) == ("*", "2026-11-01", "2026-11-03")


@pytest.mark.parametrize("odd", ['a" OR "\\@example.com', "Ana@example.com", "ana@xn--mnchen-3ya.example"])
async def test_an_address_that_could_be_written_otherwise_is_looked_for_among_all(odd: str) -> None:
    fake = Noting([Sent(KEY), Sent("b", odd)])
    async with asked("mandrill", fake) as (feed, api):
        events = await search("mandrill", feed, api, Query(SINCE, UNTIL, "b", odd))
    assert [event.send_key for event in events] == [KEY, "b"]
    assert fake.asked[0]["query"] == "*"


UNNAMED = {"_id": "m", "state": "sent", "email": ANA, "ts": 1793607304, "metadata": {"shop": "a"}}


@pytest.mark.parametrize(
    "change", [{}, {"metadata": None}, {"email": "ANA.Reyes@Example.com"}, {"email": None}, {"ts": None}]
)
async def test_mail_to_the_recipient_without_a_key_may_be_the_sought_one(change: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="^unnamed"):
        await found([UNNAMED | change], Query(SINCE, UNTIL, KEY, ANA))


@pytest.mark.parametrize("change", [{"email": "bo.lind@example.net"}, {"metadata": {"send_key": "other"}}])
async def test_mail_to_somebody_else_or_of_another_key_is_not(change: dict[str, Any]) -> None:
    assert len(await found([UNNAMED | change], Query(SINCE, UNTIL, KEY, ANA))) == 1


async def test_mail_of_another_time_on_the_days_around_is_left_out() -> None:
    before, after = UNNAMED | {"ts": 1793606399}, UNNAMED | {"ts": 1793613601}  # a second before 08:00, after 10:00
    assert await found([before, after], Query(SINCE, UNTIL, KEY, ANA)) == []


async def test_mail_without_a_key_beside_the_sought_one_does_not_matter() -> None:
    both = [UNNAMED, UNNAMED | {"metadata": {"send_key": KEY}}]
    assert [event.send_key for event in await found(both, Query(SINCE, UNTIL, KEY, ANA))] == [None, KEY]


async def test_where_there_are_more_than_a_thousand_the_time_is_halved_and_none_is_lost() -> None:
    crowd = [Sent(f"{n:048x}", message_id=str(n), at=NOW - timedelta(seconds=n % 600)) for n in range(2500)]
    fake = Noting(crowd)
    async with asked("mandrill", fake) as (feed, api):
        events = await search("mandrill", feed, api, Query(SINCE, UNTIL, KEY, "ana.reyes@example.com"))
    assert sorted(int(event.message_id or "") for event in events) == list(range(2500))
    first, second, *_ = fake.asked
    assert first["query"] == 'full_email:"ana.reyes@example.com"'
    # from 08:00 to before 09:00 UTC, which is half of the span
    assert second["query"] == 'full_email:"ana.reyes@example.com" AND ts:[1793606400 TO 1793609999]'


async def test_a_second_of_a_thousand_messages_is_not_read_to_its_end() -> None:
    fake = Fake([Sent(f"{n:048x}", message_id=str(n)) for n in range(1000)])
    async with asked("mandrill", fake) as (feed, api):
        with pytest.raises(ApiError, match="too_many"):
            await search("mandrill", feed, api, Query(SINCE, UNTIL, KEY, ANA))


# -- a second reading --------------------------------------------------------------------------------------------------

DIFFERENT_KINDS = {"delivered": "anymail does not know it; the documents do"}


@pytest.mark.parametrize("name", sorted(EXPECTED.keys() - {"inbound"}))  # which anymail reads as a message
def test_django_anymail_reads_the_same(name: str) -> None:
    request = Delivery(fixture(f"mandrill/{name}.form"), FORM)
    (ours,), (theirs,) = PROVIDER.parse(request).events, anymail_events("mandrill", request)
    assert (ours.message_id, ours.recipient, ours.occurred_at) == (
        theirs.message_id,
        theirs.recipient,
        theirs.timestamp,
    )
    assert theirs.metadata.get("send_key") == ours.send_key
    assert theirs.event_id is None
    assert (ours.kind.value == theirs.event_type) is (name not in DIFFERENT_KINDS)


@pytest.mark.parametrize("name", ["sync_blacklist_add", "sync_whitelist_add"])
def test_django_anymail_makes_an_unknown_event_of_no_message_of_what_is_only_counted_here(name: str) -> None:
    (theirs,) = anymail_events("mandrill", Delivery(fixture(f"mandrill/{name}.form"), FORM))
    assert (theirs.event_type, theirs.message_id) == ("unknown", None)
