# SPDX-License-Identifier: Apache-2.0
"""SMTP2GO: one event in each POST, as a form (its default) or as a JSON object; unsigned."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Final, Literal

from webhooks.asking import Api, Pages, Query, Shown, credential, items, needed, utc
from webhooks.event import Event, Kind, Testimony, bounded_id, derived_id, is_plain_address
from webhooks.forms import form_fields
from webhooks.payload import at, first, id_at, iso_time, load_object, load_or_none, short, text_at
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
from webhooks.reply import Reply, all_mean, by_code, by_ids, is_some, is_success
from webhooks.signature import credential_objection, credential_only, sample_delivery

FACTS: Final = Facts(
    title="SMTP2GO",
    key_slot=(
        "custom_headers [{header: X-Send-Key, value}] (SMTP: the header itself), and X-Send-Key in the webhook's list"
        " of headers; comes back as a field named like the header, and in the API's custom_headers"
        " [api-evangelist/smtp2go asyncapi, openapi]"
    ),
    first_evidence=(
        "processed: received by SMTP2GO and being processed for delivery [api-evangelist/smtp2go asyncapi]"
    ),
    event_id=(
        "none (id is the webhook's): a hash over email_id, rcpt, event, time, url and what else tells opens and clicks"
        " apart [api-evangelist/smtp2go asyncapi]"
    ),
    authentication=(
        "nothing is signed. secrets: header:Name=value (auth_header_type, auth_header_value), basic:user:password or"
        " query:name=value in the URL [api-evangelist/smtp2go asyncapi, sheaf-project/sheaf#139]"
    ),
    signs_body=False,
    signs_time=False,
    redelivery=(
        "35 times within 48 hours (5 in the first 30 minutes, then hourly), where no answer comes within 10 s or it is"
        " an error; what failed at last can be repeated by hand [api-evangelist/smtp2go asyncapi]"
    ),
    redelivers_for=timedelta(hours=48),
    look_up=(
        "by recipient and time, then compared by the header: POST /v3/activity/search {search_recipient, start_date,"
        " end_date, custom_headers: [X-Send-Key]}; an address that is not plain is looked for among all of the span. An"
        " event to the recipient without the header makes it unclear. 1,000 events a page, 60 calls a minute; 5 days on"
        " free plans, 30 on paid ones, and what is older is not found"
        " [developers.smtp2go.com/docs/view-account-activity, api-evangelist/smtp2go openapi]. About two minutes late"
        " are documented for /email/search only: 15 are assumed. api_url chooses a region (https://eu-api.smtp2go.com);"
        " no api_scope"
    ),
    registration=(
        "POST /v3/webhook/add {url, events, headers, output_format, auth_header_type, auth_header_value}; one on free"
        " plans, ten on paid ones [api-evangelist/smtp2go openapi, asyncapi]"
    ),
    sources="github.com/api-evangelist/smtp2go (2026-08, as harvested from the vendor), developers.smtp2go.com/docs",
    native_key=(
        "documented to have none: a request that is sent again is a second message [api-evangelist/smtp2go conventions]"
    ),
    finds_by="recipient",
    kept_for=timedelta(days=5),
    lists=True,
    setup=(
        "Settings > Webhooks: add one with the URL {url}; output JSON or form, both are read",
        "events: processed, delivered, open, click, bounce, spam, unsubscribe, resubscribe, reject",
        "headers: add X-Send-Key, or our key doesn't come back",
        'authentication: a header of your own; here secrets = ["header:Name=value"]',
        'or user:password@ in the URL; here secrets = ["basic:user:password"]',
        "send with what stamp returns merged into the body of POST /v3/email/send",
        "confirm with the answer's email_id, where it counts the recipient under succeeded",
        "api_key: a key with the right for activity/search, for the look-up; api_url where the account is in a region",
    ),
    key_is_echoed_in=("every e-mail event, but only while X-Send-Key is in the webhook's list of headers"),
)

_ACCEPTED: Final = Testimony.ACCEPTED
_REJECTED: Final = Testimony.REJECTED

MEANINGS: Final = MappingProxyType(
    {
        "processed": (Kind.QUEUED, _ACCEPTED),
        "delivered": (Kind.DELIVERED, _ACCEPTED),
        "open": (Kind.OPENED, _ACCEPTED),
        "click": (Kind.CLICKED, _ACCEPTED),
        "bounce": (Kind.BOUNCED, _ACCEPTED),  # of a hard or soft one: either was tried
        "spam": (Kind.COMPLAINED, _ACCEPTED),
        "unsubscribe": (Kind.UNSUBSCRIBED, _ACCEPTED),
        "resubscribe": (Kind.SUBSCRIBED, _ACCEPTED),
        "reject": (Kind.REJECTED, _REJECTED),
    }
)
"""What each value of `event` means and proves; others (sms_*, opt-out) are no e-mail [api-evangelist/smtp2go
asyncapi]."""

_LISTED: Final = MappingProxyType(
    {
        "processed": (Kind.QUEUED, _ACCEPTED),
        "delivered": (Kind.DELIVERED, _ACCEPTED),
        "opened": (Kind.OPENED, _ACCEPTED),
        "clicked": (Kind.CLICKED, _ACCEPTED),
        "soft-bounced": (Kind.BOUNCED, _ACCEPTED),
        "hard-bounced": (Kind.BOUNCED, _ACCEPTED),
        "spam": (Kind.COMPLAINED, _ACCEPTED),
        "unsubscribed": (Kind.UNSUBSCRIBED, _ACCEPTED),
        "resubscribed": (Kind.SUBSCRIBED, _ACCEPTED),
        "rejected": (Kind.REJECTED, _REJECTED),
    }
)
"""The same for the names in answers of the API [api-evangelist/smtp2go openapi]."""

_API: Final = "https://api.smtp2go.com"
_PAGE: Final = 1_000
"""Events on a page, at most [developers.smtp2go.com/docs/view-account-activity]."""
_CREDENTIAL: Final = "header:Name=value, basic:user:password or query:name=value"
_HEADER: Final = "X-Send-Key"
_TELLS_APART: Final = ("time", "url", "srchost", "read-secs", "bounce", "host", "message")

_REPLIES: Final = MappingProxyType(
    all_mean("not_sent", "ENDPOINT_PERMISSION_DENIED")
    | all_mean("rejected", "NON_VALIDATING_IN_PAYLOAD")
    | all_mean("ambiguous", "API_EXCEPTION")
)
"""What codes of errors prove; of others the status. API_EXCEPTION, like the status 402 ("request failed"), is said of
anything [developers.smtp2go.com/docs/response-codes, by api-evangelist/smtp2go errors]."""


class Smtp2Go:
    """SMTP2GO as the receiver and the sender's side know it."""

    name: Final = "smtp2go"
    facts: Final = FACTS

    def stamp(self, wire_key: str) -> Stamp:
        """Return the header that makes the key come back; there is no native idempotency key."""
        return Stamp(
            body={"custom_headers": [{"header": _HEADER, "value": wire_key}]}, smtp_headers={_HEADER: wire_key}
        )

    def read_reply(self, status: int, headers: Mapping[str, str], body: bytes) -> list[Reply]:  # noqa: ARG002
        """Return the one answer to all recipients: taken if one of them was."""
        said = load_or_none(body)
        if is_success(status) and is_some(at(said, "data", "succeeded")):
            return by_ids(status, [id_at(said, "data", "email_id")])
        if is_success(status) and is_some(at(said, "data", "failed")):
            return [Reply("rejected", "no recipient accepted")]
        code = text_at(said, "data", "error_code") or text_at(said, "error_code") or ""
        return [by_code(status, code.removeprefix("E_ApiResponseCodes."), _REPLIES)]

    async def verify(self, delivery: Delivery, feed: Feed, now: datetime, fetch: Fetch) -> Verdict:  # noqa: ARG002
        """Judge the credential that the request carries: SMTP2GO signs nothing."""
        return credential_only(delivery, feed.secrets, _CREDENTIAL)

    def parse(self, delivery: Delivery) -> Parsed:
        """Return the one event of the delivery."""
        entry = _fields(delivery)
        name = text_at(entry, "event")
        if name is None:
            raise BadPayload("no event: not a webhook of SMTP2GO")
        kind, testimony = MEANINGS.get(name, UNKNOWN)
        event = Event(
            kind=kind,
            testimony=testimony,
            message_id=id_at(entry, "email_id"),
            event_id=_event_id(name, entry),
            send_key=_send_key(entry),
            recipient=_recipient(entry),
            occurred_at=iso_time(entry.get("time")),
            reason=short(text_at(entry, "message")) if kind in (Kind.BOUNCED, Kind.REJECTED) else None,
            raw=delivery.body,
        )
        return Parsed((event,))

    def sample(self, kind: str, wire_key: str, feed: Feed, now: datetime) -> Delivery:
        """Return an example in JSON that carries the feed's first credential."""
        body = _sample_body(sampled_name(self.name, kind, MEANINGS), wire_key, now)
        needs = f"the feed has no credential to carry: set feeds.<name>.secrets to {_CREDENTIAL}"
        return sample_delivery(body, feed.secrets, None, needs)

    def objection(self, setting: Literal["secrets", "topics"], value: str) -> str | None:
        """Return what is wrong with a secret that no request can carry."""
        return credential_objection("SMTP2GO", _CREDENTIAL, value) if setting == "secrets" else None

    async def search(self, query: Query, feed: Feed, api: Api) -> AsyncIterator[Event]:
        """Yield the API's events of the span, of one recipient where that is sure.

        Raises ApiError where one of the recipient's shows no key: it may be the sought one's.
        """
        shown = Shown(query)
        async for item in _listed(query, feed, api):
            event = _found(item)
            shown.note(event, unnamed=query.is_unnamed(event))
            yield event
        shown.settle("an event to this recipient shows no X-Send-Key, so it may be the sought one's")


