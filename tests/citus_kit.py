# SPDX-License-Identifier: Apache-2.0
"""A coordinator and two workers of Citus, for tests that need them; the folder of binaries is named from outside."""

from __future__ import annotations

import asyncio
import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import UUID

import asyncpg
from places import PREFIX, parent_folder

import reconciler
import webhooks
from reconciler.database.postgres import PORT, EmbeddedPostgres
from reconciler.distributed import statements as distributed

SETTINGS = {
    "shared_preload_libraries": "citus",
    "wal_level": "logical",
    "max_connections": "200",
    "synchronous_commit": "on",  # one of them is killed
}


def binaries() -> Path | None:
    """The folder of a PostgreSQL that has Citus: what RECONCILER_CITUS_BIN names, or that of pg_config on the PATH."""
    if named := os.environ.get("RECONCILER_CITUS_BIN"):
        return Path(named)
    if program := shutil.which("pg_config"):
        done = subprocess.run([program, "--bindir", "--pkglibdir"], capture_output=True, text=True, check=False)
        folder, _, libraries = done.stdout.strip().partition("\n")
        if folder and (Path(libraries) / "citus.so").exists():
            return Path(folder)
    return None


async def execute(dsn: str, *statements: str) -> None:
    """Run statements, each by itself, on a connection of their own."""
    connection = await asyncpg.connect(dsn)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


class Cluster:
    """The servers, which reach each other over their sockets."""

    def __init__(self, servers: list[EmbeddedPostgres]) -> None:
        self.servers = servers
        self.coordinator, *self.workers = servers

    async def make(self, name: str, *, extension: bool = True, workers: bool = True) -> str:
        """Create a database on each, of which the coordinator knows the workers; return the coordinator's URL."""
        async with asyncio.TaskGroup() as group:
            for server in self.servers:
                group.create_task(execute(server.dsn(), f"CREATE DATABASE {name}"))
        if extension:
            for server in self.servers:
                await execute(server.dsn(name), "CREATE EXTENSION citus")
        if extension and workers:
            await self.join(name)
        return self.coordinator.dsn(name)

    async def join(self, name: str) -> None:
        """Make the workers known to the coordinator of a database."""
        known = [f"SELECT citus_add_node('{server.root / 'sock'}', {PORT})" for server in self.workers]
        coordinator = f"SELECT citus_set_coordinator_host('{self.coordinator.root / 'sock'}', {PORT})"
        await execute(self.coordinator.dsn(name), coordinator, *known)


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Run a coordinator and two workers with the binaries of a folder."""
    servers = [
        EmbeddedPostgres(Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent_folder())), fast=True) for _ in range(3)
    ]
    try:
        with mock.patch.dict(os.environ, RECONCILER_PG_BIN=str(folder)):
            for server in servers:
                server._settings |= SETTINGS
                server.start()
        yield Cluster(servers)
    finally:
        for server in servers:
            server.stop()
            shutil.rmtree(server.root, ignore_errors=True)


STATEMENT = re.compile(r"\s*(WITH|SELECT|INSERT|UPDATE|DELETE)\b")
WITHOUT = re.compile(r"__main__|\.(demo|trial|breakable)\b")


def statements() -> Iterator[tuple[str, str]]:
    """All statements that stand as constants in the program, by module and name; each once."""
    seen = set()
    for package in (reconciler, webhooks):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if WITHOUT.search(found.name):
                continue
            for name, value in vars(importlib.import_module(found.name)).items():
                each = {name: value} if isinstance(value, str) else value if isinstance(value, dict) else {}
                for key, text in each.items():
                    if name.isupper() and isinstance(text, str) and STATEMENT.match(text) and text not in seen:
                        seen.add(text)
                        yield f"{found.name}.{name}" + ("" if key == name else f"[{key[:20]}]"), text


MADE_UP: dict[str, Any] = {
    "text": "k1",
    "int4": 1,
    "int8": 1,
    "float8": 0.5,
    "bool": True,
    "timestamptz": datetime(2026, 11, 20, tzinfo=UTC),
    "interval": timedelta(minutes=1),
    "jsonb": "{}",
    "json": "{}",
    "uuid": UUID(int=1),
    "bytea": b"x",
    "date": date(2026, 11, 1),
}


async def complaint(pool: asyncpg.Pool, statement: str) -> str | None:
    """What the database says against a statement, with made up arguments; what it did is rolled back."""
    async with pool.acquire() as connection:
        transaction = connection.transaction()
        await transaction.start()
        try:
            prepared = await connection.prepare(
                distributed.form(statement) if _is_distributed(connection) else statement
            )
            await prepared.fetch(*[_argument(kind.name) for kind in prepared.get_parameters()])
        except asyncpg.PostgresError as error:
            return str(error)
        finally:
            await transaction.rollback()
    return None


def _is_distributed(connection: Any) -> bool:
    return isinstance(connection._con, distributed.DistributedConnection)


def _argument(kind: str) -> Any:
    return [MADE_UP.get(kind[:-2])] * 2 if kind.endswith("[]") else MADE_UP.get(kind)
