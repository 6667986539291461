# SPDX-License-Identifier: Apache-2.0
"""Scaleway Transactional Email (TEM): each event is one message of a topic of Topics and Events, which speaks SNS.

SW-D is the public source of Scaleway's documentation, SW-SDK its Python SDK.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Final, Literal

import msgspec

from webhooks import sns
from webhooks.asking import Api, ApiError, Pages, Query, credentials, items, needed, utc
from webhooks.event import Event, Kind, Testimony, derived_id, is_plain_address
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
from webhooks.reply import Reply, by_ids, first_of
from webhooks.signature import sample_delivery

FACTS: Final = Facts(
    title="Scaleway Transactional Email (API, SMTP)",
    key_slot=(
        "additional_headers [{key: X-Send-Key}], by SMTP the header itself; comes back in email_headers [{key, value}]"
        " [SW-D webhook-events-payloads, SW-SDK CreateEmailRequest]"
    ),
    first_evidence="email_queued: the email was received and is being prepared to be sent [SW-D webhook-event-types]",
    event_id="id of the event, inside the SNS message, the same in the API's list [SW-D webhook-events-payloads]",
    authentication=(
        "SNS envelope, RSA signature version 1 (SHA-1); the certificate at SigningCertURL must go back to Scaleway's"
        " authority, whose root is built in (valid until 2032); topics on an allow-list. Without topics: basic:user:"
        "password in the subscription's URL [SW-D verifying-webhooks, topics-and-events-support; anymail/"
        "django-anymail#435]"
    ),
    signs_body=True,
    signs_time=True,
    by_topics=True,
    redelivery=(
        "failed after several tries; how many, for how long and after which answers is documented nowhere, and a"
        " delivery policy can't be set: fill gaps from the API's list [SW-SDK WebhookEventStatus, SW-D"
        " topics-and-events-support]"
    ),
    redelivers_for=timedelta(0),  # none is promised
    # Nowhere is said what a 4xx does; at Amazon it ends the delivery, so that a chain being renewed would lose events.
    refused_status=503,
    look_up=(
        "GET emails?mail_rcpt=&since=&until= lists what was taken, without headers; the key is compared in what GET"
        " webhooks/{id}/events?email_id= says of each, and what is listed without a key makes the answer silent."
        " api_key is a secret key, api_scope the project's ID. How soon a send is listed, and for how long, is not"
        " documented: 15 min and a day are allowed for [SW-SDK tem/v1alpha1/api.py]"
    ),
    registration=(
        "POST webhooks {domain_id, project_id, name, event_types, sns_arn}, after a topic with an HTTPS subscription"
        " was made; the receiver confirms subscriptions of the feed's topics [SW-D use-webhooks-with-sns-topics]"
    ),
    sources=(
        "SW-D: github.com/scaleway/docs-content pages/transactional-email and pages/topics-and-events; SW-SDK:"
        " github.com/scaleway/scaleway-sdk-python (2026-08)"
    ),
    tolerance=timedelta(hours=8),  # SNS signs the time of publishing, not of the attempt
    native_key="none [SW-SDK CreateEmailRequest]",
    finds_by="recipient",
    lists=True,
    key_is_echoed_in=(
        "every email_* event; not in blocklist_created, which is about an address. email_blocklisted has no message id:"
        " only the key tells which send it is about [SW-D webhook-events-payloads]"
    ),
    setup=(
        "Console, Topics and Events, region Paris: create a standard topic, set topics of this feed to its ARN",
        "Create a subscription of the topic, protocol HTTPS, endpoint {url}: the receiver confirms it by itself",
        "Transactional Email, domain, Webhooks: create one with this ARN for each domain you send from",
        "Tick email_queued, email_deferred, email_delivered, email_dropped, email_mailbox_not_found, email_spam",
        "Tick email_blocklisted and blocklist_created too: look-ups need the events of every type",
        "Nothing is to be switched on for the key: the header X-Send-Key comes back by itself",
        "Confirm with emails[].id of the answer, which events call email_id; its message_id is in no event",
        "For look-ups set api_key to a secret key that may read Transactional Email, api_scope to the project's ID",
        "Refused for certificate_issuer? Put the current sns-trust-chain.pem into the folder of certificates",
        "Without signatures: no topics, https://user:password@... as endpoint, basic:user:password in secrets",
        "A password confirms no subscription: then do so in the console, which fills in the SubscribeURL",
    ),
)

_ACCEPTED: Final = Testimony.ACCEPTED
_REJECTED: Final = Testimony.REJECTED

MEANINGS: Final = MappingProxyType(
    {
        "email_queued": (Kind.QUEUED, _ACCEPTED),
        "email_deferred": (Kind.DEFERRED, _ACCEPTED),
        "email_delivered": (Kind.DELIVERED, _ACCEPTED),
        "email_dropped": (Kind.BOUNCED, _ACCEPTED),  # by the recipient's server
        "email_mailbox_not_found": (Kind.BOUNCED, _ACCEPTED),
        "email_spam": (Kind.BOUNCED, _ACCEPTED),  # so a filter says, Scaleway's or the recipient's: nobody complained
        "email_blocklisted": (Kind.REJECTED, _REJECTED),
        "blocklist_created": UNKNOWN,
        "unknown_type": UNKNOWN,
    }
)
"""What each `type` means and proves [SW-D webhook-event-types]."""

_ROOT: Final = b"""\
-----BEGIN CERTIFICATE-----
MIIDKTCCAhGgAwIBAgIUY6AfGz9I3izxKghHlHm1nGZjDH4wDQYJKoZIhvcNAQEL
BQAwHDEaMBgGA1UEAxMRU2NhbGV3YXkgTW5RIFJvb3QwHhcNMjIwNjI4MjMxNDU3
WhcNMzIwNjI1MjMxNTI3WjAcMRowGAYDVQQDExFTY2FsZXdheSBNblEgUm9vdDCC
ASIwDQYJKoZIhvcNAQEBBQADggEPADCCAQoCggEBAMtSiWNtxnmn6xoQ9AV1EGvW
+AZEqKtbttclL1+FYhSbkpVG+ZqYACnAYnLO4ThXxvd/NGIGJhhGnUACcBieVeDa
mW7W0ihGS2hIhNmgF4Krk33YmH0Fv9g7sOLRQtUOdGDII+sC1gFQ62BkPWJE1sD9
+lH5klYACiIEEdQbXbq1WdxExzdteLLoAdQnHlgq2T5p6ExWHF2l47zoWx57GxGW
tpEUR8fNXjvrCaxT8SRGTHYrhdKuURu0wqeLe4ZKo1ZhkT2DmTUC/V44LKs+qHKP
4kP/TRPWPluSLlNCw2EENaAT7YjIYFXRgvhTUQDdDy8NqMlPlsyR91jWfgLOOSEC
AwEAAaNjMGEwDgYDVR0PAQH/BAQDAgEGMA8GA1UdEwEB/wQFMAMBAf8wHQYDVR0O
BBYEFGDBDigVCoj8/iud9o/2ZG5mH+G3MB8GA1UdIwQYMBaAFGDBDigVCoj8/iud
9o/2ZG5mH+G3MA0GCSqGSIb3DQEBCwUAA4IBAQBrTwDD8/DzPNNUAHZwcqi+XrnP
69Zb1QqLPaISVcSse0if/Qw/AhIV0jNEqhgM6eKRMzNLVjN1iBhMOX13RtF51z3O
GfVE9xIT8Rq8gs0fBCagAkFT1bhC0y679M0JQPWUPYYp21Dku95lV3jBAGRyH4ZP
gwvtCAEjdCNPFl9e5r6lYS0bJ/Ls66Cr/V0yk1EHdIxnhaCGD0q9WpfBmPyGwsLm
EfIUixJUQdqNztel4TzUMw+QpkmiQMFfEpLPFWZePMoIIXv7QR1URRkodwipqGa0
Awagvuiapfu5xxuxAful/bC6HFbVjg1su2IsUQKed/Pnvy2fQTNVlKiDQmhp
-----END CERTIFICATE-----
"""
"""Scaleway MnQ Root, valid until 2032-06-25: the first certificate of sns-trust-chain.pem, as symfony/symfony#65355
holds it against Scaleway's own file. Authorities below it are renewed sooner: they are fetched, and must go back to it.
"""

_TOPIC: Final = re.compile(r"arn:scw:sns:([a-z]{2}-[a-z]{3}):[A-Za-z0-9-]+:[A-Za-z0-9._-]+")
_API: Final = "https://api.scaleway.com"
_PATH: Final = "/transactional-email/v1alpha1/regions/fr-par"  # its only region [anymail/django-anymail docs]
_PAGE: Final = 100
"""Items on a page, at most [SW-SDK ListWebhookEventsRequest]."""
_NEWEST_FIRST: Final = "created_at_desc"


def _region(arn: str) -> str | None:
    found = _TOPIC.fullmatch(arn)
    return found[1] if found else None


def _host(arn: str) -> str | None:
    region = _region(arn)
    return f"sns.mnq.{region}.scaleway.com" if region else None


def _folder(arn: str) -> str | None:
    # All regions' folders are on one host [SW-D verifying-webhooks, python-node-topics-events].
    region = _region(arn)
    return f"https://messaging.s3.fr-par.scw.cloud/{region}/sns/" if region else None


SERVICE: Final = sns.Service(_host, _folder, re.compile(r"[A-Za-z0-9_.:-]+\.(?:crt|pem)"), _ROOT, "sns-trust-chain.pem")
"""Scaleway's SNS: hosts, and the authority of its signing certificates [SW-D create-manage-subscriptions]."""


