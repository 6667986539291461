# SPDX-License-Identifier: Apache-2.0
"""The embedded PostgreSQL: a server of our own in a directory, for whoever has no `database.url`.

It uses nothing but a directory of PostgreSQL binaries. Two files are locked with flock(2), because the kernel gives
those locks back however a process ends: `users.lock` is shared by every program that uses the server, and `server.lock`
is inherited by the server's own processes, so that it is free exactly when none of them is left.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import signal
import socket
import struct
import time
from pathlib import Path
from typing import Final, Self
from urllib.parse import quote

from reconciler.database.binaries import Account, choose_account, complaint_of, find_binaries, locales_of
from reconciler.errors import DatabaseUnavailable

PORT: Final = 5432
"""Names the socket file only: the server listens on no network address."""

MAX_SOCKET_PATH: Final = 103
"""Bytes a socket's path may have: sun_path holds 104 with its zero byte on macOS, 108 on Linux."""

START_TIMEOUT: Final = 300
"""Seconds a start may take, crash recovery included."""

STOPS: Final = ((signal.SIGINT, 60.0), (signal.SIGQUIT, 10.0))
"""How to ask the server to stop, and the seconds it gets: a fast shutdown, then one that recovers at the next start."""

SSL_REQUEST: Final = struct.pack("!ii", 8, 80877103)
"""What the protocol answers with one byte before any authentication: a server that is being killed does not."""

DURABLE: Final = {
    "listen_addresses": "",
    "port": str(PORT),
    "unix_socket_permissions": "0700",
    "max_connections": "100",
}
FAST: Final = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "shared_buffers": "64MB",
    "autovacuum": "off",
}


