# SPDX-License-Identifier: Apache-2.0
"""A sender that is killed at any step of `send_once` sends nothing twice and loses nothing.

One process a step, each with a key of its own, all against a provider that takes the message and then is silent. Later
the provider's webhook speaks of what it took, a real daemon decides, and a second sender sends what was released.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import aiohttp
import asyncpg
import pytest
from sender_under_kill import send
from serving import ROOT, sample, serving, until, write_config

from reconciler.breakable.esp import esp
from reconciler.breakable.fate import Fates

pytestmark = pytest.mark.proof

SETTINGS = """
[rules]
grace = "200ms"
give_up_after = "1s"
on_unknown = "release"
release_budget = 1000
release_share = 1
canary_share = 1
[reconcile]
every = "1s"
"""
"""Whatever nobody spoke of is released: the provider's events are delivered before, so that this is right."""


async def kill_everywhere(dsn: str, url: str) -> dict[str, int]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(ROOT / "tests" / "sender_under_kill.py"), dsn, url),
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        stdout=subprocess.PIPE,
    )
    async with asyncio.timeout(240):
        out, _ = await process.communicate()
    assert process.returncode == 0
    counted: dict[str, int] = json.loads(out)
    return counted


async def test_a_sender_killed_at_any_step_of_send_once_neither_doubles_nor_loses_a_message(
    db: asyncpg.Pool, dsn: str, tmp_path: Path
) -> None:
    async with esp("mailgun", fates=Fates(hangs=1)) as provider:
        counted = await kill_everywhere(dsn, provider.url)
        taken_once = dict(provider.taken)
        print(f"{counted['kills']} kills, {len(taken_once)} messages taken")  # noqa: T201 - for who wants to know
        assert counted["kills"] >= 20
        assert set(taken_once.values()) == {1}
        claimed = await db.fetchval("SELECT count(*) FROM send_log WHERE state = 'claimed'")
        assert len(taken_once) < claimed, "some died between claim and submission"

        async with serving(write_config(tmp_path, SETTINGS), RECONCILER_DATABASE__URL=dsn) as daemon:
            for wire_key in taken_once:
                assert await daemon.deliver("mg", sample("mg", "accepted", wire_key)) == 200

            async def decided() -> bool:
                return await db.fetchval("SELECT count(*) = 0 FROM send_log WHERE state = 'claimed'")

            await until(decided, "every claim gets its verdict")

        states = {row["wire_key"]: row["state"] for row in await db.fetch("SELECT wire_key, state FROM send_log")}
        assert {key for key, state in states.items() if state == "sent"} == set(taken_once)
        provider.fates = Fates()
        senders = counted["kills"] + counted["alive"]
        async with aiohttp.ClientSession() as session:
            for step in range(1, senders + 1):
                sent = await send(db, session, provider.url, f"kill:{step}")
                assert sent.outcome in {"sent", "already_sent"}
        assert set(provider.taken.values()) == {1}
        assert len(provider.taken) == senders
        assert await db.fetchval("SELECT array_agg(DISTINCT state) FROM send_log") == ["sent"]
