# SPDX-License-Identifier: Apache-2.0
"""Customer.io, transactional messages and reporting webhooks: one JSON object a delivery, signed with its time."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Final

import msgspec

from webhooks.event import Event, Kind, Testimony, derived_id
from webhooks.payload import at, first, id_at, load_object, load_or_none, short, text_at, unix_time
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
    Refused,
    Stamp,
    Verdict,
    sampled_name,
)
from webhooks.reply import Reply, by_ids
from webhooks.signature import (
    carries_credential,
    credential_only,
    hmac_sha256,
    judge_age,
    octets,
    same,
    sample_delivery,
    signing_secrets,
)

FACTS: Final = Facts(
    title="Customer.io (transactional API, reporting webhooks)",
    key_slot=(
        "none: nothing of ours comes back. Events are matched by delivery_id, which the API's answer holds"
        " [docs.customer.io/api/webhooks]"
    ),
    first_evidence="sent; attempted where it could not be sent yet and is tried again [docs.customer.io/api/webhooks]",
    event_id="event_id, unique for each event [docs.customer.io/api/webhooks]",
    authentication=(
        "header X-CIO-Signature: hex HMAC-SHA256 of v0:, the header X-CIO-Timestamp, a colon and the raw body; secrets:"
        " the webhook's signing key as text [docs.customer.io/journeys/webhooks, customerio/customerio-node#227]"
    ),
    signs_body=True,
    signs_time=True,
    redelivery=(
        "with exponential back-off for 7 days until any 2xx within 4 s; after 400 to 405, 410, 429, 500, 502 and 521 it"
        " waits an hour first; all later events wait behind the one that fails [docs.customer.io/api/webhooks]. Whether"
        " a repeat is signed anew was not found, so age is not checked by default"
    ),
    redelivers_for=timedelta(days=7),
    look_up=(
        "not by our key, which no answer holds; without the delivery_id a send can't be told from another one to the"
        " same person [docs.customer.io/api/app]"
    ),
    registration="Data & Integrations > Integrations > Reporting Webhooks [docs.customer.io/journeys/webhooks]",
    sources="docs.customer.io/api/webhooks, docs.customer.io/journeys/webhooks, github.com/customerio/customerio-node",
    native_key="none: a send that is repeated is a second send [customerio/customerio-python#133]",
    setup=(
        "Data & Integrations > Integrations > Reporting Webhooks > Add Reporting Webhook: enter {url}",
        "Tick all of Email: drafted, attempted, sent, delivered, opened, clicked, converted, unsubscribed, bounced,",
        "dropped, failed, undeliverable and marked as spam; set Send Frequency to every time",
        "Set secrets to the webhook's signing key before it is enabled: a refused event holds up all that follow",
        "Leave Body Content off: it would store the text of mails with the events",
        "Confirm each send with the delivery_id of the answer: nothing else ties an event to its send",
        "A send whose answer was lost can't be decided here: it waits for give_up_after",
    ),
    echoes_key=False,
    key_is_echoed_in="no event; the message id is delivery_id",
)

_ACCEPTED: Final = Testimony.ACCEPTED
_REJECTED: Final = Testimony.REJECTED

MEANINGS: Final[Meanings] = MappingProxyType(
    {
        "sent": (Kind.SENT, _ACCEPTED),
        "attempted": (Kind.DEFERRED, _ACCEPTED),
        "delivered": (Kind.DELIVERED, _ACCEPTED),
        "opened": (Kind.OPENED, _ACCEPTED),
        "human_opened": (Kind.OPENED, _ACCEPTED),
        "clicked": (Kind.CLICKED, _ACCEPTED),
        "human_clicked": (Kind.CLICKED, _ACCEPTED),
        "converted": (Kind.SENT, _ACCEPTED),  # a goal reached after a mail that was sent: no kind of its own
        "unsubscribed": (Kind.UNSUBSCRIBED, _ACCEPTED),
        "bounced": (Kind.BOUNCED, _ACCEPTED),
        "spammed": (Kind.COMPLAINED, _ACCEPTED),
        "dropped": (Kind.REJECTED, _REJECTED),
        "failed": (Kind.FAILED, _REJECTED),
        "undeliverable": (Kind.FAILED, _REJECTED),
        "drafted": UNKNOWN,
    }
)
"""What each `metric` of an e-mail means and proves [docs.customer.io/api/webhooks; that an undeliverable one was not
sent, and the human_ ones: (memory)]. Other object types (customer, push, sms, in_app, slack, webhook) are no mail."""

_SIGNATURE: Final = "x-cio-signature"
_TIMESTAMP: Final = "x-cio-timestamp"


class CustomerIo:
    """Customer.io as the receiver and the sender's side know it."""

    name: Final = "customerio"
    facts: Final = FACTS

    def stamp(self, wire_key: str) -> Stamp:  # noqa: ARG002 - there is nowhere to put it
        """Return nothing: Customer.io gives back nothing of ours and has no idempotency key."""
        return Stamp()

    def read_reply(self, status: int, headers: Mapping[str, str], body: bytes) -> list[Reply]:  # noqa: ARG002
        """Return the answer to the message."""
        return by_ids(status, [id_at(load_or_none(body), "delivery_id")])

    async def verify(self, delivery: Delivery, feed: Feed, now: datetime, fetch: Fetch) -> Verdict:  # noqa: ARG002
        """Judge the signature against each of the feed's signing keys, or the credential that the request carries."""
        keys = signing_secrets(feed.secrets)
        if not keys or carries_credential(delivery, feed.secrets):
            return credential_only(delivery, feed.secrets, "the webhook's signing key")
        timestamp, given = (delivery.headers.get(name, "") for name in (_TIMESTAMP, _SIGNATURE))
        if not timestamp or not given:
            return Refused("missing", "no X-CIO-Timestamp or X-CIO-Signature header: not a reporting webhook")
        if not any([same(given, _signature(key, timestamp, delivery.body)) for key in keys]):
            return Refused("signature", "the signature matches none of the feed's signing keys")
        return judge_age(timestamp, now, feed.tolerance)

    def parse(self, delivery: Delivery) -> Parsed:
        """Return the one event of the delivery."""
        said = load_object(delivery.body)
        metric = text_at(said, "metric")
        if metric is None:
            raise BadPayload("no metric: not a reporting webhook of Customer.io")
        return Parsed((_event(said, metric, delivery.body),))

    def sample(self, kind: str, wire_key: str, feed: Feed, now: datetime) -> Delivery:
        """Return an example delivery, signed with the feed's first signing key or carrying its credential."""
        body = _sample_body(sampled_name(self.name, kind, MEANINGS), wire_key, now)
        keys, timestamp = signing_secrets(feed.secrets), str(int(now.timestamp()))
        signed = {_TIMESTAMP: timestamp, _SIGNATURE: _signature(keys[0], timestamp, body)} if keys else None
        return sample_delivery(body, feed.secrets, signed, "the feed has no signing key: set feeds.<name>.secrets")


