# SPDX-License-Identifier: Apache-2.0
"""Twilio SendGrid, v3 Mail Send and the Event Webhook.

The Event Webhook posts JSON arrays of up to 768 KB, one flat object an event and recipient, with our custom argument
among the provider's own fields.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import datetime, timedelta
from functools import partial
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import quote

import msgspec

from webhooks import asking
from webhooks.asking import Api, ApiError, Change, Query, Shown, bearer, by_halves, credential, items, needed, utc
from webhooks.event import Event, Kind, Testimony, bounded_id, derived_id, is_plain_address, unread
from webhooks.payload import at, has_doubled_names, load_object, short, split, text_at, unix_time
from webhooks.provider import (
    UNKNOWN,
    BadPayload,
    Delivery,
    Facts,
    Feed,
    Fetch,
    Parsed,
    Provider,
    Refused,
    Stamp,
    Verdict,
    sampled_name,
)
from webhooks.reply import Reply, by_ids, unclear
from webhooks.signature import (
    carries_credential,
    credential_only,
    decode_base64,
    ecdsa_public_key,
    ecdsa_sha256_matches,
    judge_age,
    octets,
    sample_delivery,
    signing_secrets,
)

FACTS: Final = Facts(
    title="Twilio SendGrid (v3 Mail Send, Event Webhook)",
    key_slot=(
        "custom_args.send_key, of the message or of a personalization (SMTP: unique_args in X-SMTPAPI); comes back at"
        " the top level of each event as send_key. Arguments named like a field of the event vanish"
        " [sendgrid/docs for-developers/tracking-events/event.md]"
    ),
    first_evidence=(
        "processed: received and ready to be delivered; known to go missing while later events arrive"
        " [sendgrid/sendgrid-python#560]"
    ),
    event_id=(
        "sg_event_id; missing on some unsubscribe events [sendgrid/docs#2862], reported to change when an event is"
        " posted again [sendgrid/sendgrid-nodejs#1435]"
    ),
    authentication=(
        "ECDSA P-256 with SHA-256 over the timestamp header and the raw body, X-Twilio-Email-Event-Webhook-Signature"
        " and -Timestamp; secrets: the public keys shown by the settings; off unless switched on, turning it off and on"
        " makes a new key without overlap [sendgrid/docs getting-started-event-webhook-security-features.md]"
    ),
    signs_body=True,
    signs_time=True,
    redelivery=(
        "at growing intervals for 24 hours until any 2xx [sendgrid/docs troubleshooting.md]; the same event three times"
        " on average and 46 times at worst was measured [sendgrid/docs#2933]"
    ),
    redelivers_for=timedelta(hours=24),
    look_up=(
        "not by our key: POST /v3/logs by recipient and time (30 days, 1,000 messages, no paging), then custom_args of"
        ' GET /v3/logs/{sg_message_id}. How late a message appears is not documented beyond "near real time": 15'
        " minutes are waited. api_key: an API key that may read Email Logs, of the subuser that sends; api_url:"
        " https://api.eu.sendgrid.com for EU subusers [twilio/sendgrid-oai tsg_logs_v3,"
        " twilio.com/docs/sendgrid/api-reference/email-logs]"
    ),
    registration=(
        "POST /v3/user/webhooks/event/settings, then PATCH .../settings/signed/{id} {enabled: true} answers the public"
        " key [twilio/sendgrid-oai tsg_webhooks_v3]"
    ),
    sources=(
        "github.com/sendgrid/docs, github.com/twilio/sendgrid-oai (2026-01), github.com/sendgrid/sendgrid-python"
        " helpers/eventwebhook, twilio.com/docs/sendgrid"
    ),
    native_key=(
        "none: mail send takes no idempotency field or header, and batch_id only cancels or pauses scheduled sends"
        " [twilio/sendgrid-oai tsg_mail_v3]"
    ),
    finds_by="recipient",
    kept_for=timedelta(days=30),
    lists=True,
    setup=(
        "Settings > Mail Settings > Event Webhooks: create a webhook with the Post URL {url}, and enable it",
        "Tick all deliverability events: processed, dropped, deferred, delivered, bounced",
        "Tick all engagement events: opened, clicked, spam reports, unsubscribes, group unsubscribes and resubscribes",
        "Enable Signed Event Webhook (it can't be while the webhook is made) and set secrets to the Verification Key",
        "Never switch signing off and on: that makes a new key, and deliveries under it are refused until it is set",
        "Send custom_args.send_key with each message, by SMTP in X-SMTPAPI unique_args; in a batch, one a recipient",
        "Confirm with the header X-Message-Id of the answer: its body is empty",
        "For look-ups, set api_key and, for EU subusers, api_url to https://api.eu.sendgrid.com",
    ),
    key_is_echoed_in=(
        "every event but asynchronous bounces, which have no message id either (sendgrid/docs#5177), and some"
        " unsubscribe events (sendgrid/docs#2862)"
    ),
)

_ACCEPTED: Final = Testimony.ACCEPTED
_REJECTED: Final = Testimony.REJECTED
_NONE: Final = Testimony.NONE

MEANINGS: Final = MappingProxyType(
    {
        "processed": (Kind.QUEUED, _ACCEPTED),
        "dropped": (Kind.REJECTED, _REJECTED),
        "delivered": (Kind.DELIVERED, _ACCEPTED),
        "deferred": (Kind.DEFERRED, _ACCEPTED),
        "bounce": (Kind.BOUNCED, _ACCEPTED),  # also what is shown as "blocked"
        "open": (Kind.OPENED, _ACCEPTED),
        "click": (Kind.CLICKED, _ACCEPTED),
        "spamreport": (Kind.COMPLAINED, _ACCEPTED),
        "unsubscribe": (Kind.UNSUBSCRIBED, _ACCEPTED),
        "group_unsubscribe": (Kind.UNSUBSCRIBED, _ACCEPTED),
        "group_resubscribe": (Kind.SUBSCRIBED, _ACCEPTED),
        "account_status_change": (Kind.UNKNOWN, _NONE),
        "cancel_drop": (Kind.REJECTED, _REJECTED),  # a cancelled scheduled send; seen in Email Logs
    }
)
"""What each value of `event` means and proves [twilio.com/docs/sendgrid/for-developers/tracking-events/event,
twilio/sendgrid-oai tsg_logs_v3]."""

_ALL_ON: Final = MappingProxyType(
    {
        "enabled": True,
        **dict.fromkeys(("processed", "dropped", "delivered", "deferred", "bounce", "open", "click"), True),
        **dict.fromkeys(("spam_report", "unsubscribe", "group_unsubscribe", "group_resubscribe"), True),
    }
)
"""The settings of a webhook that make it post all events [twilio/sendgrid-oai tsg_webhooks_v3]."""

_API: Final = "https://api.sendgrid.com"
_SETTINGS: Final = "/v3/user/webhooks/event/settings"
_MOST: Final = 1_000
"""The most messages that one search answers; there is no second page [twilio/sendgrid-oai tsg_logs_v3]."""

_OF_STATUS: Final = MappingProxyType({"bounced": "bounce", "blocked": "bounce"})
"""The statuses of Email Logs that are not named as their event is."""

_SIGNATURE: Final = "x-twilio-email-event-webhook-signature"
_TIMESTAMP: Final = "x-twilio-email-event-webhook-timestamp"
_MILLISECONDS: Final = 100_000_000_000  # no timestamp in seconds is that large; marketing samples show milliseconds
_TELLS_APART: Final = ("type", "url", "url_offset", "attempt", "asm_group_id", "useragent", "ip", "reason", "response")


class _Fields(msgspec.Struct, gc=False):
    """The fields that are read of every event, in the types they usually have."""

    event: str | None = None
    email: str | None = None
    timestamp: int | float | str | None = None
    sg_event_id: str | None = None
    sg_message_id: str | None = None
    send_key: str | None = None
    reason: str | None = None
    response: str | None = None


_FIELDS: Final = msgspec.json.Decoder(_Fields)
_NAMES: Final = re.compile(rb'"(?:event|email|timestamp|sg_event_id|sg_message_id|send_key)"')

_NOT_QUEUED: Final = 200
"""What a request in sandbox mode is answered instead of 202 [docs.sendgrid.com/for-developers/.../sandbox-mode]."""


class SendGrid:
    """Twilio SendGrid as the receiver and the sender's side know it."""

    name: Final = "sendgrid"
    facts: Final = FACTS

    def stamp(self, wire_key: str) -> Stamp:
        """Return the custom argument that makes the key come back; there is no native idempotency key."""
        arguments = {"send_key": wire_key}
        return Stamp(
            body={"custom_args": arguments},
            smtp_headers={"X-SMTPAPI": json.dumps({"unique_args": arguments})},
        )

    def read_reply(self, status: int, headers: Mapping[str, str], body: bytes) -> list[Reply]:
        """Return the one answer to all personalizations. 200, empty, instead of 202 is sandbox mode: never sent."""
        if status == _NOT_QUEUED:
            is_empty = not body and headers.get("content-length") == "0"
            return [Reply("rejected", "HTTP 200 not queued") if is_empty else unclear(status)]
        message_id = headers.get("x-message-id", "").partition(".")[0]
        return by_ids(status, [bounded_id(message_id)] if message_id else [], for_all=True)

    async def verify(self, delivery: Delivery, feed: Feed, now: datetime, fetch: Fetch) -> Verdict:  # noqa: ARG002
        """Judge the signature against each of the feed's public keys, or the credential that the request carries."""
        keys = [key for key in signing_secrets(feed.secrets) if ecdsa_public_key(key)]
        if not keys or carries_credential(delivery, feed.secrets):
            return credential_only(delivery, feed.secrets, "the webhook's public key")
        timestamp, encoded = delivery.headers.get(_TIMESTAMP), delivery.headers.get(_SIGNATURE)
        if not timestamp or not encoded:
            return Refused("missing", "not signed: switch on Signed Event Webhook in SendGrid's settings")
        signature, message = decode_base64(encoded.strip()), octets(timestamp) + delivery.body
        if not signature or not any([ecdsa_sha256_matches(key, signature, message) for key in keys]):
            return Refused("signature", "no public key of the feed fits; switching signing off and on makes a new key")
        return judge_age(timestamp, now, feed.tolerance)

    def parse(self, delivery: Delivery) -> Parsed:
        """Return one event for each element; one that can't be read is kept as unknown and counted as `damaged`."""
        anomalies: Counter[str] = Counter()
        events = [_event(raw, anomalies) for raw in split(delivery.body)]
        return Parsed(events, anomalies=anomalies)

    async def search(self, query: Query, feed: Feed, api: Api) -> AsyncIterator[Event]:
        """Yield the events of each message of a span of time, to one recipient where the query names it.

        Raises ApiError where one of a recipient's shows no key: it may be the sought one.
        """
        shown = Shown(query)
        async for message in by_halves(partial(_listed, query.recipient, feed, api), *query.seconds(), _MOST):
            if not query.may_be_to(text_at(message, "to_email")):
                continue  # its arguments need not be read
            place = f"/v3/logs/{quote(needed(message, 'sg_message_id'), safe='')}"
            for event in _found((await _call(feed, api, "GET", place)).value):
                shown.note(event, unnamed=event.send_key is None)
                yield event
        if query.recipient:
            shown.settle("a message to this recipient shows no custom argument send_key")

    async def changes(self, url: str, feed: Feed, api: Api) -> list[Change]:
        """Return what makes the webhook of this URL post all events, signed; other webhooks stay as they are."""
        reply = await _call(feed, api, "GET", f"{_SETTINGS}/all")
        hook = next((hook for hook in items(reply.value, "webhooks") if at(hook, "url") == url), None)
        if hook is None:
            return [Change("create the webhook, for all events and signed", partial(_create, url, feed, api))]
        found = []
        if off := [name for name in _ALL_ON if hook.get(name) is not True]:
            found.append(Change(f"switch on {', '.join(off)}", partial(_switch_on, hook, feed, api)))
        if not text_at(hook, "public_key"):  # it has one where signing is on
            found.append(Change("switch on the webhook's signature", partial(_sign, hook, feed, api)))
        return found

    def sample(self, kind: str, wire_key: str, feed: Feed, now: datetime) -> Delivery:
        """Return an example batch of one, where the feed has a credential that the request carries."""
        body = _sample_body(sampled_name(self.name, kind, MEANINGS), wire_key, now)
        needs = "SendGrid signs with Twilio's private key: add a secret such as header:Name=value to the feed"
        return sample_delivery(body, feed.secrets, None, needs)


