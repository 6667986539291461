# SPDX-License-Identifier: Apache-2.0
"""Whose SNS messages are believed, and from where their certificates are taken."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st
from sns_signer import TOPIC, CertificateStore, FakeSNS, case_store

from webhooks import sns
from webhooks.payload import at, load
from webhooks.provider import BadPayload, Delivery, Feed, Later, Refused, Verdict, Verified
from webhooks.providers.ses import PROVIDER

HERE = Path(__file__).parent
NOW = datetime(2026, 11, 20, 10, 5, tzinfo=UTC)
RECORD = json.loads((HERE / "providers/fixtures/ses/event_delivery.json").read_bytes())
FEED = Feed("ses-eu", "ses", topics=(TOPIC,), tolerance=timedelta(hours=8))
BASIC = {"authorization": "Basic " + base64.b64encode(b"user:password").decode()}
KINDS = ["Notification", "SubscriptionConfirmation", "UnsubscribeConfirmation"]


@pytest.fixture(autouse=True)
def _no_certificates_from_other_tests() -> Iterator[None]:
    sns.forget_certificates()
    yield
    sns.forget_certificates()


@pytest.fixture(scope="module")
def aws() -> FakeSNS:
    return FakeSNS()


async def judge(delivery: Delivery, store: CertificateStore, feed: Feed = FEED, now: datetime = NOW) -> Verdict:
    return await PROVIDER.verify(delivery, feed, now, store)


def reason(verdict: Verdict) -> str:
    assert isinstance(verdict, Refused), verdict
    assert verdict.hint
    assert "\n" not in verdict.hint
    return verdict.reason


async def refusal(delivery: Delivery, store: CertificateStore, feed: Feed = FEED, now: datetime = NOW) -> str:
    return reason(await judge(delivery, store, feed, now))


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
    envelope = json.loads((HERE / "providers/fixtures/ses" / f"{name}.json").read_bytes())
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


# -- certificates ------------------------------------------------------------------------------------------------------

HOST = "https://sns.eu-west-1.amazonaws.com"


@pytest.mark.parametrize(
    "url",
    [
        "",
        f"{HOST}/",
        f"{HOST}",
        f"{HOST}/x.pem",
        f"{HOST}/SimpleNotificationService-.pem",
        f"{HOST}/SimpleNotificationService-a.pem\n",
        f"{HOST}/SimpleNotificationService-a.pem?x=1",
        f"{HOST}/SimpleNotificationService-a.pem#x",
        f"{HOST}/SimpleNotificationService-\u0661.pem",
        f"{HOST}/a/../SimpleNotificationService-a.pem",
        f"{HOST}/SimpleNotificationService-..%2fa.pem",
        f"{HOST}:443/SimpleNotificationService-a.pem",
        f"{HOST}.cn/SimpleNotificationService-a.pem",
        f"{HOST}./SimpleNotificationService-a.pem",
        f"{HOST}\\@evil.example/SimpleNotificationService-a.pem",
        "https://user@sns.eu-west-1.amazonaws.com/SimpleNotificationService-a.pem",
        "HTTPS://sns.eu-west-1.amazonaws.com/SimpleNotificationService-a.pem",
        " https://sns.eu-west-1.amazonaws.com/SimpleNotificationService-a.pem",
        "https://sns.eu-west-2.amazonaws.com/SimpleNotificationService-a.pem",
        "https://sns.eu-west-1xamazonaws.com/SimpleNotificationService-a.pem",
        "file:///SimpleNotificationService-a.pem",
    ],
)
async def test_no_other_url_is_ever_fetched(aws, url):
    store = CertificateStore({url: aws.pem})
    delivery = aws.delivery(aws.message(RECORD, now=NOW, SigningCertURL=url))
    assert await refusal(delivery, store) == "certificate_url"
    assert store.calls == []


@pytest.mark.parametrize(
    ("topic", "host"),
    [
        (TOPIC, "sns.eu-west-1.amazonaws.com"),
        ("arn:aws-cn:sns:cn-north-1:000000000000:t", "sns.cn-north-1.amazonaws.com.cn"),
        ("arn:aws-us-gov:sns:us-gov-west-1:000000000000:t", "sns.us-gov-west-1.amazonaws.com"),
        ("arn:aws-evil:sns:eu-west-1:000000000000:t", None),
        ("arn:aws:sns:evil.example/:000000000000:t", None),
        ("arn:aws:sqs:eu-west-1:000000000000:t", None),
        ("", None),
    ],
)
def test_a_topic_has_one_host(topic, host):
    assert sns.topic_host(topic) == host


async def test_even_a_configured_topic_that_is_no_arn_has_no_certificate(aws):
    topic = "evil"
    message = aws.message(
        RECORD, now=NOW, TopicArn=topic, SigningCertURL="https://None/SimpleNotificationService-a.pem"
    )
    assert await refusal(aws.delivery(message), aws.store, replace(FEED, topics=(topic,))) == "certificate_url"


async def test_a_certificate_is_fetched_once(aws):
    store = CertificateStore(aws.store.pems)
    for _ in range(3):
        assert await judge(aws.delivery(aws.message(RECORD, now=NOW)), store) == Verified()
    assert store.calls == [aws.certificate_url]


async def test_without_its_certificate_a_message_must_come_again(aws):
    store = CertificateStore({})
    delivery = aws.delivery(aws.message(RECORD, now=NOW))
    assert await judge(delivery, store) == Later("certificate")
    store.pems = aws.store.pems
    assert await judge(delivery, store) == Verified()
    assert len(store.calls) == 2


@pytest.mark.parametrize(
    "pem", ["", "<html>no</html>", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
async def test_what_is_no_certificate_is_not_remembered(aws, pem):
    store = CertificateStore({aws.certificate_url: pem})
    delivery = aws.delivery(aws.message(RECORD, now=NOW))
    assert await judge(delivery, store) == Later("certificate")
    store.pems = aws.store.pems
    assert await judge(delivery, store) == Verified()


async def test_the_memory_of_certificates_is_bounded(aws):
    store = CertificateStore({})
    for number in range(200):
        url = f"{aws.base}/SimpleNotificationService-{number}.pem"
        store.pems[url] = aws.pem
        assert await judge(aws.delivery(aws.message(RECORD, now=NOW, SigningCertURL=url)), store) == Verified()
    assert len(sns._fetched) == 64


async def test_a_pinned_certificate_is_never_fetched(aws, tmp_path):
    aws.pin(tmp_path)
    store = CertificateStore({})
    feed = replace(FEED, certificates=str(tmp_path))
    assert await judge(aws.delivery(aws.message(RECORD, now=NOW)), store, feed) == Verified()
    url = "https://evil.example/" + aws.certificate_url.rpartition("/")[2]
    hostile = aws.delivery(aws.message(RECORD, now=NOW, SigningCertURL=url))
    assert await refusal(hostile, store, feed) == "certificate_url"
    assert store.calls == []


async def test_a_certificate_that_is_not_pinned_yet_is_fetched(aws, tmp_path):
    delivery = aws.delivery(aws.message(RECORD, now=NOW))
    assert await judge(delivery, aws.store, replace(FEED, certificates=str(tmp_path))) == Verified()
    assert await judge(delivery, CertificateStore({}), replace(FEED, certificates=str(tmp_path / "none"))) == Verified()
    sns.forget_certificates()
    assert await judge(delivery, CertificateStore({}), replace(FEED, certificates=str(tmp_path))) == Later(
        "certificate"
    )


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
    assert await judge(replace(raw, headers={**raw.headers, **BASIC}), aws.store, feed) == Verified()
    assert await judge(replace(raw, headers={**raw.headers, "x-token": "abc"}), aws.store, feed) == Verified()
    assert await refusal(replace(raw, headers={**raw.headers, "x-token": "abd"}), aws.store, feed) == "raw_delivery"
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


# -- cases from public trouble reports ---------------------------------------------------------------------------------


def case(number: str) -> dict[str, Any]:
    (path,) = (HERE / "cases").glob(f"{number}-*.json")
    value: dict[str, Any] = json.loads(path.read_text())
    return value


async def case_verdicts(number: str, store: CertificateStore | None = None) -> list[Verdict]:
    value = case(number)
    feed = replace(FEED, topics=tuple(value["config"]["sns_topics"]))
    now = datetime.fromisoformat(value["clock"])
    store = store or case_store(value)
    requests = [value, *value.get("requests", [])]
    return [
        await judge(
            Delivery(request["body_text"].encode(), {k.lower(): v for k, v in request["headers"].items()}),
            store,
            feed,
            now,
        )
        for request in requests
    ]


@pytest.mark.parametrize("number", ["001", "002", "022", "030", "032", "034", "044", "100"])
async def test_a_case_that_is_genuine_is_believed(number):
    assert set(await case_verdicts(number)) == {Verified()}


async def test_case_003_raw_delivery_is_named():
    assert [reason(verdict) for verdict in await case_verdicts("003")] == ["raw_delivery"]


async def test_case_030_a_clock_that_is_off_is_suspected():
    value = case("030")
    delivery = Delivery(value["body_text"].encode(), {})
    verdict = await judge(delivery, case_store(value), now=datetime(2026, 11, 20, 18, 30, tzinfo=UTC))
    assert reason(verdict) == "stale"
    assert "clock skew suspected" in verdict.hint


async def test_case_033_no_hostile_url_is_fetched():
    store = case_store(case("033"))
    verdicts = await case_verdicts("033", store)
    assert [reason(verdict) for verdict in verdicts] == ["certificate_url"] * 7
    assert store.calls == []


async def test_case_034_without_a_certificate_both_must_come_again():
    assert await case_verdicts("034", CertificateStore({})) == [Later("certificate")] * 2


def test_a_certificate_without_an_rsa_key_is_none():
    assert sns.read_certificate(_elliptic()) is None


def _elliptic() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    dated = builder.serial_number(1).not_valid_before(NOW).not_valid_after(NOW + timedelta(days=1))
    return dated.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
