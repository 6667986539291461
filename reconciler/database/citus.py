# SPDX-License-Identifier: Apache-2.0
"""Distributes the schema over several PostgreSQL nodes with Citus, by wire key.

What is known of one send lies on one node: its row, events, verdicts and questions. What is about feeds, campaigns and
the installation stays on the coordinator, to which everybody connects. A few functions of the senders' protocol, and
what passes ask, are said in another way there: `migrations/citus` holds them, laid over those of the numbered files.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import asyncpg

from reconciler.database.connection import Connection
from reconciler.errors import UserError

OLDEST: Final = (13, 0)
"""The oldest release of Citus that takes the statements; 14.0 is the one that was tried."""

MOST_ROWS: Final = 100_000
"""Rows of a table that are moved at most: everybody waits while they are."""

BY_WIRE_KEY: Final = ("send_log", "provider_event", "verdict", "shadow_verdict", "look_up", "asked_again")
BY_RECIPIENT: Final = "cap_taken"

IS_DISTRIBUTED: Final = """
SELECT EXISTS (SELECT FROM pg_dist_partition WHERE logicalrelid = to_regclass('send_log'))
"""
HAS_CITUS: Final = "SELECT to_regclass('pg_catalog.pg_dist_partition') IS NOT NULL"


async def is_distributed(connection: Connection) -> bool:
    """Say whether the schema that the connection sees first is distributed."""
    return bool(await connection.fetchval(HAS_CITUS)) and bool(await connection.fetchval(IS_DISTRIBUTED))


@dataclass(frozen=True, slots=True)
class Layout:
    """How a distributed schema lies."""

    version: str
    """Of Citus."""
    workers: int
    shards: int


LAYOUT: Final = """
SELECT (SELECT extversion FROM pg_extension WHERE extname = 'citus') AS version,
       (SELECT count(*) FROM pg_dist_node WHERE noderole = 'primary' AND isactive AND shouldhaveshards)::int AS workers,
       (SELECT count(*) FROM pg_dist_shard WHERE logicalrelid = to_regclass('send_log'))::int AS shards
"""


async def read_layout(connection: Connection) -> Layout | None:
    """Return how the schema lies; None: on one server."""
    if not await is_distributed(connection):
        return None
    (row,) = await connection.fetch(LAYOUT)
    return Layout(**row)


OBJECTIONS: Final = """
SELECT CASE
    WHEN NOT EXISTS (SELECT FROM pg_dist_node WHERE groupid = 0)
    THEN 'the workers don''t know the coordinator: SELECT citus_set_coordinator_host(host, port) first'
    WHEN NOT EXISTS (SELECT FROM pg_dist_node WHERE isactive AND shouldhaveshards)
    THEN 'no node would hold anything: SELECT citus_add_node(host, port) for each worker first'
    WHEN NOT EXISTS (SELECT FROM pg_dist_local_group WHERE groupid = 0)
    THEN 'this is a worker: connect to the coordinator'
    WHEN current_setting('citus.shard_replication_factor') <> '1'
    THEN 'citus.shard_replication_factor is not 1: copies of shards are not what is guarded here, set it back'
    WHEN EXISTS (SELECT FROM installation WHERE recipient_salt IS NOT NULL)
    THEN 'recipients are stored hashed here, by triggers, which Citus runs on no distributed table'
    WHEN EXISTS (SELECT FROM installation WHERE cardinality(tell) > 0) OR EXISTS (SELECT FROM release_outbox)
    THEN 'the outbox is in use, which is written by a trigger; Citus runs none: take [outbox] out of the settings first'
END
"""
COUNTS: Final = """
SELECT greatest((SELECT count(*) FROM (SELECT FROM send_log LIMIT $1) AS s),
                (SELECT count(*) FROM (SELECT FROM provider_event LIMIT $1) AS e))
"""
SETTINGS: Final = "SELECT set_config('citus.shard_count', $1::int::text, true)"
WITHOUT_TRIGGERS: Final = """
DROP TRIGGER IF EXISTS send_tell ON send_log;
DROP TRIGGER IF EXISTS be_durable ON send_log;
DROP TRIGGER IF EXISTS be_durable ON provider_event;
ALTER TABLE installation ADD CONSTRAINT no_outbox_on_citus CHECK (cardinality(tell) = 0),
    ADD CONSTRAINT no_hashes_on_citus CHECK (recipient_salt IS NULL)
"""
WAIT_FOR_ROWS_ONLY: Final = """
DO $$ BEGIN
    EXECUTE format('ALTER DATABASE %I SET citus.all_modifications_commutative = on', current_database());
END $$
"""
"""Else whoever writes to several shards locks them whole until he commits, which Citus does for copies of shards. There
are none: rows' own locks are enough, and are taken in one order."""
KNOW_EVERYWHERE: Final = (
    "SELECT create_distributed_function('send_is_over(send_log, timestamptz, timestamptz)'::regprocedure)"
)
"""The one function over a whole row that is asked of the nodes."""
DISTRIBUTE: Final = "SELECT create_distributed_table($1::text::regclass, $2, colocate_with => $3)"


async def distribute(connection: asyncpg.Connection, shards: int) -> None:
    """Distribute the tables in the caller's transaction, which looks for names in one schema. Raises UserError."""
    await _refuse(connection)
    await connection.execute(SETTINGS, shards)
    await connection.execute(WITHOUT_TRIGGERS)
    for table in BY_WIRE_KEY:
        await connection.execute(DISTRIBUTE, table, "wire_key", "none" if table == "send_log" else "send_log")
    await connection.execute(DISTRIBUTE, BY_RECIPIENT, "recipient_key", "none")
    await connection.execute(KNOW_EVERYWHERE)
    await connection.execute(WAIT_FOR_ROWS_ONLY)


async def _refuse(connection: asyncpg.Connection) -> None:
    if not await connection.fetchval(HAS_CITUS):
        raise UserError("this database has no Citus: CREATE EXTENSION citus here and in the workers' databases first")
    layout = await connection.fetchrow(LAYOUT)
    assert layout is not None  # noqa: S101 - scalars make a row
    major, minor = (int(part) for part in layout["version"].partition("-")[0].split("."))
    if (major, minor) < OLDEST:
        raise UserError(f"Citus is {layout['version']} here: version {OLDEST[0]}.{OLDEST[1]} or newer is needed")
    if objection := await connection.fetchval(OBJECTIONS):
        raise UserError(objection)
    if await connection.fetchval(COUNTS, MOST_ROWS + 1) > MOST_ROWS:
        raise UserError(
            f"send_log or provider_event holds more than {MOST_ROWS:,} rows, for which everybody would wait: "
            "distribute a fresh installation"
        )


OVERLAY: Final = "SELECT obj_description(to_regprocedure('send_lock(text[])'), 'pg_proc')"


async def lacks_overlay(connection: asyncpg.Connection, folder: Path) -> bool:
    """Say whether a distributed schema has other functions than this program's."""
    return bool(await connection.fetchval(OVERLAY) != _checksum(folder))


async def overlay(connection: asyncpg.Connection, folder: Path) -> None:
    """Lay this program's functions for distributed tables over the others, in the caller's transaction."""
    for path in _files(folder):
        await connection.execute(path.read_text("utf-8"))
    await connection.execute(f"COMMENT ON FUNCTION send_lock(text[]) IS '{_checksum(folder)}'")


def _files(folder: Path) -> list[Path]:
    return sorted((folder / "citus").glob("*.sql"))


def _checksum(folder: Path) -> str:
    return hashlib.sha256("".join(path.read_text("utf-8") for path in _files(folder)).encode()).hexdigest()