def _fields(delivery: Delivery) -> dict[str, Any]:
    # The body tells which of the two it is, not the content type.
    if delivery.body.lstrip()[:1] in (b"{", b"["):
        return load_object(delivery.body)
    return dict(reversed(form_fields(delivery)))  # the first of a name that is there twice


def _event_id(name: str, entry: dict[str, Any]) -> str:
    rest = [text_at(entry, field) for field in _TELLS_APART]
    return derived_id("smtp2go", text_at(entry, "email_id"), _recipient(entry), name, *rest)


def _send_key(headers: object) -> str | None:
    if not isinstance(headers, dict):
        return None
    return first(text_at(value) for name, value in headers.items() if name.lower() == _HEADER.lower())


def _recipient(entry: dict[str, Any]) -> str | None:
    everybody = entry.get("recipients")
    only = everybody[0] if isinstance(everybody, list) and len(everybody) == 1 else None
    return text_at(entry, "rcpt") or text_at(only)


# -- asking ------------------------------------------------------------------------------------------------------------


def _question(query: Query) -> dict[str, object]:
    """Return the search for a span: from its beginning up to but not including its end, in whole seconds of UTC."""
    since, until = query.seconds()
    plain = query.recipient and is_plain_address(query.recipient)
    return {
        "start_date": utc(since),
        "end_date": utc(until + 1),
        "custom_headers": [_HEADER],
        "limit": _PAGE,
        **({"search_recipient": query.recipient} if plain else {}),
    }


