# SPDX-License-Identifier: Apache-2.0
"""Feeds deliveries that were kept through the same parse and store as live ones. Repeating it changes nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import BinaryIO, Final, Protocol

import asyncpg

from reconciler.filling.common import BATCH, filling, opened_inbox, store
from webhooks.event import Event
from webhooks.inbox import Inbox
from webhooks.intake import place_of
from webhooks.provider import BadPayload, Feed, Fetch, Parsed, Provider, Refused, Verdict, Verified
from webhooks.registry import PROVIDERS
from webhooks.sources import Blob, Entry, entries

Progress = Callable[[str, int], None]
"""Is told the file that is read and how many of its bytes were."""

MAX_WAITING: Final = 16_000_000
"""Bytes of events that are collected before they are stored."""

MAX_DAMAGED: Final = 1_000
"""How many damaged entries are named; more are only counted."""


class Source(Protocol):
    """Where deliveries are kept: `webhooks.sources.Files` or `S3Files`."""

    async def blobs(self) -> list[Blob]:
        """Return its files."""
        ...

    def open(self, blob: Blob) -> AbstractAsyncContextManager[BinaryIO]:
        """Give the bytes of one."""
        ...


@dataclass
class Summary:
    """What a replay did."""

    entries: int = 0
    events: int = 0
    stored: int = 0
    repeated: int = 0
    controls: int = 0
    """Pings, confirmations and the like: they hold no events."""
    others: int = 0
    """Entries of other feeds than the one that was asked for."""
    damaged: list[tuple[str, str]] = field(default_factory=list)
    """What was skipped, by the name of the entry, and why."""
    damaged_entries: int = 0
    feeds: Counter[str] = field(default_factory=Counter)
    """Events by feed."""

    def note_damage(self, name: str, why: str) -> None:
        """Count an entry that is skipped."""
        self.damaged_entries += 1
        if len(self.damaged) < MAX_DAMAGED:
            self.damaged.append((name, why))


class _Skipped(Exception):
    """An entry that can't be stored; the text says why."""


async def replay(
    pool: asyncpg.Pool,
    source: Source,
    blobs: Sequence[Blob],
    feeds: Mapping[str, Feed],
    *,
    feed: str | None,
    verify: Fetch | None,
    dry_run: bool = False,
    progress: Progress = lambda _name, _read: None,
    providers: Mapping[str, Provider] = PROVIDERS,
) -> Summary:
    """Store the deliveries of files of a source and return what was done.

    `feed` says whose they are; without it each must name its feed, as an archive's do. With `verify` signatures are
    checked (their age is not), and what doesn't pass is skipped as damaged. `dry_run` parses and stores nothing. Raises
    UserError, OSError, ApiError.
    """
    summary = Summary()
    async with AsyncExitStack() as stack:
        inbox = None if dry_run else await stack.enter_async_context(opened_inbox(pool))
        batches = _Batches(inbox, summary)
        for blob in blobs:
            async with source.open(blob) as file:
                for entry in entries(blob.name, file):
                    progress(blob.name, entry.read)
                    summary.entries += 1
                    await asyncio.sleep(0)  # lets the mark be renewed, however much is skipped
                    if feed and entry.feed and entry.feed != feed:
                        summary.others += 1
                        continue
                    try:
                        target = _feed_of(entry, feeds, feed)
                        parsed = await _parsed(entry, target, providers[target.provider], verify)
                    except _Skipped as why:
                        summary.note_damage(entry.name, str(why))
                        continue
                    if batches.is_first(target.name) and not dry_run:
                        await stack.enter_async_context(filling(pool, target.name))
                    await batches.add(target.name, parsed)
        await batches.flush()
    return summary


def _feed_of(entry: Entry, feeds: Mapping[str, Feed], wanted: str | None) -> Feed:
    name = wanted or entry.feed
    if name is None:
        raise _Skipped(entry.damage or "doesn't say which feed it is of: name it with --feed")
    if name not in feeds:
        raise _Skipped(f"is of the feed {name}, which is not configured")
    return feeds[name]


async def _parsed(entry: Entry, feed: Feed, provider: Provider, verify: Fetch | None) -> Parsed:
    if entry.delivery is None:
        raise _Skipped(entry.damage)
    try:
        if verify is not None:
            verdict = await provider.verify(entry.delivery, replace(feed, tolerance=None), datetime.now(UTC), verify)
            _refuse_unproved(verdict)
        return provider.parse(entry.delivery)
    except BadPayload as error:
        raise _Skipped(str(error)) from None
    except _Skipped:
        raise
    except Exception as error:  # noqa: BLE001 - one entry that our adapter fails at doesn't stop the others
        raise _Skipped(f"could not be read ({place_of(error)['error']}): a fault of ours") from None


def _refuse_unproved(verdict: Verdict) -> None:
    if isinstance(verdict, Refused):
        raise _Skipped(f"is not proved to be the provider's ({verdict.reason})")
    if not isinstance(verdict, Verified):
        raise _Skipped(f"could not be verified ({verdict.reason})")


class _Batches:
    """Collects events by feed, so that many deliveries share a commit. Without an inbox it only counts."""

    def __init__(self, inbox: Inbox | None, summary: Summary) -> None:
        self._inbox, self._summary = inbox, summary
        self._waiting: dict[str, list[Event]] = {}
        self._bytes = 0

    def is_first(self, feed: str) -> bool:
        """Say whether nothing of a feed was added yet."""
        return feed not in self._waiting

    async def add(self, feed: str, parsed: Parsed) -> None:
        """Take a delivery's events. Raises UserError where the database can't store."""
        self._summary.controls += not parsed.events
        self._summary.feeds[feed] += len(parsed.events)
        waiting = self._waiting.setdefault(feed, [])
        waiting += parsed.events
        self._bytes += sum(len(event.raw) for event in parsed.events)
        if len(waiting) >= BATCH or self._bytes > MAX_WAITING:
            await self.flush()

    async def flush(self) -> None:
        """Store what waits. Raises UserError where the database can't."""
        for feed in self._waiting:
            await self._store(feed)
        self._bytes = 0

    async def _store(self, feed: str) -> None:
        events, self._waiting[feed] = self._waiting[feed], []
        self._summary.events += len(events)
        if self._inbox is None:
            return
        stored = await store(self._inbox, feed, events, "replay")
        self._summary.stored += stored.stored
        self._summary.repeated += stored.repeated
