# SPDX-License-Identifier: Apache-2.0
"""What the reconciling half tells Prometheus: verdicts, passes, and figures that are read from the database.

The figures are read at intervals, never by a scrape; `reconciler_figures_timestamp_seconds` tells how old they are.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Protocol, TypeVar

from prometheus_client import Counter, Gauge, Histogram

from reconciler.rule.policy import holds_of

MOST_CLASSES: Final = 20
"""Message classes of a feed that are told of: senders name them, and nothing else bounds them."""

VERDICTS: Final = Counter(
    "reconciler_verdicts", "What passes decided; a row that stays held counts each time.", ["action", "reason"]
)
EXPECTED_DUPLICATES: Final = Counter(
    "reconciler_released_risk",
    "Sum of the risks that releases stated: how many of them are expected to duplicate.",
    ["reason"],
)
STATEMENTS_RETRIED: Final = Counter("reconciler_statements_retried", "Statements of passes that were repeated.")
PASS_SECONDS: Final = Histogram(
    "reconciler_pass_seconds",
    "Duration of whole passes.",
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
)
LAST_PASS: Final = Gauge("reconciler_last_pass_timestamp_seconds", "When the newest whole pass ended.")
WORK_FAILED: Final = Counter("reconciler_work_failed", "Background work that failed, passes among it.", ["work"])
TICKS_MISSED: Final = Counter("reconciler_ticks_missed", "Ticks of the clock that did not happen.", ["work", "cause"])
DATABASE_UP: Final = Gauge("reconciler_database_up", "1 if the database answered the newest check.")
DATABASE_SECONDS: Final = Histogram(
    "reconciler_database_check_seconds",
    "Time of one check of the database, every two seconds: a connection, and the smallest statement.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5),
)

SENDS: Final = Gauge(
    "reconciler_sends",
    "Undecided sends: claimed, released for retry, capped, or pending and looked at; by the reason that holds them.",
    ["state", "held"],
)
OLDEST_CLAIMED: Final = Gauge("reconciler_oldest_claimed_seconds", "Age of the oldest claim without a verdict.")
OLDEST_RELEASED: Final = Gauge("reconciler_oldest_released_seconds", "Age of the oldest release that nobody claimed.")
DUE: Final = Gauge("reconciler_sends_due", "Undecided sends whose next look is due: what passes have before them.")
OLDEST_DUE: Final = Gauge("reconciler_oldest_due_seconds", "For how long the oldest of those has been due.")
HOLDS: Final = Gauge(
    "reconciler_feed_hold",
    "1 while nothing is released on a feed: paused, breaker (open) or suspect (after a restore). Feed * is all feeds.",
    ["feed", "hold"],
)
REFUSED_IN_A_ROW: Final = Gauge(
    "reconciler_feed_refused_in_a_row",
    "Deliveries refused since the newest good one, within a day; unsigned ones, which anybody can send, left out.",
    ["feed"],
)
STORED: Final = Gauge(
    "reconciler_feed_stored_timestamp_seconds", "When the newest delivery of events within a day was stored.", ["feed"]
)
DUPLICATES: Final = Counter(
    "reconciler_duplicates",
    "Sends found accepted twice (duplicate), or that may have been (ids_differ).",
    ["feed", "sort"],
)
VANISHED: Final = Gauge(
    "reconciler_sends_vanished",
    "Answered sends of a day, sampled, of which nothing was ever heard though their neighbours were heard of.",
    ["feed", "message_class"],
)
VANISHED_OF: Final = Gauge(
    "reconciler_sends_vanished_of",
    "Answered sends among which vanished ones were looked for.",
    ["feed", "message_class"],
)
FIGURES_READ: Final = Gauge("reconciler_figures_timestamp_seconds", "When the figures of the database were read.")

SPANS_LOST: Final = Counter("reconciler_spans_lost", "Spans of traces that no collector took.")
API_REQUESTS: Final = Counter(
    "reconciler_api_requests",
    "Requests to /v1/sends by route, and by outcome or, where there is none, status.",
    ["route", "outcome"],
)


class _OfFeed(Protocol):
    @property
    def feed(self) -> str: ...


Group = TypeVar("Group", bound=_OfFeed)


def largest(groups: Iterable[Group], size: Callable[[Group], int]) -> Iterator[Group]:
    """Yield of each feed the MOST_CLASSES largest of its groups, one a message class."""
    told: Tally[str] = Tally()
    for group in sorted(groups, key=size, reverse=True):
        told[group.feed] += 1
        if told[group.feed] <= MOST_CLASSES:
            yield group


def note_pass(counts: Mapping[str, int], seconds: float) -> None:
    """Count a pass and what it reported: `action:reason`, `waiting`, `retried`."""
    PASS_SECONDS.observe(seconds)
    LAST_PASS.set_to_current_time()
    for name, n in counts.items():
        action, colon, reason = name.partition(":")
        if colon or name == "waiting":
            VERDICTS.labels(action, reason).inc(n)
    STATEMENTS_RETRIED.inc(counts.get("retried", 0))


# The partial index over undecided rows finds them; `insight.figures` sees to it that many are read seldom.
UNDECIDED: Final = """
SELECT CASE WHEN held_reason IS NULL AND capped_until > statement_timestamp() THEN 'capped'
            WHEN released_at IS NOT NULL THEN 'released' ELSE state END AS state, coalesce(held_reason, '') AS held,
       count(*) AS n,
       extract(epoch FROM clock_timestamp() - min(CASE WHEN state = 'claimed' THEN claimed_at ELSE released_at END))
           ::float8 AS oldest,
       count(*) FILTER (WHERE next_check_at <= clock_timestamp()) AS due,
       greatest(0, extract(epoch FROM clock_timestamp() - min(next_check_at)))::float8 AS overdue
