# SPDX-License-Identifier: Apache-2.0
"""Runs a program under another user number: ``python userns.py NUMBER PROGRAM ARGUMENT...`` (Linux).

PostgreSQL refuses to run as root, and its initdb refuses an account without an entry in /etc/passwd. In a user
namespace that maps our account to another number it sees that number, while every file stays ours: no new account, no
chmod. This is a script of its own because unshare(2) needs a process without threads.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Final

CLONE_NEWUSER: Final = 0x1000_0000


def main(number: int, command: list[str]) -> None:
    """Enter a namespace where we are `number` and become `command`. Raises OSError where the system forbids it."""
    uid, gid = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER):
        raise OSError(ctypes.get_errno(), "user namespaces are not allowed here")
    Path("/proc/self/setgroups").write_text("deny")  # the kernel's condition for a gid_map without privileges
    Path("/proc/self/uid_map").write_text(f"{number} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{number} {gid} 1")
    os.execv(command[0], command)  # noqa: S606 - to run it is the purpose


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), sys.argv[2:])
    except OSError as error:
        sys.exit(f"userns: {error}")
