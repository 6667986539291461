# SPDX-License-Identifier: Apache-2.0
"""What a running process finds wrong with itself, told to `status` through the database.

It reads the very figures that it gives to Prometheus and judges them as the alerts do, so that an alert and a person at
a terminal never disagree. A process that ends takes back what it told; of one that died it is soon too old.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final

from reconciler.insight.figures import STATUS_READ
from reconciler.metrics import DATABASE_SECONDS, FIGURES_READ, WORK_FAILED
from webhooks.database import ACQUIRE_SECONDS, FAILURES
from webhooks.metrics import ARCHIVE_DROPPED, COMMIT_SECONDS

TELL_SECONDS: Final = 5.0
"""How often a process looks at itself."""

_MINUTE: Final = 60.0
KEPT: Final = 20 * _MINUTE
"""Seconds of its figures that it remembers."""

MOST_FAILURES: Final = 3
"""More failures of one kind of work within a quarter of an hour, the newest within five minutes."""

CODES: Final = ("archive_drops", "database_slow", "figures_old", "work_fails")

SLOW: Final = (
    ("reconciler_database_check_seconds", "0.5", 0.1, "checks of the database take longer than half a second"),
    ("reconciler_inbox_commit_seconds", "1.0", 0.01, "batches of events take longer than a second to commit"),
)
"""Histograms: more than this share took longer than this bucket, in each of the last two spans of five minutes."""

Figures = dict[tuple[str, str], float]
"""Values by the name of the sample and its label."""


class SelfCheck:
    """Looks again and again. `who` names the process; `seconds` is a clock that never goes back."""

    def __init__(self, who: str, *, reconciles: bool, seconds: Callable[[], float] = time.monotonic) -> None:
        self._who, self._reconciles, self._seconds = who, reconciles, seconds
        self._looks = deque([(seconds(), _figures())])
        self._told: set[str] = set(CODES)  # a process of this name that was killed may have left some

    async def tell(self, pool: Any) -> None:
        """Look once, and write what is wrong and what is no more."""
        self._looks.append((self._seconds(), _figures()))
        while self._looks[1][0] <= self._looks[-1][0] - KEPT:
            self._looks.popleft()
        found = dict(self._wrong())
        if found or self._told:
            await pool.execute(TELL, self._who, list(found), list(found.values()), list(CODES))
            self._told = set(found)

    async def take_back(self, pool: Any) -> None:
        """Take back what was told, since the process ends: its successor has another name. Tried once."""
        if self._told:
            with suppress(*FAILURES):
                await pool.execute(TAKE_BACK, self._who, list(CODES), timeout=ACQUIRE_SECONDS)

    def _wrong(self) -> Iterator[tuple[str, str]]:
        if dropped := self._rise("reconciler_archive_dropped_total", 10 * _MINUTE):
            yield "archive_drops", f"the archive lost {dropped:.0f} deliveries or files within 10 minutes"
        if slow := [what for name, le, share, what in SLOW if self._is_slow(name, le, share)]:
            yield "database_slow", " and ".join(slow)
        if old := self._old():
            yield "figures_old", f"{old} has not been read for long"
        if failing := [f"{work} ({n:.0f} times)" for work, n in self._failing()]:
            yield "work_fails", f"background work fails again and again within 15 minutes: {', '.join(failing)}"

    def _failing(self) -> Iterator[tuple[str, float]]:
        name = "reconciler_work_failed_total"
        for work in sorted(label for sample, label in self._looks[-1][1] if sample == name):
            failures = self._rise(name, 15 * _MINUTE, label=work)
            if failures > MOST_FAILURES and self._rise(name, 5 * _MINUTE, label=work):
                yield work, failures

    def _is_slow(self, name: str, le: str, share: float) -> bool:
        def slower(since: float, until: float) -> bool:
            n = self._rise(f"{name}_count", since, until)
            quick = self._rise(f"{name}_bucket", since, until, le)
            return n - quick > share * n

        return slower(5 * _MINUTE, 0.0) and slower(10 * _MINUTE, 5 * _MINUTE)

    def _old(self) -> str | None:
        """Name what was read lately and is read no more, or never was."""
        if not self._reconciles:
            return None
        if self._runs_for(5 * _MINUTE) and not self._rise("reconciler_figures_timestamp_seconds", 5 * _MINUTE):
            return "the state of undecided sends"
        if self._runs_for(KEPT) and not self._rise("reconciler_status_timestamp_seconds", KEPT):
            return "the status"
        return None

    def _runs_for(self, seconds: float) -> bool:
        return self._looks[-1][0] - self._looks[0][0] >= seconds

    def _rise(self, name: str, since: float, until: float = 0.0, label: str = "") -> float:
        """Return by how much a figure rose between these many seconds ago."""
        return self._at(until).get((name, label), 0.0) - self._at(since).get((name, label), 0.0)

    def _at(self, ago: float) -> Figures:
        when = self._looks[-1][0] - ago
        return next((figures for at, figures in reversed(self._looks) if at <= when), self._looks[0][1])


def _figures() -> Figures:
    metrics = (ARCHIVE_DROPPED, COMMIT_SECONDS, DATABASE_SECONDS, FIGURES_READ, STATUS_READ, WORK_FAILED)
    samples = (sample for metric in metrics for family in metric.collect() for sample in family.samples)
    return {(one.name, "".join(one.labels.values())): one.value for one in samples}


TELL: Final = """
WITH well AS (DELETE FROM finding WHERE host = $1 AND code = ANY ($4::text[]) AND code <> ALL ($2::text[]))
INSERT INTO finding (code, host, text)
SELECT code, $1, text FROM unnest($2::text[], $3::text[]) AS found (code, text) ORDER BY code
ON CONFLICT (code, host) DO UPDATE SET text = excluded.text, seen_at = clock_timestamp()
"""
TAKE_BACK: Final = "DELETE FROM finding WHERE host = $1 AND code = ANY ($2::text[])"
