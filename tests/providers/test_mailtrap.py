# SPDX-License-Identifier: Apache-2.0
"""Mailtrap: what its webhooks and its e-mail logs mean, prove and carry. Expectations are its documents', by hand."""

from __future__ import annotations

import hashlib
import hmac
import json
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import anymail_compare
import pytest
from aiohttp import web
from api_kit import Sent, asked, search
from apis.mailtrap import Fake
from case_files import FIXTURES, fixture, no_fetch

from webhooks.asking import ApiError, Query
from webhooks.event import Answer, Event
from webhooks.lookup import Found, Sought, look_up
from webhooks.provider import BadPayload, Delivery, Feed, NoSample, Parsed, Refused, Verified
from webhooks.providers.mailtrap import PROVIDER

NOW = datetime(2026, 11, 2, 9, 0, tzinfo=UTC)
KEY = "e15bd8fd5b6b63a6f91c331d3c0702980d93474c2b1c4474"
OTHER = "5484389ddcae99204cde863d5da0d5f5ad84374a056cdeaf"
MESSAGE = "0b7c2a10-d7c4-11f0-8000-00f5a1b2c3d4"
ANA = "ana.reyes@example.com"


class Expected(NamedTuple):
    kind: str
    at: str
    event_id: str
    reason: str | None = None
    testimony: str = "accepted"
    send_key: str | None = KEY


DELIVERY = Expected("delivered", "08:15:07", "f9aa3544-e88d-57b0-b36b-28c26b924487")
OPEN = Expected("opened", "08:16:04", "73621348-a31d-5e26-a38b-cbf69c5c23ec")
REJECT = Expected(
    "rejected", "08:15:06", "f829f7d9-ca13-5280-839f-10d0f4f079ea", "recipient suppressed (invented)", "rejected"
)
WEBHOOKS = {
    "delivery": [DELIVERY],
    "delivery_no_custom": [
        Expected("delivered", "08:15:07", "9fcd34ed-9f8d-587c-a103-0ace6cd6a13d", send_key=None),
    ],
    "soft_bounce": [Expected("deferred", "08:15:13", "3ca2983a-942c-54db-b9d3-13f4a16875aa", "452 full (invented)")],
    "bounce": [Expected("bounced", "08:15:08", "a5a0fff1-af12-541f-b7cb-0ce09c9508ac", "550 unknown (invented)")],
    "suspension": [
        Expected("deferred", "08:15:06", "6c9aaee7-90d2-5ca0-9b89-2fc07cb34b36", "account limit reached (invented)")
    ],
    "reject": [REJECT],
    "open": [OPEN],
    "click": [Expected("clicked", "08:16:05", "0a2e3077-d4c4-5138-8c76-6342d10d64ae")],
    "unsubscribe": [Expected("unsubscribed", "08:20:04", "e965af0f-15cd-519e-84ce-6345519c3594")],
    "spam": [Expected("complained", "09:15:04", "e263e917-bcac-5a91-820d-e7a57a59d326")],
    "batch": [DELIVERY, OPEN, REJECT],
    "batch_lines": [DELIVERY, OPEN],
}
FILES = {file.stem: file for file in (FIXTURES / "mailtrap").glob("*") if not file.stem.startswith("api_")}


def parsed(body: bytes | object) -> Parsed:
    return PROVIDER.parse(Delivery(body if isinstance(body, bytes) else json.dumps(body).encode(), {}))


def parse(**event: Any) -> Event:
    (found,) = parsed({"events": [event]}).events
    return found


def test_every_webhook_fixture_has_an_expectation() -> None:
    assert FILES.keys() == WEBHOOKS.keys()


@pytest.mark.parametrize("name", WEBHOOKS)
def test_a_webhook_of_either_format_is_read_as_the_facts_say(name: str) -> None:
    found = parsed(FILES[name].read_bytes())
    assert len(found.events) == len(WEBHOOKS[name])
    assert not found.anomalies
    for event, expected in zip(found.events, WEBHOOKS[name], strict=True):
        assert (event.kind, event.testimony, event.event_id) == (
            expected.kind,
            expected.testimony,
            expected.event_id,
        )
        assert (event.send_key, event.reason) == (expected.send_key, expected.reason)
        assert (event.message_id, event.recipient) == (MESSAGE, ANA)
        assert event.occurred_at == datetime.fromisoformat(f"2026-11-02T{expected.at}+00:00")


