# SPDX-License-Identifier: Apache-2.0
"""A thousand callers of one key, over Python, SQL and HTTP, from several processes: one submission, and all are told.

How long they wait is measured by `python -m benchmarks --only e`.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import asyncpg
import pytest
from serving import ROOT, serving, write_config

from reconciler.breakable.esp import esp
from reconciler.tokens import hash_of, new_token

pytestmark = pytest.mark.proof

CALLERS = {"python": 334, "sql": 333, "http": 333}
KEY = "order.receipt:1:ada@example.com"


class Process:
    """Callers of one way in a process of their own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout

    @classmethod
    async def start(cls, way: str, where: str, url: str) -> Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.callers", way, where, url, KEY, str(CALLERS[way])),
            env={"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        started = cls(process)
        assert await started._stdout.readline() == b"ready\n"
        return started

    async def outcomes(self) -> list[str]:
        self._stdin.write(b"\n")
        await self._stdin.drain()
        told = json.loads(await self._stdout.readline())
        assert await self._process.wait() == 0
        return [outcome for *_, outcome in told]


async def test_a_thousand_callers_of_one_key_submit_it_once_and_are_all_told(
    db: asyncpg.Pool, dsn: str, tmp_path: Path
) -> None:
    token = new_token()
    settings = f'[api.tokens.callers]\nhash = ["{hash_of(token)}"]\n'
    async with (
        esp("mailgun") as provider,
        serving(write_config(tmp_path, settings), RECONCILER_DATABASE__URL=dsn) as daemon,
        asyncio.timeout(90),
    ):
        await daemon.becomes(200)
        places = {"python": dsn, "sql": dsn, "http": f"{daemon.url} {token}"}
        processes = [await Process.start(way, places[way], provider.url) for way in CALLERS]
        told = await asyncio.gather(*(process.outcomes() for process in processes))
    counted = Counter(outcome for outcomes in told for outcome in outcomes)
    assert list(provider.taken.values()) == [1]
    assert (counted["sent"], counted.total()) == (1, sum(CALLERS.values()))
    assert set(counted) <= {"sent", "in_flight", "already_sent"}
    row = await db.fetchrow("SELECT state, attempt FROM send_log WHERE send_key = $1", KEY)
    assert tuple(row) == ("sent", 1)
