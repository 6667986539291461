# SPDX-License-Identifier: Apache-2.0
"""Azure Communication Services Email: reports through Event Grid, matched by an operation id that we choose."""

from __future__ import annotations

import json
import re
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from datetime import datetime, timedelta
from http import HTTPStatus
from types import MappingProxyType
from typing import Final, Literal
from urllib.parse import quote

import msgspec

from webhooks.asking import Api, ApiError, Query, bearer, credential
from webhooks.event import Event, Kind, Testimony, bounded_id, derived_id, unread
from webhooks.payload import at, first, id_at, iso_time, load_object, load_or_none, short, split, text_at
from webhooks.provider import (
    UNKNOWN,
    BadPayload,
    Delivery,
    Facts,
    Feed,
    Fetch,
    Handshake,
    Meanings,
    Parsed,
    Provider,
    Stamp,
    Verdict,
    Verified,
    sampled_name,
)
from webhooks.reply import Reply, by_ids, is_success
from webhooks.signature import credential_objection, credential_only, sample_delivery

FACTS: Final = Facts(
    title="Azure Communication Services Email (Event Grid)",
    key_slot=(
        "no slot for our key: custom headers don't come back. Request header Operation-Id holds a GUID that we make of"
        " the key (uuid5); it comes back as data.messageId [azure-communication-email 1.1.0 begin_send(operation_id),"
        " Azure/azure-sdk-for-net#40779]"
    ),
    first_evidence=(
        "none before the delivery report of each recipient; the status of the operation is known earlier, by look-up"
        " [MicrosoftDocs/azure-docs event-grid/communication-services-email-events.md]"
    ),
    event_id=(
        "id, the same on each redelivery; Event Grid delivers at least once and in no order, and duplicates may be"
        " received [MicrosoftDocs/azure-docs event-grid/delivery-and-retry.md]"
    ),
    authentication=(
        "nothing is signed. secrets: query:name=value for a secret in the endpoint's URL, or header:Name=value for a"
        " static delivery property; an Entra token is not verified here. The handshake by OPTIONS carries no event and"
        " is answered without a secret [MicrosoftDocs/azure-docs event-grid/webhook-event-delivery.md,"
        " delivery-properties.md]"
    ),
    signs_body=False,
    signs_time=False,
    redelivery=(
        "after 10 s, 30 s, 1, 5, 10, 30 min, 1 h, then hourly, for 24 hours or 30 attempts, until 200 to 204 within"
        " 30 s; 400, 401, 403 and 413 are never repeated and the event is dropped, so a wrong secret is answered 503"
        " [MicrosoftDocs/azure-docs event-grid/delivery-and-retry.md]"
    ),
    redelivers_for=timedelta(hours=24),
    look_up=(
        "by the id that we chose: GET /emails/operations/{id} at api_url, the resource's own endpoint. api_key is an"
        " Entra access token, which lives for about an hour (memory); access keys sign the time of each request and are"
        " not supported here. 404 means that there was no such operation (assumed; a 404 about a delivered mail was"
        " reported once: Azure/azure-sdk-for-python#35849). How soon it shows a send and how long it keeps it was not"
        " found: 15 min are allowed for [learn.microsoft.com/rest/api/communication/email,"
        " learn.microsoft.com/rest/api/communication/authentication]"
    ),
    registration=(
        "an event subscription of the Communication Services resource, by portal, CLI or ARM; validated by an event"
        " that is answered {validationResponse: code}, with the CloudEvents schema by OPTIONS"
        " [MicrosoftDocs/azure-docs event-grid/webhook-event-delivery.md]"
    ),
    sources=(
        "github.com/MicrosoftDocs/azure-docs articles/event-grid, learn.microsoft.com/rest/api/communication, package"
        " azure-communication-email 1.1.0, learn.microsoft.com @azure/eventgrid AcsEmailDeliveryReportStatus"
    ),
    refused_status=503,
    methods=("POST", "OPTIONS"),
    native_key=(
        "none that a stored request can use: Repeatability-Request-Id with Repeatability-First-Sent replays the first"
        " answer for 5 minutes (409 in progress, 412 too old), but needs the time of the first attempt, and the SDKs"
        " draw both anew [learn.microsoft.com/rest/api/communication/repeatable-requests]; what a repeated Operation-Id"
        " does was not found"
    ),
    finds_by="id",
    setup=(
        "Set secrets to query:secret=VALUE here, with a long random VALUE, before the next step calls the endpoint",
        "Portal > the resource > Events > Event Subscription: endpoint type Web Hook, endpoint {url}?secret=VALUE",
        "Tick Email Delivery Report Received and Email Engagement Tracking Report Received; either schema is read",
        "Send with the stamp's header Operation-Id (SDK: operation_id); nothing else ties an event to its send",
        "Give the stamp's message_id to the claim as known_message_id",
        "Send to one recipient at a time: the operation is one for all of them",
        "Switch on dead-lettering to a storage account: what is not delivered within 24 hours is lost without it",
        "Opens and clicks need user engagement tracking, on the sending domain and in the message",
        "For look-ups set api_url to the resource's endpoint, https://NAME.REGION.communication.azure.com",
        "Set api_key to an Entra access token for https://communication.azure.com/.default, which you renew",
    ),
    echoes_key=False,
    key_is_echoed_in="no event; the message id is data.messageId, which is the Operation-Id that we chose",
    first_event_is_delivery=True,
)

