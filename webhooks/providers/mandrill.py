# SPDX-License-Identifier: Apache-2.0
"""Mandrill (Mailchimp Transactional): a form with a list of events, signed together with the URL it is posted to."""

from __future__ import annotations

import base64
import hmac
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any, Final, Literal
from urllib.parse import urlencode

from msgspec.structs import replace

from webhooks.asking import Api, Query, Shown, by_halves, credential, items, needed
from webhooks.event import Event, Kind, Testimony, bounded_id, derived_id, is_plain_address, unread
from webhooks.forms import form_fields
from webhooks.payload import at, id_at, load_object, load_or_none, short, split, text_at, unix_time
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
    Verified,
    sampled_name,
)
from webhooks.reply import Reply, all_mean, by_ids, each, is_success, unclear, undecided
from webhooks.signature import carries_credential, credential_only, octets, same, sample_delivery, signing_secrets

FACTS: Final = Facts(
    title="Mandrill (Mailchimp Transactional)",
    key_slot=(
        "message.metadata.send_key (250 bytes of JSON for all fields, 200 in older documents; recipient_metadata of a"
        " recipient wins), by SMTP the header X-MC-Metadata; comes back as msg.metadata.send_key"
        " [mailchimp transactional.openapi.json 1.4, mandrill.zendesk.com 205582417]"
    ),
    first_evidence="send [mailchimp.com/developer/transactional/docs/webhooks]",
    event_id=(
        "none: _id is the message's. A hash over it, event, recipient, time, URL and address of a click"
        " [mailchimp.com/developer/transactional/docs/webhooks]"
    ),
    authentication=(
        "X-Mandrill-Signature: HMAC-SHA1, in base64, of the webhook's URL exactly as it was entered and each field's"
        " name and value, sorted by name; secrets: the webhook's key. Test posts of an empty list are signed with the"
        " fixed key test-webhook, which is accepted for nothing else [anymail/webhooks/mandrill.py, symfony"
        " MailchimpRequestParser.php, anymail/django-anymail#48]"
    ),
    signs_body=True,
    signs_time=False,
    redelivery=(
        "a failed batch is sent again and holds up the events after it, until somebody presses 'give up'; neither"
        " intervals nor an end are documented: an hour is a cautious guess [mandrill.zendesk.com 205583277]"
    ),
    redelivers_for=timedelta(hours=1),
    look_up=(
        "by day, and by recipient where the address is plain, then compared: POST /messages/search, at most 1,000"
        " messages and no paging, so that the time is halved where there are more. A message to the recipient without"
        " metadata makes it unclear. Messages are kept 30 days, 20 searches a minute. No delay is documented:"
        " 15 minutes are assumed [mailchimp transactional.openapi.json 1.4, mandrill.zendesk.com 360039298733,"
        " rubydoc.info/gems/mandrill-api]"
    ),
    registration=(
        "POST /webhooks/add (url, description, events) answers auth_key; before, the URL must answer a HEAD and a test"
        " post [mailchimp transactional.openapi.json 1.4, mailchimp.com/developer/transactional/docs/webhooks]"
    ),
    sources=(
        "mailchimp transactional.openapi.json 1.4 (github.com/mailchimp/mailchimp-client-lib-codegen, 2026-04),"
        " mailchimp.com/developer/transactional, mandrill.zendesk.com, github.com/anymail/django-anymail,"
        " github.com/symfony/symfony"
    ),
    native_key="none found [mailchimp transactional.openapi.json 1.4]",
    finds_by="recipient",
    kept_for=timedelta(days=30),
    lists=True,
    setup=(
        "Under Settings, Webhooks add a webhook with the URL {url}; the receiver must be running, for it is tested.",
        "Tick: message is sent, delayed, bounced, soft-bounced, delivered, opened, clicked, marked as spam,",
        "recipient unsubscribes, message is rejected. Sync events tell of no message and are only counted.",
        "Set secrets here to the key that Mandrill shows beside the webhook (until then only its test is accepted).",
        "If the URL entered there differs from the above by a single character, set feeds.<name>.signed_url to it.",
        "Keep all metadata of a message below 200 bytes of JSON, or the key may be lost.",
        "Confirm with the answer's _id where its status is sent, queued or scheduled.",
        "Its status rejected or invalid, with HTTP 200 too, means that it is never sent: fail it, don't confirm.",
        "Optional: add send_key under Settings, Custom Metadata, to search the activity by u_send_key:KEY yourself.",
        "For look-ups set api_key to an API key that may call messages/search.",
    ),
    key_is_echoed_in=("every event of a message; not in sync events and incoming mail, which tell of no send"),
)