def test_an_event_of_a_batch_keeps_its_exact_bytes() -> None:
    one, two = b'{"event": "open",  "event_id":"1"}', b'{"event":"click","event_id":"2"}'
    for body in (b'{"events": [' + one + b" ,\n" + two + b"]}", one + b"\n" + two + b"\n", one + b"\r\n\r\n" + two):
        assert [event.raw for event in parsed(body).events] == [one, two]
    assert [event.raw for event in parsed(one).events] == [one]


def test_lines_and_array_are_the_same_events() -> None:
    lines, array = (parsed(FILES[name].read_bytes()).events for name in ("batch_lines", "batch"))
    assert [(event.message_id, event.event_id, event.kind) for event in lines] == [
        (event.message_id, event.event_id, event.kind) for event in array[:2]
    ]


@pytest.mark.parametrize(
    "body",
    [
        b'{"events":[{"event":"open","event_id":"1"},7,{"event":"click","event_id":"2"}]}',
        b'{"events":[{"event":"open","event_id":"1"},"text",{"event":"click","event_id":"2"}]}',
        b'{"event":"open","event_id":"1"}\n{"event":\n{"event":"click","event_id":"2"}',
        b'[]\n{"event":"open","event_id":"1"}\n{"event":"click","event_id":"2"}',
    ],
)
def test_what_can_not_be_read_never_fails_its_neighbours(body: bytes) -> None:
    found = parsed(body)
    assert found.anomalies == {"damaged": 1}
    kinds = [event.kind for event in found.events]
    assert sorted(kinds) == ["clicked", "opened", "unknown"]
    assert {event.testimony for event in found.events if event.kind == "unknown"} == {"none"}


def test_half_an_emoji_costs_no_event_its_bytes() -> None:
    one, two = b'{"event":"open","event_id":"1","user_agent":"\\ud83d"}', b'{"event":"click","event_id":"2"}'
    for body in (b'{"events":[' + one + b"," + two + b"]}", one + b"\n" + two):
        found = parsed(body)
        assert [event.raw for event in found.events] == [one, two]
        assert [event.kind for event in found.events] == ["opened", "clicked"]


def test_an_empty_batch_holds_nothing() -> None:
    assert parsed({"events": []}) == Parsed([])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" \n ",
        b"prose\nprose",
        b"[]",
        b'[{"event":"open"}]',
        b"{}",
        b'{"events":7}',
        b'{"events":[',
        b'{"event":7.5}',
        b"\xff",
    ],
)
def test_what_is_no_webhook_of_mailtrap_is_refused(body: bytes) -> None:
    with pytest.raises(BadPayload, match=r"JSON|Mailtrap"):
        parsed(body)


@pytest.mark.parametrize(
    ("name", "kind"), [("soft bounce", "deferred"), ("soft_bounce", "deferred"), ("spam_complaint", "complained")]
)
def test_events_are_known_by_the_names_of_webhooks_and_of_subscriptions(name: str, kind: str) -> None:
    event = parse(event=name, message_id="m")
    assert (event.kind, event.testimony) == (kind, "accepted")


def test_an_event_not_known_yet_is_kept_and_proves_nothing() -> None:
    event = parse(event="teleported", message_id="m", custom_variables={"send_key": "k"})
    assert (event.kind, event.testimony, event.message_id, event.send_key) == ("unknown", "none", "m", "k")


@pytest.mark.parametrize(
    ("slots", "key"),
    [
        ({"custom_variables": {"send_key": "order.receipt:1001"}, "category": "Receipts"}, "order.receipt:1001"),
        ({"custom_variables": {"send_key": KEY}, "category": OTHER}, KEY),
        ({"category": KEY}, KEY),
        ({"custom_variables": {"stream": "orders"}, "category": KEY}, KEY),
        ({"category": "Receipts"}, None),
        ({"category": "receipt-1042"}, None),
        ({"custom_variables": [], "category": None}, None),
        ({"custom_variables": "send_key", "category": 7}, None),
        ({}, None),
    ],
)
def test_the_key_is_found_in_either_slot_and_the_applications_own_category_is_none(
    slots: dict[str, Any], key: str | None
) -> None:
    assert parse(event="delivery", **slots).send_key == key


