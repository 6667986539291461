# SPDX-License-Identifier: Apache-2.0
"""Mailtrap, Email Sending: batches as a JSON object or as JSON Lines, an event about one recipient each, all signed."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import quote

import msgspec

from webhooks.asking import Api, ApiError, Pages, Query, Shown, bearer, credential, items, needed, utc
from webhooks.event import HASHED_KEY, Event, Kind, Testimony, bounded_id, derived_id, unread
from webhooks.payload import at, first, id_at, iso_time, load_object, load_or_none, short, split, text_at, unix_time
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
from webhooks.reply import Reply, by_ids, by_status, each, first_of, is_success, unclear
from webhooks.signature import (
    carries_credential,
    credential_only,
    hmac_sha256,
    same,
    sample_delivery,
    signing_secrets,
)

FACTS: Final = Facts(
    title="Mailtrap (Email Sending)",
    key_slot=(
        "custom_variables.send_key, and the key as the category too (SMTP: headers X-MT-Custom-Variables, JSON, and"
        " X-MT-Category); both come back under their names. Custom variables of more than 1000 bytes of JSON are left"
        " out silently, all of them; a category (at most 255 characters) can't go with template_uuid: leave it out of"
        " such a call [mailtrap/mailtrap-docs email-api-smtp/custom-variables.md, mailtrap/mailtrap-openapi]"
    ),
    first_evidence=(
        "delivery, soft bounce or bounce: nothing says that a message was queued; suspension (parked: its domain is not"
        " verified) comes before an attempt [mailtrap/mailtrap-docs analytics/statuses-and-events.md]"
    ),
    event_id="event_id, a UUID meant for idempotency [mailtrap/mailtrap-docs advanced/webhooks]",
    authentication=(
        "header Mailtrap-Signature: hex HMAC-SHA256 of the raw body; the key is the secret's 32 characters as text, not"
        " the bytes that they spell; no time is signed. secrets: the signing_secret of each webhook; or basic: and"
        " query: in the URL [mailtrap/mailtrap-docs advanced/webhooks, mailtrap/mailtrap-python#67]"
    ),
    signs_body=True,
    signs_time=False,
    redelivery=(
        "40 times, every 5 minutes, until exactly 200 within 30 seconds; then the webhook is paused and its owner told"
        " by e-mail. At most 500 events every 30 s [docs.mailtrap.io/developers/webhooks, mailtrap/mailtrap-docs]"
    ),
    redelivers_for=timedelta(minutes=200),
    look_up=(
        "GET /api/email_logs with filters sent_after, sent_before and category (equal); custom_variables come back but"
        " can't be filtered by. Invalid and unknown filters are ignored, so each message is compared again; where the"
        " category finds nothing, all messages of the span are read, since a send by template has none. One to the"
        " recipient with neither variable nor category of ours makes it unclear. not_delivered"
        " is a bounce or a reject: GET /api/email_logs/{id} tells. api_key: a token that may read every domain that the"
        " feed sends from; api_scope is not used. Kept for days by plan; no delay is documented, 15 minutes are assumed"
        " [mailtrap/mailtrap-openapi specs/email-sending.openapi.yml]"
    ),
    registration=(
        'POST /api/webhooks {"webhook": {url, webhook_type: "email_sending", payload_format, sending_stream,'
        " event_types, domain_id}}; its answer shows signing_secret once [mailtrap/mailtrap-openapi]"
    ),
    sources=(
        "github.com/mailtrap/mailtrap-openapi and mailtrap-docs, docs.mailtrap.io, github.com/mailtrap/mailtrap-python"
        " 2.11, github.com/symfony/symfony#58403, github.com/anymail/django-anymail#485"
    ),
    native_key="none in its OpenAPI: a retry sends again [mailtrap/mailtrap-openapi, dahlia/upyo#32]",
    finds_by="key",
    lists=True,
    setup=(
        "Settings > Webhooks > Create New Webhook; one for each sending stream (Transactional, Bulk) that is used",
        "URL: {url} (ports 80 and 443 only)",
        "Payload format: JSON or JSON Lines, both are read; area: Email Sending; domain: all, or the one of this feed",
        "Events: Delivery, Soft bounce, Bounce, Suspension, Reject, Open, Click, Unsubscribe, Spam complaint",
        "Copy the signing secret of each webhook, shown once, into secrets, as it is",
        "Keep all custom variables of a message below 1000 bytes of JSON; sends by template_uuid go without category",
        "Confirm with the one of the answer's message_ids, one recipient a send",
        "The sandbox has no webhooks for its messages: use the sending API or SMTP",
        (
            "For look-ups: an API token that may read all sending domains into api_key; keep give_up_after well below"
            " the days for which the plan keeps e-mail logs"
        ),
    ),
    key_is_echoed_in=(
        "every event, unless custom variables and category were left out. Of a key that is not 48 hex digits the"
        " category alone is none, as it may be the application's own"
    ),
    first_event_is_delivery=True,
)

_ACCEPTED: Final = Testimony.ACCEPTED
_REJECTED: Final = Testimony.REJECTED

MEANINGS: Final = MappingProxyType(
    {
        "delivery": (Kind.DELIVERED, _ACCEPTED),
        "soft bounce": (Kind.DEFERRED, _ACCEPTED),  # with a space [symfony/symfony#58403]; tried ten more times
        "soft_bounce": (Kind.DEFERRED, _ACCEPTED),  # as subscriptions and the API name it
        "bounce": (Kind.BOUNCED, _ACCEPTED),
        "open": (Kind.OPENED, _ACCEPTED),
        "click": (Kind.CLICKED, _ACCEPTED),
        "unsubscribe": (Kind.UNSUBSCRIBED, _ACCEPTED),
        "spam": (Kind.COMPLAINED, _ACCEPTED),
        "spam_complaint": (Kind.COMPLAINED, _ACCEPTED),  # as subscriptions name it
        "suspension": (Kind.DEFERRED, _ACCEPTED),  # parked; sent once the domain is verified, else a reject follows
        "reject": (Kind.REJECTED, _REJECTED),
    }
)
"""What each `event` means and proves [mailtrap/mailtrap-docs analytics/statuses-and-events.md]."""

_STATUSES: Final = MappingProxyType(
    {
        "delivered": (Kind.DELIVERED, _ACCEPTED),
        "enqueued": (Kind.QUEUED, _ACCEPTED),
        "opted_out": (Kind.DELIVERED, _ACCEPTED),  # unsubscribed, or complained of, after its delivery
    }
)
"""What each status of the e-mail logs means and proves, but not_delivered [the same, mailtrap/mailtrap-openapi]."""

_SIGNATURE: Final = "mailtrap-signature"
_EVENTS: Final = re.compile(rb'"events"\s*:\s*(?=\[)')
_REASONS: Final = ("reason", "response", "bounce_category")
_TELLS_APART: Final = ("event", "message_id", "email", "url", "ip", "response")
_DETAILS: Final = ("reject_reason", "email_service_provider_response", "bounce_category")
_API: Final = "https://mailtrap.io"
_LOGS: Final = "/api/email_logs"
_MOST_EVENTS: Final = 500
"""Events of one delivery [docs.mailtrap.io/developers/webhooks]; of so many lines one must be an event."""


class _Batch(msgspec.Struct, gc=False):
    events: list[msgspec.Raw]


_BATCH: Final = msgspec.json.Decoder(_Batch)


class Mailtrap:
    """Mailtrap as the receiver and the sender's side know it."""

    name: Final = "mailtrap"
    facts: Final = FACTS

    def stamp(self, wire_key: str) -> Stamp:
        """Return the variable and the category that make the key come back; there is no native idempotency key."""
        variables = {"send_key": wire_key}
        return Stamp(
            body={"custom_variables": variables, "category": wire_key},
            smtp_headers={
                "X-MT-Custom-Variables": json.dumps(variables),
                "X-MT-Category": wire_key,
            },
        )

    def read_reply(self, status: int, headers: Mapping[str, str], body: bytes) -> list[Reply]:  # noqa: ARG002
        """Return the answer to a message, or to each of a batch."""
        said = load_or_none(body)
        if not is_success(status):
            return [by_status(status)]
        responses = at(said, "responses")
        if isinstance(responses, list) and responses:
            return each(_reply(status, one) for one in responses)
        return [_reply(status, said)]

    async def verify(self, delivery: Delivery, feed: Feed, now: datetime, fetch: Fetch) -> Verdict:  # noqa: ARG002
        """Judge the signature against each of the feed's secrets, or the credential that the request carries."""
        keys = signing_secrets(feed.secrets)
        if not keys or carries_credential(delivery, feed.secrets):
            return credential_only(delivery, feed.secrets, "the webhook's signing secret")
        given = delivery.headers.get(_SIGNATURE)
        if not given:
            return Refused("missing", "no Mailtrap-Signature header: not a webhook of Mailtrap")
        if not any([same(given, hmac_sha256(key, delivery.body).hex()) for key in keys]):
            return Refused("signature", "no signing secret of the feed fits; each webhook has its own")
        return Verified()

    def parse(self, delivery: Delivery) -> Parsed:
        """Return one event for each element or line; one that can't be read is kept as unknown, counted as damaged."""
        anomalies: Counter[str] = Counter()
        events = [_event(raw, anomalies) for raw in _pieces(delivery.body)]
        return Parsed(events, anomalies=anomalies)

    def sample(self, kind: str, wire_key: str, feed: Feed, now: datetime) -> Delivery:
        """Return an example batch of one, signed with the feed's first secret or carrying its credential."""
        body = _sample_body(sampled_name(self.name, kind, MEANINGS), wire_key, now)
        keys = signing_secrets(feed.secrets)
        signed = {_SIGNATURE: hmac_sha256(keys[0], body).hex()} if keys else None
        return sample_delivery(body, feed.secrets, signed, "the feed has no signing secret: set feeds.<name>.secrets")

    async def search(self, query: Query, feed: Feed, api: Api) -> AsyncIterator[Event]:
        """Yield the messages of our category, and where none of them bears our key, all messages of the span.

        Raises ApiError where one of them shows no key and may be the sought one.
        """
        shown = Shown(query)
        for filters in _filters(query):
            async for item in _listed(filters, feed, api):
                event = await _found(item, query.wire_key, feed, api)
                shown.note(event, unnamed=query.is_unnamed(event))
                yield event
            if shown.found:
                return
        shown.settle("a message to this recipient shows no key, so it may be the sought one")


