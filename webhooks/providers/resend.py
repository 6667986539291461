# SPDX-License-Identifier: Apache-2.0
"""Resend: one JSON object a delivery, signed by the Standard Webhooks scheme under Svix's header names."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import datetime, timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Literal
from urllib.parse import quote

import msgspec

from webhooks.asking import Api, ApiError, Change, Pages, Query, Shown, bearer, credential, items, needed
from webhooks.event import Event, Kind, Testimony, bounded_id, derived_id
from webhooks.payload import at, first, id_at, iso_time, list_at, load_object, load_or_none, short, text_at
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
from webhooks.reply import Reply, all_mean, by_code, by_ids, each, is_success, unclear
from webhooks.signature import (
    sample_delivery,
    sign_standard_webhook,
    standard_webhook,
    standard_webhook_id,
    standard_webhook_keys,
    standard_webhook_objection,
)

FACTS: Final = Facts(
    title="Resend",
    key_slot=(
        "tags [{name: send_key}] (letters, digits, _ and -, at most 256; by SMTP the header X-Send-Key); comes back as"
        " data.tags.send_key, the header in data.headers [resend/resend-openapi OutboundEmailEventData]"
    ),
    first_evidence="email.sent, or email.scheduled: the API request was successful [resend/resend-openapi]",
    event_id=(
        "header svix-id, the same on each retry and on a replay from dashboard or API; none in the body [svix-docs]."
        " Events of a message to several recipients don't say which one: use one recipient a send"
    ),
    authentication=(
        "Standard Webhooks: HMAC-SHA256 of id, timestamp and raw body; secrets: the whsec_ signing secret, several"
        " while it is rotated; never a whpk_ key, which is public [standard-webhooks spec]"
    ),
    signs_body=True,
    signs_time=True,
    redelivery=(
        "at once, then after 5 s, 5 min, 30 min, 2 h, 5 h, 10 h and 10 h, until any 2xx; the endpoint is disabled after"
        " about 5 days of failure [resend.com/docs/webhooks/retries-and-replays, svix-docs]"
    ),
    redelivers_for=timedelta(hours=27),
    look_up=(
        "by time and recipient: GET /emails lists newest first, without filter or tags; GET /emails/{id} shows the"
        " tags, where our key is compared [resend/resend-node 6.22, resend.com/changelog/list-sent-emails-endpoint]. It"
        " needs an api_key of full access and keeps 30 days; one call an e-mail, 2 calls/s. What was sent by SMTP shows"
        " no tags. How soon it shows a send is not documented: 15 min are allowed for"
    ),
    registration="POST /webhooks {endpoint, events} answers id and signing_secret [resend/resend-openapi]",
    sources="github.com/resend/resend-openapi, resend-node 6.22, resend.com/docs, github.com/svix/svix-docs",
    same_key_window=timedelta(hours=24),
    native_key=(
        "header Idempotency-Key (by SMTP Resend-Idempotency-Key), kept 24 hours: the same request is answered with the"
        " first id and nothing is sent; 409 invalid_idempotent_request proves that an earlier request with the key was"
        " taken, but not its id; 409 concurrent_idempotent_requests only that one is running; 400"
        " invalid_idempotency_key that nothing was taken [resend.com/docs/dashboard/emails/idempotency-keys]"
    ),
    finds_by="recipient",
    kept_for=timedelta(days=30),
    lists=True,
    tolerance=timedelta(minutes=5),
    setup=(
        "Webhooks > Add webhook: enter {url}",
        "Tick every event that begins with email., but not email.received",
        "Copy the signing secret (whsec_...) of this webhook into secrets; while it is rotated keep both",
        "Nothing is to be switched on for the key: the tag send_key comes back by itself",
        "For look-ups and this set-up set api_key to an API key of full access; a sending key can't read",
        "Send to one recipient at a time: events of a message to several don't say which of them they are about",
        "After about 5 days of failure Resend disables the webhook: switch it on again here, and replay there",
    ),
    key_is_echoed_in=(
        "every email.* event of an outbound message; contact.*, domain.* and suppression.* are about no send"
    ),
)

_ACCEPTED: Final = Testimony.ACCEPTED
_REJECTED: Final = Testimony.REJECTED
_NONE: Final = Testimony.NONE

MEANINGS: Final = MappingProxyType(
    {
        "email.sent": (Kind.SENT, _ACCEPTED),
        "email.scheduled": (Kind.QUEUED, _ACCEPTED),
        "email.delivered": (Kind.DELIVERED, _ACCEPTED),
        "email.delivery_delayed": (Kind.DEFERRED, _ACCEPTED),
        "email.bounced": (Kind.BOUNCED, _ACCEPTED),
        "email.complained": (Kind.COMPLAINED, _ACCEPTED),
        "email.opened": (Kind.OPENED, _ACCEPTED),
        "email.clicked": (Kind.CLICKED, _ACCEPTED),
        "email.failed": (Kind.FAILED, _REJECTED),
        "email.suppressed": (Kind.REJECTED, _REJECTED),
        "email.received": (Kind.INBOUND, _NONE),
    }
)
"""What each value of `type` means and proves; others (contact.*, domain.*, suppression.*) speak of no send
[resend/resend-node webhook-event.interface.ts, resend/resend-openapi]."""

_STATES: Final = MappingProxyType(
    {
        **{name.removeprefix("email."): meaning for name, meaning in MEANINGS.items()},
        "queued": (Kind.QUEUED, _ACCEPTED),
        "canceled": (Kind.FAILED, _REJECTED),  # it was scheduled, and somebody took it back
    }
)
"""What each `last_event` of an e-mail means and proves [resend/resend-openapi Email]."""

_API: Final = "https://api.resend.com"
_PAGE: Final = 100
"""Items on a page, at most [resend/resend-openapi PaginationLimit]."""
_EVENTS: Final = tuple(name for name, (_, testimony) in MEANINGS.items() if testimony is not _NONE)

_SUPPRESSED: Final = (Kind.REJECTED, _REJECTED)
_REASONS: Final = (("bounce", "message"), ("failed", "reason"), ("suppressed", "message"))
_TELLS_APART: Final = (("click", "link"), ("click", "timestamp"), ("id",))

_REPLIES: Final = MappingProxyType(
    all_mean("accepted", "invalid_idempotent_request")
    | all_mean("ambiguous", "concurrent_idempotent_requests")
    | all_mean("rejected", "invalid_idempotency_key")
    | all_mean("not_sent", "missing_api_key", "restricted_api_key", "invalid_api_key", "rate_limit_exceeded")
    | all_mean("not_sent", "daily_quota_exceeded", "monthly_quota_exceeded")
)
"""What names of errors prove; of others the status [resend.com/docs/api-reference/errors]. Another payload under the
same key: an earlier request was taken."""


class Resend:
    """Resend as the receiver and the sender's side know it."""

    name: Final = "resend"
    facts: Final = FACTS

    def stamp(self, wire_key: str) -> Stamp:
        """Return tag, header and native idempotency key (kept 24 hours: the same request sends nothing again)."""
        return Stamp(
            body={"tags": [{"name": "send_key", "value": wire_key}]},
            headers={"Idempotency-Key": wire_key},
            smtp_headers={"X-Send-Key": wire_key, "Resend-Idempotency-Key": wire_key},
        )

    def read_reply(self, status: int, headers: Mapping[str, str], body: bytes) -> list[Reply]:  # noqa: ARG002
        """Return the answer to a message, or to each of a batch."""
        said = load_or_none(body)
        if not is_success(status):
            return [by_code(status, text_at(said, "name"), _REPLIES)]
        sent, refused = at(said, "data"), at(said, "errors")
        if not isinstance(sent, list):
            return by_ids(status, [id_at(said, "id")])
        replies = by_ids(status, [id_at(email, "id") for email in sent]) if sent else []
        return each(_with_refused(status, replies, refused) if refused else replies or [unclear(status)])

    async def verify(self, delivery: Delivery, feed: Feed, now: datetime, fetch: Fetch) -> Verdict:  # noqa: ARG002
        """Judge the signature against each of the feed's `whsec_` secrets."""
        return standard_webhook(delivery, feed.secrets, now, feed.tolerance)

    def parse(self, delivery: Delivery) -> Parsed:
        """Return the one event of the delivery."""
        body = load_object(delivery.body)
        name = text_at(body, "type")
        if name is None:
            raise BadPayload("no type: not a Resend event")
        data = at(body, "data")
        kind, testimony = _meaning(name, data)
        event = Event(
            kind=kind,
            testimony=testimony,
            message_id=id_at(data, "email_id"),
            event_id=bounded_id(standard_webhook_id(delivery) or _event_id(name, body)),
            send_key=None if kind is Kind.INBOUND else _send_key(data),  # others write what comes in
            recipient=_recipient(data),
            occurred_at=iso_time(at(body, "created_at")),
            reason=short(first(text_at(data, *path) for path in _REASONS)),
            raw=delivery.body,
        )
        return Parsed((event,))

    def sample(self, kind: str, wire_key: str, feed: Feed, now: datetime) -> Delivery:
        """Return an example delivery, signed with the feed's first `whsec_` secret or carrying its credential."""
        body = _sample_body(sampled_name(self.name, kind, MEANINGS), wire_key, now)
        keys = standard_webhook_keys(feed.secrets)
        signed = _signature(keys[0], body, now) if keys else None
        return sample_delivery(body, feed.secrets, signed, "the feed has no whsec_ secret to sign with")

    def objection(self, setting: Literal["secrets", "topics"], value: str) -> str | None:
        """Return what is wrong with a secret that is no `whsec_` signing secret."""
        return standard_webhook_objection(value) if setting == "secrets" else None

    async def search(self, query: Query, feed: Feed, api: Api) -> AsyncIterator[Event]:
        """Yield each e-mail of the span, to the query's recipient if there is one, as it is retrieved by its id.

        Raises ApiError where one of a recipient's shows no key: sent by SMTP, it may be the sought one.
        """
        shown = Shown(query)
        async for listed in _emails(query.since, feed, api):
            if _time(listed) > query.until or not _may_be_to(listed, query):
                continue
            event = _found(await _call(api, feed, "GET", f"/emails/{quote(needed(listed, 'id'), safe='')}"))
            shown.note(event, unnamed=event.send_key is None)
            yield event
        if query.recipient:
            shown.settle("an e-mail to this recipient shows no tag send_key, so it may be the sought one")

    async def changes(self, url: str, feed: Feed, api: Api) -> list[Change]:
        """Return what the webhook with our URL lacks, or its creation, which answers its signing secret."""
        async for webhook in _listed("/webhooks", feed, api):
            if (text_at(webhook, "endpoint") or "").partition("?")[0] == url:
                return _corrections(webhook, feed, api)
        text = f"create the webhook with {', '.join(_EVENTS)}"
        return [Change(text, partial(_create, {"endpoint": url, "events": list(_EVENTS)}, feed, api))]


