# SPDX-License-Identifier: Apache-2.0
"""MailerSend: one JSON object about one recipient in each POST, in two versions, its raw bytes signed."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Final, Literal
from urllib.parse import quote

from msgspec.structs import replace

from webhooks.asking import Api, ApiError, Pages, Query, Shown, bearer, credentials, items, needed
from webhooks.event import HASHED_KEY, Event, Kind, Testimony, bounded_id, derived_id
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
    Refused,
    Stamp,
    Verdict,
    Verified,
    sampled_name,
)
from webhooks.reply import Reply, all_mean, by_code, by_ids, is_success, unclear
from webhooks.signature import (
    CREDENTIAL_SCHEMES,
    carries_credential,
    credential_only,
    hmac_sha256,
    same,
    sample_delivery,
    signing_secrets,
)

FACTS: Final = Facts(
    title="MailerSend (v1 and v2 webhooks)",
    key_slot=(
        "one of at most five tags (SMTP: header X-MailerSend-Tags, separated by commas); there is no metadata, and"
        " custom headers are for the highest plan only. A wire key of 48 hex digits is a tag as it is, any other is the"
        " tag send_key-<key>, so that it is told apart from the application's own. Comes back in data.tags (v2),"
        " data.email.tags (v1) [developers.mailersend.com/api/v1/email, anymail/django-anymail docs/esps/mailersend]"
    ),
    first_evidence=(
        "activity.sent: sent from its servers, the recipient's has not answered yet; there is no webhook for queued"
        " [developers.mailersend.com/api/v1/account/webhooks]"
    ),
    event_id=(
        "data.id, the id of the activity; the types that are about no message have none that is documented, so a hash"
        " over type, time and what they name [developers.mailersend.com/api/v1/account/webhooks]"
    ),
    authentication=(
        "header Signature (an SDK's README calls it x-mailersend-signature, wrongly): hex HMAC-SHA256 of the raw body,"
        " whose v1 form escapes slashes; nothing signs a time, so only data.id stops a replay. secrets: the webhook's"
        " signing secret. The ping webhook.test is signed with a secret that the documents print, so it proves nothing:"
        " it is answered whoever signed it and stores nothing; that secret verifies nothing else"
        " [developers.mailersend.com/api/v1/account/webhooks#security, symfony/symfony#63915]"
    ),
    signs_body=True,
    signs_time=False,
    redelivery=(
        "two versions are documented. The older: after 10 s and 100 s until 2xx within 3 seconds, paused after 20"
        " failures in 24 hours [developers.mailersend.com/api/v1/account/webhooks of 2025-12-16]. The newer:"
        " exponentially for about 3 days; 4xx but 429 ends it at once, so a wrong signature is answered 503: no event"
        " is lost while a secret is changed [api-evangelist/mailersend of 2026-08-13, hookdeck/webhook-skills#187 and"
        " #189]. By either a webhook that is down for too long is paused until somebody switches it on"
    ),
    redelivers_for=timedelta(seconds=110),
    look_up=(
        "GET /v1/activity/{domain_id}?date_from&date_to&page&limit lists the domain's activities and can filter neither"
        " by tag nor by recipient: the span is read to its end, 23 hours at a time, and our key looked for in its tags;"
        " one to the recipient without a tag of ours makes it unclear."
        " api_key: an API token that may read activity; api_scope: the id of the domain, one a feed. An activity names"
        " the e-mail, not the message, so its message id is email:<id> here. Kept 1 to 30 days by plan; no delay is"
        " documented, 15 minutes are assumed [developers.mailersend.com/api/v1/email/activity,"
        " mailersend/mailersend-nodejs#64]"
    ),
    registration=(
        "POST /v1/webhooks {url (at most 191 characters), name, events, domain_id, enabled, version: 1 or 2}; the URL"
        " must answer the ping with 2xx, else it is not saved [developers.mailersend.com/api/v1/account/webhooks]"
    ),
    sources=(
        "developers.mailersend.com/api/v1 (2025-12 and 2026), github.com/api-evangelist/mailersend (2026-08-13),"
        " github.com/mailersend/mailersend-php 0.40, github.com/anymail/django-anymail#489, symfony/symfony#65589"
    ),
    refused_status=503,
    native_key="documented to have none: a retry sends again [api-evangelist/mailersend conventions of 2026-08-13]",
    finds_by="key",
    lists=True,
    setup=(
        "Domains > Manage > Webhooks > Add webhook, for each sending domain (one feed a domain)",
        "URL: {url} (at most 191 characters)",
        "Version: 2.0 (1.0 is read, too, and ends on 2026-12-01)",
        (
            "Events: activity.sent, activity.delivered, activity.soft_bounced, activity.hard_bounced,"
            " activity.deferred (paid plans only), activity.suppressed, activity.opened, activity.opened_unique,"
            " activity.clicked, activity.clicked_unique, activity.unsubscribed, activity.spam_complaint,"
            " activity.survey_opened, activity.survey_submitted"
        ),
        "Save: the ping webhook.test is answered 200 before any secret is set here",
        "Copy the webhook's Signing secret into secrets; it is not the API token (mlsn.)",
        "Put the stamp's tag first and keep to five tags in all; one recipient a send",
        "Confirm with the answer's header x-message-id; the warning ALL_SUPPRESSED means that nothing is sent: fail it",
        (
            "For look-ups: an API token that may read activity into api_key, the domain's id into api_scope; where the"
            " plan keeps activities for a day only, set give_up_after well below that"
        ),
    ),
    key_is_echoed_in=("every activity.* event, unless the tags come as null or were left out of the send"),
)

_ACCEPTED: Final = Testimony.ACCEPTED
_REJECTED: Final = Testimony.REJECTED
_NONE: Final = Testimony.NONE

MEANINGS: Final = MappingProxyType(
    {
        "activity.sent": (Kind.SENT, _ACCEPTED),
        "activity.delivered": (Kind.DELIVERED, _ACCEPTED),
        "activity.soft_bounced": (Kind.BOUNCED, _ACCEPTED),
        "activity.hard_bounced": (Kind.BOUNCED, _ACCEPTED),
        "activity.deferred": (Kind.DEFERRED, _ACCEPTED),
        "activity.opened": (Kind.OPENED, _ACCEPTED),
        "activity.opened_unique": (Kind.OPENED, _ACCEPTED),
        "activity.clicked": (Kind.CLICKED, _ACCEPTED),
        "activity.clicked_unique": (Kind.CLICKED, _ACCEPTED),
        "activity.unsubscribed": (Kind.UNSUBSCRIBED, _ACCEPTED),
        "activity.spam_complaint": (Kind.COMPLAINED, _ACCEPTED),
        "activity.survey_opened": (Kind.OPENED, _ACCEPTED),
        "activity.survey_submitted": (Kind.CLICKED, _ACCEPTED),  # an answer: there is no nearer kind
        "activity.suppressed": (Kind.REJECTED, _REJECTED),  # since 2026-08 [mailersend-php changelog]
        "inbound.message": (Kind.INBOUND, _NONE),  # of an inbound route [anymail/webhooks/mailersend.py]
    }
)
"""What each `type` means and proves; others (maintenance.*, sender_identity.*, inbound_*, email_*, bulk_email.*,
recipient.*) speak of no send [developers.mailersend.com/api/v1/account/webhooks]."""

_ONLY_LISTED: Final = MappingProxyType(
    {
        "activity.queued": (Kind.QUEUED, _ACCEPTED),
        "activity.spam_complaints": (Kind.COMPLAINED, _ACCEPTED),
    }
)
"""Types of activities that the API lists and no webhook has [developers.mailersend.com/api/v1/email/activity]."""

PING: Final = "webhook.test"
PUBLIC_SECRET: Final = "test_Am3L1GuOIc4blLUuHqAPxxwkZaJyEk8G"  # noqa: S105 - printed in the documents
"""What MailerSend signs its ping with [developers.mailersend.com/api/v1/account/webhooks#security]."""

_OUR_TAG: Final = re.compile(rf"send_key[-:](.+)|({HASHED_KEY.pattern})", re.DOTALL)
_REASONS: Final = (("meta", "reason"), ("morph", "readable_reason"), ("morph", "reason"), ("reason",))
_TELLS_APART: Final = (
    *(("id",), ("domain_id",), ("message_id",), ("email_id",), ("email", "id"), ("recipient",), ("email",)),
    *(("inbound_id",), ("inbound_message_id",), ("meta", "url"), ("meta", "ip"), ("morph", "id")),
)
_API: Final = "https://api.mailersend.com"
_PAGE: Final = 100
"""Activities on a page: the most that there may be."""
_SPAN: Final = 23 * 3_600
"""How many seconds are asked for at once: less than the day that the smallest plan allows."""

_CODE: Final = re.compile(r"\bMS\d{5}\b")
_REPLIES: Final = MappingProxyType(
    all_mean("not_sent", "MS40301", "MS40302", "MS40303", "MS40304", "MS40305", "MS42901", "MS42903")
    | all_mean("not_sent", "MS42204", "MS42207", "MS42216", "MS42222", "MS42225", "MS42226")
)
"""Codes in an error's message: access, rate, quota, plan, a domain that is not verified; of others the status
[developers.mailersend.com/general, by api-evangelist/mailersend errors]."""


class MailerSend:
    """MailerSend as the receiver and the sender's side know it."""

    name: Final = "mailersend"
    facts: Final = FACTS

    def stamp(self, wire_key: str) -> Stamp:
        """Return the tag that makes the key come back; there is no native idempotency key."""
        tag = wire_key if HASHED_KEY.fullmatch(wire_key) else f"send_key-{wire_key}"
        return Stamp(body={"tags": [tag]}, smtp_headers={"X-MailerSend-Tags": tag})

    def read_reply(self, status: int, headers: Mapping[str, str], body: bytes) -> list[Reply]:
        """Return the one answer to all recipients. Of a bulk request only its own look-up tells what was taken."""
        said = load_or_none(body)
        if not is_success(status):
            message = text_at(said, "message")
            code = _CODE.search(message or "")
            return [by_code(status, code[0] if code else message, _REPLIES)]
        if message_id := headers.get("x-message-id"):
            return by_ids(status, [bounded_id(message_id)])
        types = [at(warning, "type") for warning in list_at(said, "warnings")]
        return [Reply("rejected", "ALL_SUPPRESSED") if "ALL_SUPPRESSED" in types else unclear(status)]

    async def verify(self, delivery: Delivery, feed: Feed, now: datetime, fetch: Fetch) -> Verdict:  # noqa: ARG002
        """Judge the signature against each of the feed's secrets; a ping only has to bear one."""
        given = delivery.headers.get("signature", "")
        if given.strip() and _is_ping(delivery.body):
            return Verified()
        keys = _keys(feed)
        if not keys or carries_credential(delivery, feed.secrets):
            return credential_only(delivery, feed.secrets, "the webhook's signing secret")
        if not given:
            return Refused("missing", "no Signature header: not a webhook of MailerSend")
        if not any([same(given, hmac_sha256(key, delivery.body).hex()) for key in keys]):
            return Refused("signature", "no secret of the feed fits; it takes the webhook's own, not the API token")
        return Verified()

    def parse(self, delivery: Delivery) -> Parsed:
        """Return the one event of a webhook of either version; a ping has none."""
        body = load_object(delivery.body)
        name = text_at(body, "type")
        if name is None:
            raise BadPayload("no type: not a webhook of MailerSend")
        if name == PING:
            return Parsed(control="ping")
        return Parsed((_event(name, at(body, "data"), text_at(body, "created_at"), delivery.body),))

    def sample(self, kind: str, wire_key: str, feed: Feed, now: datetime) -> Delivery:
        """Return an example delivery of version 2, signed with the feed's first secret or carrying its credential."""
        body = self._sample_body(sampled_name(self.name, kind, MEANINGS), wire_key, now)
        keys = _keys(feed)
        signed = {"signature": hmac_sha256(keys[0], body).hex()} if keys else None
        return sample_delivery(body, feed.secrets, signed, "the feed has no signing secret: set feeds.<name>.secrets")

    def objection(self, setting: Literal["secrets", "topics"], value: str) -> str | None:
        """Return what is wrong with a secret that everybody knows, or that is an API token."""
        if setting != "secrets" or value.startswith(CREDENTIAL_SCHEMES):
            return None
        if value.strip() == PUBLIC_SECRET:
            return "is the one that MailerSend's documents print, so it proves nothing: set the webhook's own"
        return "is an API token and verifies nothing: set the webhook's signing secret" if _is_token(value) else None

    async def search(self, query: Query, feed: Feed, api: Api) -> AsyncIterator[Event]:
        """Yield each activity of the domain in the span: the API can't ask for less.

        Raises ApiError where one of the recipient's shows no key: it may be the sought one's.
        """
        shown = Shown(query)
        async for item in _listed(query, feed, api):
            event = _found(item)
            shown.note(event, unnamed=query.is_unnamed(event))
            yield event
        shown.settle("an activity of this recipient's shows no tag of ours: it may be the sought one's")

    def _sample_body(self, name: str, wire_key: str, now: datetime) -> bytes:
        data = {
            "id": derived_id("sample", name, wire_key, now.isoformat())[:24],
            "message_id": derived_id("sample", wire_key)[:24],
            "type": name.partition(".")[2],
            "recipient": "sample@example.com",
            "tags": self.stamp(wire_key).body["tags"],
            "meta": [],
        }
        return json.dumps({"type": name, "created_at": now.isoformat(), "data": data}).encode()


def _keys(feed: Feed) -> list[str]:
    return [secret for secret in signing_secrets(feed.secrets) if secret.strip() != PUBLIC_SECRET]


def _is_ping(body: bytes) -> bool:
    # Read as `parse` reads it, so that what passes here can hold no event.
    if PING.encode() not in body:
        return False
    try:
        return text_at(load_object(body), "type") == PING
    except BadPayload:
        return False


def _is_token(value: str) -> bool:
    return value.strip().startswith("mlsn.")


def _event(name: str, data: object, sent_at: str | None, raw: bytes) -> Event:
    kind, testimony = MEANINGS.get(name) or _ONLY_LISTED.get(name, UNKNOWN)
    occurred_at = text_at(data, "created_at") or sent_at  # v1 dates the activity apart from its webhook
    is_activity = name.startswith("activity.")
    return Event(
        kind=kind,
        testimony=testimony,
        message_id=id_at(data, "message_id") or id_at(data, "email", "message", "id"),
        event_id=(id_at(data, "id") if is_activity else None) or _event_id(name, data, occurred_at),
        send_key=None if kind is Kind.INBOUND else _send_key(data),  # others write what comes in
        recipient=_recipient(data) if is_activity or name.startswith("recipient.") else None,
        occurred_at=iso_time(occurred_at),
        reason=short(first(text_at(data, *path) for path in _REASONS)),
        raw=raw,
    )


def _event_id(name: str, data: object, occurred_at: str | None) -> str:
    return derived_id("mailersend", name, occurred_at, *(text_at(data, *path) for path in _TELLS_APART))


def _recipient(data: object) -> str | None:
    # v2 sends `recipient` [symfony/symfony#65589] where its documents print `email`; in v1 `email` is an object.
    return text_at(data, "recipient") or text_at(data, "email") or text_at(data, "email", "recipient", "email")


def _send_key(data: object) -> str | None:
    tags = list_at(at(data, "tags") or at(data, "email", "tags"))
    ours = (_OUR_TAG.fullmatch(tag) for tag in tags if isinstance(tag, str))
    # No document of MailerSend's puts a key into `meta`; one that is there is taken all the same.
    return first(match[1] or match[2] for match in ours if match) or text_at(data, "meta", "send_key")


# -- asking ------------------------------------------------------------------------------------------------------------


def _spans(since: int, until: int) -> Iterator[tuple[int, int]]:
    """Yield the seconds in which each part of the span begins and ends, a little more rather than less."""
    for start in range(since, until, _SPAN):
        yield start - 1, min(start + _SPAN, until) + 1


async def _listed(query: Query, feed: Feed, api: Api) -> AsyncIterator[object]:
    """Yield the activities of the span, page by page until the last one. Raises ApiError."""
    key, scope = credentials(feed, "api_key", "api_scope")
    headers, url = bearer(key), f"{feed.api_url or _API}/v1/activity/{quote(scope, safe='')}"
    for since, until in _spans(*query.seconds()):
        pages, page, more = Pages(), 0, True
        while more:
            page += 1
            params = {"date_from": str(since), "date_to": str(until), "limit": str(_PAGE), "page": str(page)}
            answer = (await api.call("GET", url, headers=headers, params=params)).value
            found, more = items(answer, "data"), _goes_on(answer)
            pages.turn((id_at(found[0], "id") if found else None) or f"page {page}")
            for item in found:
                yield item


def _goes_on(answer: object) -> bool:
    links = at(answer, "links")
    if not isinstance(links, dict) or "next" not in links:
        raise ApiError("garbage", "the list of activities does not say whether it goes on")
    return links["next"] is not None or len(items(answer, "data")) >= _PAGE  # a full page may go on whatever it says


def _found(item: object) -> Event:
    email_id, name = needed(item, "email", "id"), needed(item, "type")
    needed(item, "id")
    event = _event(f"activity.{name}", item, None, json.dumps(item).encode())
    return replace(event, message_id=event.message_id or bounded_id(f"email:{email_id}"))


PROVIDER: Final[Provider] = MailerSend()
