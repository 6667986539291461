# SPDX-License-Identifier: Apache-2.0
"""Where tests keep their clusters, and how these die."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

from reconciler.database.postgres import EmbeddedPostgres

PREFIX = "esp-reconciler-tests-"

ROOM = 2 * 1024**3
"""Bytes: a session of eight processes, each with a cluster and the databases of a few tests."""


def parent_folder() -> Path:
    """A folder in memory where there is room: a database there is about eight times as quick to copy.

    Containers are given 64 MB by default, less than one cluster.
    """
    memory = Path("/dev/shm")  # noqa: S108 - shared memory is meant
    roomy = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free >= ROOM
    return memory if roomy else Path(tempfile.gettempdir())


def let_die(server: EmbeddedPostgres) -> None:
    """Let a server die without a word, and wait until none of its processes is left."""
    os.kill(int((server.data / "postmaster.pid").read_text().split()[0]), signal.SIGQUIT)
    while (free := server._no_server()) is None:
        time.sleep(0.01)
    os.close(free)
