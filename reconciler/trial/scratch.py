# SPDX-License-Identifier: Apache-2.0
"""A schema of our own in the user's database: made, migrated, and dropped at the end, however the work in it ended.

The connection's search_path leads there and nowhere else. Whoever was killed leaves a schema behind, which the next run
finds by its comment and by the lock that its maker no longer holds.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, urlencode

import asyncpg

from reconciler.database.migrate import migrate
from reconciler.errors import NO_DATABASE_URL, DatabaseUnavailable, UserError, describe_connection_error
from webhooks.database import is_behind_pooler

PREFIX: Final = "reconciler_selftest_"
COMMENT: Final = "Scratch of reconciler selftest, which drops it at its end"
_CONNECT_SECONDS: Final = 15.0
_DROP_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Scratch:
    """A schema to try things in. All connections to it bear its name as (the beginning of) their application_name."""

    name: str
    dsn: str


@asynccontextmanager
async def scratch_schema(dsn: str) -> AsyncIterator[Scratch]:
    """Give a fresh schema with this release's tables. Raises UserError where there can't be one."""
    name = PREFIX + secrets.token_hex(4)
    scratch = Scratch(name, _inside(dsn, name))
    async with _connected(dsn) as keeper:
        if await is_behind_pooler(keeper):
            raise UserError(
                "the database is reached through a pooler in transaction mode, which keeps no search_path: set "
                "database.direct_url, so that the self-test has a schema of its own"
            )
        await _sweep(keeper)
        await _create(keeper, name)
        try:
            await _refuse_other_schema(scratch)
            await migrate(scratch.dsn)
            await _silence_outbox(keeper, name)
            yield scratch
        finally:
            await _drop(dsn, name)


def _inside(dsn: str, schema: str) -> str:
    """Return the URL that leads into a schema. What it says of search_path wins over the role's and the database's."""
    address, _, query = dsn.partition("?")
    own = {"search_path": schema, "application_name": schema}
    kept = [(name, value) for name, value in parse_qsl(query, keep_blank_values=True) if name not in own]
    return f"{address}?{urlencode([*kept, *own.items()])}"


@asynccontextmanager
async def _connected(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    try:
        connection = await asyncpg.connect(dsn, timeout=_CONNECT_SECONDS, statement_cache_size=0)
    except (OSError, *NO_DATABASE_URL, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise DatabaseUnavailable(describe_connection_error(dsn, error)) from error
    try:
        yield connection
    finally:
        await connection.close(timeout=_CONNECT_SECONDS)


# Of a run that was killed: nobody holds the lock of its name any more.
LEFT_BEHIND: Final = """
WITH scratch AS MATERIALIZED (
    SELECT nspname::text AS name FROM pg_namespace
    WHERE starts_with(nspname::text, $1) AND obj_description(oid, 'pg_namespace') = $2
      AND pg_has_role(nspowner, 'USAGE')
)
SELECT name FROM scratch WHERE pg_try_advisory_lock(hashtextextended(name, 0))
"""
DROP: Final = "SELECT format('DROP SCHEMA IF EXISTS %I CASCADE', $1::text)"


async def _sweep(keeper: asyncpg.Connection) -> None:
    for row in await keeper.fetch(LEFT_BEHIND, PREFIX, COMMENT):
        await keeper.execute(await keeper.fetchval(DROP, row["name"]))


LOCK_NAME: Final = "SELECT pg_advisory_lock(hashtextextended($1, 0))"
CREATE: Final = "SELECT format('CREATE SCHEMA %1$I; COMMENT ON SCHEMA %1$I IS %2$L', $1::text, $2::text)"


async def _create(keeper: asyncpg.Connection, name: str) -> None:
    await keeper.execute(LOCK_NAME, name)  # until this connection ends
    try:
        await keeper.execute(await keeper.fetchval(CREATE, name, COMMENT))
    except asyncpg.InsufficientPrivilegeError as error:
        raise UserError(
            f"the self-test needs a schema of its own, and this account may not create one ({error}): grant it (GRANT "
            "CREATE ON DATABASE ... TO ...), or name another database or account for it in RECONCILER_DATABASE__URL"
        ) from error


CURRENT_SCHEMA: Final = "SELECT current_schema()"


async def _refuse_other_schema(scratch: Scratch) -> None:
    """Nothing may happen in a schema of the user's, where something between us and the server drops the search_path."""
    async with _connected(scratch.dsn) as connection:
        if (found := await connection.fetchval(CURRENT_SCHEMA)) != scratch.name:
            raise UserError(
                f"connections lead into the schema {found} whatever search_path they ask for: set database.direct_url "
                "to the server itself"
            )


# Channels belong to the whole database: an application that listens for releases must not hear of ours.
STAY_SILENT: Final = "SELECT format('ALTER TABLE %I.send_log DISABLE TRIGGER send_tell', $1::text)"


async def _silence_outbox(keeper: asyncpg.Connection, name: str) -> None:
    await keeper.execute(await keeper.fetchval(STAY_SILENT, name))


# What was killed may still run on the server, and hold locks.
END_OTHERS: Final = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE starts_with(application_name, $1) AND datname = current_database() AND pid <> pg_backend_pid()
"""


async def _drop(dsn: str, name: str) -> None:
    try:
        async with asyncio.timeout(_DROP_SECONDS), _connected(dsn) as connection:
            await connection.execute(END_OTHERS, name)
            await connection.execute(await connection.fetchval(DROP, name))
    except (OSError, TimeoutError, DatabaseUnavailable, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"the schema {name} could not be dropped ({reason}): the next reconciler selftest does it, or you do: "
            f"DROP SCHEMA {name} CASCADE"
        ) from error