def test_without_an_id_a_repeat_is_the_same_event_and_another_click_is_not() -> None:
    click = {"event": "click", "message_id": "m", "email": ANA, "timestamp": 1793607365, "url": "https://a.example"}
    one, again = parse(**click), parse(**click)
    assert one.event_id == again.event_id != parse(**{**click, "url": "https://b.example"}).event_id
    assert one.event_id != parse(**{**click, "timestamp": 1793607365.5}).event_id


# --- what is Mailtrap's and what isn't

SECRET = "8d9a3c0e7f5b2d4a6c1e9f8b3a7d5c2e"
BODY = b'{"events": [{"event": "delivery"}]}'


def signed(key: bytes, body: bytes = BODY) -> Delivery:
    return Delivery(body, {"mailtrap-signature": hmac.digest(key, body, hashlib.sha256).hex()})


async def verdict(request: Delivery, *secrets: str) -> str:
    judged = await PROVIDER.verify(request, Feed("main", "mailtrap", secrets), NOW, no_fetch)
    return judged.reason if isinstance(judged, Refused) else "verified" if judged == Verified() else repr(judged)


async def test_the_key_is_the_secrets_text_not_the_bytes_that_it_spells() -> None:
    assert await verdict(signed(SECRET.encode()), SECRET) == "verified"
    assert await verdict(signed(bytes.fromhex(SECRET)), SECRET) == "signature"
    by_openssl = "210a73bdc0dc1cc0b4197970aabc56eeb4f7ce7f941e6d344e47cc3d5d4fd8bb"
    assert await verdict(Delivery(BODY, {"mailtrap-signature": by_openssl}), SECRET) == "verified"


async def test_the_secrets_of_two_streams_fit_one_feed() -> None:
    other = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"
    assert await verdict(signed(other.encode()), SECRET, other) == "verified"
    assert await verdict(signed(b"third"), SECRET, other) == "signature"
    assert await verdict(Delivery(BODY, {}), SECRET) == "missing"
    assert await verdict(signed(b""), "") == "no_secret"


# --- what a send is answered

ANSWERS = {"api_send_ok": ([MESSAGE], "accepted", "Confirm with the one of the answer's message_ids")}
"""For each answer: its ids as the sender's side keeps them, what it proves, and the words that say so in the setup."""


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_names_the_message_as_its_events_do_and_the_setup_says_what_it_proves(name: str) -> None:
    ids, _, words = ANSWERS[name]
    answer = json.loads(fixture(f"mailtrap/{name}.json"))
    assert ([message_id.strip("<> ") for message_id in answer["message_ids"]], answer["success"]) == (ids, True)
    assert {event.message_id for file in FILES.values() for event in parsed(file.read_bytes()).events} == set(ids)
    assert words in " ".join(PROVIDER.facts.setup)


# --- stamp, facts and samples


def test_the_stamp_fills_both_slots() -> None:
    stamp = PROVIDER.stamp(KEY)
    assert stamp.body == {"custom_variables": {"send_key": KEY}, "category": KEY}
    assert stamp.smtp_headers == {"X-MT-Custom-Variables": f'{{"send_key": "{KEY}"}}', "X-MT-Category": KEY}
    assert stamp.headers == {}
    assert parse(event="delivery", **stamp.body).send_key == KEY
    assert parse(event="delivery", **PROVIDER.stamp("receipt-1042").body).send_key == "receipt-1042"


def test_absence_means_less_as_no_event_comes_before_the_recipients_server_answered() -> None:
    assert PROVIDER.facts.first_event_is_delivery
    assert PROVIDER.facts.same_key_window is None
    assert PROVIDER.facts.redelivers_for == timedelta(minutes=200)  # 40 times, every 5 minutes
    assert (PROVIDER.facts.busy_status, PROVIDER.facts.refused_status) == (503, 401)


@pytest.mark.parametrize("secrets", [(SECRET,), ("basic:hook:throw-away",)])
@pytest.mark.parametrize(
    ("kind", "meant"), [("soft bounce", "deferred"), ("rejected", "rejected"), ("spam", "complained")]
)
async def test_a_sample_is_one_that_the_feed_accepts(kind: str, meant: str, secrets: tuple[str, ...]) -> None:
    sample = PROVIDER.sample(kind, KEY, Feed("main", "mailtrap", secrets), NOW)
    assert await verdict(sample, *secrets) == "verified"
    (event,) = PROVIDER.parse(sample).events
    assert (event.kind, event.send_key, event.occurred_at) == (meant, KEY, NOW)


