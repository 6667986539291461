# SPDX-License-Identifier: Apache-2.0
"""The embedded server's promises (case 101): it starts as anybody, survives kills, is shared, and never eats data."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest
from places import parent_folder

from reconciler.database import binaries, postgres
from reconciler.database.binaries import Account, find_binaries
from reconciler.database.postgres import EmbeddedPostgres
from reconciler.errors import DatabaseUnavailable

PROJECT = Path(__file__).parent.parent
USERNS = PROJECT / "reconciler" / "database" / "userns.py"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play other accounts")

CLIENT = """
import asyncio, sys
from pathlib import Path
import asyncpg
from reconciler.errors import DatabaseUnavailable
from reconciler.database.postgres import EmbeddedPostgres

async def ask(dsn):
    connection = await asyncpg.connect(dsn)
    print(await connection.fetchval("SELECT pg_postmaster_start_time()::text"), flush=True)
    await connection.close()

server = EmbeddedPostgres(Path(sys.argv[1]), fast=True)
try:
    asyncio.run(ask(server.start()))
except DatabaseUnavailable as error:
    sys.exit(f"error: {error}")
sys.stdin.read()
server.stop()
"""
"""Starts or joins the server, prints when it was started, and leaves when its standard input ends."""


def _client(root: Path, *before: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*before, sys.executable, "-c", CLIENT, str(root)],
        cwd=PROJECT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _ask(dsn: str, statement: str) -> object:
    async def run() -> object:
        connection = await asyncpg.connect(dsn)
        try:
            return await connection.fetchval(statement)
        finally:
            await connection.close()

    return asyncio.run(run())


def _postmaster(server: EmbeddedPostgres) -> int:
    return int((server.data / "postmaster.pid").read_text().split()[0])


@pytest.fixture
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="embedded-", dir=parent_folder()))
    yield path / "pg"
    EmbeddedPostgres(path / "pg").stop()
    shutil.rmtree(path)


@pytest.fixture
def server(root: Path) -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(root, fast=True) as started:
        yield started


def test_data_are_kept_and_durable_unless_told_otherwise(root):
    with EmbeddedPostgres(root) as server:
        _ask(server.dsn(), "CREATE TABLE kept AS SELECT 7 AS n")
        assert _ask(server.dsn(), "SHOW fsync") == "on"
        assert _ask(server.dsn(), "SHOW synchronous_commit") == "on"
    assert not (server.data / "postmaster.pid").exists()
    with EmbeddedPostgres(root, fast=True) as server:
        assert _ask(server.dsn(), "SELECT n FROM kept") == 7
        assert _ask(server.dsn(), "SHOW fsync") == "off"


def test_it_is_removed_with_all_that_was_made_for_it_once_nobody_else_uses_it(root):
    server = EmbeddedPostgres(root / ("long-" * 20), fast=True)  # its socket has to be elsewhere
    server.start()
    elsewhere = Path(server.dsn().partition("host=")[2].partition("&")[0])
    other = EmbeddedPostgres(server.root, fast=True)
    other.start()
    assert server.remove() is False
    assert _ask(other.dsn(), "SELECT 7") == 7
    assert other.remove() is True
    assert [place.exists() for place in (server.root, elsewhere)] == [False, False]


def test_it_listens_on_no_network_and_lets_in_nobody_else(server):
    assert _ask(server.dsn(), "SHOW listen_addresses") == ""
    assert _ask(server.dsn(), "SHOW max_connections") == "100"
    assert (server.root / "sock").stat().st_mode & 0o077 == 0
    assert server.data.stat().st_mode & 0o077 == 0


def test_text_is_utf8_and_lower_knows_unicode_under_any_environment(root, monkeypatch):
    for name, value in {"LANG": "xx_YY", "LC_ALL": "xx_YY", "PGPORT": "1", "PGHOST": "nowhere", "PGDATA": "/x"}.items():
        monkeypatch.setenv(name, value)
    with EmbeddedPostgres(root, fast=True) as server:
        assert _ask(server.dsn(), "SHOW server_encoding") == "UTF8"
        assert _ask(server.dsn(), "SELECT lower('BÜCHER')") == "bücher"


def test_a_killed_server_is_revived_with_all_that_was_committed(root):
    with EmbeddedPostgres(root) as server:
        _ask(server.dsn(), "CREATE TABLE kept AS SELECT 7 AS n")
        os.kill(_postmaster(server), signal.SIGKILL)
        server.start()
        assert _ask(server.dsn(), "SELECT n FROM kept") == 7


def test_a_pid_file_whose_pid_is_another_program_by_now_is_stale(root):
    with EmbeddedPostgres(root, fast=True) as server:
        stale = (server.data / "postmaster.pid").read_text()
    (server.data / "postmaster.pid").write_text(stale.replace(stale.split()[0], str(os.getppid()), 1))
    with server:
        assert _ask(server.dsn(), "SELECT 1") == 1
        assert _postmaster(server) != os.getppid()


def test_a_half_way_initdb_never_counts(root):
    unfinished = root / "data.unfinished"
    unfinished.mkdir(parents=True)
    (unfinished / "PG_VERSION").write_text("18")
    with EmbeddedPostgres(root, fast=True) as server:
        assert _ask(server.dsn(), "SELECT 1") == 1
    assert not unfinished.exists()


def test_a_directory_that_is_not_ours_is_never_initialised(root):
    (root / "data").mkdir(parents=True)
    (root / "data" / "thesis.txt").write_text("ten years")
    with pytest.raises(DatabaseUnavailable, match=r"holds no PostgreSQL data.*set database.data_dir"):
        EmbeddedPostgres(root).start()
    assert (root / "data" / "thesis.txt").read_text() == "ten years"


def test_data_of_another_postgresql_are_refused_with_a_way_out(root):
    (root / "data").mkdir(parents=True)
    (root / "data" / "PG_VERSION").write_text("9\n")
    with pytest.raises(DatabaseUnavailable, match=r"written by PostgreSQL 9 .*RECONCILER_PG_BIN"):
        EmbeddedPostgres(root).start()


def test_five_cold_starts_at_once_share_one_server_and_the_last_one_out_stops_it(root):
    clients = [_client(root) for _ in range(5)]
    outputs = [client.communicate(timeout=60) for client in clients]
    assert [client.returncode for client in clients] == [0] * 5, outputs
    assert not (root / "data" / "postmaster.pid").exists()


def test_five_cold_starts_at_once_see_the_same_server(root):
    clients = [_client(root) for _ in range(5)]
    started = {client.stdout.readline() for client in clients}
    assert len(started) == 1
    assert started != {""}
    for client in clients:
        client.communicate(timeout=30)


def test_a_killed_client_does_not_keep_the_server_running(root):
    client = _client(root)
    assert client.stdout.readline()
    client.kill()
    client.communicate()
    server = EmbeddedPostgres(root, fast=True)
    pid = _postmaster(server)
    server.start()
    assert _postmaster(server) == pid, "it was joined, not started again"
    assert server.stop() is True


def test_the_first_one_out_leaves_the_server_to_the_others(server, root):
    other = EmbeddedPostgres(root, fast=True)
    other.start()
    assert other.stop() is False
    assert _ask(server.dsn(), "SELECT 1") == 1


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_in_the_terminal_does_not_stop_the_server_of_the_others(root):
    first = _client(root)
    assert first.stdout.readline()
    with EmbeddedPostgres(root, fast=True) as server:
        os.killpg(first.pid, signal.SIGINT)
        _, complaint = first.communicate(timeout=20)
        assert "KeyboardInterrupt" in complaint
        assert _ask(server.dsn(), "SELECT 1") == 1


def test_a_long_or_odd_path_moves_only_the_socket(root):
    long = root / ("long, 'odd' path " * 6)
    with EmbeddedPostgres(long, fast=True) as server:
        assert _ask(server.dsn(), "SELECT current_setting('data_directory')") == str(long / "data")
    socket_dir = Path(server.dsn().partition("host=")[2].partition("&")[0])
    assert socket_dir.stat().st_mode & 0o077 == 0
    socket_dir.rmdir()


def test_a_socket_directory_that_others_can_enter_is_refused(root, monkeypatch):
    open_dir = root.parent / "open"
    open_dir.mkdir()
    open_dir.chmod(0o755)
    monkeypatch.setattr(postgres, "_socket_dir", lambda _: open_dir)
    with pytest.raises(DatabaseUnavailable, match="only uid"):
        EmbeddedPostgres(root).start()


def test_where_there_is_no_postgresql_the_error_names_the_ways_out(root, monkeypatch):
    monkeypatch.setenv("RECONCILER_PG_BIN", str(root))
    with pytest.raises(DatabaseUnavailable, match="RECONCILER_PG_BIN names"):
        EmbeddedPostgres(root).start()
    monkeypatch.delenv("RECONCILER_PG_BIN")
    monkeypatch.setattr(binaries, "_wheel_binaries", lambda: ())
    monkeypatch.setattr(binaries, "_system_binaries", lambda: ())
    with pytest.raises(DatabaseUnavailable, match="install the extra embedded of esp-reconciler, or set database"):
        EmbeddedPostgres(root).start()


def test_a_named_bin_directory_wins(monkeypatch):
    monkeypatch.delenv("RECONCILER_PG_BIN", raising=False)
    found = find_binaries()
    monkeypatch.setattr(binaries, "_wheel_binaries", lambda: ())
    monkeypatch.setattr(binaries, "_system_binaries", lambda: ())
    monkeypatch.setenv("RECONCILER_PG_BIN", str(found))
    assert find_binaries() == found


def test_a_file_in_the_way_is_one_clear_sentence(root):
    root.write_text("in the way")
    with pytest.raises(DatabaseUnavailable, match=r"File exists.*set database.data_dir"):
        EmbeddedPostgres(root).start()


@as_root
def test_an_account_without_a_passwd_entry_can_run_it(root):
    client = _client(root, sys.executable, str(USERNS), "12345")
    output, complaint = client.communicate(timeout=60)
    assert client.returncode == 0, complaint
    assert output


@as_root
def test_a_directory_of_somebody_else_is_one_clear_sentence(root):
    root.mkdir(mode=0o700)
    os.chown(root, 1234, 1234)
    client = _client(root, sys.executable, str(USERNS), "12345")
    _, complaint = client.communicate(timeout=60)
    assert client.returncode == 1
    assert complaint.startswith(f"error: {root} can't hold the embedded PostgreSQL (Permission denied): set database.")
    assert complaint.count("\n") == 1
    assert list(root.iterdir()) == []


@as_root
def test_data_of_somebody_else_are_one_clear_sentence(root):
    (root / "data").mkdir(parents=True)
    os.chown(root / "data", 1234, 1234)
    client = _client(root, sys.executable, str(USERNS), "12345")
    _, complaint = client.communicate(timeout=60)
    assert client.returncode == 1
    assert "its data belong to uid" in complaint
    assert complaint.count("\n") == 1


@as_root
def test_root_can_use_a_mounted_directory_of_somebody_else(root):
    root.mkdir()
    os.chown(root, 1234, 1234)
    root.parent.chmod(0o755)
    with EmbeddedPostgres(root, fast=True) as server:
        assert _ask(server.dsn(), "SELECT 1") == 1


@as_root
def test_where_nothing_else_is_allowed_root_gives_the_server_to_nobody(root, monkeypatch):
    """Containers often forbid namespaces; the binaries must then be readable by all."""
    dropped = Account(binaries.NOBODY, binaries.NOBODY, drop=True)
    try:
        reachable = dropped.run([str(find_binaries() / "postgres"), "--version"]).returncode == 0
    except PermissionError:
        reachable = False
    if not reachable:
        pytest.skip("the binaries are not reachable by other accounts here")
    root.parent.chmod(0o755)
    monkeypatch.setattr(binaries, "accounts", lambda *_: iter([dropped]))
    with EmbeddedPostgres(root, fast=True) as server:
        assert _ask(server.dsn(), "SELECT 1") == 1
    assert server.data.stat().st_uid == binaries.NOBODY
    monkeypatch.undo()
    with server:
        assert _ask(server.dsn(), "SELECT 1") == 1
        assert server.data.stat().st_uid == binaries.NOBODY, "the owner of the data decides the next time"


@as_root
def test_binaries_that_no_account_may_run_are_one_clear_sentence(root, monkeypatch):
    monkeypatch.setattr(binaries, "accounts", lambda *_: iter([Account(0, 0)]))
    programs = root.parent / "bin"
    programs.mkdir()
    for name in ("initdb", "pg_ctl", "postgres"):
        (programs / name).write_text("#!/bin/sh\necho 'postgres: error: not for you' >&2; exit 1\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("RECONCILER_PG_BIN", str(programs))
    with pytest.raises(
        DatabaseUnavailable, match=r"does not run as uid 0 \(postgres: error: not for you\): run this as"
    ):
        EmbeddedPostgres(root).start()
