# SPDX-License-Identifier: Apache-2.0
"""MailerSend: what its webhooks and its list of activities mean, prove and carry, as its documents have it."""

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
from apis.mailersend import Fake
from case_files import FIXTURES, case, clock, delivery, fixture, no_fetch

from webhooks.asking import ApiError, Query
from webhooks.event import Event
from webhooks.provider import BadPayload, Delivery, Feed, NoSample, Parsed, Refused, Verified
from webhooks.providers.mailersend import PROVIDER, PUBLIC_SECRET, MailerSend

NOW = datetime(2026, 11, 2, 9, 0, tzinfo=UTC)
KEY = "e15bd8fd5b6b63a6f91c331d3c0702980d93474c2b1c4474"
MESSAGE = "690710a8c3d2e1f0a9b8c7d6"
ANA = "ana.reyes@example.com"


class Expected(NamedTuple):
    kind: str
    testimony: str
    occurred_at: str
    event_id: str | None = None
    reason: str | None = None
    send_key: str | None = KEY
    message_id: str | None = MESSAGE
    recipient: str | None = ANA


def v2(kind: str, at: str, event_id: str, reason: str | None = None, testimony: str = "accepted") -> Expected:
    return Expected(kind, testimony, f"2026-11-02T{at}+00:00", event_id, reason)


def v1(kind: str, at: str, event_id: str, reason: str | None = None) -> Expected:
    return Expected(kind, "accepted", f"2026-11-02T{at}.506000+00:00", event_id, reason)


def account(recipient: str | None = None, reason: str | None = None) -> Expected:
    return Expected("unknown", "none", "2026-11-02T08:15:34+00:00", None, reason, None, None, recipient)


WEBHOOKS = {
    "v2_sent": v2("sent", "08:15:05", "690710a95d64244fb845e1ee"),
    "v2_sent_docs_variant": v2("sent", "08:15:05", "690710a971c59d6224622b2e"),
    "v2_sent_no_tags": v2("sent", "08:15:05", "690710a946b37135712d1d3c")._replace(send_key=None),
    "v2_delivered": v2("delivered", "08:15:07", "690710a97e94de3afbffe5d2"),
    "v2_soft_bounced": v2("bounced", "08:15:34", "690710a98186626bba80540a", "Mailbox full (invented)"),
    "v2_hard_bounced": v2("bounced", "08:15:08", "690710a979f92f70e1012220", "Unknown user (invented)"),
    "v2_deferred": v2("deferred", "08:15:24", "690710a9a7a8955333599211", "Greylisted (invented)"),
    "v2_opened": v2("opened", "08:16:04", "690710a965f8710778aa1186"),
    "v2_opened_unique": v2("opened", "08:16:04", "690710a9d1bd5675babcabfa"),
    "v2_clicked": v2("clicked", "08:16:05", "690710a97f08c177569d61c6"),
    "v2_clicked_unique": v2("clicked", "08:16:05", "690710a99f2e0fe5ce1de1fb"),
    "v2_unsubscribed": v2("unsubscribed", "08:20:04", "690710a9ff6bd669af36d60c", "option_3"),
    "v2_spam_complaint": v2("complained", "09:15:04", "690710a982f7783f21e512dc"),
    "v2_survey_opened": v2("opened", "08:16:14", "690710a9ab90babe47de5c23"),
    "v2_survey_submitted": v2("clicked", "08:16:34", "690710a90eb721e797ff8e76"),
    "v2_suppressed": v2("rejected", "08:15:05", "690710a9edc962f6e174f3dd", "on_hold", "rejected"),
    "v1_sent": v1("sent", "08:15:05", "690710a90a1e250d6f210826"),
    "v1_delivered": v1("delivered", "08:15:07", "690710a9edb4a3bc875f6742"),
    "v1_soft_bounced": v1("bounced", "08:15:34", "690710a9ac613a346a792190", "Mailbox full (invented)"),
    "v1_hard_bounced": v1("bounced", "08:15:08", "690710a9f518e3a9c652e4f9", "Unknown user (invented)"),
    "v1_deferred": v1("deferred", "08:15:24", "690710a9b3a53eb744ef2f44"),
    "v1_opened": v1("opened", "08:16:04", "690710a935ca09fc77e9b6da"),
    "v1_opened_unique": v1("opened", "08:16:04", "690710a99897f908f7ba954a"),
    "v1_clicked": v1("clicked", "08:16:05", "690710a96f3e63b8316dde90"),
    "v1_clicked_unique": v1("clicked", "08:16:05", "690710a971809ae07a672e63"),
    "v1_unsubscribed": v1("unsubscribed", "08:20:04", "690710a9db6164369b7ad1db", "I get too many emails (invented)"),
    "v1_spam_complaint": v1("complained", "09:15:04", "690710a98abeb76f49122fbc"),
    "maintenance_start": account(),
    "maintenance_end": account(),
    "sender_identity_verified": account(),
    "inbound_forward_failed": account(),
    "inbound_message_rejected": account(reason="attachment_size_exceeded"),
    "email_single_verified": account(),
    "email_list_verified": account(),
    "bulk_email_completed": account(),
    "recipient_on_hold_added": account(ANA),
    "recipient_on_hold_removed": account(ANA),
}


