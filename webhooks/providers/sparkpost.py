# SPDX-License-Identifier: Apache-2.0
"""SparkPost (Bird): unsigned batches of events wrapped by class, searched by the key that is also the campaign's id."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Final, Literal

from msgspec.structs import replace

from webhooks.asking import Api, ApiError, Pages, Query, Shown, credential, items, needed, utc
from webhooks.event import HASHED_KEY, Event, Kind, Testimony, derived_id, is_plain_address, unread
from webhooks.payload import at, id_at, iso_time, load, load_or_none, short, split, text_at, unix_time
from webhooks.provider import (
    UNKNOWN,
    BadPayload,
    Delivery,
    Facts,
    Feed,
    Fetch,
    Parsed,
    Provider,
    Stamp,
    Verdict,
    sampled_name,
)
from webhooks.reply import Reply, all_mean, by_code, by_ids, first_of, is_some, is_success, unclear
from webhooks.signature import credential_objection, credential_only, sample_delivery

FACTS: Final = Facts(
    title="SparkPost (Bird)",
    key_slot=(
        "metadata.send_key (10 KB; recipients[].metadata wins) and campaign_id (64 bytes), by SMTP both in the header"
        " X-MSYS-API; comes back as rcpt_meta.send_key and campaign_id"
        " [developers.sparkpost.com transmissions.apib, smtp.apib]"
    ),
    first_evidence="injection [developers.sparkpost.com event types]",
    event_id=(
        "event_id, unique, a number or a UUID as text [github.com/SparkPost/support-docs/pull/257]; the header"
        " X-MessageSystems-Batch-ID names only the batch. The message id is transmission_id, which the call answers as"
        " results.id: message_id is another, later one [anymail/webhooks/sparkpost.py]"
    ),
    authentication=(
        "nothing is signed. secrets: basic:user:password for auth_type basic, header:Name=value for custom_headers"
        " (or the older X-MessageSystems-Webhook-Token), query:name=value in the URL; a token that auth_type oauth2"
        " fetches is bearer:TOKEN while it lasts [developers.sparkpost.com webhooks.apib]"
    ),
    signs_body=False,
    signs_time=False,
    redelivery=(
        "for 8 hours until exactly 200 within 10 seconds, then discarded; the state of failed batches is kept for 24"
        " hours [developers.sparkpost.com webhooks.apib, github.com/SparkPost/support-docs/issues/268]"
    ),
    redelivers_for=timedelta(hours=8),
    look_up=(
        "by our key as campaign: GET /api/v1/events/message?campaigns=..., whose keyword search finds more than that"
        " and is compared again. Where that finds nothing, since a sender may have set another campaign, all events"
        " since then are read and rcpt_meta compared, by recipients where the address is plain. Kept 10 days, up to 1"
        " minute ago. No delay is documented: 15 minutes are assumed."
        " api_scope: the id of a subaccount; api_url: https://api.eu.sparkpost.com for an account in the EU"
        " [developers.sparkpost.com events.apib]"
    ),
    registration=(
        "POST /api/v1/webhooks (name, target, events, auth_type, auth_credentials, custom_headers): the target must"
        " answer a test post with 200; events come after 1 minute [developers.sparkpost.com webhooks.apib]"
    ),
    sources=(
        "github.com/SparkPost/developers.sparkpost.com content/api (2026-06) and pull/590 (2026-08),"
        " github.com/SparkPost/support-docs, github.com/anymail/django-anymail"
    ),
    same_key_window=timedelta(hours=24),
    native_key=(
        "HTTP header Idempotency-Key on transmissions, kept 24 hours (scheduled: 24 hours after the scheduled time)."
        " The same request is answered with the first answer and X-Idempotent-Replayed: true, nothing is sent again;"
        " 409 code 1600 (other payload) proves that the first request was taken; 409 code 1601 says that one is in"
        " progress, which proves nothing yet; 400 code 1602: the key has other characters than letters, digits, . _ -"
        " [github.com/SparkPost/developers.sparkpost.com/pull/590]"
    ),
    finds_by="key",
    kept_for=timedelta(days=10),
    lists=True,
    setup=(
        "Under Configuration, Webhooks create a webhook with the target {url} (ports 80 and 443 only).",
        "The receiver must be running: SparkPost creates it only if the target answers a test post with 200.",
        "Choose Basic Auth with a user and password of your own; set secrets here to basic:user:password.",
        "Select the message events injection, delivery, bounce, delay, out_of_band, spam_complaint, policy_rejection.",
        "Select the generation events generation_failure and generation_rejection.",
        "Select the engagement events open, initial_open, click, amp_open, amp_initial_open and amp_click.",
        "Select the unsubscribe events list_unsubscribe and link_unsubscribe.",
        "Send metadata and campaign_id as stamped: with another campaign_id a look-up has to read all of the time.",
        "Confirm with the answer's results.id, where its total_accepted_recipients is not 0.",
        "For look-ups set api_key to an API key with the grant message_events/view.",
        "For an account in the EU set api_url to https://api.eu.sparkpost.com.",
    ),
    key_is_echoed_in=(
        "every event of a message; by SMTP opens and clicks hold only 1000 bytes of metadata. Not in events about A/B"
        " tests, ingestion, SMS and incoming mail"
    ),
)

_ACCEPTED: Final = Testimony.ACCEPTED
_REJECTED: Final = Testimony.REJECTED
_NONE: Final = Testimony.NONE

MEANINGS: Final = MappingProxyType(
    {
        "injection": (Kind.QUEUED, _ACCEPTED),
        "delivery": (Kind.DELIVERED, _ACCEPTED),
        "bounce": (Kind.BOUNCED, _ACCEPTED),
        "out_of_band": (Kind.BOUNCED, _ACCEPTED),
        "delay": (Kind.DEFERRED, _ACCEPTED),
        "spam_complaint": (Kind.COMPLAINED, _ACCEPTED),
        "policy_rejection": (Kind.REJECTED, _REJECTED),
        "generation_rejection": (Kind.REJECTED, _REJECTED),
        "generation_failure": (Kind.FAILED, _REJECTED),
        "open": (Kind.OPENED, _ACCEPTED),
        "initial_open": (Kind.OPENED, _ACCEPTED),
        "click": (Kind.CLICKED, _ACCEPTED),
        "amp_open": (Kind.OPENED, _ACCEPTED),
        "amp_initial_open": (Kind.OPENED, _ACCEPTED),
        "amp_click": (Kind.CLICKED, _ACCEPTED),
        "list_unsubscribe": (Kind.UNSUBSCRIBED, _ACCEPTED),
        "link_unsubscribe": (Kind.UNSUBSCRIBED, _ACCEPTED),
        "relay_injection": (Kind.INBOUND, _NONE),
        "relay_delivery": (Kind.INBOUND, _NONE),
        "relay_rejection": (Kind.INBOUND, _NONE),
        "relay_tempfail": (Kind.INBOUND, _NONE),
        "relay_permfail": (Kind.INBOUND, _NONE),
    }
)
"""What each `type` means and proves; others (ab_test_*, sms_status, ingestion) speak of no send
[developers.sparkpost.com event types]."""

_BOUNCE_CLASSES: Final = MappingProxyType(
    {
        "60": Kind.AUTORESPONDED,
        "80": Kind.SUBSCRIBED,
        "90": Kind.UNSUBSCRIBED,
        "100": Kind.AUTORESPONDED,
    }
)
"""What a bounce means whose `bounce_class` says that it is none [anymail/webhooks/sparkpost.py]."""

_API: Final = "https://api.sparkpost.com"
_EVENTS: Final = "/api/v1/events/message"
_PAGE: Final = 1_000
"""Events on a page; 10,000 are allowed [developers.sparkpost.com events.apib]."""
_CREDENTIAL: Final = "basic:user:password, header:Name=value or query:name=value"
_TELLS_APART: Final = (
    *("type", "transmission_id", "message_id", "raw_rcpt_to", "rcpt_to", "msg_from", "timestamp"),
    *("target_link_url", "ip_address", "user_agent"),
)

_REPLIES: Final = MappingProxyType(
    all_mean("accepted", "1600")
    | all_mean("ambiguous", "1601")
    | all_mean("rejected", "1602")
    | all_mean("not_sent", "2101", "2102", "2103")
)
"""What codes of errors prove: another payload under the same key, a first request in progress, a malformed key,
sending limits; of others the status [developers.sparkpost.com transmissions.apib and pull/590]."""


class SparkPost:
    """SparkPost as the receiver and the sender's side know it."""

    name: Final = "sparkpost"
    facts: Final = FACTS

    def stamp(self, wire_key: str) -> Stamp:
        """Return metadata, campaign and native idempotency key (kept 24 hours: the same request sends nothing again).

        By SMTP there is no idempotency key.
        """
        slots = {"metadata": {"send_key": wire_key}, "campaign_id": wire_key}
        return Stamp(body=slots, headers={"Idempotency-Key": wire_key}, smtp_headers={"X-MSYS-API": json.dumps(slots)})

    def read_reply(self, status: int, headers: Mapping[str, str], body: bytes) -> list[Reply]:  # noqa: ARG002
        """Return the one answer to all recipients: taken if one of them was."""
        said = load_or_none(body)
        if not is_success(status):
            return [by_code(status, text_at(first_of(at(said, "errors")), "code"), _REPLIES)]
        taken, refused = (at(said, "results", f"total_{word}_recipients") for word in ("accepted", "rejected"))
        if is_some(taken):
            return by_ids(status, [id_at(said, "results", "id")], for_all=not is_some(refused))
        return [Reply("rejected", "no recipient accepted") if is_some(refused) else unclear(status)]

    async def verify(self, delivery: Delivery, feed: Feed, now: datetime, fetch: Fetch) -> Verdict:  # noqa: ARG002
        """Judge the credential that the request carries: SparkPost signs nothing."""
        return credential_only(delivery, feed.secrets, _CREDENTIAL)

    def parse(self, delivery: Delivery) -> Parsed:
        """Return the event of each element; one that can't be read is kept as unknown and counted as `damaged`."""
        elements = [(raw, _classes(raw)) for raw in split(delivery.body)]
        anomalies = Counter("damaged" for _, classes in elements if classes is None)
        if anomalies["damaged"] == len(elements):
            raise BadPayload("no element with msys: not a batch of SparkPost")
        events = [event for raw, classes in elements for event in _events(raw, classes)]
        if not events:  # [{"msys": {}}] is posted to see whether the target is there
            return Parsed(control="ping")
        return Parsed(events, anomalies=anomalies)

    def sample(self, kind: str, wire_key: str, feed: Feed, now: datetime) -> Delivery:
        """Return an example batch of one that carries the feed's credential."""
        body = _sample_body(sampled_name(self.name, kind, MEANINGS), wire_key, now)
        needs = f"the feed has no credential to carry: set feeds.<name>.secrets to {_CREDENTIAL}"
        return sample_delivery(body, feed.secrets, None, needs)

    def objection(self, setting: Literal["secrets", "topics"], value: str) -> str | None:
        """Return what is wrong with a secret that no request can carry."""
        return credential_objection("SparkPost", _CREDENTIAL, value) if setting == "secrets" else None

    async def search(self, query: Query, feed: Feed, api: Api) -> AsyncIterator[Event]:
        """Yield the events of the campaign that is our key; where there is none, and without a key, of the span.

        Raises ApiError where one of them shows no key and may be the sought one's.
        """
        shown = Shown(query)
        for filters in _questions(query):
            async for item in _listed(filters, feed, api):
                event = _found(item, query.wire_key)
                shown.note(event, unnamed=query.is_unnamed(event))
                yield event
            if shown.found:
                return
        shown.settle("an event to this recipient shows no key, so it may be the sought one's")


