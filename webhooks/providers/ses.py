# SPDX-License-Identifier: Apache-2.0
"""Amazon SES (API v2 and SMTP); its events arrive through SNS, EventBridge or queues, all as the same record.

An SES record holds no event id, and one fact reaches us with another envelope id on each road: by SNS, by EventBridge,
as an event (`eventType`) and as an identity notification (`notificationType`). So the event id is always derived from
the record's content, and is the same on all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from webhooks import sns
from webhooks.asking import Api, Change, credential
from webhooks.aws import ask, do
from webhooks.aws_policy import grant
from webhooks.aws_topic import Way, queue_changes, subscription_changes, topic_changes, way_to
from webhooks.event import Event, Kind, Testimony, derived_id
from webhooks.payload import SHORT, at, first, id_at, iso_time, list_at, load_or_none, load_shared, short, text_at
from webhooks.provider import BadPayload, Delivery, Facts, Feed, Fetch, NoSample, Parsed, Provider, Stamp, Verdict
from webhooks.reply import Reply, all_mean, by_code, by_ids, each, is_success, unclear

FACTS: Final = Facts(
    title="Amazon SES (API v2, SMTP)",
    key_slot=(
        "EmailTags send_key, back in mail.tags.send_key[0]; header X-Send-Key, back in mail.headers; by SMTP"
        " X-SES-MESSAGE-TAGS. Tags take [A-Za-z0-9_-] and need a configuration set [SES-DG send-email, BC MessageTag]"
    ),
    first_evidence="Send: the request was successful and SES will attempt to deliver [BC EventDestination]",
    event_id="none in the record; derived from message id, type, recipient, time and feedback id [SNS-HH, AM-SES]",
    authentication=(
        "SNS: RSA signature of the envelope, version 1 (SHA-1) or 2 (SHA-256), by a certificate on the SNS host of the"
        " topic's region, topics on an allow-list; raw delivery has no signature. SQS: IAM [SNS-DG verify, SNS-RAW]"
    ),
    signs_body=True,
    signs_time=True,
    by_topics=True,
    redelivery=(
        "SNS to HTTPS: 3 retries 20 s apart, at most 1 h with an own delivery policy, never after a 4xx: give the"
        " subscription a dead-letter queue. SNS to SQS: 23 days [SNS-DG retries, prepare, dlq]"
    ),
    redelivers_for=timedelta(minutes=1),
    look_up=(
        "not asked: GetMessageInsights takes a message id, which a lost answer did not give (VDM on, 1 call/s); by"
        " recipient and time there is only CreateExportJob, a file whose columns were not found [BC]"
    ),
    registration=(
        "sesv2 CreateConfigurationSetEventDestination with an SnsDestination in a configuration set (api_scope), then"
        " sns Subscribe (https, raw delivery off, SignatureVersion 2; or sqs); the receiver confirms subscriptions of"
        " the feed's topics [BC, SES-DG]"
    ),
    sources=(
        "BC: boto/botocore sesv2/2019-09-27; SES-API: its v2 reference, TrackingConfigurationOverrides; SES-DG: Amazon"
        " SES developer guide (event-publishing-*, notification-contents); SNS-DG: Amazon SNS developer guide; SNS-HH:"
        " its http-header page; SNS-RAW: its raw-message-delivery page; AM-SES: django-anymail's notes on Amazon SES"
    ),
    tolerance=timedelta(hours=8),  # SNS signs the time of publishing, not of the attempt
    fills_queues=True,
    native_key="none: neither SendEmail nor SendBulkEmail takes a token of any kind, whatever articles say [BC]",
    setup=(
        "Make a configuration set and a standard SNS topic in one region; send each message with that set, or no event",
        "Set topics to the topic's ARN and api_scope to the set's name here; `endpoints apply` then does steps 3 to 7",
        "Topic > Access policy: let ses.amazonaws.com publish to it; by API or CLI set its SignatureVersion to 2",
        "Topic > Create subscription: HTTPS, {url}, raw message delivery off; the running receiver confirms it",
        "Better, SQS: set queue_url here, subscribe the queue, let sns.amazonaws.com send to it in its access policy",
        "Configuration set > Event destinations > Add: Amazon SNS, the topic, all types; Opens and Clicks change mails",
        "Give an HTTPS subscription a dead-letter queue: SNS gives up after a minute, and at once after a 4xx",
        "Send with the EmailTags and the header X-Send-Key of the stamp; nothing else is to be switched on for the key",
        "Switch the SDK's own retries off when sending (total_max_attempts 1): they send again without anybody seeing",
    ),
    key_is_echoed_in=(
        "every event of a configuration set; identity notifications only with original headers included, and no"
        " headers over 10 KB"
    ),
)


class _Type(NamedTuple):
    kind: Kind
    testimony: Testimony
    detail: str
    """Name of the object that holds what is particular to the event."""
    recipients: tuple[str, ...] = ()
    """Where the event names its recipients; empty where it doesn't."""


