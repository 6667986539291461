# SPDX-License-Identifier: Apache-2.0
"""From where the certificates of SNS are taken, and that nothing else is ever fetched."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from judging import FEED, HOST, NOW, RECORD, judge, refusal
from sns_signer import TOPIC, CertificateStore

from webhooks import sns
from webhooks.provider import Later, Verified


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


async def test_a_pinned_certificate_that_is_replaced_counts_from_the_next_delivery_on(aws, tmp_path):
    feed = replace(FEED, certificates=str(tmp_path))
    pinned = tmp_path / aws.certificate_url.rpartition("/")[2]
    pinned.write_text("x" * len(aws.pem))
    delivery = aws.delivery(aws.message(RECORD, now=NOW))
    assert await judge(delivery, CertificateStore({}), feed) == Later("certificate")
    aws.pin(tmp_path)
    assert await judge(delivery, CertificateStore({}), feed) == Verified()
    pinned.unlink()
    assert await judge(delivery, CertificateStore({}), feed) == Later("certificate")


async def test_a_certificate_that_is_not_pinned_yet_is_fetched(aws, tmp_path):
    delivery = aws.delivery(aws.message(RECORD, now=NOW))
    assert await judge(delivery, aws.store, replace(FEED, certificates=str(tmp_path))) == Verified()
    assert await judge(delivery, CertificateStore({}), replace(FEED, certificates=str(tmp_path / "none"))) == Verified()
    sns._fetched.clear()
    assert await judge(delivery, CertificateStore({}), replace(FEED, certificates=str(tmp_path))) == Later(
        "certificate"
    )


def test_a_certificate_without_an_rsa_key_is_none():
    assert sns.read_certificate(_elliptic()) is None


def _elliptic() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    dated = builder.serial_number(1).not_valid_before(NOW).not_valid_after(NOW + timedelta(days=1))
    return dated.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