def parse(body: bytes) -> Event:
    (event,) = PROVIDER.parse(Delivery(body, {})).events
    return event


def webhook(name: str, **data: Any) -> Event:
    return parse(json.dumps({"type": name, "created_at": "2026-11-02T08:15:05.000000Z", "data": data}).encode())


def facts_of(event: Event) -> tuple[Any, ...]:
    occurred_at = event.occurred_at.isoformat() if event.occurred_at else None
    said = (event.kind.value, event.testimony.value, occurred_at, event.event_id, event.reason)
    return (*said, event.send_key, event.message_id, event.recipient)


def test_every_webhook_fixture_has_an_expectation() -> None:
    names = {file.stem for file in (FIXTURES / "mailersend").glob("*")}
    assert {name for name in names if not name.startswith("api_")} == {*WEBHOOKS, "webhook_test"}


@pytest.mark.parametrize("name", WEBHOOKS)
def test_a_webhook_of_either_version_is_read_as_the_facts_say(name: str) -> None:
    body = fixture(f"mailersend/{name}.json")
    event, expected = parse(body), WEBHOOKS[name]
    assert facts_of(event) == expected._replace(event_id=expected.event_id or event.event_id)
    assert event.raw == body


def test_no_two_webhooks_are_the_same_event() -> None:
    events = [parse(fixture(f"mailersend/{name}.json")) for name in WEBHOOKS]
    assert len({(event.message_id, event.event_id) for event in events}) == len(WEBHOOKS)


def test_the_ping_is_a_control_message_without_events() -> None:
    assert PROVIDER.parse(Delivery(fixture("mailersend/webhook_test.json"), {})) == Parsed(control="ping")


@pytest.mark.parametrize(
    ("tags", "key"),
    [
        ([KEY], KEY),
        (["order.receipt", "newsletter", KEY], KEY),
        (["order.receipt", "send_key-receipt-1042"], "receipt-1042"),
        (["send_key:order.receipt:1001"], "order.receipt:1001"),
        (["receipt-1042"], None),
        ([KEY.upper()], None),
        ([KEY + "0"], None),
        (["send_key-"], None),
        ([None, 7, {}, [KEY], "", KEY], KEY),
        ([], None),
        (None, None),
        (KEY, None),
        ({"0": KEY}, None),
    ],
)
def test_our_tag_is_told_apart_from_the_applications_own(tags: Any, key: str | None) -> None:
    assert webhook("activity.sent", id="a", tags=tags).send_key == key
    assert webhook("activity.sent", id="a", email={"tags": tags}).send_key == key