def _event(raw: bytes, anomalies: Counter[str]) -> Event:
    try:
        return _built(_fields(raw, anomalies), raw)
    except BadPayload:
        anomalies["damaged"] += 1
        return unread(raw, "sendgrid")


def _fields(raw: bytes, anomalies: Counter[str]) -> _Fields:
    # Listing names is much cheaper than a parser that notices doubled ones; a false alarm only costs time.
    names = _NAMES.findall(raw)
    if len(set(names)) < len(names) and (first := has_doubled_names(raw)):
        anomalies["duplicate_keys"] += 1
        return _picked(first)
    try:
        return _FIELDS.decode(raw)
    except (msgspec.DecodeError, RecursionError):  # a field of an odd type, or odd characters
        return _picked(load_object(raw))


def _picked(value: dict[str, object]) -> _Fields:
    fields = _Fields(**{name: text_at(value, name) for name in _Fields.__struct_fields__})
    fields.timestamp = at(value, "timestamp")
    return fields


def _built(fields: _Fields, raw: bytes) -> Event:
    kind, testimony = MEANINGS.get(fields.event or "", UNKNOWN)
    message_id = (fields.sg_message_id or "").partition(".")[0]
    return Event(
        kind=kind,
        testimony=testimony,
        message_id=bounded_id(message_id) if message_id else None,
        event_id=bounded_id(fields.sg_event_id) if fields.sg_event_id else _event_id(fields, raw),
        send_key=fields.send_key or None,
        recipient=fields.email or None,
        occurred_at=_time(fields.timestamp),
        reason=short(fields.reason or (fields.response if kind is Kind.DEFERRED else None)),
        raw=raw,
    )


