# SPDX-License-Identifier: Apache-2.0
"""A PostgreSQL of the test session's own, and for each test that asks a fresh, migrated database in it.

Session fixtures do their asynchronous work with ``asyncio.run``: each test has an event loop of its own, and nothing
of asyncpg may outlive the loop it was made on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import suppress
from pathlib import Path

import asyncpg
import pytest
import structlog
from aws_server import aws, moto_url  # noqa: F401 - fixtures
from hypothesis import HealthCheck, Phase, settings
from places import PREFIX, parent_folder
from program import config, logs_as_before, program  # noqa: F401 - fixtures

from reconciler.database.binaries import accounts
from reconciler.database.migrate import migrate
from reconciler.database.postgres import EmbeddedPostgres
from webhooks.inbox import Inbox

TEMPLATE = "template_of_tests"

# An example has no deadline: how long it takes says how busy the machine is.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "mutants", settings.get_profile("tests"), max_examples=1000, phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("tests")


def _sweep(parent: Path) -> None:
    """Stop and remove what a killed test session left behind; a living one is younger or holds its lock."""
    for root in parent.glob(f"{PREFIX}*"):
        with suppress(FileNotFoundError):
            found = root.stat()
            old = found.st_uid == os.getuid() and found.st_mtime < time.time() - 300
            if old and EmbeddedPostgres(root).stop():
                shutil.rmtree(root, ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:  # noqa: F811 - not the fixture
    """A process for each core, eight at most, for the whole suite; what was picked runs in this one, for debuggers.

    Each has a PostgreSQL of its own. `-n 0` and `-n 4` say otherwise.
    """
    picked = config.option.keyword or config.getoption("lf", default=False)
    whole = all(Path(__file__).is_relative_to(Path(arg).resolve()) for arg in config.args)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 8) if whole and not picked else 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Spells out what no UTF-8 can hold, such as half an emoji in a captured log: a worker could not send it."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture(autouse=True)
def logs_as_found() -> Iterator[None]:
    """Undo what a test, or the program that it ran, did to the logging of this process."""
    yield
    structlog.reset_defaults()
    logging.getLogger("aiohttp.server").filters.clear()


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tests have their data folders."""
    return tmp_path_factory.mktemp("homes")


@pytest.fixture(autouse=True)
def home_of_its_own(homes: Path) -> Iterator[None]:
    """A data folder of the test's own, made when it is first written to.

    The databases of a session are copies of one, so that they are one installation: the heartbeat that a daemon kept of
    one test's would make those of later tests look restored from a backup.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_DATA_HOME", str(homes / uuid.uuid4().hex[:16]))
        yield


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Lets programs that the test starts hear Ctrl-C and hang-ups, even where pytest ignores them (nohup, `&`)."""
    ctrl_c = signal.signal(signal.SIGINT, signal.default_int_handler)
    closed = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, ctrl_c)
    signal.signal(signal.SIGHUP, closed)


UTC_EVERYWHERE = ("ALTER SYSTEM SET timezone = 'UTC'", "SELECT pg_reload_conf()")
"""Where a server has the zone of its machine, a day that a test goes back may have 23 hours."""


@pytest.fixture(scope="session")
def pg() -> Iterator[EmbeddedPostgres]:
    """The session's server; `pg.log_file` is its log."""
    parent = parent_folder()
    _sweep(parent)
    root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    server = EmbeddedPostgres(root, fast=True)
    server.start()
    for statement in UTC_EVERYWHERE:
        asyncio.run(_execute(server.dsn(), statement))
    yield server
    server.stop()
    shutil.rmtree(root, ignore_errors=True)


async def _execute(dsn: str, statement: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


@pytest.fixture(scope="session")
def template(pg: EmbeddedPostgres) -> str:
    """The name of a database that holds the real migrations and no rows."""
    asyncio.run(_execute(pg.dsn(), f"CREATE DATABASE {TEMPLATE}"))
    asyncio.run(migrate(pg.dsn(TEMPLATE)))
    return TEMPLATE


@pytest.fixture
async def empty_dsn(pg: EmbeddedPostgres) -> AsyncIterator[str]:
    """The URL of a fresh database without any migration."""
    name = f"t_{uuid.uuid4().hex[:16]}"
    await _execute(pg.dsn(), f"CREATE DATABASE {name}")
    yield pg.dsn(name)
    await _execute(pg.dsn(), f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
async def dsn(pg: EmbeddedPostgres, template: str) -> AsyncIterator[str]:
    """The URL of a fresh, migrated database; the same one that `db` is a pool of."""
    name = f"t_{uuid.uuid4().hex[:16]}"
    await _execute(pg.dsn(), f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY file_copy")
    yield pg.dsn(name)
    await _execute(pg.dsn(), f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
async def db(dsn: str) -> AsyncIterator[asyncpg.Pool]:
    """A pool on a fresh, migrated database."""
    pool = await asyncpg.create_pool(dsn, min_size=1, max_size=10)
    yield pool
    await asyncio.wait_for(pool.close(), 10)


@pytest.fixture
async def inbox(db: asyncpg.Pool) -> AsyncIterator[Inbox]:
    """An open inbox."""
    box = Inbox()
    await box.open(db)
    yield box
    await box.close()


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder for sockets."""
    with tempfile.TemporaryDirectory(prefix="cut-") as directory:  # tmp_path may be too long for a socket
        yield Path(directory)


POOLER = """
[databases]
* = host={server} user=postgres
[pgbouncer]
pool_mode = transaction
default_pool_size = 2
auth_type = any
unix_socket_dir = {directory}
listen_port = 6432
"""


@pytest.fixture
async def pooler(pg: EmbeddedPostgres, dsn: str, tmp_path: Path) -> AsyncIterator[str]:
    """The URL of the same database as `dsn`, through a PgBouncer in transaction mode; skips where there is none."""
    pgbouncer = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if pgbouncer is None:
        pytest.skip("pgbouncer is not installed")
    directory = Path(tempfile.mkdtemp(prefix="pooler-"))  # tmp_path may be too long for a socket
    settings = tmp_path / "pgbouncer.ini"
    settings.write_text(POOLER.format(server=pg.root / "sock", directory=directory))
    account = next(accounts(pg.root, pg.data))
    through = f"{dsn.partition('?')[0]}?host={directory}&port=6432"
    process = await asyncio.create_subprocess_exec(
        *account.prefix, pgbouncer, str(settings), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(10):
            while not (directory / ".s.PGSQL.6432").exists():
                assert process.returncode is None, "pgbouncer ended"
                await asyncio.sleep(0.02)
        yield through
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        shutil.rmtree(directory, ignore_errors=True)
