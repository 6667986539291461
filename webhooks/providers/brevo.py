# SPDX-License-Identifier: Apache-2.0
"""Brevo, transactional e-mail: one JSON object a delivery, or an array where the webhook is batched; unsigned."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any, Final, Literal
from uuid import NAMESPACE_DNS, uuid5

from webhooks.asking import Api, ApiError, Pages, Query, credential, items
from webhooks.event import Event, Kind, Testimony, derived_id
from webhooks.payload import at, first, id_at, iso_time, load, load_object, short, split, text_at, unix_time
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
from webhooks.signature import CREDENTIAL_SCHEMES, credential_only, sample_delivery

FACTS: Final = Facts(
    title="Brevo (transactional e-mail)",
    key_slot=(
        'headers."X-Mailin-custom" as JSON text {"send_key": ...} (django-anymail can\'t read bare text) and tags'
        " [send_key], as the look-up knows tags only; by SMTP headers of the names X-Mailin-custom and X-Mailin-Tag."
        " Comes back as X-Mailin-custom, tags, and tag (JSON text of the tags, or plain text); the recipient sees the"
        " header [anymail/webhooks/brevo.py, symfony Mailer bridge]"
    ),
    first_evidence=(
        "request: taken by Brevo; a blocked, invalid_email or error may still follow, and delivered often comes before"
        " it [anymail/django-anymail docs/esps/brevo.rst]"
    ),
    event_id=(
        "none (id is not the event's): a hash over message-id, recipient, event, ts_epoch or ts_event, and link"
        " [anymail/webhooks/brevo.py]. ts_epoch is the only time that is surely UTC; complaints may lack it"
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
        " Without a key by startDate and endDate, whole days [developers.brevo.com/reference/get-email-event-report,"
        " getbrevo/brevo-python]. 100 to 300 calls an hour [developers.brevo.com/docs/api-limits]. How late it shows an"
        " event was not found: 15 minutes are assumed. No api_scope"
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
        "authentication: a token; here secrets = [bearer:TOKEN]",
        "batched may be on: up to 500 events, 5 minutes late at most, so the grace has to be longer",
        "send with what stamp returns merged into the body of POST /v3/smtp/email; several recipients share an id",
        "api_key: an API key of the account, for the look-up",
        "test the secrets before they are changed: a delivery that is refused is not repeated",
    ),
    key_is_echoed_in=(
        "every event of a message; not in list_addition, which is no send. Mail that was sent without the stamp is"
        " stored and joined by message id where exactly one row has it; else it decides nothing"
    ),
)

_YES: Final = Testimony.ACCEPTED
_NO: Final = Testimony.REJECTED

MEANINGS: Final = MappingProxyType(
    {
        "request": (Kind.QUEUED, _YES),
        "delivered": (Kind.DELIVERED, _YES),
        "deferred": (Kind.DEFERRED, _YES),
        "soft_bounce": (Kind.BOUNCED, _YES),
        "hard_bounce": (Kind.BOUNCED, _YES),
        "complaint": (Kind.COMPLAINED, _YES),
        "spam": (Kind.COMPLAINED, _YES),  # the older name
        "opened": (Kind.OPENED, _YES),
        "unique_opened": (Kind.OPENED, _YES),
        "proxy_open": (Kind.OPENED, _YES),
        "unique_proxy_open": (Kind.OPENED, _YES),
        "click": (Kind.CLICKED, _YES),
        "unsubscribed": (Kind.UNSUBSCRIBED, _YES),
        "unsubscribe": (Kind.UNSUBSCRIBED, _YES),
        "blocked": (Kind.REJECTED, _NO),
        "invalid_email": (Kind.REJECTED, _NO),
        "error": (Kind.FAILED, _NO),
        "list_addition": (Kind.SUBSCRIBED, Testimony.NONE),
    }
)
"""What each value of `event` means and proves [anymail/webhooks/brevo.py, symfony Mailer bridge, developers.brevo.com
docs/transactional-webhooks; that blocked, invalid_email and error were never handed on: the same]."""

_LISTED: Final = MappingProxyType(
    {
        "requests": (Kind.QUEUED, _YES),
        "delivered": (Kind.DELIVERED, _YES),
        "deferred": (Kind.DEFERRED, _YES),
        "softBounces": (Kind.BOUNCED, _YES),
        "hardBounces": (Kind.BOUNCED, _YES),
        "bounces": (Kind.BOUNCED, _YES),
        "spam": (Kind.COMPLAINED, _YES),
        "opened": (Kind.OPENED, _YES),
        "loadedByProxy": (Kind.OPENED, _YES),
        "clicks": (Kind.CLICKED, _YES),
        "unsubscribed": (Kind.UNSUBSCRIBED, _YES),
        "blocked": (Kind.REJECTED, _NO),
        "invalid": (Kind.REJECTED, _NO),
        "error": (Kind.FAILED, _NO),
    }
)
"""The same for the names in answers of the API [getbrevo/brevo-node getEmailEventReportEventsInner]. An entry may have
no name at all [sendinblue/APIv3-python-library#87]."""

_API: Final = "https://api.brevo.com"
_LIMIT: Final = "2500"
_NAMESPACE: Final = uuid5(NAMESPACE_DNS, "brevo.com")
_MILLISECONDS: Final = 100_000_000_000  # no time in seconds is that large
_MARK: Final = "send_key:"
_HASHED: Final = re.compile(r"[0-9a-f]{48}")
_PLAIN: Final = re.compile(r"[a-z0-9_-]{1,48}")


class Brevo:
    """Brevo as the receiver and the sender's side know it."""

    name: Final = "brevo"
    facts: Final = FACTS

    def stamp(self, wire_key: str) -> Stamp:
        """Return header, tag and native idempotency key (30 minutes; a second request is refused, not answered)."""
        custom = json.dumps({"send_key": wire_key})
        idempotency_key = str(uuid5(_NAMESPACE, wire_key))
        return Stamp(
            body={"headers": {"X-Mailin-custom": custom, "idempotencyKey": idempotency_key}, "tags": [wire_key]},
            smtp_headers={"X-Mailin-custom": custom, "X-Mailin-Tag": wire_key},
        )

    async def verify(self, delivery: Delivery, feed: Feed, now: datetime, fetch: Fetch) -> Verdict:  # noqa: ARG002
        """Judge the credential that the request carries: Brevo signs nothing."""
        return credential_only(delivery, feed.secrets, "bearer:TOKEN, header:Name=value or basic:user:password")

    def parse(self, delivery: Delivery) -> Parsed:
        """Return the event, or those of a batch; one that can't be read there is kept as unknown and counted."""
        parts = split(delivery.body)
        if parts == [delivery.body]:
            return Parsed((_event(delivery.body),))
        anomalies: dict[str, int] = {}
        return Parsed([_kept(raw, anomalies) for raw in parts], anomalies=anomalies)

    def sample(self, kind: str, wire_key: str, feed: Feed, now: datetime) -> Delivery:
        """Return an example delivery that carries the feed's first credential."""
        body = _sample_body(sampled_name(self.name, kind, MEANINGS), wire_key, now)
        needs = "the feed has no credential to carry: set feeds.<name>.secrets to bearer:TOKEN"
        return sample_delivery(body, feed.secrets, None, needs)

    def objection(self, setting: Literal["secrets", "topics"], value: str) -> str | None:
        """Return what is wrong with a secret that no request can carry."""
        if setting == "topics" or value.startswith(CREDENTIAL_SCHEMES):
            return None
        return "verifies nothing, as Brevo signs nothing: write bearer:TOKEN, header:Name=value or basic:user:password"

    async def search(self, query: Query, feed: Feed, api: Api) -> AsyncIterator[Event]:
        """Yield the API's events with the tag, or of whole days, page by page until an empty one."""
        headers = {"api-key": credential(feed.api_key, "api_key", feed)}
        url = (feed.api_url or _API) + "/v3/smtp/statistics/events"
        pages = Pages()
        for filters in _filters(query):
            offset = 0
            while True:
                # Ascending, so that events which come in meanwhile don't move those that are still to be read.
                params = {**filters, "sort": "asc", "limit": _LIMIT, "offset": str(offset)}
                page = _page((await api.call("GET", url, headers=headers, params=params)).value)
                if not page:
                    break
                pages.turn(derived_id(json.dumps([filters, page])))
                for item in page:
                    yield _found(item, query.wire_key)
                offset += len(page)


def _kept(raw: bytes, anomalies: dict[str, int]) -> Event:
    try:
        return _event(raw)
    except BadPayload:
        anomalies["damaged"] = anomalies.get("damaged", 0) + 1
        event_id = derived_id("brevo", raw.decode("latin-1"))
        return Event(kind=Kind.UNKNOWN, testimony=Testimony.NONE, message_id=None, event_id=event_id, raw=raw)


def _event(raw: bytes) -> Event:
    entry = load_object(raw)
    name = text_at(entry, "event")
    if name is None:
        raise BadPayload("no event: not a webhook of Brevo")
    kind, testimony = MEANINGS.get(name, UNKNOWN)
    return Event(
        kind=kind,
        testimony=testimony,
        message_id=id_at(entry, "message-id"),
        event_id=_event_id(name, entry),
        send_key=_send_key(entry),
        recipient=_recipient(entry.get("email")),
        occurred_at=_time(entry),
        reason=None if kind is Kind.DELIVERED else short(text_at(entry, "reason")),
        raw=raw,
    )


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
    """Return the key that the custom header names; else what is marked or looks like one, there and among the tags."""
    custom = (text_at(entry, "X-Mailin-custom") or "").strip()
    parts = [] if custom.startswith("{") else custom.split("|")  # "name:value|name:value" in Brevo's own samples
    bare = parts[0] if len(parts) == 1 else None
    tags = [*_tags(entry.get("tags")), *_tags(entry.get("tag"))]
    return _named(custom) or _marked([*parts, *tags]) or bare or _plain(tags)


def _named(custom: str) -> str | None:
    try:
        return text_at(load(custom.encode("utf-8", "surrogatepass")), "send_key") if custom.startswith("{") else None
    except BadPayload:  # it was once cut short [anymail/django-anymail#95]
        return None


def _tags(value: object) -> list[str]:
    """Return tags, which come as a list, as its JSON text, joined by commas, or as the only one."""
    if isinstance(value, str) and value.startswith("["):
        try:
            value = load(value.encode("utf-8", "surrogatepass"))
        except BadPayload:
            return []
    listed: Sequence[object] = value if isinstance(value, list) else value.split(",") if isinstance(value, str) else ()
    return [tag.strip() for tag in listed if isinstance(tag, str)]


def _marked(texts: Sequence[str]) -> str | None:
    marked = (text.removeprefix(_MARK) for text in texts if text.startswith(_MARK))
    return first([*marked, *(text for text in texts if _HASHED.fullmatch(text))])


def _plain(tags: Sequence[str]) -> str | None:
    # Where it is somebody else's tag, the event is filed under a key that no row has: better than to lose our own.
    return first(tag for tag in tags if _PLAIN.fullmatch(tag))


def _filters(query: Query) -> Iterator[dict[str, str]]:
    if query.wire_key:
        yield {"tags": json.dumps([query.wire_key]), "days": "90"}
        return
    only = {"email": query.recipient} if query.recipient else {}
    # In which zone days are read isn't documented. One before is harmless; one after may be refused as in the future.
    start, last = query.since.astimezone(UTC).date() - timedelta(days=1), query.until.astimezone(UTC).date()
    while start <= last:
        end = min(start + timedelta(days=29), last)
        yield {**only, "startDate": start.isoformat(), "endDate": end.isoformat()}
        start = end + timedelta(days=1)


def _page(answer: object) -> list[Any]:
    # Where nothing is found the list is left out: the API's model has it as optional [getbrevo/brevo-python].
    return [] if answer == {} else items(answer, "events")


def _found(item: object, wanted: str | None) -> Event:
    message_id, name = id_at(item, "messageId"), text_at(item, "event")
    if message_id is None:
        raise ApiError("garbage", "an event of the API's answer has no messageId")
    kind, testimony = _LISTED.get(name or "", UNKNOWN)
    recipient, tags = text_at(item, "email"), _tags(at(item, "tag"))
    rest = [text_at(item, field) for field in ("date", "link", "ip")]
    return Event(
        kind=kind,
        testimony=testimony,
        message_id=message_id,
        event_id=derived_id("brevo", "look-up", message_id, recipient, name, *rest),
        send_key=wanted if wanted in tags else _marked(tags) or _plain(tags),
        recipient=recipient,
        occurred_at=iso_time(at(item, "date")),
        reason=None if kind is Kind.DELIVERED else short(text_at(item, "reason")),
        raw=json.dumps(item).encode(),
    )


def _sample_body(name: str, wire_key: str, now: datetime) -> bytes:
    event = {
        "event": name,
        "email": "sample@example.com",
        "message-id": f"<{derived_id('sample', wire_key)}@smtp-relay.mailin.fr>",
        "ts_event": int(now.timestamp()),
        "ts_epoch": int(now.timestamp() * 1000),
        "X-Mailin-custom": json.dumps({"send_key": wire_key}),
        "tags": [wire_key],
        "tag": json.dumps([wire_key]),
    }
    return json.dumps(event).encode()


PROVIDER: Final[Provider] = Brevo()