def test_where_no_sample_can_be_made_the_reason_is_told() -> None:
    with pytest.raises(NoSample, match="no signing secret"):
        PROVIDER.sample("delivered", KEY, Feed("main", "mailtrap"), NOW)
    with pytest.raises(NoSample, match=r"'sent'; there are delivery"):
        PROVIDER.sample("sent", KEY, Feed("main", "mailtrap", (SECRET,)), NOW)


# --- its API

SPAN = Query(NOW - timedelta(hours=1), NOW)
LOG = json.loads(fixture("mailtrap/api_email_logs.json"))


async def read(answer: Any, history: Any = None) -> list[Event]:
    def spoil(request: web.Request) -> web.Response:
        return web.json_response(answer if request.path == "/api/email_logs" else history)

    async with asked("mailtrap", Fake([]), spoil) as (feed, api):
        return await search("mailtrap", feed, api, SPAN)


async def test_what_the_logs_hold_is_read_as_documented() -> None:
    (event,) = await read(LOG)
    assert (event.kind, event.testimony, event.send_key) == ("delivered", "accepted", KEY)
    assert (event.message_id, event.recipient) == (MESSAGE, ANA)
    assert event.occurred_at == datetime(2026, 11, 2, 8, 15, 4, tzinfo=UTC)
    assert json.loads(event.raw) == LOG["messages"][0]


@pytest.mark.parametrize(
    ("status", "kind", "testimony"),
    [
        ("delivered", "delivered", "accepted"),
        ("enqueued", "queued", "accepted"),
        ("opted_out", "delivered", "accepted"),
        ("something new", "unknown", "none"),
    ],
)
async def test_a_status_of_the_logs_proves_what_the_facts_say(status: str, kind: str, testimony: str) -> None:
    (event,) = await read({**LOG, "messages": [{**LOG["messages"][0], "status": status}]})
    assert (event.kind, event.testimony) == (kind, testimony)


@pytest.mark.parametrize(
    ("history", "kind", "testimony", "reason"),
    [
        (
            [{"event_type": "bounce", "details": {"email_service_provider_response": "User unknown"}}],
            "bounced",
            "accepted",
            "User unknown",
        ),
        (
            [
                {"event_type": "suspension", "details": {}},
                {"event_type": "reject", "details": {"reject_reason": "Policy rejection"}},
            ],
            "rejected",
            "rejected",
            "Policy rejection",
        ),
        ([7, {"event_type": "suspension"}], "unknown", "none", None),
        ([], "unknown", "none", None),
    ],
)
async def test_whether_a_message_bounced_or_was_never_sent_its_history_tells(
    history: list[Any], kind: str, testimony: str, reason: str | None
) -> None:
    log = {**LOG, "messages": [{**LOG["messages"][0], "status": "not_delivered"}]}
    (event,) = await read(log, {"events": history})
    assert (event.kind, event.testimony, event.reason) == (kind, testimony, reason)
    with pytest.raises(ApiError, match=r"^garbage"):
        await read(log, {"error": "no"})


@pytest.mark.parametrize(
    "answer",
    [
        {"messages": []},
        {"messages": [7], "next_page_cursor": None},
        {"messages": [{"message_id": "m"}], "next_page_cursor": None},
        {"messages": [{"status": "delivered"}], "next_page_cursor": None},
        {"messages": None, "next_page_cursor": None},
    ],
)
async def test_a_log_of_another_shape_is_garbage(answer: Any) -> None:
    with pytest.raises(ApiError, match=r"^garbage"):
        await read(answer)


async def found_in(fake: Fake) -> Found:
    at = NOW - timedelta(minutes=40)
    sought = Sought(KEY, at - timedelta(minutes=2), at - timedelta(minutes=1), ANA)
    control = Sought(OTHER, at, at + timedelta(minutes=1), ANA)
    async with asked("mailtrap", fake) as (feed, api):
        return await look_up(PROVIDER, feed, api, sought, control, NOW)