def _signature(key: str, timestamp: str, body: bytes) -> str:
    return hmac_sha256(key, b"v0:%b:%b" % (octets(timestamp), body)).hex()


def _event(said: dict[str, Any], metric: str, raw: bytes) -> Event:
    data, object_type = at(said, "data"), text_at(said, "object_type")
    kind, testimony = MEANINGS.get(metric, UNKNOWN) if object_type == "email" else UNKNOWN
    message_id = id_at(data, "delivery_id")
    recipient = first(text_at(data, *path) for path in (("recipient",), ("email_address",), ("identifiers", "email")))
    told_apart = (text_at(said, "timestamp"), text_at(data, "href"))
    return Event(
        kind=kind,
        testimony=testimony,
        message_id=message_id,
        event_id=id_at(said, "event_id") or derived_id("customerio", object_type, metric, message_id, *told_apart),
        recipient=recipient,
        occurred_at=unix_time(at(said, "timestamp")),
        reason=short(text_at(data, "failure_message")),
        raw=raw,
    )


def _sample_body(metric: str, wire_key: str, now: datetime) -> bytes:
    data = {"delivery_id": "sample-" + derived_id("sample", wire_key), "recipient": "sample@example.com"}
    return msgspec.json.encode(
        {
            "event_id": derived_id("sample", wire_key, metric, now.isoformat()),
            "object_type": "email",
            "metric": metric,
            "timestamp": int(now.timestamp()),
            "data": data,
        }
    )


PROVIDER: Final[Provider] = CustomerIo()
