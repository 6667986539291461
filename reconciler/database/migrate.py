# SPDX-License-Identifier: Apache-2.0
"""Brings a database to this release's schema: numbered plain SQL files, each run once, up only.

Safe while the application runs and while several programs start at once. A database that is ahead of the program is
fine (a rolling upgrade); a file that was edited or removed after it ran is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import asyncpg

from reconciler.database import citus
from reconciler.errors import NO_DATABASE_URL, DatabaseUnavailable, UserError, describe_connection_error
from webhooks.database import is_behind_pooler

LOCK: Final = 0x657370_7265636F  # "esp" and "reco": any number will do that no one else takes
LOCK_TIMEOUT: Final = 5.0
"""Seconds one try waits for a table. While it waits, everybody who wants that table waits behind it."""

STATEMENT_TIMEOUT: Final = 600.0
"""Seconds one migration may take in a transaction."""

LOOK_TIMEOUT: Final = 30.0
"""Seconds that looking at what ran may take: a server may take connections and then say nothing more."""

BUILD_TIMEOUT: Final = 6 * 3600.0
"""Seconds one that runs outside of a transaction may take: it builds an index, and nobody waits for it."""

_NAME: Final = re.compile(r"(\d{4})_[a-z0-9_]+\.sql")
_COMMENT: Final = re.compile(r"--.*")


class MigrationError(UserError, RuntimeError):
    """The schema can't be brought, or wasn't brought, to this release's state; nothing was done by halves."""


@dataclass(frozen=True)
class Migration:
    """One file. The checksum is taken over its text with Unix line ends, so that a checkout's do not matter."""

    version: int
    name: str
    sql: str

    @property
    def sha256(self) -> str:
        """The checksum that is kept in the database."""
        return hashlib.sha256(self.sql.encode()).hexdigest()

    @property
    def transactional(self) -> bool:
        """False if its first line is `-- no-transaction`: one idempotent statement that wants to run by itself."""
        return self.sql.partition("\n")[0].strip() != "-- no-transaction"

    @property
    def words(self) -> list[str]:
        """The identifiers of the file, those in comments left out."""
        return re.findall(r"\w+", _COMMENT.sub("", self.sql))


def default_folder() -> Path:
    """The files of this release: in the package, or in the checkout that it belongs to."""
    package = Path(__file__).parents[1]
    packaged = package / "migrations"
    return packaged if packaged.is_dir() else package.parent / "migrations"


def load(folder: Path | None = None) -> list[Migration]:
    """Read the migrations in their order. Raises MigrationError if the numbers are not 1, 2, 3 ..."""
    folder = folder or default_folder()
    paths = sorted(folder.glob("*.sql"))
    for number, path in enumerate(paths, 1):
        found = _NAME.fullmatch(path.name)
        if not found or int(found[1]) != number:
            raise MigrationError(f"{path}: expected a file named {number:04d}_<words>.sql here, is one missing?")
    if not paths:
        raise MigrationError(f"{folder} holds no migrations: this installation is incomplete")
    migrations = [Migration(number, path.name, path.read_text("utf-8")) for number, path in enumerate(paths, 1)]
    if empty := next((migration.name for migration in migrations if not migration.words), None):
        raise MigrationError(f"{folder / empty}: holds no statement: is this installation whole?")
    return migrations


