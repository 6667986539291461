# SPDX-License-Identifier: Apache-2.0
"""Mailgun, v3 Messages and webhooks: one event about one recipient in each POST, its signature inside the body.

Webhooks are JSON; those set up long ago are still forms, which are read as the JSON that says the same.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from datetime import datetime, timedelta
from functools import lru_cache, partial
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import quote

import msgspec

from webhooks import asking
from webhooks.asking import Api, ApiError, Change, Pages, Query, Shown, basic, credentials, items, needed
from webhooks.event import Event, Kind, Testimony, bounded_id, derived_id, is_plain_address
from webhooks.forms import form_fields
from webhooks.payload import at, first, list_at, load_object, load_or_none, load_text, short, text_at, unix_time
from webhooks.provider import (
    UNKNOWN,
    BadPayload,
    Delivery,
    Facts,
    Feed,
    Fetch,
    NoSample,
    Parsed,
    Provider,
    Refused,
    Stamp,
    Verdict,
    Verified,
)
from webhooks.reply import Reply, by_ids
from webhooks.signature import (
    NO_SECRET,
    carries_credential,
    hmac_sha256,
    judge_age,
    same,
    sample_delivery,
    signing_secrets,
)

FACTS: Final = Facts(
    title="Mailgun (v3 Messages, webhooks)",
    key_slot=(
        "form field v:send_key (SMTP: JSON in the header X-Mailgun-Variables); comes back as event-data.user-variables"
        ".send_key, in legacy forms as X-Mailgun-Variables of message-headers or as a field send_key. Recipients can"
        " read it; more than 4 KB of variables are cut off in events [mailgun/documentation user_manual.rst,"
        " mailgun/mailgun-mcp-server openapi.yaml, anymail/webhooks/mailgun.py]"
    ),
    first_evidence="accepted: taken and queued [documentation.mailgun.com user-manual/events/event-types]",
    event_id=(
        "event-data.id, unique within a day [mailgun/documentation api-events.rst], so with the UTC day of the event's"
        " own timestamp; the message id beside it tells the domains of an account apart. Legacy forms have none: a hash"
        " over message, event, recipient, time, URL and IP address. Not the signature's token: whether a retry repeats"
        " it is not documented"
    ),
    authentication=(
        "hex HMAC-SHA256 over timestamp and token, inside the JSON or form. The body itself is not covered, so that one"
        " captured timestamp, token and signature verify any body for ever: only TLS limits that, and a tolerance,"
        " with which late retries are refused. Tokens are not remembered: several receivers would have to share them,"
        " and a retry may carry the same one. secrets: the HTTP webhook signing key, which is not the API key; events"
        " of a subaccount are signed with the parent account's key too"
        " [documentation.mailgun.com user-manual/webhooks/securing-webhooks, anymail/django-anymail#153]"
    ),
    signs_body=False,
    signs_time=True,
    redelivery=(
        "over 8 hours (5, 10, 15 min, 1, 2, 4 h) until 200; 406 ends it at once; for delivered the documents contradict"
        " each other [documentation.mailgun.com user-manual/webhooks/webhook-retries, mailgun/documentation#317]"
    ),
    redelivers_for=timedelta(hours=8),
    look_up=(
        "not by our key: GET /v3/{domain}/events by recipient and time, then compare user-variables; what was rejected"
        " has no recipient and is asked for apart. A page is to be trusted after half an hour; events are kept for a"
        " day on free plans, else for 3 to 30; deprecated for the Logs API, whose filters are not published. api_key:"
        " an API key; api_scope: the sending domain; api_url: https://api.eu.mailgun.net for domains in the EU"
        " [mailgun/documentation api-events.rst, mailgun/mailgun-mcp-server openapi.yaml]"
    ),
    registration=(
        "POST /v4/domains/{domain}/webhooks with url and event_types (accepted, delivered, temporary_fail,"
        " permanent_fail, opened, clicked, unsubscribed, complained); three URLs an event type, 300 requests a minute"
        " [mailgun/mailgun-mcp-server openapi.yaml, mailgun/documentation api-webhooks.rst]"
    ),
    sources=(
        "github.com/mailgun/documentation (2024-07), github.com/mailgun/mailgun-mcp-server openapi.yaml (2026-07),"
        " documentation.mailgun.com, github.com/mailgun/mailgun-go events/enums.go"
    ),
    native_key=(
        "none: no field or header of its API is one, and v:idempotency-key would be a variable like any other"
        " [mailgun/mailgun-mcp-server openapi.yaml]"
    ),
    finds_by="recipient",
    lists=True,
    settles_after=timedelta(minutes=30),
    setup=(
        "Sending > Webhooks, the domain: add {url} for each event type (an event type takes three URLs at most)",
        "The event types are accepted, delivered, temporary and permanent failure, opened, clicked, unsubscribed, spam",
        "Add it to the domain or to the account, not to both: each event would come twice",
        "Set secrets to the HTTP webhook signing key (it is not the API key); a new one replaces the old at once",
        'Use TLS: one captured signature fits any body for ever; tolerance = "15m" limits it, but refuses late retries',
        "Send v:send_key with each message, by SMTP the header X-Mailgun-Variables; in a batch, one key a recipient",
        "Switch on the domain's open and click tracking, if opened and clicked are wanted",
        "For look-ups, set api_key, api_scope to the domain and, in the EU, api_url to https://api.eu.mailgun.net",
    ),
    key_is_echoed_in=(
        "every event but delayed bounces, whose user-variables are empty [mailgun/documentation api-events.rst]"
    ),
)

_ACCEPTED: Final = Testimony.ACCEPTED
_REJECTED: Final = Testimony.REJECTED
_NONE: Final = Testimony.NONE

MEANINGS: Final = MappingProxyType(
    {
        "accepted": (Kind.QUEUED, _ACCEPTED),
        "delivered": (Kind.DELIVERED, _ACCEPTED),
        "opened": (Kind.OPENED, _ACCEPTED),
        "clicked": (Kind.CLICKED, _ACCEPTED),
        "unsubscribed": (Kind.UNSUBSCRIBED, _ACCEPTED),
        "complained": (Kind.COMPLAINED, _ACCEPTED),
        "rejected": (Kind.REJECTED, _REJECTED),  # no webhook of its own; seen in the Events API
        "bounced": (Kind.BOUNCED, _ACCEPTED),  # of legacy forms
        "stored": (Kind.INBOUND, _NONE),
    }
)
"""What each value of `event` means and proves, but `failed` and, in legacy forms, `dropped`
[documentation.mailgun.com events/event-types, anymail/webhooks/mailgun.py]."""

_NEVER_TRIED: Final = frozenset({"605", "606", "607"})
"""Codes of failures by a suppression list: bounced, unsubscribed, complained [mailgun/mailgun-go events/enums.go]."""

_EVENT_TYPES: Final = (
    *("accepted", "delivered", "temporary_fail", "permanent_fail"),
    *("opened", "clicked", "unsubscribed", "complained"),
)
_MAX_URLS: Final = 3
"""URLs that one event type is posted to [mailgun/mailgun-mcp-server openapi.yaml]."""

_FAILURES: Final = ("failed", "dropped")
_REASONED: Final = (*_FAILURES, "bounced", "rejected")

_API: Final = "https://api.mailgun.net"
_PAGE: Final = 300
"""Events on a page, at most [mailgun/documentation api-events.rst]."""


class Mailgun:
    """Mailgun as the receiver and the sender's side know it."""

    name: Final = "mailgun"
    facts: Final = FACTS

    def stamp(self, wire_key: str) -> Stamp:
        """Return the user variable that makes the key come back; there is no native idempotency key."""
        return Stamp(
            body={"v:send_key": wire_key},
            smtp_headers={"X-Mailgun-Variables": msgspec.json.encode({"send_key": wire_key}).decode()},
        )

    def read_reply(self, status: int, headers: Mapping[str, str], body: bytes) -> list[Reply]:  # noqa: ARG002
        """Return the one answer to all recipients."""
        return by_ids(status, [_bare(text_at(load_or_none(body), "id"))], for_all=True)

    async def verify(self, delivery: Delivery, feed: Feed, now: datetime, fetch: Fetch) -> Verdict:  # noqa: ARG002
        """Judge the signature inside the body against each of the feed's keys, or the credential of the request."""
        if not any(feed.secrets):
            return NO_SECRET
        if carries_credential(delivery, feed.secrets):
            return Verified()
        return _judge(_signature_block(delivery), signing_secrets(feed.secrets), feed, now)

    def parse(self, delivery: Delivery) -> Parsed:
        """Return the one event of a webhook, JSON or a legacy form."""
        data = _webhook(delivery.body).get("event-data")
        if not isinstance(data, dict):
            raise BadPayload("no event-data object: not a webhook of Mailgun")
        return Parsed((_event(data, delivery.body),))

    async def search(self, query: Query, feed: Feed, api: Api) -> AsyncIterator[Event]:
        """Yield the events of a span of time, for one recipient where the query names it; ids are the webhooks'.

        Raises ApiError where one that may be the recipient's shows no key: it may be the sought one.
        """
        begin, end = query.seconds()
        span = {"begin": str(begin), "end": str(end), "ascending": "yes", "limit": str(_PAGE)}
        shown = Shown(query)
        for filters in _filters(query.recipient):
            async for item in _listed(feed, api, {**span, **filters}):
                event = _found(item)
                shown.note(event, unnamed=query.is_unnamed(event))
                yield event
        if query.recipient:
            shown.settle("an event of this recipient's, or of nobody's in particular, shows no send_key")

    async def changes(self, url: str, feed: Feed, api: Api) -> list[Change]:
        """Return one change for each event type that is not posted to the URL; other URLs stay as they are."""
        there = at((await _call(feed, api, "GET", f"/v3/domains/{_domain(feed)}/webhooks")).value, "webhooks")
        if not isinstance(there, dict):
            raise ApiError("garbage", "the API's answer does not list the domain's webhooks")
        urls = {name: list_at(there, name, "urls") for name in _EVENT_TYPES}  # one that isn't set is null or missing
        return [_addition(name, urls[name], url, feed, api) for name in _EVENT_TYPES if url not in urls[name]]

    def sample(self, kind: str, wire_key: str, feed: Feed, now: datetime) -> Delivery:
        """Return an example delivery, by Mailgun's names of events and webhooks or by normalised kinds."""
        name = _SAMPLED.get(kind, kind)
        if name not in _SAMPLES:
            raise NoSample(f"mailgun has no sample {kind!r}; there are {', '.join((*_SAMPLES, *_SAMPLED))}")
        keys = signing_secrets(feed.secrets)
        body = {
            "signature": _signature(keys[0] if keys else "", name, wire_key, now),
            "event-data": _sample_event(name, wire_key, now),
        }
        needs = "the feed has no secrets, so no sample would be taken: set feeds.<name>.secrets"
        return sample_delivery(msgspec.json.encode(body), feed.secrets, {} if keys else None, needs)