_ACCEPTED: Final = Testimony.ACCEPTED
_REJECTED: Final = Testimony.REJECTED
_NONE: Final = Testimony.NONE
_DESTINATION: Final = ("mail", "destination")
MEANINGS: Final = {
    "Send": _Type(Kind.SENT, _ACCEPTED, "send", _DESTINATION),
    "Delivery": _Type(Kind.DELIVERED, _ACCEPTED, "delivery", ("delivery", "recipients")),
    "Bounce": _Type(Kind.BOUNCED, _ACCEPTED, "bounce", ("bounce", "bouncedRecipients")),
    "Complaint": _Type(Kind.COMPLAINED, _ACCEPTED, "complaint", ("complaint", "complainedRecipients")),
    "Reject": _Type(Kind.REJECTED, _REJECTED, "reject", _DESTINATION),
    "Rendering Failure": _Type(Kind.FAILED, _REJECTED, "failure", _DESTINATION),
    "DeliveryDelay": _Type(Kind.DEFERRED, _ACCEPTED, "deliveryDelay", ("deliveryDelay", "delayedRecipients")),
    "Open": _Type(Kind.OPENED, _ACCEPTED, "open"),
    "Click": _Type(Kind.CLICKED, _ACCEPTED, "click"),
    "Subscription": _Type(Kind.SUBSCRIBED, _ACCEPTED, "subscription"),
    "Received": _Type(Kind.INBOUND, _NONE, "receipt"),
}
"""What each `eventType` or `notificationType` means and proves [SES-DG contents, notification-contents]."""
_UNKNOWN: Final = _Type(Kind.UNKNOWN, _NONE, "")

VALIDATION: Final = "Successfully validated SNS topic for Amazon SES event publishing."
"""The sentence that SES publishes, as it is, after an event destination was added [AM-SES]."""

_SUBSCRIBED: Final = "AmazonSnsSubscriptionSucceeded"
_STEPS: Final = 8
"""Envelopes and texts within texts that are opened; EventBridge within SNS within SQS takes three."""
_ADDRESS: Final = re.compile(r"[^\s<>@]+@[^\s<>@]+")
_NEVER_TRIED: Final = ("Suppressed", "OnAccountSuppressionList")
"""Sub-types of bounces and complaints about messages that SES took but never attempted to send [SES-DG contents]."""
_WANTED: Final = (
    "SEND",
    "REJECT",
    "BOUNCE",
    "COMPLAINT",
    "DELIVERY",
    "RENDERING_FAILURE",
    "DELIVERY_DELAY",
    "SUBSCRIPTION",
)
"""Types that are switched on [BC EventType]; OPEN and CLICK make SES put a pixel and its links in [SES-API]."""
_TELLS_APART: Final = ("feedbackId", "link", "ipAddress", "userAgent")
_KINDS: Final = ("bounceType", "bounceSubType", "complaintSubType", "complaintFeedbackType", "delayType")
_REASONS: Final = (*_KINDS, "reason", "errorMessage")


class _Record(NamedTuple):
    raw: bytes
    """The innermost JSON text that holds the record, byte by byte."""
    fields: dict[str, Any]
    published: datetime | None
    """When the outermost envelope that says so was made."""
    bridged: bool
    """Whether EventBridge brought it."""


class _Recipient(NamedTuple):
    address: str | None
    diagnosis: str | None = None


