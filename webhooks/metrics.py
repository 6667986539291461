# SPDX-License-Identifier: Apache-2.0
"""What the receiving half counts for Prometheus, in the default registry. Labels are bounded: configured feeds only."""

from __future__ import annotations

from functools import cache
from typing import Final

from prometheus_client import Counter, Gauge, Histogram

UNKNOWN_FEED: Final = ""
"""The label of deliveries to feeds that are not configured (their names come from outside, so none is kept)."""

DELIVERIES: Final = Counter(
    "reconciler_deliveries", "Requests of providers, by what became of them.", ["feed", "outcome"]
)
EVENTS: Final = Counter(
    "reconciler_events", "Events of verified deliveries; repeated ones were stored before.", ["feed", "result"]
)
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
events = cache(EVENTS.labels)
anomaly = cache(ANOMALIES.labels)
queue_messages = cache(QUEUE_MESSAGES.labels)