def _signature_block(delivery: Delivery) -> Any:
    try:
        return _webhook(delivery.body).get("signature")
    except BadPayload:
        return None


def _judge(block: Any, keys: tuple[str, ...], feed: Feed, now: datetime) -> Verdict:
    timestamp, token = text_at(block, "timestamp"), text_at(block, "token")
    given = [signature for name in ("signature", "parent-signature") if (signature := text_at(block, name))]
    if not (timestamp and token and given):
        return Refused("missing", "no signature in the body: is it a webhook of Mailgun?")
    message = f"{timestamp}{token}".encode("utf-8", "surrogatepass")
    wanted = [hmac_sha256(key, message).hex() for key in keys]
    if not any([same(signature, want) for signature in given for want in wanted]):
        return Refused("signature", "no key of the feed fits; it takes the HTTP webhook signing key, not the API key")
    return judge_age(timestamp, now, feed.tolerance)


@lru_cache(maxsize=1)  # `verify` and `parse` read the same body, one right after the other
def _webhook(body: bytes) -> dict[str, Any]:
    """Return the JSON of a webhook; of a legacy form, the JSON that says the same. Not to be changed."""
    try:
        return load_object(body)
    except BadPayload:
        if body.lstrip().startswith(b"{"):
            raise
    return _as_json(_form(body))