async def _listed(query: Query, feed: Feed, api: Api) -> AsyncIterator[Any]:
    """Yield the events of a question, by continue tokens to the end. Raises ApiError."""
    headers = {"X-Smtp2go-Api-Key": credential(feed.api_key, "api_key", feed)}
    url, body, pages = (feed.api_url or _API) + "/v3/activity/search", _question(query), Pages()
    while True:
        answer = (await api.call("POST", url, headers=headers, json=body)).value
        for item in items(answer, "data", "events"):
            yield item
        token = text_at(answer, "data", "continue_token")
        if token is None:
            return
        pages.turn(token)
        body = {**body, "continue_token": token}


def _found(item: object) -> Event:
    message_id, name = bounded_id(needed(item, "email_id")), needed(item, "event")
    kind, testimony = _LISTED.get(name, UNKNOWN)
    recipient = text_at(item, "recipient")
    words = [text_at(item, field) for field in ("reason", "error", "smtp_response")]
    return Event(
        kind=kind,
        testimony=testimony,
        message_id=message_id,
        event_id=derived_id("smtp2go", "look-up", message_id, recipient, name, text_at(item, "date"), *words),
        send_key=_send_key(at(item, "custom_headers")) or _send_key(at(item, "headers")),
        recipient=recipient,
        occurred_at=iso_time(at(item, "date")),
        reason=short(first(words)) if kind in (Kind.BOUNCED, Kind.REJECTED) else None,
        raw=json.dumps(item).encode(),
    )


# -- samples -----------------------------------------------------------------------------------------------------------


def _sample_body(name: str, wire_key: str, now: datetime) -> bytes:
    event = {
        "event": name,
        "time": now.isoformat(),
        "rcpt": "sample@example.com",
        "email_id": "sample-" + derived_id("sample", wire_key)[:16],
        _HEADER: wire_key,
    }
    return json.dumps(event).encode()


PROVIDER: Final[Provider] = Smtp2Go()