def _classes(raw: bytes) -> dict[str, Any] | None:
    """Return what an element's `msys` holds by class, {} for a ping, None where the element can't be read."""
    try:
        classes = at(load(raw), "msys")
    except BadPayload:
        return None
    return classes if isinstance(classes, dict) else None


def _events(raw: bytes, classes: dict[str, Any] | None) -> list[Event]:
    if classes is None:
        return [unread(raw, "sparkpost")]
    return [_event(name, fields, raw) for name, fields in classes.items()]


def _event(class_name: str, fields: Any, raw: bytes) -> Event:
    kind, testimony = _meaning(class_name, fields)
    return Event(
        kind=kind,
        testimony=testimony,
        message_id=id_at(fields, "transmission_id"),
        event_id=id_at(fields, "event_id") or _event_id(class_name, fields),
        send_key=None if kind is Kind.INBOUND else _send_key(fields),  # others write what comes in
        recipient=text_at(fields, "raw_rcpt_to") or text_at(fields, "rcpt_to"),  # the raw one keeps its case
        occurred_at=_time(at(fields, "timestamp")),
        reason=short(text_at(fields, "reason") or text_at(fields, "raw_reason")),
        raw=raw,
    )


def _meaning(class_name: str, fields: Any) -> tuple[Kind, Testimony]:
    if class_name.startswith("relay_"):
        return Kind.INBOUND, _NONE
    kind, testimony = MEANINGS.get(text_at(fields, "type") or "", UNKNOWN)
    if kind is Kind.BOUNCED:
        kind = _BOUNCE_CLASSES.get(text_at(fields, "bounce_class") or "", kind)
    return kind, testimony