def _form(body: bytes) -> list[tuple[str, str]]:
    boundary = body.partition(b"\r\n")[0]
    if not boundary.startswith(b"--"):
        return form_fields(Delivery(body, {}))
    # What was kept of a multipart form has no header that says so.
    content_type = f'multipart/form-data; boundary="{boundary[2:].decode("latin-1")}"'
    return form_fields(Delivery(body, {"content-type": content_type}))


def _as_json(fields: list[tuple[str, str]]) -> dict[str, Any]:
    # The user's variables lie among Mailgun's fields. Of two of one name Mailgun's is the first, but of those of the
    # signature the last [anymail/webhooks/mailgun.py].
    form, last = dict(reversed(fields)), dict(fields)
    incoming = "X-Mailgun-Incoming" in form or form.keys() >= {"sender", "from"}
    if not incoming and "event" not in form:
        raise BadPayload("neither JSON nor a form of Mailgun's legacy webhooks")
    description = first(form.get(name) for name in ("description", "error", "notification"))
    return {
        "signature": {name: last.get(name) for name in ("timestamp", "token", "signature")},
        "event-data": {
            # What a route passes on holds the headers of a stranger's mail as fields, `event` may be one of them.
            "event": "stored" if incoming else form["event"],
            "timestamp": last.get("timestamp"),
            "message": {"headers": {"message-id": form.get("Message-Id") or form.get("message-id")}},
            "user-variables": {"send_key": _form_key(form)},
            "delivery-status": {"code": form.get("code"), "description": description},
            **{name: form.get(name) for name in ("recipient", "reason", "url", "ip")},
        },
    }