def _event_id(fields: _Fields, raw: bytes) -> str:
    value = load_object(raw)
    rest = [json.dumps(value.get(name), sort_keys=True) for name in _TELLS_APART]
    return derived_id("sendgrid", fields.sg_message_id, fields.event, fields.email, str(fields.timestamp), *rest)


def _time(value: object) -> datetime | None:
    if isinstance(value, (int, float)) and _MILLISECONDS < value < _MILLISECONDS * 1000:
        value = value / 1000
    return unix_time(value)


async def _call(
    feed: Feed, api: Api, method: str, path: str, value: object = None, expect: tuple[int, ...] = ()
) -> asking.ApiReply:
    login = bearer(credential(feed.api_key, "api_key", feed))
    return await api.call(method, (feed.api_url or _API) + path, headers=login, json=value, expect=expect)


async def _listed(recipient: str | None, feed: Feed, api: Api, since: int, until: int) -> list[Any]:
    """Return the messages of a span in seconds since 1970: all, or as many as one answer holds."""
    asked = {"query": _asked(recipient, since, until), "limit": _MOST}
    return items((await _call(feed, api, "POST", "/v3/logs", asked)).value, "messages")


def _asked(recipient: str | None, since: int, until: int) -> str:
    begin, end = (f'TIMESTAMP "{utc(seconds)}"' for seconds in (since, until))
    query = f"sg_message_id_created_at >= {begin} AND sg_message_id_created_at < {end}"
    # Queries are case-sensitive, and what quotes do in them is not documented: other addresses are compared here.
    return f"{query} AND to_email = '{recipient}'" if recipient and is_plain_address(recipient) else query


