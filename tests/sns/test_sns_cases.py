# SPDX-License-Identifier: Apache-2.0
"""Cases of SNS from public trouble reports."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from judging import FEED, TESTS, judge, reason
from sns_signer import CertificateStore, case_store

from webhooks.provider import Delivery, Later, Verdict, Verified


def case(number: str) -> dict[str, Any]:
    (path,) = (TESTS / "cases").glob(f"{number}-*.json")
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