def _form_key(form: Mapping[str, str]) -> str | None:
    """Return our key from the message's own variables; opens, clicks and unsubscribes have it as a field only."""
    for header in list_at(load_text(form.get("message-headers"))):
        match header:
            case ["X-Mailgun-Variables", variables] if key := _send_key(variables):
                return key
    return form.get("send_key")


def _event(data: dict[str, Any], raw: bytes) -> Event:
    name, send_key = text_at(data, "event") or "", _send_key(data.get("user-variables"))
    message_id, occurred_at = _bare(text_at(data, "message", "headers", "message-id")), unix_time(data.get("timestamp"))
    incoming = _is_incoming(name, data, send_key)
    kind, testimony = _failure(data) if name in _FAILURES else MEANINGS.get(name, UNKNOWN)
    if incoming:
        kind, testimony = Kind.INBOUND if kind is Kind.QUEUED else kind, _NONE
    return Event(
        kind=kind,
        testimony=testimony,
        message_id=message_id,
        event_id=_event_id(data, message_id, occurred_at),
        send_key=None if incoming else send_key,  # others write what comes in
        recipient=text_at(data, "recipient"),
        occurred_at=occurred_at,
        reason=_reason(data) if name in _REASONED else None,
        raw=raw,
    )


def _send_key(variables: object) -> str | None:
    # The Logs API and the header of a message write the variables as JSON text.
    return text_at(load_text(variables) if isinstance(variables, str) else variables, "send_key")


def _bare(message_id: str | None) -> str | None:
    bare = (message_id or "").strip("<> ")
    return bounded_id(bare) if bare else None


def _failure(data: dict[str, Any]) -> tuple[Kind, Testimony]:
    if data.get("severity") == "temporary":
        return Kind.DEFERRED, _ACCEPTED
    code, description = (text_at(data, "delivery-status", name) for name in ("code", "description"))
    reason = text_at(data, "reason") or ""
    if reason.startswith("suppress-") or (description or "").startswith("Not delivering to") or code in _NEVER_TRIED:
        return Kind.REJECTED, _REJECTED
    return Kind.BOUNCED, _ACCEPTED


def _is_incoming(name: str, data: dict[str, Any], send_key: str | None) -> bool:
    """Say whether the event is about mail that came in or that a route passed on, which proves nothing of a send.

    A stranger can write our key into the headers of such mail, so a route decides whatever the key says. Without one,
    `is-authenticated` false speaks only where no key came back: samples of ordinary sends have it too
    [mailgun/mailgun-go events_test.go].
    """
    if data.get("routes") or name == "stored" or at(data, "flags", "is-routed") is True:
        return True
    return name == "accepted" and not send_key and at(data, "flags", "is-authenticated") is False


def _event_id(data: dict[str, Any], message_id: str | None, occurred_at: datetime | None) -> str:
    if identity := text_at(data, "id"):
        return bounded_id(f"{identity}:{occurred_at.date().isoformat()}" if occurred_at else identity)
    told_apart = (text_at(data, name) for name in ("event", "severity", "recipient", "url", "ip"))
    return derived_id("mailgun", message_id, repr(occurred_at and occurred_at.timestamp()), *told_apart)


def _reason(data: dict[str, Any]) -> str | None:
    status = data.get("delivery-status")
    return short(
        text_at(data, "reason") or text_at(data, "reject", "reason"),
        text_at(status, "code"),
        text_at(status, "description") or text_at(status, "message"),
    )


async def _call(feed: Feed, api: Api, method: str, path: str, **sent: Any) -> asking.ApiReply:
    key, _ = credentials(feed, "api_key", "api_scope")
    login = basic("api", key)
    return await api.call(method, (feed.api_url or _API) + path, headers=login, **sent)


