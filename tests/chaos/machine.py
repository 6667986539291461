# SPDX-License-Identifier: Apache-2.0
"""What only some machines let a test do: set PostgreSQL's clock, fill its disk, put a pooler before it."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
from contextlib import suppress
from pathlib import Path

from reconciler.database.binaries import accounts, find_binaries

from .processes import PAUSE, Postgres

LIBFAKETIME = "*/faketime/libfaketime.so.1"
"""Below /usr/lib, where Debian's package `libfaketime` has it."""

POSTGRES_SCRIPT = """#!/bin/sh
export LD_PRELOAD={library} FAKETIME_TIMESTAMP_FILE={file} FAKETIME_CACHE_DURATION=1
export FAKETIME_DONT_FAKE_MONOTONIC=1 DONT_FAKE_MONOTONIC=1 FAKETIME_DISABLE_SHM=1
exec {binaries}/postgres "$@"
"""
PG_CTL_SCRIPT = """#!/bin/sh
exec {binaries}/pg_ctl -p {folder}/postgres "$@"
"""


class Clock:
    """PostgreSQL's clock: a PostgreSQL that is started after `install` goes by it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "clock"

    def install(self) -> bool:
        """Make it the embedded PostgreSQL's; False where libfaketime is not installed."""
        library = next(Path("/usr/lib").glob(LIBFAKETIME), None)
        if library is None:
            return False
        binaries = find_binaries()
        words = {"library": library, "file": self._file, "binaries": binaries, "folder": self._folder}
        self._folder.mkdir()
        self.set(0)
        (self._folder / "initdb").symlink_to(binaries / "initdb")
        for name, script in (("postgres", POSTGRES_SCRIPT), ("pg_ctl", PG_CTL_SCRIPT)):
            path = self._folder / name
            path.write_text(script.format(**words))
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        os.environ["RECONCILER_PG_BIN"] = str(self._folder)
        return True

    def set(self, seconds: float) -> None:
        """Let it be so many seconds ahead of the true time, within a second from now."""
        written = self._file.with_suffix(".new")
        written.write_text(f"{seconds:+.1f}\n")
        written.replace(self._file)

    def remove(self) -> None:
        """Let a PostgreSQL that is started from now on go by the true time."""
        os.environ.pop("RECONCILER_PG_BIN", None)


class Disk:
    """A small file system in memory, for root."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        self.folder = folder
        self._megabytes = megabytes
        self._filler = folder / "filler"

    def mount(self) -> bool:
        """Mount it; False where that is not allowed."""
        self.folder.mkdir()
        options = f"size={self._megabytes}m,mode=700"
        command = ["mount", "-t", "tmpfs", "-o", options, "esp-reconciler-chaos", str(self.folder)]
        with suppress(OSError):
            return subprocess.run(command, capture_output=True, check=False).returncode == 0
        return False

    def fill(self) -> None:
        """Leave no byte free."""
        with self._filler.open("wb") as file, suppress(OSError):
            while True:
                file.write(bytes(65_536))
                file.flush()

    def free(self) -> None:
        """Give back what `fill` took."""
        self._filler.unlink(missing_ok=True)

    def unmount(self) -> None:
        """Remove it, and all that is in it."""
        command = ["umount", "-l", str(self.folder)]
        subprocess.run(command, capture_output=True, check=False)


PGBOUNCER = """
[databases]
* = host={server} user=postgres
[pgbouncer]
pool_mode = transaction
default_pool_size = 20
max_client_conn = 200
auth_type = any
server_login_retry = 1
unix_socket_dir = {directory}
listen_port = 6432
"""


class Pooler:
    """A PgBouncer in transaction mode that is started again whenever it is gone."""

    def __init__(self, folder: Path, postgres: Postgres) -> None:
        self.socket = folder / ".s.PGSQL.6432"
        self._folder, self._postgres = folder, postgres
        self._program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        self._process: asyncio.subprocess.Process | None = None

    @property
    def is_installed(self) -> bool:
        """Say whether there is one."""
        return self._program is not None

    async def listens(self) -> bool:
        """Say whether it takes connections."""
        return self.socket.exists()

    async def run(self) -> None:
        """Keep it running, until this is cancelled."""
        self._folder.mkdir(exist_ok=True)
        settings = self._folder / "pgbouncer.ini"
        settings.write_text(PGBOUNCER.format(server=self._postgres.socket.parent, directory=self._folder))
        embedded = self._postgres.embedded
        account = next(accounts(embedded.root, embedded.data))
        try:
            while True:
                self.socket.unlink(missing_ok=True)
                quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                self._process = await asyncio.create_subprocess_exec(
                    *account.prefix, str(self._program), str(settings), **quiet
                )
                await self._process.wait()
                await asyncio.sleep(PAUSE)
        finally:
            self.kill()

    def kill(self) -> None:
        """End it without a word."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
