# SPDX-License-Identifier: Apache-2.0
"""Whose SNS messages are believed."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judging import BASIC, FEED, HOST, KINDS, NOW, RECORD, TESTS, judge, reason, refusal
from msgspec import structs
from sns_signer import TOPIC, CertificateStore, FakeSNS

from webhooks.payload import at, load
from webhooks.provider import BadPayload, Delivery, Later, Refused, Verified
from webhooks.providers.ses import PROVIDER

# -- signatures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subject", [None, "", "Amazon SES Email Event Notification"])
@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_topic_of_the_feed_signed_is_believed(aws, kind, version, subject):
    delivery = aws.delivery(aws.message(RECORD, now=NOW, type=kind, version=version, subject=subject))
    assert await judge(delivery, aws.store) == Verified()


@pytest.mark.parametrize(
    "name",
    [
        "sns_http_notification_send",
        "sns_http_topic_validation",
        "sns_http_subscription_confirmation",
        "sns_http_unsubscribe_confirmation",
    ],
)
async def test_the_fixtures_are_believed_once_they_are_signed(name):
    envelope = json.loads((TESTS / "providers/fixtures/ses" / f"{name}.json").read_bytes())
    aws = FakeSNS(envelope["TopicArn"])
    feed = replace(FEED, topics=(aws.topic,), tolerance=None)
    assert await judge(aws.delivery(aws.resigned(envelope)), aws.store, feed) == Verified()
    forged = envelope | {"SigningCertURL": aws.certificate_url}
    assert await refusal(aws.delivery(forged), aws.store, feed) == "signature"


@pytest.mark.parametrize("field", ["Message", "MessageId", "Subject", "Timestamp", "Signature"])
async def test_a_changed_field_is_noticed(aws, field):
    message = aws.message(RECORD, now=NOW, subject="subject")
    first = message[field][0]
    message[field] = ("B" if first == "A" else "A") + message[field][1:]
    assert await refusal(aws.delivery(message), aws.store) == "signature"


async def test_a_subject_put_in_or_taken_out_is_noticed(aws):
    without = aws.message(RECORD, now=NOW)
    assert await refusal(aws.delivery(without | {"Subject": ""}), aws.store) == "signature"
    with_subject = aws.message(RECORD, now=NOW, subject="subject")
    del with_subject["Subject"]
    assert await refusal(aws.delivery(with_subject), aws.store) == "signature"


async def test_a_null_subject_is_no_subject(aws):
    message = aws.message(RECORD, now=NOW) | {"Subject": None}
    assert await judge(aws.delivery(message), aws.store) == Verified()


@pytest.mark.parametrize("version", ["3", "", "0", "v2", None, 2])
async def test_other_signature_versions_are_refused(aws, version):
    message = aws.message(RECORD, now=NOW)
    del message["SignatureVersion"]
    if version is not None:
        message["SignatureVersion"] = version
    wanted = "signature_version" if isinstance(version, str) else "missing"
    assert await refusal(aws.delivery(message), aws.store) == wanted


@pytest.mark.parametrize("signature", ["", "AAAA", "not base64!", "\u00e4\u00f6", "\ud83d", "A" * 100_000])
async def test_a_signature_that_is_none_is_just_wrong(aws, signature):
    message = aws.message(RECORD, now=NOW) | {"Signature": signature}
    assert await refusal(aws.delivery(message), aws.store) == "signature"


async def test_the_header_must_say_what_the_body_says(aws):
    message = aws.message(RECORD, now=NOW)
    other = aws.delivery(message, x_amz_sns_message_type="SubscriptionConfirmation")
    assert await refusal(other, aws.store) == "message_type"
    assert await judge(Delivery(other.body, {}), aws.store) == Verified()


async def test_an_unknown_message_type_is_refused(aws):
    message = aws.message(RECORD, now=NOW, type="Gossip", SubscribeURL="u", Token="t")
    assert await refusal(aws.delivery(message), aws.store) == "message_type"


@pytest.mark.parametrize("field", ["Message", "MessageId", "Timestamp", "TopicArn", "Signature", "SigningCertURL"])
@pytest.mark.parametrize("value", [None, 7, ["x"], {"x": 1}])
async def test_a_field_that_is_missing_or_no_text_is_refused(aws, field, value):
    message = aws.message(RECORD, now=NOW)
    body = json.dumps({k: v for k, v in (message | {field: value}).items() if v is not None}).encode()
    delivery = Delivery(body, aws.delivery(message).headers)
    assert await refusal(delivery, aws.store) == "missing"


@pytest.mark.parametrize("field", ["Token", "SubscribeURL"])
async def test_a_confirmation_without_its_token_or_url_is_refused(aws, field):
    message = aws.message("confirm", now=NOW, type="SubscriptionConfirmation", **{field: None})
    assert await refusal(aws.delivery(message), aws.store) == "missing"


async def test_fields_cannot_be_cut_elsewhere(aws):
    message = aws.message("true\nMessageId\nid", now=NOW, MessageId="m")
    cut = message | {"Message": "true", "MessageId": "id\nMessageId\nm"}
    assert await judge(aws.delivery(message), aws.store) == Verified()
    assert await refusal(aws.delivery(cut), aws.store) == "missing"


# -- topics ------------------------------------------------------------------------------------------------------------


async def test_another_account_s_topic_is_refused_however_well_signed(aws):
    stranger = FakeSNS(TOPIC.replace("000000000000", "111111111111"))
    for kind in KINDS:
        delivery = stranger.delivery(stranger.message(RECORD, now=NOW, type=kind))
        assert await refusal(delivery, stranger.store) == "topic"
    assert stranger.store.calls == []


async def test_a_feed_without_topics_believes_nobody(aws):
    verdict = await judge(aws.delivery(aws.message(RECORD, now=NOW)), aws.store, replace(FEED, topics=()))
    assert reason(verdict) == "topic"
    assert "topics" in verdict.hint


# -- time --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("age", "tolerance", "stale"),
    [
        (timedelta(hours=7, minutes=59), timedelta(hours=8), False),
        (timedelta(hours=8, minutes=1), timedelta(hours=8), True),
        (-timedelta(hours=8, minutes=1), timedelta(hours=8), True),
        (timedelta(days=14), None, False),
    ],
)
async def test_the_time_of_publishing_must_lie_within_the_tolerance(aws, age, tolerance, stale):
    delivery = aws.delivery(aws.message(RECORD, now=NOW - age))
    verdict = await judge(delivery, aws.store, replace(FEED, tolerance=tolerance))
    assert (reason(verdict) == "stale" and "clock" in verdict.hint) if stale else verdict == Verified()


async def test_a_time_that_cannot_be_read_is_stale_unless_age_is_off(aws):
    delivery = aws.delivery(aws.message(RECORD, now=NOW, Timestamp="yesterday"))
    assert await refusal(delivery, aws.store) == "stale"
    assert await judge(delivery, aws.store, replace(FEED, tolerance=None)) == Verified()


@pytest.mark.parametrize("days", [-1, 400])
async def test_a_certificate_counts_only_while_it_is_valid(days):
    aws = FakeSNS(begins=NOW, ends=NOW + timedelta(days=395))
    now = NOW + timedelta(days=days)
    delivery = aws.delivery(aws.message(RECORD, now=now))
    assert await refusal(delivery, aws.store, now=now) == "certificate_dates"
    assert await judge(aws.delivery(aws.message(RECORD, now=NOW)), aws.store) == Verified()


# -- raw delivery ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [json.dumps(RECORD), "", "prose", "[]", "null", '{"eventType": 1}'])
@pytest.mark.parametrize("headers", [{}, {"x-amz-sns-rawdelivery": "true"}])
async def test_raw_delivery_is_refused_and_named(aws, body, headers):
    verdict = await judge(Delivery(body.encode(), headers), aws.store)
    assert reason(verdict) == "raw_delivery"
    assert "raw message delivery" in verdict.hint


async def test_raw_delivery_is_believed_with_a_credential(aws):
    feed = replace(FEED, secrets=("basic:user:password", "header:X-Token=abc"))
    raw = aws.raw_delivery(RECORD)
    assert await judge(structs.replace(raw, headers={**raw.headers, **BASIC}), aws.store, feed) == Verified()
    assert await judge(structs.replace(raw, headers={**raw.headers, "x-token": "abc"}), aws.store, feed) == Verified()
    other = structs.replace(raw, headers={**raw.headers, "x-token": "abd"})
    assert await refusal(other, aws.store, feed) == "raw_delivery"
    assert await refusal(raw, aws.store, feed) == "raw_delivery"


async def test_the_signature_decides_where_there_are_topics(aws):
    feed = replace(FEED, secrets=("basic:user:password",))
    message = aws.message(RECORD, now=NOW)
    assert await judge(aws.delivery(message), aws.store, feed) == Verified()
    forged = aws.delivery(message | {"Message": "{}"}, **BASIC)
    assert await refusal(forged, aws.store, feed) == "signature"


async def test_a_credential_never_confirms_a_subscription(aws):
    feed = replace(FEED, topics=(), secrets=("basic:user:password",))
    for kind in KINDS:
        delivery = aws.delivery(aws.message("text", now=NOW, type=kind), **BASIC)
        verdict = await judge(delivery, aws.store, feed)
        assert reason(verdict) == "topic" if kind == "SubscriptionConfirmation" else verdict == Verified()
    raw = aws.delivery(
        aws.message("text", now=NOW, type="SubscriptionConfirmation"), x_amz_sns_rawdelivery="true", **BASIC
    )
    assert await refusal(raw, aws.store, replace(feed, topics=FEED.topics)) == "raw_delivery"


# -- confirmations -----------------------------------------------------------------------------------------------------


async def test_a_verified_confirmation_has_its_url(aws):
    message = aws.message("confirm", now=NOW, type="SubscriptionConfirmation")
    delivery = aws.delivery(message)
    assert await judge(delivery, aws.store) == Verified()
    found = PROVIDER.parse(delivery)
    assert (found.control, found.confirm_url) == ("subscription_confirmation", message["SubscribeURL"])


CONFIRM = f"/?Action=ConfirmSubscription&TopicArn={TOPIC}&Token=t"


@pytest.mark.parametrize(
    "url",
    [
        f"https://evil.example{CONFIRM}",
        f"http://sns.eu-west-1.amazonaws.com{CONFIRM}",
        f"https://sns.us-east-1.amazonaws.com{CONFIRM}",
        f"https://sns.eu-west-1.amazonaws.com@evil.example{CONFIRM}",
        f"https://sns.eu-west-1.amazonaws.com:8443{CONFIRM}",
        f"{HOST}/x{CONFIRM}",
        f"{HOST}/?Action=DeleteTopic&TopicArn={TOPIC}&Token=t",
        f"{HOST}/?Action=ConfirmSubscription&TopicArn={TOPIC}2&Token=t",
        f"{HOST}{CONFIRM}&Action=DeleteTopic",
        f"{HOST}{CONFIRM} HTTP/1.1",
        f"{HOST}{CONFIRM}#x",
        "x",
    ],
)
async def test_nothing_else_is_confirmed(aws, url):
    delivery = aws.delivery(aws.message("confirm", now=NOW, type="SubscriptionConfirmation", SubscribeURL=url))
    assert await refusal(delivery, aws.store) == "subscribe_url"
    assert PROVIDER.parse(delivery).confirm_url is None


async def test_a_removal_confirms_nothing_and_is_counted(aws):
    delivery = aws.delivery(aws.message("removed", now=NOW, type="UnsubscribeConfirmation"))
    assert await judge(delivery, aws.store) == Verified()
    found = PROVIDER.parse(delivery)
    assert (found.control, found.confirm_url, found.anomalies) == (
        "unsubscribe_confirmation",
        None,
        {"unsubscribed": 1},
    )


# -- hostile bodies ----------------------------------------------------------------------------------------------------


@given(body=st.binary(max_size=200))
def test_no_bytes_raise(body):
    verdict = asyncio.run(judge(Delivery(body, {}), CertificateStore({})))
    assert isinstance(verdict, Refused)


def test_no_damaged_envelope_raises_or_is_believed():
    aws, dice = FakeSNS(), random.Random(1)
    body = aws.delivery(aws.message(RECORD, now=NOW, subject="s")).body

    async def all_of_them() -> set[type]:
        verdicts = set()
        for _ in range(3000):
            at, byte = dice.randrange(len(body)), dice.randrange(256)
            damaged = body[:at] + bytes([byte]) + body[at + dice.randrange(3) :]
            if _same(damaged, body):
                continue
            verdicts.add(type(await judge(Delivery(damaged, {}), aws.store)))
        return verdicts

    assert asyncio.run(all_of_them()) <= {Refused, Later}


def _same(damaged: bytes, body: bytes) -> bool:
    signed = ("Type", "MessageId", "TopicArn", "Subject", "Message", "Timestamp", "Signature")
    try:
        one, other = load(damaged), load(body)
    except BadPayload:
        return False
    return all(at(one, name) == other[name] for name in signed)


@pytest.mark.parametrize("depth", [900, 100_000])
async def test_deep_nesting_raises_nothing(aws, depth):
    body = b'{"Type": ' + b"[" * depth + b"]" * depth + b"}"
    assert await refusal(Delivery(body, {}), aws.store) in ("missing", "raw_delivery")