def _send_key(fields: Any) -> str | None:
    # A campaign of somebody's own is no key of ours, and nobody calls one by 48 hex digits.
    campaign = text_at(fields, "campaign_id") or ""
    return text_at(fields, "rcpt_meta", "send_key") or (campaign if HASHED_KEY.fullmatch(campaign) else None)


def _time(value: Any) -> datetime | None:
    # Webhooks write seconds as text, the Events API and some generation events ISO 8601.
    return unix_time(value) or iso_time(value)


def _event_id(class_name: str, fields: Any) -> str:
    told = [text_at(fields, name) for name in _TELLS_APART]
    return derived_id("sparkpost", class_name, *told, text_at(fields, "content", "email_rfc822"))


# -- asking ------------------------------------------------------------------------------------------------------------


def _questions(query: Query) -> list[dict[str, str]]:
    """Return what to ask, one after the other until our key is found."""
    since, until = query.seconds()
    if query.wire_key is None:
        return [{"from": utc(since), "to": utc(until + 1)}]  # `to` is exclusive
    # Without `to` it reads up to a minute ago: whatever happened to the message later proves as much.
    to_them = {"recipients": query.recipient} if query.recipient and is_plain_address(query.recipient) else {}
    return [{"from": utc(since), "campaigns": query.wire_key}, {"from": utc(since), **to_them}]