def _with_refused(status: int, sent: list[Reply], refused: object) -> list[Reply]:
    """Return replies in the order of the call: a permissive batch lists apart, by place, what was not valid."""
    places = [at(error, "index") for error in refused] if isinstance(refused, list) else [None]
    replies, known = list(sent), [place for place in places if type(place) is int]
    for place in sorted(known):
        if not 0 <= place <= len(replies):
            return [unclear(status)]
        replies.insert(place, Reply("rejected", "invalid in a batch"))
    return replies if len(known) == len(places) else [unclear(status)]


def _meaning(name: str, data: object) -> tuple[Kind, Testimony]:
    return _SUPPRESSED if _is_old_suppression(name, data) else MEANINGS.get(name, UNKNOWN)


def _is_old_suppression(name: str, data: object) -> bool:
    # Before email.suppressed existed, a suppressed send was reported as a bounce [anymail/webhooks/resend.py].
    if name != "email.bounced":
        return False
    sub_type, message = (text_at(data, "bounce", field) or "" for field in ("subType", "message"))
    return "suppress" in sub_type.lower() or "suppressed sending" in message.lower()


def _send_key(data: object) -> str | None:
    return _named(at(data, "tags"), "send_key") or _named(at(data, "headers"), "x-send-key")


def _named(pairs: object, wanted: str) -> str | None:
    # Tags come as an object, headers as a list of {name, value}; either is taken for both.
    for name, value in _pairs(pairs):
        if isinstance(name, str) and name.lower() == wanted:
            return text_at(value)
    return None


