# SPDX-License-Identifier: Apache-2.0
"""The served OpenAPI document is true: schemathesis asks a real server whatever it allows, and what it doesn't."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
from sends_kit import FEEDS, Sender, api, token

from reconciler.api.routes import CLAIM_ANSWERS
from reconciler.configuration.tables import ApiSettings

BOTH = "espr_both"
DOCUMENT = "/v1/openapi.json"

HOOKS = """
import itertools

import schemathesis

numbers = itertools.count(1)


@schemathesis.hook
def before_call(context, case, kwargs):
    positive = case.meta and case.meta.generation.mode == schemathesis.GenerationMode.POSITIVE
    if positive and "Idempotency-Key" in (case.headers or {}):  # which a caller uses once
        case.headers["Idempotency-Key"] = f"call-{next(numbers)}"
"""
# 410: times that have passed are valid, and answered so.
CONFIG = """
hooks = "hooks.py"
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "401", "403", "404", "409", "410", "429"]
"""


@pytest.fixture
async def sender(db: asyncpg.Pool) -> AsyncIterator[Sender]:
    settings = ApiSettings(tokens={"both": token(BOTH, scopes=("send", "operate"))})
    async with api(db, settings) as found:
        yield found


async def test_the_server_answers_as_its_document_says(sender: Sender, tmp_path: Path) -> None:
    (tmp_path / "hooks.py").write_text(HOOKS)
    config = tmp_path / "schemathesis.toml"
    config.write_text(CONFIG)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run"),
        *(str(sender.client.make_url(DOCUMENT)), "--header", f"Authorization: Bearer {BOTH}"),
        *("--checks", "all", "--max-examples", "20", "--generation-deterministic", "--warnings", "off"),
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-6000:]
    assert b"8 selected" in output


async def test_the_document_is_served_to_everybody_and_names_the_feeds(sender: Sender) -> None:
    async with sender.client.get(DOCUMENT) as answer:
        document = await answer.json()
    assert answer.status == 200
    assert document["openapi"] == "3.1.0"
    assert document["components"]["schemas"]["Claim"]["properties"]["feed"]["enum"] == sorted(FEEDS)
    described = document["paths"]["/v1/sends"]["post"]["responses"]
    for outcome, told in CLAIM_ANSWERS.items():
        assert outcome in described[str(told.status)]["description"]


async def test_every_route_is_described(sender: Sender) -> None:
    async with sender.client.get(DOCUMENT) as answer:
        document = await answer.json()
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    served = {
        (route.method, route.resource.canonical)
        for route in sender.client.app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert served - {("GET", DOCUMENT)} == described
