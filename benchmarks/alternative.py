# SPDX-License-Identifier: Apache-2.0
"""(j) The receiver beside the obvious alternative: django-anymail under gunicorn, one INSERT an event.

Both are programs of their own on the same PostgreSQL, are sent the same signed posts over as many connections, and must
have stored each event at the end of each round. Both are set up as they are quickest: what is tried is listed here.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Final, TypeVar

from benchmarks.events import empty_database
from benchmarks.programs import Load, Program, daemon, feed_settings, serving
from benchmarks.stand import Comparison, Result, Scale, compare, connected, copied_database, say
from reconciler.database.postgres import EmbeddedPostgres


@dataclass(frozen=True, slots=True)
class Posts:
    """What is posted in a round, and how many times as quick as the alternative we want to be."""

    provider: str
    what: str
    number: int
    events: int
    """Of each post."""
    wanted: float


POSTS: Final = (
    Posts("mailgun", "Mailgun, one event a post", 20_000, 1, 10.0),
    Posts("sendgrid", "SendGrid, 100 events a post", 1_000, 100, 5.0),
)
WARM_UP: Final = 200
"""Posts of one event before each round, which do not count: every process has its connections and plans then."""

TRIAL: Final = 0.1
"""Share of a round by which the quickest set-up is found."""

GUNICORN: Final = ("--bind", "127.0.0.1:0", "--no-control-socket", "--backlog", "2048")
OURS: Final = {"1 process": 1, "2 workers": 2}
SYNC: Final = ("--worker-class", "sync", "--workers")
THREADS: Final = ("--worker-class", "gthread", "--keep-alive", "75", "--workers")
THEIRS: Final = {
    "2 workers of 2 threads": (*THREADS, "2", "--threads", "2"),
    "2 workers of 4 threads": (*THREADS, "2", "--threads", "4"),
    "4 workers of 2 threads": (*THREADS, "4", "--threads", "2"),
    "2 sync workers": (*SYNC, "2"),
    "4 sync workers": (*SYNC, "4"),
}

# Nothing but the key that finds a repeated event.
TABLE: Final = """
CREATE TABLE tracking_event (
    esp text NOT NULL, message_id text NOT NULL, event_id text NOT NULL, send_key text, kind text NOT NULL,
    occurred_at timestamptz, received_at timestamptz NOT NULL DEFAULT clock_timestamp(), recipient text, reason text,
    raw text NOT NULL,
    PRIMARY KEY (message_id, event_id, esp))
"""
COUNT_OURS: Final = "SELECT count(*) FROM provider_event"
COUNT_THEIRS: Final = "SELECT count(*) FROM tracking_event"

_rounds: Final = count()
SetUp = TypeVar("SetUp")


async def run(embedded: EmbeddedPostgres, scale: Scale) -> list[Result]:
    """Compare both sides for each kind of posts, each side as it is quickest for them."""
    if find_spec("gunicorn") is None:
        say("(j) is left out, for want of gunicorn: pip install -c constraints.txt -e '.[bench]'")
        return []
    async with connected(embedded.dsn()) as connection:
        await connection.execute("CREATE DATABASE tracking")
    async with connected(embedded.dsn("tracking")) as connection:
        await connection.execute(TABLE)
    with tempfile.TemporaryDirectory() as folder:
        bench = _Bench(embedded, Path(folder), scale)
        return [await bench.compared(posts) for posts in POSTS]


class _Bench:
    """Runs either side, posts to it, and counts what it stored."""

    def __init__(self, embedded: EmbeddedPostgres, folder: Path, scale: Scale) -> None:
        self._embedded, self._folder, self._scale = embedded, folder, scale
        self._busiest: dict[str, float] = {}

    async def compared(self, posts: Posts) -> Comparison:
        """Find the quickest set-up of each side, and compare these."""
        self._busiest = {}
        ours, theirs, notes = next(iter(OURS)), next(iter(THEIRS)), []
        if self._scale.rounds > 1:  # a smoke run takes what usually is quickest
            trial = replace(posts, number=self._scale.of(round(posts.number * TRIAL)))
            ours, our_rates = await _quickest(OURS, partial(self._ours, trial))
            theirs, their_rates = await _quickest(THEIRS, partial(self._theirs, trial))
            notes = [f"ours tried: {our_rates}", f"theirs tried: {their_rates}"]
        full = replace(posts, number=self._scale.of(posts.number))
        done = await compare(
            f"(j) {posts.what}, to django-anymail under gunicorn",
            "events/s",
            posts.wanted,
            partial(self._ours, full, OURS[ours]),
            partial(self._theirs, full, THEIRS[theirs]),
            self._scale.rounds,
        )
        busy = " and ".join(f"{share:.0%}" for share in self._busiest.values())
        done.notes.extend([f"{ours} to {theirs}", *notes, f"load generator busy {busy} of a core"])
        return done

    async def _ours(self, posts: Posts, workers: int) -> float:
        settings = feed_settings([posts.provider], self._folder)
        async with (
            empty_database(self._embedded) as dsn,
            daemon(self._folder, dsn, settings, "--only", "receiver", workers=workers) as program,
        ):
            return await self._rate(posts, program, f"/webhooks/{posts.provider}", dsn, COUNT_OURS)

    async def _theirs(self, posts: Posts, arguments: tuple[str, ...]) -> float:
        command = [sys.executable, "-m", "gunicorn", *GUNICORN, *arguments, "benchmarks.anymail_site:application"]
        async with (
            copied_database(self._embedded, "round", "tracking") as dsn,
            serving(command, {"ANYMAIL_SITE_DSN": dsn}, _address) as program,
        ):
            return await self._rate(posts, program, f"/{posts.provider}", dsn, COUNT_THEIRS)

    async def _rate(self, posts: Posts, program: Program, path: str, dsn: str, rows: str) -> float:
        """Return the events a second that were stored, after a warm-up."""
        mark = f"j{next(_rounds)}"
        warm, load = [
            await Load.prepared(
                "benchmarks.load", posts.provider, path, name, self._folder, program.port, n, "--events", events
            )
            for name, n, events in ((f"{mark}-warm", WARM_UP, 1), (mark, posts.number, posts.events))
        ]
        await warm.run()
        told = await load.run()
        stored, wanted = await _stored(dsn, rows), WARM_UP + posts.number * posts.events
        if told["answers"] != {"200": posts.number} or stored != wanted:
            raise SystemExit(f"{stored:,} of {wanted:,} events are stored; answers: {told['answers']}")
        self._busiest[path] = max(self._busiest.get(path, 0.0), told["busy"])
        return float(posts.number * posts.events / told["seconds"])


async def _quickest(set_ups: Mapping[str, SetUp], rate: Callable[[SetUp], Awaitable[float]]) -> tuple[str, str]:
    """Return the name of the quickest set-up, and what was tried, in words."""
    rates = {name: await rate(set_up) for name, set_up in set_ups.items()}
    tried = ", ".join(f"{name} {found:,.0f}" for name, found in rates.items())
    return max(rates, key=rates.__getitem__), tried


async def _stored(dsn: str, rows: str) -> int:
    async with connected(dsn) as connection:
        return int(await connection.fetchval(rows))


def _address(line: str) -> str | None:
    found = re.search(r"Listening at: (http://\S+)", line)
    return found[1] if found else None