NAMESPACE: Final = uuid.UUID("fa97fbdb-5f72-5643-8835-c6dfa189100e")
"""The namespace of operation ids: `uuid5(uuid.NAMESPACE_URL, "urn:esp-reconciler:wire-key")`. It can never change: a
send that is still open would be looked for under another id."""

_ACCEPTED: Final = Testimony.ACCEPTED
_REJECTED: Final = Testimony.REJECTED

MEANINGS: Final[Meanings] = MappingProxyType(
    {
        "Delivered": (Kind.DELIVERED, _ACCEPTED),
        "Expanded": (Kind.SENT, _ACCEPTED),  # to the members of a distribution list
        "Failed": (Kind.BOUNCED, _ACCEPTED),
        "Bounced": (Kind.BOUNCED, _ACCEPTED),
        "Quarantined": (Kind.BOUNCED, _ACCEPTED),
        "FilteredSpam": (Kind.BOUNCED, _ACCEPTED),
        "Suppressed": (Kind.REJECTED, _REJECTED),
        "view": (Kind.OPENED, _ACCEPTED),
        "click": (Kind.CLICKED, _ACCEPTED),
    }
)
"""What `data.status` of a delivery report and `data.engagementType` of an engagement report mean and prove
[MicrosoftDocs/azure-docs communication-services-email-events.md, @azure/eventgrid AcsEmailDeliveryReportStatus; that a
suppressed message is not sent: (memory)]."""

_OPERATIONS: Final[Meanings] = MappingProxyType(
    {
        "NotStarted": (Kind.QUEUED, _ACCEPTED),
        "Running": (Kind.QUEUED, _ACCEPTED),
        "Succeeded": (Kind.SENT, _ACCEPTED),
        "Failed": (Kind.FAILED, _REJECTED),
        "Canceled": (Kind.FAILED, _REJECTED),
    }
)
"""What `status` of an operation means: Succeeded is out for delivery, of a Failed one nothing was sent
[learn.microsoft.com/azure/communication-services/quickstarts/email/send-email-advanced/manually-poll-for-email-status].
"""

_DELIVERY_REPORT: Final = "Microsoft.Communication.EmailDeliveryReportReceived"
_ENGAGEMENT_REPORT: Final = "Microsoft.Communication.EmailEngagementTrackingReportReceived"
_VALIDATION: Final = "Microsoft.EventGrid.SubscriptionValidationEvent"
_TIMES: Final = (  # older documents spell TimeStamp
    *(("data", "deliveryAttemptTimestamp"), ("data", "deliveryAttemptTimeStamp")),
    *(("data", "userActionTimestamp"), ("data", "userActionTimeStamp")),
    *(("eventTime",), ("time",)),
)
_ORIGIN: Final = re.compile(r"[A-Za-z0-9.*:-]{1,253}")
_API_VERSION: Final = "2023-03-31"
_CREDENTIALS: Final = "query:name=value or header:Name=value"


