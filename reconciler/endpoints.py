# SPDX-License-Identifier: Apache-2.0
"""The providers' side of a feed: whether its webhook is registered as it should be, and how it is put right."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

import asyncpg
import structlog

from reconciler.settings import Settings
from webhooks.api import HttpApi, open_session
from webhooks.asking import Api, ApiError, Change, Registers
from webhooks.provider import Feed
from webhooks.registry import PROVIDERS

_log: Final = structlog.get_logger()

CHECK_EVERY: Final = timedelta(hours=23)
"""How often the daemon looks: once a day, whichever process is first."""


@dataclass
class Endpoint:
    """How one feed's webhook stands at its provider."""

    feed: str
    url: str
    changes: list[Change] = field(default_factory=list)
    """What is not as it should be; nothing where all is well."""
    problem: str = ""
    """Why it could not be looked at: no credential, an API that fails, a provider that offers none."""


@dataclass(frozen=True, slots=True)
class Step:
    """One change that was made, would be made, or failed."""

    feed: str
    text: str
    done: bool = False
    told: str | None = None
    """What the provider answered that has to be configured here (a new key)."""
    problem: str = ""


def credentials_given(feed: Feed) -> bool:
    """Say whether the provider can be asked about this feed's webhook."""
    return isinstance(PROVIDERS[feed.provider], Registers) and bool(feed.api_key or feed.api_scope)


async def look(feed: Feed, url: str, api: Api) -> Endpoint:
    """Look at one feed's webhook and change nothing. Never raises for what the provider does."""
    provider = PROVIDERS[feed.provider]
    if not isinstance(provider, Registers):
        problem = f"{provider.facts.title} can't be set up from here: see reconciler endpoints show --feed {feed.name}"
        return Endpoint(feed.name, url, problem=problem)
    try:
        return Endpoint(feed.name, url, await provider.changes(url, feed, api))
    except ApiError as error:
        return Endpoint(feed.name, url, problem=str(error))


async def make(feed: str, change: Change) -> Step:
    """Make one change at a provider. Never raises for what the provider does."""
    try:
        return Step(feed, change.text, done=True, told=await change.make())
    except ApiError as error:
        return Step(feed, change.text, problem=str(error))


@asynccontextmanager
async def opened_apis(feeds: Mapping[str, Feed]) -> AsyncIterator[dict[str, Api]]:
    """Yield a client for each feed."""
    async with open_session() as session:
        yield {name: HttpApi(session, lambda: datetime.now(UTC)) for name in feeds}


# A lease: of several processes one looks.
TAKE_CHECK: Final = """
INSERT INTO feed_state AS f (feed, endpoint_checked_at) VALUES ($1, clock_timestamp())
ON CONFLICT (feed) DO UPDATE SET endpoint_checked_at = clock_timestamp()
WHERE f.endpoint_checked_at IS NULL OR f.endpoint_checked_at < clock_timestamp() - $2::interval
RETURNING 1
"""
NOTE_CHECK: Final = "UPDATE feed_state SET endpoint_finding = $2 WHERE feed = $1"


async def check_daily(pool: asyncpg.Pool, settings: Settings, feeds: Mapping[str, Feed]) -> None:
    """Look at each feed whose credential is given, once a day, and keep what was found for `status`."""
    asked = {name: feed for name, feed in feeds.items() if credentials_given(feed)}
    async with opened_apis(asked) as apis:
        for name, feed in asked.items():
            url = settings.endpoint_url(name)
            if url is None or not await pool.fetchval(TAKE_CHECK, name, CHECK_EVERY):
                continue
            finding = finding_of(await look(feed, url, apis[name]))
            await pool.execute(NOTE_CHECK, name, finding)
            if finding:
                _log.warning("endpoint_differs", feed=name, finding=finding)


def finding_of(endpoint: Endpoint) -> str | None:
    """Return what is wrong with an endpoint in one line, or None."""
    wrong = "; ".join(change.text for change in endpoint.changes)
    return endpoint.problem or (f"to be changed at the provider: {wrong}" if wrong else None)