def _domain(feed: Feed) -> str:
    _, scope = credentials(feed, "api_key", "api_scope")
    return quote(scope, safe="")


def _filters(recipient: str | None) -> list[dict[str, str]]:
    # Filters are expressions, in which words and signs have a meaning [api-events.rst]; a plain address has none.
    if recipient and is_plain_address(recipient):
        return [{"recipient": recipient}, {"event": "rejected"}]  # what was rejected has no recipient
    return [{}]


async def _listed(feed: Feed, api: Api, params: Mapping[str, str]) -> AsyncIterator[dict[str, Any]]:
    """Yield the items of all pages: each names a next one, the last of them is empty [api-events.rst]."""
    path, pages = f"/v3/{_domain(feed)}/events", Pages()
    reply = await _call(feed, api, "GET", path, params=params)
    while found := items(reply.value, "items"):
        for item in found:
            yield item
        # Of the next page's address only its own part is used: our credential goes to no other place.
        page = (text_at(reply.value, "paging", "next") or "").partition("/events/")[2]
        if not page:
            raise ApiError("garbage", "the API names no next page after one that is not empty")
        pages.turn(page)
        reply = await _call(feed, api, "GET", f"{path}/{page}")


def _found(item: dict[str, Any]) -> Event:
    """Return a listed event, kept as its webhook says it, so that it is read in one way. Raises ApiError."""
    needed(item, "event")
    return _event(item, json.dumps({"event-data": item}).encode())


def _addition(name: str, others: list[Any], url: str, feed: Feed, api: Api) -> Change:
    make = partial(_add, name, url, feed, api) if len(others) < _MAX_URLS else partial(_refuse, name)
    return Change(f"add the endpoint to the URLs of {name}", make)


async def _refuse(name: str) -> None:
    raise ApiError("refused", f"{name} has {_MAX_URLS} URLs, as many as Mailgun takes: remove one by hand")


async def _add(name: str, url: str, feed: Feed, api: Api) -> None:
    wanted = {"url": url, "event_types": name}
    place, refused = f"/v4/domains/{_domain(feed)}/webhooks", HTTPStatus.BAD_REQUEST
    reply = await _call(feed, api, "POST", place, form=wanted, expect=(refused,))
    if reply.status == refused and "already exists" not in (text_at(reply.value, "Reason") or ""):
        raise ApiError("refused", "Mailgun refused the URL: public DNS has to know its host")


_BOUNCED: Final = {"event": "failed", "severity": "permanent", "reason": "bounce", "delivery-status": {"code": 550}}

_SAMPLES: Final[Mapping[str, Mapping[str, object]]] = MappingProxyType(
    {
        "accepted": {"event": "accepted"},
        "delivered": {"event": "delivered"},
        "permanent_fail": _BOUNCED,
        "temporary_fail": {**_BOUNCED, "severity": "temporary", "reason": "generic", "delivery-status": {"code": 451}},
        "rejected": {**_BOUNCED, "reason": "suppress-bounce", "delivery-status": {"code": 605}},
        "opened": {"event": "opened"},
        "clicked": {"event": "clicked", "url": "https://example.com/"},
        "complained": {"event": "complained"},
        "unsubscribed": {"event": "unsubscribed"},
    }
)
_SAMPLED: Final[Mapping[str, str]] = MappingProxyType(
    {"queued": "accepted", "failed": "permanent_fail", "bounced": "permanent_fail", "deferred": "temporary_fail"}
)
"""The sample of each other name that may be asked for."""


def _sample_event(name: str, wire_key: str, now: datetime) -> dict[str, object]:
    return {
        "id": derived_id("sample", name, wire_key, now.isoformat())[:22],
        "timestamp": now.timestamp(),
        "user-variables": {"send_key": wire_key},
        "message": {"headers": {"message-id": f"sample.{derived_id(wire_key)[:16]}@example.com"}},
        "recipient": "sample@example.com",
        **_SAMPLES[name],
    }


def _signature(key: str, name: str, wire_key: str, now: datetime) -> dict[str, str]:
    timestamp = str(int(now.timestamp()))
    token = derived_id("token", name, wire_key, now.isoformat())
    return {
        "timestamp": timestamp,
        "token": token,
        "signature": hmac_sha256(key, f"{timestamp}{token}".encode()).hex(),
    }


PROVIDER: Final[Provider] = Mailgun()
