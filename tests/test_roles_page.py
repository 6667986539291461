# SPDX-License-Identifier: Apache-2.0
"""The roles that docs/roles.md makes can do everything at run time."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import asyncpg
from kit import fail, heard_neighbours, old_claim, policies, reconcile
from program import Program
from snippets import block, statements

from reconciler.configuration.settings import Settings
from reconciler.database.migrate import migrate, pending
from reconciler.insight.status import read_status
from reconciler.insight.why import tell
from reconciler.passes import feeds
from webhooks.event import Event, Kind, Testimony
from webhooks.inbox import Inbox

ROLES = ("mail_receiver", "mail_daemon", "shop")


async def test_roles_can_do_everything_at_run_time_once_they_are_granted_what_the_page_says(
    empty_dsn: str, tmp_path: Path
) -> None:
    owner = empty_dsn.replace("postgres@", "mail_owner@")
    (tmp_path / "reconciler.toml").touch()
    admin = await asyncpg.connect(empty_dsn)
    try:
        await admin.execute("CREATE ROLE mail_owner LOGIN; ALTER SCHEMA public OWNER TO mail_owner")
        await migrate(owner)
        make, grant = statements(block("docs/roles.md", "sh", "--grant"))
        for dsn, words in ((empty_dsn, make), (owner, grant)):
            assert (await Program(tmp_path / "reconciler.toml", dsn)(*words[1:])).exit_code == 0
        await use_everything(empty_dsn.replace("postgres@", "mail_daemon@"))
    finally:
        names = ", ".join((*ROLES, "mail_owner"))
        await admin.execute(f"ALTER SCHEMA public OWNER TO postgres; DROP OWNED BY {names} CASCADE; DROP ROLE {names}")
        await admin.close()


async def use_everything(dsn: str) -> None:
    """What daemon, senders and operators do, each once."""
    assert await pending(dsn) == []
    async with asyncpg.create_pool(dsn, min_size=1, max_size=3) as pool:
        await old_claim(pool, "order:1")
        await heard_neighbours(pool)
        assert (await reconcile(pool)).counts["released:absent"] == 1
        await pool.fetch("SELECT provider_event_make_partitions()")
        inbox = Inbox()
        await inbox.open(pool)
        await inbox.store(
            "mg",
            [
                Event(
                    kind=Kind.DELIVERED,
                    testimony=Testimony.ACCEPTED,
                    message_id="m",
                    event_id="e",
                    send_key="order:1",
                    raw=b"{}",
                )
            ],
        )
        await inbox.close()
        async with pool.acquire() as connection:
            await feeds.pause(connection, "mg", "why", "ann")
            await feeds.resume(connection, "mg", "why", "ann")
            await read_status(connection, Settings(), lambda: datetime.now(UTC))
        await fail(pool, "order:2", await old_claim(pool, "order:2"), "422", not_sent=False)
        released = await pool.fetchrow("SELECT outcome FROM operator_release('order:2', 'why', 'ann')")
        assert released["outcome"] == "released"
        assert (await tell(pool, policies(), "order:1")).state == "pending"