def _reply(status: int, response: object) -> Reply:
    success, ids = at(response, "success"), at(response, "message_ids")  # an id for each recipient
    if success is True and (message_id := id_at(first_of(ids))):
        return by_ids(status, [message_id])[0]
    return Reply("rejected", "success false") if success is False else unclear(status)


def _pieces(body: bytes) -> list[bytes]:
    """Return the exact bytes of each event: of the array in `events`, of each line, or of the one that is the body."""
    try:
        return [bytes(raw) for raw in _BATCH.decode(body).events]
    except (msgspec.DecodeError, RecursionError):  # JSON Lines, odd characters, or not Mailtrap's JSON at all
        pass
    whole = _object(body)
    array = _EVENTS.search(body)
    if isinstance(at(whole, "events"), list) and array:
        return split(body[array.end() :])
    if text_at(whole, "event"):
        return [body]
    lines = [line for line in body.splitlines() if line.strip()]
    if not any(text_at(_object(line), "event") for line in lines[:_MOST_EVENTS]):
        raise BadPayload("no events: not a webhook of Mailtrap")
    return lines


def _object(raw: bytes) -> dict[str, Any] | None:
    try:
        return load_object(raw)
    except BadPayload:
        return None


def _event(raw: bytes, anomalies: Counter[str]) -> Event:
    value = _object(raw)
    if value is None:
        anomalies["damaged"] += 1
        return unread(raw, "mailtrap")
    kind, testimony = MEANINGS.get(text_at(value, "event") or "", UNKNOWN)
    return Event(
        kind=kind,
        testimony=testimony,
        message_id=id_at(value, "message_id"),
        event_id=id_at(value, "event_id") or _event_id(value),
        send_key=_send_key(value),
        recipient=text_at(value, "email"),
        occurred_at=unix_time(at(value, "timestamp")),
        reason=short(first(text_at(value, name) for name in _REASONS)),
        raw=raw,
    )