_ACCEPTED: Final = Testimony.ACCEPTED
_REJECTED: Final = Testimony.REJECTED
_NONE: Final = Testimony.NONE

MEANINGS: Final = MappingProxyType(
    {
        "send": (Kind.SENT, _ACCEPTED),
        "deferral": (Kind.DEFERRED, _ACCEPTED),
        "hard_bounce": (Kind.BOUNCED, _ACCEPTED),
        "soft_bounce": (Kind.BOUNCED, _ACCEPTED),
        "delivered": (Kind.DELIVERED, _ACCEPTED),
        "open": (Kind.OPENED, _ACCEPTED),
        "click": (Kind.CLICKED, _ACCEPTED),
        "spam": (Kind.COMPLAINED, _ACCEPTED),
        "unsub": (Kind.UNSUBSCRIBED, _ACCEPTED),
        "reject": (Kind.REJECTED, _REJECTED),
        "inbound": (Kind.INBOUND, _NONE),
    }
)
"""What each value of `event` means and proves [mailchimp.com/developer/transactional/docs/webhooks]."""

_STATES: Final = MappingProxyType(
    {
        "sent": (Kind.SENT, _ACCEPTED),
        "queued": (Kind.QUEUED, _ACCEPTED),
        "scheduled": (Kind.QUEUED, _ACCEPTED),
        "deferred": (Kind.DEFERRED, _ACCEPTED),
        "bounced": (Kind.BOUNCED, _ACCEPTED),
        "soft-bounced": (Kind.BOUNCED, _ACCEPTED),
        "spam": (Kind.COMPLAINED, _ACCEPTED),
        "unsub": (Kind.UNSUBSCRIBED, _ACCEPTED),
        "rejected": (Kind.REJECTED, _REJECTED),
    }
)
"""What each `state` that a search tells means and proves; `canceled` was stopped by somebody, which proves neither
[mailchimp transactional.openapi.json 1.4, mandrill.zendesk.com 360039298733]."""

TEST_KEY: Final = "test-webhook"
"""What Mandrill signs its test post of an empty list with, for everybody [symfony MailchimpRequestParser.php]."""

_FIELD: Final = "mandrill_events"
_SIGNATURE: Final = "x-mandrill-signature"
_FORM: Final = "application/x-www-form-urlencoded"
_LISTS: Final = frozenset({"blacklist", "whitelist", "denylist", "allowlist"})
"""Values of `type` of sync events; the documents have renamed the lists, samples still have the older names."""

_API: Final = "https://mandrillapp.com/api/1.4"
_MOST: Final = 1_000
"""Most messages of one search [mailchimp transactional.openapi.json 1.4]."""

_REFUSALS: Final = MappingProxyType(
    all_mean("rejected", "ValidationError")
    | all_mean("not_sent", "Invalid_Key", "PaymentRequired", "PoorReputation", "Unknown_Subaccount", "Unknown_Template")
)
"""What names of errors prove; GeneralError and others nothing [mailchimp.com/developer/transactional/api]."""
_REJECTS: Final = frozenset(
    {"hard-bounce", "soft-bounce", "spam", "unsub", "custom", "invalid", "invalid-sender", "unsigned", "rule"}
    | {"test-mode-limit"}
)
"""Values of `reject_reason` [mailchimp transactional.openapi.json 1.4]."""


