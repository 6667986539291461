# SPDX-License-Identifier: Apache-2.0
"""How tests ask whether an SNS message is believed."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sns_signer import TOPIC, CertificateStore

from webhooks.provider import Delivery, Feed, Refused, Verdict
from webhooks.providers.ses import PROVIDER

TESTS = Path(__file__).parent.parent
NOW = datetime(2026, 11, 20, 10, 5, tzinfo=UTC)
RECORD = json.loads((TESTS / "providers/fixtures/ses/event_delivery.json").read_bytes())
FEED = Feed("ses-eu", "ses", topics=(TOPIC,), tolerance=timedelta(hours=8))
BASIC = {"authorization": "Basic " + base64.b64encode(b"user:password").decode()}
HOST = "https://sns.eu-west-1.amazonaws.com"
KINDS = ["Notification", "SubscriptionConfirmation", "UnsubscribeConfirmation"]


async def judge(delivery: Delivery, store: CertificateStore, feed: Feed = FEED, now: datetime = NOW) -> Verdict:
    return await PROVIDER.verify(delivery, feed, now, store)


def reason(verdict: Verdict) -> str:
    assert isinstance(verdict, Refused), verdict
    assert verdict.hint
    assert "\n" not in verdict.hint
    return verdict.reason


async def refusal(delivery: Delivery, store: CertificateStore, feed: Feed = FEED, now: datetime = NOW) -> str:
    return reason(await judge(delivery, store, feed, now))