class AzureAcs:
    """Azure Communication Services Email as the receiver and the sender's side know it."""

    name: Final = "azure_acs"
    facts: Final = FACTS

    def stamp(self, wire_key: str) -> Stamp:
        """Return the operation id, which comes back as the message id of all events."""
        operation_id = str(uuid.uuid5(NAMESPACE, wire_key))
        return Stamp(headers={"Operation-Id": operation_id}, message_id=operation_id)

    def read_reply(self, status: int, headers: Mapping[str, str], body: bytes) -> list[Reply]:
        """Return the one answer to all recipients; the id is the operation's, which is ours."""
        said = load_or_none(body)
        if status == HTTPStatus.PRECONDITION_FAILED:  # too late to be told what came of the first attempt
            return [Reply("ambiguous", "HTTP 412")]
        _, testimony = _OPERATIONS.get(text_at(said, "status") or "", UNKNOWN)
        if is_success(status) and testimony is Testimony.REJECTED:
            return [Reply("rejected", "operation failed")]
        message_id = id_at(said, "id") or headers.get("operation-id")
        return by_ids(status, [bounded_id(message_id).lower()] if message_id else [])

    async def verify(self, delivery: Delivery, feed: Feed, now: datetime, fetch: Fetch) -> Verdict:  # noqa: ARG002
        """Judge the credential that the request carries; OPTIONS needs none, since nothing of it is stored."""
        if delivery.method == "OPTIONS":
            return Verified()
        return credential_only(delivery, feed.secrets, _CREDENTIALS)

    def parse(self, delivery: Delivery) -> Parsed:
        """Return the events of a batch, of either schema, or the answer to a handshake."""
        if delivery.method == "OPTIONS":
            return _permission(delivery)
        whole = split(delivery.body)
        if not whole:
            raise BadPayload("an empty array: not a delivery of Event Grid")
        if len(whole) == 1 and (code := _validation_code(whole[0])):
            answer = Handshake(json.dumps({"validationResponse": code}).encode(), {"Content-Type": "application/json"})
            return Parsed(control="subscription_validation", answer=answer)
        if whole == [delivery.body]:
            return Parsed((_event(delivery.body),))
        anomalies: Counter[str] = Counter()
        return Parsed([_of_batch(raw, anomalies) for raw in whole], anomalies=anomalies)

    def sample(self, kind: str, wire_key: str, feed: Feed, now: datetime) -> Delivery:
        """Return an example report about the operation of a key, by Azure's status or a normalised kind."""
        name = sampled_name(self.name, kind, MEANINGS)
        body = msgspec.json.encode([_sample_report(name, self.stamp(wire_key).message_id, now)])
        return sample_delivery(body, feed.secrets, None, f"the feed has no credential to carry: set {_CREDENTIALS}")

    def objection(self, setting: Literal["secrets", "topics"], value: str) -> str | None:
        """Return what is wrong with a secret that no request can carry."""
        return credential_objection("Event Grid", _CREDENTIALS, value) if setting == "secrets" else None

    async def search(self, query: Query, feed: Feed, api: Api) -> AsyncIterator[Event]:
        """Yield the operation that bears the known id, if there is one."""
        token = credential(feed.api_key, "api_key", feed)
        base = credential(feed.api_url or "", "api_url", feed)
        if query.message_id is None:
            raise ApiError(
                "refused", "Azure is asked by an Operation-Id that was known before the call, and has no list"
            )
        reply = await api.call(
            "GET",
            f"{base}/emails/operations/{quote(query.message_id, safe='')}",
            headers=bearer(token),
            params={"api-version": _API_VERSION},
            expect=(HTTPStatus.NOT_FOUND,),
        )
        if reply.status != HTTPStatus.NOT_FOUND:
            yield _found(reply.value, query.message_id)


