# SPDX-License-Identifier: Apache-2.0
"""What the daemon's workers do: by the settings, and for the archive."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final

import structlog

from reconciler import composition
from reconciler.campaigns.caps import caps_of, keeping_caps
from reconciler.configuration.settings import Settings
from reconciler.insight.figures import figures
from reconciler.insight.watch import watch
from reconciler.metrics import FeedFigures
from reconciler.outbox.delivery import telling
from reconciler.passes.reconcile import Policies
from reconciler.upkeep.endpoints import check_daily
from reconciler.upkeep.retention import pruning
from webhooks.archive import Archive
from webhooks.asking import ApiError
from webhooks.database import ACQUIRE_SECONDS, FAILURES, BoundedPool

Work = Callable[[], Awaitable[object]]
Works = dict[str, Work]

_log: Final = structlog.get_logger()


def by_settings(
    settings: Settings,
    pool: BoundedPool,
    who: str,
    passes: Callable[[BoundedPool, Policies], Work] | None,
    note_feeds: Callable[[Mapping[str, FeedFigures]], None] | None,
) -> Works:
    """Return what workers do as the settings say, by their names; `passes` None: this process only receives."""
    works: Works = {"figures": figures(pool, settings, note_feeds, reconciles=passes is not None)}
    if passes:
        policies = composition.policies(settings)
        works |= {
            "pass": passes(pool, policies),
            "endpoints": partial(check_daily, pool, composition.feeds(settings), settings.webhook_url),
            "watch": watch(pool, settings, policies.late_window, who),
            "outbox": telling(pool, settings.outbox),
            "caps": keeping_caps(pool, caps_of(settings)),
            "prune": pruning(pool, settings.retention, policies.late_window),
        }
    return works


# The partial index over undecided rows answers it.
NEWLY_HELD: Final = """
SELECT 'held:' || held_reason AS verdict, count(*) AS n FROM send_log
WHERE state IN ('pending', 'claimed') AND next_check_at IS NOT NULL
  AND held_since >= (SELECT started_at FROM pass WHERE who = $1 ORDER BY started_at DESC LIMIT 1)
GROUP BY held_reason
"""


async def tell_pass(pool: BoundedPool, who: str, counts: Mapping[str, int]) -> None:
    """Log what a pass moved and what is held since it; a pass after which all waits as before says nothing."""
    done = {name: n for name, n in sorted(counts.items()) if n and name.startswith(("sent:", "failed:", "released:"))}
    if any(n and name.startswith("held:") for name, n in counts.items()):
        done |= {row["verdict"]: row["n"] for row in await pool.fetch(NEWLY_HELD, who)}
    if done:
        _log.info("pass_done", counts=done)


UPLOAD_SECONDS: Final = 300.0
"""Longest pause between two tries to upload, whatever `archive.every`: `status` soon forgets what is not told again."""

NOTE_FINDING: Final = """
INSERT INTO finding (code, host, text) VALUES ('archive', $1, $2)
ON CONFLICT (code, host) DO UPDATE SET text = $2, seen_at = clock_timestamp()
"""
FORGET_FINDING: Final = "DELETE FROM finding WHERE code = 'archive' AND host = $1"


async def upload(archive: Archive, pool: BoundedPool) -> None:
    """Carry the archive to S3, and let `status` know where that fails."""
    host = socket.gethostname()
    try:
        await archive.upload()
    except ApiError as error:
        await pool.execute(NOTE_FINDING, host, f"{archive.waiting_bytes() // 1_000_000} MB wait for S3: {error}")
        raise
    await pool.execute(FORGET_FINDING, host)


async def take_back(pool: BoundedPool) -> None:
    """Take back what `status` was told of the archive, since the process ends: whoever tries next says how it is."""
    with suppress(*FAILURES):
        await pool.execute(FORGET_FINDING, socket.gethostname(), timeout=ACQUIRE_SECONDS)


async def close_archive(archive: Archive) -> None:
    """Write what waits for the archive."""
    try:
        await archive.close()
    except OSError as error:
        _log.warning("archive_not_written", reason=error.strerror)