async def migrate(
    dsn: str,
    *,
    folder: Path | None = None,
    namespace: str | None = None,
    hash_recipients: bool = False,
    shards: int | None = None,
    wait: float = 60.0,
) -> list[str]:
    """Apply what is missing and return the names of the files applied, none if there was nothing to do.

    `wait` is how many seconds another migrator, or a table that a long transaction holds, is waited for. `namespace`
    sets the name of this installation, which can't change after the first send. `hash_recipients` lets recipients be
    stored hashed for ever, which has to be said before the first send and event. `shards` distributes the tables with
    Citus, each in so many parts, unless they are. Raises MigrationError, and DatabaseUnavailable where the database
    can't be reached.
    """
    migrations = load(folder)
    async with _connection(dsn) as connection:
        await _require_schema(connection)
        if not await is_behind_pooler(connection):  # there the lock would stay behind, on a connection that others get
            await _take_lock(connection, wait)
        await _create_table(connection)
        done = await _applied(connection)
        missing = [migration for migration in migrations if migration.version not in done]
        _refuse_drift(migrations, done)
        if missing and (why := await not_the_owner(connection)):
            raise MigrationError(f"{missing[0].name} was not run: {why}")
        ran = [migration.name for migration in missing if await _apply(connection, migration, wait)]
        if namespace is not None:
            await _set_namespace(connection, namespace)
        if hash_recipients:
            await _hash_recipients(connection, min(LOCK_TIMEOUT, wait))
        return ran + await _distribute(connection, folder or default_folder(), shards, anew=bool(ran))


async def pending(dsn: str, folder: Path | None = None) -> list[str]:
    """The names of the files not yet applied. Changes nothing; raises as `migrate` does, for drift too."""
    migrations = load(folder)
    async with _connection(dsn) as connection, asyncio.timeout(LOOK_TIMEOUT):
        await _require_schema(connection)
        done = await _applied(connection) if await _table_exists(connection) else {}
        _refuse_drift(migrations, done)
        missing = [migration.name for migration in migrations if migration.version not in done]
        return missing + await _missing_overlay(connection, folder or default_folder())