_REPLIES: Final = MappingProxyType(
    all_mean("rejected", "MessageRejected", "BadRequestException", "MESSAGE_REJECTED", "INVALID_PARAMETER")
    | all_mean("rejected", "InvalidParameterValue", "ValidationError")
    | all_mean("not_sent", "Throttling", "ConfigurationSetDoesNotExist", "TemplateDoesNotExist")
    | all_mean("not_sent", "AccountSendingPausedException", "ConfigurationSetSendingPausedException")
    | all_mean("not_sent", "AccountSuspendedException", "SendingPausedException", "LimitExceededException")
    | all_mean("not_sent", "MailFromDomainNotVerifiedException", "NotFoundException", "TooManyRequestsException")
    | all_mean("not_sent", "AccessDeniedException", "ExpiredTokenException", "ThrottlingException", "RequestExpired")
    | all_mean("not_sent", "MAIL_FROM_DOMAIN_NOT_VERIFIED", "CONFIGURATION_SET_NOT_FOUND", "TEMPLATE_NOT_FOUND")
    | all_mean("not_sent", "ACCOUNT_SUSPENDED", "ACCOUNT_THROTTLED", "ACCOUNT_DAILY_QUOTA_EXCEEDED")
    | all_mean("not_sent", "INVALID_SENDING_POOL_NAME", "ACCOUNT_SENDING_PAUSED", "CONFIGURATION_SET_SENDING_PAUSED")
    | all_mean("not_sent", "TRANSIENT_FAILURE")
    | all_mean("ambiguous", "FAILED", "RequestAbortedException")
)
"""What errors (API v2 and v1) and the Status of SendBulkEmail's entries prove, others nothing: 400 is also answered to
what may be tried again [BC; the errors of every AWS service: AWS documents]."""
_V1_CODE: Final = re.compile(rb"<Code>([A-Za-z0-9.]{1,60})</Code>")


class Ses:
    """Amazon SES as the receiver and the sender's side know it."""

    name: Final = "ses"
    facts: Final = FACTS

    def stamp(self, wire_key: str) -> Stamp:
        """Return tag and header: identity notifications have no tags, and long headers are cut from events.

        The body is that of SendEmail with `Content.Simple`. Raw content takes X-Send-Key among its own headers.
        """
        return Stamp(
            body={
                "EmailTags": [{"Name": "send_key", "Value": wire_key}],
                "Content": {"Simple": {"Headers": [{"Name": "X-Send-Key", "Value": wire_key}]}},
            },
            smtp_headers={"X-Send-Key": wire_key, "X-SES-MESSAGE-TAGS": f"send_key={wire_key}"},
        )

    def read_reply(self, status: int, headers: Mapping[str, str], body: bytes) -> list[Reply]:
        """Return what SendEmail, or each entry of SendBulkEmail, came to."""
        said = load_or_none(body)
        if not is_success(status):
            name = headers.get("x-amzn-errortype") or text_at(said, "__type") or _code_of_v1(body)
            code = name.partition(":")[0].rpartition("#")[2]
            return [by_code(status, code if code in _REPLIES else None, _REPLIES)]
        results = at(said, "BulkEmailEntryResults")
        if isinstance(results, list) and results:
            return each(_bulk_reply(status, result) for result in results)
        message_id = id_at(said, "MessageId")
        return by_ids(status, [message_id]) if message_id else [unclear(status)]

    async def verify(self, delivery: Delivery, feed: Feed, now: datetime, fetch: Fetch) -> Verdict:
        """Say whether one of the feed's SNS topics signed the delivery, or the request carries a credential."""
        return await sns.verify(delivery, feed, now, fetch)

    def parse(self, delivery: Delivery) -> Parsed:
        """Return one event a recipient, out of SNS and EventBridge envelopes in any order or of a bare record."""
        value = _load(delivery.body)
        about_subscription = sns.control(value) if isinstance(value, dict) else None
        return about_subscription or _read(_unwrap(delivery.body, value))

    def sample(self, kind: str, wire_key: str, feed: Feed, now: datetime) -> Delivery:  # noqa: ARG002
        """Raise NoSample: only AWS has the key that signs SNS messages."""
        raise NoSample(
            "only AWS can sign SNS messages: send a stamped mail to the SES mailbox simulator instead"
            " (success@, bounce@, complaint@ or suppressionlist@simulator.amazonses.com)"
        )

    def objection(self, setting: Literal["secrets", "topics"], value: str) -> str | None:
        """Return what is wrong with a topic that is no ARN."""
        if setting != "topics" or sns.topic_host(value):
            return None
        return "is no ARN of an SNS topic: write arn:aws:sns:REGION:ACCOUNT:NAME"

    async def changes(self, url: str, feed: Feed, api: Api) -> list[Change]:  # noqa: ARG002 - AWS has clients of its own
        """Return what is missing on the way from configuration set to topic, and from there to `url` or our queue.

        Configuration set, topic and queue have to exist; what leads elsewhere is left alone.
        """
        configuration_set = credential(feed.api_scope, "api_scope", feed)
        way = await way_to(url, feed)
        return [
            *await topic_changes(way, "the configuration set", _publishes(way.topic, configuration_set)),
            *await queue_changes(way),
            *await subscription_changes(way),
            *await _destination_changes(way, configuration_set),
        ]