class Scaleway:
    """Scaleway TEM as the receiver and the sender's side know it."""

    name: Final = "scaleway"
    facts: Final = FACTS

    def stamp(self, wire_key: str) -> Stamp:
        """Return the header that makes the key come back; there is no native idempotency key."""
        return Stamp(
            body={"additional_headers": [{"key": "X-Send-Key", "value": wire_key}]},
            smtp_headers={"X-Send-Key": wire_key},
        )

    def read_reply(self, status: int, headers: Mapping[str, str], body: bytes) -> list[Reply]:  # noqa: ARG002
        """Return the one answer to all recipients, each of whom has a message of its own: the first one's id."""
        return by_ids(status, [id_at(first_of(at(load_or_none(body), "emails")), "id")])

    async def verify(self, delivery: Delivery, feed: Feed, now: datetime, fetch: Fetch) -> Verdict:
        """Say whether one of the feed's topics signed the delivery, by a certificate of Scaleway's authority."""
        return await sns.verify(delivery, feed, now, fetch, SERVICE)

    def parse(self, delivery: Delivery) -> Parsed:
        """Return the one event of the delivery, out of its SNS envelope or bare."""
        raw, value = delivery.body, load_object(delivery.body)
        if about_subscription := sns.control(value, SERVICE):
            return about_subscription
        if value.get("Type") == sns.NOTIFICATION:
            raw = (text_at(value, "Message") or "").encode("utf-8", "surrogatepass")
            value = load_object(raw)
        return Parsed((_event(raw, value),))

    def sample(self, kind: str, wire_key: str, feed: Feed, now: datetime) -> Delivery:
        """Return an example message as it is inside of an envelope, carrying the feed's credential."""
        body = _sample_body(sampled_name(self.name, kind, MEANINGS), wire_key, now)
        needs = "only Scaleway can sign SNS messages, and the feed has no credential to carry: send a stamped mail"
        return sample_delivery(body, feed.secrets, None, needs)

    def objection(self, setting: Literal["secrets", "topics"], value: str) -> str | None:
        """Return what is wrong with a topic that is no ARN of Scaleway's."""
        if setting != "topics" or _region(value):
            return None
        return "is no ARN of a Scaleway topic: write arn:scw:sns:REGION:project-ID:NAME"

    async def search(self, query: Query, feed: Feed, api: Api) -> AsyncIterator[Event]:
        """Yield the events of e-mails to the recipient that were taken in the span; without one, all events of it."""
        webhooks = await _webhooks(feed, api)
        if query.recipient is None:
            for webhook in webhooks:
                async for event in _events_of_span(webhook, {}, query, feed, api):
                    yield event
            return
        async for event in _events_to_recipient(query.recipient, webhooks, query, feed, api):
            yield event


