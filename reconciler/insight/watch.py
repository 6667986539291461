# SPDX-License-Identifier: Apache-2.0
"""The daemon's watch: sends that were accepted twice, sends that vanished, feeds whose deliveries are refused."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Final

import asyncpg
import structlog

from reconciler.configuration.settings import Settings
from reconciler.database.connection import database_clock
from reconciler.insight.duplicates import look_at_events, look_at_retries
from reconciler.insight.reports import read_vanished
from reconciler.passes.feeds import stop_refused_feeds

WATCH_SECONDS: Final = 60.0
"""How often the newest events are looked at for duplicates."""
THOROUGH_SECONDS: Final = 3600.0
"""How often every send that was given out again is looked at, too, and vanished sends are counted."""

_log: Final = structlog.get_logger()


def watch(pool: asyncpg.Pool, settings: Settings, late_window: timedelta, who: str) -> Callable[[], Awaitable[None]]:
    """Return what does one look; the first is a thorough one. `late_window` is how far back that goes."""
    was_thorough = -math.inf

    async def look() -> None:
        nonlocal was_thorough
        began = time.monotonic()
        async with pool.acquire() as connection:
            for feed in await stop_refused_feeds(connection, sorted(settings.feeds), who):
                _log.warning("breaker_opened", feed=feed, reason="refused deliveries")
            found = await look_at_events(connection, who)
            if began - was_thorough >= THOROUGH_SECONDS:
                since = await database_clock(connection) - late_window
                found += await look_at_retries(connection, since, who)
                await read_vanished(connection, settings)
                was_thorough = began
        for one in found:
            _log.warning("duplicate", wire_key=one.wire_key, sort=one.sort, because=one.because, feed=one.feed)

    return look
