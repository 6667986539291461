# SPDX-License-Identifier: Apache-2.0
"""Mailgun: what its webhooks are signed with, what is stamped on a message, and samples of both."""

from __future__ import annotations

import hashlib
import hmac
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from case_files import no_fetch

from webhooks.provider import Delivery, Feed, NoSample, Refused, Verdict, Verified
from webhooks.providers.mailgun import PROVIDER

KEY = "signing-key-one"
NOW = datetime(2026, 11, 2, 9, 0, tzinfo=UTC)
SIGNED_AT = str(int(NOW.timestamp()))
TOKEN = "070c160a6299c5438070b1aa737b14fc2992ed49579c142648"
OUR_KEY = "e15bd8fd5b6b63a6f91c331d3c0702980d93474c2b1c4474"


def sign(timestamp: str = SIGNED_AT, token: str = TOKEN, key: str = KEY) -> str:
    return hmac.new(key.encode(), (timestamp + token).encode(), hashlib.sha256).hexdigest()


def signed(signature: Any = None, **event: Any) -> Delivery:
    block = signature if signature is not None else {"timestamp": SIGNED_AT, "token": TOKEN, "signature": sign()}
    return Delivery(json.dumps({"signature": block, "event-data": event}).encode(), {})


def feed(*secrets: str, tolerance: timedelta | None = None) -> Feed:
    return Feed("mailgun-main", "mailgun", secrets, tolerance)


async def verify(request: Delivery, of: Feed) -> Verdict:
    return await PROVIDER.verify(request, of, NOW, no_fetch)


async def test_any_configured_key_verifies_so_keys_can_be_rotated() -> None:
    assert await verify(signed(event="opened"), feed("old-key", KEY)) == Verified()
    assert await verify(signed(event="opened"), feed(KEY, "new-key")) == Verified()


async def test_the_parent_accounts_key_verifies_events_of_a_subaccount() -> None:
    block = {"timestamp": SIGNED_AT, "token": TOKEN, "signature": sign(key="the-child's"), "parent-signature": sign()}
    assert await verify(signed(block), feed(KEY)) == Verified()


async def test_a_timestamp_given_as_a_number_verifies() -> None:
    block = {"timestamp": int(SIGNED_AT), "token": TOKEN, "signature": sign()}
    assert await verify(signed(block), feed(KEY)) == Verified()


GOOD = {"timestamp": SIGNED_AT, "token": TOKEN, "signature": sign()}


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ({**GOOD, "signature": "0" * 64}, "signature"),
        ({**GOOD, "signature": sign(key="another")}, "signature"),
        ({**GOOD, "signature": sign()[:-1]}, "signature"),
        ({**GOOD, "signature": sign() + "0"}, "signature"),
        ({**GOOD, "signature": "größe"}, "signature"),
        ({**GOOD, "signature": "\ud800"}, "signature"),
        ({**GOOD, "token": TOKEN[::-1]}, "signature"),
        ({**GOOD, "token": "\udfff"}, "signature"),
        ({**GOOD, "timestamp": "1"}, "signature"),
        ({**GOOD, "signature": ""}, "missing"),
        ({**GOOD, "signature": None}, "missing"),
        ({**GOOD, "signature": [sign()]}, "missing"),
        ({**GOOD, "token": ""}, "missing"),
        ({"token": TOKEN, "signature": sign()}, "missing"),
        ({}, "missing"),
        ([], "missing"),
        ("text", "missing"),
    ],
)
async def test_a_wrong_or_malformed_signature_is_refused(block: Any, reason: str) -> None:
    verdict = await verify(signed(block, event="delivered"), feed(KEY))
    assert isinstance(verdict, Refused)
    assert verdict.reason == reason
    assert KEY not in verdict.hint


@pytest.mark.parametrize("secrets", [(), ("",)])
async def test_without_a_secret_every_delivery_is_refused(secrets: tuple[str, ...]) -> None:
    empty = {**GOOD, "signature": sign(key="")}
    verdicts = [await verify(signed(block), feed(*secrets)) for block in (GOOD, empty)]
    assert [verdict.reason for verdict in verdicts if isinstance(verdict, Refused)] == ["no_secret", "no_secret"]


async def test_a_credential_of_the_request_stands_in_for_the_signature() -> None:
    secrets = feed("header:X-Hook=throwaway")
    unsigned = signed({}, event="opened").body
    assert await verify(Delivery(unsigned, {"x-hook": "throwaway"}), secrets) == Verified()
    assert isinstance(await verify(Delivery(unsigned, {"x-hook": "another"}), secrets), Refused)