def test_a_key_in_meta_is_taken_where_no_tag_is_ours() -> None:
    assert webhook("activity.sent", id="a", tags=["x"], meta={"send_key": "order.receipt:1001"}).send_key == (
        "order.receipt:1001"
    )
    assert webhook("activity.sent", id="a", tags=[KEY], meta={"send_key": "other"}).send_key == KEY


@pytest.mark.parametrize("wire_key", [KEY, "receipt-1042", "send_key-1", "a" * 47, "z" * 48, "_"])
def test_the_stamp_is_one_tag_from_which_the_key_comes_back(wire_key: str) -> None:
    stamp = PROVIDER.stamp(wire_key)
    assert webhook("activity.sent", id="a", tags=["own", *stamp.body["tags"]]).send_key == wire_key  # type: ignore[misc]
    assert stamp.smtp_headers == {"X-MailerSend-Tags": stamp.body["tags"][0]}  # type: ignore[index]
    assert stamp.headers == {}


def test_the_stamp_is_the_key_itself_where_its_form_tells_it_apart() -> None:
    assert PROVIDER.stamp(KEY).body == {"tags": [KEY]}
    assert PROVIDER.stamp("receipt-1042").body == {"tags": ["send_key-receipt-1042"]}


def test_the_same_activity_has_one_identity_in_both_versions() -> None:
    newer = webhook("activity.sent", id="a", message_id="m", recipient=ANA, tags=[KEY])
    older = webhook("activity.sent", id="a", email={"message": {"id": "m"}, "recipient": {"email": ANA}, "tags": [KEY]})
    assert (newer.message_id, newer.event_id, newer.recipient) == (older.message_id, older.event_id, older.recipient)


def test_without_an_id_a_repeat_is_the_same_event_and_another_click_is_not() -> None:
    click = {"message_id": "m", "recipient": ANA, "meta": {"url": "https://a.example"}}
    one, again = (webhook("activity.clicked", **click) for _ in "12")
    other = webhook("activity.clicked", **{**click, "meta": {"url": "https://b.example"}})
    assert one.event_id == again.event_id != other.event_id


def test_a_type_not_known_yet_is_kept_and_proves_nothing() -> None:
    event = webhook("activity.teleported", id="a", message_id="m", recipient=ANA, tags=[KEY])
    assert facts_of(event)[:2] == ("unknown", "none")
    assert (event.send_key, event.message_id, event.recipient) == (KEY, "m", ANA)


def test_incoming_mail_proves_nothing_and_carries_no_key() -> None:
    event = webhook("inbound.message", id="i", tags=[KEY], meta={"send_key": KEY})
    assert facts_of(event)[:2] == ("inbound", "none")
    assert event.send_key is None


def test_queued_is_no_webhook_but_proves_acceptance_where_it_is_listed() -> None:
    assert webhook("activity.queued", id="a").testimony == "accepted"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"7", b"{}", b'{"type":7.5}', b'{"type":{}}', b"\xff"])
def test_what_is_no_webhook_of_mailersend_is_refused(body: bytes) -> None:
    with pytest.raises(BadPayload, match=r"JSON|type"):
        PROVIDER.parse(Delivery(body, {}))


# --- what is MailerSend's and what isn't

SECRET = "throw-away-signing-secret"
PING = b'{"type":"webhook.test","message":"This is a ping test message","created_at":"2026-11-02T08:15:04.000000Z"}'
SENT = b'{"type":"activity.sent","url":"https:\\/\\/hooks.shop.example.com\\/webhooks\\/mailersend","data":{"id":"a"}}'


def signed(body: bytes, secret: str = SECRET) -> Delivery:
    return Delivery(body, {"signature": hmac.digest(secret.encode(), body, hashlib.sha256).hex()})


async def verdict(request: Delivery, *secrets: str) -> str:
    judged = await PROVIDER.verify(request, Feed("main", "mailersend", secrets), NOW, no_fetch)
    return judged.reason if isinstance(judged, Refused) else "verified" if judged == Verified() else repr(judged)