@asynccontextmanager
async def _connection(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection of our own, whose end gives back the lock. What the database refuses becomes a MigrationError."""
    try:
        # no statement cache: a pooler in transaction mode would not know the prepared statements
        connection = await asyncpg.connect(dsn, timeout=15, statement_cache_size=0)
    except (OSError, *NO_DATABASE_URL, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise DatabaseUnavailable(describe_connection_error(dsn, error)) from error
    try:
        yield connection
    except (OSError, asyncpg.PostgresConnectionError, asyncpg.OperatorInterventionError) as error:  # it goes down
        raise DatabaseUnavailable(describe_connection_error(dsn, error)) from error
    except asyncpg.InsufficientPrivilegeError as error:
        why = await not_the_owner(connection)
        raise MigrationError(f"migrate: {_one_line(error)}" + (f": {why}" if why else "")) from error
    except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise MigrationError(f"migrate: {_one_line(error)}") from error
    finally:
        await connection.close(timeout=10)


@asynccontextmanager
async def in_transaction(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    """Give a connection to a migrated database in one transaction that looks for names in its first schema only.

    Raises MigrationError for what the database refuses, and where there is no schema yet, and DatabaseUnavailable.
    """
    async with _connection(dsn) as connection, connection.transaction():
        await _require_schema(connection)
        if not await _table_exists(connection):
            raise MigrationError("the database has no schema yet: run reconciler migrate")
        await connection.execute(PREPARE, True, int(LOCK_TIMEOUT * 1000), int(STATEMENT_TIMEOUT * 1000))
        yield connection


CURRENT_SCHEMA: Final = "SELECT current_schema()"


async def _require_schema(connection: asyncpg.Connection) -> None:
    if await connection.fetchval(CURRENT_SCHEMA) is None:
        raise MigrationError(
            "the connection's search_path names no schema that exists and that this role may use: create it, grant "
            "USAGE on it, or set search_path for this role"
        )


# Whoever may act as the owner is one. Where there are no tables yet, whoever may create them will be.
NOT_THE_OWNER: Final = """
SELECT CASE
    WHEN c.oid IS NULL AND NOT has_schema_privilege(n.oid, 'CREATE')
    THEN format('GRANT CREATE ON SCHEMA %I TO %I first, or migrate as a role that may', nspname, current_user)
    WHEN NOT pg_has_role(relowner, 'USAGE')
    THEN format('%1$I does not own the tables here, %2$I does: migrate as %2$I, who can also give %1$I its rights '
                '(migrate --grant)', current_user, pg_get_userbyid(relowner)) END
FROM pg_namespace n LEFT JOIN pg_class c ON relnamespace = n.oid AND relname = 'schema_migration'
WHERE nspname = current_schema()
"""


async def not_the_owner(connection: asyncpg.Connection) -> str | None:
    """Say why this role can't migrate, and who can; None for the owner."""
    why: str | None = await connection.fetchval(NOT_THE_OWNER)
    return why


TRY_LOCK: Final = "SELECT pg_try_advisory_lock($1)"


async def _take_lock(connection: asyncpg.Connection, wait: float) -> None:
    """One migrator at a time. Polled: a waiting statement is a snapshot that CREATE INDEX CONCURRENTLY waits for."""
    end = time.monotonic() + wait
    while not await connection.fetchval(TRY_LOCK, LOCK):
        if time.monotonic() > end:
            raise MigrationError(f"another migrate has been running for {wait:g} s: wait for its end, then try again")
        await asyncio.sleep(0.1)


TABLE_EXISTS: Final = """
SELECT EXISTS (SELECT FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
               WHERE nspname = current_schema() AND relname = 'schema_migration')
"""

CREATE_TABLE: Final = """
CREATE TABLE schema_migration (
    version int PRIMARY KEY,
    name text NOT NULL,
    sha256 text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
)
"""


async def _table_exists(connection: asyncpg.Connection) -> bool:
    return bool(await connection.fetchval(TABLE_EXISTS))


async def _create_table(connection: asyncpg.Connection) -> None:
    try:
        if not await _table_exists(connection):
            await connection.execute(CREATE_TABLE)
    except asyncpg.PostgresError:  # another migrator was quicker: PostgreSQL has an error for each moment of that race
        if not await _table_exists(connection):
            raise


APPLIED: Final = "SELECT version, name, sha256 FROM schema_migration"


async def _applied(connection: asyncpg.Connection) -> dict[int, asyncpg.Record]:
    return {row["version"]: row for row in await connection.fetch(APPLIED)}


def _refuse_drift(migrations: list[Migration], done: dict[int, asyncpg.Record]) -> None:
    """What ran must be what the files say. Versions beyond the last file are a newer release's."""
    for migration in migrations:
        ran = done.get(migration.version)
        if ran is None:
            if any(version > migration.version for version in done):
                raise MigrationError(f"{migration.name} never ran here, though later ones did: restore its record")
        elif ran["name"] != migration.name:
            raise MigrationError(f"{ran['name']} ran here and is missing, {migration.name} has its number: restore it")
        elif ran["sha256"] != migration.sha256:
            raise MigrationError(f"{migration.name} was edited after it ran here: restore it and add a new file")


async def _apply(connection: asyncpg.Connection, migration: Migration, wait: float) -> bool:
    """Run one file, patiently where a table is held by others. False if another migrator was quicker."""
    end = time.monotonic() + wait
    pause = 0.5
    while True:
        try:
            if migration.transactional:
                return await _apply_in_transaction(connection, migration, min(LOCK_TIMEOUT, wait))
            await _apply_alone(connection, migration, wait)
        except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError) as error:
            if time.monotonic() + pause > end:
                raise MigrationError(
                    f"{migration.name}: a long transaction held what it needs for {wait:g} s; it will run next time"
                ) from error
        except asyncpg.PostgresConnectionError:
            raise
        except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise MigrationError(f"{migration.name}: {_one_line(error)}") from error
        else:
            return True
        await asyncio.sleep(pause)  # those who queued up behind us pass
        pause = min(2 * pause, 8.0)


PREPARE: Final = """
SELECT set_config('search_path', quote_ident(current_schema()) || ', pg_temp', $1),
       set_config('lock_timeout', $2::bigint::text, $1),
       set_config('statement_timeout', $3::bigint::text, $1),
       set_config('citus.multi_shard_modify_mode', 'sequential', $1)
"""
"""$1 whether for this transaction only, $2 and $3 in milliseconds. Functions keep this search_path (FROM CURRENT).
Of a distributed schema one file may change tables and functions only where all goes over one connection to each node.
"""

