# SPDX-License-Identifier: Apache-2.0
"""Brevo, transactional e-mail: one JSON object a delivery, or an array where the webhook is batched; unsigned."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any, Final, Literal
from uuid import NAMESPACE_DNS, uuid5

from webhooks.asking import Api, ApiError, Query, Shown, by_offset, credential, items
from webhooks.event import (
    HASHED_KEY,
    Event,
    Kind,
    Testimony,
    bounded_id,
    derived_id,
    is_plain_address,
    unread,
)
from webhooks.payload import at, first, iso_time, load_object, load_or_none, load_text, short, split, text_at, unix_time
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
from webhooks.reply import Reply, all_mean, by_code, by_ids, is_success
from webhooks.signature import credential_objection, credential_only, sample_delivery

FACTS: Final = Facts(
    title="Brevo (transactional e-mail)",
    key_slot=(
        'headers."X-Mailin-custom" as JSON text {"send_key": ...} (django-anymail can\'t read bare text) and a tag, as'
        " the look-up knows tags only: a wire key of 48 hex digits as it is, any other as send_key:<key>, so that it is"
        " told apart from the application's own; by SMTP headers of the names X-Mailin-custom and X-Mailin-Tag. Comes"
        " back as X-Mailin-custom, tags, and tag (JSON text of the tags, or plain text); the recipient sees the header"
        " [anymail/webhooks/brevo.py, symfony Mailer bridge]"
    ),
    first_evidence=(
        "request: taken by Brevo; a blocked, invalid_email or error may still follow, and delivered often comes before"
        " it [anymail/django-anymail docs/esps/brevo.rst]"
    ),
    event_id=(
        "none (id is not the event's): a hash over message-id, recipient, event, ts_epoch or ts_event, and link"
        " [anymail/webhooks/brevo.py]. ts_epoch is the only time that is surely UTC; complaints may lack it. message-id"
        " is kept without its brackets <>, as the sender's side keeps the messageId of the answer"
    ),
    authentication=(
        "nothing is signed. secrets: bearer:TOKEN (auth), header:Name=value (headers) or basic:user:password (in the"
        " URL) [getbrevo/brevo-python]"
    ),
    signs_body=False,
    signs_time=False,
    redelivery=(
        "after 10 min, 1 h, 2 h and 8 h, but only where it was answered 429 or not at all: any other 4xx and every 5xx"
        " ends it and the event is lost [developers.brevo.com/docs/retry-mechanism]"
    ),
    redelivers_for=timedelta(hours=8),
    look_up=(
        "by our key: GET /v3/smtp/statistics/events?tags=[...]&days=90, header api-key; what is older is not found."
        " Where no event shows our tag, and for a back-fill, by startDate and endDate, whole days, and by recipient"
        " where it is plain: a send whose tag was left out is unclear, not absent"
        " [developers.brevo.com/reference/get-email-event-report, getbrevo/brevo-python]. 100 to 300 calls an hour"
        " [developers.brevo.com/docs/api-limits]. How late it shows an event was not found: 15 minutes are assumed. No"
        " api_scope"
    ),
    registration=(
        "POST /v3/webhooks {url, type: transactional, channel: email, events, auth or headers, batched}; 40 at most"
        " [getbrevo/brevo-python]"
    ),
    sources=(
        "github.com/getbrevo/brevo-python, developers.brevo.com/docs (retry-mechanism, batch-webhooks, api-limits),"
        " django-anymail 15.2, symfony/symfony Mailer/Bridge/Brevo"
    ),
    busy_status=429,
    refused_status=429,
    native_key=(
        "headers.idempotencyKey in the JSON body, a UUID: uuid5 of the wire key in the namespace uuid5(DNS,"
        " brevo.com). Kept 30 minutes (15 by the older changelog). A second request is refused as duplicate_parameter:"
        " that proves the first was taken, but doesn't give its messageId, so it is no replay and no same-key retry;"
        " what a request in flight does was not found [developers.brevo.com/docs/heterogenous-versions-batch-emails,"
        " developers.brevo.com/changelog/email-api-now-supports-idempotency]"
    ),
    finds_by="key",
    kept_for=timedelta(days=30),
    lists=True,
    setup=(
        "Transactional > Settings > Webhook: add one with the URL {url} (or POST /v3/webhooks, type transactional)",
        "events: request, delivered, deferred, softBounce, hardBounce, spam, blocked, invalid, error, unsubscribed",
        "events, where opens and clicks matter: opened, uniqueOpened, proxyOpen, uniqueProxyOpen, click",
        'authentication: a token; here secrets = ["bearer:TOKEN"]',
        "batched may be on: up to 500 events, 5 minutes late at most, so the grace has to be longer",
        "send with what stamp returns merged into the body of POST /v3/smtp/email; several recipients share an id",
        "confirm with the answer's messageId; duplicate_parameter means that the first request was taken: confirm, too",
        "api_key: an API key of the account, for the look-up",
        "a delivery that no secret fits is answered 429, so that it comes again while a secret is changed",
    ),
    key_is_echoed_in=("every event of a message that was sent with the stamp; not in list_addition, which is no send"),
)

_ACCEPTED: Final = Testimony.ACCEPTED
_REJECTED: Final = Testimony.REJECTED
_NONE: Final = Testimony.NONE

MEANINGS: Final = MappingProxyType(
    {
        "request": (Kind.QUEUED, _ACCEPTED),
        "delivered": (Kind.DELIVERED, _ACCEPTED),
        "deferred": (Kind.DEFERRED, _ACCEPTED),
        "soft_bounce": (Kind.BOUNCED, _ACCEPTED),
        "hard_bounce": (Kind.BOUNCED, _ACCEPTED),
        "complaint": (Kind.COMPLAINED, _ACCEPTED),
        "spam": (Kind.COMPLAINED, _ACCEPTED),  # the older name
        "opened": (Kind.OPENED, _ACCEPTED),
        "unique_opened": (Kind.OPENED, _ACCEPTED),
        "proxy_open": (Kind.OPENED, _ACCEPTED),
        "unique_proxy_open": (Kind.OPENED, _ACCEPTED),
        "click": (Kind.CLICKED, _ACCEPTED),
        "unsubscribed": (Kind.UNSUBSCRIBED, _ACCEPTED),
        "unsubscribe": (Kind.UNSUBSCRIBED, _ACCEPTED),
        "blocked": (Kind.REJECTED, _REJECTED),
        "invalid_email": (Kind.REJECTED, _REJECTED),
        "error": (Kind.FAILED, _REJECTED),
        "list_addition": (Kind.SUBSCRIBED, _NONE),
    }
)
"""What each value of `event` means and proves [anymail/webhooks/brevo.py, symfony Mailer bridge, developers.brevo.com
docs/transactional-webhooks; that blocked, invalid_email and error were never handed on: the same]."""

_LISTED: Final = MappingProxyType(
    {
        "requests": (Kind.QUEUED, _ACCEPTED),
        "delivered": (Kind.DELIVERED, _ACCEPTED),
        "deferred": (Kind.DEFERRED, _ACCEPTED),
        "softBounces": (Kind.BOUNCED, _ACCEPTED),
        "hardBounces": (Kind.BOUNCED, _ACCEPTED),
        "bounces": (Kind.BOUNCED, _ACCEPTED),
        "spam": (Kind.COMPLAINED, _ACCEPTED),
        "opened": (Kind.OPENED, _ACCEPTED),
        "loadedByProxy": (Kind.OPENED, _ACCEPTED),
        "clicks": (Kind.CLICKED, _ACCEPTED),
        "unsubscribed": (Kind.UNSUBSCRIBED, _ACCEPTED),
        "blocked": (Kind.REJECTED, _REJECTED),
        "invalid": (Kind.REJECTED, _REJECTED),
        "error": (Kind.FAILED, _REJECTED),
    }
)
"""The same for the names in answers of the API [getbrevo/brevo-node getEmailEventReportEventsInner]. An entry may have
no name at all [sendinblue/APIv3-python-library#87]."""

_API: Final = "https://api.brevo.com"
_PAGE: Final = 2_500
"""Events on a page, at most [getbrevo/brevo-python]."""
_CREDENTIAL: Final = "bearer:TOKEN, header:Name=value or basic:user:password"
_NAMESPACE: Final = uuid5(NAMESPACE_DNS, "brevo.com")
_MILLISECONDS: Final = 100_000_000_000  # no time in seconds is that large
_MARK: Final = "send_key:"

_REPLIES: Final = MappingProxyType(
    all_mean("accepted", "duplicate_parameter")
    | all_mean("ambiguous", "duplicate_request")
    | all_mean("not_sent", "unauthorized", "permission_denied", "reseller_permission_denied", "not_enough_credits")
    | all_mean("not_sent", "account_under_validation", "method_not_allowed")
)
"""What codes of errors prove; of others the status [getbrevo SDKs' ErrorModel]. duplicate_parameter: our idempotency
key was taken before; what duplicate_request says was not found."""


class Brevo:
    """Brevo as the receiver and the sender's side know it."""

    name: Final = "brevo"
    facts: Final = FACTS

    def stamp(self, wire_key: str) -> Stamp:
        """Return header, tag and native idempotency key (30 minutes; a second request is refused, not answered)."""
        custom, tag = json.dumps({"send_key": wire_key}), _tag(wire_key)
        idempotency_key = str(uuid5(_NAMESPACE, wire_key))
        return Stamp(
            body={"headers": {"X-Mailin-custom": custom, "idempotencyKey": idempotency_key}, "tags": [tag]},
            smtp_headers={"X-Mailin-custom": custom, "X-Mailin-Tag": tag},
        )

    def read_reply(self, status: int, headers: Mapping[str, str], body: bytes) -> list[Reply]:  # noqa: ARG002
        """Return the answer to a message, or to each version of one."""
        said = load_or_none(body)
        if not is_success(status):
            return [by_code(status, text_at(said, "code"), _REPLIES)]
        versions = at(said, "messageIds")
        ids = versions if isinstance(versions, list) else [at(said, "messageId")]
        return by_ids(status, [_bare(text_at(message_id)) for message_id in ids])

    async def verify(self, delivery: Delivery, feed: Feed, now: datetime, fetch: Fetch) -> Verdict:  # noqa: ARG002
        """Judge the credential that the request carries: Brevo signs nothing."""
        return credential_only(delivery, feed.secrets, _CREDENTIAL)

    def parse(self, delivery: Delivery) -> Parsed:
        """Return the event, or those of a batch; one that can't be read there is kept as unknown and counted."""
        parts = split(delivery.body)
        if parts == [delivery.body]:
            return Parsed((_event(delivery.body),))
        anomalies: Counter[str] = Counter()
        return Parsed([_kept(raw, anomalies) for raw in parts], anomalies=anomalies)

    def sample(self, kind: str, wire_key: str, feed: Feed, now: datetime) -> Delivery:
        """Return an example delivery that carries the feed's first credential."""
        body = _sample_body(sampled_name(self.name, kind, MEANINGS), wire_key, now)
        needs = f"the feed has no credential to carry: set feeds.<name>.secrets to {_CREDENTIAL}"
        return sample_delivery(body, feed.secrets, None, needs)

    def objection(self, setting: Literal["secrets", "topics"], value: str) -> str | None:
        """Return what is wrong with a secret that no request can carry."""
        return credential_objection("Brevo", _CREDENTIAL, value) if setting == "secrets" else None

    async def search(self, query: Query, feed: Feed, api: Api) -> AsyncIterator[Event]:
        """Yield the events under our tag; where none shows our key, and without a key, those of the span's days.

        Raises ApiError where one of them shows no key and may be the sought one's, whose tag was left out.
        """
        shown = Shown(query)
        for filters in _filters(query):
            async for item in _listed(filters, feed, api):
                event, by_tag = _found(item, query.wire_key), "tags" in filters
                if not by_tag and query.is_of_another_time(event):
                    continue
                shown.note(event, unnamed=event.send_key is None and (by_tag or query.may_be_to(event.recipient)))
                yield event
            if shown.found:
                return
        shown.settle("an event of the API's answer shows no tag of ours: it may be the sought one's")


def _tag(wire_key: str) -> str:
    return wire_key if HASHED_KEY.fullmatch(wire_key) else _MARK + wire_key


def _kept(raw: bytes, anomalies: Counter[str]) -> Event:
    try:
        return _event(raw)
    except BadPayload:
        anomalies["damaged"] += 1
        return unread(raw, "brevo")


def _event(raw: bytes) -> Event:
    entry = load_object(raw)
    name = text_at(entry, "event")
    if name is None:
        raise BadPayload("no event: not a webhook of Brevo")
    kind, testimony = MEANINGS.get(name, UNKNOWN)
    return Event(
        kind=kind,
        testimony=testimony,
        message_id=_bare(text_at(entry, "message-id")),
        event_id=_event_id(name, entry),
        send_key=_send_key(entry),
        recipient=_recipient(entry.get("email")),
        occurred_at=_time(entry),
        reason=None if kind is Kind.DELIVERED else short(text_at(entry, "reason")),
        raw=raw,
    )


def _bare(message_id: str | None) -> str | None:
    # As the sender's side keeps what it is answered.
    bare = (message_id or "").strip("<> ")
    return bounded_id(bare) if bare else None


def _event_id(name: str, entry: dict[str, Any]) -> str:
    time = first(text_at(entry, field) for field in ("ts_epoch", "ts_event", "ts", "date"))
    rest = [text_at(entry, field) for field in ("link", "key")]
    return derived_id("brevo", text_at(entry, "message-id"), _recipient(entry.get("email")), name, time, *rest)


def _time(entry: dict[str, Any]) -> datetime | None:
    epoch = entry.get("ts_epoch")
    if isinstance(epoch, (int, float)) and _MILLISECONDS < epoch < _MILLISECONDS * 1000:
        epoch = epoch / 1000  # in seconds at some complaints
    # Without it there is only a time that may be in the account's zone, hours away: enough to file the event by.
    return unix_time(epoch) or unix_time(entry.get("ts_event")) or unix_time(entry.get("ts"))


def _recipient(email: object) -> str | None:
    if isinstance(email, list):  # of list_addition
        return text_at(email[0]) if len(email) == 1 else None
    return text_at(email)


def _send_key(entry: dict[str, Any]) -> str | None:
    """Return the key that the custom header names or is; else what is marked or looks like one, there or as a tag."""
    custom = (text_at(entry, "X-Mailin-custom") or "").strip()
    parts = [] if custom.startswith("{") else custom.split("|")  # "name:value|name:value" in Brevo's own samples
    bare = parts[0] if len(parts) == 1 else None
    named = text_at(load_text(custom), "send_key") if custom.startswith("{") else None  # None where it was cut short
    tags = [*_tags(entry.get("tags")), *_tags(entry.get("tag"))]
    return first([named, _marked([*parts, *tags]), bare])


def _tags(value: object) -> list[str]:
    """Return tags, which come as a list, as its JSON text, joined by commas, or as the only one."""
    if isinstance(value, str):
        value = load_text(value) if value.startswith("[") else value.split(",")
    return [tag.strip() for tag in value if isinstance(tag, str)] if isinstance(value, list) else []


def _marked(texts: Sequence[str]) -> str | None:
    marked = (text.removeprefix(_MARK) for text in texts if text.startswith(_MARK))
    return first([*marked, *(text for text in texts if HASHED_KEY.fullmatch(text))])


# -- asking ------------------------------------------------------------------------------------------------------------


def _filters(query: Query) -> Iterator[dict[str, str]]:
    if query.wire_key:
        yield {"tags": json.dumps([_tag(query.wire_key)]), "days": "90"}
    only = {"email": query.recipient} if query.recipient and is_plain_address(query.recipient) else {}
    # In which zone days are read isn't documented. One before is harmless; one after may be refused as in the future.
    start, last = query.since.astimezone(UTC).date() - timedelta(days=1), query.until.astimezone(UTC).date()
    while start <= last:
        end = min(start + timedelta(days=29), last)
        yield {**only, "startDate": start.isoformat(), "endDate": end.isoformat()}
        start = end + timedelta(days=1)


def _listed(filters: dict[str, str], feed: Feed, api: Api) -> AsyncIterator[Any]:
    """Yield the events of a question, page by page until an empty one. Raises ApiError."""
    headers = {"api-key": credential(feed.api_key, "api_key", feed)}
    url = (feed.api_url or _API) + "/v3/smtp/statistics/events"

    async def ask(offset: int) -> list[Any]:
        # Ascending, so that events which come in meanwhile don't move those that are still to be read.
        params = {**filters, "sort": "asc", "limit": str(_PAGE), "offset": str(offset)}
        answer = (await api.call("GET", url, headers=headers, params=params)).value
        # Where nothing is found the list is left out: the API's model has it as optional [getbrevo/brevo-python].
        return [] if answer == {} else items(answer, "events")

    return by_offset(ask)


def _found(item: object, wanted: str | None) -> Event:
    given, name = text_at(item, "messageId"), text_at(item, "event")
    if (message_id := _bare(given)) is None:
        raise ApiError("garbage", "an event of the API's answer has no messageId")
    kind, testimony = _LISTED.get(name or "", UNKNOWN)
    recipient, tags = text_at(item, "email"), _tags(at(item, "tag"))
    rest = [text_at(item, field) for field in ("date", "link", "ip")]
    return Event(
        kind=kind,
        testimony=testimony,
        message_id=message_id,
        event_id=derived_id("brevo", "look-up", given, recipient, name, *rest),
        send_key=wanted if wanted and {wanted, _tag(wanted)} & set(tags) else _marked(tags),
        recipient=recipient,
        occurred_at=iso_time(at(item, "date")),
        reason=None if kind is Kind.DELIVERED else short(text_at(item, "reason")),
        raw=json.dumps(item).encode(),
    )


# -- samples -----------------------------------------------------------------------------------------------------------


def _sample_body(name: str, wire_key: str, now: datetime) -> bytes:
    event = {
        "event": name,
        "email": "sample@example.com",
        "message-id": f"<{derived_id('sample', wire_key)}@smtp-relay.mailin.fr>",
        "ts_event": int(now.timestamp()),
        "ts_epoch": int(now.timestamp() * 1000),
        "X-Mailin-custom": json.dumps({"send_key": wire_key}),
        "tags": [_tag(wire_key)],
        "tag": json.dumps([_tag(wire_key)]),
    }
    return json.dumps(event).encode()


PROVIDER: Final[Provider] = Brevo()
