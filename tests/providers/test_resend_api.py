# SPDX-License-Identifier: Apache-2.0
"""Resend asked: what its e-mails tell of sends, and how its webhook is looked after."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web
from api_kit import NOW, Sent, asked, search
from apis.resend import Fake
from case_files import FIXTURES, fixture

from webhooks.asking import ApiError, Query
from webhooks.event import Answer, Event
from webhooks.lookup import Sought, look_up
from webhooks.provider import Delivery
from webhooks.providers.resend import PROVIDER

KEY = "e15bd8fd5b6b63a6f91c331d3c0702980d93474c2b1c4474"
MESSAGE = "7c1f0a52-3d0b-4e8e-9a57-b1c64d20e9f3"
ANA, BO = "ana.reyes@example.com", "bo.lind@example.net"
HOUR = Query(NOW - timedelta(hours=1), NOW, KEY, ANA)
URL = "https://hooks.example.com/webhooks/main"
EVENTS = [
    "email.sent",
    "email.scheduled",
    "email.delivered",
    "email.delivery_delayed",
    "email.bounced",
    "email.complained",
    "email.opened",
    "email.clicked",
    "email.failed",
    "email.suppressed",
]
FIRST = "479e3145-0"


def answers(
    emails: dict[str, Any] | None = None, email: dict[str, Any] | None = None
) -> Callable[[web.Request], web.Response]:
    """Return what answers with the recorded list and e-mail, or with changed ones."""
    listed = {**json.loads(fixture("resend/api_list_emails.json")), **(emails or {})}
    one = {**json.loads(fixture("resend/api_get_email.json")), **(email or {})}
    return lambda request: web.json_response(listed if request.path == "/emails" else one)


async def found(query: Query = HOUR, **changed: Any) -> list[Event]:
    async with asked("resend", Fake([]), spoil=answers(**changed)) as (feed, api):
        return await search("resend", feed, api, query)


# --- the second witness


async def test_a_retrieved_e_mail_proves_what_became_of_it() -> None:
    (event,) = await found()
    assert (event.kind, event.testimony, event.reason) == ("delivered", "accepted", None)
    assert (event.message_id, event.send_key, event.recipient) == (MESSAGE, KEY, ANA)
    assert event.occurred_at == datetime(2026, 11, 2, 8, 15, 4, 217000, UTC)
    assert json.loads(event.raw) == json.loads(fixture("resend/api_get_email.json"))


@pytest.mark.parametrize(
    ("state", "kind", "testimony"),
    [
        ("queued", "queued", "accepted"),
        ("scheduled", "queued", "accepted"),
        ("sent", "sent", "accepted"),
        ("delivered", "delivered", "accepted"),
        ("delivery_delayed", "deferred", "accepted"),
        ("bounced", "bounced", "accepted"),
        ("complained", "complained", "accepted"),
        ("opened", "opened", "accepted"),
        ("clicked", "clicked", "accepted"),
        ("failed", "failed", "rejected"),
        ("suppressed", "rejected", "rejected"),
        ("canceled", "failed", "rejected"),
        ("teleported", "unknown", "none"),
        (None, "unknown", "none"),
    ],
)
async def test_a_state_means_what_the_vendor_s_schema_says(state: str | None, kind: str, testimony: str) -> None:
    (event,) = await found(email={"last_event": state})
    assert (event.kind, event.testimony) == (kind, testimony)


async def test_only_e_mails_to_the_recipient_within_the_span_are_retrieved() -> None:
    sends = [
        Sent(KEY, "Ana.Reyes@EXAMPLE.com", "wanted"),
        Sent("b" * 48, BO, "other"),
        Sent("c" * 48, ANA, "later", at=NOW + timedelta(seconds=1)),
        Sent("d" * 48, ANA, "earlier", at=NOW - timedelta(hours=1, seconds=1)),
    ]
    fake = Fake(sends)
    async with asked("resend", fake) as (feed, api):
        assert [event.message_id for event in await search("resend", feed, api, HOUR)] == ["wanted"]
    assert [request.path for request in fake.requests] == ["/emails", "/emails/wanted", "/emails"]


@pytest.mark.parametrize(
    "recipients",
    [
        {"to": [BO], "cc": ["Ana Reyes <ANA.reyes@example.com>"]},
        {"to": [BO], "bcc": ANA},
        {"to": [], "cc": None},
        {"to": None},
        {"to": [{"email": BO}]},
    ],
)
async def test_an_e_mail_that_may_be_to_the_recipient_is_retrieved(recipients: dict[str, Any]) -> None:
    listed = json.loads(fixture("resend/api_list_emails.json"))["data"][0]
    assert len(await found(emails={"data": [{**listed, **recipients}]})) == 1


async def test_the_list_is_not_read_beyond_the_span() -> None:
    old = [Sent(f"{i:048x}", ANA, str(i), at=NOW - timedelta(days=2, seconds=i)) for i in range(20)]
    fake = Fake([Sent(KEY, ANA, "wanted"), *old])
    async with asked("resend", fake) as (feed, api):
        await search("resend", feed, api, HOUR)
    assert [request.path for request in fake.requests] == ["/emails", "/emails/wanted"]


ANSWERS = {
    "api_send_ok": (200, [MESSAGE], "accepted"),
    "api_batch_ok": (200, [MESSAGE, "1e77d3b9-80c2-4f3a-8f6e-0d9a5bb2c417"], "accepted"),
    "api_409_other_payload": (409, [], "accepted"),
    "api_409_concurrent": (409, [], "ambiguous"),
    "api_400_bad_key": (400, [], "rejected"),
}
"""What a send is answered: the ids as a confirmation stores them, and what it proves of the send with this key."""
SAID = {
    "api_409_other_payload": "409 invalid_idempotent_request proves that an earlier request with the key was taken",
    "api_409_concurrent": "409 concurrent_idempotent_requests only that one is running",
    "api_400_bad_key": "400 invalid_idempotency_key that nothing was taken",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_has_the_message_id_of_its_events_or_the_facts_say_what_it_proves(name: str) -> None:
    answer = json.loads(fixture(f"resend/{name}.json"))
    status, message_ids, _ = ANSWERS[name]
    one_each = [one["id"].strip("<> ") for one in answer.get("data", [answer]) if "id" in one]
    assert (answer.get("statusCode", 200), one_each) == (status, message_ids)
    (event,) = PROVIDER.parse(Delivery(fixture("resend/email_sent.json"), {})).events
    assert message_ids[:1] in ([], [event.message_id])
    assert SAID.get(name, "the same request is answered with the first id") in PROVIDER.facts.native_key
    assert answer.get("name", "") in PROVIDER.facts.native_key


def test_every_answer_of_the_api_is_expected() -> None:
    names = {file.stem for file in (FIXTURES / "resend").glob("api_*")}
    assert names == {*ANSWERS, "api_get_email", "api_list_emails"}


def untagging(fake: Fake) -> Callable[[web.Request], None]:
    """Return what lets one of the e-mails be one that was sent by SMTP."""

    def spoil(request: web.Request) -> None:
        fake.tagged = request.path != "/emails/untagged"

    return spoil


async def test_an_e_mail_that_shows_no_key_may_be_the_sought_one_so_that_nothing_is_absent() -> None:
    at = NOW - timedelta(minutes=40)
    sought = Sought("f" * 48, at - timedelta(minutes=2), at - timedelta(minutes=1), ANA)
    control = Sought(KEY, at, at + timedelta(minutes=1), BO)
    fake = Fake([Sent("f" * 48, ANA, "untagged", at - timedelta(minutes=1)), Sent(KEY, BO, "tagged", at)])
    async with asked("resend", fake, spoil=untagging(fake)) as (feed, api):
        answer = await look_up(PROVIDER, feed, api, sought, control, NOW + timedelta(days=1))
    assert (answer.answer, answer.reason) == (Answer.SILENT, "unnamed")
    assert "no tag send_key" in answer.hint


async def test_the_sought_one_is_found_beside_one_that_shows_no_key() -> None:
    fake = Fake([Sent(KEY, ANA, "tagged"), Sent("f" * 48, ANA, "untagged")])
    async with asked("resend", fake, spoil=untagging(fake)) as (feed, api):
        events = await search("resend", feed, api, HOUR)
    assert [event.send_key for event in events] == [KEY, None]


@pytest.mark.parametrize(
    "changed",
    [
        {"emails": {"data": None}},
        {"emails": {"has_more": None}},
        {"emails": {"has_more": True, "data": []}},
        {"emails": {"data": [None]}},
        {"emails": {"data": [{"id": MESSAGE, "to": [ANA]}]}},
        {"emails": {"data": [{"created_at": "2026-11-02T08:15:04.217Z", "to": [ANA]}]}},
        {"email": {"id": None}},
        {"email": {"created_at": "soon"}},
    ],
)
async def test_an_answer_that_does_not_hold_what_it_should_is_told(changed: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="^garbage"):
        await found(**changed)


# --- the webhook


def webhook(**changed: Any) -> dict[str, Any]:
    return {"id": FIRST, "endpoint": URL, "events": EVENTS, "status": "enabled", **changed}


async def looked_after(fake: Fake) -> list[tuple[str, str | None]]:
    """Return what was changed and what was answered, having seen that nothing is left to change."""
    async with asked("resend", fake) as (feed, api):
        before = copy.deepcopy(fake.webhooks)
        changes = await PROVIDER.changes(URL, feed, api)
        assert fake.webhooks == before
        told = [(change.text, await change.make()) for change in changes]
        assert await PROVIDER.changes(URL, feed, api) == []
    return told


async def test_a_missing_webhook_is_created_and_its_secret_told() -> None:
    fake = Fake([])
    assert await looked_after(fake) == [
        (f"create the webhook with {', '.join(EVENTS)}", 'set feeds.main.secrets to "whsec_dGhyb3ctYXdheQ=="')
    ]
    assert fake.webhooks == [webhook(created_at="2026-11-02")]


@pytest.mark.parametrize(
    ("as_it_is", "text"),
    [
        ({"status": "disabled"}, "enable it"),
        ({"events": EVENTS[2:]}, "add email.sent, email.scheduled"),
        ({"events": EVENTS[1:], "status": "disabled"}, "add email.sent and enable it"),
        ({"events": None}, f"add {', '.join(EVENTS)}"),
    ],
)
async def test_what_is_switched_off_is_switched_on(as_it_is: dict[str, Any], text: str) -> None:
    fake = Fake([], webhooks=[webhook(**as_it_is)])
    assert await looked_after(fake) == [(f"webhook {FIRST}: {text}", None)]
    assert (sorted(fake.webhooks[0]["events"]), fake.webhooks[0]["status"]) == (sorted(EVENTS), "enabled")


async def test_events_that_somebody_added_stay() -> None:
    fake = Fake([], webhooks=[webhook(events=["email.received"])])
    await looked_after(fake)
    assert fake.webhooks[0]["events"] == ["email.received", *EVENTS]


async def test_a_complete_webhook_is_found_on_whichever_page_and_others_are_left_alone() -> None:
    others = [webhook(id=f"other-{i}", endpoint=f"https://other.example.org/{i}", status="disabled") for i in range(7)]
    fake = Fake([], webhooks=copy.deepcopy([*others, webhook(endpoint=URL + "?token=t")]))
    assert await looked_after(fake) == []
    fake = Fake([], webhooks=copy.deepcopy(others))
    await looked_after(fake)
    assert fake.webhooks[:7] == others


async def test_an_endless_or_odd_list_of_webhooks_is_told() -> None:
    with pytest.raises(ApiError, match="^endless"):
        await looked_after(Fake([], webhooks=[webhook(endpoint="https://other.example.org")], endless=True))
    async with asked("resend", Fake([]), spoil=lambda _: web.json_response({"data": 7})) as (feed, api):
        with pytest.raises(ApiError, match="^garbage"):
            await PROVIDER.changes(URL, feed, api)
        with pytest.raises(ApiError, match=r"^unconfigured: set feeds\.main\.api_key"):
            await PROVIDER.changes(URL, replace(feed, api_key=""), api)


def test_its_facts_say_that_it_can_be_asked_by_recipient() -> None:
    facts = PROVIDER.facts
    assert (facts.finds_by, facts.lists, facts.same_key_window) == ("recipient", True, timedelta(hours=24))
    assert facts.settles_after == timedelta(minutes=15)
    assert any("{url}" in step for step in facts.setup)
