# SPDX-License-Identifier: Apache-2.0
"""What the receiving half counts for Prometheus, in the default registry. Labels are bounded: configured feeds only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Final

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from webhooks.event import Event

UNKNOWN_FEED: Final = ""
"""What deliveries to feeds that are not configured count as: no feed can be called so, and their names are not kept."""

DELIVERIES: Final = Counter(
    "reconciler_deliveries", "Requests of providers, by what became of them.", ["feed", "outcome"]
)
REPEATED: Final = Counter("reconciler_events_repeated", "Events that were stored before.", ["feed"])
ANOMALIES: Final = Counter("reconciler_anomalies", "Oddities in verified deliveries.", ["feed", "what"])
QUEUE_MESSAGES: Final = Counter(
    "reconciler_queue_messages",
    "Messages of queues: deleted, not_deleted (they come again), left (so do these).",
    ["feed", "result"],
)
COMMIT_SECONDS: Final = Histogram(
    "reconciler_inbox_commit_seconds",
    "Time of one batch from statement to commit.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
QUEUED_EVENTS: Final = Gauge("reconciler_inbox_queued_events", "Events that wait for their commit.")
QUEUED_BYTES: Final = Gauge("reconciler_inbox_queued_bytes", "Bytes of events that wait for their commit.")
RETRIES: Final = Counter("reconciler_inbox_retries", "Batches that were tried again, by cause.", ["cause"])
REDUCED: Final = Counter(
    "reconciler_inbox_reduced_events", "Events refused by the database as they were: raw bytes and testimony are kept."
)
ARCHIVE_DROPPED: Final = Counter(
    "reconciler_archive_dropped", "Deliveries or files that the archive lost to its limits; their events are stored."
)

# A child is looked up once: `labels` costs more than counting.
delivery = cache(DELIVERIES.labels)
repeated = cache(REPEATED.labels)
anomaly = cache(ANOMALIES.labels)
queue_messages = cache(QUEUE_MESSAGES.labels)


class EventCounts(Collector):
    """Counts events by what they say. The sums are made at a scrape: a counter each would cost a tenth of an event."""

    def __init__(self) -> None:
        self._tally: defaultdict[tuple[str, str, str, bool], int] = defaultdict(int)

    def note(self, feed: str, events: Sequence[Event]) -> None:
        """Count the events of one delivery."""
        tally = self._tally
        for event in events:
            tally[feed, event.kind, event.testimony, not event.send_key] += 1

    def describe(self) -> Iterable[CounterMetricFamily]:
        """Return the two counters, without any value."""
        yield CounterMetricFamily(
            "reconciler_events",
            "Events of verified deliveries that are stored, repeated ones among them, by what they prove of the send.",
            labels=["feed", "kind", "testimony"],
        )
        yield CounterMetricFamily(
            "reconciler_events_unstamped", "Events that bear no key of ours: mail that nobody stamped.", labels=["feed"]
        )

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Return the two counters."""
        by_kind: defaultdict[tuple[str, ...], int] = defaultdict(int)
        unstamped: defaultdict[tuple[str, ...], int] = defaultdict(int)
        for (feed, kind, testimony, without_key), n in self._tally.items():
            by_kind[feed, kind, testimony] += n
            unstamped[(feed,)] += n if without_key else 0
        for family, sums in zip(self.describe(), (by_kind, unstamped), strict=True):
            for labels, n in sums.items():
                family.add_metric(labels, n)
            yield family


EVENTS: Final = EventCounts()
REGISTRY.register(EVENTS)
