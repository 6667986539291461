# SPDX-License-Identifier: Apache-2.0
"""How often a line may be logged that anybody on the internet, or a database that is away, can cause."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import structlog
from aiohttp.http_exceptions import HttpProcessingError


class Quiet:
    """Lets one log line of a kind through every `every` seconds, so that a flood of deliveries can't fill a disk."""

    def __init__(self, every: float = 60.0, seconds: Callable[[], float] = time.monotonic) -> None:
        self._every = every
        self._seconds = seconds
        self._last: dict[tuple[str, str], tuple[float, int]] = {}

    def silenced(self, feed: str, reason: str) -> int | None:
        """Return how many lines were silenced since the last one, or None where this one is silenced, too."""
        now = self._seconds()
        since, silenced = self._last.get((feed, reason), (now - self._every, 0))
        if now - since < self._every:
            self._last[feed, reason] = (since, silenced + 1)
            return None
        self._last[feed, reason] = (now, 0)
        return silenced


class UnreadableRequests(logging.Filter):
    """Takes what aiohttp logs of requests that are no HTTP: a traceback each, which quotes what was sent.

    One short line a minute is told instead; anything else passes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._quiet = Quiet()

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether a record is to be logged as it is."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        if (before := self._quiet.silenced("", "unreadable")) is not None:
            log = structlog.get_logger("webhooks.receiver")
            log.warning("request_unreadable", error=type(error).__name__, unlogged_before=before)
        return False
