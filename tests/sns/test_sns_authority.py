# SPDX-License-Identifier: Apache-2.0
"""Scaleway's SNS: its signing certificates must go back to its authority, and only its own hosts are ever asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from judging import BASIC, FEED, TESTS, reason
from msgspec import structs
from sns_signer import SCALEWAY_TOPIC, Authority, CertificateStore, FakeScaleway, FakeSNS, _key, authority

from webhooks import sns
from webhooks.provider import Delivery, Feed, Later, Refused, Verdict, Verified
from webhooks.providers import ses
from webhooks.providers.scaleway import PROVIDER, SERVICE

NOW = datetime(2026, 11, 2, 9, 0, tzinfo=UTC)
EVENT = json.loads((TESTS / "providers/fixtures/scaleway/email_queued.json").read_bytes())
SCALEWAY = Feed("scaleway-main", "scaleway", topics=(SCALEWAY_TOPIC,), tolerance=timedelta(hours=8))
BUCKET = "https://messaging.s3.fr-par.scw.cloud"
HOST = "https://sns.mnq.fr-par.scaleway.com"
CONFIRM = f"/?Action=ConfirmSubscription&TopicArn={SCALEWAY_TOPIC}&Token=t"
TRUSTING = replace(SERVICE, authority=authority("Root for tests").pem.encode())
"""Scaleway's service with the tests' authority in the place of Scaleway's own."""


@pytest.fixture
def scaleway() -> FakeScaleway:
    return FakeScaleway()


async def judge(
    delivery: Delivery,
    store: CertificateStore,
    feed: Feed = SCALEWAY,
    now: datetime = NOW,
    service: sns.Service = TRUSTING,
) -> Verdict:
    return await sns.verify(delivery, feed, now, store, service)


def delivered(scaleway: FakeScaleway, now: datetime = NOW, **fields: Any) -> Delivery:
    return scaleway.delivery(scaleway.message(EVENT, now=now, **fields))


def served(scaleway: FakeScaleway, pem: str, chain: str | None = None) -> CertificateStore:
    """What the bucket would hold with another signing certificate, or with another chain."""
    return CertificateStore({scaleway.certificate_url: pem, scaleway.chain_url: chain or scaleway.chain})


def issued_by(issuer: Authority) -> str:
    return issuer.issue("sns.mnq.srr.scw.cloud", _key().public_key(), ca=False)


# -- the authority -----------------------------------------------------------------------------------------------------


async def test_certificate_and_chain_are_fetched_once_and_lead_to_the_authority(scaleway):
    for version in ("1", "2", "1"):
        assert await judge(delivered(scaleway, version=version), scaleway.store) == Verified()
    assert scaleway.store.calls == [scaleway.certificate_url, scaleway.chain_url]


async def test_a_certificate_on_scaleways_host_is_not_trusted_for_that(scaleway):
    stranger = authority("Somebody else")
    for pem in (FakeSNS().pem, issued_by(stranger), stranger.pem):
        assert reason(await judge(delivered(scaleway), served(scaleway, pem))) == "certificate_issuer"
        sns._fetched.clear()


async def test_a_chain_on_scaleways_host_is_not_trusted_for_that(scaleway):
    stranger = authority("Somebody else")
    between = authority("Somebody else's", stranger)
    store = served(scaleway, issued_by(between), stranger.pem + between.pem)
    assert reason(await judge(delivered(scaleway), store)) == "certificate_issuer"


async def test_only_scaleways_own_root_is_built_in(scaleway):
    verdict = await PROVIDER.verify(delivered(scaleway), SCALEWAY, NOW, scaleway.store)
    assert reason(verdict) == "certificate_issuer"
    assert "certificates" in verdict.hint


async def test_an_authority_that_only_has_the_right_name_is_none(scaleway):
    twin = authority("Authority for tests", authority("Root for tests", None, NOW - timedelta(days=1)))
    assert reason(await judge(delivered(scaleway), served(scaleway, issued_by(twin)))) == "certificate_issuer"


