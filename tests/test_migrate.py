# SPDX-License-Identifier: Apache-2.0
"""The migration runner's promises, each on a small folder of its own."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import ssl
from pathlib import Path

import asyncpg
import pytest
from test_roles import made, role_of

from reconciler.database import migrate as runner
from reconciler.database.migrate import MigrationError, load, migrate, pending
from reconciler.database.postgres import EmbeddedPostgres
from reconciler.errors import DatabaseUnavailable, describe_connection_error

TABLE = "CREATE TABLE thing (id int, note text);\n"
COLUMN = "ALTER TABLE thing ADD COLUMN extra int;\n"
INDEX = "-- no-transaction\nCREATE UNIQUE INDEX CONCURRENTLY IF NOT EXISTS thing_id_key ON thing (id)\n"
INSTALLATION = """
CREATE TABLE installation (namespace text NOT NULL DEFAULT '');
INSERT INTO installation DEFAULT VALUES;
CREATE TABLE send_log (wire_key text PRIMARY KEY);
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "0001_thing.sql").write_text(TABLE)
    return tmp_path


@pytest.fixture
async def connection(empty_dsn: str):
    opened = await asyncpg.connect(empty_dsn)
    yield opened
    await opened.close()


async def test_the_second_run_does_nothing(empty_dsn, folder):
    (folder / "0002_extra.sql").write_text(COLUMN)
    assert await pending(empty_dsn, folder) == ["0001_thing.sql", "0002_extra.sql"]
    assert await migrate(empty_dsn, folder=folder) == ["0001_thing.sql", "0002_extra.sql"]
    assert await pending(empty_dsn, folder) == []
    assert await migrate(empty_dsn, folder=folder) == []


async def test_asking_what_is_pending_creates_nothing(empty_dsn, folder, connection):
    await pending(empty_dsn, folder)
    assert await connection.fetchval("SELECT to_regclass('schema_migration')") is None


async def test_the_release_brings_its_own_migrations(dsn):
    assert [migration.name for migration in load()]
    assert await pending(dsn) == []
    assert await migrate(dsn) == []


async def test_a_file_edited_after_it_ran_is_refused_by_name(empty_dsn, folder):
    await migrate(empty_dsn, folder=folder)
    (folder / "0001_thing.sql").write_text(TABLE + "-- a word\n")
    (folder / "0002_extra.sql").write_text(COLUMN)
    for run in (migrate(empty_dsn, folder=folder), pending(empty_dsn, folder)):
        with pytest.raises(MigrationError, match=r"^0001_thing\.sql was edited"):
            await run
    (folder / "0001_thing.sql").write_text(TABLE)
    assert await pending(empty_dsn, folder) == ["0002_extra.sql"], "the refused run changed nothing"


async def test_line_ends_of_a_checkout_are_no_edit(empty_dsn, folder):
    await migrate(empty_dsn, folder=folder)
    (folder / "0001_thing.sql").write_bytes(TABLE.replace("\n", "\r\n").encode())
    assert await pending(empty_dsn, folder) == []


async def test_a_missing_file_is_refused_by_name(empty_dsn, folder):
    (folder / "0002_extra.sql").write_text(COLUMN)
    (folder / "0003_index.sql").write_text(INDEX)
    await migrate(empty_dsn, folder=folder)
    (folder / "0002_extra.sql").unlink()
    with pytest.raises(MigrationError, match=r"0003_index\.sql: expected a file named 0002_"):
        await migrate(empty_dsn, folder=folder)
    (folder / "0003_index.sql").rename(folder / "0002_index.sql")
    with pytest.raises(MigrationError, match=r"^0002_extra\.sql ran here and is missing"):
        await migrate(empty_dsn, folder=folder)


async def test_a_file_that_later_ones_overtook_is_refused(empty_dsn, folder, connection):
    await migrate(empty_dsn, folder=folder)
    await connection.execute("UPDATE schema_migration SET version = 2")
    with pytest.raises(MigrationError, match=r"^0001_thing\.sql never ran here"):
        await migrate(empty_dsn, folder=folder)


async def test_a_database_ahead_of_the_program_is_fine(empty_dsn, folder):
    (folder / "0002_extra.sql").write_text(COLUMN)
    await migrate(empty_dsn, folder=folder)
    (folder / "0002_extra.sql").unlink()
    assert await migrate(empty_dsn, folder=folder) == []
    assert await pending(empty_dsn, folder) == []


async def test_five_at_once_run_each_file_once(empty_dsn, folder):
    """Case 096: five pods that start together."""
    (folder / "0002_extra.sql").write_text(COLUMN)
    (folder / "0003_index.sql").write_text(INDEX)
    ran = await asyncio.gather(*(migrate(empty_dsn, folder=folder) for _ in range(5)))
    assert sorted(ran, key=len) == [[], [], [], [], ["0001_thing.sql", "0002_extra.sql", "0003_index.sql"]]


