# SPDX-License-Identifier: Apache-2.0
"""What all benchmarks stand on: a durable PostgreSQL on the real disk, interleaved rounds, figures for people."""

from __future__ import annotations

import asyncio
import math
import os
import platform
import shutil
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import asyncpg

from reconciler.database.postgres import EmbeddedPostgres

# Checkpoints and vacuums that happen to fall into one side's round must not decide. Durability stays: fsync,
# full_page_writes and synchronous_commit keep their defaults, which `durability` reads back.
# A server of this size is given some memory, which both sides have alike.
SERVER_SETTINGS: Final = (
    "ALTER SYSTEM SET shared_buffers = '2GB'",
    "ALTER SYSTEM SET max_wal_size = '16GB'",
    "ALTER SYSTEM SET checkpoint_timeout = '1h'",
    "ALTER SYSTEM SET autovacuum = off",
)
DURABILITY: Final = """
SELECT string_agg(name || '=' || setting, ' ' ORDER BY name) FROM pg_settings
WHERE name IN ('fsync', 'synchronous_commit', 'full_page_writes')
"""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured: 1.0 is the full size; `rounds` is how often each side runs after the warm-up."""

    size: float
    rounds: int

    def of(self, full: int) -> int:
        """Return a full count at this scale."""
        return max(1, round(full * self.size))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sides measured in turns. Rates are per second: a ratio of 1 means as quick as the limit."""

    name: str
    unit: str
    wanted: float | None
    ours: list[float]
    limit: list[float]
    notes: list[str] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Ours through the limit, round by round."""
        return [ours / limit for ours, limit in zip(self.ours, self.limit, strict=True)]

    @property
    def line(self) -> str:
        """One line for people."""
        wanted = f"  (wanted >= {self.wanted:g})" if self.wanted else ""
        return (
            f"{self.name:<58} {_spread(self.ours, ',.0f')} vs {_spread(self.limit, ',.0f')} {self.unit}"
            f"   ratio {_spread(self.ratios, '.2f')}{wanted}{''.join('; ' + note for note in self.notes)}"
        )

    def record(self) -> dict[str, Any]:
        """The figures for a machine."""
        return asdict(self) | {"ratio": statistics.median(self.ratios)}


@dataclass(frozen=True, slots=True)
class Figure:
    """Something measured on its own."""

    name: str
    value: float
    unit: str
    wanted_at_most: float | None = None
    note: str = ""

    @property
    def line(self) -> str:
        """One line for people."""
        wanted = f"  (wanted <= {self.wanted_at_most:g})" if self.wanted_at_most else ""
        return f"{self.name:<58} {self.value:,.2f} {self.unit}{wanted}{'  ' + self.note if self.note else ''}"

    def record(self) -> dict[str, Any]:
        """The figure for a machine."""
        return asdict(self)


Result = Comparison | Figure
Side = Callable[[], Awaitable[float]]


async def compare(name: str, unit: str, wanted: float | None, ours: Side, limit: Side, rounds: int) -> Comparison:
    """Run both sides in turns, each once as a warm-up that does not count; each returns its rate."""
    await ours()
    await limit()
    pairs = [(await ours(), await limit()) for _ in range(rounds)]
    return Comparison(name, unit, wanted, [pair[0] for pair in pairs], [pair[1] for pair in pairs])


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)  # noqa: T201 - this is the program's output


@contextmanager
def server(folder: str | None) -> Iterator[EmbeddedPostgres]:
    """Give an embedded PostgreSQL with durable settings in a new folder, which is removed in the end."""
    root = Path(tempfile.mkdtemp(prefix="reconciler-bench-", dir=folder))
    try:
        with EmbeddedPostgres(root) as embedded:
            yield embedded
    finally:
        shutil.rmtree(root, ignore_errors=True)


async def settle_server(embedded: EmbeddedPostgres) -> str:
    """Apply SERVER_SETTINGS and return what the server says of itself."""
    async with connected(embedded.dsn()) as connection:
        for statement in SERVER_SETTINGS:
            await connection.execute(statement)
    await asyncio.to_thread(embedded.stop)
    await asyncio.to_thread(embedded.start)
    async with connected(embedded.dsn()) as connection:
        version = await connection.fetchval("SHOW server_version")
        return f"PostgreSQL {version} ({await connection.fetchval(DURABILITY)})"


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    """Give a connection for a while, without a limit of time on its statements."""
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()


COPY_DATABASE: Final = "CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy"
DROP_DATABASE: Final = "DROP DATABASE IF EXISTS {} WITH (FORCE)"


@asynccontextmanager
async def copied_database(embedded: EmbeddedPostgres, name: str, template: str) -> AsyncIterator[str]:
    """Give the DSN of a copy of a database, dropped afterwards. Copying ends in a checkpoint: all start clean."""
    async with connected(embedded.dsn()) as connection:
        await connection.execute(DROP_DATABASE.format(name))
        await connection.execute(COPY_DATABASE.format(name, template))
        try:
            yield embedded.dsn(name)
        finally:
            await connection.execute(DROP_DATABASE.format(name))


def percentile(values: Iterable[float], share: float) -> float:
    """Return what this share of the values does not exceed; of none at all it is not a number."""
    found = sorted(values)
    return found[min(len(found) - 1, int(len(found) * share))] if found else math.nan


def machine() -> str:
    """What the figures were taken on, with the load that others put on it."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{os.cpu_count()} cores, {_processor()}, Python {sys.version.split()[0]}, load average {load}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _spread(values: list[float], form: str) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return "-".join(format(value, form) for value in (low, middle, high))