def _code_of_v1(body: bytes) -> str:
    """Return the code of an error of the API v1, which answers in XML."""
    found = _V1_CODE.search(body)
    return found[1].decode() if found else ""


def _bulk_reply(status: int, result: object) -> Reply:
    name = text_at(result, "Status")
    return by_ids(status, [id_at(result, "MessageId")])[0] if name == "SUCCESS" else by_code(status, name, _REPLIES)


def _load(raw: bytes) -> Any:
    # The sentence says in prose what identity notifications say in JSON.
    return {"notificationType": _SUBSCRIBED} if raw.strip() == VALIDATION.encode() else load_shared(raw)


def _unwrap(raw: bytes, value: Any) -> _Record:
    published, bridged = None, False
    for _ in range(_STEPS):
        if isinstance(value, str):
            raw = value.encode("utf-8", "surrogatepass")
            value = _load(raw)
        elif at(value, "Type") == sns.NOTIFICATION:
            published = published or iso_time(at(value, "Timestamp"))
            value = at(value, "Message")
        elif at(value, "detail-type"):
            published, bridged = published or iso_time(at(value, "time")), at(value, "source") == "aws.ses"
            value = at(value, "detail")
        elif isinstance(value, dict):
            return _Record(raw, value, published, bridged)
    raise BadPayload("no SES record in it, or too many envelopes around it")


def _read(record: _Record) -> Parsed:
    fields = record.fields
    name = text_at(fields, "eventType") or text_at(fields, "notificationType") or ""
    if name == _SUBSCRIBED:
        return Parsed(control="topic_validation")
    if record.bridged and not name:
        return Parsed(control="account_notice")  # advisor recommendations, sending enabled or disabled
    found = MEANINGS.get(name, _UNKNOWN)
    if not isinstance(at(fields, "mail"), dict) or (found is _UNKNOWN and not text_at(fields, "mail", "messageId")):
        raise BadPayload("no SES record: neither a known event type nor a message id")
    return Parsed([_event(record, name, found, recipient) for recipient in _recipients(fields, found)])


def _event(record: _Record, name: str, found: _Type, recipient: _Recipient) -> Event:
    fields, detail = record.fields, at(record.fields, found.detail)
    message_id = id_at(fields, "mail", "messageId")
    return Event(
        kind=Kind.UNSUBSCRIBED if _opted_out(detail) else found.kind,
        testimony=_REJECTED if _never_tried(detail) else found.testimony,
        message_id=message_id,
        event_id=derived_id("ses", message_id, name, recipient.address, *_telling(fields, found)),
        send_key=None if found.kind is Kind.INBOUND else _send_key(fields),  # others write what comes in
        recipient=recipient.address,
        occurred_at=_time(detail) or iso_time(at(fields, "mail", "timestamp")) or record.published,
        reason=short(name) if found is _UNKNOWN else _reason(detail, recipient.diagnosis),
        raw=record.raw,
    )


def _telling(fields: dict[str, Any], found: _Type) -> list[str | None]:
    # What tells apart two events of one type about one message and recipient; the envelope must have no part in it.
    detail = at(fields, found.detail)
    time = _time(detail)
    parts = [
        time.isoformat() if time else text_at(detail, "timestamp"),
        *(text_at(detail, part) for part in _TELLS_APART),
    ]
    if found is _UNKNOWN:
        parts.append(_content(fields))
    if not text_at(fields, "mail", "messageId"):  # emulators
        parts += [_send_key(fields), text_at(fields, "mail", "timestamp")]
    return parts


