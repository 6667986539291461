# SPDX-License-Identifier: Apache-2.0
"""Counts what each feed's deliveries came to, a row a feed, minute and outcome, written every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from webhooks import metrics

Tally = dict[tuple[str, str, int], tuple[int, float]]
"""How often and when last (on the counter's own clock), by feed, outcome and minute of that clock."""


class Counters:
    """Counts outcomes in memory until `flush` writes them.

    Outcomes are `stored`, `control`, `damaged`, `refused:<reason>` and `later:<reason>`.

    `seconds` is a clock that never goes back; the database's clock decides to which minute a count belongs.
    """

    def __init__(self, seconds: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._tally: Tally = {}

    def note(self, feed: str, outcome: str, n: int = 1) -> None:
        """Count `n` deliveries of a configured feed, or of all the others together (`metrics.UNKNOWN_FEED`)."""
        metrics.delivery(feed, outcome).inc(n)
        now = self._seconds()
        self._add((feed, outcome, int(now) // 60), n, now)

    async def flush(self, pool: Any) -> int:
        """Write what was counted since the last flush; return how many rows that were. Nothing is lost if it fails."""
        tally, self._tally = self._tally, {}
        try:
            if tally:
                await _write(pool, tally, self._seconds())
        except BaseException:
            for key, (n, last) in tally.items():
                self._add(key, n, last)
            raise
        return len(tally)

    def _add(self, key: tuple[str, str, int], n: int, at: float) -> None:
        before, last = self._tally.get(key, (0, at))
        self._tally[key] = (before + n, max(last, at))


# Sorted, so that two receivers can't deadlock.
ADD_DELIVERIES: Final = """
INSERT INTO feed_delivery AS d (feed, minute, outcome, n, last_at)
SELECT feed, date_trunc('minute', now() - age), outcome, sum(n), max(now() - age)
FROM unnest($1::text[], $2::text[], $3::bigint[], $4::float8[]) AS t (feed, outcome, n, seconds),
    make_interval(secs => seconds) AS age
GROUP BY 1, 2, 3
ORDER BY 1, 2, 3
ON CONFLICT (feed, minute, outcome) DO UPDATE SET n = d.n + excluded.n, last_at = greatest(d.last_at, excluded.last_at)
"""


async def _write(pool: Any, tally: Tally, now: float) -> None:
    feeds, outcomes, _ = zip(*tally, strict=True)
    counts, times = zip(*tally.values(), strict=True)
    async with pool.acquire() as connection, connection.transaction():
        await connection.execute(ADD_DELIVERIES, feeds, outcomes, counts, [now - at for at in times])