def _event(raw: bytes, message: dict[str, Any]) -> Event:
    name = text_at(message, "type")
    if name is None:
        raise BadPayload("no type: not an event of Scaleway TEM")
    kind, testimony = MEANINGS.get(name, UNKNOWN)
    return Event(
        kind=kind,
        testimony=testimony,
        message_id=id_at(message, "email_id"),
        event_id=id_at(message, "id") or _derived_id(name, message),
        send_key=_send_key(message.get("email_headers")),
        recipient=text_at(message, "email_to"),
        occurred_at=iso_time(message.get("created_at")),
        reason=_reason(message),
        raw=raw,
    )


def _derived_id(name: str, message: dict[str, Any]) -> str:
    told_apart = ("email_id", "email_to", "created_at", "email_try_count", "blocklist_id")
    return derived_id("scaleway", name, *(text_at(message, field) for field in told_apart))


def _send_key(headers: object) -> str | None:
    named = list_at(headers)
    return first(text_at(header, "value") for header in named if (text_at(header, "key") or "").lower() == "x-send-key")


def _reason(message: dict[str, Any]) -> str | None:
    code = text_at(message, "email_response_code") or text_at(message, "blocklist_type")
    words = first(text_at(message, field) for field in ("email_response_message", "email_error", "blocklist_reason"))
    return short(code, words)


# -- the API -----------------------------------------------------------------------------------------------------------