async def test_who_may_not_issue_certificates_is_no_authority(scaleway):
    key = _key()
    impostor = Authority("Signer", key, scaleway.between.issue("Signer", key.public_key(), ca=False))
    store = served(scaleway, issued_by(impostor), scaleway.chain + impostor.pem)
    assert reason(await judge(delivered(scaleway), store)) == "certificate_issuer"


@pytest.mark.parametrize("days", [-1, 11])
async def test_an_authority_is_none_before_and_after_its_time(scaleway, days):
    between = authority("Short-lived", scaleway.root, NOW, NOW + timedelta(days=10))
    store = served(scaleway, issued_by(between), scaleway.root.pem + between.pem)
    assert await judge(delivered(scaleway), store) == Verified()
    later = NOW + timedelta(days=days)
    assert reason(await judge(delivered(scaleway, now=later), store, now=later)) == "certificate_issuer"


async def test_a_certificate_is_none_after_its_time(scaleway):
    between = scaleway.between
    pem = between.issue("signer", _key().public_key(), ca=False, begins=NOW - timedelta(days=9), ends=NOW)
    store, late = served(scaleway, pem), NOW + timedelta(seconds=1)
    assert await judge(delivered(scaleway), store) == Verified()
    assert reason(await judge(delivered(scaleway, now=late), store, now=late)) == "certificate_dates"


async def test_a_longer_chain_leads_to_the_authority_and_a_circle_does_not(scaleway):
    second = authority("Second", scaleway.between)
    third = authority("Third", second)
    chain = scaleway.chain + second.pem + third.pem
    assert await judge(delivered(scaleway), served(scaleway, issued_by(third), chain)) == Verified()
    loop = authority("Loop")
    store = served(scaleway, issued_by(loop), loop.pem * 40)
    sns._fetched.clear()
    assert reason(await judge(delivered(scaleway), store)) == "certificate_issuer"


async def test_a_renewed_authority_is_fetched_where_the_one_remembered_does_not_fit(scaleway):
    assert await judge(delivered(scaleway), scaleway.store) == Verified()
    renewed = authority("Authority of next year", scaleway.root)
    scaleway.certificate_url = f"{scaleway.folder}sns_certificate_2.crt"
    scaleway.store.pems = {
        scaleway.certificate_url: issued_by(renewed),
        scaleway.chain_url: scaleway.chain + renewed.pem,
    }
    scaleway.store.calls.clear()
    assert await judge(delivered(scaleway), scaleway.store) == Verified()
    assert await judge(delivered(scaleway), scaleway.store) == Verified()
    assert scaleway.store.calls == [scaleway.certificate_url, scaleway.chain_url]


@pytest.mark.parametrize("missing", ["certificate", "chain"])
async def test_without_certificate_or_chain_a_message_must_come_again(scaleway, missing):
    place = scaleway.certificate_url if missing == "certificate" else scaleway.chain_url
    absent = CertificateStore({url: pem for url, pem in scaleway.store.pems.items() if url != place})
    assert await judge(delivered(scaleway), absent) == Later("certificate")
    assert await judge(delivered(scaleway), scaleway.store) == Verified()


