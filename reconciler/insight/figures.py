# SPDX-License-Identifier: Apache-2.0
"""The daemon's figures for Prometheus: those of the database, read at intervals, and what `status --check` would say.

What is told here is what `reconciler status` tells, of the same statements, so that an alert and a person at a terminal
never disagree.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from prometheus_client import Gauge

from reconciler import metrics
from reconciler.configuration.settings import Settings
from reconciler.database.connection import Connection
from reconciler.insight.findings import judge
from reconciler.insight.status import Status, read_status
from reconciler.metrics import FeedFigures

FIGURES_SECONDS: Final = 15.0
"""How often what stands in few rows is read."""

SHARE: Final = 0.01
"""Of its time at most so much goes into counting undecided sends. 200,000 of them, as a brown-out may leave behind,
were counted in half a second on a busy machine: every 50 seconds then."""

LONGEST_SECONDS: Final = 120.0
"""Between two counts, however long one takes: alerts wait for them."""

STATUS_SECONDS: Final = 300.0
"""How often the whole status is."""

FINDINGS: Final = Gauge(
    "reconciler_findings",
    "What reconciler status finds: needs_person 1 is what reconciler status --check ends with 3 for.",
    ["code", "feed", "needs_person"],
)
STATUS_READ: Final = Gauge("reconciler_status_timestamp_seconds", "When that, and what follows, was read.")
SENDS_UNHEARD: Final = Gauge(
    "reconciler_feed_sends_unheard",
    "1 where sends were answered an hour ago or more and nothing was delivered since: of a feed that spoke within a "
    "day more than six of them, of another any of that day.",
    ["feed"],
)
KEYED: Final = Gauge(
    "reconciler_feed_keyed_events", "Events of a day that bear a key, at most 20,000 of all feeds.", ["feed"]
)
UNKNOWN: Final = Gauge("reconciler_feed_unknown_events", "Those of them whose key no send has.", ["feed"])
LAG: Final = Gauge(
    "reconciler_feed_lag_seconds",
    "How long after its claim an answered send is heard of: half of them (0.5), and 98 in 100 (0.98). None where more "
    "are missed at every age.",
    ["feed", "message_class", "quantile"],
)
COVERAGE: Final = Gauge(
    "reconciler_feed_coverage_ratio",
    "Share of the answered sends that passed their grace within an hour which the feed has spoken of, 0 to 1.",
    ["feed", "message_class"],
)
CONTROLS: Final = Gauge(
    "reconciler_feed_controls", "Answered sends by which silence is measured.", ["feed", "message_class"]
)
CONTROLS_MISSING: Final = Gauge(
    "reconciler_feed_controls_missing",
    "How many are missing before silence means anything.",
    ["feed", "message_class"],
)
NO_ECHO: Final = Gauge(
    "reconciler_feed_no_echo",
    "1 where the feed is deaf to a class: of its 20 answered sends or more none was ever heard of.",
    ["feed", "message_class"],
)
DUPLICATES_RECORDED: Final = Gauge(
    "reconciler_duplicates_recorded", "Duplicates that were found within seven days, by whichever process.", ["feed"]
)
OUTBOX_WAITING: Final = Gauge("reconciler_outbox_waiting", "Messages to the application that wait for their delivery.")
OUTBOX_OLDEST: Final = Gauge("reconciler_outbox_oldest_seconds", "For how long the oldest of them has waited.")
OUTBOX_DEAD: Final = Gauge("reconciler_outbox_dead", "Messages to the application that were given up.")
PARTITIONS_MISSING: Final = Gauge(
    "reconciler_partitions_missing", "Partitions of this month and the next that provider_event lacks."
)


def figures(
    pool: Any,
    settings: Settings,
    note_feeds: Callable[[Mapping[str, FeedFigures]], None] | None,
    *,
    reconciles: bool,
    seconds: Callable[[], float] = time.monotonic,
) -> Callable[[], Awaitable[None]]:
    """Return what does one reading. `note_feeds` is told how deliveries ended, where this process receives any.

    `seconds` is a clock that never goes back.
    """
    count_again, status_read = -math.inf, -math.inf

    async def read() -> None:
        nonlocal count_again, status_read
        if note_feeds:
            note_feeds(await metrics.read_feeds(pool))
        if not reconciles:
            return
        if (began := seconds()) >= count_again:
            await metrics.read_undecided(pool)
            count_again = began + min((seconds() - began) / SHARE, LONGEST_SECONDS)
        await metrics.read_holds(pool, settings.feeds)
        if seconds() - status_read >= STATUS_SECONDS:
            status_read = seconds()
            async with pool.acquire() as connection:
                await read_standing(connection, settings)

    return read


async def read_standing(connection: Connection, settings: Settings) -> None:
    """Set all that `reconciler status` would say now."""
    tell(await read_status(connection, settings, lambda: datetime.now(UTC)), settings)


def tell(status: Status, settings: Settings) -> None:
    """Set the figures of a status. What was told before and is no more is forgotten."""
    _tell_findings(status, settings)
    _tell_feeds(status, settings)
    _tell_outlooks(status)
    OUTBOX_WAITING.set(status.outbox.waiting)
    OUTBOX_DEAD.set(status.outbox.dead)
    oldest = status.outbox.oldest
    OUTBOX_OLDEST.set((status.now - oldest).total_seconds() if oldest else 0.0)
    PARTITIONS_MISSING.set(len(status.missing_months))
    STATUS_READ.set_to_current_time()


def _tell_findings(status: Status, settings: Settings) -> None:
    FINDINGS.clear()
    known = {*settings.feeds, None}  # senders may name any feed
    found = Counter((f.code, f.feed or "" if f.feed in known else "", f.needs_person) for f in judge(status, settings))
    for (code, feed, needs_person), n in found.items():
        FINDINGS.labels(code, feed, str(int(needs_person))).set(n)


def _tell_feeds(status: Status, settings: Settings) -> None:
    for gauge in (SENDS_UNHEARD, KEYED, UNKNOWN, DUPLICATES_RECORDED):
        gauge.clear()
    for feed in status.feeds:
        if feed.feed in settings.feeds:
            SENDS_UNHEARD.labels(feed.feed).set(feed.sends_unheard)
            DUPLICATES_RECORDED.labels(feed.feed).set(0)
    for name, (keyed, unknown) in status.foreign.items():
        KEYED.labels(name).set(keyed)
        UNKNOWN.labels(name).set(unknown)
    for found in status.duplicates:
        DUPLICATES_RECORDED.labels(found.feed if found.feed in settings.feeds else "").inc(found.n)


def _tell_outlooks(status: Status) -> None:
    for gauge in (LAG, COVERAGE, CONTROLS, CONTROLS_MISSING, NO_ECHO):
        gauge.clear()
    for outlook in metrics.largest(status.outlooks, lambda outlook: outlook.controls):
        labels = outlook.feed, outlook.message_class
        CONTROLS.labels(*labels).set(outlook.controls)
        CONTROLS_MISSING.labels(*labels).set(outlook.missing)
        NO_ECHO.labels(*labels).set(outlook.deaf)
        for quantile, lag in (("0.5", outlook.half_after), ("0.98", outlook.late_after)):
            if lag is not None:
                LAG.labels(*labels, quantile).set(lag)
        if outlook.asked:
            COVERAGE.labels(*labels).set(outlook.heard / outlook.asked)