async def test_five_at_once_run_each_file_once_without_the_lock_too(empty_dsn, folder, monkeypatch):
    """As behind a pooler, where the key of the record alone decides."""
    monkeypatch.setattr(runner, "TRY_LOCK", "SELECT $1::bigint IS NOT NULL")
    (folder / "0002_extra.sql").write_text(COLUMN)
    ran = await asyncio.gather(*(migrate(empty_dsn, folder=folder) for _ in range(5)))
    assert sorted(name for names in ran for name in names) == ["0001_thing.sql", "0002_extra.sql"]


async def test_a_migrator_that_never_ends_is_not_waited_for_for_ever(empty_dsn, folder, connection):
    await connection.execute("SELECT pg_advisory_lock($1)", runner.LOCK)
    with pytest.raises(MigrationError, match="another migrate"):
        await migrate(empty_dsn, folder=folder, wait=0.2)
    await connection.execute("SELECT pg_advisory_unlock($1)", runner.LOCK)
    assert await migrate(empty_dsn, folder=folder) == ["0001_thing.sql"]


async def test_case_096_posts_go_on_while_a_migration_waits_for_a_reader(
    pg: EmbeddedPostgres, empty_dsn, folder, connection, monkeypatch
):
    """Case 096: an idle transaction has read the table that the migration changes."""
    monkeypatch.setattr(runner, "LOCK_TIMEOUT", 0.1)
    await migrate(empty_dsn, folder=folder)
    (folder / "0002_extra.sql").write_text(COLUMN)
    timeouts = pg.log_file.read_text().count("due to lock timeout")
    poster = await asyncpg.connect(empty_dsn)
    async with connection.transaction():
        await connection.fetch("SELECT * FROM thing")
        running = asyncio.create_task(migrate(empty_dsn, folder=folder))
        while pg.log_file.read_text().count("due to lock timeout") < timeouts + 2:
            await asyncio.wait_for(poster.execute("INSERT INTO thing (id) VALUES (1)"), 20)
        assert not running.done()
    assert await asyncio.wait_for(running, 20) == ["0002_extra.sql"]
    assert await connection.fetchval("SELECT count(extra) FROM thing") == 0
    await poster.close()


async def test_a_table_that_stays_held_is_an_error_that_changed_nothing(empty_dsn, folder, connection):
    await migrate(empty_dsn, folder=folder)
    (folder / "0002_extra.sql").write_text("CREATE TABLE before (id int);\n" + COLUMN)
    async with connection.transaction():
        await connection.fetch("SELECT * FROM thing")
        with pytest.raises(MigrationError, match=r"^0002_extra\.sql: a long transaction"):
            await migrate(empty_dsn, folder=folder, wait=0.1)
    assert await connection.fetchval("SELECT to_regclass('before')") is None
    assert await pending(empty_dsn, folder) == ["0002_extra.sql"]


VALID = "SELECT indisvalid FROM pg_index WHERE indexrelid = $1::regclass"


async def test_an_index_left_invalid_is_rebuilt_and_a_customers_own_is_not_touched(empty_dsn, folder, connection):
    """Case 096: IF NOT EXISTS alone would keep the invalid one for ever."""
    await migrate(empty_dsn, folder=folder)
    (folder / "0002_index.sql").write_text(INDEX + "-- unlike theirs\n")
    await connection.execute("CREATE TABLE customer (id int); INSERT INTO customer VALUES (1), (1)")
    with pytest.raises(asyncpg.UniqueViolationError):
        await connection.execute("CREATE UNIQUE INDEX CONCURRENTLY theirs ON customer (id)")
    writer = await asyncpg.connect(empty_dsn)
    async with writer.transaction():
        await writer.execute("INSERT INTO thing VALUES (1)")
        with pytest.raises(MigrationError, match=r"^0002_index\.sql: a long transaction"):
            await migrate(empty_dsn, folder=folder, wait=0.2)
    await writer.close()
    assert await connection.fetchval(VALID, "thing_id_key") is False
    assert await migrate(empty_dsn, folder=folder) == ["0002_index.sql"]
    assert await connection.fetchval(VALID, "thing_id_key") is True
    assert await connection.fetchval(VALID, "theirs") is False