async def _events_to_recipient(
    recipient: str, webhooks: list[str], query: Query, feed: Feed, api: Api
) -> AsyncIterator[Event]:
    """Yield the events of all e-mails to a recipient in the span. Raises ApiError where one can't be compared.

    One whose events show no key may be the sought one, where that is not found elsewhere.
    """
    named, of_blocked = set(), set()
    for webhook in webhooks:  # events of blocked e-mails name no e-mail: there have to be as many keys as of these
        async for event in _events_of_span(webhook, {"event_types": "email_blocklisted"}, query, feed, api):
            if event.send_key and query.may_be_to(event.recipient):
                of_blocked.add(event.send_key)
            yield event
    unnamed, blocked = 0, 0
    async for email in _emails(recipient, query, feed, api):
        keys = set()
        async for event in _events_of_email(email, webhooks, feed, api):
            keys.add(event.send_key)
            yield event
        if any(keys):
            named |= keys
        elif _is_blocked(email):
            blocked += 1
        else:
            unnamed += 1
    if (unnamed or blocked > len(of_blocked)) and query.wire_key not in named | of_blocked:
        raise ApiError(
            "unnamed", "no event shows the key of an e-mail to this recipient: webhooks need all event types"
        )


async def _emails(recipient: str, query: Query, feed: Feed, api: Api) -> AsyncIterator[object]:
    """Yield the e-mails of the span that may be to a recipient."""
    since, until = query.seconds()
    params = {"since": utc(since - 1), "until": utc(until + 1)}  # both bounds may be exclusive
    if is_plain_address(recipient):
        params["mail_rcpt"] = recipient
    async for email in _listed("/emails", "emails", params, feed, api):
        if query.may_be_to(text_at(email, "mail_rcpt")):
            yield email


async def _webhooks(feed: Feed, api: Api) -> list[str]:
    """Return the ids of the project's webhooks, where the feed has topics only of those that publish to them."""
    listed = [webhook async for webhook in _listed("/webhooks", "webhooks", {}, feed, api)]
    ids = [needed(webhook, "id") for webhook in listed if not feed.topics or text_at(webhook, "sns_arn") in feed.topics]
    if not ids:
        raise ApiError("not_found", "the project has no webhook for this feed, so nothing shows our key: create one")
    return ids


async def _events_of_span(
    webhook: str, params: dict[str, str], query: Query, feed: Feed, api: Api
) -> AsyncIterator[Event]:
    # The list has no filter for times, but an order.
    ordered = {"order_by": _NEWEST_FIRST, **params}
    async for item in _listed(f"/webhooks/{webhook}/events", "webhook_events", ordered, feed, api):
        created = iso_time(at(item, "created_at"))
        if created is None:
            raise ApiError("garbage", "an event of the API's list has no time")
        if created < query.since:
            return
        if created <= query.until:
            yield _found(item)


async def _events_of_email(email: object, webhooks: list[str], feed: Feed, api: Api) -> AsyncIterator[Event]:
    for webhook in webhooks:
        path, params = f"/webhooks/{webhook}/events", {"email_id": needed(email, "id")}
        async for item in _listed(path, "webhook_events", params, feed, api):
            yield _found(item)


async def _listed(path: str, name: str, params: dict[str, str], feed: Feed, api: Api) -> AsyncIterator[object]:
    """Yield each item of a list, page by page. Raises ApiError where it can't be read to its end."""
    key, scope = credentials(feed, "api_key", "api_scope")
    headers = {"X-Auth-Token": key}
    asked = {"project_id": scope, "page_size": str(_PAGE), **params}
    pages, seen, page = Pages(), 0, 1
    while True:
        pages.turn(str(page))
        url = (feed.api_url or _API) + _PATH + path
        reply = await api.call("GET", url, headers=headers, params={**asked, "page": str(page)})
        found, total = items(reply.value, name), at(reply.value, "total_count")
        for item in found:
            yield item
        seen, page = seen + len(found), page + 1
        if not isinstance(total, int) or (not found and seen < total):
            raise ApiError("garbage", "the API's list is shorter than it says, or doesn't say how long it is")
        if seen >= total:
            return


def _found(item: object) -> Event:
    """Return the event that a webhook's list holds as the text that was published."""
    raw = (text_at(item, "data") or "").encode("utf-8", "surrogatepass")
    try:
        return _event(raw, load_object(raw))
    except BadPayload:
        raise ApiError("garbage", "an event of the API's list has no payload that can be read") from None


def _is_blocked(email: object) -> bool:
    return "blocklisted" in list_at(email, "flags")


def _sample_body(name: str, wire_key: str, now: datetime) -> bytes:
    sample = {
        "id": derived_id("sample", name, wire_key, now.isoformat()),
        "type": name,
        "created_at": now.isoformat(),
        "email_id": "sample-" + derived_id("sample", wire_key)[:32],
        "email_to": "sample@example.com",
        "email_headers": [{"key": "X-Send-Key", "value": wire_key}],
    }
    return msgspec.json.encode(sample)


PROVIDER: Final[Provider] = Scaleway()
