# SPDX-License-Identifier: Apache-2.0
"""AWS on loopback: moto's server, with throw-away credentials. The fixture `aws` yields its URL, emptied."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientSession
from moto.server import ThreadedMotoServer

from webhooks.aws import open_client

REGION = "eu-west-1"


@pytest.fixture(scope="session")
def moto_url() -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
async def aws(moto_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "throw-away")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "throw-away")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    async with ClientSession() as session, session.post(f"{moto_url}/moto-api/reset") as response:
        assert response.status == 200
    return moto_url


@asynccontextmanager
async def client(service: str, url: str) -> AsyncIterator[Any]:
    async with open_client(service, REGION, url) as found:
        yield found
