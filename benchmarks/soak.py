# SPDX-License-Identifier: Apache-2.0
"""(i) Ten minutes of posts of all providers into `reconciler serve`, whose passes run: does it grow or slow down?"""

from __future__ import annotations

import asyncio
import itertools
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import asyncpg

from benchmarks.events import empty_database
from benchmarks.payloads import events_of, feeds, key_of, kind_of
from benchmarks.programs import Load, Program, daemon, feed_settings
from benchmarks.stand import Figure, Result, Scale, connected, percentile
from reconciler.database.postgres import EmbeddedPostgres

RATE: Final = 500
"""Posts a second."""

SECONDS: Final = 600
SAMPLES: Final = 120
"""How often memory and descriptors are read: every five seconds of ten minutes."""

PARTS: Final = 10
"""The first and the last of so many parts of the time are compared; memory counts after the first."""

MARK: Final = "i"
CLAIMED: Final = 20
"""One post in so many speaks of a claim; every other one of these is answered as well, and makes a control."""

CLAIM_EVERY: Final = 1.0
AHEAD: Final = 3.0
"""Seconds between a claim and its event."""

SETTINGS: Final = """
[rules]
grace = "20s"
"""

# What nobody speaks of is judged by its silence, again and again.
CLAIM: Final = """
SELECT count(*) FROM unnest($1::text[]) AS k,
    send_claim(k, 'mailgun', '{"submit_within": "5s", "recipient": "ada@example.com"}') AS c
WHERE c.outcome = 'claimed'
"""
CONFIRM: Final = """
SELECT count(*) FROM send_log l, send_confirm(l.send_key, l.fence, l.send_key, '{}') AS c
WHERE l.wire_key = ANY ($1::text[])
"""
EVENTS: Final = "SELECT count(*) FROM provider_event WHERE source = 'http'"
CONNECTIONS: Final = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'reconciler%'
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """What the process held at a time."""

    at: float
    megabytes: float
    descriptors: int
    connections: int
    """To the database."""


async def run(embedded: EmbeddedPostgres, scale: Scale) -> list[Result]:
    """Post at a steady rate, and watch the process."""
    seconds = max(6, scale.of(SECONDS))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = feed_settings(feeds(folder), folder) + SETTINGS
        async with empty_database(embedded) as dsn, daemon(folder, dsn, settings) as program:
            load = await Load.prepared("benchmarks.paced", "mixed", MARK, folder, program.port, RATE * seconds, RATE)
            told, samples = await _watched(dsn, load, program, seconds)
            await _check(dsn, told, RATE * seconds)
    return _figures(told["took"], samples, seconds)


async def _watched(dsn: str, load: Load, program: Program, seconds: int) -> tuple[dict[str, Any], list[Sample]]:
    samples: list[Sample] = []
    async with connected(dsn) as sender, connected(dsn) as onlooker:
        claiming = asyncio.create_task(_claim(sender))
        await asyncio.sleep(AHEAD)
        sampling = asyncio.create_task(_sample(onlooker, program.pid, seconds / SAMPLES, samples))
        told = await load.run()
        for task in (claiming, sampling):
            task.cancel()
        for failure in await asyncio.gather(claiming, sampling, return_exceptions=True):
            if isinstance(failure, BaseException) and not isinstance(failure, asyncio.CancelledError):
                raise failure
    return told, samples


async def _claim(connection: asyncpg.Connection) -> None:
    """Claim what posts will speak of and one send more, at their pace; confirm half of it."""
    begun, step = time.monotonic(), round(RATE * CLAIM_EVERY)
    for first in itertools.count(0, step):
        await asyncio.sleep(begun + first / RATE - time.monotonic())
        numbers = [n for n in range(first, first + step) if n % CLAIMED == 0]
        keys = [key_of(f"{MARK}-{n}") for n in numbers]
        await connection.execute(CLAIM, [*keys, key_of(f"{MARK}-silent-{first}")])
        await connection.execute(CONFIRM, keys[::2])


async def _sample(connection: asyncpg.Connection, pid: int, every: float, samples: list[Sample]) -> None:
    begun = time.monotonic()
    for number in itertools.count():
        await asyncio.sleep(begun + number * every - time.monotonic())
        megabytes, descriptors = _held(pid)
        open_connections = await connection.fetchval(CONNECTIONS)
        samples.append(Sample(time.monotonic() - begun, megabytes, descriptors, open_connections))


def _held(pid: int) -> tuple[float, int]:
    """Return the resident megabytes and the open descriptors of a process (Linux tells)."""
    process = Path(f"/proc/{pid}")
    pages = int((process / "statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6, len(list((process / "fd").iterdir()))


async def _check(dsn: str, told: dict[str, Any], posts: int) -> None:
    forged = sum(kind_of(n) == "forged" for n in range(posts))
    wanted = {"200": posts - forged, "401": forged}
    events = sum(map(events_of, range(posts)))
    async with connected(dsn) as connection:
        stored = await connection.fetchval(EVENTS)
    if told["answers"] != {status: n for status, n in wanted.items() if n} or stored != events:
        raise SystemExit(f"{stored:,} of {events:,} events are stored; answers: {told['answers']}, not {wanted}")


def _figures(took: Sequence[float], samples: Sequence[Sample], seconds: int) -> list[Result]:
    part = seconds / PARTS
    later = [sample for sample in samples if part <= sample.at <= seconds]
    slope, _ = statistics.linear_regression([one.at / 60 for one in later], [one.megabytes for one in later])
    first, last = later[0], later[-1]
    posts = round(part * RATE)
    early, late = ([1000 * percentile(some, share) for share in (0.5, 0.99)] for some in (took[:posts], took[-posts:]))
    return [
        Figure(f"(i) memory over {seconds} s at {RATE} mixed posts a second", slope, "MB/minute", None,
               f"{first.megabytes:.0f} MB after a {PARTS}th of the time, {last.megabytes:.0f} MB at its end"),
        Figure("(i) p50 of an answer, the last part to the first", late[0] / early[0], "times", None,
               f"{early[0]:.1f} and {late[0]:.1f} ms"),
        Figure("(i) p99 of an answer, the last part to the first", late[1] / early[1], "times", None,
               f"{early[1]:.1f} and {late[1]:.1f} ms"),
        Figure("(i) open descriptors at the end, to before", last.descriptors / first.descriptors, "times", None,
               f"{first.descriptors} and {last.descriptors}; connections to the database {first.connections} and "
               f"{last.connections}"),
    ]  # fmt: skip
