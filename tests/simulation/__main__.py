# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: T201 - what it prints is its result
"""Sends many messages through the real ledger, with faults of every kind, and fails where a promise is broken."""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Final

import asyncpg
import structlog
import uvloop

from reconciler.database.postgres import EmbeddedPostgres
from reconciler.errors import DatabaseUnavailable

from . import truth
from .audit import broken, losses
from .life import Life, Progress, connected, parties, prepare
from .report import lines
from .senders import Broken
from .world import World

AUDIT_EVERY: Final = 250
"""Ticks."""

TELL_EVERY: Final = 5.0
"""Seconds."""

QUICKER: Final = (
    "ALTER DATABASE postgres SET synchronous_commit = off",  # a crash of this machine may cost the last second
    "ALTER SYSTEM SET max_wal_size = '4GB'",
    "SELECT pg_reload_conf()",
)


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--sends", type=int, default=1_000_000, metavar="N", help="how many (1,000,000)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="another seed, another world (1)")
    parser.add_argument("--resume", action="store_true", help="go on with the run of the data directory")
    parser.add_argument("--keep", action="store_true", help="keep the database where all went well")
    parser.add_argument(
        "--data-dir", type=Path, default=Path("build/simulation"), metavar="DIR", help="(build/simulation)"
    )
    asked = parser.parse_args()
    if asked.sends < 1:
        parser.error("--sends must be at least 1")
    if asked.resume != (asked.data_dir / "data").exists():
        there = "holds no run to go on with" if asked.resume else "holds a run: --resume goes on with it, or remove it"
        print(f"{asked.data_dir} {there}", file=sys.stderr)
        return 2
    # What is broken on purpose is no news.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        with EmbeddedPostgres(asked.data_dir) as server:
            status = uvloop.run(lived(server, asked))
    except DatabaseUnavailable as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        where = f" --data-dir {asked.data_dir}"
        print(f"\ninterrupted; go on with: python -m tests.simulation --resume{where}", file=sys.stderr)
        return 130
    if status == 0 and not asked.keep:
        shutil.rmtree(asked.data_dir)
    elif status:
        print(f"the database is kept: RECONCILER_DATABASE__DATA_DIR={asked.data_dir} reconciler why KEY")
    return status


async def lived(server: EmbeddedPostgres, asked: argparse.Namespace) -> int:
    """Live a run to its end, or to the first broken promise; return the exit status."""
    if not asked.resume:
        async with connected(server.dsn()) as connection:
            for statement in QUICKER:
                await connection.execute(statement)
        await prepare(server.dsn(), asked.sends, asked.seed)
    async with connected(server.dsn()) as connection:
        try:
            run = await truth.read_run(connection)
        except asyncpg.UndefinedTableError:
            print(f"{asked.data_dir} holds a run that had not begun: remove it", file=sys.stderr)
            return 2
        world = World(run["sends"], run["seed"])
        print(f"{world.sends:,} sends, seed {world.seed}, from tick {run['tick']:,}", flush=True)
        found, over = await _live(server.dsn(), world, connection)
        lost = await losses(connection) if over else None
        print(*await lines(connection, world, lost), *found, sep="\n")
        print(f"{len(found)} promises broken (seed {world.seed})")
    return int(bool(found))


async def _live(dsn: str, world: World, connection: Any) -> tuple[list[str], bool]:
    """Return the broken promises, and whether the run came to its end."""
    over = False
    async with parties(dsn, world) as life:
        tell = Teller(life)
        while not over:
            try:
                over = await life.run(AUDIT_EVERY, tell)
            except Broken as promise:
                return [f"BROKEN: {promise}"], False
            begun = time.monotonic()
            if found := await broken(connection, over=over):
                return found, over
            print(f"all promises kept so far (looked for {time.monotonic() - begun:.0f} s)", flush=True)
    return [], True


class Teller:
    """Prints how far a run is, every few seconds."""

    def __init__(self, life: Life) -> None:
        self._minutes, self._sends = life.world.minutes, life.world.sends
        self._begun = self._told = time.monotonic()
        self._first: Progress | None = None

    def __call__(self, progress: Progress) -> None:
        """Note a tick, and print a line now and then."""
        self._first = self._first or progress
        now = time.monotonic()
        if now - self._told < TELL_EVERY:
            return
        self._told = now
        speed = (progress.sends - self._first.sends) / (now - self._begun)
        more = f", {speed:,.0f} sends/s" if progress.tick < self._minutes else ", nothing more is sent"
        print(f"  {progress.at:%d %b %H:%M}: {progress.sends:,} of {self._sends:,} sends{more}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
