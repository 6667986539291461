# SPDX-License-Identifier: Apache-2.0
"""What tests of campaigns say often: a file, its load, a batch, a worker that can be killed."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
from kit import FEED, RULES, event, reconcile, unlimited

from reconciler.campaigns.load import Loaded, Plan, load
from webhooks.registry import PROVIDERS

ROOT = Path(__file__).parent.parent
PLAN = Plan("spring", FEED, "people.csv")
RELEASES = replace(RULES, give_up_after=timedelta(minutes=30), on_unknown="release")
"""Releases whatever nobody spoke of, so that only what the provider did not take is sent again."""


def people(n: int, first: int = 0) -> bytes:
    """A file of so many recipients."""
    lines = (f"person{i}@example{i % 7}.com,Name {i}\n" for i in range(first, first + n))
    return ("recipient,name\n" + "".join(lines)).encode()


async def loaded(db: asyncpg.Pool, content: bytes, plan: Plan = PLAN, provider: str = "mailgun") -> Loaded:
    return await load(db, plan, io.BytesIO(content), PROVIDERS[provider], lambda _lines: None)


async def batch(db: Any, size: int = 100, name: str = "spring", **options: Any) -> list[asyncpg.Record]:
    rows: list[asyncpg.Record] = await db.fetch(
        "SELECT * FROM send_claim_campaign($1, $2, $3)", name, size, json.dumps(options)
    )
    return rows


async def states(db: asyncpg.Pool, name: str = "spring") -> dict[str, int]:
    rows = await db.fetch("SELECT state, count(*) AS n FROM send_log WHERE campaign = $1 GROUP BY state", name)
    return {row["state"]: row["n"] for row in rows}


@asynccontextmanager
async def worker(dsn: str, url: str, size: int, at_once: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a worker process; it is killed in the end, if it lives."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(ROOT / "tests/campaign_process.py"), dsn, url, "spring", str(size), str(at_once)),
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


MAKE_ALL_OLDER = """
UPDATE send_log SET claimed_at = claimed_at - $1::interval, first_claimed_at = first_claimed_at - $1::interval,
    submit_by = submit_by - $1::interval, next_check_at = next_check_at - $1::interval
WHERE state = 'claimed'
"""
CLAIMED = "SELECT wire_key FROM send_log WHERE state = 'claimed'"


async def decide_claimed(db: asyncpg.Pool, taken: Any) -> tuple[int, int]:
    """Let an hour pass and the provider speak of what it took of the claimed sends; returns how many it did and not."""
    claimed = [row["wire_key"] for row in await db.fetch(CLAIMED)]
    spoken_of = [key for key in claimed if key in taken]
    for key in spoken_of:
        await event(db, key, message_id=f"late-{key}")
    await db.execute(MAKE_ALL_OLDER, timedelta(hours=1))
    await reconcile(db, RELEASES, limit=unlimited(FEED))
    return len(spoken_of), len(claimed) - len(spoken_of)
