# SPDX-License-Identifier: Apache-2.0
"""What Event Grid sends of Azure's mails is read as written in its fact sheet, and its handshakes are answered."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web
from api_kit import Sent, asked, search
from apis.azure_acs import Fake
from case_files import FIXTURES, fixture, no_fetch

from webhooks.asking import ApiError, Query
from webhooks.event import Event, Kind, Testimony
from webhooks.provider import BadPayload, Delivery, Feed, NoSample, Parsed, Refused, Verified
from webhooks.providers.azure_acs import NAMESPACE, PROVIDER

KEY = "e15bd8fd5b6b63a6f91c331d3c0702980d93474c2b1c4474"
OPERATION = "9c6b79c7-ac19-5382-9bfc-79eb7496fb48"
ANA = "ana.reyes@example.com"
MESSAGE = "657ac463-40e8-57cd-92f5-fff5c1891c4e"
YES, NO, NOTHING = Testimony.ACCEPTED, Testimony.REJECTED, Testimony.NONE
NOW = datetime(2026, 11, 2, 9, 0, tzinfo=UTC)


def at(clock_time: str) -> datetime:
    return datetime.fromisoformat(f"2026-11-02T{clock_time}+00:00")


TAKEN, GONE, SEEN = at("08:15:10.285574"), at("08:15:11.285574"), at("08:16:04.130359")
EXPECTED = {
    "delivery_report_delivered": (Kind.DELIVERED, YES, "d4bc3b3a-6b43-54f1-858c-c482ed152c13", TAKEN, None),
    "delivery_report_delivered_cloudevent": (
        *(Kind.DELIVERED, YES, "84daf638-ad26-5205-b7e8-69366afc1e12", TAKEN, None),
    ),
    "delivery_report_delivered_old_timestamp_name": (
        *(Kind.DELIVERED, YES, "ae700d7c-65e2-5ce1-8b24-5efbc84bd20d", TAKEN, None),
    ),
    "delivery_report_expanded": (Kind.SENT, YES, "3961637a-139e-5d97-a9b2-6eb813ee36c9", TAKEN, None),
    "delivery_report_bounced": (
        *(Kind.BOUNCED, YES, "974e54fb-9e01-5509-88ed-beb37a23b7de", GONE),
        "Bounced 550 5.1.1 (invented)",
    ),
    "delivery_report_failed": (
        *(Kind.BOUNCED, YES, "03d8dc14-f467-56bb-9e60-d52ec78471fa", GONE, "Failed (invented)"),
    ),
    "delivery_report_filtered_spam": (
        *(Kind.BOUNCED, YES, "4a7e0f92-c355-5dff-a4c1-277c3be7fae7", GONE, "FilteredSpam (invented)"),
    ),
    "delivery_report_quarantined": (
        *(Kind.BOUNCED, YES, "315523a4-a4c8-5742-964b-8bd32236ab58", GONE, "Quarantined (invented)"),
    ),
    "delivery_report_suppressed": (
        *(Kind.REJECTED, NO, "2aca8420-e523-53da-916c-83b3dca95ec2", at("08:15:06.285574")),
        "Suppressed recipient on the suppression list (invented)",
    ),
    "engagement_view": (Kind.OPENED, YES, "218661cd-e30b-5804-bdb7-14f97d3c2853", SEEN, None),
    "engagement_click": (Kind.CLICKED, YES, "d57848e5-672a-59b8-b9aa-8c9fb9922584", SEEN, None),
}


def parsed(*events: Any, **headers: str) -> Parsed:
    return PROVIDER.parse(Delivery(json.dumps(events).encode(), headers))


def report(status: str = "Delivered", **data: Any) -> dict[str, Any]:
    name = "Microsoft.Communication.EmailDeliveryReportReceived"
    return {"id": "e", "eventType": name, "data": {"messageId": MESSAGE, "status": status, **data}}


@pytest.mark.parametrize("name", EXPECTED)
def test_every_event_type_is_read_as_the_facts_say(name: str) -> None:
    body = fixture(f"azure_acs/{name}.json")
    (event,) = PROVIDER.parse(Delivery(body, {})).events
    assert (event.kind, event.testimony, event.event_id, event.occurred_at, event.reason) == EXPECTED[name]
    assert (event.message_id, event.send_key, event.recipient) == (MESSAGE, None, ANA)
    assert event.raw == body.strip().removeprefix(b"[").removesuffix(b"]").strip()


def test_every_webhook_fixture_has_an_expectation() -> None:
    names = {path.stem for path in (FIXTURES / "azure_acs").glob("*.json")}
    assert names == {*EXPECTED, *ANSWERS, "subscription_validation"}


def test_a_batch_of_either_schema_and_a_single_event_are_read_alike() -> None:
    cloud = {"id": "c", "type": report()["eventType"], "specversion": "1.0", "data": report("Bounced")["data"]}
    delivered, bounced = parsed(report(), cloud).events
    assert (delivered.event_id, delivered.kind) == ("e", Kind.DELIVERED)
    assert (bounced.event_id, bounced.kind) == ("c", Kind.BOUNCED)
    (single,) = PROVIDER.parse(Delivery(json.dumps(cloud).encode(), {})).events
    assert single.kind is Kind.BOUNCED


def test_engagement_is_read_in_either_spelling_and_without_a_recipient() -> None:
    name = "Microsoft.Communication.EmailEngagementTrackingReportReceived"
    data = {"messageId": MESSAGE, "engagementType": "View", "userActionTimeStamp": "2022-09-06T22:34:52.13+00:00"}
    (event,) = parsed({"id": "e", "eventType": name, "data": data}).events
    assert (event.kind, event.recipient) == (Kind.OPENED, None)
    assert event.occurred_at == datetime(2022, 9, 6, 22, 34, 52, 130000, UTC)


def test_an_operation_id_is_the_same_in_either_case() -> None:
    (event,) = parsed(report(messageId=MESSAGE.upper())).events
    assert event.message_id == MESSAGE


@pytest.mark.parametrize(
    "told", [report("Teleported"), {"id": "e", "eventType": "Microsoft.Communication.SMSReceived"}]
)
def test_what_is_not_known_yet_is_kept_and_proves_nothing(told: dict[str, Any]) -> None:
    (event,) = parsed(told).events
    assert (event.kind, event.testimony, event.event_id) == (Kind.UNKNOWN, NOTHING, "e")


def test_an_event_without_an_id_gets_one_that_tells_events_apart() -> None:
    nameless = [report(status) | {"id": None} for status in ("Delivered", "Bounced")]
    first, second = parsed(*nameless).events
    assert first.event_id != second.event_id
    assert parsed(*nameless) == parsed(*nameless)


def test_what_cannot_be_read_of_a_batch_is_kept_since_a_refusal_would_drop_it() -> None:
    found = PROVIDER.parse(Delivery(b'[7, {"id": "x"}, ' + json.dumps(report()).encode() + b"]", {}))
    assert [event.kind for event in found.events] == [Kind.UNKNOWN, Kind.UNKNOWN, Kind.DELIVERED]
    assert [event.raw for event in found.events[:2]] == [b"7", b'{"id": "x"}']
    assert found.anomalies == {"damaged": 2}


@pytest.mark.parametrize("body", [b"", b"prose", b"[]", b"{}", b"7", b'{"id":"e"}', b'{"eventType":7.5}'])
def test_a_body_that_is_no_event_is_refused(body: bytes) -> None:
    with pytest.raises(BadPayload):
        PROVIDER.parse(Delivery(body, {}))


# --- handshakes


def test_a_subscription_is_validated_by_repeating_its_code() -> None:
    found = PROVIDER.parse(Delivery(fixture("azure_acs/subscription_validation.json"), {}))
    assert (list(found.events), found.control) == ([], "subscription_validation")
    assert found.answer is not None
    assert found.answer.body == b'{"validationResponse": "6F2B8E1D-INVENTED"}'
    assert found.answer.headers == {"Content-Type": "application/json"}


@pytest.mark.parametrize("code", [None, "", 7.5, {}])
def test_a_validation_without_a_code_is_an_event_like_any_other(code: object) -> None:
    found = parsed({"id": "v", "eventType": "Microsoft.EventGrid.SubscriptionValidationEvent", "data": {"c": code}})
    assert [event.kind for event in found.events] == [Kind.UNKNOWN]
    assert found.answer is None


async def test_options_is_answered_with_the_permission_and_nothing_else() -> None:
    request = Delivery(
        json.dumps([report()]).encode(), {"webhook-request-origin": "eventgrid.azure.net"}, "OPTIONS", "secret=x"
    )
    assert await PROVIDER.verify(request, Feed("main", "azure_acs"), NOW, no_fetch) == Verified()
    found = PROVIDER.parse(request)
    assert (list(found.events), found.control) == ([], "webhook_validation")
    assert found.answer is not None
    assert found.answer.headers == {"WebHook-Allowed-Origin": "eventgrid.azure.net", "WebHook-Allowed-Rate": "*"}
    assert found.answer.body == b""
    assert PROVIDER.facts.methods == ("POST", "OPTIONS")


@pytest.mark.parametrize("origin", [None, "", " ", "größe", "two words", "a\nb", "\udcff", "x" * 300])
def test_options_without_a_usable_origin_is_refused(origin: str | None) -> None:
    headers = {} if origin is None else {"webhook-request-origin": origin}
    with pytest.raises(BadPayload):
        PROVIDER.parse(Delivery(b"", headers, "OPTIONS"))


# --- what is Azure's and what isn't


async def verdict(request: Delivery, *secrets: str) -> str:
    judged = await PROVIDER.verify(request, Feed("main", "azure_acs", secrets), NOW, no_fetch)
    return judged.reason if isinstance(judged, Refused) else "verified" if judged == Verified() else repr(judged)


async def test_only_the_secret_in_the_url_or_a_header_makes_a_delivery_azures() -> None:
    assert await verdict(Delivery(b"[]", {}, query="secret=value"), "query:secret=value") == "verified"
    assert await verdict(Delivery(b"[]", {"x-own": "value"}), "header:X-Own=value") == "verified"
    assert await verdict(Delivery(b"[]", {}, query="secret=other"), "query:secret=value") == "signature"
    assert await verdict(Delivery(b"[]", {"authorization": "Bearer other"}), "bearer:t") == "signature"
    assert await verdict(Delivery(b"[]", {"aeg-event-type": "SubscriptionValidation"}), "bearer:t") == "missing"
    assert await verdict(Delivery(b"[]", {}), "plain") == "no_secret"
    assert await verdict(Delivery(b"[]", {})) == "no_secret"


def test_no_answer_makes_azure_drop_an_event_while_a_secret_is_changed() -> None:
    assert PROVIDER.facts.refused_status == PROVIDER.facts.busy_status == 503


def test_a_secret_that_no_request_can_carry_is_objected_to() -> None:
    objection = PROVIDER.objection("secrets", "plain")  # type: ignore[attr-defined]
    assert objection == (
        "verifies nothing, since Event Grid signs no webhook: write query:name=value or header:Name=value"
    )
    assert PROVIDER.objection("secrets", "query:secret=value") is None  # type: ignore[attr-defined]
    assert PROVIDER.objection("topics", "plain") is None  # type: ignore[attr-defined]


# --- stamp and sample


def test_the_stamp_is_an_operation_id_made_of_the_key() -> None:
    stamp = PROVIDER.stamp(KEY)
    assert (stamp.headers, stamp.message_id) == ({"Operation-Id": OPERATION}, OPERATION)
    assert (stamp.body, stamp.smtp_headers) == ({}, {})
    assert PROVIDER.stamp("order-1042").message_id == "2c0136b5-5e29-591f-a90b-61a8cf978514"
    assert uuid.uuid5(uuid.NAMESPACE_URL, "urn:esp-reconciler:wire-key") == NAMESPACE
    assert PROVIDER.facts.echoes_key is False
    assert PROVIDER.facts.same_key_window is None


async def test_a_sample_is_about_the_operation_of_its_key() -> None:
    sample = PROVIDER.sample("delivered", KEY, Feed("main", "azure_acs", ("query:secret=value",)), NOW)
    assert await verdict(sample, "query:secret=value") == "verified"
    (event,) = PROVIDER.parse(sample).events
    assert (event.kind, event.message_id, event.occurred_at) == (Kind.DELIVERED, OPERATION, NOW)
    with pytest.raises(NoSample, match="no credential to carry"):
        PROVIDER.sample("delivered", KEY, Feed("main", "azure_acs"), NOW)


# --- look-up


ASKED = Query(NOW - timedelta(hours=1), NOW, KEY, ANA, MESSAGE)


async def looked_up(answer: object, status: int = 200) -> list[Event]:
    def spoil(_: web.Request) -> web.Response:
        return web.json_response(answer, status=status)

    async with asked("azure_acs", Fake([]), spoil) as (feed, api):
        return await search("azure_acs", feed, api, ASKED)


@pytest.mark.parametrize(
    ("status", "kind", "testimony"),
    [
        ("NotStarted", Kind.QUEUED, YES),
        ("Running", Kind.QUEUED, YES),
        ("Succeeded", Kind.SENT, YES),
        ("Failed", Kind.FAILED, NO),
        ("Canceled", Kind.FAILED, NO),
        ("Teleported", Kind.UNKNOWN, NOTHING),
    ],
)
async def test_the_status_of_an_operation_is_testimony(status: str, kind: Kind, testimony: Testimony) -> None:
    (event,) = await looked_up({"id": MESSAGE, "status": status, "error": None})
    assert (event.kind, event.testimony, event.message_id, event.send_key) == (kind, testimony, MESSAGE, None)


ANSWERS = {
    "api_send_accepted": (MESSAGE, YES, Kind.QUEUED),
    "api_operation_status": (MESSAGE, YES, Kind.SENT),
}
"""What is answered to a send and to a look-up: the id as a confirmation stores it, what it proves, and its kind."""


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answer_has_the_message_id_of_its_events_and_is_read_as_an_operation(name: str) -> None:
    answer = json.loads(fixture(f"azure_acs/{name}.json"))
    (event,) = await looked_up(answer)
    assert (answer["id"].strip("<> "), event.testimony, event.kind) == ANSWERS[name]
    (report,) = PROVIDER.parse(Delivery(fixture("azure_acs/delivery_report_delivered.json"), {})).events
    assert event.message_id == report.message_id == MESSAGE


async def test_the_reason_of_a_failed_operation_is_told() -> None:
    (event,) = await looked_up({"id": MESSAGE, "status": "Failed", "error": {"code": "c", "message": "no recipient"}})
    assert event.reason == "no recipient"


async def test_an_operation_that_is_not_there_is_nothing() -> None:
    assert await looked_up({"error": {"code": "NotFound"}}, 404) == []


async def test_an_id_is_one_part_of_the_address_whatever_is_in_it() -> None:
    odd = Query(NOW - timedelta(hours=1), NOW, KEY, ANA, "a/../b?c#d%2F")
    fake = Fake([])
    async with asked("azure_acs", fake) as (feed, api):
        assert await search("azure_acs", feed, api, odd) == []
    assert fake.requests[0].raw_path == "/emails/operations/a%2F..%2Fb%3Fc%23d%252F?api-version=2023-03-31"


async def test_another_operation_than_the_one_asked_for_is_garbage() -> None:
    with pytest.raises(ApiError, match="garbage"):
        await looked_up({"id": OPERATION, "status": "Succeeded"})


async def test_it_is_asked_by_id_at_the_resources_own_endpoint_with_a_token() -> None:
    fake = Fake([Sent(KEY, message_id=MESSAGE)])
    async with asked("azure_acs", fake) as (feed, api):
        assert len(await search("azure_acs", feed, api, ASKED)) == 1
        (request,) = fake.requests
        assert request.path_qs == f"/emails/operations/{MESSAGE}?api-version=2023-03-31"
        assert request.headers["Authorization"] == "Bearer entra-token"
        with pytest.raises(ApiError, match="refused"):
            await search("azure_acs", feed, api, Query(NOW - timedelta(hours=1), NOW))
        with pytest.raises(ApiError, match=r"feeds\.main\.api_url"):
            await search("azure_acs", Feed("main", "azure_acs", api_key="token"), api, ASKED)