async def test_the_signature_is_over_the_raw_bytes_escaped_slashes_and_all() -> None:
    request = signed(SENT)
    assert await verdict(request, SECRET) == "verified"
    assert await verdict(Delivery(SENT.replace(b"\\/", b"/"), request.headers), SECRET) == "signature"
    assert await verdict(Delivery(SENT, {"x-mailersend-signature": request.headers["signature"]}), SECRET) == "missing"


async def test_either_of_two_secrets_fits_while_one_is_changed() -> None:
    assert await verdict(signed(SENT, "new"), SECRET, "new") == "verified"
    assert await verdict(signed(SENT, "third"), SECRET, "new") == "signature"


@pytest.mark.parametrize("secrets", [(), (SECRET,), ("basic:hook:throw-away",)])
async def test_the_ping_is_answered_whoever_signed_it_so_that_the_webhook_can_be_saved(secrets: tuple[str]) -> None:
    assert await verdict(signed(PING, PUBLIC_SECRET), *secrets) == "verified"
    assert await verdict(signed(PING, "unknown"), *secrets) == "verified"
    assert await verdict(Delivery(PING, {}), *secrets) in ("missing", "no_secret", "signature")
    assert await verdict(Delivery(PING, {"signature": " "}), *secrets) in ("missing", "no_secret", "signature")


FORGED = [
    SENT,
    b'{"type":"activity.delivered","data":{"id":"webhook.test"}}',
    b'{"type":"webhook.test","type":"activity.delivered","data":{"id":"a"}}',
    b'{"type":"activity.delivered","data":{"id":"a"},"type":null,"x":"webhook.test"}',
    b'webhook.test{"type":"activity.delivered"}',
]


@pytest.mark.parametrize("body", FORGED)
@pytest.mark.parametrize("secrets", [(SECRET,), (SECRET, PUBLIC_SECRET), (PUBLIC_SECRET,)])
async def test_the_printed_secret_never_proves_an_event(body: bytes, secrets: tuple[str, ...]) -> None:
    assert await verdict(signed(body, PUBLIC_SECRET), *secrets) in ("signature", "no_secret")


@pytest.mark.parametrize(
    "body", [PING, b'{"type":"activity.delivered","type":"webhook.test"}', b'\xef\xbb\xbf{"type":"webhook.test"}']
)
async def test_what_passes_as_a_ping_holds_no_event(body: bytes) -> None:
    assert await verdict(signed(body, "anybody")) == "verified"
    assert PROVIDER.parse(Delivery(body, {})) == Parsed(control="ping")


def test_secrets_that_verify_nothing_are_objected_to() -> None:
    provider = MailerSend()
    assert "documents print" in (provider.objection("secrets", PUBLIC_SECRET) or "")
    assert "API token" in (provider.objection("secrets", "mlsn.0123456789abcdef") or "")
    assert provider.objection("secrets", SECRET) is None
    assert provider.objection("secrets", "bearer:mlsn.0123456789abcdef") is None
    assert provider.objection("topics", PUBLIC_SECRET) is None


async def test_case_019_the_test_of_a_new_webhook_is_answered_and_stores_nothing() -> None:
    of = case("019")
    feed = Feed("main", "mailersend", tuple(of["config"]["mailersend_secrets"]))
    assert await PROVIDER.verify(delivery(of), feed, clock(of), no_fetch) == Verified()
    assert PROVIDER.parse(delivery(of)) == Parsed(control="ping")


# --- what a send is answered