FROM send_log
WHERE state IN ('pending', 'claimed') AND next_check_at IS NOT NULL
GROUP BY 1, 2
"""


async def read_undecided(pool: Any) -> None:
    """Set the figures of undecided sends."""
    rows = await pool.fetch(UNDECIDED)
    SENDS.clear()
    for state in ("claimed", "released"):
        SENDS.labels(state, "").set(0)
    for row in rows:
        SENDS.labels(row["state"], row["held"]).set(row["n"])
    OLDEST_CLAIMED.set(max((row["oldest"] for row in rows if row["state"] == "claimed"), default=0.0))
    OLDEST_RELEASED.set(
        max((row["oldest"] for row in rows if (row["state"], row["held"]) == ("released", "")), default=0.0)
    )
    DUE.set(sum(row["due"] for row in rows))
    OLDEST_DUE.set(max((row["overdue"] for row in rows), default=0.0))
    FIGURES_READ.set_to_current_time()


@dataclass(frozen=True, slots=True)
class FeedFigures:
    """How deliveries of one feed ended within a day."""

    stored_at: datetime | None
    """When the newest delivery of events came. A ping is no sign of life: some providers' can be forged by anybody."""
    refused_at: datetime | None
    refused_in_a_row: int
    """Refused since the newest verified one, give or take those of its minute, and without those that were unsigned:
    anybody can send them."""


DELIVERED: Final = """
WITH lately AS (
    SELECT feed, n, last_at, outcome LIKE 'refused:%' AS refused, outcome = 'refused:missing' AS unsigned,
           max(last_at) FILTER (WHERE outcome = 'stored') OVER (PARTITION BY feed) AS stored_at
    FROM feed_delivery
    WHERE minute > statement_timestamp() - interval '1 day' AND feed <> ''  -- strangers' names are no feed
)
SELECT feed, max(stored_at) AS stored_at, max(last_at) FILTER (WHERE refused) AS refused_at,
       coalesce(sum(n) FILTER (WHERE refused AND NOT unsigned AND last_at > coalesce(stored_at, '-infinity')), 0)::int
           AS in_a_row
FROM lately
GROUP BY feed
"""


async def read_feeds(pool: Any) -> dict[str, FeedFigures]:
    """Return how the deliveries of each feed ended, and set the figures of refusals."""
    rows = await pool.fetch(DELIVERED)
    REFUSED_IN_A_ROW.clear()
    STORED.clear()
    for row in rows:
        REFUSED_IN_A_ROW.labels(row["feed"]).set(row["in_a_row"])
        if row["stored_at"]:
            STORED.labels(row["feed"]).set(row["stored_at"].timestamp())
    return {row["feed"]: FeedFigures(row["stored_at"], row["refused_at"], row["in_a_row"]) for row in rows}


HELD_FEEDS: Final = """
SELECT feed, ARRAY[paused_at, breaker_at, suspect_at] AS holds FROM feed_state
WHERE feed = ANY ($1::text[]) AND num_nonnulls(paused_at, breaker_at, suspect_at) > 0
"""


async def read_holds(pool: Any, feeds: Collection[str]) -> None:
    """Set which of these feeds, and of the hold on all of them, release nothing now."""
    rows = await pool.fetch(HELD_FEEDS, [*feeds, "*"])
    HOLDS.clear()
    for row in rows:
        for hold in holds_of(row["holds"]):
            HOLDS.labels(row["feed"], hold).set(1)