async def test_a_failing_file_is_rolled_back_whole_and_named_in_one_line(empty_dsn, folder, connection):
    (folder / "0002_wrong.sql").write_text("CREATE TABLE half (id int);\nSELECT nonsense;\n")
    with pytest.raises(MigrationError, match=r"^0002_wrong\.sql: column \"nonsense\" does not exist$"):
        await migrate(empty_dsn, folder=folder)
    assert await connection.fetchval("SELECT to_regclass('half')") is None
    assert await pending(empty_dsn, folder) == ["0002_wrong.sql"]


async def test_functions_pin_the_schema_that_the_connection_chose(empty_dsn, folder, connection):
    (folder / "0002_function.sql").write_text(
        "CREATE FUNCTION things() RETURNS bigint LANGUAGE sql SET search_path FROM CURRENT "
        "AS 'SELECT count(*) FROM thing';\n"
    )
    await connection.execute('CREATE SCHEMA "Odd, Name"; CREATE TABLE public.thing (id int)')
    await migrate(empty_dsn + "&search_path=%22Odd, Name%22,public", folder=folder)
    assert await connection.fetchval('SELECT "Odd, Name".things()') == 0
    assert await connection.fetchval("SELECT proconfig FROM pg_proc WHERE proname = 'things'") == [
        'search_path="Odd, Name", pg_temp'
    ]
    assert await pending(empty_dsn, folder) == ["0001_thing.sql", "0002_function.sql"], "another schema, another state"


# Who may migrate


@pytest.fixture
async def stranger(empty_dsn):
    """The URL by which a role logs in that owns nothing."""
    async with made(empty_dsn, "stranger") as dsns:
        yield dsns["stranger"]


def refused_to(stranger: str, before: str = "") -> str:
    """What whoever does not own the tables reads in one line, as a pattern."""
    name = role_of(stranger)
    told = (
        f"{name} does not own the tables here, postgres does: migrate as postgres, who can also give {name} its rights"
    )
    return f"^{re.escape(f'{before}{told} (migrate --grant)')}$"


async def test_whoever_does_not_own_the_tables_is_told_who_does_and_nothing_is_done(
    empty_dsn, folder, connection, stranger
):
    await migrate(empty_dsn, folder=folder)
    denied = "migrate: permission denied for table schema_migration: "
    for run in (migrate(stranger, folder=folder), pending(stranger, folder)):
        with pytest.raises(MigrationError, match=refused_to(stranger, denied)):
            await run
    await connection.execute(f"GRANT ALL ON schema_migration TO {role_of(stranger)}")
    await connection.execute(f"GRANT CREATE ON SCHEMA public TO {role_of(stranger)}")
    (folder / "0002_more.sql").write_text("CREATE TABLE more (id int);\n")  # which it might make, and would own
    with pytest.raises(MigrationError, match=refused_to(stranger, "0002_more.sql was not run: ")):
        await migrate(stranger, folder=folder)
    assert await connection.fetchval("SELECT to_regclass('more')") is None
    assert await pending(stranger, folder) == ["0002_more.sql"]


async def test_whoever_does_not_own_the_tables_may_migrate_where_nothing_is_missing(
    empty_dsn, folder, connection, stranger
):
    await migrate(empty_dsn, folder=folder)
    await connection.execute(f"GRANT SELECT ON schema_migration TO {role_of(stranger)}")
    assert await migrate(stranger, folder=folder) == []


async def test_a_member_of_the_owner_migrates_as_the_owner_does(empty_dsn, folder, connection, stranger):
    async with made(empty_dsn, "owner") as dsns:
        await connection.execute(f"GRANT CREATE ON SCHEMA public TO {role_of(dsns['owner'])}, {role_of(stranger)}")
        await migrate(dsns["owner"], folder=folder)
        (folder / "0002_extra.sql").write_text(COLUMN)
        with pytest.raises(MigrationError, match=rf"{role_of(dsns['owner'])} does: migrate as "):
            await migrate(stranger, folder=folder)
        await connection.execute(f"GRANT {role_of(dsns['owner'])} TO {role_of(stranger)}")
        assert await migrate(stranger, folder=folder) == ["0002_extra.sql"]


async def test_the_name_of_an_installation_is_its_owners(empty_dsn, tmp_path, stranger):
    (tmp_path / "0001_installation.sql").write_text(INSTALLATION + "GRANT SELECT ON schema_migration TO PUBLIC;\n")
    await migrate(empty_dsn, folder=tmp_path)
    denied = "migrate: permission denied for table installation: "
    with pytest.raises(MigrationError, match=refused_to(stranger, denied)):
        await migrate(stranger, folder=tmp_path, namespace="mine")


async def test_whoever_may_not_create_the_first_table_is_told_what_to_grant(folder, stranger):
    name = role_of(stranger)
    expected = f"^migrate: permission denied for schema public: GRANT CREATE ON SCHEMA public TO {name} first, or"
    with pytest.raises(MigrationError, match=expected):
        await migrate(stranger, folder=folder)