@pytest.mark.parametrize("chain", ["", "<html>", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
async def test_what_is_no_chain_proves_nothing_and_is_not_remembered(scaleway, chain):
    store = CertificateStore({**scaleway.store.pems, scaleway.chain_url: chain})
    assert reason(await judge(delivered(scaleway), store)) == "certificate_issuer"
    assert await judge(delivered(scaleway), scaleway.store) == Verified()


async def test_a_pinned_chain_is_trusted_instead_and_none_is_fetched(scaleway, tmp_path: Path):
    scaleway.pin(tmp_path)
    feed = replace(SCALEWAY, certificates=str(tmp_path))
    assert await PROVIDER.verify(delivered(scaleway), feed, NOW, scaleway.store) == Verified()
    assert scaleway.store.calls == [scaleway.certificate_url]
    (tmp_path / "sns-trust-chain.pem").write_text(authority("Somebody else").pem)
    assert reason(await judge(delivered(scaleway), scaleway.store, feed)) == "certificate_issuer"
    (tmp_path / "sns-trust-chain.pem").write_text("no certificate")
    assert reason(await judge(delivered(scaleway), scaleway.store, feed)) == "certificate_issuer"


async def test_a_pinned_signing_certificate_is_not_fetched_but_proved_all_the_same(scaleway, tmp_path: Path):
    feed = replace(SCALEWAY, certificates=str(tmp_path))
    name = scaleway.certificate_url.rpartition("/")[2]
    (tmp_path / name).write_text(scaleway.pem)
    assert await judge(delivered(scaleway), scaleway.store, feed) == Verified()
    assert scaleway.store.calls == [scaleway.chain_url]
    (tmp_path / name).write_text(FakeSNS().pem)
    assert reason(await judge(delivered(scaleway), scaleway.store, feed)) == "certificate_issuer"


INTERMEDIATE = b"""\
-----BEGIN CERTIFICATE-----
MIIDJDCCAgygAwIBAgIUd2nIy8FaDuca2xFkrlrZgkwYDaIwDQYJKoZIhvcNAQEL
BQAwHDEaMBgGA1UEAxMRU2NhbGV3YXkgTW5RIFJvb3QwHhcNMjQxMjA1MTUzNTM3
WhcNMjcxMjA1MTUzNjA3WjAXMRUwEwYDVQQDEwxTY2FsZXdheSBNblEwggEiMA0G
CSqGSIb3DQEBAQUAA4IBDwAwggEKAoIBAQDTroJNvqAuIMgky9rCN8Pocf8UVJN7
095J7poeE+6esiMPwooaoGIhuvEoQJNHRtYdYmRpbrcSFEO8hXCnstWhljGdSumv
NJLMXMa1qxNZPYckah1Pxmu8xkPe9iuoC0yyRPbsRVP6B2nzwO2kjF5rP7XnH7pW
qctIEHiuD1wdKu0TmwFmLV6aqgJ8aYEpLo5RYAk5KyNbW8D2b96D/buYLkjcTp9W
BsU+0/n/GvefG0UKekMykakm3jHP7vtXtO56cxFjUHRRc8HsQObER6dxzKOWRod1
caIkaIK1s7zGJn7c6I+su+Tro91Fk2rCPP4/CzgfDJTp+Nk643hnPW3ZAgMBAAGj
YzBhMA4GA1UdDwEB/wQEAwIBBjAPBgNVHRMBAf8EBTADAQH/MB0GA1UdDgQWBBTM
tf2g/osLntpPeojyIfWFDEEnSzAfBgNVHSMEGDAWgBRgwQ4oFQqI/P4rnfaP9mRu
Zh/htzANBgkqhkiG9w0BAQsFAAOCAQEAYwuUBAMMT7xZzJRlZ4eRwA5Eqql+GbTp
ePWdwx7Qa5WmRKaFj3nLCNxw6Ng6YWpusQF3M/1Ob8aB0DdRn/GZ8wdkMcO+cCsJ
rBmW7RTTS3Mg0Hh43Wh+7Hzcq5JxMM4gifnaBpOJ/Ksm+roflALkCb1tXX3FF300
LsHgbg6ejB3SjsIpHPye1PSdHTsJqbSrU25UrmZN29RU5qgaC6zd3REKLafmmL4n
Zser1MH2FsZ6QPEuYDSYEIFoywSFx5oeFvp/Y4ta/ipOCvB9G08NY8wIDyPElcoj
cxXjhLhctPUL61xVvym8M5aOlp7uyE0Gynxzh+AoSK5U7ZsuKuuOOw==
-----END CERTIFICATE-----
"""
"""Scaleway's authority of 2024 to 2027, as its chain holds it."""


def test_the_built_in_root_is_scaleways_and_issued_its_authority():
    assert SERVICE.authority
    (root,) = x509.load_pem_x509_certificates(SERVICE.authority)
    assert root.fingerprint(hashes.SHA256()).hex() == "c5a0145efb57916c07f9af3e3f311215062c0562c2d56d7ff3c57da9fb52e4d5"
    assert (root.subject.rfc4514_string(), root.not_valid_after_utc.year) == ("CN=Scaleway MnQ Root", 2032)
    root.verify_directly_issued_by(root)
    assert sns._goes_back(x509.load_pem_x509_certificate(INTERMEDIATE), [root], [], NOW)


# -- what is asked -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "",
        f"{BUCKET}/fr-par/sns/",
        f"{BUCKET}/nl-ams/sns/a.crt",
        f"{BUCKET}/fr-par/other/a.crt",
        f"{BUCKET}/a.crt",
        f"{BUCKET}/fr-par/sns/a.txt",
        f"{BUCKET}/fr-par/sns/a.crt?x=1",
        f"{BUCKET}/fr-par/sns/a.crt#x",
        f"{BUCKET}/fr-par/sns/a.crt\n",
        f"{BUCKET}/fr-par/sns/../../other/a.crt",
        f"{BUCKET}/fr-par/sns/..%2f..%2fa.crt",
        f"{BUCKET}/fr-par/sns/x\\a.crt",
        f"{BUCKET}:443/fr-par/sns/a.crt",
        f"{BUCKET}.evil.example/fr-par/sns/a.crt",
        f"{BUCKET}@evil.example/fr-par/sns/a.crt",
        f"{BUCKET}\\@evil.example/fr-par/sns/a.crt",
        "https://evil.s3.fr-par.scw.cloud/fr-par/sns/a.crt",
        "https://user@messaging.s3.fr-par.scw.cloud/fr-par/sns/a.crt",
        "http://messaging.s3.fr-par.scw.cloud/fr-par/sns/a.crt",
        "HTTPS://messaging.s3.fr-par.scw.cloud/fr-par/sns/a.crt",
        "https://sns.eu-west-1.amazonaws.com/SimpleNotificationService-a.pem",
        "file:///fr-par/sns/a.crt",
    ],
)
async def test_no_other_url_is_ever_fetched(scaleway, url):
    store = CertificateStore({url: scaleway.pem})
    assert reason(await judge(delivered(scaleway, SigningCertURL=url), store)) == "certificate_url"
    assert store.calls == []