def _pairs(value: object) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list):
        yield from ((at(entry, "name"), at(entry, "value")) for entry in value)


def _everybody(data: object) -> list[Any]:
    listed = [at(data, field) for field in ("to", "cc", "bcc")]
    return [address for entry in listed for address in (entry if isinstance(entry, list) else [entry]) if address]


def _recipient(data: object) -> str | None:
    everybody = _everybody(data)
    if len(everybody) > 1:
        return None  # the event doesn't say which of them it is about
    return text_at(everybody[0]) if everybody else text_at(data, "email")


def _event_id(name: str, body: dict[str, Any]) -> str:
    data = at(body, "data")
    rest = [text_at(data, *path) for path in (("email_id",), *_TELLS_APART)]
    return derived_id("resend", name, text_at(body, "created_at"), _recipient(data), *rest)


async def _call(api: Api, feed: Feed, method: str, path: str, **sent: Any) -> Any:
    login = bearer(credential(feed.api_key, "api_key", feed))
    return (await api.call(method, (feed.api_url or _API) + path, headers=login, **sent)).value


async def _listed(path: str, feed: Feed, api: Api) -> AsyncIterator[Any]:
    """Yield what a list holds, page by page. Raises ApiError."""
    pages, params, more = Pages(), {"limit": str(_PAGE)}, True
    while more:
        answer = await _call(api, feed, "GET", path, params=params)
        page, more = items(answer, "data"), at(answer, "has_more")
        for item in page:
            yield item
        if not isinstance(more, bool) or (more and not page):
            raise ApiError("garbage", "the API does not say where its list ends")
        if more:
            params["after"] = needed(page[-1], "id")
            pages.turn(params["after"])