async def test_age_is_not_looked_at_unless_a_tolerance_is_set() -> None:
    old = str(int((NOW - timedelta(days=3)).timestamp()))
    request = signed({"timestamp": old, "token": TOKEN, "signature": sign(old)})
    assert PROVIDER.facts.tolerance is None
    assert await verify(request, feed(KEY)) == Verified()
    verdict = await verify(request, feed(KEY, tolerance=timedelta(hours=8)))
    assert isinstance(verdict, Refused)
    assert verdict.reason == "stale"
    assert await verify(signed(), feed(KEY, tolerance=timedelta(minutes=5))) == Verified()


async def test_a_signed_timestamp_that_is_no_time_is_refused_where_age_is_looked_at() -> None:
    request = signed({"timestamp": "soon", "token": TOKEN, "signature": sign("soon")})
    assert isinstance(await verify(request, feed(KEY, tolerance=timedelta(minutes=5))), Refused)


async def test_a_captured_signature_fits_any_body_as_long_as_no_tolerance_is_set_and_the_facts_say_so() -> None:
    forged = signed(event="failed", severity="permanent", id="forged")
    years_later = NOW + timedelta(days=1000)
    assert await PROVIDER.verify(forged, feed(KEY), years_later, no_fetch) == Verified()
    limited = feed(KEY, tolerance=timedelta(minutes=15))
    assert isinstance(await PROVIDER.verify(forged, limited, NOW + timedelta(minutes=16), no_fetch), Refused)
    facts = PROVIDER.facts
    assert "one captured timestamp, token and signature verify any body for ever" in facts.authentication
    assert "Tokens are not remembered: several receivers would have to share them" in facts.authentication
    assert any('tolerance = "15m"' in step for step in facts.setup)


def test_the_stamp_is_a_user_variable() -> None:
    stamp = PROVIDER.stamp(OUR_KEY)
    assert stamp.body == {"v:send_key": OUR_KEY}
    assert stamp.headers == {}
    assert json.loads(stamp.smtp_headers["X-Mailgun-Variables"]) == {"send_key": OUR_KEY}


SAMPLES = {
    "accepted": ("queued", "accepted"),
    "queued": ("queued", "accepted"),
    "delivered": ("delivered", "accepted"),
    "failed": ("bounced", "accepted"),
    "permanent_fail": ("bounced", "accepted"),
    "bounced": ("bounced", "accepted"),
    "temporary_fail": ("deferred", "accepted"),
    "deferred": ("deferred", "accepted"),
    "rejected": ("rejected", "rejected"),
    "opened": ("opened", "accepted"),
    "clicked": ("clicked", "accepted"),
    "complained": ("complained", "accepted"),
    "unsubscribed": ("unsubscribed", "accepted"),
}


@pytest.mark.parametrize("kind", SAMPLES)
async def test_a_sample_is_taken_and_means_what_it_is_asked_for(kind: str) -> None:
    of = feed(KEY, "another", tolerance=timedelta(minutes=5))
    sample = PROVIDER.sample(kind, OUR_KEY, of, NOW)
    assert await verify(sample, of) == Verified()
    (event,) = PROVIDER.parse(sample).events
    assert (event.kind, event.testimony) == SAMPLES[kind]
    assert (event.send_key, event.occurred_at) == (OUR_KEY, NOW)


def test_a_sample_asked_for_again_is_another_event_of_the_same_message() -> None:
    times = (NOW, NOW + timedelta(seconds=1))
    one, other = (PROVIDER.parse(PROVIDER.sample("opened", OUR_KEY, feed(KEY), time)).events[0] for time in times)
    assert one.message_id == other.message_id
    assert one.event_id != other.event_id


async def test_a_sample_carries_the_credential_of_a_feed_without_signing_key() -> None:
    of = feed("query:token=throwaway")
    assert await verify(PROVIDER.sample("opened", OUR_KEY, of, NOW), of) == Verified()


def test_no_sample_says_why_in_one_line() -> None:
    with pytest.raises(NoSample, match=r"^mailgun has no sample 'bounce'; there are accepted, .*, queued, .*"):
        PROVIDER.sample("bounce", OUR_KEY, feed(KEY), NOW)
    with pytest.raises(NoSample, match="no secrets"):
        PROVIDER.sample("opened", OUR_KEY, feed(), NOW)
