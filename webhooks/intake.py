# SPDX-License-Identifier: Apache-2.0
"""What becomes of a delivery, by whichever road it came: judged, parsed, stored, counted, kept for the archive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from traceback import extract_tb
from typing import Final

import structlog

from webhooks import metrics
from webhooks.counters import Counters
from webhooks.event import unread
from webhooks.inbox import Inbox, Stored
from webhooks.provider import BadPayload, Clock, Delivery, Feed, Fetch, Later, Parsed, Provider, Verdict
from webhooks.quiet import Quiet

Keep = Callable[[Feed, Delivery, datetime], None]
"""Is called with each delivery whose events are stored, and must not wait (an archive)."""

_log: Final = structlog.get_logger()
_NOTHING: Final = Stored(0, 0)


class Intake:
    """Takes the deliveries of all feeds. `quiet` bounds how often one feed and reason is logged."""

    def __init__(self, inbox: Inbox, fetch: Fetch, clock: Clock, counters: Counters, keep: Keep | None = None) -> None:
        self.inbox, self.counters, self.quiet = inbox, counters, Quiet()
        self._fetch, self._clock, self._keep = fetch, clock, keep

    async def verdict(self, feed: Feed, provider: Provider, delivery: Delivery) -> Verdict:
        """Say whether a delivery is the provider's. Never raises."""
        try:
            return await provider.verify(delivery, feed, self._clock(), self._fetch)
        except Exception as error:  # noqa: BLE001 - our fault, so the delivery must come again
            self.log_failure("verify_failed", feed, error)
            return Later("verify_failed")

    def parsed(self, feed: Feed, provider: Provider, delivery: Delivery) -> Parsed:
        """Return what a delivery holds. Raises BadPayload where it is not this provider's format."""
        try:
            return provider.parse(delivery)
        except BadPayload:
            raise
        except Exception as error:  # noqa: BLE001 - our fault: kept whole, to be read again by a better adapter
            self.log_failure("delivery_damaged", feed, error)
            return Parsed((unread(delivery.body),), anomalies={"damaged": 1})

    async def store(self, feed: Feed, delivery: Delivery, parsed: Parsed, source: str) -> Stored:
        """Return once the events are committed. Raises InboxBusy and InboxUnavailable."""
        stored = await self.inbox.store(feed.name, parsed.events, source) if parsed.events else _NOTHING
        self._note(feed, parsed, stored)
        if self._keep and parsed.events:  # a ping proves nothing of who sent it
            self._keep(feed, delivery, self._clock())
        return stored

    def _note(self, feed: Feed, parsed: Parsed, stored: Stored) -> None:
        self.counters.note(feed.name, "stored" if parsed.events else "control")
        metrics.EVENTS.note(feed.name, parsed.events)
        if stored.repeated:
            metrics.repeated(feed.name).inc(stored.repeated)
        for what, n in parsed.anomalies.items():
            metrics.anomaly(feed.name, what).inc(n)
            if what == "damaged":
                self.counters.note(feed.name, what, n)

    def log_failure(self, event: str, feed: Feed, error: Exception) -> None:
        """Log a fault of ours, now and then."""
        if (before := self.quiet.silenced(feed.name, event)) is not None:
            _log.error(event, feed=feed.name, **place_of(error), unlogged_before=before)


def place_of(error: Exception) -> Mapping[str, str]:
    """Return what may be logged of an error: neither its traceback nor its text, which may quote a delivery."""
    where = extract_tb(error.__traceback__)[-1]
    return {"error": type(error).__name__, "at": f"{where.name}:{where.lineno}"}