RECORD: Final = """
INSERT INTO schema_migration (version, name, sha256) VALUES ($1, $2, $3) ON CONFLICT (version) DO NOTHING RETURNING 1
"""


async def _apply_in_transaction(connection: asyncpg.Connection, migration: Migration, lock_timeout: float) -> bool:
    async with connection.transaction():
        await connection.execute(PREPARE, True, int(lock_timeout * 1000), int(STATEMENT_TIMEOUT * 1000))
        # first, so that its key keeps out a second migrator where a pooler allows no lock
        if not await _record(connection, migration):
            return False
        await connection.execute(migration.sql)
        return True


async def _apply_alone(connection: asyncpg.Connection, migration: Migration, wait: float) -> None:
    """Run the one statement outside of a transaction; nobody queues up behind the locks it waits for."""
    if await is_behind_pooler(connection):
        raise MigrationError(f"{migration.name} can't run through a pooler: set database.direct_url for migrations")
    await connection.execute(PREPARE, False, int(wait * 1000), int(BUILD_TIMEOUT * 1000))
    await _drop_invalid_indexes(connection, migration)
    await connection.execute(migration.sql)
    await _record(connection, migration)


async def _record(connection: asyncpg.Connection, migration: Migration) -> bool:
    return bool(await connection.fetchval(RECORD, migration.version, migration.name, migration.sha256))


DROP_INVALID: Final = """
SELECT format('DROP INDEX CONCURRENTLY IF EXISTS %I.%I', nspname, relname)
FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid JOIN pg_namespace ON pg_namespace.oid = relnamespace
WHERE NOT indisvalid AND relkind = 'i' AND nspname = current_schema() AND relname = ANY ($1::text[])
"""


async def _drop_invalid_indexes(connection: asyncpg.Connection, migration: Migration) -> None:
    """Clear away what a failed CREATE INDEX CONCURRENTLY of this file left: IF NOT EXISTS would keep it."""
    for row in await connection.fetch(DROP_INVALID, migration.words):
        await connection.execute(row[0])


SET_NAMESPACE: Final = """
UPDATE installation SET namespace = $1 WHERE namespace = $1 OR NOT EXISTS (SELECT FROM send_log) RETURNING 1
"""


async def _set_namespace(connection: asyncpg.Connection, namespace: str) -> None:
    if not await connection.fetchval(SET_NAMESPACE, namespace):
        raise MigrationError(
            f"the namespace can't become {namespace!r}: sends are recorded under another one, which their keys hold"
        )


HASH_RECIPIENTS: Final = "SELECT recipients_hash_from_now_on($1)"


async def _hash_recipients(connection: asyncpg.Connection, lock_timeout: float) -> None:
    async with connection.transaction():
        await connection.execute(PREPARE, True, int(lock_timeout * 1000), int(STATEMENT_TIMEOUT * 1000))
        if not await connection.fetchval(HASH_RECIPIENTS, secrets.token_bytes(32)):
            raise MigrationError(
                "recipients can't be stored hashed any more: sends or events are recorded here already, which hold "
                "addresses: begin with a fresh database"
            )


OVERLAY: Final = "citus"
"""What the functions for distributed tables are called among the names of the files."""


async def _distribute(connection: asyncpg.Connection, folder: Path, shards: int | None, *, anew: bool) -> list[str]:
    """Distribute the tables where that is asked for, and lay the functions for it over those of the files."""
    distributed = await citus.is_distributed(connection)
    if not distributed and not shards:
        return []
    if distributed and not anew and not await citus.lacks_overlay(connection, folder):
        return []
    async with connection.transaction():
        await connection.execute(PREPARE, True, int(LOCK_TIMEOUT * 1000), int(STATEMENT_TIMEOUT * 1000))
        if shards and not distributed:
            await citus.distribute(connection, shards)
        await citus.overlay(connection, folder)
    return [OVERLAY]


async def _missing_overlay(connection: asyncpg.Connection, folder: Path) -> list[str]:
    if await citus.is_distributed(connection) and await citus.lacks_overlay(connection, folder):
        return [OVERLAY]
    return []


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