def _event_id(value: dict[str, Any]) -> str:
    said = (text_at(value, name) for name in _TELLS_APART)
    return derived_id("mailtrap", str(value.get("timestamp")), *said)


def _send_key(value: object) -> str | None:
    # Our category is known by its form alone: the application may have its own. It is all that is left where the
    # variables were too long.
    category = text_at(value, "category") or ""
    return text_at(value, "custom_variables", "send_key") or (category if HASHED_KEY.fullmatch(category) else None)


# -- asking ------------------------------------------------------------------------------------------------------------


async def _get(path: str, feed: Feed, api: Api, params: Mapping[str, str] | None = None) -> Any:
    headers = bearer(credential(feed.api_key, "api_key", feed))
    return (await api.call("GET", (feed.api_url or _API) + path, headers=headers, params=params)).value


def _filters(query: Query) -> list[dict[str, str]]:
    """Return what to ask, one after the other until our key is found."""
    since, until = query.seconds()  # whether sent_after and sent_before mean their own second is not documented
    span = {"filters[sent_after]": utc(since - 1), "filters[sent_before]": utc(until + 1)}
    if query.wire_key is None:
        return [span]
    return [{**span, "filters[category][operator]": "equal", "filters[category][value]": query.wire_key}, span]


async def _listed(filters: Mapping[str, str], feed: Feed, api: Api) -> AsyncIterator[Any]:
    """Yield the messages that pass the filters, page by page to the end. Raises ApiError."""
    pages, params = Pages(), dict(filters)
    while True:
        answer = await _get(_LOGS, feed, api, params)
        for item in items(answer, "messages"):
            yield item
        if "next_page_cursor" not in answer:
            raise ApiError("garbage", "the list of e-mail logs does not say whether it goes on")
        if answer["next_page_cursor"] is None:
            return
        params["search_after"] = str(answer["next_page_cursor"])
        pages.turn(params["search_after"])