def _permission(delivery: Delivery) -> Parsed:
    # Whoever asks may deliver: what they then post needs the secret all the same.
    origin = delivery.headers.get("webhook-request-origin", "")
    if not _ORIGIN.fullmatch(origin):
        raise BadPayload("OPTIONS without WebHook-Request-Origin: not a handshake of CloudEvents")
    answer = Handshake(headers={"WebHook-Allowed-Origin": origin, "WebHook-Allowed-Rate": "*"})
    return Parsed(control="webhook_validation", answer=answer)


def _validation_code(raw: bytes) -> str | None:
    try:
        said = load_object(raw)
    except BadPayload:
        return None
    return text_at(said, "data", "validationCode") if said.get("eventType") == _VALIDATION else None


def _of_batch(raw: bytes, anomalies: Counter[str]) -> Event:
    try:
        return _event(raw)
    except BadPayload:  # a batch that is refused is dropped for good: what can't be read of it is kept
        anomalies["damaged"] += 1
        return unread(raw, "azure_acs")


def _event(raw: bytes) -> Event:
    said = load_object(raw)
    event_type = first(text_at(said, name) for name in ("eventType", "type"))
    if event_type is None:
        raise BadPayload("no eventType or type: not an event of Event Grid")
    data = at(said, "data")
    kind, testimony = _meaning(event_type, data)
    message_id, recipient = _message_id(data), text_at(data, "recipient")
    when = first(text_at(said, *path) for path in _TIMES)
    told_apart = (text_at(data, name) for name in ("status", "engagementType", "engagementContext"))
    return Event(
        kind=kind,
        testimony=testimony,
        message_id=message_id,
        event_id=id_at(said, "id") or derived_id("azure_acs", event_type, message_id, recipient, when, *told_apart),
        recipient=recipient,
        occurred_at=iso_time(when),
        reason=_reason(kind, data),
        raw=raw,
    )


def _meaning(event_type: str, data: object) -> tuple[Kind, Testimony]:
    if event_type == _DELIVERY_REPORT:
        return MEANINGS.get(text_at(data, "status") or "", UNKNOWN)
    if event_type == _ENGAGEMENT_REPORT:  # documents write View, samples view
        return MEANINGS.get((text_at(data, "engagementType") or "").lower(), UNKNOWN)
    return UNKNOWN


def _message_id(data: object) -> str | None:
    # A GUID is the same in either case; the row holds it in lower case.
    message_id = id_at(data, "messageId")
    return message_id.lower() if message_id else None


def _reason(kind: Kind, data: object) -> str | None:
    if kind not in (Kind.BOUNCED, Kind.REJECTED):
        return None
    return short(text_at(data, "status"), text_at(data, "deliveryStatusDetails", "statusMessage"))


def _found(said: object, asked: str) -> Event:
    status = text_at(said, "status")
    if status is None or (text_at(said, "id") or "").lower() != asked.lower():
        raise ApiError("garbage", "the API's answer is not the status of the operation that was asked for")
    kind, testimony = _OPERATIONS.get(status, UNKNOWN)
    return Event(
        kind=kind,
        testimony=testimony,
        message_id=asked,
        event_id=derived_id("azure_acs", "look-up", asked, status),
        reason=short(first(text_at(said, "error", name) for name in ("message", "code"))),
        raw=msgspec.json.encode(said),
    )


def _sample_report(name: str, message_id: str | None, now: datetime) -> dict[str, object]:
    when = now.isoformat()
    engagement = {"engagementType": name, "userActionTimestamp": when, "engagementContext": "https://example.com/"}
    delivery = {"status": name, "deliveryAttemptTimestamp": when}
    is_engagement = name in ("view", "click")
    return {
        "id": derived_id("sample", message_id, name, when),
        "subject": f"sender/sample@example.com/message/{message_id}",
        "eventType": _ENGAGEMENT_REPORT if is_engagement else _DELIVERY_REPORT,
        "eventTime": when,
        "dataVersion": "1.0",
        "metadataVersion": "1",
        "data": {
            "sender": "sample@example.com",
            "recipient": "sample@example.com",
            "messageId": message_id,
            **(engagement if is_engagement else delivery),
        },
    }


PROVIDER: Final[Provider] = AzureAcs()