async def test_whoever_may_not_use_the_schema_is_told_so(connection, folder, stranger):
    await connection.execute("CREATE SCHEMA mail")
    with pytest.raises(MigrationError, match="search_path names no schema that exists and that this role may use"):
        await migrate(stranger + "&search_path=mail", folder=folder)


def test_a_file_without_a_statement_is_refused(tmp_path):
    (tmp_path / "0001_thing.sql").write_text("-- nothing\n")
    with pytest.raises(MigrationError, match="0001_thing.sql: holds no statement"):
        load(tmp_path)


async def test_a_connection_without_a_schema_is_told_so(empty_dsn, folder):
    with pytest.raises(MigrationError, match="search_path names no schema"):
        await migrate(empty_dsn + "&search_path=nowhere", folder=folder)


async def test_the_namespace_is_set_until_the_first_send(empty_dsn, tmp_path, connection):
    (tmp_path / "0001_installation.sql").write_text(INSTALLATION)
    for namespace in ("first", "second"):
        await migrate(empty_dsn, folder=tmp_path, namespace=namespace)
        assert await connection.fetchval("SELECT namespace FROM installation") == namespace
    await connection.execute("INSERT INTO send_log VALUES ('k')")
    await migrate(empty_dsn, folder=tmp_path)
    await migrate(empty_dsn, folder=tmp_path, namespace="second")
    with pytest.raises(MigrationError, match="can't become 'third'"):
        await migrate(empty_dsn, folder=tmp_path, namespace="third")
    assert await connection.fetchval("SELECT namespace FROM installation") == "second"


async def test_a_database_that_is_not_there_is_one_line(pg: EmbeddedPostgres, folder, unused_tcp_port):
    with pytest.raises(DatabaseUnavailable, match='"absent" does not exist; check the name'):
        await migrate(pg.dsn("absent"), folder=folder)
    with pytest.raises(DatabaseUnavailable, match=f"127.0.0.1:{unused_tcp_port} can't be used: .*Connect call failed"):
        await pending(f"postgresql://app:s3cret@127.0.0.1:{unused_tcp_port}/mail", folder)


async def test_a_folder_without_migrations_is_an_incomplete_installation(empty_dsn, tmp_path):
    with pytest.raises(MigrationError, match="holds no migrations"):
        await migrate(empty_dsn, folder=tmp_path)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed"), "nothing listens there: is PostgreSQL run"),
        (OSError(f"Multiple exceptions: [Errno {errno.ECONNREFUSED}] a, [Errno {errno.ECONNREFUSED}] b"), "nothing"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), "nothing listens there: is PostgreSQL running"),
        (socket.gaierror(-2, "Name or service not known"), "no host has that name: check the host in database.url"),
        (TimeoutError(), "is it the right host and port in database.url, and does a firewall let us through?"),
        (asyncpg.InvalidPasswordError("password of s3cret"), "check user and password in database.url"),
        (asyncpg.InvalidAuthorizationSpecificationError("no pg_hba.conf entry"), "check user and password in database"),
        (asyncpg.InvalidCatalogNameError('"mail" does not exist'), "check the name in database.url, or create it"),
        (asyncpg.TooManyConnectionsError("sorry"), "raise its max_connections, or lower database.pool_max_size"),
        (asyncpg.CannotConnectNowError("the database system is starting up"), "try again in a moment"),
        (ssl.SSLCertVerificationError("self-signed"), "check sslmode and sslrootcert in database.url"),
        (ConnectionError("PostgreSQL server rejected SSL upgrade"), "check sslmode and sslrootcert in database.url"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_to_do_about_a_database_that_can_t_be_used_is_said_with_the_reason(error, advice):
    text = describe_connection_error("postgresql://app:s3cret@db:5433/mail", error)
    assert text.startswith("the database at db:5433 can't be used: ")
    assert f"; {advice}" in text
    assert "s3cret" not in text


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://app:s3cret@db:5433/mail",
        "postgresql://app:s3cret@db:port/mail",
        "postgresql://app:s3cret/more@db/mail",
        "postgresql://app:12/s3cret@db/mail",
        "postgresql://app:12#s3cret@db/mail",
        "postgresql://app@db/mail?password=s3cret",
        "postgresql://app:s3cret@[db/mail",
        "app:s3cret@db",
    ],
)
@pytest.mark.parametrize("kind", [OSError, ValueError, TimeoutError])
def test_a_connection_error_never_tells_the_password(dsn, kind):
    text = describe_connection_error(dsn, kind(f"no luck with s3cret of {dsn}"))
    assert "s3cret" not in text
    assert "database" in text
    assert "\n" not in text