async def test_a_send_by_template_which_has_no_category_is_not_taken_for_absent() -> None:
    sends = [Sent(f"{n:048x}", message_id=f"{n:08x}-1") for n in range(7)]
    sends += [Sent(KEY, message_id="ours"), Sent(OTHER, message_id="control")]
    assert (await found_in(Fake(sends, by_template=frozenset({KEY})))).answer is Answer.ACCEPTED
    assert (await found_in(Fake([send for send in sends if send.wire_key != KEY]))).answer is Answer.ABSENT


async def test_a_filter_that_the_api_ignores_makes_nobody_elses_mail_evidence() -> None:
    class Deaf(Fake):
        async def answer(self, request: web.Request) -> web.StreamResponse:
            ignoring = {name: value for name, value in request.query.items() if "filters" not in name}
            return await super().answer(request.clone(rel_url=request.rel_url.with_query(ignoring)))

    sends = [Sent(f"{n:048x}", message_id=f"{n:08x}-1") for n in range(4)]
    assert (await found_in(Deaf([*sends, Sent(OTHER, message_id="control")]))).answer is Answer.ABSENT


LISTED = {"message_id": "m", "status": "delivered", "to": ANA, "category": None, "custom_variables": {}}


async def looked_up(key: str, *pages: list[dict[str, Any]]) -> list[Event]:
    """What search yields of these answers, one a question."""
    answers = iter(pages)

    def spoil(_: web.Request) -> web.Response:
        return web.json_response({"messages": next(answers, []), "next_page_cursor": None})

    async with asked("mailtrap", Fake([]), spoil) as (feed, api):
        return await search("mailtrap", feed, api, Query(NOW - timedelta(hours=1), NOW, key, ANA))


async def test_a_category_that_is_the_key_asked_for_is_ours_whatever_it_looks_like() -> None:
    for pages in ([[LISTED | {"category": "receipt-1042"}]], [[], [LISTED | {"category": "receipt-1042"}]]):
        (event,) = await looked_up("receipt-1042", *pages)
        assert (event.send_key, event.testimony) == ("receipt-1042", "accepted")


@pytest.mark.parametrize(
    "change", [{}, {"category": "Receipts"}, {"to": "ANA.Reyes@Example.com"}, {"to": None}, {"custom_variables": None}]
)
async def test_mail_to_the_recipient_without_a_key_may_be_the_sought_one(change: dict[str, Any]) -> None:
    for key in (KEY, "receipt-1042"):
        with pytest.raises(ApiError, match="^unnamed"):
            await looked_up(key, [], [LISTED | change])


@pytest.mark.parametrize("change", [{"to": "bo.lind@example.net"}, {"category": OTHER}])
async def test_mail_to_somebody_else_or_of_another_key_is_not(change: dict[str, Any]) -> None:
    assert len(await looked_up(KEY, [], [LISTED | change])) == 1


async def test_the_span_is_asked_for_in_utc_and_a_little_wider() -> None:
    fake = Fake([])
    since = datetime.fromisoformat("2026-11-02T09:00:00.5+02:00")
    async with asked("mailtrap", fake) as (feed, api):
        await search("mailtrap", feed, api, Query(since, since + timedelta(minutes=1), KEY))
    assert [dict(request.query) for request in fake.requests] == [
        {
            "filters[sent_after]": "2026-11-02T06:59:59Z",
            "filters[sent_before]": "2026-11-02T07:01:02Z",
            "filters[category][operator]": "equal",
            "filters[category][value]": KEY,
        },
        {"filters[sent_after]": "2026-11-02T06:59:59Z", "filters[sent_before]": "2026-11-02T07:01:02Z"},
    ]


# --- a second reading


def anymail_reads(body: bytes) -> list[Any]:
    return anymail_compare.anymail_events("mailtrap", Delivery(body, {"content-type": "application/json"}))


@pytest.mark.parametrize("name", sorted(WEBHOOKS.keys() - {"batch_lines"}))  # anymail reads no JSON Lines
def test_django_anymail_reads_the_same(name: str) -> None:
    body = FILES[name].read_bytes()
    for ours, theirs in zip(parsed(body).events, anymail_reads(body), strict=True):
        assert (ours.kind, ours.message_id, ours.event_id) == (theirs.event_type, theirs.message_id, theirs.event_id)
        assert (ours.recipient, ours.occurred_at) == (theirs.recipient, theirs.timestamp)
        assert theirs.metadata.get("send_key") == ours.send_key