def _content(fields: dict[str, Any]) -> str | None:
    try:
        return json.dumps({**fields, "eventType": None, "notificationType": None}, sort_keys=True)
    except RecursionError:  # nested more deeply than can be written, though not than can be read
        return None


def _recipients(fields: dict[str, Any], found: _Type) -> list[_Recipient]:
    """Return whom the event is about: those it names, else the only destination, else nobody in particular."""
    named = [_recipient(entry) for entry in (list_at(fields, *found.recipients) if found.recipients else ())]
    if named := [recipient for recipient in named if recipient.address]:
        return named
    destination = list_at(fields, *_DESTINATION)
    return [_recipient(destination[0]) if len(destination) == 1 else _Recipient(None)]


def _recipient(entry: object) -> _Recipient:
    if isinstance(entry, str):
        return _Recipient(entry or None)
    return _Recipient(text_at(entry, "emailAddress"), text_at(entry, "diagnosticCode"))


def _send_key(fields: dict[str, Any]) -> str | None:
    tag = at(fields, "mail", "tags", "send_key")
    tagged = text_at(tag[0] if isinstance(tag, list) and tag else tag)
    headers = list_at(fields, "mail", "headers")
    named = (text_at(header, "value") for header in headers if (text_at(header, "name") or "").lower() == "x-send-key")
    return tagged or first(named)


def _time(detail: object) -> datetime | None:
    return iso_time(at(detail, "timestamp"))


def _never_tried(detail: object) -> bool:
    return at(detail, "bounceSubType") in _NEVER_TRIED or at(detail, "complaintSubType") in _NEVER_TRIED


def _opted_out(detail: object) -> bool:
    return bool(_refused(at(detail, "newTopicPreferences")) - _refused(at(detail, "oldTopicPreferences")))


def _refused(preferences: object) -> set[str | None]:
    topics = list_at(preferences, "topicSubscriptionStatus")
    refused = {text_at(topic, "topicName") for topic in topics if at(topic, "subscriptionStatus") == "OptOut"}
    return refused | ({"*"} if at(preferences, "unsubscribeAll") is True else set())


def _reason(detail: object, diagnosis: str | None) -> str | None:
    words = "/".join(word for part in _REASONS if (word := text_at(detail, part)))
    # Cut before the addresses are looked for, which takes time quadratic in the length of a word.
    text = ": ".join(part[: 2 * SHORT] for part in (words, diagnosis) if part)
    return short(_ADDRESS.sub("<address>", text))


def _publishes(topic: str, configuration_set: str) -> dict[str, Any]:
    """Return the grant that lets the configuration set publish to the topic."""
    _, partition, _, region, account, _ = topic.split(":", 5)
    source = f"arn:{partition}:ses:{region}:{account}:configuration-set/{configuration_set}"
    return grant("ses.amazonaws.com", "sns:Publish", topic, {"AWS:SourceAccount": account, "AWS:SourceArn": source})


async def _destination_changes(way: Way, configuration_set: str) -> list[Change]:
    place = {"ConfigurationSetName": configuration_set}
    answer = await ask(way.feed, "sesv2", "get_configuration_set_event_destinations", **place)
    there = answer.get("EventDestinations", [])
    ours = [found for found in there if at(found, "SnsDestination", "TopicArn") == way.topic]
    on = {kind for found in ours if found.get("Enabled") for kind in found["MatchingEventTypes"]}
    off = [kind for kind in _WANTED if kind not in on]
    if not off:
        return []
    verb, name, kinds = "create", f"esp-reconciler-{derived_id(way.topic)[:8]}", list(_WANTED)
    if ours:
        verb, name, kinds = "update", ours[0]["Name"], [*dict.fromkeys([*ours[0]["MatchingEventTypes"], *_WANTED])]
    destination = {"Enabled": True, "MatchingEventTypes": kinds, "SnsDestination": {"TopicArn": way.topic}}
    change = partial(do, way.feed, "sesv2", f"{verb}_configuration_set_event_destination", **place)
    change = partial(change, EventDestinationName=name, EventDestination=destination)
    return [Change(f"configuration set: {verb} event destination {name} with {', '.join(off)}", change)]


PROVIDER: Final[Provider] = Ses()