class Mandrill:
    """Mandrill as the receiver and the sender's side know it."""

    name: Final = "mandrill"
    facts: Final = FACTS

    def stamp(self, wire_key: str) -> Stamp:
        """Return the metadata that makes the key come back; there is no native idempotency key."""
        metadata = {"send_key": wire_key}
        return Stamp(body={"message": {"metadata": metadata}}, smtp_headers={"X-MC-Metadata": json.dumps(metadata)})

    def read_reply(self, status: int, headers: Mapping[str, str], body: bytes) -> list[Reply]:  # noqa: ARG002
        """Return the answer to each recipient. Errors come with a 5xx too, and tell by name that nothing was taken."""
        said = load_or_none(body)
        if is_success(status) and isinstance(said, list) and said:
            return each(_reply(status, item) for item in said)
        name = text_at(said, "name") or ""
        if name in _REFUSALS:
            return [Reply(_REFUSALS[name], name)]
        return [undecided(status)]

    async def verify(self, delivery: Delivery, feed: Feed, now: datetime, fetch: Fetch) -> Verdict:  # noqa: ARG002
        """Judge the signature against each of the feed's keys, or the credential that the request carries.

        A test post of an empty list is accepted under Mandrill's fixed key, and unsigned while there is no secret:
        Mandrill shows the key only after the URL has answered its test.
        """
        keys = signing_secrets(feed.secrets)
        if _is_test(delivery):
            if not any(secret.strip() for secret in feed.secrets):
                return Verified()
            keys = (*keys, TEST_KEY)
        if not keys or carries_credential(delivery, feed.secrets):
            return credential_only(delivery, feed.secrets, "the webhook's key")
        return _judge_signature(delivery, keys, feed.signed_url)

    def parse(self, delivery: Delivery) -> Parsed:
        """Return an event for each element but those about a list of addresses, which tell of no message.

        One that can't be read is kept as unknown and counted as `damaged`.
        """
        elements = split(_told(delivery))
        anomalies: Counter[str] = Counter()
        events = [event for raw in elements if (event := _event(raw, anomalies))]
        if events:
            return Parsed(events, anomalies=anomalies)
        return Parsed(control="sync" if elements else "ping", anomalies=anomalies)

    def sample(self, kind: str, wire_key: str, feed: Feed, now: datetime) -> Delivery:
        """Return an example form of one event, signed with the feed's first key or carrying its credential."""
        body = _sample_body(sampled_name(self.name, kind, MEANINGS), wire_key, now)
        keys, signed = signing_secrets(feed.secrets), None
        if keys and feed.signed_url:
            signed = {_SIGNATURE: _signature(keys[0], feed.signed_url, form_fields(Delivery(body, {})))}
        needs = "nothing to sign with: set feeds.<name>.secrets, and its signed_url or receiver.public_url"
        sample = sample_delivery(body, feed.secrets, signed, needs)
        return replace(sample, headers={**sample.headers, "content-type": _FORM})

    def objection(self, setting: Literal["secrets", "topics"], value: str) -> str | None:
        """Return what is wrong with a secret that everybody knows."""
        if setting == "secrets" and value.strip() == TEST_KEY:
            return "is the fixed key of Mandrill's test posts, which everybody knows: set the key of the webhook"
        return None

    async def search(self, query: Query, feed: Feed, api: Api) -> AsyncIterator[Event]:
        """Yield what became of each message on the days around the span, of one recipient where that is sure.

        Raises ApiError where one of the recipient's shows no key: it may be the sought one.
        """
        shown = Shown(query)
        async for item in _listed(query, feed, api):
            event = _found(item)
            if query.is_of_another_time(event):
                continue
            shown.note(event, unnamed=query.is_unnamed(event))
            yield event
        shown.settle("a message to this recipient shows no metadata send_key: it may be the sought one")


def _reply(status: int, item: object) -> Reply:
    state, cause = text_at(item, "status"), text_at(item, "reject_reason")
    if state in ("sent", "queued", "scheduled"):
        return by_ids(status, [id_at(item, "_id")])[0]
    if state in ("rejected", "invalid"):
        return Reply("rejected", f"{state}: {cause}" if cause in _REJECTS else state)
    return unclear(status)


# -- signature ---------------------------------------------------------------------------------------------------------


def _judge_signature(delivery: Delivery, keys: tuple[str, ...], url: str | None) -> Verdict:
    given = delivery.headers.get(_SIGNATURE, "")
    if not given.strip():
        return Refused("missing", "no X-Mandrill-Signature header")
    if url is None:
        return Refused("no_url", "Mandrill signs the URL: set feeds.<name>.signed_url or receiver.public_url")
    try:
        fields = form_fields(delivery)
    except BadPayload:
        return Refused("signature", "no form, which is what Mandrill posts")
    wanted = [_signature(key, url, fields) for key in keys]
    if not any([same(given, want) for want in wanted]):
        return Refused(
            "signature",
            "no key of the feed fits, or Mandrill has another URL: set feeds.<name>.signed_url to the webhook's URL as"
            " it was entered there, to the last character",
        )
    return Verified()


def _signature(key: str, url: str, fields: list[tuple[str, str]]) -> str:
    ordered = sorted(fields, key=lambda field: field[0])
    signed = "".join([url, *(name + value for name, value in ordered)])
    return base64.b64encode(hmac.digest(octets(key), octets(signed), "sha1")).decode()