async def _listed(filters: Mapping[str, str], feed: Feed, api: Api) -> AsyncIterator[Any]:
    """Yield the events that pass the filters, by links to the next page to the end. Raises ApiError."""
    headers = {"Authorization": credential(feed.api_key, "api_key", feed)}
    scope = {"subaccounts": feed.api_scope} if feed.api_scope else {}
    params: Mapping[str, str] | None = {**filters, **scope, "per_page": str(_PAGE), "cursor": "initial"}
    page, pages = _EVENTS, Pages()
    while page:
        pages.turn(page)
        answer = (await api.call("GET", (feed.api_url or _API) + page, headers=headers, params=params)).value
        for item in items(answer, "results"):
            yield item
        page, params = _next_page(answer), None


def _next_page(answer: Any) -> str:
    links = at(answer, "links")
    page = at(links, "next") if isinstance(links, dict) else 0
    if page is None:
        return ""
    if not isinstance(page, str) or not page.startswith(_EVENTS + "?"):
        raise ApiError("garbage", "the API's answer does not say where its next page is")
    return page


def _found(item: Any, wanted: str | None) -> Event:
    needed(item, "type")
    event = _event("", item, json.dumps(item).encode())
    ours = event.send_key is None and wanted is not None and text_at(item, "campaign_id") == wanted
    return replace(event, send_key=wanted) if ours else event


# -- samples -----------------------------------------------------------------------------------------------------------

_SAMPLE_CLASSES: Final = (
    ("unsubscribe", "unsubscribe_event"),
    ("generation", "gen_event"),
    ("open", "track_event"),
    ("click", "track_event"),
    ("", "message_event"),
)


def _sample_body(name: str, wire_key: str, now: datetime) -> bytes:
    class_name = next(class_name for part, class_name in _SAMPLE_CLASSES if part in name)
    event = {
        "type": name,
        "event_id": derived_id("sample", name, wire_key, now.isoformat()),
        "timestamp": str(int(now.timestamp())),
        "transmission_id": "sample-" + derived_id("sample", wire_key)[:16],
        "campaign_id": wire_key,
        "rcpt_meta": {"send_key": wire_key},
        "rcpt_to": "sample@example.com",
        "raw_rcpt_to": "sample@example.com",
    }
    return json.dumps([{"msys": {class_name: event}}]).encode()


PROVIDER: Final[Provider] = SparkPost()