async def _emails(since: datetime, feed: Feed, api: Api) -> AsyncIterator[Any]:
    """Yield listed e-mails, newest first, until one is older. Raises ApiError."""
    async for listed in _listed("/emails", feed, api):
        if _time(listed) < since:
            return
        yield listed


def _time(email: object) -> datetime:
    if time := iso_time(at(email, "created_at")):
        return time
    raise ApiError("garbage", "an e-mail of the API's answer has no created_at")


def _may_be_to(email: object, query: Query) -> bool:
    return any(query.may_be_to(text_at(address)) for address in _everybody(email) or [None])


def _found(email: object) -> Event:
    state = text_at(email, "last_event")
    kind, testimony = _STATES.get(state or "", UNKNOWN)
    return Event(
        kind=kind,
        testimony=testimony,
        message_id=needed(email, "id"),
        event_id=derived_id("resend", "look-up", needed(email, "id"), state),
        send_key=_send_key(email),
        recipient=_recipient(email),
        occurred_at=_time(email),
        reason=short(state) if kind is Kind.UNKNOWN else None,
        raw=msgspec.json.encode(email),
    )


def _corrections(webhook: dict[str, Any], feed: Feed, api: Api) -> list[Change]:
    """Return the one change that a webhook with our URL needs, if any."""
    ticked = list_at(webhook, "events")
    missing = [name for name in _EVENTS if name not in ticked]
    disabled = webhook.get("status") != "enabled"
    needs = [f"add {', '.join(missing)}"] if missing else []
    needs += ["enable it"] if disabled else []
    body = {"events": [*ticked, *missing], "status": "enabled"}
    identity = needed(webhook, "id")
    change = Change(f"webhook {identity}: {' and '.join(needs)}", partial(_update, identity, body, feed, api))
    return [change] if needs else []


async def _create(body: Mapping[str, object], feed: Feed, api: Api) -> str:
    secret = text_at(await _call(api, feed, "POST", "/webhooks", json=body), "signing_secret")
    return f'set feeds.{feed.name}.secrets to "{secret}"' if secret else "copy the webhook's signing secret to secrets"


async def _update(webhook: str, body: Mapping[str, object], feed: Feed, api: Api) -> None:
    await _call(api, feed, "PATCH", f"/webhooks/{quote(webhook, safe='')}", json=body)


def _sample_body(name: str, wire_key: str, now: datetime) -> bytes:
    when = now.isoformat()
    data = {
        "email_id": "sample-" + derived_id("sample", wire_key)[:32],
        "created_at": when,
        "to": ["sample@example.com"],
        "tags": {"send_key": wire_key},
    }
    return json.dumps({"type": name, "created_at": when, "data": data}).encode()


def _signature(key: bytes, body: bytes, now: datetime) -> dict[str, str]:
    message_id, timestamp = "msg_" + derived_id("sample", body.decode()), str(int(now.timestamp()))
    signature = sign_standard_webhook(key, message_id, timestamp, body)
    return {"svix-id": message_id, "svix-timestamp": timestamp, "svix-signature": signature}


PROVIDER: Final[Provider] = Resend()