class EmbeddedPostgres:
    """A PostgreSQL server in `root`, shared by all programs that name the same directory.

    The first `start` creates and starts it, the last `stop` stops it; the data stay. `fast` gives up durability, for
    tests. Only the account that owns `root` can connect: a socket in a private directory, no network port.
    """

    def __init__(self, root: Path, *, fast: bool = False) -> None:
        self.root = root.resolve()
        self.data = self.root / "data"
        self.log_file = self.root / "postgres.log"
        self._settings = DURABLE | FAST if fast else DURABLE
        self._socket_dir = _socket_dir(self.root)
        self._users: int | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def dsn(self, database: str = "postgres") -> str:
        """The URL of a database of this server, whether it runs or not."""
        return f"postgresql://postgres@/{quote(database, safe='')}?host={self._socket_dir}&port={PORT}"

    def start(self) -> str:
        """Start the server, or join the running one, and return the URL of its database `postgres`.

        May be called again at any time, for instance to revive a server that was killed. Raises DatabaseUnavailable.
        """
        try:
            self._join()
        except BaseException as error:
            self._leave()
            if isinstance(error, OSError):
                raise DatabaseUnavailable(_unusable(self.root, error.strerror or str(error))) from error
            raise
        return self.dsn()

    def stop(self) -> bool:
        """Stop using the server; the last user shuts it down. True if it does not run any more."""
        if not self.root.is_dir():
            return True
        if self._users is None:
            self._users = _open(self.root / "users.lock")
        try:  # whoever starts meanwhile waits for this lock, or holds it and is the last one out himself
            return _try_lock(self._users) and self._shut_down()
        finally:
            self._leave()

    def remove(self) -> bool:
        """Stop using the server and remove it with its data, unless another program uses it. True if it is gone."""
        if not self.stop():
            return False
        shutil.rmtree(self._socket_dir, ignore_errors=True)
        shutil.rmtree(self.root, ignore_errors=True)
        return not self.root.exists()

    def _join(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._users is None:
            self._users = _open(self.root / "users.lock")
            fcntl.flock(self._users, fcntl.LOCK_SH)
        end = time.monotonic() + START_TIMEOUT
        while not self._ready():
            if (free := self._no_server()) is not None:
                self._launch(free)
            elif time.monotonic() > end:
                raise DatabaseUnavailable(
                    f"the embedded PostgreSQL in {self.root} runs but does not answer on {self._socket_dir}; "
                    f"see {self.log_file}"
                )
            else:
                time.sleep(0.05)

    def _leave(self) -> None:
        if self._users is not None:
            os.close(self._users)
            self._users = None

    def _no_server(self) -> int | None:
        """The lock on `server.lock`, a descriptor to close, unless a process of the server still lives."""
        descriptor = _open(self.root / "server.lock")
        if _try_lock(descriptor):
            return descriptor
        os.close(descriptor)
        return None

    def _launch(self, server_lock: int) -> None:
        """Create the cluster if there is none and start the server, which inherits `server_lock`."""
        try:
            binaries = find_binaries()
            account, version = choose_account(binaries, self.root, self.data)
            self._check_data(account, version)
            self._prepare(account)
            if not self.data.exists():
                self._create(binaries, account, version, server_lock)
            if self._postmaster() is None:  # the pid in these is dead, not yet reaped, or by now another program's
                (self.data / "postmaster.pid").unlink(missing_ok=True)
                (self._socket_dir / f".s.PGSQL.{PORT}.lock").unlink(missing_ok=True)
            self._start_server(binaries, account, server_lock)
        finally:
            os.close(server_lock)

    def _check_data(self, account: Account, version: int) -> None:
        """Refuse data that the server would refuse, and a directory `data` that is not ours at all."""
        if not self.data.exists():
            return
        if (owner := self.data.stat().st_uid) != account.uid:
            raise DatabaseUnavailable(_unusable(self.root, f"its data belong to uid {owner}, we are uid {account.uid}"))
        try:
            written_by = int((self.data / "PG_VERSION").read_text())
        except (FileNotFoundError, ValueError):
            raise DatabaseUnavailable(_unusable(self.root, "its folder `data` holds no PostgreSQL data")) from None
        if written_by != version:
            raise DatabaseUnavailable(
                f"{self.data} was written by PostgreSQL {written_by} and the binaries here are PostgreSQL {version}: "
                f"set RECONCILER_PG_BIN to the bin directory of a PostgreSQL {written_by}"
            )

    def _prepare(self, account: Account) -> None:
        """Make what the server can't make for itself where another account owns `root`."""
        self._socket_dir.mkdir(exist_ok=True, mode=0o700)
        os.close(os.open(self.log_file, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
        account.take(self.root, self._socket_dir, self.log_file)
        found = self._socket_dir.lstat()
        if found.st_uid != account.uid or found.st_mode & 0o077:
            raise DatabaseUnavailable(
                f"{self._socket_dir} must be a directory that only uid {account.uid} can enter: remove it"
            )

    def _create(self, binaries: Path, account: Account, version: int, server_lock: int) -> None:
        """Run initdb beside the final place, so that one that died half-way never counts as a cluster."""
        unfinished = self.root / "data.unfinished"
        command = [str(binaries / "initdb"), "-D", str(unfinished), "-U", "postgres", "--auth=trust", "--encoding=UTF8"]
        for locale in locales_of(version):
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(mode=0o700)
            account.take(unfinished)
            done = account.run([*command, *locale], keep=[server_lock])
            if not done.returncode:
                break
        else:
            raise DatabaseUnavailable(_unusable(self.root, f"initdb failed, {complaint_of(done.stderr)}"))
        unfinished.rename(self.data)
        _sync(self.root)

    def _start_server(self, binaries: Path, account: Account, server_lock: int) -> None:
        settings = self._settings | {"unix_socket_directories": str(self._socket_dir)}
        options = shlex.join(word for name, value in settings.items() for word in ("-c", f"{name}={value}"))
        log_size = self.log_file.stat().st_size
        command = [str(binaries / "pg_ctl"), "-D", str(self.data), "-w", "-t", str(START_TIMEOUT)]
        done = account.run([*command, "-l", str(self.log_file), "-o", options, "start"], keep=[server_lock])
        if done.returncode:
            log = self.log_file.read_bytes()[log_size:].decode(errors="replace")
            raise DatabaseUnavailable(
                f"the embedded PostgreSQL did not start: {complaint_of(done.stderr + log)}; see {self.log_file}"
            )

    def _ready(self) -> bool:
        """Whether the server takes connections: not starting, not stopping, not merely a file that says so."""
        try:
            status = (self.data / "postmaster.pid").read_text().splitlines()[7].strip()
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(2)
                probe.connect(str(self._socket_dir / f".s.PGSQL.{PORT}"))
                probe.sendall(SSL_REQUEST)
                answered = probe.recv(1) != b""
        except (OSError, IndexError):
            return False
        return answered and status == "ready"

    def _postmaster(self) -> int | None:
        """The pid of the server's first process, if the pid file still speaks of one."""
        try:
            pid = int((self.data / "postmaster.pid").read_text().split()[0])
            os.kill(pid, 0)
            if Path("/proc/self/cwd").exists() and Path(f"/proc/{pid}/cwd").readlink() != self.data:
                return None
        except (OSError, IndexError, ValueError):
            return None
        return pid

    def _shut_down(self) -> bool:
        for how, seconds in STOPS:
            if (pid := self._postmaster()) is not None:
                os.kill(pid, how)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                if (free := self._no_server()) is not None:
                    os.close(free)
                    return True
                time.sleep(0.02)
        return False


def _socket_dir(root: Path) -> Path:
    """A directory whose socket path is short and plain enough for every program; the same from every program."""
    inside = root / "sock"
    if len(os.fsencode(inside / f".s.PGSQL.{PORT}")) <= MAX_SOCKET_PATH and re.fullmatch(
        r"[\w/.+-]+", str(inside), re.ASCII
    ):
        return inside
    name = hashlib.sha256(os.fsencode(root)).hexdigest()[:16]
    return Path("/tmp") / f"esp-reconciler-{name}"  # noqa: S108 - made private, checked to be so


def _unusable(root: Path, reason: str) -> str:
    return (
        f"{root} can't hold the embedded PostgreSQL ({reason}): "
        "set database.data_dir to a directory that this account owns, or set database.url"
    )


def _open(path: Path) -> int:
    """A descriptor to lock. Readable by all, so that root and the owner of the directory can both lock it."""
    return os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sync(directory: Path) -> None:
    """Make a rename inside `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