async def _found(item: object, wanted: str | None, feed: Feed, api: Api) -> Event:
    message_id, status = needed(item, "message_id"), needed(item, "status")
    meaning, reason = _STATUSES.get(status, UNKNOWN), None
    if status == "not_delivered":
        meaning, reason = _end(items(await _get(f"{_LOGS}/{quote(message_id, safe='')}", feed, api), "events"))
    kind, testimony = meaning
    return Event(
        kind=kind,
        testimony=testimony,
        message_id=bounded_id(message_id),
        event_id=derived_id("mailtrap", "look-up", message_id, status),
        # A key of the form that an application's own category may have is ours where it is the one that is asked for.
        send_key=_send_key(item) or (wanted if wanted and text_at(item, "category") == wanted else None),
        recipient=text_at(item, "to"),
        occurred_at=iso_time(at(item, "sent_at")),
        reason=short(reason),
        raw=json.dumps(item).encode(),
    )


def _end(history: Sequence[object]) -> tuple[tuple[Kind, Testimony], str | None]:
    """Return what a history that ended without delivery means, and why: its bounce or, before any attempt, reject."""
    for name in ("bounce", "reject"):
        for entry in history:
            if text_at(entry, "event_type") == name:
                return MEANINGS[name], first(text_at(entry, "details", field) for field in _DETAILS)
    return UNKNOWN, None


# -- samples -----------------------------------------------------------------------------------------------------------


def _sample_body(name: str, wire_key: str, now: datetime) -> bytes:
    event = {
        "event": name,
        "event_id": derived_id("sample", name, wire_key, now.isoformat()),
        "message_id": derived_id("sample", wire_key),
        "email": "sample@example.com",
        "timestamp": int(now.timestamp()),
        "custom_variables": {"send_key": wire_key},
        "category": wire_key,
    }
    return json.dumps({"events": [event]}).encode()


PROVIDER: Final[Provider] = Mailtrap()
