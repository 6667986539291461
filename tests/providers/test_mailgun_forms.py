# SPDX-License-Identifier: Apache-2.0
"""Mailgun's legacy form webhooks: the same facts, signed alike, among the user's own variables."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple
from urllib.parse import parse_qsl, urlencode

import pytest
from anymail_compare import anymail_events
from case_files import FIXTURES, case, clock, delivery, fixture, no_fetch
from spoiling import CONTENT_TYPES

from webhooks.event import Event
from webhooks.provider import BadPayload, Delivery, Feed, Refused, Verdict, Verified
from webhooks.providers.mailgun import PROVIDER

SIGNING_KEY = "signing-key-one"
KEY = "e15bd8fd5b6b63a6f91c331d3c0702980d93474c2b1c4474"
MESSAGE = "20261102081504.6f1e2d3c4b5a6978@mg.shop.example.com"
ANA = "ana.reyes@example.com"
NOW = datetime(2026, 11, 2, 8, 16, tzinfo=UTC)
SIGNED_AT, TOKEN = "1793607307", "token"
Fields = Sequence[tuple[str, str]]


class Expected(NamedTuple):
    kind: str
    testimony: str
    event_id: str
    reason: str | None = None


FORMS = {
    "legacy_delivered": Expected("delivered", "accepted", "3b8d3bd7bc4459c0ea4d4951c18f0cce13f43299"),
    "legacy_bounced": Expected(
        "bounced", "accepted", "44e12de31c5369dd2692154807a0699f31d09d95", "550 5.1.1 no such mailbox"
    ),
    "legacy_dropped": Expected(
        "rejected",
        "rejected",
        "70a5f1f031cf162709464bf36b6c5944d0ed0a3e",
        "hardfail 605 Not delivering to previously bounced address",
    ),
    "legacy_complained": Expected("complained", "accepted", "d4dae69411d65b09ed94cf9064fc970165208a2e"),
    "legacy_unsubscribed": Expected("unsubscribed", "accepted", "7d63f07a2e2061f133ca1c561082496ccecbbe28"),
    "legacy_opened": Expected("opened", "accepted", "af2fe246beda90da0cddfa4bd93950f7d139b43d"),
    "legacy_clicked": Expected("clicked", "accepted", "4605179ff31e663d277176e9640710a7e7e067ff"),
}


def post(fields: Fields) -> Delivery:
    return Delivery(urlencode(list(fields)).encode(), {"content-type": CONTENT_TYPES[".form"]})


def stored(name: str) -> Delivery:
    return Delivery(fixture(f"mailgun/{name}.form"), {"content-type": CONTENT_TYPES[".form"]})


def multipart(fields: Fields, boundary: str = "----x") -> Delivery:
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{text}\r\n' for name, text in fields
    ]
    body = "".join(parts) + f"--{boundary}--\r\n"
    return Delivery(body.encode(), {"content-type": f"multipart/form-data; boundary={boundary}"})


def event_of(request: Delivery) -> Event:
    (event,) = PROVIDER.parse(request).events
    return event


def signature(timestamp: str = SIGNED_AT, token: str = TOKEN, key: str = SIGNING_KEY) -> dict[str, str]:
    digest = hmac.digest(key.encode(), f"{timestamp}{token}".encode(), hashlib.sha256).hex()
    return {"timestamp": timestamp, "token": token, "signature": digest}


async def verdict(request: Delivery, tolerance: timedelta | None = None) -> Verdict:
    return await PROVIDER.verify(request, Feed("main", "mailgun", (SIGNING_KEY,), tolerance), NOW, no_fetch)


OPENED = (("event", "opened"), ("recipient", ANA), ("message-id", MESSAGE), ("send_key", KEY))
DROPPED = (("event", "dropped"), ("recipient", ANA), ("Message-Id", f"<{MESSAGE}>"), ("send_key", KEY))


# --- what they say


def test_every_form_is_expected() -> None:
    assert {file.stem for file in (FIXTURES / "mailgun").glob("*.form")} == FORMS.keys()


@pytest.mark.parametrize("name", FORMS)
def test_a_form_means_and_proves_what_its_json_would(name: str) -> None:
    event, expected = event_of(stored(name)), FORMS[name]
    assert expected == (event.kind, event.testimony, event.event_id, event.reason)
    assert (event.send_key, event.message_id, event.recipient) == (KEY, MESSAGE, ANA)
    assert event.occurred_at == datetime(2026, 11, 2, 8, 15, 7, tzinfo=UTC)
    assert event.raw == fixture(f"mailgun/{name}.form")


@pytest.mark.parametrize(
    ("fields", "meaning"),
    [
        ([("code", "605")], ("rejected", "rejected")),
        ([("code", "606")], ("rejected", "rejected")),
        ([("code", "607")], ("rejected", "rejected")),
        (
            [("code", "550"), ("description", "Not delivering to a user who marked it as spam")],
            ("rejected", "rejected"),
        ),
        ([("code", "550"), ("description", "no such mailbox")], ("bounced", "accepted")),
        ([("reason", "old")], ("bounced", "accepted")),
    ],
)
def test_what_was_dropped_is_rejected_only_where_delivery_was_never_tried(
    fields: Fields, meaning: tuple[str, str]
) -> None:
    event = event_of(post([*DROPPED, *fields]))
    assert (event.kind, event.testimony, event.message_id) == (*meaning, MESSAGE)


def test_a_form_of_a_kind_nobody_knows_is_kept_and_proves_nothing() -> None:
    event = event_of(post([("event", "something_new"), *OPENED[1:]]))
    assert (event.kind, event.testimony, event.send_key) == ("unknown", "none", KEY)


# --- the user's variables among the fields


@pytest.mark.parametrize("name", ["event", "recipient", "message-id"])
def test_of_doubled_fields_mailguns_own_is_the_first(name: str) -> None:
    event = event_of(post([*OPENED, (name, "delivered"), ("timestamp", SIGNED_AT)]))
    assert (event.kind, event.recipient, event.message_id) == ("opened", ANA, MESSAGE)


async def test_of_doubled_fields_of_the_signature_mailguns_own_is_the_last() -> None:
    users = [("timestamp", "1"), ("token", "mine"), ("signature", "0" * 64)]
    ours = list(signature().items())
    assert await verdict(post([*OPENED, *users, *ours])) == Verified()
    assert event_of(post([*OPENED, *users, *ours])).occurred_at == datetime(2026, 11, 2, 8, 15, 7, tzinfo=UTC)
    assert isinstance(await verdict(post([*OPENED, *ours, *users])), Refused)


HEADERS = (
    '[["Subject","x"],["X-Mailgun-Variables","{\\"app\\": 1}"],["X-Mailgun-Variables","{\\"send_key\\": \\"own\\"}"]]'
)


@pytest.mark.parametrize(
    ("headers", "field", "key"),
    [
        (HEADERS, "field", "own"),
        (HEADERS, None, "own"),
        ('[["Subject","x"]]', "field", "field"),
        ('[["X-Mailgun-Variables","{cut of', "field", "field"),
        ('[7,null,["X-Mailgun-Variables"],["X-Mailgun-Variables",7]]', "field", "field"),
        ("7", "field", "field"),
        ("", "", None),
        (None, None, None),
    ],
)
def test_the_key_is_the_messages_own_variable_before_a_field_of_that_name(
    headers: str | None, field: str | None, key: str | None
) -> None:
    given = {name: text for name, text in (("message-headers", headers), ("send_key", field)) if text is not None}
    assert event_of(post([*DROPPED[:3], *given.items()])).send_key == key


@pytest.mark.parametrize(
    "marks",
    [
        [("X-Mailgun-Incoming", "Yes")],
        [("sender", "eve@example.net"), ("from", "Eve <eve@example.net>")],
    ],
)
@pytest.mark.parametrize("event", [[], [("event", "delivered")]])
def test_what_a_route_passes_on_proves_nothing_though_a_stranger_writes_our_fields(
    marks: Fields, event: Fields
) -> None:
    forged = [("message-headers", HEADERS), ("send_key", KEY), ("Message-Id", f"<{MESSAGE}>")]
    found = event_of(post([("recipient", "in@shop.example.com"), *marks, *event, *forged, ("body-plain", "hello")]))
    assert (found.kind, found.testimony, found.send_key) == ("inbound", "none", None)


# --- identity


def test_a_form_has_no_id_so_a_repeat_is_the_same_event_and_another_event_is_not() -> None:
    one = [*OPENED, ("ip", "203.0.113.88"), *signature().items()]
    signed_anew = [*OPENED, ("ip", "203.0.113.88"), *signature(token="another").items()]
    others = [
        [("event", "clicked"), *one[1:]],
        [*one[:1], ("recipient", "bo.lind@example.net"), *one[2:]],
        [*OPENED, ("ip", "203.0.113.89"), *signature().items()],
        [*OPENED, ("ip", "203.0.113.88"), *signature("1793607308").items()],
        [*one, ("url", "https://a.example")],
    ]
    ids = {event_of(post(fields)).event_id for fields in (one, *others)}
    assert len(ids) == 6
    assert event_of(post(one)).event_id == event_of(post(signed_anew)).event_id == event_of(multipart(one)).event_id


# --- both formats of a form, whatever its content type says


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/json"])
async def test_the_content_type_does_not_decide(content_type: str) -> None:
    fields = [*OPENED, *signature().items()]
    for request in (post(fields), multipart(fields)):
        bare = Delivery(request.body, {"content-type": content_type} if content_type else {})
        assert await verdict(bare) == Verified()
        assert event_of(bare) == event_of(request)


async def test_case_010_a_multipart_form_with_a_file_is_read() -> None:
    of = case("010")
    feed = Feed("main", "mailgun", tuple(of["config"]["mailgun_signing_keys"]), timedelta(minutes=5))
    assert await PROVIDER.verify(delivery(of), feed, clock(of), no_fetch) == Verified()
    event = event_of(delivery(of))
    assert (event.kind, event.testimony) == (of["expect"]["type"], of["expect"]["evidence"])
    assert (event.message_id, event.send_key) == (of["expect"]["message_id"], of["expect"]["send_key"])
    assert (event.recipient, event.reason) == (
        "ada@example.org",
        "hardfail 605 Not delivering to previously bounced address",
    )


@pytest.mark.parametrize(
    "body",
    [
        b"prose",
        b"a=b&c=d",
        b"sender=eve",
        b"--x",
        b"--x\r\n",
        b'--"\r\nContent-Disposition: form-data; name="event"\r\n\r\nopened\r\n--"--\r\n',
        b"&" * 2000,
        b'{"event-data": {"event": "opened", "url": "https://a.example/?a=1&event=delivered&send_key=k',
    ],
)
async def test_what_is_no_form_of_mailgun_is_refused_in_one_line(body: bytes) -> None:
    request = Delivery(body, {"content-type": CONTENT_TYPES[".form"]})
    with pytest.raises(BadPayload, match=r"^[^\n]+$"):
        PROVIDER.parse(request)
    assert isinstance(await verdict(request), Refused)


# --- signature


@pytest.mark.parametrize("make", [post, multipart])
async def test_a_signed_form_is_verified_and_a_spoilt_one_is_not(make: Callable[[Fields], Delivery]) -> None:
    good = signature()
    assert await verdict(make([*OPENED, *good.items()]), timedelta(minutes=5)) == Verified()
    for name, given in good.items():
        for spoilt in ("", given[:-1], given + "0", "größe", "9" * 5000, "\x00"):
            judged = await verdict(make([*OPENED, *{**good, name: spoilt}.items()]))
            assert isinstance(judged, Refused)
        assert isinstance(await verdict(make([*OPENED, *((n, t) for n, t in good.items() if n != name)])), Refused)


async def test_the_age_of_a_form_is_looked_at_where_a_tolerance_is_set() -> None:
    old = post([*OPENED, *signature("1793520000").items()])
    assert await verdict(old) == Verified()
    judged = await verdict(old, timedelta(hours=8))
    assert isinstance(judged, Refused)
    assert judged.reason == "stale"


# --- a second reading


@pytest.mark.parametrize("name", FORMS)
def test_django_anymail_reads_the_same(name: str) -> None:
    ours, (theirs,) = event_of(stored(name)), anymail_events("mailgun", stored(name))
    assert theirs.event_type == ours.kind
    assert theirs.message_id == f"<{ours.message_id}>"  # anymail adds the brackets, we take them off
    assert (theirs.recipient, theirs.timestamp) == (ours.recipient, ours.occurred_at)
    assert theirs.metadata["send_key"] == ours.send_key
    assert theirs.event_id == dict(parse_qsl(ours.raw.decode()))["token"]  # ours is derived: a retry may be signed anew
