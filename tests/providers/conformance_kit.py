# SPDX-License-Identifier: Apache-2.0
"""What the conformance suite needs of a provider: its fixtures, how a delivery is signed, and ways to spoil either."""

from __future__ import annotations

import base64
import importlib
import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

from scheme import Scheme
from spoiling import CONTENT_TYPES

from webhooks.event import MAX_ID, Event, Kind
from webhooks.payload import SHORT
from webhooks.provider import BadPayload, Delivery, Parsed
from webhooks.registry import PROVIDERS

FIXTURES = Path(__file__).parent / "fixtures"
NOW = datetime(2026, 11, 2, 9, 0, tzinfo=UTC)
KEY = "e15bd8fd5b6b63a6f91c331d3c0702980d93474c2b1c4474"
"""The wire key of the send that fixtures are about. A provider that echoes keys needs a fixture that holds it."""

SCHEMES: Mapping[str, Scheme] = {
    file.stem: importlib.import_module(f"schemes.{file.stem}").SCHEME
    for file in sorted((Path(__file__).parent / "schemes").glob("*.py"))
}
"""An entry for each provider that signs. What a request carries by itself (basic:user:password ...) needs none."""


# -- fixtures ----------------------------------------------------------------------------------------------------------


@cache
def webhooks_of(provider: str) -> Mapping[str, Delivery]:
    """Return what a provider's webhook posts, by the name of the fixture file.

    `api_*` are answers of its API, `unread_*` a format that is not read; of `sqs_*` the queued message's Body counts.
    """
    files = sorted(file for file in (FIXTURES / provider).iterdir() if file.suffix in CONTENT_TYPES)
    return {file.stem: _delivery(file) for file in files if not file.stem.startswith(("api_", "unread_"))}


def _delivery(file: Path) -> Delivery:
    body = file.read_bytes()
    if file.stem.startswith("sqs_"):
        body = json.loads(body)["Body"].encode()
    return Delivery(body, {"content-type": CONTENT_TYPES[file.suffix]})


def events(provider: str, delivery: Delivery) -> list[Event]:
    return list(PROVIDERS[provider].parse(delivery).events)


@cache
def with_key(provider: str) -> Mapping[str, Delivery]:
    """Return the webhooks that prove acceptance of the send KEY; where no key comes back, of whatever they name."""
    return {name: delivery for name, delivery in webhooks_of(provider).items() if _accepts_key(provider, delivery)}


def _accepts_key(provider: str, delivery: Delivery) -> bool:
    with suppress(Exception):  # what can't be read is for a test to tell: this runs while tests are collected
        wanted = KEY if PROVIDERS[provider].facts.echoes_key else None
        return any(event.send_key == wanted and event.testimony == "accepted" for event in events(provider, delivery))
    return False


def identity(event: Event) -> tuple[str | None, str]:
    return event.message_id, event.event_id


def check(found: Parsed) -> None:
    """Hold what was parsed against what every event promises."""
    assert not (found.events and found.control)
    for event in found.events:
        assert event.raw
        assert 0 < len(event.event_id.encode("utf-8", "surrogatepass")) <= MAX_ID
        assert event.message_id is None or 0 < len(event.message_id.encode("utf-8", "surrogatepass")) <= MAX_ID
        assert "" not in (event.send_key, event.recipient, event.reason)
        assert len(event.reason or "") <= SHORT
        if event.kind is Kind.INBOUND:  # strangers write what comes in
            assert (event.testimony, event.send_key) == ("none", None)
        assert event.occurred_at is None or event.occurred_at.utcoffset() == timedelta(0)


def check_refusal(text: str, *secrets: str) -> None:
    """Hold a refusal's text against what every one promises: a line that gives away nothing."""
    assert text
    assert len(text.splitlines()) == 1
    assert len(text) < 250
    assert not [secret for secret in (KEY, "ana.reyes", *secrets) if secret.strip() and secret in text]


def parsed_or_refused(provider: str, delivery: Delivery) -> Parsed | None:
    """Return what is parsed of a hostile delivery, None where it is refused; anything else is a fault."""
    try:
        found = PROVIDERS[provider].parse(delivery)
    except BadPayload as refusal:
        check_refusal(str(refusal))
        return None
    check(found)
    return found


CARRIED = {
    "basic:user:throw-away": lambda text: Delivery(
        b"", {"authorization": "Basic " + base64.b64encode(f"user:{text}".encode("utf-8", "surrogatepass")).decode()}
    ),
    "bearer:throw-away": lambda text: Delivery(b"", {"authorization": f"Bearer {text}"}),
    "header:X-Own=throw-away": lambda text: Delivery(b"", {"x-own": text}),
    "query:own=throw-away": lambda text: Delivery(b"", {}, query=f"own={text}"),
}
"""Each credential that a request may carry, with the request that carries a text in its place."""
