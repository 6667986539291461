# SPDX-License-Identifier: Apache-2.0
"""Finds a program that a rolling upgrade may come from: an older commit with an older schema of this tree."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from serving import ROOT

PARTS = ("reconciler", "webhooks", "migrations")
NEWEST = 3
"""How many older schemas there are to come from."""


class Older(NamedTuple):
    """A program of an older release."""

    folder: Path
    """What PYTHONPATH has to name."""
    schema: str
    """The number of its last migration."""


def older_program(folder: Path, seed: int) -> Older | None:
    """Unpack one of the newest into the folder, by the seed; None where this tree has no such history.

    An archive of the sources has none.
    """
    found = list(islice(_commits(), NEWEST))
    if not found:
        return None
    commit, schema = found[(seed - 1) % len(found)]
    with tarfile.open(fileobj=io.BytesIO(_git("archive", commit, *PARTS))) as files:
        files.extractall(folder, filter="data")
    return Older(folder, schema)


def _commits() -> Iterator[tuple[str, str]]:
    """Yield the newest commit of each older schema, with the number of its last migration; the newest schema first."""
    newer = {path.name: _git("hash-object", str(path)).decode().strip() for path in (ROOT / "migrations").glob("*.sql")}
    for changed in _git("log", "--format=%H", "--", "migrations").decode().split():
        lines = _git("ls-tree", f"{changed}^:migrations").decode().splitlines()
        entries = (line.partition("\t") for line in lines)
        older = {name: meta.split()[2] for meta, _, name in entries if name.endswith(".sql")}
        if older and older.items() < newer.items():
            yield f"{changed}^", max(older).partition("_")[0]
            newer = older


def _git(*arguments: str) -> bytes:
    """Return what git says; nothing where it refuses, or is not there."""
    try:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, check=False).stdout
    except OSError:
        return b""
