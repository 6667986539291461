# SPDX-License-Identifier: Apache-2.0
"""Trouble that others reported of their senders, played through here: processes killed, answers late, records lost."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import asyncpg
from aiohttp import web
from aiohttp.test_utils import TestServer
from kit import event, make_older, reconcile, release_by_pass, row
from sends_kit import KEY, Sender, api

from reconciler.breakable.esp import esp
from reconciler.insight.duplicates import look_at_events
from webhooks.database import connect_pool

ROOT = Path(__file__).parent.parent
LIMIT = 60.0
ANSWERED_FIRST, LOST = 40, 20


class Provider:
    """Answers worker `a` a few times and then only takes its messages; keeps `b` waiting until `a` is dead."""

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()
        self.of_a: list[str] = []
        self.all_lost, self.a_is_dead, self.over = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def post(self, request: web.Request) -> web.Response:
        form = await request.post()
        key = str(form["v:send_key"])
        self.taken[key] += 1
        if form["h:X-Worker"] == "b":
            await self.a_is_dead.wait()
        else:
            self.of_a.append(key)
            if len(self.of_a) == ANSWERED_FIRST + LOST:
                self.all_lost.set()
            if len(self.of_a) > ANSWERED_FIRST:
                await self.over.wait()
        return web.json_response({"id": f"<{key}@mg.example.com>", "message": "Queued. Thank you."})


async def start(dsn: str, url: str, name: str) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(ROOT / "tests/sender_process.py"), dsn, url, name),
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    return process


async def test_case_054_of_two_workers_one_submits_and_what_a_killed_one_lost_is_resolved_by_evidence(
    dsn: str, db: asyncpg.Pool
) -> None:
    provider, app = Provider(), web.Application()
    app.router.add_post("/messages", provider.post)
    async with TestServer(app) as server, asyncio.timeout(LIMIT):
        url = str(server.make_url("/messages"))
        a, b = await asyncio.gather(start(dsn, url, "a"), start(dsn, url, "b"))
        for process in (a, b):
            assert process.stdin is not None
            process.stdin.write(b"go\n")
        await provider.all_lost.wait()
        a.kill()  # between submit and commit of 20 sends
        await a.wait()
        provider.a_is_dead.set()
        assert await b.wait() == 0
        provider.over.set()

    assert (len(provider.taken), set(provider.taken.values())) == (500, {1})
    lost = provider.of_a[ANSWERED_FIRST:]
    claimed = await db.fetch("SELECT wire_key, send_key, attempt, fence FROM send_log WHERE state = 'claimed'")
    assert sorted(r["wire_key"] for r in claimed) == sorted(lost)
    assert {r["attempt"] for r in claimed} == {1}
    assert await db.fetchval("SELECT count(*) FROM send_log WHERE state = 'sent'") == 500 - LOST

    keys = [r["send_key"] for r in claimed]
    for key in keys:  # two hours are no evidence
        await make_older(db, key, timedelta(hours=2))
    await reconcile(db)
    assert [(await row(db, key))["state"] for key in keys] == ["claimed"] * LOST
    for key in keys:
        await event(db, key, message_id=f"m-{key}")
    await reconcile(db)
    assert [(await row(db, key))["state"] for key in keys] == ["sent"] * LOST


async def test_case_059_the_late_answer_of_a_superseded_attempt_wins_and_stops_the_next_one(db: asyncpg.Pool) -> None:
    first = await release_by_pass(db, KEY)
    async with api(db) as sender:
        _, second = await sender.claim()
        assert second["attempt"] == 2
        late = await sender.confirm(first, message_id="m-a")
        assert (late[0], late[1]["outcome"]) == (200, "sent_late")
        _, shown = await sender.look()  # what the second worker does right before it submits
        assert (shown["state"], shown["message_id"]) == ("sent", "m-a")
        stopped = await sender.fail(second["fence"], not_sent=True)
        assert (stopped[0], stopped[1]["outcome"]) == (200, "sent")
    said = "SELECT attempt, fence, message_id FROM provider_event WHERE source = 'sender' AND wire_key = wire_key($1)"
    assert [tuple(r) for r in await db.fetch(said, KEY)] == [(1, first, "m-a")]
    async with db.acquire() as connection:
        assert await look_at_events(connection, "test") == []


async def test_case_059_where_the_next_attempt_was_submitted_both_ids_are_kept_and_a_duplicate_is_told(
    db: asyncpg.Pool,
) -> None:
    first = await release_by_pass(db, KEY)
    async with api(db) as sender:
        _, second = await sender.claim()
        await sender.confirm(first, message_id="m-a")
        told = await sender.confirm(second["fence"], message_id="m-b")
        assert (told[0], told[1]["outcome"]) == (200, "duplicate")
    said = (
        "SELECT attempt, message_id FROM provider_event WHERE source = 'sender' AND wire_key = wire_key($1) ORDER BY 1"
    )
    assert [tuple(r) for r in await db.fetch(said, KEY)] == [(1, "m-a"), (2, "m-b")]
    async with db.acquire() as connection:
        assert [(d.sort, d.because) for d in await look_at_events(connection, "test")] == [
            ("duplicate", "two_attempts")
        ]


NEW_SESSIONS = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'api'
"""


@asynccontextmanager
async def read_only(db: asyncpg.Pool) -> AsyncIterator[None]:
    """Let the database refuse every write of the API, as after a fail-over to a standby."""
    name = await db.fetchval("SELECT current_database()")
    await db.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    await db.execute(NEW_SESSIONS)
    yield
    await db.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
    await db.execute(NEW_SESSIONS)


async def submit(sender: Sender, url: str, key: str) -> int:
    """Do what a worker does up to its confirm; return the fence, 0 where it was not granted."""
    status, claimed = await sender.claim(key)
    if status != 201:
        return 0
    form = {"to": "ada@example.org", **claimed["stamp"]["body"]}
    async with sender.client.session.post(url, data=form) as answer:
        assert answer.status == 200
    fence: int = claimed["fence"]
    return fence


async def test_case_065_records_that_fail_after_the_submission_are_no_reason_to_submit_again(
    dsn: str, db: asyncpg.Pool
) -> None:
    keys = [f"order:{n}" for n in range(50)]
    pool = await connect_pool(dsn, size=4, application="api")
    async with esp("mailgun") as provider, api(pool) as sender:
        fences = {key: await submit(sender, provider.url, key) for key in keys}
        async with read_only(db):
            for key in keys:
                assert (await sender.confirm(fences[key], key))[0] == 503
            for _ in range(5):  # the job framework
                assert {await submit(sender, provider.url, key) for key in keys} == {0}
            assert await submit(sender, provider.url, "order:new") == 0  # nor is anything new begun
        assert sum(provider.taken.values()) == 50

        assert {await submit(sender, provider.url, key) for key in keys} == {0}
        for key in keys[:25]:  # a sender that repeats its confirm
            assert (await sender.confirm(fences[key], key))[1]["outcome"] == "sent"
        for key in keys[25:]:  # and the provider's events of the others
            await make_older(db, key, timedelta(hours=2))
            await event(db, key, message_id=f"m-{key}")
        await reconcile(db)
        assert {(await sender.claim(key))[1]["outcome"] for key in keys} == {"already_sent"}
        assert (len(provider.taken), set(provider.taken.values())) == (50, {1})
    await pool.close()
