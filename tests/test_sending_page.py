# SPDX-License-Identifier: Apache-2.0
"""What docs/sending.md shows, in Python, SQL and HTTP, does what it says."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from datetime import timedelta
from pathlib import Path
from textwrap import indent
from typing import Any

import aiohttp
import asyncpg
import pytest
from kit import claim, confirm, fail, row
from serving import serving as running
from serving import write_config
from snippets import block, blocks

from reconciler import guard
from reconciler.breakable.esp import esp
from reconciler.breakable.fate import Fate
from reconciler.tokens import hash_of, new_token
from webhooks.event import wire_key


@pytest.mark.parametrize(
    ("fate", "outcome", "state", "again"),
    [
        (Fate.ANSWERED, "sent", "sent", "already_sent"),
        (Fate.REFUSED, "failed", "failed", "failed"),
        (Fate.BUSY, "released", "pending", "released"),
        (Fate.LATE_ERROR, "waiting", "claimed", "in_flight"),
        (Fate.RESET, "waiting", "claimed", "in_flight"),
    ],
)
async def test_the_sender_in_python_tells_each_answer_as_what_it_proves(
    db: asyncpg.Pool, fate: Fate, outcome: str, state: str, again: str
) -> None:
    sender = block("docs/sending.md", "python", "send_once")
    names: dict[str, Any] = {}
    exec(sender, names)  # noqa: S102 - it is what readers copy
    order = {"id": 1234, "email": "a@example.com", "text": "Thank you."}
    async with esp("mailgun") as provider, aiohttp.ClientSession() as session:
        provider.next_fates.extend([fate, fate])
        sent = await names["send_receipt"](db, session, provider.url, order)
        assert sent.outcome == outcome
        assert set(provider.taken) <= {wire_key("order.receipt:1234:a@example.com")}
        assert dict(await db.fetchrow("SELECT state, message_class, fingerprint IS NOT NULL AS has FROM send_log")) == {
            "state": state,
            "message_class": "receipts",
            "has": True,
        }
        assert (await names["send_receipt"](db, session, provider.url, order)).outcome == again
        assert provider.taken.total() == fate.taken


async def test_the_sender_with_curl_claims_confirms_and_fails(db: asyncpg.Pool, dsn: str, tmp_path: Path) -> None:
    token = new_token()
    settings = (
        '[feeds.mailgun-main]\nprovider = "mailgun"\nsecrets = ["key-0123456789abcdef"]\n'
        f'[api.tokens.shop]\nhash = ["{hash_of(token)}"]\n'
    )
    async with running(write_config(tmp_path, settings), RECONCILER_DATABASE__URL=dsn) as daemon:
        await daemon.becomes(200)
        environment = {**os.environ, "URL": daemon.url, "TOKEN": token}
        claiming, reporting = blocks("docs/sending.md", "sh", "curl")
        claimed = json.loads(await curl(claiming, environment))
        assert (claimed["outcome"], claimed["stamp"]["body"]) == ("claimed", {"v:send_key": claimed["wire_key"]})
        repeated = json.loads(await curl(claiming, environment))
        assert (repeated["outcome"], repeated.get("fence")) == ("in_flight", None)
        said = await curl(reporting, {**environment, "FENCE": str(claimed["fence"])})
    assert [json.loads(part)["outcome"] for part in said.replace("}{", "}\n{").splitlines()] == ["sent", "sent"]
    row = await db.fetchrow("SELECT state, provider_message_id FROM send_log")
    assert tuple(row) == ("sent", "20260501.1234@example.com")


async def curl(script: str, environment: dict[str, str]) -> str:
    process = await asyncio.create_subprocess_exec("/bin/sh", "-ec", script, env=environment, stdout=subprocess.PIPE)
    async with asyncio.timeout(30):
        out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode()


async def test_the_sender_as_a_block_submits_once(db: asyncpg.Pool) -> None:
    body = block("docs/sending.md", "python", "guard.sending")
    told: list[str] = []
    names: dict[str, Any] = {"guard": guard, "print": told.append}
    exec("async def run(pool, session, url, key, form):\n" + indent(body, "    "), names)  # noqa: S102 - as above
    async with esp("mailgun") as provider, aiohttp.ClientSession() as session:
        for _ in range(2):
            await names["run"](db, session, provider.url, "order:1", {"to": "a@example.com"})
        assert (told, sum(provider.taken.values())) == (["sent", "already_sent"], 1)


async def test_the_sender_in_sql_claims_confirms_and_fails(db: asyncpg.Pool) -> None:
    script = block("docs/sending.md", "sql", "send_claim_commit")
    claim_it, confirm_it, fail_it = [line.partition(";")[0] for line in script.splitlines()]
    options = re.search("options: '(.*)'", script)
    assert options is not None
    key = "order.receipt:1234:a@example.com"
    claimed = await db.fetchrow(claim_it, key, "mailgun-main", options[1])
    assert (claimed["outcome"], claimed["wire_key"]) == ("claimed", wire_key(key))
    waiting = await db.fetchrow(fail_it, key, claimed["fence"], "time-out", None)
    confirmed = await db.fetchrow(confirm_it, key, claimed["fence"], "<20260501.1234@example.com>")
    assert (waiting["outcome"], confirmed["outcome"]) == ("waiting", "sent")
    row = await db.fetchrow("SELECT provider_message_id, fingerprint, submit_by - claimed_at AS time FROM send_log")
    assert tuple(row) == ("20260501.1234@example.com", "5f2c8e", timedelta(seconds=30))


async def test_a_worker_gets_what_may_be_sent_again_and_nothing_else(db: asyncpg.Pool) -> None:
    query = block("docs/sending.md", "sql", "send_claim_released_commit")
    statement = query.partition(";")[0]
    for key in ("free-1", "free-2", "running", "sent", "failed"):
        fence = (await claim(db, key, "mailgun-main"))["fence"]
        if key.startswith("free"):
            await fail(db, key, fence, "refused", not_sent=True)
    await fail(db, "failed", (await row(db, "failed"))["fence"], "422", not_sent=False)
    await confirm(db, "sent", (await row(db, "sent"))["fence"])
    await db.fetch("SELECT * FROM send_enqueue('new', 'mailgun-main', '{}')")
    assert [found["send_key"] for found in json.loads(await db.fetchval(statement))] == ["free-1", "free-2"]
    assert json.loads(await db.fetchval(statement)) == []
    async with db.acquire() as connection, connection.transaction():
        with pytest.raises(asyncpg.InvalidTransactionTerminationError):
            await connection.fetchval(statement)
