# SPDX-License-Identifier: Apache-2.0
"""Over HTTP: providers that deliver by other methods than POST, or want another answer than the usual one."""

from __future__ import annotations

import json
from pathlib import Path

import asyncpg
from receiver_app import running

from webhooks.provider import Feed

AZURE = Feed("azure", "azure_acs", ("query:token=throw-away",))
ELASTIC = Feed("elastic", "elastic_email", ("query:token=throw-away",))
FIXTURES = Path(__file__).parent / "providers/fixtures"


async def test_a_provider_that_shakes_hands_is_answered_as_it_wants(db: asyncpg.Pool) -> None:
    body = (FIXTURES / "azure_acs/subscription_validation.json").read_bytes()
    code = json.loads(body)[0]["data"]["validationCode"]
    headers = {"aeg-event-type": "SubscriptionValidation"}
    async with running(db, [AZURE]) as app:
        answer = await app.request("POST", "/webhooks/azure?token=throw-away", body, headers)
        assert (answer.status, answer.json) == (200, {"validationResponse": code})
        origin = {"WebHook-Request-Origin": "eventgrid.azure.net"}
        answer = await app.request("OPTIONS", "/webhooks/azure?token=throw-away", b"", origin)
        assert (answer.status, answer.headers["WebHook-Allowed-Origin"]) == (200, "eventgrid.azure.net")
    assert await db.fetchval("SELECT count(*) FROM provider_event") == 0


async def test_a_provider_that_delivers_by_get_is_stored_and_its_probe_is_answered(db: asyncpg.Pool) -> None:
    query = (FIXTURES / "elastic_email/sent.form").read_text().strip()
    async with running(db, [ELASTIC]) as app:
        assert (await app.request("GET", f"/webhooks/elastic?token=throw-away&{query}", b"")).status == 200
        assert (await app.request("GET", f"/webhooks/elastic?token=wrong&{query}", b"")).status == 401
        assert (await app.request("GET", "/webhooks/elastic", b"")).status == 200
        assert (await app.request("PUT", "/webhooks/elastic", b"")).headers["Allow"] == "GET,HEAD,POST"
    rows = await db.fetch("SELECT wire_key, raw FROM provider_event")
    assert [row["wire_key"] for row in rows] == ["e15bd8fd5b6b63a6f91c331d3c0702980d93474c2b1c4474"]
    assert b"throw-away" not in rows[0]["raw"]