ANSWERS = {
    "api_send_headers": (MESSAGE, "accepted", "Confirm with the answer's header x-message-id"),
    "api_send_all_suppressed": (None, "rejected", "the warning ALL_SUPPRESSED means that nothing is sent"),
}
"""For each answer: its id as the sender's side keeps it, what it proves, and the words that say so in the setup."""


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_names_the_message_as_its_events_do_and_the_setup_says_what_it_proves(name: str) -> None:
    message_id, _, words = ANSWERS[name]
    answer = json.loads(fixture(f"mailersend/{name}.json"))
    assert answer.get("headers", {}).get("x-message-id", "").strip("<> ") == (message_id or "")
    assert [warning["type"] in words for warning in answer.get("warnings", [])] == [True] * (message_id is None)
    ids = {parse(fixture(f"mailersend/{webhook}.json")).message_id for webhook in WEBHOOKS}
    assert ids == {MESSAGE, None}  # None: what is about no message
    assert words in " ".join(PROVIDER.facts.setup)


# --- facts and samples


def test_no_answer_ends_a_delivery_that_was_not_stored_or_not_proved() -> None:
    assert (PROVIDER.facts.busy_status, PROVIDER.facts.refused_status) == (503, 503)


def test_of_two_documented_ways_to_deliver_again_the_shorter_one_counts() -> None:
    assert PROVIDER.facts.redelivers_for == timedelta(seconds=10 + 100)
    for version in ("after 10 s and 100 s", "exponentially for about 3 days"):
        assert version in PROVIDER.facts.redelivery


def test_without_an_idempotency_key_a_retry_is_never_called_safe() -> None:
    assert PROVIDER.facts.same_key_window is None
    assert not PROVIDER.facts.first_event_is_delivery


@pytest.mark.parametrize("secrets", [(SECRET,), ("bearer:token",), (PUBLIC_SECRET, SECRET)])
async def test_a_sample_is_one_that_the_feed_accepts(secrets: tuple[str, ...]) -> None:
    sample = PROVIDER.sample("activity.suppressed", "receipt-1042", Feed("main", "mailersend", secrets), NOW)
    assert await verdict(sample, *secrets) == "verified"
    event = parse(sample.body)
    assert (event.kind, event.testimony, event.send_key, event.occurred_at) == (
        "rejected",
        "rejected",
        "receipt-1042",
        NOW,
    )


@pytest.mark.parametrize("secrets", [(), (PUBLIC_SECRET,)])
def test_where_no_sample_can_be_signed_the_reason_is_told(secrets: tuple[str, ...]) -> None:
    with pytest.raises(NoSample, match="no signing secret"):
        PROVIDER.sample("sent", KEY, Feed("main", "mailersend", secrets), NOW)


# --- its API


async def test_what_the_api_lists_is_read_as_documented() -> None:
    page = json.loads(fixture("mailersend/api_activity.json"))
    async with asked("mailersend", Fake([]), lambda _: web.json_response(page)) as (feed, api):
        (event,) = await search("mailersend", feed, api, Query(NOW - timedelta(hours=1), NOW, KEY))
    assert facts_of(event) == (
        "queued",
        "accepted",
        "2026-11-02T08:15:05+00:00",
        "690710a9d79f29198de678d1",
        None,
        KEY,
        "email:690710a8d4e5f60718293a4b",
        ANA,
    )
    assert json.loads(event.raw) == page["data"][0]


def activity(**change: Any) -> dict[str, Any]:
    """The page of one activity, with other fields of its e-mail."""
    page = json.loads(fixture("mailersend/api_activity.json"))
    page["data"][0]["email"] |= change
    return page


async def looked_up(page: dict[str, Any]) -> list[Event]:
    async with asked("mailersend", Fake([]), lambda _: web.json_response(page)) as (feed, api):
        return await search("mailersend", feed, api, Query(NOW - timedelta(hours=1), NOW, KEY, ANA))


@pytest.mark.parametrize("tags", [None, [], ["order.receipt"]])
@pytest.mark.parametrize("recipient", [{"email": "ANA.Reyes@Example.com"}, {}])
async def test_mail_to_the_recipient_without_a_tag_of_ours_may_be_the_sought_one(tags: Any, recipient: Any) -> None:
    with pytest.raises(ApiError, match="^unnamed"):
        await looked_up(activity(tags=tags, recipient=recipient))