@pytest.mark.parametrize("name", ["sns_certificate_123.crt", "sns_certificate_3f-a0-11.crt", "a:b.pem"])
async def test_a_certificate_of_any_serial_number_is_fetched(scaleway, name):
    store = CertificateStore({f"{scaleway.folder}{name}": scaleway.pem, scaleway.chain_url: scaleway.chain})
    assert await judge(delivered(scaleway, SigningCertURL=scaleway.folder + name), store) == Verified()


@pytest.mark.parametrize(
    "topic",
    ["arn:aws:sns:fr-par:000000000000:t", "arn:scw:sns:evil.example/:p:t", "arn:scw:sqs:fr-par:p:t", "fr-par", ""],
)
async def test_even_a_configured_topic_that_is_not_scaleways_has_no_certificate(scaleway, topic):
    feed = replace(SCALEWAY, topics=(topic,))
    verdict = await judge(delivered(scaleway, TopicArn=topic), scaleway.store, feed)
    assert isinstance(verdict, Refused)
    assert scaleway.store.calls == []


async def test_amazon_and_scaleway_do_not_stand_in_for_each_other(scaleway):
    both = (SCALEWAY_TOPIC, *FEED.topics)
    amazon = FakeSNS()
    amazons = amazon.delivery(amazon.message(EVENT, now=NOW))
    assert reason(await judge(amazons, amazon.store, replace(SCALEWAY, topics=both))) == "certificate_url"
    verdict = await ses.PROVIDER.verify(delivered(scaleway), replace(FEED, topics=both), NOW, scaleway.store)
    assert reason(verdict) == "certificate_url"
    assert amazon.store.calls == scaleway.store.calls == []


