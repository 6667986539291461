# SPDX-License-Identifier: Apache-2.0
"""Loops: one JSON object a delivery, signed by the Standard Webhooks scheme; its answers and events share no id."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from http import HTTPStatus
from types import MappingProxyType
from typing import Final, Literal

import msgspec

from webhooks.event import Event, Kind, Testimony, bounded_id, derived_id
from webhooks.payload import at, first, id_at, load_object, load_or_none, text_at, unix_time
from webhooks.provider import (
    UNKNOWN,
    BadPayload,
    Delivery,
    Facts,
    Feed,
    Fetch,
    Meanings,
    Parsed,
    Provider,
    Stamp,
    Verdict,
    sampled_name,
)
from webhooks.reply import Reply, by_ids, is_success, unclear
from webhooks.signature import (
    sample_delivery,
    sign_standard_webhook,
    standard_webhook,
    standard_webhook_id,
    standard_webhook_keys,
    standard_webhook_objection,
)

FACTS: Final = Facts(
    title="Loops",
    key_slot=(
        "no slot that comes back: the key is sent as Idempotency-Key only. The API answers success and no id, and"
        " events name recipient and transactionalId [loops.so/docs/api-reference, api-evangelist/loops 2026-08]"
    ),
    first_evidence="transactional.email.sent [loops.so/docs/api-reference/webhooks/transactional-email-sent]",
    event_id=(
        "header webhook-id, meant for telling repeats; none in the body"
        " [loops.so/docs/api-reference/webhooks/transactional-email-sent]"
    ),
    authentication=(
        "Standard Webhooks: HMAC-SHA256 of webhook-id, webhook-timestamp and raw body; secrets: the whsec_ signing"
        " secret, both for the 24 hours in which it is rotated [loops.so/docs/webhooks]"
    ),
    signs_body=True,
    signs_time=True,
    redelivery="up to 8 attempts within about 28 hours until any 2xx; 10 events a second [loops.so/docs/webhooks]",
    redelivers_for=timedelta(hours=27),
    look_up=(
        "no: sends can't be listed or searched [api-evangelist/loops conventions]; what decides a send whose answer was"
        " lost is the same request with the same Idempotency-Key"
    ),
    registration="Settings > Webhooks, by hand; one endpoint an account [loops.so/docs/webhooks]",
    sources="loops.so/docs/webhooks, loops.so/docs/api-reference, github.com/api-evangelist/loops (2026-08)",
    tolerance=timedelta(minutes=5),
    same_key_window=timedelta(hours=24),
    native_key=(
        "header Idempotency-Key, up to 100 characters, kept 24 hours: a repeat sends nothing and is answered 409, which"
        " proves that the first request was taken, so a retry with the same key can't duplicate: 2xx means that it was"
        " sent now, 409 that it was sent before and is to be confirmed, without an id. The first answer is not given"
        " again. Not documented: what a repeat is answered while the first request is running (a retry comes"
        " retry_backoff after submit_by, when none should be), and whether a request that was refused uses up its key"
        " [loops.so/docs/api-reference/send-transactional-email, api-evangelist/loops conventions of 2026-08-13]"
    ),
    setup=(
        "Settings > Webhooks: enter {url} (an account has one endpoint only)",
        "Tick transactional.email.sent, email.delivered, email.softBounced, email.hardBounced, email.spamReported",
        "Opens, clicks and unsubscribes are told of campaigns and workflows only",
        "Set secrets to the signing secret (whsec_...) that the page shows",
        "Nothing makes the key come back: send it as Idempotency-Key, and confirm a send that is answered 409",
        "Events decide nothing, as no answer names an id: a send whose answer was lost is repeated with the same key",
        "For that the claim has to hold the same content and feed, and same_key_retry to be on, as it is by default",
    ),
    echoes_key=False,
    key_is_echoed_in="no event, and the API's answers hold no id to join one by: Loops' events decide nothing",
)

MEANINGS: Final[Meanings] = MappingProxyType(
    {
        "transactional.email.sent": (Kind.SENT, Testimony.ACCEPTED),
        "campaign.email.sent": (Kind.SENT, Testimony.ACCEPTED),
        "loop.email.sent": (Kind.SENT, Testimony.ACCEPTED),
        "email.delivered": (Kind.DELIVERED, Testimony.ACCEPTED),
        "email.softBounced": (Kind.DEFERRED, Testimony.ACCEPTED),  # tried again several times
        "email.hardBounced": (Kind.BOUNCED, Testimony.ACCEPTED),
        "email.opened": (Kind.OPENED, Testimony.ACCEPTED),
        "email.clicked": (Kind.CLICKED, Testimony.ACCEPTED),
        "email.unsubscribed": (Kind.UNSUBSCRIBED, Testimony.ACCEPTED),
        "email.resubscribed": (Kind.SUBSCRIBED, Testimony.ACCEPTED),
        "email.spamReported": (Kind.COMPLAINED, Testimony.ACCEPTED),
        "contact.unsubscribed": (Kind.UNSUBSCRIBED, Testimony.NONE),
        "contact.mailingList.unsubscribed": (Kind.UNSUBSCRIBED, Testimony.NONE),
        "contact.mailingList.subscribed": (Kind.SUBSCRIBED, Testimony.NONE),
        "contact.created": UNKNOWN,
        "contact.deleted": UNKNOWN,
    }
)
"""What each `eventName` means and proves [loops.so/docs/api-reference/webhooks]; what is about a contact is about no
send."""

_TEST: Final = "testing.testEvent"
_SOURCES: Final = ("transactionalId", "campaignId", "loopId")


class Loops:
    """Loops as the receiver and the sender's side know it."""

    name: Final = "loops"
    facts: Final = FACTS

    def stamp(self, wire_key: str) -> Stamp:
        """Return the native idempotency key, kept 24 hours; nothing makes the key come back."""
        return Stamp(headers={"Idempotency-Key": wire_key})

    def read_reply(self, status: int, headers: Mapping[str, str], body: bytes) -> list[Reply]:  # noqa: ARG002
        """Return the answer to the message, which names no id. 409 proves that the same key was taken before."""
        success = at(load_or_none(body), "success")
        if status == HTTPStatus.CONFLICT and success is False:
            return [Reply("accepted", "HTTP 409 key used", for_all=False)]
        return [unclear(status)] if is_success(status) and success is False else by_ids(status, [])

    async def verify(self, delivery: Delivery, feed: Feed, now: datetime, fetch: Fetch) -> Verdict:  # noqa: ARG002
        """Judge the signature against each of the feed's `whsec_` secrets."""
        return standard_webhook(delivery, feed.secrets, now, feed.tolerance)

    def parse(self, delivery: Delivery) -> Parsed:
        """Return the one event of the delivery; the test event of the settings page is none."""
        said = load_object(delivery.body)
        name = text_at(said, "eventName")
        if name is None:
            raise BadPayload("no eventName: not an event of Loops")
        if name == _TEST:
            return Parsed(control="ping")
        kind, testimony = MEANINGS.get(name, UNKNOWN)
        message_id, recipient = id_at(said, "email", "id"), text_at(said, "contactIdentity", "email")
        source = first(text_at(said, field) for field in _SOURCES)
        told_apart = (text_at(said, "eventTime"), text_at(said, "mailingList", "id"), source)
        derived = derived_id("loops", name, message_id, recipient, *told_apart)
        event = Event(
            kind=kind,
            testimony=testimony,
            message_id=message_id,
            event_id=bounded_id(standard_webhook_id(delivery) or derived),
            recipient=recipient,
            occurred_at=unix_time(at(said, "eventTime")),
            raw=delivery.body,
        )
        return Parsed((event,))

    def sample(self, kind: str, wire_key: str, feed: Feed, now: datetime) -> Delivery:
        """Return an example delivery, signed with the feed's first `whsec_` secret or carrying its credential."""
        body = _sample_body(sampled_name(self.name, kind, MEANINGS), wire_key, now)
        keys = standard_webhook_keys(feed.secrets)
        signed = _signed(keys[0], body, now) if keys else None
        return sample_delivery(body, feed.secrets, signed, "the feed has no whsec_ secret to sign with")

    def objection(self, setting: Literal["secrets", "topics"], value: str) -> str | None:
        """Return what is wrong with a secret that is no `whsec_` signing secret."""
        return standard_webhook_objection(value) if setting == "secrets" else None


def _sample_body(name: str, wire_key: str, now: datetime) -> bytes:
    return msgspec.json.encode(
        {
            "eventName": name,
            "eventTime": int(now.timestamp()),
            "webhookSchemaVersion": "1.0.0",
            "contactIdentity": {"id": "sample", "email": "sample@example.com", "userId": None},
            "sourceType": "transactional",
            "transactionalId": "sample",
            "email": {
                "id": "sample-" + derived_id("sample", wire_key),
                "emailMessageId": "sample",
                "subject": "Sample",
            },
        }
    )


def _signed(key: bytes, body: bytes, now: datetime) -> dict[str, str]:
    message_id, timestamp = "msg_" + derived_id("sample", body.decode()), str(int(now.timestamp()))
    signature = sign_standard_webhook(key, message_id, timestamp, body)
    return {"webhook-id": message_id, "webhook-timestamp": timestamp, "webhook-signature": signature}


PROVIDER: Final[Provider] = Loops()
