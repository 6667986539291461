# SPDX-License-Identifier: Apache-2.0
"""A plan that was made while the log was empty must not read a full one from end to end: sessions keep their plans."""

from __future__ import annotations

import asyncpg
import pytest
from kit import call, claim

from webhooks import database
from webhooks.database import connect_pool

ROWS = 20_000
FILL_SENDS = """
INSERT INTO send_log (wire_key, send_key, state, feed, attempt, fence, first_claimed_at, claimed_at, submit_by,
    answered_at, provider_message_id, verdict_source, verdict_reason, sent_at)
SELECT md5(n::text), 'order:' || n, 'sent', 'mg', 1, nextval('send_fence'), at, at, at + interval '1 min', at,
    'm-' || n, 'sender', 'answered', at
FROM generate_series(1, $1::int) AS n, clock_timestamp() AS at
"""
FILL_EVENTS = """
INSERT INTO provider_event (feed, message_id, event_id, partition_at, wire_key, kind, testimony, source)
SELECT 'mg', 'm-' || n, 'd-' || n, clock_timestamp(), md5(n::text), 'delivered', 'accepted', 'http'
FROM generate_series(1, $1::int) AS n
"""
READ_WHOLE = """
SELECT relname, seq_tup_read FROM pg_stat_xact_user_tables
WHERE (relname LIKE 'provider_event%' OR relname = 'send_log') AND seq_tup_read > 0
"""


async def fill(db: asyncpg.Pool) -> None:
    """Fill the log, and let nobody look at how large it is now."""
    await db.execute(FILL_SENDS, ROWS)
    await db.execute(FILL_EVENTS, ROWS)


async def send(sender: asyncpg.Connection, n: str) -> None:
    """Make each of a sender's calls."""
    confirmed, failed = [await claim(sender, f"{name}:{n}") for name in ("confirmed", "failed")]
    await call(sender, "send_confirm", f"confirmed:{n}", confirmed["fence"], f"m:{n}", "{}")
    await call(sender, "send_fail", f"failed:{n}", failed["fence"], "timeout", None)
    await call(sender, "send_enqueue", f"later:{n}", "mg", "{}")
    await call(sender, "send_claim_released", "mg", 10, "{}")
    await claim(sender, f"confirmed:{n}")


async def test_a_sender_reads_no_whole_log_that_was_empty_when_his_plans_were_made(dsn: str, db: asyncpg.Pool) -> None:
    await db.execute("VACUUM ANALYZE")  # as it is done each night: from now on the server believes that it is empty
    sender = await asyncpg.connect(dsn)
    for n in range(8):
        await send(sender, f"early-{n}")
    await fill(db)
    async with sender.transaction():
        await send(sender, "late")
        assert await sender.fetch(READ_WHOLE) == []
    await sender.close()


FORBIDS_WHOLE_READS = """
SELECT proname, 'jit=off' = ANY (proconfig) AS is_never_compiled FROM pg_proc
WHERE pronamespace = current_schema()::regnamespace AND 'enable_seqscan=off' = ANY (proconfig)
"""


async def test_what_forbids_whole_reads_is_never_compiled(db: asyncpg.Pool) -> None:
    # Until PostgreSQL 18 a read that is forbidden, and that nothing else can do, costs ten thousand million: each call
    # that looks at the one row of `installation` would be compiled, for 60 ms.
    rows = await db.fetch(FORBIDS_WHOLE_READS)
    assert "send_claim" in {row["proname"] for row in rows}
    assert [row["proname"] for row in rows if not row["is_never_compiled"]] == []


EVENTS_OF = "SELECT count(*) FROM provider_event WHERE wire_key = $1"


async def seen_whole(dsn: str, db: asyncpg.Pool) -> list[str]:
    """Ask for a send's events over a connection that did so while there were none; return what it read whole."""
    await db.execute("VACUUM ANALYZE")
    async with await connect_pool(dsn, size=1, application="test") as pool:
        for _ in range(8):
            await pool.fetchval(EVENTS_OF, "nobody's")
        await fill(db)
        async with pool.acquire() as connection, connection.transaction():
            assert await connection.fetchval(EVENTS_OF, "nobody's") == 0
            return [row["relname"] for row in await connection.fetch(READ_WHOLE)]


async def test_the_daemon_forgets_plans_before_they_are_old(
    dsn: str, db: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "PLANS_SECONDS", 0.0)
    assert await seen_whole(dsn, db) == []


async def test_the_daemon_keeps_plans_meanwhile(dsn: str, db: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "PLANS_SECONDS", 3600.0)
    assert len(await seen_whole(dsn, db)) == 1, "the newest month's plan is the one that was made while it was empty"


PER_ROW = "SELECT send_heard(md5('1'), 'mg', NULL, 'm-1', NULL), send_note_delivery(md5('1'))"
"""What passes call for each row; the functions' plans are kept by the pooler's connections, whoever uses them."""


async def test_behind_a_pooler_what_passes_call_for_each_row_reads_no_whole_log(pooler: str, db: asyncpg.Pool) -> None:
    await db.execute("VACUUM ANALYZE")
    await db.execute(FILL_SENDS, 1)
    async with await connect_pool(pooler, size=1, application="test") as pool:
        for _ in range(8):
            await pool.execute(PER_ROW)
        await db.execute("DELETE FROM send_log")
        await fill(db)
        async with pool.acquire() as connection, connection.transaction():
            await connection.execute(PER_ROW)
            assert await connection.fetch(READ_WHOLE) == []