def _found(message: object) -> Iterator[Event]:
    """Yield the events of a message in Email Logs, each put as its webhook would; the arguments lie apart here."""
    own = {"email": text_at(message, "to_email"), "sg_message_id": needed(message, "sg_message_id")}
    status, arguments = text_at(message, "status"), at(message, "custom_args")
    if not isinstance(arguments, dict | None):
        raise ApiError("garbage", "the API's answer holds custom arguments of another form than documented")
    listed = [event for event in items(message, "events") if at(event, "event") != "received"]  # of the whole request
    for event in listed or [{"event": _OF_STATUS.get(status or "", status)}]:
        needed(event, "event")
        raw = json.dumps({**own, **event, "send_key": text_at(arguments, "send_key")}).encode()
        yield _built(_fields(raw, Counter()), raw)


async def _create(url: str, feed: Feed, api: Api) -> str:
    value = {"url": url, "friendly_name": "esp-reconciler", **_ALL_ON}
    reply = await _call(feed, api, "POST", _SETTINGS, value, expect=(HTTPStatus.BAD_REQUEST,))
    if reply.status != HTTPStatus.BAD_REQUEST:
        return await _sign(reply.value, feed, api)
    for error in items(reply.value, "errors"):
        if at(error, "url") == url:  # somebody was quicker
            return await _sign(error, feed, api)
    raise ApiError("refused", "SendGrid refused the webhook: its URL, or as many as the plan allows are there already")


async def _switch_on(hook: object, feed: Feed, api: Api) -> None:
    await _call(feed, api, "PATCH", f"{_SETTINGS}/{_id(hook)}", {"url": at(hook, "url"), **_ALL_ON})


async def _sign(hook: object, feed: Feed, api: Api) -> str:
    reply = await _call(feed, api, "PATCH", f"{_SETTINGS}/signed/{_id(hook)}", {"enabled": True})
    return f"set feeds.{feed.name}.secrets to {needed(reply.value, 'public_key')}"


def _id(hook: object) -> str:
    return quote(needed(hook, "id"), safe="")


def _sample_body(name: str, wire_key: str, now: datetime) -> bytes:
    event = {
        "email": "sample@example.com",
        "timestamp": int(now.timestamp()),
        "event": name,
        "sg_event_id": derived_id("sample", name, wire_key, now.isoformat()),
        "sg_message_id": derived_id("sample", wire_key)[:22] + ".recvd-sample.0",
        "send_key": wire_key,
    }
    return json.dumps([event]).encode() + b"\r\n"


PROVIDER: Final[Provider] = SendGrid()