async def test_another_regions_topic_has_its_own_places(scaleway):
    topic = SCALEWAY_TOPIC.replace("fr-par", "nl-ams")
    dutch = FakeScaleway(topic)
    assert dutch.certificate_url.startswith(f"{BUCKET}/nl-ams/sns/")
    feed = replace(SCALEWAY, topics=(topic,))
    assert await judge(delivered(dutch), dutch.store, feed) == Verified()
    confirmation = dutch.message("confirm", now=NOW, type="SubscriptionConfirmation")
    assert await judge(dutch.delivery(confirmation), dutch.store, feed) == Verified()
    assert confirmation["SubscribeURL"].startswith("https://sns.mnq.nl-ams.scaleway.com/?")


async def test_a_message_of_another_topic_is_refused(scaleway):
    other = FakeScaleway(SCALEWAY_TOPIC + "2")
    assert reason(await judge(delivered(other), other.store)) == "topic"


@pytest.mark.parametrize("field", ["Message", "MessageId", "Timestamp", "Subject"])
async def test_a_changed_field_is_refused(scaleway, field):
    message: Mapping[str, Any] = scaleway.message(EVENT, now=NOW) | {field: "2026-11-02T09:00:01Z"}
    assert reason(await judge(scaleway.delivery(message), scaleway.store)) == "signature"


async def test_a_message_older_than_eight_hours_is_stale(scaleway):
    assert PROVIDER.facts.tolerance == timedelta(hours=8)
    old = NOW - timedelta(hours=8, seconds=1)
    assert reason(await judge(delivered(scaleway, now=old), scaleway.store)) == "stale"


# -- subscriptions -----------------------------------------------------------------------------------------------------


async def test_a_signed_confirmation_of_the_feeds_topic_is_to_be_confirmed(scaleway):
    delivery = scaleway.delivery(scaleway.message("confirm", now=NOW, type="SubscriptionConfirmation"))
    assert await judge(delivery, scaleway.store) == Verified()
    found = PROVIDER.parse(delivery)
    assert found.control == "subscription_confirmation"
    assert found.confirm_url
    assert found.confirm_url.startswith(f"{HOST}/?Action=ConfirmSubscription&TopicArn={SCALEWAY_TOPIC}&Token=")


@pytest.mark.parametrize(
    "url",
    [
        f"http://sns.mnq.fr-par.scaleway.com{CONFIRM}",
        f"https://sns.mnq.nl-ams.scaleway.com{CONFIRM}",
        f"https://sns.eu-west-1.amazonaws.com{CONFIRM}",
        f"{HOST}.evil.example{CONFIRM}",
        f"{HOST}@evil.example{CONFIRM}",
        f"{HOST}:8443{CONFIRM}",
        f"{HOST}{CONFIRM}2".replace(f"{SCALEWAY_TOPIC}", f"{SCALEWAY_TOPIC}2"),
        f"{HOST}{CONFIRM}".replace("ConfirmSubscription", "DeleteTopic"),
        f"{HOST}{CONFIRM}&Action=DeleteTopic",
        f"{HOST}{CONFIRM}#x",
        f"{HOST}/x{CONFIRM}",
    ],
)
async def test_no_other_url_is_ever_confirmed(scaleway, url):
    message = scaleway.message("confirm", now=NOW, type="SubscriptionConfirmation", SubscribeURL=url)
    assert reason(await judge(scaleway.delivery(message), scaleway.store)) == "subscribe_url"
    assert PROVIDER.parse(scaleway.delivery(message)).confirm_url is None


async def test_a_password_confirms_no_subscription_but_carries_events_where_no_topics_are_set(scaleway):
    feed = Feed("scaleway-main", "scaleway", ("basic:user:password",))
    event = delivered(scaleway)
    carried = structs.replace(event, headers={**event.headers, **BASIC})
    assert await PROVIDER.verify(carried, feed, NOW, scaleway.store) == Verified()
    assert reason(await PROVIDER.verify(event, feed, NOW, scaleway.store)) == "topic"
    confirmation = scaleway.delivery(scaleway.message("confirm", now=NOW, type="SubscriptionConfirmation"))
    carried = structs.replace(confirmation, headers={**confirmation.headers, **BASIC})
    assert reason(await PROVIDER.verify(carried, feed, NOW, scaleway.store)) == "topic"
    assert scaleway.store.calls == []
