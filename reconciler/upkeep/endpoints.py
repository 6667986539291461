# SPDX-License-Identifier: Apache-2.0
"""The providers' side of a feed: whether its webhook is registered as it should be, and how it is put right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import asyncpg
import structlog

from webhooks.api import open_api
from webhooks.asking import Api, ApiError, Change, Registers
from webhooks.provider import Feed
from webhooks.registry import PROVIDERS

_log: Final = structlog.get_logger()


@dataclass
class Endpoint:
    """How one feed's webhook stands at its provider."""

    feed: str
    changes: list[Change] = field(default_factory=list)
    """What is not as it should be; nothing where all is well."""
    problem: str = ""
    """Why it could not be looked at."""
    askable: bool = True
    """False where the provider offers nothing to ask, or the credential for it is not set."""

    @property
    def finding(self) -> str | None:
        """What is wrong in one line, or None."""
        wrong = "; ".join(change.text for change in self.changes)
        return self.problem or (f"to be changed at the provider: {wrong}" if wrong else None)


@dataclass(frozen=True, slots=True)
class Step:
    """One change that was made, would be made, or failed."""

    feed: str
    text: str
    done: bool = False
    told: str | None = None
    """What the provider answered that has to be configured here (a new key)."""
    problem: str = ""


async def inspect(feed: Feed, url: str, api: Api) -> Endpoint:
    """Look at one feed's webhook and change nothing. Never raises for what the provider does."""
    provider = PROVIDERS[feed.provider]
    if not isinstance(provider, Registers):
        problem = f"{provider.facts.title} can't be set up from here: see reconciler endpoints show --feed {feed.name}"
        return Endpoint(feed.name, problem=problem, askable=False)
    try:
        return Endpoint(feed.name, await provider.changes(url, feed, api))
    except ApiError as error:
        return Endpoint(feed.name, problem=str(error), askable=error.reason != "unconfigured")


async def make(feed: str, change: Change) -> Step:
    """Make one change at a provider. Never raises for what the provider does."""
    try:
        return Step(feed, change.text, done=True, told=await change.make())
    except ApiError as error:
        return Step(feed, change.text, problem=str(error))


# A lease: of several processes one looks, once a day, or each hour while something is wrong.
TAKE_CHECK: Final = """
INSERT INTO feed_state AS f (feed, endpoint_checked_at) VALUES ($1, clock_timestamp())
ON CONFLICT (feed) DO UPDATE SET endpoint_checked_at = clock_timestamp()
WHERE f.endpoint_checked_at IS NULL OR f.endpoint_checked_at < clock_timestamp()
    - CASE WHEN f.endpoint_finding IS NULL THEN interval '23 hours' ELSE interval '55 minutes' END
RETURNING 1
"""
NOTE_CHECK: Final = "UPDATE feed_state SET endpoint_finding = $2 WHERE feed = $1"
FORGET: Final = "UPDATE feed_state SET endpoint_finding = NULL WHERE endpoint_finding IS NOT NULL AND feed <> ALL ($1)"


async def check_daily(pool: asyncpg.Pool, feeds: Mapping[str, Feed], url_of: Callable[[str], str | None]) -> None:
    """Look at each feed that can be asked, and keep what was found for `status`."""
    asked = {name: feed for name, feed in feeds.items() if isinstance(PROVIDERS[feed.provider], Registers)}
    await pool.execute(FORGET, list(asked))
    for name, feed in asked.items():
        url = url_of(name)
        if url is None or not await pool.fetchval(TAKE_CHECK, name):
            continue
        async with open_api() as api:
            endpoint = await inspect(feed, url, api)
        finding = endpoint.finding if endpoint.askable else None
        await pool.execute(NOTE_CHECK, name, finding)
        if finding:
            _log.warning("endpoint_differs", feed=name, finding=finding)