async def test_mail_to_somebody_else_or_beside_the_sought_one_does_not_matter() -> None:
    assert len(await looked_up(activity(tags=None, recipient={"email": "bo.lind@example.net"}))) == 1
    page = activity()
    page["data"] += activity(tags=None)["data"]
    assert [event.send_key for event in await looked_up(page)] == [KEY, None]


async def test_a_long_span_is_asked_for_in_parts_that_the_smallest_plan_allows() -> None:
    sends = [Sent(f"{n:048x}", message_id=f"{n:08x}-1", at=NOW - timedelta(hours=12 * n)) for n in range(8)]
    fake = Fake(sends)
    async with asked("mailersend", fake) as (feed, api):
        events = await search("mailersend", feed, api, Query(NOW - timedelta(hours=84), NOW))
    assert {event.send_key for event in events} == {sent.wire_key for sent in sends}
    spans = [(int(request.query["date_from"]), int(request.query["date_to"])) for request in fake.requests]
    assert min(spans)[0] <= (NOW - timedelta(hours=84)).timestamp()
    assert max(spans)[1] >= NOW.timestamp()


async def test_a_full_page_is_not_taken_for_the_last_one() -> None:
    page = json.loads(fixture("mailersend/api_activity.json"))
    full, rest = {**page, "data": page["data"] * 100}, {**page, "data": []}
    async with asked(
        "mailersend", Fake([]), lambda request: web.json_response(full if request.query["page"] == "1" else rest)
    ) as (feed, api):
        events = await search("mailersend", feed, api, Query(NOW - timedelta(hours=1), NOW))
    assert len(events) == 100


@pytest.mark.parametrize(
    "answer",
    [
        {"data": []},
        {"data": [], "links": None},
        {"data": [], "links": {}},
        {"data": [7], "links": {"next": None}},
        {"data": [{"id": "a", "type": "sent"}], "links": {"next": None}},
        {"data": [{"id": "a", "email": {"id": "e"}}], "links": {"next": None}},
    ],
)
async def test_a_list_of_another_shape_is_garbage(answer: Any) -> None:
    async with asked("mailersend", Fake([]), lambda _: web.json_response(answer)) as (feed, api):
        with pytest.raises(ApiError, match=r"^garbage"):
            await search("mailersend", feed, api, Query(NOW - timedelta(hours=1), NOW))


async def test_without_the_domain_it_says_which_setting_is_missing() -> None:
    fake = Fake([], settings={"api_key": "mlsn.throw-away"})
    async with asked("mailersend", fake) as (feed, api):
        with pytest.raises(ApiError, match=r"^unconfigured: set feeds\.main\.api_scope"):
            await search("mailersend", feed, api, Query(NOW - timedelta(hours=1), NOW))
    assert not fake.requests


# --- a second reading

ANYMAIL_DIFFERS = {
    **dict.fromkeys(("v1_opened_unique", "v1_clicked_unique"), "anymail 15.1 leaves out the unique ones"),
    "v1_deferred": "anymail 15.1 does not know it; MailerSend's documents say: temporarily delayed",
}


def anymail_reads(request: Delivery) -> Any:
    (event,) = anymail_compare.anymail_events("mailersend", request)
    return event


@pytest.mark.parametrize("name", [name for name in WEBHOOKS if name.startswith("v1_")])  # 15.1 knows no version 2
def test_django_anymail_reads_the_same_in_version_1(name: str) -> None:
    request = Delivery(fixture(f"mailersend/{name}.json"), {"content-type": "application/json"})
    ours, theirs = parse(request.body), anymail_reads(request)
    assert (theirs.message_id, theirs.event_id, theirs.recipient, theirs.timestamp) == (
        ours.message_id,
        ours.event_id,
        ours.recipient,
        ours.occurred_at,
    )
    assert theirs.tags == [ours.send_key]
    assert (theirs.description or None) == ours.reason
    assert (theirs.event_type != ours.kind) == (name in ANYMAIL_DIFFERS)