def _is_test(delivery: Delivery) -> bool:
    """Say whether a delivery holds an empty list: by what is parsed, so that nothing else passes for one."""
    try:
        return _told(delivery).strip() == b"[]"
    except BadPayload:
        return False


# -- events ------------------------------------------------------------------------------------------------------------


def _told(delivery: Delivery) -> bytes:
    """Return the JSON of a delivery's form, or its body where that is JSON: an event's bytes as we keep them."""
    if delivery.body.lstrip()[:1] in (b"[", b"{"):
        return delivery.body
    listed = dict(form_fields(delivery)).get(_FIELD)
    if listed is None:
        raise BadPayload("no field mandrill_events: not a form of Mandrill")
    return octets(listed)


def _event(raw: bytes, anomalies: Counter[str]) -> Event | None:
    try:
        element = load_object(raw)
    except BadPayload:
        anomalies["damaged"] += 1
        return unread(raw, "mandrill")
    if "event" not in element and text_at(element, "type") in _LISTS:
        anomalies["sync"] += 1
        return None
    return _built(element, raw)


def _built(element: dict[str, Any], raw: bytes) -> Event:
    message = at(element, "msg")
    kind, testimony = MEANINGS.get(text_at(element, "event") or "", UNKNOWN)
    return Event(
        kind=kind,
        testimony=testimony,
        message_id=id_at(element, "_id") or id_at(message, "_id"),
        event_id=_event_id(element, message),
        send_key=None if kind is Kind.INBOUND else text_at(message, "metadata", "send_key"),  # others write that
        recipient=text_at(message, "email"),
        occurred_at=unix_time(at(element, "ts")),
        reason=_reason(message),
        raw=raw,
    )


def _event_id(element: dict[str, Any], message: Any) -> str:
    told = [text_at(element, name) for name in ("_id", "event", "type", "url", "ip")]
    # Two mails may come in within a second, and have no _id.
    told += [text_at(message, name) for name in ("_id", "email", "raw_msg")]
    return derived_id("mandrill", str(at(element, "ts")), *told)


def _reason(message: Any) -> str | None:
    return short(text_at(message, "reject", "reason"), text_at(message, "bounce_description"), text_at(message, "diag"))


# -- asking ------------------------------------------------------------------------------------------------------------


async def _listed(query: Query, feed: Feed, api: Api) -> AsyncIterator[Any]:
    """Yield the messages of the days around the span, or of itself where those are too many. Raises ApiError."""
    key, (since, until) = credential(feed.api_key, "api_key", feed), query.seconds()
    plain = query.recipient and is_plain_address(query.recipient)
    terms = f'full_email:"{query.recipient}"' if plain else "*"
    # Days, in a time zone that is not documented: one more on either side.
    days = {"date_from": _day(query.since, -1), "date_to": _day(query.until, +1)}

    async def ask(start: int, end: int) -> list[Any]:
        narrowed = "" if (start, end) == (since, until + 1) else f" AND ts:[{start} TO {end - 1}]"
        body = {"key": key, "query": terms + narrowed, **days, "limit": _MOST}
        return items((await api.call("POST", f"{feed.api_url or _API}/messages/search", json=body)).value)

    async for message in by_halves(ask, since, until + 1, _MOST):
        if at(message, "channel") != "sms":
            yield message


def _day(time: datetime, days: int) -> str:
    return (time.astimezone(UTC) + timedelta(days=days)).date().isoformat()


def _found(message: Any) -> Event:
    message_id, state = bounded_id(needed(message, "_id")), needed(message, "state")
    kind, testimony = _STATES.get(state, UNKNOWN)
    return Event(
        kind=kind,
        testimony=testimony,
        message_id=message_id,
        event_id=derived_id("mandrill", "look-up", message_id, state),
        send_key=text_at(message, "metadata", "send_key"),
        recipient=text_at(message, "email"),
        occurred_at=unix_time(at(message, "ts")),
        reason=_reason(message),
        raw=json.dumps(message).encode(),
    )


# -- samples -----------------------------------------------------------------------------------------------------------


def _sample_body(name: str, wire_key: str, now: datetime) -> bytes:
    message_id, seconds = derived_id("sample", wire_key)[:32], int(now.timestamp())
    message = {
        "_id": message_id,
        "ts": seconds,
        "email": "sample@example.com",
        "metadata": {"send_key": wire_key},
    }
    event = {"event": name, "_id": message_id, "ts": seconds, "msg": message}
    return urlencode({_FIELD: json.dumps([event])}).encode()


PROVIDER: Final[Provider] = Mandrill()
